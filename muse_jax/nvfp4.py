"""NVFP4: e2m1 codes in blocks of 16 along a row, an e4m3 scale per block, an fp32 scale per matrix (muse_spark.md section 4).

    value = e2m1(code) * e4m3(block scale) * global scale

The product of the first two is exact in bfloat16 and float32, which the whole is not: GEMMs contract with `decode` and
multiply the fp32 accumulator by the global scale.

Functions take numpy and jax arrays alike and return the kind they were given. A row is contiguous along its last axis, K, the
axis that a GEMM contracts. Arithmetic is IEEE fp32, without the approximate reciprocals of GPU quantisers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

BLOCK = 16  # values of a row that share a scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest e4m3 above zero

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_MIN_GLOBAL_SCALE = float(np.finfo(np.float32).tiny)
# A row of activations below this is a row of zeros: from there on, reciprocals of its scales are no normal fp32 numbers.
_MIN_ROW_AMAX = 2.0**-100
_PIECE = 1 << 18  # values that numpy encodes at a time: temporaries that fit a cache, and a bound on memory

Array = TypeVar("Array", np.ndarray, jax.Array)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "block_scales", "global_scale", "input_scale"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4Weight:
    """Packed matrices [..., N, K]; the leading axes are those of stacks, such as experts and their gate and up halves.

    codes: [..., N, K/2] uint8; byte j of a row holds value 2j in its low and value 2j + 1 in its high half.
    block_scales: [..., N, K/16] float8_e4m3fn.
    global_scale: [...] fp32, multiplies.
    input_scale: [...] fp32, a static activation scale. The checkpoint's; no arithmetic here uses it.
    """

    codes: Any
    block_scales: Any
    global_scale: Any
    input_scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices that it stands for."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def decode(self, dtype: DTypeLike) -> Any:
        """[..., N, K], without the global scale: exact in bfloat16 and float32."""
        return decode(self.codes, self.block_scales, dtype)

    def dequantize(self) -> Any:
        """[..., N, K] fp32, the global scale included."""
        return self.decode(np.float32) * self.global_scale[..., None, None]


# ---------------------------------------------------------------------------------------------------------------- codes


def pack(codes: Array) -> Array:
    """[..., K] uint8, 0 to 15 -> [..., K/2] uint8. The low half of a byte is the even index."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Array) -> Array:
    """[..., K/2] uint8 -> [..., K] uint8, 0 to 15."""
    xp = packed.__array_namespace__()
    return xp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode(packed: Array, block_scales: Array, dtype: DTypeLike) -> Array:
    """e2m1(code) e4m3(block scale), exact.

    Args:     packed: [..., K/2] uint8.  block_scales: [..., K/16] float8_e4m3fn.  dtype: bfloat16 or float32.
    Returns:  [..., K] of `dtype`.
    """
    xp = packed.__array_namespace__()
    codes = unpack(packed)
    # Magnitudes 0 0.5 1 1.5 2 3 4 6 are a convex function of the code: twice the value is the largest of three lines.
    m = (codes & 7).astype(np.int8)
    twice = xp.maximum(xp.maximum(m, 2 * m - 4), 4 * m - 16).astype(dtype)
    twice = xp.where(codes >= 8, -twice, twice).reshape(*block_scales.shape, BLOCK)
    half = xp.asarray(0.5, dtype=dtype)
    return (twice * (block_scales.astype(dtype) * half)[..., None]).reshape(codes.shape)


def _e2m1(x: Array) -> Array:
    """Codes, uint8, of the nearest e2m1 values: ties to the even code, saturating at 6. Zero keeps its sign, NaN gets 6."""
    xp = x.__array_namespace__()
    a = xp.abs(x)
    # Steps are 0.5 up to 2, 1 up to 4, 2 up to 6: the code is the smallest of three roundings, each exact in its range.
    code = xp.minimum(xp.minimum(xp.rint(2 * a), xp.rint(a) + 2), xp.rint(a * 0.5) + 4)
    return xp.fmin(code, 7).astype(np.uint8) | (xp.signbit(x).astype(np.uint8) << 3)


