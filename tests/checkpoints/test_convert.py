"""Conversion between formats: the same bytes by every way, after every interruption, or one line and nothing."""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import random_weights
from safetensors import deserialize
from safetensors.numpy import save_file

import checkpoints.packed
import muse_jax
from checkpoints import (
    CheckpointError,
    convert,
    load_params,
    open_reader,
    read_config,
    read_draft_config,
    save_draft,
    sharded_put,
)
from checkpoints.convert import Options
from checkpoints.journal import working_directory
from checkpoints.manifest import read_manifest
from muse_jax import nvfp4
from muse_jax.config import TINY, MLPKind, default_layer_types, default_layer_uses_rope
from muse_jax.layout import packed_tensors

REPOSITORY = Path(__file__).resolve().parents[2]
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
# Three sparse layers, of which the middle one may be NVFP4, and a dense one. Rows of tiles are ragged: 72 = 64 + 8 rows, and
# 80 bf16 values = 128 + 32 bytes; two KV heads are fewer than eight ranks.
CONFIG = dataclasses.replace(
    TINY,
    vocab_size=72,
    hidden_size=80,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=144,
    moe_hidden_size=96,
    moe_intermediate_size=32,
    num_local_experts=3,
    num_experts_per_tok=2,
    layer_types=default_layer_types(4),
    layer_uses_rope=default_layer_uses_rope(4),
    mlp_layer_types=(MLPKind.SPARSE, MLPKind.SPARSE, MLPKind.DENSE, MLPKind.SPARSE),
    dtype="bfloat16",
)
NVFP4 = dataclasses.replace(CONFIG, nvfp4_layers=(1,))
EXPERTS = "model.language_model.layers.1.mlp.experts"
TOWERS = {"model.vision_tower.patch.weight": np.ones((3, 2), np.float32), "model.audio_tower.steps": np.array(7, np.int64)}
PACKED = [Options("packed", tp) for tp in (1, 2, 4, 8)]
FORMATS = [Options("hf"), Options("orbax"), *PACKED]


def config_json(config):
    names = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
        moe_hidden_size moe_intermediate_size num_local_experts num_experts_per_tok sliding_window output_multiplier dtype"""
    fields = {name: getattr(config, name) for name in names.split()}
    return {
        "model_type": "muse_spark_text",
        "mlp_layer_types": [str(kind) for kind in config.mlp_layer_types],
        "eos_token_id": list(config.eos_token_ids),
        **fields,
    }


def random_tensors(rng, config, dtype=BF16):
    return random_weights.random_tensors(rng, config, dtype)


def write(directory, tensors, config=CONFIG):
    """An HF directory as the safetensors library writes it, with a tokenizer file that nobody reads here."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1]}')
    (directory / "secret.py").write_text("raise SystemExit")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def split_experts(tensors):
    """The same weights with a tensor for each expert and projection, as ModelOpt names those of NVFP4."""
    tensors = dict(tensors)
    for layer in (0, 1, 3):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        for stack, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for suffix, ending in (
                ("", "weight"),
                ("_weight_scale", "weight_scale"),
                ("_weight_scale_2", "weight_scale_2"),
                ("_input_scale", "input_scale"),
            ):
                whole = tensors.pop(f"{prefix}.{stack}{suffix}", None)
                for e in range(0 if whole is None else len(whole)):
                    parts = np.split(whole[e], 2) if len(projections) == 2 else [whole[e]]
                    for projection, part in zip(projections, parts, strict=True):
                        scalar = ending in ("weight_scale_2", "input_scale")
                        tensors[f"{prefix}.{e}.{projection}.{ending}"] = (
                            np.array(part).reshape(()) if scalar else np.ascontiguousarray(part)
                        )
    return tensors


def run(source, target, options, **kwargs):
    return convert.convert(convert.plan(source, target, options), **kwargs)


def load_file(path):
    """Tensors by name, as the safetensors library finds them; it has no numpy dtype for F8_E4M3."""
    dtypes = {"BF16": BF16, "F32": F32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64}
    found = deserialize(path.read_bytes())
    return {name: np.frombuffer(t["data"], dtypes[t["dtype"]]).reshape(t["shape"]) for name, t in found}


