"""A draft's config.json in, DraftConfig out, and one clear error for every other draft."""

import dataclasses
import math

import pytest

from muse_jax.config import MUSE_SPARK_OPEN, AttentionKind, ConfigError
from muse_jax.draft_config import ARCHITECTURES, DraftConfig, default_target_layer_ids

SLIDING, FULL = "sliding_attention", "full_attention"


def draft(dflash: dict | None = None, **fields) -> dict:
    """config.json of a small draft of two layers; `dflash` changes its dflash_config."""
    return {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel"],
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "dflash_config": {
            "target_layer_ids": [3, 1],
            "mask_token_id": 99,
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
            **(dflash or {}),
        },
        **fields,
    }


def without(raw: dict, *names: str) -> dict:
    raw = {name: value for name, value in raw.items() if name not in names}
    return raw | {"dflash_config": {name: value for name, value in raw["dflash_config"].items() if name not in names}}


class TestAccepted:
    def test_every_field_and_the_defaults(self):
        assert DraftConfig.from_hf(draft()) == DraftConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            rms_norm_eps=1e-6,
            rope_theta=5e5,
            layer_types=(AttentionKind.GLOBAL, AttentionKind.GLOBAL),
            sliding_window=None,
            is_causal=None,
            attention_bias=False,
            target_layer_ids=(3, 1),
            mask_token_id=99,
            block_size=8,
            conv_kernel_size=2,
            conv_group_size=16,
            selector_rank=8,
            selector_top_k=4,
            input_embedding_scale=1.0,
            output_multiplier=1.0,
            final_logit_softcapping=None,
            has_mask_embedding=False,
            dtype="bfloat16",
        )

    @pytest.mark.parametrize(
        ("fields", "field", "value"),
        [
            ({"rms_norm_eps": 1e-5}, "rms_norm_eps", 1e-5),
            (
                {"layer_types": [SLIDING, FULL], "sliding_window": 7},
                "layer_types",
                (AttentionKind.SLIDING, AttentionKind.GLOBAL),
            ),
            ({"layer_types": [SLIDING] * 2, "sliding_window": 7}, "sliding_window", 7),
            ({"is_causal": False}, "is_causal", False),
            ({"is_causal": True}, "is_causal", True),
            ({"attention_bias": True}, "attention_bias", True),
            ({"dtype": "float32"}, "dtype", "float32"),
            ({"torch_dtype": "float32"}, "dtype", "float32"),
            ({"rope_parameters": None, "rope_theta": 7e4}, "rope_theta", 7e4),
            ({"final_logit_softcapping": 20}, "final_logit_softcapping", 20.0),
            ({"final_logit_softcapping": 0}, "final_logit_softcapping", None),
            ({"final_logit_softcapping": -3.5}, "final_logit_softcapping", None),
            ({"output_multiplier": 0.25}, "output_multiplier", 0.25),
            ({"input_embedding_scale": 1.7}, "input_embedding_scale", 1.7),
        ],
        ids=str,
    )
    def test_settings(self, fields, field, value):
        config = DraftConfig.from_hf(draft(**fields))
        assert getattr(config, field) == value and type(getattr(config, field)) is type(value)

    @pytest.mark.parametrize(
        ("field", "inner", "outer"),
        [
            ("block_size", 4, 6),
            ("mask_token_id", 5, 6),
            ("target_layer_ids", [0], [2]),
            ("conv_kernel_size", 3, 1),
            ("conv_group_size", 8, 32),
            ("selector_rank", 2, 3),
            ("selector_top_k", 5, 6),
            ("input_embedding_scale", 2.0, 3.0),
            ("output_multiplier", 0.5, 0.25),
            ("final_logit_softcapping", 10.0, 20.0),
        ],
    )
    def test_dflash_config_comes_first_then_the_top_level(self, field, inner, outer):
        def read(raw):
            value = getattr(DraftConfig.from_hf(raw), field)
            return list(value) if isinstance(value, tuple) else value

        raw = without(draft(), field) | {field: outer}
        assert read(raw) == outer
        assert read(raw | {"dflash_config": raw["dflash_config"] | {field: inner}}) == inner

    def test_a_cap_that_is_switched_off_inside(self):
        assert DraftConfig.from_hf(
            draft({"final_logit_softcapping": None}, final_logit_softcapping=20.0)
        ) == DraftConfig.from_hf(draft())

    def test_defaults_of_qwen3_and_dflash(self):
        assert DraftConfig.from_hf(without(draft(), "head_dim")).head_dim == 128
        assert DraftConfig.from_hf(without(draft(), "block_size")).block_size == 16

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_architectures(self, architecture):
        assert DraftConfig.from_hf(draft(architectures=[architecture])) == DraftConfig.from_hf(draft())

    def test_settings_that_change_nothing(self):
        neutral = {
            "hidden_act": "silu",
            "is_neox_style": True,
            "rope_scaling": None,
            "has_own_lm_head": False,
            "logit_scale": 1.0,
            "tie_word_embeddings": False,
            "target_hidden_size": 64,
            "attention_sink_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 0,
            "max_position_embeddings": 1_048_576,
        }
        assert DraftConfig.from_hf(draft(**neutral)) == DraftConfig.from_hf(draft())

    def test_derived_sizes(self):
        config = DraftConfig.from_hf(draft(head_dim=20))
        assert (config.q_size, config.kv_size, config.conv_groups, config.num_predictions) == (80, 40, 4, 7)

    @pytest.mark.parametrize(("is_causal", "full", "sliding"), [(None, False, True), (True, True, True), (False, False, False)])
    def test_causality(self, is_causal, full, sliding):
        config = DraftConfig.from_hf(draft(is_causal=is_causal, layer_types=[SLIDING, FULL], sliding_window=4))
        assert (config.causal(AttentionKind.GLOBAL), config.causal(AttentionKind.SLIDING)) == (full, sliding)
        assert (config.window(0), config.window(1)) == (4, None)


