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

import collections
import dataclasses
from collections.abc import Callable, Mapping
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
BLOCK = 16  # values of a row that share a block scale

# Bits of a word that hold sign, exponent (two) and mantissa of its codes, for pairs of codes (0, 1), (2, 3), (4, 5), (6, 7):
# the even code in the low half of the word, the odd one 16 bits higher. In bfloat16 they belong to bits 15, 8, 7 and 6, and are
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
    if nvfp4 and (m % BLOCK or f % BLOCK):
        raise NotImplementedError(f"moe_hidden = {m}, moe_intermediate = {f}: NVFP4 experts need multiples of {BLOCK}")
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
#
# Functions count a buffer in lines of TILE_BYTES: a layer of bf16 experts has more bytes than a 32-bit index.

_CHUNKS = TILE_BYTES // CHUNK
_GROUP = np.arange(_CHUNKS)  # rows after which the swizzle repeats
_SWIZZLE = _GROUP[:, None] ^ _GROUP[None, :]
# Where the 32 bits of a word's eight codes are, code by code, high to low: as in a checkpoint, and in a tile.
_PLAIN_BITS = tuple(4 * code + 3 - i for code in range(8) for i in range(4))
_TILE_BITS = tuple(CODE_BITS[code // 2][i] + 16 * (code % 2) for code in range(8) for i in range(4))
_SIGNS = 0x88888888  # of the codes of a word of a checkpoint
_PLAIN_ORDER = tuple(np.argsort(SCALE_ORDER).tolist())


def _swizzle(chunks: jax.Array) -> jax.Array:
    """[..., rows of a group, chunks, bytes]: exchanges chunks; doing it again undoes it."""
    return chunks[..., _GROUP[:, None], _SWIZZLE, :]


def _tiles(rows: jax.Array) -> jax.Array:
    """[rows, bytes] uint8 -> [row tiles, K tiles, 64, 128] uint8, filled up with zeros and swizzled."""
    n, k = rows.shape
    rows = jnp.pad(rows, ((0, -n % TILE_ROWS), (0, -k % TILE_BYTES)))
    groups = rows.reshape(-1, TILE_ROWS // _CHUNKS, _CHUNKS, rows.shape[1] // TILE_BYTES, _CHUNKS, CHUNK)
    tiles = _swizzle(groups.transpose(0, 3, 1, 2, 4, 5))
    return tiles.reshape(*tiles.shape[:2], TILE_ROWS, TILE_BYTES)


def _rows(tiles: jax.Array, n: int, k: int) -> jax.Array:
    """Undoes `_tiles`, for ranks: [ranks here, row tiles, K tiles, 64, 128] uint8 -> [ranks here, n, k bytes]."""
    ranks, row_tiles, k_tiles = tiles.shape[:3]
    groups = _swizzle(tiles.reshape(ranks, row_tiles, k_tiles, -1, _CHUNKS, _CHUNKS, CHUNK))
    rows = groups.transpose(0, 1, 3, 4, 2, 5, 6).reshape(ranks, row_tiles * TILE_ROWS, k_tiles * TILE_BYTES)
    return rows[:, :n, :k]


def _integers(x: jax.Array) -> jax.Array:
    """The bits of floats, as unsigned integers of their size."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _bytes(x: jax.Array) -> jax.Array:
    """[..., k] of more than a byte each -> [..., bytes] uint8."""
    x = lax.bitcast_convert_type(x, jnp.uint8)
    return x.reshape(*x.shape[:-2], -1)


def _move_bits(words: jax.Array, source: tuple[int, ...], target: tuple[int, ...]) -> jax.Array:
    """uint32 words whose bits `target` are the bits `source` of `words`, one by one."""
    masks: dict[int, int] = collections.defaultdict(int)
    for a, b in zip(source, target, strict=True):
        masks[b - a] |= 1 << a
    moved = jnp.zeros_like(words)
    for shift, mask in masks.items():
        bits = words & np.uint32(mask)
        moved |= bits << np.uint32(shift) if shift >= 0 else bits >> np.uint32(-shift)
    return moved


def _words(x: jax.Array) -> jax.Array:
    """[..., bytes] uint8 -> [..., bytes / 4] uint32."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)


def _pack_nvfp4(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """codes [rows, K/2] uint8 and bits of block scales [rows, K/16] uint8 -> lines of NVFP4 tiles."""
    flips = jnp.where(scales >= 128, np.uint32(_SIGNS), np.uint32(0))
    words = _words(codes).reshape(*scales.shape, -1) ^ flips[..., None]
    codes = lax.bitcast_convert_type(_move_bits(words, _PLAIN_BITS, _TILE_BITS), jnp.uint8).reshape(codes.shape)
    tiles = _tiles(codes)
    row_tiles, k_tiles = tiles.shape[:2]
    n, k = scales.shape
    scales = jnp.pad(scales & np.uint8(127), ((0, row_tiles * TILE_ROWS - n), (0, k_tiles * TILE_SCALES - k)))
    scales = scales.reshape(row_tiles, TILE_ROWS, k_tiles, TILE_SCALES)[..., np.array(SCALE_ORDER)].transpose(0, 2, 1, 3)
    return jnp.concatenate([tiles, scales.reshape(row_tiles, k_tiles, -1, TILE_BYTES)], axis=2).reshape(-1, TILE_BYTES)


def _unpack_nvfp4(lines: jax.Array, segment: Segment) -> tuple[jax.Array, jax.Array]:
    """Undoes `_pack_nvfp4`, for ranks: codes [ranks here, rows, K/2] and bits of scales [ranks here, rows, K/16]."""
    ranks = lines.shape[0]
    lines = lines.reshape(ranks, segment.row_tiles, segment.k_tiles, -1, TILE_BYTES)
    codes = _rows(lines[..., :TILE_ROWS, :], segment.rows, segment.k // 2)
    codes = lax.bitcast_convert_type(_move_bits(_words(codes), _TILE_BITS, _PLAIN_BITS), jnp.uint8).reshape(codes.shape)
    scales = lines[..., TILE_ROWS:, :].reshape(*lines.shape[:3], TILE_ROWS, TILE_SCALES)[..., np.array(_PLAIN_ORDER)]
    scales = scales.transpose(0, 1, 3, 2, 4).reshape(ranks, segment.row_tiles * TILE_ROWS, -1)
    return codes, scales[:, : segment.rows, : segment.k // BLOCK]


def _pack_plain(rows: jax.Array) -> jax.Array:
    """[rows, K] uint16 or uint32, the bits of bf16 or fp32 -> lines of tiles."""
    return _tiles(_bytes(rows)).reshape(-1, TILE_BYTES)


def _unpack_plain(lines: jax.Array, segment: Segment) -> jax.Array:
    """Undoes `_pack_plain`, for ranks: [ranks here, lines, 128] uint8 -> [ranks here, rows, K]."""
    dtype = np.dtype(np.uint16 if segment.kind == "bf16" else np.uint32)
    lines = lines.reshape(lines.shape[0], segment.row_tiles, segment.k_tiles, TILE_ROWS, TILE_BYTES)
    rows = _rows(lines, segment.rows, segment.k * dtype.itemsize)
    return lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], segment.k, dtype.itemsize), dtype)


def _pack_vector(vector: jax.Array) -> jax.Array:
    data = _bytes(vector.reshape(-1))
    return jnp.pad(data, (0, -data.size % TILE_BYTES)).reshape(-1, TILE_BYTES)


def _unpack_vector(lines: jax.Array, vector: Vector) -> jax.Array:
    return lax.bitcast_convert_type(lines.reshape(-1, 4)[: vector.size], jnp.float32)


# ---- Parameters ---------------------------------------------------------------------------------------------------------

RESIDUAL_GATE_FLOOR = 1e-3  # of alpha^2
_BF16, _FP32, _U8, _E4M3 = map(np.dtype, (jnp.bfloat16, jnp.float32, jnp.uint8, jnp.float8_e4m3fn))


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """An array of the model. axis: that the ranks share, None: each has all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None = None


def _parameters(shape: Shape, nvfp4: bool) -> dict[tuple[str, ...], _Parameter]:
    """The parameters of a layer but for its residual gates, by path."""
    d, m, f, e = shape.hidden, shape.moe_hidden, shape.moe_intermediate, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    table = {
        ("input_norm",): _Parameter((d,), _BF16),
        ("attention", "q_proj"): _Parameter((q, d), _BF16, 0),
        ("attention", "k_proj"): _Parameter((kv, d), _BF16, 0),
        ("attention", "v_proj"): _Parameter((kv, d), _BF16, 0),
        ("attention", "attn_out_gate"): _Parameter((q, d), _BF16, 0),
        ("attention", "o_proj"): _Parameter((d, q), _BF16, 1),
        ("pre_ffn_norm",): _Parameter((d,), _BF16),
        ("mlp", "router"): _Parameter((e, d), _FP32),
        ("mlp", "router_bias"): _Parameter((e,), _FP32),
        ("mlp", "pre_expert_proj"): _Parameter((m, d), _BF16, 0),
        ("mlp", "pre_expert_norm"): _Parameter((m,), _BF16),
        ("mlp", "post_expert_norm"): _Parameter((m,), _BF16),
        ("mlp", "post_expert_proj"): _Parameter((d, m), _BF16, 0),
        ("post_ffn_norm",): _Parameter((d,), _BF16),
    }
    for name, stack, k, axis in (("gate_up", (e, 2, f), m, 2), ("down", (e, m), f, 1)):
        at = ("mlp", name)
        if nvfp4:
            table[*at, "codes"] = _Parameter((*stack, k // 2), _U8, axis)
            table[*at, "block_scales"] = _Parameter((*stack, k // BLOCK), _E4M3, axis)
            table[*at, "global_scale"] = _Parameter(stack[:-1], _FP32)
        else:
            table[at] = _Parameter((*stack, k), _BF16, axis)
    return table


def _checked(array: Any, name: str, parameter: _Parameter, shape: Shape, rank: Any) -> jax.Array:
    """`array`, which is `parameter`, or a rank's part of it where `rank` is None."""
    expected = list(parameter.shape)
    if rank is None and parameter.axis is not None:
        expected[parameter.axis] = shape.of_rank(expected[parameter.axis])
    if array.shape != tuple(expected) or array.dtype != parameter.dtype:
        found = f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{name} is {found}: this shape of model needs {parameter.dtype}{expected}")
    return array


def _get(params: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key] if isinstance(params, Mapping) else getattr(params, key)
    return params


def _part(array: jax.Array, axis: int, shape: Shape, rank: Any, index: Any = None) -> jax.Array:
    """What a rank has of an array, or of entry `index` of it.

    One slice, so that of whole arrays no more is read or copied than this.
    """
    starts, sizes = [0] * array.ndim, list(array.shape)
    if index is not None:
        starts[0], sizes[0] = index, 1
    if rank is not None:
        sizes[axis] = shape.of_rank(sizes[axis])
        starts[axis] = rank * sizes[axis]
    part = _slice(array, starts, sizes)
    return part if index is None else part[0]


def _slice(array: jax.Array, starts: list[Any], sizes: list[int]) -> jax.Array:
    """`lax.dynamic_slice`, as unsigned integers, for loops over `starts`.

    XLA for CPU may move bf16 and fp8 as wider floats, and then subnormal numbers may become zero. Without the barrier XLA would
    take the conversion of the whole array out of the loop.
    """
    array, starts = lax.optimization_barrier((array, starts))
    return lax.dynamic_slice(_integers(array), starts, sizes)


def _check_rank(rank: Any, shape: Shape) -> None:
    if isinstance(rank, int) and not 0 <= rank < shape.ranks:
        raise ValueError(f"rank = {rank}: allowed are 0 to {shape.ranks - 1}")


def gate_factors(gate: jax.Array, temperature: float) -> dict[str, jax.Array]:
    """What a residual gate multiplies stream (alpha) and branch (beta) by; gate: [D] fp32.

    beta = sigmoid(gate / temperature); alpha^2 = 1 - beta^2, floored.
    """
    w = gate / temperature
    beta = jax.nn.sigmoid(w)
    return {"alpha": jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-w) * (1.0 + beta), RESIDUAL_GATE_FLOOR)), "beta": beta}


