"""Compares the answers and logits of a checkpoint with those of a reference: what quantising cost.

    python scripts/compare_checkpoints.py REFERENCE CHECKPOINT --prompts questions.jsonl
    python scripts/compare_checkpoints.py REFERENCE CHECKPOINT --prompts questions.jsonl --activations nvfp4

Both answer the prompts at T = 0, with their draft if they have one; then both read every prompt with the reference's answer,
and their logits at the answer's tokens are compared:

    logits, relative RMS   of the difference over the reference's logits less their mean of each token
    KL                     of the two distributions at each token, mean, in nats
    top-1 agreement        tokens at which both would choose the same
    loss                   mean negative log likelihood of the reference's answers, in nats per token
    acceptance             tokens per step, of each with its own answers
    same answers           of the checkpoint and the reference

Exit code: 0; 1 if the device fails; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the
reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_acceptance import Prompt, decode_all, read_prompts
from command_line import Parser, directory, guarded, leave, open_streams, positive_int, report
from generate import encode, make_mesh

NAME = "compare_checkpoints.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    figures = compare(args)
    if args.json:
        print(json.dumps(figures))
    else:
        print_figures(figures)
    return 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    import muse_jax

    mesh = make_mesh(args.devices)
    reference = muse_jax.load(args.reference, mesh=mesh, dtype=args.dtype)
    other = muse_jax.load(args.checkpoint, mesh=mesh, dtype=args.dtype, activations=args.activations)
    if reference.config.vocab_size != other.config.vocab_size:
        raise ValueError(f"{args.checkpoint}: its vocabulary of {other.config.vocab_size} tokens is not the reference's")
    texts = read_prompts(args.prompts, args.field, args.limit)
    if reference.tokenizer is None:
        raise ValueError(f"{args.reference}: no tokenizer.json, so it cannot read a prompt")
    settings = argparse.Namespace(chat=reference.tokenizer.has_chat_template, system=None, reasoning_effort=None)
    prompts = [Prompt(encode(reference, settings, text), 0) for text in texts]
    runs = []
    for muse, name in ((reference, "reference"), (other, "checkpoint")):
        done = 0

        def advance(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if sys.stderr.isatty():
                report(f"\r{name}: {done} of {len(prompts)} prompts")

        runs.append(decode_all(muse, prompts, 0.0, args.max_new_tokens, args.batch_size, advance))
    squares = signal = divergence = loss_reference = loss_other = 0.0
    tokens = agreeing = 0
    for prompt, answer in zip(prompts, runs[0].tokens, strict=True):
        row = [[*prompt.tokens, *answer]]
        first = len(prompt.tokens) - 1
        ours, theirs = (np.asarray(muse.logits(row)[0, first:-1], np.float64) for muse in (other, reference))
        squares += float(np.sum(np.square(ours - theirs)))
        signal += float(np.sum(np.square(theirs - theirs.mean(axis=-1, keepdims=True))))
        ours, theirs = (np.asarray(jax.nn.log_softmax(x.astype(np.float32), axis=-1), np.float64) for x in (ours, theirs))
        divergence += float(np.sum(np.exp(theirs) * (theirs - ours)))
        agreeing += int(np.sum(ours.argmax(axis=-1) == theirs.argmax(axis=-1)))
        at = np.arange(len(answer)), np.asarray(answer)
        loss_other, loss_reference = loss_other - float(ours[at].sum()), loss_reference - float(theirs[at].sum())
        tokens += len(answer)
    steps = [sum(map(len, run.accepted)) for run in runs]
    acceptance = [sum(run.committed) / count if count else None for run, count in zip(runs, steps, strict=True)]
    return {
        "reference": str(args.reference),
        "checkpoint": str(args.checkpoint),
        "activations": args.activations,
        "dtype": str(np.dtype(reference.model.module.dtype)),
        "prompts": len(prompts),
        "answer_tokens": tokens,
        "logits_relative_rms": (squares / signal) ** 0.5,
        "kl": divergence / tokens,
        "top1_agreement": agreeing / tokens,
        "loss_reference": loss_reference / tokens,
        "loss_checkpoint": loss_other / tokens,
        "acceptance_reference": acceptance[0],
        "acceptance_checkpoint": acceptance[1],
        "same_answers": sum(a == b for a, b in zip(runs[0].tokens, runs[1].tokens, strict=True)),
    }


def print_figures(figures: dict[str, Any]) -> None:
    print(f"{figures['prompts']} prompts, {figures['answer_tokens']} tokens of the reference's answers, {figures['dtype']}")
    for name, key, form in (
        ("logits, relative RMS", "logits_relative_rms", "{:.4f}"),
        ("KL, nats", "kl", "{:.5f}"),
        ("top-1 agreement", "top1_agreement", "{:.2%}"),
        ("loss, reference", "loss_reference", "{:.4f}"),
        ("loss, checkpoint", "loss_checkpoint", "{:.4f}"),
        ("acceptance, reference", "acceptance_reference", "{:.3f}"),
        ("acceptance, checkpoint", "acceptance_checkpoint", "{:.3f}"),
        ("same answers", "same_answers", "{}"),
    ):
        value = figures[key]
        print(f"{name:24}{'-' if value is None else form.format(value)}")


def note(message: str) -> None:
    report(f"{NAME}: {message}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("reference", type=directory, metavar="REFERENCE", help="checkpoint to compare with")
    add("checkpoint", type=directory, metavar="CHECKPOINT", help="of the same tokenizer")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines, an object with a prompt each")
    add("--field", default="question", help="the object's field that holds the prompt (default: question)")
    add("--limit", type=positive_int, default=100, metavar="N", help="prompts to take from the file (default: 100)")
    add("--activations", choices=("bf16", "nvfp4"), default="bf16", help="of CHECKPOINT's NVFP4 experts (default: bf16)")
    add("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: the checkpoint's, on a CPU float32)")
    add("--devices", type=positive_int, metavar="N", help="share the work among N devices; virtual ones on a CPU")
    add("--max-new-tokens", type=positive_int, default=256, metavar="N", help="most tokens of an answer (default: 256)")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="prompts decoded together (default: 8)")
    add("--json", action="store_true", help="print figures as one JSON object")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
