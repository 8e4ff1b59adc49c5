"""Drafts on disk: round trips, every name they are stored under, and one clear error for everything that is wrong."""

import contextlib
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, HFReader, load_params, read_draft_config, save_draft
from muse_jax.config import ConfigError
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import draft_tensors, parameter_tree

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
# Written out rather than taken from the layout table (dflash2.md section 1.2): D 16, 2 taps, 24 and 8 rows of q and k, heads of
# 4, FFN 20, kernel 3, 8 groups of 2 channels, vocabulary 40, rank 6. A swapped axis is a wrong shape.
LAYER_SHAPES = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (24, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 24),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "attention_conv.base_kernel": (2, 3, 16),
    "attention_conv.kernel_projection.weight": (48, 16),
    "mlp_conv.base_kernel": (2, 3, 16),
    "mlp_conv.kernel_projection.weight": (48, 16),
    "mlp.gate_proj.weight": (20, 16),
    "mlp.up_proj.weight": (20, 16),
    "mlp.down_proj.weight": (16, 20),
}
BIAS_SHAPES = {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", 24), ("k", 8), ("v", 8), ("o", 16))}
GLOBAL_SHAPES = {
    "fc.weight": (16, 32),
    "hidden_norm.weight": (16,),
    "norm.weight": (16,),
    CODEBOOKS[0]: (40, 6),
    CODEBOOKS[1]: (40, 6),
    "candidate_selector.hidden_projection.weight": (6, 16),
}


def config_json(dtype="float32", **fields):
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_target_layers": 4,
        "dflash_config": {
            "target_layer_ids": [2, 0],
            "mask_token_id": 39,
            "block_size": 8,
            "conv_kernel_size": 3,
            "conv_group_size": 2,
            "selector_rank": 6,
            "selector_top_k": 4,
        },
        **fields,
    }


def random_tensors(rng, dtype=F32, bias=False):
    """Tensors of the file by their published names."""
    layer_shapes = LAYER_SHAPES | (BIAS_SHAPES if bias else {})
    shapes = GLOBAL_SHAPES | {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer_shapes.items()}
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def write(directory, tensors, **fields):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(**fields)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_mask(directory, tensors):
    save_file(tensors, directory / "mask_embedding.safetensors")


def load(directory, dtype=F32, **kwargs):
    return load_params(directory, read_draft_config(directory), dtype=dtype, **kwargs)


def by_name(params, config):
    """A draft's parameters by the names and in the shapes of the table."""

    def leaf(spec):
        node = params
        for step in spec.path:
            node = node[step]
        return np.asarray(node).reshape(spec.shape)

    return {spec.name: leaf(spec) for spec in draft_tensors(config)}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape), name
        assert left[name].tobytes() == right[name].tobytes(), name


def rejected(directory, *culprits):
    """Loading fails with one line that holds all of `culprits`, before anything is put on a device."""

    def put(*_):
        raise AssertionError("a tensor was placed before the checkpoint was checked")

    with pytest.raises(CheckpointError) as error:
        load(directory, put=put)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000
    for culprit in culprits:
        assert culprit in message, message
    return message


class TestLoad:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, F32])
    @pytest.mark.parametrize("stored", [BF16, F32])
    def test_values_dtypes_and_report(self, tmp_path, rng, stored, dtype, bias):
        tensors = random_tensors(rng, stored, bias)
        write(tmp_path, tensors, dtype=stored.name, attention_bias=bias)
        config = read_draft_config(tmp_path)
        assert config == DraftConfig.from_hf(config_json(stored.name, attention_bias=bias))
        params, report = load(tmp_path, dtype)
        assert sorted(params["layers"]) == [0, 1]
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
        assert_same(by_name(params, config), {name: tensor.astype(dtype) for name, tensor in tensors.items()})
        assert (report.num_tensors, report.num_bytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))
        assert (report.num_skipped, report.dtypes) == (0, ("BF16" if stored == BF16 else "F32",))

    def test_the_tree_is_that_of_the_layout(self, tmp_path, rng):
        params, _ = load(write(tmp_path, random_tensors(rng)))
        expected = parameter_tree(read_draft_config(tmp_path), lambda spec: np.zeros(spec.param_shape))
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        jax.tree.map(lambda leaf, like: np.testing.assert_equal(leaf.shape, like.shape), params, expected)

    def test_slices_put_and_progress(self, tmp_path, rng):
        tensors = random_tensors(rng)
        calls = []

        def put(spec, shape, dtype, read_slice):
            assert shape == spec.param_shape
            return read_slice((slice(1, 3),))

        params, report = load(write(tmp_path, tensors), put=put, progress=lambda *call: calls.append(call))
        np.testing.assert_array_equal(params["fc"], tensors["fc.weight"][1:3])
        assert len(calls) == len(tensors) + 1 and calls[0] == (0, report.num_bytes) and calls[-1] == (report.num_bytes,) * 2

    def test_not_float16(self, tmp_path, rng):
        with pytest.raises(CheckpointError, match="float16: allowed are bfloat16 and float32"):
            load(write(tmp_path, random_tensors(rng)), np.float16)


