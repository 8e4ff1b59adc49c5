"""Products of a few rows with dense bf16 matrices, for Hopper (Mosaic GPU, sm_90): as fast as the matrices can be read.

The transposed product: weights are on the side of 64 rows of a wgmma, tokens on that of 8 or 16, both in shared memory. The
matrices that read the same rows, one after the other, are cut into blocks of 64 rows; a tile is a few blocks, whichever
matrices they belong to, and K is cut into `splits` parts. A unit of work is (tile, part). CTAs, one an SM, take units in
turns: a producer warpgroup fills a ring of stages by TMA across the borders of units, and a warpgroup for each block of the
tile multiplies. Tiles of several blocks share the tokens that a stage brings along.

With one part the accumulators are the result. With more they go to memory, and a second kernel adds them in the order of K.
So a result depends on K, `splits` and `chunk` alone: not on the number of rows of a matrix, its neighbours or CTAs, and a
matrix that is cut by rank has the bits of the whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import common, compat

BLOCK_ROWS = 64  # of weights, what a wgmma takes
MAX_ROWS = 16
MAX_BLOCKS = 3  # warpgroups that multiply; each thread of a CTA of four may still have 128 registers
SWIZZLE_COLS = 64  # of 2 bytes: 128, the widest swizzle
MAX_SPLITS = 32  # that the second kernel adds
COLUMNS = 32  # of the result, that a CTA of the second kernel adds
SHARED_MEMORY = 227 * 1024  # of a CTA
BARRIERS = 1024  # bytes of shared memory left to them


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs.

    splits: parts of K, each whole chunks, as equal as can be. Part of the definition of the sum, like chunk.
    chunk: columns of a stage, a multiple of 64.  blocks: of 64 rows in a tile, 1 to 3.  stages: of the ring.
    num_ctas: one for each SM; 132 on H100 and H200.
    """

    splits: int = 1
    blocks: int = 1
    chunk: int = 128
    stages: int = 8
    num_ctas: int = 132


