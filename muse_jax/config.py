"""The facts of a Muse Spark checkpoint, read from its `config.json` and checked before anything is allocated."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration this project does not implement; the message names the field, its value and what is allowed."""


class AttentionKind(enum.StrEnum):
    SLIDING = "sliding_attention"
    GLOBAL = "full_attention"


class MLPKind(enum.StrEnum):
    SPARSE = "sparse"
    DENSE = "dense"


# HF constants that no config field carries (transformers 5.24.0, modeling_muse_spark.py).
RESIDUAL_GATE_FLOOR = 1e-3
NVFP4_BLOCK = 16  # values along a row that share a scale; half as many bytes

_NUM_LAYERS = 62
_MAX_SIZE = 2**31 - 1
_MIN_FLOAT, _MAX_FLOAT = 1e-30, 1e30  # products of two such settings are still float32
# Far above any model; they keep a hostile file from asking for tables of billions of entries.
_MAX_EXCLUDED = 10_000
_MAX_WILDCARDS, _MAX_MODULE_NAME = 8, 300  # the time to match a name grows with both
_MAX_OF = {"num_hidden_layers": 4096, "num_local_experts": 65_536}


def _is_global(layer_idx: int, num_layers: int) -> bool:
    """Every fourth layer is global, counted back from the last one."""
    return (num_layers - 1 - layer_idx) % 4 == 0


def default_layer_types(num_layers: int) -> tuple[AttentionKind, ...]:
    return tuple(AttentionKind.GLOBAL if _is_global(i, num_layers) else AttentionKind.SLIDING for i in range(num_layers))


def default_layer_uses_rope(num_layers: int) -> tuple[bool, ...]:
    return tuple(not _is_global(i, num_layers) for i in range(num_layers))


class AttentionSizes:
    """What follows from the attention fields that a target's config and a draft's have in common."""

    @property
    def q_size(self) -> int:
        """Rows of q_proj, and of a target's output gate, N * H."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k_proj and of v_proj, K * H."""
        return self.num_key_value_heads * self.head_dim

    def window(self, layer_idx: int) -> int | None:
        """Keys visible to the layer, its own included; None for a global layer."""
        return self.sliding_window if self.layer_types[layer_idx] == AttentionKind.SLIDING else None


