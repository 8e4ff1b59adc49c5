"""A branch's post-norm, its residual gate and the next norm."""

from pallas_kernels.blend_norm.kernel import BlendNorm as BlendNorm
from pallas_kernels.blend_norm.kernel import blend_norm as blend_norm
from pallas_kernels.blend_norm.reference import blend_norm as blend_norm_reference  # noqa: F401
from pallas_kernels.blend_norm.reference import gate_factors as gate_factors
