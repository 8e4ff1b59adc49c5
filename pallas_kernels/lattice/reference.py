"""Scores of every candidate after every candidate of the position before in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lattice(
    projected: jax.Array, anchor: jax.Array, ids: jax.Array, unary: jax.Array, predecessor: jax.Array, successor: jax.Array
) -> jax.Array:
    """`lattice_of_rows` with the rows of whole codebooks.

    Args:     anchor: [B] int32, the token before position 0.  ids: [B, P, K] int32, candidates of each position.
              predecessor, successor: [V, R] bf16 or fp32; ids are below V.  Others and result: as `lattice_of_rows`.
    """
    first = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, ids.shape[2]))
    before = jnp.concatenate([first, ids[:, :-1]], axis=1)
    return lattice_of_rows(projected, predecessor[before], successor[ids], unary)


def lattice_of_rows(projected: jax.Array, before: jax.Array, rows: jax.Array, unary: jax.Array) -> jax.Array:
    """unary_j + sum_r before_ir projected_r rows_jr.

    Args:     projected: [B, P, R] fp32, of the hidden state of each position.  before, rows: [B, P, K, R] bf16 or fp32, of the
              candidates of the position before and of the position.  unary: [B, P, K] fp32, scores of the candidates alone.
    Returns:  [B, P, K before, K] fp32.
    Rounding: fp32; before projected is rounded, then products with rows are summed.
    """
    left = before.astype(jnp.float32) * projected[:, :, None, :]
    return unary[:, :, None, :] + jnp.einsum("bpir,bpjr->bpij", left, rows.astype(jnp.float32), precision="highest")
