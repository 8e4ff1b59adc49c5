"""One sequence, several ways to compute it: whole, prefilled in chunks, decoded row by row or many rows at once.

All must agree in fp32, across the window's edge, chunk borders, wrapped rings and blocks of queries, keys and experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from muse_jax import attention, ops
from muse_jax.config import TINY, MLPKind
from muse_jax.kv_cache import DecodeContext, FullContext, KVCache, PrefillContext, ring_capacity
from muse_jax.model import MuseSpark
from muse_jax.numerics import NUMERICS

CONFIG = dataclasses.replace(
    TINY,
    num_hidden_layers=2,
    layer_types=TINY.layer_types[4:],  # a sliding layer (window 8), then a global one
    layer_uses_rope=TINY.layer_uses_rope[4:],
    mlp_layer_types=(MLPKind.SPARSE, MLPKind.DENSE),
)
TREE = 16
LENGTHS = (1, 20, 40)  # shorter than the window, longer than it, and longer than the ring of 8 - 1 + 16 slots
TOTAL = max(LENGTHS) + 3 * TREE
SLOTS = 128  # of global layers; a prompt's last chunk may reach past the prompt
# Of the largest logit: fp32 sums in another order, each sublayer enlarging what came before (1e-5 is usual).
TOLERANCE = 1e-4
UNREADABLE = np.float32(1e20)  # masks are added to scores and masked values multiplied by 0, so it has to be finite

# Each shape runs a few times at most, so compiling is most of the time: without LLVM's optimisations it is half.
compile_once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@compile_once
def full_logits(model, tokens):
    return model.logits(model(tokens, FullContext.create(tokens.shape[1]))[0])


@compile_once
def prefill_chunk(model, tokens, start, lengths, cache):
    context = PrefillContext.create(start, lengths, tokens.shape[1])
    stream, layers, _ = model(tokens, context, cache)
    return model.logits(stream), KVCache(layers, context.ring_positions(cache.ring_positions))


@compile_once
def decode_rows(model, tokens, start, cache):
    stream, rows, _ = model(tokens, DecodeContext.chain(cache, start, tokens.shape[1], CONFIG), cache)
    return model.logits(stream), cache.commit(rows, start, CONFIG)


def prefill(model, tokens, chunk, tree_size=TREE):
    """Prompts of `LENGTHS`, from an empty cache. Returns logits [B, T, V] and the cache."""
    cache = KVCache.empty(CONFIG, len(LENGTHS), SLOTS, tree_size, jnp.float32)
    lengths, padded, logits = jnp.array(LENGTHS), np.pad(tokens, ((0, 0), (0, chunk))), []
    for start in range(0, max(LENGTHS), chunk):
        rows = jnp.asarray(padded[:, start : start + chunk])
        chunk_logits, cache = prefill_chunk(model, rows, jnp.int32(start), lengths, cache)
        logits.append(chunk_logits)
    return np.concatenate(logits, axis=1), cache


def rows_at(tokens, starts, count):
    return jnp.asarray(np.stack([row[start : start + count] for row, start in zip(tokens, starts, strict=True)]))


@dataclasses.dataclass
class Case:
    model: MuseSpark
    tokens: np.ndarray  # [B, TOTAL] int32
    full: np.ndarray  # [B, TOTAL, V], logits of the whole sequences

    def assert_rows(self, logits, starts):
        """`logits` [B, T, V] are those of positions starts[b] ... starts[b] + T - 1."""
        for row, whole, start in zip(np.asarray(logits), self.full, starts, strict=True):
            self.assert_close(row, whole[start : start + len(row)])

    def assert_close(self, ours, expected):
        assert np.abs(ours - expected).max() / np.abs(self.full).max() < TOLERANCE


@pytest.fixture(scope="module", params=list(NUMERICS))
def case(request) -> Case:
    rng = np.random.default_rng(7)

    def draw(path, shape):
        name, values = path[-1].key, rng.normal(size=shape.shape)
        if len(shape.shape) > 1:
            values /= np.sqrt(shape.shape[-1])
        else:
            values = (name == "final_norm") + 0.3 * values
        return jnp.asarray(values, jnp.float32)

    numerics = NUMERICS[request.param]
    model = MuseSpark(CONFIG, numerics=numerics, dtype=jnp.float32)
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state)))
    model = nnx.merge(graph, state)
    tokens = rng.integers(0, CONFIG.vocab_size, (len(LENGTHS), TOTAL)).astype(np.int32)
    return Case(model, tokens, np.asarray(full_logits(model, jnp.asarray(tokens))))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_and_decode_agree_with_the_whole_sequence(case, chunk):
    logits, cache = prefill(case.model, case.tokens, chunk)
    for row, whole, length in zip(logits, case.full, LENGTHS, strict=True):
        case.assert_close(row[:length], whole[:length])

    many, _ = decode_rows(case.model, rows_at(case.tokens, LENGTHS, TREE), jnp.array(LENGTHS), cache)
    case.assert_rows(many, LENGTHS)
    for step in range(CONFIG.sliding_window + TREE):  # the rows of short prompts cross the window; all rings wrap
        starts = np.array(LENGTHS) + step
        one, cache = decode_rows(case.model, rows_at(case.tokens, starts, 1), jnp.asarray(starts), cache)
        case.assert_rows(one, starts)


def test_rows_that_are_not_committed_leave_no_trace(case):
    """A step's rows are guesses: some are kept, and the next step starts behind those."""
    _, cache = prefill(case.model, case.tokens, 7)
    starts = np.array(LENGTHS)
    for kept in (5, 1, TREE, 3):  # all rings wrap within a step
        rows = np.array(rows_at(case.tokens, starts, TREE))
        rows[:, kept:] = (rows[:, kept:] + 1) % CONFIG.vocab_size
        logits, cache = decode_rows(case.model, jnp.asarray(rows), jnp.asarray(starts), cache)
        case.assert_rows(np.asarray(logits)[:, :kept], starts)
        starts = starts + kept


