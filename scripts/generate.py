"""Writes text with a Muse Spark checkpoint.

    python scripts/generate.py                                           answers a sample question with the bundled model
    python scripts/generate.py --chat --prompt "Ann has 3 pens ..."      answers a question of yours
    cat story.txt | python scripts/generate.py --temperature 0.8         continues a text
    python scripts/generate.py --no-draft                                one token a step, the same text
    python scripts/generate.py --devices 8 --coordinator hosta:1234 --num-processes 2 --process-id 0      on hosta, and with
                               --process-id 1 on another host: four devices of each, one text

The text goes to stdout as it comes, figures to stderr. A prompt is continued as it stands, or answered with --chat;
without one, a sample question is asked, in chat form if the checkpoint has a chat template. Where the checkpoint has a draft,
each step verifies a tree of the tokens it proposes; the figures then say how many tokens a step brought. Compiled programs are
kept in $XDG_CACHE_HOME/muse_jax (~/.cache/muse_jax), so that later runs start faster; JAX_COMPILATION_CACHE_DIR names
another directory, JAX_ENABLE_COMPILATION_CACHE=0 turns this off.

Several processes need the same checkpoint, prompt and arguments, but for --process-id; where these differ, all end. Process 0
writes the text. A process that does not arrive, dies or is interrupted ends the others with a line that says so and exit
code 1: after --connect-timeout seconds; at once; 2 s later; and after 30 s if it is stopped or its host or network has gone.

Exit code: 0; 1 if the device fails (out of memory) or another process is lost; 2 for bad arguments or files; 130 after Ctrl-C;
141 if the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    Interrupts,
    Parser,
    broken_pipe,
    device_failure,
    directory,
    leave,
    open_streams,
    positive_int,
    report,
)

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    from jax.sharding import Mesh

    from muse_jax import Generation, Muse
    from muse_jax.distributed import Group

NAME = "generate.py"
BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "muse_tiny"
SAMPLE_QUESTION = (
    "A baker fills 4 trays with 12 rolls each. She sells 30 rolls in the morning and half of the rest in the afternoon. "
    "How many rolls are left?"
)
MAX_PROMPT_BYTES = 16 << 20  # a million tokens of English are about 5 MB
CHAINS = {"greedy": "chain", "sampled": "sampled_chain"}  # as `load` names them
DEFAULT_TREE_SIZE = 16
LOW_ACCEPTANCE, ENOUGH_STEPS = 1.2, 64  # fewer tokens per step than the first, over at least so many steps, is worth a warning


@dataclasses.dataclass
class Answer:
    """What there is of the answer so far: an interruption may come at any time."""

    text: str = ""
    prompt_tokens: int = 0
    muse: Muse | None = None
    generation: Generation | None = None
    group: Group | None = None  # where there are several processes
    seconds_draft: float | None = None  # of one step
    line_open: bool = False  # whether stdout is inside a line
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def figures(self) -> dict[str, Any]:
        """The object that --json prints."""
        muse, generation = self.muse, self.generation
        tokens, steps = ([], 0) if generation is None else (generation.tokens, len(generation.accepted))
        drafted = muse is not None and muse.draft_config is not None
        seconds_step = None if generation is None else generation.seconds_step
        return {
            "text": self.text,
            "tokens": tokens,
            "finish_reason": (generation and generation.finish_reason) or "interrupted",
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(tokens),
            "seconds_prefill": None if generation is None else generation.seconds_prefill,
            "seconds_decode": None if generation is None else generation.seconds_decode,
            "seconds_total": time.perf_counter() - self.began,  # imports, loading and compilation included
            "tokens_per_second": None if generation is None else generation.tokens_per_second,
            "steps": steps,
            "acceptance_length": None if generation is None else generation.acceptance_length,
            "accepted_histogram": histogram(generation.accepted) if drafted and steps else None,
            "seconds_step": seconds_step,
            "seconds_draft": self.seconds_draft,
            "seconds_verify": None if self.seconds_draft is None else max(0.0, seconds_step - self.seconds_draft),
            "speculation": None if muse is None else str(muse.model.speculation),
            "tree_size": muse.model.num_rows if drafted else None,
            "backend": None if muse is None else muse.backend,
            "paths": None if muse is None else muse.model.module.backend.paths,
            "devices": None if muse is None else 1 if muse.mesh is None else muse.mesh.size,
        }


def histogram(accepted: Sequence[int]) -> dict[str, int]:
    """How many steps accepted 1, 2, ... tokens, before clipping at the end of the text, without those that never came."""
    return {str(count): steps for count, steps in sorted(collections.Counter(accepted).items())}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    answer = Answer()
    if args.coordinator is None:
        return run(args, answer)
    keep_streams(args)
    try:
        exit_code = run(args, answer)
    except BaseException:  # a second Ctrl-C, too, must not leave this to JAX's own end
        traceback.print_exc()
        exit_code = fail(answer, "an error in the program", FAILED)
    if answer.group is not None:
        answer.group.exit(exit_code)
    leave(exit_code, at_once=True)


def run(args: argparse.Namespace, answer: Answer) -> int:
    """Writes answer and figures, or what went wrong. Returns the exit code."""
    interrupts = Interrupts()
    try:
        try:
            with interrupts.raised():
                write_answer(args, answer, interrupts)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left takes no time
            if answer.group is not None:
                answer.group.leave("it was interrupted")
            # Tokens may have come whose text was not written yet; text and tokens of --json shall agree.
            if answer.generation is not None:
                emit(answer, answer.muse.tokenizer.decode(answer.generation.tokens)[len(answer.text) :])
        if speaks(args):
            print_figures(args, answer)
    except BrokenPipeError:
        if answer.group is not None:
            answer.group.leave("the reader of its text has gone")
        return broken_pipe()
    except (ValueError, OSError) as error:
        return fail(answer, " ".join(str(error).split()), BAD_INPUT)
    except ModuleNotFoundError as error:
        return fail(answer, f"{error.name} is not installed: pip install -e .", BAD_INPUT)
    except RuntimeError as error:
        if type(error).__name__ == "ProcessError":
            return fail(answer, str(error), FAILED)
        # Where a process is lost the line of the thread that watches it says more.
        return fail(answer, device_failure(error), FAILED, patience=3.0)
    return INTERRUPTED if interrupts.arrived else 0


def fail(answer: Answer, line: str, exit_code: int, patience: float = 0.0) -> int:
    """Reports an error, to the other processes first."""
    if answer.group is not None:
        answer.group.leave(line, patience)
    complain(answer, line)
    return exit_code


def complain(answer: Answer, line: str) -> None:
    """Reports an error on a line of its own, also where a terminal shows an unfinished one of the text."""
    if answer.line_open and sys.stdout.isatty():
        report("")
    note(line)


def speaks(args: argparse.Namespace) -> bool:
    """Whether this process writes the text and the figures; of the others only errors are heard."""
    return not args.process_id


def keep_streams(args: argparse.Namespace) -> None:
    """Keeps stdout and stderr for this script: gloo greets on stdout, and JAX's runtime has a page to say on stderr, stack
    trace included, where another process is lost. With --verbose both go to stderr."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        with contextlib.suppress(OSError):  # not open
            own = os.dup(stream.fileno())
            setattr(sys, name, open(own, "w", encoding=stream.encoding, errors="replace"))  # noqa: SIM115
            os.dup2(2 if args.verbose else os.open(os.devnull, os.O_WRONLY), descriptor)
    if not speaks(args):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def write_answer(args: argparse.Namespace, answer: Answer, interrupts: Interrupts) -> None:
    """Loads the checkpoint and writes the answer, keeping `answer` up to date.

    Raises: ValueError or OSError with one line for bad settings or files.
    """
    clock = Clock()
    if not args.checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory")
    prompt = read_prompt(args)
    with interrupts.held():
        import muse_jax
        from muse_jax.sampling import SamplingParams

    clock.lap("imports")
    if args.coordinator is not None:
        answer.group = join(args, answer, prompt)
        clock.lap("processes")
    elif args.compilation_cache:
        use_compilation_cache()
    mesh = make_mesh(args.devices, args.num_processes, quiet=not speaks(args))
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    SamplingParams.create(1, **sampling)  # a large checkpoint takes minutes to load: check this before
    clock.lap("devices")
    with loading_bar(interrupts.check, speaks(args)) as progress:
        answer.muse = muse = muse_jax.load(
            args.checkpoint,
            mesh=mesh,
            backend=args.backend,
            numerics=args.numerics,
            dtype=args.dtype,
            activations=args.activations,
            moe_sharding=args.moe_sharding,
            max_length=args.max_length,
            draft=args.draft,
            speculation=args.speculation,
            tree_size=args.tree_size or DEFAULT_TREE_SIZE,
            progress=progress,
        )
    clock.lap("load")
    if args.verbose and speaks(args):
        note(describe(muse))
    tokens = encode(muse, args, prompt)
    answer.prompt_tokens = len(tokens)
    if answer.group is not None:
        answer.group.agree(prompt_tokens=digest(tokens))
    if prompt is None and speaks(args):
        note(f"no prompt, so the question is: {SAMPLE_QUESTION}")
    clock.lap("prompt")
    answer.generation = generation = muse.generate(tokens, max_new_tokens=args.max_new_tokens, **sampling)
    for piece in generation:
        if not answer.text:
            clock.lap("first token")
        emit(answer, piece)
        interrupts.check()
    end_line(answer)
    if args.verbose and speaks(args):
        note(f"start-up: {clock}")
        for line in describe_paths(muse.model.module.backend.paths):
            note(line)
    if generation.accepted and (args.json or args.verbose):  # compiles the draft on its own
        answer.seconds_draft = generation.draft_seconds()
        interrupts.check()
    if answer.group is not None:
        answer.group.finish(digest(generation.tokens))


