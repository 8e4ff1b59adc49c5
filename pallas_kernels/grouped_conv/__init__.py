"""The draft's causal convolution over the rows of a block, with kernels that depend on the row."""
