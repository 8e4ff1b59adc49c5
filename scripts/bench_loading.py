"""Measures the memory of loading a checkpoint onto a mesh: nothing that is shared by the devices is ever there as a whole.

    python scripts/bench_loading.py                            2 GB, a minute or two; three times that on the disk
    python scripts/bench_loading.py --gb 6 --directory DIR --json

A synthetic checkpoint in HF layout is converted to Orbax and to packed with --tp 8, and each is loaded in a process of its own
in bf16 on eight virtual CPU devices, whose memory is the process's. `on devices` is the sum over the shards of all parameters,
`layout` the sum that their table asks for: a part for each device, a whole for each of what every device has. `RSS` is how far
the resident memory rose above what it was before loading; `beyond` is the most by which it was, at the end of any tensor, above
the arrays that were there then.

Exit code: 0; 1 if a format has other bytes on the devices than the layout asks for, or its RSS rises above them by the largest
tensor and 300 MB, at the end or at any tensor, or if the disk or the device fails; 2 for bad arguments; 130
after Ctrl-C; 141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import FAILED, Parser, guarded, leave, open_streams, report
from generate import virtual_devices

if TYPE_CHECKING:  # the library takes a second to import, a mistyped option should not
    import jax
    import numpy as np

    from muse_jax.config import ModelConfig
    from muse_jax.layout import TensorSpec

NAME = "bench_loading.py"
FORMATS = ("hf", "orbax", "packed")
DEVICES = 8
SLACK = 300_000_000  # bytes beyond the arrays and the largest tensor: pieces on their way, what libraries keep
_STATUS = Path("/proc/self/status")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args), of_disk=FAILED)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bench_loading.", dir=args.directory) as directory:
        rows = measure(Path(directory), args.gb)
    print_table(rows)
    if args.json:
        print(json.dumps({"devices": DEVICES, "slack": SLACK, "formats": rows}))
    return FAILED if any(row["faults"] for row in rows) else 0


def measure(directory: Path, gigabytes: float) -> list[dict[str, Any]]:
    """Makes the checkpoints and loads each. Returns the figures of `loaded` for each format, with its `faults`."""
    note(f"writing {gigabytes:g} GB in HF layout")
    in_process(write_source, directory / "hf", gigabytes)
    for format in FORMATS[1:]:
        note(f"converting to {format}")
        in_process(converted, directory / "hf", directory / format, format)
    rows = []
    for format in FORMATS:
        note(f"loading {format}")
        row = {"format": format} | in_process(loaded, directory / format)
        rows.append(row | {"faults": faults(row)})
    return rows


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with the figures of one format, one line each."""
    found = []
    if row["device_bytes"] != row["layout_bytes"]:
        found.append(f"{row['device_bytes']} bytes on the devices, but the layout asks for {row['layout_bytes']}")
    limit = row["largest_tensor"] + SLACK
    if row["rss_growth"] >= row["layout_bytes"] + limit:
        found.append(f"RSS rose by {row['rss_growth']} bytes: the limit is {row['layout_bytes'] + limit}")
    if row["beyond_arrays"] >= limit:
        found.append(f"RSS rose to {row['beyond_arrays']} bytes above the arrays: the limit is {limit}")
    return found


