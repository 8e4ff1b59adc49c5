"""`lattice` as a device runs it that has its codebooks whole, and `lattice_of_rows` where devices share them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes, normal
from pallas_kernels.lattice import reference
from pallas_kernels.lattice.kernel import Lattice, lattice, lattice_of_rows

TOP_K, RANK = 16, 256
VOCABULARY = 202_048 // 8  # enough that nothing is read twice
# Sequences, positions.
SHAPES = ((1, 15), (1, 7), (4, 15))
# Sums of RANK terms are drawn with a standard deviation of 1, so that they, and sums of some of the terms, are below 8 = 2^3.
# Every addition rounds by up to 2^-25 of a number that is below 8, and no term is in more than 256 of them: as such roundings
# have either sign, they add up to some sqrt(256) = 2^4 of one: 2^-18 on either side, 2^-17. TF32 would be 2^-11 off.
ERROR = 2.0**-17


def cases(
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    top_k: int = TOP_K,
    rank: int = RANK,
    vocabulary: int = VOCABULARY,
    before: int = 4,
) -> Iterator[Case]:
    config = Lattice(before)

    def of_codebooks(*args, interpret=None):
        return lattice(*args, config, interpret)

    def of_rows(*args, interpret=None):
        return lattice_of_rows(*args, config, interpret)

    for batch, positions in shapes:

        def per_position(rng: np.random.Generator, batch=batch, positions=positions) -> tuple[np.ndarray, np.ndarray]:
            unary = normal(rng, (batch, positions, top_k), np.float32)
            return normal(rng, (batch, positions, rank), np.float32, rank**-0.5), unary

        def arguments(rng: np.random.Generator, batch=batch, positions=positions, per_position=per_position) -> tuple:
            projected, unary = per_position(rng)
            anchor = rng.integers(vocabulary, size=batch).astype(np.int32)
            ids = rng.integers(vocabulary, size=(batch, positions, top_k)).astype(np.int32)
            return projected, anchor, ids, unary, *(normal(rng, (vocabulary, rank), jnp.bfloat16) for _ in range(2))

        def arguments_of_rows(rng: np.random.Generator, batch=batch, positions=positions, per_position=per_position) -> tuple:
            projected, unary = per_position(rng)
            before, rows = (normal(rng, (batch, positions, top_k, rank), jnp.bfloat16) for _ in range(2))
            return projected, before, rows, unary

        size = nbytes(
            ((batch, positions, rank), jnp.float32),
            ((2, batch, positions, top_k, rank), jnp.bfloat16),
            ((batch, positions, top_k), jnp.float32),
            ((batch, positions, top_k, top_k), jnp.float32),
        )
        ids_bytes = nbytes(((batch, positions, top_k), jnp.int32), ((batch,), jnp.int32))
        yield Case(f"lattice[{batch}x{positions}]", of_codebooks, reference.lattice, arguments, size + ids_bytes)
        yield Case(f"lattice[rows,{batch}x{positions}]", of_rows, reference.lattice_of_rows, arguments_of_rows, size)


def check(actual: jax.Array, expected: jax.Array) -> None:
    assert actual.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=ERROR)
