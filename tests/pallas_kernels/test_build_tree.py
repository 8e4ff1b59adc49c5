"""build_tree: the tree of the likeliest paths in one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.build_tree import shapes
from pallas_kernels.build_tree.kernel import build_tree
from pallas_kernels.build_tree.reference import build_tree as build_tree_reference

KINDS = ("random", "ties", "no_paths", "few_paths", "infinite", "nan", "zeros", "certain")
# Positions, candidates, nodes: a whole block; the most nodes, after the last position too; K that does not divide 32, and K of
# which one or eight fit into 32.
SMALL = ((15, 16, 16), (2, 16, 32), (4, 12, 9), (2, 32, 6), (9, 4, 12))


def draw(rng: np.random.Generator, kind: str, batch: int, positions: int, top_k: int) -> tuple[np.ndarray, ...]:
    anchor, ids, log_probs = shapes.draw(rng, batch, positions, top_k)
    chance = rng.random(log_probs.shape)
    if kind == "ties":
        log_probs = np.round(2 * log_probs) / 2
    elif kind == "no_paths":
        log_probs[chance < 0.5] = -np.inf
    elif kind == "few_paths":
        log_probs[chance < 0.95] = -np.inf
    elif kind == "infinite":
        log_probs[chance < 0.05] = np.inf
        log_probs[chance > 0.9] = -np.inf
    elif kind == "nan":
        log_probs[chance < 0.03] = np.nan
        log_probs[chance > 0.97] = -np.float32(np.nan)
    elif kind == "zeros":
        log_probs = np.where(chance < 0.2, 0, np.where(chance < 0.4, -0.0, log_probs)).astype(np.float32)
    elif kind == "certain":
        log_probs = np.where(np.arange(top_k) == rng.integers(top_k, size=(*log_probs.shape[:-1], 1)), 0, -np.inf)
        log_probs = log_probs.astype(np.float32)
    return anchor, ids, log_probs


def draw_all(rng: np.random.Generator, batch: int, positions: int, top_k: int) -> list[np.ndarray]:
    """`batch` sequences of each kind."""
    return [np.concatenate(x) for x in zip(*[draw(rng, kind, batch, positions, top_k) for kind in KINDS], strict=True)]


@pytest.mark.parametrize(("positions", "top_k", "size"), SMALL)
def test_interpreted_kernel_builds_the_same_trees(rng, positions, top_k, size):
    args = draw_all(rng, 1, positions, top_k)
    kernel = jax.jit(functools.partial(build_tree, size=size, interpret=compat.interpret_params(detect_races=False)))
    shapes.check(kernel(*args), build_tree_reference(*map(jnp.asarray, args), size))


def test_interpreted_kernel_has_no_races(rng):
    [case] = shapes.cases(((2, 4, 5),))
    args = case.arguments(rng)
    shapes.check(jax.jit(functools.partial(case.kernel, interpret=compat.interpret_params()))(*args), case.reference(*args))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in shapes.cases()])
def test_kernel_is_lowered_for_cuda(case, rng):
    text = jax.jit(case.kernel).trace(*case.arguments(rng)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in shapes.cases()])
def test_compiled_kernel_builds_the_same_trees(case, rng):
    args = case.arguments(rng)
    shapes.check(jax.jit(case.kernel)(*args), jax.jit(case.reference)(*args))


@pytest.mark.gpu
@pytest.mark.parametrize(("positions", "top_k", "size"), (*SMALL, (15, 32, 32)))
def test_compiled_kernel_builds_the_same_trees_of_all_kinds(rng, positions, top_k, size):
    args = draw_all(rng, 500, positions, top_k)
    actual = jax.jit(functools.partial(build_tree, size=size))(*args)
    shapes.check(actual, jax.jit(functools.partial(build_tree_reference, size=size))(*args))


def test_shapes_that_do_not_fit_are_refused(rng):
    anchor, ids, log_probs = shapes.draw(rng, 2, 3, 16)
    for size in (1, 33):
        with pytest.raises(NotImplementedError, match=f"{size} nodes"):
            build_tree(anchor, ids, log_probs, size)
    for positions, top_k in ((3, 6), (1, 64), (3, 8)):
        with pytest.raises(NotImplementedError, match=f"{positions} positions of {top_k}"):
            build_tree(*shapes.draw(rng, 2, positions, top_k), 4)
    with pytest.raises(ValueError, match="anchor"):
        build_tree(anchor[:1], ids, log_probs, 4)
    with pytest.raises(ValueError, match=r"ids must be int32.* got int64"):
        build_tree(anchor, ids.astype(np.int64), log_probs, 4)
    with pytest.raises(ValueError, match="log_probs"):
        build_tree(anchor, ids, log_probs[:, :, :4], 4)
