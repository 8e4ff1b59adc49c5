"""How the megakernel keeps weights: for each rank and layer one buffer, of tiles in the order in which a step reads them.

A tile is 64 output rows by 128 bytes of K: 64 bfloat16 values, 32 fp32 values (the router's) or 256 NVFP4 codes of each row.
What a matrix lacks to whole tiles is zero. Tiles follow each other along K, then down the rows, then from expert to expert, so
what a CTA takes at a time is contiguous. Within a tile

    bytes      row r is 128 bytes at 128 r, and its 16-byte chunk c lies at chunk c ^ (r & 7): the 128-byte swizzle of Hopper
               and Blackwell, with which neither `ldmatrix`-like reads nor wgmma or tcgen05 meet a bank twice
    NVFP4      each 32-bit word of a chunk has its eight codes' bits in the places of `CODE_BITS`; after the 64 x 128 bytes of
               codes come 64 x 16 block scales, e4m3 without sign (codes have it), in the order of `SCALE_ORDER`

Heads are padded to 64 rows, so that a tile is a head's. `pack_layer` makes a buffer of one rank from the layer's parameters,
`unpack_layer` makes them again: prefill runs on what it gives.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE_ROWS, TILE_BYTES, TILE_SCALES, CHUNK = 64, 128, 16, 16
TILE = TILE_ROWS * TILE_BYTES
NVFP4_TILE = TILE + TILE_ROWS * TILE_SCALES
NUM_RANKS = 8  # that a sum over K of o_proj is cut for, whatever the number of devices
BF16_K, FP32_K, NVFP4_K = 64, 32, 256  # values of a row of a tile

# Bits of a word that hold sign, exponent (two) and mantissa of its codes, for pairs of codes (0, 1), (2, 3), (4, 5), (6, 7): the
# even code in the low half of the word, the odd one 16 bits higher. In bfloat16 they belong to bits 15, 8, 7 and 6, and are
# there after a shift left of 0, 3 and 6; the last pair takes what is left.
CODE_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
# A lane holds 32 codes of chunk q and of chunk q + 4 of a row, and so four scales: they lie side by side.
SCALE_ORDER = tuple(8 * half + 2 * q + i for q in range(4) for half in range(2) for i in range(2))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model that its buffers depend on; all ranks have the same.

    ranks: that share the model.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_hidden: int
    moe_intermediate: int
    experts: int
    vocab: int
    ranks: int = 1

    def __post_init__(self) -> None:
        problems = []

        def check(ok: bool, problem: str) -> None:
            if not ok:
                problems.append(problem)

        check(self.ranks in (1, 2, 4, 8), f"ranks = {self.ranks}: allowed are 1, 2, 4, 8")
        check(self.heads % NUM_RANKS == 0, f"heads = {self.heads}: multiples of {NUM_RANKS} are possible")
        per_rank = self.heads // NUM_RANKS
        check(0 < per_rank <= 16, f"heads = {self.heads}: at most {16 * NUM_RANKS} are possible")
        check(self.heads % self.kv_heads == 0, f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        group = self.heads // self.kv_heads
        check(group in (1, 2, 4, 8), f"heads / kv_heads = {group}: allowed are 1, 2, 4, 8")
        check(self.kv_heads % self.ranks == 0, f"kv_heads = {self.kv_heads}: {self.ranks} ranks cannot share them")
        fits = self.head_dim % 8 == 0 and self.head_dim <= TILE_ROWS
        check(fits, f"head_dim = {self.head_dim}: multiples of 8 up to {TILE_ROWS} are possible")
        for name in ("hidden", "moe_hidden", "moe_intermediate", "vocab"):
            size, step = getattr(self, name), 8 * self.ranks
            check(size % step == 0, f"{name} = {size}: multiples of {step} are possible for {self.ranks} ranks")
        for name in ("moe_hidden", "moe_intermediate"):
            check(getattr(self, name) <= 4096, f"{name} = {getattr(self, name)}: at most 4096 is possible")
        check(self.hidden <= 8192, f"hidden = {self.hidden}: at most 8192 is possible")
        check(self.experts <= 256, f"experts = {self.experts}: at most 256 are possible")
        if problems:
            raise NotImplementedError("; ".join(problems))

    def of_rank(self, size: int) -> int:
        return size // self.ranks


@dataclasses.dataclass(frozen=True)
class Segment:
    """A matrix, or a stack of them, in a rank's buffer.

    kind: "bf16", "fp32" or "nvfp4".  count: matrices.  rows, k: of one, without padding.
    """

    name: str
    offset: int
    kind: str
    count: int
    rows: int
    k: int

    @property
    def tile_k(self) -> int:
        return {"bf16": BF16_K, "fp32": FP32_K, "nvfp4": NVFP4_K}[self.kind]

    @property
    def tile_bytes(self) -> int:
        return NVFP4_TILE if self.kind == "nvfp4" else TILE

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def k_tiles(self) -> int:
        return -(-self.k // self.tile_k)

    @property
    def nbytes(self) -> int:
        return self.count * self.row_tiles * self.k_tiles * self.tile_bytes


@dataclasses.dataclass(frozen=True)
class Vector:
    """fp32 numbers in a rank's buffer: norm weights as 1 + w, factors of residual gates, scales. Every rank has all of them."""

    name: str
    offset: int
    size: int

    @property
    def nbytes(self) -> int:
        return -(-4 * self.size // TILE_BYTES) * TILE_BYTES


def layer_table(shape: Shape, nvfp4: bool) -> tuple[Segment | Vector, ...]:
    """What a layer's buffer holds, in its order. nvfp4: its experts are."""
    table: list[Segment | Vector] = []
    d, m, f, e = shape.hidden, shape.moe_hidden, shape.moe_intermediate, shape.experts
    heads, kv_heads = shape.of_rank(shape.heads), shape.of_rank(shape.kv_heads)
    experts = "nvfp4" if nvfp4 else "bf16"

    def end() -> int:
        return table[-1].offset + table[-1].nbytes if table else 0

    def matrix(name: str, kind: str, rows: int, k: int, count: int = 1) -> None:
        table.append(Segment(name, end(), kind, count, rows, k))

    def vector(name: str, size: int) -> None:
        table.append(Vector(name, end(), size))

    matrix("qkv_gate", "bf16", (2 * heads + 2 * kv_heads) * TILE_ROWS, d)  # heads of q, k, v and gate
    matrix("o_proj", "bf16", d, heads * TILE_ROWS)
    matrix("router", "fp32", e, d)
    matrix("pre_expert_proj", "bf16", shape.of_rank(m), d)
    matrix("gate_up", experts, 2 * shape.of_rank(f), m, e)  # rows of gate and up take turns
    matrix("down", experts, shape.of_rank(m), f, e)
    matrix("post_expert_proj", "bf16", shape.of_rank(d), m)
    for name, size in (
        ("input_norm", d),
        ("post_attention_alpha", d),
        ("post_attention_beta", d),
        ("pre_ffn_norm", d),
        ("router_bias", e),
        ("pre_expert_norm", m),
        ("gate_up_scale", 2 * e),
        ("down_scale", e),
        ("post_expert_norm", m),
        ("post_ffn_norm", d),
        ("post_ffn_alpha", d),
        ("post_ffn_beta", d),
    ):
        vector(name, size)
    return tuple(table)


def head_table(shape: Shape) -> tuple[Segment | Vector, ...]:
    """What the buffer of the output layer holds."""
    lm_head = Segment("lm_head", 0, "bf16", 1, shape.of_rank(shape.vocab), shape.hidden)
    return lm_head, Vector("final_norm", lm_head.nbytes, shape.hidden)


def table_bytes(table: tuple[Segment | Vector, ...]) -> int:
    return table[-1].offset + table[-1].nbytes


# ---- Tiles --------------------------------------------------------------------------------------------------------------
