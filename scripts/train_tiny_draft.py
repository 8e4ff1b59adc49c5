"""Trains the DFlash2 draft of a small target on text that the target writes itself: `train_tiny.py --stage draft`.

    questions of GSM8K, whole or cut short -> the target writes on -> texts
    text -> target, frozen -> taps, teacher logits -> blocks at random anchors -> losses of draft and selector

Blocks and losses: dflash2.md section 11. What a block sees in training is what it sees when it serves. The gradients' matrix
products are fp32; NVIDIA_TF32_OVERRIDE=1 lets cuBLAS round their operands to TF32, which takes 40 % off a step on an H200.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from tokenizers import Tokenizer

from checkpoints import load_params, read_config, save_draft
from muse_jax import ops, tree
from muse_jax.attention import attend, hide
from muse_jax.config import AttentionKind, ModelConfig
from muse_jax.draft import DFlash2, block_visibility
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import KV, FullContext, KVCache, PrefillContext, heads_first
from muse_jax.layout import TensorSpec, draft_tensors, parameter_tree, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.numerics import Numerics, fp32, round_to
from muse_jax.sampling import SamplingParams
from muse_jax.speculation import Speculation, propose
from scripts.train_tiny import (
    ASSISTANT,
    END_OF_TEXT,
    END_OF_TURN,
    MASK,
    PAD,
    Encoded,
    InputError,
    command_line,
    directory_bytes,
    encode,
    epoch,
    make_optimizer,
    positive_int,
    read_problems,
    setting,
    write_log,
)

TREE_SIZE = 16  # nodes of the trees that the draft is judged by
WRITE_BATCH = 4096  # texts that are written at once
EVAL_SEQUENCES = 8  # texts whose blocks are evaluated at once
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the training texts, in equal shares; questions are written at 1


# --------------------------------------------------------------------------------------------------------------- config


def make_config(target: ModelConfig, mask_token_id: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """The content of the draft's `config.json`. overrides: fields of it or of its `dflash_config` to set."""
    settings = {
        "target_layer_ids": list(range(target.num_hidden_layers - 1)),  # engines disagree on what the last layer's tap is
        "mask_token_id": mask_token_id,
        "block_size": 16,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
        "input_embedding_scale": 1.0,
        "output_multiplier": target.output_multiplier,
        "final_logit_softcapping": target.final_logit_softcapping,
    }
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 10 * target.hidden_size // 3,
        "num_hidden_layers": 3,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "use_sliding_window": True,  # without it transformers forgets the window
        "sliding_window": 256,
        "is_causal": False,
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": target.num_hidden_layers,
        "tie_word_embeddings": False,
    }
    config |= {name: value for name, value in overrides.items() if name not in settings}
    settings |= {name: value for name, value in overrides.items() if name in settings}
    config.setdefault("layer_types", [str(AttentionKind.SLIDING)] * config["num_hidden_layers"])
    return config | {"dflash_config": settings}


# ----------------------------------------------------------------------------------------------------------------- text


class Texts(NamedTuple):
    """Right-padded prompts with their answers."""

    tokens: np.ndarray  # [N, T] int32
    starts: np.ndarray  # [N] int32: tokens of the prompt, so the index of the answer's first token
    ends: np.ndarray  # [N] int32: tokens of prompt and answer


