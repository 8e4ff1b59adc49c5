"""NVFP4 quantisation of rows of activations in plain jnp.

    value = e2m1(code) * e4m3(block scale) * row scale

Codes and scales are bits, so the reference is one operation after another in IEEE fp32, and barriers keep XLA from rewriting
products and reciprocals, which moves ties.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 16  # values of a row that share a scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_EXPONENT_OF_1_TWICE = 254 << 23  # minus the bits of a power of two: those of its inverse
MIN_ROW_AMAX = 2.0**-100  # a row below this is a row of zeros: from there on, reciprocals are normal fp32 numbers


def quantize_rows(x: jax.Array, amax: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds each row to NVFP4 with a scale of its own, amax / (6 * 448).

    Args:     x: [T, K] bf16.  amax: [T] fp32, the largest magnitudes of the rows that x is cut from; None where x is whole.
    Returns:  codes [T, K/2] uint8, byte j with value 2j in its low and value 2j + 1 in its high half; block scales [T, K/16]
              float8_e4m3fn; row scales [T] fp32, which multiply. A row of zeros has codes and scales 0, as has a block too
              small for the row's scale. NaN gives NaN scales.
    Rounding: nearest-even.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    block_amax = jnp.max(jnp.abs(blocks), axis=-1)
    scale_of_row = row_scale(jnp.max(block_amax, axis=-1) if amax is None else amax)
    scale, reciprocal = block_scales(block_amax, scale_of_row[..., None])
    codes = jnp.where(scale[..., None] == 0, 0, e2m1(blocks * reciprocal[..., None])).reshape(x.shape)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(jnp.uint8), scale.astype(jnp.float8_e4m3fn), scale_of_row


def row_scale(amax: jax.Array) -> jax.Array:
    """The scale of a row with this largest magnitude."""
    return jnp.where(amax < MIN_ROW_AMAX, 0.0, amax * (1 / (E2M1_MAX * E4M3_MAX)))


def block_scales(
    amax: jax.Array, row_scale: jax.Array, reciprocal: Callable[[jax.Array], jax.Array] = lambda x: 1 / x
) -> tuple[jax.Array, jax.Array]:
    """e4m3 scales of blocks with these largest magnitudes, as fp32, and what their values are multiplied by."""
    encode_scale = lax.optimization_barrier(reciprocal(jnp.where(row_scale == 0, 1.0, row_scale)))
    sixth = lax.optimization_barrier(amax * (1 / E2M1_MAX))
    scale = nearest_e4m3(jnp.minimum(encode_scale * sixth, E4M3_MAX))
    return scale, reciprocal(jnp.where(scale == 0, 1.0, scale) * reciprocal(encode_scale))


def nearest_e4m3(x: jax.Array) -> jax.Array:
    """The nearest e4m3 value of fp32 numbers from 0 to 448, ties to even, as fp32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)  # of two, at most x
    step = jnp.maximum(power, 2.0**-6) * 2.0**-3
    inverse = lax.bitcast_convert_type(_EXPONENT_OF_1_TWICE - lax.bitcast_convert_type(step, jnp.int32), jnp.float32)
    return lax.round(x * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) * step


def e2m1(x: jax.Array) -> jax.Array:
    """Codes, int32, of the nearest e2m1 values: ties to the even code, saturating at 6. Zero keeps its sign, NaN gets 6."""

    def rint(x: jax.Array) -> jax.Array:
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)

    a = jnp.abs(x)
    # Steps are 0.5 up to 2, 1 up to 4, 2 up to 6: the code is the smallest of three roundings, each exact in its range.
    code = jnp.minimum(jnp.minimum(rint(2 * a), rint(a) + 2), rint(a * 0.5) + 4)
    code = jnp.where(code < 7, code, 7.0).astype(jnp.int32)
    sign = lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.int32), jnp.int32(31))
    return code | (sign << 3)
