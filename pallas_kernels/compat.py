"""What differs between versions of jax (0.10.2 to 0.12), and between GPU lowering and interpreter, in this one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

# The default differs between versions. Kernels that say nothing else lower with either.
LOWERING_SEMANTICS = plgpu.LoweringSemantics.Lane
# As in 0.10.2, whose interpreter knows neither `load` nor `layout_cast`.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_NEEDS_INDEX = _INDEX is not None and _INDEX.default is inspect.Parameter.empty


def interpret_params(detect_races: bool = True) -> Any:
    """For the argument `interpret` of a kernel: run it on the CPU, warpgroup by warpgroup.

    From 0.12 on, accesses of memory that nothing orders are an error, unless `detect_races` is False. Until then the detector
    only prints, so it is off.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(detect_races=detect_races) if hasattr(params, "on_race") else params()


def load(ref: Any, layout: Any, *, optimized: bool = True, interpret: Any = None) -> jax.Array:
    """What a ref holds, in registers of this layout.

    Not `ref[...]`: 0.10.2 refuses to read global memory into a tiled layout unless told that the read need not be optimised.
    """
    if not _LOAD_NEEDS_INDEX:
        return plgpu.load(ref, layout=layout, optimized=optimized)
    return ref[...] if interpret else plgpu.load(ref, (), layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Writes registers to a ref. 0.12 refuses layouts that do not fill cache lines of global memory, unless told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


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


def in_layout(x: jax.Array, layout: Any, interpreted: bool) -> jax.Array:
    """`plgpu.layout_cast`. The interpreter has no layouts, and that of 0.10.2 does not know the operation."""
    return x if interpreted else plgpu.layout_cast(x, layout)


def map_registers(x: Any, function: Callable[[ir.Value], ir.Value], element_type: ir.Type) -> Any:
    """Within `inline_mgpu`: `function` on each register of an array of 16-bit elements, two a register.

    It takes and returns vectors of one 32-bit integer; the result's elements, of another 16-bit type, are in the same layout.
    """
    one_i32, two = ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), ir.VectorType.get((2,), element_type)
    registers = np.empty_like(x.registers)
    for i, register in np.ndenumerate(x.registers):
        registers[i] = vector.bitcast(two, function(vector.bitcast(one_i32, register)))
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
