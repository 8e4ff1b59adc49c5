"""`build_tree` as every device runs it, on the lattice of a whole block."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.build_tree.kernel import build_tree
from pallas_kernels.build_tree.reference import Tree
from pallas_kernels.build_tree.reference import build_tree as reference
from pallas_kernels.cases import Case, nbytes, normal

TOP_K = 16
# Sequences, positions, nodes with the root.
SHAPES = ((1, 15, 16), (1, 7, 16), (1, 15, 32), (4, 15, 16), (256, 15, 16))
VOCABULARY = 202_048


def draw(rng: np.random.Generator, batch: int, positions: int, top_k: int, scale: float = 2.0) -> tuple[np.ndarray, ...]:
    """anchor, ids and log_probs of random scores, rows of position 0 equal."""
    scores = normal(rng, (batch, positions, top_k, top_k), np.float32, scale)
    scores[:, 0] = scores[:, 0, :1]
    scores -= np.max(scores, axis=-1, keepdims=True)
    log_probs = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    ids = rng.integers(VOCABULARY, size=(batch, positions, top_k)).astype(np.int32)
    return rng.integers(VOCABULARY, size=batch).astype(np.int32), ids, log_probs


def cases(shapes: tuple[tuple[int, int, int], ...] = SHAPES, top_k: int = TOP_K) -> Iterator[Case]:
    for batch, positions, nodes in shapes:

        def kernel(anchor, ids, log_probs, interpret=None, nodes=nodes):
            return build_tree(anchor, ids, log_probs, nodes, interpret)

        def plain(anchor, ids, log_probs, nodes=nodes):
            return reference(anchor, ids, log_probs, nodes)

        def arguments(rng: np.random.Generator, batch=batch, positions=positions) -> tuple:
            return draw(rng, batch, positions, top_k)

        size = nbytes(
            ((batch, positions, top_k, top_k), jnp.float32),
            ((batch, positions * top_k + 1), jnp.int32),
            ((batch, nodes, 4), jnp.int32),
            ((batch, nodes, nodes + 1), jnp.bool_),
        )
        yield Case(f"build_tree[{batch}x{positions},{nodes}]", kernel, plain, arguments, size)


def check(actual: Tree, expected: Tree) -> None:
    """Every bit: sums of the same two numbers, and comparisons. Only the sign of a zero may differ."""
    for name, x, y in zip(Tree._fields, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype, (name, x.dtype)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)
