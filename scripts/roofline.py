"""Computes, without running anything, what a decode step of one sequence reads and the least time it takes, phase by phase.

    python scripts/roofline.py --full-size                        the released model on eight H200s
    python scripts/roofline.py --full-size --device gb300 --context 131072 --plot step.png     a chart; needs the extra `plot`
    python scripts/roofline.py --checkpoint DIR --tp 2 --rows 8 --bandwidth 3.35 --launch-us 2 --sync-us 1
    python scripts/roofline.py --story                            the published 12.9 and 5.9 ms, term by term

Every figure is of one of --tp ranks, whose experts are divided by rows of their matrices, so that no routing is uneven.

    weights, KV  bytes that a phase reads in all its runs. Weights are the layout's tables of the checkpoint, KV the positions
                 that the rows see. Activations and writes stay in the L2 cache and are not counted
    floor        these bytes over the memory's bandwidth
    launches     number x cost; a launch covers a layer from its attention to the qkv projection of the next
    syncs        points where all SMs of a GPU wait for each other x cost
    exchanges    points that wait for other GPUs x latency, and what they send over the links' bandwidth
    in series    all of them, as if nothing were hidden behind anything else

The constants have their sources under the table; an option replaces any of them. --story shows the same terms beside what was
published of the ordinary chain of kernels and of the megakernel, and what they do not explain as a remainder.

Exit code: 0; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from command_line import (
    Parser,
    directory,
    guarded,
    leave,
    open_streams,
    positive_int,
)
from generate import BUNDLED
from output_files import check_plot, picture, write_picture
from show_collectives import full_size, num_rows, read_configs

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    from matplotlib.figure import Figure

    from muse_jax.config import ModelConfig
    from muse_jax.draft_config import DraftConfig
    from muse_jax.roofline import Device, Phase, Settings

NAME = "roofline.py"
DEFAULT_CONTEXT = 2048
TERMS = ("weights", "kv", "launches", "syncs", "exchanges")
CONSTANTS = {"bandwidth": "bandwidth", "launch": "launch_us", "sync": "sync_us", "latency": "latency_us", "link": "link"}

# The description of the megakernel for Muse Spark Open (SGLang team, 11 Nov 2026): eight GB300s, batch 1, GSM8K, greedy.
PUBLISHED = {
    "chain": {"step_ms": 12.9, "verify_ms": 10.9, "draft_ms": 1.16, "launches": 1450, "draft_launches": 175, "tok_s": 517},
    "megakernel": {"step_ms": 5.9, "verify_ms": 5.3, "draft_ms": 0.44, "launches": 97, "draft_launches": 8, "tok_s": 1109},
}
PUBLISHED_ROWS, PUBLISHED_EXPERTS, PUBLISHED_ACCEPTANCE = 16, 49, 6.6
PREFETCHED_EXPERTS, PREFETCH_MS = 14, 0.2  # of a layer, before its routing is known; of the verify half
FENCE_US = (3.6 + 4.0) / 2  # published, with copies in flight


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    figures = collect(args)
    if args.plot is not None:
        write_picture(args.plot, draw(figures))
    if args.json:
        print(json.dumps(figures))
    elif args.story:
        print_story(figures)
    else:
        print_figures(figures)
    return 0


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as --json prints them. Raises ValueError or OSError with one line for bad settings or files."""
    if args.plot is not None:
        check_plot(args.plot)
    from muse_jax import roofline

    config, draft = full_size() if args.full_size else read_configs(args.checkpoint)
    if args.rows == 1:
        draft = None
    elif draft is None:
        raise ValueError(f"--rows {args.rows}: there is no draft, so a step has one row")
    else:
        draft.check_fits(config)
    settings, experts_source = read_settings(args, config)
    device, constants = read_device(args)
    phases = roofline.step(config, draft, settings)
    acceptance, acceptance_source = read_acceptance(args, draft)

    def totals(chosen: list[Phase]) -> dict[str, Any]:
        return {
            "weight_bytes": sum(phase.weight_bytes for phase in chosen),
            "kv_bytes": sum(phase.kv_bytes for phase in chosen),
            **add_up([phase.times(device) for phase in chosen]),
        }

    whole = totals(phases)
    figures: dict[str, Any] = {
        "conditions": {
            "model": "full size" if args.full_size else args.checkpoint.resolve().name,
            "draft": "none" if draft is None else f"of {draft.num_hidden_layers} layers",
            "device": args.device,
            **dataclasses.asdict(settings),
            "experts_source": experts_source,
            "acceptance": acceptance,
            "acceptance_source": acceptance_source,
        },
        "constants": constants,
        "phases": [{**dataclasses.asdict(phase), **add_up([phase.times(device)])} for phase in phases],
        "totals": {
            "draft": totals([phase for phase in phases if phase.in_draft]),
            "verify": totals([phase for phase in phases if not phase.in_draft]),
            "step": whole,
        },
        "computed_tokens_per_second": None
        if acceptance is None
        else {"floor": acceptance * 1e6 / whole["floor_us"], "in_series": acceptance * 1e6 / whole["in_series_us"]},
    }
    if args.story:
        constants["graph_launch"] = roofline.GRAPH_LAUNCH._asdict()
        constants["start_and_end"] = roofline.START_AND_END._asdict()
        tables = tell_story(config, draft, settings, device, phases)
        figures["story"] = {name: [line.figures() for line in lines] for name, lines in tables.items()}
    return figures


