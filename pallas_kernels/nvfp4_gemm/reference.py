"""The GEMMs of routed experts with NVFP4 weights, in plain jnp: one routed row after the other.

    value of a weight = e2m1(code) e4m3(block scale) global scale

The product of the first two is exact in bfloat16 and is what the GEMM contracts; the fp32 accumulator is multiplied by the
global scale, and by the scale of the row where activations are quantised.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import linear, round_to

BLOCK = 16  # values of a row of weights that share a scale


def gate_up(
    x: jax.Array,
    idx: jax.Array,
    codes: jax.Array,
    block_scales: jax.Array,
    global_scale: jax.Array,
    row_scale: jax.Array | None = None,
) -> jax.Array:
    """silu(gate) up of each routed row.

    Args:     x: [R, K] bfloat16 or float32.  idx: [R, top_k] int32, expert ids.  codes: [E, 2, F, K/2] uint8, gate then up;
              the low half of a byte is the even index.  block_scales: [E, 2, F, K/16] float8_e4m3fn.
              global_scale: [E, 2] fp32.  row_scale: [R] fp32, of quantised rows; x is then what they decode to without it.
    Returns:  [R, top_k, F] of x's dtype.
    Rounding: from fp32 accumulators, once.
    """
    top_k = idx.shape[1]

    def one(routed: jax.Array) -> jax.Array:
        row, expert = lax.div(routed, jnp.int32(top_k)), idx.reshape(-1)[routed]
        scale = _at(global_scale, expert)[None, :, None]
        if row_scale is not None:
            scale = scale * _at(row_scale, row)
        weight = decode(_at(codes, expert), _at(block_scales, expert), x.dtype)
        acc = linear(_at(x, row)[None], weight.reshape(-1, x.shape[1])).reshape(1, 2, -1) * scale
        gate, up = acc[:, 0], acc[:, 1]
        return round_to(gate * jax.nn.sigmoid(gate) * up, x.dtype)[0]

    return lax.map(one, jnp.arange(idx.size, dtype=jnp.int32)).reshape(*idx.shape, -1)


def down(
    hidden: jax.Array,
    idx: jax.Array,
    codes: jax.Array,
    block_scales: jax.Array,
    global_scale: jax.Array,
    row_scale: jax.Array | None = None,
) -> jax.Array:
    """Each routed row times its expert's matrix.

    Args:     hidden: [R, top_k, K] bfloat16 or float32.  idx: [R, top_k] int32.  codes: [E, N, K/2] uint8.
              block_scales: [E, N, K/16] float8_e4m3fn.  global_scale: [E] fp32.  row_scale: [R, top_k] fp32.
    Returns:  [R, top_k, N] of hidden's dtype.
    Rounding: from the fp32 accumulator, once.
    """
    rows = hidden.reshape(idx.size, -1)

    def one(routed: jax.Array) -> jax.Array:
        expert = idx.reshape(-1)[routed]
        scale = _at(global_scale, expert)
        if row_scale is not None:
            scale = scale * row_scale.reshape(-1)[routed]
        weight = decode(_at(codes, expert), _at(block_scales, expert), hidden.dtype)
        return round_to(linear(_at(rows, routed)[None], weight) * scale, hidden.dtype)[0]

    return lax.map(one, jnp.arange(idx.size, dtype=jnp.int32)).reshape(*idx.shape, -1)


def decode(codes: jax.Array, block_scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[..., K/2] uint8 and [..., K/16] float8_e4m3fn -> [..., K] of `dtype`: e2m1 times e4m3, exact."""
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    magnitudes = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype)
    values = jnp.where(nibbles < 8, magnitudes[nibbles & 7], -magnitudes[nibbles & 7])
    blocks = values.reshape(*block_scales.shape, BLOCK) * block_scales.astype(dtype)[..., None]
    return blocks.reshape(values.shape)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)
