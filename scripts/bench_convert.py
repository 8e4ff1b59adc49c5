"""Measures conversions of a synthetic checkpoint: rate against `cp` and `sync`, peak memory, and what kill -9 leaves.

    python scripts/bench_convert.py                            6 GB in the current directory's file system; some minutes
    python scripts/bench_convert.py --work DIR --gigabytes 1 --kills 3 --json

Every conversion is the script as users run it, in a process of its own, start included. Before each, and before each copy by
`cp`, the files that are read are dropped from the page cache. `of cp` is the rate of a conversion over that of the `cp` of the
same source right before it, each until `sync` returned; rates are bytes read over time. The limit of memory is twice the
largest tensor and 1 GB. With --kills the conversion is killed so many times at random moments, resumed after each, and
compared with an uninterrupted one: files byte by byte, of Orbax by the tensors.

Exit code: 0; 1 if a conversion fails, needs more memory than the limit, or differs after kills; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import filecmp
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import BAD_INPUT, FAILED, Parser, leave, open_streams, positive_int, report

CONVERT = Path(__file__).resolve().parent / "convert_checkpoint.py"
PATHS = {  # name: source, arguments
    "hf -> hf": ("hf", ["--to", "hf"]),
    "hf -> packed, tp 8": ("hf", ["--to", "packed", "--tp", "8"]),
    "packed -> hf": ("hf -> packed, tp 8", ["--to", "hf"]),
    "hf -> orbax": ("hf", ["--to", "orbax"]),
    "orbax -> hf": ("hf -> orbax", ["--to", "hf"]),
    "orbax -> packed, tp 8": ("hf -> orbax", ["--to", "packed", "--tp", "8"]),
    "hf bf16 -> hf nvfp4": ("hf", ["--to", "hf", "--quantize", "nvfp4"]),
}
LIMIT_BYTES = 1_000_000_000  # beyond twice the largest tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="bench_convert.", dir=args.work) as work:
        figures = measure(Path(work), args)
    if args.json:
        print(json.dumps(figures))
    else:
        print_table(figures)
    return 0 if figures["ok"] else FAILED


def measure(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    source = work / "hf"
    # In another process: what this one has held counts as the peak of those that it starts.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        largest = pool.submit(write_source, source, args.gigabytes).result()
    limit = 2 * largest + LIMIT_BYTES
    figures: dict[str, Any] = {"largest_tensor": largest, "memory_limit": limit, "paths": {}, "ok": True}
    made = {"hf": source}
    for name, (origin, arguments) in PATHS.items():
        note(name)
        target = work / name.replace(" ", "_").replace("->", "to").replace(",", "")
        copy_rate = copied(made[origin], work / "copy")
        row, code = converted(made[origin], target, arguments)
        row["cp_bytes_per_second"] = copy_rate
        row["of_cp"] = row["bytes_per_second"] / copy_rate if code == 0 else None
        row["ok"] = code == 0 and row["peak_rss"] <= limit
        if row["ok"] and args.kills and name != "hf bf16 -> hf nvfp4":
            row["kills"], row["same_after_kills"] = killed(made[origin], work / "killed", arguments, target, args.kills)
            row["ok"] = row["same_after_kills"]
        figures["paths"][name] = row
        figures["ok"] &= row["ok"]
        if code == 0:
            made[name] = target
        still_needed = {origin for origin, _ in list(PATHS.values())[list(PATHS).index(name) + 1 :]}
        for old in [old for old in made if old not in still_needed]:
            shutil.rmtree(made.pop(old))
    return figures


def write_source(directory: Path, gigabytes: int) -> int:
    """A target of about that size in HF layout, of random bf16 values. Returns the bytes of its largest tensor."""
    import jax.numpy as jnp
    import numpy as np

    from checkpoints.hf import save_hf
    from muse_jax.config import TINY, MLPKind, default_layer_types, default_layer_uses_rope
    from muse_jax.layout import parameter_tree

    layers = max(3, gigabytes)
    config = dataclasses.replace(
        TINY, vocab_size=32_768, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, moe_hidden_size=2048, moe_intermediate_size=2048, num_local_experts=36, num_experts_per_tok=4,
        layer_types=default_layer_types(layers), layer_uses_rope=default_layer_uses_rope(layers),
        mlp_layer_types=(MLPKind.SPARSE,) * layers, dtype="bfloat16",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(1 << 24, np.float32) * 0.02).astype(jnp.bfloat16)

    def draw(spec) -> np.ndarray:
        array = np.resize(np.roll(values, int(rng.integers(values.size))), spec.param_shape)
        return array.astype(spec.dtype_in(jnp.bfloat16))

    class Lazy:
        """Drawn when it is written."""

        def __init__(self, spec) -> None:
            self._spec, self.shape = spec, spec.param_shape

        def __array__(self, dtype=None, copy=None):
            return draw(self._spec)

    names = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim moe_hidden_size " \
            "moe_intermediate_size num_local_experts num_experts_per_tok sliding_window dtype"  # fmt: skip
    raw = {"model_type": "muse_spark_text", **{name: getattr(config, name) for name in names.split()}}
    save_hf(parameter_tree(config, Lazy), raw, directory, dtype=jnp.bfloat16)
    return config.num_local_experts * 2 * config.moe_intermediate_size * config.moe_hidden_size * 2


def copied(source: Path, target: Path) -> float:
    """Bytes per second of `cp -r` and `sync`."""
    size = drop_cached(source)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    subprocess.run(["sync"], check=True)
    return size / seconds


def converted(source: Path, target: Path, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Figures of one run of the script, and its exit code."""
    size = drop_cached(source)
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, CONVERT, source, target, *arguments, "--json"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    subprocess.run(["sync"], check=True)
    seconds = time.perf_counter() - began
    row = {"bytes_in": size, "seconds": seconds, "bytes_per_second": size / seconds, "peak_rss": usage.ru_maxrss * 1024}
    return row, child.returncode