def files(directory):
    """Every file under a directory by its relative name."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assert_same_tensors(directory, tensors):
    found = load_file(directory / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def nothing_left(target):
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir() if target.name in path.name] == []


@pytest.fixture
def source(tmp_path, rng):
    return write(tmp_path / "source", random_tensors(rng, NVFP4) | TOWERS, NVFP4)


class TestRoundTrips:
    @pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.to}{o.tp or ''}")
    @pytest.mark.parametrize("config", [CONFIG, NVFP4], ids=["bf16", "nvfp4"])
    def test_every_text_tensor_is_byte_identical(self, tmp_path, rng, config, options):
        tensors = random_tensors(rng, config)
        source = write(tmp_path / "source", tensors | TOWERS, config)
        result = run(source, tmp_path / "middle", options, verify=True)
        assert result.verified_tensors == len(tensors)
        run(tmp_path / "middle", tmp_path / "back", Options("hf"), verify=True)
        assert_same_tensors(tmp_path / "back", tensors)
        assert {name for name in tensors if name.endswith("_input_scale")} == (
            set() if config is CONFIG else {f"{EXPERTS}.gate_up_proj_input_scale", f"{EXPERTS}.down_proj_input_scale"}
        )
        for name in ("config.json", "generation_config.json"):
            assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
        assert not (tmp_path / "back" / "secret.py").exists()
        manifest = read_manifest(tmp_path / "middle")
        assert manifest.not_carried["tensors"] == 2
        assert manifest.not_carried["families"] == ["model.audio_tower", "model.vision_tower"]
        assert manifest.not_carried["files"] == ["secret.py"]
        assert manifest.source == {"format": "hf", "name": "source", "revision": None}
        back = read_manifest(tmp_path / "back")
        assert (back.source, back.weights_sha256) == (manifest.source, manifest.weights_sha256)
        assert back.not_carried == manifest.not_carried | {"files": []}
        nothing_left(tmp_path / "other")

    @pytest.mark.parametrize("config", [CONFIG, NVFP4], ids=["bf16", "nvfp4"])
    def test_stacked_and_per_expert_sources_are_the_same_weights(self, tmp_path, rng, config):
        tensors = random_tensors(rng, config)
        write(tmp_path / "a", tensors, config)
        write(tmp_path / "b", split_experts(tensors), config)
        assert read_config(tmp_path / "b").nvfp4_layers == config.nvfp4_layers
        one, other = (run(tmp_path / name, tmp_path / f"{name}.hf", Options("hf")).manifests[""] for name in "ab")
        assert one.weights_sha256 == other.weights_sha256
        assert_same_tensors(tmp_path / "b.hf", tensors)

    def test_a_checksum_is_that_of_the_tensor(self, tmp_path, rng, source):
        manifest = run(source, tmp_path / "packed", Options("packed", 2)).manifests[""]
        for name, tensor in load_file(source / "model.safetensors").items():
            if name not in TOWERS:
                assert manifest.tensors[name].sha256 == hashlib.sha256(tensor.tobytes()).hexdigest()

    @pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.to}{o.tp or ''}")
    def test_gates_stored_as_bf16_stay_bf16(self, tmp_path, rng, options):
        """The packed layout holds them as fp32; the way back knows what they were."""
        tensors = {name: tensor.astype(BF16) for name, tensor in random_tensors(rng, CONFIG).items()}
        run(write(tmp_path / "source", tensors), tmp_path / "middle", options)
        run(tmp_path / "middle", tmp_path / "back", Options("hf"))
        assert_same_tensors(tmp_path / "back", tensors)

    def test_fp32_that_packed_would_round_is_refused(self, tmp_path, rng):
        source = write(tmp_path / "source", random_tensors(rng, CONFIG, F32))  # config.json says bfloat16
        with pytest.raises(CheckpointError, match="is float32 and would be rounded to bfloat16"):
            convert.plan(source, tmp_path / "packed", Options("packed", 1))

    @pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.to}{o.tp or ''}")
    @pytest.mark.parametrize("mask", [False, True])
    def test_draft(self, tmp_path, small_draft_json, small_draft_params, rng, options, mask):
        params = dict(small_draft_params)
        if mask:
            params["mask_embedding"] = rng.standard_normal(small_draft_json["hidden_size"], np.float32)
        save_draft(params, small_draft_json, tmp_path / "source", dtype=np.float32)
        run(tmp_path / "source", tmp_path / "middle", options, verify=True)
        assert read_draft_config(tmp_path / "middle").has_mask_embedding == mask
        run(tmp_path / "middle", tmp_path / "back", Options("hf"))
        for path in (tmp_path / "source").glob("*.safetensors"):
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()

    def test_a_target_takes_its_draft_along_and_answers_the_same(self, tmp_path, draft_checkpoint):
        run(draft_checkpoint, tmp_path / "packed", Options("packed", 2))
        texts = []
        for path, mesh in ((draft_checkpoint, None), (tmp_path / "packed", muse_jax.sharding.make_mesh(2))):
            muse = muse_jax.load(path, mesh=mesh, prefill_chunk=64)
            assert muse.model.speculation == "tree"
            texts.append("".join(muse.generate("One two", max_new_tokens=24)))
        assert texts[0] == texts[1]


class TestQuantize:
    def test_tensors_metadata_and_report(self, tmp_path, rng):
        tensors = random_tensors(rng, CONFIG)
        made = convert.plan(write(tmp_path / "source", tensors), tmp_path / "nvfp4", Options("hf", quantize="nvfp4"))
        result = convert.convert(made, verify=True)
        config = read_config(tmp_path / "nvfp4")  # a disagreement of metadata and tensors would warn
        assert config.nvfp4_layers == (1,)
        found = load_file(tmp_path / "nvfp4" / "model.safetensors")
        for name, tensor in tensors.items():
            if not name.startswith(f"{EXPERTS}.") or "norm" in name:
                assert found[name].tobytes() == tensor.tobytes()
        for stack, halves in (("gate_up_proj", 2), ("down_proj", 1)):
            whole = tensors[f"{EXPERTS}.{stack}"]
            shape = (len(whole), halves, -1, whole.shape[-1]) if halves == 2 else whole.shape
            packed = nvfp4.quantize(whole.reshape(shape), stack)
            for suffix, field in (
                ("", packed.codes),
                ("_weight_scale", packed.block_scales),
                ("_weight_scale_2", packed.global_scale),
                ("_input_scale", packed.input_scale),
            ):
                assert found[f"{EXPERTS}.{stack}{suffix}"].tobytes() == field.tobytes(), (stack, suffix)
            expected = nvfp4.quantization_error(whole.reshape(shape), packed)
            report = result.manifests[""].tensors[f"{EXPERTS}.{stack}"].quantization
            assert report["relative_rms"] == pytest.approx(expected.relative_rms, rel=1e-5)  # summed in another order
            assert report["worst_block"] == expected.worst_block
            assert tuple(report["worst_block_index"]) == expected.worst_block_index
            assert report["saturated"] == expected.saturated
        raw = json.loads((tmp_path / "nvfp4" / "config.json").read_text())
        assert raw["quantization_config"]["quant_algo"] == "NVFP4"
        assert json.loads((tmp_path / "nvfp4" / "hf_quant_config.json").read_text())["quantization"]["group_size"] == 16

    def test_straight_to_packed_is_the_same(self, tmp_path, rng):
        source = write(tmp_path / "source", random_tensors(rng, CONFIG))
        one = run(source, tmp_path / "hf", Options("hf", quantize="nvfp4")).manifests[""]
        other = run(source, tmp_path / "packed", Options("packed", 2, "nvfp4")).manifests[""]
        assert one.weights_sha256 == other.weights_sha256
        reports = [{name: entry.quantization for name, entry in manifest.tensors.items()} for manifest in (one, other)]
        assert reports[0] == reports[1]
        assert json.loads((tmp_path / "packed" / "muse_manifest.json").read_text())["tensors"][f"{EXPERTS}.down_proj"][
            "quantization"
        ]

    def test_nan_leaves_nothing(self, tmp_path, rng):
        tensors = random_tensors(rng, CONFIG)
        tensors[f"{EXPERTS}.down_proj"][2, 5, 7] = np.nan
        source = write(tmp_path / "source", tensors)
        with pytest.raises(CheckpointError, match=r"down_proj\[2\] holds NaN"):
            run(source, tmp_path / "nvfp4", Options("hf", quantize="nvfp4"))
        nothing_left(tmp_path / "nvfp4")

    def test_refused_sources(self, tmp_path, rng, source, small_draft_json, small_draft_params):
        save_draft(small_draft_params, small_draft_json, tmp_path / "draft", dtype=np.float32)
        few = dataclasses.replace(CONFIG, mlp_layer_types=(MLPKind.SPARSE, MLPKind.DENSE, MLPKind.DENSE, MLPKind.SPARSE))
        write(tmp_path / "few", random_tensors(rng, few), few)
        for directory, message in (
            (source, "not NVFP4 yet"),
            (tmp_path / "draft", "is for targets"),
            (tmp_path / "few", "needs a sparse layer between two others"),
        ):
            with pytest.raises(CheckpointError, match=message):
                convert.plan(directory, tmp_path / "out", Options("hf", quantize="nvfp4"))


class TestDestination:
    def test_what_is_there_stays(self, tmp_path, source):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        with pytest.raises(CheckpointError, match="out: exists; choose another destination"):
            run(source, tmp_path / "out", Options("hf"))
        assert files(tmp_path / "out") == {"mine": b"mine"}

    def test_empty_directory_and_new_parents(self, tmp_path, source):
        (tmp_path / "empty").mkdir()
        run(source, tmp_path / "empty", Options("hf"))
        run(source, tmp_path / "new" / "parents" / "out", Options("hf"))
        assert files(tmp_path / "empty") == files(tmp_path / "new" / "parents" / "out")

    @pytest.mark.parametrize("target", ["source", "source/inside", "."])
    def test_source_and_destination_in_each_other(self, tmp_path, source, target):
        with pytest.raises(CheckpointError, match="must not lie one in the other"):
            convert.plan(source, tmp_path / target, Options("hf"))

    @pytest.mark.parametrize(
        ("options", "message"),
        [(("zip",), "to = 'zip'"), (("hf", 2), "tp = 2"), (("packed",), "tp = None"), (("packed", 3), "tp = 3"),
         (("hf", None, "int4"), "quantize = 'int4'")],
    )  # fmt: skip
    def test_options(self, options, message):
        with pytest.raises(CheckpointError, match=message):
            Options(*options)

    @pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.to}{o.tp or ''}")
    def test_bytes_are_counted_before(self, tmp_path, source, options):
        made = convert.plan(source, tmp_path / "out", options)
        assert made.bytes_in == sum(t.nbytes for n, t in load_file(source / "model.safetensors").items() if n not in TOWERS)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
        convert.convert(made)
        text = (".json", ".jinja", ".md")
        written = sum(len(data) for name, data in files(tmp_path / "out").items() if not name.endswith(text))
        if options.to == "orbax":  # its own metadata is small, and not counted
            assert made.bytes_out <= written + 4096
        else:
            assert written == made.bytes_out

    def test_disk_too_small(self, tmp_path, source, monkeypatch):
        needed = convert.plan(source, tmp_path / "out", Options("hf")).bytes_out
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed + 1000))
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        assert not made.fits
        with pytest.raises(CheckpointError, match=f"needs {needed} bytes"):
            convert.convert(made)
        nothing_left(tmp_path / "out")

    @pytest.mark.parametrize("kind", ["outside", "inside", "cache"])
    def test_links_among_the_files_that_are_copied(self, tmp_path, source, kind):
        """A checkpoint from a stranger must not bring a file of this machine into the result."""
        if kind == "cache":  # as the Hugging Face cache links every file
            home = tmp_path / "models--a--b"
            (home / "snapshots").mkdir(parents=True)
            source = source.rename(home / "snapshots" / ("0123456789" * 4))
        place = {"outside": tmp_path / "secret", "inside": source / "text", "cache": tmp_path / "models--a--b" / "blobs" / "1"}
        place[kind].parent.mkdir(exist_ok=True)
        place[kind].write_text("text")
        (source / "README.md").symlink_to(place[kind])
        if kind == "outside":
            with pytest.raises(CheckpointError, match=r"README\.md: a link out of the checkpoint"):
                run(source, tmp_path / "out", Options("hf"))
            return nothing_left(tmp_path / "out")
        run(source, tmp_path / "out", Options("hf"))
        assert (tmp_path / "out" / "README.md").read_text() == "text" and not (tmp_path / "out" / "README.md").is_symlink()
        revision = "0123456789" * 4 if kind == "cache" else None
        assert read_manifest(tmp_path / "out").source["revision"] == revision

    def test_second_conversion_to_the_same_place(self, tmp_path, source):
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        with working_directory(made.partial, convert._conversion(made), resume=False):
            for resume in (False, True):
                with pytest.raises(CheckpointError, match="another conversion is writing there"):
                    convert.convert(made, resume=resume)
        assert (made.partial / "journal.jsonl").exists()

    def test_a_file_system_without_locks(self, tmp_path, source, monkeypatch):
        def refuse(*_):
            raise OSError(errno.ENOSYS, "no locks")

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.warns(UserWarning, match="its file system has no locks"):
            run(source, tmp_path / "out", Options("hf"))

    def test_link_to_a_directory_and_mount_point(self, tmp_path, source, monkeypatch):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        run(source, tmp_path / "link", Options("hf"))
        assert (tmp_path / "real" / "model.safetensors").exists() and (tmp_path / "link").is_symlink()
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
        with pytest.raises(CheckpointError, match="mount: a mount point"):
            run(source, tmp_path / "mount", Options("hf"))
        with pytest.raises(CheckpointError, match=r"config\.json is no directory"):
            convert.plan(source, tmp_path / "real" / "config.json" / "out", Options("hf"))


class TestResume:
    """Interrupted at every write, sync and rename in turn, then resumed: the files of an uninterrupted run."""

    @pytest.mark.parametrize(
        "options", [Options("hf"), Options("packed", 2), Options("hf", quantize="nvfp4")], ids=["hf", "packed", "quantize"]
    )
    def test_every_moment(self, tmp_path, rng, monkeypatch, options):
        source = write(tmp_path / "source", random_tensors(rng, CONFIG))
        made = convert.plan(source, tmp_path / "whole", options)
        convert.convert(made)
        expected = files(tmp_path / "whole")
        monkeypatch.setattr(convert, "_SYNC_BYTES", 1 << 14)  # several lines in the journal
        calls = (("write_exactly", "checkpoints.hf_sink"), ("write_exactly", "checkpoints.packed"), ("fsync", "os"),
                 ("rename", "os"))  # fmt: skip

        def interrupted_at(moment, resume):
            count = 0
            with monkeypatch.context() as patch:
                for name, module in calls:
                    inner = getattr(sys.modules[module], name)

                    def stopping(*args, inner=inner):
                        nonlocal count
                        count += 1
                        if count == moment:
                            raise KeyboardInterrupt
                        return inner(*args)

                    patch.setattr(sys.modules[module], name, stopping)
                made = convert.plan(source, tmp_path / "out", options)
                convert.convert(made, resume=resume, workers=1)

        moment, completed = 1, False
        while not completed:
            try:
                interrupted_at(moment, False)
                completed = True
            except KeyboardInterrupt:
                assert not (tmp_path / "out").exists() or files(tmp_path / "out") == expected
                if not (tmp_path / "out").exists():
                    if (tmp_path / ".out.partial").exists():  # else it was over before it began
                        with pytest.raises(CheckpointError, match="an unfinished conversion"):
                            run(source, tmp_path / "out", options)
                    run(source, tmp_path / "out", options, resume=True, workers=1)
            assert files(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
            shutil.rmtree(tmp_path / ".out.partial", ignore_errors=True)
            moment += max(1, moment // 6)  # every one of the first, then fewer
        assert moment > 60

    def test_work_is_not_repeated(self, tmp_path, source, monkeypatch):
        monkeypatch.setattr(convert, "_SYNC_BYTES", 1)
        inner, names = convert._convert_tensor, []

        def stopping(reader, sink, spec, *args):
            if spec.path == ("lm_head",) and not names:
                raise KeyboardInterrupt
            if names:
                names.append(spec.name)
            return inner(reader, sink, spec, *args)

        monkeypatch.setattr(convert, "_convert_tensor", stopping)
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        with pytest.raises(KeyboardInterrupt):
            convert.convert(made, workers=1)
        noted = {json.loads(line)["name"] for line in (made.partial / "journal.jsonl").read_text().splitlines()[1:]}
        names.append("now they are listed")
        result = convert.convert(made, resume=True, workers=1)
        assert set(names[1:]) == {spec.name for spec in made.parts[0].reader.specs} - noted
        assert noted and 0 < result.resumed_bytes < made.bytes_in

    def partial(self, tmp_path, source):
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        with working_directory(made.partial, convert._conversion(made), resume=False):
            pass
        return made.partial

    def test_other_options_or_source_are_refused(self, tmp_path, source):
        self.partial(tmp_path, source)
        (source / "download.lock").write_text("not read")
        os.utime(source / "config.json", ns=(1, 1))
        run(source, tmp_path / "out", Options("hf"), resume=True)
        shutil.rmtree(tmp_path / "out")
        self.partial(tmp_path, source)
        for options, other in ((Options("packed", 1), "'to', 'tp'"), (Options("orbax"), "'to'")):
            with pytest.raises(CheckpointError, match=f"belongs to another conversion .other {other}.: repeat that one"):
                run(source, tmp_path / "out", options, resume=True)
        (source / "generation_config.json").write_text("{}")
        os.utime(source / "model.safetensors", ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"other 'generation_config\.json', 'model\.safetensors'"):
            run(source, tmp_path / "out", Options("hf"), resume=True)

    def test_a_disk_that_fails_for_a_moment(self, tmp_path, source, monkeypatch):
        """The source cannot be read in the middle: what was written stays."""
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        inner = convert._convert_tensor

        def failing(reader, sink, spec, *args):
            if spec.path == ("final_norm",):
                (source / "model.safetensors").rename(source / "gone")
            return inner(reader, sink, spec, *args)

        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="cannot be read"):
            patch.setattr(convert, "_convert_tensor", failing)
            convert.convert(made, workers=1)
        assert (made.partial / "journal.jsonl").exists()
        (source / "gone").rename(source / "model.safetensors")
        run(source, tmp_path / "out", Options("hf"), resume=True, verify=True)

    @pytest.mark.parametrize("keep", [0, 5, -1])
    def test_journal_cut_anywhere(self, tmp_path, source, keep):
        path = self.partial(tmp_path, source) / "journal.jsonl"
        text = path.read_text() + '{"part": "", "name": "lm_head.weig'
        path.write_text(text[: keep % (len(text) + 1)])
        run(source, tmp_path / "out", Options("hf"), resume=True, verify=True)

    @pytest.mark.parametrize("options", [Options("hf"), Options("packed", 2), Options("orbax")], ids=lambda o: o.to)
    @pytest.mark.parametrize("damage", ["bits", "files", "data", "metadata", "journal"])
    def test_damaged_in_between(self, tmp_path, source, monkeypatch, options, damage):
        """What was finished and is damaged before the resumption is made again, in at most two runs."""
        made = convert.plan(source, tmp_path / "out", options)
        inner = os.rename
        monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("the disk is away")))
        with pytest.raises(OSError, match="the disk is away"):
            convert.convert(made)
        monkeypatch.setattr(os, "rename", inner)
        data = made.partial / "data"
        files = [path for path in data.rglob("*") if path.is_file() and path.name.startswith(("model", "rank", "c."))]
        if damage == "bits":
            for path in files:
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
        elif damage == "files":
            files[0].unlink()
            (data / "config.json").write_text("{}")
        elif damage == "data":
            shutil.rmtree(data)
        elif damage == "metadata":
            for path in data.rglob("zarr.json"):
                path.write_text("{")
        else:
            text = (made.partial / "journal.jsonl").read_text().splitlines(keepends=True)
            (made.partial / "journal.jsonl").write_text("".join([*text[:3], text[3][:20] + "\n", *text[4:]]))
        if damage == "bits":
            with pytest.raises(convert.MismatchError, match="--resume makes it right"):
                convert.convert(made, resume=True, verify=True)
        convert.convert(made, resume=True, verify=True)
        assert not made.partial.exists()

    @pytest.mark.parametrize("to", [["hf"], ["packed", "--tp", "4"], ["orbax"]], ids=lambda to: to[0])
    def test_killed(self, tmp_path, rng, to):
        """kill -9 of the script at random moments."""
        big = dataclasses.replace(CONFIG, vocab_size=40_000, hidden_size=400, head_dim=50)
        source = write(tmp_path / "source", random_tensors(rng, big), big)
        command = [sys.executable, REPOSITORY / "scripts" / "convert_checkpoint.py", source, tmp_path / "out", "--to", *to]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        for _ in range(3):
            child = subprocess.Popen(
                [*command, "--resume"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            deadline = time.monotonic() + 60
            while not (tmp_path / ".out.partial" / "data").exists() and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(float(rng.uniform(0, 0.15)))
            child.kill()
            child.wait()
        done = subprocess.run([*command, "--resume", "--json"], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        made = convert.plan(source, tmp_path / "out", Options(to[0], int(to[2]) if len(to) > 1 else None))
        assert convert.verify_published(made) == len(made.parts[0].reader.specs)
        assert not (tmp_path / ".out.partial").exists()


class TestVerify:
    @pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.to}{o.tp or ''}")
    def test_a_flipped_bit_is_found(self, tmp_path, source, rng, options):
        made = convert.plan(source, tmp_path / "out", options)
        convert.convert(made)
        convert.verify_published(made)
        pattern = {"hf": "*.safetensors", "packed": "*.bin", "orbax": "*gate_up*/**/*"}[options.to]
        victims = [path for path in (tmp_path / "out").glob(pattern) if path.is_file() and path.suffix != ".json"]
        path = victims[int(rng.integers(len(victims)))]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # of the last tensor, in any format
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as error:
            convert.verify_published(made)
        assert "\n" not in str(error.value)

    def test_a_flipped_bit_in_a_copy_that_is_not_read(self, tmp_path, source):
        """The router is in every rank's file, and loading takes it from the first."""
        made = convert.plan(source, tmp_path / "out", Options("packed", 4))
        convert.convert(made)
        tensor = next(tensor for tensor in packed_tensors(NVFP4, 4) if tensor.spec.path[-1] == "router")
        path = tmp_path / "out" / "rank-3-of-4.bin"
        data = bytearray(path.read_bytes())
        data[tensor.offset + 5] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rank-3-of-4\.bin: .*mlp\.gate\.weight does not have the checksum"):
            convert.verify_published(made)

    def test_found_before_publishing(self, tmp_path, source, monkeypatch):
        """A bad tensor is made again by --resume, and no other."""
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        inner = convert._write_rest

        def damaging(made, part, directory, entries):
            data = bytearray((directory / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (directory / "model.safetensors").write_bytes(data)
            return inner(made, part, directory, entries)

        monkeypatch.setattr(convert, "_write_rest", damaging)
        with pytest.raises(convert.MismatchError, match="does not have the checksum of its manifest; --resume makes it right"):
            convert.convert(made, verify=True)
        assert not (tmp_path / "out").exists()
        monkeypatch.setattr(convert, "_write_rest", inner)
        result = convert.convert(made, resume=True, verify=True)
        assert result.verified_tensors == len(made.parts[0].reader.specs)
        assert made.bytes_in - result.resumed_bytes in {made.parts[0].reader.num_bytes(s) for s in made.parts[0].reader.specs}

    @pytest.mark.parametrize("options", [Options("hf"), Options("packed", 2)], ids=lambda o: o.to)
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_small_files_count_too(self, tmp_path, source, options, name):
        made = convert.plan(source, tmp_path / "out", options)
        convert.convert(made)
        assert convert.is_published(made)
        assert not convert.is_published(convert.plan(source, tmp_path / "out", Options("orbax")))
        (tmp_path / "out" / name).write_text((tmp_path / "out" / name).read_text() + " ")
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}: missing, or not as it was converted"):
            convert.verify_published(made)

    def test_wrong_from_the_start(self, tmp_path, source):
        """A destination that is whole but of other weights differs from the source in a sample."""
        made = convert.plan(source, tmp_path / "out", Options("hf"))
        other = load_file(source / "model.safetensors")
        other = {name: np.roll(tensor, 1) for name, tensor in other.items()}
        write(tmp_path / "other", other, NVFP4)
        run(tmp_path / "other", tmp_path / "out", Options("hf"))
        with pytest.raises(CheckpointError, match="differs from the source"):
            convert.verify_published(made)

    def test_damaged_source(self, tmp_path, source):
        run(source, tmp_path / "middle", Options("hf"))
        path = tmp_path / "middle" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="the source is damaged"):
            run(tmp_path / "middle", tmp_path / "out", Options("hf"))
        nothing_left(tmp_path / "out")


