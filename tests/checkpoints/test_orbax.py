"""Orbax checkpoints: stock Orbax restores ours and its own are read; damage of any kind is one line of error."""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import orbax
from checkpoints.orbax import OrbaxReader, OrbaxSink, array_name, stored_names
from checkpoints.shards import CheckpointError
from muse_jax.config import MUSE_SPARK_OPEN
from muse_jax.layout import TensorSpec, parameter_tree, tensors

ROOT = str(Path(__file__).parents[2])
BF16, FP32, FP8 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn))


@pytest.fixture(scope="module")
def config(small_config):
    """With NVFP4 experts, so that there are all dtypes; a head count that eight ranks divide."""
    return dataclasses.replace(small_config, dtype="bfloat16", nvfp4_layers=(0,))


@pytest.fixture(scope="module")
def arrays(config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(spec: TensorSpec) -> np.ndarray:
        if spec.dtype == np.uint8:
            return rng.integers(0, 256, spec.param_shape, np.uint8)
        return rng.standard_normal(spec.param_shape, np.float32).astype(spec.dtype_in(BF16))

    return {spec.name: draw(spec) for spec in tensors(config)}


@pytest.fixture(scope="module")
def params(config, arrays):
    return parameter_tree(config, lambda spec: jnp.asarray(arrays[spec.name]))


def set_small_pieces(patch):
    """Sizes at which the small model has arrays of several chunks and several pieces."""
    patch.setattr(orbax, "_PIECE_BYTES", 2048)
    patch.setattr(orbax, "_CHUNK_BYTES", 1024)


@pytest.fixture
def small_pieces(monkeypatch):
    set_small_pieces(monkeypatch)


def write(directory, arrays, config, names=None, finish=True) -> OrbaxSink:
    sink = OrbaxSink(directory, tensors(config), {name: array.dtype for name, array in arrays.items()})
    sink.create()
    for spec in tensors(config):
        if names is None or spec.name in names:
            for index in sink.pieces(spec):
                sink.write(spec, index, arrays[spec.name][index])
            sink.sync([spec])
    if finish:
        sink.finish()
    return sink


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, config, arrays):
    with pytest.MonkeyPatch.context() as patch:
        set_small_pieces(patch)
        directory = tmp_path_factory.mktemp("pristine") / "own"
        write(directory, arrays, config)
    return directory


@pytest.fixture
def own(tmp_path, pristine, small_pieces):
    """A checkpoint that OrbaxSink wrote in many chunks."""
    return shutil.copytree(pristine, tmp_path / "own")


def save_stock(directory, tree, **options):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))


def save_default(directory, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def save_steps(directory, tree):
    with ocp.CheckpointManager(directory.parent / "steps") as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
    os.rename(directory.parent / "steps" / "7", directory)


STOCK = {
    "standard": save_default,
    "manager": save_steps,
    "v1": ocp_v1.save,
    "zarr2": lambda directory, tree: save_stock(directory, tree, use_ocdbt=False),
    "zarr3": lambda directory, tree: save_stock(directory, tree, use_ocdbt=False, use_zarr3=True),
    "ocdbt_zarr3": lambda directory, tree: save_stock(directory, tree, use_zarr3=True),
    "uncompressed": lambda directory, tree: save_stock(directory, tree, use_ocdbt=False, use_compression=False),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, params):
    """The directory of what stock Orbax saves in one of these ways; not to be changed."""
    return functools.cache(lambda way: save_as(way, tmp_path_factory.mktemp(way) / "stock", params))


def save_as(way, directory, tree):
    STOCK[way](directory, tree)
    return directory


@pytest.fixture
def stock(tmp_path, saved):
    """A copy of it, to be damaged."""
    return lambda way: shutil.copytree(saved(way), tmp_path / "stock")


def assert_reads(reader, arrays):
    for spec in reader.specs:
        array = arrays[spec.name]
        assert reader.dtype(spec) == array.dtype
        assert reader.num_bytes(spec) == array.nbytes
        got = reader.read(spec, array.dtype)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8), err_msg=spec.name)


