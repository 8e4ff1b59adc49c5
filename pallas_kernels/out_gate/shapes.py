"""`out_gate` as a rank of eight runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, check_rounded, nbytes, normal
from pallas_kernels.out_gate.kernel import out_gate
from pallas_kernels.out_gate.reference import out_gate as reference

HEADS, HEAD_DIM = 16, 64
ROWS = (16, 32)
EPS = 1e-5
RELATIVE_ERROR = 2.0**-20  # 64 squares in another order, rsqrt, exponential, reciprocal


def cases(rows: tuple[int, ...] = ROWS, heads: int = HEADS) -> Iterator[Case]:
    def kernel(out, gate, interpret=None):
        return out_gate(out, gate, EPS, interpret)

    for t in rows:

        def arguments(rng: np.random.Generator, t=t) -> tuple:
            return normal(rng, (t, heads, HEAD_DIM), np.float32), normal(rng, (t, heads * HEAD_DIM), jnp.bfloat16, 3)

        size = nbytes(*[((t, heads, HEAD_DIM), dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.bfloat16)])
        yield Case(f"out_gate[{t}]", kernel, lambda *args: reference(*args, EPS), arguments, size)


def check(actual: jax.Array, expected: jax.Array) -> None:
    check_rounded(actual, expected, RELATIVE_ERROR)
