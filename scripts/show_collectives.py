"""Shows what a decode step of one sequence sends between devices: every collective, its place, payload and number of runs.

    python scripts/show_collectives.py                          the bundled model and its draft on eight devices
    python scripts/show_collectives.py --full-size --markdown   the released model of 816 billion parameters, with a draft
    python scripts/show_collectives.py --devices 4 --moe-sharding expert

Nothing is loaded and nothing runs: shapes are enough. The step is lowered for this machine's devices, virtual ones on a CPU,
and its collectives are read from the program before XLA optimises it, with the dtypes of the source. --compiled reads what XLA
makes of it for this machine: it may join collectives, and for a CPU it widens bf16 to f32.

    place    the innermost named scope around the collective, draft.* in the draft
    bytes    of the whole array, gathered, reduced or exchanged; the last line has the sum over all runs
    runs     times a layer x layers, or times a step x 1; --compiled cannot tell layers apart
             *: inside a branch or a loop of unknown length, so that it may run more or less often

Exit code: 0; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
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
from generate import BUNDLED, virtual_devices

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    import jax
    from jax.sharding import Mesh

    from muse_jax import DecodeState
    from muse_jax.config import ModelConfig
    from muse_jax.decoding import Model
    from muse_jax.draft_config import DraftConfig
    from muse_jax.hlo import Module
    from muse_jax.sharding import ShardingConfig

NAME = "show_collectives.py"
SLOTS = 4096  # positions that the caches hold; nothing that travels depends on it
NVFP4_LAYERS = range(1, 61)  # of the released NVFP4 checkpoint; the experts of its first and its last layer are bf16
CARRIES = {
    "embed": "rows of the embedding",
    "attention.o_proj": "eight partial sums",
    "moe.pre_expert_proj": "pooled rows",
    "moe.hidden": "hidden rows of the experts",
    "moe.norm": "sums of squares of expert rows",
    "moe.mixed": "weighted sums of expert rows",
    "moe.rows": "expert rows",
    "moe.post_expert_proj": "branch",
    "mlp.down_proj": "eight partial sums",
    "sampling": "best tokens, or candidates and sums, of each part of the vocabulary",
    "draft.embed": "rows of the embedding",
    "draft.conv": "coefficients of the convolutions",
    "draft.o_proj": "eight partial sums",
    "draft.down_proj": "eight partial sums",
    "draft.fc": "eight partial sums, of the taps of accepted rows",
    "draft.candidates": "candidates of each part of the vocabulary",
    "draft.codebooks": "rows of the codebooks",
    "draft.selector": "projected rows",
}
LAYER_PLACES = ("attention.", "moe.", "mlp.")


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one place that carry the same.  runs: of a step.  calls: layers, or 1 for the whole step."""

    place: str
    carries: str
    kind: str
    array: str
    payload_bytes: int
    runs: int
    calls: int
    may_vary: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    conditions, rows = collect(args)
    if args.json:
        print(json.dumps({**conditions, "collectives": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in conditions.items() if value is not None))
        print_table(rows, args.markdown)
    return 0


def collect(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """What the table is of, and its rows. Raises ValueError or OSError with one line for bad settings or files."""
    import jax
    import jax.numpy as jnp

    import muse_jax
    from muse_jax import hlo
    from muse_jax.sharding import ShardingConfig, make_mesh

    config, draft_config = full_size() if args.full_size else read_configs(args.checkpoint)
    if args.activations == "nvfp4" and not config.nvfp4_layers:
        raise ValueError("--activations nvfp4: this checkpoint has no NVFP4 experts, so only bf16 is allowed")
    if args.rows == 1:
        draft_config = None
    elif draft_config is None:
        raise ValueError(f"--rows {args.rows}: there is no draft, so a step has one row")
    virtual_devices(args.devices)
    mesh = make_mesh(args.devices)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    sharding = ShardingConfig(mesh.size, args.moe_sharding, args.moe_exchange, calls=not on_gpu)
    dtype = jnp.dtype(args.dtype or config.dtype)
    model, state = abstract_step(config, draft_config, mesh, sharding, dtype, args.rows, args.activations)
    lowered = jax.jit(muse_jax.decode, donate_argnames="state").lower(model, state)
    program: dict[str, Any] = {"program": "before XLA"}
    if args.compiled:
        began = time.perf_counter()
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        program = {
            "program": f"compiled for {mesh.devices.flat[0].platform}",
            "compile_seconds": round(time.perf_counter() - began, 1),
            "argument_bytes": memory.argument_size_in_bytes,  # of a device
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    text = compiled.as_text() if args.compiled else lowered.as_text("hlo", debug_info=True)
    conditions = {
        "model": "full size" if args.full_size else args.checkpoint.name,
        "draft": "none" if draft_config is None else f"of {draft_config.num_hidden_layers} layers",
        "devices": mesh.size,
        "rows": args.rows,
        "dtype": str(dtype),
        "moe_sharding": args.moe_sharding,
        "moe_exchange": args.moe_exchange if args.moe_sharding == "n" else None,
        "activations": args.activations,
        **program,
        "jax": jax.__version__,
    }
    module = hlo.parse(text)
    if args.compiled:
        conditions["largest_arrays"] = "; ".join(
            f"{each.name} {describe(list(map(str, each.result)))}" for each in module.largest(3)
        )
    return conditions, read_rows(module)


def read_configs(checkpoint: Path) -> tuple[ModelConfig, DraftConfig | None]:
    """Of a checkpoint and of the draft in it."""
    import checkpoints
    from muse_jax.muse import DRAFT_DIRECTORY

    draft = checkpoint / DRAFT_DIRECTORY
    return checkpoints.read_config(checkpoint), checkpoints.read_draft_config(draft) if draft.is_dir() else None


def full_size() -> tuple[ModelConfig, DraftConfig]:
    """The released NVFP4 checkpoint, and a draft of the published shape, whose head size and FFN width are a relative's."""
    from muse_jax.config import MUSE_SPARK_OPEN, AttentionKind
    from muse_jax.draft_config import DraftConfig, default_target_layer_ids

    draft = DraftConfig(
        vocab_size=202_048,
        hidden_size=8192,
        num_hidden_layers=5,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=24_576,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        layer_types=(AttentionKind.SLIDING,) * 5,
        sliding_window=2048,
        is_causal=False,
        attention_bias=False,
        target_layer_ids=default_target_layer_ids(62, 5),
        mask_token_id=201_818,
        block_size=16,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=256,
        selector_top_k=16,
        output_multiplier=MUSE_SPARK_OPEN.output_multiplier,
        final_logit_softcapping=MUSE_SPARK_OPEN.final_logit_softcapping,
    )
    return dataclasses.replace(MUSE_SPARK_OPEN, nvfp4_layers=tuple(NVFP4_LAYERS)), draft


def abstract_step(
    config: ModelConfig,
    draft_config: DraftConfig | None,
    mesh: Mesh,
    sharding: ShardingConfig,
    dtype: jax.typing.DTypeLike,
    rows: int,
    activations: str = "bf16",
    slots: int = SLOTS,
) -> tuple[Model, DecodeState]:
    """Arguments of `muse_jax.decode` for one sequence as shapes, each where it lives on the mesh.

    Args:     rows: of a step; 1 without a draft.  slots: positions that the caches hold.
    Raises:   ValueError if model and sharding do not fit.
    """
    import functools

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from muse_jax import decoding
    from muse_jax.draft import DFlash2
    from muse_jax.layout import parameter_tree
    from muse_jax.model import MuseSpark
    from muse_jax.sampling import SamplingParams
    from muse_jax.sharding import placement

    sharding.check_fits(config)

    where, copies = placement(mesh, sharding)

    def leaf(spec):
        times = copies(spec)
        shape = tuple(size * (times if axis == spec.shard_axis else 1) for axis, size in enumerate(spec.param_shape))
        return jax.ShapeDtypeStruct(shape, spec.dtype_in(dtype), sharding=where(spec))

    def placed(tree, specs):
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs
        )

    settings = {"dtype": jnp.dtype(dtype), "sharding": sharding}
    drafted = {}
    if draft_config is not None:
        draft_config.check_fits(config)
        drafted = {"draft": DFlash2(draft_config, **settings), "draft_params": parameter_tree(draft_config, leaf)}
    module = MuseSpark(config, activations=activations, **settings)
    model = decoding.Model.create(module, parameter_tree(config, leaf), **drafted, tree_size=rows, mesh=mesh)
    caches = jax.eval_shape(functools.partial(decoding.empty_caches, batch=1, slots=slots), model)
    everywhere = functools.partial(jax.tree.map, lambda _: decoding.EVERYWHERE)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    done, stops = jax.ShapeDtypeStruct((1,), jnp.bool), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    rest = (row, row, row, done, stops, jax.eval_shape(lambda: SamplingParams.create(1, temperature=1.0)))
    return model, decoding.DecodeState(*placed(caches, model.cache_specs), *placed(rest, everywhere(rest)), num_rows=rows)


def read_rows(module: Module) -> list[Row]:
    """Collectives of a program that carry the same in the same place as one row each, those that run most first."""
    from muse_jax import hlo

    groups: dict[tuple, list[hlo.Collective]] = {}
    for collective in module.collectives():
        place = place_of(hlo.scopes(collective.op_name))
        may_vary = collective.in_branch or collective.in_unknown_loop
        array = describe([str(array) for array in collective.result])
        groups.setdefault((place, collective.kind, array, collective.payload_bytes, may_vary), []).append(collective)
    rows = []
    for (place, kind, array, payload, may_vary), found in groups.items():
        # Layers of a kind are one function of the program; where XLA has put functions into their callers, nothing says which.
        runs, calls = sum(collective.times for collective in found), 1
        if place.startswith(LAYER_PLACES):
            calls = sum({collective.computation: collective.times for collective in found}.values())
        carries = CARRIES.get(place, "")
        rows.append(Row(place, carries, kind, array, payload, runs, calls, may_vary))
    return sorted(rows, key=lambda row: -row.calls)


def place_of(scopes: Sequence[str]) -> str:
    """The innermost scope, said to be the draft's where an outer one is."""
    if not scopes:
        return "(no scope)"
    in_draft = any(scope.split(".")[0] == "draft" for scope in scopes[:-1]) and not scopes[-1].startswith("draft.")
    return f"draft.{scopes[-1]}" if in_draft else scopes[-1]


def describe(arrays: list[str]) -> str:
    """Arrays of a collective in a few words."""
    if len(set(arrays)) == 1:
        return arrays[0] if len(arrays) == 1 else f"{len(arrays)} x {arrays[0]}"
    return " + ".join(arrays)


def print_table(rows: list[Row], markdown: bool) -> None:
    head = ("place", "carries", "collective", "array", "bytes", "runs")
    lines = []
    for row in rows:
        runs = f"{row.runs / row.calls:g} x {row.calls}" + "*" * row.may_vary
        lines.append((row.place, row.carries, row.kind, row.array, f"{row.payload_bytes:,}", runs))
    total, count = sum(row.payload_bytes * row.runs for row in rows), sum(row.runs for row in rows)
    lines.append(("step", "", "", "", f"{total:,}", f"{count:,}"))
    if markdown:
        print("| " + " | ".join(head) + " |\n|---|---|---|---|---:|---:|")
        for line in lines:
            print("| " + " | ".join(line) + " |")
        return
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, *lines):
        left = [cell.ljust(width) for cell, width in zip(line[:4], widths[:4], strict=True)]
        print("  ".join([*left, *(cell.rjust(width) for cell, width in zip(line[4:], widths[4:], strict=True))]).rstrip())


def num_rows(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from 1 to 32")
    return int(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--checkpoint", type=directory, default=BUNDLED, metavar="DIR", help="model (default: the bundled one)")
    model.add_argument("--full-size", action="store_true", help="the released model of 816 billion parameters, with a draft")
    add("--devices", type=positive_int, default=8, metavar="N", help="that share the work: 1, 2, 4 or 8 (default: 8)")
    add("--rows", type=num_rows, default=16, metavar="N", help="of a step: nodes of the tree, 1 without draft (default: 16)")
    add("--moe-sharding", choices=("n", "expert", "replicated"), default="n", help="of the routed experts (default: n)")
    add("--moe-exchange", choices=("sums", "rows"), default="sums", help="after their second GEMM, with n (default: sums)")
    add("--activations", choices=("bf16", "nvfp4"), default="bf16", help="of NVFP4 experts (default: bf16)")
    add("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: the checkpoint's)")
    add("--compiled", action="store_true", help="read the program that XLA compiles for this machine")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print a Markdown table")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
