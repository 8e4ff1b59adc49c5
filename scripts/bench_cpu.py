"""Times muse_jax, transformers and dflash on the same checkpoint, CPU, prompts and run, after checking that tokens agree.

    python scripts/bench_cpu.py              needs the extra `parity`, and dflash (pip install --no-deps dflash==0.1.0)

All are fp32, batch 1, greedy, and answer the same few questions to the end. transformers runs with the fastest of its
settings here: attention and expert implementation and number of threads are tried first, for decoding, for dflash (which
drives transformers' target with the checkpoint's draft) and for prefill apart. Then all take turns. Decoding is timed from
the first token's arrival to the last one's, prefill from the prompt to the first token, start-up from the start of a
`generate.py` process to its first text.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from command_line import Parser, guarded, leave, open_streams, positive_int
from generate import BUNDLED, SAMPLE_QUESTION

import muse_jax
from muse_jax.muse import DRAFT_DIRECTORY

NAME = "bench_cpu.py"
PREFILL_TOKENS = 1000
QUESTIONS = (
    SAMPLE_QUESTION,
    "Mia reads 15 pages a day from Monday to Friday and 40 pages in all at the weekend. How many pages does she read a week?",
    "A farmer has 6 rows of 25 cabbages. Rabbits eat 18 of them and he sells the rest for $2 each. How much does he earn?",
    "Tom is 4 years older than Ben, and Ben is twice as old as Lea, who is 7. How old is Tom?",
    "A bus has 48 seats. A quarter of them are empty, and 5 people stand. How many people are on the bus?",
    "Nora saves $12 a week for 9 weeks and then buys shoes for $65. How much money does she have left?",
)
PROBE_TOKENS = 12  # decoded to find transformers' fastest setting
# A greedy choice may differ where the two logits are closer than this, for at most one token in a thousand: what fp32 sums,
# added in another order, can do.
TIE, TIE_FRACTION = 1e-4, 1e-3


class Run(NamedTuple):
    tokens: list[int]
    seconds_prefill: float
    seconds_decode: float


class Setting(NamedTuple):
    """What transformers lets one choose on a CPU."""

    attention: str
    experts: str
    threads: int

    def __str__(self) -> str:
        return f"{self.attention} attention, {self.experts} experts, {self.threads} thread{'s' * (self.threads > 1)}"


class Transformers:
    """transformers' model of a checkpoint."""

    def __init__(self, checkpoint: Path):
        import torch
        from transformers import MuseSparkForConditionalGeneration
        from transformers.generation.streamers import BaseStreamer

        class Arrivals(BaseStreamer):
            """Notes when tokens come; `generate` hands over the prompt first."""

            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:
                self.times.append(time.perf_counter())

            def end(self) -> None:
                pass

        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._torch, self._arrivals = torch, Arrivals
        self._model = MuseSparkForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._draft = None
        if (checkpoint / DRAFT_DIRECTORY).is_dir():
            from dflash.model import DFlash2DraftModel

            self._draft = DFlash2DraftModel.from_pretrained(checkpoint / DRAFT_DIRECTORY, dtype=torch.float32).eval()
            self._draft.register_forward_pre_hook(lambda *_: self._draft_times.append(time.perf_counter()))
            self._draft_times: list[float] = []

    def use(self, setting: Setting) -> None:
        self._model.set_attn_implementation(setting.attention)
        self._model.set_experts_implementation(setting.experts)
        self._torch.set_num_threads(setting.threads)

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def run(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[int] = ()) -> Run:
        """One token after the other."""
        arrivals, ids = self._arrivals(), self._torch.tensor([prompt])
        mask = self._torch.ones_like(ids)
        self._model.generation_config.eos_token_id = list(stops) or None
        began = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, streamer=arrivals)
        first, last = arrivals.times[1], arrivals.times[-1]
        return Run(out[0, len(prompt) :].tolist(), first - began, last - first)

    def run_dflash(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[int]) -> Run:
        """Speculatively; the first token is there when the draft is first called."""
        from dflash.model import dflash_generate

        self._draft_times.clear()
        began = time.perf_counter()
        out = dflash_generate(self._draft, self._model, self._torch.tensor([prompt]), num_tokens, list(stops))
        ended = time.perf_counter()
        first = self._draft_times[0] if self._draft_times else ended
        return Run(out[0, len(prompt) :].tolist(), first - began, ended - first)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V]."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([tokens])).logits[0].float().numpy()

    def fastest(self, measure: Callable[[], float], settings: Sequence[Setting]) -> Setting:
        """The setting of least `measure()`; each is called once before, to warm up."""
        seconds = {}
        for setting in settings:
            self.use(setting)
            measure()
            seconds[setting] = measure()
        return min(seconds, key=seconds.get)