def in_process(function: Callable, *args: Any) -> Any:
    """`function(*args)` in a process of its own, so that nothing that another one held counts."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ----------------------------------------------------------------------------------------------- in processes of their own


def write_source(directory: Path, gigabytes: float) -> None:
    """A target of about that size in HF layout, of random bf16 values, made as they are written."""
    import jax.numpy as jnp
    import numpy as np

    from checkpoints.hf import save_hf
    from muse_jax.layout import parameter_tree

    config = sized(gigabytes)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1 << 20, np.float32) * 0.02

    class Drawn:
        def __init__(self, spec: TensorSpec) -> None:
            self._spec, self.shape = spec, spec.param_shape

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            stored = np.roll(values, int(rng.integers(values.size))).astype(self._spec.dtype_in(jnp.bfloat16))
            return np.resize(stored, self.shape)

    names = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size " \
            "moe_hidden_size moe_intermediate_size num_local_experts num_experts_per_tok mlp_layer_types dtype"  # fmt: skip
    raw = {"model_type": "muse_spark_text", **{name: getattr(config, name) for name in names.split()}}
    save_hf(parameter_tree(config, Drawn), raw, directory, dtype=jnp.bfloat16)


def sized(gigabytes: float) -> ModelConfig:
    """Three sparse layers and a dense one, eight KV heads, and as many experts as the size takes."""
    from muse_jax.config import TINY, MLPKind, default_layer_types, default_layer_uses_rope
    from muse_jax.layout import text_tensors

    layers, width = 4, 1024 if gigabytes >= 0.5 else 256

    def config(experts: int) -> ModelConfig:
        return dataclasses.replace(
            TINY, vocab_size=8 * width, hidden_size=width, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=8, head_dim=width // 16, intermediate_size=2 * width, moe_hidden_size=width,
            moe_intermediate_size=width, num_local_experts=experts, num_experts_per_tok=2,
            layer_types=default_layer_types(layers), layer_uses_rope=default_layer_uses_rope(layers),
            mlp_layer_types=(MLPKind.SPARSE,) * (layers - 1) + (MLPKind.DENSE,), dtype="bfloat16",
        )  # fmt: skip

    def size(experts: int) -> int:
        return sum(spec.size * spec.dtype_in("bfloat16").itemsize for spec in text_tensors(config(experts)))

    fewest = 2
    return config(fewest + max(0, round((gigabytes * 1e9 - size(fewest)) / (size(fewest + 1) - size(fewest)))))


def converted(source: Path, target: Path, format: str) -> None:
    from checkpoints import convert

    convert.convert(convert.plan(source, target, convert.Options(format, tp=DEVICES if format == "packed" else None)))


def loaded(directory: Path) -> dict[str, Any]:
    """Loads a checkpoint onto the mesh and says what that took, in bytes and seconds."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # where the devices' memory is the process's
    virtual_devices(DEVICES)
    import jax
    import jax.numpy as jnp

    import checkpoints.orbax  # noqa: F401 (what importing takes is not what loading takes)
    import muse_jax
    from checkpoints.loading import read_config
    from muse_jax.layout import tensors
    from muse_jax.sharding import make_mesh

    mesh = make_mesh(DEVICES)
    jax.block_until_ready([jax.device_put(jnp.zeros(1), device) for device in mesh.devices.flat])
    specs = tensors(read_config(directory))
    before, live, beyond = memory("VmRSS"), [0], [0]

    def progress(done: int, total: int) -> None:
        # The peak includes that of the tensor just loaded, which is not hidden by those that were still to come.
        live.append(sum(map(array_bytes, jax.live_arrays())))
        beyond.append(memory("VmHWM") - before - live[-1])

    began = time.perf_counter()
    muse = muse_jax.load(directory, mesh=mesh, dtype="bfloat16", progress=progress)
    arrays = jax.block_until_ready(jax.tree.leaves(muse.model.params))
    seconds = time.perf_counter() - began
    growth = memory("VmHWM") - before
    return {
        "seconds": seconds,
        "num_tensors": len(specs),
        "stored_bytes": sum(spec.size * spec.dtype_in(jnp.bfloat16).itemsize for spec in specs),
        "largest_tensor": max(spec.size * spec.dtype_in(jnp.bfloat16).itemsize for spec in specs),
        "layout_bytes": sum(rank_bytes(spec, rank) for spec in specs for rank in range(DEVICES)),
        "device_bytes": sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards),
        "live_bytes": max(live),
        "rss_before": before,
        "rss_growth": growth,
        "beyond_arrays": max(beyond),
    }


def rank_bytes(spec: TensorSpec, rank: int) -> int:
    """What the layout gives one device of a parameter of a bf16 model."""
    return math.prod(part.stop - part.start for part in spec.rank_part(DEVICES, rank)) * spec.dtype_in("bfloat16").itemsize


def array_bytes(array: jax.Array) -> int:
    """Of all shards; asking for the shards would make arrays of them, which would then count as well."""
    sharding = array.sharding
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize * len(sharding.addressable_devices)


def memory(field: str) -> int:
    """Resident bytes of this process: VmRSS, now; VmHWM, the most. (getrusage would count those of the process's parent.)"""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


# ---------------------------------------------------------------------------------------------------------- command line


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'MB':8} {'stored':>8} {'largest':>8} {'layout':>8} {'on devices':>11} {'live':>8} {'RSS':>8} {'limit':>8} "
        f"{'beyond':>8} {'s':>6}  verdict"
    )
    for row in rows:
        names = ("stored_bytes", "largest_tensor", "layout_bytes", "device_bytes", "live_bytes", "rss_growth")
        stored, largest, layout, devices, live, growth = (row[name] / 1e6 for name in names)
        print(
            f"{row['format']:8} {stored:8.1f} {largest:8.1f} {layout:8.1f} {devices:11.1f} {live:8.1f} {growth:8.1f} "
            f"{layout + largest + SLACK / 1e6:8.1f} {row['beyond_arrays'] / 1e6:8.1f} {row['seconds']:6.1f}  "
            f"{'; '.join(row['faults']) or 'ok'}"
        )


def note(message: str) -> None:
    report(f"{NAME}: {message}")


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--gb", type=positive_number, default=2.0, metavar="N", help="size of the checkpoint in GB (default: 2)")
    add("--directory", type=Path, help="where the checkpoints are made, and removed at the end (default: as TMPDIR says)")
    add("--json", action="store_true", help="end stdout with a line that holds the figures as a JSON object")
    args = parser.parse_args(argv)
    if args.directory is not None and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: no such directory")
    if not _STATUS.exists():
        parser.error(f"{_STATUS}: not on this system; resident memory is read from there")
    return args


if __name__ == "__main__":
    leave(main())