def make_prompts(
    questions: Sequence[Encoded], count: int, cut: float, length: int, pad: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Beginnings of texts: prompts drawn at random, a share of them cut somewhere, so that the target invents the rest.

    Args:     cut: the share.  length: columns; longer prompts are left out.
    Returns:  tokens [count, length] int32, right-padded, and how many of each row are given [count].
    """
    prompts = [ids[:end] for ids, end in questions if end < length]
    if not prompts:
        raise InputError(f"--length {length}: every question is longer")
    tokens, given = np.full((count, length), pad, np.int32), np.zeros(count, np.int32)
    for row, choice in enumerate(rng.integers(len(prompts), size=count)):
        ids = prompts[choice]
        given[row] = rng.integers(2, len(ids)) if rng.random() < cut else len(ids)  # 2: what every prompt begins with
        tokens[row, : given[row]] = ids[: given[row]]
    return tokens, given


# --------------------------------------------------------------------------------------------------------------- blocks


@functools.partial(jax.tree_util.register_dataclass, data_fields=["anchors", "positions", "visible"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class BlockContext:
    """A blocks of each of B sequences side by side: a block sees the context before its anchor, and itself.

    For a draft it is what `DecodeContext` is when it serves, with the whole sequence in place of a cache.
    """

    anchors: jax.Array  # [B, A] int32, positions
    positions: jax.Array  # [B * A, block_size] int32
    visible: tuple[jax.Array, jax.Array]  # rows of a block that its rows see in full and in sliding layers

    @classmethod
    def create(cls, anchors: jax.Array, config: DraftConfig) -> BlockContext:
        rows = jnp.arange(config.block_size, dtype=jnp.int32)
        return cls(anchors, anchors.reshape(-1, 1) + rows[None, :], block_visibility(config))

    def attend(self, q, k, v, cache: KV, window: int | None, scale: float, numerics: Numerics):
        """cache: keys and values of the whole sequences, [B, K, T, H]. Returns [B * A, block_size, N, H] fp32, None."""
        k, v = heads_first(k), heads_first(v)
        context = [jnp.repeat(x, self.anchors.shape[1], axis=0) for x in cache]
        slots = jnp.arange(cache[0].shape[2], dtype=jnp.int32)[None, None, :]
        seen = slots < self.anchors.reshape(-1, 1, 1)
        if window is not None:
            seen &= self.positions[:, :, None] - slots < window
        rows = self.visible[window is not None][None]
        return attend(q, [(*context, hide(seen)), (k, v, hide(rows))], scale, numerics), None


def block_hidden(draft: DFlash2, embedding: jax.Array, tokens: jax.Array, taps: jax.Array, anchors: jax.Array) -> jax.Array:
    """Hidden states of the predicting rows of blocks.

    Args:     embedding: [V, D].  tokens: [B, T] int32.  taps: [B, T, taps * D].  anchors: [B, A] int32, positions.
    Returns:  [B * A, P, D].
    """
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    caches = draft.context_keys_values(taps, positions)
    block = draft.embed(jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1), embedding)
    return draft(block, BlockContext.create(anchors, draft.config), caches)[:, 1:]


def following(tokens: jax.Array, anchors: jax.Array, ends: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens after each anchor: their indices, themselves, and whether the text has them, [B * A, count] each."""
    index = anchors[:, :, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None, None, :]
    exists = index < ends[:, None, None]
    index = jnp.minimum(index, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    after = jnp.take_along_axis(tokens, index, axis=1)
    return index, after.reshape(-1, count), exists.reshape(-1, count)


def selector_scores(draft: DFlash2, hidden: jax.Array, before: jax.Array, ids: jax.Array, unary: jax.Array) -> jax.Array:
    """Scores of candidates after one token each: a row of `DFlash2.lattice`.

    Args:     hidden: [B, P, D].  before: [B, P] int32.  ids, unary: [B, P, K].  Returns: [B, P, K] fp32.
    """
    # Tables are widened before the look-up: its gradient adds up rows, which bf16 would lose.
    left = fp32(draft.predecessor_codebook[...])[before] * ops.linear(hidden, draft.selector_projection[...])
    right = fp32(draft.successor_codebook[...])[ids]
    return unary + jnp.einsum("bpr,bpkr->bpk", left, right, precision="highest")


def candidates_with(best: jax.Array, ids: jax.Array) -> jax.Array:
    """Puts the token that should win among the candidates: in the weakest one's place where it is missing.

    Args:     best: [B, P] int32.  ids: [B, P, K] int32, best first.
    """
    missing = ~jnp.any(ids == best[:, :, None], axis=-1)
    return ids.at[:, :, -1].set(jnp.where(missing, best, ids[:, :, -1]))


class Losses(NamedTuple):
    """Of blocks, per position and with the position's weight, in nats."""

    draft: jax.Array  # divergence of the draft from the teacher
    selector: jax.Array  # of the selector from the teacher's choice


def block_losses(
    draft: DFlash2, hidden: jax.Array, lm_head: jax.Array, teacher: jax.Array, before: jax.Array, weights: jax.Array
) -> Losses:
    """Weighted means of both losses.

    Args:     hidden: [B, P, D].  teacher: [B, P, V] fp32, the target's logits for each position given the true tokens
              before it.  before: [B, P] int32, the last of these.  weights: [B, P].
    """
    logits = draft.logits(hidden, lm_head)
    best = jnp.argmax(teacher, axis=-1).astype(jnp.int32)
    teacher = jax.nn.log_softmax(teacher, axis=-1)
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits, axis=-1)), axis=-1)

    _, ids = lax.top_k(lax.stop_gradient(logits), draft.config.selector_top_k)
    ids = candidates_with(best, ids)
    scores = selector_scores(draft, hidden, before, ids, jnp.take_along_axis(logits, ids, axis=-1))
    wins = jnp.sum(jnp.where(ids == best[:, :, None], jax.nn.log_softmax(scores, axis=-1), 0), axis=-1)
    total = jnp.sum(weights)
    return Losses(jnp.sum(divergence * weights) / total, -jnp.sum(wins * weights) / total)


