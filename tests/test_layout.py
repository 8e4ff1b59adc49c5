"""The table of tensors: against the published sizes, and against the parameter tree of the model."""

import dataclasses
import math
from collections import Counter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from muse_jax import sharding
from muse_jax.config import MUSE_SPARK_OPEN, TINY, ConfigError, MLPKind
from muse_jax.layout import is_skipped, packed_tensors, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.sharding import ShardingConfig

SPECS = {spec.name: spec for spec in text_tensors(MUSE_SPARK_OPEN)}
LAYER = "model.language_model.layers.1."

# muse_spark.md 2.1
RELEASED_LAYER = {
    "input_layernorm.weight": (8192,),
    "self_attn.q_proj.weight": (8192, 8192),
    "self_attn.k_proj.weight": (1024, 8192),
    "self_attn.v_proj.weight": (1024, 8192),
    "self_attn.gate_proj.weight": (8192, 8192),
    "self_attn.o_proj.weight": (8192, 8192),
    "post_attention_residual_gate.gate": (8192,),
    "pre_feedforward_layernorm.weight": (8192,),
    "mlp.gate.weight": (256, 8192),
    "mlp.gate.e_score_correction_bias": (256,),
    "mlp.pre_expert_proj.weight": (4096, 8192),
    "mlp.pre_expert_norm.weight": (4096,),
    "mlp.experts.gate_up_proj": (256, 8192, 4096),
    "mlp.experts.down_proj": (256, 4096, 4096),
    "mlp.experts.post_expert_norm.weight": (4096,),
    "mlp.post_expert_proj.weight": (8192, 4096),
    "post_feedforward_layernorm.weight": (8192,),
    "post_feedforward_residual_gate.gate": (8192,),
}
KEPT_FP32 = {
    "post_attention_residual_gate.gate",
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "post_feedforward_residual_gate.gate",
}


def num_bytes(spec) -> int:
    return spec.size * spec.dtype_in(jnp.bfloat16).itemsize