def assert_restored(tree, arrays, config):
    want, structure = jax.tree.flatten(parameter_tree(config, lambda spec: arrays[spec.name]))
    assert jax.tree.structure(tree) == structure
    for got, array in zip(jax.tree.leaves(tree), want, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(got), array)


def one_line(excinfo) -> str:
    message = str(excinfo.value)
    assert "\n" not in message
    assert len(message) < 1200
    assert "source locations" not in message
    return message


# ---- Stock Orbax reads what the sink wrote ----------------------------------------------------------------------------


def sharded_target(config, arrays):
    mesh = Mesh(np.array(jax.devices()[:8]), ("tp",))

    def leaf(spec):
        axes = ["tp" if axis == spec.shard_axis and spec.num_parts == 8 else None for axis in range(len(spec.param_shape))]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(spec.param_shape, arrays[spec.name].dtype, sharding=sharding)

    return parameter_tree(config, leaf)


def restore_standard(directory, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory, target)


def restore_pytree(directory, target):
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(directory, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))


def restore_manager(directory, target):
    """As a step of a CheckpointManager, whose item `default` it is."""
    shutil.copytree(directory, directory.parent / "steps" / "0" / "default")
    with ocp.CheckpointManager(directory.parent / "steps") as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(target))


@pytest.mark.parametrize("restore", [restore_standard, restore_pytree, restore_manager, ocp_v1.load])
def test_stock_orbax_restores_with_shardings(own, config, arrays, restore):
    target = sharded_target(config, arrays)
    restored = restore(own, target)
    assert_restored(restored, arrays, config)
    jax.tree.map(lambda got, want: np.testing.assert_equal(got.sharding, want.sharding), restored, target)
    assert sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(restored)) > 10


@pytest.mark.parametrize("restore", [restore_standard, ocp_v1.load])
def test_without_a_target_layer_indices_are_strings_and_leaves_are_numpy(own, config, arrays, restore):
    restored = restore(own, None)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(restored))
    assert list(restored["layers"]) == ["0", "1"]
    restored["layers"] = {int(key): layer for key, layer in restored["layers"].items()}
    assert_restored(restored, arrays, config)


def test_the_directory_holds_nothing_but_arrays_and_metadata(own, config, arrays):
    chunks = sum(path.stat().st_size for path in own.rglob("c*") if path.is_file())
    assert OrbaxSink("nowhere", tensors(config), {name: array.dtype for name, array in arrays.items()}).num_bytes == chunks
    names = {array_name(spec) for spec in tensors(config)}
    assert set(os.listdir(own)) == names | {"_METADATA", "_CHECKPOINT_METADATA"}


# ---- The reader reads both --------------------------------------------------------------------------------------------


def test_reads_what_the_sink_wrote(own, config, arrays):
    reader = OrbaxReader(own, config)
    assert_reads(reader, arrays)
    assert reader.specs == tensors(config)
    assert reader.config is config
    assert stored_names(own) == {array_name(spec) for spec in reader.specs}
    assert reader.report.num_tensors == len(arrays)
    assert reader.report.num_bytes == sum(array.nbytes for array in arrays.values())
    assert reader.report.num_skipped == reader.report.skipped_bytes == 0
    assert reader.report.dtypes == ("BF16", "F32", "F8_E4M3", "U8")


@pytest.mark.parametrize("way", STOCK)
@pytest.mark.parametrize("large_chunks", [False, True])
def test_reads_what_stock_orbax_saved(saved, config, arrays, way, large_chunks, monkeypatch):
    if large_chunks:  # than a piece
        monkeypatch.setattr(orbax, "_PIECE_BYTES", 256)
    assert_reads(OrbaxReader(saved(way), config), arrays)


def test_reads_arrays_that_were_sharded_and_layers_in_a_list(tmp_path, config, arrays, params):
    target = sharded_target(config, arrays)
    tree = jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), params, target)
    tree["layers"] = list(tree["layers"].values())
    save_default(tmp_path / "stock", tree)
    assert_reads(OrbaxReader(tmp_path / "stock", config), arrays)


