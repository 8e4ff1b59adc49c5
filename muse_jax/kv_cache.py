"""KV caches, and the three ways a forward pass meets them.

Global layers keep every position in order (slot = position). Sliding layers keep a ring of window - 1 + tree_size slots
(slot = position mod capacity), just enough that the rows of a step never overwrite a key that one of them still sees.
Caches are [B, K, slots, H]; the model hands each layer's pair to a context:

    FullContext     whole sequences, no cache           muse.logits, training
    PrefillContext  a chunk of prompts, all at the same positions; writes the cache
    DecodeContext   up to tree_size rows per sequence, each sequence at its own position; leaves the cache as it is

The rows of a decode step are written once it is known which of them stay (`KVCache.commit`), in the order in which they
follow each other: a tree is compacted by being written.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax.attention import attend, attend_band, attend_causal, attend_committed, attend_prefix, hide
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.numerics import Numerics

KV = tuple[jax.Array, jax.Array]
Config = ModelConfig | DraftConfig


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers", "ring_positions"], meta_fields=[])
@dataclasses.dataclass
class KVCache:
    """The caches of all layers.

    layers: one (keys, values) pair per layer, [B, K, slots, H].
    ring_positions: [B, ring slots] int32, the position each ring slot holds (the same in every sliding layer), -1 if none.
    """

    layers: list[KV]
    ring_positions: jax.Array

    @classmethod
    def empty(
        cls, config: Config, batch: int, slots: int, tree_size: int, dtype: jnp.dtype, kv_heads: int | None = None
    ) -> KVCache:
        """kv_heads: of the arrays, where it is not the config's (`sharding.cache_heads`).  slots: positions a global layer can
        hold. Padding of a prompt's last chunk and rows of an unfinished step need room too: a write past the end would be
        moved back over older rows."""
        ring = ring_capacity(config, slots, tree_size)

        def pair(layer_idx: int) -> KV:
            size = slots if config.window(layer_idx) is None else ring
            shape = (batch, kv_heads or config.num_key_value_heads, size, config.head_dim)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

        layers = [pair(i) for i in range(config.num_hidden_layers)]
        return cls(layers, jnp.full((batch, ring), -1, jnp.int32))

    def fill(self, rows: list[KV], context: PrefillContext, config: Config) -> KVCache:
        """Writes a chunk's rows. rows: a pair [B, K, T, H] per layer."""
        layers = [
            context.write(pair, *new, config.window(i)) for i, (pair, new) in enumerate(zip(self.layers, rows, strict=True))
        ]
        return KVCache(layers, context.ring_positions(self.ring_positions))

    def commit(self, rows: list[KV], start: jax.Array, config: Config, path: jax.Array | None = None) -> KVCache:
        """Writes the rows of a step to positions start, start + 1, ... of each sequence.

        Args:     rows: a pair [B, K, T, H] per layer.  start: [B] int32, positions committed before.
                  path: [B, T] int32, the row that each position gets; None: the rows in their order.
        All T rows are written; those beyond what was accepted are hidden until a later step overwrites them, because
        nothing sees a position that is not committed, and nothing they overwrite is still visible.

        `start` must be computed from something that needed the old cache: XLA for CPU writes in place only where the data
        say that the last read is over, and copies the whole cache otherwise, an optimization barrier or not.
        """
        num_rows, ring = rows[0][0].shape[2], self.ring_positions.shape[1]
        linear_runs, ring_runs = Runs.linear(start, num_rows, path), Runs.ring(start, num_rows, ring, path)
        layers = []
        for i, (pair, new) in enumerate(zip(self.layers, rows, strict=True)):
            runs = linear_runs if config.window(i) is None else ring_runs
            layers.append(tuple(runs.write(cache, x) for cache, x in zip(pair, new, strict=True)))
        row = (_arange(ring)[None, :] - start[:, None]) % ring
        return KVCache(layers, jnp.where(row < num_rows, start[:, None] + row, self.ring_positions))


def ring_capacity(config: Config, slots: int, tree_size: int) -> int:
    """Slots of a sliding layer's ring: the window but the query's own key, and every row of a step.

    A window wider than the sequences that the caches are for (`slots`) shows all of them, and takes no more room. Kernels read
    slots by eight.
    """
    return -(-(min(config.sliding_window or 1, slots) - 1 + tree_size) // 8) * 8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["positions"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FullContext:
    """Whole right-padded sequences from position 0, without a cache."""

    positions: jax.Array  # [1, T] int32

    @classmethod
    def create(cls, num_tokens: int) -> FullContext:
        return cls(_arange(num_tokens)[None])

    def attend(self, q, k, v, cache: None, window: int | None, scale: float, numerics: Numerics):
        """q: [B, T, N, H]; k, v: [B, T, K, H]; see the other contexts. Returns ([B, T, N, H] fp32, cache)."""
        k, v = heads_first(k), heads_first(v)
        if window is None:
            return attend_causal(q, k, v, scale, numerics), cache
        window = min(window, q.shape[1])
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (window - 1, 0), (0, 0))) for x in (k, v))
        return attend_band(q, k, v, 0, window, scale, numerics), cache


