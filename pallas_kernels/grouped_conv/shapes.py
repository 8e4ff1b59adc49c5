"""Shapes of the released draft, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.grouped_conv import kernel, reference

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """Before a sublayer (side 0) z is the normed input and the result feeds a GEMM; after it (side 1) the stream is added."""

    name: str
    side: int
    batch: int = 1
    rows: int = BLOCK_SIZE
    channels: int = 8192
    groups: int = 512
    taps: int = 2

    @property
    def bytes_moved(self) -> int:
        elements = self.batch * self.rows * self.channels
        per_element = 4 * 3 if self.side else 2 * 2
        return elements * per_element + self.taps * (2 * self.channels + 4 * self.batch * self.rows * self.groups)

    def args(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays as `grouped_conv` takes them."""
        keys = jax.random.split(key, 4)
        rows = (self.batch, self.rows, self.channels)
        z = jax.random.normal(keys[0], rows, jnp.float32 if self.side else jnp.bfloat16)
        base = jax.random.normal(keys[1], (2, self.taps, self.channels), jnp.bfloat16)
        coefficients = jax.random.normal(keys[2], (self.batch, self.rows, 2, self.taps, self.groups), jnp.float32)
        residual = (jax.random.normal(keys[3], rows, jnp.float32),) if self.side else ()
        return (z, base, coefficients, *residual)

    def function(self, module, **options) -> Callable[..., jax.Array]:
        """grouped_conv of `kernel` or `reference`."""
        dtype = jnp.float32 if self.side else jnp.bfloat16
        return functools.partial(module.grouped_conv, side=self.side, block_size=BLOCK_SIZE, dtype=dtype, **options)


SHAPES = [ConvShape("before", 0), ConvShape("after", 1), ConvShape("after_4", 1, batch=4)]


def cases(config: kernel.GroupedConvConfig | None = None) -> Iterator[Case]:
    options = {} if config is None else {"config": config}
    for shape in SHAPES:

        def arguments(rng: np.random.Generator, shape: ConvShape = shape) -> tuple:
            return shape.args(jax.random.key(int(rng.integers(1 << 31))))

        run, expected = shape.function(kernel, **options), shape.function(reference)
        yield Case(f"grouped_conv[{shape.name}]", run, expected, arguments, shape.bytes_moved)


def check(actual: jax.Array, expected: jax.Array) -> None:
    """A few products and sums in fp32, which the GPU may contract, then perhaps a rounding to bf16."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and np.all(np.isfinite(actual.astype(np.float32)))
    actual, expected = (x.astype(np.float32) for x in (actual, expected))
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error <= 2.0**-16, f"relative error {error:.2g}"  # roundings that flip are few
