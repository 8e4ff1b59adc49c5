"""config.json in, ModelConfig out, and one clear error for every other model."""

import dataclasses
import json

import pytest

from muse_jax.config import (
    MUSE_SPARK_OPEN,
    TINY,
    AttentionKind,
    ConfigError,
    MLPKind,
    ModelConfig,
    default_layer_types,
    default_layer_uses_rope,
)

SLIDING, FULL = "sliding_attention", "full_attention"


def bare(**fields) -> dict:
    """A text config of four layers."""
    return {"model_type": "muse_spark_text", "num_hidden_layers": 4, **fields}


# Fields of the text config, and what the message says: field, value, what is allowed.
REJECTED = [
    ({"hidden_size": 8200}, "hidden_size = 8200: must be a multiple of num_attention_heads = 128"),
    ({"num_key_value_heads": 12}, "num_attention_heads = 128: must be a multiple of num_key_value_heads = 12"),
    ({"layer_types": [FULL] * 3}, "layer_types has length 3: expected a list of num_hidden_layers = 4 entries"),
    ({"layer_types": FULL}, "layer_types has length str: expected a list of num_hidden_layers = 4 entries"),
    (
        {"layer_types": [SLIDING, FULL, "chunked_attention", FULL]},
        "layer_types[2] = 'chunked_attention': allowed are 'sliding_attention' and 'full_attention'",
    ),
    ({"layer_types": [[], {}, None, 1]}, "layer_types[0] = []: allowed are 'sliding_attention' and 'full_attention'"),
    ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types has length 5: expected a list of num_hidden_layers = 4 entries"),
    ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types[0] = 'moe': allowed are 'sparse' and 'dense'"),
    ({"layer_rope_theta": [0.0] * 3}, "layer_rope_theta has length 3: expected a list of num_hidden_layers = 4 entries"),
    ({"layer_rope_theta": [0, 1e4, 0, 0]}, "layer_rope_theta[1] = 10000.0: allowed are 0 and rope_theta = 500000"),
    ({"layer_rope_theta": [0, 0, 0, -5e5]}, "layer_rope_theta[3] = -500000.0: allowed are 0 and rope_theta = 500000"),
    ({"layer_rope_theta": [False] * 4}, "layer_rope_theta[0] = False: allowed are 0 and rope_theta = 500000"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn': only 'default' is supported"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0: expected a finite number above 0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5: only 1.0 is supported"),
    ({"rope_parameters": [5e5]}, "rope_parameters = [500000.0]: expected an object with rope_type and rope_theta"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling = {'type': 'linear'}: only None is supported"),
    ({"attention_bias": True}, "attention_bias = True: only False is supported"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu' is supported"),
    ({"num_shared_experts": 1}, "num_shared_experts = 1: only 0 is supported"),
    ({"inference_moe_w13_interleaved": True}, "inference_moe_w13_interleaved = True: only False is supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True: only False is supported"),
    (
        {"num_local_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok = 5: must be at most num_local_experts = 4",
    ),
    ({"final_logit_softcapping": None}, "final_logit_softcapping = None: expected a finite number above 0"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping = 0: expected a finite number above 0"),
    ({"final_logit_softcapping": -20.0}, "final_logit_softcapping = -20.0: expected a finite number above 0"),
    (
        {"sliding_window": None},
        "sliding_window = None: expected an integer above 0 where layer_types has 'sliding_attention'",
    ),
    ({"sliding_window": 0}, "sliding_window = 0: expected an integer from 1 to 2147483647"),
    ({"head_dim": 63}, "head_dim = 63: must be even"),
    ({"hidden_size": "8192"}, "hidden_size = '8192': expected an integer from 1 to 2147483647"),
    ({"hidden_size": 8192.0}, "hidden_size = 8192.0: expected an integer from 1 to 2147483647"),
    ({"vocab_size": True}, "vocab_size = True: expected an integer from 1 to 2147483647"),
    ({"moe_hidden_size": None}, "moe_hidden_size = None: expected an integer from 1 to 2147483647"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected an integer from 1 to 4096"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: expected a finite number above 0"),
    ({"output_multiplier": float("inf")}, "output_multiplier = inf: expected a finite number above 0"),
    ({"qk_scale_factor": 10**400}, "qk_scale_factor = 1000"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id = [1, '2']: expected a token id, a list of token ids or null"),
    ({"bos_token_id": -1}, "bos_token_id = -1: expected an integer from 0 to 2147483647"),
    ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config.quant_algo = None: only 'NVFP4'"),
    ({"dtype": "float16"}, "dtype = 'float16': allowed are 'bfloat16' and 'float32'"),
]


@pytest.mark.parametrize(("fields", "message"), REJECTED, ids=lambda case: next(iter(case)) if isinstance(case, dict) else "")
def test_other_models_are_refused(fields, message):
    """The message names the field, its value and what is allowed, in the bare and in the nested form."""
    nested = {"model_type": "muse_spark", "text_config": bare(**fields)}
    for raw in (bare(**fields), nested):
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_hf(raw)
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "musespark1x_text", "muse_spark_vision", None, 3, ["muse_spark"], {}])
def test_other_model_types_are_refused(model_type):
    with pytest.raises(ConfigError, match=r"^model_type = .*: only 'muse_spark' and 'muse_spark_text' are supported$"):
        ModelConfig.from_hf({"model_type": model_type})
    with pytest.raises(ConfigError, match=r"^text_config\.model_type = .*: only 'muse_spark_text' is supported$"):
        ModelConfig.from_hf({"model_type": "muse_spark", "text_config": {"model_type": model_type}})


@pytest.mark.parametrize("raw", [None, [], "muse_spark", 1, {}, {"model_type": "muse_spark"}])
def test_things_that_are_no_config_are_refused(raw):
    with pytest.raises(ConfigError):
        ModelConfig.from_hf(raw)


HOSTILE = [
    True,
    False,
    -1,
    0,
    10**30,
    10**5000,
    1e308,
    float("nan"),
    float("inf"),
    -0.0,
    "",
    "1",
    "x\ny",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
]
FIELDS = [
    *(field.name for field in dataclasses.fields(ModelConfig)),
    *("model_type", "text_config", "rope_parameters", "layer_rope_theta", "eos_token_id", "dtype", "torch_dtype", "hidden_act"),
    *("attention_bias", "mlp_bias", "num_shared_experts", "tie_word_embeddings", "rope_scaling", "quantization_config"),
    *("image_token_id", "video_token_id", "audio_token_id", "partial_rotary_factor", "attn_logit_softcapping"),
]


@pytest.mark.parametrize("field", dict.fromkeys(FIELDS))
def test_hostile_values_raise_nothing_but_config_errors(field):
    """Either a config or one short line."""
    lists = [[value] * 4 for value in HOSTILE]
    for value in [*HOSTILE, *lists, list(range(100_000))]:
        for raw in (
            bare(**{field: value}),
            {"model_type": "muse_spark", "text_config": bare(), field: value},
            {"model_type": "muse_spark", "text_config": bare(**{field: value})},
            bare(rope_parameters={field: value, "rope_type": value}),
        ):
            try:
                ModelConfig.from_hf(raw)
            except ConfigError as error:
                assert len(str(error)) < 300 and "\n" not in str(error)


class TestAccepted:
    def test_defaults_are_the_released_model(self):
        """muse_spark.md 1.2."""
        config = ModelConfig.from_hf({"model_type": "muse_spark_text"})
        assert dataclasses.replace(config, placeholder_token_ids=(200_092, 200_091, 200_038)) == MUSE_SPARK_OPEN
        released = {
            "vocab_size": 202048,
            "hidden_size": 8192,
            "num_hidden_layers": 62,
            "num_attention_heads": 128,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "intermediate_size": 16384,
            "moe_hidden_size": 4096,
            "moe_intermediate_size": 4096,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "qk_scale_factor": 5.4730064863875,
            "output_multiplier": (8192 / 256) ** -0.5,
            "final_logit_softcapping": 20.0,
            "residual_gate_temperature": 0.3,
            "sliding_window": 2048,
            "rope_theta": 500000.0,
            "max_position_embeddings": 1048576,
            "bos_token_id": 200000,
            "eos_token_ids": (200001,),
            "pad_token_id": None,
            "mlp_layer_types": ("sparse",) * 62,
            "dtype": "bfloat16",
        }
        assert {name: getattr(config, name) for name in released} == released
        assert (config.q_size, config.kv_size, config.q_heads_per_kv_head) == (8192, 1024, 8)

    def test_global_layers_are_counted_from_the_last(self):
        globals_of_62 = [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61]
        assert [i for i in range(62) if MUSE_SPARK_OPEN.layer_types[i] == AttentionKind.GLOBAL] == globals_of_62
        assert [i for i in range(62) if not MUSE_SPARK_OPEN.layer_uses_rope[i]] == globals_of_62
        assert [i for i in range(62) if MUSE_SPARK_OPEN.window(i) is None] == globals_of_62
        assert MUSE_SPARK_OPEN.window(0) == 2048
        assert ModelConfig.from_hf(bare()).layer_types == (SLIDING, SLIDING, SLIDING, FULL)
        assert ModelConfig.from_hf(bare(num_hidden_layers=1)).layer_types == (FULL,)
        assert ModelConfig.from_hf(bare(num_hidden_layers=5)).layer_uses_rope == (False, True, True, True, False)

    def test_lists_and_rope_are_two_switches(self):
        lists = {"layer_types": [FULL, SLIDING, FULL, SLIDING], "layer_rope_theta": [10000, 0, 0.0, 1e4]}
        config = ModelConfig.from_hf(bare(rope_parameters={"rope_type": "default", "rope_theta": 10000}, **lists))
        assert config.layer_types == tuple(lists["layer_types"])
        assert config.layer_uses_rope == (True, False, False, True)
        assert config.rope_theta == 1e4
        assert ModelConfig.from_hf(bare(mlp_layer_types=["sparse", "dense"] * 2)).mlp_layer_types[1] == MLPKind.DENSE

    def test_nested_form_adds_placeholders_alone(self):
        text = bare(vocab_size=1000, eos_token_id=[5, 7], pad_token_id=3)
        nested = {"model_type": "muse_spark", "text_config": text, "vision_config": {"hidden_size": "?"}, "image_token_id": 9}
        config = ModelConfig.from_hf(nested)
        assert config.placeholder_token_ids == (9, 200_091, 200_038)
        assert dataclasses.replace(config, placeholder_token_ids=()) == ModelConfig.from_hf(text)
        assert (config.eos_token_ids, config.pad_token_id) == ((5, 7), 3)
        del text["model_type"]  # of the inner object, it may be absent
        assert ModelConfig.from_hf(nested) == config

    def test_dtype_is_found_wherever_it_was_written(self):
        for outer, inner in (({}, {"dtype": "float32"}), ({"dtype": "float32"}, {}), ({"torch_dtype": "float32"}, {})):
            raw = {"model_type": "muse_spark", "text_config": bare(**inner), **outer}
            assert ModelConfig.from_hf(raw).dtype == "float32"
        assert ModelConfig.from_hf(bare(torch_dtype="float32")).dtype == "float32"

    def test_harmless_variants(self):
        cap = ModelConfig.from_hf(bare(final_logit_softcapping=30)).final_logit_softcapping
        assert cap == 30.0 and isinstance(cap, float)
        assert ModelConfig.from_hf(bare(eos_token_id=None, bos_token_id=None)).eos_token_ids == ()
        assert ModelConfig.from_hf(bare(sliding_window=None, layer_types=[FULL] * 4)).sliding_window is None
        ignored = {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 1, "architectures": ["x"], "new": {}}
        assert ModelConfig.from_hf(bare(**ignored)) == ModelConfig.from_hf(bare())
        neutral = {"hidden_act": "silu", "attention_bias": False, "num_shared_experts": 0, "tie_word_embeddings": False}
        assert ModelConfig.from_hf(json.loads(json.dumps(bare(**neutral)))) == ModelConfig.from_hf(bare())
        assert ModelConfig.from_hf(bare(head_dim=32)).q_size == 4096  # need not equal hidden_size


def test_relations_are_checked_without_a_file_too():
    with pytest.raises(ConfigError, match="num_experts_per_tok = 9"):
        dataclasses.replace(TINY, num_experts_per_tok=9)
    with pytest.raises(ConfigError, match="layer_uses_rope has length 5: expected num_hidden_layers = 6"):
        dataclasses.replace(TINY, layer_uses_rope=TINY.layer_uses_rope[1:])


def test_tiny_has_every_feature():
    assert set(zip(TINY.layer_types, TINY.mlp_layer_types, strict=True)) == {
        (SLIDING, "sparse"),
        (FULL, "sparse"),
        (FULL, "dense"),
    }
    assert TINY.layer_types == default_layer_types(6) and TINY.layer_uses_rope == default_layer_uses_rope(6)
    assert TINY.q_size != TINY.hidden_size
