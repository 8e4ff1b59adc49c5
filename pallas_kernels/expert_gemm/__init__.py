"""The two GEMMs of routed experts with bf16 weights, of one rank in a decode step."""

from pallas_kernels.expert_gemm.kernel import Config, down, fitting, gate_up

__all__ = ["Config", "down", "fitting", "gate_up"]
