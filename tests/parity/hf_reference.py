"""Random Muse Spark models of transformers, what they compute on the way, and our model with their weights.

transformers runs with eager attention and grouped experts, whose roundings muse_spark.md section 3 describes; other
implementations round elsewhere (trap 33).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration
from transformers.models.muse_spark import modeling_muse_spark

from muse_jax.config import ModelConfig
from muse_jax.layout import TEXT_PREFIX, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.numerics import Numerics

# Root mean square of what each matrix produces. The inputs of all norms are kept small, near the epsilons (1e-5, and 1e-8 after
# a branch), so that an epsilon in the wrong place shows; gates and the router get arguments of order one.
_OUTPUT_RMS = {
    "embed_tokens": 2e-4,
    "q_proj": 0.05,
    "k_proj": 0.05,
    "v_proj": 0.05,
    "self_attn.gate_proj": 1.0,
    "o_proj": 1e-5,
    "pre_expert_proj": 0.05,
    "gate_up_proj": 1.0,
    "experts.down_proj": 0.02,
    "post_expert_proj": 1e-5,
    "mlp.gate_proj": 1.0,
    "mlp.up_proj": 1.0,
    "mlp.down_proj": 1e-5,
}

TEXT_DEFAULTS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_multiplier": 0.5,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_hf_config(placeholders: tuple[int, int, int] = (200_092, 200_091, 200_038), **text) -> MuseSparkConfig:
    """A text decoder of `TEXT_DEFAULTS` with `text` changed, and towers of toy size.

    placeholders: token ids that stand for image, video and audio.
    """
    text = TEXT_DEFAULTS | text
    return MuseSparkConfig(
        text_config=text,
        vision_config={
            "patch_size": 2,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
        },
        audio_config={
            "patch_sizes": [2],
            "hidden_sizes": [8],
            "depths": [1],
            "num_hidden_layers": 1,
            "out_hidden_size": text["hidden_size"],
        },
        out_hidden_size=32,
        projector_hidden_size=8,
        image_token_id=placeholders[0],
        video_token_id=placeholders[1],
        audio_token_id=placeholders[2],
    )


def make_hf_model(config: MuseSparkConfig, dtype: torch.dtype, rng: np.random.Generator) -> MuseSparkForConditionalGeneration:
    """A model of `config` with every text tensor random (initial weights hide many mistakes, trap 24)."""
    torch.manual_seed(0)  # the towers, which text does not use
    # Not .to(dtype): that would round the tensors that transformers keeps in fp32 (trap 23).
    model = MuseSparkForConditionalGeneration._from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="grouped_mm"
    ).eval()
    for name, tensor in _text_state(model).items():
        values = torch.from_numpy(_random_values(name, tuple(tensor.shape), config, rng))
        tensor.copy_(values)
    return model


def _random_values(name: str, shape: tuple, config: MuseSparkConfig, rng: np.random.Generator) -> np.ndarray:
    text = config.text_config
    values = rng.normal(size=shape)
    if name.endswith("residual_gate.gate"):
        # sigmoid(gate / temperature) is 0.5 give or take 0.2; a few gates are wide open or shut, where the floor acts.
        values = text.residual_gate_temperature * values
        values[::16] = rng.choice([-3.0, 3.0], size=values[::16].shape)
    elif name.endswith("e_score_correction_bias"):
        values = 0.15 * values
    elif name.endswith("mlp.gate.weight"):
        values = values / (math.sqrt(text.hidden_size) * text.output_multiplier)
    elif name == "lm_head.weight":
        values = 8.0 * values / (math.sqrt(text.hidden_size) * text.output_multiplier)
    elif name == TEXT_PREFIX + "norm.weight":
        values = 1.0 + 0.3 * values
    elif name.endswith("norm.weight"):
        values = 0.3 * values
    else:
        (rms,) = (rms for part, rms in _OUTPUT_RMS.items() if part in name)
        fan_in = 1 if "embed_tokens" in name else shape[-1]
        values = values * rms / math.sqrt(fan_in)
    return values.astype(np.float32)


def _text_state(model: MuseSparkForConditionalGeneration) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if k.startswith((TEXT_PREFIX, "lm_head."))}


def our_config(config: MuseSparkConfig) -> ModelConfig:
    return ModelConfig.from_hf(config.to_dict())


def build(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    numerics: Numerics,
    dtype: jnp.dtype,
    dense_experts: bool = False,
) -> MuseSpark:
    """Our model with the text tensors of an HF state dict, placed by the layout table."""
    settings = {"numerics": numerics, "dtype": dtype, "dense_experts": dense_experts}
    model = MuseSpark(config, **settings)
    specs = text_tensors(config)
    assert {spec.name for spec in specs} == set(tensors)
    for spec in specs:
        tensor = tensors[spec.name]
        assert tuple(tensor.shape) == spec.shape, spec.name
        assert tensor.dtype == torch.float32 or spec.dtype is None, spec.name
        values = jnp.asarray(tensor.float().numpy().reshape(spec.param_shape))
        node = model
        for step in spec.path:
            node = node[step] if isinstance(step, int) else getattr(node, step)
        node.set_value(values.astype(spec.dtype_in(dtype)))
    return model


@dataclasses.dataclass(eq=False, repr=False)
class Recording:
    """One forward pass of an HF model. Arrays are fp32 and hold the HF values exactly."""

    hf: MuseSparkForConditionalGeneration
    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    tokens: np.ndarray  # [B, T] int32
    inputs: dict[str, tuple]  # of every module, by its name below the language model ("layers.0.mlp"), and of "lm_head"
    outputs: dict[str, np.ndarray | tuple]  # likewise; and "layers.i.qkv", "layers.i.attended", "logits"

    @functools.cache  # noqa: B019 (recordings live as long as the tests)
    def model(self, numerics: Numerics, dtype: jnp.dtype, dense_experts: bool = False) -> MuseSpark:
        """Our model with HF's weights."""
        return build(self.config, self.tensors, numerics, dtype, dense_experts)

    def routing_margin(self) -> float:
        """The least distance between the last chosen and the first unchosen score, over all layers and tokens."""
        top_k, margins = self.config.num_experts_per_tok, [math.inf]
        for name, output in self.outputs.items():
            if name.endswith("mlp.gate") and top_k < self.config.num_local_experts:
                bias = self.tensors[f"{TEXT_PREFIX}{name}.e_score_correction_bias"].numpy()
                scores = np.sort(1 / (1 + np.exp(-output[0])) + bias, axis=-1)
                margins.append((scores[:, -top_k] - scores[:, -top_k - 1]).min())
        return float(min(margins))


