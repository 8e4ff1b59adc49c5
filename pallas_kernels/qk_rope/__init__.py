"""Norm and RoPE of queries and keys."""

from pallas_kernels.qk_rope.kernel import qk_rope as qk_rope
from pallas_kernels.qk_rope.reference import qk_rope as qk_rope_reference  # noqa: F401
