"""The GEMMs of routed experts: packing, plan, kernels interpreted on the CPU and lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from muse_jax import nvfp4, ops
from muse_jax.numerics import SERVING
from muse_jax.nvfp4 import NVFP4Weight
from pallas_kernels import compat
from pallas_kernels.nvfp4_gemm import kernel as kernel_module
from pallas_kernels.nvfp4_gemm import reference, shapes
from pallas_kernels.nvfp4_gemm.kernel import Config, down, gate_up, plan
from pallas_kernels.nvfp4_gemm.packing import pack_weights, unpack_weights

KERNELS = {"gate_up": gate_up, "down": down}
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the interpreter of jax 0.10 has no transposed operands of wgmma"
)


def _weights(rng, *shape) -> NVFP4Weight:
    """Rows of very different sizes, so that block scales take all their exponents; zeros with either sign."""
    w = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-12, 3, (*shape[:-1], 1)))
    w[..., ::7] = 0
    return jax.tree.map(jnp.asarray, nvfp4.quantize(w.astype(jnp.bfloat16), "weights"))


def _matrices(w: NVFP4Weight) -> tuple[jax.Array, jax.Array, jax.Array]:
    return w.codes, w.block_scales, w.global_scale


def _routing(rng, rows, top_k, experts) -> jax.Array:
    return jnp.asarray(np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32))


# -------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(("tile_rows", "cols"), [(64, 32), (128, 32), (128, 64)])
@pytest.mark.parametrize("matrices", [1, 2])
def test_packing_has_an_inverse(rng, tile_rows, cols, matrices):
    codes = jnp.asarray(rng.integers(0, 256, (3, matrices, 128, 1024), np.uint8))
    scales = lax.bitcast_convert_type(jnp.asarray(rng.integers(0, 255, (3, matrices, 128, 128), np.uint8)), jnp.float8_e4m3fn)
    global_scale = jnp.asarray(rng.standard_normal((3, matrices)).astype(np.float32))
    packed = pack_weights(codes, scales, global_scale, tile_rows, cols)
    assert (packed.k, packed.out_rows, packed.matrices, packed.tile_rows, packed.cols) == (2048, 128, matrices, tile_rows, cols)
    assert packed.words.nbytes + packed.block_scales.nbytes == codes.nbytes + scales.nbytes
    for one, other in zip(unpack_weights(packed), (codes, scales, global_scale), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


def test_packing_says_what_does_not_fit(rng):
    codes, scales, global_scale = jnp.zeros((2, 96, 256), jnp.uint8), jnp.zeros((2, 96, 32)), jnp.zeros(2)
    with pytest.raises(ValueError, match="96 rows of each of 1 matrices"):
        pack_weights(codes, scales, global_scale, 128, 32)
    with pytest.raises(ValueError, match="K = 512 is not a multiple of 1024"):
        pack_weights(codes[:, :64], scales[:, :64], global_scale, 64, 64)
    with pytest.raises(ValueError, match="32 or 64 columns are possible"):
        pack_weights(codes, scales, global_scale, 32, 32)


def test_every_product_is_exact():
    """All codes times all scales, in each of the four places of a word, as the interpreter and as a GPU decode them."""
    codes = jnp.tile(jnp.arange(16, dtype=jnp.uint8)[:, None] * 17, (1, 512)).reshape(1, 64, 128)
    scales = np.arange(64 * 16, dtype=np.uint8).reshape(1, 64, 16) % 127  # 127 is NaN
    scales = jnp.repeat(lax.bitcast_convert_type(jnp.asarray(scales), jnp.float8_e4m3fn), 32, axis=2)[..., :16]
    codes = jnp.tile(codes, (1, 1, 4))
    scales = jnp.tile(scales, (1, 1, 4))[..., :64]
    packed = pack_weights(codes, scales, jnp.ones(1), 64, 32)
    words, scale = packed.words[0, 0], packed.block_scales[0, 0]
    shifted = (scale.astype(jnp.float32) * 2.0**118).astype(jnp.bfloat16)
    expected = reference.decode(codes, scales, jnp.float32)[0].reshape(64, 2, 32, 4, 4).transpose(1, 3, 4, 0, 2)
    for chunk in range(2):
        for q in range(4):
            word = words[chunk, 64 * q : 64 * (q + 1)]
            for code in range(4):
                value = kernel_module._decode_normal(word, code, shifted[chunk]).astype(jnp.float32) * 2.0**8
                np.testing.assert_array_equal(value, expected[chunk, q, code])
                # numpy knows subnormal numbers, as a GPU does.
                bits = np.asarray(kernel_module._vector_bits(word, code)).view(jnp.bfloat16).astype(np.float64)
                np.testing.assert_array_equal(
                    bits * np.asarray(shifted[chunk]).astype(np.float64) * 2.0**8, expected[chunk, q, code]
                )


def test_bits_of_a_pair_of_words_do_not_mix(rng):
    """What `_decode_packed` does to a 32-bit register is what `_vector_bits` does to its halves."""
    words = rng.integers(0, 1 << 16, (1000, 2), np.uint16)
    pairs = words.view(np.uint32)[:, 0]
    for code in range(4):
        bits = np.zeros_like(pairs)
        for left, mask in kernel_module._moves(code):
            shifted = pairs << np.uint32(left) if left >= 0 else pairs >> np.uint32(-left)
            bits |= shifted & np.uint32(mask << 16 | mask)
        np.testing.assert_array_equal(bits.view(np.uint16).reshape(-1, 2), kernel_module._vector_bits(jnp.asarray(words), code))


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 4), (5, 3, 6), (16, 8, 256), (16, 8, 9), (16, 2, 3)])
def test_plan(rng, rows, top_k, experts):
    idx = _routing(rng, rows, top_k, experts)
    made = jax.tree.map(np.asarray, jax.jit(plan, static_argnums=1)(idx, experts))
    active = np.unique(idx)
    assert made.num_active == [len(active)]
    np.testing.assert_array_equal(made.expert[: len(active)], active)
    assert not made.expert[len(active) :].any()
    np.testing.assert_array_equal(made.expert[made.place], idx)
    positions = made.first_group[made.place] * 8 + made.rank
    assert len(np.unique(positions)) == rows * top_k
    np.testing.assert_array_equal(made.source[positions].reshape(-1), np.arange(rows * top_k))
    for place, expert in enumerate(active):
        count = np.count_nonzero(idx == expert)
        np.testing.assert_array_equal(np.sort(made.rank[np.asarray(idx) == expert]), np.arange(count))
        assert 8 * made.first_group[place] + (8 if rows <= 8 else 16) <= len(made.source)
        if place + 1 < len(active):
            assert made.first_group[place + 1] == made.first_group[place] + -(-count // 8)


def test_plan_refuses_more_rows_than_a_window():
    with pytest.raises(NotImplementedError, match="17 rows, more than 16"):
        plan(jnp.zeros((17, 1), jnp.int32), 4)


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_is_that_of_the_model(rng, activations, dtype):
    """Bit for bit: `ops.experts` in blocks of one row is the two references one after the other."""
    experts, rows, top_k, k, f = 24, 5, 4, 64, 48
    w_gate_up, w_down = _weights(rng, experts, 2, f, k), _weights(rng, experts, k, f)
    x = jnp.asarray(rng.standard_normal((rows, k)).astype(np.float32)).astype(dtype)
    idx = _routing(rng, rows, top_k, experts)
    expected = ops.experts(x, idx, w_gate_up, w_down, SERVING, activations)

    def quantized(x):
        rows = ops.quantize_rows(x)
        return rows.decode(), rows.row_scale

    x, scale = quantized(x) if activations == "nvfp4" else (x, None)
    hidden = reference.gate_up(x, idx, *_matrices(w_gate_up), scale)
    hidden, scale = quantized(hidden) if activations == "nvfp4" else (hidden, None)
    out = reference.down(hidden, idx, *_matrices(w_down), scale)
    assert out.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(out, expected)


# -------------------------------------------------------------------------------------------------------------- kernels


def _tolerance(name, x, idx, w, row_scale) -> tuple[np.ndarray, np.ndarray]:
    """In float64, the result and how far from it one may be: fp32 sums of K terms in any order, then one rounding."""
    wide = lambda a: np.asarray(a).astype(np.float64)  # noqa: E731
    values = wide(nvfp4.decode(w.codes, w.block_scales, jnp.float32)) * wide(w.global_scale)[..., None, None]
    values, x = values[np.asarray(idx)], wide(x)
    x = x if row_scale is None else x * wide(row_scale)[..., None]
    form = "rk,rtcfk->rtcf" if name == "gate_up" else "rtk,rtfk->rtf"
    sums, sizes = np.einsum(form, x, values), np.einsum(form, abs(x), abs(values))
    errors = x.shape[-1] * 2.0**-24 * sizes
    if name == "down":
        return sums, errors + 2.0**-8 * abs(sums)
    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    (gate, up), (d_gate, d_up) = np.moveaxis(sums, 2, 0), np.moveaxis(errors, 2, 0)
    out = silu(gate) * up
    # The slope of silu is below 1.1. 2^-20: its exponential.
    return out, (1.1 * d_gate) * (abs(up) + d_up) + abs(silu(gate)) * d_up + (2.0**-8 + 2.0**-20) * abs(out)


def _compare(name, out, x, idx, w, row_scale=None):
    expected, tolerance = _tolerance(name, x, idx, w, row_scale)
    assert out.dtype == jnp.bfloat16 and out.shape == expected.shape
    error = abs(np.asarray(out).astype(np.float64) - expected)
    assert (error <= tolerance).all(), (error - tolerance).max()  # NaN fails


def _run(name, x, idx, w, row_scale=None, tile_rows=128, cols=32, num_ctas=2, races=False) -> jax.Array:
    args = (x, plan(idx, w.codes.shape[0]), pack_weights(*_matrices(w), tile_rows, cols), row_scale)
    args = jax.block_until_ready(args)  # the interpreter's callbacks may starve what runs beside them
    config = Config(stages=2, num_ctas=num_ctas)
    params = compat.interpret_params(detect_races=races)
    return jax.block_until_ready(KERNELS[name](*args, config=config, interpret=params))


def _poisoned(w: NVFP4Weight, idx) -> NVFP4Weight:
    """Experts that nobody chose are NaN: reading one shows."""
    chosen = np.isin(np.arange(w.codes.shape[0]), idx)
    scales = jnp.where(chosen.reshape(-1, *[1] * (w.block_scales.ndim - 1)), w.block_scales.astype(jnp.float32), jnp.nan)
    return dataclasses.replace(w, block_scales=scales.astype(jnp.float8_e4m3fn))


@interpreted
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(rng, name, tile_rows):
    """Fewer rows than a window of 8, two chunks of K, more tiles than CTAs, experts that nobody chose."""
    experts, rows, top_k, k = 5, 3, 2, 1024
    w = _weights(rng, experts, *((2, 64) if name == "gate_up" else (128,)), k)
    idx = _routing(rng, rows, top_k, experts - 1)
    x = jnp.asarray(rng.standard_normal((rows, k) if name == "gate_up" else (rows, top_k, k)).astype(np.float32))
    x = x.astype(jnp.bfloat16)
    _compare(name, _run(name, x, idx, _poisoned(w, idx), tile_rows=tile_rows, races=True), x, idx, w)


@interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_with_quantized_rows(rng, name):
    experts, rows, top_k, k = 4, 3, 2, 512
    w = _weights(rng, experts, *((2, 64) if name == "gate_up" else (128,)), k)
    idx = _routing(rng, rows, top_k, experts)
    x = jnp.asarray(rng.standard_normal((rows, k) if name == "gate_up" else (rows, top_k, k)).astype(np.float32))
    quantized = ops.quantize_rows(x.astype(jnp.bfloat16))
    x = nvfp4.decode(quantized.codes, quantized.block_scales, jnp.bfloat16)
    _compare(name, _run(name, x, idx, w, quantized.row_scale), x, idx, w, quantized.row_scale)


@interpreted
def test_rows_do_not_depend_on_the_batch(rng):
    """16 rows of one expert, two windows of 8 for `down`; and the same rows, bit for bit, without the others."""
    experts, k = 3, 512
    w = _weights(rng, experts, 64, k)
    idx = jnp.asarray(np.stack([np.full(16, 1), np.where(np.arange(16) % 2, 0, 2)], axis=1).astype(np.int32))
    x = jnp.asarray(rng.standard_normal((16, 2, k)).astype(np.float32)).astype(jnp.bfloat16)
    out = _run("down", x, idx, w, tile_rows=64)
    _compare("down", out, x, idx, w)
    np.testing.assert_array_equal(_run("down", x[9:12], idx[9:12], w, tile_rows=64), out[9:12])


def _abstract(shape: shapes.Shape, tile_rows: int, cols: int, rows: int = 16, quantized: bool = False) -> tuple:
    """Arguments of a kernel at full size, without memory."""
    made = jax.eval_shape(functools.partial(shapes.arguments, dataclasses.replace(shape, rows=rows)))
    packed = jax.eval_shape(
        functools.partial(pack_weights, tile_rows=tile_rows, cols=cols),
        *(made[name] for name in ("codes", "block_scales", "global_scale")),
    )
    scale = jax.ShapeDtypeStruct(made["x"].shape[:-1], jnp.float32) if quantized else None
    return made["x"], jax.eval_shape(lambda idx: plan(idx, shape.experts), made["idx"]), packed, scale


def _lowered() -> list[tuple]:
    """(shape, tile, decode, rows, quantized).

    Inferring layouts takes jax 0.10 ten times as long: two programs have to do. For `gate_up` of quantised rows it finds none.
    """
    few = [
        (shapes.GATE_UP, shapes.TILES["gate_up"][0], "packed", 16, False),
        (shapes.DOWN, shapes.TILES["down"][0], "vector", 8, False),
    ]
    if jax.__version_info__ < (0, 12):
        return few
    each = [(shape, tile) for shape in shapes.SHAPES for tile in shapes.TILES[shape.name]]
    return [(*one, decode, rows, rows == 8) for one in each for decode, rows in (("packed", 16), ("vector", 8))]


@pytest.mark.parametrize(("shape", "tile", "decode", "rows", "quantized"), _lowered())
def test_lowers_for_hopper_at_full_size(shape, tile, decode, rows, quantized):
    tile_rows, cols, stages = tile
    run = functools.partial(KERNELS[shape.name], config=Config(stages=stages, decode=decode))
    lowered = jax.jit(run).trace(*_abstract(shape, tile_rows, cols, rows, quantized)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


def test_kernels_say_what_is_wrong():
    args = _abstract(shapes.GATE_UP, 128, 32)
    x, routing, packed, _ = args
    lower = lambda *args, **kwargs: jax.eval_shape(functools.partial(gate_up, **kwargs), *args)  # noqa: E731
    with pytest.raises(NotImplementedError, match="x is float32: the kernel takes bfloat16"):
        lower(jax.ShapeDtypeStruct(x.shape, jnp.float32), routing, packed)
    with pytest.raises(ValueError, match=r"x has shape \(16, 64\)"):
        lower(jax.ShapeDtypeStruct((16, 64), jnp.bfloat16), routing, packed)
    with pytest.raises(ValueError, match="2 matrices an expert in place of 1"):
        jax.eval_shape(down, jax.ShapeDtypeStruct((16, 8, 4096), jnp.bfloat16), routing, packed)
    with pytest.raises(ValueError, match="at least two stages"):
        lower(x, routing, packed, config=Config(stages=1))


def test_bytes_of_a_step():
    assert shapes.GATE_UP.num_bytes == pytest.approx(49 * 2.36e6, rel=0.01)
    assert shapes.DOWN.num_bytes == pytest.approx(49 * 1.18e6, rel=0.03)
    assert len(np.unique(shapes.routing(shapes.DOWN, np.random.default_rng(0)))) == 49


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(shapes.cases()), ids=lambda case: case.name)
def test_kernel_on_a_gpu(case, rng):
    args = case.arguments(rng)
    run = jax.jit(case.kernel)
    out = run(*args)
    shapes.check(out, jax.jit(case.reference)(*args))
    np.testing.assert_array_equal(out, run(*args))
