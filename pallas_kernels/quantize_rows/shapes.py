"""`quantize_rows` as a rank of eight runs it: on pooled rows, and on its part of the hidden rows of eight experts each."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes, normal
from pallas_kernels.quantize_rows.kernel import quantize_rows
from pallas_kernels.quantize_rows.reference import BLOCK
from pallas_kernels.quantize_rows.reference import quantize_rows as reference

K, TOP_K, RANKS = 4096, 8, 8
ROWS = (16, 32)

EXACT_DIVISIONS = True  # results are bits: the reference must not run where divisions are approximated


def cases(rows: tuple[int, ...] = ROWS, k: int = K, warpgroups: int = 4) -> Iterator[Case]:
    """Compare with the reference on a CPU: XLA for GPUs approximates reciprocals, and so may differ."""

    def whole(x, interpret=None):
        return quantize_rows(x, None, warpgroups, interpret)

    def of_piece(x, amax, interpret=None):
        return quantize_rows(x, amax, 1, interpret)

    for t in rows:

        def arguments(rng: np.random.Generator, t=t) -> tuple:
            return (normal(rng, (t, k), jnp.bfloat16),)

        def arguments_of_piece(rng: np.random.Generator, t=t) -> tuple:
            x = normal(rng, (t * TOP_K, k // RANKS), jnp.bfloat16)
            return x, np.max(np.abs(x), axis=1).astype(np.float32) * rng.integers(1, 3, t * TOP_K).astype(np.float32)

        def size(t: int, k: int) -> int:
            codes_and_scales = ((t, k // 2), jnp.uint8), ((t, k // BLOCK), jnp.uint8), ((t,), jnp.float32)
            return nbytes(((t, k), jnp.bfloat16), *codes_and_scales)

        yield Case(f"quantize_rows[{t}]", whole, reference, arguments, size(t, k))
        piece_size = size(t * TOP_K, k // RANKS) + 4 * t * TOP_K
        yield Case(f"quantize_rows[piece,{t}]", of_piece, reference, arguments_of_piece, piece_size)


def check(actual: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    """Bit for bit."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
