"""Records one decode step as a trace that https://ui.perfetto.dev shows, with the names that operations have in the model.

    python scripts/profile_step.py                              the bundled model and its draft: step.trace.json.gz
    python scripts/profile_step.py --devices 8 --out eight.trace.json.gz
    python scripts/profile_step.py --speculation off --top 20
    python scripts/profile_step.py --backend megakernel         what each CTA did in the verify step

Every operation that the device ran in the step is an event: its name is the path of the model's scopes and the operation that
it came from, its arguments say what XLA calls it. Operations of all layers of a kind have the same names. The table sums up by
scope; on several devices, over all of them. A profiler slows a step down, small operations most: times are for comparing parts.

To XLA the verify step of `megakernel` is one operation, so its own profiler looks into that and at nothing else: an event is a
phase of a layer in a CTA. ffi/README.md, Profiler, says how to read table and trace. So far the backend serves on
CPUs alone, by the Host reference: phase by phase on one thread, with times that say nothing about the kernel.

Exit code: 0; 1 if the device fails; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import (
    Parser,
    directory,
    guarded,
    leave,
    open_streams,
    positive_int,
)
from generate import BUNDLED, make_mesh, tree_size
from output_files import check_option, write_file
from profiler_trace import recorded

if TYPE_CHECKING:
    from muse_jax.decoding import DecodeState, Model
    from muse_jax.hlo import Module

NAME = "profile_step.py"
WARM_UP = 3
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
AFTER_EXPERTS = {
    "to_post_ffn_us": "until post_ffn has ended",
    "idle_us": "of which a CTA waits for inputs",
    "to_qkv_us": "until qkv of the next layer has ended",
    "idle_with_qkv_us": "of which a CTA waits for inputs",
}
STEPS_LEFT = 64  # tokens that may still come, so that a step is not the last one


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    figures = profile(args)
    if args.json:
        print(json.dumps(figures))
    elif "phases" in figures:
        print_phases(figures, args.top)
    else:
        print_table(figures, args.top)
    return 0


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the trace. Raises ValueError or OSError with one line for bad settings or files."""
    import jax

    import muse_jax
    from muse_jax import hlo

    check_option("--out", args.out)
    muse = muse_jax.load(
        args.checkpoint,
        mesh=make_mesh(args.devices),
        backend=args.backend,
        dtype=args.dtype,
        speculation=args.speculation,
        tree_size=args.tree_size,
    )
    tokens = [1, 2, 3] if muse.tokenizer is None else muse.tokenizer.encode(PROMPT)
    state, _ = muse.prefill([tokens], max_new_tokens=STEPS_LEFT * muse.model.num_rows, stop_token_ids=[])
    if muse.backend == "megakernel":
        trace, figures = phases_of_step(muse.model, state)
        write_file(args.out, gzip.compress(json.dumps(trace).encode()))
        return described(args, muse.backend) | figures
    step = jax.jit(muse_jax.decode, donate_argnames="state").lower(muse.model, state).compile()
    for _ in range(WARM_UP):
        state, out = step(muse.model, state)
    jax.block_until_ready(out)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    how = {"create_perfetto_trace": True, "profiler_options": options}
    with recorded(lambda: jax.block_until_ready(step(muse.model, state)), "perfetto_trace.json.gz", **how) as file:
        trace = json.loads(gzip.decompress(file.read_bytes()))
    events, seconds = named(trace["traceEvents"], hlo.parse(step.as_text()))
    if not seconds:
        raise ValueError("the profiler recorded no operation of the step")
    write_file(args.out, gzip.compress(json.dumps(trace | {"traceEvents": events}).encode()))
    return described(args, muse.backend) | {
        "operations": sum(count for count, _ in seconds.values()),
        "scopes": {scope: {"operations": count, "us": us} for scope, (count, us) in seconds.items()},
    }


