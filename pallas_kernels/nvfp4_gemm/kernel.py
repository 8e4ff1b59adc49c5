"""The GEMMs of the routed experts of one decode step with NVFP4 weights, for Hopper (Mosaic GPU, sm_90).

The transposed product, weights on the side of 64 rows of a wgmma and tokens on the side of 8 or 16, so that one instruction
serves all tokens. A unit of work is (expert with a routed row, tile of its rows); CTAs, one an SM, take units in turns.
A producer warpgroup fills a ring of stages by TMA across the borders of units; four consumer warpgroups decode a stage in
registers and multiply. They split a tile's rows, and K by the words of a block (packing.py); the partial sums of a unit are
added in shared memory in a fixed order. So a result has the same bits whatever else is in the batch.

Of a unit all rows of a window of tokens are computed and written, to [place of the expert, rows, window]; a gather outside
the kernel takes those that were routed. The window of `gate_up` is all tokens, that of `down` begins with the expert's
first group of routed rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import compat
from pallas_kernels.numerics import round_to
from pallas_kernels.nvfp4_gemm.packing import CODES, FIELDS, WORDS, PackedWeights, permute_rows
from pallas_kernels.nvfp4_gemm.reference import BLOCK

CONSUMERS = 4  # warpgroups that multiply
# A thread of five warpgroups starts with 96 registers at most (65,536 / 640, in steps of 8). Consumers wait for theirs, so
# the sum over warpgroups must not exceed 5 x 96.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 104
WGMMA_ROWS = 64
MAX_ROWS = 16
SHARED_MEMORY = 227 * 1024  # of a CTA
GROUP = 8  # tokens, the least that a wgmma takes

# Bits of codes are read as bfloat16 numbers, 2^-126 e2m1. Scales are multiplied by 2^118, which keeps 448 2^118 finite, and
# accumulators by the missing 2^8 with the global scale. All exact.
_SCALE_SHIFT = 2.0**118
_ACC_SHIFT = 2.0**8


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs; the sizes of tiles are those of the packed weights.

    stages: of the ring.  num_ctas: one for each SM; 132 on H100 and H200.  decode: "packed" works on two codes in a 32-bit
    register at once, by Mosaic GPU code inlined in the kernel; "vector" is the same arithmetic on arrays of uint16.
    """

    stages: int = 4
    num_ctas: int = 132
    decode: Literal["packed", "vector"] = "packed"


# ----------------------------------------------------------------------------------------------------------------- plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which experts have routed rows, and where. Row r's slot k is routed row r top_k + k; A = min(E, R top_k) places.

    `down` reads the routed rows in the order of experts, each expert's in groups of 8 of its own: what a wgmma takes.

    num_active: [1] int32.  expert: [A] int32, ascending; 0 beyond the active ones.  first_group: [A] int32, of the expert.
    source: [8 groups] int32, the routed row in each place of the groups; 0 where there is none.
    place: [R, top_k] int32, of the row's expert.  rank: [R, top_k] int32, of the row among its expert's.
    """

    num_active: jax.Array
    expert: jax.Array
    first_group: jax.Array
    source: jax.Array
    place: jax.Array
    rank: jax.Array

    @property
    def window(self) -> int:
        """Tokens of a wgmma."""
        return 8 if self.place.shape[0] <= 8 else 16

    def padded(self, x: jax.Array) -> jax.Array:
        """Rows [R, K] as the one window that they are, [window, K]."""
        return jnp.pad(x, ((0, self.window - x.shape[0]), (0, 0)))

    def of_padded(self, out: jax.Array) -> jax.Array:
        """The routed rows' results, [R, top_k, N]. out: [A, N, window], of each place with the window of `padded`."""
        return out[self.place, :, jnp.arange(self.place.shape[0])[:, None]]

    def of_grouped(self, out: jax.Array) -> jax.Array:
        """The same where a place's window is of rows in the order of `source` and begins with its expert's first group."""
        return out[self.place, :, self.rank]