def add_up(times: list[dict[str, float]]) -> dict[str, float]:
    """Microseconds by term, and their sums."""
    by_term = {term: sum(each[term] for each in times) for term in TERMS}
    return {
        **{f"{term}_us": us for term, us in by_term.items()},
        "floor_us": by_term["weights"] + by_term["kv"],
        "in_series_us": sum(by_term.values()),
    }


# ------------------------------------------------------------------------------------------------------------- settings


def read_settings(args: argparse.Namespace, config: ModelConfig) -> tuple[Settings, str]:
    """What the step is, and where its number of experts comes from."""
    from muse_jax.config import MLPKind
    from muse_jax.roofline import Settings, uniform_experts

    room = config.max_position_embeddings - args.rows
    context = min(DEFAULT_CONTEXT, room) if args.context is None else args.context
    if not 1 <= context <= room:
        raise ValueError(f"--context {context}: at most {room}, which leaves room for the rows of the step")
    if args.activations == "nvfp4" and not config.nvfp4_layers:
        raise ValueError("--activations nvfp4: this checkpoint has no NVFP4 experts, so only bf16 is allowed")
    experts, source = args.experts, "given"
    each = config.num_experts_per_tok
    most = min(config.num_local_experts, args.rows * each)
    if MLPKind.SPARSE not in config.mlp_layer_types:
        if experts is not None:
            raise ValueError("--experts: this model has none")
        experts, source = 0.0, "the model has none"
    elif experts is None and args.full_size and args.rows == PUBLISHED_ROWS:
        experts, source = PUBLISHED_EXPERTS, "published, Nov 2026: measured on GSM8K with 16 rows"
    elif experts is None:
        experts = uniform_experts(config, args.rows)
        source = f"expected if each row took any {each} of {config.num_local_experts} with equal chance"
    elif not each <= experts <= most:
        raise ValueError(
            f"--experts {experts:g}: expected {each} (one row's) to {most} (each row has its own, or all there are)"
        )
    activations = args.activations or ("nvfp4" if config.nvfp4_layers else "bf16")
    return Settings(args.tp, args.rows, context, float(experts), activations, args.moe_exchange), source


def read_device(args: argparse.Namespace) -> tuple[Device, dict[str, dict[str, Any]]]:
    """The device with what the arguments say of it, and its constants as --json prints them."""
    from muse_jax.roofline import DEVICES

    device = DEVICES[args.device]
    for constant, option in CONSTANTS.items():
        if (value := getattr(args, option)) is not None:
            device = dataclasses.replace(device, **{constant: getattr(device, constant)._replace(value=value, source="given")})
    return device, {constant: getattr(device, constant)._asdict() for constant in CONSTANTS}


def read_acceptance(args: argparse.Namespace, draft: DraftConfig | None) -> tuple[float | None, str | None]:
    """Tokens that a step commits, and where that number comes from."""
    most = 1 if draft is None else min(args.rows, draft.block_size)
    if args.acceptance is not None:
        if not 1 <= args.acceptance <= most:
            raise ValueError(f"--acceptance {args.acceptance:g}: expected 1 to {most} tokens of a step of {args.rows} rows")
        return args.acceptance, "given"
    if draft is None:
        return 1.0, "no draft"
    if args.full_size and args.rows == PUBLISHED_ROWS:
        return PUBLISHED_ACCEPTANCE, "published, Nov 2026: a step verifies 16 rows"
    return None, None


