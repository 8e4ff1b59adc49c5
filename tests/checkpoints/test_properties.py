"""Properties of reading, naming, cutting and packing that hold for whatever hypothesis thinks of."""

import copy
import dataclasses
import itertools
import json
import math
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_weights import random_tensors
from safetensors.numpy import save_file

from checkpoints import CheckpointError, HFReader, load_params, open_reader, read_config
from checkpoints.convert import Options, convert, plan
from checkpoints.hf import _draft_names, split_files
from checkpoints.manifest import MANIFEST_FILE, Manifest, TensorEntry, read_manifest
from checkpoints.packed import from_tiles, to_tiles
from checkpoints.pieces import row_boxes
from checkpoints.shards import DTYPE_NAMES, DTYPES, StoredTensor, open_directory
from muse_jax.config import TINY, MLPKind, ModelConfig, default_layer_types, default_layer_uses_rope
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import draft_tensors, text_tensors

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
LAYERS = "model.language_model.layers"


def examples(count):
    """The same examples in every run; machines are slow at times."""
    checks = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=checks)


@st.composite
def configs(draw, max_layers=3):
    """Targets of every mix of layers; sizes that no tile and few ranks divide."""
    num_layers = draw(st.integers(1, max_layers))
    kinds = tuple(draw(st.lists(st.sampled_from(list(MLPKind)), min_size=num_layers, max_size=num_layers)))
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    heads = kv_heads * draw(st.integers(1, 3))
    return dataclasses.replace(
        TINY,
        vocab_size=draw(st.integers(1, 150)),
        hidden_size=heads * draw(st.integers(1, 9)),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 150)),
        moe_hidden_size=16 * draw(st.integers(1, 9)),
        moe_intermediate_size=16 * draw(st.integers(1, 5)),
        num_local_experts=draw(st.integers(2, 4)),
        layer_types=default_layer_types(num_layers),
        layer_uses_rope=default_layer_uses_rope(num_layers),
        mlp_layer_types=kinds,
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        nvfp4_layers=tuple(i for i, kind in enumerate(kinds) if kind == MLPKind.SPARSE and draw(st.booleans())),
    )


def config_json(config):
    renamed = ("layer_uses_rope", "rope_theta", "eos_token_ids", "placeholder_token_ids", "nvfp4_layers")
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in renamed}
    return {"model_type": "muse_spark_text", **fields, "eos_token_id": list(config.eos_token_ids)}


def random_tensors_of(config, seed):
    return random_tensors(np.random.default_rng(seed), config, config.dtype)


def per_expert(config, tensors):
    """The same weights with one tensor for each expert and projection."""
    tensors = dict(tensors)
    for i, kind in enumerate(config.mlp_layer_types):
        if kind != MLPKind.SPARSE:
            continue
        prefix = f"{LAYERS}.{i}.mlp.experts"
        for suffix, ending in (
            ("", "weight"),
            ("_weight_scale", "weight_scale"),
            ("_weight_scale_2", "weight_scale_2"),
            ("_input_scale", "input_scale"),
        ):
            if f"{prefix}.down_proj{suffix}" not in tensors:
                continue
            gate_up, down = (tensors.pop(f"{prefix}.{stack}{suffix}") for stack in ("gate_up_proj", "down_proj"))
            for expert in range(config.num_local_experts):
                gate, up = np.split(gate_up[expert], 2)
                if gate_up.ndim == 2:
                    gate, up = gate.reshape(()), up.reshape(())
                for name, part in (("gate", gate), ("up", up), ("down", down[expert])):
                    tensors[f"{prefix}.{expert}.{name}_proj.{ending}"] = np.array(part)
    return tensors


