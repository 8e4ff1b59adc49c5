"""The draft's grouped convolution: the kernel interpreted, lowered, and compiled on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.grouped_conv import kernel, reference, shapes
from pallas_kernels.grouped_conv.kernel import GroupedConvConfig, grouped_conv

interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 does not interpret layout_cast")


def tensors(rng, batch, rows, channels, groups, taps, dtype=jnp.float32):
    """z, base, coefficients and residual."""

    def normal(shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    z, base = normal((batch, rows, channels), dtype), normal((2, taps, channels), dtype)
    return z, base, normal((batch, rows, 2, taps, groups)), normal((batch, rows, channels))


def check_near(args, out, side, block_size, dtype):
    """Equal but for the contraction of one product and sum, which moves fp32 by half a unit in the last place of a term, and
    for what that does to a rounding to bfloat16 near a tie."""
    expected = np.asarray(reference.grouped_conv(*args, side=side, block_size=block_size, dtype=dtype), np.float32)
    difference, out = np.abs(np.asarray(out, np.float32) - expected), np.asarray(out, np.float32)
    assert np.all(np.isfinite(out))
    if dtype == jnp.bfloat16:
        assert np.mean(difference > 0) < 1e-3  # a tie is within 2^-15 of one value in 2^-8, and both must be rare together
        np.testing.assert_allclose(out, expected, rtol=2**-7)
    else:
        terms = jax.tree.map(jnp.abs, args)
        magnitude = np.asarray(reference.grouped_conv(*terms, side=side, block_size=block_size))
        assert np.all(difference <= 2**-23 * magnitude)


@interpreted
@pytest.mark.parametrize(
    ("side", "dtype", "taps", "rows"), [(0, jnp.bfloat16, 2, 2), (1, jnp.float32, 2, 4), (1, jnp.float32, 3, 1)]
)
def test_kernel(rng, side, dtype, taps, rows):
    """Two blocks of one sequence: no tap reaches from the second into the first, or before it."""
    z, base, coefficients, residual = tensors(rng, 1, 8, 64 * 16, 64, taps, dtype)
    z = z.at[0, 3].set(jnp.nan)
    args = (z, base, coefficients) + ((residual,) if side else ())
    config, interpret = GroupedConvConfig(rows), compat.interpret_params()
    function = lambda *args: grouped_conv(  # noqa: E731
        *args, side=side, block_size=4, dtype=dtype, config=config, interpret=interpret
    )
    out = jax.jit(function)(*args)
    assert np.all(np.isnan(out[0, 3]))
    clean = (z.at[0, 3].set(0), *args[1:])
    check_near(clean, out.at[0, 3].set(function(*clean)[0, 3]), side, 4, dtype)


def test_refuses_what_does_not_fit(rng):
    def conv(rows=8, block_size=4, groups=64, channels=1024, side=0, taps=2, config=GroupedConvConfig(), **options):  # noqa: B008
        z, base, coefficients, _ = tensors(rng, 1, rows, channels, groups, taps)
        return grouped_conv(z, options.get("base", base), coefficients, side=side, block_size=block_size, config=config)

    for options, error, message in [
        ({"groups": 32}, NotImplementedError, "multiple of 64"),
        ({"channels": 512}, NotImplementedError, "channels"),
        ({"rows": 6}, ValueError, "do not fit"),
        ({"config": GroupedConvConfig(3)}, ValueError, "do not fit"),
        ({"taps": 5}, ValueError, "do not fit"),
        ({"side": 2}, ValueError, "side"),
        ({"base": jnp.zeros((2, 2, 8))}, ValueError, "base must be"),
    ]:
        with pytest.raises(error, match=message):
            conv(**options)
    with pytest.raises(ValueError, match="rows"):
        GroupedConvConfig(0)


@pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])
@pytest.mark.parametrize("shape", shapes.SHAPES[:2], ids=lambda shape: shape.name)
def test_lowers_for_hopper(shape, semantics, monkeypatch):
    """Without a GPU, Mosaic lowers for compute capability 9.0."""
    monkeypatch.setattr(compat, "LOWERING_SEMANTICS", plgpu.LoweringSemantics[semantics])
    args = jax.eval_shape(shape.args, jax.random.key(0))
    lowered = jax.jit(shape.function(kernel)).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
def test_on_a_gpu(shape):
    args = shape.args(jax.random.key(1))
    out = jax.jit(shape.function(kernel))(*args)
    check_near(args, out, shape.side, shapes.BLOCK_SIZE, jnp.float32 if shape.side else jnp.bfloat16)
