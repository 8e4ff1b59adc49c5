"""NVFP4 quantisation of rows of activations."""
