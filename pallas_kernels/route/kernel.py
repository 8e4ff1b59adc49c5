"""Choice of experts in one launch; a warp has a row, a CTA four."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import PIECE_LAYOUT, PIECE_SHAPE, kernel, loader, store, whole_rows
from pallas_kernels.route.reference import RENORM_EPS

_ROWS = PIECE_SHAPE[0]  # of a CTA


@dataclasses.dataclass(frozen=True)
class Route:
    """top_k: experts per row.  multiplier: of logits.  scaling: sum of a row's weights."""

    top_k: int
    multiplier: float
    scaling: float


def route(logits: jax.Array, bias: jax.Array, config: Route, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """`reference.route`, whose arguments and results these are, in one launch.

    top_k times the best of a row is found and hidden. Scores are compared as integers: a warp has one instruction for the
    largest of its integers, and they have an order with NaN too, so that ids are those of experts whatever the scores.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if E is no multiple of 128.
    Rounding: that of the reference, but the chosen scores are summed best first, and the exponential of the sigmoid may differ
              from XLA's in its last bits; so may a choice between scores that are this close.
    """
    rows, experts = logits.shape
    if bias.shape != (experts,) or logits.dtype != jnp.float32 or bias.dtype != jnp.float32:
        raise ValueError(f"route: float32 [T, E] and [E] wanted, got {logits.dtype}{logits.shape} and {bias.dtype}{bias.shape}")
    if not 0 < config.top_k <= experts:
        raise ValueError(f"route: {config.top_k} of {experts} experts")
    if experts % PIECE_SHAPE[1]:
        raise NotImplementedError(f"route: {experts} experts; multiples of 128 are possible")
    load = loader(interpret)
    logits = whole_rows(logits, _ROWS)

    def route_rows(logits_ref, bias_ref, idx_ref, weights_ref):
        here = pl.ds(lax.axis_index("block") * _ROWS, _ROWS)
        shape = (_ROWS, experts)

        def along_row(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, shape, (0,))

        scores = jax.nn.sigmoid(load(logits_ref.at[here], PIECE_LAYOUT) * config.multiplier)
        bias = lax.broadcast_in_dim(load(bias_ref, PIECE_LAYOUT.reduce(0)), shape, (1,))
        keys = _ordered(scores + bias)
        descending = experts - 1 - lax.broadcasted_iota(jnp.int32, shape, 1)
        chosen = []
        for i in range(config.top_k):
            is_best = keys == along_row(jnp.max(keys, axis=1))
            best = jnp.max(jnp.where(is_best, descending, -1), axis=1)  # the lowest id of equals
            store(idx_ref.at[here, i], experts - 1 - best)
            is_best = descending == along_row(best)
            keys = jnp.where(is_best, jnp.iinfo(jnp.int32).min, keys)
            chosen.append(jnp.sum(jnp.where(is_best, scores, 0.0), axis=1))  # one term
        total = sum(chosen[1:], chosen[0]) + RENORM_EPS
        for i, score in enumerate(chosen):
            store(weights_ref.at[here, i], score / total * config.scaling)

    out = (len(logits), config.top_k)
    idx, weights = kernel(
        route_rows,
        [jax.ShapeDtypeStruct(out, jnp.int32), jax.ShapeDtypeStruct(out, jnp.float32)],
        grid={"block": len(logits) // _ROWS},
        interpret=interpret,
    )(logits, bias)
    return idx[:rows], weights[:rows]


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of fp32 numbers, above the lowest int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
