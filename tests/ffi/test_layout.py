"""Packed weights: they come back, every byte is where the rules say, and the released model has the bytes that sums give."""

import dataclasses
import functools
import math
import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ffi.layout import Shape, Vector, head_table, layer_table, pack_head, pack_layer, table_bytes, unpack_head, unpack_layer
from muse_jax.config import MUSE_SPARK_OPEN
from muse_jax.numerics import SERVING
from muse_jax.nvfp4 import NVFP4Weight, decode
from muse_jax.ops import GateFactors, one_plus

# The bundled checkpoint: no size but the vocabulary is whole tiles.
TINY = Shape(
    hidden=192,
    heads=8,
    kv_heads=2,
    head_dim=24,
    moe_hidden=96,
    moe_intermediate=128,
    experts=16,
    vocab=3072,
)
# Heads enough for eight ranks, whose parts are not whole tiles; K of three tiles of bf16, and of one and a half of NVFP4.
WIDE = Shape(
    hidden=192,
    heads=16,
    kv_heads=8,
    head_dim=40,
    moe_hidden=384,
    moe_intermediate=64,
    experts=3,
    vocab=576,
)
SHAPES = [
    *(pytest.param(dataclasses.replace(TINY, ranks=ranks), id=f"tiny{ranks}") for ranks in (1, 2)),
    *(pytest.param(dataclasses.replace(WIDE, ranks=ranks), id=f"wide{ranks}") for ranks in (1, 2, 4, 8)),
]
TEMPERATURE = 0.3
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

pack = jax.jit(pack_layer, static_argnames=("shape", "nvfp4", "temperature"))
unpack = jax.jit(unpack_layer, static_argnames=("shape", "nvfp4"))
gate_factors = jax.jit(functools.partial(GateFactors.create, temperature=TEMPERATURE))


# ---- Weights ------------------------------------------------------------------------------------------------------------


