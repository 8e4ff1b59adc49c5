"""Converts a checkpoint of Muse Spark, or of its draft, between formats.

    python scripts/convert_checkpoint.py SRC DST --to packed --tp 8            HF or Orbax -> one file a rank
    python scripts/convert_checkpoint.py SRC DST --to hf --quantize nvfp4      bf16 -> NVFP4 experts, as ModelOpt stores them
    python scripts/convert_checkpoint.py SRC DST --to orbax --verify           and reads everything again before it is published
    python scripts/convert_checkpoint.py SRC DST --to hf --dry-run             counts bytes, writes nothing

SRC is a directory in any of the formats; the folder `draft` in it, where there is one, is converted with it. Tensors stay as
they are, bit for bit, unless --quantize asks otherwise; towers of images, video and audio are not carried. DST appears when
it is complete: until then everything is in `.DST.partial` beside it, and after an interruption, also kill -9, the same
command with --resume goes on there. --verify with a DST that is complete already only verifies it. Formats, sizes and times:
checkpoints/README.md.

Exit code: 0; 1 if the disk fails or --verify finds a difference; 2 for bad arguments or a source that cannot be converted;
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from generate import BAD_INPUT, FAILED, INTERRUPTED, Parser, broken_pipe, directory, leave, open_streams, positive_int, report

if TYPE_CHECKING:  # the library takes a second to import, a mistyped option should not
    from checkpoints.convert import Plan, Result

NAME = "convert_checkpoint.py"
_LINE_SECONDS = 30  # between two lines of progress where stderr is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax starts JAX, which would take a GPU's memory for nothing
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    try:
        return run(args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note("interrupted; what was converted is kept: the same command with --resume goes on")
        return INTERRUPTED
    except BrokenPipeError:
        return broken_pipe()
    except ValueError as error:  # CheckpointError and ConfigError are
        note(" ".join(str(error).split()))
        return BAD_INPUT
    except OSError as error:
        note(f"{' '.join(str(error).split())}; what was converted is kept: the same command with --resume goes on")
        return FAILED


def run(args: argparse.Namespace) -> int:
    from checkpoints import CheckpointError
    from checkpoints.convert import Options, convert, plan, verify_published

    made = plan(args.source, args.target, Options(to=args.to, tp=args.tp, quantize=args.quantize))
    if args.dry_run:
        print_plan(made, args.json)
        if not made.fits:
            note(f"{made.target}: the file system has only {made.bytes_free} bytes free")
            return BAD_INPUT
        return 0
    if (args.verify or args.resume) and (made.target / "muse_manifest.json").exists():
        if not args.verify:
            note(f"{made.target} is complete")
            return 0
        try:
            with progress_display() as show:
                count = verify_published(made, show)
        except CheckpointError as error:
            note(str(error))
            return FAILED
        print(
            json.dumps({"destination": str(made.target), "verified_tensors": count})
            if args.json
            else f"{count} tensors verified"
        )
        return 0
    with progress_display() as show:
        result = convert(made, resume=args.resume, verify=args.verify, progress=show, workers=args.workers)
    print_result(result, args.json)
    return 0


def print_plan(made: Plan, as_json: bool) -> None:
    figures = {
        "source": str(made.source),
        "destination": str(made.target),
        "format": made.options.to,
        "tp": made.options.tp,
        "tensors": sum(len(part.reader.specs) for part in made.parts),
        "bytes_in": made.bytes_in,
        "bytes_out": made.bytes_out,
        "bytes_free": made.bytes_free,
        "fits": made.fits,
        "not_carried": {
            "tensors": sum(part.reader.report.num_skipped for part in made.parts),
            "bytes": sum(part.reader.report.skipped_bytes for part in made.parts),
            "families": sorted({family for part in made.parts for family in part.reader.report.skipped_families}),
        },
    }
    if as_json:
        print(json.dumps(figures))
        return
    left = figures["not_carried"]
    print(
        f"{figures['tensors']} tensors: {made.bytes_in} bytes to read, {made.bytes_out} bytes to write, {made.bytes_free} free"
    )
    if left["tensors"]:
        print(f"not carried: {left['tensors']} tensors, {left['bytes']} bytes ({', '.join(left['families'])})")


def print_result(result: Result, as_json: bool) -> None:
    made = result.plan
    read = made.bytes_in - result.resumed_bytes
    quantised = {
        f"{part}/{name}" if part else name: dict(entry.quantization)
        for part, manifest in result.manifests.items()
        for name, entry in manifest.tensors.items()
        if entry.quantization is not None
    }
    figures: dict[str, Any] = {
        "destination": str(made.target),
        "format": made.options.to,
        "tensors": sum(len(manifest.tensors) for manifest in result.manifests.values()),
        "bytes_in": made.bytes_in,
        "bytes_out": made.bytes_out,
        "seconds": round(result.seconds, 3),
        "bytes_per_second": round(read / result.seconds),
        "resumed_bytes": result.resumed_bytes,
        "verified_tensors": result.verified_tensors,
        "weights_sha256": {part or "target": manifest.weights_sha256 for part, manifest in result.manifests.items()},
        "not_carried": {part or "target": dict(manifest.not_carried) for part, manifest in result.manifests.items()},
        "quantization": quantised,
    }
    if as_json:
        print(json.dumps(figures))
        return
    if quantised:
        width = max(map(len, quantised))
        print(f"{'quantised':{width}}  relative RMS  worst block  saturated")
        for name, cost in quantised.items():
            rms, worst, saturated = cost["relative_rms"], cost["worst_block"], cost["saturated"]
            print(f"{name:{width}}  {rms:12.4%}  {worst:11.4%}  {saturated:9}")
    verified = "" if result.verified_tensors is None else f", {result.verified_tensors} verified"
    print(
        f"{made.target}: {figures['tensors']} tensors{verified}, {read} bytes read, {made.bytes_out} written "
        f"in {result.seconds:.1f} s ({read / result.seconds / 1e6:.0f} MB/s)"
    )


@contextlib.contextmanager
def progress_display() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a progress callback: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            tasks: dict[str, Any] = {}

            def show(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = bar.add_task(phase, total=total)
                bar.update(tasks[phase], completed=done)

            yield show
        return

    began = last = time.monotonic()

    def show_line(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_SECONDS and 0 < done < total:
            last = now
            left = (now - began) * (total - done) / done
            note(f"{phase}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {done / (now - began) / 1e6:.0f} MB/s, {left:.0f} s left")

    yield show_line


def note(message: str) -> None:
    report(f"{NAME}: {message}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("source", type=directory, metavar="SRC", help="checkpoint directory: HF, Orbax or packed")
    add("target", type=directory, metavar="DST", help="directory to make")
    add("--to", required=True, choices=("hf", "orbax", "packed"), help="format of DST")
    add("--tp", type=int, choices=(1, 2, 4, 8), help="ranks; with --to packed, and needed there")
    add("--quantize", choices=("nvfp4",), help="round the experts, but for the first and the last layer's")
    add("--resume", action="store_true", help="go on where an interrupted run stopped")
    add("--verify", action="store_true", help="read the result again: checksums, and samples against SRC")
    add("--dry-run", action="store_true", help="check SRC and count bytes; write nothing")
    add("--workers", type=positive_int, default=4, metavar="N", help="tensors converted at a time, 0.1 GB each (default: 4)")
    add("--json", action="store_true", help="print figures as one JSON object")
    args = parser.parse_args(argv)
    if (args.to == "packed") != (args.tp is not None):
        parser.error("--tp goes with --to packed, which needs it")
    return args


if __name__ == "__main__":
    leave(main())
