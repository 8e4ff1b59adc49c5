"""The GEMMs of the routed experts of one decode step with bf16 weights, for Hopper (Mosaic GPU, sm_90): as fast as the active
experts can be read.

What is computed, and for which tokens, is as in `nvfp4_gemm`, whose plan this takes; weights lie as in the checkpoint. A unit
of work is (expert with a routed row, 64 rows of its matrix, or of gate and of up). CTAs, one an SM, take units in turns: a
producer warpgroup fills a ring of stages by TMA across the borders of units, and one warpgroup multiplies, weights on the side
of 64 rows of a wgmma and tokens on that of 8 or 16. It has the accumulators of gate and up, so SwiGLU needs no exchange.

K is not split: a result depends on K alone, whatever else is in the batch, and a matrix cut by rank has the bits of the whole.
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
from pallas_kernels.nvfp4_gemm.kernel import Plan

TILE_ROWS = 64  # of each matrix, what a wgmma takes
SWIZZLE_COLS = 64  # of 2 bytes: 128, the widest swizzle
GROUP = 8  # tokens, in which a plan counts
SHARED_MEMORY = 227 * 1024  # of a CTA
BARRIERS = 1024  # bytes of shared memory left to them


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs.

    chunk: columns of a stage, a multiple of 64 that divides K.  stages: of the ring; None: as many as shared memory holds.
    num_ctas: one for each SM; 132 on H100 and H200.
    """

    chunk: int = 128
    stages: int | None = None
    num_ctas: int = 132


def gate_up(x: jax.Array, routing: Plan, weights: jax.Array, config: Config = Config(), interpret: Any = None) -> jax.Array:
    """silu(gate) up of each routed row.

    Args:     x: [R, K] bfloat16, R at most 16.  routing: of idx [R, top_k].  weights: [E, 2, F, K] bfloat16, gate and up; F
              and K are multiples of 64.
    Returns:  [R, top_k, F] bfloat16.
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: from fp32 accumulators, once.
    """
    if weights.ndim != 4 or weights.shape[1] != 2:
        raise ValueError(f"weights have shape {weights.shape}: [E, 2, F, K] is possible")
    _check("x", x, (routing.place.shape[0], weights.shape[-1]), weights)
    first_group = jnp.zeros_like(routing.first_group)
    return routing.of_padded(_gemm(routing.padded(x), first_group, routing, weights, config, interpret))


def down(hidden: jax.Array, routing: Plan, weights: jax.Array, config: Config = Config(), interpret: Any = None) -> jax.Array:
    """Each routed row times its expert's matrix.

    Args:     hidden: [R, top_k, K] bfloat16, R at most 16.  routing: of idx [R, top_k].  weights: [E, N, K] bfloat16; N and K
              are multiples of 64.
    Returns:  [R, top_k, N] bfloat16.
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: from the fp32 accumulator, once.
    """
    if weights.ndim != 3:
        raise ValueError(f"weights have shape {weights.shape}: [E, N, K] is possible")
    _check("hidden", hidden, (*routing.place.shape, weights.shape[-1]), weights)
    grouped = hidden.reshape(-1, weights.shape[-1])[routing.source]
    return routing.of_grouped(_gemm(grouped, routing.first_group, routing, weights[:, None], config, interpret))


def fitting(k: int) -> Config:
    """A config for matrices with K columns, on a GPU of 132 SMs."""
    return Config() if k % Config.chunk == 0 else Config(chunk=SWIZZLE_COLS)


def _check(name: str, x: jax.Array, shape: tuple[int, ...], weights: jax.Array) -> None:
    for what, array in ((f"{name} is", x), ("weights are", weights)):
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{what} {array.dtype}: the kernel takes bfloat16")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: the routing and the weights ask for {shape}")
    if weights.shape[-2] % TILE_ROWS or weights.shape[-1] % SWIZZLE_COLS:
        raise NotImplementedError(f"matrices {list(weights.shape[-2:])}: multiples of {TILE_ROWS} are possible")