def draw_nvfp4(rng: np.random.Generator, *shape: int) -> NVFP4Weight:
    """All codes with all scales but NaN: both signs, both zeros, subnormals."""
    *stack, n, k = shape
    codes = rng.integers(0, 256, (*stack, n, k // 2), np.uint8)
    scales = rng.integers(0, 256, (*stack, n, k // 16), np.uint8)
    scales[(scales & 127) == 127] = 128  # NaN: another -0
    assert {0, 128} <= set(scales.reshape(-1).tolist())
    scalars = rng.uniform(0.5, 2, stack).astype(np.float32)
    return NVFP4Weight(codes, scales.view(E4M3), scalars, np.ones_like(scalars))


def layer(shape: Shape, leaf: Callable, experts: Callable) -> dict:
    """A layer as muse_jax has it; leaf(dtype, *sizes) and experts(*sizes) make its arrays."""
    d, m, f, e = shape.hidden, shape.moe_hidden, shape.moe_intermediate, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "input_norm": leaf(BF16, d),
        "attention": {
            "q_proj": leaf(BF16, q, d),
            "k_proj": leaf(BF16, kv, d),
            "v_proj": leaf(BF16, kv, d),
            "attn_out_gate": leaf(BF16, q, d),
            "o_proj": leaf(BF16, d, q),
        },
        "post_attention_gate": leaf(np.float32, d),
        "pre_ffn_norm": leaf(BF16, d),
        "mlp": {
            "router": leaf(np.float32, e, d),
            "router_bias": leaf(np.float32, e),
            "pre_expert_proj": leaf(BF16, m, d),
            "pre_expert_norm": leaf(BF16, m),
            "gate_up": experts(e, 2, f, m),
            "down": experts(e, m, f),
            "post_expert_norm": leaf(BF16, m),
            "post_expert_proj": leaf(BF16, d, m),
        },
        "post_ffn_norm": leaf(BF16, d),
        "post_ffn_gate": leaf(np.float32, d),
    }


def draw(rng: np.random.Generator, shape: Shape, nvfp4: bool) -> dict:
    def leaf(dtype, *sizes: int) -> jax.Array:
        if dtype == BF16 and len(sizes) > 1:  # any bits but NaN and infinity: subnormals, both zeros
            bits = rng.integers(0, 1 << 16, sizes, np.uint16)
            return jnp.asarray(np.where((bits & 0x7F80) == 0x7F80, bits & 0x807F, bits).view(BF16))
        return jnp.asarray(rng.standard_normal(sizes, np.float32).astype(dtype))

    return layer(shape, leaf, functools.partial(draw_nvfp4, rng) if nvfp4 else functools.partial(leaf, BF16))


AXES = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "attn_out_gate": 0, "o_proj": 1}
AXES |= {"pre_expert_proj": 0, "post_expert_proj": 0, "gate_up": 2, "down": 1}


def cut_axis(path: tuple) -> int | None:
    """The axis of a leaf that ranks share."""
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return None if names[-1].endswith("_scale") else next((AXES[name] for name in names if name in AXES), None)


def rank_part(params: dict, shape: Shape, rank: int) -> dict:
    def part(path, x):
        axis = cut_axis(path)
        if axis is None:
            return x
        size = x.shape[axis] // shape.ranks
        return lax.slice_in_dim(x, rank * size, (rank + 1) * size, axis=axis)

    return jax.tree_util.tree_map_with_path(part, params)


def pack_ranks(params: dict, shape: Shape, nvfp4: bool) -> jax.Array:
    return jnp.stack([pack(params, shape, nvfp4, rank, temperature=TEMPERATURE) for rank in range(shape.ranks)])


def assert_same_bits(actual, expected) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.tobytes() == expected.tobytes()


def decoded(codes, scales) -> np.ndarray:
    return decode(np.asarray(codes), np.asarray(scales), np.float32)


def assert_unpacked(actual: dict, params: dict) -> None:
    """What `unpack_layer` promises of weights `params`."""
    flat = {tuple(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(actual)}
    seen = set()

    def check(path: tuple, expected) -> None:
        seen.add(path)
        assert_same_bits(flat[path], expected)

    for path, x in walk(params):
        if isinstance(x, NVFP4Weight):
            codes, scales = flat[*path, "codes"], flat[*path, "block_scales"]
            check((*path, "block_scales"), abs(np.asarray(x.block_scales)))
            check((*path, "global_scale"), x.global_scale)
            seen.add((*path, "codes"))
            assert codes.dtype == np.uint8
            assert_same_bits(decoded(codes, scales), decoded(x.codes, x.block_scales))
        elif path[-1].endswith("_gate") and path[0] != "attention":
            factors = gate_factors(x)
            check((*path, "alpha"), factors.alpha)
            check((*path, "beta"), factors.beta)
        elif path[-1].endswith("_norm"):
            seen.add(path)
            assert_same_bits(one_plus(flat[path], SERVING), one_plus(x, SERVING))
        else:
            check(path, x)
    assert seen == set(flat)


def walk(params, path: tuple = ()):
    for key, x in params.items():
        yield from walk(x, (*path, key)) if isinstance(x, dict) else [((*path, key), x)]


# ---- Round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvfp4", [False, True], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_come_back(shape, nvfp4, rng):
    params = draw(rng, shape, nvfp4)
    buffers = pack_ranks(params, shape, nvfp4)
    assert buffers.shape == (shape.ranks, table_bytes(layer_table(shape, nvfp4)))
    assert_unpacked(unpack(buffers, shape, nvfp4), params)
    last = shape.ranks - 1
    assert_unpacked(unpack(buffers[last:], shape, nvfp4), rank_part(params, shape, last))


@pytest.mark.parametrize("ranks", [1, 4, 8])  # of 576, 144 and 72 rows: nine tiles, two and a bit, one and a bit
def test_head_comes_back(ranks, rng):
    shape = dataclasses.replace(WIDE, ranks=ranks)
    lm_head = jnp.asarray(rng.standard_normal((shape.vocab, shape.hidden), np.float32).astype(BF16))
    norm = jnp.asarray(rng.standard_normal(shape.hidden, np.float32).astype(BF16))
    buffers = jnp.stack([pack_head(lm_head, norm, shape, rank) for rank in range(ranks)])
    assert buffers.shape == (ranks, table_bytes(head_table(shape)))
    for here, rows in ((buffers, lm_head), (buffers[-1:], lm_head[-(shape.vocab // ranks) :])):
        actual, actual_norm = unpack_head(here, shape)
        assert_same_bits(actual, rows)
        assert_same_bits(actual_norm, norm.astype(jnp.float32))
    assert_same_bits(pack_head(rows, norm, shape, None), buffers[-1])


@pytest.mark.parametrize("nvfp4", [False, True], ids=["bf16", "nvfp4"])
def test_packing_on_a_mesh(nvfp4, rng):
    shape = dataclasses.replace(WIDE, ranks=8)
    params = draw(rng, shape, nvfp4)
    mesh = Mesh(np.array(jax.devices()[:8]), ("tp",))

    def spec(path, x):
        axis = cut_axis(path)
        return PartitionSpec(*("tp" if i == axis else None for i in range(x.ndim)))

    specs = jax.tree_util.tree_map_with_path(spec, params)
    here = jax.jit(
        jax.shard_map(
            lambda part: pack_layer(part, shape, nvfp4, None, temperature=TEMPERATURE)[None],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec("tp", None),
        )
    )
    assert_same_bits(here(params), pack_ranks(params, shape, nvfp4))


def test_rank_may_be_traced(rng):
    shape = dataclasses.replace(WIDE, ranks=4)
    params = draw(rng, shape, True)
    traced = pack(params, shape, True, jnp.int32(3), temperature=TEMPERATURE)
    assert_same_bits(traced, pack_layer(params, shape, True, 3, temperature=TEMPERATURE))


def test_gates_may_be_factors(rng):
    params = draw(rng, TINY, False)
    factors = {name: GateFactors.create(params[name], TEMPERATURE) for name in ("post_attention_gate", "post_ffn_gate")}
    assert_same_bits(pack(params | factors, TINY, False, 0), pack(params, TINY, False, 0, temperature=TEMPERATURE))
    again = {name: vars(value) for name, value in factors.items()}  # as `unpack_layer` has them
    assert_same_bits(pack(params | again, TINY, False, 0), pack(params, TINY, False, 0, temperature=TEMPERATURE))


def test_norms_of_every_weight():
    """1 + (fp32(1 + w) - 1) is fp32(1 + w) for all finite bf16 w, so that norms of unpacked weights have the same bits."""
    w = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)
    w = jnp.asarray(w[np.isfinite(w)])
    stored = 1.0 + w
    assert_same_bits(1.0 + jax.jit(lambda x: x - 1.0)(stored), stored)


# ---- Bytes, one by one --------------------------------------------------------------------------------------------------


def bits_of_bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def codes_of_word(word: int) -> list[float]:
    """The eight e2m1 values of a word, found as a kernel finds them: as bfloat16 that is too small by 2^126."""
    values = []
    for pair in range(4):
        for half in (word & 0xFFFF, word >> 16):
            if pair < 3:
                bits = (half << 3 * pair) & 0b1000_0001_1100_0000
            else:
                sign, exponent, mantissa = half >> 14 & 1, half >> 10 & 3, half >> 13 & 1
                bits = sign << 15 | exponent << 7 | mantissa << 6
            values.append(bits_of_bf16(bits) * 2.0**126)
    return values


def read_matrix(data: bytes, kind: str, rows: int, k: int) -> np.ndarray:
    """A matrix [rows, k], float64, of the bytes of its tiles; padding is asserted to be zero.

    NVFP4 values have their block scale.
    """
    chunk_values = {"bf16": 8, "fp32": 4, "nvfp4": 32}[kind]
    tile_k, tile_bytes = 8 * chunk_values, 64 * 128 + (64 * 16 if kind == "nvfp4" else 0)
    row_tiles, k_tiles = math.ceil(rows / 64), math.ceil(k / tile_k)
    assert len(data) == row_tiles * k_tiles * tile_bytes
    full = np.empty((row_tiles * 64, k_tiles * tile_k))
    for tile in range(row_tiles * k_tiles):
        row0, k0, start = tile // k_tiles * 64, tile % k_tiles * tile_k, tile * tile_bytes
        for place in range(512):
            row, chunk = place // 8, place % 8 ^ (place // 8 & 7)
            raw = data[start + 16 * place : start + 16 * place + 16]
            if kind == "bf16":
                values = [bits_of_bf16(bits) for bits in struct.unpack("<8H", raw)]
            elif kind == "fp32":
                values = struct.unpack("<4f", raw)
            else:
                values = [value for word in struct.unpack("<4I", raw) for value in codes_of_word(word)]
                # The scales of chunks q and q + 4 are four bytes in this order: two of q, two of q + 4.
                at = start + 64 * 128 + 16 * row + 4 * (chunk % 4) + 2 * (chunk // 4)
                assert max(data[at : at + 2]) < 128
                scales = np.frombuffer(data[at : at + 2], E4M3).astype(float)
                values = [value * scales[i // 16] for i, value in enumerate(values)]
            at_k = k0 + chunk_values * chunk
            full[row0 + row, at_k : at_k + chunk_values] = values
    assert not full[rows:].any() and not full[:, k:].any()
    return full[:rows, :k]


def padded(x: np.ndarray, axis: int, heads: int, head_dim: int) -> np.ndarray:
    """Heads of `axis` padded with zeros to 64."""
    parts = [np.insert(part, [head_dim] * (64 - head_dim), 0, axis) for part in np.split(x, heads, axis)]
    return np.concatenate(parts, axis)


def expected_entries(params: dict, shape: Shape, nvfp4: bool, rank: int) -> dict[str, np.ndarray]:
    """What a rank's buffer holds, by names of the table: [count, rows, k] float64, vectors fp32."""

    def rows(x, axis: int = 0) -> np.ndarray:
        return np.split(np.asarray(x), shape.ranks, axis)[rank].astype(float)

    attention, mlp = params["attention"], params["mlp"]
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads, "attn_out_gate": shape.heads}
    parts = [padded(rows(attention[name]), 0, n // shape.ranks, shape.head_dim) for name, n in heads.items()]
    gate_up, down = (decoded(x.codes, x.block_scales) if nvfp4 else x for x in (mlp["gate_up"], mlp["down"]))
    gate, up = rows(gate_up[:, 0], 1), rows(gate_up[:, 1], 1)
    entries = {
        "qkv_gate": np.concatenate(parts),
        "o_proj": padded(rows(attention["o_proj"], 1), 1, shape.heads // shape.ranks, shape.head_dim),
        "router": np.asarray(mlp["router"], float),
        "pre_expert_proj": rows(mlp["pre_expert_proj"]),
        "gate_up": np.stack([np.stack(pair, 1).reshape(-1, shape.moe_hidden) for pair in zip(gate, up, strict=True)]),
        "down": rows(down, 1),
        "post_expert_proj": rows(mlp["post_expert_proj"]),
        "router_bias": mlp["router_bias"],
        "gate_up_scale": mlp["gate_up"].global_scale.reshape(-1) if nvfp4 else np.ones(2 * shape.experts, np.float32),
        "down_scale": mlp["down"].global_scale if nvfp4 else np.ones(shape.experts, np.float32),
    }
    for name in ("input_norm", "pre_ffn_norm", "post_ffn_norm"):
        entries[name] = np.float32(1) + np.asarray(params[name], np.float32)
    for name in ("pre_expert_norm", "post_expert_norm"):
        entries[name] = np.float32(1) + np.asarray(mlp[name], np.float32)
    for name in ("post_attention", "post_ffn"):
        factors = GateFactors.create(params[f"{name}_gate"], TEMPERATURE)
        entries |= {f"{name}_alpha": factors.alpha, f"{name}_beta": factors.beta}
    return entries


@pytest.mark.parametrize("nvfp4", [False, True], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize(
    "shape", [dataclasses.replace(TINY, ranks=2), dataclasses.replace(WIDE, ranks=4)], ids=["tiny2", "wide4"]
)
def test_every_byte(shape, nvfp4, rng):
    params, rank = draw(rng, shape, nvfp4), shape.ranks - 1
    data = np.asarray(pack(params, shape, nvfp4, rank, temperature=TEMPERATURE)).tobytes()
    expected = expected_entries(params, shape, nvfp4, rank)
    end = 0
    for entry in layer_table(shape, nvfp4):
        assert entry.offset == end and end % 128 == 0
        end += entry.nbytes
        part, values = data[entry.offset : end], expected.pop(entry.name)
        if isinstance(entry, Vector):
            assert part == np.asarray(values).astype("<f4").tobytes().ljust(len(part), b"\0"), entry.name
            continue
        values = values.reshape(entry.count, entry.rows, entry.k)
        size = len(part) // entry.count
        for i, matrix in enumerate(values):
            actual = read_matrix(part[i * size : (i + 1) * size], entry.kind, entry.rows, entry.k)
            np.testing.assert_array_equal(actual, matrix, entry.name)
    assert end == len(data) and not expected


# ---- The released model -------------------------------------------------------------------------------------------------

FULL = Shape(
    hidden=MUSE_SPARK_OPEN.hidden_size,
    heads=MUSE_SPARK_OPEN.num_attention_heads,
    kv_heads=MUSE_SPARK_OPEN.num_key_value_heads,
    head_dim=MUSE_SPARK_OPEN.head_dim,
    moe_hidden=MUSE_SPARK_OPEN.moe_hidden_size,
    moe_intermediate=MUSE_SPARK_OPEN.moe_intermediate_size,
    experts=MUSE_SPARK_OPEN.num_local_experts,
    vocab=MUSE_SPARK_OPEN.vocab_size,
    ranks=8,
)
# 16 + 2 + 2 + 16 heads of 64 rows; o_proj; router; two projections of 4096 to 512 x 8192 elements; vectors.
DENSE_BYTES = 2304 * 8192 * 2 + 8192 * 1024 * 2 + 256 * 8192 * 4 + 2 * 512 * 8192 * 2 + 4 * (7 * 8192 + 2 * 4096 + 4 * 256)
EXPERT_VALUES = 1024 * 4096 + 512 * 4096
FULL_BYTES = {
    False: DENSE_BYTES + 256 * EXPERT_VALUES * 2,  # 3.29 GB
    True: DENSE_BYTES + 256 * EXPERT_VALUES * 9 // 16,  # half a byte a code, a sixteenth for scales: 0.98 GB
}


def full_size(nvfp4: bool) -> dict:
    """The whole layer as shapes."""

    def leaf(dtype, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def experts(*sizes: int):
        *stack, n, k = sizes
        scalars = leaf(np.float32, *stack)
        return NVFP4Weight(leaf(np.uint8, *stack, n, k // 2), leaf(E4M3, *stack, n, k // 16), scalars, scalars)

    return layer(FULL, leaf, experts if nvfp4 else functools.partial(leaf, BF16))


@pytest.mark.parametrize("nvfp4", [False, True], ids=["bf16", "nvfp4"])
def test_bytes_of_the_released_model(nvfp4):
    assert table_bytes(layer_table(FULL, nvfp4)) == FULL_BYTES[nvfp4]
    params = full_size(nvfp4)
    pack_shape = functools.partial(pack_layer, shape=FULL, nvfp4=nvfp4, temperature=TEMPERATURE)
    buffer = jax.eval_shape(functools.partial(pack_shape, rank=7), params)
    assert (buffer.shape, buffer.dtype) == ((FULL_BYTES[nvfp4],), np.uint8)
    part = jax.eval_shape(functools.partial(rank_part, shape=FULL, rank=7), params)
    assert jax.eval_shape(functools.partial(pack_shape, rank=None), part) == buffer
    one = jax.eval_shape(lambda x: unpack_layer(x[None], FULL, nvfp4), buffer)
    assert one["mlp"]["post_expert_proj"].shape == (1024, 4096)
    assert one["attention"]["o_proj"].shape == (8192, 1024)
    everything = jax.ShapeDtypeStruct((8, *buffer.shape), buffer.dtype)
    whole = jax.eval_shape(lambda x: unpack_layer(x, FULL, nvfp4), everything)
    assert whole["attention"] == params["attention"]


FULL_HEAD = jax.ShapeDtypeStruct((202_048, 8192), BF16), jax.ShapeDtypeStruct((8192,), BF16)
FULL_HEAD_BYTES = 395 * 64 * 8192 * 2 + 4 * 8192  # 25,256 rows are 24 less than 395 tiles


def test_bytes_of_the_released_head():
    for lm_head, rank in ((FULL_HEAD[0], 7), (jax.ShapeDtypeStruct((25_256, 8192), BF16), None)):
        buffer = jax.eval_shape(functools.partial(pack_head, shape=FULL, rank=rank), lm_head, FULL_HEAD[1])
        assert (buffer.shape, buffer.dtype) == ((FULL_HEAD_BYTES,), np.uint8)


@pytest.mark.parametrize("nvfp4", [False, True], ids=["bf16", "nvfp4"])
def test_memory_of_a_layer(nvfp4):
    """Compiled, not run: besides buffer and weights, packing and unpacking need room for two dense matrices."""
    params = full_size(nvfp4)
    packing = jax.jit(lambda x: pack_layer(x, FULL, nvfp4, 1, temperature=TEMPERATURE)).lower(params).compile()
    buffer = jax.ShapeDtypeStruct((1, FULL_BYTES[nvfp4]), np.uint8)
    unpacking = jax.jit(lambda x: unpack_layer(x, FULL, nvfp4)).lower(buffer).compile()
    for program in (packing, unpacking):
        assert program.memory_analysis().temp_size_in_bytes < 2 * 2304 * 8192 * 2


def test_memory_of_the_head():
    """The same: room for some rows of tiles."""
    packing = jax.jit(lambda x, y: pack_head(x, y, FULL, 1)).lower(*FULL_HEAD).compile()
    buffer = jax.ShapeDtypeStruct((1, FULL_HEAD_BYTES), np.uint8)
    unpacking = jax.jit(lambda x: unpack_head(x, FULL)).lower(buffer).compile()
    for program in (packing, unpacking):
        assert program.memory_analysis().temp_size_in_bytes < 4 * 64 * 8192 * 2


# ---- Errors -------------------------------------------------------------------------------------------------------------


def test_wrong_arrays_are_named(rng):
    params = draw(rng, TINY, False)
    with pytest.raises(ValueError, match=r"post_attention_gate is a weight: its factors need `temperature`"):
        pack_layer(params, TINY, False, 0)
    for rank in (-1, 1):
        with pytest.raises(ValueError, match=rf"rank = {rank}: allowed are 0 to 0"):
            pack_layer(params, TINY, False, rank, temperature=TEMPERATURE)
    wide = params | {"pre_ffn_norm": params["pre_ffn_norm"].astype(jnp.float32)}
    with pytest.raises(ValueError, match=r"pre_ffn_norm is float32\[192\]: this shape of model needs bfloat16\[192\]"):
        pack_layer(wide, TINY, False, 0, temperature=TEMPERATURE)
    halves = dataclasses.replace(TINY, ranks=2)
    with pytest.raises(ValueError, match=r"attention.q_proj is bfloat16\[192, 192\]: .* needs bfloat16\[96, 192\]"):
        pack_layer(params, halves, False, None, temperature=TEMPERATURE)
    with pytest.raises(ValueError, match=r"mlp.router is float32\[3, 192\]"):
        pack_layer(draw(rng, dataclasses.replace(TINY, experts=3), True), TINY, True, 0, temperature=TEMPERATURE)
    with pytest.raises(ValueError, match=r"lm_head is .* needs bfloat16\[576, 192\]"):
        pack_head(jnp.zeros((8, 192), jnp.bfloat16), jnp.zeros(192, jnp.bfloat16), WIDE, 0)


def test_wrong_buffers_are_named():
    size = table_bytes(layer_table(dataclasses.replace(WIDE, ranks=4), False))
    for wrong in ((2, size), (4, size - 128), (size,)):
        with pytest.raises(ValueError, match=rf"needs uint8\[1 or 4, {size}\]"):
            unpack_layer(jnp.zeros(wrong, jnp.uint8), dataclasses.replace(WIDE, ranks=4), False)


def test_nvfp4_rows_are_whole_blocks():
    odd = dataclasses.replace(TINY, moe_intermediate=120)
    layer_table(odd, False)
    with pytest.raises(NotImplementedError, match="moe_intermediate = 120: NVFP4 experts need multiples of 16"):
        layer_table(odd, True)
