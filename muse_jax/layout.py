"""The tables of a target's text tensors and of a draft's: names in the checkpoint, shapes, dtypes, place in the parameter
tree, sharding.

Loading, saving and sharding read these tables, so a tensor that they do not name does not exist. They need nothing but the
configs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from muse_jax.config import NVFP4_BLOCK, MLPKind, ModelConfig
from muse_jax.draft_config import DraftConfig

TEXT_PREFIX = "model.language_model."

_FP32 = np.dtype(np.float32)
_CODES = np.dtype(np.uint8)
_BLOCK_SCALES = np.dtype(jnp.float8_e4m3fn)

NUM_RANKS = 8  # that work is written for; a mesh of fewer devices runs several on each

# Tensors of the released repository that text decoding does not need: the towers, and buffers that older exports keep.
SKIPPED_PREFIXES = (
    "model.vision_tower.",
    "model.vision_adapter.",
    "model.vision_projection.",
    "model.audio_tower.",
)
SKIPPED_PARTS = ("rotary_emb", "num_tokens_per_expert", "embed_norm.weight")
SKIPPED_SUFFIXES = (".mlp.norm_weight", ".self_attn.q_scale", ".self_attn.k_scale", ".self_attn.v_scale")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One text tensor of the checkpoint and the parameter it becomes.

    `shape` is the shape in the file; `param_shape` has as many elements in the same order. Matrices are [out, in] in both.
    """

    name: str  # in the safetensors file
    shape: tuple[int, ...]
    path: tuple[str | int, ...]  # in the parameter tree of `muse_jax.model.MuseSpark`
    param_shape: tuple[int, ...]
    # Of the parameter, where it does not follow the model's: fp32 for router and residual gates, uint8 for packed codes.
    dtype: np.dtype | None = None
    # Of `param_shape`, cut into one part for each of NUM_RANKS ranks; None: every rank has all of it.
    shard_axis: int | None = None
    # Different parts, where that is not NUM_RANKS: KV heads fewer than ranks, of which neighbours share one.
    num_parts: int = NUM_RANKS

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def dtype_in(self, model_dtype: DTypeLike) -> np.dtype:
        """The parameter's dtype in a model of bf16 or fp32."""
        return jnp.dtype(model_dtype) if self.dtype is None else self.dtype

    def rank_part(self, tp: int, rank: int) -> tuple[slice, ...]:
        """What `rank` of `tp` holds of the parameter, as slices of all its axes. Neighbours may hold the same."""
        part = [slice(0, size) for size in self.param_shape]
        if self.shard_axis is not None:
            parts = min(tp, self.num_parts)
            rows, i = self.param_shape[self.shard_axis] // parts, rank * parts // tp
            part[self.shard_axis] = slice(i * rows, (i + 1) * rows)
        return tuple(part)

    def holders(self, tp: int) -> range:
        """Ranks of `tp` whose parts together are the parameter, each element once."""
        parts = 1 if self.shard_axis is None else min(tp, self.num_parts)
        return range(0, tp, tp // parts)


def is_skipped(name: str) -> bool:
    """Whether a tensor of the file is known and not part of the text decoder."""
    return name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIXES) or any(part in name for part in SKIPPED_PARTS)


def text_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every text tensor of a checkpoint of this config (muse_spark.md sections 2.1 and 2.4), in file order."""
    specs: list[TensorSpec] = []
    d, v = config.hidden_size, config.vocab_size

    def add(name: str, path: tuple, *shape: int, **kwargs) -> None:
        specs.append(_spec(name, path, shape, **kwargs))

    add(TEXT_PREFIX + "embed_tokens.weight", ("embedding",), v, d, shard_axis=0)
    for i in range(config.num_hidden_layers):
        prefix, layer = f"{TEXT_PREFIX}layers.{i}.", ("layers", i)
        attention = (*layer, "attention")
        add(prefix + "input_layernorm.weight", (*layer, "input_norm"), d)
        by_heads = _by_heads(config)
        for name, path, rows in (
            ("q_proj", "q_proj", config.q_size),
            ("k_proj", "k_proj", config.kv_size),
            ("v_proj", "v_proj", config.kv_size),
            ("gate_proj", "attn_out_gate", config.q_size),
        ):
            add(f"{prefix}self_attn.{name}.weight", (*attention, path), rows, d, **by_heads[name])
        add(prefix + "self_attn.o_proj.weight", (*attention, "o_proj"), d, config.q_size, **by_heads["o_proj"])
        add(prefix + "post_attention_residual_gate.gate", (*layer, "post_attention_gate"), d, dtype=_FP32)
        add(prefix + "pre_feedforward_layernorm.weight", (*layer, "pre_ffn_norm"), d)
        if config.mlp_layer_types[i] == MLPKind.SPARSE:
            _add_moe(add, prefix + "mlp.", (*layer, "mlp"), config, i in config.nvfp4_layers)
        else:
            f = config.intermediate_size
            add(prefix + "mlp.gate_proj.weight", (*layer, "mlp", "gate_proj"), f, d, shard_axis=0)
            add(prefix + "mlp.up_proj.weight", (*layer, "mlp", "up_proj"), f, d, shard_axis=0)
            add(prefix + "mlp.down_proj.weight", (*layer, "mlp", "down_proj"), d, f, shard_axis=1)
        add(prefix + "post_feedforward_layernorm.weight", (*layer, "post_ffn_norm"), d)
        add(prefix + "post_feedforward_residual_gate.gate", (*layer, "post_ffn_gate"), d, dtype=_FP32)
    add(TEXT_PREFIX + "norm.weight", ("final_norm",), d)
    add("lm_head.weight", ("lm_head",), v, d, shard_axis=0)
    return tuple(specs)


def _spec(
    name: str, path: tuple, shape: tuple[int, ...], *, param_shape: tuple[int, ...] | None = None, **kwargs: Any
) -> TensorSpec:
    """An axis that the ranks do not divide is not cut."""
    param_shape = param_shape or shape
    axis = kwargs.pop("shard_axis", None)
    if axis is not None and param_shape[axis] % kwargs.get("num_parts", NUM_RANKS):
        axis = None
    return TensorSpec(name, shape, path, param_shape, shard_axis=axis, **kwargs)


def cuts_heads(config: ModelConfig | DraftConfig) -> bool:
    """Whether each rank can have whole query heads with their KV heads; if not, attention is not cut."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return heads % NUM_RANKS == 0 and (kv_heads % NUM_RANKS == 0 or NUM_RANKS % kv_heads == 0)


