"""The quantisation metadata of ModelOpt checkpoints (muse_spark.md section 2.4), read as a claim and written as a service.

Which tensors are NVFP4 is seen from the tensors: engines match the exclude list by different rules, and an entry for
layer 6 may hit layer 60.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.shards import read_json
from muse_jax.config import NVFP4_BLOCK, MLPKind, ModelConfig, excluded_modules
from muse_jax.layout import TEXT_PREFIX

QUANT_FILE = "hf_quant_config.json"
# A layer's experts are an entry's to exclude under any of these names of the decoder.
_PREFIXES = (TEXT_PREFIX, "model.", "language_model.model.", "")

_WILDCARD = re.compile(r"[*?]")
# More than a model of which every linear layer has a pattern; ten times as many would take seconds.
_MAX_GLOBS, _MAX_COMPARISONS = 1000, 100_000


def read_excluded(directory: Path, config_json: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The modules that the metadata excludes from quantisation; None if there is no metadata.

    Raises:   CheckpointError for an unreadable file; ConfigError for a quantisation other than NVFP4.
    """
    text = config_json.get("text_config", config_json)
    for holder in (config_json, text):
        if holder.get("quantization_config") is not None:
            return excluded_modules(holder["quantization_config"], "quantization_config")
    if (directory / QUANT_FILE).exists():
        return excluded_modules(read_json(directory / QUANT_FILE), QUANT_FILE)
    return None


def disagreement(excluded: tuple[str, ...], config: ModelConfig) -> str | None:
    """Where the exclude list and the tensors tell different stories about the experts; None if they agree."""
    patterns = frozenset(excluded)
    globs = tuple(filter(_WILDCARD.search, patterns))
    if len(globs) > _MAX_GLOBS or len(globs) * config.num_hidden_layers > _MAX_COMPARISONS:
        return f"the quantisation metadata has {len(globs)} patterns, too many to compare with the tensors, which are believed"
    wrong = [
        i
        for i, kind in enumerate(config.mlp_layer_types)
        if kind == MLPKind.SPARSE and _is_excluded(i, patterns, globs) == (i in config.nvfp4_layers)
    ]
    if not wrong:
        return None
    layers = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
    return f"the quantisation metadata and the tensors disagree on the experts of layers {layers}; the tensors are believed"


def metadata(config: ModelConfig) -> dict[str, Any]:
    """What ModelOpt would write for a checkpoint whose `config.nvfp4_layers` have NVFP4 experts, in the nested form."""
    excluded = ["lm_head", "model.vision_tower*", "model.vision_adapter*", "model.vision_projection*", "model.audio_tower*"]
    for i, kind in enumerate(config.mlp_layer_types):
        layer = f"{TEXT_PREFIX}layers.{i}"
        excluded.append(f"{layer}.self_attn*")
        if kind != MLPKind.SPARSE:
            excluded.append(f"{layer}.mlp*")
            continue
        excluded += [f"{layer}.mlp.{name}" for name in ("gate", "pre_expert_proj", "post_expert_proj")]
        if i not in config.nvfp4_layers:
            excluded.append(f"{layer}.mlp.experts*")
    return {
        "producer": {"name": "muse_jax"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": excluded,
        },
    }


def flat_metadata(config: ModelConfig) -> dict[str, Any]:
    """The same in the form of config.json's `quantization_config`."""
    quantization = metadata(config)["quantization"]
    group = {"num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    return {
        "quant_method": "modelopt",
        "quant_algo": quantization["quant_algo"],
        "config_groups": {"group_0": {"weights": group, "targets": ["Linear"]}},
        "ignore": quantization["exclude_modules"],
    }


def _is_excluded(layer: int, patterns: frozenset[str], globs: tuple[str, ...]) -> bool:
    modules = [f"{prefix}layers.{layer}.mlp.experts" for prefix in _PREFIXES]
    parents = {module.rsplit(".", depth)[0] for module in modules for depth in range(3)}  # the experts, their MLP, the layer
    if not patterns.isdisjoint(parents):
        return True
    # An entry may be a pattern of the experts, or of every matrix in them.
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for pattern in globs
        for module in modules
        for name in (module, f"{module}.gate_up_proj")
    )
