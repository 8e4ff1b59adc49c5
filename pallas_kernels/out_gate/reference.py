"""Norm and gate of attention's output in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import rms, round_to


def out_gate(out: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """rms of each head times sigmoid(gate).

    Args:     out: [T, N, H] fp32, of attention.  gate: [T, N H], rounded to the model's dtype after its GEMM.
    Returns:  [T, N H] of gate's dtype.
    Rounding: fp32; the product once.
    """
    sigmoid = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(out.shape)
    return round_to(rms(out, eps) * sigmoid, gate.dtype).reshape(gate.shape)
