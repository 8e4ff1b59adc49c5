"""What a rank of eight has of a layer with bf16 experts, for tests on a GPU and for benchmarks: one list for both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.dense_gemm.shapes import check
from pallas_kernels.expert_gemm import kernel, reference
from pallas_kernels.nvfp4_gemm import shapes as nvfp4_shapes
from pallas_kernels.nvfp4_gemm.kernel import Plan, plan

__all__ = ["CONFIGS", "DOWN", "GATE_UP", "SHAPES", "Shape", "arguments", "cases", "check"]


class Shape(nvfp4_shapes.Shape):
    @property
    def num_bytes(self) -> int:
        """What has to be read and written: the active experts, tokens and results."""
        weights = self.active * self.matrices * self.out_rows * self.k
        inputs = self.rows * self.k * (1 if self.matrices == 2 else self.top_k)
        return 2 * (weights + inputs + self.rows * self.top_k * self.out_rows)


GATE_UP = Shape("gate_up", matrices=2, out_rows=512, k=4096)
DOWN = Shape("down", matrices=1, out_rows=512, k=4096)
SHAPES = (GATE_UP, DOWN)

# What is worth timing: the larger ring in fewer and in more pieces.
CONFIGS = (kernel.Config(chunk=128), kernel.Config(chunk=256))


def arguments(shape: Shape, seed: int = 0) -> tuple[jax.Array, Plan, jax.Array, jax.Array]:
    """Random rows, plan, ids and weights, made on the device; sums have unit variance."""
    keys = jax.random.split(jax.random.key(seed), 2)
    matrices = (shape.experts, 2, shape.out_rows) if shape.matrices == 2 else (shape.experts, shape.out_rows)
    tokens = (shape.rows, shape.k) if shape.matrices == 2 else (shape.rows, shape.top_k, shape.k)
    weights = jax.random.normal(keys[0], (*matrices, shape.k), jnp.bfloat16) * jnp.bfloat16(shape.k**-0.5)
    idx = jnp.asarray(nvfp4_shapes.routing(shape, np.random.default_rng(seed)))
    return jax.random.normal(keys[1], tokens, jnp.bfloat16), plan(idx, shape.experts), idx, weights


def cases() -> Iterator[Case]:
    """Of each kernel; arguments are those of the kernel and those of the reference. Results are as `check` tells them apart:
    of `gate_up` an array, of `down` a tuple of one."""
    for shape in SHAPES:
        for config in CONFIGS:
            name = f"expert_gemm[{shape.name},chunk={config.chunk}]"
            yield Case(name, run_kernel(shape, config), run_plain(shape), functools.partial(_make, shape), shape.num_bytes)


def run_kernel(shape: Shape, config: kernel.Config) -> Callable:
    def run(x: jax.Array, routing: Plan, _: jax.Array, weights: jax.Array, interpret: Any = None) -> Any:
        out = getattr(kernel, shape.name)(x, routing, weights, config, interpret)
        return out if shape.matrices == 2 else (out,)

    return run


def run_plain(shape: Shape) -> Callable:
    def run(x: jax.Array, _: Plan, idx: jax.Array, weights: jax.Array) -> Any:
        out = getattr(reference, shape.name)(x, idx, weights)
        return out if shape.matrices == 2 else (out,)

    return run


def _make(shape: Shape, rng: np.random.Generator) -> tuple[jax.Array, Plan, jax.Array, jax.Array]:
    return jax.jit(functools.partial(arguments, shape, int(rng.integers(1 << 31))))()