class TestTaps:
    def test_published_ones(self):
        """dflash2.md section 1.1: the drafts of Muse Spark and of Muse Glimmer."""
        assert default_target_layer_ids(62, 5) == (1, 16, 30, 44, 59)
        assert default_target_layer_ids(52, 5) == (1, 13, 25, 37, 49)
        assert default_target_layer_ids(62, 1) == (31,)

    def test_a_draft_that_names_none(self):
        raw = without(draft(num_target_layers=52, num_hidden_layers=5), "target_layer_ids")
        assert DraftConfig.from_hf(raw).target_layer_ids == (1, 13, 25, 37, 49)
        inside = draft({"num_target_layers": 62, "target_layer_ids": None}, num_hidden_layers=5)
        assert DraftConfig.from_hf(inside).target_layer_ids == (1, 16, 30, 44, 59)

    @pytest.mark.parity
    def test_all_those_of_dflash(self):
        model = pytest.importorskip("dflash.model")
        for num_target_layers in range(1, 130):
            for num_draft_layers in range(1, 12):
                theirs = model.build_target_layer_ids(num_target_layers, num_draft_layers)
                assert default_target_layer_ids(num_target_layers, num_draft_layers) == tuple(theirs)


# Changes of dflash_config, changes outside, and how the message starts.
REJECTED = [
    ({}, {"model_type": "llama"}, "model_type = 'llama': only 'qwen3' is supported for a draft"),
    ({}, {"model_type": None}, "model_type = None: only 'qwen3' is supported for a draft"),
    (
        {},
        {"architectures": ["DFlashDraftModel"]},
        "architectures = ['DFlashDraftModel']: a DFlash2 draft names one of DFlash2D",
    ),
    ({}, {"architectures": "DFlash2DraftModel"}, "architectures = 'DFlash2DraftModel': a DFlash2 draft names one of"),
    ({}, {"architectures": None}, "architectures = []: a DFlash2 draft names one of"),
    ({}, {"dflash_config": None}, "dflash_config = None: expected an object"),
    ({}, {"dflash_config": [1]}, "dflash_config = [1]: expected an object"),
    ({}, {"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu' is supported"),
    ({}, {"is_neox_style": False}, "is_neox_style = False: only True is supported"),
    ({"rope_is_neox_style": False}, {}, "rope_is_neox_style = False: only True is supported"),
    ({}, {"rope_scaling": {"type": "yarn"}}, "rope_scaling = {'type': 'yarn'}: only None is supported"),
    ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1.0 is supported"),
    ({}, {"draft_vocab_size": 32}, "draft_vocab_size = 32: only None is supported"),
    ({}, {"has_own_lm_head": True}, "has_own_lm_head = True: only False is supported"),
    ({}, {"logit_scale": 0.5}, "logit_scale = 0.5: only 1.0 is supported"),
    ({}, {"logit_scale": False}, "logit_scale = False: only 1.0 is supported"),
    ({}, {"tie_word_embeddings": True}, "tie_word_embeddings = True: only False is supported"),
    ({"sample_from_anchor": True}, {}, "sample_from_anchor = True: only False is supported"),
    ({"use_swa": True}, {}, "use_swa = True: only False is supported"),
    ({"swa_window_size": 64}, {}, "swa_window_size = 64: only None is supported"),
    ({"attention_sink_bias": True}, {}, "attention_sink_bias = True: only None is supported"),
    ({"attention_value_scale": 2.0}, {}, "attention_value_scale = 2.0: only None is supported"),
    ({"projector_type": "domino"}, {}, "projector_type = 'domino': only None is supported"),
    ({}, {"sliding_window_non_causal": True}, "sliding_window_non_causal = True: only None is supported"),
    ({}, {"quantization_config": {}}, "quantization_config = {}: only None is supported"),
    ({}, {"target_hidden_size": 32}, "target_hidden_size = 32: must equal hidden_size = 64"),
    ({"causal": True}, {"is_causal": False}, "causal = True: must equal is_causal = False"),
    ({"causal": True}, {}, "causal = True: must equal is_causal = None"),
    ({}, {"vocab_size": 0}, "vocab_size = 0: expected an integer from 1 to 2147483647"),
    ({}, {"hidden_size": "64"}, "hidden_size = '64': expected an integer from 1 to 2147483647"),
    ({}, {"intermediate_size": 96.0}, "intermediate_size = 96.0: expected an integer from 1 to 2147483647"),
    ({}, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected an integer from 1 to 4096"),
    ({}, {"num_attention_heads": True}, "num_attention_heads = True: expected an integer from 1 to 2147483647"),
    ({}, {"num_attention_heads": 3}, "num_attention_heads = 3: must be a multiple of num_key_value_heads = 2"),
    ({}, {"head_dim": None}, "head_dim = None: expected an integer from 1 to 2147483647"),
    ({}, {"head_dim": 15}, "head_dim = 15: must be even"),
    ({}, {"rms_norm_eps": math.nan}, "rms_norm_eps = nan: expected a finite number above 0"),
    ({}, {"rope_parameters": None}, "rope_theta = None: expected a finite number above 0"),
    ({}, {"rope_parameters": {}}, "rope_theta = None: expected a finite number above 0"),
    ({}, {"rope_parameters": 5e5}, "rope_parameters = 500000.0: expected an object with rope_type and rope_theta"),
    ({}, {"rope_parameters": {"rope_theta": math.inf}}, "rope_theta = inf: expected a finite number above 0"),
    ({}, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn': only 'default' is supported"),
    ({}, {"rope_parameters": {"type": "linear"}}, "rope_parameters.type = 'linear': only 'default' is supported"),
    ({}, {"rope_parameters": {"rope_dim": 8}}, "rope_parameters.rope_dim = 8: only None is supported"),
    ({}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5: only 1.0"),
    ({}, {"attention_bias": 1}, "attention_bias = 1: expected true or false"),
    ({}, {"is_causal": "yes"}, "is_causal = 'yes': expected true or false"),
    ({}, {"layer_types": [FULL]}, "layer_types = ['full_attention']: expected 2 entries (num_hidden_layers), each 'sliding"),
    ({}, {"layer_types": FULL}, "layer_types = 'full_attention': expected 2 entries"),
    ({}, {"layer_types": [FULL, "chunked"]}, "layer_types = ['full_attention', 'chunked']: expected 2 entries"),
    ({}, {"layer_types": [[], {}]}, "layer_types = [[], {}]: expected 2 entries"),
    ({}, {"layer_types": [FULL, SLIDING]}, "sliding_window = None: expected an integer above 0 where layer_types has 'sliding"),
    ({}, {"use_sliding_window": True}, "layer_types is missing: expected an entry for every layer where use_sliding_window is"),
    ({}, {"use_sliding_window": 1}, "use_sliding_window = 1: expected true or false"),
    ({}, {"sliding_window": 0}, "sliding_window = 0: expected an integer from 1 to 2147483647"),
    ({"target_layer_ids": []}, {}, "target_layer_ids = []: expected different layer indices of the target, at least one"),
    ({"target_layer_ids": 3}, {}, "target_layer_ids = 3: expected different layer indices of the target, at least one"),
    ({"target_layer_ids": [1, 1]}, {}, "target_layer_ids = [1, 1]: expected different layer indices"),
    ({"target_layer_ids": [1, -1]}, {}, "target_layer_ids = [1, -1]: expected different layer indices"),
    ({"target_layer_ids": [1, True]}, {}, "target_layer_ids = [1, True]: expected different layer indices"),
    ({"target_layer_ids": [1, 2.0]}, {}, "target_layer_ids = [1, 2.0]: expected different layer indices"),
    ({"target_layer_ids": [[1], [2]]}, {}, "target_layer_ids = [[1], [2]]: expected different layer indices"),
    ({"target_layer_ids": [4]}, {"num_target_layers": 4}, "target_layer_ids = [4]: must be below num_target_layers = 4"),
    ({"target_layer_ids": None}, {}, "target_layer_ids is missing, and so is num_target_layers, from which it could follow"),
    ({"target_layer_ids": None}, {"num_target_layers": 4}, "target_layer_ids = (1, 1): expected different layer indices"),
    ({}, {"num_target_layers": "62"}, "num_target_layers = '62': expected an integer from 1 to 2147483647"),
    ({"mask_token_id": None}, {}, "mask_token_id = None: expected an integer from 0 to 2147483647"),
    ({"mask_token_id": -1}, {}, "mask_token_id = -1: expected an integer from 0 to 2147483647"),
    ({"mask_token_id": 100}, {}, "mask_token_id = 100: must be below vocab_size = 100"),
    ({"block_size": 1}, {}, "block_size = 1: expected an integer from 2 to 16"),
    ({"block_size": 17}, {}, "block_size = 17: expected an integer from 2 to 16"),
    ({"block_size": None}, {"block_size": 8}, "block_size = None: expected an integer from 1 to 2147483647"),
    ({"conv_kernel_size": 9}, {}, "conv_kernel_size = 9: must be at most block_size = 8"),
    ({"conv_group_size": 24}, {}, "conv_group_size = 24: must divide hidden_size = 64"),
    ({"conv_group_size": 10**30}, {}, "conv_group_size = 1000000000000000000000000000000: expected an integer from 1"),
    ({"selector_rank": 0}, {}, "selector_rank = 0: expected an integer from 1 to 2147483647"),
    ({"selector_top_k": 101}, {}, "selector_top_k = 101: must be at most vocab_size = 100"),
    ({"selector_top_k": 1025}, {"vocab_size": 3000}, "selector_top_k = 1025: expected an integer from 1 to 1024"),
    ({"is_causal": True}, {}, "dflash_config.is_causal = True: expected outside dflash_config"),
    ({"rope_theta": 1e4}, {}, "dflash_config.rope_theta = 10000.0: expected outside dflash_config"),
    ({"sliding_window": 8}, {"sliding_window": 16}, "dflash_config.sliding_window = 8: expected outside dflash_config"),
    ({"input_embedding_scale": 0}, {}, "input_embedding_scale = 0: expected a finite number above 0"),
    ({"output_multiplier": -1.0}, {}, "output_multiplier = -1.0: expected a finite number above 0"),
    ({"output_multiplier": 10**5000}, {}, "output_multiplier = a int: expected a finite number above 0"),
    ({"final_logit_softcapping": math.nan}, {}, "final_logit_softcapping = nan: expected a finite number above 0"),
    ({"final_logit_softcapping": True}, {}, "final_logit_softcapping = True: expected a finite number above 0"),
    ({}, {"dtype": "float16"}, "dtype = 'float16': allowed are 'bfloat16' and 'float32'"),
]
REQUIRED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
)


class TestRefused:
    @pytest.mark.parametrize(("inner", "outer", "message"), REJECTED, ids=[message[:40] for *_, message in REJECTED])
    def test_other_drafts(self, inner, outer, message):
        """The message names the field, its value and what is allowed."""
        with pytest.raises(ConfigError) as error:
            DraftConfig.from_hf(draft(inner, **outer))
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("field", REQUIRED)
    def test_a_setting_that_is_missing(self, field):
        with pytest.raises(ConfigError, match=f"^{field} = None: expected an integer from "):
            DraftConfig.from_hf(without(draft(), field))

    @pytest.mark.parametrize("raw", [None, [], "qwen3", 1])
    def test_things_that_are_no_config(self, raw):
        with pytest.raises(ConfigError, match=r"^config\.json of the draft holds a .*; expected an object$"):
            DraftConfig.from_hf(raw)

    def test_fields_that_contradict_each_other(self):
        with pytest.raises(ConfigError, match=r"^layer_types has length 2: expected num_hidden_layers = 3$"):
            dataclasses.replace(DraftConfig.from_hf(draft()), num_hidden_layers=3)

    HOSTILE = (
        *(True, False, -1, 0, 10**30, 10**5000, 1e308, math.nan, math.inf, -0.0),
        *("", "1", "x\ny", [], [[]], [None], {}, {"a": {}}, [[[[[1]]]]], list(range(100_000))),
    )
    FIELDS = (
        *(field.name for field in dataclasses.fields(DraftConfig)),
        *("model_type", "architectures", "dflash_config", "rope_parameters", "num_target_layers", "torch_dtype", "hidden_act"),
        *("use_sliding_window", "rope_scaling", "causal", "logit_scale", "is_neox_style", "target_hidden_size", "use_swa"),
        *("type", "rope_type", "partial_rotary_factor", "rope_dim", "quantization_config"),
    )

    @pytest.mark.parametrize("field", dict.fromkeys(FIELDS))
    def test_hostile_values_raise_nothing_but_config_errors(self, field):
        """Either a config or one short line."""
        for value in (*self.HOSTILE, *([value] * 2 for value in self.HOSTILE)):
            for raw in (
                draft(**{field: value}),
                draft({field: value}),
                draft(rope_parameters={"rope_theta": 1e4, field: value}),
                without(draft(num_target_layers=value), "target_layer_ids"),
            ):
                try:
                    DraftConfig.from_hf(raw)
                except ConfigError as error:
                    assert len(str(error)) < 300 and "\n" not in str(error)


class TestFitsTarget:
    DRAFT = dataclasses.replace(
        DraftConfig.from_hf(draft()), vocab_size=MUSE_SPARK_OPEN.vocab_size, hidden_size=MUSE_SPARK_OPEN.hidden_size
    )

    def test_one_that_fits(self):
        last = MUSE_SPARK_OPEN.num_hidden_layers - 1
        dataclasses.replace(self.DRAFT, target_layer_ids=(last, 0)).check_fits(MUSE_SPARK_OPEN)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"hidden_size": 4096}, "hidden_size = 4096, the target has 8192"),
            ({"vocab_size": 202_047}, "vocab_size = 202047, the target has 202048"),
            ({"target_layer_ids": (62, 3)}, "target_layer_ids has 62, the target's layers are 0 to 61"),
            (
                {"vocab_size": 300_000, "mask_token_id": 202_048},
                "vocab_size = 300000, the target has 202048; mask_token_id = 202048, the target's ids are below 202048",
            ),
        ],
    )
    def test_each_reason(self, changes, reason):
        with pytest.raises(ConfigError) as error:
            dataclasses.replace(self.DRAFT, **changes).check_fits(MUSE_SPARK_OPEN)
        assert str(error.value) == f"the draft does not fit its target: {reason}"

    def test_every_reason_at_once(self):
        other = dataclasses.replace(
            self.DRAFT, hidden_size=64, vocab_size=300_000, mask_token_id=250_000, target_layer_ids=(1, 99)
        )
        with pytest.raises(ConfigError) as error:
            other.check_fits(MUSE_SPARK_OPEN)
        assert str(error.value) == (
            "the draft does not fit its target: hidden_size = 64, the target has 8192; "
            "vocab_size = 300000, the target has 202048; target_layer_ids has 99, the target's layers are 0 to 61; "
            "mask_token_id = 250000, the target's ids are below 202048"
        )
