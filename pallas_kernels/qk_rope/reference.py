"""Norm and RoPE of queries and keys in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product, rms, round_to


def qk_rope(q: jax.Array, k: jax.Array, tables: tuple[jax.Array, jax.Array] | None, eps: float) -> tuple[jax.Array, jax.Array]:
    """rms of each head, then the pairs (x_j, x_{j + H/2}) rotated.

    Args:     q: [T, N, H] and k: [T, K, H], rounded to the model's dtype after their GEMMs.  tables: cos and sin of the rows'
              angles, [T, H/2] fp32; None without RoPE.
    Returns:  q [T, N, H], and k in the order of the cache, [K, T, H]; of the model's dtype.
    Rounding: fp32; the four products on their own, then their sums; the result once.
    """
    heads, dtype = q.shape[1], q.dtype
    qk = rms(jnp.concatenate([q, k], axis=1).astype(jnp.float32), eps)
    if tables is not None:
        cos, sin = (table[:, None, :] for table in tables)
        first, second = jnp.split(qk, 2, axis=-1)
        rotated = [product(first, cos) + product(-second, sin), product(second, cos) + product(first, sin)]
        qk = jnp.concatenate(rotated, axis=-1)
    q, k = jnp.split(round_to(qk, dtype), [heads], axis=1)
    return q, k.transpose(1, 0, 2)
