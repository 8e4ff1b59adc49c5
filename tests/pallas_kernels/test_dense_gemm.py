"""Dense products of a step's rows: kernels interpreted on the CPU, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.config import MUSE_SPARK_OPEN
from muse_jax.layout import packed_tensors
from muse_jax.numerics import SERVING
from pallas_kernels import compat
from pallas_kernels.dense_gemm import reference, shapes
from pallas_kernels.dense_gemm.kernel import Config, dense, swiglu

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the interpreter of jax 0.10 has no transposed operands of wgmma"
)
BF16, FP32 = jnp.bfloat16, jnp.float32


def _normal(rng, *shape, dtype=BF16) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_reference_is_that_of_the_model(rng, dtype):
    """Bit for bit."""
    x = _normal(rng, 5, 96, dtype=dtype)
    gate, up = (_normal(rng, 48, 96, dtype=dtype) for _ in range(2))
    np.testing.assert_array_equal(reference.swiglu(x, gate, up), ops.gated_linear(x, gate, up, SERVING))


# -------------------------------------------------------------------------------------------------------------- kernels


def _run(function, *args, races=True, **kwargs):
    args = jax.block_until_ready(args)  # the interpreter's callbacks may starve what runs beside them
    return jax.block_until_ready(function(*args, interpret=compat.interpret_params(detect_races=races), **kwargs))


def _sums(x, weight) -> tuple[np.ndarray, np.ndarray]:
    """In float64, x W^T and how far from it fp32 sums in any order may be."""
    x, weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    return x @ weight.T, x.shape[1] * 2.0**-24 * (abs(x) @ abs(weight).T)


def _near(out, expected, error):
    distance = abs(np.asarray(out).astype(np.float64) - expected)
    assert (distance <= error).all(), (distance - error).max()  # NaN fails


CASES = {
    "one matrix": (1, 128, [64], Config(1, 1, 64, 2), FP32),
    "rows of its own for the window": (9, 256, [64, 72], Config(1, 2, 128, 2, num_ctas=2), BF16),
    "fewer blocks than in a tile": (16, 192, [128, 64, 64], Config(1, 3, 64, 3, num_ctas=2), FP32),
    "unequal parts": (3, 320, [64, 160], Config(3, 2, 64, 2, num_ctas=2), BF16),
    "a part for each chunk": (16, 256, [96], Config(4, 1, 64, 2, num_ctas=3), FP32),
}


@interpreted
@pytest.mark.parametrize(("rows", "k", "sizes", "config", "out_dtype"), CASES.values(), ids=CASES)
def test_kernel(rng, rows, k, sizes, config, out_dtype):
    x, weights = _normal(rng, rows, k), [_normal(rng, n, k) for n in sizes]
    # Where blocks overlap two warpgroups write the same.
    races = all(n % 64 == 0 for n in sizes)
    outs = _run(dense, x, weights, out_dtype=out_dtype, config=config, races=races)
    for out, weight in zip(outs, weights, strict=True):
        assert out.dtype == out_dtype and out.shape == (rows, weight.shape[0])
        expected, error = _sums(x, weight)
        _near(out, expected, error + (2.0**-8 * abs(expected) if out_dtype == BF16 else 0))


@interpreted
@pytest.mark.parametrize("splits", [1, 2])
def test_swiglu(rng, splits):
    x, gate, up = _normal(rng, 3, 128), _normal(rng, 64, 128), _normal(rng, 64, 128)
    out = _run(swiglu, x, gate, up, config=Config(splits, 2, 64, 2))
    (g, d_g), (u, d_u) = _sums(x, gate), _sums(x, up)
    silu = g / (1 + np.exp(-g))
    # The slope of silu is below 1.1. 2^-20: its exponential.
    error = 1.1 * d_g * (abs(u) + d_u) + abs(silu) * d_u + (2.0**-8 + 2.0**-20) * abs(silu * u)
    assert out.dtype == BF16 and out.shape == (3, 64)
    _near(out, silu * u, error)


@interpreted
def test_a_part_of_a_matrix_has_the_bits_of_the_whole(rng):
    """Whatever the tiles, the ring, the matrices beside it and the other rows (here of one window: XLA for CPU multiplies)."""
    x, weight = _normal(rng, 16, 448), _normal(rng, 192, 448)
    (whole,) = _run(dense, x, [weight], out_dtype=FP32, config=Config(3, 3, 64, 4))
    parts = [weight[:64], weight[64:]]
    outs = _run(dense, x, parts, out_dtype=FP32, config=Config(3, 2, 64, 2, num_ctas=2))
    np.testing.assert_array_equal(jnp.concatenate(outs, axis=1), whole)
    (few,) = _run(dense, x[3:14], [weight], out_dtype=FP32, config=Config(3, 1, 64, 2))
    np.testing.assert_array_equal(few, whole[3:14])


@interpreted
@pytest.mark.parametrize(("terms", "total"), [((2.0**30, 1, -(2.0**30)), 0), ((2.0**30, -(2.0**30), 1), 1)])
def test_parts_are_added_in_the_order_of_k(terms, total):
    x = np.zeros((1, 192), np.float32)
    x[0, [5, 64, 191]] = terms
    weight = jnp.ones((64, 192), BF16)
    (out,) = _run(dense, jnp.asarray(x).astype(BF16), [weight], out_dtype=FP32, config=Config(3, 1, 64, 2))
    np.testing.assert_array_equal(out, np.full((1, 64), total))


@interpreted
@pytest.mark.parametrize("gated", [False, True])
def test_cases_can_fail(rng, gated):
    """What the benchmark and the tests on a GPU run, small; and with one MMA's columns left out of the rows."""
    shape = shapes.Shape("small", 256, (64, 64), BF16, (Config(2, 2, 64, 2),), gated=gated)
    x, *weights = shapes.arguments(shape)
    expected = shapes.plain(shape)(x, *weights)
    shapes.check(_run(shapes.kernel(shape, shape.configs[0]), x, *weights), expected)
    with pytest.raises(AssertionError, match="values differ"):
        shapes.check(expected, shapes.plain(shape)(x.at[:, 128:144].set(0), *weights))