class Clock:
    """Seconds between points of the start-up."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._laps.items())


def emit(answer: Answer, piece: str) -> None:
    answer.text += piece
    if piece:
        answer.line_open = not piece.endswith("\n")
    sys.stdout.write(piece)
    sys.stdout.flush()


def end_line(answer: Answer) -> None:
    if answer.line_open:
        answer.line_open = False
        print(flush=True)


def print_figures(args: argparse.Namespace, answer: Answer) -> None:
    """Ends the text's line and reports: figures for people on stderr, for programs as the last line of stdout."""
    end_line(answer)
    figures = answer.figures()
    parts = [f"{figures['prompt_tokens']} prompt tokens", f"{figures['new_tokens']} new tokens"]
    if figures["new_tokens"]:
        parts.append(f"first token after {figures['seconds_prefill']:.2f} s")
    if figures["tokens_per_second"] is not None:
        parts.append(f"then {figures['tokens_per_second']:.1f} tokens/s")
    parts.append(f"{figures['seconds_total']:.1f} s in all")
    report(f"[{', '.join(parts)}; {figures['finish_reason']}]")
    if figures["accepted_histogram"]:
        report(f"[{describe_steps(figures)}]")
        length, steps = figures["acceptance_length"], figures["steps"]
        if length < LOW_ACCEPTANCE and steps >= ENOUGH_STEPS:
            note(
                f"only {length:.2f} tokens per step over {steps} steps; likely causes: a draft trained for another target or "
                "block size, wrong target_layer_ids or mask_token_id in its config.json, text unlike its training, a high "
                "temperature"
            )
    if args.json:
        print(json.dumps(figures), flush=True)


