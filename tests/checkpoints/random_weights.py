"""Random tensors of a target as a file holds them."""

import ml_dtypes
import numpy as np

from muse_jax.layout import text_tensors


def random_tensors(rng, config, dtype):
    """By name; NVFP4 codes and scales are any bytes that are not NaN, and fp32 tensors are not representable in bf16."""
    tensors = {}
    for spec in text_tensors(config):
        array = rng.standard_normal(spec.shape, np.float32)
        if spec.path[-1] == "codes":
            array = rng.integers(0, 256, spec.shape, np.uint8)
        elif spec.path[-1] == "block_scales":
            array = rng.integers(0, 0x7F, spec.shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
        elif spec.path[-1] in ("global_scale", "input_scale"):
            array = np.abs(array)
        tensors[spec.name] = np.asarray(array).astype(spec.dtype_in(dtype))
    return tensors