def test_ring_holds_what_a_linear_cache_holds(case):
    """A ring longer than the sequence never wraps: its slot is the position. Short rings must hold the same rows."""
    linear, *rings = (prefill(case.model, case.tokens, *how)[1] for how in ((64, TOTAL), (7, TREE), (64, TREE)))
    assert ring_capacity(CONFIG, TOTAL, TREE) < max(LENGTHS) < TOTAL < linear.ring_positions.shape[1]
    stored = np.array(LENGTHS)
    for rows in (0, TREE, 1, 1):
        if rows:
            step, starts = rows_at(case.tokens, stored, rows), jnp.asarray(stored)
            linear, *rings = (decode_rows(case.model, step, starts, cache)[1] for cache in (linear, *rings))
            stored = stored + rows
        for ring in rings:
            assert_same_rows(ring, linear, stored)


def assert_same_rows(ring, linear, stored):
    """`stored`: [B], positions that were written."""
    capacity = ring.ring_positions.shape[1]
    # The newest position that belongs in each slot; negative where there is none yet.
    newest = stored[:, None] - 1 - (stored[:, None] - 1 - np.arange(capacity)) % capacity
    np.testing.assert_array_equal(ring.ring_positions, np.maximum(newest, -1))
    for i in range(CONFIG.num_hidden_layers):
        if CONFIG.window(i) is None:
            continue
        for ours, expected in zip(ring.layers[i], linear.layers[i], strict=True):
            for row, line, positions in zip(np.asarray(ours), np.asarray(expected), newest, strict=True):
                filled = positions >= 0
                np.testing.assert_allclose(row[:, filled], line[:, positions[filled]], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rows", [1, TREE])
def test_what_must_not_be_read_is_not(case, rows):
    """Evicted and empty ring slots and slots past the end can hold anything: not a bit of the logits changes."""
    _, cache = prefill(case.model, case.tokens, 7)
    starts = np.array(LENGTHS)
    positions = np.asarray(cache.ring_positions)
    hidden_in_ring = (positions < starts[:, None] - CONFIG.sliding_window + 1) | (positions < 0)
    hidden_in_line = np.arange(SLOTS)[None, :] >= starts[:, None]
    assert hidden_in_ring.any(axis=1).all()

    def poison(i, x):
        hidden = hidden_in_line if CONFIG.window(i) is None else hidden_in_ring
        return jnp.where(hidden[:, None, :, None], UNREADABLE, x)

    layers = [(poison(i, keys), poison(i, values)) for i, (keys, values) in enumerate(cache.layers)]
    poisoned = KVCache(layers, cache.ring_positions)
    step = rows_at(case.tokens, starts, rows)
    clean, _ = decode_rows(case.model, step, jnp.asarray(starts), cache)
    dirty, _ = decode_rows(case.model, step, jnp.asarray(starts), poisoned)
    np.testing.assert_array_equal(clean, dirty)


# -------------------------------------------------------------------------------------------- blocks of attention


def direct_attention(q, k, v, visible, scale):
    """numpy, float64: all scores at once. q: [B, T, N, H]; k, v: [B, K, S, H]; visible: [T, S]."""
    groups = q.shape[2] // k.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), groups, axis=1) for x in (k, v))
    scores = np.einsum("btnh,bnsh->bnts", np.asarray(q, np.float64), k) * scale
    weights = np.exp(np.where(visible, scores - scores.max(axis=-1, keepdims=True), -np.inf))
    return np.einsum("bnts,bnsh->btnh", weights / weights.sum(axis=-1, keepdims=True), v)


def random_attention(rng, queries, keys):
    return (rng.normal(size=shape).astype(np.float32) for shape in ((2, queries, 4, 8), (2, 2, keys, 8), (2, 2, keys, 8)))


# Softmax weights of up to 2,500 keys in fp32: each is off by 1e-7 and the sum of a few 1e-7; values are of order one.
ATTENTION_TOLERANCE = 5e-6


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=list(NUMERICS))
@pytest.mark.parametrize("queries", [1, 17, attention.PREFIX_QUERY_BLOCK, 300, 600])
def test_long_prefix(rng, numerics, queries):
    slots = 1250
    assert attention.KEY_BLOCK * 2 < slots < attention.KEY_BLOCK * 3  # the third block overlaps the second
    q, k, v = random_attention(rng, queries, slots)
    run = compile_once(functools.partial(attention.attend_prefix, scale=0.4, numerics=numerics))
    edges = {0, 1, attention.KEY_BLOCK, 2 * attention.KEY_BLOCK, slots}
    for end in sorted({max(queries, edge + shift) for edge in edges for shift in (-1, 0, 1) if edge + shift <= slots}):
        first = end - queries
        visible = np.arange(slots) <= first + np.arange(queries)[:, None]
        expected = direct_attention(q, k, v, visible, 0.4)
        past_end = (np.arange(slots) >= end)[:, None]
        dirty_k, dirty_v = (np.where(past_end, UNREADABLE, x) for x in (k, v))
        ours = run(q, dirty_k, dirty_v, jnp.int32(first))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=ATTENTION_TOLERANCE)


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=list(NUMERICS))
@pytest.mark.parametrize("slots", [7, attention.KEY_BLOCK, attention.KEY_BLOCK + 1, 1250])
def test_committed_keys_and_rows(rng, numerics, slots):
    """Two sequences of their own lengths, and rows that see themselves and some of the others, as in a tree."""
    num_rows = 5
    q, k, v = random_attention(rng, num_rows, slots)
    _, rows_k, rows_v = random_attention(rng, num_rows, num_rows)
    seen = np.eye(num_rows, dtype=bool) | (rng.random((2, num_rows, num_rows)) < 0.3)
    run = compile_once(functools.partial(attention.attend_committed, scale=0.4, numerics=numerics))
    edges = {0, 1, attention.KEY_BLOCK - 1, attention.KEY_BLOCK, attention.KEY_BLOCK + 1, slots - 1, slots}
    for length in sorted(edge for edge in edges if 0 <= edge <= slots):
        lengths = (length, slots // 2)
        past_end = np.arange(slots)[None, :] >= np.array(lengths)[:, None]
        dirty_k, dirty_v = (np.where(past_end[:, None, :, None], UNREADABLE, x) for x in (k, v))
        ours = run(q, dirty_k, dirty_v, jnp.int32(lengths), (rows_k, rows_v, attention.hide(seen)))
        for b in range(2):
            keys, values = (np.concatenate(x, axis=1)[None] for x in ((k[b], rows_k[b]), (v[b], rows_v[b])))
            visible = np.concatenate([np.tile(~past_end[b], (num_rows, 1)), seen[b]], axis=1)
            expected = direct_attention(q[b : b + 1], keys, values, visible, 0.4)
            np.testing.assert_allclose(ours[b : b + 1], expected, rtol=0, atol=ATTENTION_TOLERANCE)


@pytest.mark.parametrize("queries", [1, 127, 128, 129, 257, 300])
@pytest.mark.parametrize("window", [1, 8, 200])
def test_banded_attention(rng, queries, window):
    """Both sides of query block borders; at the start, where keys before position 0 are missing, and later."""
    assert attention.QUERY_BLOCK == 128
    keys = window - 1 + queries
    q, k, v = random_attention(rng, queries, keys)
    run = compile_once(functools.partial(attention.attend_band, window=window, scale=0.4, numerics=NUMERICS["serving"]))
    offset = np.arange(keys) - np.arange(queries)[:, None]
    for first in (0, 5, 1000):
        missing = np.arange(keys) < window - 1 - first
        expected = direct_attention(q, k, v, (offset >= 0) & (offset < window) & ~missing, 0.4)
        dirty_k, dirty_v = (np.where(missing[:, None], UNREADABLE, x) for x in (k, v))
        ours = run(q, dirty_k, dirty_v, jnp.int32(first))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=ATTENTION_TOLERANCE)


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=list(NUMERICS))
@pytest.mark.parametrize("queries", [1, 127, 128, 129, 256, 257, 300])
def test_causal_attention(rng, numerics, queries):
    q, k, v = random_attention(rng, queries, queries)
    ours = compile_once(functools.partial(attention.attend_causal, scale=0.4, numerics=numerics))(q, k, v)
    expected = direct_attention(q, k, v, np.tri(queries, dtype=bool), 0.4)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ATTENTION_TOLERANCE)


