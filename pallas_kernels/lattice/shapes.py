"""The draft of the released model, for tests and the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes, normal
from pallas_kernels.lattice import reference
from pallas_kernels.lattice.kernel import Lattice, lattice

TOP_K, RANK = 16, 256
# Sequences, positions.
SHAPES = ((1, 15), (1, 7), (4, 15))
# Sums of RANK terms are drawn with a standard deviation of 1, so that they, and sums of some of the terms, are below 8 = 2^3.
# Every addition rounds by up to 2^-25 of a number that is below 8, and no term is in more than 256 of them: as such roundings
# have either sign, they add up to some sqrt(256) = 2^4 of one: 2^-18 on either side, 2^-17. TF32 would be 2^-11 off.
ERROR = 2.0**-17


def cases(
    shapes: tuple[tuple[int, int], ...] = SHAPES, top_k: int = TOP_K, rank: int = RANK, before: int = 4
) -> Iterator[Case]:
    def run(*args, interpret=None):
        return lattice(*args, Lattice(before), interpret)

    for batch, positions in shapes:

        def arguments(rng: np.random.Generator, batch=batch, positions=positions) -> tuple:
            projected = normal(rng, (batch, positions, rank), np.float32, rank**-0.5)
            before, rows = (normal(rng, (batch, positions, top_k, rank), jnp.bfloat16) for _ in range(2))
            return projected, before, rows, normal(rng, (batch, positions, top_k), np.float32)

        size = nbytes(
            ((batch, positions, rank), jnp.float32),
            ((2, batch, positions, top_k, rank), jnp.bfloat16),
            ((batch, positions, top_k), jnp.float32),
            ((batch, positions, top_k, top_k), jnp.float32),
        )
        yield Case(f"lattice[{batch}x{positions}]", run, reference.lattice, arguments, size)


def check(actual: jax.Array, expected: jax.Array) -> None:
    assert actual.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=ERROR)
