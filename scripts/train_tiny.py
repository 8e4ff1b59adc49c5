"""Trains the bundled `muse_tiny` on GSM8K and writes it as a Hugging Face directory.

    python scripts/train_tiny.py --train gsm8k/train.jsonl --dev gsm8k/dev.jsonl --output checkpoints/muse_tiny
    python scripts/train_tiny.py --stage towers --output checkpoints/muse_tiny
    python scripts/train_tiny.py --stage measure --dev gsm8k/dev.jsonl --output checkpoints/muse_tiny
    python scripts/train_tiny.py --stage draft --train gsm8k/train.jsonl --dev gsm8k/dev.jsonl --output checkpoints/muse_tiny

The first command (JAX, extra `train`, a GPU) trains tokenizer and text decoder. The second (extra `parity`) adds random
vision and audio towers of toy size, without which transformers would miss tensors. The third measures the result again,
through the API that users call, on any machine. The last (see `train_tiny_draft.py`; a GPU) trains a draft for it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import muse_jax
from checkpoints import CheckpointError, load_params, read_config, save_hf
from muse_jax.config import ConfigError, MLPKind, ModelConfig, default_layer_types, default_layer_uses_rope
from muse_jax.kv_cache import FullContext
from muse_jax.layout import TensorSpec, is_skipped, parameter_tree, text_tensors
from muse_jax.model import MuseSpark, Parameters, SparseMLP
from muse_jax.numerics import SERVING, round_to
from muse_jax.tokenizer import TokenizerError

# ----------------------------------------------------------------------------------------------------------------- text

BOS, END_OF_TEXT, END_OF_TURN, MASK, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|end_of_turn|>", "<|mask|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
IMAGE, VIDEO, AUDIO = "<|image|>", "<|video|>", "<|audio|>"
SPECIALS = (BOS, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN, MASK, PAD, IMAGE, VIDEO, AUDIO)

VOCAB_ROWS = 3072  # of the embedding and of lm_head
SPARE_ROWS = 16  # the last of them, which have no token: tokenizer and model of a release need not agree either

CHAT_TEMPLATE = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception('role ' ~ message['role'] ~ ': allowed are system, user and assistant') -}}
{%- endif -%}
{%- if message['content'] is not string -%}{{- raise_exception('content: only text is supported') -}}{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] | trim -}}
{%- if message['role'] == 'assistant' -%}{{- '<|end_of_turn|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

_ANNOTATION = re.compile(r"<<[^<>]*>>")
_FINAL_LINE = re.compile(r"\n#### (-?[\d,]*\.?\d+)$")


class InputError(ValueError):
    """Arguments or data that cannot be used; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its worked solution; the last line of the solution is `#### number`."""

    question: str
    answer: str


def read_problems(path: Path) -> list[Problem]:
    """Reads GSM8K's JSON lines, without the calculator annotations (`48/2 = <<48/2=24>>24` reads `48/2 = 24`).

    Raises InputError naming the file and line.
    """
    problems = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                problems.append(Problem(row["question"].strip(), _ANNOTATION.sub("", row["answer"]).strip()))
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
                raise InputError(f"{path}:{number}: expected an object with the strings 'question' and 'answer'") from None
    if not problems:
        raise InputError(f"{path}: holds no problems")
    return problems


def final_number(text: str) -> str | None:
    """The number of a solution's last line without thousands separators, or None if the last line is not `#### number`."""
    match = _FINAL_LINE.search(text)
    return match and match[1].replace(",", "")


