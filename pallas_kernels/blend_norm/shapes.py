"""`blend_norm` as a rank of eight runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blend_norm.kernel import BlendNorm, blend_norm
from pallas_kernels.blend_norm.reference import blend_norm as reference
from pallas_kernels.cases import Case, check_rounded, nbytes, normal

D = 8192
ROWS = (16, 32)
POST_EPS, EPS = 1e-8, 1e-5
# Of a norm whose sum has another order: a tree of 8192 squares is within 14 roundings of 2^-24 of any other; the root halves
# what is left of them; then rsqrt and four more operations.
RELATIVE_ERROR = 2.0**-21


def cases(rows: tuple[int, ...] = ROWS, d: int = D, warpgroups: int = 4) -> Iterator[Case]:
    config = BlendNorm(POST_EPS, EPS, warpgroups)

    def kernel(*args, interpret=None):
        return blend_norm(*args, config, interpret)

    for t in rows:
        for name, dtype, scaled in (("post_attn", jnp.float32, False), ("post_ffn", jnp.bfloat16, True)):

            def arguments(rng: np.random.Generator, t=t, dtype=dtype, scaled=scaled) -> tuple:
                beta = 1 / (1 + np.exp(-normal(rng, (d,), np.float32)))
                weights = [normal(rng, (d,), jnp.bfloat16, 0.1) for _ in range(2)]
                stream, branch = normal(rng, (t, d), np.float32, 3), normal(rng, (t, d), dtype, 5)
                return stream, branch, np.sqrt(1 - beta**2), beta, weights[0], weights[1] if scaled else None

            vectors = [((d,), jnp.float32)] * 2 + [((d,), jnp.bfloat16)] * (1 + scaled)
            size = nbytes(*[((t, d), x) for x in (jnp.float32, dtype, jnp.float32, jnp.bfloat16)], *vectors)
            yield Case(f"blend_norm[{name},{t}]", kernel, lambda *args: reference(*args, POST_EPS, EPS), arguments, size)


def check(actual: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array]) -> None:
    (new, normed), (expected_new, expected_normed) = actual, expected
    new, expected_new = np.asarray(new), np.asarray(expected_new)
    # Terms of the blend may cancel, so the error is one of the row's largest value.
    error = np.abs(new - expected_new) / np.max(np.abs(expected_new), axis=1, keepdims=True)
    assert new.dtype == np.float32 and error.max() < RELATIVE_ERROR
    # What the norm rounds has the errors of the stream, which are larger where terms cancelled.
    check_rounded(normed, expected_normed, 4 * RELATIVE_ERROR)
