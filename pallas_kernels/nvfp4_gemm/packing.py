"""NVFP4 weights in the order in which the kernel reads them: a permutation of bits, made once at loading.

A tile is `tile_rows` rows of an expert by `16 cols` values of K: what one stage of the kernel's ring holds, contiguous.
A block of 16 values (one scale) is four words of 16 bits; in a tile, word q of all blocks is a matrix of its own,
[tile_rows, cols], with the same shape as the matrix of scales. So a thread that holds an element of one holds the same
element of the others, and decoding is arithmetic on elements. Value 4q + s of the block in column c meets column c of the
matrix (q, s), which is why `permute_rows` puts K in the order [.., q, s, c].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.nvfp4_gemm.reference import BLOCK

WORDS = 4  # 16-bit words of a block
CODES = 4  # codes of a word

# Bits of a word that hold sign, the two exponent bits and the mantissa bit of its codes, high to low. In bfloat16 they belong
# to bits 15, 8, 7 and 6: the first three codes are there after a shift left of 0, 3 and 6, and the fourth takes what is left.
FIELDS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """Matrices of E experts for the kernel.

    words: [E, tiles, chunks, 4 tile_rows, cols] uint16.  block_scales: [E, tiles, chunks, tile_rows, cols] float8_e4m3fn.
    global_scale: [E, matrices] fp32, multiplies; matrices is 2 for gate and up, which share tiles, half the rows each.
    """

    words: Any
    block_scales: Any
    global_scale: Any

    @property
    def tile_rows(self) -> int:
        return self.block_scales.shape[-2]

    @property
    def cols(self) -> int:
        return self.block_scales.shape[-1]

    @property
    def matrices(self) -> int:
        return self.global_scale.shape[-1]

    @property
    def out_rows(self) -> int:
        """Rows of each matrix."""
        return self.block_scales.shape[1] * self.tile_rows // self.matrices

    @property
    def k(self) -> int:
        return self.block_scales.shape[2] * self.cols * BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices that it stands for."""
        pair = (self.matrices,) if self.matrices > 1 else ()
        return (len(self.words), *pair, self.out_rows, self.k)

    def unpack(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arguments of `pack_weights`: codes, block scales, global scales."""
        arrays = unpack_weights(self)
        return arrays if self.matrices > 1 else tuple(x[:, 0] for x in arrays)


def pack_weights(
    codes: jax.Array, block_scales: jax.Array, global_scale: jax.Array, tile_rows: int = 128, cols: int = 32
) -> PackedWeights:
    """The matrices of experts in the kernel's order.

    Args:     codes: [E, 2, F, K/2] (gate, up) or [E, N, K/2] uint8.  block_scales: [.., K/16] float8_e4m3fn.
              global_scale: [E, 2] or [E] fp32.  tile_rows: 64 or 128.  cols: 32 or 64.
    Raises:   ValueError if rows or K are not multiples of a tile's.
    """
    if codes.ndim == 3:
        codes, block_scales, global_scale = codes[:, None], block_scales[:, None], global_scale[:, None]
    experts, matrices, rows, blocks = block_scales.shape
    if tile_rows not in (64, 128) or cols not in (32, 64):
        raise ValueError(f"tiles of {tile_rows} rows and {cols} columns: 64 or 128 rows and 32 or 64 columns are possible")
    if rows * matrices % tile_rows or rows % (tile_rows // matrices):
        raise ValueError(f"{rows} rows of each of {matrices} matrices are not a whole number of tiles of {tile_rows}")
    if blocks % cols:
        raise ValueError(f"K = {blocks * BLOCK} is not a multiple of {cols * BLOCK}")
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.uint16)
    nibbles = nibbles.reshape(experts, matrices, rows, blocks, WORDS, CODES)
    words = sum(
        ((nibbles[..., s] >> (3 - i)) & 1) << bit for s, fields in enumerate(FIELDS) for i, bit in enumerate(fields)
    )  # [E, matrices, rows, blocks, 4]
    part = tile_rows // matrices
    shape = (experts, matrices, rows // part, part, blocks // cols, cols)
    words = words.reshape(*shape, WORDS).transpose(0, 2, 4, 6, 1, 3, 5)
    scales = block_scales.reshape(shape).transpose(0, 2, 4, 1, 3, 5)
    return PackedWeights(
        words.reshape(*words.shape[:3], WORDS * tile_rows, cols),
        scales.reshape(*scales.shape[:3], tile_rows, cols),
        global_scale,
    )


def unpack_weights(packed: PackedWeights) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arguments of `pack_weights`, with the axis of matrices kept: [E, matrices, rows, ..]."""
    experts, tiles, chunks, tile_rows, cols = packed.block_scales.shape
    part = tile_rows // packed.matrices
    words = packed.words.reshape(experts, tiles, chunks, WORDS, packed.matrices, part, cols).transpose(0, 4, 1, 5, 2, 6, 3)
    nibbles = [sum(((words >> bit) & 1) << (3 - i) for i, bit in enumerate(fields)) for fields in FIELDS]
    nibbles = jnp.stack(nibbles, axis=-1).astype(jnp.uint8).reshape(experts, packed.matrices, packed.out_rows, -1, 2)
    scales = packed.block_scales.reshape(experts, tiles, chunks, packed.matrices, part, cols).transpose(0, 3, 1, 4, 2, 5)
    codes = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return codes, scales.reshape(experts, packed.matrices, packed.out_rows, -1), packed.global_scale


def permute_rows(x: jax.Array, cols: int) -> jax.Array:
    """[n, K] -> [chunks, n, 16 cols]: chunks of K, each in the order [q, s, c] of the weights."""
    n, k = x.shape
    return x.reshape(n, k // (cols * BLOCK), cols, BLOCK).transpose(1, 0, 3, 2).reshape(-1, n, cols * BLOCK)
