"""Attention of the rows of one decode step as two Mosaic GPU kernels for Hopper.

The KV cache is cut into blocks, and runs of blocks go to `splits` CTAs per KV head. A CTA has a warpgroup that streams keys
and values into a ring of `stages` by TMA, and one warpgroup per 64 rows that computes; rows are pairs (row of the step, query
head of the KV head), so that 16 rows of 8 heads are two tiles of 64 for wgmma. The step's own keys and values are one more
block, the last. Each CTA leaves weighted values, maximum and sum of weights; a second kernel merges them in the order of the
splits, so that the result does not depend on timing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

TILE = 64  # rows of a wgmma, so of a computing warpgroup
OWN_BLOCK = 64  # room for the keys of the step: a K of wgmma under a 128-byte swizzle
MAX_ROWS = 16
SMEM_BYTES = 224 * 1024  # of 227 KiB that a CTA can have; barriers and scratch take the rest
# A maximum before any score. It is finite, so that the weight of a hidden key, exp2(-inf - maximum), is always 0.
_LOWEST = -1e30
_ROW, _COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class DecodeAttentionConfig:
    """Sizes that change the speed, and with the number of splits the last bits, but not the meaning.

    block: slots of a stage.  stages: of the ring in shared memory.  splits: CTAs per KV head and sequence; None: as many as
    `num_sms` has room for.  merge_warpgroups: of a merging CTA; the splits are shared out among them.
    merge_columns: of H, for a merging CTA; 8 is the narrowest wgmma layout and makes the most CTAs.
    """

    block: int = 128
    stages: int = 5
    splits: int | None = None
    num_sms: int = 132
    merge_warpgroups: int = 4
    merge_columns: int = 8

    def __post_init__(self) -> None:
        if self.block % 64 or not 64 <= self.block <= 256:
            raise ValueError(f"block must be 64, 128, 192 or 256, not {self.block}")
        if self.merge_columns not in (8, 16, 32, 64):
            raise ValueError(f"merge_columns must be 8, 16, 32 or 64, not {self.merge_columns}")
        if self.stages < 1 or self.merge_warpgroups < 1 or (self.splits is not None and self.splits < 1):
            raise ValueError(f"stages, splits and merge_warpgroups must be at least 1: {self}")


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
    config: DecodeAttentionConfig = DecodeAttentionConfig(),
    interpret: Any = False,
) -> jax.Array:
    """Attention of a step's rows to a ring of slots and to each other, in a sliding layer.

    Args:     q: [B, T, N, H] bf16.  k, v: [B, K, slots, H] bf16, the ring.  k_rows, v_rows: [B, K, T, H] bf16.
              ring_positions: [B, slots] int32, the position in each slot, -1 if none.  start: [B] int32, committed
              positions; slots at or after it are hidden.  positions: [B, T] int32, of the rows; a row sees the `window`
              positions that end with its own.  rows_visible: [B, T, T] bool, which rows each row sees; each sees itself.
    Returns:  [B, T, N, H] fp32.
    Raises:   ValueError, NotImplementedError: see `attend_linear`.
    """
    shape = _Shape.create(q, k, v, k_rows, v_rows, rows_visible, config)
    for name, array, expected in (
        ("ring_positions", ring_positions, (shape.batch, shape.slots)),
        ("start", start, (shape.batch,)),
        ("positions", positions, (shape.batch, shape.rows)),
    ):
        _check(name, array, expected, jnp.int32)
    oldest = jnp.maximum(positions - (window - 1), 0)
    held = jnp.where(ring_positions < start[:, None], ring_positions, -1)
    # The last block is moved back to end with the ring; the slots it shares with the block before are hidden in it.
    begin = (shape.blocks - 1) * shape.block
    shared = begin - (shape.slots - shape.block)
    hidden = jnp.full((shape.batch, shared), -1, jnp.int32)
    held = jnp.concatenate([held[:, :begin], hidden, held[:, begin:]], axis=1)
    return _attend(shape, q, k, v, k_rows, v_rows, held, oldest, rows_visible, True, scale, interpret)


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
    config: DecodeAttentionConfig = DecodeAttentionConfig(),
    interpret: Any = False,
) -> jax.Array:
    """Attention of a step's rows to the first `lengths` slots of a linear cache and to each other, in a global layer.

    Args:     q: [B, T, N, H] bf16, T <= 16.  k, v: [B, K, slots, H] bf16; no block after that of slot `lengths - 1` is read.
              k_rows, v_rows: [B, K, T, H] bf16.  lengths: [B] int32, clamped to 0 .. slots.
              rows_visible: [B, T, T] bool, which rows each row sees; each sees itself.
              scale: of the scores; interpret: False, or what `compat.interpret_params` returns.
    Returns:  [B, T, N, H] fp32; zeros for a row that sees nothing.
    Rounding: scores, softmax and sums fp32; weights are rounded to bf16 where they meet values, relative to the maximum of
              the keys before and in the same block; one division at the end.
    Hidden:   keys that nobody sees may hold anything; values that nobody sees, in a block that is read, must be finite.
    Raises:   ValueError if shapes or dtypes do not fit each other, or there are fewer slots than a block, or stages do not fit
              into shared memory;
              NotImplementedError unless slots is a multiple of 8, H is 64 or 128, N / K is 8, 16, 32 or 64, and T N / K is at
              most 128.
    """
    shape = _Shape.create(q, k, v, k_rows, v_rows, rows_visible, config)
    _check("lengths", lengths, (shape.batch,), jnp.int32)
    oldest = jnp.zeros((shape.batch, shape.rows), jnp.int32)
    return _attend(shape, q, k, v, k_rows, v_rows, lengths, oldest, rows_visible, False, scale, interpret)


@dataclasses.dataclass(frozen=True)
class _Shape:
    batch: int
    rows: int  # T as given
    groups: int  # query heads per KV head
    kv_heads: int
    head_dim: int
    slots: int
    block: int
    stages: int
    splits: int
    merge_warpgroups: int
    merge_columns: int

    @classmethod
    def create(cls, q, k, v, k_rows, v_rows, rows_visible, config: DecodeAttentionConfig) -> _Shape:
        if q.ndim != 4 or k.ndim != 4:
            raise ValueError(f"q must be [B, T, N, H] and k [B, K, slots, H], not {q.shape} and {k.shape}")
        batch, rows, heads, head_dim = q.shape
        kv_heads, slots = k.shape[1:3]
        _check("q", q, q.shape, jnp.bfloat16)
        for name, array, length in (("k", k, slots), ("v", v, slots), ("k_rows", k_rows, rows), ("v_rows", v_rows, rows)):
            _check(name, array, (batch, kv_heads, length, head_dim), jnp.bfloat16)
        _check("rows_visible", rows_visible, (batch, rows, rows), jnp.bool_)
        groups, rest = divmod(heads, kv_heads)
        if rest or groups not in (8, 16, 32, 64):
            raise NotImplementedError(f"8, 16, 32 or 64 query heads per KV head, not {heads} / {kv_heads}")
        if slots % 8:
            raise NotImplementedError(f"slots must be a multiple of 8, the rows of a swizzled tile, not {slots}")
        if head_dim not in (64, 128):
            raise NotImplementedError(f"head_dim 64 or 128, not {head_dim}")
        if not 1 <= rows <= MAX_ROWS or rows * groups > 2 * TILE:
            raise NotImplementedError(
                f"up to {MAX_ROWS} rows and {2 * TILE} pairs of row and query head, not {rows} x {groups}"
            )
        if slots < config.block:
            raise ValueError(f"the cache has {slots} slots, fewer than a block of {config.block}")
        tiles = -(-rows * groups // TILE)
        smem_bytes = 2 * head_dim * (tiles * TILE + 2 * config.stages * config.block + 2 * OWN_BLOCK)
        if smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{config.stages} stages of {config.block} slots need {smem_bytes} bytes of {SMEM_BYTES} of shared memory"
            )
        splits = config.splits or max(1, config.num_sms // (batch * kv_heads))
        splits = min(splits, -(-slots // config.block) + 1)
        return cls(
            batch=batch,
            rows=rows,
            groups=groups,
            kv_heads=kv_heads,
            head_dim=head_dim,
            slots=slots,
            block=config.block,
            stages=config.stages,
            splits=splits,
            merge_warpgroups=min(config.merge_warpgroups, splits),
            merge_columns=config.merge_columns,
        )

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.block)

    @property
    def tile_steps(self) -> int:
        """Rows of the step in a tile."""
        return TILE // self.groups

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile_steps)

    @property
    def padded_rows(self) -> int:
        """Rows of the step that fill their tiles, and copies into a swizzled buffer, which go by 8."""
        return -(-self.tiles * self.tile_steps // 8) * 8


def _attend(shape: _Shape, q, k, v, k_rows, v_rows, seen, oldest, rows_visible, is_ring, scale, interpret) -> jax.Array:
    """seen: of a ring [B, blocks * block], the position in each slot or -1; else lengths [B]."""
    padding = shape.padded_rows - shape.rows
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        k_rows, v_rows = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k_rows, v_rows))
    bit = jnp.int32(1) << lax.iota(jnp.int32, shape.rows)[None, None, :]
    bits = jnp.sum(jnp.where(rows_visible, bit, 0), axis=-1, dtype=jnp.int32)
    # What each pair of row and query head sees: the oldest position, and one bit for each row of the step.
    row_info = jnp.stack([oldest, bits], axis=1)
    row_info = jnp.pad(row_info, ((0, 0), (0, 0), (0, shape.tiles * shape.tile_steps - shape.rows)))
    row_info = jnp.repeat(row_info, shape.groups, axis=-1).reshape(shape.batch, 2, shape.tiles, TILE)
    row_info = row_info.transpose(0, 2, 1, 3)
    partials = _split(shape, q, k, v, k_rows, v_rows, seen, row_info, is_ring, scale, interpret)
    return _merge(shape, *partials, interpret)


def _split(shape: _Shape, q, k, v, k_rows, v_rows, seen, row_info, is_ring, scale, interpret):
    """Returns weighted values [B, K, tiles, H / C, splits, TILE, C] and statistics [B, K, tiles, splits, 2, TILE]
    (maximum in units of log2, sum of weights), fp32. The values of a split without a key are not written; its sums are 0."""
    block, stages, tiles, head_dim, groups = shape.block, shape.stages, shape.tiles, shape.head_dim, shape.groups
    num_columns = shape.merge_columns
    log2_scale = scale * math.log2(math.e)

    def kernel(q, k, v, k_rows, v_rows, seen, row_info, out_values, out_stats, *scratch):
        q_smem, k_smem, v_smem, own_smem, q_ready, k_ready, v_ready, own_ready, k_free, v_free = scratch
        split, kv_head, b = (lax.axis_index(name) for name in ("split", "kv_head", "batch"))
        wg = lax.axis_index("wg")

        if is_ring:
            blocks, whole_blocks = jnp.int32(shape.blocks), jnp.int32(0)
        else:
            length = jnp.clip(seen[b], 0, shape.slots)
            blocks, whole_blocks = lax.div(length + (block - 1), jnp.int32(block)), lax.div(length, jnp.int32(block))
        per_split = lax.div(blocks + shape.splits, jnp.int32(shape.splits))  # of blocks + 1, rounded up
        first = split * per_split
        steps = jnp.clip(blocks - first, 0, per_split)
        whole_steps = jnp.clip(whole_blocks - first, 0, steps)
        has_own = ((first <= blocks) & (blocks < first + per_split)).astype(jnp.int32)

        @pl.when(wg == tiles)
        def _load():
            if tiles == 2:
                plgpu.set_max_registers(40, action="decrease")

            @pl.when(has_own > 0)
            def _own():
                # Weights of keys that are not there are 0, and so must be values.
                own_smem.at[1][...] = plgpu.layout_cast(jnp.zeros((OWN_BLOCK, head_dim), jnp.bfloat16), plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                for i, rows in enumerate((k_rows, v_rows)):
                    own = own_smem.at[i, pl.ds(0, shape.padded_rows)]
                    plgpu.copy_gmem_to_smem(rows.at[b, kv_head], own, own_ready)

            @pl.loop(0, steps)
            def _step(step):
                stage = lax.rem(step, jnp.int32(stages))
                slots = pl.ds(jnp.minimum((first + step) * block, shape.slots - block), block)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                plgpu.copy_gmem_to_smem(k.at[b, kv_head, slots], k_smem.at[stage], k_ready.at[stage])

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[stage])

                plgpu.copy_gmem_to_smem(v.at[b, kv_head, slots], v_smem.at[stage], v_ready.at[stage])

        @pl.when(wg < tiles)
        def _compute():
            if tiles == 2:
                plgpu.set_max_registers(232, action="increase")
            q_tile = q_smem.at[wg]
            for i in range(shape.tile_steps):
                heads = q.at[b, wg * shape.tile_steps + i, pl.ds(kv_head * groups, groups)]
                plgpu.copy_gmem_to_smem(heads, q_tile.at[pl.ds(i * groups, groups)], q_ready.at[wg])
            oldest, own_bits = (compat.load(row_info.at[b, wg, i], _ROW, optimized=False) for i in range(2))
            plgpu.barrier_wait(q_ready.at[wg])

            def fold(carry, k_tile, v_tile, visible, after_scores, before_values):
                """Takes the keys of a tile into a softmax. visible: which each row sees, or None for all."""
                values, maximum, total = carry
                num_keys = k_tile.shape[0]

                def scores(acc):
                    plgpu.wgmma(acc, q_tile, k_tile.transpose((1, 0)))
                    return acc[...]

                x = pl.run_scoped(scores, plgpu.ACC((TILE, num_keys), jnp.float32))
                after_scores()
                if visible is not None:
                    x = jnp.where(visible, x, -jnp.inf)
                new_maximum = jnp.maximum(maximum, jnp.max(x, axis=1) * log2_scale)
                weights = jnp.exp2(x * log2_scale - lax.broadcast_in_dim(new_maximum, x.shape, [0]))
                rescale = jnp.exp2(maximum - new_maximum)
                total = total * rescale + jnp.sum(weights, axis=1)
                weights = weights.astype(jnp.bfloat16)
                before_values()
                added = compat.matmul_from_registers(weights, v_tile, interpret)
                values = values * lax.broadcast_in_dim(rescale, values.shape, [0]) + added
                return values, new_maximum, total

            def cache_step(step, carry, visible):
                stage = lax.rem(step, jnp.int32(stages))
                seen_by_row = None if visible is None else visible(first + step)
                plgpu.barrier_wait(k_ready.at[stage])
                carry = fold(
                    carry,
                    k_smem.at[stage],
                    v_smem.at[stage],
                    seen_by_row,
                    lambda: plgpu.barrier_arrive(k_free.at[stage]),
                    lambda: plgpu.barrier_wait(v_ready.at[stage]),
                )
                plgpu.barrier_arrive(v_free.at[stage])
                return carry

            def own_step(_, carry):
                row = plgpu.broadcasted_iota(jnp.int32, (TILE, OWN_BLOCK), 1, layout=plgpu.Layout.WGMMA)
                bits = lax.broadcast_in_dim(own_bits, (TILE, OWN_BLOCK), [0])
                visible = ((bits >> jnp.minimum(row, 31)) & 1) == 1  # bit 31 is of no row
                plgpu.barrier_wait(own_ready)
                return fold(carry, own_smem.at[0], own_smem.at[1], visible, lambda: None, lambda: None)

            def seen_in_ring(block_idx):
                held = compat.load(seen.at[b, pl.ds(block_idx * block, block)], _COLUMN, optimized=False)
                held = lax.broadcast_in_dim(held, (TILE, block), [1])
                return held >= lax.broadcast_in_dim(oldest, (TILE, block), [0])

            def seen_in_prefix(block_idx):
                begin = block_idx * block
                slot = plgpu.broadcasted_iota(jnp.int32, (TILE, block), 1, layout=plgpu.Layout.WGMMA)
                slot = slot + jnp.minimum(begin, shape.slots - block)
                visible = slot < length
                return visible & (slot >= begin) if shape.slots % block else visible

            cast = plgpu.layout_cast
            carry = (
                cast(jnp.zeros((TILE, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                cast(jnp.full((TILE,), _LOWEST, jnp.float32), _ROW),
                cast(jnp.zeros((TILE,), jnp.float32), _ROW),
            )
            if is_ring:
                carry = lax.fori_loop(0, steps, functools.partial(cache_step, visible=seen_in_ring), carry)
            else:
                carry = lax.fori_loop(0, whole_steps, functools.partial(cache_step, visible=None), carry)
                carry = lax.fori_loop(whole_steps, steps, functools.partial(cache_step, visible=seen_in_prefix), carry)
            values, maximum, total = lax.fori_loop(0, has_own, own_step, carry)

            for i, x in enumerate((maximum, total)):
                out_stats.at[b, kv_head, wg, split, i][...] = x

            @pl.when(steps + has_own > 0)
            def _store():
                for i in range(head_dim // num_columns):
                    columns = lax.slice(values, (0, i * num_columns), (TILE, (i + 1) * num_columns))
                    out_values.at[b, kv_head, wg, i, split][...] = columns

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def entry(*refs):
        pl.run_scoped(
            lambda *scratch: kernel(*refs, *scratch),
            plgpu.SMEM((tiles, TILE, head_dim), jnp.bfloat16, transforms=tiling),
            plgpu.SMEM((stages, block, head_dim), jnp.bfloat16, transforms=tiling),
            plgpu.SMEM((stages, block, head_dim), jnp.bfloat16, transforms=tiling),
            plgpu.SMEM((2, OWN_BLOCK, head_dim), jnp.bfloat16, transforms=tiling),
            plgpu.Barrier(num_arrivals=shape.tile_steps, num_barriers=tiles),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
            collective_axes="wg",
        )

    outer = (shape.batch, shape.kv_heads, tiles)
    return plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((*outer, head_dim // num_columns, shape.splits, TILE, num_columns), jnp.float32),
            jax.ShapeDtypeStruct((*outer, shape.splits, 2, TILE), jnp.float32),
        ),
        grid=(shape.splits, shape.kv_heads, shape.batch),
        grid_names=("split", "kv_head", "batch"),
        num_threads=tiles + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=compat.LOWERING_SEMANTICS),
    )(q, k, v, k_rows, v_rows, seen, row_info)


def _merge(shape: _Shape, values: jax.Array, stats: jax.Array, interpret: Any) -> jax.Array:
    """Sum over splits of weighted values over sum of weights. Returns [B, T, N, H] fp32."""
    groups, splits, warpgroups, num_columns = shape.groups, shape.splits, shape.merge_warpgroups, shape.merge_columns
    each = -(-splits // warpgroups)

    def kernel(values, stats, out, values_smem, stats_smem, out_smem, done):
        column, tile, kv_head, b = (lax.axis_index(name) for name in ("column", "tile", "kv_head", "batch"))
        wg = lax.axis_index("wg")

        def merge(parts):
            """parts: triples of values, maxima and sums; a part whose sum is 0 has values of no meaning."""
            highest = functools.reduce(jnp.maximum, (maximum for _, maximum, _ in parts))
            total = values = None
            for part, maximum, part_total in parts:
                weight = jnp.exp2(maximum - highest)
                seen = lax.broadcast_in_dim(part_total, part.shape, [0]) > 0.0
                part = jnp.where(seen, part * lax.broadcast_in_dim(weight, part.shape, [0]), 0.0)
                values = part if values is None else values + part
                total = part_total * weight if total is None else total + part_total * weight
            return values, highest, total

        def load_part(i):
            split = wg * each + i
            exists = split < splits
            split = jnp.minimum(split, splits - 1)
            part = compat.load(values.at[b, kv_head, tile, column, split], plgpu.Layout.WGMMA, optimized=False)
            maximum, total = (compat.load(stats.at[b, kv_head, tile, split, j], _ROW, optimized=False) for j in range(2))
            return part, maximum, total * exists.astype(jnp.float32)

        merged = merge([load_part(i) for i in range(each)])
        values_smem.at[wg][...] = merged[0]
        stats_smem.at[wg, 0][...] = merged[1]
        stats_smem.at[wg, 1][...] = merged[2]
        plgpu.barrier_arrive(done)

        @pl.when(wg == 0)
        def _finish():
            plgpu.barrier_wait(done)
            parts = []
            for i in range(warpgroups):
                part = compat.load(values_smem.at[i], plgpu.Layout.WGMMA, optimized=False)
                parts.append((part, *(compat.load(stats_smem.at[i, j], _ROW) for j in range(2))))
            values, _, total = merge(parts)
            total = jnp.maximum(total, 1e-30)  # a row that sees nothing gets zeros
            out_smem[...] = values / lax.broadcast_in_dim(total, values.shape, [0])
            plgpu.commit_smem()
            for i in range(shape.tile_steps):
                row = tile * shape.tile_steps + i

                @pl.when(row < shape.rows)
                def _(i=i, row=row):
                    heads, columns = pl.ds(kv_head * groups, groups), pl.ds(column * num_columns, num_columns)
                    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(i * groups, groups)], out.at[b, row, heads, columns])

            plgpu.wait_smem_to_gmem(0)

    def entry(*refs):
        pl.run_scoped(
            lambda *scratch: kernel(*refs, *scratch),
            plgpu.SMEM((warpgroups, TILE, num_columns), jnp.float32),
            plgpu.SMEM((warpgroups, 2, TILE), jnp.float32),
            plgpu.SMEM((TILE, num_columns), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
            collective_axes="wg",
        )

    heads = shape.kv_heads * groups
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((shape.batch, shape.rows, heads, shape.head_dim), jnp.float32),
        grid=(shape.head_dim // num_columns, shape.tiles, shape.kv_heads, shape.batch),
        grid_names=("column", "tile", "kv_head", "batch"),
        num_threads=warpgroups,
        thread_name="wg",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=compat.LOWERING_SEMANTICS),
    )(values, stats)


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != tuple(shape) or array.dtype != dtype:
        expected = f"{jnp.dtype(dtype).name} {list(shape)}"
        raise ValueError(f"{name} must be {expected}, not {array.dtype.name} {list(array.shape)}")