def killed(source: Path, target: Path, arguments: list[str], whole: Path, kills: int) -> tuple[int, bool]:
    """Kills a conversion at random moments and resumes it. Returns how many kills met it, and whether it ended alike."""
    command = [sys.executable, CONVERT, source, target, *arguments, "--resume"]
    partial = target.parent / f".{target.name}.partial"
    met = 0
    for _ in range(kills):
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while child.poll() is None and not (partial / "data").exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0.5, 3.0))
        met += child.poll() is None
        child.kill()
        child.wait()
        if target.exists():
            shutil.rmtree(target)  # it was quicker; begin again, so that every kill meets a conversion
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    same = same_files(target, whole) if "orbax" not in arguments else same_weights(target, whole, source, arguments)
    shutil.rmtree(target)
    return met, same


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (one, other)]
    return names[0] == names[1] and not any(filecmp.cmpfiles(one, other, names[0], shallow=False)[1:])


def same_weights(one: Path, other: Path, source: Path, arguments: list[str]) -> bool:
    """Whether all tensors of `one` have the checksums of its manifest, and that is the manifest of `other`."""
    verified = subprocess.run([sys.executable, CONVERT, source, one, *arguments, "--verify"], stdout=subprocess.DEVNULL)
    sums = [json.loads((root / "muse_manifest.json").read_text())["weights_sha256"] for root in (one, other)]
    return verified.returncode == 0 and sums[0] == sums[1]


def drop_cached(directory: Path) -> int:
    """Drops a directory's files from the page cache. Returns their bytes."""
    size = 0
    for path in directory.rglob("*"):
        if path.is_file():
            size += path.stat().st_size
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size


def print_table(figures: dict[str, Any]) -> None:
    print(f"largest tensor {figures['largest_tensor'] / 1e9:.2f} GB, memory limit {figures['memory_limit'] / 1e9:.2f} GB")
    print(f"{'path':22} {'GB':>6} {'s':>7} {'MB/s':>6} {'cp MB/s':>8} {'of cp':>6} {'peak GB':>8}  killed and resumed")
    for name, row in figures["paths"].items():
        share = "failed" if row["of_cp"] is None else f"{row['of_cp']:.0%}"
        after = "" if "kills" not in row else f"{row['kills']} times: {'the same' if row['same_after_kills'] else 'DIFFERENT'}"
        print(
            f"{name:22} {row['bytes_in'] / 1e9:6.2f} {row['seconds']:7.1f} {row['bytes_per_second'] / 1e6:6.0f} "
            f"{row['cp_bytes_per_second'] / 1e6:8.0f} {share:>6} {row['peak_rss'] / 1e9:8.2f}  {after}"
        )


def note(message: str) -> None:
    report(f"bench_convert.py: {message}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="bench_convert.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="directory on the disk to measure (default: the current)")
    parser.add_argument("--gigabytes", type=positive_int, default=6, help="size of the checkpoint (default: 6, at least 3)")
    parser.add_argument("--kills", type=int, default=0, help="kills of each conversion (default: 0)")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object")
    args = parser.parse_args(argv)
    if not args.work.is_dir():
        parser.exit(BAD_INPUT, f"bench_convert.py: {args.work}: no such directory\n")
    return args


if __name__ == "__main__":
    leave(main())