# ---------------------------------------------------------------------------------------------------------------- story


class Line(NamedTuple):
    """A term of the story, in milliseconds of either half of a step."""

    what: str
    verify: float
    draft: float
    how: str = ""
    outside: float = 0.0  # of both halves

    def figures(self) -> dict[str, Any]:
        step = self.verify + self.draft + self.outside
        return {"what": self.what, "verify_ms": self.verify, "draft_ms": self.draft, "step_ms": step, "how": self.how}


def total(what: str, lines: Sequence[Line]) -> Line:
    return Line(what, sum(line.verify for line in lines), sum(line.draft for line in lines))


def minus(what: str, line: Line, other: Line, how: str = "") -> Line:
    return Line(what, line.verify - other.verify, line.draft - other.draft, how, line.outside - other.outside)


def tell_story(
    config: ModelConfig, draft: DraftConfig, settings: Settings, device: Device, phases: list[Phase]
) -> dict[str, list[Line]]:
    """Tables: the ordinary chain of kernels, the megakernel, what leads from one to the other, and what the megakernel would
    lack without some of its parts. Nothing is fitted: what the terms do not explain is a remainder.
    """
    from muse_jax import roofline

    tp, gb_per_ms, link = settings.tp, device.bandwidth.value, device.link.value * 1e6  # bytes per ms
    halves = [phase for phase in phases if not phase.in_draft], [phase for phase in phases if phase.in_draft]

    def gb(chosen: Sequence[Phase], names: Sequence[str] = ()) -> float:
        """What a rank reads, of phases of these names only if there are any."""
        return sum(phase.weight_bytes + phase.kv_bytes for phase in chosen if not names or phase.name in names) / 1e9

    def counts(field: str) -> tuple[int, int]:
        verify, drafted = (sum(getattr(phase, field) for phase in half) for half in halves)
        return verify, drafted

    def times(what: str, numbers: tuple[int, int], us: float, how: str) -> Line:
        return Line(
            what, *(number * us / 1e3 for number in numbers), f"{numbers[0]:,} and {numbers[1]:,} {how}, {us:.3g} us each"
        )

    def published(form: str) -> Line:
        told = PUBLISHED[form]
        outside = told["step_ms"] - told["verify_ms"] - told["draft_ms"]
        return Line("published", told["verify_ms"], told["draft_ms"], f"{outside:.2f} of the step in neither half", outside)

    def closed(lines: list[Line], told: Line) -> list[Line]:
        explained = total("these terms", lines)
        return [*lines, explained, told, minus("remainder", told, explained, "what these terms do not explain")]

    floor = Line(
        "weights and KV, each byte once",
        *(gb(half) / gb_per_ms for half in halves),
        " and ".join(f"{gb(half):.2f} GB" for half in halves),
    )

    # In the ordinary chain (sglang 0.5.23) a rank has whole experts, and all of some of the draft's matrices. What ranks add is
    # taken to travel in bf16 and in one shot, which is the least latency.
    busiest, even = roofline.busiest_rank(round(settings.experts), config.num_local_experts, tp), settings.experts / tp
    more = gb(phases, ("expert_gate_up", "expert_down")) * (busiest / even - 1)
    how = f"{busiest:.2f} of {settings.experts:g} on the busiest, not {even:.2f}: {more:.2f} GB"
    uneven = Line("whole experts on ranks", more / gb_per_ms, 0.0, how)
    copied = ("draft.fc", "draft.attention_conv", "draft.mlp_conv", "draft.selector")
    more = gb(roofline.step(config, draft, dataclasses.replace(settings, tp=1)), copied) - gb(phases, copied)
    copies = Line("draft's fc, convs, selector on all ranks", 0.0, more / gb_per_ms, f"{more:.2f} GB")
    chain_launches, launches = (
        (told["launches"] - told["draft_launches"], told["draft_launches"]) for told in PUBLISHED.values()
    )
    graph, us = roofline.GRAPH_LAUNCH.value, roofline.START_AND_END.value
    started = times("launches", chain_launches, graph, "published")
    ends = times("memory idle at both ends of kernels", counts("streams"), us, "that read weights")
    d, m = config.hidden_size, config.moe_hidden_size
    # Of a layer: o_proj and experts are added, both projections gathered; of the draft's: o_proj and down_proj are added.
    received = 2 * settings.rows * (d + m) * (tp - 1 + (tp - 1) / tp), 2 * draft.block_size * 2 * d * (tp - 1)
    stops, layers = (4, 2), (config.num_hidden_layers, draft.num_hidden_layers)
    per_layer = [n * device.latency.value / 1e3 + nbytes / link for n, nbytes in zip(stops, received, strict=True)]
    how = "4 and 2 a layer: latency and bytes, in bf16"
    sent = Line("exchanges", *(n * ms for n, ms in zip(layers, per_layer, strict=True)), how)

    fewer = times("launches", launches, device.launch.value, "published")
    points = times("grid-wide points in a launch", counts("syncs"), device.sync.value, "computed")
    waited = (sum(phase.times(device)["exchanges"] for phase in half) / 1e3 for half in halves)
    exchanged = Line("exchanges", *waited, "{} and {}: latency and bytes".format(*counts("exchanges")))

    saved = [n - less for n, less in zip(chain_launches, launches, strict=True)]
    bought = [
        Line("fewer launches of the target", saved[0] * graph / 1e3, 0.0, f"{saved[0]:,} x {graph:g} us"),
        Line("the draft in eight launches", 0.0, saved[1] * graph / 1e3, f"{saved[1]:,} x {graph:g} us"),
        minus(
            "dependent launch of the others", times("", launches, graph, ""), fewer, f"{graph:g} to {device.launch.value:g} us"
        ),
        ends._replace(what="prefetch: a ring that runs on", how="across phases and launches, if it never drains"),
        uneven._replace(what="N-sharded experts", how="no rank has more than another"),
        copies._replace(what="shared matrices of the draft", how="each read by one rank"),
        minus("exchanges", sent, exchanged, "more of them, and sums in fp32"),
        minus("grid-wide points in a launch", Line("", 0.0, 0.0), points, "in place of ends of kernels"),
    ]

    wide = roofline.step(config, draft, dataclasses.replace(settings, activations="bf16"))
    more = sum(phase.exchange_bytes for phase in wide) - sum(counts("exchange_bytes"))
    reads = roofline.weight_bytes(config, None, settings)
    experts = [reads["expert_gate_up", i] + reads["expert_down", i] for i in config.nvfp4_layers]
    ahead = sum(experts) / settings.experts * PREFETCHED_EXPERTS / 1e9
    how = f"at most, {ahead / len(experts) * 1e3:.0f} MB a layer; published {PREFETCH_MS}"
    inside = [
        Line("fp4 gathers, not bf16", more / link, 0.0, f"{more / 1e6:.0f} MB less"),
        times("data as its own flag, no fence", counts("exchanges"), FENCE_US, "fences (published 3.6-4.0)"),
        Line(f"{PREFETCHED_EXPERTS} experts ahead of routing", ahead / gb_per_ms, 0.0, how),
    ]
    return {
        "chain": closed([floor, uneven, copies, started, ends, sent], published("chain")),
        "megakernel": closed([floor, fewer, points, exchanged], published("megakernel")),
        "bought": closed(bought, minus("published", published("chain"), published("megakernel"), "the difference")),
        "inside": inside,
    }


