"""Norm and RoPE of queries and keys."""
