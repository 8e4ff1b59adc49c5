"""Prefill and the decode step as pure functions of (model, state).

    state, out = step(model, state)        step = jax.jit(muse_jax.decode, donate_argnames="state")

    draft:   block [anchor, mask, ...] -> candidates and lattice -> tree or chain of proposed tokens
    verify:  one target forward over its nodes -> logits, keys and values, taps
    accept:  walk down the tree as far as the target's choices are in it; one more token comes from the last node
    commit:  write the accepted rows to the target's cache, and what their taps give to the draft's

A step is one dispatch: no host transfer, fixed shapes, the caches donated and updated in place. Without a draft the tree is
its root, and a step emits one token. With a mesh each function runs under `jax.shard_map`: every device has its part of
parameters and caches and all of everything else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ffi.verify import STATUS_SIZE, problem
from muse_jax import sharding, tree
from muse_jax.config import ModelConfig
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import FullContext, KVCache, PrefillContext
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark, Routing
from muse_jax.sampling import SamplingParams, choose
from muse_jax.speculation import Speculation, propose, target_choice
from muse_jax.tree import Tree

EVERYWHERE = PartitionSpec()
NO_TOKEN = -1  # fills `StepOutput.tokens` beyond `count`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "draft_params"],
    meta_fields=["graph", "draft_graph", "speculation", "num_rows", "valid_vocab", "mesh"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded target and its draft as a plain pytree: arrays in nested dicts (cheap to flatten), everything else static.

    params, draft_params: the parameter trees of `MuseSpark` and `DFlash2`; no draft without speculation.
    graph, draft_graph: their structures; `module` and `draft` join the two while tracing.
    num_rows: nodes that a step verifies, the root included, and the most tokens that it can emit; 1 without speculation.
    valid_vocab: ids below it may be chosen; the others pad the vocabulary or are unknown to the tokenizer.
    mesh: the devices that share the work, None for one device alone; the modules' `sharding` is for as many.
    """

    params: dict
    draft_params: dict | None
    graph: nnx.GraphDef
    draft_graph: nnx.GraphDef | None
    speculation: Speculation
    num_rows: int
    valid_vocab: int
    mesh: Mesh | None

    @classmethod
    def create(
        cls,
        module: MuseSpark,
        params: Any = None,
        *,
        draft: DFlash2 | None = None,
        draft_params: Any = None,
        speculation: str = Speculation.TREE,
        tree_size: int = 16,
        valid_vocab: int | None = None,
        mesh: Mesh | None = None,
    ) -> Model:
        """Takes the modules apart.

        Args:     params, draft_params: trees to use instead of the modules' own (which may be abstract).
                  speculation: without a draft there is none, whatever this says.
                  tree_size: most nodes that a step verifies; a chain has at most the draft's block_size.
        Raises:   ValueError if the modules were made for another number of devices than the mesh has.
        """
        devices = None if mesh is None else mesh.size
        if any(part is not None and part.sharding.mesh_size != devices for part in (module, draft)):
            raise ValueError(f"the modules' sharding is not for the mesh's {devices} devices")
        graph, own = nnx.split(module)
        draft_graph = None
        speculation = Speculation.OFF if draft is None else Speculation(speculation)
        if speculation == Speculation.OFF:
            draft_params = None
        else:
            draft_graph, own_draft = nnx.split(draft)
            draft_params = nnx.to_pure_dict(own_draft) if draft_params is None else draft_params
        return cls(
            params=nnx.to_pure_dict(own) if params is None else params,
            draft_params=draft_params,
            graph=graph,
            draft_graph=draft_graph,
            speculation=speculation,
            num_rows=rows_of_step(speculation, tree_size, None if draft is None else draft.config),
            valid_vocab=module.config.vocab_size if valid_vocab is None else valid_vocab,
            mesh=mesh,
        )

    @property
    def module(self) -> MuseSpark:
        return nnx.merge(self.graph, self.params)

    @property
    def draft(self) -> DFlash2:
        return nnx.merge(self.draft_graph, self.draft_params)

    @functools.cached_property
    def config(self) -> ModelConfig:
        return self.module.config

    @functools.cached_property
    def draft_config(self) -> DraftConfig | None:
        return None if self.draft_params is None else self.draft.config

    @functools.cached_property
    def specs(self) -> Model:
        """Where each parameter lives on the mesh."""
        how, backend = self.module.sharding, self.module.backend

        def tree(config: ModelConfig | DraftConfig | None, params: dict | None) -> dict | None:
            if config is None:
                return None
            return backend.stored_specs(parameter_tree(config, lambda spec: sharding.param_spec(spec, how)), params)

        specs = {"params": tree(self.config, self.params), "draft_params": tree(self.draft_config, self.draft_params)}
        return dataclasses.replace(self, **specs)

    @property
    def cache_specs(self) -> tuple[KVCache, KVCache | None]:
        """Where the caches of target and draft live on the mesh."""

        def of(config: ModelConfig | DraftConfig | None) -> KVCache | None:
            if config is None:
                return None
            return KVCache([(sharding.cache_spec(config),) * 2] * config.num_hidden_layers, EVERYWHERE)

        return of(self.config), of(self.draft_config)

    @property
    def logit_spec(self) -> PartitionSpec:
        """Where logits [B, T, V] live on the mesh."""
        return PartitionSpec(None, None, sharding.AXIS if self.module.vocab_ranks.devices > 1 else None)


