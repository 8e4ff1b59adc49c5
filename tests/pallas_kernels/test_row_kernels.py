"""Kernels that a row, or a head, is enough to test: interpreted at small shapes, lowered and compiled at those of a rank."""

import functools
import importlib

import jax
import pytest

from pallas_kernels import compat

SMALL = {
    "blend_norm": {"rows": (1, 3), "d": 2048, "warpgroups": 2},
    "combine": {"rows": (1, 3), "m": 4096, "top_k": 3, "warpgroups": 2},
    "out_gate": {"rows": (32,), "heads": 3},
    "qk_rope": {"rows": (32,), "heads": 3, "kv_heads": 2},
    "quantize_rows": {"rows": (1, 2), "k": 4096, "warpgroups": 2},
    "route": {"rows": (8,)},
}


def each(small: bool) -> list:
    """Parameters: the module of an op's shapes, and each of its cases."""
    found = []
    for op, settings in SMALL.items():
        shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
        found += [pytest.param(shapes, case, id=case.name) for case in shapes.cases(**(settings if small else {}))]
    return found


@pytest.mark.parametrize(("shapes", "case"), each(small=True))
def test_interpreted_kernel_is_close_to_the_reference(shapes, case, rng):
    args = case.arguments(rng)
    kernel = jax.jit(functools.partial(case.kernel, interpret=compat.interpret_params()))
    shapes.check(kernel(*args), jax.jit(case.reference)(*args))


@pytest.mark.parametrize(("shapes", "case"), each(small=False))
def test_kernel_is_lowered_for_cuda(shapes, case, rng):
    traced = jax.jit(case.kernel).trace(*case.arguments(rng))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("shapes", "case"), each(small=False))
def test_compiled_kernel_is_close_to_the_reference(shapes, case, rng):
    args = case.arguments(rng)
    device = jax.devices("cpu")[0] if getattr(shapes, "EXACT_DIVISIONS", False) else None
    with jax.default_device(device):
        expected = jax.jit(case.reference)(*args)
    shapes.check(jax.jit(case.kernel)(*args), expected)
