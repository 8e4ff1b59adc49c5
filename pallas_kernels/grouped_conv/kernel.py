"""The grouped convolution of a draft block as one Mosaic GPU kernel for Hopper.

A CTA takes 64 groups of channels and some rows; in a layout of wgmma, groups are rows and the channels of a group
columns, so that a coefficient per group is a broadcast. All is read straight into registers: at a block of 16 rows the
kernel is a launch and one trip to memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.numerics import product

TILE = 64  # groups of a CTA: rows of the layout
# Four neighbouring channels to a thread: whole sectors of memory, in bf16 too.
_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


@dataclasses.dataclass(frozen=True)
class GroupedConvConfig:
    """rows: of a CTA; each also reads the taps - 1 rows before them."""

    rows: int = 2

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, not {self.rows}")


def grouped_conv(
    z: jax.Array,
    base: jax.Array,
    coefficients: jax.Array,
    residual: jax.Array | None = None,
    *,
    side: int,
    block_size: int,
    dtype: jnp.dtype = jnp.float32,
    config: GroupedConvConfig = GroupedConvConfig(),
    interpret: Any = False,
) -> jax.Array:
    """residual + sum over taps of (base + coefficients) times the row `tap` before, of the same block.

    Args:     z: [B, T, D] bf16 or fp32, T a multiple of block_size.  base: [2, taps, D] bf16 or fp32.
              coefficients: [B, T, 2, taps, groups] fp32, for channels in groups of D / groups.  residual: [B, T, D] fp32.
              side: 0 or 1, of base and coefficients.  interpret: False, or what `compat.interpret_params` returns.
    Returns:  [B, T, D] of `dtype`, bfloat16 or float32.
    Rounding: fp32, one rounding to `dtype`.
    Raises:   ValueError if shapes or dtypes do not fit each other, or a CTA's rows do not divide block_size;
              NotImplementedError unless groups is a multiple of 64 and a group has 16, 32 or 64 channels.
    """
    _check(z, base, coefficients, residual, side, block_size, dtype, config)
    batch, rows, channels = z.shape
    taps, groups = coefficients.shape[3:]
    group = channels // groups
    tile = (TILE, group)

    def load(ref: Any) -> jax.Array:
        return compat.load(ref, _LAYOUT, optimized=False).astype(jnp.float32)

    def kernel(z, base, coefficients, *rest):
        *residual, out = rest
        first = lax.axis_index("rows") * config.rows
        b, in_block = lax.axis_index("batch"), lax.rem(first, jnp.int32(block_size))
        at = pl.ds(lax.axis_index("groups") * TILE, TILE)
        taps_base = [load(base.at[side, tap, at]) for tap in range(taps)]
        x = {}
        for i in range(1 - taps, config.rows):
            row = load(z.at[b, jnp.maximum(first + i, 0), at])
            # What comes before a block is nothing, whatever is there: a select, so that NaN goes nowhere either.
            x[i] = row if i >= 0 else jnp.where(jnp.broadcast_to(in_block + i >= 0, tile), row, 0.0)
        for i in range(config.rows):
            total = None
            for tap in range(taps):
                delta = compat.load(coefficients.at[b, first + i, side, tap, at], _LAYOUT.reduce(1), optimized=False)
                delta = plgpu.layout_cast(lax.broadcast_in_dim(delta, tile, [0]), _LAYOUT)
                term = product(taps_base[tap] + delta, x[i - tap])
                total = term if total is None else total + term
            if residual:
                total = load(residual[0].at[b, first + i, at]) + total
            out.at[b, first + i, at][...] = total.astype(dtype)

    grouped = (batch, rows, groups, group)
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(grouped, dtype),
        grid=(groups // TILE, rows // config.rows, batch),
        grid_names=("groups", "rows", "batch"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=compat.LOWERING_SEMANTICS),
    )(
        z.reshape(grouped),
        base.reshape(2, taps, groups, group),
        coefficients,
        *(() if residual is None else (residual.reshape(grouped),)),
    )
    return out.reshape(z.shape)


def _check(z, base, coefficients, residual, side, block_size, dtype, config) -> None:
    floats = (jnp.bfloat16, jnp.float32)
    if z.ndim != 3 or z.dtype not in floats:
        raise ValueError(f"z must be bfloat16 or float32 [B, T, D], not {z.dtype.name} {list(z.shape)}")
    batch, rows, channels = z.shape
    if coefficients.ndim != 5 or coefficients.shape[:3] != (batch, rows, 2) or coefficients.dtype != jnp.float32:
        expected = f"float32 [{batch}, {rows}, 2, taps, groups]"
        raise ValueError(f"coefficients must be {expected}, not {coefficients.dtype.name} {list(coefficients.shape)}")
    taps, groups = coefficients.shape[3:]
    if base.shape != (2, taps, channels) or base.dtype not in floats:
        expected = f"bfloat16 or float32 {[2, taps, channels]}"
        raise ValueError(f"base must be {expected}, not {base.dtype.name} {list(base.shape)}")
    if residual is not None and (residual.shape != z.shape or residual.dtype != jnp.float32):
        raise ValueError(f"residual must be float32 {list(z.shape)}, not {residual.dtype.name} {list(residual.shape)}")
    if side not in (0, 1) or dtype not in floats:
        raise ValueError(f"side must be 0 or 1 and dtype bfloat16 or float32, not {side} and {dtype}")
    if rows % block_size or block_size % config.rows or not 1 <= taps <= block_size:
        raise ValueError(f"{rows} rows in blocks of {block_size}, {config.rows} to a CTA, with {taps} taps, do not fit")
    if groups % TILE or channels % groups or channels // groups not in (16, 32, 64):
        raise NotImplementedError(
            f"groups must be a multiple of {TILE}, of 16, 32 or 64 channels, not {groups} groups of {channels} channels"
        )