# ------------------------------------------------------------------------------------------------------------- training


def fresh_parameters(config: DraftConfig, seed: int) -> dict:
    """First values, fp32: norms are one, convolutions pass their input on, the selector adds nothing yet."""
    rng = np.random.default_rng(seed)

    def fresh(spec: TensorSpec) -> jax.Array:
        name, shape = spec.path[-1], spec.param_shape
        if len(shape) == 1:
            return jnp.full(shape, 0 if name.endswith("bias") else 1, jnp.float32)
        if name == "base_kernel":
            return jnp.zeros(shape, jnp.float32).at[:, 0].set(1)
        if name in ("kernel_projection", "successor_codebook"):
            return jnp.zeros(shape, jnp.float32)
        scale = 1 if name == "predecessor_codebook" else shape[-1] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32))

    return parameter_tree(config, fresh)


class TrainState(NamedTuple):
    params: dict  # fp32 masters
    average: dict  # of the masters over the last steps; what is shipped
    optimizer: Any
    step: jax.Array  # int32


class Acceptance(NamedTuple):
    """What would become of a block at each anchor; every length counts the token that the target adds. [B, A] each."""

    chain: jax.Array  # tokens committed with the selector's own picks
    tree: jax.Array  # with a tree
    oracle: jax.Array  # with any path through the candidates
    recalled: jax.Array  # [B, A, P] bool: the right token is a candidate
    selected: jax.Array  # [B, A, P] bool: and wins after the right tokens before it
    exists: jax.Array  # [B, A, P] bool: the text has such a token


