"""Norm and gate of attention's output."""

from pallas_kernels.out_gate.kernel import out_gate as out_gate
from pallas_kernels.out_gate.reference import out_gate as out_gate_reference  # noqa: F401