# --------------------------------------------------------------------------------------------- blocks of experts


def spread(rng, rows, top_k, num_experts):
    return np.stack([rng.permutation(num_experts)[:top_k] for _ in range(rows)])


def all_to_the_same(rng, rows, top_k, num_experts):
    return np.tile(rng.permutation(num_experts)[:top_k], (rows, 1))


def skewed(rng, rows, top_k, num_experts):
    """Most rows to the first experts, the last row to the last ones."""
    idx = np.tile(np.arange(top_k), (rows, 1))
    idx[-1] = np.arange(num_experts - top_k, num_experts)
    return idx


@pytest.mark.parametrize("routing", [spread, all_to_the_same, skewed])
@pytest.mark.parametrize(
    "rows, top_k, num_experts",
    [(1, 1, 1), (1, 3, 5), (2, 1, 8), (3, 5, 5), (4, 2, 8), (16, 2, 8), (16, 2, 32), (33, 2, 3), (130, 1, 2), (257, 4, 16)],
)
def test_experts_in_blocks(rng, routing, rows, top_k, num_experts):
    width, hidden = 12, 10
    x, gate_up, down = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((rows, width), (num_experts, 2, hidden, width), (num_experts, width, hidden))
    )
    idx = jnp.asarray(routing(rng, rows, top_k, num_experts), jnp.int32)
    blocks, dense = (
        compile_once(functools.partial(run, numerics=NUMERICS["serving"]))(x, idx, gate_up, down)
        for run in (ops.experts, ops.experts_dense)
    )
    # Sums of 12 and 10 terms in fp32.
    np.testing.assert_allclose(blocks, dense, rtol=0, atol=2e-6 * float(jnp.abs(dense).max()))
