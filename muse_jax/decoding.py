"""Prefill and the decode step as pure functions of (model, state).

    state, out = step(model, state)        step = jax.jit(muse_jax.decode, donate_argnames="state")

A step is one dispatch: no host transfer, fixed shapes, the KV cache donated and updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax.config import ModelConfig
from muse_jax.kv_cache import DecodeContext, FullContext, KVCache, PrefillContext
from muse_jax.model import MuseSpark
from muse_jax.sampling import SamplingParams, choose

NO_TOKEN = -1  # fills `StepOutput.tokens` beyond `count`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=["graph", "tree_size", "valid_vocab"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model as a plain pytree: arrays in a nested dict (cheap to flatten), everything else static.

    params: the parameter tree of `MuseSpark`.
    graph: its structure; `module` joins the two while tracing.
    tree_size: rows of a step that the caches have room for.
    valid_vocab: ids below it may be chosen; the others pad the vocabulary or are unknown to the tokenizer.
    """

    params: dict
    graph: nnx.GraphDef
    tree_size: int
    valid_vocab: int

    @classmethod
    def create(cls, module: MuseSpark, params: Any = None, *, tree_size: int = 16, valid_vocab: int | None = None) -> Model:
        """Takes the module apart. params: a tree to use instead of the module's own (which may be abstract)."""
        graph, state = nnx.split(module)
        params = nnx.to_pure_dict(state) if params is None else params
        return cls(params, graph, tree_size, module.config.vocab_size if valid_vocab is None else valid_vocab)

    @property
    def module(self) -> MuseSpark:
        return nnx.merge(self.graph, self.params)

    @functools.cached_property
    def config(self) -> ModelConfig:
        return self.module.config


@dataclasses.dataclass
class DecodeState:
    """Everything a request carries from step to step. B sequences, each at its own length."""

    cache: KVCache
    length: jax.Array  # [B] int32, committed positions; `token` has the position after them
    token: jax.Array  # [B] int32, the last emitted token, which has no KV yet
    remaining: jax.Array  # [B] int32, tokens that may still be emitted
    done: jax.Array  # [B] bool
    stop_ids: jax.Array  # [S] int32
    sampling: SamplingParams

    def _flatten(self) -> tuple[tuple, None]:
        length = self.length
        if isinstance(length, jax.Array) and not isinstance(length, jax.core.Tracer) and length.is_deleted():
            raise ValueError("this DecodeState was donated to an earlier step; use the state which that step returned")
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)), None


jax.tree_util.register_pytree_node(DecodeState, DecodeState._flatten, lambda _, fields: DecodeState(*fields))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tokens", "count", "accepted", "done"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one step emitted.

    tokens: [B, tree_size] int32; row b's new tokens, in order, are the first count[b]; NO_TOKEN beyond.
    count: [B] int32, after clipping at a stop token (kept, last) or the length limit; 0 for rows that were done.
    accepted: [B] int32, tokens the step accepted before clipping.
    done: [B] bool, after the step.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    done: jax.Array


def full_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """Logits of whole right-padded sequences, without a cache. tokens: [B, T]. Returns [B, T, V] fp32."""
    module = model.module
    stream, _ = module(tokens, FullContext.create(tokens.shape[1]))
    return module.logits(stream)


def empty_cache(model: Model, batch: int, slots: int) -> KVCache:
    """Caches for sequences of up to `slots` positions."""
    module = model.module
    return KVCache.empty(module.config, batch, slots, model.tree_size, module.dtype)


def prefill_chunk(
    model: Model, cache: KVCache, last: jax.Array, tokens: jax.Array, start: jax.Array, lengths: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Runs a chunk of right-padded prompts.

    Args:     last: [B, D], the stream of each prompt's last token, if an earlier chunk held it.  tokens: [B, T].
              start: int32 scalar, position of the chunk.  lengths: [B], of the whole prompts.
    Returns:  the new cache and `last`.
    """
    num_tokens = tokens.shape[1]
    stream, cache = model.module(tokens, PrefillContext.create(start, lengths, num_tokens), cache)
    row = lengths - 1 - start
    here = jnp.take_along_axis(stream, jnp.clip(row, 0, num_tokens - 1)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(((row >= 0) & (row < num_tokens))[:, None], here, last)


def first_token(
    model: Model,
    cache: KVCache,
    last: jax.Array,
    lengths: jax.Array,
    max_new_tokens: jax.Array,
    stop_ids: jax.Array,
    sampling: SamplingParams,
) -> tuple[DecodeState, StepOutput]:
    """Chooses the token after each prompt. last: [B, D], the stream of the prompts' last tokens; max_new_tokens: [B]."""
    logits = model.module.logits(last[:, None, :])[:, 0]
    state = DecodeState(
        cache=cache,
        length=lengths,
        token=jnp.zeros_like(lengths),
        remaining=max_new_tokens,
        done=jnp.zeros(lengths.shape, bool),
        stop_ids=stop_ids,
        sampling=sampling,
    )
    return _emit(model, state, choose(logits, lengths, sampling, model.valid_vocab))


def decode(model: Model, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """One step: each unfinished sequence emits one token.

    A pure function; jit it with `donate_argnames="state"`. The state it is given cannot be used again.
    """
    module = model.module
    context = DecodeContext.create(state.cache, state.length, 1, module.config)
    stream, cache = module(state.token[:, None], context, state.cache)
    logits = module.logits(stream)[:, 0]
    length = state.length + (~state.done).astype(jnp.int32)
    # The choice is for the position after the one that was just committed.
    token = choose(logits, state.length + 1, state.sampling, model.valid_vocab)
    return _emit(model, dataclasses.replace(state, cache=cache, length=length), token)


def _emit(model: Model, state: DecodeState, token: jax.Array) -> tuple[DecodeState, StepOutput]:
    """Emits one token [B] per unfinished sequence and ends those that stop."""
    active = ~state.done
    count = active.astype(jnp.int32)
    token = jnp.where(active, token, state.token)
    remaining = state.remaining - count
    done = state.done | jnp.any(token[:, None] == state.stop_ids[None, :], axis=1) | (remaining <= 0)
    first = jnp.arange(model.tree_size)[None, :] < count[:, None]
    tokens = jnp.where(first, token[:, None], NO_TOKEN)
    state = dataclasses.replace(state, token=token, remaining=remaining, done=done)
    return state, StepOutput(tokens=tokens, count=count, accepted=count, done=done)
