"""Scores of every candidate after every candidate of the position before in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import fp32


def lattice(projected: jax.Array, before: jax.Array, rows: jax.Array, unary: jax.Array) -> jax.Array:
    """unary_j + sum_r before_ir projected_r rows_jr.

    Args:     projected: [B, P, R] fp32, of the hidden state of each position.  before, rows: [B, P, K, R] bf16 or fp32, of the
              candidates of the position before and of the position.  unary: [B, P, K] fp32, scores of the candidates alone.
    Returns:  [B, P, K before, K] fp32.
    Rounding: fp32; before projected is rounded, then products with rows are summed.
    """
    left = fp32(before) * projected[:, :, None, :]
    return unary[:, :, None, :] + jnp.einsum("bpir,bpjr->bpij", left, fp32(rows), precision="highest")