# Each gives a name of the table the name that some engine stores it under.
ALIASES = {
    "codebooks as embeddings": lambda name: f"{name}.weight" if name in CODEBOOKS else name,
    "encoder": lambda name: {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }.get(name, name),
    "model prefix": lambda name: f"model.{name}",
    "midlayer": lambda name: name.replace("layers.0.", "midlayer."),
}
ALIASES["all of them"] = lambda name: ALIASES["model prefix"](
    ALIASES["midlayer"](ALIASES["encoder"](ALIASES["codebooks as embeddings"](name)))
)


class TestNames:
    @pytest.mark.parametrize("alias", ALIASES)
    def test_aliases(self, tmp_path, rng, alias):
        tensors = random_tensors(rng)
        stored = {ALIASES[alias](name): tensor for name, tensor in tensors.items()}
        assert stored.keys() != tensors.keys()
        params, _ = load(write(tmp_path, stored))
        assert_same(by_name(params, read_draft_config(tmp_path)), tensors)

    @pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.cos"])
    def test_rotary_buffers_are_skipped(self, tmp_path, rng, name):
        tensors = random_tensors(rng)
        params, report = load(write(tmp_path, tensors | {name: np.ones(2, np.float64)}))
        assert_same(by_name(params, read_draft_config(tmp_path)), tensors)
        assert (report.num_skipped, report.skipped_bytes) == (1, 16)

    @pytest.mark.parametrize(
        ("name", "also"),
        [
            ("fc.weight", "encoder.fc.weight"),
            ("hidden_norm.weight", "encoder.output_norm_enc.weight"),
            ("norm.weight", "model.norm.weight"),
            ("layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
            (CODEBOOKS[0], f"{CODEBOOKS[0]}.weight"),
            (CODEBOOKS[1], f"model.{CODEBOOKS[1]}.weight"),
        ],
    )
    def test_two_names_for_one_tensor(self, tmp_path, rng, name, also):
        tensors = random_tensors(rng)
        write(tmp_path, tensors | {also: tensors[name].copy()})
        names = ", ".join(map(repr, sorted([name, also])))
        assert rejected(tmp_path) == f"{tmp_path}: {names} are two names for one tensor"

    @pytest.mark.parametrize(
        "name",
        [
            *(
                "embed_tokens.weight",
                "model.embed_tokens.weight",
                "lm_head.weight",
                "embed_proj.weight",
                "prefix_gru.weight_ih_l0",
            ),
            *("layers.2.input_layernorm.weight", "layers.0.self_attn.q_proj.bias", "midlayers.0.norm.weight", "mask_embedding"),
            *("encoder.norm.weight", "model.model.norm.weight", "candidate_selector.weight", "model.vision_tower.patch.weight"),
            *("t2d", "d2t", "x\ny" * 99),
        ],
    )
    def test_unknown_tensors(self, tmp_path, rng, name):
        write(tmp_path, random_tensors(rng) | {name: np.ones(2, np.float32)})
        shown = repr(name if len(name) <= 120 else name[:117] + "...")
        assert rejected(tmp_path).startswith(f"{tmp_path}: tensors do not fit config.json: 1 unknown: {shown}")

    @pytest.mark.parametrize("name", [*GLOBAL_SHAPES, *(f"layers.1.{name}" for name in LAYER_SHAPES)])
    def test_every_tensor_must_be_there(self, tmp_path, rng, name):
        tensors = random_tensors(rng)
        del tensors[name]
        assert rejected(write(tmp_path, tensors)) == f"{tmp_path}: tensors do not fit config.json: 1 missing: {name!r}"

    def test_biases_must_be_there_if_the_config_says_so(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng), attention_bias=True)
        rejected(tmp_path, "8 missing: 'layers.0.self_attn.k_proj.bias'")


