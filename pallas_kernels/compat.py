"""Differences between versions of jax, and between its GPU lowering and its interpreter, in this one place."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# The default differs between versions. Kernels here lower with either.
LOWERING_SEMANTICS = plgpu.LoweringSemantics.Lane


def interpret_params(detect_races: bool = True) -> Any:
    """What `interpret=` takes to run a Mosaic GPU kernel on a CPU.

    Raises:   NotImplementedError before jax 0.12, which has no interpretation of `layout_cast`.
    """
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"jax {jax.__version__} does not interpret layout_cast; jax 0.12 does")
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """`plgpu.load` of a whole reference; jax 0.10 also asks for an index."""
    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def matmul_from_registers(a: jax.Array, b_ref: Any, interpret: Any) -> jax.Array:
    """a b with a wgmma whose left side is in registers, [64, k] x [k, n] -> fp32; waits for it.

    The interpreter takes operands of wgmma from shared memory alone, so there it is a dot product.
    """
    if interpret:
        out = jnp.dot(a, b_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # wgmma reads as TMA does; a plain read has to be ordered before the next TMA write
        return out

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b_ref)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b_ref.shape[1]), jnp.float32))