class TestReleased:
    def test_names_and_shapes(self):
        found = {name.removeprefix(LAYER): spec.shape for name, spec in SPECS.items() if name.startswith(LAYER)}
        assert found == RELEASED_LAYER
        assert {name for name, spec in SPECS.items() if spec.dtype and name.startswith(LAYER)} == {LAYER + x for x in KEPT_FP32}
        outside = {name: spec.shape for name, spec in SPECS.items() if ".layers." not in name}
        assert outside == {
            "model.language_model.embed_tokens.weight": (202048, 8192),
            "model.language_model.norm.weight": (8192,),
            "lm_head.weight": (202048, 8192),
        }
        assert len(SPECS) == len(text_tensors(MUSE_SPARK_OPEN)) == 62 * 18 + 3

    def test_parameters_and_bytes(self):
        """muse_spark.md 5.1, where parameters are those of matrices."""
        assert sum(spec.size for spec in SPECS.values() if len(spec.shape) > 1) == 819_987_480_576
        assert sum(map(num_bytes, SPECS.values())) == 1_640_243_214_336

    def test_bytes_per_gpu(self):
        """muse_spark.md 5.1, of one layer on each of eight GPUs; experts in bf16."""
        where, _ = sharding.placement(AbstractMesh((8,), ("tp",)), ShardingConfig(8))

        def share(*names: str) -> int:
            total = 0
            for name in names:
                spec = SPECS[name]
                shard = where(spec).shard_shape(spec.param_shape)
                total += math.prod(shard) * spec.dtype_in(jnp.bfloat16).itemsize
            return total

        attention = [LAYER + f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "gate", "o")]
        assert share(*attention) == 54_525_952
        assert share(attention[1]) == 2_097_152
        assert share(LAYER + "mlp.pre_expert_proj.weight") == share(LAYER + "mlp.post_expert_proj.weight") == 8_388_608
        assert share(LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj") == 3_221_225_472
        assert share(LAYER + "mlp.gate.weight", LAYER + "mlp.gate.e_score_correction_bias") == 8_388_608 + 1_024
        vectors = [LAYER + x for x, shape in RELEASED_LAYER.items() if len(shape) == 1 and "bias" not in x]
        assert share(*vectors) == 131_072
        assert share("lm_head.weight") == share("model.language_model.embed_tokens.weight") == 413_794_304

    def test_experts_split_gate_and_up_alike(self):
        """A rank holds rows of both halves: the axis of two is whole, F is split."""
        spec = SPECS[LAYER + "mlp.experts.gate_up_proj"]
        assert spec.param_shape == (256, 2, 4096, 4096) and spec.shard_axis == 2
        where, _ = sharding.placement(AbstractMesh((8,), ("tp",)), ShardingConfig(8))
        shard = where(spec).shard_shape(spec.param_shape)
        assert shard == (256, 2, 512, 4096)


def test_dense_layers_replace_the_experts():
    config = dataclasses.replace(MUSE_SPARK_OPEN, mlp_layer_types=(MLPKind.DENSE, *MUSE_SPARK_OPEN.mlp_layer_types[1:]))
    shapes = {spec.name: spec.shape for spec in text_tensors(config) if ".layers.0.mlp." in spec.name}
    prefix = "model.language_model.layers.0.mlp."
    assert shapes == {
        prefix + "gate_proj.weight": (16384, 8192),
        prefix + "up_proj.weight": (16384, 8192),
        prefix + "down_proj.weight": (8192, 16384),
    }


@pytest.mark.parametrize(
    "name",
    [
        "model.vision_tower.blocks.0.attn.qkv.weight",
        "model.vision_adapter.fc1.weight",
        "model.vision_projection.weight",
        "model.audio_tower.conv1.bias",
        "model.language_model.rotary_emb.inv_freq",
        "model.language_model.layers.3.self_attn.rotary_emb.inv_freq",
        "model.language_model.layers.3.mlp.num_tokens_per_expert",
        "model.language_model.embed_norm.weight",
        "model.language_model.layers.3.mlp.norm_weight",
        "model.language_model.layers.3.self_attn.q_scale",
        "model.language_model.layers.3.self_attn.k_scale",
        "model.language_model.layers.3.self_attn.v_scale",
    ],
)
def test_skipped(name):
    """muse_spark.md 2.2."""
    assert is_skipped(name)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in SPECS if ".layers." not in name or name.startswith(LAYER)),
        "model.language_model.layers.3.self_attn.q_proj.bias",
        "model.language_model.layers.3.mlp.experts.gate_up_proj_weight_scale",
        "model.language_model.unknown.weight",
        "vision_tower.weight",
        "model.language_model.vision_tower.weight",
    ],
)
def test_not_skipped(name):
    assert not is_skipped(name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [TINY, dataclasses.replace(TINY, mlp_layer_types=(MLPKind.DENSE,) * 6, head_dim=6)])