def write(directory, config, tensors, num_files):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    names = sorted(tensors)
    files = {f"part-{i}.safetensors": names[i::num_files] for i in range(num_files)}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, directory / (file if num_files > 1 else "model.safetensors"))
    if num_files > 1:
        weight_map = {name: file for file, some in files.items() for name in some}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def directories(tmp_path):
    """A new directory for each example of a test."""
    return lambda: Path(tempfile.mkdtemp(dir=tmp_path))


def allow_fixtures(count):
    return settings(examples(count), suppress_health_check=list(HealthCheck))


# ---- Reading ----------------------------------------------------------------------------------------------------------


@given(configs(), st.booleans(), st.integers(1, 3), st.integers(0, 2**32))
@allow_fixtures(100)
def test_names_lead_to_the_same_bytes(directories, config, split, num_files, seed):
    tensors = random_tensors_of(config, seed)
    stored = per_expert(config, tensors) if split else tensors
    directory = write(directories() / "x", config, stored, num_files)
    assert read_config(directory) == config
    reader = open_reader(directory, config)
    assert reader.report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for spec in reader.specs:
        array = reader.read(spec, reader.dtype(spec))
        assert (array.shape, array.dtype) == (spec.param_shape, tensors[spec.name].dtype)
        assert array.tobytes() == tensors[spec.name].tobytes(), spec.name


@given(configs(max_layers=2), st.booleans(), st.data())
@allow_fixtures(60)
def test_any_box_is_that_of_the_whole(directories, config, split, data):
    tensors = random_tensors_of(config, 1)
    reader = HFReader(write(directories() / "x", config, per_expert(config, tensors) if split else tensors, 1), config)
    for spec in reader.specs:
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in spec.param_shape]
        index = tuple(slice(*pair) for pair in ends)
        dtype = reader.dtype(spec)
        assert reader.read(spec, dtype, index).tobytes() == tensors[spec.name].reshape(spec.param_shape)[index].tobytes()


