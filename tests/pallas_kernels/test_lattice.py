"""lattice: scores of every candidate after every candidate of the position before in one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.lattice import shapes
from pallas_kernels.lattice.kernel import Lattice, lattice

SMALL = {"shapes": ((1, 1), (2, 3))}


def each(**settings) -> list:
    return [pytest.param(case, id=case.name) for case in shapes.cases(**settings)]


@pytest.mark.parametrize("case", each(**SMALL) + each(**SMALL | {"shapes": ((1, 2),), "top_k": 32, "before": 16}))
def test_interpreted_kernel_is_close_to_the_reference(case, rng):
    args = case.arguments(rng)
    kernel = jax.jit(functools.partial(case.kernel, interpret=compat.interpret_params()))
    shapes.check(kernel(*args), jax.jit(case.reference)(*args))


def test_rows_of_fp32(rng):
    case = next(shapes.cases(((1, 2),), rank=32))
    args = [np.asarray(x, np.float32) for x in case.arguments(rng)]
    shapes.check(case.kernel(*args, interpret=compat.interpret_params()), case.reference(*map(jnp.asarray, args)))
    assert "mosaic_gpu" in jax.jit(case.kernel).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_each_score_is_of_its_own_pair():
    """Rows that name their candidates: before has i + 1 in column i, rows have 100 p + j everywhere."""
    before = np.zeros((1, 2, 16, 32), np.float32)
    before[:, :, range(16), range(16)] = np.arange(1, 17)
    rows = np.broadcast_to((100 * np.arange(2)[:, None] + np.arange(16))[None, :, :, None], (1, 2, 16, 32)).astype(np.float32)
    unary = 1e6 * np.broadcast_to(np.arange(16, dtype=np.float32), (1, 2, 16))
    out = lattice(np.ones((1, 2, 32), np.float32), before, rows, unary, interpret=compat.interpret_params())
    expected = np.arange(1, 17)[:, None] * rows[:, :, None, :, 0] + unary[:, :, None, :]
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.parametrize("case", each())
def test_kernel_is_lowered_for_cuda(case, rng):
    text = jax.jit(case.kernel).trace(*case.arguments(rng)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", each())
def test_compiled_kernel_is_close_to_the_reference(case, rng):
    args = case.arguments(rng)
    shapes.check(jax.jit(case.kernel)(*args), jax.jit(case.reference)(*args))


def test_shapes_that_do_not_fit_are_refused(rng):
    projected, before, rows, unary = next(shapes.cases(((1, 2),))).arguments(rng)
    with pytest.raises(ValueError, match="3 of 16"):
        lattice(projected, before, rows, unary, Lattice(3))
    with pytest.raises(ValueError, match="before must be bfloat16 or float32"):
        lattice(projected, before[:, :1], rows, unary)
    with pytest.raises(ValueError, match="unary must be float32"):
        lattice(projected, before, rows, unary.astype(np.float16))
    with pytest.raises(NotImplementedError, match="rows of 24"):
        lattice(projected[:, :, :24], before[..., :24], rows[..., :24], unary)
    with pytest.raises(NotImplementedError, match="8 candidates"):
        lattice(projected, before[:, :, :8], rows[:, :, :8], unary[:, :, :8])
