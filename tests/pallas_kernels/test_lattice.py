"""lattice: scores of every candidate after every candidate of the position before in one kernel."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.draft import DFlash2
from muse_jax.sampling import UNCUT
from pallas_kernels import compat
from pallas_kernels.lattice import Lattice, lattice, lattice_of_rows, lattice_reference, shapes

SMALL = {"shapes": ((1, 1), (2, 3)), "vocabulary": 100}


def each(**settings) -> list:
    return [pytest.param(case, id=case.name) for case in shapes.cases(**settings)]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_is_what_the_draft_does(rng, dtype, jit):
    batch, positions, top_k, rank, vocab, width = 2, 3, 4, 8, 50, 16

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

    draft = types.SimpleNamespace(
        selector_ranks=UNCUT,
        vocab_ranks=UNCUT,
        selector_projection=weight(rank, width),
        predecessor_codebook=weight(vocab, rank),
        successor_codebook=weight(vocab, rank),
    )
    hidden, unary = weight(batch, positions, width), weight(batch, positions, top_k).astype(jnp.float32)
    anchor, ids = (jnp.asarray(rng.integers(vocab, size=s), jnp.int32) for s in (batch, (batch, positions, top_k)))

    def reference(hidden, anchor, ids, unary):
        projected = ops.linear(hidden, draft.selector_projection)
        return lattice_reference(projected, anchor, ids, unary, draft.predecessor_codebook, draft.successor_codebook)

    actual = jit(reference)(hidden, anchor, ids, unary)
    expected = jit(functools.partial(DFlash2.lattice, draft))(hidden, anchor, ids, unary)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.parametrize("case", each(**SMALL) + each(**SMALL | {"shapes": ((1, 2),), "top_k": 32, "before": 16}))
def test_interpreted_kernel_is_close_to_the_reference(case, rng):
    args = case.arguments(rng)
    kernel = jax.jit(functools.partial(case.kernel, interpret=compat.interpret_params()))
    shapes.check(kernel(*args), jax.jit(case.reference)(*args))


@pytest.mark.parametrize(("number", "rank"), [(0, 256), (1, 32)], ids=["codebooks", "rows"])
def test_rows_of_fp32(rng, number, rank):
    case = list(shapes.cases(((1, 2),), rank=rank, vocabulary=40))[number]
    args = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in case.arguments(rng)]
    shapes.check(case.kernel(*args, interpret=compat.interpret_params()), case.reference(*map(jnp.asarray, args)))
    assert "mosaic_gpu" in jax.jit(case.kernel).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_each_score_is_of_its_own_pair():
    """Rows that name their candidates: before has i + 1 in column i, rows have 100 p + j everywhere."""
    before = np.zeros((1, 2, 16, 32), np.float32)
    before[:, :, range(16), range(16)] = np.arange(1, 17)
    rows = np.broadcast_to((100 * np.arange(2)[:, None] + np.arange(16))[None, :, :, None], (1, 2, 16, 32)).astype(np.float32)
    unary = 1e6 * np.broadcast_to(np.arange(16, dtype=np.float32), (1, 2, 16))
    out = lattice_of_rows(np.ones((1, 2, 32), np.float32), before, rows, unary, interpret=compat.interpret_params())
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
    of_codebooks, of_rows = shapes.cases(((1, 2),), vocabulary=40)
    projected, anchor, ids, unary, *tables = of_codebooks.arguments(rng)
    with pytest.raises(ValueError, match="anchor must be int32"):
        lattice(projected, anchor[:0], ids, unary, *tables)
    with pytest.raises(ValueError, match="codebooks of bfloat16 and float32"):
        lattice(projected, anchor, ids, unary, tables[0], tables[1].astype(np.float32))
    with pytest.raises(ValueError, match="3 of 16"):
        lattice(projected, anchor, ids, unary, *tables, Lattice(3))
    with pytest.raises(NotImplementedError, match="rank 128"):
        lattice(projected[:, :, :128], anchor, ids, unary, *(x[:, :128] for x in tables))
    projected, before, rows, unary = of_rows.arguments(rng)
    with pytest.raises(ValueError, match="before must be bfloat16 or float32"):
        lattice_of_rows(projected, before[:, :1], rows, unary)
    with pytest.raises(NotImplementedError, match="rows of 24"):
        lattice_of_rows(projected[:, :, :24], before[..., :24], rows[..., :24], unary)
    with pytest.raises(NotImplementedError, match="8 candidates"):
        lattice_of_rows(projected, before[:, :, :8], rows[:, :, :8], unary[:, :, :8])