@functools.partial(jax.tree_util.register_dataclass, data_fields=["start", "positions", "counts"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PrefillContext:
    """A chunk of right-padded prompts; every sequence is at the same positions."""

    start: jax.Array  # int32 scalar, position of the first row
    positions: jax.Array  # [1, T] int32
    counts: jax.Array  # [B] int32, rows of the chunk that are prompt and not padding; can be 0

    @classmethod
    def create(cls, start: jax.Array, lengths: jax.Array, num_tokens: int) -> PrefillContext:
        """lengths: [B], of the whole prompts."""
        positions = start + _arange(num_tokens)
        return cls(start, positions[None], jnp.clip(lengths - start, 0, num_tokens))

    def attend(self, q, k, v, cache: KV, window: int | None, scale: float, numerics: Numerics):
        """Attends to the cache and the chunk, and writes the chunk's rows.

        Args:     q: [B, T, N, H].  k, v: [B, T, K, H].  cache: the layer's pair.  window: None for a global layer.
        Returns:  [B, T, N, H] fp32 (rows of padding hold garbage), and the new pair.
        """
        k, v = heads_first(k), heads_first(v)
        if window is None:
            cache = self.write(cache, k, v, window)
            return attend_prefix(q, *cache, self.start, scale, numerics), cache
        capacity = cache[0].shape[2]
        seen = min(window, capacity)  # less only where the ring holds every position
        before = (self.start - (seen - 1) + _arange(seen - 1)) % capacity
        k_band, v_band = (jnp.concatenate([jnp.take(c, before, axis=2), x], axis=2) for c, x in zip(cache, (k, v), strict=True))
        out = attend_band(q, k_band, v_band, self.start, seen, scale, numerics)
        return out, self.write(cache, k, v, window)

    def write(self, cache: KV, k: jax.Array, v: jax.Array, window: int | None) -> KV:
        """Writes the chunk's rows into a layer's pair. k, v: [B, K, T, H]."""
        if window is None:
            # Rows of padding are written too: decoding overwrites each before anything can see it.
            return tuple(lax.dynamic_update_slice_in_dim(c, x, self.start, 2) for c, x in zip(cache, (k, v), strict=True))
        row, written = self._newest_row(cache[0].shape[2])
        index, keep = row[:, None, :, None], ~written[:, None, :, None]
        return tuple(jnp.where(keep, c, jnp.take_along_axis(x, index, axis=2)) for c, x in zip(cache, (k, v), strict=True))

    def ring_positions(self, old: jax.Array) -> jax.Array:
        """Positions the ring holds after this chunk, [B, ring slots]."""
        row, written = self._newest_row(old.shape[1])
        return jnp.where(written, self.start + row, old)

    def _newest_row(self, capacity: int) -> tuple[jax.Array, jax.Array]:
        """For every ring slot the last row of the chunk that belongs in it, and whether there is one: [B, capacity]."""
        last = self.counts[:, None] - 1
        row = last - (self.start + last - _arange(capacity)[None, :]) % capacity
        return jnp.maximum(row, 0), row >= 0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "positions", "ring_mask", "rows_in_window", "rows_mask"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeContext:
    """T rows per sequence after its `start` committed positions: a token, a chain, a tree, or the block of a draft.

    The masks (`attention.hide`), the same for all layers, say what each row sees: committed keys in the ring, and rows of
    this step in sliding and in global layers; a linear cache shows all that is committed. Distances are those of positions;
    rows of a tree at the same depth share one.
    """

    start: jax.Array  # [B] int32
    positions: jax.Array  # [B, T] int32
    ring_mask: jax.Array  # [B, T, ring slots] fp32
    rows_in_window: jax.Array  # [B, T, T] fp32
    rows_mask: jax.Array  # [B, T, T] fp32

    @classmethod
    def create(
        cls, cache: KVCache, start: jax.Array, depth: jax.Array, visible: tuple[jax.Array, jax.Array], config: Config
    ) -> DecodeContext:
        """start: [B], the number of committed positions.  depth: [B, T] int32, positions of the rows after it.
        visible: which rows each row sees, [B, T, T] bool, in global and in sliding layers."""
        positions = start[:, None] + depth
        return cls(
            start=start,
            positions=positions,
            ring_mask=hide(seen_in_ring(cache.ring_positions, start, positions, config.sliding_window)),
            rows_in_window=hide(rows_in_window(positions, visible[1], config)),
            rows_mask=hide(visible[0]),
        )

    @classmethod
    def chain(cls, cache: KVCache, start: jax.Array, num_rows: int, config: Config) -> DecodeContext:
        """Rows at consecutive positions, each seeing those before it."""
        rows = jnp.broadcast_to(_arange(num_rows)[None], (start.shape[0], num_rows))
        visible = rows[:, None, :] <= rows[:, :, None]
        return cls.create(cache, start, rows, (visible, visible), config)

    def attend(self, q, k, v, cache: KV, window: int | None, scale: float, numerics: Numerics):
        """Attends to the cache and the rows. As in PrefillContext, but returns the rows, [B, K, T, H], not a new cache."""
        k, v = heads_first(k), heads_first(v)
        if window is None:
            out = attend_committed(q, *cache, self.start, (k, v, self.rows_mask), scale, numerics)
        else:
            out = attend(q, [(*cache, self.ring_mask), (k, v, self.rows_in_window)], scale, numerics)
        return out, (k, v)


def seen_in_ring(ring_positions: jax.Array, start: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
    """Which slots of a ring each row of a step sees, [B, T, ring slots] bool: committed positions in its window.

    Args:     ring_positions: [B, ring slots].  start: [B], committed positions.  positions: [B, T], of the rows.
    """
    oldest = positions[:, :, None] - (window or 1) + 1
    ring = ring_positions[:, None, :]
    return (ring >= jnp.maximum(oldest, 0)) & (ring < start[:, None, None])


def rows_in_window(positions: jax.Array, visible: jax.Array, config: Config) -> jax.Array:
    """Which rows of a step each row sees in a sliding layer, [B, T, T] bool. positions: [B, T]; visible: without the window."""
    oldest = positions[:, :, None] - (config.sliding_window or 1) + 1
    return visible & (positions[:, None, :] >= oldest)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Where the rows of a step go in a cache, as runs of consecutive slots: one, or two where a ring may end between them.

    Computed once for all layers. Rows go in by dynamic_update_slice, which XLA does in place; a scatter would not be.
    """

    begin: list[jax.Array]  # of each run [B] int32, its first slot
    row: list[jax.Array] | None  # [B, T] int32, the row for each slot of a run; None: the rows in their order
    inside: list[jax.Array] | None  # [B, T] bool, whether that slot is written; None: all are

    @classmethod
    def linear(cls, start: jax.Array, num_rows: int, path: jax.Array | None) -> Runs:
        """Slots start, start + 1, ... of each sequence."""
        return cls([start], None if path is None else [path], None)

    @classmethod
    def ring(cls, start: jax.Array, num_rows: int, ring: int, path: jax.Array | None) -> Runs:
        """The same modulo `ring`."""
        slot = lax.rem(start, jnp.int32(ring))
        if num_rows == 1:
            return cls.linear(slot, num_rows, path)
        # A run that crosses the ring's end is two: up to the end, and from slot 0. Each is a merge with what is there.
        begins = [jnp.minimum(slot, ring - num_rows), jnp.zeros_like(slot)]
        firsts = zip(begins, (0, ring), strict=True)
        rows = [(begin - slot)[:, None] + first + _arange(num_rows)[None, :] for begin, first in firsts]
        inside = [(row >= 0) & (row < num_rows) for row in rows]
        rows = [jnp.clip(row, 0, num_rows - 1) for row in rows]
        return cls(begins, rows if path is None else [jnp.take_along_axis(path, row, axis=1) for row in rows], inside)

    def write(self, cache: jax.Array, rows: jax.Array) -> jax.Array:
        """cache: [B, K, slots, H].  rows: [B, K, T, H], T <= slots.  Returns the new cache."""
        for b in range(cache.shape[0]):
            for i, begin in enumerate(self.begin):
                new, place = rows[b : b + 1], (jnp.int32(b), jnp.int32(0), begin[b], jnp.int32(0))
                if self.row is not None:
                    new = _take_rows(new, self.row[i][b])
                if self.inside is not None:
                    old = lax.dynamic_slice(cache, place, new.shape, allow_negative_indices=False)
                    inside = lax.broadcast_in_dim(self.inside[i][b], new.shape, (2,))
                    new = lax.select(inside, new, old)
                cache = lax.dynamic_update_slice(cache, new, place, allow_negative_indices=False)
        return cache


def _take_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[:, :, index], with as few operations as there can be: it is done twice and more in every layer, and compiled.

    rows: [1, K, T, H].  index: [T] int32, in bounds.
    """
    _, heads, _, head_dim = rows.shape
    numbers = lax.GatherDimensionNumbers(offset_dims=(0, 1, 3), collapsed_slice_dims=(2,), start_index_map=(2,))
    sizes, mode = (1, heads, 1, head_dim), lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(rows, index[:, None], numbers, slice_sizes=sizes, mode=mode)


def _arange(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)  # positions, rows and slots are int32 throughout


def heads_first(x: jax.Array) -> jax.Array:
    """[B, T, K, H] -> [B, K, T, H], the order of the caches."""
    return x.transpose(0, 2, 1, 3)