def run_muse(muse: muse_jax.Muse, prompt: Sequence[int], num_tokens: int, stops: Sequence[int] = ()) -> Run:
    generation = muse.generate(prompt, max_new_tokens=num_tokens, stop_token_ids=stops)
    for _ in generation:
        pass
    return Run(generation.tokens, generation.seconds_prefill, generation.seconds_decode)


def check_tokens(
    runs: dict[str, Callable[..., Run]], peer: Transformers, prompt: list[int], num_tokens: int, stops: Sequence[int]
) -> tuple[int, int]:
    """Compares greedy tokens with those of transformers, plain. Where some differ at a tie, the comparison goes on after
    transformers' choice.

    Returns:  the number of tokens compared, and of ties.
    Raises:   ValueError where they differ and it is no tie.
    """
    theirs = peer.run(prompt, num_tokens, stops).tokens
    logits = peer.logits(prompt + theirs)
    ties = 0
    for name, run in runs.items():
        agreed = 0
        while agreed < len(theirs):
            ours = run(prompt + theirs[:agreed], num_tokens - agreed, stops).tokens
            differing = next(
                (i for i, pair in enumerate(zip(ours, theirs[agreed:], strict=False)) if len(set(pair)) == 2), None
            )
            if differing is None:
                if len(ours) != len(theirs) - agreed:
                    raise ValueError(f"{name} writes {agreed + len(ours)} tokens, transformers {len(theirs)}")
                break
            own = ours[differing]
            agreed += differing
            row = logits[len(prompt) + agreed - 1]
            gap = float(row[theirs[agreed]] - row[own])
            if gap >= TIE:
                raise ValueError(
                    f"token {agreed}: transformers takes {theirs[agreed]}, {name} {own}, whose logit is {gap:.2g} less"
                )
            agreed, ties = agreed + 1, ties + 1
    return len(theirs) * len(runs), ties


