"""Dense products of a decode step in plain jnp."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import linear, round_to


def dense(x: jax.Array, weights: Sequence[jax.Array], out_dtype: jnp.dtype = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """x W^T for each of several matrices.

    Args:     x: [..., K] bfloat16 or float32.  weights: each [N, K], same dtype; N may differ.  out_dtype: bfloat16 or float32.
    Returns:  for each matrix [..., N].
    Rounding: from the fp32 accumulator, once; float32 is the accumulator itself.
    """
    return tuple(round_to(linear(x, weight), out_dtype) for weight in weights)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(x gate^T) (x up^T).

    Args:     x: [R, K] bfloat16 or float32.  gate, up: [N, K], same dtype.
    Returns:  [R, N] of x's dtype.
    Rounding: the product alone, from fp32 accumulators.
    """
    gate, up = linear(x, gate), linear(x, up)
    return round_to(gate * jax.nn.sigmoid(gate) * up, x.dtype)
