"""Scores of every candidate after every candidate of the position before in one launch; a CTA has some of those before.

A thread has an eighth of a candidate's row in registers, and takes one candidate before after the other: of rank 256, sums of
32 products in a thread, then over eight threads. Tensor cores would round to TF32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import HALF_HEAD_LAYOUT, HALF_HEAD_ROWS, kernel, loader, store

_COLUMNS = 32  # of a tile of HALF_HEAD_LAYOUT
_LEFT, _SCORES = HALF_HEAD_LAYOUT.reduce(0), HALF_HEAD_LAYOUT.reduce(1)


@dataclasses.dataclass(frozen=True)
class Lattice:
    """before: candidates of the position before that a CTA has, a divisor of K."""

    before: int = 4


def lattice(
    projected: jax.Array,
    before: jax.Array,
    rows: jax.Array,
    unary: jax.Array,
    config: Lattice = Lattice(),
    interpret: Any = None,
) -> jax.Array:
    """`reference.lattice`, whose arguments and result these are, in one launch.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if K is no multiple of 16 or R is no
              multiple of 32.
    Rounding: that of the reference, but products are summed in another order.
    """
    batch, positions, top_k = unary.shape
    rank = projected.shape[-1]
    _check("projected", projected, (batch, positions, rank), jnp.float32)
    _check("unary", unary, unary.shape, jnp.float32)
    for name, x in (("before", before), ("rows", rows)):
        _check(name, x, (*unary.shape, rank), jnp.bfloat16, jnp.float32)
    if rank % _COLUMNS:
        raise NotImplementedError(f"lattice: rows of {rank}; allowed are multiples of {_COLUMNS}")

    if config.before < 1 or top_k % config.before:
        raise ValueError(f"lattice: {config.before} of {top_k} candidates before; it must divide them")
    if top_k % HALF_HEAD_ROWS:
        raise NotImplementedError(f"lattice: {top_k} candidates; allowed are multiples of {HALF_HEAD_ROWS}")
    load = loader(interpret)

    def scores(projected_ref, before_ref, rows_ref, unary_ref, out_ref):
        b, p, first = (lax.axis_index(name) for name in ("sequence", "position", "before"))
        first = first * config.before
        rows, alone = load(rows_ref.at[b, p], HALF_HEAD_LAYOUT), load(unary_ref.at[b, p], _SCORES)
        projected = load(projected_ref.at[b, p], _LEFT)
        left = [load(before_ref.at[b, p, first + i], _LEFT) for i in range(config.before)]
        for i, x in enumerate(left):
            x = lax.broadcast_in_dim(x * projected, rows.shape, (1,))
            store(out_ref.at[b, p, first + i], alone + jnp.sum(x * rows, axis=1))

    return kernel(
        scores,
        jax.ShapeDtypeStruct((*unary.shape, top_k), jnp.float32),
        grid={"before": top_k // config.before, "position": positions, "sequence": batch},
        interpret=interpret,
    )(projected, before, rows, unary)


def _check(name: str, x: jax.Array, shape: tuple[int, ...], *dtypes: Any) -> None:
    if x.shape != shape or x.dtype not in dtypes:
        allowed = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"lattice: {name} must be {allowed} {shape}, got {x.dtype}{x.shape}")
