"""The two GEMMs of routed experts with bf16 weights, of one rank in a decode step."""