class TestRejects:
    def test_shapes_and_dtypes(self, tmp_path, rng):
        tensors = random_tensors(rng)
        tensors["model.fc.weight"] = tensors.pop("fc.weight").T.copy()
        tensors["norm.weight"] = tensors["norm.weight"].astype(np.float16)
        write(tmp_path, tensors)
        rejected(
            tmp_path,
            "1 with the wrong shape: 'model.fc.weight' is [32, 16], expected [16, 32]",
            "1 with the wrong dtype: 'norm.weight' is F16, expected BF16 or F32",
        )

    def test_a_config_larger_than_the_file(self, tmp_path, rng):
        """Nothing of the claimed size is allocated."""
        write(tmp_path, random_tensors(rng), vocab_size=2**31 - 1, intermediate_size=2**31 - 1, num_hidden_layers=4096)
        rejected(tmp_path, "61410 missing", f"expected [{2**31 - 1}, 16]")

    def test_quantised_weights(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng) | {"layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)})
        rejected(tmp_path, "quantised weights are not supported ('layers.0.mlp.up_proj.weight_scale')")

    def test_directories_and_configs(self, tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'none'}: no such directory")):
            read_draft_config(tmp_path / "none")
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'config.json'}: no such file")):
            read_draft_config(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "muse_spark_text"}')
        with pytest.raises(ConfigError, match="model_type = 'muse_spark_text': only 'qwen3' is supported for a draft"):
            read_draft_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config_json()))
        rejected(tmp_path, f"{tmp_path}: no model.safetensors and no model.safetensors.index.json")