# --------------------------------------------------------------------------------------------------------------- output


def print_figures(figures: dict[str, Any]) -> None:
    head = ("phase", "runs", "weights MB", "KV MB", "floor", "launches", "syncs", "exchanges", "in series")
    lines = []

    def add(name: str, runs: str, row: dict[str, Any]) -> None:
        terms = ("floor", "launches", "syncs", "exchanges", "in_series")
        sizes = (f"{row[f'{kind}_bytes'] / 1e6:,.2f}" for kind in ("weight", "kv"))
        times = (f"{row[f'{term}_us']:,.1f}" for term in terms)
        lines.append((name, runs, *("-" if float(cell.replace(",", "")) == 0 else cell for cell in (*sizes, *times))))

    for phase in figures["phases"]:
        add(phase["name"], str(phase["runs"]), phase)
    for half, row in figures["totals"].items():
        if row["in_series_us"]:
            add(half, "", row)
    print_wrapped(describe(figures))
    print("one rank; bytes and microseconds of a step\n")
    print_table([head, *lines], rule_before=len(figures["phases"]) + 1)
    speed = figures["computed_tokens_per_second"]
    if speed is not None:
        facts = figures["conditions"]
        print()
        print_wrapped(
            f"computed, not measured: {speed['floor']:,.0f} tokens/s at the floor, {speed['in_series']:,.0f} in series, "
            f"at {facts['acceptance']:g} tokens a step ({facts['acceptance_source']})"
        )
    print_sources(figures)


