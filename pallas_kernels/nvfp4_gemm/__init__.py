"""The two GEMMs of routed experts with NVFP4 weights, of one rank in a decode step."""

from pallas_kernels.nvfp4_gemm.kernel import Config, Plan, down, gate_up, plan
from pallas_kernels.nvfp4_gemm.packing import PackedWeights, pack_weights, unpack_weights

__all__ = ["Config", "PackedWeights", "Plan", "down", "gate_up", "pack_weights", "plan", "unpack_weights"]
