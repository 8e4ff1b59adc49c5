"""The trace of one step: operations under the model's names."""

import gzip
import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import profile_step
import profiler_trace
from profiler_trace import Kernel

from ffi import library
from muse_jax import hlo


def test_operations_have_the_models_names(tmp_path, capsys):
    link, out = tmp_path / "step.trace.json.gz", tmp_path / "elsewhere.gz"
    link.symlink_to(out)
    assert profile_step.main(["--out", str(link), "--json", "--devices", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    parts = {scope.split("/")[0] for scope in figures["scopes"]}
    assert {"attention", "moe", "lm_head", "commit", "sampling", "draft"} <= parts
    events = [event for event in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] if event.get("ph") == "X"]
    assert len(events) >= figures["operations"] > 100
    assert all(event["args"]["hlo_op"] and event["name"].count("/") for event in events)
    # Each of six layers multiplies its experts' rows once or more on each device.
    assert sum(event["name"].startswith("moe") and event["name"].endswith("dot_general") for event in events) >= 6
    assert link.is_symlink() and not list(tmp_path.glob(".*"))


@pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel runs there")
def test_phases_of_the_megakernel(tmp_path, capsys):
    """On a CPU of the Host reference, whose times are real."""
    out = tmp_path / "step.trace.json.gz"
    assert profile_step.main(["--out", str(out), "--json", "--backend", "megakernel"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["backend"] == "megakernel" and figures["ran"] == "Host reference"
    events = [event for event in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] if event["ph"] == "X"]
    # Embedding, qkv, and eleven phases of each of six layers: one step, not those before it.
    assert len(events) == figures["events"] == 2 + 11 * 6 and figures["lost"] == 0
    counts = {row["phase"]: row["count"] for row in figures["phases"]}
    assert counts["expert_gate_up"] == 6 and counts["qkv"] == 6 and counts["lm_head"] == 1
    assert 0.5 < sum(row["share"] for row in figures["phases"]) <= 1
    assert figures["after_experts"]["to_qkv_us"]["worst"] >= figures["after_experts"]["to_post_ffn_us"]["median"] > 0
    profile_step.print_phases(figures | {"lost": 3}, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("The Host reference ran") and lines[2].startswith("3 more events were lost")
    assert len(lines) == 4 + 4 + 1 + 2


def test_a_name_that_cannot_be_written(tmp_path, capsys):
    """Before anything is loaded."""
    (tmp_path / "taken").mkdir()
    for name, problem in (("absent/trace.gz", "No such file or directory"), ("taken", "Is a directory")):
        assert profile_step.main(["--checkpoint", str(tmp_path / "nosuch"), "--out", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"profile_step.py: --out {tmp_path / name}: cannot be written: {problem}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_kernels_of_a_cuda_graph():
    """Recorded on an H200: the trace names the graph and the kernel, as XLA calls it, not the instruction."""
    text = """HloModule jit_decode

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop_add.7 = f32[4]{0} add(%x, %x), metadata={op_name="jit(decode)/moe/moe.norm/add"}
  ROOT %copy = f32[4]{0} copy(%loop_add.7), metadata={op_name="jit(decode)/commit/copy"}
}
"""
    gpu = {"ph": "X", "pid": 1, "tid": 14, "ts": 1.0, "dur": 2.0}
    graph = {"hlo_op": "command_buffer_1"}
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        gpu | {"name": "loop_add_7", "args": graph},
        gpu | {"name": "memcpy32_post", "args": graph},
        gpu | {"pid": 701, "name": "cuGraphLaunch", "args": {}},
    ]
    kept, sums = profile_step.named(events, hlo.parse(text))
    assert [event["name"] for event in kept[1:]] == ["moe/moe.norm/add", "(no scope)/memcpy32_post"]
    assert sums == {"moe/moe.norm": (1, 2.0), "(no scope)": (1, 2.0)}


def test_kernels_of_a_trace():
    """Of all streams of all GPUs, in order; what the host did and what is drawn above the streams is left out."""

    def line(name: str, began_ns: int, *events: tuple[int, int]) -> str:
        inside = "".join(f"events {{ metadata_id: 1 offset_ps: {1000 * at} duration_ps: {1000 * ns} }} " for at, ns in events)
        return f'lines {{ name: "{name}" timestamp_ns: {began_ns} {inside} }}'

    gpu = [
        line("Stream #13(Compute)", 100, (50, 7), (10, 3)),
        line("Stream #14(MemcpyD2D)", 105, (0, 2)),
        line("XLA Ops", 0, (0, 9)),
    ]
    planes = [
        ("/device:GPU:0", gpu),
        ("/host:CPU", [line("Stream", 0, (0, 1))]),
        ("/device:GPU:1", [line("Stream #13", 0, (5, 1))]),
    ]
    text = "".join(f'planes {{ name: "{name}" {" ".join(lines)} }}' for name, lines in planes)
    text = text.replace('" lines', '" event_metadata { key: 1 value { id: 1 name: "k" } } lines')
    found = profiler_trace.read_kernels(jax.profiler.ProfileData.from_text_proto(text))
    assert found == [Kernel(5, 1), Kernel(105, 2), Kernel(110, 3), Kernel(150, 7)]


@pytest.mark.parametrize(
    ("kernels", "busy", "span"),
    [
        ([], 0, 0),
        ([Kernel(5, 2)], 2, 2),
        ([Kernel(0, 10), Kernel(2, 3), Kernel(4, 8), Kernel(20, 1)], 13, 21),
        ([Kernel(0, 2), Kernel(2, 2)], 4, 4),
        ([Kernel(0, 9), Kernel(1, 2)], 9, 9),
    ],
)
def test_times_of_kernels(kernels, busy, span):
    assert (profiler_trace.busy_ns(kernels), profiler_trace.span_ns(kernels)) == (busy, span)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_kernels_without_a_gpu():
    assert profiler_trace.run_kernels(lambda: jax.block_until_ready(jax.numpy.ones(3))) == []
