"""fp32: logits of whole sequences equal those of transformers, for models of many shapes."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import torch
from bf16_checks import compile_once
from hf_reference import make_hf_config, make_hf_model, record_clear_routing

from muse_jax.kv_cache import FullContext
from muse_jax.numerics import NUMERICS

pytestmark = pytest.mark.parity

# Of the largest logit. fp32 sums in another order err by 1e-7 to 1e-6 per operation; each sublayer's norm and softmax can
# enlarge what came before, and muse_spark.md 8.1 measured 4e-5 for six layers.
TOLERANCE = 1e-4
# Errors of router scores stay below a tenth of this.
ROUTING_MARGIN = 5e-5

SLIDING, FULL = "sliding_attention", "full_attention"
CASES = {
    "default": {},
    "window 1": {"sliding_window": 1, "num_hidden_layers": 3},
    "window longer than the prompt": {"sliding_window": 100, "num_hidden_layers": 3},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 2},
    "a KV head per query head": {"num_key_value_heads": 8, "num_hidden_layers": 2},
    "dense and sparse": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "q narrower than hidden, odd sizes": {
        "num_hidden_layers": 3,
        "vocab_size": 131,
        "hidden_size": 63,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 37,
        "moe_hidden_size": 28,  # torch's grouped GEMM wants multiples of 16 bytes
        "moe_intermediate_size": 20,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "one expert, scaled": {"num_experts_per_tok": 1, "routed_scaling_factor": 2.5, "num_hidden_layers": 2},
    "all experts, scaled": {
        "num_local_experts": 5,
        "num_experts_per_tok": 5,
        "routed_scaling_factor": 0.7,
        "num_hidden_layers": 2,
    },
    "explicit schedule": {
        "layer_types": [FULL, SLIDING, FULL, SLIDING],
        "layer_rope_theta": [10_000.0, 0, 0, 10_000.0],  # full with RoPE, sliding without, and the usual two
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "sliding_window": 5,
    },
    "other constants": {
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-4,
        "post_norm_eps": 1e-9,
        "qk_scale_factor": 3.0,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 7.0,
        "residual_gate_temperature": 0.5,
    },
}
PLACEHOLDERS = (5, 6, 7)  # of image, video, audio: in plain text these ids embed as token 0


@pytest.mark.parametrize("name", CASES)
def test_logits(rng, name):
    hf = make_hf_model(make_hf_config(PLACEHOLDERS, **CASES[name]), torch.float32, rng)
    recording = record_clear_routing(hf, (2, 40), ROUTING_MARGIN, rng, among=PLACEHOLDERS)
    theirs = recording.outputs["logits"]
    for numerics in NUMERICS.values():
        model = recording.model(numerics, jnp.float32)
        ours = _logits(model, jnp.asarray(recording.tokens, jnp.int32))
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        print(f"{name}, {numerics.name}: {error:.1e} (routing margin {recording.routing_margin():.1e})")
        assert error < TOLERANCE


@compile_once
def _logits(model, tokens):
    stream, _, _ = model(tokens, FullContext.create(tokens.shape[1]))
    return model.logits(stream)
