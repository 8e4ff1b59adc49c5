"""Times muse_jax and transformers on the same checkpoint, CPU, prompt and run, after checking that their tokens agree.

    python scripts/bench_cpu.py              needs the extra `parity`

Both are fp32, batch 1, greedy, without stop tokens. transformers runs with the fastest of its settings here: attention and
expert implementation and number of threads are tried first, for decoding and prefill apart. Then the two take turns.
Decoding is timed from the first token's arrival to the last one's, prefill from the prompt to the first token, start-up
from the start of a `generate.py` process to its first text.
"""

from __future__ import annotations

import argparse
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
from generate import BUNDLED, SAMPLE_QUESTION, Parser, positive_int

import muse_jax

NAME = "bench_cpu.py"
PREFILL_TOKENS = 1000
PROBE_TOKENS = 12  # decoded to find transformers' fastest setting
# A greedy choice may differ where the two logits are closer than this, for at most one token in a thousand: what fp32 sums,
# added in another order, can do.
TIE = 1e-4


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
        self._model.generation_config.eos_token_id = None

    def use(self, setting: Setting) -> None:
        self._model.set_attn_implementation(setting.attention)
        self._model.set_experts_implementation(setting.experts)
        self._torch.set_num_threads(setting.threads)

    def run(self, prompt: Sequence[int], num_tokens: int) -> Run:
        arrivals, ids = self._arrivals(), self._torch.tensor([prompt])
        mask = self._torch.ones_like(ids)
        began = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, streamer=arrivals)
        first, last = arrivals.times[1], arrivals.times[-1]
        return Run(out[0, len(prompt) :].tolist(), first - began, last - first)

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


def run_muse(muse: muse_jax.Muse, prompt: Sequence[int], num_tokens: int) -> Run:
    generation = muse.generate(prompt, max_new_tokens=num_tokens, stop_token_ids=())
    for _ in generation:
        pass
    return Run(generation.tokens, generation.seconds_prefill, generation.seconds_decode)


def check_tokens(muse: muse_jax.Muse, peer: Transformers, prompt: list[int], num_tokens: int) -> int:
    """Compares greedy tokens of the two. Where they differ at a tie, the comparison goes on after transformers' choice.

    Returns:  the number of ties.
    Raises:   ValueError where they differ and it is no tie, or if there are too many ties.
    """
    theirs = peer.run(prompt, num_tokens).tokens
    if len(theirs) != num_tokens:
        raise ValueError(f"transformers stopped after {len(theirs)} of {num_tokens} tokens")
    logits = peer.logits(prompt + theirs)
    agreed = ties = 0
    while agreed < num_tokens:
        ours = run_muse(muse, prompt + theirs[:agreed], num_tokens - agreed).tokens
        differing = [i for i, pair in enumerate(zip(ours, theirs[agreed:], strict=True)) if len(set(pair)) == 2]
        if not differing:
            break
        own = ours[differing[0]]
        agreed += differing[0]
        row = logits[len(prompt) + agreed - 1]
        gap = float(row[theirs[agreed]] - row[own])
        if gap >= TIE or ties == num_tokens // 1000:
            theirs_and_ours = f"transformers takes {theirs[agreed]}, muse_jax {own}, whose logit is {gap:.2g} less"
            raise ValueError(f"token {agreed}: {theirs_and_ours}; {ties} ties before")
        agreed, ties = agreed + 1, ties + 1
    return ties


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
    muse = muse_jax.load(args.checkpoint, dtype="float32")
    peer = Transformers(args.checkpoint)
    prompt = muse.tokenizer.encode(SAMPLE_QUESTION)
    repeated = muse.tokenizer.encode(SAMPLE_QUESTION * (PREFILL_TOKENS // len(prompt) + 1))
    long_prompt = (repeated * PREFILL_TOKENS)[:PREFILL_TOKENS]

    ties = check_tokens(muse, peer, prompt, args.new_tokens)
    results["correctness"] = {"tokens": args.new_tokens, "ties": ties}

    threads = sorted({1, num_cores()})
    # The third implementation of experts, batched_mm, copies the weights of every token's experts: for decoding alone.
    settings = [Setting(*s) for s in itertools.product(("eager", "sdpa"), ("eager", "grouped_mm", "batched_mm"), threads)]
    for_decode = peer.fastest(lambda: peer.run(prompt, PROBE_TOKENS).seconds_decode, settings)
    for_prefill = peer.fastest(
        lambda: peer.run(long_prompt, 1).seconds_prefill, [s for s in settings if s.experts != "batched_mm"]
    )
    later = args.new_tokens - 1
    peer.use(for_decode)
    results["decode"] = {"unit": "tokens/s", "new_tokens": args.new_tokens, "setting": str(for_decode)}
    results["decode"] |= interleave(
        args.repeats,
        muse_jax=lambda: later / run_muse(muse, prompt, args.new_tokens).seconds_decode,
        transformers=lambda: later / peer.run(prompt, args.new_tokens).seconds_decode,
    )
    peer.use(for_prefill)
    results["prefill"] = {"unit": "ms", "prompt_tokens": PREFILL_TOKENS, "setting": str(for_prefill)}
    results["prefill"] |= interleave(
        args.repeats,
        muse_jax=lambda: 1e3 * run_muse(muse, long_prompt, 1).seconds_prefill,
        transformers=lambda: 1e3 * peer.run(long_prompt, 1).seconds_prefill,
    )
    if not args.skip_startup:
        results["startup"] = {"unit": "s"} | time_startup(args.checkpoint)
    return results


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
    table = Table(title=f"{results['checkpoint']}, fp32, batch 1, greedy: median (min - max) of {len(decode['muse_jax'])}")
    for column in ("", "muse_jax", "transformers", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, row in (
        (f"decode {decode['new_tokens']}, tokens/s", decode),
        (f"prefill {prefill['prompt_tokens']}, ms", prefill),
    ):
        ratio = statistics.median(row["muse_jax"]) / statistics.median(row["transformers"])
        table.add_row(name, spread(row["muse_jax"]), spread(row["transformers"]), f"{ratio:.2f}")
    for name, seconds in results.get("startup", {}).items():
        if name != "unit":
            table.add_row(f"{name}, s", f"{seconds:.1f}", "", "")
    console = Console(highlight=False)
    console.print(f"tokens agree: {correctness['tokens']} greedy tokens, {correctness['ties']} ties excused")
    console.print(table)
    console.print(f"transformers: decoding with {decode['setting']}; prefill with {prefill['setting']}")
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_before']} before; Python {facts['python']}, "
        f"jax {facts['jax']}, torch {facts['torch']}, transformers {facts['transformers']}; commit {facts['commit']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=BUNDLED, help="directory in Hugging Face layout (default: the bundled muse_tiny)")
    add("--new-tokens", type=positive_int, default=128, metavar="N", help="tokens to decode (default: 128)")
    add("--repeats", type=positive_int, default=5, metavar="N", help="timed runs of each (default: 5)")
    add("--skip-startup", action="store_true", help="do not time the start of generate.py")
    add("--json", action="store_true", help="also print everything as one JSON object, the last line")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error("--new-tokens 1: expected at least 2")
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX first looks for devices
    try:
        results = bench(args)
    except ModuleNotFoundError as error:
        print(f"{NAME}: {error.name} is not installed: pip install -e '.[parity]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    print_table(results)
    if args.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