def print_story(figures: dict[str, Any]) -> None:
    titles = {
        "chain": "ordinary chain of kernels",
        "megakernel": "megakernel",
        "bought": "what leads from one to the other",
        "inside": "worth inside the megakernel (in no sum)",
    }
    print_wrapped(describe(figures))
    print("milliseconds; published figures: eight GB300s, Nov 2026; all else computed, and nothing fitted")
    for name, lines in figures["story"].items():
        table = [(titles[name], "verify", "draft", "step", "")]
        for line in lines:
            table.append((line["what"], *(f"{line[f'{part}_ms']:.2f}" for part in ("verify", "draft", "step")), line["how"]))
        print()
        print_table(table, rule_before=None if name == "inside" else len(lines) - 2)
    speeds = []
    for form, told in PUBLISHED.items():
        at = PUBLISHED_ACCEPTANCE / told["step_ms"] * 1e3
        speeds.append(f"{form} {at:,.0f} computed from its step, {told['tok_s']:,} published")
    in_series = figures["computed_tokens_per_second"]["in_series"]
    speeds.append(f"{in_series:,.0f} if a step took this model's terms alone")
    print()
    print_wrapped(f"tokens/s at {PUBLISHED_ACCEPTANCE:g} tokens a step: {'; '.join(speeds)}")
    print_sources(figures)


def describe(figures: dict[str, Any]) -> str:
    """The conditions, as print_wrapped takes them."""
    facts = {name: value for name, value in figures["conditions"].items() if not name.startswith(("acceptance", "experts_"))}
    facts["experts"] = f"{facts['experts']:.4g} a layer"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def print_sources(figures: dict[str, Any]) -> None:
    print()
    print_wrapped(figures["conditions"]["experts_source"], "experts")
    for name, constant in figures["constants"].items():
        print_wrapped(f"{constant['value']:.3g} {constant['unit']}: {constant['source']}", name.replace("_", " "))


def print_wrapped(text: str, name: str = "") -> None:
    """In lines of a terminal, after a name if there is one."""
    first = f"{name:15}" if name else ""
    print(textwrap.fill(text, 110, initial_indent=first, subsequent_indent=" " * len(first)))


