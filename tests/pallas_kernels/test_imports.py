"""What is imported with what: references cost nothing, kernels a second."""

import subprocess
import sys
from pathlib import Path

import pallas_kernels

ROOT = Path(pallas_kernels.__file__).parent.parent
MOSAIC = "jax.experimental.pallas.mosaic_gpu"


def imported_with(module: str) -> set[str]:
    """All modules of a fresh process that has imported this one."""
    script = f"import sys, {module}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def test_muse_jax_imports_references_and_no_kernels():
    modules = imported_with("muse_jax")
    assert "pallas_kernels.lattice.reference" in modules
    assert MOSAIC not in modules
    assert not [module for module in modules if module.startswith("pallas_kernels.") and module.endswith(".kernel")]
    assert MOSAIC in imported_with("muse_jax.pallas_backend")


def test_kernels_do_not_import_muse_jax():
    ops = sorted(path.parent.name for path in ROOT.glob("pallas_kernels/*/shapes.py"))
    modules = imported_with(", ".join(f"pallas_kernels.{op}.shapes" for op in ops))
    assert "pallas_kernels.lattice.kernel" in modules
    assert not [module for module in modules if module.split(".")[0] == "muse_jax"]
