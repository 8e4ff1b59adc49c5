"""Attention of the rows of one decode step in plain jnp.

q is [B, T, N, H], caches [B, K, slots, H], the step's keys and values [B, K, T, H]; query head n reads KV head n // (N / K).
Scores, softmax and sums are fp32, weights are rounded to the dtype of the values, and the result is [B, T, N, H] fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import round_to

KEY_BLOCK = 512  # slots of a linear cache that are read at a time
_HIDDEN = jnp.finfo(jnp.float32).min

Part = tuple[jax.Array, jax.Array, jax.Array]  # keys, values, and what `hide` makes of those that are seen


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
    return attend(q, [(k, v, hide(visible)), (k_rows, v_rows, hide(rows_visible))], scale)


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
    """
    return attend_committed(q, k, v, lengths, (k_rows, v_rows, hide(rows_visible)), scale)


def attend_committed(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, rows: Part, scale: float) -> jax.Array:
    """`attend_linear` with a mask of the rows that is there already.

    A cache of more than KEY_BLOCK slots is read in blocks, so that what a step needs besides the cache does not grow with it.
    All blocks are read: a loop of fixed length keeps a GPU from asking the host whether to go on.
    """
    slots = k.shape[2]
    if slots <= KEY_BLOCK:
        return attend(q, [(k, v, hide(jnp.arange(slots)[None, None, :] < lengths[:, None, None])), rows], scale)

    def step(i: jax.Array, carry: Partial) -> Partial:
        keys, k_block, v_block = key_block(i, k, v)
        visible = (keys[None, None, :] < lengths[:, None, None]) & (keys >= i * KEY_BLOCK)[None, None, :]
        return fold(carry, q, (k_block, v_block, hide(visible)), scale)

    # The rows come first: a maximum over a block of hidden keys alone would mean nothing.
    carry = fold(empty(q, k), q, rows, scale)
    return finish(lax.fori_loop(0, -(-slots // KEY_BLOCK), step, carry))


def hide(visible: jax.Array) -> jax.Array:
    """What is added to the scores of all heads: 0, or very low where a key is hidden. visible: [B or 1, T or 1, S] bool.

    Held back from being recomputed in each fusion that reads the scores.
    """
    return lax.optimization_barrier(jnp.where(visible, 0.0, _HIDDEN))


def attend(q: jax.Array, parts: Sequence[Part], scale: float) -> jax.Array:
    """softmax(scale q k^T) v over the visible keys of all parts together."""
    part_scores = [scores(q, k, mask, scale) for k, _, mask in parts]
    maximum = functools.reduce(jnp.maximum, (jnp.max(part, axis=-1, keepdims=True) for part in part_scores))
    weights = [jnp.exp(part - maximum) for part in part_scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    return sum(weighted(part, v) for part, (_, v, _) in zip(weights, parts, strict=True)) / _per_query(total)


# ---- A softmax in parts -----------------------------------------------------------------------------------------------

Partial = tuple[jax.Array, jax.Array, jax.Array]  # weighted values [B, T, N, H], maximum and sum of weights [B, K, G, T, 1]


def empty(q: jax.Array, k: jax.Array) -> Partial:
    batch, num_queries, heads, _ = q.shape
    rows = (batch, k.shape[1], heads // k.shape[1], num_queries, 1)
    return jnp.zeros(q.shape, jnp.float32), jnp.full(rows, _HIDDEN), jnp.zeros(rows, jnp.float32)


def fold(carry: Partial, q: jax.Array, part: Part, scale: float) -> Partial:
    """Takes more keys into a softmax."""
    k, v, mask = part
    part_scores = scores(q, k, mask, scale)
    output, maximum, total = carry
    new_maximum = jnp.maximum(maximum, jnp.max(part_scores, axis=-1, keepdims=True))
    weights = jnp.exp(part_scores - new_maximum)
    rescale = jnp.exp(maximum - new_maximum)
    output = output * _per_query(rescale) + weighted(weights, v)
    return output, new_maximum, total * rescale + jnp.sum(weights, axis=-1, keepdims=True)


def finish(carry: Partial) -> jax.Array:
    output, _, total = carry
    return output / _per_query(total)


def key_block(i: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots, keys and values of block i. The last block may overlap the one before, as slices stay in bounds."""
    begin = jnp.minimum(i * KEY_BLOCK, k.shape[2] - KEY_BLOCK)
    k, v = (lax.dynamic_slice_in_dim(x, begin, KEY_BLOCK, axis=2) for x in (k, v))
    return begin + jnp.arange(KEY_BLOCK), k, v


# ---- Products ---------------------------------------------------------------------------------------------------------


def scores(
    q: jax.Array, k: jax.Array, mask: jax.Array, scale: float, step: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """[B, K, G, T, S] fp32 for G query heads per KV head; very low where a key is hidden. step: rounds q k^T, before the scale
    and after it.

    exp(score - maximum) of a hidden key is 0 for every query that sees a key; others (padding) get garbage, not NaN.
    """
    batch, num_queries, heads, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    groups = heads // kv_heads
    # The query heads of a KV head are rows of one GEMM (several times faster on a CPU than an axis of their own).
    q = q.reshape(batch, num_queries, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * num_queries, head_dim)
    products = jnp.einsum("bkmh,bksh->bkms", q, k, precision="highest", preferred_element_type=jnp.float32)
    products = products.reshape(batch, kv_heads, groups, num_queries, num_keys)
    return step(step(products) * scale) + mask[:, None, None, :, :]


def weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """[B, K, G, T, S] fp32, rounded here, x [B, K, S, H] -> [B, T, N, H] fp32."""
    batch, kv_heads, groups, num_queries, num_keys = weights.shape
    weights = round_to(weights, v.dtype).reshape(batch, kv_heads, groups * num_queries, num_keys)
    out = jnp.einsum("bkms,bksh->bkmh", weights, v, precision="highest", preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, groups, num_queries, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, num_queries, kv_heads * groups, -1)


def _per_query(x: jax.Array) -> jax.Array:
    """[B, K, G, T, 1] -> [B, T, N, 1]."""
    batch, kv_heads, groups, num_queries, _ = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, kv_heads * groups, 1)
