"""`combine` as a rank of eight runs it: on whole rows, and on an eighth of each with the sums of squares that ranks add up."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, check_rounded, nbytes, normal
from pallas_kernels.combine import reference
from pallas_kernels.combine.kernel import Combine, combine

M, TOP_K, RANKS = 4096, 8, 8
ROWS = (16, 32)
EPS = 1e-8
# 4096 squares in another order, rsqrt, products; eight terms, which may cancel.
RELATIVE_ERROR = 2.0**-20


def cases(rows: tuple[int, ...] = ROWS, m: int = M, top_k: int = TOP_K, warpgroups: int = 4) -> Iterator[Case]:
    piece = m // RANKS

    def whole(rows, weights, norm_weight, interpret=None):
        return combine(rows, weights, norm_weight, Combine(EPS, m, warpgroups), interpret=interpret)

    def of_piece(rows, weights, norm_weight, total, interpret=None):
        return combine(rows, weights, norm_weight, Combine(EPS, m, warpgroups=1), total, interpret)

    def plain(rows, weights, norm_weight, total=None):
        return reference.combine(rows, weights, norm_weight, EPS, total, m)

    for t in rows:

        def arguments(rng: np.random.Generator, n: int, t=t) -> tuple:
            weights = rng.random((t, top_k), np.float32) + 0.1
            weights /= weights.sum(axis=1, keepdims=True)
            return normal(rng, (t, top_k, n), jnp.bfloat16, 2), weights, normal(rng, (n,), jnp.bfloat16, 0.1)

        def arguments_of_piece(rng: np.random.Generator, t=t, arguments=arguments) -> tuple:
            return *arguments(rng, piece), m * (4 + rng.random((t, top_k), np.float32))

        def size(n: int, t=t) -> int:
            return nbytes(((t, top_k + 1, n), jnp.bfloat16), ((t, top_k), jnp.float32), ((n,), jnp.bfloat16))

        yield Case(f"combine[{t}]", whole, plain, lambda rng, arguments=arguments: arguments(rng, m), size(m))
        yield Case(f"combine[piece,{t}]", of_piece, plain, arguments_of_piece, size(piece) + 4 * t * top_k)


def check(actual: jax.Array, expected: jax.Array) -> None:
    check_rounded(actual, expected, RELATIVE_ERROR)
