"""Attention of the rows of one decode step to a KV cache and to each other."""
