"""NVFP4 quantisation of rows of activations."""

from pallas_kernels.quantize_rows.kernel import quantize_rows as quantize_rows
from pallas_kernels.quantize_rows.reference import quantize_rows as quantize_rows_reference  # noqa: F401