def test_reads_any_box(own, config, arrays, rng):
    reader = OrbaxReader(own, config)
    for spec in reader.specs:
        array = arrays[spec.name]
        for _ in range(3):
            ends = [sorted(rng.integers(0, size + 1, 2)) for size in array.shape[: rng.integers(0, array.ndim + 1)]]
            index = tuple(slice(int(start), int(stop)) for start, stop in ends)
            np.testing.assert_array_equal(reader.read(spec, array.dtype, index), array[index], err_msg=f"{spec.name} {index}")


def test_large_chunks_are_decoded_once(stock, config, arrays, monkeypatch):
    directory = stock("standard")
    reader = OrbaxReader(directory, config)
    monkeypatch.setattr(orbax, "_PIECE_BYTES", 256)
    spec = next(spec for spec in reader.specs if spec.path == ("embedding",))
    reader.read(spec, BF16, (slice(0, 1),))
    shutil.rmtree(directory)
    np.testing.assert_array_equal(reader.read(spec, BF16), arrays[spec.name])
    other = next(spec for spec in reader.specs if spec.path == ("lm_head",))
    with pytest.raises(CheckpointError):
        reader.read(other, BF16)
    with pytest.raises(CheckpointError):  # the first is not kept beside the second
        reader.read(spec, BF16)


def test_reads_no_chunk_but_those_of_the_box(own, config, arrays):
    reader = OrbaxReader(own, config)
    spec = next(spec for spec in reader.specs if spec.path == ("embedding",))
    chunks = sorted((own / "embedding").glob("c.*"), key=lambda path: int(path.name.split(".")[1]))
    assert len(chunks) >= 8
    rows = len(arrays[spec.name]) // len(chunks)
    for chunk in chunks[1:]:
        chunk.unlink()
    np.testing.assert_array_equal(reader.read(spec, BF16, (slice(0, rows),)), arrays[spec.name][:rows])
    with pytest.raises(CheckpointError):
        reader.read(spec, BF16, (slice(0, rows + 1),))


def test_converts_between_bf16_and_fp32_and_nothing_else(tmp_path, config, arrays):
    wide = {name: array.astype(FP32) if array.dtype == BF16 else array for name, array in arrays.items()}
    halves = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1e-40, np.inf], FP32)  # the first three are ties
    norm = next(spec for spec in tensors(config) if spec.path == ("final_norm",))
    wide[norm.name] = np.resize(halves, norm.param_shape)
    write(tmp_path / "wide", wide, config)
    reader = OrbaxReader(tmp_path / "wide", config)
    narrow = reader.read(norm, BF16)
    assert narrow.dtype == BF16
    np.testing.assert_array_equal(narrow[:3].astype(FP32), [1, 1 + 2**-6, -1])
    np.testing.assert_array_equal(narrow, wide[norm.name].astype(BF16))

    write(tmp_path / "narrow", arrays, config)
    reader = OrbaxReader(tmp_path / "narrow", config)
    np.testing.assert_array_equal(reader.read(norm, FP32), arrays[norm.name].astype(FP32))
    codes = next(spec for spec in reader.specs if spec.dtype == np.uint8)
    scales = next(spec for spec in reader.specs if spec.dtype == FP8)
    for spec, dtype in ((codes, FP32), (codes, FP8), (scales, BF16), (norm, np.uint8), (norm, np.float16)):
        with pytest.raises(CheckpointError, match="cannot be read as"):
            reader.read(spec, dtype)