def described(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """What ran where."""
    import jax

    return {
        "trace": str(args.out),
        "backend": backend,
        "devices": args.devices or 1,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def phases_of_step(model: Model, state: DecodeState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a step of the megakernel: the trace, and its figures."""
    import jax

    import muse_jax
    from ffi import profile
    from ffi.verify import profiled

    num_layers = model.config.num_hidden_layers
    with profiled(profile.places(num_layers)) as buffers:
        # A function of its own: nobody has traced it before.
        step = jax.jit(lambda model, state: muse_jax.decode(model, state), donate_argnums=1).lower(model, state).compile()
    for _ in range(WARM_UP + 1):
        jax.effects_barrier()
        buffers.clear()
        state, out = step(model, state)
        jax.block_until_ready(out)
    jax.effects_barrier()
    found = profile.decode(num_layers, buffers)
    return profile.chrome_trace(found), {
        "ran": "kernel" if found.by_kernel else "Host reference",
        "events": len(found.events),
        "lost": found.lost,
        "span_us": found.span_ns / 1e3,
        "timer_ns": found.timer_ns,
        "phases": [dataclasses.asdict(row) for row in profile.phase_table(found)],
        "after_experts": profile.tail_summary(profile.layer_tails(found)),
    }


def named(events: list[dict], module: Module) -> tuple[list[dict], dict[str, tuple[int, float]]]:
    """The device's events under the model's names, and the number and microseconds of each scope's, longest first."""
    from muse_jax import hlo

    found = [i for computation in module.computations.values() for i in computation.instructions.values()]
    # Of a kernel in a CUDA graph the trace has the graph and the kernel's name, which is the instruction's with underscores.
    instructions = {re.sub(r"[.-]", "_", i.name): i for i in found} | {i.name: i for i in found}
    gpus = {event["pid"] for event in events if "/device:GPU" in str(event.get("args", {}).get("name"))}
    kept, sums = [], collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("ph") == "M":
            kept.append(event)
            continue
        args = event.get("args", {})
        on_gpu = event.get("pid") in gpus
        if event.get("ph") != "X" or not (on_gpu or "hlo_op" in args):
            continue
        instruction = instructions.get(args.get("hlo_op")) or instructions.get(event["name"])
        op_name = "" if instruction is None else instruction.op_name
        scope = "/".join(hlo.scopes(op_name)) or "(no scope)"
        operation = op_name.rpartition("/")[2] or event["name"]
        named = {"hlo_op": event["name"]} | args | {"op_name": op_name}
        kept.append(event | {"name": f"{scope}/{operation}", "args": named})
        if instruction is None or instruction.kind not in ("while", "call", "conditional"):  # they have events of their own
            sums[scope][0] += 1
            sums[scope][1] += event.get("dur", 0.0)
    return kept, {scope: tuple(sums[scope]) for scope in sorted(sums, key=lambda scope: -sums[scope][1])}


def print_table(figures: dict[str, Any], top: int) -> None:
    print(f"{figures['trace']}: {figures['operations']} operations, {figures['device']}, backend {figures['backend']}")
    total = sum(each["us"] for each in figures["scopes"].values())
    for scope, each in list(figures["scopes"].items())[:top]:
        print(f"{each['us']:10.1f} us  {each['us'] / total:5.1%}  {each['operations']:5d}  {scope}")


def print_phases(figures: dict[str, Any], top: int) -> None:
    """Longest first."""
    where = f"{figures['device']}, backend {figures['backend']} ({figures['ran']})"
    print(f"{figures['trace']}: {figures['events']} events of {figures['span_us']:.1f} us, {where}")
    if figures["ran"] != "kernel":
        print("The Host reference ran, phase by phase on one thread of a CPU: its times say nothing about the kernel.")
    if figures["lost"]:
        print(f"{figures['lost']} more events were lost: the buffer had no place for them.")
    print(f"{'share':>6} {'count':>7} {'mean us':>9} {'p10':>9} {'p90':>9} {'max':>9} {'waited':>9}")
    for row in sorted(figures["phases"], key=lambda row: -row["share"])[:top]:
        times = " ".join(f"{row[name]:9.2f}" for name in ("mean_us", "p10_us", "p90_us", "max_us", "waited_us"))
        print(f"{row['share']:6.1%} {row['count']:7d} {times}  {row['phase']} ({row['role']})")
    print("From the end of a layer's expert_down, median and worst of the layers:")
    for name, text in AFTER_EXPERTS.items():
        if name in figures["after_experts"] and (figures["ran"] == "kernel" or "idle" not in name):  # one thread never waits
            each = figures["after_experts"][name]
            print(f"{each['median']:10.2f} us {each['worst']:10.2f} us  {text}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", type=directory, default=BUNDLED, metavar="DIR", help="model (default: the bundled one)")
    out_help = "trace to write, gzipped JSON (default: step.trace.json.gz)"
    add("--out", type=Path, default=Path("step.trace.json.gz"), metavar="FILE", help=out_help)
    add("--devices", type=positive_int, metavar="N", help="share the work among N devices; virtual ones on a CPU")
    backends = "implementation of a step: xla, pallas, megakernel or auto (default: auto)"
    add("--backend", default="auto", metavar="NAME", help=backends)
    dtype_help = "of the weights (default: the checkpoint's, on a CPU float32, for megakernel bfloat16)"
    add("--dtype", choices=("bfloat16", "float32"), help=dtype_help)
    add("--speculation", choices=("tree", "chain", "off"), default="tree", help="what a step verifies (default: tree)")
    add("--tree-size", type=tree_size, default=16, metavar="N", help="nodes of the tree (default: 16)")
    add("--top", type=positive_int, default=15, metavar="N", help="lines of the table (default: 15)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
