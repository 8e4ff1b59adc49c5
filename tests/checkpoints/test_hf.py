"""HF directories: round trips, sharded loads, bounded memory, and one clear error for everything that is wrong."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import checkpoints.hf
from checkpoints import (
    CheckpointError,
    HFReader,
    LoadReport,
    checkpoint_dtype,
    load_params,
    read_config,
    save_hf,
    sharded_put,
    shards,
)
from checkpoints.shards import open_directory
from muse_jax.config import TINY, ConfigError, MLPKind, default_layer_types, default_layer_uses_rope
from muse_jax.layout import insert, text_tensors

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)

# One sparse and one dense layer. No two sizes are equal, so that a swapped axis is a wrong shape.
CONFIG = dataclasses.replace(
    TINY,
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=48,
    moe_hidden_size=24,
    moe_intermediate_size=8,
    num_local_experts=4,
    layer_types=default_layer_types(2),
    layer_uses_rope=default_layer_uses_rope(2),
    mlp_layer_types=(MLPKind.SPARSE, MLPKind.DENSE),
)
SPECS = text_tensors(CONFIG)
STACKS = ("gate_up_proj", "down_proj")
EXPERTS = "model.language_model.layers.0.mlp.experts"
TOWERS = {
    "model.vision_tower.patch.weight": np.ones((3, 2), np.float32),
    "model.audio_tower.steps": np.array(7, np.int64),
}


def config_json(config=CONFIG, dtype="float32"):
    names = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
        moe_hidden_size moe_intermediate_size num_local_experts num_experts_per_tok sliding_window output_multiplier
        max_position_embeddings bos_token_id"""
    fields = {name: getattr(config, name) for name in names.split()}
    fields["mlp_layer_types"] = [str(kind) for kind in config.mlp_layer_types]
    fields["eos_token_id"] = list(config.eos_token_ids)
    return {"model_type": "muse_spark_text", "dtype": dtype, **fields}


def random_tensors(rng, dtype=F32, specs=SPECS):
    """Tensors of the file by name; fp32 ones are not representable in bf16."""
    return {s.name: rng.standard_normal(s.shape, np.float32).astype(s.dtype_in(dtype)) for s in specs}


