"""Attention in plain jnp: direct, banded over a sliding window, and blocked over a long prefix.

Everywhere q is [B, T, N, H], keys and values are [B, K, S, H] (the order of the caches), query head n reads KV head
n // (N / K), scores, softmax and sums are fp32, and the result is [B, T, N, H] fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax.numerics import Numerics, fp32, round_to

QUERY_BLOCK = 128  # queries of a banded block; the band is this plus the window
PREFIX_QUERY_BLOCK = 256  # queries and keys of a block of a long prefix: their scores stay in a CPU's cache
KEY_BLOCK = 512
_HIDDEN = jnp.finfo(jnp.float32).min


Part = tuple[jax.Array, jax.Array, jax.Array]  # keys, values, and what `hide` makes of those that are seen


def hide(visible: jax.Array) -> jax.Array:
    """What is added to the scores of all heads: 0, or very low where a key is hidden. visible: [B or 1, T or 1, S] bool.

    Held back from being recomputed in each fusion that reads the scores.
    """
    return lax.optimization_barrier(jnp.where(visible, 0.0, _HIDDEN))


def attend(q: jax.Array, parts: Sequence[Part], scale: float, numerics: Numerics) -> jax.Array:
    """softmax(scale q k^T) v over the visible keys of all parts together."""
    scores = [_scores(q, k, mask, scale, numerics) for k, _, mask in parts]
    maximum = functools.reduce(jnp.maximum, (jnp.max(part, axis=-1, keepdims=True) for part in scores))
    weights = [jnp.exp(part - maximum) for part in scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    if numerics.scores_rounded:
        return sum(_values(part / total, v) for part, (_, v, _) in zip(weights, parts, strict=True))
    return sum(_values(part, v) for part, (_, v, _) in zip(weights, parts, strict=True)) / _per_query(total)


def attend_band(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_position: jax.Array | int,
    window: int,
    scale: float,
    numerics: Numerics,
) -> jax.Array:
    """Causal attention of T consecutive queries to the last `window` keys each, their own included.

    Args:     q: [B, T, N, H].  k, v: [B, K, window - 1 + T, H], the keys of the window - 1 positions before the first query,
              then of the queries.  first_position: int32 scalar, position of the first query; keys before position 0 are
              hidden.
    """
    num_queries = q.shape[1]

    def block(q_block: jax.Array, start: jax.Array) -> jax.Array:
        queries = q_block.shape[1]
        keys = window - 1 + queries
        k_block = lax.dynamic_slice_in_dim(k, start, keys, axis=2)
        v_block = lax.dynamic_slice_in_dim(v, start, keys, axis=2)
        offset = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]  # 0: the oldest key of the window
        exists = jnp.arange(keys)[None, :] + start + first_position >= window - 1
        visible = (offset >= 0) & (offset < window) & exists
        return attend(q_block, [(k_block, v_block, hide(visible[None]))], scale, numerics)

    if num_queries <= QUERY_BLOCK:
        return block(q, jnp.int32(0))
    padding = -num_queries % QUERY_BLOCK
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
    return _map_queries(block, q, QUERY_BLOCK)


def attend_causal(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, numerics: Numerics) -> jax.Array:
    """Causal attention of T queries to the keys of the same T positions."""
    keys = jnp.arange(k.shape[2])

    def block(q_block: jax.Array, start: jax.Array) -> jax.Array:
        visible = keys[None, :] <= start + jnp.arange(q_block.shape[1])[:, None]
        return attend(q_block, [(k, v, hide(visible[None]))], scale, numerics)

    if q.shape[1] <= 2 * QUERY_BLOCK:
        return block(q, jnp.int32(0))
    return _map_queries(block, q, QUERY_BLOCK)


def attend_prefix(
    q: jax.Array, k: jax.Array, v: jax.Array, first_position: jax.Array, scale: float, numerics: Numerics
) -> jax.Array:
    """Causal attention of T consecutive queries to slots 0 .. first_position + T - 1 of a linear cache (slot = position).

    A long cache is read in blocks of KEY_BLOCK slots and only as far as a block of queries sees, so that memory and time do
    not depend on its capacity. HF numerics rounds normalised probabilities, which needs all scores of a query at once:
    there the whole cache is read, for a few queries at a time.
    """
    num_queries, slots = q.shape[1], k.shape[2]

    def whole(q_block: jax.Array, start: jax.Array | int) -> jax.Array:
        queries = first_position + start + jnp.arange(q_block.shape[1])
        visible = jnp.arange(slots)[None, :] <= queries[:, None]
        return attend(q_block, [(k, v, hide(visible[None]))], scale, numerics)

    if slots <= KEY_BLOCK:
        return whole(q, 0)
    if numerics.scores_rounded:
        return _map_queries(whole, q, min(16, num_queries))

    def online(q_block: jax.Array, start: jax.Array | int) -> jax.Array:
        block_queries = q_block.shape[1]
        end = first_position + start + block_queries  # positions the block sees
        queries = end - block_queries + jnp.arange(block_queries)

        def step(i: jax.Array, carry: Partial) -> Partial:
            keys, k_block, v_block = _key_block(i, k, v)
            visible = (keys[None, :] <= queries[:, None]) & (keys >= i * KEY_BLOCK)[None, :]
            return _fold(carry, q_block, (k_block, v_block, hide(visible[None])), scale, numerics)

        return _finish(lax.fori_loop(0, (end + KEY_BLOCK - 1) // KEY_BLOCK, step, _empty(q_block, k)))

    return _map_queries(online, q, min(PREFIX_QUERY_BLOCK, num_queries))


def attend_committed(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, rows: Part, scale: float, numerics: Numerics
) -> jax.Array:
    """Attention of the rows of a step to a linear cache, of which each sequence has its first `lengths` slots, and to rows.

    Args:     k, v: [B, K, slots, H].  lengths: [B] int32.  rows: keys and values of the step, and the mask of
              what each row sees of them; each sees itself.
    A long cache is read in blocks of KEY_BLOCK slots, so that what a step needs besides the cache does not grow with it
    (except with HF numerics; see `attend_prefix`). All blocks are read: a loop of fixed length keeps a GPU from asking the
    host whether to go on.
    """
    slots = k.shape[2]
    if slots <= KEY_BLOCK or numerics.scores_rounded:
        visible = jnp.arange(slots)[None, None, :] < lengths[:, None, None]
        return attend(q, [(k, v, hide(visible)), rows], scale, numerics)

    def step(i: jax.Array, carry: Partial) -> Partial:
        keys, k_block, v_block = _key_block(i, k, v)
        visible = (keys[None, None, :] < lengths[:, None, None]) & (keys >= i * KEY_BLOCK)[None, None, :]
        return _fold(carry, q, (k_block, v_block, hide(visible)), scale, numerics)

    # The rows come first: a maximum over a block of hidden keys alone would mean nothing.
    carry = _fold(_empty(q, k), q, rows, scale, numerics)
    return _finish(lax.fori_loop(0, -(-slots // KEY_BLOCK), step, carry))


Partial = tuple[jax.Array, jax.Array, jax.Array]  # softmax so far: weighted values [B, T, N, H], maximum and sum of weights


def _empty(q: jax.Array, k: jax.Array) -> Partial:
    batch, num_queries, heads, _ = q.shape
    rows = (batch, k.shape[1], heads // k.shape[1], num_queries, 1)
    return jnp.zeros(q.shape, jnp.float32), jnp.full(rows, _HIDDEN), jnp.zeros(rows, jnp.float32)


def _fold(carry: Partial, q: jax.Array, part: Part, scale: float, numerics: Numerics) -> Partial:
    """Takes more keys into a softmax."""
    k, v, mask = part
    scores = _scores(q, k, mask, scale, numerics)
    output, maximum, total = carry
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_maximum)
    rescale = jnp.exp(maximum - new_maximum)
    output = output * _per_query(rescale) + _values(weights, v)
    return output, new_maximum, total * rescale + jnp.sum(weights, axis=-1, keepdims=True)


def _finish(carry: Partial) -> jax.Array:
    output, _, total = carry
    return output / _per_query(total)


def _key_block(i: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots, keys and values of block i. The last block may overlap the one before, as slices stay in bounds."""
    begin = jnp.minimum(i * KEY_BLOCK, k.shape[2] - KEY_BLOCK)
    k, v = (lax.dynamic_slice_in_dim(x, begin, KEY_BLOCK, axis=2) for x in (k, v))
    return begin + jnp.arange(KEY_BLOCK), k, v


