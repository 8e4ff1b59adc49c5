"""Attention in plain jnp: direct, banded over a sliding window, and blocked over a long prefix.

What a decode step does is the reference of its kernel; with HF numerics scores and probabilities are rounded, here.

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
from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.reference import KEY_BLOCK, Part, Partial, hide

QUERY_BLOCK = 128  # queries of a banded block; the band is this plus the window
PREFIX_QUERY_BLOCK = 256  # queries of a block of a long prefix: their scores for KEY_BLOCK keys stay in a CPU's cache


def attend(q: jax.Array, parts: Sequence[Part], scale: float, numerics: Numerics) -> jax.Array:
    """softmax(scale q k^T) v over the visible keys of all parts together."""
    if not numerics.scores_rounded:
        return reference.attend(q, parts, scale)
    scores = [reference.scores(q, k, mask, scale, lambda x: fp32(round_to(x, q.dtype))) for k, _, mask in parts]
    maximum = functools.reduce(jnp.maximum, (jnp.max(part, axis=-1, keepdims=True) for part in scores))
    weights = [jnp.exp(part - maximum) for part in scores]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    return sum(reference.weighted(part / total, v) for part, (_, v, _) in zip(weights, parts, strict=True))


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
            keys, k_block, v_block = reference.key_block(i, k, v)
            visible = (keys[None, :] <= queries[:, None]) & (keys >= i * KEY_BLOCK)[None, :]
            return reference.fold(carry, q_block, (k_block, v_block, hide(visible[None])), scale)

        carry = lax.fori_loop(0, (end + KEY_BLOCK - 1) // KEY_BLOCK, step, reference.empty(q_block, k))
        return reference.finish(carry)

    return _map_queries(online, q, min(PREFIX_QUERY_BLOCK, num_queries))


def attend_committed(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, rows: Part, scale: float, numerics: Numerics
) -> jax.Array:
    """Attention of the rows of a step to a linear cache, of which each sequence has its first `lengths` slots, and to rows.

    Args:     k, v: [B, K, slots, H].  lengths: [B] int32.  rows: keys and values of the step, and the mask of
              what each row sees of them; each sees itself.
    """
    if not numerics.scores_rounded:
        return reference.attend_committed(q, k, v, lengths, rows, scale)
    visible = jnp.arange(k.shape[2])[None, None, :] < lengths[:, None, None]
    return attend(q, [(k, v, hide(visible)), rows], scale, numerics)


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
