"""Rounding and norms of the references, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds fp32 values to bfloat16 or float32, nearest-even. XLA may drop a plain fp32 -> bf16 -> fp32 pair."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, rounded on its own where it is a term of a sum.

    XLA and LLVM may contract a product and a sum to one rounding, and of two products they take either, depending on the code
    around them. A comparison in between keeps them from that.
    """
    xy = x * y
    return lax.select(xy == xy, xy, lax.full_like(xy, jnp.nan))


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis. x: fp32."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def one_plus(weight: jax.Array, ndim: int) -> jax.Array:
    """1 + w in fp32, [n] -> [1, ..., 1, n]."""
    return lax.expand_dims(1.0 + weight.astype(jnp.float32), range(ndim - 1))