def _gate(params: Any, name: str, shape: Shape, temperature: float | None) -> dict[str, jax.Array]:
    gate = params[name]
    if hasattr(gate, "shape"):
        if temperature is None:
            raise ValueError(f"{name} is a weight: its factors need `temperature`")
        gate = gate_factors(_checked(gate, name, _Parameter((shape.hidden,), _FP32), shape, None), temperature)
    factors = {key: _get(gate, (key,)) for key in ("alpha", "beta")}
    return {
        key: _checked(factor, f"{name}.{key}", _Parameter((shape.hidden,), _FP32), shape, None)
        for key, factor in factors.items()
    }


# ---- A rank's buffers ---------------------------------------------------------------------------------------------------


def _pad_heads(x: jax.Array, axis: int, head_dim: int) -> jax.Array:
    """Each head of `axis` padded to TILE_ROWS."""
    x = x.reshape(*x.shape[:axis], -1, head_dim, *x.shape[axis + 1 :])
    x = jnp.pad(x, [(0, TILE_ROWS - head_dim if i == axis + 1 else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _write(
    table: tuple[Segment | Vector, ...],
    matrices: Mapping[str, Callable[[Any], tuple[jax.Array, ...]]],
    vectors: Mapping[str, jax.Array],
) -> jax.Array:
    """The buffer of a table.

    matrices: for each segment a function of the matrix's number, which gives its rows, or the rows of its codes and scales.
    """

    def pack(entry: Segment, i: Any) -> jax.Array:
        return (_pack_nvfp4 if entry.kind == "nvfp4" else _pack_plain)(*matrices[entry.name](i))

    buffer = jnp.zeros((table_bytes(table) // TILE_BYTES, TILE_BYTES), jnp.uint8)
    stacks = []
    for entry in table:
        if isinstance(entry, Segment) and entry.count > 1:
            stacks.append(entry)
            continue
        lines = _pack_vector(vectors[entry.name]) if isinstance(entry, Vector) else pack(entry, 0)
        buffer = lax.dynamic_update_slice(buffer, lines, (entry.offset // TILE_BYTES, 0))
    # Stacks come last and one matrix at a time, in place, so that what is needed besides the buffer is the size of a matrix.
    # A write after the loops would be fused with the change of shape, and that makes a copy of the buffer.
    for entry in stacks:
        start, step = entry.offset // TILE_BYTES, entry.nbytes // entry.count // TILE_BYTES

        def write(i, buffer, entry=entry, start=start, step=step):
            return lax.dynamic_update_slice(buffer, pack(entry, i), (start + i * step, 0))

        buffer = lax.fori_loop(0, entry.count, write, buffer)
    return buffer.reshape(-1)


def pack_layer(
    params: Mapping[str, Any], shape: Shape, nvfp4: bool, rank: int | jax.Array | None, *, temperature: float | None = None
) -> jax.Array:
    """A rank's buffer of one layer, as `layer_table` says.

    Args:     params: nested, [out, in], bf16 unless said otherwise, whole arrays of all ranks:
              input_norm, pre_ffn_norm, post_ffn_norm [D];
              post_attention_gate, post_ffn_gate: [D] fp32, or their factors as fields alpha and beta, [D] fp32 each;
              attention: q_proj, attn_out_gate [N H, D], k_proj, v_proj [K H, D], o_proj [D, N H];
              mlp: router [E, D] fp32, router_bias [E] fp32, pre_expert_proj [M, D], pre_expert_norm [M],
              gate_up [E, 2, F, M], down [E, M, F], post_expert_norm [M], post_expert_proj [D, M].
              NVFP4: gate_up and down have fields codes [.., K/2] uint8 (low half of a byte first), block_scales [.., K/16]
              float8_e4m3fn and global_scale [E, 2] or [E] fp32, which multiplies. An input_scale is not kept.
              rank: whose part is packed; None: params are one rank's part already (axes of N, K, and of M and F where they
              are rows, divided by the ranks).  temperature: of the residual gates, where they are not factors.
    Returns:  [bytes] uint8.
    Raises:   ValueError if an array has another shape or dtype; NotImplementedError for what NVFP4 cannot be.
    """
    table = layer_table(shape, nvfp4)
    _check_rank(rank, shape)
    known = _parameters(shape, nvfp4)
    arrays = {path: _checked(_get(params, path), ".".join(path), known[path], shape, rank) for path in known}

    def part(*path: str, index: Any = None) -> jax.Array:
        axis = known[path].axis
        return _part(arrays[path], 0 if axis is None else axis, shape, None if axis is None else rank, index)

    def heads(_) -> tuple[jax.Array]:
        names = ("q_proj", "k_proj", "v_proj", "attn_out_gate")
        return (jnp.concatenate([_pad_heads(part("attention", name), 0, shape.head_dim) for name in names]),)

    def experts(name: str, i: Any) -> tuple[jax.Array, ...]:
        fields = (("codes",), ("block_scales",)) if nvfp4 else ((),)
        rows = (part("mlp", name, *field, index=i) for field in fields)
        # Rows of gate and up take turns.
        return tuple(x if name == "down" else x.transpose(1, 0, 2).reshape(-1, x.shape[-1]) for x in rows)

    matrices = {
        "qkv_gate": heads,
        "o_proj": lambda _: (_pad_heads(part("attention", "o_proj"), 1, shape.head_dim),),
        "router": lambda _: (part("mlp", "router"),),
        "pre_expert_proj": lambda _: (part("mlp", "pre_expert_proj"),),
        "gate_up": lambda i: experts("gate_up", i),
        "down": lambda i: experts("down", i),
        "post_expert_proj": lambda _: (part("mlp", "post_expert_proj"),),
    }
    vectors = {path[-1]: 1.0 + arrays[path].astype(jnp.float32) for path in known if path[-1].endswith("_norm")}
    for name in ("post_attention", "post_ffn"):
        vectors |= {f"{name}_{key}": x for key, x in _gate(params, f"{name}_gate", shape, temperature).items()}
    vectors["router_bias"] = arrays["mlp", "router_bias"]
    for name, size in (("gate_up", 2 * shape.experts), ("down", shape.experts)):
        vectors[f"{name}_scale"] = arrays["mlp", name, "global_scale"] if nvfp4 else jnp.ones(size, jnp.float32)
    return _write(table, matrices, vectors)


def pack_head(lm_head: jax.Array, final_norm: jax.Array, shape: Shape, rank: int | jax.Array | None) -> jax.Array:
    """A rank's buffer of the output layer, as `head_table` says.

    Args:     lm_head: [V, D] bf16; [V/R, D] where `rank` is None.  final_norm: [D] bf16.
    Returns:  [bytes] uint8.
    Raises:   ValueError if an array has another shape or dtype.
    """
    _check_rank(rank, shape)
    _checked(lm_head, "lm_head", _Parameter((shape.vocab, shape.hidden), _BF16, 0), shape, rank)
    _checked(final_norm, "final_norm", _Parameter((shape.hidden,), _BF16), shape, rank)
    segment, norm = head_table(shape)
    start = 0 if rank is None else rank * segment.rows
    # The rows of tiles as a stack of matrices, for the sake of memory; the last may have fewer rows.
    count, rest = divmod(segment.rows, TILE_ROWS)
    stack = dataclasses.replace(segment, name="stack", count=count, rows=TILE_ROWS)
    last = dataclasses.replace(segment, name="last", offset=stack.nbytes, rows=rest)

    def rows(i: Any, size: int) -> tuple[jax.Array]:
        return (_slice(lm_head, [start + i * TILE_ROWS, 0], [size, shape.hidden]),)

    matrices = {"stack": lambda i: rows(i, TILE_ROWS), "last": lambda _: rows(count, rest)}
    table = (*(entry for entry in (stack, last) if entry.nbytes), norm)
    return _write(table, matrices, {"final_norm": final_norm.astype(jnp.float32)})


def _lines(buffers: jax.Array, table: tuple[Segment | Vector, ...], shape: Shape) -> jax.Array:
    """[ranks here, bytes] as lines."""
    size = table_bytes(table)
    if buffers.dtype != _U8 or buffers.ndim != 2 or buffers.shape[0] not in (1, shape.ranks) or buffers.shape[1] != size:
        ranks = " or ".join(map(str, sorted({1, shape.ranks})))
        raise ValueError(f"buffers are {buffers.dtype}{list(buffers.shape)}: this shape of model needs uint8[{ranks}, {size}]")
    return buffers.reshape(buffers.shape[0], -1, TILE_BYTES)


def _matrix(lines: jax.Array, segment: Segment, i: Any = 0) -> Any:
    """[ranks here, rows, K] of bits, or codes and bits of scales of such: matrix `i` of a segment."""
    step = segment.nbytes // segment.count // TILE_BYTES
    part = lax.dynamic_slice(lines, (0, segment.offset // TILE_BYTES + i * step, 0), (lines.shape[0], step, TILE_BYTES))
    return (_unpack_nvfp4 if segment.kind == "nvfp4" else _unpack_plain)(part, segment)


def _vector(lines: jax.Array, vector: Vector) -> jax.Array:
    start = vector.offset // TILE_BYTES
    return _unpack_vector(lax.slice_in_dim(lines[0], start, start + vector.nbytes // TILE_BYTES), vector)


def _floats(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Undoes `_integers`."""
    return lax.bitcast_convert_type(bits, dtype)


def _stacked(x: jax.Array) -> jax.Array:
    """[ranks here, rows, ...] -> [all rows, ...]."""
    return x.reshape(-1, *x.shape[2:])


def unpack_layer(buffers: jax.Array, shape: Shape, nvfp4: bool) -> dict[str, Any]:
    """The parameters of a layer again, whole if all ranks' buffers are here, else one rank's part.

    Args:     buffers: [ranks here, bytes] uint8, of all ranks or of one.
    Returns:  the nested structure of `pack_layer`, with these differences:
              NVFP4 weights are {codes, block_scales, global_scale}; block scales have no sign, which went to the codes, so
              decoded values are the same bits; there is no input_scale;
              residual gates are their factors, {alpha, beta};
              norm weights are fp32: the buffer's 1 + w less 1. That is exact for each w in bf16, and adding 1 to it gives
              the buffer's number again; of w itself it lacks what 1 + w rounded away.
    """
    table = layer_table(shape, nvfp4)
    entry = {item.name: item for item in table}
    lines = _lines(buffers, table, shape)

    def vector(name: str) -> jax.Array:
        return _vector(lines, entry[name])

    def norm(name: str) -> jax.Array:
        return vector(name) - 1.0

    def experts(name: str) -> Any:
        def natural(x: jax.Array) -> jax.Array:
            if name == "down":
                return _stacked(x)
            return x.reshape(x.shape[0], -1, 2, x.shape[-1]).transpose(2, 0, 1, 3).reshape(2, -1, x.shape[-1])

        def expert(i: jax.Array) -> Any:
            rows = jax.tree.map(natural, _matrix(lines, entry[name], i))
            return {"codes": rows[0], "block_scales": _floats(rows[1], _E4M3)} if nvfp4 else _floats(rows, _BF16)

        # By number, not over the slices: these would be a copy of the segment.
        stack = lax.map(expert, jnp.arange(shape.experts, dtype=jnp.int32))
        if nvfp4:
            stack["global_scale"] = vector(f"{name}_scale").reshape((-1, 2) if name == "gate_up" else (-1,))
        return stack

    def projection(name: str) -> jax.Array:
        return _floats(_stacked(_matrix(lines, entry[name])), _BF16)

    heads = _matrix(lines, entry["qkv_gate"]).reshape(lines.shape[0], -1, TILE_ROWS, shape.hidden)
    q, kv = shape.of_rank(shape.heads), shape.of_rank(shape.kv_heads)
    split = jnp.split(heads[:, :, : shape.head_dim], (q, q + kv, q + 2 * kv), axis=1)
    names = ("q_proj", "k_proj", "v_proj", "attn_out_gate")
    attention = {name: _floats(x.reshape(-1, shape.hidden), _BF16) for name, x in zip(names, split, strict=True)}
    o_proj = _matrix(lines, entry["o_proj"]).reshape(lines.shape[0], shape.hidden, q, TILE_ROWS)[..., : shape.head_dim]
    attention["o_proj"] = _floats(o_proj.transpose(1, 0, 2, 3).reshape(shape.hidden, -1), _BF16)
    return {
        "input_norm": norm("input_norm"),
        "attention": attention,
        "post_attention_gate": {key: vector(f"post_attention_{key}") for key in ("alpha", "beta")},
        "pre_ffn_norm": norm("pre_ffn_norm"),
        "mlp": {
            "router": _floats(_matrix(lines[:1], entry["router"])[0], _FP32),
            "router_bias": vector("router_bias"),
            "pre_expert_proj": projection("pre_expert_proj"),
            "pre_expert_norm": norm("pre_expert_norm"),
            "gate_up": experts("gate_up"),
            "down": experts("down"),
            "post_expert_norm": norm("post_expert_norm"),
            "post_expert_proj": projection("post_expert_proj"),
        },
        "post_ffn_norm": norm("post_ffn_norm"),
        "post_ffn_gate": {key: vector(f"post_ffn_{key}") for key in ("alpha", "beta")},
    }


def unpack_head(buffers: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """lm_head [V, D] bf16 ([V/R, D] from one rank of several) and final_norm [D] fp32; buffers: [ranks here, bytes] uint8."""
    lm_head, final_norm = table = head_table(shape)
    lines = _lines(buffers, table, shape)
    return _floats(_stacked(_matrix(lines, lm_head)), _BF16), _vector(lines, final_norm)
