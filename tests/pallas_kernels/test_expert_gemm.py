"""The GEMMs of routed experts with bf16 weights: kernels interpreted on the CPU, lowered for CUDA, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops, pallas_backend
from muse_jax.backends import XLA
from muse_jax.config import MUSE_SPARK_OPEN, TINY
from muse_jax.layout import packed_tensors
from muse_jax.numerics import SERVING
from muse_jax.pallas_backend import Pallas
from muse_jax.sharded_experts import ShardedExperts
from muse_jax.sharding import ONE_DEVICE
from pallas_kernels import compat
from pallas_kernels.expert_gemm import reference, shapes
from pallas_kernels.expert_gemm.kernel import Config, down, fitting, gate_up
from pallas_kernels.nvfp4_gemm.kernel import plan

KERNELS = {"gate_up": gate_up, "down": down}
BF16 = jnp.bfloat16
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the interpreter of jax 0.10 has no transposed operands of wgmma"
)


def _normal(rng, *shape, dtype=BF16) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)


def _routing(rng, rows, top_k, experts) -> jax.Array:
    return jnp.asarray(np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32))


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_reference_is_that_of_the_model(rng, dtype):
    """Bit for bit: `ops.experts` in blocks of one row is the two references one after the other."""
    experts, rows, top_k, k, f = 24, 5, 4, 64, 48
    w_gate_up, w_down = _normal(rng, experts, 2, f, k, dtype=dtype), _normal(rng, experts, k, f, dtype=dtype)
    x, idx = _normal(rng, rows, k, dtype=dtype), _routing(rng, rows, top_k, experts)
    expected = ops.experts(x, idx, w_gate_up, w_down, SERVING)
    out = reference.down(reference.gate_up(x, idx, w_gate_up), idx, w_down)
    assert out.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(out, expected)


# -------------------------------------------------------------------------------------------------------------- kernels


def _run(name, x, idx, weights, config, races=False) -> jax.Array:
    args = jax.block_until_ready((x, plan(idx, len(weights)), weights))  # callbacks may starve what runs beside them
    return jax.block_until_ready(KERNELS[name](*args, config, compat.interpret_params(detect_races=races)))


def _near(name, out, x, idx, weights):
    """In float64, the result and how far from it one may be: fp32 sums of K terms in any order, then one rounding."""
    x, values = (np.asarray(a).astype(np.float64) for a in (x, weights[idx]))
    form = "rk,rtcfk->rtcf" if name == "gate_up" else "rtk,rtfk->rtf"
    expected, sizes = np.einsum(form, x, values), np.einsum(form, abs(x), abs(values))
    error = x.shape[-1] * 2.0**-24 * sizes
    if name == "gate_up":
        (gate, up), (d_gate, d_up) = np.moveaxis(expected, 2, 0), np.moveaxis(error, 2, 0)
        silu = gate / (1 + np.exp(-gate))
        # The slope of silu is below 1.1. 2^-20: its exponential.
        expected = silu * up
        error = 1.1 * d_gate * (abs(up) + d_up) + abs(silu) * d_up + 2.0**-20 * abs(expected)
    assert out.dtype == BF16 and out.shape == expected.shape
    far = abs(np.asarray(out).astype(np.float64) - expected) - (error + 2.0**-8 * abs(expected))
    assert (far <= 0).all(), far.max()  # NaN fails


@interpreted
@pytest.mark.parametrize(("name", "chunk"), [("gate_up", 128), ("down", 64)])
def test_kernel(rng, name, chunk):
    """Fewer rows than a window of 8, more tiles than CTAs and than stages; experts that nobody chose are NaN."""
    experts, rows, top_k, k = 5, 3, 2, 384
    weights = _normal(rng, experts, *((2, 128) if name == "gate_up" else (128,)), k)
    idx = _routing(rng, rows, top_k, experts - 1)
    unused = np.setdiff1d(np.arange(experts), idx)
    assert len(unused)
    weights = weights.at[unused].set(jnp.nan)
    x = _normal(rng, rows, *(() if name == "gate_up" else (top_k,)), k)
    out = _run(name, x, idx, weights, Config(chunk=chunk, stages=2, num_ctas=2), races=True)
    _near(name, out, x, idx, weights)


@interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_rows_do_not_depend_on_the_batch(rng, name):
    """16 rows of one expert, two windows of 8 for `down`; and the same rows, bit for bit, beside fewer others, and of a part of
    the matrices. (Of one window: XLA for CPU multiplies.)"""
    experts, k = 3, 128
    weights = _normal(rng, experts, *((2, 128) if name == "gate_up" else (128,)), k)
    idx = jnp.asarray(np.stack([np.full(16, 1), np.where(np.arange(16) % 2, 0, 2)], axis=1).astype(np.int32))
    x = _normal(rng, 16, *(() if name == "gate_up" else (2,)), k)
    whole = _run(name, x, idx, weights, Config(64, 3, 3))
    _near(name, whole, x, idx, weights)
    part = _run(name, x[4:14], idx[4:14], weights[..., 64:, :], Config(64, 2, 1))
    np.testing.assert_array_equal(part, whole[4:14, :, 64:])


@interpreted
@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
def test_cases_can_fail(shape):
    """What the benchmark and the tests on a GPU run, small; and with one MMA's columns left out of the rows."""
    small = dataclasses.replace(shape, out_rows=64, k=128, rows=3, top_k=2, experts=6, active=4)
    x, routing, idx, weights = jax.block_until_ready(shapes.arguments(small))
    expected = shapes.run_plain(small)(x, routing, idx, weights)
    run = shapes.run_kernel(small, Config(64, 2, 2))
    shapes.check(jax.block_until_ready(run(x, routing, idx, weights, compat.interpret_params(detect_races=False))), expected)
    with pytest.raises(AssertionError, match="values differ"):
        shapes.check(expected, shapes.run_plain(small)(x.at[..., 64:80].set(0), routing, idx, weights))


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("config", shapes.CONFIGS, ids=str)
@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
def test_lowers_for_hopper_at_full_size(shape, config, rows):
    args = jax.eval_shape(functools.partial(shapes.arguments, dataclasses.replace(shape, rows=rows, active=8 * rows // 4)))
    lowered = jax.jit(shapes.run_kernel(shape, config)).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


def test_kernels_say_what_is_wrong():
    def refused(error, match, x=(16, 256), weights=(4, 2, 64, 256), dtypes=(BF16, BF16), function=gate_up, **config):
        x, weights = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip((x, weights), dtypes, strict=True))
        routing = jax.eval_shape(lambda idx: plan(idx, 4), jax.ShapeDtypeStruct((16, 2), jnp.int32))
        with pytest.raises(error, match=match):
            jax.eval_shape(functools.partial(function, config=Config(**config)), x, routing, weights)

    refused(NotImplementedError, "x is float32: the kernel takes bfloat16", dtypes=(jnp.float32, BF16))
    refused(NotImplementedError, "weights are float32: the kernel takes bfloat16", dtypes=(BF16, jnp.float32))
    refused(NotImplementedError, r"matrices \[96, 256\]: multiples of 64", weights=(4, 2, 96, 256))
    refused(NotImplementedError, r"matrices \[64, 96\]: multiples of 64", x=(16, 96), weights=(4, 2, 64, 96))
    refused(ValueError, r"x has shape \(15, 256\): the routing and the weights ask for \(16, 256\)", x=(15, 256))
    refused(ValueError, r"\[E, 2, F, K\] is possible", weights=(4, 64, 256))
    refused(ValueError, r"\[E, N, K\] is possible", function=down)
    refused(ValueError, r"hidden has shape \(16, 256\)", weights=(4, 64, 256), function=down)
    refused(ValueError, "multiples of 64 that divide K = 256", chunk=96)
    refused(ValueError, "multiples of 64 that divide K = 256", chunk=192)
    refused(ValueError, "1 stages of 36864 bytes: 2 to 6", stages=1)
    refused(ValueError, "7 stages of 36864 bytes: 2 to 6", stages=7)
    refused(ValueError, "at least one CTA", num_ctas=0)


def test_fitting():
    assert fitting(4096) == Config() == shapes.CONFIGS[0]
    assert fitting(192) == Config(chunk=64)


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize(
    ("rows", "hidden", "path"),
    [
        pytest.param(3, 128, "pallas", marks=interpreted),
        (17, 128, "xla (17 rows, more than 16)"),
        (3, 96, "xla (matrices [64, 96]: multiples of 64 are possible)"),
    ],
)
def test_layers_with_plain_experts(rng, monkeypatch, rows, hidden, path):
    """`backend="pallas"` beside "xla". Quantised activations are for NVFP4 weights: here they change nothing."""
    config = dataclasses.replace(TINY, moe_hidden_size=hidden, moe_intermediate_size=64, num_local_experts=4)
    config = dataclasses.replace(config, num_experts_per_tok=2)
    # One kernel of two CTAs has fewer warpgroups than the eight virtual devices of these tests have threads.
    monkeypatch.setattr(pallas_backend, "_INTERPRETED_CTAS", 2)
    monkeypatch.setattr(pallas_backend, "_check_threads", lambda: None)
    matrices = _normal(rng, 4, 2, 64, hidden) / 8, _normal(rng, 4, hidden, 64) / 8
    x, idx = _normal(rng, rows, hidden), _routing(rng, rows, 2, 4)
    args = jax.block_until_ready((x, idx, jnp.full((rows, 2), 0.5, jnp.float32), *matrices, _normal(rng, hidden)))

    def run(backend, activations):
        experts = ShardedExperts(config, SERVING, jnp.dtype(BF16), activations, ONE_DEVICE, backend)
        return np.asarray(jax.block_until_ready(experts(*args)))

    backend = Pallas(interpreted=True)
    out = run(backend, "nvfp4")
    assert backend.paths["expert_gemm"] == [path]
    assert "quantize_rows" not in backend.paths
    expected, out = (y.astype(np.float64) for y in (run(XLA, "bf16"), out))
    assert np.sqrt(np.mean((out - expected) ** 2)) <= 2.0**-8 * np.sqrt(np.mean(expected**2))


def test_only_bf16_experts_are_fused():
    assert Pallas().fuses_experts(jnp.zeros((4, 64, 64), BF16))
    assert not Pallas().fuses_experts(jnp.zeros((4, 64, 64), jnp.float32))


def test_shapes_are_those_of_a_rank():
    table = {tensor.spec.path[-1]: tensor for tensor in packed_tensors(MUSE_SPARK_OPEN, 8)}
    for shape in shapes.SHAPES:
        matrices = (2,) if shape.matrices == 2 else ()
        assert table[shape.name].shape == (shape.experts, *matrices, shape.out_rows, shape.k)
    assert shapes.GATE_UP.num_bytes == pytest.approx(49 * 2 * 512 * 4096 * 2, rel=0.01)
    assert shapes.DOWN.num_bytes == pytest.approx(49 * 512 * 4096 * 2, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(shapes.cases()), ids=lambda case: case.name)
def test_kernel_on_a_gpu(case, rng):
    args = case.arguments(rng)
    run = jax.jit(case.kernel)
    out = run(*args)
    shapes.check(out, jax.jit(case.reference)(*args))
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(run(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
