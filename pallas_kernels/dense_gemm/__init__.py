"""Products of one decode step's rows with dense bf16 matrices, of one rank."""

from pallas_kernels.dense_gemm.kernel import Config, dense, fitting, swiglu
from pallas_kernels.dense_gemm.reference import dense as dense_reference
from pallas_kernels.dense_gemm.reference import swiglu as swiglu_reference

__all__ = ["Config", "dense", "dense_reference", "fitting", "swiglu", "swiglu_reference"]
