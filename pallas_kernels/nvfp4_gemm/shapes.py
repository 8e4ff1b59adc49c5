"""What a rank of eight has of the released model, for tests on a GPU and for benchmarks: one list for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.nvfp4_gemm import kernel, packing, reference


@dataclasses.dataclass(frozen=True)
class Shape:
    """rows tokens of top_k experts each, of which `active` are distinct; matrices [out_rows, k], one or two an expert."""

    name: str
    matrices: int
    out_rows: int
    k: int
    rows: int = 16
    top_k: int = 8
    experts: int = 256
    active: int = 49  # measured on GSM8K by the authors of the model's first megakernel

    @property
    def num_bytes(self) -> int:
        """What has to be read and written: the active experts, tokens and results."""
        weights = self.active * self.matrices * self.out_rows * (self.k // 2 + self.k // packing.BLOCK)
        inputs = self.rows * self.k * (1 if self.matrices == 2 else self.top_k)
        return weights + 2 * (inputs + self.rows * self.top_k * self.out_rows)


GATE_UP = Shape("gate_up", matrices=2, out_rows=512, k=4096)
DOWN = Shape("down", matrices=1, out_rows=512, k=4096)
SHAPES = (GATE_UP, DOWN)

# (rows of a tile, columns of a tile, stages of the ring): what is worth timing. Stages are as many as fit 227 KB.
TILES = {"gate_up": ((128, 32, 4), (64, 32, 6), (128, 32, 3)), "down": ((64, 32, 6), (128, 32, 3))}


def routing(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """[rows, top_k] int32: distinct experts in a row, `active` in all."""
    chosen = rng.choice(shape.experts, shape.active, replace=False)
    rounds = -(-shape.rows * shape.top_k // shape.active)
    while True:
        dealt = np.concatenate([rng.permutation(chosen) for _ in range(rounds)])[: shape.rows * shape.top_k]
        idx = dealt.reshape(shape.rows, shape.top_k)
        if all(len(np.unique(row)) == shape.top_k for row in idx):
            return idx.astype(np.int32)


def arguments(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
    """Random arguments of the reference, made on the device. Scales are those of weights of unit variance."""
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), 3)
    matrices = (shape.experts, 2, shape.out_rows) if shape.matrices == 2 else (shape.experts, shape.out_rows)
    tokens = (shape.rows, shape.k) if shape.matrices == 2 else (shape.rows, shape.top_k, shape.k)
    scales = jax.random.uniform(keys[1], (*matrices, shape.k // packing.BLOCK), minval=64.0, maxval=448.0)
    return {
        "x": jax.random.normal(keys[2], tokens, jnp.bfloat16),
        "idx": jnp.asarray(routing(shape, rng)),
        "codes": jax.random.bits(keys[0], (*matrices, shape.k // 2), jnp.uint8),
        "block_scales": scales.astype(jnp.float8_e4m3fn),
        "global_scale": jnp.full(matrices[:-1], 2.0**-15, jnp.float32),
    }


def cases() -> Iterator[Case]:
    """Of each kernel and tile; arguments are those of the kernel and those of the reference."""
    for shape in SHAPES:
        for tile_rows, cols, stages in TILES[shape.name]:
            for decode in ("packed", "vector"):
                yield Case(
                    f"nvfp4_gemm[{shape.name},{tile_rows}x{cols * packing.BLOCK},stages={stages},{decode}]",
                    _kernel(shape, kernel.Config(stages=stages, decode=decode)),
                    lambda _, args, shape=shape: getattr(reference, shape.name)(*args),
                    _maker(shape, tile_rows, cols),
                    shape.num_bytes,
                )


def _kernel(shape: Shape, config: kernel.Config) -> Callable:
    def run(args: tuple[jax.Array, kernel.Plan, packing.PackedWeights], _: tuple) -> jax.Array:
        return getattr(kernel, shape.name)(*args, config=config)

    return run


def _maker(shape: Shape, tile_rows: int, cols: int) -> Callable[[np.random.Generator], tuple[tuple[Any, ...], tuple[Any, ...]]]:
    def make(rng: np.random.Generator) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        args = arguments(shape, int(rng.integers(1 << 31)))
        matrices = args["codes"], args["block_scales"], args["global_scale"]
        weights = jax.jit(packing.pack_weights, static_argnums=(3, 4))(*matrices, tile_rows, cols)
        routed = jax.jit(kernel.plan, static_argnums=1)(args["idx"], shape.experts)
        return (args["x"], routed, weights), (args["x"], args["idx"], *matrices)

    return make


def check(actual: jax.Array, expected: jax.Array) -> None:
    """fp32 sums of 4,096 terms in another order, 2^-24 each, then a rounding that may flip: a bf16 unit is up to 2^-7."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    far = ~(abs(actual - expected) <= 2.0**-7 * abs(expected) + 2.0**-12 * np.sqrt(np.mean(expected**2)))
    assert not far.any(), f"{np.count_nonzero(far)} of {far.size} values differ, by up to {abs(actual - expected).max():.3g}"