def write(directory, tensors, shards=1, config=None):
    """A directory as others write it: by the safetensors library, in the order of its choice."""
    (directory / "config.json").write_text(json.dumps(config or config_json()))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names[i::shards], file))
    write_index(directory, weight_map)
    return directory


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def rewrite_header(path, change):
    """Replaces the JSON text of a file's header by `change(text)`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode()).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def load(directory, dtype=F32, **kwargs):
    return load_params(directory, CONFIG, dtype=dtype, **kwargs)


def at(params, spec):
    for key in spec.path:
        params = params[key]
    return params


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_holds(params, tensors, dtype, specs=SPECS):
    assert len(jax.tree.leaves(params)) == len(specs)
    for spec in specs:
        leaf = at(params, spec)
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, leaf.dtype) == (spec.param_shape, spec.dtype_in(dtype)), spec.name
        expected = tensors[spec.name].astype(leaf.dtype).reshape(spec.param_shape)
        np.testing.assert_array_equal(bits(leaf), bits(expected), err_msg=spec.name)


def split_experts(tensors):
    """The same weights with one tensor for each expert and projection."""
    tensors = dict(tensors)
    gate_up, down = (tensors.pop(f"{EXPERTS}.{stack}") for stack in STACKS)
    f = CONFIG.moe_intermediate_size
    for e in range(CONFIG.num_local_experts):
        tensors[f"{EXPERTS}.{e}.gate_proj.weight"] = np.ascontiguousarray(gate_up[e, :f])
        tensors[f"{EXPERTS}.{e}.up_proj.weight"] = np.ascontiguousarray(gate_up[e, f:])
        tensors[f"{EXPERTS}.{e}.down_proj.weight"] = np.ascontiguousarray(down[e])
    return tensors


def rejected(directory, *culprits, config=CONFIG):
    """Loading fails with one line that holds all of `culprits`, before anything is put on a device."""

    def put(*_):
        raise AssertionError("a tensor was placed before the checkpoint was checked")

    with pytest.raises(CheckpointError) as error:
        load_params(directory, config, dtype=F32, put=put)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000
    for culprit in culprits:
        assert culprit in message, message
    return message


class TestLoad:
    @pytest.mark.parametrize("dtype", [BF16, F32])
    @pytest.mark.parametrize("stored", [BF16, F32])
    @pytest.mark.parametrize("shards", [1, 3])
    def test_values_and_dtypes(self, tmp_path, rng, stored, dtype, shards):
        tensors = random_tensors(rng, stored)
        params, report = load(write(tmp_path, tensors | TOWERS, shards), dtype)
        assert_holds(params, tensors, dtype)
        assert sorted(params["layers"]) == [0, 1]
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        dtypes = ("BF16", "F32") if stored == BF16 else ("F32",)
        assert report == LoadReport(len(SPECS), num_bytes, 2, 32, dtypes, ("model.audio_tower", "model.vision_tower"))

    def test_fp32_only_tensors_stored_as_bf16(self, tmp_path, rng):
        tensors = {name: tensor.astype(BF16) for name, tensor in random_tensors(rng).items()}
        params, report = load(write(tmp_path, tensors), BF16)
        assert_holds(params, tensors, BF16)
        assert report.dtypes == ("BF16",)

    @pytest.mark.parametrize("shards", [1, 2])
    def test_one_tensor_per_expert(self, tmp_path, rng, shards):
        tensors = random_tensors(rng)
        params, report = load(write(tmp_path, split_experts(tensors), shards))
        assert_holds(params, tensors, F32)
        assert report.num_tensors == len(SPECS)

    def test_progress_ends_at_the_total(self, tmp_path, rng):
        calls = []
        _, report = load(write(tmp_path, random_tensors(rng)), progress=lambda *call: calls.append(call))
        done, totals = zip(*calls, strict=True)
        assert len(calls) == len(SPECS) + 1 and set(totals) == {report.num_bytes}
        assert done[0] == 0 and done[-1] == report.num_bytes and list(done) == sorted(set(done))

    def test_links_into_a_store_as_the_hub_cache_has_them(self, tmp_path, rng):
        tensors = random_tensors(rng)
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir(), snapshot.mkdir()
        for path in write(blobs, tensors, 2).iterdir():
            (snapshot / path.name).symlink_to(Path("..", "blobs", path.name))
        assert_holds(load(snapshot)[0], tensors, F32)

    def test_file_that_changes_after_the_check(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        reader = HFReader(tmp_path, CONFIG)
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: the file changed while it was being loaded")):
            reader.read(SPECS[0], F32)

    def test_file_that_shrinks_under_the_read(self, tmp_path, rng, monkeypatch):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        monkeypatch.setattr(checkpoints.shards, "_stamp", lambda descriptor: (0, 0))

        def put(spec, shape, dtype, read_slice):
            if spec == SPECS[2]:
                os.truncate(path, 5000)
            return jax.device_put(read_slice(()))

        with pytest.raises(CheckpointError, match=re.escape(f"{path}: the file ends before its tensors do")):
            load(tmp_path, put=put)

    def test_failure_leaves_no_arrays_behind(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng))
        before = {id(array) for array in jax.live_arrays()}

        def put(spec, shape, dtype, read_slice):
            if spec == SPECS[-1]:
                assert len({id(array) for array in jax.live_arrays()} - before) == len(SPECS) - 1
                raise CheckpointError("the last one fails")
            return jax.device_put(read_slice(()))

        with pytest.raises(CheckpointError, match="the last one fails") as kept:
            load(tmp_path, put=put)
        assert kept.tb is not None
        assert not {id(array) for array in jax.live_arrays()} - before

    @pytest.mark.parametrize("dtype", [np.float16, np.int8])
    def test_other_dtypes_are_refused(self, tmp_path, rng, dtype):
        with pytest.raises(CheckpointError, match=rf"{np.dtype(dtype).name}: allowed are bfloat16 and float32"):
            load(write(tmp_path, random_tensors(rng)), dtype)


class TestSlices:
    @pytest.mark.parametrize("per_expert", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_any_slice_is_that_of_the_whole(self, tmp_path, rng, dtype, per_expert):
        tensors = random_tensors(rng)
        reader = HFReader(write(tmp_path, split_experts(tensors) if per_expert else tensors), CONFIG)
        for spec in SPECS:
            whole = tensors[spec.name].reshape(spec.param_shape).astype(dtype)
            for _ in range(6):
                ends = [sorted(rng.integers(0, size + 1, 2)) for size in spec.param_shape]
                index = tuple(slice(int(a), int(b)) for a, b in ends)[: rng.integers(1, len(ends) + 1)]
                part = reader.read(spec, dtype, index)
                assert part.dtype == dtype
                np.testing.assert_array_equal(bits(part), bits(whole[index]))

    @pytest.mark.parametrize("per_expert", [False, True])
    def test_each_of_eight_devices_reads_its_slice(self, tmp_path, rng, monkeypatch, per_expert):
        tensors = random_tensors(rng)
        write(tmp_path, split_experts(tensors) if per_expert else tensors)
        mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

        def sharding(spec):
            axes = [None] * len(spec.param_shape)
            if spec.shard_axis is not None:
                axes[spec.shard_axis] = "tp"
            return NamedSharding(mesh, PartitionSpec(*axes))

        bytes_read = 0
        fill = shards.read_exactly

        def counting_fill(file, position, buffer):
            nonlocal bytes_read
            bytes_read += len(buffer)
            fill(file, position, buffer)

        monkeypatch.setattr(shards, "read_exactly", counting_fill)
        inner, per_tensor = sharded_put(sharding), {}

        def put(spec, shape, dtype, read_slice):
            slices = []

            def spy(index):
                nonlocal bytes_read
                bytes_read = 0
                part = read_slice(index)
                slices.append(bytes_read)
                return part

            leaf = inner(spec, shape, dtype, spy)
            per_tensor[spec.name] = slices
            return leaf

        params, _ = load(tmp_path, put=put)
        assert_holds(params, tensors, F32)
        for spec in SPECS:
            assert at(params, spec).sharding.is_equivalent_to(sharding(spec), len(spec.param_shape))
            whole = tensors[spec.name].nbytes
            expected = [whole] if spec.shard_axis is None else [whole // 8] * 8
            assert per_tensor[spec.name] == expected, spec.name


class TestMemory:
    """Sixteen layers: all of the tensors are 22 times the largest one, so that holding two too many shows."""

    CONFIG = dataclasses.replace(
        TINY,
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=16,
        num_attention_heads=8,
        head_dim=16,
        moe_hidden_size=64,
        moe_intermediate_size=128,
        num_local_experts=16,
        layer_types=default_layer_types(16),
        layer_uses_rope=default_layer_uses_rope(16),
        mlp_layer_types=(MLPKind.SPARSE,) * 16,
    )

    @pytest.mark.parametrize(("stored", "dtype", "copies"), [(BF16, BF16, 1), (F32, F32, 1), (BF16, F32, 1.5)])
    def test_arrays_of_one_tensor_at_a_time(self, tmp_path, rng, stored, dtype, copies):
        specs = text_tensors(self.CONFIG)
        write(tmp_path, random_tensors(rng, stored, specs))
        largest = max(spec.size for spec in specs) * dtype.itemsize

        def put(spec, shape, dtype, read_slice):
            return len(read_slice(()))

        load_params(tmp_path, self.CONFIG, dtype=dtype, put=put)  # fills caches that stay
        tracemalloc.start()
        try:
            _, report = load_params(tmp_path, self.CONFIG, dtype=dtype, put=put)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        slack = 600_000  # the parsed header, 200 paths and their sources
        assert copies * largest <= peak <= copies * largest + slack
        assert report.num_bytes > 15 * copies * largest * stored.itemsize / dtype.itemsize

    @pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
    def test_resident_memory_of_a_process(self, tmp_path):
        """Mapped pages of the file would show here, and not in the test above."""
        config = dataclasses.replace(self.CONFIG, num_local_experts=64)
        specs = text_tensors(config)
        write(tmp_path, {spec.name: np.ones(spec.shape, np.float32) for spec in specs}, config=config_json(config))
        program = """
            import sys
            import numpy as np
            from checkpoints import load_params, read_config

            def peak():
                return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if "VmHWM" in line)

            def put(spec, shape, dtype, read_slice):
                return len(read_slice(()))

            config = read_config(sys.argv[1])
            open("/proc/self/clear_refs", "w").write("5")  # forgets the peak of the imports
            before = peak()
            _, report = load_params(sys.argv[1], config, dtype=np.float32, put=put)
            print(peak() - before, report.num_bytes)
        """
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
        root = Path(checkpoints.hf.__file__).parents[1]
        result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
        assert result.returncode == 0, result.stderr
        growth, num_bytes = map(int, result.stdout.split())
        largest = 4 * max(spec.size for spec in specs)
        assert num_bytes > 100_000_000 and growth < 2 * largest + 4_000_000, (growth, largest)


class TestRejects:
    def test_directories(self, tmp_path):
        for path, fault in ((tmp_path / "none", "no such directory"), (tmp_path / "file", "not a directory")):
            (tmp_path / "file").touch()
            rejected(path, f"{path}: {fault}")
            with pytest.raises(CheckpointError, match=re.escape(f"{path}: {fault}")):
                read_config(path)
        rejected(tmp_path, f"{tmp_path}: no model.safetensors and no model.safetensors.index.json")
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'config.json'}: no such file")):
            read_config(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\xff", "1" * 5000])
    def test_config_that_is_not_json(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"config\.json: (not readable as JSON|'a' appears twice)"):
            read_config(tmp_path)

    def test_config_of_another_model(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ConfigError, match="llama"):
            read_config(tmp_path)

    def test_config(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(config_json()))
        assert read_config(tmp_path) == CONFIG
        assert checkpoint_dtype(CONFIG) == F32
        assert checkpoint_dtype(dataclasses.replace(CONFIG, dtype="bfloat16")) == BF16

    def test_pipe_in_place_of_a_file(self, tmp_path):
        os.mkfifo(tmp_path / "model.safetensors")
        os.mkfifo(tmp_path / "config.json")
        rejected(tmp_path, "no model.safetensors")
        with pytest.raises(CheckpointError, match="no such file"):
            read_config(tmp_path)

    def test_single_file_beside_an_index(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng), shards=2)
        write(tmp_path, random_tensors(rng))
        rejected(tmp_path, "model.safetensors and model.safetensors.index.json both exist")

    @pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "null", "{'a': 1}"])
    def test_index_of_another_form(self, tmp_path, index):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        rejected(tmp_path, "model.safetensors.index.json: ")

    def test_index_that_is_too_large(self, tmp_path):
        path = tmp_path / "model.safetensors.index.json"
        path.touch()
        os.truncate(path, 1 << 40)  # sparse
        rejected(tmp_path, "model.safetensors.index.json: larger than 33554432 bytes")

    def test_index_with_a_repeated_key(self, tmp_path):
        text = '{"weight_map": {"lm_head.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(text)
        rejected(tmp_path, "'lm_head.weight' appears twice")

    @pytest.mark.parametrize(
        "shard",
        ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors", "..", ".",
         "", "C:model.safetensors", "a\0.safetensors", "a\n.safetensors", ".a.safetensors", "a.bin", 3, None, ["a"]],
    )  # fmt: skip
    def test_index_that_points_elsewhere(self, tmp_path, rng, shard):
        write(tmp_path, random_tensors(rng), shards=2)
        write_index(tmp_path, read_index(tmp_path) | {"lm_head.weight": shard})
        shown = repr(shard) if isinstance(shard, str) else type(shard).__name__
        rejected(tmp_path, f"'lm_head.weight' is in {shown}; expected a file of this directory")

    @pytest.mark.parametrize("shard", ["none.safetensors", "n" * 5000 + ".safetensors"])
    def test_index_that_names_no_file(self, tmp_path, rng, shard):
        write(tmp_path, random_tensors(rng), shards=2)
        write_index(tmp_path, read_index(tmp_path) | {"lm_head.weight": shard})
        with pytest.raises(CheckpointError, match=f"{shard}: no such file"):
            HFReader(tmp_path, CONFIG)

    def test_missing_shard(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng), shards=3)
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
        rejected(tmp_path, "model-00002-of-00003.safetensors: no such file")

    def test_index_and_shards_disagree(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng), shards=2)
        true = read_index(tmp_path)
        write_index(tmp_path, true | {"lm_head.other": true["lm_head.weight"]})
        rejected(tmp_path, f"'lm_head.other' is said to be in {true['lm_head.weight']}, which does not hold it")
        write_index(tmp_path, true | {"lm_head.weight": next(s for s in true.values() if s != true["lm_head.weight"])})
        rejected(tmp_path, "'lm_head.weight' is said to be in")
        write_index(tmp_path, {name: shard for name, shard in true.items() if name != "lm_head.weight"})
        rejected(tmp_path, "does not list 'lm_head.weight'")

    def test_tensor_in_two_shards(self, tmp_path, rng):
        tensors = random_tensors(rng)
        write(tmp_path, tensors, shards=2)
        for shard in (tmp_path / file for file in set(read_index(tmp_path).values())):
            save_file(load_file(shard) | {"lm_head.weight": tensors["lm_head.weight"]}, shard)
        rejected(
            tmp_path,
            "'lm_head.weight' is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors",
        )

    def test_header_with_a_repeated_tensor(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        entry = re.compile(r'"lm_head.weight":\{[^}]*\},?')
        rewrite_header(path, lambda text: text.replace('{"__', "{" + entry.search(text)[0].rstrip(",") + ',"__', 1))
        rejected(tmp_path, f"{path}: 'lm_head.weight' appears twice")

    def test_header_entry_in_list_form(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        entry = re.compile(r'"lm_head.weight":\{"dtype":("F32"),"shape":(\[.*?\]),"data_offsets":(\[.*?\])\}')
        rewrite_header(path, lambda text: entry.sub(r'"lm_head.weight":[\1,\2,\3]', text))
        rejected(tmp_path, f"{path}: ", "entry")

    def test_header_that_claims_to_be_huge(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])
        rejected(tmp_path, f"{path}: header of {1 << 60} bytes")

    @pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
    def test_truncated_file(self, tmp_path, rng, size):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        os.truncate(path, size % path.stat().st_size)
        rejected(tmp_path, f"{path}: ")

    def test_overlapping_tensors(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        rewrite_header(path, lambda text: re.sub(r'"data_offsets":\[\d+,', '"data_offsets":[0,', text))
        rejected(tmp_path, f"{path}: not a whole safetensors file")

    def test_missing_tensors(self, tmp_path, rng):
        tensors = random_tensors(rng)
        gone = [spec.name for spec in SPECS if ".layers.1.mlp" in spec.name] + ["lm_head.weight"]
        write(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in gone})
        rejected(tmp_path, "4 missing: 'lm_head.weight', 'model.language_model.layers.1.mlp.down_proj.weight', ", "and 1 more")

    def test_unknown_tensors(self, tmp_path, rng):
        extra = {f"model.language_model.layers.0.extra{i}": np.ones(2, np.float32) for i in range(5)}
        write(tmp_path, random_tensors(rng) | extra)
        rejected(tmp_path, "5 unknown: 'model.language_model.layers.0.extra0', ", "and 2 more")

    def test_layer_beyond_the_last(self, tmp_path, rng):
        write(tmp_path, random_tensors(rng) | {"model.language_model.layers.2.input_layernorm.weight": np.ones(16, np.float32)})
        rejected(tmp_path, "1 unknown: 'model.language_model.layers.2.input_layernorm.weight'")

    @pytest.mark.parametrize(
        "spec", [s for s in SPECS if s.path[-1] in ("embedding", "router", "gate_up", "down")], ids=lambda spec: spec.path[-1]
    )
    def test_wrong_shape(self, tmp_path, rng, spec):
        tensors = random_tensors(rng)
        transposed = np.ascontiguousarray(np.moveaxis(tensors[spec.name], -1, 0))
        write(tmp_path, tensors | {spec.name: transposed})
        rejected(tmp_path, f"'{spec.name}' is {list(transposed.shape)}, expected {list(spec.shape)}")

    @pytest.mark.parametrize(("dtype", "shown"), [(np.float16, "F16"), (np.float64, "F64"), (np.uint8, "U8")])
    def test_wrong_dtype(self, tmp_path, rng, dtype, shown):
        tensors = random_tensors(rng)
        write(tmp_path, tensors | {"lm_head.weight": tensors["lm_head.weight"].astype(dtype)})
        rejected(tmp_path, "1 with the wrong dtype: ", f"'lm_head.weight' is {shown}, expected BF16 or F32")

    def test_several_faults_are_told_together(self, tmp_path, rng):
        tensors = random_tensors(rng)
        tensors["lm_head"] = tensors.pop("lm_head.weight")
        write(tmp_path, tensors)
        rejected(tmp_path, "1 unknown: 'lm_head'", "1 missing: 'lm_head.weight'")

    @pytest.mark.parametrize(
        "name",
        [f"{EXPERTS}.gate_up_proj_weight_scale", f"{EXPERTS}.down_proj_weight_scale_2", f"{EXPERTS}.down_proj_input_scale",
         f"{EXPERTS}.0.w13_weight.qweight", f"{EXPERTS}.w2_qzeros", f"{EXPERTS}.0.gate_proj.weight_packed",
         f"{EXPERTS}.0.w2_weight.scales", f"{EXPERTS}.0.gate_up_proj.g_idx"],
    )  # fmt: skip
    def test_quantised_weights(self, tmp_path, rng, name):
        write(tmp_path, random_tensors(rng) | {name: np.ones(2, np.float32)})
        rejected(tmp_path, f"quantised weights are not supported ('{name}')")

    @pytest.mark.parametrize("stack", STACKS)
    def test_both_layouts_of_experts(self, tmp_path, rng, stack):
        tensors = random_tensors(rng)
        name = f"{EXPERTS}.{stack}"
        write(tmp_path, split_experts(tensors) | {name: tensors[name]})
        rejected(tmp_path, f"{EXPERTS} has both the stack {stack} and tensors for each expert")

    def test_experts_that_do_not_fit(self, tmp_path, rng):
        tensors = split_experts(random_tensors(rng))
        up, down = f"{EXPERTS}.2.up_proj.weight", f"{EXPERTS}.3.down_proj.weight"
        write(tmp_path, {name: tensor for name, tensor in tensors.items() if name != up})
        rejected(tmp_path, f"1 missing: '{up}'")
        write(tmp_path, tensors | {f"{EXPERTS}.4.up_proj.weight": tensors[up]})
        rejected(tmp_path, f"1 unknown: '{EXPERTS}.4.up_proj.weight'")
        write(tmp_path, tensors | {down: np.ascontiguousarray(tensors[down].T)})
        rejected(tmp_path, f"'{down}' is [8, 24], expected [24, 8]")
        write(tmp_path, tensors | {down: tensors[down].astype(np.float16)})
        rejected(tmp_path, f"'{down}' is F16")
        write(tmp_path, tensors)
        rejected(
            tmp_path,
            "12 tensors for num_local_experts = 1000000000",
            config=dataclasses.replace(CONFIG, num_local_experts=10**9),
        )


class TestDamagedFiles:
    """Whatever bytes are lost or changed: one CheckpointError, or tensors of the right shapes."""

    def check(self, directory):
        try:
            params, _ = load(directory)
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            return False
        for spec in SPECS:
            assert at(params, spec).shape == spec.param_shape
        return True

    def test_truncated_anywhere(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        for size in [
            *range(12),
            header - 1,
            header,
            len(data) - 1,
            *rng.integers(0, header, 60),
            *rng.integers(0, len(data), 60),
        ]:
            path.write_bytes(data[:size])
            assert not self.check(tmp_path), size
        path.write_bytes(data + b"x")
        assert not self.check(tmp_path)

    def test_header_bytes_changed(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng)) / "model.safetensors"
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        assert self.check(tmp_path)
        tracemalloc.start()
        try:
            for _ in range(200):
                damaged = bytearray(data)
                for position in rng.integers(0, header, rng.integers(1, 4)) if rng.random() < 0.9 else rng.integers(0, 8, 1):
                    damaged[position] ^= 1 << int(rng.integers(8))
                path.write_bytes(damaged)
                self.check(tmp_path)
            assert tracemalloc.get_traced_memory()[1] < (40 << 20)  # a header may claim 32 MB
        finally:
            tracemalloc.stop()

    def test_index_bytes_changed(self, tmp_path, rng):
        path = write(tmp_path, random_tensors(rng), shards=2) / "model.safetensors.index.json"
        data = path.read_bytes()
        assert self.check(tmp_path)
        for _ in range(100):
            damaged = bytearray(data)
            damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            self.check(tmp_path)


def random_params(rng, dtype=np.float32):
    params = {}
    for spec in SPECS:
        leaf = rng.standard_normal(spec.param_shape, np.float32)
        insert(params, spec.path, jnp.asarray(leaf if spec.dtype else leaf.astype(dtype)))
    return params


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


class TestSave:
    @pytest.mark.parametrize("dtype", [BF16, F32])
    @pytest.mark.parametrize("max_shard_bytes", [10**9, 8000, 1])
    def test_round_trip_is_bitwise(self, tmp_path, rng, dtype, max_shard_bytes):
        params, source = random_params(rng, dtype), config_json(dtype=dtype.name)
        out = tmp_path / "a" / "b"
        save_hf(params, source, out, dtype=dtype, extra_tensors=TOWERS, max_shard_bytes=max_shard_bytes)
        loaded, report = load(out, dtype)
        assert_same(loaded, params)
        assert (report.num_skipped, report.skipped_bytes) == (2, 32)
        assert json.loads((out / "config.json").read_text()) == source
        assert (read_config(out).dtype, out.parent.stat().st_nlink) == (dtype.name, 3)  # nothing is left beside it

    @pytest.mark.parametrize("max_shard_bytes", [10**9, 8000])
    def test_library_reads_the_same(self, tmp_path, rng, max_shard_bytes):
        params = random_params(rng, BF16)
        save_hf(
            params, config_json(dtype="bfloat16"), tmp_path, dtype=BF16, extra_tensors=TOWERS, max_shard_bytes=max_shard_bytes
        )
        files = sorted(tmp_path.glob("*.safetensors"))
        assert (len(files) > 2) == (max_shard_bytes == 8000)
        read = {}
        for file in files:
            assert b'{"__metadata__":{"format":"pt"}' in file.read_bytes()[:60]
            read |= load_file(file)
        assert set(read) == {spec.name for spec in SPECS} | set(TOWERS)
        for spec in SPECS:
            assert (read[spec.name].shape, read[spec.name].dtype) == (spec.shape, spec.dtype_in(BF16))
            np.testing.assert_array_equal(bits(read[spec.name]).ravel(), bits(at(params, spec)).ravel())
        for name, tower in TOWERS.items():
            assert (read[name].shape, read[name].dtype) == (tower.shape, tower.dtype)
            np.testing.assert_array_equal(read[name], tower)

    def test_shards_follow_the_layout_and_the_limit(self, tmp_path, rng):
        save_hf(random_params(rng), config_json(), tmp_path, dtype=F32, max_shard_bytes=8000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(spec.size for spec in SPECS)
        order = [index["weight_map"][spec.name] for spec in SPECS]
        assert order == sorted(order) and order[0] == f"model-00001-of-{len(set(order)):05}.safetensors"
        for file in set(order):
            sizes = [4 * spec.size for spec, shard in zip(SPECS, order, strict=True) if shard == file]
            assert sum(sizes) <= 8000 or len(sizes) == 1

    def test_tensors_start_at_multiples_of_their_item(self, tmp_path, rng):
        odd = dataclasses.replace(CONFIG, vocab_size=41, moe_hidden_size=3, moe_intermediate_size=5)
        params = {}
        for spec in text_tensors(odd):
            insert(params, spec.path, rng.standard_normal(spec.param_shape, np.float32))
        towers = {"model.vision_tower.odd": np.ones(3, np.uint8), "model.vision_tower.wide": np.ones(1, np.int64)}
        save_hf(params, config_json(odd, "bfloat16"), tmp_path, dtype=BF16, extra_tensors=towers)
        item = {"BF16": 2, "F32": 4, "U8": 1, "I64": 8}
        stored = open_directory(tmp_path)
        assert {tensor.dtype for tensor in stored.values()} == set(item)
        assert not [name for name, tensor in stored.items() if tensor.offset % item[tensor.dtype]]

    def test_dtypes_are_converted(self, tmp_path, rng):
        params = random_params(rng)
        save_hf(params, config_json(dtype="bfloat16"), tmp_path, dtype=BF16)
        loaded, _ = load(tmp_path, F32)
        for spec in SPECS:
            leaf = np.asarray(at(params, spec))
            assert not np.array_equal(leaf, leaf.astype(BF16).astype(F32))
            expected = leaf if spec.dtype else leaf.astype(BF16).astype(F32)
            np.testing.assert_array_equal(at(loaded, spec), expected)

    def test_sharded_parameters(self, tmp_path, rng):
        params = random_params(rng)
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("b"))), params)
        save_hf(sharded, config_json(), tmp_path, dtype=F32)
        assert_same(load(tmp_path)[0], params)

    def test_save_replaces_a_checkpoint_and_nothing_else(self, tmp_path, rng):
        first, second = random_params(rng), random_params(rng)
        for name in ("tokenizer.json", "draft.safetensors"):
            (tmp_path / name).write_text("kept")
        save_hf(first, config_json(), tmp_path, dtype=F32, max_shard_bytes=1)
        save_hf(second, config_json(), tmp_path, dtype=F32)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["config.json", "draft.safetensors", "model.safetensors", "tokenizer.json"]
        assert_same(load(tmp_path)[0], second)
        save_hf(first, config_json(), tmp_path, dtype=F32, max_shard_bytes=8000)
        assert_same(load(tmp_path)[0], first)

    @pytest.mark.parametrize("call", range(1, 30, 2))
    def test_interrupted_save_leaves_the_old_one_or_nothing(self, tmp_path, rng, interrupted, call):
        """Stops at every second write to disk or change of a directory, while files are written and while they move."""
        old, new = random_params(rng), random_params(rng)
        out = tmp_path / "out"
        save_hf(old, config_json(), out, dtype=F32, max_shard_bytes=8000)
        with interrupted(call), pytest.raises(KeyboardInterrupt):
            save_hf(new, config_json(), out, dtype=F32, max_shard_bytes=8000)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        try:
            read_config(out)
        except CheckpointError as error:
            assert "config.json: no such file" in str(error)
        else:
            assert_same(load(out)[0], old)

    def test_what_does_not_fit_is_refused(self, tmp_path, rng):
        def refused(match, params=None, dtype=F32, config=None, **kwargs):
            out = tmp_path / "out"
            with pytest.raises(ValueError, match=match):
                save_hf(params or random_params(rng), config or config_json(), out, dtype=dtype, **kwargs)
            assert not out.exists()

        params = random_params(rng)
        del params["layers"][1]["mlp"]["up_proj"]
        refused("params: 1 missing: 'layers/1/mlp/up_proj'", params)
        refused("params: 1 unknown: 'extra'", random_params(rng) | {"extra": jnp.ones(2)})
        refused(r"params: lm_head is \[16, 40\], expected \[40, 16\]", random_params(rng) | {"lm_head": jnp.ones((16, 40))})
        refused("config.json has dtype 'float32' but the tensors are to be stored as bfloat16", dtype=BF16)
        refused("float16: allowed are bfloat16 and float32", dtype=np.float16)
        refused("model_type = 'llama'", config={"model_type": "llama"})
        refused("extra_tensors: 'lm_head.extra' would be refused", extra_tensors={"lm_head.extra": np.ones(2)})
        refused("'model.vision_tower.x' is complex64", extra_tensors={"model.vision_tower.x": np.ones(2, np.complex64)})
