"""NVFP4 quantisation of rows of activations in one launch; a CTA has a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from pallas_kernels.quantize_rows.reference import BLOCK, block_scales, e2m1, row_scale

_PAIRS = BLOCK // 2
# Pairs of values that share a byte, [blocks, 8, 2]: a warp has four blocks, a thread a pair of each.
_PAIRS_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((16, 8, 2), (4, 8, 2))), (-6,), (-3, -2), -1)


def quantize_rows(
    x: jax.Array, amax: jax.Array | None = None, warpgroups: int = 4, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reference.quantize_rows`, whose arguments and results these are, in one launch, bit for bit.

    Of a row with NaN, scales are NaN and codes may differ in their signs. A whole row is read twice, for its codes and for its
    largest magnitude, in the layouts that suit each; one of the two comes from a cache.

    Args:     warpgroups: of a CTA, 1, 2, 4 or 8.
    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if K is no multiple of 512 warpgroups.
    """
    rows, n = x.shape
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"quantize_rows: bfloat16 wanted, got {x.dtype}")
    if amax is not None and (amax.shape != (rows,) or amax.dtype != jnp.float32):
        raise ValueError(f"quantize_rows: largest magnitudes must be float32 {(rows,)}, got {amax.dtype}{amax.shape}")
    if n % (PIECE * warpgroups):
        raise NotImplementedError(f"quantize_rows: rows of {n}; {warpgroups} warpgroups need multiples of {PIECE * warpgroups}")
    load, blocks = loader(interpret), n // BLOCK // warpgroups  # of a warpgroup
    reciprocal = _reciprocal if interpret is None else lambda x: 1 / x

    def quantize_row(pairs_ref, whole_ref, codes_ref, scales_ref, row_scales_ref, *scratch):
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        here = pl.ds(wg * blocks, blocks)
        x = load(pairs_ref.at[row, here], _PAIRS_LAYOUT)
        if amax is None:
            shared, barriers = scratch
            magnitudes = [jnp.abs(load(whole_ref.at[row, i], PIECE_LAYOUT)) for i in pieces_of_warpgroup(n, warpgroups)]
            [largest] = exchange([per_warp(magnitudes, jnp.max)], shared.at[0], barriers.at[0], load)
            scale_of_row = row_scale(jnp.max(largest))
        else:
            scale_of_row = row_scale(whole_ref[row])

        block_amax = jnp.max(jnp.max(jnp.abs(x), axis=2), axis=1)
        # As an array: Mosaic GPU of jax 0.10.2 has no barrier for scalars.
        scale, factor = block_scales(block_amax, jnp.full(block_amax.shape, scale_of_row), reciprocal)
        store(scales_ref.at[row, here], scale)
        scale, factor = (lax.broadcast_in_dim(y, x.shape[:2], (0,)) for y in (scale, factor))
        codes = e2m1(x * lax.broadcast_in_dim(factor, x.shape, (0, 1)))
        is_high = lax.broadcasted_iota(jnp.int32, x.shape, 2)
        codes = jnp.sum(jnp.where(is_high == 1, codes << 4, codes), axis=2)
        store(codes_ref.at[row, here], jnp.where(scale == 0, 0, codes))

        @pl.when(wg == 0)
        def _():
            row_scales_ref[row] = scale_of_row

    codes, scales, row_scales = kernel(
        quantize_row,
        [
            jax.ShapeDtypeStruct((rows, n // BLOCK, _PAIRS), jnp.uint8),
            jax.ShapeDtypeStruct((rows, n // BLOCK), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid={"row": rows},
        warpgroups=warpgroups,
        scratch=exchange_scratch(1, warpgroups) if amax is None else (),
        interpret=interpret,
    )(x.reshape(rows, n // BLOCK, _PAIRS, 2), in_pieces(x) if amax is None else amax)
    return codes.reshape(rows, n // 2), scales, row_scales


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x, correctly rounded, of finite x with no mantissa of ones only. For compiled kernels.

    Mosaic GPU's own is within a unit in the last place. A Newton step mends that if both its lines are one fused operation,
    which is what it makes of a product and a sum; a CPU might not. x here has few mantissas: of a scale of rows, which comes
    from a bfloat16, of its reciprocal, and of their products with e4m3 values. A test goes through all.
    """
    approximate = 1 / x
    error = 1 - x * approximate
    return jnp.where(error == error, approximate + approximate * error, approximate)  # not for infinity and zero