class TestMaskEmbedding:
    @pytest.mark.parametrize("shape", [(), (1,)])
    @pytest.mark.parametrize("stored", [BF16, F32])
    def test_is_a_parameter(self, tmp_path, rng, stored, shape):
        tensors, embedding = random_tensors(rng), rng.standard_normal(16, np.float32).astype(stored)
        write_mask(write(tmp_path, tensors), {"embedding": embedding, "mask_token_id": np.full(shape, 39, np.int64)})
        (tmp_path / "mask_embedding.pt").write_bytes(b"\x80\x04.")  # beside the other file it is not needed
        config = read_draft_config(tmp_path)
        assert config.has_mask_embedding
        params, report = load(tmp_path)
        assert_same(by_name(params, config), tensors | {"mask_embedding": embedding.astype(F32)})
        assert (report.num_tensors, len(report.dtypes)) == (len(tensors) + 1, 1 if stored == F32 else 2)

    def test_a_config_that_does_not_know_of_it(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng))
        config = read_draft_config(tmp_path)
        write_mask(tmp_path, {"embedding": np.ones(16, np.float32), "mask_token_id": np.int64(39)[None]})
        with pytest.raises(CheckpointError, match="1 unknown: 'embedding'"):
            HFReader(tmp_path, config)
        config = read_draft_config(tmp_path)
        (tmp_path / "mask_embedding.safetensors").unlink()
        with pytest.raises(CheckpointError, match="1 missing: 'mask_embedding'"):
            HFReader(tmp_path, config)

    def test_pickles_are_never_opened(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "mask_embedding.pt"
        os.mkfifo(path)  # opening it would wait for a writer
        message = (
            f"{path}: a pickle, which is never opened; store it as mask_embedding.safetensors with the tensors "
            "'embedding' [hidden_size] and 'mask_token_id' (I64)"
        )
        assert rejected(tmp_path) == message
        with pytest.raises(CheckpointError, match=re.escape(message)):
            HFReader(tmp_path, DraftConfig.from_hf(config_json()))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mask_token_id": np.array([38])}, "mask_token_id = 38, config.json has 39"),
            ({"mask_token_id": np.array([39, 39])}, "'mask_token_id' is I64 [2]; expected one I64 number"),
            ({"mask_token_id": np.array([39], np.int32)}, "'mask_token_id' is I32 [1]; expected one I64 number"),
            ({"mask_token_id": np.array([[39]])}, "'mask_token_id' is I64 [1, 1]; expected one I64 number"),
            ({"per_position": np.ones((7, 16), np.float32)}, "'per_position'; expected 'embedding' and 'mask_token_id' and no"),
            ({"mask_token_id": None}, "has 'embedding'; expected 'embedding' and 'mask_token_id' and no others"),
            ({"embedding": None}, "has 'mask_token_id'; expected 'embedding' and 'mask_token_id' and no others"),
            ({"embedding": np.ones((1, 16), np.float32)}, "'embedding' is [1, 16], expected [16]"),
            ({"embedding": np.ones(16, np.float16)}, "'embedding' is F16"),
        ],
        ids=str,
    )
    def test_one_that_does_not_fit(self, tmp_path, rng, change, message):
        tensors = {"embedding": np.ones(16, np.float32), "mask_token_id": np.array([39])} | change
        write_mask(write(tmp_path, random_tensors(rng)), {k: v for k, v in tensors.items() if v is not None})
        rejected(tmp_path, message)

    def test_a_file_of_another_form(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "mask_embedding.safetensors"
        path.write_bytes(b"\x80\x04.")
        rejected(tmp_path, f"{path}: ")


class TestSave:
    @pytest.mark.parametrize("mask", [False, True])
    @pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_round_trip_is_bitwise(self, tmp_path, rng, dtype, max_shard_bytes, mask):
        first, second = tmp_path / "first", tmp_path / "second"
        write(first, random_tensors(rng, dtype, bias=True), dtype=dtype.name, attention_bias=True)
        if mask:
            write_mask(first, {"embedding": np.ones(16, dtype), "mask_token_id": np.array([39])})
        params, _ = load(first, dtype)
        source = config_json(dtype.name, attention_bias=True)
        save_draft(params, source, second, dtype=dtype, max_shard_bytes=max_shard_bytes)
        assert json.loads((second / "config.json").read_text()) == source
        assert (second / "model.safetensors").exists() == (max_shard_bytes == 10**9)
        config = read_draft_config(second)
        assert config == read_draft_config(first) and config.has_mask_embedding == mask
        assert_same(by_name(load(second, dtype)[0], config), by_name(params, config))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]

    def test_published_names(self, tmp_path, rng):
        tensors = random_tensors(rng)
        params, _ = load(write(tmp_path, {ALIASES["all of them"](name): tensor for name, tensor in tensors.items()}))
        save_draft(params, config_json(), tmp_path, dtype=F32)
        assert_same(load_file(tmp_path / "model.safetensors"), tensors)

    def test_mask_embedding_file(self, tmp_path, rng):
        params, _ = load(write(tmp_path, random_tensors(rng)))
        save_draft(params | {"mask_embedding": jnp.arange(16.0)}, config_json(), tmp_path, dtype=F32)
        stored = load_file(tmp_path / "mask_embedding.safetensors")
        expected = {"embedding": np.arange(16, dtype=np.float32), "mask_token_id": np.array(39, np.int64)}
        assert_same(stored, expected)

    def test_replaces_a_draft_and_nothing_else(self, tmp_path, rng):
        """A mask embedding left behind would become the new draft's."""
        params, _ = load(write(tmp_path, random_tensors(rng)))
        save_draft(params | {"mask_embedding": jnp.ones(16)}, config_json(), tmp_path, dtype=F32, max_shard_bytes=4000)
        (tmp_path / "mask_embedding.pt").touch()
        (tmp_path / "README.md").touch()
        save_draft(params, config_json(), tmp_path, dtype=F32)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert not read_draft_config(tmp_path).has_mask_embedding
        load(tmp_path)

    @pytest.mark.parametrize("call", range(1, 20))
    def test_interrupted_save_leaves_the_old_one_or_nothing(self, tmp_path, rng, interrupted, call):
        old, _ = load(write(tmp_path / "source", random_tensors(rng)))
        old["mask_embedding"] = jnp.ones(16)
        new = jax.tree.map(lambda leaf: -leaf, old)
        out = tmp_path / "out"
        save_draft(old, config_json(), out, dtype=F32)
        with interrupted(call) as calls, contextlib.suppress(KeyboardInterrupt):
            save_draft(new, config_json(), out, dtype=F32)
        finished = calls() < call
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
        try:
            config = read_draft_config(out)
        except CheckpointError as error:
            assert "config.json: no such file" in str(error) and not finished
        else:
            assert config.has_mask_embedding
            loaded = by_name(load(out)[0], config)
            trees = [by_name(tree, config) for tree in ([new] if finished else [old, new])]
            assert any(all(np.array_equal(loaded[name], tree[name]) for name in tree) for tree in trees)

    def test_what_does_not_fit_is_refused(self, tmp_path, rng):
        params, _ = load(write(tmp_path / "source", random_tensors(rng)))
        out = tmp_path / "out"

        def refused(match, changed=None, config=None, dtype=F32):
            with pytest.raises(ValueError, match=match):
                save_draft(params if changed is None else changed, config or config_json(), out, dtype=dtype)
            assert not out.exists()

        refused("params: 1 missing: 'fc'", {name: leaf for name, leaf in params.items() if name != "fc"})
        refused("params: 1 unknown: 'lm_head'", params | {"lm_head": jnp.ones(2)})
        refused(r"params: fc is \[32, 16\], expected \[16, 32\]", params | {"fc": params["fc"].T})
        refused(r"params: mask_embedding is \[1, 16\], expected \[16\]", params | {"mask_embedding": jnp.ones((1, 16))})
        refused("config.json has dtype 'float32' but the tensors are to be stored as bfloat16", dtype=BF16)
        refused("float16: allowed are bfloat16 and float32", dtype=np.float16)
        refused("model_type = 'llama'", config={"model_type": "llama"})