# ---- What does not fit the config -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["standard", "zarr3"])
def test_names_every_kind_of_fault(tmp_path, config, params, way):
    tree = jax.tree.map(lambda leaf: leaf, params)
    del tree["final_norm"]
    tree["layers"][1]["surplus"] = jnp.ones(3)
    tree["embedding"] = tree["embedding"][1:]
    tree["layers"][0]["mlp"]["gate_up"]["codes"] = tree["layers"][0]["mlp"]["gate_up"]["codes"].astype(jnp.int8)
    tree["lm_head"] = tree["lm_head"].astype(jnp.float16)
    save_as(way, tmp_path / "stock", tree)
    with pytest.raises(CheckpointError) as excinfo:
        OrbaxReader(tmp_path / "stock", config)
    message = one_line(excinfo)
    for part in (
        "1 unknown: 'layers.1.surplus'",
        "1 missing: 'final_norm'",
        "'embedding' is [263, 64], expected [264, 64]",
        "'layers.0.mlp.gate_up.codes' is I8, expected U8",
        "'lm_head' is F16, expected BF16 or F32",
    ):
        assert part in message


def test_fp32_parameters_may_be_stored_as_bf16(tmp_path, config, arrays):
    router = next(spec for spec in tensors(config) if spec.path[-1] == "router")
    stored = {**arrays, router.name: arrays[router.name].astype(BF16)}
    write(tmp_path / "own", stored, config)
    reader = OrbaxReader(tmp_path / "own", config)
    np.testing.assert_array_equal(reader.read(router, FP32), stored[router.name].astype(FP32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.write_text(""), "not a directory"),
        (lambda path: path.mkdir(), "not an Orbax checkpoint"),
    ],
)
def test_no_checkpoint(tmp_path, config, make, message):
    make(tmp_path / "none")
    with pytest.raises(CheckpointError, match=message):
        OrbaxReader(tmp_path / "none", config)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tree_metadata": {}}',
        '{"tree_metadata": {"a": 1}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": 1}]}}}',
        '{"tree_metadata": {"a": {"key_metadata": null}}}',
        '{"tree_metadata": {"a": {"key_metadata": [{"key": "a"}]}}, "use_ocdbt": true}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
    ],
)
def test_tree_metadata_is_checked(own, config, text):
    (own / "_METADATA").write_text(text)
    with pytest.raises(CheckpointError) as excinfo:
        OrbaxReader(own, config)
    one_line(excinfo)


@pytest.mark.parametrize("file", ["_METADATA", "embedding/zarr.json"])
def test_metadata_is_bounded(own, config, file):
    os.truncate(own / file, (32 << 20) + 1)
    with pytest.raises(CheckpointError, match="larger than 33554432 bytes"):
        OrbaxReader(own, config)


def test_manifest_is_bounded(stock, config):
    directory = stock("standard")
    os.truncate(directory / "manifest.ocdbt", (32 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt: missing, or larger"):
        OrbaxReader(directory, config)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a/../../b"])
def test_paths_in_the_metadata_are_names_and_never_opened(own, config, name):
    metadata = json.loads((own / "_METADATA").read_text())
    entry = metadata["tree_metadata"]["('final_norm',)"]
    entry["key_metadata"][0]["key"] = name
    (own / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match=re.escape(f"1 unknown: '{name}'")):
        OrbaxReader(own, config)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"shape": [2**60, 64]}, "'embedding' is [1152921504606846976, 64]"),
        ({"shape": [2**62, 2**62]}, "'embedding'"),
        ({"shape": [-1, 64]}, "'embedding'"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 64]}}}, "larger than the array"),
        ({"data_type": "int4"}, "'embedding' is int4, expected BF16 or F32"),
        ({"data_type": "object"}, "'embedding' cannot be read"),
        ({"codecs": [{"name": "bytes"}, {"name": "run_this"}]}, "run_this"),
        ({"storage_transformers": [{"name": "elsewhere"}]}, "'embedding' cannot be read"),
        ({"kvstore": {"driver": "file", "path": "/etc/"}}, "'embedding' cannot be read"),
        ({"node_type": "group"}, "'embedding' cannot be read"),
    ],
)
def test_array_metadata_is_checked(own, config, edit, message):
    path = own / "embedding" / "zarr.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(CheckpointError) as excinfo:
        OrbaxReader(own, config)
    assert message in one_line(excinfo)


