"""Post-expert norm and weighted sum of routed rows in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import one_plus, round_to


def combine(
    rows: jax.Array,
    weights: jax.Array,
    norm_weight: jax.Array,
    eps: float,
    total: jax.Array | None = None,
    width: int | None = None,
) -> jax.Array:
    """sum_k weights_k rms(rows_k (1 + w)).

    Args:     rows: [T, top_k, m], down projections, rounded to the model's dtype.  weights: [T, top_k] fp32.  norm_weight: [m].
              total, width: where rows are pieces of rows of `width` values, the sums of the squares of the whole scaled rows,
              [T, top_k] fp32; None where rows are whole.
    Returns:  [T, m] of rows' dtype.
    Rounding: fp32; the sum once.
    """
    scaled = _scaled(rows, norm_weight)
    mean = jnp.mean(scaled * scaled, axis=-1, keepdims=True) if total is None else total[..., None] / width
    normed = scaled * lax.rsqrt(mean + eps)
    return round_to(jnp.sum(normed * weights[..., None], axis=1), rows.dtype)


def _scaled(rows: jax.Array, norm_weight: jax.Array) -> jax.Array:
    return rows.astype(jnp.float32) * one_plus(norm_weight, 3)
