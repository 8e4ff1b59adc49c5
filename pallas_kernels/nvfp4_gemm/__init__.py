"""The two GEMMs of routed experts with NVFP4 weights, of one rank in a decode step."""
