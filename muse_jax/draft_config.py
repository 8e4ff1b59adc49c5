"""The facts of a DFlash2 draft checkpoint, read from its `config.json` and checked against the target it is to serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from muse_jax.config import AttentionKind, AttentionSizes, ConfigError, ModelConfig, integer_field, number_field, shown

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
MAX_BLOCK_SIZE = 16
MAX_TOP_K = 1024  # no tensor's size follows from it, and a lattice has its square per position
_BACKBONE = (  # read outside `dflash_config`, and there alone
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "rope_parameters", "rope_theta", "attention_bias", "layer_types", "sliding_window",
    "is_causal", "dtype",
)  # fmt: skip
_KINDS = tuple(map(str, AttentionKind))


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The taps of a draft that names none: one per draft layer, spread from layer 1 to the third from the end.

    Source: dflash 0.1.0, build_target_layer_ids; halves are rounded to even, as Python does.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclasses.dataclass(frozen=True)
class DraftConfig(AttentionSizes):
    """A DFlash2 draft: a few Qwen3-style layers that read the target's hidden states and predict a block at once.

    It has no embedding and no lm_head of its own: it borrows the target's, without their norm, multiplier and soft cap.
    """

    vocab_size: int  # of the target
    hidden_size: int  # D, of the target too
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    layer_types: tuple[AttentionKind, ...]
    sliding_window: int | None  # keys a sliding layer sees, the query's own included
    is_causal: bool | None  # of every layer; None: sliding layers are causal, full layers see their whole block
    attention_bias: bool  # of q, k, v and o projections
    target_layer_ids: tuple[int, ...]  # taps: the outputs of these target layers, in this order
    mask_token_id: int  # fills the block after its anchor
    block_size: int  # rows of a forward pass: the anchor, and the positions that are predicted
    conv_kernel_size: int
    conv_group_size: int  # G, channels that share a dynamic coefficient
    selector_rank: int
    selector_top_k: int  # candidates per position
    input_embedding_scale: float = 1.0  # multiplies the raw embeddings of the block
    output_multiplier: float = 1.0  # of the draft's logits
    final_logit_softcapping: float | None = None
    has_mask_embedding: bool = False  # the checkpoint brings its own embedding of the mask token
    dtype: str = "bfloat16"  # of the checkpoint

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_predictions(self) -> int:
        """Positions a block predicts, P: all rows but the anchor."""
        return self.block_size - 1

    @property
    def conv_groups(self) -> int:
        return self.hidden_size // self.conv_group_size

    def causal(self, kind: AttentionKind) -> bool:
        """Whether the rows of a block see only earlier rows, in layers of this kind."""
        return kind == AttentionKind.SLIDING if self.is_causal is None else self.is_causal

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Reads a parsed `config.json` (dflash2.md section 1.1). What is DFlash's own is looked up in `dflash_config`, then
        outside; what the backbone is made of stands outside.

        Raises ConfigError for what is missing, out of range, or would make this a different draft.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json of the draft holds a {type(raw).__name__}; expected an object")
        inner = raw.get("dflash_config", {})
        if not isinstance(inner, Mapping):
            raise ConfigError(f"dflash_config = {shown(inner)}: expected an object")
        settings = {**raw, **inner}
        _refuse_other_drafts(raw, settings)

        values: dict[str, Any] = {}
        for field in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        ):  # fmt: skip
            values[field] = integer_field(raw, field, None, minimum=1)
        values["head_dim"] = integer_field(raw, "head_dim", 128, minimum=1)  # Qwen3's default, whatever hidden_size is
        values["rms_norm_eps"] = number_field(raw, "rms_norm_eps", 1e-6)
        values["rope_theta"] = _rope_theta(raw)
        values["attention_bias"] = _flag(raw, "attention_bias", False)
        values["is_causal"] = _flag(raw, "is_causal", None)

        num_layers = values["num_hidden_layers"]
        values["layer_types"] = _layer_types(raw, num_layers)
        window = raw.get("sliding_window")
        values["sliding_window"] = None if window is None else integer_field(raw, "sliding_window", None, minimum=1)
        values["target_layer_ids"] = _target_layer_ids(settings, num_layers)
        values["mask_token_id"] = integer_field(settings, "mask_token_id", None, minimum=0)
        values["block_size"] = integer_field(settings, "block_size", 16, minimum=1)
        for field in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            values[field] = integer_field(settings, field, None, minimum=1)
        values["input_embedding_scale"] = number_field(settings, "input_embedding_scale", 1.0)
        values["output_multiplier"] = number_field(settings, "output_multiplier", 1.0)
        cap = settings.get("final_logit_softcapping")
        is_off = cap is None or (isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap <= 0)
        values["final_logit_softcapping"] = None if is_off else number_field(settings, "final_logit_softcapping", None)
        dtype = raw.get("dtype", raw.get("torch_dtype"))
        values["dtype"] = "bfloat16" if dtype is None else dtype
        return cls(**values)

    def check_fits(self, target: ModelConfig) -> None:
        """Raises ConfigError with every reason why this draft cannot serve the target."""
        reasons = [
            f"{field} = {getattr(self, field)}, the target has {getattr(target, field)}"
            for field in ("hidden_size", "vocab_size")
            if getattr(self, field) != getattr(target, field)
        ]
        if (last := max(self.target_layer_ids)) >= target.num_hidden_layers:
            reasons.append(f"target_layer_ids has {last}, the target's layers are 0 to {target.num_hidden_layers - 1}")
        if self.mask_token_id >= target.vocab_size:
            reasons.append(f"mask_token_id = {self.mask_token_id}, the target's ids are below {target.vocab_size}")
        if reasons:
            raise ConfigError(f"the draft does not fit its target: {'; '.join(reasons)}")


def _refuse_other_drafts(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Settings of other drafts that would change the result if they were ignored."""
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"model_type = {shown(raw['model_type'])}: only 'qwen3' is supported for a draft")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, (list, tuple)) or not any(name in ARCHITECTURES for name in architectures):
        raise ConfigError(f"architectures = {shown(architectures)}: a DFlash2 draft names one of {', '.join(ARCHITECTURES)}")
    neutral = {
        "hidden_act": "silu",
        "is_neox_style": True,
        "rope_is_neox_style": True,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "draft_vocab_size": None,
        "has_own_lm_head": False,
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "sample_from_anchor": False,
        "use_swa": False,
        "swa_window_size": None,
        "attention_sink_bias": None,
        "attention_value_scale": None,
        "projector_type": None,
        "sliding_window_non_causal": None,
        "quantization_config": None,
    }
    for field, value in neutral.items():
        allowed = (value, None) if value else (value, None, False)  # "off" is neutral only where off is the default
        if field in settings and settings[field] not in allowed:
            raise ConfigError(f"{field} = {shown(settings[field])}: only {shown(value)} is supported")
    inner = raw.get("dflash_config", {})
    for field in _BACKBONE:
        if field in inner and inner[field] != raw.get(field):
            raise ConfigError(f"dflash_config.{field} = {shown(inner[field])}: expected outside dflash_config")
    for field, other in (("target_hidden_size", "hidden_size"), ("causal", "is_causal")):
        if settings.get(field) not in (None, raw.get(other)):
            raise ConfigError(f"{field} = {shown(settings[field])}: must equal {other} = {shown(raw.get(other))}")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """Engines disagree about the default, so the file has to say it."""
    rope = raw.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters = {shown(rope)}: expected an object with rope_type and rope_theta")
    neutral = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0, "rope_dim": None}
    for field, value in neutral.items():
        if rope.get(field, value) not in (value, None):
            raise ConfigError(f"rope_parameters.{field} = {shown(rope[field])}: only {shown(value)} is supported")
    return number_field(rope, "rope_theta", None)


