"""quantize_rows: NVFP4 quantisation of activations in one kernel, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import nvfp4
from pallas_kernels import compat
from pallas_kernels.quantize_rows import shapes
from pallas_kernels.quantize_rows.kernel import quantize_rows
from pallas_kernels.quantize_rows.reference import quantize_rows as quantize_rows_reference


def hard_rows(rng: np.random.Generator, k: int) -> np.ndarray:
    """Rows with many ties, of zeros, of tiny and huge values, with blocks too small for their row, and with signed zeros."""
    rows = rng.standard_normal((12, k), np.float32)
    rows[0] = 0
    rows[1] = rng.integers(-12, 13, k) / 2
    rows[2] *= 2.0**-99
    rows[3] *= 2.0**-110
    rows[4] *= 2.0**120
    rows[5, : k // 2] *= 2.0**-14
    rows[6] = np.where(rng.random(k) < 0.5, -0.0, rows[6])
    rows[7] = rng.integers(-6, 7, k)
    rows[8, 16:32] *= 1e-5
    rows[9] = 2.0 ** rng.integers(-8, 8, k)
    rows[10] = rng.integers(-2688, 2689, k)
    return rows.astype(jnp.bfloat16)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_reference_is_the_quantiser(rng, jit):
    x = jnp.asarray(hard_rows(rng, 512))
    shapes.check(jit(quantize_rows_reference)(x), jit(nvfp4.quantize_rows)(x))
    amax = 2 * jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1)
    shapes.check(jit(quantize_rows_reference)(x, amax), jit(nvfp4.quantize_rows)(x, amax))


def test_hard_rows(rng):
    x = hard_rows(rng, 512)
    shapes.check(quantize_rows(x, None, 1, compat.interpret_params()), jax.jit(quantize_rows_reference)(x))


def test_nan_stays_nan():
    x = np.ones((2, 512), np.float32).astype(jnp.bfloat16)
    x[1, 3] = np.nan
    _, block_scales, row_scales = quantize_rows(x, None, 1, compat.interpret_params())
    assert np.isnan(np.asarray(row_scales)).tolist() == [False, True]
    assert np.isnan(np.asarray(block_scales).astype(np.float32)).all(axis=1).tolist() == [False, True]


def test_a_newton_step_rounds_every_reciprocal_correctly():
    """All mantissas that the kernel inverts, from approximations one unit to either side and the right one."""
    f = np.float32
    row_scales = (np.arange(128, 256) * f(2.0**-7) * f(1 / (6 * 448))).astype(f)
    encode_scales = (1 / row_scales).astype(f)
    e4m3 = np.concatenate([np.arange(8, 16), np.arange(1, 8)]).astype(f)
    xs = np.concatenate([row_scales, encode_scales, np.outer(e4m3, 1 / encode_scales).astype(f).ravel()])
    right = (1 / xs).astype(f)
    for approximate in (right, np.nextafter(right, f(0)), np.nextafter(right, f(np.inf))):
        # In fp64 the products are exact, and so is 1 - x r, as that cancels.
        error = (1 - xs.astype(np.float64) * approximate).astype(f).astype(np.float64)
        np.testing.assert_array_equal((approximate + approximate * error).astype(f), right)


@pytest.mark.gpu
def test_compiled_kernel_on_hard_rows(rng):
    x = hard_rows(rng, 4096)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(quantize_rows_reference)(x)
    shapes.check(jax.jit(quantize_rows)(x), expected)


def test_shapes_that_do_not_fit_are_refused(rng):
    (x,) = next(shapes.cases()).arguments(rng)
    with pytest.raises(NotImplementedError, match="rows of 512"):
        quantize_rows(x[:, :512], None, 4)
    with pytest.raises(ValueError, match="bfloat16 wanted"):
        quantize_rows(x.astype(np.float32))
    with pytest.raises(ValueError, match="largest magnitudes"):
        quantize_rows(x, np.ones(3, np.float32))
