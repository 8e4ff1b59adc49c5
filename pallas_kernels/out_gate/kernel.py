"""Norm and gate of attention's output in one launch; a CTA has 16 rows of a head."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import HALF_HEAD_ROWS, halves_of_head, head_rms, kernel, loader, store_halves, whole_rows


def out_gate(out: jax.Array, gate: jax.Array, eps: float, interpret: Any = None) -> jax.Array:
    """`reference.out_gate`, whose arguments and results these are, in one launch.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if H is no multiple of 64.
    Rounding: that of the reference, but squares are summed in another order, and the exponential of the sigmoid may differ
              from XLA's in its last bits.
    """
    rows, heads, head_dim = out.shape
    if gate.shape != (rows, heads * head_dim) or out.dtype != jnp.float32:
        raise ValueError(f"out_gate: a gate {gate.shape} and {out.dtype}{out.shape}; wanted [T, N H] and float32 [T, N, H]")
    if head_dim % 64:
        raise NotImplementedError(f"out_gate: heads of {head_dim}; multiples of 64 are possible")
    load = loader(interpret)
    out, gate = whole_rows(out, HALF_HEAD_ROWS), whole_rows(gate, HALF_HEAD_ROWS)

    def out_gate_head(out_ref, gate_ref, gated_ref):
        here = pl.ds(lax.axis_index("block") * HALF_HEAD_ROWS, HALF_HEAD_ROWS)
        head = lax.axis_index("head")
        gates = [jax.nn.sigmoid(x) for x in halves_of_head(gate_ref.at[here, head], load)]
        normed = head_rms(halves_of_head(out_ref.at[here, head], load), eps)
        store_halves(gated_ref.at[here, head], [x * g for x, g in zip(normed, gates, strict=True)])

    gated = kernel(
        out_gate_head,
        jax.ShapeDtypeStruct(out.shape, gate.dtype),
        grid={"head": heads, "block": len(out) // HALF_HEAD_ROWS},
        interpret=interpret,
    )(out, gate.reshape(out.shape))
    return gated.reshape(gate.shape)[:rows]