def _by_heads(config: ModelConfig | DraftConfig) -> dict[str, dict[str, int]]:
    """How attention is cut."""
    if not cuts_heads(config):
        return {name: {} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")}
    rows, shared = {"shard_axis": 0}, {"shard_axis": 0, "num_parts": min(config.num_key_value_heads, NUM_RANKS)}
    return {"q_proj": rows, "k_proj": shared, "v_proj": shared, "gate_proj": rows, "o_proj": {"shard_axis": 1}}


def draft_tensors(config: DraftConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a DFlash2 draft (dflash2.md section 1.2), in file order."""
    specs: list[TensorSpec] = []
    d, v, r = config.hidden_size, config.vocab_size, config.selector_rank
    taps, groups = config.conv_kernel_size, config.conv_groups

    def add(name: str, path: tuple, *shape: int, **kwargs) -> None:
        specs.append(_spec(name, path, shape, **kwargs))

    add("fc.weight", ("fc",), d, len(config.target_layer_ids) * d, shard_axis=1)
    add("hidden_norm.weight", ("hidden_norm",), d)
    for i in range(config.num_hidden_layers):
        prefix, layer = f"layers.{i}.", ("layers", i)
        add(prefix + "input_layernorm.weight", (*layer, "input_norm"), d)
        add(prefix + "post_attention_layernorm.weight", (*layer, "pre_ffn_norm"), d)
        by_heads = _by_heads(config)
        for name, rows in (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)):
            add(f"{prefix}self_attn.{name}.weight", (*layer, name), rows, d, **by_heads[name])
            if config.attention_bias:
                add(f"{prefix}self_attn.{name}.bias", (*layer, name.replace("proj", "bias")), rows, **by_heads[name])
        add(prefix + "self_attn.o_proj.weight", (*layer, "o_proj"), d, config.q_size, **by_heads["o_proj"])
        if config.attention_bias:
            add(prefix + "self_attn.o_proj.bias", (*layer, "o_bias"), d)
        for name in ("q_norm", "k_norm"):
            add(f"{prefix}self_attn.{name}.weight", (*layer, name), config.head_dim)
        for conv in ("attention_conv", "mlp_conv"):
            add(f"{prefix}{conv}.base_kernel", (*layer, conv, "base_kernel"), 2, taps, d)
            # Rows are ordered by side, tap and group.
            add(
                f"{prefix}{conv}.kernel_projection.weight",
                (*layer, conv, "kernel_projection"),
                2 * taps * groups,
                d,
                shard_axis=0,
            )
        f = config.intermediate_size
        add(prefix + "mlp.gate_proj.weight", (*layer, "gate_proj"), f, d, shard_axis=0)
        add(prefix + "mlp.up_proj.weight", (*layer, "up_proj"), f, d, shard_axis=0)
        add(prefix + "mlp.down_proj.weight", (*layer, "down_proj"), d, f, shard_axis=1)
    add("norm.weight", ("final_norm",), d)
    add("candidate_selector.predecessor_codebook", ("predecessor_codebook",), v, r, shard_axis=0)
    add("candidate_selector.successor_codebook", ("successor_codebook",), v, r, shard_axis=0)
    add("candidate_selector.hidden_projection.weight", ("selector_projection",), r, d, shard_axis=0)
    if config.has_mask_embedding:
        add("mask_embedding", ("mask_embedding",), d)
    return tuple(specs)


# The packed layout: one file a rank, in which each parameter begins at a multiple of a page (direct I/O needs that).
# Matrices that are GEMM operands are cut into tiles of 64 rows by 128 bytes (a Hopper or Blackwell shared-memory tile of the
# 128-byte swizzle: 64 bf16 values or 256 NVFP4 codes of a row), so that a stage of whole tiles is one contiguous copy; tiles
# follow each other along a row of tiles, then down, one matrix after the other. The megakernel's buffers (ffi/layout.py)
# have tiles of this size, too, but padded, swizzled and in another order: they are made when a checkpoint is loaded.
# Tiles at the edges are smaller, so nothing is padded. Block scales have tiles of 64 rows by 16, those of one tile of codes.
# Everything else is row major: vectors, and tables of which single rows are gathered.
PACKED_VERSION = 1
PACKED_ALIGNMENT = 4096
TILE_ROWS, TILE_BYTES, TILE_SCALES = 64, 128, 16
_GATHERED = ("embedding", "predecessor_codebook", "successor_codebook", "base_kernel", "global_scale", "input_scale")


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """One parameter in the packed file of each rank; place and shape are the same for all ranks."""

    spec: TensorSpec
    shape: tuple[int, ...]  # of a rank's part of `spec.param_shape`
    dtype: np.dtype
    offset: int  # of its first byte in the file
    tile: tuple[int, int] | None  # rows, and bytes of a row; None: row major

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def packed_tensors(config: ModelConfig | DraftConfig, tp: int) -> tuple[PackedTensor, ...]:
    """The table of a packed checkpoint's files, in file order, which is the order in which a step reads the weights."""
    table: list[PackedTensor] = []
    end = 0
    for spec in tensors(config):
        shape = tuple(part.stop - part.start for part in spec.rank_part(tp, 0))
        tiled = len(shape) > 1 and spec.path[-1] not in _GATHERED
        tile = (TILE_ROWS, TILE_SCALES if spec.path[-1] == "block_scales" else TILE_BYTES) if tiled else None
        tensor = PackedTensor(spec, shape, spec.dtype_in(config.dtype), -(-end // PACKED_ALIGNMENT) * PACKED_ALIGNMENT, tile)
        table.append(tensor)
        end = tensor.offset + tensor.nbytes
    return tuple(table)


def insert(tree: dict, path: tuple[str | int, ...], leaf: Any) -> None:
    """Puts `leaf` into a nested dict at `path`."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def tensors(config: ModelConfig | DraftConfig) -> tuple[TensorSpec, ...]:
    """The table of a target or of a draft."""
    return draft_tensors(config) if isinstance(config, DraftConfig) else text_tensors(config)


def parameter_tree(config: ModelConfig | DraftConfig, leaf: Callable[[TensorSpec], Any]) -> dict:
    """A nested dict of the structure of the model's parameters, with `leaf(spec)` in each place."""
    tree: dict = {}
    for spec in tensors(config):
        insert(tree, spec.path, leaf(spec))
    return tree


def _add_moe(add, prefix: str, path: tuple, config: ModelConfig, nvfp4: bool) -> None:
    d, m, f, e = config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size, config.num_local_experts
    add(prefix + "gate.weight", (*path, "router"), e, d, dtype=_FP32)
    add(prefix + "gate.e_score_correction_bias", (*path, "router_bias"), e, dtype=_FP32)
    add(prefix + "pre_expert_proj.weight", (*path, "pre_expert_proj"), m, d, shard_axis=0)
    add(prefix + "pre_expert_norm.weight", (*path, "pre_expert_norm"), m)
    # Gate rows come first, then up rows. With an axis of its own for the two, splitting F keeps each pair on one rank.
    for name, path_name, rows, param_rows, k, axis, scalars in (
        ("gate_up_proj", "gate_up", (e, 2 * f), (e, 2, f), m, 2, (e, 2)),
        ("down_proj", "down", (e, m), (e, m), f, 1, (e,)),
    ):
        name, at = f"{prefix}experts.{name}", (*path, path_name)
        if not nvfp4:
            add(name, at, *rows, k, param_shape=(*param_rows, k), shard_axis=axis)
            continue
        scale = f"{name}_weight_scale"
        for tensor, field, columns, dtype in (
            (name, "codes", k // 2, _CODES),
            (scale, "block_scales", k // NVFP4_BLOCK, _BLOCK_SCALES),
        ):
            add(tensor, (*at, field), *rows, columns, param_shape=(*param_rows, columns), dtype=dtype, shard_axis=axis)
        add(f"{scale}_2", (*at, "global_scale"), *scalars, dtype=_FP32)
        add(f"{name}_input_scale", (*at, "input_scale"), *scalars, dtype=_FP32)
    add(prefix + "experts.post_expert_norm.weight", (*path, "post_expert_norm"), m)
    add(prefix + "post_expert_proj.weight", (*path, "post_expert_proj"), d, m, shard_axis=0)