class TestLoading:
    @pytest.fixture
    def packed(self, tmp_path, source):
        run(source, tmp_path / "packed", Options("packed", 2))
        return tmp_path / "packed"

    @pytest.mark.parametrize("devices", [1, 4])
    def test_wrong_number_of_ranks(self, packed, devices):
        mesh = muse_jax.sharding.make_mesh(devices) if devices > 1 else None
        message = f"packed for tp = 2, to be loaded on {devices} devices: load it on 2 .*, or convert it with .* --tp {devices}"
        with pytest.raises(CheckpointError, match=message):
            muse_jax.load(packed, mesh=mesh)

    def test_each_device_reads_its_own_bytes(self, packed, monkeypatch):
        """Of what is split, each rank's part from that rank's file and once; of the rest, the first rank's."""
        inner, bytes_read = checkpoints.packed.read_exactly, {}

        def counting(file, position, buffer):
            bytes_read[Path(file.name).name] = bytes_read.get(Path(file.name).name, 0) + len(buffer)
            inner(file, position, buffer)

        monkeypatch.setattr(checkpoints.packed, "read_exactly", counting)
        config, mesh = read_config(packed), muse_jax.sharding.make_mesh(2)
        put = sharded_put(*muse_jax.sharding.placement(mesh, muse_jax.sharding.ShardingConfig(2)))
        load_params(packed, config, dtype=jnp.bfloat16, put=put, num_ranks=2)
        split = sum(tensor.nbytes for tensor in packed_tensors(config, 2) if len(tensor.spec.holders(2)) == 2)
        assert bytes_read["rank-1-of-2.bin"] == split
        whole = sum(tensor.nbytes for tensor in packed_tensors(config, 2) if len(tensor.spec.holders(2)) == 1)
        assert split + whole <= bytes_read["rank-0-of-2.bin"] <= split + 2 * whole

    def test_wrong_config(self, packed):
        """Half as many heads of twice the size have the same bytes, and another meaning."""
        raw = json.loads((packed / "config.json").read_text())
        raw |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20}
        (packed / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match="not the config that was converted"):
            muse_jax.load(packed, mesh=muse_jax.sharding.make_mesh(2))

    def test_wrong_version(self, packed):
        path = packed / "muse_manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
        with pytest.raises(CheckpointError, match="format version 2, this program reads 1: convert the source again"):
            read_config(packed)

    def test_missing_and_short_files(self, packed):
        data = (packed / "rank-1-of-2.bin").read_bytes()
        (packed / "rank-1-of-2.bin").write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match=r"rank-1-of-2\.bin: has \d+ bytes, expected"):
            open_reader(packed, read_config(packed))
        (packed / "rank-1-of-2.bin").unlink()
        with pytest.raises(CheckpointError, match=r"rank-1-of-2\.bin: no such file: convert the source again"):
            open_reader(packed, read_config(packed))
        (packed / "muse_manifest.json").unlink()
        with pytest.raises(CheckpointError, match="without its manifest"):
            read_config(packed)

    def test_bit_rot(self, packed):
        path = packed / "rank-1-of-2.bin"
        data = bytearray(path.read_bytes())
        data[-1] ^= 0x40
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight does not have the checksum of the manifest"):
            muse_jax.load(packed, mesh=muse_jax.sharding.make_mesh(2))

    @pytest.mark.parametrize("tensor", ["down_proj_weight_scale", "down_proj_weight_scale_2", "gate_up_proj_input_scale"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_scales_that_are_no_numbers(self, tmp_path, rng, tensor, value):
        tensors = random_tensors(rng, NVFP4)
        name = f"{EXPERTS}.{tensor}"
        tensors[name].reshape(-1)[-1] = value  # e4m3 has no infinity: it becomes NaN there
        source = write(tmp_path / "source", tensors, NVFP4)
        message = f"{name}: 1 of its scales are NaN or infinite"
        with pytest.raises(CheckpointError, match=message):
            muse_jax.load(source)
        with pytest.raises(CheckpointError, match=message):
            run(source, tmp_path / "out", Options("packed", 2))
        nothing_left(tmp_path / "out")
