"""How a tensor is cut for streaming: boxes that follow each other in row-major order and are whole along the last axes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

PIECE_BYTES = 32 << 20


def row_boxes(
    shape: tuple[int, ...], itemsize: int, *, rows: int = 1, period: int | None = None, limit: int = PIECE_BYTES
) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `limit` bytes (more only where `rows` rows of the last axis are more), in row-major order.

    Args:     shape: of the array; a scalar has one box.
              rows: cuts of the last axis but one are multiples of it, counted from the last multiple of `period`.
              period: where that count begins anew; None: at 0 alone.
    """
    if not shape:
        yield ()
        return
    # The axis that is cut: before it boxes have one element, behind it they are whole.
    sizes = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next((axis for axis, size in enumerate(sizes) if size <= limit), len(shape) - 1)
    axis = min(axis, max(0, len(shape) - 2))  # rows of the last axis are not cut
    is_row_axis = axis == len(shape) - 2
    step = max(1, limit // sizes[axis])
    if is_row_axis:
        step = max(1, step // rows) * rows
    bounds = []
    for begin in range(0, shape[axis], (period if is_row_axis else None) or shape[axis]):
        end = min(begin + (period if is_row_axis and period else shape[axis]), shape[axis])
        bounds += [(start, min(start + step, end)) for start in range(begin, end, step)]
    for outer in np.ndindex(*shape[:axis]):
        for start, stop in bounds:
            yield (*(slice(i, i + 1) for i in outer), slice(start, stop), *(slice(0, size) for size in shape[axis + 1 :]))
