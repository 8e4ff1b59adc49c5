"""`qk_rope` as a rank of eight runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, check_rounded, nbytes, normal
from pallas_kernels.qk_rope.kernel import qk_rope
from pallas_kernels.qk_rope.reference import qk_rope as reference

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 64
ROWS = (16, 32)
EPS = 1e-5
RELATIVE_ERROR = 2.0**-21  # 64 squares in another order, rsqrt; with RoPE two terms, which may cancel


def cases(rows: tuple[int, ...] = ROWS, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Iterator[Case]:
    def kernel(q, k, tables, interpret=None):
        return qk_rope(q, k, tables, EPS, interpret)

    for t in rows:
        for name in ("rope", "nope"):

            def arguments(rng: np.random.Generator, t=t, name=name) -> tuple:
                q, k = (normal(rng, (t, n, HEAD_DIM), jnp.bfloat16) for n in (heads, kv_heads))
                angles = normal(rng, (t, HEAD_DIM // 2), np.float32, 100)
                return q, k, (np.cos(angles), np.sin(angles)) if name == "rope" else None

            size = 2 * nbytes(((t, heads + kv_heads, HEAD_DIM), jnp.bfloat16))
            size += nbytes(((t, HEAD_DIM), jnp.float32)) if name == "rope" else 0
            yield Case(f"qk_rope[{name},{t}]", kernel, lambda *args: reference(*args, EPS), arguments, size)


def check(actual: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array]) -> None:
    for x, y in zip(actual, expected, strict=True):
        check_rounded(x, y, RELATIVE_ERROR)