def test_a_missing_array_is_named(own, config):
    shutil.rmtree(own / "embedding")
    with pytest.raises(CheckpointError, match=r"embedding/zarr\.json: no such file"):
        OrbaxReader(own, config)


@pytest.mark.parametrize("file", ["embedding/c.0.0", "embedding/zarr.json", "_METADATA"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent / "nowhere")])
def test_special_files_are_not_opened(own, config, file, make):
    (own / file).unlink()
    make(own / file)
    with pytest.raises(CheckpointError, match=r"neither a file nor a directory|not an Orbax checkpoint"):
        OrbaxReader(own, config)


def test_files_may_be_links(own, config, arrays):
    os.rename(own / "embedding" / "c.0.0", own.parent / "blob")
    (own / "embedding" / "c.0.0").symlink_to(own.parent / "blob")
    os.rename(own / "lm_head", own.parent / "array")
    (own / "lm_head").symlink_to(own.parent / "array")
    assert_reads(OrbaxReader(own, config), arrays)


# ---- Damaged chunks ---------------------------------------------------------------------------------------------------


def largest_file(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


DAMAGES = [os.unlink, truncate, flip_a_bit, replace_by_directory, lambda path: os.truncate(path, 0)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("path", [("embedding",), ("final_norm",), ("layers", 0, "mlp", "gate_up", "codes")])
def test_damage_is_an_error(own, config, arrays, damage, path):
    spec = next(spec for spec in tensors(config) if spec.path == path)
    damage(max((own / array_name(spec)).glob("c*")))
    reader = OrbaxReader(own, config)
    with pytest.raises(CheckpointError) as excinfo:
        reader.read(spec, arrays[spec.name].dtype)
    message = one_line(excinfo)
    assert array_name(spec) in message
    assert "copy or convert it again" in message


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_for_stock_orbax(tmp_path, damage):
    # Of one array: when the restore of one fails, Orbax drops the coroutines of others, which warns.
    spec = awkward((5, 7))
    sink = OrbaxSink(tmp_path, [spec], {spec.name: FP32})
    sink.create()
    (index,) = sink.pieces(spec)
    sink.write(spec, index, np.ones(spec.shape, FP32))
    sink.finish()
    assert (restore_standard(tmp_path, None)[spec.path[0]] == 1).all()
    damage(tmp_path / spec.path[0] / "c.0.0")
    with pytest.raises(ValueError, match=r"Error reading|is missing|Is a directory"):
        restore_standard(tmp_path, None)


@pytest.mark.parametrize("damage", [os.unlink, halve, replace_by_directory, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("way", ["standard", "zarr2", "zarr3", "uncompressed"])
def test_damage_of_stock_checkpoints_is_an_error(stock, config, arrays, damage, way):
    directory = stock(way)
    damage(largest_file(directory / ("" if way == "standard" else "embedding")))
    with pytest.raises(CheckpointError) as excinfo:
        assert_reads(OrbaxReader(directory, config), arrays)
    one_line(excinfo)


def test_a_chunk_that_decodes_to_more_than_its_size(tmp_path, stock, config, arrays):
    """Compressed data are no way to an allocation of any size."""
    directory = stock("zarr2")
    metadata = json.loads((directory / "embedding" / ".zarray").read_text())
    size = 1 << 28
    bomb = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/bomb/"}}
    bomb["metadata"] = {"shape": [size], "chunks": [size], "dtype": "|u1", "compressor": metadata["compressor"]}
    zeros = np.broadcast_to(np.uint8(1), size)
    ts.open(bomb, create=True).result().write(zeros).result()
    os.replace(tmp_path / "bomb" / "0", directory / "embedding" / "0.0")
    with pytest.raises(CheckpointError, match="End of data expected"):
        assert_reads(OrbaxReader(directory, config), arrays)


# ---- The sink ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvfp4_layers", [(), tuple(range(5, 62))])
def test_chunks_and_pieces_of_the_released_model(nvfp4_layers):
    """As 816 billion parameters: whole chunks, bounded, in order, and no rank's part shares a chunk with another's."""
    config = dataclasses.replace(MUSE_SPARK_OPEN, nvfp4_layers=nvfp4_layers)
    specs = {(spec.param_shape, spec.dtype, spec.shard_axis): spec for spec in tensors(config)}
    for spec in specs.values():
        dtype, shape = spec.dtype_in(BF16), spec.param_shape
        chunk = orbax._chunk_shape(spec, dtype)
        assert math.prod(chunk) * dtype.itemsize <= 32 << 20
        if spec.shard_axis is not None:
            assert (shape[spec.shard_axis] // 8) % chunk[spec.shard_axis] == 0
        sink = OrbaxSink.__new__(OrbaxSink)  # of which pieces() needs the dtypes only
        sink._dtypes = {spec.name: dtype}
        pieces = list(sink.pieces(spec))
        assert sum(math.prod(s.stop - s.start for s in piece) for piece in pieces) == spec.size
        starts = [tuple(s.start for s in piece) for piece in pieces]
        assert starts == sorted(set(starts))
        for piece in pieces:
            assert math.prod(s.stop - s.start for s in piece) * dtype.itemsize <= 64 << 20
            for s, part, size in zip(piece, chunk, shape, strict=True):
                assert s.start % part == 0
                assert s.stop % part == 0 or s.stop == size
        # Pieces of the largest arrays are runs of memory and not small: few files, few calls.
        if spec.size > 1 << 26:
            assert all(s == slice(0, size) for s, size in zip(pieces[0][2:], shape[2:], strict=True))
            assert math.prod(chunk) * dtype.itemsize >= 8 << 20


def awkward(shape, axis=None, dtype=None):
    return TensorSpec(f"t{shape}", shape, ("t" + "_".join(map(str, shape)),), shape, dtype, axis)


AWKWARD = (awkward(()), awkward((1,)), awkward((101,)), awkward((1, 997)), awkward((7, 1, 331)), awkward((1, 2, 8, 65), 2))


def test_shapes_that_no_chunk_divides(tmp_path, small_pieces, rng):
    arrays = {spec.name: np.asarray(rng.standard_normal(spec.shape), FP32) for spec in AWKWARD}
    sink = OrbaxSink(tmp_path, AWKWARD, dict.fromkeys(arrays, FP32))
    sink.create()
    for spec in AWKWARD:
        for index in sink.pieces(spec):
            sink.write(spec, index, arrays[spec.name][index])
        sink.sync([spec])
    sink.finish()
    restored = restore_standard(tmp_path, None)
    for spec in AWKWARD:
        np.testing.assert_array_equal(restored[spec.path[0]], arrays[spec.name])


def test_different_arrays_are_written_by_several_threads(tmp_path, config, arrays, small_pieces):
    sink = OrbaxSink(tmp_path / "own", tensors(config), {name: array.dtype for name, array in arrays.items()})
    sink.create()

    def write_one(spec):
        for index in sink.pieces(spec):
            sink.write(spec, index, arrays[spec.name][index])
        sink.sync([spec])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write_one, tensors(config)))
    sink.finish()
    reader = OrbaxReader(tmp_path / "own", config)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = dict(pool.map(lambda spec: (spec.name, reader.read(spec, arrays[spec.name].dtype)), reader.specs))
    assert all(got[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_resumes_over_what_an_interrupted_run_left(tmp_path, config, arrays, small_pieces):
    specs = tensors(config)
    whole = {spec.name for spec in specs[:5]}
    sink = write(tmp_path / "own", arrays, config, names=whole, finish=False)
    half = specs[5]
    first, *rest = sink.pieces(half)
    assert rest
    sink.write(half, first, np.zeros_like(arrays[half.name][first]))  # to be overwritten
    (tmp_path / "own" / array_name(half) / "c.1.0.__lock").write_bytes(b"half a chunk")
    (tmp_path / "own" / ".orbax-metadata.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "own" / ".orbax-metadata").mkdir()
    (tmp_path / "own" / ".orbax-metadata" / "_METADATA").write_text("{")

    sink = OrbaxSink(tmp_path / "own", specs, {name: array.dtype for name, array in arrays.items()})
    sink.create()
    with pytest.raises(CheckpointError, match="missing or incomplete"):
        sink.sync([half])
    with pytest.raises(CheckpointError, match="missing or incomplete"):
        sink.finish()
    assert not (tmp_path / "own" / "_METADATA").exists()
    write(tmp_path / "own", arrays, config, names=arrays.keys() - whole)
    assert_reads(OrbaxReader(tmp_path / "own", config), arrays)
    assert not list((tmp_path / "own").glob(".orbax*"))
    write(tmp_path / "own", arrays, config, names=())  # finish twice
    assert_restored(restore_standard(tmp_path / "own", sharded_target(config, arrays)), arrays, config)


def test_finishing_can_be_interrupted_anywhere(tmp_path, config, arrays, interrupted):
    sink = write(tmp_path / "own", arrays, config, finish=False)
    for call in range(1, 100):
        with interrupted(call) as count:
            try:
                sink.finish()
            except KeyboardInterrupt:
                assert count() == call
                continue
        break
    assert call > 3
    assert_reads(OrbaxReader(tmp_path / "own", config), arrays)
    assert not list((tmp_path / "own").glob(".orbax*"))


def test_a_killed_writer_leaves_no_partial_chunk(tmp_path):
    """Whatever moment kill -9 comes at, chunk files are absent or whole, and the next run completes them."""
    code = """
import sys, numpy as np
from checkpoints.orbax import OrbaxSink
from muse_jax.layout import TensorSpec
spec = TensorSpec("t", (64, 1 << 20), ("t",), (64, 1 << 20))
sink = OrbaxSink(sys.argv[1], [spec], {"t": np.dtype(np.uint8)})
sink.create()
for index in sink.pieces(spec):
    for _ in range(200):
        sink.write(spec, index, np.ones([s.stop - s.start for s in index], np.uint8))
        print(flush=True)
"""
    env = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", code, str(tmp_path / "own")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    chunks = list((tmp_path / "own" / "t").glob("c.*[0-9]"))
    assert chunks
    assert {chunk.stat().st_size for chunk in chunks} == {(32 << 20) + 4}
    spec = TensorSpec("t", (64, 1 << 20), ("t",), (64, 1 << 20))
    sink = OrbaxSink(tmp_path / "own", [spec], {"t": np.dtype(np.uint8)})
    sink.create()
    for index in sink.pieces(spec):
        sink.write(spec, index, np.full([s.stop - s.start for s in index], 2, np.uint8))
    sink.sync([spec])
    sink.finish()
    assert (restore_standard(tmp_path / "own", None)["t"] == 2).all()


def test_refuses_a_piece_of_another_dtype_or_shape(tmp_path, config, arrays):
    spec = tensors(config)[0]
    sink = OrbaxSink(tmp_path, tensors(config), {name: array.dtype for name, array in arrays.items()})
    sink.create()
    (index,) = sink.pieces(spec)
    for array in (arrays[spec.name].astype(FP32), arrays[spec.name][1:]):
        with pytest.raises(ValueError, match="embedding: got"):
            sink.write(spec, index, array)


def test_refuses_arrays_begun_with_another_dtype(tmp_path, config, arrays):
    write(tmp_path, arrays, config, names={tensors(config)[0].name}, finish=False)
    wide = {name: array.astype(FP32) if array.dtype == BF16 else array for name, array in arrays.items()}
    with pytest.raises(OSError, match=r"'embedding' cannot be written .*data_type") as excinfo:
        write(tmp_path, wide, config)
    one_line(excinfo)


def test_importing_the_packages_does_not_import_orbax():
    code = "import sys, muse_jax, checkpoints; sys.exit('orbax' in sys.modules or 'tensorstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}).returncode == 0
