"""Post-expert norm and weighted sum of routed rows in one launch; a CTA has the slots of a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    PIECE,
    PIECE_LAYOUT,
    exchange,
    exchange_scratch,
    in_pieces,
    kernel,
    loader,
    per_warp,
    pieces_of_warpgroup,
    store,
)


@dataclasses.dataclass(frozen=True)
class Combine:
    """eps: of the norm.  width: values of a whole row.  warpgroups: of a CTA, 1, 2, 4 or 8."""

    eps: float
    width: int
    warpgroups: int = 4


def combine(
    rows: jax.Array,
    weights: jax.Array,
    norm_weight: jax.Array,
    config: Combine,
    total: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`reference.combine`, whose arguments and result these are, in one launch.

    All slots of a row are loaded once and stay in registers: with four warpgroups and rows of 4096 a thread has eight values
    of each.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if m is no multiple of 512 warpgroups.
    Rounding: that of the reference, but squares are summed in another order; slots in their own.
    """
    _check(rows, norm_weight, config.warpgroups)
    num_rows, top_k, n = rows.shape
    for x in (weights,) if total is None else (weights, total):
        if x.shape != (num_rows, top_k) or x.dtype != jnp.float32:
            raise ValueError(f"combine: weights and totals must be float32 {(num_rows, top_k)}, got {x.dtype}{x.shape}")
    if total is None and n != config.width:
        raise ValueError(f"combine: pieces of {n} of rows of {config.width} need the total of their squares")
    load = loader(interpret)

    def combine_row(rows_ref, weights_ref, norm_ref, *refs):
        row, numbers = lax.axis_index("row"), pieces_of_warpgroup(n, config.warpgroups)
        slots = _scaled_slots(rows_ref.at[row], norm_ref, numbers, load)
        weights = [weights_ref[row, k] for k in range(top_k)]
        if total is None:
            out_ref, shared, barriers = refs
            totals = _totals(slots, shared, barriers, load)
        else:
            total_ref, out_ref = refs
            totals = [total_ref[row, k] for k in range(top_k)]
        inverses = [lax.rsqrt(total / config.width + config.eps) for total in totals]
        for j, i in enumerate(numbers):
            terms = [slot[j] * r * w for slot, r, w in zip(slots, inverses, weights, strict=True)]
            store(out_ref.at[row, i], functools.reduce(jnp.add, terms))

    arrays = [in_pieces(rows), weights, in_pieces(norm_weight), *([] if total is None else [total])]
    return kernel(
        combine_row,
        jax.ShapeDtypeStruct((num_rows, *arrays[0].shape[2:]), rows.dtype),
        grid={"row": num_rows},
        warpgroups=config.warpgroups,
        scratch=exchange_scratch(top_k, config.warpgroups) if total is None else (),
        interpret=interpret,
    )(*arrays).reshape(num_rows, n)


def _check(rows: jax.Array, norm_weight: jax.Array, warpgroups: int) -> None:
    if rows.ndim != 3 or norm_weight.shape != rows.shape[2:]:
        raise ValueError(f"combine: [T, top_k, m] and [m] wanted, got {rows.shape} and {norm_weight.shape}")
    if rows.shape[2] % (PIECE * warpgroups):
        raise NotImplementedError(
            f"combine: rows of {rows.shape[2]}; {warpgroups} warpgroups need a multiple of {PIECE * warpgroups}"
        )


def _scaled_slots(slots_ref: Any, norm_ref: Any, numbers: list[Any], load: Callable) -> list[list[jax.Array]]:
    """This warpgroup's pieces of each slot of a row [top_k, pieces, 4, 128], times 1 + w."""
    slots = [[load(slots_ref.at[k, i], PIECE_LAYOUT) for i in numbers] for k in range(slots_ref.shape[0])]
    scale = [1.0 + load(norm_ref.at[i], PIECE_LAYOUT) for i in numbers]
    return [[x * s for x, s in zip(slot, scale, strict=True)] for slot in slots]


def _totals(slots: list[list[jax.Array]], shared: Any, barriers: Any, load: Callable) -> list[jax.Array]:
    """The sum of the squares of each slot's whole row, a scalar."""
    values = [per_warp([x * x for x in slot]) for slot in slots]
    return [jnp.sum(total) for total in exchange(values, shared.at[0], barriers.at[0], load)]
