"""The GEMMs of routed experts with bf16 weights, in plain jnp: one routed row after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_gemm.reference import dense, swiglu


def gate_up(x: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
    """silu(gate) up of each routed row.

    Args:     x: [R, K] bfloat16 or float32.  idx: [R, top_k] int32, expert ids.  weights: [E, 2, F, K] of x's dtype, gate and
              up.
    Returns:  [R, top_k, F] of x's dtype.
    Rounding: from fp32 accumulators, once.
    """
    return _each(lambda row, matrices: swiglu(row, matrices[0], matrices[1]), jnp.repeat(x, idx.shape[1], axis=0), idx, weights)


def down(hidden: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
    """Each routed row times its expert's matrix.

    Args:     hidden: [R, top_k, K] bfloat16 or float32.  idx: [R, top_k] int32.  weights: [E, N, K] of hidden's dtype.
    Returns:  [R, top_k, N] of hidden's dtype.
    Rounding: from the fp32 accumulator, once.
    """
    rows = hidden.reshape(idx.size, hidden.shape[-1])
    return _each(lambda row, matrix: dense(row, [matrix], row.dtype)[0], rows, idx, weights)


def _each(function, rows: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
    """function(row [1, K], weights of its expert) for each routed row."""

    def one(routed: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, expert = routed
        return function(row[None], lax.dynamic_index_in_dim(weights, expert, keepdims=False))[0]

    return lax.map(one, (rows, idx.reshape(-1))).reshape(*idx.shape, -1)