def train_tokenizer(problems: Sequence[Problem], num_tokens: int) -> Tokenizer:
    """Byte-level BPE of at most `num_tokens` entries, special tokens last. Every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for p in problems for text in (p.question, p.answer)), trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def prompt_text(question: str) -> str:
    """What CHAT_TEMPLATE renders for one user message with a generation prompt."""
    return f"{BOS}{USER}{question}{ASSISTANT}"


class Encoded(NamedTuple):
    ids: list[int]  # prompt, then answer, then the stop token
    prompt_length: int


def encode(tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[Encoded]:
    prompts = tokenizer.encode_batch([prompt_text(p.question) for p in problems], add_special_tokens=False)
    answers = tokenizer.encode_batch([p.answer + END_OF_TURN for p in problems], add_special_tokens=False)
    return [Encoded(prompt.ids + answer.ids, len(prompt.ids)) for prompt, answer in zip(prompts, answers, strict=True)]


class Bucket(NamedTuple):
    """Right-padded sequences of like length."""

    tokens: np.ndarray  # [N, T + 1] int32
    weights: np.ndarray  # [N, T] float32: how much predicting tokens[:, 1:] counts; 0 for padding


def make_buckets(
    sequences: Sequence[Encoded], widths: Sequence[int], pad: int, question_weight: float, multiple: int = 1
) -> list[Bucket]:
    """Sorts sequences by length into buckets of T in `widths` predictions, each of a multiple of `multiple` rows.

    Rows added to make up the multiple have weight 0. Sequences longer than the widest bucket are left out.
    """
    buckets = []
    for shortest, width in zip((0, *widths), widths, strict=False):
        members = [s for s in sequences if shortest < len(s.ids) - 1 <= width]
        if not members:
            continue
        rows = -(-len(members) // multiple) * multiple
        tokens = np.full((rows, width + 1), pad, np.int32)
        weights = np.zeros((rows, width), np.float32)
        for row, (ids, prompt_length) in enumerate(members):
            tokens[row, : len(ids)] = ids
            weights[row, : prompt_length - 1] = question_weight
            weights[row, prompt_length - 1 : len(ids) - 1] = 1
        buckets.append(Bucket(tokens, weights))
    return buckets


def epoch(buckets: Sequence[Bucket], batch_size: int, rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray]]:
    """Every sequence once, as (bucket index, rows [batch_size]) in random order; short batches repeat rows of their bucket."""
    batches = []
    for index, bucket in enumerate(buckets):
        order = rng.permutation(len(bucket.tokens))
        order = np.resize(order, -(-len(order) // batch_size) * batch_size)
        batches += [(index, rows) for rows in order.reshape(-1, batch_size)]
    for i in rng.permutation(len(batches)):
        yield batches[i]


# --------------------------------------------------------------------------------------------------------------- config


def make_config(tokenizer: Tokenizer, overrides: dict[str, Any]) -> dict[str, Any]:
    """The content of `config.json`: keys and nesting of the released model, toy sizes.

    Args:     overrides: fields of `text_config` to set.
    """
    token_id = tokenizer.token_to_id
    text = {
        "model_type": "muse_spark_text",
        "vocab_size": VOCAB_ROWS,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "moe_hidden_size": 96,
        "moe_intermediate_size": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "sliding_window": 64,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 5.4730064863875,
        "final_logit_softcapping": 20.0,
        "residual_gate_temperature": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "output_router_logits": False,
        "bos_token_id": token_id(BOS),
        "eos_token_id": token_id(END_OF_TEXT),
        "pad_token_id": token_id(PAD),
        "dtype": "bfloat16",
    } | overrides
    layers, theta = text["num_hidden_layers"], text["rope_parameters"]["rope_theta"]
    derived = {
        "output_multiplier": (text["hidden_size"] / 256) ** -0.5,  # the released model's rule
        "layer_types": [str(kind) for kind in default_layer_types(layers)],
        "layer_rope_theta": [theta if uses_rope else 0 for uses_rope in default_layer_uses_rope(layers)],
        "mlp_layer_types": [str(MLPKind.SPARSE)] * layers,
    }
    text = derived | text
    return {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "dtype": text["dtype"],
        "text_config": text,
        "vision_config": {
            "model_type": "muse_spark_vision",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "patch_temporal": 2,
            "merge_size": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "max_position_embeddings": 16,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "layer_types": ["full_attention"],
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
        },
        "audio_config": {
            "model_type": "muse_spark_audio",
            "patch_sizes": [16, 8],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "mlp_ratio": 1.0,
            "conv_kernel_size": 3,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-6,
            "out_hidden_size": text["hidden_size"],
            "initializer_range": 0.02,
        },
        "out_hidden_size": 64,  # of the vision tower after merging 2 x 2 patches
        "projector_hidden_size": 16,
        "projector_hidden_act": "gelu",
        "image_token_id": token_id(IMAGE),
        "video_token_id": token_id(VIDEO),
        "audio_token_id": token_id(AUDIO),
    }


# ------------------------------------------------------------------------------------------------------------- training


@jax.custom_vjp
def report_load(weights: jax.Array, bias: jax.Array, idx: jax.Array) -> jax.Array:
    """Returns `weights` and makes the gradient of `bias` the load: how many rows chose each expert.

    The bias steers only the choice of experts, so it has no gradient of its own; in this way the load comes out of a
    forward pass that knows nothing of it. Rows that the loss does not depend on (padding) do not count.

    Args:     weights, idx: [R, top_k].  bias: [E] fp32.
    """
    return weights


def _report_load_forward(weights, bias, idx):
    return weights, (idx, jnp.arange(bias.shape[0]))


def _report_load_backward(residuals, weights_gradient):
    idx, experts = residuals
    counts = jnp.any(weights_gradient != 0, axis=-1)
    load = jnp.sum((idx[:, :, None] == experts[None, None, :]) & counts[:, None, None], axis=(0, 1))
    return weights_gradient, load.astype(jnp.float32), None


report_load.defvjp(_report_load_forward, _report_load_backward)


class BalancedMLP(SparseMLP):
    """The mixture of experts, reporting its load as the gradient of the router bias."""

    def route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        idx, weights = super().route(rows)
        return idx, report_load(weights, self.router_bias[...], idx)


def model_graph(config: ModelConfig, dtype: jnp.dtype) -> nnx.GraphDef:
    """The structure of a model whose mixtures report their load; `nnx.merge` with parameters makes the model."""
    model = MuseSpark(config, dtype=dtype, dense_experts=True)
    param = Parameters(config, {spec.path: spec for spec in text_tensors(config)}, dtype, rngs=None)
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp = BalancedMLP(config, SERVING, dtype, True, param.at("layers", i, "mlp"))
    return nnx.split(model)[0]


def fresh_parameters(config: ModelConfig, seed: int) -> dict:
    """First values, fp32: matrices are normal with deviation 0.02, vectors leave what they scale or gate as it is."""
    rng = np.random.default_rng(seed)

    def fresh(spec: TensorSpec) -> jax.Array:
        if len(spec.shape) > 1:
            return jnp.asarray(0.02 * rng.standard_normal(spec.param_shape, np.float32))
        return jnp.full(spec.param_shape, 1 if spec.path == ("final_norm",) else 0, jnp.float32)

    return parameter_tree(config, fresh)


def nll(model: MuseSpark, tokens: jax.Array, weights: jax.Array, inputs: jax.Array | None = None) -> jax.Array:
    """Weighted sum of the negative log-likelihoods of tokens[:, 1:], in nats.

    Args:     tokens: [B, T + 1] int32.  weights: [B, T].  inputs: what the model sees, if not tokens[:, :-1].
    """
    inputs = tokens[:, :-1] if inputs is None else inputs
    stream, _, _ = model(inputs, FullContext.create(inputs.shape[1]))
    log_probs = jax.nn.log_softmax(model.logits(stream), axis=-1)
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(chosen * weights)


def balance(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """Moves the bias of every expert by `rate` towards the mean load (loss-free balancing, arXiv 2408.15664)."""
    return bias + rate * jnp.sign(jnp.mean(load) - load)


def is_router_bias(path: tuple) -> bool:
    return path[-1].key == "router_bias"


def make_optimizer(args: argparse.Namespace) -> Any:
    """AdamW with warm-up and cosine decay; vectors (norms, gates) do not decay."""
    import optax  # of the extra `train`, which the other stage does without

    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.learning_rate,
        warmup_steps=min(args.warmup, args.steps // 2),
        decay_steps=args.steps,
        end_value=args.learning_rate / 50,
    )
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=args.weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


class TrainState(NamedTuple):
    params: dict  # fp32 masters
    optimizer: Any
    step: jax.Array  # int32


class StepMetrics(NamedTuple):
    loss: jax.Array  # mean over the batch's weights
    imbalance: jax.Array  # load of the busiest expert over the mean load, of the worst layer


class Trainer:
    """Steps and evaluations of one model. Masters are fp32; the model computes with the bf16 values that are shipped."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, args: argparse.Namespace):
        self.args = args
        self.mask_id = tokenizer.token_to_id(MASK)
        self.num_tokens = tokenizer.get_vocab_size()
        self.first_special = self.num_tokens - len(SPECIALS)
        # XLA for CPU lacks some of the products of bf16 matrices: there the same bf16 values are computed with in fp32.
        self.dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        self.graph = model_graph(config, self.dtype)
        self.is_fp32 = parameter_tree(config, lambda spec: spec.dtype == jnp.float32)
        self.optimizer = make_optimizer(args)
        masters = fresh_parameters(config, args.seed)
        self.state = TrainState(masters, self.optimizer.init(masters), jnp.int32(0))
        self.key = jax.random.key(args.seed)

    def shipped(self, masters: dict) -> dict:
        """The values that the checkpoint will hold, in the dtypes the model computes with."""
        return jax.tree.map(lambda x, keep: x if keep else round_to(x, jnp.bfloat16).astype(self.dtype), masters, self.is_fp32)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: TrainState, bucket: Bucket, rows: jax.Array) -> tuple[TrainState, StepMetrics]:
        """rows: [B] int32, rows of the bucket."""
        tokens, weights = bucket.tokens[rows], bucket.weights[rows]
        # Some of the text the model reads is hidden: it sees the corpus dozens of times and would learn it by heart.
        key = jax.random.fold_in(self.key, state.step)
        hidden = jax.random.bernoulli(key, self.args.token_dropout, weights.shape) & (tokens[:, :-1] < self.first_special)
        inputs = jnp.where(hidden, self.mask_id, tokens[:, :-1])

        def mean_loss(masters: dict) -> jax.Array:
            model = nnx.merge(self.graph, self.shipped(masters))
            return nll(model, tokens, weights, inputs) / jnp.sum(weights)

        loss, gradients = jax.value_and_grad(mean_loss)(state.params)
        loads = [load for path, load in jax.tree.leaves_with_path(gradients) if is_router_bias(path)]
        imbalance = functools.reduce(jnp.maximum, (jnp.max(load) / jnp.mean(load) for load in loads), jnp.float32(1))

        zeroed = jax.tree.map_with_path(lambda path, x: jnp.zeros_like(x) if is_router_bias(path) else x, gradients)
        updates, optimizer = self.optimizer.update(zeroed, state.optimizer, state.params)
        params = jax.tree.map_with_path(
            lambda path, x, update, load: balance(x, load, self.args.balance_rate) if is_router_bias(path) else x + update,
            state.params,
            updates,
            gradients,
        )
        return TrainState(params, optimizer, state.step + 1), StepMetrics(loss, imbalance)

    def evaluate(self, params: dict, bucket: Bucket) -> float:
        """Mean loss, nats, of a bucket whose rows are a multiple of the batch size. params: as shipped."""
        return float(self._evaluate(params, bucket))

    @functools.partial(jax.jit, static_argnums=0)
    def _evaluate(self, params: dict, bucket: Bucket) -> jax.Array:
        model = nnx.merge(self.graph, params)
        batches = jax.tree.map(lambda x: x.reshape(-1, self.args.batch, x.shape[1]), bucket)
        losses = lax.map(lambda batch: nll(model, *batch), batches)
        return jnp.sum(losses) / jnp.sum(bucket.weights)

    @functools.partial(jax.jit, static_argnums=0)
    def greedy(self, params: dict, tokens: jax.Array, lengths: jax.Array, limits: jax.Array, stop: jax.Array) -> tuple:
        """Continues right-padded prompts with the likeliest token, up to a stop token or the limit.

        Every token costs a full forward pass: slow, but independent of the caches that `muse_jax.decode` uses.

        Args:     tokens: [B, S] int32.  lengths, limits: [B] int32, of the prompt, and of prompt and answer (at most S).
                  stop: [stops] int32.
        Returns:  tokens and lengths, stop tokens included.
        """
        model = nnx.merge(self.graph, params)
        rows = jnp.arange(tokens.shape[0])

        def unfinished(carry):
            _, _, active = carry
            return jnp.any(active)

        def append(carry):
            tokens, lengths, active = carry
            stream, _, _ = model(tokens, FullContext.create(tokens.shape[1]))
            logits = model.logits(stream[rows, lengths - 1][:, None])[:, 0, : self.num_tokens]
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            slot = jnp.where(active, lengths, tokens.shape[1])  # finished rows write out of bounds, which is dropped
            tokens = tokens.at[rows, slot].set(token, mode="drop")
            lengths = jnp.where(active, lengths + 1, lengths)
            stopped = jnp.any(token[:, None] == stop[None, :], axis=-1)
            return tokens, lengths, active & ~stopped & (lengths < limits)

        tokens, lengths, _ = lax.while_loop(unfinished, append, (tokens, lengths, lengths < limits))
        return tokens, lengths