def _each() -> list:
    return [
        pytest.param(shape, c, id=f"{shape.name}-{c.splits}-{c.blocks}-{c.chunk}")
        for shape in shapes.SHAPES
        for c in shape.configs
    ]


@pytest.mark.parametrize(("shape", "config"), _each())
def test_lowers_for_hopper_at_full_size(shape, config):
    args = jax.eval_shape(functools.partial(shapes.arguments, shape))
    lowered = jax.jit(shapes.kernel(shape, config)).trace(*args).lower(lowering_platforms=("cuda",))
    launches = 2 if config.splits > 1 or shape.gated else 1
    assert lowered.as_text().count("custom_call @mosaic_gpu") == launches


@pytest.mark.parametrize(("shape", "config"), _each())
def test_work_is_spread_over_the_gpu(shape, config):
    """No CTA has more than 1.15 of an equal share, at 132 of them."""
    blocks = sum(-(-n // 64) for n in shape.sizes)
    units = -(-blocks // config.blocks) * config.splits
    chunks = -(-shape.k // config.chunk // config.splits) * config.blocks
    assert -(-units // 132) * chunks * 132 <= 1.15 * blocks * shape.k / config.chunk


def test_kernels_say_what_is_wrong():
    def refused(error, match, x=(16, 256), weights=((64, 256),), dtype=BF16, function=dense, **kwargs):
        abstract = lambda shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        with pytest.raises(error, match=match):
            jax.eval_shape(functools.partial(function, **kwargs), abstract(x), *map(abstract, weights))

    one = lambda x, *weights, **kwargs: dense(x, weights, **kwargs)  # noqa: E731
    refused = functools.partial(refused, function=one)
    refused(ValueError, r"x has shape \(2, 8, 256\)", x=(2, 8, 256))
    refused(NotImplementedError, "17 rows, more than 16", x=(17, 256))
    refused(ValueError, "no matrix", weights=())
    refused(NotImplementedError, "x is float32: the kernel takes bfloat16", dtype=FP32)
    refused(ValueError, r"matrix 1 has shape \(64, 128\): x asks for \[N, 256\]", weights=((64, 256), (64, 128)))
    refused(NotImplementedError, "matrix 0 has 32 rows: at least 64, and a multiple of 8", weights=((32, 256),))
    refused(NotImplementedError, "matrix 0 has 68 rows: at least 64, and a multiple of 8", weights=((68, 256),))
    refused(NotImplementedError, "72 rows: at least 64, and a multiple of 32", weights=((72, 256),), config=Config(2))
    refused(ValueError, "out_dtype is float16", out_dtype=jnp.float16)
    refused(ValueError, "multiples of 64 that divide K = 256", config=Config(chunk=96))
    refused(ValueError, "multiples of 64 that divide K = 256", config=Config(chunk=192))
    refused(ValueError, "3 splits of K = 256: 1 to 2", config=Config(splits=3))
    refused(ValueError, "tiles of 4 blocks: 1 to 3", config=Config(blocks=4))
    refused(ValueError, "at least two stages", config=Config(stages=1))
    refused(ValueError, "12 stages of 20480 bytes do not fit shared memory: at most 11", config=Config(stages=12))
    refused(ValueError, "they must be equal", weights=((64, 256), (128, 256)), function=swiglu)


def test_shapes_are_those_of_a_rank():
    table = {tensor.spec.path[-1]: tensor for tensor in packed_tensors(MUSE_SPARK_OPEN, 8)}
    names = {shape.name: (shape.name,) for shape in shapes.SHAPES if not shape.name.startswith("draft")}
    names["qkv_gate"] = ("q_proj", "k_proj", "v_proj", "attn_out_gate")
    for shape in shapes.SHAPES:
        if shape.name in names:
            assert [table[name].shape for name in names[shape.name]] == [(n, shape.k) for n in shape.sizes]


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(shapes.cases()), ids=lambda case: case.name)
def test_kernel_on_a_gpu(case, rng):
    args = case.arguments(rng)
    run = jax.jit(case.kernel)
    out = run(*args)
    shapes.check(out, jax.jit(case.reference)(*args))
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(run(*args)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", shapes.SHAPES[:1], ids=lambda shape: shape.name)
def test_a_part_of_a_matrix_has_the_bits_of_the_whole_on_a_gpu(shape):
    x, weight, *_ = shapes.arguments(shape)
    config = shape.configs[0]
    (whole,) = jax.jit(lambda x, *w: dense(x, w, FP32, config))(x, weight)
    parts = jax.jit(lambda x, *w: dense(x, w, FP32, config))(x, *jnp.split(weight, [320, 832]))
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)
    (few,) = jax.jit(lambda x, *w: dense(x, w, FP32, config))(x[3:8], weight)
    np.testing.assert_array_equal(few, whole[3:8])