def rows_of_step(speculation: str, tree_size: int, draft_config: DraftConfig | None) -> int:
    """Nodes that a step verifies, for `Model.create`."""
    if draft_config is None or speculation == Speculation.OFF:
        return 1
    return tree_size if speculation == Speculation.TREE else min(tree_size, draft_config.block_size)


@dataclasses.dataclass
class DecodeState:
    """Everything a request carries from step to step. B sequences, each at its own length."""

    cache: KVCache
    draft_cache: KVCache | None  # keys and values of the committed tokens' features; None without speculation
    length: jax.Array  # [B] int32, committed positions; `token` has the position after them
    token: jax.Array  # [B] int32, the last emitted token, which has no KV yet: the anchor
    remaining: jax.Array  # [B] int32, tokens that may still be emitted
    done: jax.Array  # [B] bool
    stop_ids: jax.Array  # [B, S] int32
    sampling: SamplingParams
    num_rows: int  # static: rows of a step that the caches have room for

    def _flatten(self) -> tuple[tuple, int]:
        length = self.length
        if isinstance(length, jax.Array) and not isinstance(length, jax.core.Tracer) and length.is_deleted():
            raise ValueError("this DecodeState was donated to an earlier step; use the state which that step returned")
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)[:-1]), self.num_rows


jax.tree_util.register_pytree_node(DecodeState, DecodeState._flatten, lambda rows, fields: DecodeState(*fields, rows))


