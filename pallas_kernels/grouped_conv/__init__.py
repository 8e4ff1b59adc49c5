"""The draft's causal convolution over the rows of a block, with kernels that depend on the row."""

from pallas_kernels.grouped_conv.kernel import GroupedConvConfig, grouped_conv

__all__ = ["GroupedConvConfig", "grouped_conv"]