def _stages(config: Config, k: int, matrices: int, window: int) -> int:
    """The number of stages. Raises ValueError if the config does not fit."""
    chunk = config.chunk
    if chunk < SWIZZLE_COLS or chunk % SWIZZLE_COLS or k % chunk:
        raise ValueError(f"chunks of {chunk} columns: multiples of {SWIZZLE_COLS} that divide K = {k} are possible")
    stage = 2 * chunk * (matrices * TILE_ROWS + window)
    most = (SHARED_MEMORY - BARRIERS) // stage
    stages = most if config.stages is None else config.stages
    if not 2 <= stages <= most:
        raise ValueError(f"{stages} stages of {stage} bytes: 2 to {most}, what shared memory holds, are possible")
    if config.num_ctas < 1:
        raise ValueError(f"{config}: at least one CTA is needed")
    return stages


def _gemm(
    rows: jax.Array, first_group: jax.Array, routing: Plan, weights: jax.Array, config: Config, interpret: Any
) -> jax.Array:
    """The kernel: each active expert times its window of rows.

    Args:     rows: [n, K].  first_group: [A] int32, of a place's window.  weights: [E, 1 or 2, N, K].
    Returns:  [A, N, window] bfloat16; not written beyond the active places.
    """
    _, matrices, n, k = weights.shape
    window, chunk, num_ctas = routing.window, config.chunk, config.num_ctas
    stages = _stages(config, k, matrices, window)
    tiles, chunks = n // TILE_ROWS, k // chunk

    def kernel(num_active, expert, first_group, rows, weights, out, w_smem, x_smem, full, empty) -> None:
        sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
        units = num_active[0] * tiles
        my_units = lax.div(units - sm + (num_ctas - 1), jnp.int32(num_ctas))

        def place_and_tile(i):
            unit = sm + i * num_ctas
            place = lax.div(unit, jnp.int32(tiles))
            return place, unit - place * tiles

        @pl.when(wg == 1)
        def _produce():
            @pl.loop(0, my_units)
            def _(i):
                place, tile = place_and_tile(i)
                first_row = (expert[place] * (matrices * tiles) + tile) * TILE_ROWS
                first_token = first_group[place] * GROUP

                @pl.loop(0, chunks)
                def _(index):
                    step = i * chunks + index
                    slot = lax.rem(step, jnp.int32(stages))
                    columns = pl.ds(index * chunk, chunk)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for matrix in range(matrices):
                        tile_rows = weights.at[pl.ds(first_row + matrix * n, TILE_ROWS), columns]
                        plgpu.copy_gmem_to_smem(tile_rows, w_smem.at[slot, matrix], full.at[slot])
                    plgpu.copy_gmem_to_smem(rows.at[pl.ds(first_token, window), columns], x_smem.at[slot], full.at[slot])

        @pl.when(wg == 0)
        def _consume():
            @pl.loop(0, my_units)
            def _(i):
                place, tile = place_and_tile(i)

                def accumulate(*accs):
                    @pl.loop(0, chunks)
                    def _(index):
                        slot = lax.rem(i * chunks + index, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[slot])
                        for matrix, acc in enumerate(accs):
                            plgpu.wgmma(acc, w_smem.at[slot, matrix], x_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])

                    return tuple(acc[...] for acc in accs)

                sums = pl.run_scoped(accumulate, *[plgpu.ACC((TILE_ROWS, window), jnp.float32)] * matrices)
                result = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if matrices == 2 else sums[0]
                compat.store(out.at[place, pl.ds(tile * TILE_ROWS, TILE_ROWS), :], result.astype(jnp.bfloat16))

    tiled = plgpu.TilingTransform((8, SWIZZLE_COLS)), plgpu.SwizzleTransform(2 * SWIZZLE_COLS)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(routing.expert), n, window), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((stages, matrices, TILE_ROWS, chunk), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((stages, window, chunk), jnp.bfloat16, transforms=tiled),
            plgpu.Barrier(num_arrivals=matrices + 1, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(num_ctas,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="wg",
        # No thread reads what another wrote, but for what TMA brings, and that has barriers.
        compiler_params=plgpu.CompilerParams(lowering_semantics=compat.LOWERING_SEMANTICS, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(routing.num_active, routing.expert, first_group, rows, weights.reshape(-1, k))
