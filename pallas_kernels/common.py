"""What several kernels need: rows in the registers of warpgroups, and what the warps of a CTA tell each other.

A warpgroup is four warps of 32 threads; Mosaic GPU calls it a thread, and "wg" is a kernel's axis of warpgroups. Where rows are
long a CTA has one, and its warps exchange sums over it; where they are short, a warp has whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

# A row is cut into pieces of 512 values, each an array [4, 128] in the registers of a warpgroup: a warp has 128 of them, a
# thread four consecutive ones.
PIECE = 512
PIECE_SHAPE = (4, 128)
PIECE_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)
# 16 rows of half a head: a warp has four rows, eight threads a row.
HALF_HEAD_ROWS = 16
HALF_HEAD_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), (-5,), (-3, -2), -1)
# Sums of the warps, of which there are a multiple of four: every thread holds all.
_EVERYWHERE = plgpu.Layout.TILED(plgpu.Tiling(((4,),)), (plgpu.Replicated(4),), (plgpu.Replicated(32),), -1)


def kernel(body: Callable, out_type: Any, *, grid: dict[str, int], interpret: Any, warpgroups: int = 1, scratch: Any = ()):
    """`plgpu.kernel` as this package uses it. grid: sizes by name.  interpret: None to compile, else `interpret_params()`."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        # The semantics are said because their default is another in jax 0.10.2 than in 0.12. Barriers around every store are
        # for threads that read what others of their warpgroup wrote: here that happens in `exchange` alone, which has its own,
        # where every thread arrives and waits.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )


def loader(interpret: Any) -> Callable[[Any, Any], jax.Array]:
    """load(ref, layout): what a ref holds, as fp32."""

    def load(ref: Any, layout: Any) -> jax.Array:
        return compat.load(ref, layout, optimized=False, interpret=interpret).astype(jnp.float32)

    return load


def whole_rows(x: jax.Array, multiple: int) -> jax.Array:
    """Rows of zeros appended up to a multiple of so many."""
    padding = -x.shape[0] % multiple
    return jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)]) if padding else x


def store(ref: Any, x: jax.Array) -> None:
    """Rounds to the ref's dtype and writes."""
    compat.store(ref, x.astype(ref.dtype))


def in_pieces(x: jax.Array) -> jax.Array:
    """[..., n] -> [..., n / 512, 4, 128]: the same memory."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // PIECE, *PIECE_SHAPE)


def halves_of_head(ref: Any, load: Callable) -> list[jax.Array]:
    """Both halves of a head in 16 rows, [16, H] -> two [16, H / 2] fp32."""
    half = ref.shape[-1] // 2
    return [load(ref.at[:, pl.ds(i * half, half)], HALF_HEAD_LAYOUT) for i in range(2)]


def head_rms(halves: Sequence[jax.Array], eps: float) -> list[jax.Array]:
    """rms over each row of a head, given and returned as halves."""
    first, second = halves
    n = 2 * first.shape[1]
    total = jnp.sum(first * first + second * second, axis=1)
    inverse = lax.broadcast_in_dim(lax.rsqrt(total / n + eps), first.shape, (0,))
    return [x * inverse for x in halves]


def store_halves(ref: Any, halves: Sequence[jax.Array]) -> None:
    """Rounds both halves of a head to the ref's dtype and writes them."""
    half = ref.shape[-1] // 2
    for i, x in enumerate(halves):
        store(ref.at[:, pl.ds(i * half, half)], x)


def pieces_of_warpgroup(n: int, warpgroups: int) -> list[Any]:
    """Numbers of the pieces of a row of n values that this warpgroup has. For use inside a kernel."""
    count = n // (PIECE * warpgroups)
    first = lax.axis_index("wg") * count
    return [first + i for i in range(count)]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, rounded on its own where it is a term of a sum.

    Mosaic GPU marks products and sums for contraction. LLVM sees no product behind a barrier; ptxas, and XLA under the
    interpreter, see through barriers, but not through comparisons.
    """
    xy = lax.optimization_barrier(x * y)
    return lax.select(xy == xy, xy, jnp.full_like(xy, jnp.nan))


def per_warp(arrays: Sequence[jax.Array], op: Callable = jnp.sum) -> jax.Array:
    """Sums (or what else `op` does) of pieces, one for each warp of the warpgroup: [4]."""
    combine = jnp.add if op is jnp.sum else jnp.maximum
    return op(functools.reduce(combine, arrays), axis=1)


def exchange_scratch(count: int, warpgroups: int, uses: int = 1) -> list[Any]:
    """The scratch of `uses` calls of `exchange` with `count` values each: [uses, count, warps] fp32, [uses] barriers."""
    return [
        plgpu.SMEM((uses, count, 4 * warpgroups), jnp.float32),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=uses),
    ]


def exchange(values: Sequence[jax.Array], shared: Any, barrier: Any, load: Callable) -> list[jax.Array]:
    """Gives every thread of a CTA the values of all warps.

    Args:     values: each [4] fp32, one for each warp of this warpgroup.  shared, barrier: of one use, since nobody waits
              until all have read.
    Returns:  for each of `values`, [warps] fp32.
    """
    first = 4 * lax.axis_index("wg")
    for i, value in enumerate(values):
        shared[i, pl.ds(first, 4)] = value
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    return [load(shared.at[i], _EVERYWHERE) for i in range(len(values))]