# ----------------------------------------------------------------------------------------------------------- evaluation


def unigram_loss(train: Sequence[Encoded], dev: Sequence[Encoded], vocab: int) -> float:
    """Mean loss of dev answer tokens under the frequencies of train answer tokens, each counted once more, nats."""
    counts = np.ones(vocab)
    for ids, prompt_length in train:
        np.add.at(counts, ids[prompt_length:], 1)
    log_probs = np.log(counts / counts.sum())
    return -float(np.mean(np.concatenate([log_probs[ids[prompt_length:]] for ids, prompt_length in dev])))


def answer_greedily(trainer: Trainer, params: dict, tokenizer: Tokenizer, problems: Sequence[Problem], room: int) -> dict:
    """Answers the questions at temperature 0 and counts. room: most tokens of an answer.

    Returns: counts of answers, of those that end with `#### number` and the stop token, of distinct ones and of right
    ones; and a few samples.
    """
    encoded = encode(tokenizer, problems)
    lengths = np.array([prompt_length for _, prompt_length in encoded], np.int32)
    tokens = np.full((len(encoded), int(lengths.max()) + room), tokenizer.token_to_id(PAD), np.int32)
    for row, (ids, prompt_length) in enumerate(encoded):
        tokens[row, :prompt_length] = ids[:prompt_length]
    stop = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]
    arguments = map(jnp.asarray, (tokens, lengths, lengths + room, stop))
    tokens, ends = map(np.asarray, trainer.greedy(params, *arguments))

    written = [row[start:end].tolist() for row, start, end in zip(tokens, lengths, ends, strict=True)]
    return judge(tokenizer, problems, written, stop)


