"""`route` as every rank runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes, normal
from pallas_kernels.route.kernel import Route, route
from pallas_kernels.route.reference import route as reference

EXPERTS = 256
ROWS = (16, 32)
CONFIG = Route(top_k=8, multiplier=0.1767766952966369, scaling=1.0)
RELATIVE_ERROR = 2.0**-20  # eight terms in another order, exponential, reciprocal, quotient


def cases(rows: tuple[int, ...] = ROWS, experts: int = EXPERTS, config: Route = CONFIG) -> Iterator[Case]:
    def kernel(logits, bias, interpret=None):
        return route(logits, bias, config, interpret)

    def plain(logits, bias):
        return reference(logits, bias, config.top_k, config.multiplier, config.scaling)

    for t in rows:

        def arguments(rng: np.random.Generator, t=t) -> tuple:
            return normal(rng, (t, experts), np.float32, 10), normal(rng, (experts,), np.float32, 0.1)

        size = nbytes(((t + 1, experts), jnp.float32), ((t, 2 * config.top_k), jnp.float32))
        yield Case(f"route[{t}]", kernel, plain, arguments, size)


def check(actual: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array]) -> None:
    """Ids are equal: random scores are further apart than an exponential is wrong, but for one in ten thousand rows."""
    (idx, weights), (expected_idx, expected_weights) = actual, expected
    assert idx.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(idx), np.asarray(expected_idx))
    np.testing.assert_allclose(np.asarray(weights), np.asarray(expected_weights), rtol=RELATIVE_ERROR, atol=0)