def print_table(lines: list[tuple[str, ...]], rule_before: int | None) -> None:
    """Columns: numbers to the right, the first and one without a head to the left. The first line is the head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [i == 0 or not name for i, name in enumerate(lines[0])]
    for number, line in enumerate(lines):
        cells = zip(line, widths, left, strict=True)
        text = "  ".join(cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in cells)
        if number == rule_before:
            print("-" * sum(2 + width for width, name in zip(widths, lines[0], strict=True) if name))
        print(text.rstrip())


COLOURS = {  # that colour-blind readers can tell apart (Okabe and Ito)
    "weights": "#0072B2",
    "kv": "#56B4E9",
    "launches": "#E69F00",
    "syncs": "#D55E00",
    "exchanges": "#CC79A7",
}
LABELS = {
    "weights": "weights",
    "kv": "KV cache",
    "launches": "launches",
    "syncs": "synchronisation inside a GPU",
    "exchanges": "synchronisation and transfer between GPUs",
}


def duration(us: float) -> str:
    """With its unit, in three digits or so."""
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.0f} µs" if us >= 10 else f"{us:.1f} µs"


def draw(figures: dict[str, Any]) -> Figure:
    """A bar for each group of phases, stacked of what its time is spent on."""
    from matplotlib.figure import Figure

    facts, step = figures["conditions"], figures["totals"]["step"]
    groups: dict[str, dict[str, float]] = {}
    for phase in figures["phases"]:
        spent = groups.setdefault(phase["group"], dict.fromkeys(TERMS, 0.0))
        for term in TERMS:
            spent[term] += phase[f"{term}_us"]
    groups["embedding and head"] = groups.pop("embedding and head")  # most of it is at the end
    figure = Figure(figsize=(10, 2.2 + 0.5 * len(groups)), dpi=150, layout="constrained")
    axes = figure.subplots()
    ends = dict.fromkeys(groups, 0.0)
    for term in TERMS:
        if any(spent[term] for spent in groups.values()):
            sizes = [spent[term] for spent in groups.values()]
            axes.barh(list(groups), sizes, left=list(ends.values()), height=0.62, color=COLOURS[term], label=LABELS[term])
            ends = {name: end + size for (name, end), size in zip(ends.items(), sizes, strict=True)}
    for name, end in ends.items():
        axes.annotate(duration(end), (end, name), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("µs of a decode step, if nothing is hidden behind anything else (computed)")
    axes.xaxis.set_major_formatter("{x:,g}")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    how = f"{facts['device'].upper()}, tp {facts['tp']}, {facts['rows']} rows, context {facts['context']:,}"
    figure.suptitle(
        f"One decode step: {facts['model']}, {how}, {facts['experts']:.4g} experts a layer, draft {facts['draft']}\n"
        f"bytes alone {duration(step['floor_us'])}, in series {duration(step['in_series_us'])}",
        fontsize=11,
    )
    return figure


# ---------------------------------------------------------------------------------------------------------- command line


def amount(text: str) -> float:
    return number(text, lambda value: value > 0, "above 0")


def cost(text: str) -> float:
    return number(text, lambda value: value >= 0, "of at least 0")


def number(text: str, allowed: Callable[[float], bool], which: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (allowed(value) and value <= 1e9):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number {which}, at most 1e9")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--checkpoint", type=directory, default=BUNDLED, metavar="DIR", help="model (default: the bundled one)")
    model.add_argument("--full-size", action="store_true", help="the released model of 816 billion parameters, with a draft")
    model.add_argument("--story", action="store_true", help="what was published beside these terms, under its conditions")
    add("--tp", type=int, choices=(1, 2, 4, 8), help="ranks that share the work (default: 8)")
    add("--rows", type=num_rows, metavar="N", help="that a step verifies, 1 to 32; 1 without draft (default: 16)")
    add("--context", type=positive_int, metavar="N", help=f"positions before the step (default: {DEFAULT_CONTEXT})")
    experts_help = "different ones that a layer's rows use (default: 49 for 16 rows of --full-size, else as if all were alike)"
    add("--experts", type=amount, metavar="N", help=experts_help)
    add("--activations", choices=("bf16", "nvfp4"), help="between NVFP4 experts' GEMMs (default: nvfp4)")
    add("--moe-exchange", choices=("rows", "sums"), help="after their second GEMM (default: rows)")
    add("--acceptance", type=amount, metavar="N", help="tokens that a step commits (default: 6.6 for 16 rows of --full-size)")
    add("--device", choices=("h200", "gb300"), help="whose constants to use (default: h200)")
    add("--bandwidth", type=amount, metavar="TB/s", help="of the memory")
    add("--launch-us", type=cost, metavar="US", help="of a kernel")
    add("--sync-us", type=cost, metavar="US", help="of a point where all SMs of a GPU wait for each other")
    add("--latency-us", type=cost, metavar="US", help="of what another GPU sends")
    add("--link", type=amount, metavar="GB/s", help="into a GPU from all others")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=picture, metavar="FILE", help="also draw a chart, .png, .svg or .pdf")
    args = parser.parse_args(argv)
    defaults = {
        "tp": 8, "rows": 16, "experts": None, "activations": None, "moe_exchange": "rows", "acceptance": None,
        "device": "gb300" if args.story else "h200",
    }  # fmt: skip
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif args.story:
            parser.error(f"--{name.replace('_', '-')}: not allowed with --story, which has the published conditions")
    args.full_size |= args.story
    return args


if __name__ == "__main__":
    leave(main())