class Trainer:
    """A frozen target that writes and teaches, and the draft that learns from it.

    Masters are fp32; the draft computes with the bf16 values that are shipped.
    """

    def __init__(
        self,
        target: ModelConfig,
        params: dict,
        config: DraftConfig,
        tokenizer: Tokenizer,
        args: argparse.Namespace,
        console: Console,
    ):
        self.args, self.console, self.target_config, self.config = args, console, target, config
        # XLA for CPU lacks some of the products of bf16 matrices: there the same bf16 values are computed with in fp32.
        self.dtype = compute_dtype()
        self.target_graph = nnx.split(MuseSpark(target, dtype=self.dtype, dense_experts=True))[0]
        self.target_params = params
        self.graph = nnx.split(DFlash2(config, dtype=self.dtype))[0]
        self.num_tokens = tokenizer.get_vocab_size()
        self.assistant, self.pad = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(PAD)
        self.stop = [tokenizer.token_to_id(token) for token in (END_OF_TURN, END_OF_TEXT)]
        self.optimizer = make_optimizer(args)
        masters = fresh_parameters(config, args.seed)
        self.state = TrainState(masters, jax.tree.map(jnp.copy, masters), self.optimizer.init(masters), jnp.int32(0))
        self.text_key, self.anchor_key = jax.random.split(jax.random.key(args.seed))

    def shipped(self, masters: dict) -> dict:
        """The values that the checkpoint will hold, in the dtype the draft computes with."""
        return jax.tree.map(lambda x: round_to(x, jnp.bfloat16).astype(self.dtype), masters)

    # ---- text

    def write(self, tokens: np.ndarray, given: np.ndarray, temperatures: np.ndarray, seed: int) -> Texts:
        """Lets the target finish texts: what is missing of the question at temperature 1, the answer at `temperatures`.

        Args:     tokens: [N, T] int32, of which each row's first `given` count.  temperatures: [N] float32.  seed: of the
                  choices; as many of the next seeds are taken as there are batches.
        Returns:  those that have an answer of at least two tokens.
        """
        size, count = self.args.write_batch, len(tokens)
        rows = np.resize(np.arange(count), -(-count // size) * size)  # one shape, compiled once
        written = []
        for i, chunk in enumerate(track(rows.reshape(-1, size), "texts", console=self.console, disable=count <= size)):
            key = jax.random.fold_in(self.text_key, seed + i)
            arguments = (jnp.asarray(x[chunk]) for x in (tokens, given, temperatures))
            written.append(np.asarray(self._write(self.target_params, *arguments, key)))
        tokens = np.concatenate(written)[:count]
        columns = np.arange(tokens.shape[1])[None, :]
        asked = np.any(tokens == self.assistant, axis=1)
        starts = np.argmax(tokens == self.assistant, axis=1) + 1
        stopped = np.isin(tokens, self.stop) & (columns >= starts[:, None])
        ends = np.where(stopped.any(axis=1), np.argmax(stopped, axis=1) + 1, tokens.shape[1])
        good = asked & (ends - starts >= 2)
        return Texts(tokens[good], starts[good].astype(np.int32), ends[good].astype(np.int32))

    @functools.partial(jax.jit, static_argnums=0)
    def _write(self, params: dict, given_tokens: jax.Array, given: jax.Array, temperatures: jax.Array, key: jax.Array):
        model = nnx.merge(self.target_graph, params)
        batch, length = given_tokens.shape
        stop = jnp.asarray(self.stop, jnp.int32)

        def unfinished(carry: tuple) -> jax.Array:
            index, _, _, _, done = carry
            return (index + 1 < length) & ~jnp.all(done)

        def append(carry: tuple) -> tuple:
            index, tokens, cache, answering, done = carry
            context = PrefillContext.create(index, jnp.full(batch, length, jnp.int32), 1)
            token = lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
            stream, kept, _ = model(token, context, cache)
            logits = model.logits(stream)[:, 0, : self.num_tokens]
            # argmax(logits / T + noise), without dividing by 0
            temperature = jnp.where(answering, temperatures, 1.0)
            noise = jax.random.gumbel(jax.random.fold_in(key, index), logits.shape)
            chosen = jnp.argmax(logits + temperature[:, None] * noise, axis=-1).astype(jnp.int32)
            fixed = lax.dynamic_index_in_dim(given_tokens, index + 1, axis=1, keepdims=False)
            token = jnp.where(done, self.pad, jnp.where(index + 1 < given, fixed, chosen))
            done |= answering & jnp.any(token[:, None] == stop[None, :], axis=1)
            answering |= token == self.assistant
            tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], index + 1, axis=1)
            return index + 1, tokens, KVCache(kept, context.ring_positions(cache.ring_positions)), answering, done

        cache = KVCache.empty(self.target_config, batch, length, 1, self.dtype)
        nobody = jnp.zeros(batch, bool)
        return lax.while_loop(unfinished, append, (jnp.int32(0), given_tokens, cache, nobody, nobody))[1]

    # ---- steps

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def step(self, target_params: dict, state: TrainState, texts: Texts, rows: jax.Array) -> tuple[TrainState, Losses]:
        """rows: [B] int32, rows of the texts."""
        tokens, starts, ends = (x[rows] for x in texts)
        # Anchors are spread over each answer; the last one has a token after it.
        shape = (rows.shape[0], self.args.anchors)
        offset = jax.random.uniform(jax.random.fold_in(self.anchor_key, state.step), shape)
        share = (jnp.arange(shape[1], dtype=jnp.float32)[None, :] + offset) / shape[1]
        room = ends - 1 - starts
        anchors = starts[:, None] + jnp.minimum((share * room[:, None]).astype(jnp.int32), room[:, None] - 1)

        model = nnx.merge(self.target_graph, target_params)
        stream, _, taps = model(tokens, FullContext.create(tokens.shape[1]), taps=self.config.target_layer_ids)
        logits = model.logits(stream)
        positions = self.config.num_predictions
        index, after, exists = following(tokens, anchors, ends, positions)
        teacher = jnp.take_along_axis(logits, index[:, :, None] - 1, axis=1).reshape(-1, positions, logits.shape[-1])
        first = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
        before = jnp.concatenate([first, after[:, :-1]], axis=1)
        decay = jnp.exp(-jnp.arange(positions, dtype=jnp.float32) / self.args.gamma)
        weights = jnp.where(exists, decay[None, :], 0)
        embedding, lm_head = model.embedding[...], model.lm_head[...]

        def loss(masters: dict) -> tuple[jax.Array, Losses]:
            draft = nnx.merge(self.graph, self.shipped(masters))
            hidden = block_hidden(draft, embedding, tokens, taps, anchors)
            losses = block_losses(draft, hidden, lm_head, teacher / self.args.teacher_temperature, before, weights)
            return losses.draft + losses.selector, losses

        gradients, losses = jax.grad(loss, has_aux=True)(state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        step = state.step + 1
        # Early on the average follows faster, so that it forgets the first values.
        rate = jnp.maximum(1 - self.args.average, 1 / (1 + fp32(step) / 10))
        average = jax.tree.map(lambda old, new: old + rate * (new - old), state.average, params)
        return TrainState(params, average, optimizer, step), losses

    # ---- measuring

    def evaluate(self, params: dict, texts: Texts) -> dict[str, Any]:
        """Decodes the answers on paper: what the draft would have proposed, and how much of it is what the texts say.

        Args:     params: as shipped.
        Returns:  tokens committed per verification, as a mean over all verifications, with chain, tree and oracle; recall
                  of the right token among the candidates, by position and over all; accuracy of the selector.
        """
        rooms = texts.ends - 1 - texts.starts
        room = -(-int(rooms.max()) // 64) * 64  # few shapes, since each is compiled
        rows = np.resize(np.arange(len(rooms)), -(-len(rooms) // EVAL_SEQUENCES) * EVAL_SEQUENCES)
        batches = [
            self._evaluate(params, self.target_params, Texts(*(x[batch] for x in texts)), room)
            for batch in rows.reshape(-1, EVAL_SEQUENCES)
        ]
        found = Acceptance(*(np.concatenate(parts)[: len(rooms)] for parts in zip(*jax.device_get(batches), strict=True)))
        exists = found.exists & (np.arange(room)[None, :] < rooms[:, None])[:, :, None]
        total = exists.sum()
        return {
            **{name: committed_per_round(getattr(found, name), rooms) for name in ("chain", "tree", "oracle")},
            "recall": float((found.recalled & exists).sum() / total),
            "recall_by_position": (
                (found.recalled & exists).sum(axis=(0, 1)) / np.maximum(exists.sum(axis=(0, 1)), 1)
            ).tolist(),
            "selector_accuracy": float((found.selected & exists).sum() / total),
        }

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def _evaluate(self, params: dict, target_params: dict, texts: Texts, room: int) -> Acceptance:
        draft, model = nnx.merge(self.graph, params), nnx.merge(self.target_graph, target_params)
        tokens, starts, ends = texts
        _, _, taps = model(tokens, FullContext.create(tokens.shape[1]), taps=self.config.target_layer_ids)
        anchors = jnp.minimum(starts[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :], ends[:, None] - 2)
        anchor = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
        _, after, exists = following(tokens, anchors, ends, self.config.num_predictions)
        after = jnp.where(exists, after, -1)

        hidden = block_hidden(draft, model.embedding[...], tokens, taps, anchors)
        ids, unary = draft.candidates(hidden, model.lm_head[...], self.num_tokens)
        lattice = draft.lattice(hidden, anchor, ids, unary)
        # The target's choice at a node of the right path is the text's next token; off that path nothing is accepted.
        choice = jnp.pad(after, ((0, 0), (0, 1)), constant_values=-1)

        def committed(speculation: Speculation, size: int) -> jax.Array:
            greedy = SamplingParams.create(anchor.shape[0])
            nodes, _ = propose(speculation, lattice, ids, anchor, anchors.reshape(-1), greedy, size)
            return tree.accept(nodes, jnp.take_along_axis(choice, nodes.depth, axis=1))[0]

        before = jnp.concatenate([anchor[:, None], after[:, :-1]], axis=1)
        best = jnp.argmax(selector_scores(draft, hidden, before, ids, unary), axis=-1)
        selected = jnp.take_along_axis(ids, best[:, :, None], axis=2)[:, :, 0] == after
        recalled = jnp.any(ids == after[:, :, None], axis=-1)

        found = Acceptance(
            chain=committed(Speculation.CHAIN, self.config.block_size),
            tree=committed(Speculation.TREE, TREE_SIZE),
            oracle=1 + jnp.sum(jnp.cumprod(recalled.astype(jnp.int32), axis=1), axis=1),
            recalled=recalled,
            selected=selected,
            exists=exists,
        )
        return jax.tree.map(lambda x: x.reshape(*anchors.shape, *x.shape[1:]), found)


def committed_per_round(lengths: np.ndarray, rooms: np.ndarray) -> float:
    """Tokens after an answer's first one, divided by the verifications that they take.

    Args:     lengths: [N, A], tokens that a verification at the a-th token of an answer commits.  rooms: [N], tokens after
              the first of each answer; a verification commits none beyond them.
    """
    rounds = 0
    for row, room in zip(lengths.tolist(), rooms.tolist(), strict=True):
        place = 0
        while place < room:
            place += row[place]
            rounds += 1
    return float(rooms.sum()) / rounds


def compute_dtype() -> jnp.dtype:
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


class Fit(NamedTuple):
    """Where the draft was best: the step of the longest acceptance on held-out texts, and the parameters it would ship."""

    params: dict
    step: int
    held_out: dict[str, Any]  # what `Trainer.evaluate` measured there
    log: list[dict]  # one row per evaluation


def fit(trainer: Trainer, texts: Texts, held_out: Texts) -> Fit:
    """Trains for args.steps, or until args.max_seconds are over. Raises InputError if the loss is not finite."""
    args, rng, console = trainer.args, np.random.default_rng(trainer.args.seed), trainer.console
    started = time.perf_counter()
    texts = jax.device_put(texts)
    best: Fit | None = None
    batches, log, losses = iter(()), [], []
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.steps)
        for step in range(1, args.steps + 1):
            if (batch := next(batches, None)) is None:
                batches = epoch([texts], args.batch, rng)
                batch = next(batches)
            rows = jnp.asarray(batch[1], jnp.int32)
            trainer.state, step_losses = trainer.step(trainer.target_params, trainer.state, texts, rows)
            losses.append(step_losses)
            progress.update(task, completed=step)
            if step % args.eval_every and step != args.steps:
                continue
            draft_loss, selector_loss = (float(np.mean(x)) for x in zip(*jax.device_get(losses), strict=True))
            if not math.isfinite(draft_loss + selector_loss):
                raise InputError("the loss is not a finite number: lower --learning-rate")
            losses = []
            params = trainer.shipped(trainer.state.average)
            found = trainer.evaluate(params, held_out)
            row = {
                "step": step,
                "draft_loss": round(draft_loss, 4),
                "selector_loss": round(selector_loss, 4),
                **{name: round(value, 4) for name, value in found.items() if isinstance(value, float)},
                "seconds": round(time.perf_counter() - started, 1),
            }
            log.append(row)
            if best is None or found["tree"] > best.held_out["tree"]:
                best = Fit(params, step, found, log)
            progress.update(task, description=f"chain {found['chain']:.2f}  tree {found['tree']:.2f}")
            progress.console.print(" ".join(f"{key}={value}" for key, value in row.items()))
            if row["seconds"] > args.max_seconds:
                break
    return best


def check_saves(params: dict, config_json: dict[str, Any], directory: Path) -> None:
    """Saves a draft on trial: what `save_draft` refuses should not wait for the end of the training.

    Raises: InputError, CheckpointError or OSError.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory}: not a directory, and the draft's shall be written there")
    if config_json["dtype"] != "bfloat16":
        raise InputError(f"dtype = {config_json['dtype']!r}: the draft is saved in bfloat16")
    if directory.exists() and not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{directory}: may not be written to")
    # `save_draft` writes beside the directory, whose place a link may set, before it moves files there.
    with tempfile.TemporaryDirectory(prefix=".draft.", dir=directory.resolve().parent) as trial:
        save_draft(params, config_json, Path(trial, "draft"), dtype=jnp.bfloat16)


def train_draft(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stage `draft`: writes texts, trains on them, measures, and writes the draft with its card into `<output>/draft`."""
    started = time.perf_counter()
    problems, dev_problems = read_problems(args.train), read_problems(args.dev)
    if args.held_out >= len(problems):
        raise InputError(f"--held-out {args.held_out}: {args.train} holds {len(problems)} problems")
    target = read_config(args.output)
    tokenizer = Tokenizer.from_file(str(args.output / "tokenizer.json"))
    config_json = make_config(target, tokenizer.token_to_id(MASK), dict(args.config))
    config = DraftConfig.from_hf(config_json)
    config.check_fits(target)
    num_parameters = sum(spec.size for spec in draft_tensors(config))
    target_parameters = sum(spec.size for spec in text_tensors(target))
    params, _ = load_params(args.output, target, dtype=compute_dtype())
    trainer = Trainer(target, params, config, tokenizer, args, console)
    directory = args.output / "draft"
    check_saves(trainer.state.params, config_json, directory)

    encoded = encode(tokenizer, problems)
    train_questions, held_out_questions = encoded[: -args.held_out], encoded[-args.held_out :]
    dev_questions = encode(tokenizer, dev_problems)[: args.answers]
    asked = [*held_out_questions, *dev_questions]
    if (longest := max(end for _, end in asked)) + 2 > args.room:
        raise InputError(f"--room {args.room}: there are questions of {longest} tokens, and an answer needs two")
    tokens = np.full((len(asked), args.room), trainer.pad, np.int32)
    for row, (ids, end) in enumerate(asked):
        tokens[row, :end] = ids[:end]
    given = np.array([end for _, end in asked], np.int32)
    answers = trainer.write(tokens, given, np.zeros(len(asked), np.float32), seed=0)
    if len(answers.tokens) < len(asked):
        raise InputError(f"{args.output}: some of its answers are shorter than two tokens")
    held_out, dev = (Texts(*(x[part] for x in answers)) for part in (slice(args.held_out), slice(args.held_out, None)))

    temperatures = np.resize(np.float32(ANSWER_TEMPERATURES), args.texts)
    prompts = make_prompts(train_questions, args.texts, args.cut, args.length, trainer.pad, np.random.default_rng(args.seed))
    texts = trainer.write(*prompts, temperatures, seed=len(asked))
    if not len(texts.tokens):
        raise InputError(f"{args.output}: wrote no text of at most {args.length} tokens that has an answer")
    writing_seconds = time.perf_counter() - started
    answer_tokens = int((texts.ends - texts.starts).sum())
    console.print(
        f"{len(texts.tokens)} texts with {answer_tokens} tokens of answers in {writing_seconds:.0f} s; "
        f"{num_parameters:,} parameters, the target has {target_parameters:,}; {jax.devices()[0].device_kind}"
    )

    training_started = time.perf_counter()
    best = fit(trainer, texts, held_out)
    training_seconds = time.perf_counter() - training_started
    results = {
        "command": command_line(args),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters,
        "target_parameters": target_parameters,
        "target_layers": target.num_hidden_layers,
        "texts": len(texts.tokens),
        "answer_tokens": answer_tokens,
        "steps": best.log[-1]["step"],
        "best_step": best.step,
        "held_out_problems": args.held_out,
        "dev_problems": len(dev.tokens),
        "loss": {
            name: next(row[name] for row in best.log if row["step"] == best.step) for name in ("draft_loss", "selector_loss")
        },
        "held_out": best.held_out,
        "dev": trainer.evaluate(best.params, dev),
        "seconds_writing": writing_seconds,
        "seconds_training": training_seconds,
        "seconds_total": time.perf_counter() - started,
    }
    save_draft(best.params, config_json, directory, dtype=jnp.bfloat16)
    write_log(directory / "training_log.csv", best.log)
    (directory / "README.md").write_text(model_card(results, config, args), encoding="utf-8")
    return results | {"files": {f"{directory.name}/{name}": size for name, size in directory_bytes(directory).items()}}


# ---------------------------------------------------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} --stage draft",
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--stage", choices=("draft",), required=True)
    add("--train", type=Path, required=True, help="GSM8K train.jsonl, for its questions")
    add("--dev", type=Path, required=True, help="GSM8K problems to measure the result on")
    add("--output", type=Path, required=True, help="directory of the target; the draft goes to `draft` inside")
    add("--seed", type=int, default=0, help="same seed, same result; on a GPU with --xla_gpu_deterministic_ops only")
    add("--texts", type=positive_int, default=98_304, help="texts that the target writes to train on")
    add("--write-batch", type=positive_int, default=4096, help="texts that are written at once")
    add("--cut", type=float, default=0.5, help="share of the texts of whose question the target invents the end")
    add("--length", type=positive_int, default=256, help="tokens of a training text; longer ones are not finished")
    add("--room", type=positive_int, default=384, help="tokens of a held-out or dev question and its answer, at most")
    add("--steps", type=positive_int, default=18_000)
    add("--batch", type=positive_int, default=32, help="texts per step")
    add("--anchors", type=positive_int, default=32, help="blocks per text and step")
    add("--learning-rate", type=float, default=4e-3, help="its peak")
    add("--warmup", type=int, default=500, help="steps until the peak, at most half of all")
    add("--weight-decay", type=float, default=0.01)
    add("--gamma", type=float, default=4.0, help="the position i after the anchor weighs exp(-(i - 1) / gamma) in the loss")
    add("--teacher-temperature", type=float, default=0.5, help="of the target's distribution that the draft learns")
    add("--average", type=float, default=0.999, help="weight of the past in the average that is shipped")
    add("--max-seconds", type=float, default=math.inf, help="end training early, at the first measurement after this time")
    add("--eval-every", type=positive_int, default=2000, help="steps between measurements on held-out problems")
    add("--held-out", type=positive_int, default=373, help="last problems of --train, to choose the best step by")
    add("--answers", type=positive_int, default=100, help="dev questions whose answers are decoded on paper at the end")
    add("--config", type=setting, nargs="+", default=[], metavar="KEY=VALUE", help="fields of config.json, values as JSON")
    add("--json", action="store_true", help="print the results as one JSON object, the last line")
    args = parser.parse_args(argv)
    if not 0 <= args.cut <= 1:
        parser.error(f"--cut {args.cut}: allowed are 0 to 1")
    if not 0 <= args.average < 1:  # 1 would ship the first values
        parser.error(f"--average {args.average}: allowed are 0 and above, below 1")
    for name in ("gamma", "teacher_temperature"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0")
    return args


def model_card(results: dict[str, Any], config: DraftConfig, args: argparse.Namespace) -> str:
    """README.md of the draft, from the results of `train_draft`."""
    held_out, dev = results["held_out"], results["dev"]
    lengths = "\n".join(f"| {name} | {held_out[name]:.2f} | {dev[name]:.2f} |" for name in ("chain", "tree", "oracle"))
    recall = "\n".join(
        f"| {i} | {a:.1%} | {b:.1%} |"
        for i, (a, b) in enumerate(zip(held_out["recall_by_position"], dev["recall_by_position"], strict=True), start=1)
    )
    temperatures = ", ".join(f"{temperature:g}" for temperature in ANSWER_TEMPERATURES)
    layers = " and ".join(f"{count} {kind}" for kind, count in collections.Counter(map(str, config.layer_types)).items())
    card = f"""\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# {args.output.name}: draft

A DFlash2 draft of {results["parameters"] / 1e6:.2f} million parameters for {args.output.name}, whose text decoder has
{results["target_parameters"] / 1e6:.2f} million. One forward pass proposes candidates for the next {config.num_predictions}
tokens.

## Model

- `DFlash2DraftModel` in bfloat16: {config.num_hidden_layers} layers ({layers}, window {config.sliding_window}) of width
  {config.hidden_size}, FFN {config.intermediate_size}, {config.num_attention_heads} query and {config.num_key_value_heads}
  key/value heads of {config.head_dim}.
- Taps: outputs of layers {", ".join(map(str, config.target_layer_ids))} of the target's {results["target_layers"]}.
- Blocks of {config.block_size}; convolutions of {config.conv_kernel_size} taps, {config.conv_group_size} channels a group;
  a selector of rank {config.selector_rank} over {config.selector_top_k} candidates per position.
- Embedding and lm_head are the target's.

## Training

- Text: {results["texts"]} texts that {args.output.name} wrote itself, with {results["answer_tokens"]} tokens of answers, and
  nothing else. Their questions begin as problems of GSM8K's `train.jsonl` do (Cobbe et al., arXiv 2110.14168; OpenAI, MIT
  licence); of {args.cut:.0%} of them the target invents the end, at temperature 1. The temperatures of the answers are
  {temperatures}, in equal shares. A text, question and answer, ends at {args.length} tokens, finished or not.
- {results["steps"]} steps of {args.batch} texts with {args.anchors} blocks each, AdamW. Loss: divergence of the draft from the
  target's distribution at temperature {args.teacher_temperature:g}, and cross-entropy of the selector towards the target's
  choice; position i weighs exp(-(i-1)/{args.gamma:g}). What is shipped is a running average of the weights.
- The weights are those of step {results["best_step"]}, where the target's answers to the last
  {results["held_out_problems"]} problems of `train.jsonl`, held out for this, took the fewest verifications with a tree.
  `training_log.csv` has the others. `dev.jsonl`, problems of GSM8K's test split, chose nothing.
- {results["device"]}, jax {results["jax"]}: {results["seconds_writing"]:.0f} s of writing,
  {results["seconds_training"]:.0f} s of training, {results["seconds_total"]:.0f} s in all, compilation included.

The data are `train.jsonl` and `test.jsonl` of github.com/openai/grade-school-math, the latter (or a part of it) as
`dev.jsonl`.

```bash
{results["command"]}
```

## Results

Greedy answers to the held-out questions and to {results["dev_problems"]} of `dev.jsonl`. Tokens committed per verification, the
target's own included: the tokens after the first of every answer, divided by the verifications that they took.

| | held out | dev |
|---|---|---|
{lengths}

`chain` follows the selector's picks, `tree` has {TREE_SIZE} nodes with the anchor, `oracle` would always pick the right
candidate. The losses at the chosen step were {results["loss"]["draft_loss"]:.3f} (draft) and
{results["loss"]["selector_loss"]:.3f} (selector) on training texts. After the right tokens the selector picks the right one
in {held_out["selector_accuracy"]:.1%} of the held-out cases and {dev["selector_accuracy"]:.1%} on dev. The right token is
among the {config.selector_top_k} candidates in {held_out["recall"]:.1%} and {dev["recall"]:.1%}; by position:

| position | held out | dev |
|---|---|---|
{recall}
"""
    return wrap(card)


def wrap(markdown: str) -> str:
    """Fills paragraphs and list items to 128 columns; front matter, headings, tables and code stay as they are."""

    def fill(text: str, indent: str) -> str:
        return textwrap.fill(
            " ".join(text.split()), 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    blocks = []
    for block in markdown.removesuffix("\n").split("\n\n"):
        if block.startswith("- "):
            block = "\n".join(fill(item, "  ") for item in re.split(r"\n(?=- )", block))
        elif not block.startswith(("---", "#", "|", "```")):
            block = fill(block, "")
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"