def plan(idx: jax.Array, num_experts: int) -> Plan:
    """Groups routed rows by expert, by comparing each pair: there are 128 at most.

    Args:     idx: [R, top_k] int32; the experts of a row are distinct.
    Raises:   NotImplementedError if there are more than 16 rows.
    """
    if idx.shape[0] > MAX_ROWS:
        raise NotImplementedError(f"{idx.shape[0]} rows, more than {MAX_ROWS}")
    routed = idx.size
    num_places = min(num_experts, routed)
    num_groups = min(routed, (routed + (GROUP - 1) * num_places) // GROUP)
    ids, number = idx.reshape(routed), jnp.arange(routed, dtype=jnp.int32)
    same = ids[:, None] == ids[None, :]
    rank = _sum(same & (number[None, :] < number[:, None]))
    opens = rank == 0  # the expert's first row
    groups = jnp.where(opens, lax.div(_sum(same) + (GROUP - 1), jnp.int32(GROUP)), 0)
    smaller = ids[None, :] < ids[:, None]
    place = _sum(smaller & opens[None, :])
    first_group = _sum(jnp.where(smaller, groups[None, :], 0))
    position = first_group * GROUP + rank
    # Beyond the last group there is one more, which the last window may reach into.
    positions = jnp.arange((num_groups + 1) * GROUP, dtype=jnp.int32)
    is_at = (place[None, :] == jnp.arange(num_places, dtype=jnp.int32)[:, None]) & opens[None, :]
    return Plan(
        num_active=_sum(opens)[None],
        expert=_sum(jnp.where(is_at, ids[None, :], 0)),
        first_group=_sum(jnp.where(is_at, first_group[None, :], 0)),
        source=_sum(jnp.where(position[None, :] == positions[:, None], number[None, :], 0)),
        place=place.reshape(idx.shape),
        rank=rank.reshape(idx.shape),
    )


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, dtype=jnp.int32)


# -------------------------------------------------------------------------------------------------------------- kernels


def gate_up(
    x: jax.Array,
    routing: Plan,
    weights: PackedWeights,
    row_scale: jax.Array | None = None,
    config: Config = Config(),
    interpret: Any = None,
) -> jax.Array:
    """silu(gate) up of each routed row.

    Args:     x: [R, K] bfloat16, R at most 16.  routing: of idx [R, top_k].  weights: gate and up, [E, 2, F, K] packed.
              row_scale: [R] fp32, where x is what quantised rows decode to without it.
    Returns:  [R, top_k, F] bfloat16.
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: from fp32 accumulators, once.
    """
    rows = routing.place.shape[0]
    _check(x, weights, (rows, weights.k), 2, config, "x", "[R, K]")
    window = routing.window
    if row_scale is not None:
        part = weights.tile_rows // 2
        row_scale = jnp.broadcast_to(jnp.pad(row_scale, (0, window - rows))[None], (part, window))
    ordered = permute_rows(routing.padded(x), weights.cols)
    first_group = jnp.zeros_like(routing.first_group)
    out = _gemm(ordered, first_group, routing, weights, row_scale, jnp.bfloat16, config, interpret)
    return routing.of_padded(out)


def down(
    hidden: jax.Array,
    routing: Plan,
    weights: PackedWeights,
    row_scale: jax.Array | None = None,
    config: Config = Config(),
    interpret: Any = None,
) -> jax.Array:
    """Each routed row times its expert's matrix.

    Args:     hidden: [R, top_k, K] bfloat16, R at most 16.  routing: of idx [R, top_k].  weights: [E, N, K] packed.
              row_scale: [R, top_k] fp32.
    Returns:  [R, top_k, N] bfloat16.
    Raises:   ValueError, NotImplementedError: what is wrong, and what is possible.
    Rounding: from the fp32 accumulator, once.
    """
    _check(hidden, weights, (*routing.place.shape, weights.k), 1, config, "hidden", "[R, top_k, K]")
    # The order of K first, while there are few rows; XLA would fuse the two and read every value by itself.
    ordered = lax.optimization_barrier(permute_rows(hidden.reshape(-1, weights.k), weights.cols))
    # With a scale for each row, whose place in the window differs, that multiplication is left to the gather.
    dtype = jnp.bfloat16 if row_scale is None else jnp.float32
    out = _gemm(ordered[:, routing.source], routing.first_group, routing, weights, None, dtype, config, interpret)
    out = routing.of_grouped(out)
    return out if row_scale is None else round_to(out * row_scale[..., None], jnp.bfloat16)


