"""Records one decode step as a trace that https://ui.perfetto.dev shows, with the names that operations have in the model.

    python scripts/profile_step.py                              the bundled model and its draft: step.trace.json.gz
    python scripts/profile_step.py --devices 8 --out eight.trace.json.gz
    python scripts/profile_step.py --speculation off --top 20

Every operation that the device ran in the step is an event: its name is the path of the model's scopes and the operation that
it came from, its arguments say what XLA calls it. Operations of all layers of a kind have the same names. The table sums up by
scope; on several devices, over all of them. A profiler slows a step down, small operations most: times are for comparing parts.

Exit code: 0; 1 if the device fails; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the
reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import collections
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
    from muse_jax.hlo import Module

NAME = "profile_step.py"
WARM_UP = 3
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
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
    return {
        "trace": str(args.out),
        "backend": muse.backend,
        "devices": args.devices or 1,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "operations": sum(count for count, _ in seconds.values()),
        "scopes": {scope: {"operations": count, "us": us} for scope, (count, us) in seconds.items()},
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


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", type=directory, default=BUNDLED, metavar="DIR", help="model (default: the bundled one)")
    add("--out", type=Path, default=Path("step.trace.json.gz"), metavar="FILE", help="(default: step.trace.json.gz)")
    add("--devices", type=positive_int, metavar="N", help="share the work among N devices; virtual ones on a CPU")
    add("--backend", default="auto", metavar="NAME", help="implementation of a step: xla, pallas or auto (default: auto)")
    add("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: the checkpoint's, on a CPU float32)")
    add("--speculation", choices=("tree", "chain", "off"), default="tree", help="what a step verifies (default: tree)")
    add("--tree-size", type=tree_size, default=16, metavar="N", help="nodes of the tree (default: 16)")
    add("--top", type=positive_int, default=15, metavar="N", help="lines of the table (default: 15)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