def _nearest_e4m3(x: Array) -> Array:
    """The nearest e4m3 value of fp32 numbers from 0 to 448, ties to even, as fp32.

    A cast would do in numpy, but XLA may drop a pair of casts, and a cast above 464 gives NaN: clamp before, not after.
    """
    xp = x.__array_namespace__()
    power = (x.view(np.int32) & 0x7F800000).view(np.float32)  # of two, at most x
    step = xp.maximum(power, 2.0**-6) * 2.0**-3
    return xp.rint(x / step) * step


# -------------------------------------------------------------------------------------------------------------- weights


def matrix_scale(amax: Array) -> Array:
    """The global scale of matrices with these largest magnitudes, fp32: amax / (6 * 448), as ModelOpt has it.

    It gives the largest block the largest scale. A matrix of zeros gets 1.
    """
    xp = amax.__array_namespace__()
    return xp.where(amax > 0, xp.maximum(amax / (E2M1_MAX * E4M3_MAX), _MIN_GLOBAL_SCALE), 1.0).astype(np.float32)


def encode(weight: Array, global_scale: Array) -> tuple[Array, Array]:
    """Rounds matrices to NVFP4.

        block scale = e4m3(clamp(amax(block) / (6 global), 2^-9, 448))      code = e2m1(weight / (block scale * global))

    Args:     weight: [..., N, K] bfloat16 or float32, finite; K a multiple of 16.  global_scale: [...] fp32, above 0.
    Returns:  codes [..., N, K/2] uint8 and block scales [..., N, K/16] float8_e4m3fn.
    Rounding: nearest-even, codes saturate at 6. numpy works in pieces and needs a few MB besides the result.
    """
    xp = weight.__array_namespace__()
    *stack, n, k = weight.shape
    rows = weight.reshape(-1, k)
    scales = xp.repeat(global_scale.reshape(-1), n)
    step = max(1, _PIECE // k) if xp is np else len(rows)
    pieces = [_encode_rows(rows[i : i + step], scales[i : i + step]) for i in range(0, len(rows), step)]
    codes, block_scales = pieces[0] if len(pieces) == 1 else map(xp.concatenate, zip(*pieces, strict=True))
    return codes.reshape(*stack, n, k // 2), block_scales.reshape(*stack, n, k // BLOCK)


def _encode_rows(rows: Array, global_scale: Array) -> tuple[Array, Array]:
    """rows: [R, K].  global_scale: [R]."""
    xp = rows.__array_namespace__()
    blocks = rows.astype(np.float32).reshape(len(rows), -1, BLOCK)
    global_scale = global_scale[:, None]
    amax = xp.max(xp.abs(blocks), axis=-1)
    scale = _nearest_e4m3(xp.clip(amax / (E2M1_MAX * global_scale), E4M3_MIN, E4M3_MAX))
    codes = _e2m1(blocks / (scale * global_scale)[..., None])
    return pack(codes.reshape(rows.shape)), scale.astype(_E4M3)


def quantize(weight: np.ndarray, name: str) -> NVFP4Weight:
    """Packs matrices, each with its own global scale; input scales are 1, as in checkpoints without calibration.

    Args:     weight: [..., N, K] bfloat16 or float32; gate and up halves are two matrices.  name: for the error.
    Returns:  numpy arrays.
    Raises:   ValueError if K is not a multiple of 16, or if a value is NaN or infinite.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"{name} has rows of {weight.shape[-1]}: NVFP4 needs a multiple of {BLOCK}")
    scale = matrix_scale(_amax(weight, name))
    codes, block_scales = encode(weight, scale)
    return NVFP4Weight(codes, block_scales, scale, np.ones_like(scale))


def _amax(weight: np.ndarray, name: str) -> np.ndarray:
    """Largest magnitude of each matrix, fp32. As integers, magnitudes have the order of the numbers, and NaN is above all."""
    bits = np.dtype(f"u{weight.dtype.itemsize}")
    amax = np.empty(weight.shape[:-2], weight.dtype)
    for matrix in np.ndindex(amax.shape):
        amax.view(bits)[matrix] = np.max(weight[matrix].view(bits) & np.iinfo(bits).max // 2)
    amax = amax.astype(np.float32)
    if not np.isfinite(amax).all():
        where = list(map(int, np.argwhere(~np.isfinite(amax))[0]))
        raise ValueError(f"{name} holds NaN or infinity (matrix {where}): only finite values can be quantised")
    return amax


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """What packing a tensor cost.

    relative_rms: root of the summed squares of all errors over that of all values; 0 for zeros.
    worst_block: the same of the block where it is largest; `worst_block_index` is its place in `block_scales`.
    saturated: values beyond 6 times their scale, so clipped.
    """

    relative_rms: float
    worst_block: float
    worst_block_index: tuple[int, ...]
    saturated: int


def quantization_error(weight: np.ndarray, packed: NVFP4Weight) -> QuantizationError:
    """Compares matrices [..., N, K] with their packed form, both numpy."""
    *_, n, k = weight.shape
    rows, codes, scales = (x.reshape(-1, x.shape[-1]) for x in (weight, packed.codes, packed.block_scales))
    global_scale = np.repeat(packed.global_scale.reshape(-1), n)
    step = max(1, _PIECE // k)
    errors = values = 0.0
    worst, worst_at, saturated = 0.0, 0, 0
    for i in range(0, len(rows), step):
        piece = slice(i, i + step)
        exact = rows[piece].astype(np.float32).reshape(-1, k // BLOCK, BLOCK)
        scale = global_scale[piece, None, None]
        decoded = decode(codes[piece], scales[piece], np.float32).reshape(exact.shape) * scale
        limit = E2M1_MAX * scales[piece].astype(np.float32)[..., None] * scale
        saturated += int(np.count_nonzero(np.abs(exact) > limit))
        error, value = (np.sum(np.square(x, dtype=np.float64), axis=-1).reshape(-1) for x in (exact - decoded, exact))
        errors, values = errors + error.sum(), values + value.sum()
        relative = error / np.where(value > 0, value, 1)
        if (largest := relative.max()) > worst:
            worst, worst_at = largest, i * (k // BLOCK) + int(relative.argmax())
    index = tuple(map(int, np.unravel_index(worst_at, packed.block_scales.shape)))
    return QuantizationError(float(np.sqrt(errors / (values or 1))), float(np.sqrt(worst)), index, saturated)


# ---------------------------------------------------------------------------------------------------------- activations


def quantize_rows(x: Array, amax: Array | None = None) -> tuple[Array, Array, Array]:
    """Rounds each row of activations to NVFP4 with a scale of its own, amax / (6 * 448) (muse_spark.md 4.3, per-token).

    Args:     x: [..., K] bfloat16; K a multiple of 16.  amax: [...] fp32, the largest magnitude of the row that x is cut from.
    Returns:  codes [..., K/2] uint8, block scales [..., K/16] float8_e4m3fn and row scales [...] fp32, which multiply.
              A row of zeros has codes and scales 0, as has a block too small for the row's scale. NaN stays NaN.
    Rounding: nearest-even. The block that holds a row's largest value gets the scale 448, so nothing saturates beyond
              rounding.
    """
    xp = x.__array_namespace__()
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    block_amax = xp.max(xp.abs(blocks), axis=-1)
    amax = xp.max(block_amax, axis=-1) if amax is None else amax
    scale_of_row = row_scale(amax)
    encode_scale = _as_written(1 / xp.where(scale_of_row == 0, 1.0, scale_of_row))[..., None]
    sixth = _as_written(block_amax * (1 / E2M1_MAX))
    scale = _nearest_e4m3(xp.minimum(encode_scale * sixth, E4M3_MAX))
    is_zero = scale == 0
    reciprocal = 1 / (xp.where(is_zero, 1.0, scale) * (1 / encode_scale))
    codes = xp.where(is_zero[..., None], xp.asarray(0, dtype=np.uint8), _e2m1(blocks * reciprocal[..., None]))
    return pack(codes.reshape(x.shape)), scale.astype(_E4M3), scale_of_row


def row_scale(amax: Array) -> Array:
    """The scale of a row of activations with this largest magnitude, fp32."""
    xp = amax.__array_namespace__()
    return xp.where(amax < _MIN_ROW_AMAX, 0.0, amax * (1 / (E2M1_MAX * E4M3_MAX)))


def _as_written(x: Array) -> Array:
    """Keeps XLA from rewriting the products and reciprocals around x, which moves ties."""
    return lax.optimization_barrier(x) if isinstance(x, jax.Array) else x