def _check(
    x: jax.Array, weights: PackedWeights, shape: tuple[int, ...], matrices: int, config: Config, name: str, axes: str
) -> None:
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{name} is {x.dtype}: the kernel takes bfloat16")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: the routing and the weights ask for {shape}, {axes}")
    if weights.matrices != matrices:
        raise ValueError(f"weights have {weights.matrices} matrices an expert in place of {matrices}")
    if config.stages < 2 or config.num_ctas < 1:
        raise ValueError(f"{config}: at least two stages and one CTA are needed")


def _gemm(
    rows: jax.Array,
    first_group: jax.Array,
    routing: Plan,
    weights: PackedWeights,
    row_scale: jax.Array | None,
    out_dtype: Any,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """The kernel: each active expert times its window of rows.

    Args:     rows: [chunks, n, K / chunks], of `permute_rows`.  first_group: [A] int32, of a place's window.
              row_scale: [rows of a matrix in a tile, window].
    Returns:  [A, out_rows, window]; not written beyond the active places.
    """
    _, tiles, chunks, tile_rows, cols = weights.block_scales.shape
    interpreted = interpret is not None
    matrices, part = weights.matrices, tile_rows // weights.matrices
    row_groups = tile_rows // WGMMA_ROWS  # warpgroups beside each other along the rows of a tile
    k_groups = CONSUMERS // row_groups
    words_each = WORDS // k_groups
    window, stages, num_ctas = routing.window, config.stages, config.num_ctas
    chunk_k = cols * BLOCK
    strided = plgpu.Layout.WG_STRIDED((min(part, WGMMA_ROWS), window), vec_size=min(4, min(part, WGMMA_ROWS) * window // 128))

    def body(num_active, expert, first_group, scale, rows, words, block_scales, *refs, scratch):
        row_scale, out = refs if len(refs) == 2 else (None, *refs)
        sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
        words_s, scales_s, rows_s, partial_s, out_s = (scratch[name] for name in ("words", "scales", "rows", "partial", "out"))
        full, empty, summed, free = (scratch[name] for name in ("full", "empty", "summed", "free"))
        units = num_active[0] * tiles
        my_units = lax.div(units - sm + (num_ctas - 1), jnp.int32(num_ctas))

        def place_and_tile(i):
            unit = sm + i * num_ctas
            place = lax.div(unit, jnp.int32(tiles))
            return place, unit - place * tiles

        @pl.when(wg == CONSUMERS)
        def _produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(step, _):
                i = lax.div(step, jnp.int32(chunks))
                chunk, slot = step - i * chunks, lax.rem(step, jnp.int32(stages))
                place, tile = place_and_tile(i)
                e = expert[place]

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                index = (e * tiles + tile) * chunks + chunk
                plgpu.copy_gmem_to_smem(words.at[index], words_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(block_scales.at[index], scales_s.at[slot], full.at[slot])
                window_rows = rows.at[chunk, pl.ds(first_group[place] * GROUP, window), :]
                plgpu.copy_gmem_to_smem(window_rows, rows_s.at[slot], full.at[slot])
                return ()

            lax.fori_loop(0, my_units * chunks, load, ())

        @pl.when(wg < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            row_group, k_group = lax.rem(wg, jnp.int32(row_groups)), lax.div(wg, jnp.int32(row_groups))

            def multiply(acc, slot):
                scale_rows = scales_s[slot, pl.ds(row_group * WGMMA_ROWS, WGMMA_ROWS), :]
                scale_rows = compat.in_layout(scale_rows, plgpu.Layout.WGMMA, interpreted)
                scale = (scale_rows.astype(jnp.float32) * jnp.float32(_SCALE_SHIFT)).astype(jnp.bfloat16)
                for w in range(words_each):
                    q = k_group * words_each + w
                    word = words_s[slot, pl.ds(q * tile_rows + row_group * WGMMA_ROWS, WGMMA_ROWS), :]
                    word = compat.in_layout(word, plgpu.Layout.WGMMA, interpreted)
                    for code in range(CODES):
                        columns = pl.ds((q * CODES + code) * cols, cols)
                        b = rows_s.at[slot, :, columns].transpose((1, 0))
                        if interpreted:  # whose wgmma reads shared memory alone
                            scratch["a"][wg] = _decode_normal(word, code, scale)
                            plgpu.wgmma(acc, scratch["a"].at[wg], b)
                        else:
                            plgpu.wgmma(acc, _DECODE[config.decode](word, code, scale), b)
                    plgpu.wgmma_wait(0)

            def one_unit(i, _):
                def accumulate(acc):
                    def one_chunk(chunk, _):
                        slot = lax.rem(i * chunks + chunk, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[slot])
                        multiply(acc, slot)
                        plgpu.commit_smem()  # registers were read from what TMA overwrites next
                        plgpu.barrier_arrive(empty.at[slot])
                        return ()

                    lax.fori_loop(0, chunks, one_chunk, ())
                    return acc[...]

                partial = pl.run_scoped(accumulate, plgpu.ACC((WGMMA_ROWS, window), jnp.float32))

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(free)

                partial_s[wg] = compat.in_layout(partial, plgpu.Layout.WGMMA, interpreted)
                plgpu.barrier_arrive(summed)

                @pl.when(wg == 0)
                def _():
                    plgpu.barrier_wait(summed)
                    finish(*place_and_tile(i))

                return ()

            def total(matrix: int, group: int):
                """Sums over the groups of K, in their order: rows of one matrix, [64 or 32, window]."""
                row = matrix * part + group * WGMMA_ROWS
                within = pl.ds(row % WGMMA_ROWS, min(part, WGMMA_ROWS))
                sums = [partial_s[k * row_groups + row // WGMMA_ROWS, within, :] for k in range(k_groups)]
                sums = [compat.in_layout(x, strided, interpreted) for x in sums]
                return sum(sums[1:], sums[0])

            def finish(place, tile):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last unit's copy
                for group in range(max(1, part // WGMMA_ROWS)):
                    sums = [total(matrix, group) * scale[place, matrix] for matrix in range(matrices)]
                    if row_scale is not None:
                        scale_of_rows = compat.in_layout(scratch["row_scale"][...], strided, interpreted)
                        sums = [x * scale_of_rows for x in sums]
                    result = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if matrices == 2 else sums[0]
                    out_s[pl.ds(group * WGMMA_ROWS, min(part, WGMMA_ROWS)), :] = compat.in_layout(
                        result.astype(out_dtype), strided, interpreted
                    )
                plgpu.barrier_arrive(free)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_s, out.at[place, pl.ds(tile * part, part), :])

            if row_scale is not None:

                @pl.when(wg == 0)
                def _():
                    plgpu.copy_gmem_to_smem(row_scale, scratch["row_scale"], scratch["row_scale_full"])
                    plgpu.barrier_wait(scratch["row_scale_full"])

            lax.fori_loop(0, my_units, one_unit, ())
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    scratch = {
        "words": plgpu.SMEM((stages, WORDS * tile_rows, cols), jnp.uint16, transforms=_tiled(cols, 2)),
        "scales": plgpu.SMEM((stages, tile_rows, cols), jnp.float8_e4m3fn, transforms=_tiled(cols, 1)),
        "rows": plgpu.SMEM((stages, window, chunk_k), jnp.bfloat16, transforms=_tiled(cols, 2)),
        "partial": plgpu.SMEM((CONSUMERS, WGMMA_ROWS, window), jnp.float32),
        "out": plgpu.SMEM((part, window), out_dtype),
    }
    if row_scale is not None:
        scratch["row_scale"] = plgpu.SMEM(row_scale.shape, jnp.float32)
    used = sum(-(-x.dtype.itemsize * math.prod(x.shape) // 1024) * 1024 for x in scratch.values())
    if used + 1024 > SHARED_MEMORY:  # barriers besides
        raise ValueError(
            f"{config.stages} stages of {tile_rows} x {chunk_k} weights need {used} bytes of shared memory: fewer fit"
        )
    scratch |= {
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        "summed": plgpu.Barrier(num_arrivals=CONSUMERS),
        "free": plgpu.Barrier(),
        "row_scale_full": plgpu.Barrier(),
    }
    if interpreted:
        scratch["a"] = plgpu.SMEM((CONSUMERS, WGMMA_ROWS, cols), jnp.bfloat16)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(routing.expert), weights.out_rows, window), out_dtype),
        scratch_types={"scratch": scratch},
        grid=(num_ctas,),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    return kernel(
        routing.num_active,
        routing.expert,
        first_group,
        weights.global_scale[routing.expert] * _ACC_SHIFT,
        rows,
        weights.words.reshape(-1, WORDS * tile_rows, cols),
        weights.block_scales.reshape(-1, tile_rows, cols),
        *([] if row_scale is None else [row_scale]),
    )


def _tiled(cols: int, itemsize: int) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, cols)), plgpu.SwizzleTransform(cols * itemsize)


# --------------------------------------------------------------------------------------------------------------- decode


def _moves(code: int) -> tuple[tuple[int, int], ...]:
    """Shifts to the left, and masks, that bring a code's bits to their places in a bfloat16."""
    sign, high, _, mantissa = FIELDS[code]
    if 15 - sign == 8 - high == 6 - mantissa:
        return ((15 - sign, 0x81C0),)
    return (15 - sign, 0x8000), (8 - high, 0x0180), (6 - mantissa, 0x0040)


def _vector_bits(word: jax.Array, code: int) -> jax.Array:
    def masked(left: int, mask: int) -> jax.Array:
        shifted = word if left == 0 else word << jnp.uint16(left) if left > 0 else word >> jnp.uint16(-left)
        return shifted & jnp.uint16(mask)

    return functools.reduce(jnp.bitwise_or, (masked(left, mask) for left, mask in _moves(code)))


def _decode_vector(word: jax.Array, code: int, scale: jax.Array) -> jax.Array:
    """[64, cols] uint16 -> [64, cols] bfloat16.

    A code with exponent bits 0 is a subnormal number, which the multiplication takes as it is.
    """
    return lax.bitcast_convert_type(_vector_bits(word, code), jnp.bfloat16) * scale


def _decode_packed(word: jax.Array, code: int, scale: jax.Array) -> jax.Array:
    """The same on 32-bit registers, each with the words of two neighbouring columns."""

    def pair_bits(pair: Any) -> Any:
        def constant(x):
            return vector.broadcast(pair.type, arith.constant(ir.IntegerType.get_signless(32), x))

        def masked(left, mask):
            shift = arith.shli if left > 0 else arith.shrui
            shifted = shift(pair, constant(abs(left))) if left else pair
            return arith.andi(shifted, constant(mask << 16 | mask))

        return functools.reduce(arith.ori, (masked(left, mask) for left, mask in _moves(code)))

    layout = plgpu.Layout.WGMMA
    bits = plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(word.shape, jnp.bfloat16, layout=layout))(
        lambda _, word: compat.map_registers(word, pair_bits, ir.BF16Type.get())
    )
    return bits(word) * scale


def _decode_normal(word: jax.Array, code: int, scale: jax.Array) -> jax.Array:
    """The same without subnormal numbers, which XLA for CPU takes as zeros."""
    bits = _vector_bits(word, code)
    value = lax.bitcast_convert_type(bits + jnp.uint16(126 << 7), jnp.bfloat16)
    half = jnp.where((bits & 0x0040) != 0, jnp.bfloat16(0.5), jnp.bfloat16(0))
    value = jnp.where((bits & 0x0180) == 0, jnp.where((bits & 0x8000) != 0, -half, half), value)
    return value * (scale * jnp.bfloat16(2.0**-126))


_DECODE = {"packed": _decode_packed, "vector": _decode_vector}
