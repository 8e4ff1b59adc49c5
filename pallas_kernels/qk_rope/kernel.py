"""Norm and RoPE of queries and keys in one launch; a CTA has 16 rows of a head."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    HALF_HEAD_LAYOUT,
    HALF_HEAD_ROWS,
    halves_of_head,
    head_rms,
    kernel,
    loader,
    product,
    store_halves,
    whole_rows,
)


def qk_rope(
    q: jax.Array, k: jax.Array, tables: tuple[jax.Array, jax.Array] | None, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`reference.qk_rope`, whose arguments and results these are, in one launch.

    The rows of a head are rows of the tables too, so that nothing is ever broadcast over heads.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if H is no multiple of 64.
    Rounding: that of the reference, but squares are summed in another order.
    """
    rows, heads, head_dim = q.shape
    if k.shape != (rows, k.shape[1], head_dim) or k.dtype != q.dtype:
        raise ValueError(f"qk_rope: k {k.dtype}{k.shape} does not fit q {q.dtype}{q.shape}")
    tables = () if tables is None else tuple(tables)
    if any(table.shape != (rows, head_dim // 2) or table.dtype != jnp.float32 for table in tables):
        raise ValueError(f"qk_rope: tables must be float32 {(rows, head_dim // 2)}, got {[t.shape for t in tables]}")
    if head_dim % 64:
        raise NotImplementedError(f"qk_rope: heads of {head_dim}; multiples of 64 are possible")
    load = loader(interpret)
    q, k, *tables = (whole_rows(x, HALF_HEAD_ROWS) for x in (q, k, *tables))
    padded = len(q)

    def qk_rope_head(q_ref, k_ref, *refs):
        *table_refs, q_out_ref, k_out_ref = refs
        head, here = lax.axis_index("head"), pl.ds(lax.axis_index("block") * HALF_HEAD_ROWS, HALF_HEAD_ROWS)

        def one_head(ref: Any, out_ref: Any) -> None:
            first, second = head_rms(halves_of_head(ref, load), eps)
            if table_refs:
                cos, sin = (load(table.at[here], HALF_HEAD_LAYOUT) for table in table_refs)
                first, second = (
                    product(first, cos) + product(-second, sin),
                    product(second, cos) + product(first, sin),
                )
            store_halves(out_ref, [first, second])

        @pl.when(head < heads)
        def _():
            one_head(q_ref.at[here, head], q_out_ref.at[here, head])

        @pl.when(head >= heads)
        def _():
            one_head(k_ref.at[here, head - heads], k_out_ref.at[head - heads, here])

    q, k = kernel(
        qk_rope_head,
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((k.shape[1], padded, head_dim), k.dtype)],
        grid={"head": heads + k.shape[1], "block": padded // HALF_HEAD_ROWS},
        interpret=interpret,
    )(q, k, *tables)
    return q[:rows], k[:, :rows]