def describe_steps(figures: dict[str, Any]) -> str:
    """For example "tree of 16: 3.1 tokens per step over 24 steps, accepted 1▃ 2█ 4▅, draft 1.2 ms + verify 2.9 ms"."""
    bars = "▁▂▃▄▅▆▇█"
    counts = figures["accepted_histogram"]
    scale = (len(bars) - 1) / max(counts.values())
    accepted = " ".join(f"{count}{bars[round(steps * scale)]}" for count, steps in counts.items())
    kind = figures["speculation"].replace("_", " ")
    length, steps = figures["acceptance_length"], figures["steps"]
    line = f"{kind} of {figures['tree_size']}: {length:.2f} tokens per step over {steps} steps, accepted {accepted}"
    if figures["seconds_draft"] is not None:
        line += f", draft {1e3 * figures['seconds_draft']:.2f} ms + verify {1e3 * figures['seconds_verify']:.2f} ms"
    return line


def note(message: str) -> None:
    report(f"{NAME}: {message}")


def describe(muse: Muse) -> str:
    import jax

    devices = jax.devices()[:1] if muse.mesh is None else muse.mesh.devices.ravel().tolist()
    module, model = muse.model.module, muse.model
    draft = "no draft" if muse.draft_config is None else f"draft: {model.speculation} of {model.num_rows}"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}{processes}, backend {muse.backend}, "
        f"numerics {module.numerics.name}, {module.dtype}, {draft}, "
        f"compilation cache {jax.config.jax_compilation_cache_dir or 'off'}"
    )


