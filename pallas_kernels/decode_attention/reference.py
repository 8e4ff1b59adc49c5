"""Attention of the rows of one decode step in plain jnp.

q is [B, T, N, H], caches [B, K, slots, H], the step's keys and values [B, K, T, H]; query head n reads KV head n // (N / K).
Scores, softmax and sums are fp32, weights are rounded to the dtype of the values, and the result is [B, T, N, H] fp32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

KEY_BLOCK = 512  # slots of a linear cache that are read at a time
_HIDDEN = jnp.finfo(jnp.float32).min

Part = tuple[jax.Array, jax.Array, jax.Array]  # keys, values, and which keys are visible: [B, T or 1, S] bool


def attend_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    ring_positions: jax.Array,
    start: jax.Array,
    positions: jax.Array,
    rows_visible: jax.Array,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """Attention to a ring and to the rows of the step.

    Args:     ring_positions: [B, slots] int32, the position in each slot, -1 if none.  start: [B] int32, committed
              positions.  positions: [B, T] int32, of the rows.  rows_visible: [B, T, T] bool.
    """
    oldest = jnp.maximum(positions - (window - 1), 0)
    ring = ring_positions[:, None, :]
    visible = (ring >= oldest[:, :, None]) & (ring < start[:, None, None])
    return _attend(q, [(k, v, visible), (k_rows, v_rows, rows_visible)], scale)


def attend_linear(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_rows: jax.Array,
    v_rows: jax.Array,
    lengths: jax.Array,
    rows_visible: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention to the first `lengths` slots of a cache and to the rows of the step.

    Args:     lengths: [B] int32.  rows_visible: [B, T, T] bool; each row sees itself.
    A cache of more than KEY_BLOCK slots is read in blocks, all of them, with a running maximum.
    """
    slots = k.shape[2]
    if slots <= KEY_BLOCK:
        visible = jnp.arange(slots)[None, None, :] < lengths[:, None, None]
        return _attend(q, [(k, v, visible), (k_rows, v_rows, rows_visible)], scale)

    def step(i: jax.Array, carry: tuple) -> tuple:
        # The last block may overlap the one before, as slices stay in bounds.
        begin = jnp.minimum(i * KEY_BLOCK, slots - KEY_BLOCK)
        keys = begin + jnp.arange(KEY_BLOCK)
        k_block, v_block = (lax.dynamic_slice_in_dim(x, begin, KEY_BLOCK, axis=2) for x in (k, v))
        visible = (keys[None, None, :] < lengths[:, None, None]) & (keys >= i * KEY_BLOCK)[None, None, :]
        return _fold(carry, q, (k_block, v_block, visible), scale)

    batch, num_rows, heads, _ = q.shape
    per_row = (batch, k.shape[1], heads // k.shape[1], num_rows, 1)
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(per_row, _HIDDEN), jnp.zeros(per_row, jnp.float32)
    # The rows come first: a maximum over a block of hidden keys alone would mean nothing.
    carry = _fold(nothing, q, (k_rows, v_rows, rows_visible), scale)
    output, _, total = lax.fori_loop(0, -(-slots // KEY_BLOCK), step, carry)
    return output / _per_query(total)


def _attend(q: jax.Array, parts: list[Part], scale: float) -> jax.Array:
    """softmax(scale q k^T) v over the visible keys of all parts together."""
    scores = [_scores(q, k, visible, scale) for k, _, visible in parts]
    maximum = functools.reduce(jnp.maximum, (jnp.max(part, axis=-1, keepdims=True) for part in scores))
    weights = [jnp.exp(part - maximum) for part in scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    return sum(_values(part, v) for part, (_, v, _) in zip(weights, parts, strict=True)) / _per_query(total)


def _fold(carry: tuple, q: jax.Array, part: Part, scale: float) -> tuple:
    """Takes more keys into a softmax: weighted values [B, T, N, H], maximum and sum of weights [B, K, N / K, T, 1]."""
    k, v, visible = part
    scores = _scores(q, k, visible, scale)
    output, maximum, total = carry
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_maximum)
    rescale = jnp.exp(maximum - new_maximum)
    output = output * _per_query(rescale) + _values(weights, v)
    return output, new_maximum, total * rescale + jnp.sum(weights, axis=-1, keepdims=True)


def _scores(q: jax.Array, k: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """[B, K, G, T, S] fp32 for G query heads per KV head; very low where a key is hidden."""
    batch, num_rows, heads, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    groups = heads // kv_heads
    # The query heads of a KV head are rows of one GEMM (several times faster on a CPU than an axis of their own).
    q = q.reshape(batch, num_rows, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * num_rows, head_dim)
    scores = jnp.einsum("bkmh,bksh->bkms", q, k, precision="highest", preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, groups, num_rows, num_keys) * scale
    # One [B, T, S] addend for all heads, held back from being recomputed in each fusion that reads the scores.
    mask = lax.optimization_barrier(jnp.where(visible, 0.0, _HIDDEN))
    return scores + mask[:, None, None, :, :]


def _values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """[B, K, G, T, S] fp32, rounded here, x [B, K, S, H] -> [B, T, N, H] fp32."""
    batch, kv_heads, groups, num_rows, num_keys = weights.shape
    if v.dtype == jnp.bfloat16:
        # Forced: XLA may drop a plain fp32 -> bf16 -> fp32 pair.
        weights = lax.reduce_precision(weights, exponent_bits=8, mantissa_bits=7)
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, groups * num_rows, num_keys)
    out = jnp.einsum("bkms,bksh->bkmh", weights, v, precision="highest", preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, groups, num_rows, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, num_rows, kv_heads * groups, -1)


def _per_query(x: jax.Array) -> jax.Array:
    """[B, K, G, T, 1] -> [B, T, N, 1]."""
    batch, kv_heads, groups, num_rows, _ = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, num_rows, kv_heads * groups, 1)
