"""Dense products of a decode step in plain jnp."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import round_to


def dense(x: jax.Array, weights: Sequence[jax.Array], out_dtype: jnp.dtype = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """x W^T for each of several matrices.

    Args:     x: [R, K] bfloat16 or float32.  weights: each [N, K], same dtype; N may differ.  out_dtype: bfloat16 or float32.
    Returns:  for each matrix [R, N].
    Rounding: from the fp32 accumulator, once; float32 is the accumulator itself.
    """
    return tuple(round_to(_contract(x, weight), out_dtype) for weight in weights)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(x gate^T) (x up^T).

    Args:     x: [R, K] bfloat16 or float32.  gate, up: [N, K], same dtype.
    Returns:  [R, N] of x's dtype.
    Rounding: the product alone, from fp32 accumulators.
    """
    gate, up = _contract(x, gate), _contract(x, up)
    return round_to(gate * jax.nn.sigmoid(gate) * up, x.dtype)


def _contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    # HIGHEST: float32 operands may otherwise go through TF32 on a GPU. It changes nothing for bfloat16.
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
