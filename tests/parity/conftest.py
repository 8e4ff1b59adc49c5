"""Makes this folder's other modules importable (tests/ has no packages), and shares the bfloat16 recording."""

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def bf16_recording():
    """A bfloat16 HF model of every kind of layer, run once: 0 sliding with RoPE, 2 dense, 3 full without RoPE."""
    import torch
    from hf_reference import make_hf_config, make_hf_model, record_clear_routing

    rng = np.random.default_rng(zlib.crc32(b"bf16_recording"))
    mlps = ["sparse", "sparse", "dense", "sparse"]
    config = make_hf_config(mlp_layer_types=mlps, num_attention_heads=4, head_dim=32, routed_scaling_factor=1.5)
    model = make_hf_model(config, torch.bfloat16, rng)
    # Router inputs are HF's own, so only the order of an fp32 sum can differ: 5e-7.
    return record_clear_routing(model, (2, 64), 1e-5, rng)