@pytest.fixture(scope="module")
def valid_file():
    config = dataclasses.replace(
        TINY,
        vocab_size=8,
        num_hidden_layers=1,
        layer_types=default_layer_types(1),
        layer_uses_rope=default_layer_uses_rope(1),
        mlp_layer_types=(MLPKind.DENSE,),
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder) / "x", config, random_tensors_of(config, 3), 1)
        return config, (directory / "model.safetensors").read_bytes()


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 3),
        st.sampled_from(
            [b"", b"0", b"-1", b"18446744073709551616", b'"', b"{", b"]", b",", b"\\u0000", b"\xff", b"null", b"1e9"]
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(edits, st.booleans())
@allow_fixtures(500)
def test_a_changed_header_is_refused_or_lies_in_the_file(directories, valid_file, changes, tell_length):
    config, data = valid_file
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    for place, cut, text in changes:
        at = int(place * len(header))
        header = header[:at] + text + header[at + cut :]
    directory = directories()
    stated = len(header) if tell_length else length
    (directory / "model.safetensors").write_bytes(stated.to_bytes(8, "little") + header + data[8 + length :])
    try:
        stored = open_directory(directory)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    size = (directory / "model.safetensors").stat().st_size
    spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in stored.values())
    assert all(8 <= start <= end <= size for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for tensor in stored.values():
        if tensor.dtype in DTYPES:
            assert tensor.nbytes == math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    try:
        HFReader(directory, config)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


# ---- Names of a draft -------------------------------------------------------------------------------------------------


words = st.lists(
    st.sampled_from(["model", "midlayer", "layers", "0", "encoder", "fc", "weight", "output_norm_enc", "hidden_norm", "x",
                     "candidate_selector", "predecessor_codebook", "successor_codebook"]),
    min_size=1, max_size=5,
).map(".".join)  # fmt: skip


@given(st.sets(words, max_size=12))
@examples(300)
def test_aliases_are_injective_or_refused(names):
    stored = [(name, StoredTensor(Path("x"), name, "F32", (1,), 8, 4, (0, 0))) for name in sorted(names)]
    try:
        named = _draft_names(Path("d"), stored)
    except CheckpointError as error:
        assert re.search(r"^d: '.*', '.*' are two names for one tensor$", str(error))
        return
    assert {tensor.name for tensor in named.values()} == names and len(named) == len(names)


@given(st.sets(st.integers(0, 200), min_size=1), st.sampled_from(["", "model."]))
@examples(50)
def test_names_of_the_table_are_kept(small_draft_json, picked, prefix):
    specs = draft_tensors(DraftConfig.from_hf(small_draft_json))
    names = {specs[i % len(specs)].name for i in picked}
    stored = [(prefix + name, StoredTensor(Path("x"), prefix + name, "F32", (1,), 8, 4, (0, 0))) for name in names]
    assert _draft_names(Path("d"), stored).keys() == names


# ---- Cutting ----------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4]), st.integers(1, 5), st.none() | st.integers(1, 9), st.integers(1, 200))
@examples(400)
def test_boxes_cover_each_element_once_in_order(shape, itemsize, rows, period, limit):
    positions = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(row_boxes(shape, itemsize, rows=rows, period=period, limit=limit))
    np.testing.assert_array_equal(np.concatenate([positions[box].ravel() for box in boxes]), positions.ravel())
    for box in boxes:
        size = positions[box].size * itemsize
        assert size <= max(limit, rows * (shape[-1] if shape else 1) * itemsize)
        if len(shape) > 1 and shape[-2] > box[-2].stop - box[-2].start:
            start, stop = box[-2].start, box[-2].stop
            begin = start // period * period if period else 0
            assert (start - begin) % rows == 0
            end = min(begin + period if period else shape[-2], shape[-2])
            assert stop == end or (stop - begin) % rows == 0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
@examples(200)
def test_tiles_are_a_permutation(num_rows, row_bytes, tile_rows, tile_bytes):
    matrix = np.arange(num_rows * row_bytes, dtype=np.uint32).reshape(num_rows, row_bytes)
    planes = [(matrix >> shift).astype(np.uint8) for shift in (0, 8)]
    flat = [to_tiles(plane, (tile_rows, tile_bytes)) for plane in planes]
    order = flat[0].astype(np.uint32) + 256 * flat[1].astype(np.uint32)
    assert sorted(order.tolist()) == list(range(matrix.size))
    # Row tile by row tile, in it tile by tile, in it row by row.
    row, column = np.divmod(order.astype(np.int64), row_bytes)
    keys = list(zip(row // tile_rows, column // tile_bytes, row, column, strict=True))
    assert keys == sorted(keys)
    for plane, tiled in zip(planes, flat, strict=True):
        np.testing.assert_array_equal(from_tiles(tiled, row_bytes, (tile_rows, tile_bytes)), plane)


@given(configs(), st.sampled_from([1, 2, 4, 8]))
@examples(60)
def test_parts_of_the_ranks_tile_the_tensor(config, tp):
    for spec in text_tensors(config):
        counts = np.zeros(spec.param_shape, np.int64)
        for rank in range(tp):
            counts[spec.rank_part(tp, rank)] += 1
        assert (counts == tp // len(spec.holders(tp))).all(), spec.name
        held = np.zeros(spec.param_shape, np.int64)
        for rank in spec.holders(tp):
            held[spec.rank_part(tp, rank)] += 1
        assert (held == 1).all(), spec.name
        assert len({counts[spec.rank_part(tp, rank)].shape for rank in range(tp)}) == 1


@given(st.dictionaries(st.text(), st.integers(0, 100), min_size=1), st.integers(1, 150))
@examples(100)
def test_files_hold_every_tensor_once(nbytes, limit):
    files = split_files(nbytes, limit)
    assert [name for names in files.values() for name in names] == list(nbytes)
    assert all(sum(map(nbytes.get, names)) <= limit or len(names) == 1 for names in files.values())


# ---- Packing ----------------------------------------------------------------------------------------------------------


@given(configs(max_layers=2), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**32))
@allow_fixtures(60)
def test_ranks_reassemble_to_the_source(directories, config, tp, seed):
    folder, tensors = directories(), random_tensors_of(config, seed)
    source = write(folder / "source", config, tensors, 1)
    target = convert(plan(source, folder / "packed", Options("packed", tp))).plan.target
    assert read_config(target) == config
    params, _ = load_params(target, config, dtype=config.dtype, num_ranks=tp)
    assert len(jax.tree.leaves(params)) == len(tensors)
    for spec in text_tensors(config):
        leaf = params
        for key in spec.path:
            leaf = leaf[key]
        assert np.asarray(leaf).tobytes() == tensors[spec.name].tobytes(), spec.name


# ---- Manifests --------------------------------------------------------------------------------------------------------

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
names_of_files = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names_of_files


@st.composite
def manifests(draw):
    format = draw(st.sampled_from(["hf", "orbax", "packed"]))
    tp = draw(st.sampled_from([1, 2, 4, 8])) if format == "packed" else 1
    ranks = st.lists(digests, min_size=tp, max_size=tp).map(tuple) if format == "packed" else st.just(())
    report = st.fixed_dictionaries(
        {
            "relative_rms": st.floats(0, 1),
            "worst_block": st.floats(0, 1),
            "worst_block_index": st.lists(st.integers(0, 999), max_size=5),
            "saturated": st.integers(0, 9),
        }
    )
    entries = st.builds(TensorEntry, st.sampled_from(list(DTYPE_NAMES)), digests, ranks, st.none() | report)
    return Manifest(
        format=format,
        tp=tp,
        config_sha256=draw(digests),
        conversion=draw(digests),
        files={"config.json": draw(digests)},
        source=draw(st.dictionaries(names_of_files, values, max_size=3)),
        not_carried=draw(st.dictionaries(names_of_files, values, max_size=3)),
        tensors=draw(st.dictionaries(names_of_files, entries, max_size=4)),
    )


@given(manifests())
@allow_fixtures(100)
def test_manifests_survive_their_file(directories, manifest):
    directory = directories()
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    assert read_manifest(directory) == manifest


junk = values | st.just([]) | st.just({}) | st.just([["a", 1]]) | st.just("0" * 64) | st.just(10**4000)


@given(manifests(), junk, st.randoms(use_true_random=False))
@allow_fixtures(200)
def test_a_changed_manifest_is_refused_or_means_what_it_says(directories, manifest, value, random):
    raw = copy.deepcopy(manifest.to_json())
    places = [(raw, key) for key in raw]
    places += [(raw["tensors"], name) for name in raw["tensors"]]
    places += [(entry, key) for entry in raw["tensors"].values() for key in entry]
    holder, key = random.choice(places)
    holder[key] = value
    directory = directories()
    (directory / MANIFEST_FILE).write_text(json.dumps(raw))
    try:
        found = read_manifest(directory)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000 and MANIFEST_FILE in str(error)
        return
    assert found is not None
    again = found.to_json()
    for entry in raw["tensors"].values():  # a field that is left out has one meaning with one that is empty
        for optional in ("rank_sha256", "quantization"):
            if not entry.get(optional, 1):
                del entry[optional]
    assert again == raw | {"version": again["version"]} and type(again["tp"]) is int


@given(st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names_of_files, inner, max_size=3)))
@allow_fixtures(100)
def test_any_json_is_refused_as_a_manifest_and_as_a_config(directories, value):
    directory = directories()
    assume(not (isinstance(value, dict) and {"format", "model_type"} & value.keys()))
    for file in (MANIFEST_FILE, "config.json"):
        (directory / file).write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=MANIFEST_FILE):
        read_manifest(directory)
    with pytest.raises(ValueError, match=r"model_type|config\.json"):
        ModelConfig.from_hf(value)
