"""The draft's context caches, ring and linear: a block computed with them is the block computed with the whole context.

The whole context is kept as it is, one row per committed position, under masks written out from dflash2.md section 2.4. The
caches are filled by chunks and by steps whose last rows are guesses that turned out wrong.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from muse_jax.config import AttentionKind
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import KVCache, PrefillContext, ring_capacity
from muse_jax.layout import parameter_tree

SLIDING, FULL = AttentionKind.SLIDING, AttentionKind.GLOBAL
BLOCK, TREE = 6, 8  # rows of the draft's block, and rows that a step commits at most
PROMPTS = (45, 3)
ROUNDS = 8
SLOTS = 128
# Hidden rows are of order one after the final norm. fp32 sums in another order, through all layers: dflash2.md section 10
# measured 4.6e-5 between two ways to compute them.
TOLERANCE = 1e-4
UNREADABLE = np.float32(1e20)  # masks are added to scores and masked values multiplied by 0, so it has to be finite

CONFIG = DraftConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=40,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    layer_types=(SLIDING, SLIDING),
    sliding_window=10,
    is_causal=None,
    attention_bias=True,
    target_layer_ids=(0, 2),
    mask_token_id=63,
    block_size=BLOCK,
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=4,
    selector_top_k=4,
)
CASES = {
    "sliding, causal": {},
    "sliding, both ways": {"is_causal": False},
    "full, both ways": {"layer_types": (FULL, FULL), "sliding_window": None},
    "full, causal": {"layer_types": (FULL, FULL), "is_causal": True},
    "mixed": {"layer_types": (FULL, SLIDING)},
    "mixed, both ways": {"layer_types": (SLIDING, FULL), "is_causal": False},
    "window below the block, causal": {"sliding_window": 3},
    "window below the block, both ways": {"sliding_window": 4, "is_causal": False, "layer_types": (SLIDING, FULL)},
    "window of one": {"sliding_window": 1},
}

# Each shape runs a few times at most, so compiling is most of the time: without LLVM's optimisations it is half.
compile_once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass
class WholeContext:
    """Stands in for DecodeContext. A layer's cache is a pair [B, K, S, H], slot = position; positions from `start` on hold
    nothing yet."""

    config: DraftConfig
    start: jax.Array  # [B]

    @property
    def positions(self):
        return self.start[:, None] + jnp.arange(BLOCK)[None, :]

    def attend(self, q, k, v, cache, window, scale, numerics):
        batch, size = q.shape[0], cache[0].shape[2]
        kind = FULL if window is None else SLIDING
        causal = kind == SLIDING if self.config.is_causal is None else self.config.is_causal
        context = jnp.broadcast_to(jnp.arange(size)[None, :], (batch, size))
        key_positions = jnp.concatenate([context, self.positions], axis=1)
        exists = jnp.concatenate([context < self.start[:, None], jnp.ones((batch, BLOCK), bool)], axis=1)
        distance = self.positions[:, :, None] - key_positions[:, None, :]
        visible = jnp.broadcast_to(exists[:, None, :], distance.shape)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= jnp.abs(distance) < window
        groups = q.shape[2] // k.shape[2]
        context = (x.transpose(0, 2, 1, 3) for x in cache)
        k, v = (jnp.repeat(jnp.concatenate(pair, axis=1), groups, axis=2) for pair in zip(context, (k, v), strict=True))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest"), None


@dataclasses.dataclass
class Functions:
    """Of one draft, compiled."""

    config: DraftConfig
    graph: nnx.GraphDef
    params: dict

    @classmethod
    def create(cls, config, rng):
        def draw(spec):
            array = rng.standard_normal(spec.param_shape, np.float32)
            array *= 0.3 if array.ndim == 1 else 1.5 / np.sqrt(array.shape[-1])
            return jnp.asarray(1 + array if array.ndim == 1 and "norm" in spec.path[-1] else array)

        graph, _ = nnx.split(DFlash2(config, dtype=jnp.dtype("float32")))
        return cls(config, graph, parameter_tree(config, draw))

    @property
    def model(self):
        return nnx.merge(self.graph, self.params)

    @functools.cached_property
    def fill(self):
        @compile_once
        def fill(cache, taps, start, lengths):
            context = PrefillContext.create(start, lengths, taps.shape[1])
            return cache.fill(self.model.context_keys_values(taps, context.positions), context, self.config)

        return fill

    @functools.cached_property
    def commit(self):
        @compile_once
        def commit(cache, taps, start):
            rows = self.model.context_keys_values(taps, start[:, None] + jnp.arange(TREE)[None, :])
            return cache.commit(rows, start, self.config)

        return commit

    @functools.cached_property
    def hidden(self):
        @compile_once
        def hidden(cache, start, block):
            return self.model(block, self.model.block_context(cache, start), cache.layers)

        return hidden

    @functools.cached_property
    def hidden_of_whole(self):
        @compile_once
        def hidden(taps, start, block):
            context = self.model.context_keys_values(taps, jnp.arange(taps.shape[1])[None])
            return self.model(block, WholeContext(self.config, start), context)

        return hidden

    def prefill(self, taps, chunk):
        """Of prompts of `PROMPTS`, from an empty cache."""
        cache = KVCache.empty(self.config, len(PROMPTS), SLOTS, TREE, jnp.float32)
        for start in range(0, max(PROMPTS), chunk):
            cache = self.fill(cache, taps[:, start : start + chunk], np.int32(start), np.int32(PROMPTS))
        return cache


@pytest.fixture(scope="module", params=CASES)
def functions(request) -> Functions:
    return Functions.create(dataclasses.replace(CONFIG, **CASES[request.param]), np.random.default_rng(5))


def random_taps(rng, rows):
    return rng.standard_normal((len(PROMPTS), rows, len(CONFIG.target_layer_ids) * CONFIG.hidden_size), np.float32)


def random_block(rng):
    return rng.standard_normal((len(PROMPTS), BLOCK, CONFIG.hidden_size), np.float32)


def poisoned(config, cache, start):
    """With what no row of a block may see replaced: positions not committed, evicted or never filled."""
    positions, slots = np.asarray(cache.ring_positions), np.arange(SLOTS)
    oldest = start - (config.sliding_window or 1) + 1  # that the anchor sees
    hidden_in_ring = (positions < np.maximum(oldest, 0)[:, None]) | (positions >= start[:, None])
    hidden_in_line = slots[None, :] >= start[:, None]

    def poison(i, x):
        hidden = hidden_in_line if config.window(i) is None else hidden_in_ring
        assert hidden.any()
        return jnp.where(hidden[:, None, :, None], UNREADABLE, x)

    return KVCache([tuple(poison(i, x) for x in pair) for i, pair in enumerate(cache.layers)], cache.ring_positions)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_block_with_caches_is_the_block_with_the_whole_context(functions, rng, chunk):
    """Also with hidden slots poisoned, to the last bit."""
    config = functions.config
    capacity = ring_capacity(config, SLOTS, TREE)
    assert capacity == -(-((config.sliding_window or 1) - 1 + TREE) // 8) * 8 < max(PROMPTS)  # rings wrap in prefill
    taps = random_taps(rng, SLOTS)
    start = np.array(PROMPTS, np.int32)
    cache = functions.prefill(taps, chunk)
    for _ in range(ROUNDS):
        block = random_block(rng)
        ours = functions.hidden(cache, start, block)
        expected = functions.hidden_of_whole(taps, start, block)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(functions.hidden(poisoned(config, cache, start), start, block), ours)
        # Some rows of a step stay; what the others leave behind must not be seen.
        kept = rng.integers(1, TREE + 1, len(PROMPTS)).astype(np.int32)
        rows = random_taps(rng, TREE)
        for row, line, first, count in zip(rows, taps, start, kept, strict=True):
            row[:count] = line[first : first + count]
        cache = functions.commit(cache, rows, start)
        start = start + kept
    assert min(start) > capacity  # the short prompt's ring has wrapped too
    # The context matters, so that equal rows show something: without it they differ.
    nothing = functions.hidden_of_whole(taps, np.zeros(len(PROMPTS), np.int32), block)
    changed = np.abs(nothing - expected).max()
    assert (changed > 0.1) == (config.sliding_window != 1)


def test_what_is_visible_changes_the_block(functions, rng):
    """Each position that some row may see, and no other: the control of the poisoned slots."""
    config = functions.config
    taps, block, start = random_taps(rng, SLOTS), random_block(rng), np.array(PROMPTS, np.int32)
    cache = functions.prefill(taps, 64)
    before = np.asarray(functions.hidden(cache, start, block))
    windows = [config.window(i) for i in range(config.num_hidden_layers)]
    reach = max(PROMPTS) if None in windows else config.sliding_window - 1
    for back in sorted({1, 2, max(reach, 1), reach + 1, 20}):
        position = max(PROMPTS) - back
        if position < 0:
            continue
        other = taps.copy()
        other[0, position] += 1
        after = np.asarray(functions.hidden(functions.prefill(other, 64), start, block))
        assert (after[0] != before[0]).any() == (back <= reach)
        np.testing.assert_array_equal(after[1], before[1])
