"""What tests and the benchmark share: a kernel beside its reference at full size, and how close they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np


class Case(NamedTuple):
    """One shape of a kernel.

    kernel: takes the arguments, and `interpret`.  reference: takes the arguments.  arguments: makes them, numpy arrays, from a
    `numpy.random.Generator`.  bytes: read and written.
    """

    name: str
    kernel: Callable
    reference: Callable
    arguments: Callable[[np.random.Generator], tuple]
    bytes: int


def nbytes(*shapes: tuple[tuple[int, ...], Any]) -> int:
    """The bytes of arrays, given as (shape, dtype)."""
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape, np.float32)).astype(dtype)


def check_rounded(actual: jax.Array, expected: jax.Array, relative_error: float) -> None:
    """Values that were rounded to bf16 from fp32 ones of this relative error: one unit apart, and few of them.

    A value changes its rounding if it is as close to the middle between two bf16 numbers, which are 2^-8 to 2^-7 of it apart:
    a share of up to 2^9 times the error. Twice that is allowed, and two values more. Where terms of a sum cancel, the error is
    one of the terms, which are taken to be as large as the row's largest value. fp32 arrays must have the error itself, and a
    unit more.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    if actual.dtype == np.float32:
        np.testing.assert_allclose(actual, expected, rtol=relative_error + 2.0**-23, atol=0)
        return
    assert actual.dtype == ml_dtypes.bfloat16
    assert np.isfinite(actual.astype(np.float32)).all()
    apart = np.abs(_ordered(actual) - _ordered(expected))
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32))
    largest = np.max(np.abs(expected.astype(np.float32)), axis=-1, keepdims=True)
    far = (apart > 1) & (difference > 2 * relative_error * largest)
    assert not far.any(), f"{np.count_nonzero(far)} of {apart.size} values are up to {apart[far].max()} units apart"
    allowed = 2 + int(2 * 2.0**9 * relative_error * apart.size)
    assert np.count_nonzero(apart) <= allowed, f"{np.count_nonzero(apart)} of {apart.size} values differ, allowed {allowed}"


def _ordered(x: np.ndarray) -> np.ndarray:
    """bf16 numbers as integers: neighbours differ by one, both zeros are 0."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)
