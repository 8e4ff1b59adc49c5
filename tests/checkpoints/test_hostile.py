"""Files from strangers. Whatever is in them: one line, five seconds, 300 MB beyond the import, and nothing at the destination.

Each directory is given to `muse_jax.load` and to the converter in forks of one process that has imported the package, so that
time and memory are those of the directory alone. What is bounded is processor time, since tests share their machine; what
waits for ever instead, for a pipe, ends with the wall clock.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from random_weights import random_tensors
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, load_params, read_config
from checkpoints.convert import Options, convert, plan
from muse_jax.layout import packed_tensors, text_tensors
from muse_jax.tokenizer import TemplateLimits, Tokenizer, TokenizerError

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")

ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEGABYTES = 5, 300
HEADER_BYTES, MEMBERS = 32 << 20, 1 << 19  # the limits of checkpoints/shards.py, from both sides
MODEL, INDEX, CONFIG, QUANT = "model.safetensors", "model.safetensors.index.json", "config.json", "hf_quant_config.json"
MANIFEST = "muse_manifest.json"
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'  # seven members
EXPERTS = "model.language_model.layers.0.mlp.experts"

INSPECTOR = """
    import json, os, resource, signal, sys, time, warnings
    import muse_jax
    import muse_jax.tokenizer
    from checkpoints.convert import Options, convert, plan

    warnings.simplefilter("ignore")

    def peak():
        return next(int(line.split()[1]) / 1e3 for line in open("/proc/self/status") if "VmHWM" in line)

    def act(action, source, target):
        if action == "load":
            muse_jax.load(source)
        elif action == "tokenizer":
            muse_jax.tokenizer.Tokenizer.from_directory(source)
        else:
            convert(plan(source, target, Options("packed", 2)))

    def report(*request):
        open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
        resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))  # the machine is not to suffer from a failing test
        before, began = peak(), time.process_time()
        kind = message = None
        try:
            act(*request)
        except ValueError as error:
            kind, message = "ValueError", str(error)
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        return [kind, message, time.process_time() - began, peak() - before]

    print("ready", flush=True)
    for line in sys.stdin:
        reader, writer = os.pipe()
        if os.fork() == 0:
            signal.alarm(60)  # what still waits then ends without a report
            os.write(writer, json.dumps(report(*json.loads(line))).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            print(pipe.read().decode() or "null", flush=True)
        os.wait()
"""


@dataclasses.dataclass
class Report:
    kind: str | None  # of the error
    message: str | None
    seconds: float
    megabytes: float


class Inspector:
    """Runs load, conversion or tokenizer on a directory in a fresh fork and measures it."""

    def __init__(self):
        command = [sys.executable, "-c", textwrap.dedent(INSPECTOR)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True, bufsize=1
        )
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, action, source, target=None):
        self.process.stdin.write(json.dumps([action, str(source), str(target)]) + "\n")
        report = json.loads(self.process.stdout.readline())
        assert report is not None, f"{action} of {source} hangs or dies"
        return Report(*report)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def inspect():
    inspector = Inspector()
    yield inspector
    inspector.close()


@pytest.fixture
def source(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "in" / "source")
    return tmp_path / "in" / "source"


def assert_refused(inspect, source, *culprits, actions=("load", "convert")):
    """Each action fails with one line that names the culprits, in time, in memory, and leaves nothing."""
    out = source.parent.parent / "out"
    out.mkdir(exist_ok=True)
    for action in actions:
        report = inspect(action, source, out / "target")
        if report.seconds >= SECONDS:  # a busy machine makes processor time longer, but hardly twice in a row
            report = inspect(action, source, out / "target")
        assert report.kind == "ValueError", report
        assert "\n" not in report.message and len(report.message) < 1000, report.message[:2000]
        for culprit in culprits:
            assert re.search(culprit, report.message), report.message
        assert report.seconds < SECONDS and report.megabytes < MEGABYTES, report
        assert not list(out.iterdir())


def assert_harmless(inspect, source, actions=("load",)):
    for action in actions:
        report = inspect(action, source)
        assert report.kind is None, report
        assert report.seconds < SECONDS and report.megabytes < MEGABYTES, report


def write_header(path, text, data=b""):
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tensors(path, entries):
    write_header(path, ("{" + ",".join(entries) + "}").encode())


def change_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return json.dumps({"lm_head.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


# ---- Headers ----------------------------------------------------------------------------------------------------------


HEADERS = {  # text of a header before 16 bytes of data
    "offset beyond the file": entry(offsets=(0, 17)),
    "offset of 2^63": entry(offsets=(0, 2**63)),
    "offset of 2^64 + 16": entry(offsets=(0, 2**64 + 16)),
    "negative offset": entry(offsets=(-16, 0)),
    "offsets in reverse": entry(offsets=(16, 0)),
    "fractional offset": entry(offsets=(0, 16.0)),
    "hole before the tensor": entry(shape=(1, 1), offsets=(12, 16)),
    "overlapping tensors": entry()[:-1] + b"," + entry().replace(b"lm_head", b"norm")[1:],
    "shape that overflows 64 bits": entry(shape=(2**32, 2**32)),
    "shape that overflows with a zero": entry(shape=(2**63, 2**63, 0), offsets=(0, 0)),
    "size of more than 64 bits": entry(shape=(2**64 + 2, 2)),
    "negative size": entry(shape=(-2, -2)),
    "unknown dtype": entry(dtype="PICKLE"),
    "a million axes": entry(shape=(1,) * 500_000 + (2, 2)),
    "a hundred axes": entry(shape=(1,) * 100 + (2, 2)),
    "name that is not UTF-8": entry().replace(b"lm_head", b"lm_\xff\xfehead"),
    "name that is half a surrogate": entry().replace(b"lm_head", b"\\ud800"),
    "name of a megabyte": entry().replace(b"lm_head", b"n" * 1_000_000),
    "name with line ends": entry().replace(b"lm_head", b"lm\\n\\r\\u2028head"),
    "name with a path": entry().replace(b"lm_head", b"../../../../tmp/x"),
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "no tensors": b"{}",
    "metadata that is null": b'{"__metadata__":null}',
    "metadata that is a number": b'{"__metadata__":7}',
    "metadata of numbers": b'{"__metadata__":{"a":7}}',
    "NaN": b'{"lm_head.weight":NaN}',
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(inspect, source, name):
    write_header(source / MODEL, HEADERS[name], bytes(16))
    assert_refused(inspect, source)


LARGE_HEADERS = {
    "as many tensors as fit": lambda: "{" + ",".join(f'"{i:x}":{EMPTY}' for i in range(600_000)) + "}",
    "as many tensors as are read": lambda: "{" + ",".join(f'"{i:x}":{EMPTY}' for i in range(MEMBERS // 7 - 1)) + "}",
    "tensors of the towers": lambda: "{" + ",".join(f'"rotary_emb{i}.{i:0300}":{EMPTY}' for i in range(MEMBERS // 7 - 1)) + "}",
    "tensors in list form": lambda: "{" + ",".join(f'"{i:x}":["U8",[0],[0,0]]' for i in range(MEMBERS // 7 - 1)) + "}",
    "two million tensors in list form": lambda: "{" + ",".join(f'"{i:x}":["U8",[],[0,0]]' for i in range(1_300_000)) + "}",
    "metadata": lambda: '{"__metadata__":{' + ",".join(f'"{i:x}":"{i:055}"' for i in range(500_000)) + "}}",
    "one shape": lambda: '{"a":{"dtype":"U8","shape":[' + "0," * (MEMBERS - 9) + '0],"data_offsets":[0,0]}}',
    "lists in lists": lambda: '{"a":[' + "[[[[[]]]]]," * (HEADER_BYTES // 11 - 9) + "[]]}",
    "empty objects": lambda: '{"a":[' + "{}," * (HEADER_BYTES // 3 - 9) + "{}]}",
    "numbers": lambda: '{"a":[' + "1.5," * (HEADER_BYTES // 4 - 9) + "1]}",
    "one number": lambda: '{"a":' + "7" * (HEADER_BYTES - 9) + "}",
    "open lists": lambda: "[" * HEADER_BYTES,
    "open lists within the limit": lambda: '{"a":' + "[" * (MEMBERS - 9),
    "open objects": lambda: '{"a":' * (MEMBERS - 9),
    "one name": lambda: '{"' + "n" * (HEADER_BYTES - 99) + f'":{EMPTY}}}',
    "one name of escapes": lambda: '{"' + r"\ud83d\ude00" * (HEADER_BYTES // 12 - 99) + f'":{EMPTY}}}',
    "one name with a wide character": lambda: '{"' + "n" * (HEADER_BYTES - 99) + "\U0001f600" + f'":{EMPTY}}}',
    "one name with a wide escape": lambda: '{"' + "n" * (HEADER_BYTES - 99) + r"\ud83d\ude00" + f'":{EMPTY}}}',
    "spaces": lambda: "{}" + " " * (HEADER_BYTES - 2),
}


@pytest.mark.parametrize("name", LARGE_HEADERS)
def test_large_headers(inspect, source, name):
    text = LARGE_HEADERS[name]().encode()
    assert len(text) <= HEADER_BYTES
    write_header(source / MODEL, text)
    assert_refused(inspect, source, str(source))


@pytest.mark.parametrize("length", [HEADER_BYTES + 1, 100_000_001, 2**63, 2**64 - 1])
def test_header_above_the_limit(inspect, source, length):
    with open(source / MODEL, "r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(200_000_000)
    assert_refused(inspect, source, f"header of {length} bytes; at most {HEADER_BYTES} are read")


# ---- Indices ----------------------------------------------------------------------------------------------------------


def write_shards(source, shards, padding=0):
    """An index and shards, given as lists of names, of empty tensors."""
    (source / MODEL).unlink(missing_ok=True)
    for i, names in enumerate(shards):
        text = ("{" + ",".join(f'"{name}":{EMPTY}' for name in names) + "}").encode()
        write_header(source / f"s{i}.safetensors", text + b" " * max(0, padding - len(text)))
    weight_map = {name: f"s{i}.safetensors" for i, names in enumerate(shards) for name in names}
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_index_of_a_million_names(inspect, source):
    (source / MODEL).unlink()
    names = ",".join(f'"{i:014x}":"s.safetensors"' for i in range(1_000_000))
    (source / INDEX).write_text('{"weight_map":{' + names + "}}")
    assert HEADER_BYTES * 0.9 < (source / INDEX).stat().st_size < HEADER_BYTES
    assert_refused(inspect, source, f"{INDEX}: about 1000001 JSON members; at most {MEMBERS} are read")


def test_index_within_the_members_but_of_too_many_tensors(inspect, source):
    write_shards(source, [[]])
    (source / INDEX).write_text(json.dumps({"weight_map": {f"{i:040x}": "s0.safetensors" for i in range(MEMBERS - 9)}}))
    assert_refused(inspect, source, f"{INDEX}: more than 200000 tensors")


def test_as_many_tensors_as_an_index_may_list(inspect, source):
    names = [f"{EXPERTS}.{i}.gate_proj.weight_scale_2" for i in range(199_999)]
    write_shards(source, [names[i::3] for i in range(3)])
    assert_refused(inspect, source, "199999 tensors for num_local_experts|199999 unknown|199983 unknown")


def test_as_many_shards_as_an_index_may_name(inspect, source):
    write_shards(source, [[f"{i}", f"{i}b"] for i in range(4096)])
    assert_refused(inspect, source, "8192 unknown")
    write_shards(source, [[f"{i}"] for i in range(4097)])
    assert_refused(inspect, source, "more than 200000 tensors or 4096 files")


def test_shards_of_empty_headers(inspect, source):
    write_shards(source, [[f"{i}"] for i in range(5)], padding=HEADER_BYTES)
    assert_refused(inspect, source, "headers of more than 67108864 bytes")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../b.safetensors", "..", "x" * 10_000_000])
def test_index_that_points_elsewhere(inspect, source, name):
    shutil.copy(source / MODEL, source.parent / "outside.safetensors")
    write_shards(source, [["a"]])
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert_refused(inspect, source, f"{INDEX}: 'a' is in '.*expected a file of this directory")


@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/mem", ".", "model.safetensors", "nowhere"])
def test_links(inspect, source, target):
    for file in (MODEL, INDEX, CONFIG):
        for name in (MODEL, INDEX):
            (source / name).unlink(missing_ok=True)
        (source / file).unlink(missing_ok=True)
        (source / file).symlink_to(target if file == MODEL else target.replace("model.safetensors", file))
        assert_refused(inspect, source, re.escape(str(source)))


@pytest.mark.parametrize("file", [MODEL, INDEX, CONFIG, QUANT, MANIFEST, "tokenizer.json", "_METADATA"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "folder", "zero"]
)
def test_what_is_no_file(inspect, source, file, make):
    if file == INDEX:
        (source / MODEL).unlink()
    (source / file).unlink(missing_ok=True)
    make(source / file)
    # The tokenizer is opened by load alone: a conversion copies regular files and no others.
    assert_refused(
        inspect, source, re.escape(str(source)), actions=("load",) if file == "tokenizer.json" else ("load", "convert")
    )


# ---- Configs ----------------------------------------------------------------------------------------------------------


def test_table_of_the_largest_config(inspect, source):
    config = json.loads((source / CONFIG).read_text())
    for field in ("layer_types", "mlp_layer_types", "layer_rope_theta"):
        del config[field]
    (source / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": 4096, "num_local_experts": 65_536}))
    assert_refused(inspect, source, "4083. missing|missing")
    # One tensor for each of half the experts of three layers, the first ones packed.
    config |= {"num_hidden_layers": 3, "num_local_experts": 32_768}
    (source / CONFIG).write_text(json.dumps(config))
    names = [f"model.language_model.layers.{i}.mlp.experts.{e}.gate_proj.weight" for i in range(3) for e in range(32_768)]
    names += [name.replace("gate", "down") for name in names]
    scales = [f"model.language_model.layers.{i}.mlp.experts.0.gate_proj.weight_scale" for i in range(3)]
    write_shards(source, [names[i::4] for i in range(4)] + [scales])
    assert_refused(inspect, source, "has 65537 tensors for num_local_experts = 32768")


@pytest.mark.parametrize(
    "text",
    ['{"model_type":' + "[" * 600 + "]" * 600 + "}", '{"model_type":"muse_spark","text_config":' + "[" * 900 + "]" * 900 + "}",
     '{"model_type":' + "7" * 4000 + "}", '{"model_type":"' + "x" * (HEADER_BYTES - 20) + '"}', "[" * 100_000, '"\\ud800"',
     '{"model_type":[' + "{}," * (MEMBERS // 2 - 9) + "{}]}", "[" + "[]," * MEMBERS + "[]]", "\0" * 1000, " " * 1000],
    ids=range(10),
)  # fmt: skip
def test_configs_that_are_none(inspect, source, text):
    (source / CONFIG).write_text(text)
    assert_refused(inspect, source)


QUANTIZATIONS = {
    "true": {"group_size": True},
    "float": {"group_size": 16.0},
    "huge": {"group_size": 10**4000},
    "text": {"group_size": "16"},
    "in a group": {"config_groups": {"a": {"weights": {"group_size": 32}}}},
    "many names": {"ignore": ["a"] * 10_001},
    "many wildcards": {"ignore": ["*e" * 2000]},
    "long set": {"ignore": ["*[" + "a-z" * 1_000_000 + "]"]},
    "no names": {"ignore": [["a"]]},
    "another": {"quant_algo": "FP8"},
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("file", [CONFIG, QUANT])
def test_quantisation_metadata(inspect, source, name, file):
    metadata = {"quant_algo": "NVFP4"} | QUANTIZATIONS[name]
    if file == CONFIG:
        change_json(source / CONFIG, quantization_config=metadata)
    else:
        (source / QUANT).write_text(json.dumps({"quantization": metadata}))
    assert_refused(inspect, source, "quantization_config|hf_quant_config")


@pytest.mark.parametrize("depth", [100, 450, 900])
def test_nesting_that_nobody_reads(inspect, source, depth):
    (source / CONFIG).write_text((source / CONFIG).read_text().replace("{", '{"x":' + "[" * depth + "]" * depth + ",", 1))
    for action in ("load", "convert"):
        report = inspect(action, source, source.parent / "target")
        assert report.kind in (None, "ValueError"), report


def test_nested_quantisation_metadata(inspect, source):
    change_json(source / CONFIG, quantization_config=json.loads('{"quantization":' * 900 + "{}" + "}" * 900))
    assert_refused(inspect, source, "quantization_config.quantization.quant_algo = None")


@pytest.mark.parametrize("count", [1000, 10_000])
def test_patterns_that_are_slow_to_match(inspect, source, count):
    """Within all limits, so the checkpoint loads; the metadata is no more than a second opinion."""
    patterns = ["*[a-z]" * 4 + f"{i:0270}" for i in range(count)]
    change_json(source / CONFIG, quantization_config={"quant_algo": "NVFP4", "ignore": patterns})
    assert_harmless(inspect, source)


# ---- Scales and bits --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvfp4_tensors(small_config):
    return random_tensors(np.random.default_rng(7), dataclasses.replace(small_config, nvfp4_layers=(0,)), np.float32)


SCALES = {
    "gate_up_proj_weight_scale": (0x7F, 0xFF),  # the two NaNs of e4m3fn, which has no infinity
    "down_proj_weight_scale": (0x7F, 0xFF),
    "gate_up_proj_weight_scale_2": (np.nan, np.inf, -np.inf),
    "down_proj_weight_scale_2": (np.nan, np.inf, -np.inf),
    "gate_up_proj_input_scale": (np.nan, np.inf, -np.inf),
    "down_proj_input_scale": (np.nan, np.inf, -np.inf),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_no_numbers(source, nvfp4_tensors, name):
    good = nvfp4_tensors[f"{EXPERTS}.{name}"]
    for value in SCALES[name]:
        bad = good.copy()
        bad.reshape(-1).view(np.uint8 if good.dtype.itemsize == 1 else np.float32)[-1] = value
        save_file(nvfp4_tensors | {f"{EXPERTS}.{name}": bad}, source / MODEL)
        message = f"{EXPERTS}.{name}: 1 of its scales are NaN or infinite"
        with pytest.raises(CheckpointError, match=message):
            load_params(source, read_config(source), dtype=np.float32)
        with pytest.raises(CheckpointError, match=message):
            convert(plan(source, source.parent / "target", Options("packed", 2)))
        assert os.listdir(source.parent) == ["source"]


def test_zero_and_negative_scales_are_values(source, nvfp4_tensors):
    """Zero is the scale of a block of zeros. ModelOpt writes no negative one, but its value is defined, so it is kept."""
    tensors = dict(nvfp4_tensors)
    for name in SCALES:
        tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"].copy()
        flat = tensors[f"{EXPERTS}.{name}"].reshape(-1)
        flat[:3] = np.array([0.0, -0.0, -1.5], np.float32).astype(flat.dtype)
    save_file(tensors, source / MODEL)
    for directory in (source, convert(plan(source, source.parent / "target", Options("packed", 2))).plan.target):
        config = read_config(directory)
        params, _ = load_params(directory, config, dtype=np.float32, num_ranks=1 if directory == source else 2)
        for spec in text_tensors(config):
            leaf = params
            for key in spec.path:
                leaf = leaf[key]
            assert np.asarray(leaf).tobytes() == tensors[spec.name].tobytes(), spec.name


@pytest.fixture(scope="module")
def packed(checkpoint, nvfp4_tensors, tmp_path_factory):
    source = tmp_path_factory.mktemp("packed") / "source"
    shutil.copytree(checkpoint, source)
    save_file(nvfp4_tensors, source / MODEL)
    return convert(plan(source, source.parent / "packed", Options("packed", 2))).plan.target


@pytest.fixture
def packed_source(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "in" / "packed")
    return tmp_path / "in" / "packed"


def test_every_flipped_bit_of_a_tensor_is_found(packed_source, rng):
    """In the first byte of a tensor, in the last, or somewhere between; not in what fills a page.

    What every rank has is read from the first one.
    """
    read = (packed_source / "rank-0-of-2.bin").read_bytes(), (packed_source / "rank-1-of-2.bin").read_bytes()

    def flip(rank, place):
        data = bytearray(read[rank])
        data[place] ^= 1 << int(rng.integers(8))
        (packed_source / f"rank-{rank}-of-2.bin").write_bytes(data)

    config = read_config(packed_source)
    target = packed_source.parent / "target"
    table = packed_tensors(config, 2)
    for i, tensor in enumerate(table):
        rank = i % len(tensor.spec.holders(2))
        flip(rank, tensor.offset + (0, tensor.nbytes - 1, int(rng.integers(tensor.nbytes)))[i % 3])
        # A flipped bit of a scale may make it a NaN before its checksum is known.
        with pytest.raises(CheckpointError, match=f"{tensor.spec.name}(:| does not have the checksum)"):
            load_params(packed_source, config, dtype=np.float32, num_ranks=2)
        if i % 5 == 0:
            with pytest.raises(CheckpointError, match=tensor.spec.name):
                convert(plan(packed_source, target, Options("hf")))
            assert os.listdir(packed_source.parent) == ["packed"]
        (packed_source / f"rank-{rank}-of-2.bin").write_bytes(read[rank])
    padding = next(
        t.offset - 1 for t, before in zip(table[1:], table, strict=False) if before.offset + before.nbytes < t.offset
    )
    flip(0, padding)
    load_params(packed_source, config, dtype=np.float32, num_ranks=2)


@pytest.mark.parametrize("change", [-1, 1, -4096, "all", 1 << 40])
def test_packed_file_of_another_size(inspect, packed_source, change):
    path = packed_source / "rank-1-of-2.bin"
    os.truncate(path, 0 if change == "all" else path.stat().st_size + change)
    assert_refused(inspect, packed_source, "rank-1-of-2.bin: has \\d+ bytes, expected", actions=("convert",))


MANIFESTS = {
    "another format": {"format": "hf"},
    "Orbax": {"format": "orbax"},
    "no format": {"format": ["packed"]},
    "tp 8 without files": {"tp": 8},
    "tp 10^9": {"tp": 10**9},
    "tp true": {"tp": True},
    "tp 2.0": {"tp": 2.0},
    "negative tp": {"tp": -2},
    "later version": {"version": 2},
    "no tensors": {"tensors": {}},
    "list of tensors": {"tensors": []},
    "many tensors": {"tensors": {f"{i:x}": {"dtype": "F32", "sha256": "0" * 64} for i in range(150_000)}},
    "source": {"source": [["a", 1]]},
    "no source": {"source": 7},
    "weights": {"weights_sha256": "0" * 64},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_that_lie(inspect, packed_source, name):
    change_json(packed_source / MANIFEST, **MANIFESTS[name])
    assert_refused(inspect, packed_source, "muse_manifest.json|rank-|model.safetensors|_METADATA", actions=("convert",))


@pytest.mark.parametrize("field", ["sha256", "rank_sha256", "dtype", "quantization"])
@pytest.mark.parametrize("value", ["0" * 63, ["0" * 64], {}, 7, True, "F33", None], ids=repr)
def test_manifest_entries_that_lie(inspect, packed_source, field, value):
    tensors = json.loads((packed_source / MANIFEST).read_text())["tensors"]
    tensors["lm_head.weight"][field] = value
    change_json(packed_source / MANIFEST, tensors=tensors)
    if field == "quantization" and value is None:
        assert read_config(packed_source).nvfp4_layers == (0,)  # a report is optional
    else:
        assert_refused(inspect, packed_source, MANIFEST, actions=("convert",))


@pytest.mark.parametrize("format", ["hf", "orbax", "packed"])
def test_manifest_beside_a_checkpoint_of_another_format(inspect, source, packed, format):
    manifest = json.loads((packed / MANIFEST).read_text())
    (source / MANIFEST).write_text(json.dumps(manifest | {"format": format}))
    assert_refused(inspect, source)


@pytest.mark.parametrize("index", [["y" * 31_000_000], [1] * 400_000, "y", 7, [10**4000]], ids=range(5))
def test_manifest_with_a_report_of_thirty_megabytes(inspect, packed_source, index):
    tensors = json.loads((packed_source / MANIFEST).read_text())["tensors"]
    report = {"relative_rms": 0.1, "worst_block": 0.1, "worst_block_index": index, "saturated": 0}
    tensors["lm_head.weight"]["quantization"] = report
    change_json(packed_source / MANIFEST, tensors=tensors)
    assert_refused(inspect, packed_source, MANIFEST, actions=("convert",))


# ---- Drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [".", "..", "draft", "nowhere", "/dev/zero"])
def test_draft_that_is_a_link_elsewhere(inspect, source, target):
    (source / "draft").symlink_to(target)
    assert_refused(inspect, source, "draft|config.json|architectures")


def test_pickled_mask_embedding(inspect, source, draft_checkpoint):
    shutil.copytree(draft_checkpoint / "draft", source / "draft")
    (source / "draft" / "mask_embedding.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    assert_refused(inspect, source, "mask_embedding.pt: a pickle, which is never opened")


def test_two_names_for_a_draft_tensor(inspect, source, draft_checkpoint):
    shutil.copytree(draft_checkpoint / "draft", source / "draft")
    tensors = load_file(source / "draft" / MODEL)
    save_file(tensors | {"model.fc.weight": tensors["fc.weight"]}, source / "draft" / MODEL)
    assert_refused(inspect, source, "'fc.weight', 'model.fc.weight' are two names for one tensor")


# ---- Tokenizers and templates -----------------------------------------------------------------------------------------


def pipeline(**parts):
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **parts}
    )


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


TOKENIZERS = {
    "nothing": lambda: "",
    "text": lambda: "hello",
    "null": lambda: "null",
    "list": lambda: "[]",
    "another object": lambda: '{"model_type": "muse_spark_text"}',
    "another model": lambda: '{"version":"1.0","model":{"type":"Pickle"}}',
    "open lists": lambda: "[" * 40_000_000,
    "spaces": lambda: " " * (64 << 20),
    "vocabulary of a million": lambda: pipeline().replace('"a": 0', ",".join(f'"{i:x}":{i}' for i in range(1_000_000))),
    "numbers": lambda: pipeline(x=[0] * 3_000_000),
    "id of 2^32": lambda: pipeline().replace('"a": 0', '"a": 4294967295'),
    "nested expression": lambda: pipeline(pre_tokenizer=split("(" * 100_000 + "a" + ")" * 100_000)),
    "long expression": lambda: pipeline(pre_tokenizer=split("[a-z]|" * 4_000_000)),
    "two pipelines": lambda: pipeline(pre_tokenizer=split("[a-z]|" * 4_000_000))[:-1] + ',"pre_tokenizer":null}',
    "broken expression": lambda: pipeline(pre_tokenizer=split("(")),
    "charsmap": lambda: pipeline(normalizer={"type": "Precompiled", "precompiled_charsmap": "A" * 40_000_000}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(inspect, source, name):
    (source / "tokenizer.json").write_text(TOKENIZERS[name]())
    assert_refused(inspect, source, "tokenizer.json: ", actions=("tokenizer", "load"))


def test_expression_that_explodes(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("aab") == [0, 0, 1]
    began = time.process_time()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot encode this text .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")
    assert time.process_time() - began < SECONDS


TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% for i in range(99999) %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
    "{{ 7 ** (10 ** 9) }}",
    "{{ 'ab' * 10 ** 9 }}",
    "{{ ('%' ~ 10 ** 9 ~ 'd') % 1 }}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ ''['__class__'] ~ ''|attr('__class__') ~ 1 // 0 }}",
    "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
    "{{ self._TemplateReference__context.environment.loader.x }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace()) }}",
    "{{ '{m[0].__class__.__mro__}'.format_map({'m': [1]}) }}",
    "{% import '/etc/passwd' as x %}",
    "{% include ['/etc/passwd', 'chat_template.jinja'] %}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_stopped_within_five_seconds(source, template, monkeypatch):
    monkeypatch.chdir(source)
    (source / "chat_template.jinja").write_text(template)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "good.jinja").write_text("good")
    tokenizer = Tokenizer.from_directory(source)
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, template_name="good") == "good"  # the process starts
    began = time.monotonic()
    with pytest.raises(TokenizerError, match=r"^chat template: ") as caught:
        tokenizer.apply_chat_template(chat)
    assert time.monotonic() - began < SECONDS and TemplateLimits().seconds < SECONDS
    assert "\n" not in str(caught.value) and "root:" not in str(caught.value) and not (source / "escaped").exists()


# ---- What a conversion copies, and the command line -------------------------------------------------------------------


def test_side_files_that_are_no_files_are_not_copied(source):
    os.mkfifo(source / "README.md")
    (source / "LICENSE").symlink_to("/dev/zero")
    (source / "special_tokens_map.json").symlink_to("special_tokens_map.json")
    (source / "chat_template.json").mkdir()
    target = convert(plan(source, source.parent / "target", Options("packed", 2))).plan.target
    assert sorted(p.name for p in target.iterdir()) == [
        CONFIG,
        MANIFEST,
        "rank-0-of-2.bin",
        "rank-1-of-2.bin",
        "tokenizer.json",
    ]


def test_too_much_text_is_refused(inspect, source):
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
        os.truncate(source / name, 200 << 20)
    assert_refused(inspect, source, "more than 268435456 bytes of tokenizer and text files", actions=("convert",))


@pytest.mark.parametrize("file", [MODEL, CONFIG])
def test_command_line(source, file):
    text = (source / file).read_bytes()
    (source / file).write_bytes(text.replace(b"lm_head", b"lm_\nead").replace(b"muse_spark_text", b"muse\\n\\tspark"))
    command = [sys.executable, ROOT / "scripts" / "convert_checkpoint.py", source, source.parent / "target", "--to", "hf"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert result.returncode == 2 and not result.stdout
    assert re.fullmatch(r"convert_checkpoint\.py: [^\n]+\n", result.stderr)
    assert os.listdir(source.parent) == ["source"]


def test_command_line_with_a_scale_that_is_no_number(source, nvfp4_tensors):
    name = f"{EXPERTS}.down_proj_input_scale"
    save_file(nvfp4_tensors | {name: np.full_like(nvfp4_tensors[name], np.nan)}, source / MODEL)
    command = [sys.executable, ROOT / "scripts" / "convert_checkpoint.py", source, source.parent / "target", "--to", "hf"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert result.returncode == 2 and re.fullmatch(rf"convert_checkpoint\.py: {name}: 8 of its scales [^\n]+\n", result.stderr)
    assert os.listdir(source.parent) == ["source"]