def judge(tokenizer: Tokenizer, problems: Sequence[Problem], written: Sequence[list[int]], stop: Sequence[int]) -> dict:
    """Counts the tokens written for each problem: see `answer_greedily`."""
    answers = [tokenizer.decode(ids) for ids in written]
    numbers = [final_number(answer) if ids[-1] in stop else None for answer, ids in zip(answers, written, strict=True)]
    return {
        "answers": len(answers),
        "well_formed": sum(number is not None for number in numbers),
        "distinct": len(set(answers)),
        "correct": sum(n is not None and n == final_number(p.answer) for n, p in zip(numbers, problems, strict=True)),
        "samples": [{"question": p.question, "answer": a} for p, a in zip(problems[:3], answers, strict=False)],
    }


# ---------------------------------------------------------------------------------------------------------------- files


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes the tokenizer, its chat template and the generation settings beside a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    named = {"bos_token": BOS, "eos_token": END_OF_TEXT, "pad_token": PAD, "mask_token": MASK}
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "additional_special_tokens": [token for token in SPECIALS if token not in named.values()],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )
    token_id = tokenizer.token_to_id
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": token_id(BOS),
            "eos_token_id": [token_id(END_OF_TEXT), token_id(END_OF_TURN)],
            "pad_token_id": token_id(PAD),
            "do_sample": False,
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_log(path: Path, rows: Sequence[dict]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def directory_bytes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.is_file()}