def _scores(q: jax.Array, k: jax.Array, mask: jax.Array, scale: float, numerics: Numerics) -> jax.Array:
    """[B, K, G, T, S] fp32 for G query heads per KV head; very low where a key is hidden.

    exp(score - maximum) of a hidden key is 0 for every query that sees a key; others (padding) get garbage, not NaN.
    """
    batch, num_queries, heads, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    groups = heads // kv_heads
    # The query heads of a KV head are rows of one GEMM (several times faster on a CPU than an axis of their own).
    q = q.reshape(batch, num_queries, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, groups * num_queries, head_dim)
    scores = jnp.einsum("bkmh,bksh->bkms", q, k, precision="highest", preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, groups, num_queries, num_keys)
    if numerics.scores_rounded:
        scores = fp32(round_to(fp32(round_to(scores, q.dtype)) * scale, q.dtype))
    else:
        scores = scores * scale
    return scores + mask[:, None, None, :, :]


def _values(weights: jax.Array, v: jax.Array) -> jax.Array:
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


def _map_queries(block: Callable[[jax.Array, jax.Array], jax.Array], q: jax.Array, size: int) -> jax.Array:
    """Runs `block(q_block, index of its first query)` over blocks of `size` queries, one after the other."""
    batch, num_queries, heads, head_dim = q.shape
    padding = -num_queries % size
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    count = q.shape[1] // size
    blocks = jnp.moveaxis(q.reshape(batch, count, size, heads, head_dim), 1, 0)
    starts = jnp.arange(count, dtype=jnp.int32) * size
    out = lax.map(lambda inputs: block(*inputs), (blocks, starts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * size, heads, head_dim)[:, :num_queries]