def record(model: MuseSparkForConditionalGeneration, tokens: np.ndarray) -> Recording:
    """Runs `model` on `tokens` [B, T] and keeps the inputs and outputs of every text module."""
    inputs, outputs = {}, {}

    def keep(name):
        def hook(_, args, kwargs, output):
            inputs[name] = _to_numpy(args or (kwargs.get("hidden_states"),))
            outputs[name] = _to_numpy(output)

        return hook

    eager = modeling_muse_spark.eager_attention_forward

    def attention(module, query, key, value, *args, **kwargs):
        result = eager(module, query, key, value, *args, **kwargs)
        outputs[f"layers.{module.layer_idx}.qkv"] = _to_numpy((query, key, value))
        outputs[f"layers.{module.layer_idx}.attended"] = _to_numpy(result[0])
        return result

    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(mock.patch.object(modeling_muse_spark, "eager_attention_forward", attention))
        modules = dict(model.model.language_model.named_modules()) | {"lm_head": model.lm_head}
        modules.pop("")
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(keep(name), with_kwargs=True).remove)
        outputs["logits"] = _to_numpy(model(input_ids=torch.from_numpy(tokens).long(), use_cache=False).logits)
    return Recording(model, our_config(model.config), _text_state(model), tokens, inputs, outputs)


def _to_numpy(value):
    if isinstance(value, torch.Tensor):
        return value.float().numpy() if value.is_floating_point() else value.numpy()
    return tuple(_to_numpy(v) for v in value) if isinstance(value, (tuple, list)) else value


def record_clear_routing(
    model: MuseSparkForConditionalGeneration,
    shape: tuple,
    margin: float,
    rng: np.random.Generator,
    among: tuple[int, ...] = (),
) -> Recording:
    """Records random tokens, `among` them, for which no choice of experts is closer than `margin`.

    A closer choice may fall either way in correct code and changes everything after it, so such tokens are drawn again;
    nothing is left out of the comparison.
    """
    for _ in range(50):
        tokens = rng.integers(0, model.config.text_config.vocab_size, shape)
        tokens[0, 10 : 10 + len(among)] = among
        recording = record(model, tokens)
        if recording.routing_margin() > margin:
            return recording
    raise AssertionError(f"no tokens of shape {shape} with a routing margin above {margin}")
