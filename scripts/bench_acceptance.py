"""Measures how many tokens a verify step commits: chain against tree, sizes and temperatures, over prompts of a file.

    python scripts/bench_acceptance.py --prompts questions.jsonl                 --field names the text of a line's object
    python scripts/bench_acceptance.py --prompts questions.jsonl --check         also compares every token with plain decoding
    python scripts/bench_acceptance.py --prompts questions.jsonl --png a.png     needs the extra `plot`

    acceptance    committed tokens / verify steps, all prompts pooled: each long answer weighs more than a short one. The
                  target's own token of a step counts, the first token of an answer, which comes from prefill, does not; what
                  a stop token or the length limit cuts off is not committed
    per prompt    the mean over prompts of the same quotient
    deepest       most drafted tokens that one step accepted
    tokens/s      committed tokens over the wall time of their steps, compilation and prefill not included, in batches whose
                  rows idle once they are finished

A chain verifies as many nodes as the draft's block has. A sampled chain has the distribution of plain decoding, but other
tokens, so that --check leaves it out above temperature 0; at 0 it is the chain. Prompt i uses seed + i. In bfloat16 --check
reports where answers leave plain decoding and by what gap; in float32 only ties (1e-4, one token in a thousand) are excused.

Files are written before the table is printed, so that a closed terminal does not cost them.

Exit code: 0; 1 if --check finds a difference that is no tie, or the device fails; 2 for bad arguments or files; 130 after
Ctrl-C; 141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from command_line import (
    BAD_INPUT,
    FAILED,
    Interrupts,
    Parser,
    directory,
    guarded,
    leave,
    open_streams,
    positive_int,
    report,
)
from generate import BUNDLED, encode, histogram, tree_size
from output_files import check_matplotlib, check_output, write_file

if __name__ == "__main__":
    interrupts = Interrupts()
    interrupts.hold()  # the imports below take seconds and bear no exception

import jax
import jax.numpy as jnp
import numpy as np
from bench_cpu import cpu_name, num_cores

import muse_jax
from muse_jax import Muse
from muse_jax.decoding import Model
from muse_jax.sampling import SamplingParams, filter_scores, gumbel_noise
from muse_jax.speculation import Speculation

NAME = "bench_acceptance.py"
# A choice may differ from that of plain decoding where both perturbed scores are this close to the best one, for at most one
# token in a thousand: what fp32 sums, added in another order, can do.
TIE = 1e-4
TOKENS_PER_TIE = 1000


class Prompt(NamedTuple):
    tokens: list[int]
    seed: int


class Setting(NamedTuple):
    mode: Speculation
    size: int  # most nodes of a step
    temperature: float


@dataclasses.dataclass
class Run:
    """Answers to all prompts."""

    tokens: list[list[int]]  # of each answer
    accepted: list[list[int]]  # of each answer's steps, before clipping
    seconds: float = 0.0

    @property
    def committed(self) -> list[int]:
        """Tokens of each answer that steps committed: all but the first."""
        return [len(tokens) - 1 for tokens in self.tokens]


class Divergence(NamedTuple):
    """Where an answer leaves that of plain decoding."""

    prompt: int
    token: int
    gap: float  # how far below the best score the worse of the two choices is, noise included


@dataclasses.dataclass
class Check:
    """Comparison with plain decoding. Where an answer differs, what comes after it is not compared."""

    compared: int = 0
    divergences: list[Divergence] = dataclasses.field(default_factory=list)
    fault: str | None = None


# ------------------------------------------------------------------------------------------------------------- decoding


def read_prompts(path: Path, field: str, limit: int) -> list[str]:
    """The first `limit` texts; blank lines do not count.

    Raises: ValueError with file and line for anything that is not an object with that string; OSError.
    """
    texts = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if len(texts) == limit:
                break
            if not line.strip():
                continue
            try:
                item = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
            except (ValueError, RecursionError):  # JSON, but beyond what Python reads of it
                raise ValueError(f"{path}, line {number}: a number is too long, or values are nested too deeply") from None
            if not isinstance(item, dict) or not isinstance(item.get(field), str):
                raise ValueError(f"{path}, line {number}: expected an object with a string {field!r}")
            texts.append(item[field])
    if not texts:
        raise ValueError(f"{path}: holds no prompts")
    return texts


def speculating(muse: Muse, mode: Speculation, size: int) -> Muse:
    """The same target and draft, other speculation."""
    model = muse.model
    model = Model.create(
        model.module,
        model.params,
        draft=model.draft,
        draft_params=model.draft_params,
        speculation=mode,
        tree_size=size,
        valid_vocab=model.valid_vocab,
    )
    return dataclasses.replace(muse, model=model, draft_config=None if mode == Speculation.OFF else muse.draft_config)


def decode_all(
    muse: Muse,
    prompts: Sequence[Prompt],
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None],
) -> Run:
    """Answers the prompts, `batch_size` at a time. advance: called with the number of prompts after each batch."""
    run = Run([[] for _ in prompts], [[] for _ in prompts])
    # Batches of similar lengths, so that most of them share compiled programs.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        filling = batch_size - len(rows)  # rows that are done after one token and keep the last batch in shape
        batch = [prompts[i] for i in rows + rows[:1] * filling]
        state, out = muse.prefill(
            [prompt.tokens for prompt in batch],
            seed=[prompt.seed for prompt in batch],
            temperature=temperature,
            max_new_tokens=[max_new_tokens] * len(rows) + [1] * filling,
        )
        out = jax.device_get(out)
        for i, tokens in zip(rows, out.tokens, strict=False):
            run.tokens[i].append(int(tokens[0]))
        if not out.done.all():
            # As in `Generation`, the next step is dispatched before this one is read.
            state, pending = muse.decode(state)
            began = time.perf_counter()  # the compilation is over
            while not out.done.all():
                out, (state, pending) = pending, muse.decode(state)
                out = jax.device_get(out)
                for i, tokens, count, accepted in zip(rows, out.tokens, out.count, out.accepted, strict=False):
                    if count:
                        run.tokens[i].extend(tokens[:count].tolist())
                        run.accepted[i].append(int(accepted))
            run.seconds += time.perf_counter() - began
        advance(len(rows))
    return run


def check(plain_muse: Muse, prompts: Sequence[Prompt], temperature: float, plain: Run, run: Run, exact: bool) -> Check:
    """Compares answers with those of plain decoding, token for token.

    exact: a difference that is no tie, or too many ties, is a fault. In bfloat16, where sums of other shapes round to other
    values and a score may be off by more than a tie, what is found is only reported.
    """
    result = Check()
    for i, (prompt, expected, actual) in enumerate(zip(prompts, plain.tokens, run.tokens, strict=True)):
        same = next((j for j, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            result.compared += len(expected)
            if len(expected) != len(actual):
                result.fault = f"prompt {i}: {len(actual)} tokens, {len(expected)} by plain decoding"
                return result
            continue
        result.compared += same + 1
        ours, theirs = actual[same], expected[same]
        gap = score_gap(plain_muse, prompt, temperature, expected[:same], (ours, theirs))
        result.divergences.append(Divergence(i, same, gap))
        if exact and gap >= TIE:
            what = f"{ours} instead of {theirs}, the scores {gap:.2g} below the best"
            result.fault = f"prompt {i}, token {same}: {what}; a tie is less than {TIE:g}"
            return result
    ties = len(result.divergences)
    if exact and ties * TOKENS_PER_TIE > result.compared:
        result.fault = f"{ties} ties in {result.compared} tokens: at most one in {TOKENS_PER_TIE} is excused"
    return result


def score_gap(muse: Muse, prompt: Prompt, temperature: float, given: list[int], tokens: Sequence[int]) -> float:
    """How far the worst of `tokens` is below the best choice after prompt and `given`, noise included."""
    before = prompt.tokens + given
    sampling = SamplingParams.create(1, temperature=temperature, seed=prompt.seed)
    logits = muse.logits([before])[:, -1]
    scores = filter_scores(logits, sampling, muse.model.valid_vocab)
    if temperature > 0:
        position, ids = jnp.asarray([len(before)], jnp.int32), jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        scores += gumbel_noise(sampling.seed_lo, sampling.seed_hi, position, ids)
    scores = np.asarray(scores[0])
    return float(scores.max() - scores[list(tokens)].min())


# ------------------------------------------------------------------------------------------------------------- the bench


def settings_of(args: argparse.Namespace, block_size: int) -> list[Setting]:
    """What to measure at each temperature, what others are compared with first: plain decoding, then the chain."""
    settings = []
    for temperature in args.temperatures:
        if args.check:
            settings.append(Setting(Speculation.OFF, 1, temperature))
        for mode in (Speculation.CHAIN, Speculation.TREE, Speculation.SAMPLED_CHAIN):
            if mode not in args.modes or (mode == Speculation.SAMPLED_CHAIN and temperature == 0):
                continue
            sizes = args.sizes if mode == Speculation.TREE else [block_size]
            settings += [Setting(mode, size, temperature) for size in sizes]
    return settings


def summarize(setting: Setting, run: Run, chain_length: float | None, checked: Check | None) -> dict[str, Any]:
    tokens, steps = sum(run.committed), sum(map(len, run.accepted))
    length = tokens / steps if steps else None
    per_prompt = [
        committed / len(accepted) for committed, accepted in zip(run.committed, run.accepted, strict=True) if accepted
    ]
    counts = [count for accepted in run.accepted for count in accepted]
    return {
        "mode": str(setting.mode),
        "tree_size": setting.size,
        "temperature": setting.temperature,
        "acceptance_length": length,
        "acceptance_length_per_prompt": float(np.mean(per_prompt)) if per_prompt else None,
        "ratio_to_chain": length / chain_length if length and chain_length else None,
        "deepest": max(counts) - 1 if counts else None,
        "accepted_histogram": histogram(counts),
        "tokens": tokens,
        "steps": steps,
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds if run.seconds else None,
        "check": None if checked is None else dataclasses.asdict(checked),
    }


def bench(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> dict[str, Any]:
    """Measures all settings; calls `check_interrupt` between batches. Raises ValueError or OSError for bad files."""
    texts = read_prompts(args.prompts, args.field, args.limit)
    muse = muse_jax.load(
        args.checkpoint,
        draft=args.draft,
        speculation="tree",
        tree_size=max(args.sizes),
        dtype=args.dtype,
        progress=lambda *_: check_interrupt(),
    )
    if args.chat is None:
        args.chat = muse.tokenizer is not None and muse.tokenizer.has_chat_template
    prompts = [Prompt(encode(muse, args, text), args.seed + i) for i, text in enumerate(texts)]
    settings = settings_of(args, muse.draft_config.block_size)
    batch_size = min(args.batch_size, len(prompts))
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "conditions": {
            "checkpoint": args.checkpoint.name,
            "prompts": f"{len(prompts)} of {args.prompts.name}, {'chat' if args.chat else 'as they stand'}",
            "max_new_tokens": args.max_new_tokens,
            "batch_size": batch_size,
            "seed": args.seed,
            "dtype": str(muse.model.module.dtype),
            "device": f"{cpu_name()}, {num_cores()} cores" if device.platform == "cpu" else device.device_kind,
            "jax": jax.__version__,
        },
        "runs": [],
    }
    plain_muse = speculating(muse, Speculation.OFF, 1)
    plain: dict[float, Run] = {}
    chains: dict[float, float | None] = {}
    with progress_bar(len(prompts) * len(settings), check_interrupt) as advance:
        for setting in settings:
            decoder = plain_muse if setting.mode == Speculation.OFF else speculating(muse, setting.mode, setting.size)
            run = decode_all(decoder, prompts, setting.temperature, args.max_new_tokens, batch_size, advance)
            checked = None
            if setting.mode == Speculation.OFF:
                plain[setting.temperature] = run
            elif args.check and setting.mode != Speculation.SAMPLED_CHAIN:
                exact = plain_muse.model.module.dtype == jnp.float32
                checked = check(plain_muse, prompts, setting.temperature, plain[setting.temperature], run, exact)
            row = summarize(setting, run, chains.get(setting.temperature), checked)
            if setting.mode == Speculation.CHAIN:
                chains[setting.temperature] = row["acceptance_length"]
            results["runs"].append(row)
    return results


@contextlib.contextmanager
def progress_bar(total: int, check_interrupt: Callable[[], None]) -> Iterator[Callable[[int], None]]:
    """Gives a function that calls `check_interrupt` and moves the bar on; it is shown on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("answers", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int) -> None:
            check_interrupt()
            bar.advance(task, count)

        yield advance


