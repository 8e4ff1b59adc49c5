"""The end of a branch in plain jnp: post-norm, residual gate, the norm that feeds the next GEMM."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import one_plus, product, rms, round_to


def gate_factors(gate: jax.Array, temperature: float, floor: float) -> tuple[jax.Array, jax.Array]:
    """alpha and beta of a residual gate: beta = sigmoid(gate / t), alpha^2 = 1 - beta^2, at least `floor`. [D] fp32 each.

    They depend on weights alone: compute them when weights are loaded. A kernel that took the gate would spend more time on
    its two exponentials and root than on the rest, and those would differ from XLA's in the last bit.
    """
    w = gate / temperature
    beta = jax.nn.sigmoid(w)
    return jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-w) * (1.0 + beta), floor)), beta


def blend_norm(
    stream: jax.Array,
    branch: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    next_weight: jax.Array,
    branch_weight: jax.Array | None,
    post_eps: float,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """new = alpha stream + beta rms(branch); rms(new) (1 + next_weight).

    Args:     stream: [T, D] fp32.  branch: [T, D] fp32 or bf16.  alpha, beta: [D] fp32.  next_weight: [D] of the model's
              dtype.  branch_weight: [D], for rms(branch (1 + w)); None for the branch as it is.
    Returns:  new [T, D] fp32, and normed [T, D] of next_weight's dtype.
    Rounding: fp32; both products of the blend on their own, then their sum; the normed rows once.
    """
    branch = branch.astype(jnp.float32)
    if branch_weight is not None:
        branch = branch * one_plus(branch_weight, 2)
    new = product(alpha[None], stream) + product(beta[None], rms(branch, post_eps))
    return new, round_to(rms(new, eps) * one_plus(next_weight, 2), next_weight.dtype)