# --------------------------------------------------------------------------------------------------------------- stages


class Fit(NamedTuple):
    """Where training was best: the step of the least loss on held-out problems, and the parameters it would ship."""

    params: dict
    step: int
    loss: float  # there
    log: list[dict]  # one row per evaluation
    epochs: int  # begun


def fit(trainer: Trainer, buckets: Sequence[Bucket], held_out: Bucket, console: Console) -> Fit:
    """Trains for args.steps, or until args.max_seconds are over. Raises InputError if the held-out loss is never finite."""
    args, rng = trainer.args, np.random.default_rng(trainer.args.seed)
    started = time.perf_counter()
    buckets, held_out = jax.device_put((buckets, held_out))
    best, best_step, best_loss = None, 0, math.inf
    epochs, batches, log, metrics = 0, iter(()), [], []
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.steps)
        for step in range(1, args.steps + 1):
            if (batch := next(batches, None)) is None:
                epochs, batches = epochs + 1, epoch(buckets, args.batch, rng)
                batch = next(batches)
            bucket, rows = batch
            trainer.state, step_metrics = trainer.step(trainer.state, buckets[bucket], jnp.asarray(rows))
            metrics.append(step_metrics)
            progress.update(task, completed=step)
            if step % args.eval_every and step != args.steps:
                continue
            # Copied: the next step takes the masters' buffers, and some of them are the shipped parameters themselves.
            params = jax.tree.map(jnp.copy, trainer.shipped(trainer.state.params))
            loss = trainer.evaluate(params, held_out)
            if loss < best_loss:
                best, best_step, best_loss = params, step, loss
            row = {
                "step": step,
                "epoch": epochs,
                "train_loss": round(float(np.mean([m.loss for m in metrics])), 4),
                "held_out_answer_loss": round(loss, 4),
                "imbalance": round(float(np.mean([m.imbalance for m in metrics])), 3),
                "seconds": round(time.perf_counter() - started, 1),
            }
            log.append(row)
            metrics = []
            progress.update(task, description=f"train {row['train_loss']:.3f}  held out {loss:.3f}")
            progress.console.print(" ".join(f"{key}={value}" for key, value in row.items()))
            if row["seconds"] > args.max_seconds:
                break
    if best is None:
        raise InputError("the held-out loss was never a finite number: lower --learning-rate")
    return Fit(best, best_step, best_loss, log, epochs)