class StepError(RuntimeError):
    """A step of the megakernel failed. It emitted nothing and committed nothing: the state that it returned may be decoded."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "count", "accepted", "done", "status"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What one step emitted.

    tokens: [B, model.num_rows] int32; row b's new tokens, in order, are the first count[b]; NO_TOKEN beyond.
    count: [B] int32, after clipping at a stop token (kept, last) or the length limit; 0 for rows that were done.
    accepted: [B] int32, accepted nodes, root included, before clipping: accepted - 1 drafted tokens and one of the target's.
    done: [B] bool, after the step.
    status: [8] int32, of the megakernel: zeros, or why the step failed (`check`); then count and accepted are 0, and the
      state is as before. None: steps of this backend cannot fail.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    done: jax.Array
    status: jax.Array | None = None

    def check(self) -> None:
        """Raises StepError if the step failed: with one line that says where and why. Waits for the step, if it has a status.

        `Muse.generate` and `Muse.decode` do this. Who jits `muse_jax.decode` does it where the tokens are read; a loop that
        does not would repeat a step that fails each time for ever.
        """
        check_status(self.status)


def check_status(status: jax.Array | None) -> None:
    """`StepOutput.check`."""
    failed = None if status is None else problem(jax.device_get(status))
    if failed is not None:
        raise StepError(f"the step emitted nothing, and its state is as before: {failed}")


def _on_mesh(model: Model, function: Callable, in_specs: tuple, out_specs: Any, *args: Any) -> Any:
    """function(model, *args), on every device of the model's mesh."""
    if model.mesh is None:
        return function(model, *args)
    # Nothing here is differentiated, so replication need not be tracked.
    specs = {"in_specs": (model.specs, *in_specs), "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(function, mesh=model.mesh, **specs)(model, *args)


def full_logits(model: Model, tokens: jax.Array) -> jax.Array:
    """Logits of whole right-padded sequences, without a cache. tokens: [B, T]. Returns [B, T, V] fp32."""

    def run(model: Model, tokens: jax.Array) -> jax.Array:
        module = model.module
        stream, _, _ = module(tokens, FullContext.create(tokens.shape[1]))
        return module.logits(stream)

    return _on_mesh(model, run, (EVERYWHERE,), model.logit_spec, tokens)


def empty_caches(model: Model, batch: int, slots: int) -> tuple[KVCache, KVCache | None]:
    """Caches of target and draft for sequences of up to `slots` positions."""
    how = model.module.sharding

    def empty(config: ModelConfig | DraftConfig, dtype: jnp.dtype) -> KVCache:
        return KVCache.empty(config, batch, slots, model.num_rows, dtype, sharding.cache_heads(config, how))

    cache = empty(model.config, model.module.dtype)
    draft_cache = None if model.draft_params is None else empty(model.draft_config, model.draft.dtype)
    if model.mesh is None:
        return cache, draft_cache
    where = jax.tree.map(lambda spec: NamedSharding(model.mesh, spec), model.cache_specs)
    return jax.lax.with_sharding_constraint((cache, draft_cache), where)


def prefill_chunk(
    model: Model,
    caches: tuple[KVCache, KVCache | None],
    last: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
) -> tuple[tuple[KVCache, KVCache | None], jax.Array]:
    """Runs a chunk of right-padded prompts.

    Args:     caches: of target and draft.  last: [B, D], the stream of each prompt's last token, if an earlier chunk held it.
              tokens: [B, T].  start: int32 scalar, position of the chunk.  lengths: [B], of the whole prompts.
    Returns:  the new caches and `last`.
    """
    specs = model.cache_specs
    in_specs, out_specs = (specs, *(EVERYWHERE,) * 4), (specs, EVERYWHERE)
    return _on_mesh(model, _prefill_chunk, in_specs, out_specs, caches, last, tokens, start, lengths)


def _prefill_chunk(model: Model, caches: tuple, last: jax.Array, tokens: jax.Array, start: jax.Array, lengths: jax.Array):
    num_tokens = tokens.shape[1]
    cache, draft_cache = caches
    context = PrefillContext.create(start, lengths, num_tokens)
    draft = None if draft_cache is None else model.draft
    stream, layers, taps = model.module(tokens, context, cache, taps=() if draft is None else draft.config.target_layer_ids)
    cache = KVCache(layers, context.ring_positions(cache.ring_positions))
    if draft is not None:
        draft_cache = draft_cache.fill(draft.context_keys_values(taps, context.positions), context, draft.config)
    row = lengths - 1 - start
    here = jnp.take_along_axis(stream, jnp.clip(row, 0, num_tokens - 1)[:, None, None], axis=1)[:, 0]
    return (cache, draft_cache), jnp.where(((row >= 0) & (row < num_tokens))[:, None], here, last)


def first_token(
    model: Model,
    caches: tuple[KVCache, KVCache | None],
    last: jax.Array,
    lengths: jax.Array,
    max_new_tokens: jax.Array,
    stop_ids: jax.Array,
    sampling: SamplingParams,
) -> tuple[DecodeState, StepOutput]:
    """Chooses the token after each prompt.

    Args:     last: [B, D], the stream of the prompts' last tokens.  max_new_tokens: [B].  stop_ids: [B, S].
    """

    def run(model: Model, last: jax.Array, lengths: jax.Array, sampling: SamplingParams) -> jax.Array:
        logits = [part[:, 0] for part in model.module.logit_parts(last[:, None, :])]
        return choose(logits, lengths, sampling, model.valid_vocab, model.module.vocab_ranks)

    token = _on_mesh(model, run, (EVERYWHERE,) * 3, EVERYWHERE, last, lengths, sampling)
    cache, draft_cache = caches
    state = DecodeState(
        cache=cache,
        draft_cache=draft_cache,
        length=lengths,
        token=jnp.zeros_like(lengths),
        remaining=max_new_tokens,
        done=jnp.zeros(lengths.shape, bool),
        stop_ids=stop_ids,
        sampling=sampling,
        num_rows=model.num_rows,
    )
    state, out = _emit(model, state, token[:, None], jnp.ones_like(lengths))
    # Of the structure of a step's: a loop may carry either.
    has_status = model.module.backend.reports_status
    return state, dataclasses.replace(out, status=jnp.zeros(STATUS_SIZE, jnp.int32) if has_status else None)


def decode(model: Model, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """One step: each unfinished sequence emits the accepted tokens and the one after them.

    A pure function. Jit it with `donate_argnames="state"`, so that the caches are updated in place; a state that was donated
    cannot be used again.
    """
    return decode_and_trace(model, state)[:2]


def decode_and_trace(model: Model, state: DecodeState) -> tuple[DecodeState, StepOutput, tuple[Tree, jax.Array, jax.Array]]:
    """`decode`, which also returns the tree that was verified, the path [B, N] of accepted nodes (the first `accepted`), and
    the target's logits [B, N, V] at the nodes."""
    if state.length.ndim != 1:
        raise ValueError("decode takes a batch as it is, without jax.vmap: give several prompts to prefill")
    if state.num_rows < model.num_rows or (model.draft_params is not None and state.draft_cache is None):
        raise ValueError(
            f"this DecodeState has room for steps of {state.num_rows} rows, {'with' if state.draft_cache else 'without'} a "
            f"draft; the model ({model.speculation}) has steps of {model.num_rows}: prefill with it"
        )
    heads = sharding.cache_heads(model.config, model.module.sharding)
    if state.cache.layers[0][0].shape[1] != heads:
        raise ValueError("this DecodeState was made with another mesh: prefill with the model that decodes")
    specs = _state_specs(model, state)
    out_specs = (specs, EVERYWHERE, (EVERYWHERE, EVERYWHERE, model.logit_spec))
    return _on_mesh(_refuse_derivatives(model), _step, (specs,), out_specs, state)


def _state_specs(model: Model, state: DecodeState) -> DecodeState:
    everywhere = {field.name: EVERYWHERE for field in dataclasses.fields(DecodeState)[:-1]}
    cache, draft_cache = model.cache_specs
    caches = {"cache": cache, "draft_cache": draft_cache if state.draft_cache is not None else None}
    return DecodeState(**(everywhere | caches), num_rows=state.num_rows)


def _step(model: Model, state: DecodeState) -> tuple[DecodeState, StepOutput, tuple[Tree, jax.Array, jax.Array]]:
    with jax.named_scope("draft"):
        nodes, ids, proposal = _propose(model, state)
    return verify_and_commit(model, state, nodes, ids, proposal)


def verify_and_commit(
    model: Model,
    state: DecodeState,
    nodes: Tree,
    ids: jax.Array | None = None,
    proposal: jax.Array | None = None,
    routing: Sequence[Routing | None] | None = None,
) -> tuple[DecodeState, StepOutput, tuple[Tree, jax.Array, jax.Array]]:
    """A step after its draft, on each device of a mesh by itself.

    Args:     nodes, ids, proposal: from `propose_nodes`; a tree of any tokens will do.  routing: of each layer, in place of the
              router's, so that a benchmark knows how many experts are read.
    """
    logits, rows, taps, status = _verify(model, state, nodes, routing)
    ranks = model.module.vocab_ranks
    with jax.named_scope("sampling"):
        choice = target_choice(logits, nodes, state.length, state.sampling, model.valid_vocab, ids, proposal, ranks)
    accepted, path = tree.accept(nodes, choice)
    if status is not None:
        # A failed step commits nothing: what it writes is beyond the committed positions. Taps that are no numbers would stay
        # in the draft's cache, where hidden keys count as zero times their value.
        failed = status[0] != 0
        accepted = jnp.where(failed, 0, accepted)
        taps = None if taps is None else jnp.where(failed, 0.0, taps)
    emitted = jnp.take_along_axis(choice, path, axis=1)
    new, out = _emit(model, state, emitted, accepted)
    out = dataclasses.replace(out, status=status)
    with jax.named_scope("commit"):
        cache, draft_cache = _commit(model, state, rows, taps, path, emitted)
    new = dataclasses.replace(new, cache=cache, draft_cache=draft_cache, length=state.length + out.count)
    return new, out, (nodes, path, ranks.join(logits, -1))


@jax.custom_jvp
def _refuse_derivatives(model: Model) -> Model:
    return model


@_refuse_derivatives.defjvp
def _(primals: tuple, tangents: tuple) -> NoReturn:
    raise ValueError("decode chooses tokens and has no derivative: differentiate the logits of whole sequences instead")


def propose_nodes(model: Model, state: DecodeState) -> tuple[Tree, jax.Array | None, jax.Array | None]:
    """The nodes to verify; candidates [B, P, K]; for a sampled chain the distributions that its tokens come from."""
    return _on_mesh(model, _propose, (_state_specs(model, state),), EVERYWHERE, state)


def _propose(model: Model, state: DecodeState) -> tuple[Tree, jax.Array | None, jax.Array | None]:
    if model.draft_params is None:
        no_tokens = jnp.zeros((state.token.shape[0], 0), jnp.int32)
        return tree.chain(state.token, no_tokens, no_tokens.astype(jnp.float32)), None, None
    draft = model.draft
    context = draft.block_context(state.draft_cache, state.length)
    block = draft.embed(state.token, model.params["embedding"])
    hidden = draft(block, context, state.draft_cache.layers)[:, 1:]
    ids, unary = draft.candidates(hidden, model.params["lm_head"], model.valid_vocab)
    lattice = draft.lattice(hidden, state.token, ids, unary)
    where = state.token, state.length, state.sampling, model.num_rows
    nodes, proposal = propose(model.speculation, lattice, ids, *where, draft.backend.build_tree)
    return nodes, ids, proposal


def verify(
    model: Model, state: DecodeState, nodes: Tree, routing: Sequence[Routing | None] | None = None
) -> tuple[list[jax.Array], list, jax.Array | None]:
    """Logits [B, N, V] at the nodes, in parts of the vocabulary, keys and values of their rows, and their taps.

    On each device of a mesh by itself.  routing: as in `verify_and_commit`.
    """
    return _verify(model, state, nodes, routing)[:3]


def _verify(model: Model, state: DecodeState, nodes: Tree, routing: Sequence[Routing | None] | None) -> tuple:
    """`Backend.verify` of a step."""
    module = model.module
    taps = () if model.draft_params is None else model.draft.config.target_layer_ids
    return module.backend.verify(module, nodes, state.length, state.cache, taps, routing)


def _commit(
    model: Model, state: DecodeState, rows: list, taps: jax.Array | None, path: jax.Array, emitted: jax.Array
) -> tuple[KVCache, KVCache | None]:
    """Both caches with the rows of the accepted nodes after the committed ones."""
    # A token is never negative: this only makes the writes wait for the choice, and with it for every read of the caches.
    start = state.length + (emitted[:, 0] < 0).astype(jnp.int32)
    if model.draft_params is None:
        return state.cache.commit(rows, start, model.config), None
    cache = state.cache.commit(rows, start, model.config, path)
    draft = model.draft
    positions = state.length[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    features = draft.context_keys_values(jnp.take_along_axis(taps, path[:, :, None], axis=1), positions)
    return cache, state.draft_cache.commit(features, start, draft.config)


def _emit(model: Model, state: DecodeState, tokens: jax.Array, accepted: jax.Array) -> tuple[DecodeState, StepOutput]:
    """Emits the first accepted [B] of tokens [B, T] for each unfinished sequence, and ends those that stop."""
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    accepted = jnp.where(state.done, 0, accepted)
    count = jnp.minimum(accepted, state.remaining)
    is_stop = jnp.any(tokens[:, :, None] == state.stop_ids[:, None, :], axis=2) & (slots < count[:, None])
    stopped = jnp.any(is_stop, axis=1)
    count = jnp.where(stopped, jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, count)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - count
    done = state.done | stopped | (remaining <= 0)
    tokens = jnp.where(slots < count[:, None], tokens, NO_TOKEN)
    tokens = jnp.pad(tokens, ((0, 0), (0, model.num_rows - tokens.shape[1])), constant_values=NO_TOKEN)
    state = dataclasses.replace(state, token=jnp.where(count > 0, last, state.token), remaining=remaining, done=done)
    return state, StepOutput(tokens=tokens, count=count, accepted=accepted, done=done)