# --------------------------------------------------------------------------------------------------------------- report


def label(row: dict[str, Any]) -> str:
    return "plain" if row["mode"] == Speculation.OFF else f"{row['mode'].replace('_', ' ')} {row['tree_size']}"


def verdict(row: dict[str, Any]) -> str:
    checked = row["check"]
    if checked is None:
        return ""
    if checked["fault"]:
        return "NO"
    if not checked["divergences"]:
        return "yes"
    return f"but {len(checked['divergences'])}: {max(gap for *_, gap in checked['divergences']):.2g}"


def print_table(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    facts = results["conditions"]
    table = Table(title=f"{facts['checkpoint']}: tokens per verify step, {facts['prompts']}")
    columns = ("T", "mode", "acceptance", "per prompt", "to chain", "deepest", "tokens", "steps", "tokens/s", "as plain")
    for column in columns:
        table.add_column(column, justify="left" if column in ("mode", "as plain") else "right", no_wrap=True)
    for row, after in itertools.zip_longest(results["runs"], results["runs"][1:]):
        table.add_row(
            f"{row['temperature']:g}",
            label(row),
            number(row["acceptance_length"], 3),
            number(row["acceptance_length_per_prompt"], 3),
            number(row["ratio_to_chain"], 3),
            number(row["deepest"], 0),
            str(row["tokens"]),
            str(row["steps"]),
            number(row["tokens_per_second"], 1),
            verdict(row),
            end_section=after is not None and after["temperature"] != row["temperature"],
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with console.capture() as captured:  # rich would end the program where the reader of stdout has gone
        console.print(table)
    explanation = (
        "acceptance: committed tokens / verify steps, prompts pooled; an answer's first token, from prefill, is not counted\n"
        "per prompt: mean over prompts of the same quotient; deepest: most drafted tokens accepted in one step\n"
        "as plain: whether tokens are those of plain decoding; else how many answers leave it, and the largest gap of scores\n"
        f"up to {facts['max_new_tokens']} tokens, batches of {facts['batch_size']}, seed {facts['seed']}, {facts['dtype']}; "
        f"{facts['device']}; jax {facts['jax']}"
    )
    print(captured.get() + explanation, flush=True)


def draw(results: dict[str, Any]) -> bytes:
    """A PNG: acceptance by setting, and for each temperature how the steps spread over accepted counts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [row for row in results["runs"] if row["mode"] != Speculation.OFF]
    temperatures = list(dict.fromkeys(row["temperature"] for row in runs))
    labels = list(dict.fromkeys(map(label, runs)))
    figure = Figure(figsize=(4.5 * (1 + len(temperatures)), 4), layout="constrained")
    bars, *histograms = figure.subplots(1, 1 + len(temperatures), squeeze=False)[0]
    width = 0.8 / len(temperatures)
    for i, temperature in enumerate(temperatures):
        rows = [row for row in runs if row["temperature"] == temperature and row["acceptance_length"]]
        drawn = bars.bar(
            [labels.index(label(row)) + (i - (len(temperatures) - 1) / 2) * width for row in rows],
            [row["acceptance_length"] for row in rows],
            width,
            label=f"T = {temperature:g}",
        )
        bars.bar_label(drawn, fmt="%.2f", fontsize=7)
    bars.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    bars.set(ylabel="committed tokens / verify steps, pooled", title=results["conditions"]["checkpoint"])
    bars.margins(y=0.15)
    if bars.patches:  # every answer may be a single token, which takes no step
        bars.legend(loc="upper left")
    most = max((int(count) for row in runs for count in row["accepted_histogram"]), default=1)
    for axes, temperature in zip(histograms, temperatures, strict=True):
        for row in runs:
            if row["temperature"] == temperature and row["steps"]:
                counts = collections.Counter({int(count): steps for count, steps in row["accepted_histogram"].items()})
                x = range(1, max(counts) + 1)
                axes.plot(x, [counts[count] / row["steps"] for count in x], marker=".", label=label(row))
        axes.set(xlim=(0.5, most + 0.5), xticks=range(1, most + 1))
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens accepted by a step", ylabel="share of steps", title=f"T = {temperature:g}")
        if axes.lines:
            axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------------- command line


def temperature(text: str) -> float:
    try:
        value = float(text)
        SamplingParams.create(1, temperature=value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number of at least 0") from None
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    modes = (Speculation.CHAIN, Speculation.TREE, Speculation.SAMPLED_CHAIN)
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines, an object with a prompt each")
    add("--field", default="question", help="the object's field that holds the prompt (default: question)")
    add("--chat", action=argparse.BooleanOptionalAction, help="whether prompts are put in chat form (default: if possible)")
    add("--limit", type=positive_int, default=100, metavar="N", help="prompts to take from the file (default: 100)")
    add(
        "--checkpoint",
        type=directory,
        default=BUNDLED,
        help="checkpoint in any format (default: the bundled muse_tiny)",
    )
    add("--draft", type=directory, metavar="DIR", help="DFlash2 draft (default: `draft` in the checkpoint)")
    add("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: the checkpoint's, on a CPU float32)")
    add("--modes", nargs="+", choices=modes, default=list(modes), help="default: all; sampled_chain above temperature 0 only")
    add("--sizes", nargs="+", type=tree_size, default=[8, 16, 32], metavar="N", help="nodes of a tree (default: 8 16 32)")
    add("--temperatures", nargs="+", type=temperature, default=[0.0, 1.0], metavar="T", help="default: 0 1")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N", help="most tokens of an answer (default: 256)")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="prompts decoded together (default: 8)")
    add("--seed", type=int, default=0, help="of the first prompt (default: 0)")
    add("--check", action="store_true", help="compare chains and trees with plain decoding at the same seed; ties are counted")
    add("--json", nargs="?", const="-", metavar="FILE", help="write everything to FILE, or as the last line of stdout")
    add("--png", type=Path, metavar="FILE", help="draw acceptance and histograms")
    args = parser.parse_args(argv)
    for name in ("sizes", "temperatures", "modes"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    if args.modes == [Speculation.SAMPLED_CHAIN] and args.temperatures == [0.0]:
        parser.error("--modes sampled_chain: needs a temperature above 0")
    files = {"--prompts": args.prompts, "--png": args.png, "--json": None if args.json in (None, "-") else Path(args.json)}
    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if (other := seen.setdefault(os.path.realpath(path), option)) != option:
            parser.error(f"{option} {path}: is the file of {other}, too")
        if option != "--prompts":
            try:
                check_output(path)
            except OSError as error:
                parser.error(f"{option} {path}: cannot be written: {error.strerror}")
    # What generate.py's --system and --reasoning-effort would set.
    args.system = args.reasoning_effort = None
    return args


def main(argv: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    interrupts = interrupts or Interrupts()
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args, interrupts), interrupts=interrupts)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    if args.png is not None:
        check_matplotlib("--png")
    results = bench(args, interrupts.check)
    exit_code = write_results(args, results)
    print_results(args, results)
    interrupts.check()
    faults = [row for row in results["runs"] if row["check"] and row["check"]["fault"]]
    for row in faults:
        complain(f"{label(row)} at temperature {row['temperature']:g} is not plain decoding: {row['check']['fault']}", FAILED)
    return FAILED if faults else exit_code


def write_results(args: argparse.Namespace, results: dict[str, Any]) -> int:
    """Writes the files, each whatever becomes of the other. Returns the exit code."""
    exit_code = 0
    makers = {Path(args.json): encode_json} if args.json not in (None, "-") else {}
    if args.png is not None:
        makers[args.png] = draw
    for path, make in makers.items():
        try:
            write_file(path, make(results))
        except OSError as error:
            exit_code = complain(f"{path}: {error.strerror}", BAD_INPUT)
    return exit_code


def encode_json(results: dict[str, Any]) -> bytes:
    return json.dumps(results).encode() + b"\n"


def print_results(args: argparse.Namespace, results: dict[str, Any]) -> None:
    print_table(results)
    if args.json == "-":
        print(json.dumps(results), flush=True)


def complain(message: str, exit_code: int) -> int:
    report(f"{NAME}: {message}")
    return exit_code


if __name__ == "__main__":
    leave(main(interrupts=interrupts))