def interleave(repeats: int, **measures: Callable[[], float]) -> dict[str, list[float]]:
    """Calls the measures in turn, A B A B, after one call of each that does not count."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for repeat, (name, measure) in itertools.product(range(repeats + 1), measures.items()):
        value = measure()
        if repeat:
            values[name].append(value)
    return values


def time_startup(checkpoint: Path) -> dict[str, float]:
    """Seconds from process start to first text, with an empty compilation cache and with the one that run has filled."""
    command = [sys.executable, str(Path(__file__).with_name("generate.py")), "--checkpoint", str(checkpoint)]
    command += ["--max-new-tokens", "16"]
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        env |= {"XDG_CACHE_HOME": cache, "JAX_ENABLE_COMPILATION_CACHE": "true"}
        for name in ("first run", "second run"):
            began = time.perf_counter()
            with subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            ) as process:
                first = process.stdout.read(1)
                seconds[name] = time.perf_counter() - began
                _, errors = process.communicate()
            if not first or process.returncode:
                raise ValueError(f"generate.py failed: {errors.decode(errors='replace').strip()}")
    return seconds


def conditions() -> dict[str, Any]:
    import jax
    import torch
    import transformers

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def bench(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"conditions": conditions(), "checkpoint": args.checkpoint.name}
    peer = Transformers(args.checkpoint)
    plain = muse_jax.load(args.checkpoint, dtype="float32", speculation="off")
    runs = {"plain": functools.partial(run_muse, plain)}
    if peer.has_draft:
        speculative = muse_jax.load(args.checkpoint, dtype="float32", tree_size=args.tree_size)
        runs = {"muse_jax": functools.partial(run_muse, speculative), **runs, "dflash": peer.run_dflash}
    runs["transformers"] = peer.run

    def chat(question: str) -> list[int]:
        text = plain.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        return plain.tokenizer.encode(text, add_special_tokens=False)

    prompts, stops = [chat(question) for question in QUESTIONS], plain.stop_token_ids
    long_prompt = (chat(" ".join(QUESTIONS)) * PREFILL_TOKENS)[:PREFILL_TOKENS]

    others = {name: run for name, run in runs.items() if name != "transformers"}
    counts = [check_tokens(others, peer, prompt, args.new_tokens, stops) for prompt in prompts]
    compared, ties = map(sum, zip(*counts, strict=True))
    if ties > TIE_FRACTION * compared:
        raise ValueError(f"{ties} ties in {compared} tokens: at most {TIE_FRACTION:.1%} are excused")
    results["correctness"] = {"tokens": compared, "ties": ties}

    threads = sorted({1, num_cores()})
    # The third implementation of experts, batched_mm, copies the weights of every token's experts: for decoding alone.
    settings = [Setting(*s) for s in itertools.product(("eager", "sdpa"), ("eager", "grouped_mm", "batched_mm"), threads)]
    best = {"transformers": peer.fastest(lambda: peer.run(prompts[0], PROBE_TOKENS).seconds_decode, settings)}
    if peer.has_draft:
        best["dflash"] = peer.fastest(lambda: peer.run_dflash(prompts[0], args.new_tokens, stops).seconds_decode, settings)
    for_prefill = peer.fastest(
        lambda: peer.run(long_prompt, 1).seconds_prefill, [s for s in settings if s.experts != "batched_mm"]
    )

    def tokens_per_second(name: str) -> float:
        if name in best:
            peer.use(best[name])
        done = [runs[name](prompt, args.new_tokens, stops) for prompt in prompts]
        return sum(len(run.tokens) - 1 for run in done) / sum(run.seconds_decode for run in done)

    results["decode"] = {"unit": "tokens/s", "questions": len(prompts)}
    results["decode"] |= {"settings": {name: str(setting) for name, setting in best.items()}}
    results["decode"] |= interleave(args.repeats, **{name: functools.partial(tokens_per_second, name) for name in runs})
    peer.use(for_prefill)
    results["prefill"] = {"unit": "ms", "prompt_tokens": PREFILL_TOKENS, "setting": str(for_prefill)}
    results["prefill"] |= interleave(
        args.repeats,
        plain=lambda: 1e3 * run_muse(plain, long_prompt, 1).seconds_prefill,
        transformers=lambda: 1e3 * peer.run(long_prompt, 1).seconds_prefill,
        **({"muse_jax": lambda: 1e3 * run_muse(speculative, long_prompt, 1).seconds_prefill} if peer.has_draft else {}),
    )
    if not args.skip_startup:
        results["startup"] = {"unit": "s"} | time_startup(args.checkpoint)
    return results


LABELS = {  # of the measures, in the order of the table
    "muse_jax": "muse_jax",
    "plain": "muse_jax, no draft",
    "dflash": "dflash on transformers",
    "transformers": "transformers",
}


def print_table(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def spread(values: Sequence[float]) -> str:
        median, least, most = (
            f"{x:.0f}" if x >= 100 else f"{x:.1f}" for x in (statistics.median(values), min(values), max(values))
        )
        return f"{median} ({least} - {most})"

    decode, prefill, correctness = results["decode"], results["prefill"], results["correctness"]
    facts = results["conditions"]
    table = Table(title=f"{results['checkpoint']}, fp32, batch 1, greedy: median (min - max) of {len(decode['plain'])}")
    columns = ("", "decode, tokens/s", "of transformers", f"prefill {prefill['prompt_tokens']}, ms", "of transformers")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, label in LABELS.items():
        cells = []
        for row in (decode, prefill):
            if name in row:
                ratio = statistics.median(row[name]) / statistics.median(row["transformers"])
                cells += [spread(row[name]), f"{ratio:.2f}"]
            else:
                cells += ["", ""]
        if any(cells):
            table.add_row(label, *cells)
    console = Console(highlight=False, width=110)
    console.print(f"tokens agree: {correctness['tokens']} greedy tokens compared, {correctness['ties']} ties excused")
    console.print(table)
    if startup := results.get("startup"):
        console.print(", ".join(f"{name} {startup[name]:.1f} s to the first text" for name in ("first run", "second run")))
    for name, setting in decode["settings"].items():
        console.print(f"{LABELS[name]}: decoding with {setting}")
    console.print(f"transformers: prefill with {prefill['setting']}")
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_before']} before; Python {facts['python']}, "
        f"jax {facts['jax']}, torch {facts['torch']}, transformers {facts['transformers']}; commit {facts['commit']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=BUNDLED, help="directory in Hugging Face layout (default: the bundled muse_tiny)")
    add("--new-tokens", type=positive_int, default=256, metavar="N", help="most tokens of an answer (default: 256)")
    add("--tree-size", type=positive_int, default=16, metavar="N", help="nodes that muse_jax verifies in a step (default: 16)")
    add("--repeats", type=positive_int, default=5, metavar="N", help="timed runs of each (default: 5)")
    add("--skip-startup", action="store_true", help="do not time the start of generate.py")
    add("--json", action="store_true", help="also print everything as one JSON object, the last line")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error("--new-tokens 1: expected at least 2")
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX first looks for devices
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    try:
        results = bench(args)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed: pip install -e '.[parity]' (dflash: pip install --no-deps dflash==0.1.0)"
        ) from None
    print_table(results)
    if args.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    leave(main())
