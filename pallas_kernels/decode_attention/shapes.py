"""Shapes of one rank of eight, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.decode_attention import kernel, reference

WINDOW = 2048
RING = 2064  # window - 1 and the largest tree, and then to a multiple of 8
SCALE = 64**-0.5


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """length: positions committed.  window: of a sliding layer, whose cache is a ring; None: a global layer."""

    name: str
    slots: int
    length: int
    window: int | None = None
    rows: int = 16
    batch: int = 1
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 64

    @property
    def bytes_moved(self) -> int:
        """Keys and values that are read, queries, rows and output; partial results stay in L2."""
        seen = self.slots if self.window else self.length
        kv = 2 * 2 * self.batch * self.kv_heads * self.head_dim * (seen + self.rows)
        return kv + (2 + 4) * self.batch * self.rows * self.heads * self.head_dim

    def args(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays as `attend_ring` or `attend_linear` takes them. The rows are a tree, so that siblings share a position."""
        keys = jax.random.split(key, 5)
        cache = (self.batch, self.kv_heads, self.slots, self.head_dim)
        rows = (self.batch, self.kv_heads, self.rows, self.head_dim)
        shapes = [(self.batch, self.rows, self.heads, self.head_dim), cache, cache, rows, rows]
        q, *kv = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
        parents = [(row - 1) // 2 for row in range(self.rows)]
        visible = jnp.eye(self.rows, dtype=bool)
        depth = [0] * self.rows
        for row in range(1, self.rows):
            visible = visible.at[row].set(visible[parents[row]] | visible[row])
            depth[row] = depth[parents[row]] + 1
        visible = jnp.broadcast_to(visible[None], (self.batch, self.rows, self.rows))
        start = jnp.full(self.batch, self.length, jnp.int32)
        q = q * jnp.bfloat16(2)  # scores of a deviation of 2: neither flat nor one key alone
        if self.window is None:
            return (q, *kv, start, visible)
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        newest = self.length - 1
        held = newest - (newest - slot) % self.slots
        ring_positions = jnp.broadcast_to(jnp.maximum(held, -1)[None], (self.batch, self.slots))
        positions = start[:, None] + jnp.array(depth, jnp.int32)[None, :]
        return (q, *kv, ring_positions, start, positions, visible)

    def function(self, module, **options) -> Callable[..., jax.Array]:
        """attend_ring or attend_linear of `kernel` or `reference`."""
        if self.window is None:
            return functools.partial(module.attend_linear, scale=self.head_dim**-0.5, **options)
        return functools.partial(module.attend_ring, window=self.window, scale=self.head_dim**-0.5, **options)


SHAPES = [
    AttentionShape("sliding", RING, 100_000, WINDOW),
    AttentionShape("sliding_start", RING, 700, WINDOW),
    AttentionShape("sliding_1", RING, 100_000, WINDOW, rows=1),
    AttentionShape("global_2k", 131_072, 2_048),
    AttentionShape("global_32k", 131_072, 32_768),
    AttentionShape("global_100k", 131_072, 100_000),
    AttentionShape("global_100k_1", 131_072, 100_000, rows=1),
    AttentionShape("global_32k_4", 32_768, 32_000, batch=4),
]


def cases(config: kernel.DecodeAttentionConfig | None = None) -> Iterator[Case]:
    options = {} if config is None else {"config": config}
    for shape in SHAPES:

        def arguments(rng: np.random.Generator, shape: AttentionShape = shape) -> tuple:
            return shape.args(jax.random.key(int(rng.integers(1 << 31))))

        run, expected = shape.function(kernel, **options), shape.function(reference)
        yield Case(f"decode_attention[{shape.name}]", run, expected, arguments, shape.bytes_moved)


def check(actual: jax.Array, expected: jax.Array) -> None:
    """Probabilities, rounded at another maximum on the way to a block's values: errors of 2^-9 with the law of roundings."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and np.all(np.isfinite(actual))
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error <= 2**-9 * np.sqrt(2 / 3), f"relative error {error:.2g}"
