"""Scores of every candidate after every candidate of the position before in one launch; a CTA has some of those before.

A thread has an eighth of a candidate's row in registers, and takes one candidate before after the other: of rank 256, sums of
32 products in a thread, then over eight threads. Tensor cores would round to TF32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.common import HALF_HEAD_LAYOUT, HALF_HEAD_ROWS, kernel, loader, store

_COLUMNS = 32  # of a tile of HALF_HEAD_LAYOUT
_LEFT, _SCORES = HALF_HEAD_LAYOUT.reduce(0), HALF_HEAD_LAYOUT.reduce(1)
# A row of a codebook on its way to shared memory: two values a thread.
_RANK = 256
_ROW_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((1, _RANK), (_RANK // 4,), (2,))), (-3,), (-2,), -1)


@dataclasses.dataclass(frozen=True)
class Lattice:
    """before: candidates of the position before that a CTA has, a divisor of K."""

    before: int = 4


def lattice(
    projected: jax.Array,
    anchor: jax.Array,
    ids: jax.Array,
    unary: jax.Array,
    predecessor: jax.Array,
    successor: jax.Array,
    config: Lattice = Lattice(),
    interpret: Any = None,
) -> jax.Array:
    """`reference.lattice`, whose arguments and result these are, in one launch.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if K is no multiple of 16 or R is not
              256.
    Rounding: that of the reference, but products are summed in another order.
    """
    batch, positions, top_k = ids.shape
    rank = projected.shape[-1]
    _check("anchor", anchor, (batch,), jnp.int32)
    _check("ids", ids, ids.shape, jnp.int32)
    _check("projected", projected, (batch, positions, rank), jnp.float32)
    _check("unary", unary, ids.shape, jnp.float32)
    for name, table in (("predecessor", predecessor), ("successor", successor)):
        _check_rows(name, table, (table.shape[0], rank))
    if predecessor.dtype != successor.dtype:
        raise ValueError(f"lattice: codebooks of {predecessor.dtype} and {successor.dtype}; their dtypes must be equal")
    if rank != _RANK:
        raise NotImplementedError(f"lattice: codebooks of rank {rank}; allowed is {_RANK}")

    def scores(projected_ref, anchor_ref, ids_ref, unary_ref, predecessor_ref, successor_ref, out_ref, rows_smem, *scratch):
        *left, barrier = scratch
        b, p, first = (lax.axis_index(name) for name in ("sequence", "position", "before"))
        first = first * config.before
        copies = [(successor_ref, ids_ref[b, p, j], rows_smem.at[pl.ds(j, 1)]) for j in range(top_k)]
        for i, row in enumerate(left):
            before = ids_ref[b, jnp.maximum(p - 1, 0), first + i]
            copies.append((predecessor_ref, jnp.where(p == 0, anchor_ref[b], before), row))
        # All loads are under way before the first store.
        alone = _of_position(projected_ref.at[b, p], unary_ref.at[b, p], loader(interpret))
        pieces = [load(table.at[pl.ds(token, 1)]) for table, token, _ in copies]
        for (_, _, target), piece in zip(copies, pieces, strict=True):
            compat.store(target, piece)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        outs = [out_ref.at[b, p, first + i] for i in range(config.before)]
        left = [row.at[0] for row in left]
        _scores(*alone, left, rows_smem, outs, loader(interpret))

    def load(ref: Any) -> jax.Array:
        return compat.load(ref, _ROW_LAYOUT, optimized=False, interpret=interpret)

    scratch = [plgpu.SMEM((n, rank), predecessor.dtype) for n in (top_k, *[1] * config.before)]
    call = _call(scores, ids.shape, config, interpret, [*scratch, plgpu.Barrier()])
    return call(projected, anchor, ids, unary, predecessor, successor)


def lattice_of_rows(
    projected: jax.Array,
    before: jax.Array,
    rows: jax.Array,
    unary: jax.Array,
    config: Lattice = Lattice(),
    interpret: Any = None,
) -> jax.Array:
    """`reference.lattice_of_rows`, whose arguments and result these are, in one launch.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if K is no multiple of 16 or R is no
              multiple of 32.
    Rounding: that of the reference, but products are summed in another order.
    """
    batch, positions, _ = unary.shape
    rank = projected.shape[-1]
    _check("projected", projected, (batch, positions, rank), jnp.float32)
    _check("unary", unary, unary.shape, jnp.float32)
    for name, x in (("before", before), ("rows", rows)):
        _check_rows(name, x, (*unary.shape, rank))
    if rank % _COLUMNS:
        raise NotImplementedError(f"lattice: rows of {rank}; allowed are multiples of {_COLUMNS}")

    def scores(projected_ref, before_ref, rows_ref, unary_ref, out_ref):
        b, p, first = (lax.axis_index(name) for name in ("sequence", "position", "before"))
        first = first * config.before
        left = [before_ref.at[b, p, first + i] for i in range(config.before)]
        outs = [out_ref.at[b, p, first + i] for i in range(config.before)]
        alone = _of_position(projected_ref.at[b, p], unary_ref.at[b, p], loader(interpret))
        _scores(*alone, left, rows_ref.at[b, p], outs, loader(interpret))

    return _call(scores, unary.shape, config, interpret)(projected, before, rows, unary)


def _of_position(projected_ref: Any, unary_ref: Any, load: Callable) -> tuple[jax.Array, jax.Array]:
    """[R] and [K], as `_scores` takes them."""
    return load(projected_ref, _LEFT), load(unary_ref, _SCORES)


def _scores(projected: jax.Array, unary: jax.Array, left: list[Any], rows_ref: Any, outs: list[Any], load: Callable) -> None:
    """Writes a row [K] of scores for each of `left`, [R]. rows: [K, R]."""
    rows = load(rows_ref, HALF_HEAD_LAYOUT)
    left = [load(ref, _LEFT) for ref in left]
    for x, out in zip(left, outs, strict=True):
        x = lax.broadcast_in_dim(x * projected, rows.shape, (1,))
        store(out, unary + jnp.sum(x * rows, axis=1))


def _call(
    body: Callable, shape: tuple[int, int, int], config: Lattice, interpret: Any, scratch: Any = ()
) -> Callable[..., jax.Array]:
    batch, positions, top_k = shape
    if config.before < 1 or top_k % config.before:
        raise ValueError(f"lattice: {config.before} of {top_k} candidates before; it must divide them")
    if top_k % HALF_HEAD_ROWS:
        raise NotImplementedError(f"lattice: {top_k} candidates; allowed are multiples of {HALF_HEAD_ROWS}")
    return kernel(
        body,
        jax.ShapeDtypeStruct((batch, positions, top_k, top_k), jnp.float32),
        grid={"before": top_k // config.before, "position": positions, "sequence": batch},
        scratch=scratch,
        interpret=interpret,
    )


def _check(name: str, x: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"lattice: {name} must be {jnp.dtype(dtype).name}{shape}, got {x.dtype}{x.shape}")


def _check_rows(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"lattice: {name} must be bfloat16 or float32 {shape}, got {x.dtype}{x.shape}")
