"""Eight virtual CPU devices: a step has the same bits on 1, 2, 4 and 8 of them, and each does its part of it."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import muse_jax
from muse_jax import decoding
from muse_jax.decoding import Model
from muse_jax.draft import DFlash2
from muse_jax.layout import cuts_heads, draft_tensors, parameter_tree, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import ShardingConfig, make_mesh

SIZES = (1, 2, 4, 8)
LENGTHS, NEW_TOKENS = (7, 10), 6


@pytest.fixture(scope="module", params=SIZES)
def sharded(request, checkpoint):
    return muse_jax.load(checkpoint, mesh=make_mesh(request.param))


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(sum(SIZES))
    return rng.integers(0, 259, (2, 16))


@pytest.fixture(scope="module")
def logits(muse, tokens):
    return np.asarray(muse.logits(tokens))


def at(params, path):
    return functools.reduce(lambda tree, key: tree[key], path, params)


# ---- Where things are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", SIZES)
def test_arrays_are_where_the_table_says(devices, draft_checkpoint, small_params, small_draft_params):
    """By heads, by expert rows, by vocabulary; where KV heads are fewer than devices, neighbours hold the same one."""
    sharded = muse_jax.load(draft_checkpoint, mesh=make_mesh(devices))
    mesh, model = sharded.mesh, sharded.model
    held, expected = dict.fromkeys(mesh.devices.flat, 0), 0
    for specs, params, whole in (
        (text_tensors(sharded.config), model.params, small_params),
        (draft_tensors(sharded.draft_config), model.draft_params, small_draft_params),
    ):
        for spec in specs:
            array = at(params, spec.path)
            assert len(array.addressable_shards) == devices
            for rank, shard in enumerate(sorted(array.addressable_shards, key=lambda shard: shard.device.id)):
                np.testing.assert_array_equal(shard.data, at(whole, spec.path)[spec.rank_part(devices, rank)])
                held[shard.device] += shard.data.nbytes
            expected += array.dtype.itemsize * spec.size // (1 if spec.shard_axis is None else min(devices, spec.num_parts))
    assert set(held.values()) == {expected}

    state, _ = sharded.prefill([[1, 2, 3]])
    for cache, config in ((state.cache, sharded.config), (state.draft_cache, sharded.draft_config)):
        parts = devices if cuts_heads(config) else 1  # the draft has four heads, which eight ranks do not divide
        for leaf in jax.tree.leaves(cache.layers):
            assert leaf.sharding.shard_shape(leaf.shape)[1] == max(1, config.num_key_value_heads // parts)


# ---- The same bits for any number of devices ----------------------------------------------------------------------------


def draw_params(config, dtype, name: str) -> dict:
    """Random everywhere: fresh norms, gates and biases are zero."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))

    def draw(spec) -> np.ndarray:
        match spec.path[-1]:
            case "codes":
                return rng.integers(0, 256, spec.param_shape, np.uint8)
            case "block_scales":
                return rng.integers(0x40, 0x58, spec.param_shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
            case "global_scale":
                return (2 ** rng.uniform(-1.5, 1.5, spec.param_shape) / 300).astype(np.float32)
            case "input_scale":
                return np.ones(spec.param_shape, np.float32)
        array = rng.standard_normal(spec.param_shape, np.float32)
        array *= 0.3 if array.ndim == 1 else 2 / np.sqrt(array.shape[-1])
        return (array + (spec.path == ("final_norm",))).astype(spec.dtype_in(dtype))

    return parameter_tree(config, draw)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a draft, and what is asked of it."""

    target: dict  # fields of the small config to replace
    draft: dict
    dtype: str
    batch: int
    sampling: dict
    nvfp4: bool = False
    activations: str = "bf16"
    speculation: str = "tree"
    sharding: dict = dataclasses.field(default_factory=dict)

    def configs(self, small_config, small_draft_config):
        nvfp4 = {"nvfp4_layers": (0,)} if self.nvfp4 else {}
        target = dataclasses.replace(small_config, **self.target, **nvfp4)
        shared = {name: getattr(target, name) for name in ("vocab_size", "hidden_size")}
        return target, dataclasses.replace(small_draft_config, **shared, **self.draft)


NVFP4_WIDTHS = {"moe_hidden_size": 128, "moe_intermediate_size": 256}
CASES = {
    "fp32, tree, greedy": Case({}, {}, "float32", 1, {}),
    # Widths that no vector length divides, a vocabulary that eight ranks do not; a KV head is shared by four ranks.
    "fp32, uneven, batch 3, T = 1": Case(
        {"vocab_size": 269, "hidden_size": 104, "num_key_value_heads": 2, "head_dim": 6, "moe_hidden_size": 56,
         "moe_intermediate_size": 88, "intermediate_size": 200},
        {"num_attention_heads": 8, "conv_group_size": 8}, "float32", 3, {"temperature": 1.0},
    ),
    "bf16, tree, filtered": Case(
        {"hidden_size": 72}, {"num_attention_heads": 16, "num_key_value_heads": 8, "conv_group_size": 8}, "bfloat16", 1,
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ),
    "fp32, W4A16": Case(NVFP4_WIDTHS, {}, "float32", 1, {}, nvfp4=True),
    "bf16, W4A4, chain": Case(NVFP4_WIDTHS, {}, "bfloat16", 1, {}, nvfp4=True, activations="nvfp4", speculation="chain"),
    # A block of 16 values would be cut, heads and hidden values cannot be shared: these are everywhere.
    "fp32, W4A4, nothing divides": Case(
        {"hidden_size": 48, "moe_hidden_size": 48, "moe_intermediate_size": 80, "num_attention_heads": 12,
         "intermediate_size": 100},
        {}, "float32", 1, {"temperature": 1.0}, nvfp4=True, activations="nvfp4", speculation="sampled_chain",
    ),
}  # fmt: skip


def make_model(case: Case, devices: int, configs, put_on_mesh, name: str) -> Model:
    mesh, how = make_mesh(devices), ShardingConfig(devices, **case.sharding)
    dtype = jnp.dtype(case.dtype)
    target, draft = configs
    params, draft_params = (put_on_mesh(c, draw_params(c, dtype, name), mesh, how) for c in configs)
    module = MuseSpark(target, dtype=dtype, activations=case.activations, sharding=how)
    drafted = {"draft": DFlash2(draft, dtype=dtype, sharding=how), "draft_params": draft_params}
    return Model.create(module, params, **drafted, speculation=case.speculation, valid_vocab=259, mesh=mesh)


@functools.partial(jax.jit, static_argnames="steps")
def prefill_and_decode(model, tokens, lengths, stops, sampling, steps: int):
    """Two chunks of a prompt, then steps, compiled as one program."""
    batch, width = tokens.shape
    caches = decoding.empty_caches(model, batch, 4 * width)
    last = jnp.zeros((batch, model.config.hidden_size), jnp.float32)

    def prefill(carry, chunk):
        return decoding.prefill_chunk(model, *carry, *chunk, lengths), None

    chunks = tokens.reshape(batch, 2, width // 2).swapaxes(0, 1), jnp.int32([0, width // 2])
    (caches, last), _ = jax.lax.scan(prefill, (caches, last), chunks)
    state, first = decoding.first_token(model, caches, last, lengths, jnp.full_like(lengths, 40), stops, sampling)

    def step(state, _):
        state, out, (*_, logits) = decoding.decode_and_trace(model, state)
        return state, (out, logits)

    state, (outs, logits) = jax.lax.scan(step, state, length=steps)
    return state, first, outs, logits


def same_bits(a, b) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    different = np.count_nonzero(np.ascontiguousarray(a).view(np.uint8) != np.ascontiguousarray(b).view(np.uint8))
    assert different == 0, f"{different} bytes of {a.nbytes}"


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_same_bits(small_config, small_draft_config, put_on_mesh, rng, name):
    """Tokens, logits, and keys and values of target and draft, after a prefill in two chunks and steps that wrap the ring."""
    case = CASES[name]
    configs = case.configs(small_config, small_draft_config)
    tokens = jnp.asarray(rng.integers(0, 259, (case.batch, 32)), jnp.int32)
    lengths = jnp.asarray([29, 11, 17][: case.batch], jnp.int32)
    sampling = SamplingParams.create(case.batch, **case.sampling)
    expected = None
    for devices in SIZES:
        model = make_model(case, devices, configs, put_on_mesh, name)
        stops = jnp.full((case.batch, 1), 263, jnp.int32)
        state, first, outs, logits = prefill_and_decode(model, tokens, lengths, stops, sampling, steps=3)
        assert np.isfinite(logits).all() and np.std(logits) > 0.1
        results = [first, outs, logits, state.length, state.token]
        for cache, config in zip((state.cache, state.draft_cache), configs, strict=True):
            copies = cache.layers[0][0].shape[1] // config.num_key_value_heads
            results += [[x[:, ::copies] for x in jax.tree.leaves(cache.layers)], cache.ring_positions]
        results = jax.tree.leaves(jax.device_get(results))
        expected = expected or results
        for ours, theirs in zip(results, expected, strict=True):
            same_bits(ours, theirs)