@dataclasses.dataclass(frozen=True)
class ModelConfig(AttentionSizes):
    """A text decoder; the defaults are Muse Spark Open 816B-A42B. Field names are those of the HF `text_config`."""

    vocab_size: int = 202_048  # rows of the embedding and of lm_head; the tokenizer may know fewer
    hidden_size: int = 8192  # D, width of the residual stream
    num_hidden_layers: int = _NUM_LAYERS
    num_attention_heads: int = 128  # N, query heads and heads of the output gate
    num_key_value_heads: int = 16  # K
    head_dim: int = 64  # H; N * H need not equal D
    intermediate_size: int = 16_384  # FFN width of dense layers only
    moe_hidden_size: int = 4096  # M, width the experts work at
    moe_intermediate_size: int = 4096  # F
    num_local_experts: int = 256  # E, of the whole model, not of a rank
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0  # multiplies the renormalised routing weights
    rms_norm_eps: float = 1e-5  # all norms but the three after a branch
    post_norm_eps: float = 1e-8  # post-attention, post-expert, post-FFN
    qk_scale_factor: float = 5.4730064863875  # on top of 1/sqrt(head_dim)
    output_multiplier: float = 0.1767766952966369  # on vocabulary logits and on router logits
    final_logit_softcapping: float = 20.0
    residual_gate_temperature: float = 0.3
    sliding_window: int | None = 2048  # keys a sliding layer sees, the query's own included
    layer_types: tuple[AttentionKind, ...] = default_layer_types(_NUM_LAYERS)
    layer_uses_rope: tuple[bool, ...] = default_layer_uses_rope(_NUM_LAYERS)
    mlp_layer_types: tuple[MLPKind, ...] = (MLPKind.SPARSE,) * _NUM_LAYERS
    rope_theta: float = 500_000.0
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = 200_000
    eos_token_ids: tuple[int, ...] = (200_001,)  # generation_config.json may name others
    pad_token_id: int | None = None
    placeholder_token_ids: tuple[int, ...] = (200_092, 200_091, 200_038)  # image, video, audio: embedded as token 0
    dtype: str = "bfloat16"  # of the checkpoint: "bfloat16" or "float32"
    nvfp4_layers: tuple[int, ...] = ()  # whose experts are NVFP4; known from the checkpoint's tensors, not from config.json

    def __post_init__(self) -> None:
        _check(self)

    @property
    def q_heads_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed `config.json`: the nested `muse_spark` form or a bare `muse_spark_text`.

        Raises ConfigError for everything that would make this a different model (muse_spark.md section 1.4). Fields that
        cannot change a text forward pass (dropout, initializer_range, use_cache, ...) are not read.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json holds a {type(raw).__name__}; expected an object")
        model_type = raw.get("model_type")
        if model_type == "muse_spark":
            text = raw.get("text_config")
            if not isinstance(text, Mapping):
                raise ConfigError(f"text_config = {shown(text)}: expected an object holding the text decoder's fields")
            if text.get("model_type", "muse_spark_text") != "muse_spark_text":
                raise ConfigError(f"text_config.model_type = {shown(text['model_type'])}: only 'muse_spark_text' is supported")
            placeholders = tuple(
                integer_field(raw, f"{kind}_token_id", default, minimum=0)
                for kind, default in (("image", 200_092), ("video", 200_091), ("audio", 200_038))
            )
        elif model_type == "muse_spark_text":
            text, placeholders = raw, ()
        else:
            raise ConfigError(f"model_type = {shown(model_type)}: only 'muse_spark' and 'muse_spark_text' are supported")
        for holder in (raw, text):
            if holder.get("quantization_config") is not None:
                excluded_modules(holder["quantization_config"], "quantization_config")
        _refuse_other_models(text)

        default = cls()
        values: dict[str, Any] = {"placeholder_token_ids": placeholders}
        for field in _POSITIVE_INTEGERS:
            values[field] = integer_field(text, field, getattr(default, field), minimum=1)
        for field in _FLOATS:
            values[field] = number_field(text, field, getattr(default, field))
        window = text.get("sliding_window", default.sliding_window)
        values["sliding_window"] = None if window is None else integer_field(text, "sliding_window", window, minimum=1)

        num_layers = values["num_hidden_layers"]
        values["layer_types"] = _kinds(text, "layer_types", AttentionKind, default_layer_types(num_layers))
        values["mlp_layer_types"] = _kinds(text, "mlp_layer_types", MLPKind, (MLPKind.SPARSE,) * num_layers)
        values["rope_theta"] = _rope_theta(text, default.rope_theta)
        values["layer_uses_rope"] = _layer_uses_rope(text, num_layers, values["rope_theta"])

        values["bos_token_id"] = _token_id(text, "bos_token_id", default.bos_token_id)
        values["pad_token_id"] = _token_id(text, "pad_token_id", None)
        values["eos_token_ids"] = token_id_list(text.get("eos_token_id", default.eos_token_ids[0]), "eos_token_id")
        dtype = text.get("dtype", text.get("torch_dtype", raw.get("dtype", raw.get("torch_dtype"))))
        values["dtype"] = default.dtype if dtype is None else dtype
        return cls(**values)


_POSITIVE_INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_hidden_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok",
    "max_position_embeddings",
)  # fmt: skip
_FLOATS = (
    "routed_scaling_factor", "rms_norm_eps", "post_norm_eps", "qk_scale_factor", "output_multiplier",
    "final_logit_softcapping", "residual_gate_temperature",
)  # fmt: skip


