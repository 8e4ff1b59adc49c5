"""Choice of experts in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

RENORM_EPS = 1e-15  # no config field has it (transformers 5.24.0, MuseSparkTopkRouter)


def route(logits: jax.Array, bias: jax.Array, top_k: int, multiplier: float, scaling: float) -> tuple[jax.Array, jax.Array]:
    """Chooses `top_k` experts per row by sigmoid(logits multiplier) + bias; the bias affects the choice, not the weights.

    Args:     logits: [T, E] fp32, of the router's GEMM.  bias: [E] fp32.
    Returns:  idx [T, top_k] int32, best first, ties to the lowest id; weights [T, top_k] fp32, sum `scaling`.
    Rounding: fp32 throughout.
    """
    scores = jax.nn.sigmoid(logits * multiplier)
    _, idx = lax.top_k(scores + bias[None, :], top_k)
    chosen = jnp.take_along_axis(scores, idx, axis=-1)
    return idx, chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + RENORM_EPS) * scaling
