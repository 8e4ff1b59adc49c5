"""`quantize_rows` as a rank of eight runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes, normal
from pallas_kernels.quantize_rows.kernel import quantize_rows
from pallas_kernels.quantize_rows.reference import BLOCK
from pallas_kernels.quantize_rows.reference import quantize_rows as reference

K = 4096
ROWS = (16, 32)


def cases(rows: tuple[int, ...] = ROWS, k: int = K, warpgroups: int = 4) -> Iterator[Case]:
    """Compare with the reference on a CPU: XLA for GPUs approximates reciprocals, and so may differ."""

    def kernel(x, interpret=None):
        return quantize_rows(x, warpgroups, interpret)

    for t in rows:

        def arguments(rng: np.random.Generator, t=t) -> tuple:
            return (normal(rng, (t, k), jnp.bfloat16),)

        size = nbytes(((t, k), jnp.bfloat16), ((t, k // 2), jnp.uint8), ((t, k // BLOCK), jnp.uint8), ((t,), jnp.float32))
        yield Case(f"quantize_rows[{t}]", kernel, reference, arguments, size)


def check(actual: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    """Bit for bit."""
    for x, y in zip(actual, expected, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
