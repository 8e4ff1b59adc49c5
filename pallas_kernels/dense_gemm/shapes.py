"""The dense matrices of one rank of eight of the released model and its draft, for tests and the benchmark: one list for both.

What the draft's head size and FFN width are has not been published: those of a relative, as in scripts/show_collectives.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case, nbytes
from pallas_kernels.dense_gemm import reference
from pallas_kernels.dense_gemm.kernel import Config, dense, swiglu


@dataclasses.dataclass(frozen=True)
class Shape:
    """Matrices [n, k] for each n of `sizes`, that read the same rows; with `gated` they are gate and up.

    configs: what is worth timing, the one expected to be fastest first. Units, (blocks of 64 rows / blocks of a tile) x splits,
    fill 132 SMs once, or a whole number of times, and stages hold all of a unit or most of shared memory.
    """

    name: str
    k: int
    sizes: tuple[int, ...]
    out_dtype: type
    configs: tuple[Config, ...]
    gated: bool = False
    rows: int = 16

    @property
    def num_bytes(self) -> int:
        """What has to be read and written: partial sums are not, they stay in the L2 cache."""
        outputs = self.sizes[:1] if self.gated else self.sizes
        weights = [((n, self.k), jnp.bfloat16) for n in self.sizes]
        return nbytes(((self.rows, self.k), jnp.bfloat16), *weights, *(((self.rows, n), self.out_dtype) for n in outputs))


SHAPES = (
    Shape(
        "qkv_gate",
        8192,
        (1024, 128, 128, 1024),
        jnp.bfloat16,
        (Config(11, 3, 128, 4), Config(11, 3, 64, 8), Config(7, 2, 64, 12), Config(11, 1, 256, 5)),
    ),
    Shape("o_proj", 1024, (8192,), jnp.float32, (Config(1, 1, 128, 8), Config(1, 1, 256, 4), Config(2, 2, 128, 4))),
    Shape("pre_expert_proj", 8192, (512,), jnp.bfloat16, (Config(16, 1, 128, 4), Config(16, 1, 64, 8), Config(32, 2, 64, 4))),
    Shape("post_expert_proj", 4096, (1024,), jnp.bfloat16, (Config(8, 1, 128, 4), Config(8, 1, 64, 8), Config(16, 2, 64, 4))),
    Shape("lm_head", 8192, (25_256,), jnp.float32, (Config(1, 3, 128, 4), Config(1, 3, 64, 8), Config(1, 1, 128, 11))),
    Shape("draft_qkv", 8192, (1024, 128, 128), jnp.float32, (Config(13, 2, 128, 6), Config(13, 1, 128, 11))),
    Shape("draft_conv", 8192, (256,), jnp.float32, (Config(32, 1, 128, 2), Config(32, 1, 64, 4))),
    Shape("draft_gate_up", 8192, (3072, 3072), jnp.bfloat16, (Config(4, 3, 128, 4), Config(4, 3, 64, 8)), gated=True),
    Shape("draft_down", 3072, (8192,), jnp.float32, (Config(1, 1, 128, 11), Config(1, 1, 256, 5), Config(3, 3, 128, 4))),
    Shape("draft_fc", 5120, (8192,), jnp.float32, (Config(1, 1, 128, 11), Config(1, 1, 256, 5), Config(3, 3, 64, 8))),
)


def arguments(shape: Shape, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random rows and matrices, made on the device; results have unit variance."""
    keys = jax.random.split(jax.random.key(seed), 1 + len(shape.sizes))
    weights = (jax.random.normal(key, (n, shape.k), jnp.bfloat16) for key, n in zip(keys[1:], shape.sizes, strict=True))
    scale = jnp.bfloat16(shape.k**-0.5)
    return jax.random.normal(keys[0], (shape.rows, shape.k), jnp.bfloat16), *(weight * scale for weight in weights)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for c in shape.configs:
            name = f"dense_gemm[{shape.name},splits={c.splits},{64 * c.blocks}x{c.chunk},stages={c.stages}]"
            make = functools.partial(_make, shape)
            yield Case(name, kernel(shape, c), plain(shape), make, shape.num_bytes)


def kernel(shape: Shape, config: Config) -> Callable:
    def run(x, *weights, interpret=None):
        if shape.gated:
            return swiglu(x, *weights, config=config, interpret=interpret)
        return dense(x, weights, shape.out_dtype, config, interpret)

    return run


def plain(shape: Shape) -> Callable:
    def run(x, *weights):
        return reference.swiglu(x, *weights) if shape.gated else reference.dense(x, weights, shape.out_dtype)

    return run


def _make(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    return jax.jit(functools.partial(arguments, shape))(int(rng.integers(1 << 31)))


def check(actual: jax.Array | tuple[jax.Array, ...], expected: jax.Array | tuple[jax.Array, ...]) -> None:
    """fp32 sums in two orders, then a rounding that may flip: a bf16 unit is up to 2^-7.

    A tensor core adds 16 products to an accumulator at a time and truncates: up to 512 times 2^-23 of partial sums that are
    at most a few times as large as a typical result, 2^-12 of that for both. Of a product silu(gate) up, whose factors are up
    to 5.5 typical results, that is 12 times as much, and a typical product 0.35 of a result.
    """
    gated = not isinstance(actual, tuple)
    error = 2.0**-12 * (12 / 0.35 if gated else 1)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, (one.dtype, one.shape)
        flip = 2.0**-7 if one.dtype == jnp.bfloat16 else 0.0
        one, other = (np.asarray(y).astype(np.float64) for y in (one, other))
        far = ~(abs(one - other) <= flip * abs(other) + error * np.sqrt(np.mean(other**2)))
        assert not far.any(), f"{np.count_nonzero(far)} of {far.size} values differ, by up to {abs(one - other).max():.3g}"