def describe_paths(paths: dict[str, list[str]]) -> list[str]:
    """A line for each operation that has a kernel: what ran it, in prefill or steps, and why if that was not the kernel."""
    return [f"{op}: {', '.join(each)}" for op, each in paths.items()]


# --------------------------------------------------------------------------------------------------------------- prompt


def read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt of the arguments, else of stdin if that is a pipe or a file and not empty, else None."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file not in (None, "-"):
        try:
            with open(args.prompt_file, "rb") as file:
                return decode_prompt(file.read(MAX_PROMPT_BYTES + 1), args.prompt_file)
        except OSError as error:
            raise ValueError(f"{args.prompt_file}: {error.strerror}") from None
    if args.prompt_file == "-":
        return decode_prompt(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "stdin")
    # Not a terminal, but neither what services and schedulers give programs that have no input (/dev/null, a socket).
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    return decode_prompt(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "stdin") or None


def decode_prompt(data: bytes, source: str) -> str:
    """The text of a prompt without the newline that ends its last line. Raises ValueError if too long or not UTF-8."""
    if len(data) > MAX_PROMPT_BYTES:
        raise ValueError(f"{source}: longer than the {MAX_PROMPT_BYTES >> 20} MiB allowed for a prompt")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 (byte {error.start})") from None


def encode(muse: Muse, args: argparse.Namespace, prompt: str | None) -> list[int]:
    """Token ids of the prompt (None: the sample question), in chat form or as it stands."""
    tokenizer = muse.tokenizer
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint}: no tokenizer.json, so it cannot read a prompt")
    text = SAMPLE_QUESTION if prompt is None else prompt
    if not (args.chat or (prompt is None and tokenizer.has_chat_template)):
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    variables = {} if args.reasoning_effort is None else {"reasoning_effort": args.reasoning_effort}
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
    return tokenizer.encode(chat, add_special_tokens=False)


# --------------------------------------------------------------------------------------------------------------- set-up


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX's own settings say otherwise."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    base = os.environ.get("XDG_CACHE_HOME", "")
    directory = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "muse_jax")
    try:
        if not directory.is_absolute():
            raise FileNotFoundError(0, "no home directory")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        # What lies there is run as machine code.
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(0, "other users may write to it")
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        note(f"compiled programs are not kept: {directory}: {error.strerror}")
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


# Names of arguments that may differ between processes: they are this process's own, or what they stand for is compared.
OWN_ARGUMENTS = ("process_id", "coordinator", "connect_timeout", "checkpoint", "draft", "prompt", "prompt_file")