@pytest.mark.parity
class TestDFlash:
    """The same directories as the dflash package."""

    @staticmethod
    def model(rng, dtype, bias):
        torch = pytest.importorskip("torch")
        dflash = pytest.importorskip("dflash.model")
        config = dflash.Qwen3Config(**config_json(dtype, attention_bias=bias))
        model = dflash.DFlash2DraftModel(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.from_numpy(rng.standard_normal(tuple(tensor.shape), np.float32)))
        return dflash, model

    @staticmethod
    def state(model):
        """Its tensors by their published names."""
        import torch

        def array(tensor):
            bits = tensor.detach().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach()
            return bits.numpy().view(BF16 if tensor.dtype == torch.bfloat16 else F32)

        return {re.sub(r"(codebook)\.weight$", r"\1", name): array(tensor) for name, tensor in model.state_dict().items()}

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("bias", [False, True])
    def test_loads_what_dflash_saves(self, tmp_path, rng, bias, dtype):
        _, model = self.model(rng, dtype, bias)
        model.save_pretrained(tmp_path)
        assert f"{CODEBOOKS[0]}.weight" in load_file(tmp_path / "model.safetensors")
        config = read_draft_config(tmp_path)
        params, _ = load(tmp_path, jnp.dtype(dtype))
        assert_same(by_name(params, config), self.state(model))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
    def test_dflash_loads_what_is_saved(self, tmp_path, rng, max_shard_bytes, dtype):
        dflash, model = self.model(rng, dtype, bias=True)
        first, second = tmp_path / "first", tmp_path / "second"
        model.save_pretrained(first)
        params, _ = load(first, jnp.dtype(dtype))
        source = json.loads((first / "config.json").read_text())
        save_draft(params, source, second, dtype=dtype, max_shard_bytes=max_shard_bytes)
        loaded, info = dflash.DFlash2DraftModel.from_pretrained(second, dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        assert_same(self.state(loaded), self.state(model))
