"""What the profiler saw the device do."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    import jax


class Kernel(NamedTuple):
    """A kernel or a copy that a GPU ran."""

    start_ns: float
    duration_ns: float


@contextlib.contextmanager
def recorded(work: Callable[[], Any], name: str, **options: Any) -> Iterator[Path]:
    """Runs `work` under the profiler and gives the file that this has written, for as long as the block lasts.

    Args:     work: returns when the device has done it.  name: of the file, a pattern.  options: of `jax.profiler.trace`.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, **options):
            work()
        (file,) = Path(folder).rglob(name)
        yield file


def run_kernels(work: Callable[[], Any]) -> list[Kernel]:
    """What GPUs run in `work`, which returns when they have done it; nothing without a GPU."""
    import jax

    with recorded(work, "*.xplane.pb") as file:
        return read_kernels(jax.profiler.ProfileData.from_file(str(file)))


def read_kernels(data: jax.profiler.ProfileData) -> list[Kernel]:
    """What GPUs ran, those that started first at the front."""
    lines = [line for plane in data.planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
    return sorted(Kernel(event.start_ns, event.duration_ns) for line in lines for event in line.events)


def busy_ns(kernels: list[Kernel]) -> float:
    """How long one or several of them ran.  kernels: in order of their starts."""
    busy, end = 0.0, float("-inf")
    for start, duration in kernels:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return busy


def span_ns(kernels: list[Kernel]) -> float:
    """From the start of the first to the end of the last; 0 if there are none."""
    if not kernels:
        return 0.0
    return max(start + duration for start, duration in kernels) - min(start for start, _ in kernels)