def shown(value: Any) -> str:
    """A value of the file as a message may show it: short, on one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, lists nested hundreds deep
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer_field(raw: Mapping[str, Any], field: str, default: int, minimum: int) -> int:
    value = raw.get(field, default)
    maximum = _MAX_OF.get(field, _MAX_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(f"{field} = {shown(value)}: expected an integer from {minimum} to {maximum}")
    return value


def number_field(raw: Mapping[str, Any], field: str, default: float) -> float:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _MIN_FLOAT <= value <= _MAX_FLOAT:
        raise ConfigError(f"{field} = {shown(value)}: expected a finite number above 0 (from {_MIN_FLOAT:g} to {_MAX_FLOAT:g})")
    return float(value)


def _token_id(raw: Mapping[str, Any], field: str, default: int | None) -> int | None:
    value = raw.get(field, default)
    return None if value is None else integer_field(raw, field, value, minimum=0)


def token_id_list(value: Any, field: str) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple. Raises ConfigError naming `field`."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_SIZE:
            raise ConfigError(f"{field} = {shown(value)}: expected a token id, a list of token ids or null")
    return ids


def _list(raw: Mapping[str, Any], field: str, num_layers: int) -> list[Any] | None:
    value = raw.get(field)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != num_layers:
        length = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
        raise ConfigError(f"{field} has length {length}: expected a list of num_hidden_layers = {num_layers} entries")
    return list(value)


def _kinds(raw: Mapping[str, Any], field: str, kind: type[enum.StrEnum], default: tuple) -> tuple:
    value = _list(raw, field, len(default))
    if value is None:
        return default
    allowed = [str(member) for member in kind]
    for i, entry in enumerate(value):
        if entry not in allowed:
            raise ConfigError(f"{field}[{i}] = {shown(entry)}: allowed are {' and '.join(map(repr, allowed))}")
    return tuple(kind(entry) for entry in value)


def _rope_theta(raw: Mapping[str, Any], default: float) -> float:
    rope = raw.get("rope_parameters")
    if rope is None:
        return default
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters = {shown(rope)}: expected an object with rope_type and rope_theta")
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise ConfigError(f"rope_parameters.rope_type = {shown(rope_type)}: only 'default' is supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        value = rope["partial_rotary_factor"]
        raise ConfigError(f"rope_parameters.partial_rotary_factor = {shown(value)}: only 1.0 is supported")
    return number_field(rope, "rope_theta", default)


def _layer_uses_rope(raw: Mapping[str, Any], num_layers: int, theta: float) -> tuple[bool, ...]:
    value = _list(raw, "layer_rope_theta", num_layers)
    if value is None:
        return default_layer_uses_rope(num_layers)
    for i, entry in enumerate(value):
        # Engines disagree on a per-layer base (transformers reads only whether it is zero), so it must be the base.
        if isinstance(entry, bool) or not isinstance(entry, (int, float)) or entry not in (0, theta):
            raise ConfigError(f"layer_rope_theta[{i}] = {shown(entry)}: allowed are 0 and rope_theta = {theta:g}")
    return tuple(entry != 0 for entry in value)


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    """Settings of other models that would change the result if they were ignored."""
    neutral = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_shared_experts": 0,
        "tie_word_embeddings": False,  # transformers 5.24.0 does not tie even when told to
        "inference_moe_w13_interleaved": False,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "attn_logit_softcapping": None,
    }
    for field, value in neutral.items():
        if field in raw and raw[field] not in (value, None):
            raise ConfigError(f"{field} = {shown(raw[field])}: only {shown(value)} is supported")
    if "final_logit_softcapping" in raw and raw["final_logit_softcapping"] is None:
        raise ConfigError("final_logit_softcapping = None: expected a finite number above 0")


def excluded_modules(quantization: Any, where: str, nested: bool = True) -> tuple[str, ...]:
    """What a checkpoint says about its quantisation, as ModelOpt writes it into config.json or hf_quant_config.json.

    Returns:  the modules said not to be quantised, as names or patterns. The tensors decide, not this list.
    Raises:   ConfigError for anything but NVFP4 in groups of 16; it begins with `where`.
    """
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"{where} = {shown(quantization)}: expected an object")
    method = quantization.get("quant_method", "modelopt")
    if method != "modelopt":
        raise ConfigError(f"{where}.quant_method = {shown(method)}: only 'modelopt' is supported")
    if nested and "quantization" in quantization:  # the form of hf_quant_config.json
        return excluded_modules(quantization["quantization"], f"{where}.quantization", nested=False)
    algorithm = quantization.get("quant_algo")
    if algorithm != "NVFP4":
        raise ConfigError(f"{where}.quant_algo = {shown(algorithm)}: only 'NVFP4' is supported")
    sizes = [quantization["group_size"]] if "group_size" in quantization else []
    groups = quantization.get("config_groups", {})
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and "group_size" in weights:
            sizes.append(weights["group_size"])
    for size in sizes:
        if type(size) is not int or size != NVFP4_BLOCK:
            raise ConfigError(f"{where}: group_size = {shown(size)}: NVFP4 has groups of {NVFP4_BLOCK}")
    modules = quantization.get("exclude_modules", quantization.get("ignore")) or []
    named = isinstance(modules, (list, tuple)) and all(isinstance(module, str) for module in modules)
    if not named or len(modules) > _MAX_EXCLUDED:
        raise ConfigError(f"{where}.exclude_modules = {shown(modules)}: expected a list of at most {_MAX_EXCLUDED} names")
    for module in modules:
        if len(module) > _MAX_MODULE_NAME or sum(map(module.count, "*?[")) > _MAX_WILDCARDS:
            raise ConfigError(
                f"{where}.exclude_modules has {shown(module)}: expected names of at most {_MAX_MODULE_NAME} characters "
                f"with at most {_MAX_WILDCARDS} wildcards"
            )
    return tuple(modules)


def _check(config: ModelConfig) -> None:
    """Relations between fields, whatever way the config was made."""

    def multiple(field: str, of: str) -> None:
        value, divisor = getattr(config, field), getattr(config, of)
        if value % divisor:
            raise ConfigError(f"{field} = {value}: must be a multiple of {of} = {divisor}")

    multiple("hidden_size", "num_attention_heads")
    multiple("num_attention_heads", "num_key_value_heads")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim = {config.head_dim}: must be even (rotary embedding pairs its halves)")
    if config.num_experts_per_tok > config.num_local_experts:
        raise ConfigError(
            f"num_experts_per_tok = {config.num_experts_per_tok}: "
            f"must be at most num_local_experts = {config.num_local_experts}"
        )
    for field in ("layer_types", "layer_uses_rope", "mlp_layer_types"):
        length = len(getattr(config, field))
        if length != config.num_hidden_layers:
            raise ConfigError(f"{field} has length {length}: expected num_hidden_layers = {config.num_hidden_layers}")
    if config.sliding_window is None and AttentionKind.SLIDING in config.layer_types:
        raise ConfigError("sliding_window = None: expected an integer above 0 where layer_types has 'sliding_attention'")
    if config.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype = {shown(config.dtype)}: allowed are 'bfloat16' and 'float32'")
    sparse = [i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.SPARSE]
    if list(config.nvfp4_layers) != [i for i in sparse if i in config.nvfp4_layers]:
        raise ConfigError(f"nvfp4_layers = {shown(config.nvfp4_layers)}: expected sparse layers, each once and in order")
    if config.nvfp4_layers:
        for field in ("moe_hidden_size", "moe_intermediate_size"):
            if getattr(config, field) % NVFP4_BLOCK:
                raise ConfigError(f"{field} = {getattr(config, field)}: NVFP4 needs a multiple of {NVFP4_BLOCK}")


MUSE_SPARK_OPEN = ModelConfig()

# A model of every feature and no size, for tests and examples; it runs the same code as the real one.
TINY = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    moe_hidden_size=32,
    moe_intermediate_size=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    output_multiplier=0.5,
    sliding_window=8,
    layer_types=default_layer_types(6),
    layer_uses_rope=default_layer_uses_rope(6),
    mlp_layer_types=(MLPKind.SPARSE,) * 5 + (MLPKind.DENSE,),
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_ids=(1,),
    placeholder_token_ids=(),
    dtype="float32",
)