def test_parameter_tree_of_the_model_is_the_table(config, dtype):
    module = nnx.eval_shape(lambda: MuseSpark(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    found = {tuple(key.key for key in path): (leaf.shape, leaf.dtype) for path, leaf in leaves}
    expected = {spec.path: (spec.param_shape, jnp.dtype(spec.dtype_in(dtype))) for spec in text_tensors(config)}
    assert found == expected
    assert nnx.to_pure_dict(nnx.state(module)).keys() == nnx.to_pure_dict(nnx.state(module, nnx.Param)).keys()
    assert max(Counter(spec.path for spec in text_tensors(config)).values()) == 1
    assert all(math.prod(spec.param_shape) == spec.size for spec in text_tensors(config))


class TestReleasedNVFP4:
    """muse_spark.md sections 2.4 and 5.1: the experts of layers 1 to 60 in NVFP4."""

    config = dataclasses.replace(MUSE_SPARK_OPEN, nvfp4_layers=tuple(range(1, 61)))
    specs: ClassVar = {spec.name: spec for spec in text_tensors(config)}

    def test_names_shapes_and_dtypes(self):
        prefix = "model.language_model.layers.1.mlp.experts."
        found = {
            name.removeprefix(prefix): (spec.shape, str(spec.dtype))
            for name, spec in self.specs.items()
            if name.startswith(prefix) and "norm" not in name
        }
        assert found == {
            "gate_up_proj": ((256, 8192, 2048), "uint8"),
            "gate_up_proj_weight_scale": ((256, 8192, 256), "float8_e4m3fn"),
            "gate_up_proj_weight_scale_2": ((256, 2), "float32"),
            "gate_up_proj_input_scale": ((256, 2), "float32"),
            "down_proj": ((256, 4096, 2048), "uint8"),
            "down_proj_weight_scale": ((256, 4096, 256), "float8_e4m3fn"),
            "down_proj_weight_scale_2": ((256,), "float32"),
            "down_proj_input_scale": ((256,), "float32"),
        }
        for layer in (0, 61):
            spec = self.specs[f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj"]
            assert spec.dtype is None and spec.shape == (256, 8192, 4096)

    def test_bytes(self):
        assert sum(map(num_bytes, self.specs.values())) == 528_920_795_136

    def test_a_rank_holds_the_rows_of_n_sharding(self):
        prefix = "model.language_model.layers.1.mlp.experts."
        where, _ = sharding.placement(AbstractMesh((8,), ("tp",)), ShardingConfig(8))
        for name, shape in (
            ("gate_up_proj", (256, 2, 512, 2048)),
            ("gate_up_proj_weight_scale", (256, 2, 512, 256)),
            ("gate_up_proj_weight_scale_2", (256, 2)),
            ("down_proj", (256, 512, 2048)),
            ("down_proj_weight_scale", (256, 512, 256)),
            ("down_proj_weight_scale_2", (256,)),
        ):
            spec = self.specs[prefix + name]
            assert where(spec).shard_shape(spec.param_shape) == shape

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"nvfp4_layers": (2, 1)}, "in order"),
            ({"nvfp4_layers": (62,)}, "sparse layers"),
            ({"nvfp4_layers": (1,), "moe_hidden_size": 4104}, "multiple of 16"),
        ],
    )
    def test_impossible_layers_are_refused(self, fields, message):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(MUSE_SPARK_OPEN, **fields)


class TestPacked:
    """The files of a packed checkpoint of the real model, computed."""

    config = TestReleasedNVFP4.config

    @pytest.mark.parametrize("tp", [1, 2, 4, 8])
    def test_tensors_follow_each_other_on_pages(self, tp):
        end = 0
        for tensor in packed_tensors(self.config, tp):
            assert tensor.offset % 4096 == 0 and end <= tensor.offset < end + 4096
            assert tensor.nbytes == math.prod(tensor.shape) * tensor.dtype.itemsize
            end = tensor.offset + tensor.nbytes

    def test_bytes_of_a_rank(self):
        """muse_spark.md 5.1 has 66,577,299,456 without the final norm and the experts' scalars, which every rank holds."""
        table = packed_tensors(self.config, 8)
        scalars, final_norm = 60 * 256 * 6 * 4, 8192 * 2
        assert sum(tensor.nbytes for tensor in table) == 66_577_299_456 + scalars + final_norm
        assert table[-1].offset + table[-1].nbytes - sum(tensor.nbytes for tensor in table) < 4096 * len(table)

    def test_the_parts_of_the_ranks_are_the_whole(self):
        for spec in text_tensors(TINY):
            for tp in (1, 2, 4, 8):
                covered = np.zeros(spec.param_shape, np.int32)
                for rank in range(tp):
                    covered[spec.rank_part(tp, rank)] += 1
                parts = 1 if spec.shard_axis is None else min(tp, spec.num_parts)
                assert (covered == tp // parts).all(), (spec.name, tp)
                assert {spec.name.split(".")[-2]} & {"k_proj", "v_proj"} or parts in (1, tp)

    def test_tiles(self):
        """What GEMMs read is in tiles; a tile of codes and one of their scales cover the same values."""
        tiles = {tensor.spec.path[-1]: tensor.tile for tensor in packed_tensors(self.config, 8)}
        assert tiles["q_proj"] == tiles["router"] == tiles["lm_head"] == tiles["codes"] == (64, 128)
        assert tiles["block_scales"] == (64, 128 * 2 // 16)
        assert tiles["embedding"] is tiles["input_norm"] is tiles["global_scale"] is None
