"""Attention of the rows of one decode step to a KV cache and to each other."""

from pallas_kernels.decode_attention.kernel import DecodeAttentionConfig, attend_linear, attend_ring

__all__ = ["DecodeAttentionConfig", "attend_linear", "attend_ring"]
