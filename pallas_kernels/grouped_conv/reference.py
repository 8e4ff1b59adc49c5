"""Causal convolution over the rows of a block, with a kernel of its own per row and group of channels, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import fp32, product, round_to


def grouped_conv(
    z: jax.Array,
    base: jax.Array,
    coefficients: jax.Array,
    residual: jax.Array | None = None,
    *,
    side: int,
    block_size: int,
    dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """residual + sum over taps of (base + coefficients) times the row `tap` before, of the same block.

    Args:     z: [B, T, D], T a multiple of block_size.  base: [2, taps, D].  coefficients: [B, T, 2, taps, groups] fp32, for
              channels in groups of D / groups.  residual: [B, T, D] fp32.  side: 0 or 1, of base and coefficients.
    Returns:  [B, T, D] of `dtype`, bfloat16 or float32. No tap reaches into another block.
    Rounding: fp32, one rounding to `dtype`.
    """
    batch, rows, channels = z.shape
    taps, groups = coefficients.shape[3:]
    # [B, blocks, rows of a block, groups, channels of a group]
    x = fp32(z).reshape(batch, rows // block_size, block_size, groups, channels // groups)
    kernel = fp32(base)[side].reshape(taps, 1, 1, 1, *x.shape[3:])
    delta = coefficients[:, :, side].reshape(*x.shape[:3], taps, groups, 1)
    out = jnp.zeros_like(x)
    for tap in range(taps):
        shifted = jnp.pad(x[:, :, : block_size - tap], ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))
        out = out + product(kernel[tap] + delta[:, :, :, tap], shifted)
    out = out.reshape(z.shape)
    return round_to(out if residual is None else residual + out, dtype)
