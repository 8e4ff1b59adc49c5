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

Exit code: 0; 1 if the disk fails or --verify finds a difference; 2 for bad arguments, a source that cannot be converted or a
destination that is taken; 130 after Ctrl-C; 141 if the reader of stdout has gone.
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

from command_line import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    Interrupts,
    Parser,
    broken_pipe,
    directory,
    leave,
    open_streams,
    positive_int,
    report,
)

if TYPE_CHECKING:  # the library takes a second to import, a mistyped option should not
    from checkpoints.convert import Plan

NAME = "convert_checkpoint.py"
_LINE_SECONDS = 30  # between two lines of progress where stderr is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax starts JAX, which would take a GPU's memory for nothing
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    interrupts = Interrupts()
    try:
        with interrupts.raised():
            return run(args, interrupts)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note(f"interrupted{how_to_go_on(args)}")
        return INTERRUPTED
    except BrokenPipeError:
        return broken_pipe()
    except ValueError as error:  # CheckpointError and ConfigError are
        of_the_disk = type(error).__name__ in ("MismatchError", "UnreadableError")
        note(" ".join(str(error).split()) + (how_to_go_on(args) if of_the_disk else ""))
        return FAILED if of_the_disk else BAD_INPUT
    except OSError as error:
        note(" ".join(str(error).split()) + how_to_go_on(args))
        return FAILED


def how_to_go_on(args: argparse.Namespace) -> str:
    with contextlib.suppress(OSError, RuntimeError):  # a path that cannot even be looked at
        target = args.target.resolve()
        if (target.parent / f".{target.name}.partial" / "journal.jsonl").exists():
            return "; what was converted is kept: the same command with --resume goes on"
    return ""


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    check = interrupts.check
    with interrupts.held():
        from checkpoints import CheckpointError
        from checkpoints.convert import Options, check_destination, convert, is_published, plan, verify_published
        from checkpoints.manifest import MANIFEST_FILE

    made = plan(args.source, args.target, Options(to=args.to, tp=args.tp, quantize=args.quantize))
    if (args.verify or args.resume) and (made.target / MANIFEST_FILE).exists():
        if not is_published(made):
            raise CheckpointError(f"{made.target}: exists, and was made from another source or with other options")
        count = None
        if args.verify and not args.dry_run:
            with progress_display(check) as show:
                count = verify_published(made, show)
        print_figures(figures_of(made) | {"complete": True, "verified_tensors": count}, args.json)
        return 0
    check()
    if args.dry_run:
        print_figures(figures_of(made) | {"bytes_free": made.bytes_free, "fits": made.fits}, args.json)
        check_destination(made, args.resume)
        return 0
    with progress_display(check) as show:
        result = convert(made, resume=args.resume, verify=args.verify, progress=show, workers=args.workers)
    figures = figures_of(made) | {
        "complete": True,
        "verified_tensors": result.verified_tensors,
        "resumed_bytes": result.resumed_bytes,
        "seconds": round(result.seconds, 3),
        "weights_sha256": {part or "target": manifest.weights_sha256 for part, manifest in result.manifests.items()},
        "quantization": {
            f"{part}/{name}" if part else name: dict(entry.quantization)
            for part, manifest in result.manifests.items()
            for name, entry in manifest.tensors.items()
            if entry.quantization is not None
        },
    }
    print_figures(figures, args.json)
    return 0


def figures_of(made: Plan) -> dict[str, Any]:
    return {
        "source": str(made.source),
        "destination": str(made.target),
        "format": made.options.to,
        "tp": made.options.tp,
        "tensors": sum(len(part.reader.specs) for part in made.parts),
        "bytes_in": made.bytes_in,
        "bytes_out": made.bytes_out,
        "not_carried": {part.name or "target": part.not_carried for part in made.parts},
    }


def print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    if quantised := figures.get("quantization"):
        width = max(map(len, quantised))
        print(f"{'quantised':{width}}  relative RMS  worst block  clipped values")
        for name, cost in quantised.items():
            rms, worst, saturated = cost["relative_rms"], cost["worst_block"], cost["saturated"]
            print(f"{name:{width}}  {rms:12.4%}  {worst:11.4%}  {saturated:14}")
    for part, left in figures["not_carried"].items():
        if left["tensors"]:
            print(f"not carried ({part}): {left['tensors']} tensors, {left['bytes']} bytes ({', '.join(left['families'])})")
        if left["files"]:
            print(f"not carried ({part}): {', '.join(left['files'])}")
    line = f"{figures['destination']}: {figures['tensors']} tensors, {figures['bytes_in']} bytes in, {figures['bytes_out']} out"
    if "seconds" in figures:
        rate = (figures["bytes_in"] - figures["resumed_bytes"]) / figures["seconds"] / 1e6
        line += f", {figures['seconds']:.1f} s ({rate:.0f} MB/s)"
    if "bytes_free" in figures:
        line += f", {figures['bytes_free']} free"
    if figures.get("verified_tensors") is not None:
        line += f", {figures['verified_tensors']} tensors verified"
    print(line + (", complete" if figures.get("complete") else ""))


@contextlib.contextmanager
def progress_display(check: Callable[[], None]) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a progress callback that calls `check` and shows a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            tasks: dict[str, Any] = {}

            def show(phase: str, done: int, total: int) -> None:
                if phase not in tasks:  # what a resumed conversion begins with is no speed
                    tasks[phase] = bar.add_task(phase, total=total, completed=done)
                bar.update(tasks[phase], completed=done)
                check()

            yield show
        return

    begun: dict[str, tuple[float, int]] = {}
    last = time.monotonic()

    def show_line(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        began, at = begun.setdefault(phase, (now, done))
        if now - last >= _LINE_SECONDS and at < done < total:
            last = now
            rate = (done - at) / (now - began)
            note(
                f"{phase}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {(total - done) / rate:.0f} s left"
            )
        check()

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