def _flag(raw: Mapping[str, Any], field: str, default: bool | None) -> bool | None:
    value = raw.get(field, default)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{field} = {shown(value)}: expected true or false")
    return default if value is None else value


def _layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[AttentionKind, ...]:
    value = raw.get("layer_types")
    if value is None:
        if _flag(raw, "use_sliding_window", False):
            raise ConfigError("layer_types is missing: expected an entry for every layer where use_sliding_window is true")
        return (AttentionKind.GLOBAL,) * num_layers
    if not isinstance(value, (list, tuple)) or len(value) != num_layers or any(kind not in _KINDS for kind in value):
        allowed = f"{num_layers} entries (num_hidden_layers), each {' or '.join(map(repr, _KINDS))}"
        raise ConfigError(f"layer_types = {shown(value)}: expected {allowed}")
    return tuple(map(AttentionKind, value))


def _target_layer_ids(settings: Mapping[str, Any], num_draft_layers: int) -> tuple[int, ...]:
    num_target_layers = settings.get("num_target_layers")
    if num_target_layers is not None:
        num_target_layers = integer_field(settings, "num_target_layers", None, minimum=1)
    ids = settings.get("target_layer_ids")
    if ids is None:
        if num_target_layers is None:
            raise ConfigError("target_layer_ids is missing, and so is num_target_layers, from which it could follow")
        ids = default_target_layer_ids(num_target_layers, num_draft_layers)
    whole = isinstance(ids, (list, tuple)) and ids and all(type(i) is int and i >= 0 for i in ids)
    if not whole or len(set(ids)) < len(ids):
        raise ConfigError(f"target_layer_ids = {shown(ids)}: expected different layer indices of the target, at least one")
    if num_target_layers is not None and max(ids) >= num_target_layers:
        raise ConfigError(f"target_layer_ids = {shown(ids)}: must be below num_target_layers = {num_target_layers}")
    return tuple(ids)


def _check(config: DraftConfig) -> None:
    """Relations between fields, whatever way the config was made."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads = {config.num_attention_heads}: "
            f"must be a multiple of num_key_value_heads = {config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim = {config.head_dim}: must be even (rotary embedding pairs its halves)")
    if len(config.layer_types) != config.num_hidden_layers:
        length = len(config.layer_types)
        raise ConfigError(f"layer_types has length {length}: expected num_hidden_layers = {config.num_hidden_layers}")
    if config.sliding_window is None and AttentionKind.SLIDING in config.layer_types:
        raise ConfigError("sliding_window = None: expected an integer above 0 where layer_types has 'sliding_attention'")
    if not 2 <= config.block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(f"block_size = {config.block_size}: expected an integer from 2 to {MAX_BLOCK_SIZE}")
    if config.hidden_size % config.conv_group_size:
        raise ConfigError(f"conv_group_size = {config.conv_group_size}: must divide hidden_size = {config.hidden_size}")
    if config.selector_top_k > MAX_TOP_K:
        raise ConfigError(f"selector_top_k = {config.selector_top_k}: expected an integer from 1 to {MAX_TOP_K}")
    for field, other in (("conv_kernel_size", "block_size"), ("selector_top_k", "vocab_size")):
        value, limit = getattr(config, field), getattr(config, other)
        if value > limit:
            raise ConfigError(f"{field} = {value}: must be at most {other} = {limit}")
    if config.mask_token_id >= config.vocab_size:
        raise ConfigError(f"mask_token_id = {config.mask_token_id}: must be below vocab_size = {config.vocab_size}")
    if config.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype = {shown(config.dtype)}: allowed are 'bfloat16' and 'float32'")