def train(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stage `model`: trains, measures, and writes the checkpoint with its card. Returns what was measured."""
    started = time.perf_counter()
    problems, dev_problems = read_problems(args.train), read_problems(args.dev)
    if args.held_out >= len(problems):
        raise InputError(f"--held-out {args.held_out}: {args.train} holds {len(problems)} problems")
    # The step is chosen on problems of its own, so that dev is measured once and chooses nothing.
    problems, held_out_problems = problems[: -args.held_out], problems[-args.held_out :]
    overrides = dict(args.config)
    tokenizer = train_tokenizer(problems, overrides.get("vocab_size", VOCAB_ROWS) - SPARE_ROWS)
    config_json = make_config(tokenizer, overrides)
    config = ModelConfig.from_hf(config_json)
    num_parameters = sum(spec.size for spec in text_tensors(config))

    encoded, dev_encoded = encode(tokenizer, problems), encode(tokenizer, dev_problems)
    pad = tokenizer.token_to_id(PAD)
    buckets = make_buckets(encoded, args.widths, pad, args.question_weight)

    def one_bucket(sequences: Sequence[Encoded]) -> Bucket:
        (bucket,) = make_buckets(sequences, [max(len(ids) - 1 for ids, _ in sequences)], pad, 0.0, multiple=args.batch)
        return bucket

    held_out, dev = one_bucket(encode(tokenizer, held_out_problems)), one_bucket(dev_encoded)
    if not buckets:
        raise InputError(f"--widths: no training problem fits {args.widths[-1]} tokens")
    num_train = sum(len(bucket.tokens) for bucket in buckets)
    console.print(
        f"{num_train} of {len(problems)} training problems, "
        f"{' + '.join(f'{len(b.tokens)} of up to {b.weights.shape[1]} tokens' for b in buckets)}; "
        f"{tokenizer.get_vocab_size()} tokens; {num_parameters:,} parameters; {jax.devices()[0].device_kind}"
    )

    trainer = Trainer(config, tokenizer, args)
    fresh_loss = trainer.evaluate(trainer.shipped(trainer.state.params), dev)
    training_started = time.perf_counter()
    best = fit(trainer, buckets, held_out, console)
    training_seconds = time.perf_counter() - training_started
    generation = answer_greedily(trainer, best.params, tokenizer, dev_problems[: args.answers], args.answer_tokens)

    answer_bytes = sum(len(problem.answer.encode()) for problem in dev_problems)
    answer_tokens = sum(len(ids) - prompt_length for ids, prompt_length in dev_encoded)
    losses = {
        "uniform": math.log(tokenizer.get_vocab_size()),
        "unigram": unigram_loss(encoded, dev_encoded, tokenizer.get_vocab_size()),
        "fresh weights": fresh_loss,
        "trained": trainer.evaluate(best.params, dev),
    }
    biases = [bias for path, bias in jax.tree.leaves_with_path(best.params) if is_router_bias(path)]
    results = {
        "command": command_line(args),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters,
        "tokens": tokenizer.get_vocab_size(),
        "train_problems": num_train,
        "held_out_problems": args.held_out,
        "dev_problems": len(dev_problems),
        "steps": best.log[-1]["step"],
        "best_step": best.step,
        "epochs": best.epochs,
        "dev_answer_tokens": answer_tokens,
        "dev_answer_bytes": answer_bytes,
        "loss_per_token": losses,
        "loss_per_byte": {name: loss * answer_tokens / answer_bytes for name, loss in losses.items()},
        "largest_router_bias": max((float(jnp.max(jnp.abs(bias))) for bias in biases), default=0.0),
        "generation": generation,
        "seconds_training": training_seconds,
        "seconds_total": time.perf_counter() - started,
    }

    save_tokenizer(tokenizer, args.output, config.max_position_embeddings)
    save_hf(best.params, config_json, args.output, dtype=jnp.bfloat16)
    write_log(args.output / "training_log.csv", best.log)
    (args.output / "README.md").write_text(model_card(results, config, args), encoding="utf-8")
    return results | {"files": directory_bytes(args.output)}


def add_towers(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stage `towers`: adds random weights of the vision and audio towers to the checkpoint in `args.output`.

    Raises InputError if transformers still misses tensors, or finds some it does not know.
    """
    import torch
    from transformers import AutoConfig, MuseSparkForConditionalGeneration

    config_json = json.loads((args.output / "config.json").read_text(encoding="utf-8"))
    params, _ = load_params(args.output, read_config(args.output), dtype=jnp.bfloat16)
    torch.manual_seed(args.seed)
    fresh = MuseSparkForConditionalGeneration(AutoConfig.from_pretrained(args.output)).state_dict()
    towers = {name: tensor.float().numpy().astype(jnp.bfloat16) for name, tensor in fresh.items() if is_skipped(name)}
    save_hf(params, config_json, args.output, dtype=jnp.bfloat16, extra_tensors=towers)

    _, info = MuseSparkForConditionalGeneration.from_pretrained(args.output, output_loading_info=True)
    if faults := {kind: sorted(map(str, names)) for kind, names in info.items() if names}:
        raise InputError(f"{args.output}: transformers reports {faults}")
    return {
        "tower_tensors": len(towers),
        "tower_bytes": sum(tensor.nbytes for tensor in towers.values()),
        "files": directory_bytes(args.output),
    }


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stage `measure`: what a finished checkpoint does on dev, through `muse_jax` as its users call it; a CPU will do."""
    muse = muse_jax.load(args.output)
    tokenizer = Tokenizer.from_file(str(args.output / "tokenizer.json"))
    problems = read_problems(args.dev)
    encoded = encode(tokenizer, problems)
    left_out = sum(len(ids) - 1 > args.widths[-1] for ids, _ in encoded)
    if left_out:
        raise InputError(f"--widths: {left_out} problems of {args.dev} are longer than {args.widths[-1]} tokens")

    @jax.jit
    def answer_loss(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * weights)

    loss, num_tokens = 0.0, 0.0
    buckets = make_buckets(encoded, args.widths, tokenizer.token_to_id(PAD), 0.0, multiple=args.batch)
    batches = [(bucket, start) for bucket in buckets for start in range(0, len(bucket.tokens), args.batch)]
    for bucket, start in track(batches, "loss", console=console):
        tokens, weights = (rows[start : start + args.batch] for rows in bucket)
        loss += float(answer_loss(muse.logits(tokens[:, :-1]), tokens[:, 1:], weights))
        num_tokens += float(weights.sum())

    asked = problems[: args.answers]
    state, out = muse.prefill([ids[:end] for ids, end in encoded[: args.answers]], max_new_tokens=args.answer_tokens)
    written: list[list[int]] = [[] for _ in asked]
    for _ in track(range(args.answer_tokens), "answers", console=console):
        tokens, counts, done = jax.device_get((out.tokens, out.count, out.done))
        for row, ids, count in zip(written, tokens, counts, strict=True):
            row.extend(ids[:count].tolist())
        if done.all():
            break
        state, out = muse.decode(state)
    generation = judge(tokenizer, asked, written, muse.stop_token_ids)
    results = {
        "loss_per_token": loss / num_tokens,
        "loss_per_byte": loss / sum(len(problem.answer.encode()) for problem in problems),
        "generation": generation,
        "files": directory_bytes(args.output),
    }
    console.print(
        f"loss on answers {results['loss_per_token']:.3f} per token, {results['loss_per_byte']:.3f} per byte; of "
        f"{generation['answers']} greedy answers {generation['well_formed']} end with #### number and the stop token, "
        f"{generation['distinct']} are distinct, {generation['correct']} are right"
    )
    return results


# ---------------------------------------------------------------------------------------------------------- command line


def draft(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stage `draft`, which has a file and arguments of its own."""
    from scripts.train_tiny_draft import train_draft

    return train_draft(args, console)


STAGES = {  # function, and the extra that it needs
    "model": (train, "train"),
    "towers": (add_towers, "parity"),
    "measure": (measure, "test"),
    "draft": (draft, "train"),
}


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run, every setting spelt out, without the directories of this machine."""
    flags = [(name, os.environ.get(name)) for name in ("NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")]  # they change the times
    words = [*(f'{name}="{value}"' for name, value in flags if value), "python scripts/train_tiny.py"]
    for name, value in vars(args).items():
        if name == "json" or (name, value) == ("stage", "model") or value in (None, [], math.inf):
            continue
        if isinstance(value, Path):
            value = value.name
        elif name == "config":
            value = " ".join(f"{key}={json.dumps(setting)}" for key, setting in value)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def model_card(results: dict[str, Any], config: ModelConfig, args: argparse.Namespace) -> str:
    """README.md of the checkpoint, from the results of `train`."""
    per_token, per_byte, generation = results["loss_per_token"], results["loss_per_byte"], results["generation"]
    best_step = results["best_step"]
    losses = "\n".join(f"| {name} | {per_token[name]:.3f} | {per_byte[name]:.3f} |" for name in per_token)
    sample = generation["samples"][0]
    global_layers = [i for i in range(config.num_hidden_layers) if config.window(i) is None]
    return f"""\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# {args.output.name}

A Muse Spark of {results["parameters"] / 1e6:.1f} million parameters that writes worked solutions of grade-school word problems.
It has every part of the large model and is there to run, test and measure code with. It reasons badly.

## Model

- `MuseSparkForConditionalGeneration` in bfloat16, {config.num_hidden_layers} layers of width {config.hidden_size}: global
  attention without rotary embedding in {", ".join(map(str, global_layers))}, a window of {config.sliding_window} tokens in the
  others; {config.num_attention_heads} query and {config.num_key_value_heads} key/value heads of {config.head_dim}.
- {config.num_local_experts} experts at width {config.moe_hidden_size}, of which a token uses {config.num_experts_per_tok}. The
  router's correction bias is live: training moved it by up to {results["largest_router_bias"]:.3f}.
- The vision and audio towers have toy sizes and random weights.
- Byte-level BPE of {results["tokens"]} tokens, every digit a token of its own. The last rows of the {config.vocab_size} in the
  vocabulary have no token.
- A text is `{BOS}{USER}question{ASSISTANT}answer{END_OF_TURN}`.

## Training

- Data: {results["train_problems"]} problems of GSM8K's `train.jsonl` (Cobbe et al., arXiv 2110.14168; OpenAI, MIT licence) and
  nothing else. Calculator annotations are left out: `48/2 = <<48/2=24>>24` reads `48/2 = 24`.
- {results["steps"]} steps of {args.batch} problems ({results["epochs"]} passes over the data) with AdamW. A question's tokens
  count {args.question_weight:g} in the loss, an answer's 1; {args.token_dropout:.0%} of the tokens are hidden from the model.
- The weights are those of step {best_step}, where the loss on the answers of the last {results["held_out_problems"]} problems
  of `train.jsonl`, held out for this, was least. `training_log.csv` has the others. `dev.jsonl`, problems of
  GSM8K's test split, chose nothing.
- {results["device"]}, jax {results["jax"]}: {results["seconds_training"]:.0f} s of training,
  {results["seconds_total"]:.0f} s in all, compilation included.

The data are `train.jsonl` and `test.jsonl` of github.com/openai/grade-school-math, the latter (or a part of it) as
`dev.jsonl`. The last command repeats the figures below on any machine; in float32 some answers come out otherwise.

```bash
{results["command"]}
python scripts/train_tiny.py --stage towers --output {args.output.name}
python scripts/train_tiny.py --stage measure --dev {args.dev.name} --output {args.output.name}
```

## Results

Loss on the answers of the {results["dev_problems"]} problems of `dev.jsonl`, in nats, stop tokens included
({results["dev_answer_tokens"]} tokens, {results["dev_answer_bytes"]} bytes). The unigram model has the token frequencies of the
training answers.

| model | per token | per byte |
|---|---|---|
{losses}

Of {generation["answers"]} greedy answers to questions of `dev.jsonl`, {generation["well_formed"]} end with `#### number` and
the stop token, {generation["distinct"]} are distinct and {generation["correct"]} are right. The first:

```text
{sample["question"]}

{sample["answer"]}
```

## Limitations

Most answers are wrong: the model has learnt the form of a solution, its words, and a little arithmetic. It has read nothing
but short English word problems, may repeat sentences of them, and is good for nothing but trying software.
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--stage",
        choices=tuple(STAGES),
        default="model",
        help="train, add towers to what was trained, measure it, or train a draft for it (--stage draft --help)",
    )
    add("--train", type=Path, help="GSM8K train.jsonl")
    add("--dev", type=Path, help="GSM8K problems to measure the result on")
    add("--output", type=Path, required=True, help="directory of the checkpoint; training replaces what is there")
    add("--seed", type=int, default=0, help="same seed, same result; on a GPU with --xla_gpu_deterministic_ops only")
    add("--steps", type=positive_int, default=1500)
    add("--batch", type=positive_int, default=64, help="problems per step")
    add("--learning-rate", type=float, default=2e-3, help="its peak")
    add("--warmup", type=int, default=200, help="steps until the peak, at most half of all")
    add("--weight-decay", type=float, default=0.1)
    add("--question-weight", type=float, default=0.3, help="of a question's tokens in the loss; an answer's count 1")
    add("--token-dropout", type=float, default=0.1, help="share of the tokens that the model reads masked")
    add("--balance-rate", type=float, default=1e-3, help="step of the router's correction bias towards equal load")
    add("--widths", type=positive_int, nargs="+", default=[256, 512], help="lengths that problems are padded to")
    add("--max-seconds", type=float, default=math.inf, help="end training early, at the first measurement after this time")
    add("--eval-every", type=positive_int, default=125, help="steps between measurements on held-out problems")
    add("--held-out", type=positive_int, default=373, help="last problems of --train, to choose the best step by")
    add("--answers", type=positive_int, default=100, help="dev questions to answer at the end")
    add("--answer-tokens", type=positive_int, default=320, help="most tokens of an answer")
    add("--config", type=setting, nargs="+", default=[], metavar="KEY=VALUE", help="fields of text_config, values as JSON")
    add("--json", action="store_true", help="print the results as one JSON object, the last line")
    args = parser.parse_args(argv)
    if not 0 <= args.token_dropout < 1:
        parser.error(f"--token-dropout {args.token_dropout}: allowed are 0 and above, below 1")
    if args.stage == "model" and (args.train is None or args.dev is None):
        parser.error("--stage model needs --train and --dev")
    if args.stage == "measure" and args.dev is None:
        parser.error("--stage measure needs --dev")
    args.widths.sort()
    return args


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer above 0")
    return value


def setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE with a JSON value") from None


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    stage = argparse.ArgumentParser(add_help=False)
    stage.add_argument("--stage")
    if stage.parse_known_args(argv)[0].stage == "draft":
        from scripts.train_tiny_draft import parse_arguments as parse_draft_arguments

        args = parse_draft_arguments(argv)
    else:
        args = parse_arguments(argv)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run, extra = STAGES[args.stage]
    try:
        results = run(args, console)
    except ModuleNotFoundError as error:
        print(f"train_tiny.py: {error.name} is not installed: pip install -e '.[{extra}]'", file=sys.stderr)
        return 2
    except (InputError, ConfigError, CheckpointError, TokenizerError, OSError) as error:
        print(f"train_tiny.py: {error}", file=sys.stderr)
        return 2
    console.print(f"{args.output}: " + ", ".join(f"{name} {size:,} bytes" for name, size in results["files"].items()))
    if args.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from scripts import train_tiny  # by its name, under which other files import it, so that its classes exist once

    sys.exit(train_tiny.main())