def fitting(rows: int, k: int, sizes: Sequence[int]) -> Config:
    """A config for `rows` times matrices [n, k] for each n of `sizes`, on a GPU of 132 SMs.

    As few splits as let units fill 95 % of the SMs in one round, or in several where there are so many tiles.

    Raises:   NotImplementedError if k is no multiple of 64.
    """
    if k % SWIZZLE_COLS:
        raise NotImplementedError(f"K = {k}: multiples of {SWIZZLE_COLS} are possible")
    chunk = 128 if k % 128 == 0 else SWIZZLE_COLS
    num_blocks = sum(-(-n // BLOCK_ROWS) for n in sizes)
    num_ctas = Config.num_ctas
    splits, blocks, best = 1, MAX_BLOCKS if num_blocks > num_ctas * 2 else 1, 0.0
    if num_blocks < 0.95 * num_ctas:
        for candidate in range(MAX_BLOCKS, 0, -1):
            tiles = -(-num_blocks // candidate)
            parts = max(1, min(num_ctas // tiles, k // chunk, MAX_SPLITS))
            filled = min(0.95, tiles * parts / num_ctas)
            if filled > best or (filled == best and parts < splits):
                splits, blocks, best = parts, candidate, filled
    window = _window(rows)
    stage = 2 * chunk * (blocks * BLOCK_ROWS + window)
    room = (SHARED_MEMORY - BARRIERS - 4 * blocks * BLOCK_ROWS * window) // stage
    return Config(splits, blocks, chunk, max(2, min(room, -(-k // chunk // splits))))


def dense(
    x: jax.Array,
    weights: Sequence[jax.Array],
    out_dtype: jnp.dtype = jnp.bfloat16,
    config: Config = Config(),
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """x W^T for each of several matrices.

    Args:     x: [R, K] bfloat16, R at most 16.  weights: each [N, K] bfloat16; N may differ, is at least 64 and a multiple of
              8, with `splits` of 32.  out_dtype: bfloat16 or float32.
    Returns:  for each matrix [R, N].
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: from the fp32 accumulator, once; float32 is the accumulator itself.
    """
    weights = tuple(weights)
    _check(x, weights, config, 1 if config.splits == 1 else COLUMNS)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"out_dtype is {jnp.dtype(out_dtype)}: bfloat16 and float32 are possible")
    if config.splits == 1:
        outs = [out[0] for out in _multiply(x, weights, out_dtype, config, interpret)]
    else:
        partials = _multiply(x, weights, jnp.float32, config, interpret)
        outs = _finish([(partial,) for partial in partials], lambda y: y, out_dtype, interpret)
    return tuple(out[: x.shape[0]] for out in outs)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, config: Config = Config(), interpret: Any = None) -> jax.Array:
    """silu(x gate^T) (x up^T).

    Args:     x: [R, K] bfloat16, R at most 16.  gate, up: [N, K] bfloat16, N at least 64 and a multiple of 32.
    Returns:  [R, N] bfloat16.
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: the product alone, from fp32 accumulators.
    """
    _check(x, (gate, up), config, COLUMNS)
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} and up {up.shape}: they must be equal")
    partials = _multiply(x, (gate, up), jnp.float32, config, interpret)
    (out,) = _finish([partials], lambda gate, up: gate * jax.nn.sigmoid(gate) * up, jnp.bfloat16, interpret)
    return out[: x.shape[0]]


def _check(x: jax.Array, weights: tuple[jax.Array, ...], config: Config, multiple: int) -> None:
    if x.ndim != 2 or not x.shape[0]:
        raise ValueError(f"x has shape {x.shape}: [R, K] is possible")
    if x.shape[0] > MAX_ROWS:
        raise NotImplementedError(f"{x.shape[0]} rows, more than {MAX_ROWS}")
    if not weights:
        raise ValueError("no matrix: at least one is needed")
    for name, array in (("x", x), *((f"matrix {i}", weight) for i, weight in enumerate(weights))):
        if array.dtype != jnp.bfloat16:
            raise NotImplementedError(f"{name} is {array.dtype}: the kernel takes bfloat16")
    multiple = max(multiple, 8)
    for i, weight in enumerate(weights):
        if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
            raise ValueError(f"matrix {i} has shape {weight.shape}: x asks for [N, {x.shape[1]}]")
        if weight.shape[0] < BLOCK_ROWS or weight.shape[0] % multiple:
            raise NotImplementedError(
                f"matrix {i} has {weight.shape[0]} rows: at least {BLOCK_ROWS}, and a multiple of {multiple}, are possible"
            )
    k, chunk = x.shape[1], config.chunk
    if chunk < SWIZZLE_COLS or chunk % SWIZZLE_COLS or k % chunk:
        raise ValueError(f"chunks of {chunk} columns: multiples of {SWIZZLE_COLS} that divide K = {k} are possible")
    if not 1 <= config.splits <= k // chunk:
        raise ValueError(f"{config.splits} splits of K = {k}: 1 to {k // chunk}, the number of chunks, are possible")
    if not 1 <= config.blocks <= MAX_BLOCKS:
        raise ValueError(f"tiles of {config.blocks} blocks: 1 to {MAX_BLOCKS} are possible")
    if config.stages < 2 or config.num_ctas < 1:
        raise ValueError(f"{config}: at least two stages and one CTA are needed")
    stage = 2 * chunk * (config.blocks * BLOCK_ROWS + _window(x.shape[0]))
    most = (SHARED_MEMORY - BARRIERS - 4 * config.blocks * BLOCK_ROWS * _window(x.shape[0])) // stage
    if config.stages > most:
        raise ValueError(f"{config.stages} stages of {stage} bytes do not fit shared memory: at most {most} do")


def _window(rows: int) -> int:
    return 8 if rows <= 8 else 16


def _multiply(
    x: jax.Array, weights: tuple[jax.Array, ...], out_dtype: Any, config: Config, interpret: Any
) -> Sequence[jax.Array]:
    """Each part of K apart. Returns, for each matrix, [splits, window, N]."""
    splits, blocks, chunk, stages = config.splits, config.blocks, config.chunk, config.stages
    window, num_chunks = _window(x.shape[0]), x.shape[1] // chunk
    firsts = [0]  # block of each matrix, and after them the number of blocks
    for weight in weights:
        firsts.append(firsts[-1] + -(-weight.shape[0] // BLOCK_ROWS))
    tiles = -(-firsts[-1] // blocks)
    units = tiles * splits
    num_ctas = min(config.num_ctas, units)
    turned_layout = plgpu.Layout.TILED(plgpu.Tiling(((window, 32), (window // 4, 32), (1,))), (-5,), (-2,), -1)

    def of_matrix(block: jax.Array, function: Callable[[int, jax.Array], None]) -> None:
        """Calls function(matrix, first row) for the matrix that the block is of. None for blocks beyond the last."""
        for i, weight in enumerate(weights):

            @pl.when((block >= firsts[i]) & (block < firsts[i + 1]))
            def _(i=i, rows=weight.shape[0]):
                # The last block of a matrix may overlap the one before: both write the same.
                function(i, jnp.minimum((block - firsts[i]) * BLOCK_ROWS, rows - BLOCK_ROWS))

    def kernel(x: Any, weights: Sequence[Any], outs: Sequence[Any], *scratch: Any) -> None:
        w_smem, x_smem, turn_smem, full, empty = scratch
        sm, wg = lax.axis_index("sm"), lax.axis_index("wg")

        def for_units(one: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], None]) -> None:
            """Calls one(tile, part, its first chunk, its end, steps of the ring before) for each unit of this CTA."""

            def unit(i, step):
                number = sm + i * num_ctas
                tile = lax.div(number, jnp.int32(splits))
                part = number - tile * splits
                first, end = (lax.div(p * num_chunks, jnp.int32(splits)) for p in (part, part + 1))
                one(tile, part, first, end, step)
                return step + (end - first)

            lax.fori_loop(0, lax.div(units - sm + (num_ctas - 1), jnp.int32(num_ctas)), unit, jnp.int32(0))

        @pl.when(wg == blocks)
        def _produce():
            def load(tile, part, first, end, before):
                @pl.loop(first, end)
                def _(index):
                    step = before + (index - first)
                    slot = lax.rem(step, jnp.int32(stages))
                    columns = pl.ds(index * chunk, chunk)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for b in range(blocks):

                        def copy(i, row, b=b):
                            rows = weights[i].at[pl.ds(row, BLOCK_ROWS), columns]
                            plgpu.copy_gmem_to_smem(rows, w_smem.at[slot, b], full.at[slot])

                        # Beyond the last block it is read again: every stage is full.
                        of_matrix(jnp.minimum(tile * blocks + b, firsts[-1] - 1), copy)
                    plgpu.copy_gmem_to_smem(x.at[:, columns], x_smem.at[slot], full.at[slot])

            for_units(load)

        @pl.when(wg < blocks)
        def _consume():
            def multiply(tile, part, first, end, before):
                def accumulate(acc):
                    @pl.loop(first, end)
                    def _(index):
                        slot = lax.rem(before + (index - first), jnp.int32(stages))
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, w_smem.at[slot, wg], x_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])

                    return acc[...]

                mine = turn_smem.at[wg]
                mine[...] = pl.run_scoped(accumulate, plgpu.ACC((BLOCK_ROWS, window), jnp.float32))
                plgpu.commit_smem()  # a barrier between the threads that write and those that read
                turned = compat.load(mine.transpose((1, 0)), turned_layout, optimized=False, interpret=interpret)
                plgpu.commit_smem()

                def write(i, row):
                    compat.store(outs[i].at[part, :, pl.ds(row, BLOCK_ROWS)], turned.astype(out_dtype))

                of_matrix(tile * blocks + wg, write)

            for_units(multiply)

    def entry(*refs):
        x, rest = refs[0], refs[1:]
        tiled = (plgpu.TilingTransform((8, SWIZZLE_COLS)), plgpu.SwizzleTransform(2 * SWIZZLE_COLS))
        pl.run_scoped(
            functools.partial(kernel, x, rest[: len(weights)], rest[len(weights) :]),
            plgpu.SMEM((stages, blocks, BLOCK_ROWS, chunk), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((stages, window, chunk), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((blocks, BLOCK_ROWS, window), jnp.float32),
            plgpu.Barrier(num_arrivals=blocks + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=blocks, num_barriers=stages),
            collective_axes="wg",
        )

    return plgpu.kernel(
        entry,
        out_type=tuple(jax.ShapeDtypeStruct((splits, window, weight.shape[0]), out_dtype) for weight in weights),
        grid=(num_ctas,),
        grid_names=("sm",),
        num_threads=blocks + 1,
        thread_name="wg",
        # Threads of a warpgroup read what others wrote in one place, which has its barriers.
        compiler_params=plgpu.CompilerParams(lowering_semantics=compat.LOWERING_SEMANTICS, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(jnp.pad(x, ((0, window - x.shape[0]), (0, 0))), *weights)


def _finish(
    groups: Sequence[Sequence[jax.Array]], function: Callable[..., jax.Array], out_dtype: Any, interpret: Any
) -> Sequence[jax.Array]:
    """function(sums over the parts of each array of a group, in their order), rounded.

    Args:     groups: arrays [splits, window, N] fp32, of one N in a group.
    Returns:  for each group [window, N].
    """
    splits, window, _ = groups[0][0].shape
    each = window // 4  # rows of a warp, and values of a thread
    layout = plgpu.Layout.TILED(plgpu.Tiling(((window, COLUMNS), (each, COLUMNS), (each,))), (-5,), (-3, -2), -1)
    load = common.loader(interpret)
    firsts = [0]
    for group in groups:
        firsts.append(firsts[-1] + group[0].shape[2] // COLUMNS)

    def kernel(*refs):
        piece, refs = lax.axis_index("piece"), list(refs)
        inputs = [[refs.pop(0) for _ in group] for group in groups]
        for i, (arrays, out) in enumerate(zip(inputs, refs, strict=True)):

            @pl.when((piece >= firsts[i]) & (piece < firsts[i + 1]))
            def _(i=i, arrays=arrays, out=out):
                columns = pl.ds((piece - firsts[i]) * COLUMNS, COLUMNS)
                parts = [[load(array.at[part, :, columns], layout) for part in range(splits)] for array in arrays]
                sums = (functools.reduce(jnp.add, terms) for terms in parts)
                common.store(out.at[:, columns], function(*sums))

    return common.kernel(
        kernel,
        tuple(jax.ShapeDtypeStruct((window, group[0].shape[2]), out_dtype) for group in groups),
        grid={"piece": firsts[-1]},
        interpret=interpret,
    )(*[array for group in groups for array in group])
