"""Fused GPU kernels on plain arrays, each beside its plain jnp reference."""