def join(args: argparse.Namespace, answer: Answer, prompt: str | None) -> Group:
    """Joins the devices of all processes, which must have been asked for the same."""
    from muse_jax import distributed

    facts = {name: value for name, value in vars(args).items() if name not in OWN_ARGUMENTS}
    facts["prompt"] = None if prompt is None else digest(prompt)
    facts["checkpoint"] = fingerprint(args.checkpoint)
    facts["draft"] = None if args.no_draft else fingerprint(args.draft or args.checkpoint / "draft")
    return distributed.initialize(
        args.coordinator,
        args.num_processes,
        args.process_id,
        timeout=args.connect_timeout,
        facts=facts,
        report=functools.partial(complain, answer),
    )


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def fingerprint(checkpoint: Path) -> str:
    """Of what tells checkpoints apart at little cost: config, tokenizer, names and sizes of the files of weights."""
    parts: list[Any] = []
    for name in ("config.json", "tokenizer.json"):
        file = checkpoint / name
        parts.append(hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None)
    weights = (file for pattern in ("*.safetensors", "*.bin") for file in checkpoint.glob(pattern))
    return digest([*parts, *sorted((file.name, file.stat().st_size) for file in weights)])


def make_mesh(num_devices: int | None, num_processes: int | None = None, quiet: bool = False) -> Mesh | None:
    """The devices to share the work, virtual ones where this machine has but a CPU. None: the default device alone.

    Args:     num_processes: that have joined; None: this one, by itself.
    """
    if num_devices is None:
        return None
    from muse_jax import distributed, sharding

    virtual = num_devices in sharding.MESH_SIZES and virtual_devices(num_devices // (num_processes or 1))
    mesh = sharding.make_mesh(num_devices) if num_processes is None else distributed.make_mesh(num_devices)
    if virtual and not quiet and num_devices > 1 and mesh.devices.flat[0].platform == "cpu":
        note(f"{num_devices} virtual devices share this CPU: for trying out sharding, not for speed")
    return mesh


def virtual_devices(count: int) -> bool:
    """Has a CPU stand in for so many devices of this process, unless the user has already said how many; no effect on GPUs."""
    import jax

    free = jax.config.jax_num_cpu_devices == -1 and "device_count" not in os.environ.get("XLA_FLAGS", "")
    if free:
        jax.config.update("jax_num_cpu_devices", count)
    return free


@contextlib.contextmanager
def loading_bar(check: Callable[[], None], shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a progress callback that calls `check` and, on a terminal, shows a bar once loading has taken a second."""
    began, bar = time.monotonic(), None

    def show(done: int, total: int) -> None:
        nonlocal bar
        check()
        if shown and bar is None and sys.stderr.isatty() and time.monotonic() - began > 1:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = ("loading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task("", total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


# ---------------------------------------------------------------------------------------------------------- command line


CHAIN_HELP = (
    "verify one path instead of a tree, at most the draft's block; sampled: drawn from the draft and verified by rejection "
    "sampling, so that the same seed gives another text (default: greedy)"
)


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0, at most 86400")
    return seconds


def process_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 0")
    return int(text)


def tree_size(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 32:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from 2 to 32")
    return int(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--checkpoint",
        type=directory,
        default=BUNDLED,
        help="checkpoint in any format (default: the bundled muse_tiny)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue, or with --chat to answer")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file of the prompt; - for stdin, which is also read if piped")
    add("--chat", action="store_true", help="the prompt is what a user says: apply the checkpoint's chat template")
    add("--system", metavar="TEXT", help="with --chat: system message")
    add("--reasoning-effort", metavar="LEVEL", help="with --chat: variable of the chat template")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N", help="most tokens to write (default: 256)")
    add("--max-length", type=positive_int, metavar="N", help="most tokens of prompt and answer (default: the checkpoint's)")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (default: 0, off)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens of total probability P")
    add("--min-p", type=float, default=0.0, metavar="P", help="draw from tokens of at least P times the highest probability")
    add("--seed", type=int, default=0, help="same seed, same text (default: 0)")
    draft = parser.add_mutually_exclusive_group()
    draft_help = "DFlash2 draft (default: `draft` in the checkpoint, if there)"
    draft.add_argument("--draft", type=directory, metavar="DIR", help=draft_help)
    draft.add_argument("--no-draft", action="store_true", help="one token a step, without the checkpoint's draft")
    add("--tree-size", type=tree_size, metavar="N", help="nodes a step verifies, 2 to 32 (default: 16)")
    add("--chain", nargs="?", choices=CHAINS, const="greedy", help=CHAIN_HELP)
    add("--numerics", choices=("serving", "hf"), default="serving", help="where values are rounded; hf: as transformers does")
    dtype_help = "of the weights (default: the checkpoint's, on a CPU float32, for megakernel bfloat16)"
    add("--dtype", choices=("bfloat16", "float32"), help=dtype_help)
    backend_help = "implementation of a step: xla, pallas, megakernel or auto (default: auto)"
    add("--backend", default="auto", metavar="NAME", help=backend_help)
    add("--activations", choices=("bf16", "nvfp4"), default="bf16", help="what GEMMs of NVFP4 experts read (default: bf16)")
    add("--devices", type=positive_int, metavar="N", help="share the work among N devices; virtual ones on a CPU")
    moe_help = "what of the experts a device has: part of every matrix's rows, some experts, all (default: n)"
    add("--moe-sharding", choices=("n", "expert", "replicated"), default="n", help=moe_help)
    several = "--coordinator", "--num-processes", "--process-id"
    add("--coordinator", metavar="HOST:PORT", help="several processes: the host of process 0, and a port that is free there")
    add("--num-processes", type=positive_int, metavar="N", help="processes, each with an equal part of --devices")
    add("--process-id", type=process_number, metavar="I", help="which one this is, from 0, which writes the text")
    connect_help = "how long to wait for the other processes (default: 60)"
    add("--connect-timeout", type=positive_seconds, default=60.0, metavar="SECONDS", help=connect_help)
    add("--no-compilation-cache", dest="compilation_cache", action="store_false", help="compile anew")
    add("--json", action="store_true", help="end stdout with a line that holds text, tokens and figures as a JSON object")
    add("--verbose", action="store_true", help="report versions, devices and times; this and --json also time the draft alone")
    args = parser.parse_args(argv)
    if not args.chat:
        for option, value in (("--system", args.system), ("--reasoning-effort", args.reasoning_effort)):
            if value is not None:
                parser.error(f"{option} needs --chat")
    if args.no_draft:
        for option, value in (("--tree-size", args.tree_size), ("--chain", args.chain)):
            if value is not None:
                parser.error(f"{option} needs a draft: not allowed with --no-draft")
    values = (args.coordinator, args.num_processes, args.process_id)
    if missing := [option for option, value in zip(several, values, strict=True) if value is None]:
        if len(missing) < len(several):
            parser.error(f"{', '.join(several)} go together: {', '.join(missing)} missing")
    elif args.process_id >= args.num_processes:
        parser.error(f"--process-id {args.process_id}: expected 0 to {args.num_processes - 1}, one less than --num-processes")
    elif args.devices is None or args.devices % args.num_processes:
        parser.error(f"--num-processes {args.num_processes}: needs --devices, a multiple of it")
    args.speculation = speculation(args)
    return args


def speculation(args: argparse.Namespace) -> str | None:
    """What to ask `load` for. None leaves it to whether the checkpoint has a draft; anything but "off" asks for one."""
    if args.no_draft:
        return "off"
    if args.chain is not None:
        return CHAINS[args.chain]
    return None if args.draft is None and args.tree_size is None else "tree"


if __name__ == "__main__":
    leave(main())
