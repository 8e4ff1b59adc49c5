"""The benchmark of kernels: what it does where it cannot run, and that every op is in it."""

import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_kernels

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import bench_kernels


def test_every_kernel_is_in_it():
    assert set(bench_kernels.OPS) == {path.parent.name for path in Path(pallas_kernels.__file__).parent.glob("*/kernel.py")}


@pytest.mark.parametrize("op", bench_kernels.OPS)
def test_cases(op, rng):
    """Different names, something to move, a reference that passes its own check and one value off that does not."""
    shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
    cases = list(shapes.cases())
    assert len({case.name for case in cases}) == len(cases) > 0
    assert all(case.name.startswith(op) for case in cases)
    assert all(case.bytes > 0 for case in cases)
    case = min(cases, key=lambda case: case.bytes)
    expected = case.reference(*case.arguments(rng))
    shapes.check(expected, expected)
    first, *rest = expected if isinstance(expected, tuple) else (expected,)
    wrong = np.array(first)
    wrong.flat[wrong.size // 2] += np.asarray(100, wrong.dtype)
    with pytest.raises(AssertionError):
        shapes.check((wrong, *rest) if rest else wrong, expected)


@pytest.mark.gpu
def test_one_op(capsys):
    assert bench_kernels.main(["--ops", "out_gate", "--calls", "3"]) == 0
    assert "good" in capsys.readouterr().out


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert bench_kernels.main(["--ops", "out_gate"]) == 2
    assert capsys.readouterr().err == "bench_kernels.py: needs an NVIDIA GPU, found cpu\n"
