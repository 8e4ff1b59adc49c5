"""Times every kernel of pallas_kernels at the shapes of one rank of eight, beside what XLA makes of its reference.

    python scripts/bench_kernels.py                            all of them; needs an NVIDIA GPU
    python scripts/bench_kernels.py --ops route combine --json

    verdict    first: the kernel's results beside the reference's, within the tolerance that the op's shapes.py derives
    kernel us  what the device worked per call, from a profiler trace: the median of --calls, without the gaps between launches
    xla us     the same for the reference, jitted; x: kernels and copies of a call
    MB         that must be read and written; most arrays are small and stay in the L2 cache from one call to the next
    share      of what a sum over a large array reads per second on this device, in the same run

Exit code: 0; 1 if a verdict is bad or the device fails; 2 for bad arguments or without a GPU; 130 after Ctrl-C; 141 if
the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench_decode import streaming_bandwidth
from command_line import FAILED, Parser, guarded, leave, open_streams, positive_int, report
from profiler_trace import run_kernels

NAME = "bench_kernels.py"
OPS = (
    *("blend_norm", "qk_rope", "decode_attention", "out_gate", "route", "quantize_rows", "nvfp4_gemm", "combine"),
    *("grouped_conv", "lattice", "build_tree", "dense_gemm", "expert_gemm"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """us, launches: of a call."""

    op: str
    case: str
    verdict: str  # "good", or what is wrong
    kernel_us: float
    kernel_launches: float
    xla_us: float
    xla_launches: float
    bytes: int
    share: float  # of the streaming bandwidth, by the kernel


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    import jax

    if jax.default_backend() != "gpu":
        raise ValueError(f"needs an NVIDIA GPU, found {jax.default_backend()}")
    device, bandwidth = jax.devices()[0].device_kind, streaming_bandwidth()
    report(f"{device}, jax {jax.__version__}, streaming {bandwidth / 1e12:.3f} TB/s")
    results = []
    for op in args.ops:
        for result in measure(op, args.calls, bandwidth):
            results.append(result)
            print_result(result, args.markdown)
    if args.json:
        figures = {"device": device, "jax": jax.__version__, "bandwidth_bytes_per_s": bandwidth}
        print(json.dumps(figures | {"results": [dataclasses.asdict(result) for result in results]}))
    return 0 if all(result.verdict == "good" for result in results) else FAILED


def measure(op: str, calls: int, bandwidth: float) -> Iterator[Result]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
    for case in shapes.cases():
        args = jax.tree.map(jnp.asarray, case.arguments(np.random.default_rng(0)))
        kernel, reference = jax.jit(case.kernel), jax.jit(case.reference)
        verdict = judge(shapes, reference, kernel(*args), args)
        us, launches = device_time(lambda kernel=kernel, args=args: kernel(*args), calls)
        xla_us, xla_launches = device_time(lambda reference=reference, args=args: reference(*args), calls)
        share = case.bytes / (us / 1e6) / bandwidth
        yield Result(op, case.name, verdict, us, launches, xla_us, xla_launches, case.bytes, share)


def judge(shapes: Any, reference: Callable, actual: Any, args: tuple) -> str:
    import jax

    if getattr(shapes, "EXACT_DIVISIONS", False):  # XLA for GPUs approximates them
        args = jax.device_put(args, jax.local_devices(backend="cpu")[0])
    try:
        shapes.check(actual, reference(*args))
    except AssertionError as error:
        return " ".join(str(error).split())[:200] or "differs"
    return "good"


def device_time(function: Callable, calls: int) -> tuple[float, float]:
    """Microseconds that the device works in a call, the median, and how many kernels and copies that are."""
    import jax

    def work() -> None:
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)

    jax.block_until_ready(function())
    kernels = run_kernels(work)
    each = len(kernels) // calls
    if not each or len(kernels) % calls:  # cannot be told apart
        return sum(kernel.duration_ns for kernel in kernels) / 1e3 / calls, len(kernels) / calls
    times = [sum(kernel.duration_ns for kernel in kernels[i * each : (i + 1) * each]) for i in range(calls)]
    return statistics.median(times) / 1e3, float(each)


def print_result(result: Result, markdown: bool) -> None:
    cells = (
        result.case,
        result.verdict,
        f"{result.kernel_us:.2f} x{result.kernel_launches:g}",
        f"{result.xla_us:.2f} x{result.xla_launches:g}",
        f"{result.bytes / 1e6:.3f}",
        f"{result.share:.1%}",
    )
    if markdown:
        print("| " + " | ".join(cells) + " |")
    else:
        name, verdict, kernel, xla, megabytes, share = cells
        print(f"{name:<34} kernel {kernel:>12} us  xla {xla:>14} us  {megabytes:>9} MB  {share:>6}  {verdict}")
    sys.stdout.flush()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--ops", choices=OPS, nargs="+", default=list(OPS), metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    add("--calls", type=positive_int, default=20, metavar="N", help="timed calls (default: 20)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print lines of a Markdown table")
    output.add_argument("--json", action="store_true", help="end stdout with a line that holds the figures as a JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
