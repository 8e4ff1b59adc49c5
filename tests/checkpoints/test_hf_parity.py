"""The same directories as transformers: what it saves loads here, what is saved here loads there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load_params, read_config, save_hf
from muse_jax.layout import is_skipped, text_tensors

pytestmark = pytest.mark.parity


def hf_model(rng, dtype):
    """A random MuseSparkForConditionalGeneration with towers of toy size; sparse and dense layers, fp32 gates."""
    import torch
    from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration

    text = {
        "vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "intermediate_size": 40, "moe_hidden_size": 24, "moe_intermediate_size": 20, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": None,
    }  # fmt: skip
    vision = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "patch_size": 2,
              "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4}  # fmt: skip
    audio = {"num_hidden_layers": 1, "patch_sizes": [4], "hidden_sizes": [8], "depths": [1], "conv_kernel_size": 3,
             "mlp_ratio": 1.0, "out_hidden_size": 32}  # fmt: skip
    config = MuseSparkConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        out_hidden_size=32,
        projector_hidden_size=8,
        image_token_id=70,
        video_token_id=71,
        audio_token_id=72,
    )
    model = MuseSparkForConditionalGeneration._from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():  # the state dict's tensors are those of the model
                tensor.copy_(torch.from_numpy(rng.standard_normal(tuple(tensor.shape), np.float32)))
    return model


def to_numpy(tensor):
    import torch

    if tensor.dtype == torch.bfloat16:  # numpy does not know it
        return tensor.detach().view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.detach().numpy()


def assert_bitwise(left, right, name):
    left, right = np.asarray(left), np.asarray(right)
    assert (left.dtype, left.shape) == (right.dtype, right.shape), name
    assert left.tobytes() == right.tobytes(), name


def at(params, spec):
    for key in spec.path:
        params = params[key]
    return params


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_what_transformers_saves(tmp_path, rng, dtype, max_shard_size):
    import torch

    model = hf_model(rng, getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    config = read_config(tmp_path)
    assert config.dtype == dtype
    params, report = load_params(tmp_path, config, dtype=dtype)

    state = {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
    specs = text_tensors(config)
    assert {spec.name for spec in specs} == {name for name in state if not is_skipped(name)}
    for spec in specs:
        assert_bitwise(at(params, spec), state[spec.name].reshape(spec.param_shape), spec.name)
    towers = [tensor for name, tensor in state.items() if is_skipped(name)]
    assert (report.num_skipped, report.skipped_bytes) == (len(towers), sum(tower.nbytes for tower in towers))
    assert len(towers) > 20 and len(jax.tree.leaves(params)) == report.num_tensors == len(specs)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_loads_what_is_saved(tmp_path, rng, dtype, max_shard_bytes):
    import torch
    from transformers import MuseSparkForConditionalGeneration

    first, second = tmp_path / "first", tmp_path / "second"
    model = hf_model(rng, getattr(torch, dtype))
    model.save_pretrained(first)
    params, _ = load_params(first, read_config(first), dtype=dtype)
    state = {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
    towers = {name: tensor for name, tensor in state.items() if is_skipped(name)}
    config_json = json.loads((first / "config.json").read_text())
    save_hf(params, config_json, second, dtype=dtype, extra_tensors=towers, max_shard_bytes=max_shard_bytes)

    loaded, info = MuseSparkForConditionalGeneration.from_pretrained(second, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert_bitwise(to_numpy(tensor), state[name], name)
