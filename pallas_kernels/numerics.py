"""Rounding, norms and products of the references, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds fp32 values to `dtype` (bfloat16 or float32), nearest-even.

    The rounding is forced: XLA may drop a plain fp32 -> bf16 -> fp32 pair (xla_allow_excess_precision).
    """
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, rounded on its own where it is a term of a sum.

    A compiler may contract a product and a sum to one rounding (XLA and LLVM do, on CPUs and GPUs), and of two products that
    are added it takes either, depending on the code around them. A comparison between the two keeps it from that.
    """
    xy = x * y
    return lax.select(xy == xy, xy, lax.full_like(xy, jnp.nan))


def fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def linear(x: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """x W^T with fp32 accumulation.

    Args:     x: [..., in].  weight_oi: [out, in], same dtype.
    Returns:  [..., out] fp32, not rounded.
    """
    # HIGHEST: float32 operands may otherwise go through TF32 on a GPU. It changes nothing for bfloat16.
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight_oi, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, fp32."""
    x = fp32(x)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def one_plus(weight: jax.Array, ndim: int) -> jax.Array:
    """1 + w in fp32, [n] -> [1, ..., 1, n]."""
    return lax.expand_dims(1.0 + fp32(weight), range(ndim - 1))
