"""What users hold: `load` a checkpoint, then `prefill`, `decode`, `generate` and `logits`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from muse_jax import decoding, distributed, sharding
from muse_jax.backends import Request, resolve_backend
from muse_jax.config import ModelConfig
from muse_jax.decoding import DecodeState, Model, StepOutput, rows_of_step
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.model import MuseSpark
from muse_jax.numerics import NUMERICS
from muse_jax.ops import ACTIVATIONS
from muse_jax.sampling import SamplingParams
from muse_jax.speculation import Speculation
from muse_jax.tokenizer import StreamDecoder, Tokenizer

DRAFT_DIRECTORY = "draft"  # of a checkpoint directory
MAX_TREE_SIZE = 32
_SLOT_STEP = 256  # cache sizes are multiples of it, so that requests of similar length share a compiled step
_MIN_CHUNK = 16
_MAX_INT32 = 2**31 - 1
_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

Tokens = Sequence[Sequence[int]] | np.ndarray | jax.Array


def load(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    backend: str = "auto",
    numerics: str = "serving",
    dtype: str | None = None,
    activations: str = "bf16",
    moe_sharding: str = "n",
    max_length: int | None = None,
    draft: str | Path | None = None,
    speculation: str | None = None,
    tree_size: int = 16,
    prefill_chunk: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Muse:
    """Loads a checkpoint directory in HF layout, straight into device arrays.

    Args:
      path: directory with config.json, safetensors and, for text, tokenizer.json.
      mesh: devices that share the work (`muse_jax.sharding.make_mesh`): the same bits for 1, 2, 4 and 8 (on
        CPUs). None: the default device alone, in the form that is fastest for one.
      backend: "xla"; "pallas", fused kernels for Hopper GPUs, on one device of a CPU interpreted, for tests; "megakernel", the
        verify step as one call, so far its reference on a CPU or a mesh of its devices, for tests; "auto", "pallas" on Hopper
        GPUs for checkpoints with NVFP4 experts, else "xla".
      numerics: "serving", or "hf" to round where transformers does.
      dtype: "bfloat16" or "float32"; None: the checkpoint's on a GPU, float32 on a CPU (XLA for CPU widens bf16 weights
        at every step), but bfloat16 for "megakernel", which has no other.
      activations: of NVFP4 experts; "bf16", or "nvfp4" to quantise what their GEMMs read, as GPUs with FP4 units do.
      moe_sharding: what of the routed experts a device of the mesh has: "n", a part of every matrix's output rows; "expert",
        some experts whole, whose slots are then added by ranks; "replicated", all of them.
      max_length: most positions of prompt and answer together; None: the config's max_position_embeddings.
      draft: directory of a DFlash2 draft; None: `draft` in `path`, if that is there.
      speculation: "tree"; "chain", one path; "sampled_chain", one path drawn from the draft and verified by rejection
        sampling: the target's distribution, but other tokens for the same seed than plain decoding; "off". None: "tree" if
        there is a draft.
      tree_size: nodes that a step verifies, the last emitted token included, 2 to 32; a chain takes at most the draft's
        block_size.
      prefill_chunk: most prompt tokens in one dispatch; bounds the memory that prefill needs.
      progress: called with (bytes done, bytes in all) while loading.
    Raises: ValueError (its subclasses included) with one line for anything wrong with arguments or files.
    """
    import checkpoints  # the one import of this package from here, as it imports muse_jax

    if jax.config.jax_enable_x64:
        raise ValueError("jax_enable_x64 is on: muse_jax counts positions in 32 bits and needs it off, as it is by default")
    if numerics not in NUMERICS:
        raise ValueError(f"numerics = {numerics!r}: allowed are {', '.join(map(repr, NUMERICS))}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations = {activations!r}: allowed are {', '.join(map(repr, ACTIVATIONS))}")
    if speculation not in (None, *Speculation):
        raise ValueError(f"speculation = {speculation!r}: allowed are {', '.join(map(repr, map(str, Speculation)))}")
    for name, value, low, high in (("tree_size", tree_size, 2, MAX_TREE_SIZE), ("prefill_chunk", prefill_chunk, 1, _MAX_INT32)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} = {value!r}: expected an integer from {low} to {high}")
    if mesh is not None:
        mesh = sharding.check_mesh(mesh)
    elif moe_sharding in ("expert", "replicated"):
        raise ValueError(f"moe_sharding = {moe_sharding!r} needs a mesh: without one a device has all experts")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    how = sharding.ShardingConfig(None if mesh is None else mesh.size, moe_sharding, calls=platform != "gpu")
    reader = checkpoints.open_reader(path)
    config = reader.config
    how.check_fits(config)
    if activations == "nvfp4" and not config.nvfp4_layers:
        raise ValueError("activations = 'nvfp4': this checkpoint has no NVFP4 experts, so only 'bf16' is allowed")
    draft_path, draft_config = _find_draft(path, draft, speculation), None
    if draft_path is not None:
        draft_config = checkpoints.read_draft_config(draft_path)
        draft_config.check_fits(config)
    if max_length is None:
        max_length = config.max_position_embeddings
    elif isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length = {max_length!r}: expected an integer above 1")
    if dtype is None:
        dtype = "bfloat16" if backend == "megakernel" else "float32" if platform == "cpu" else config.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype = {dtype!r}: allowed are {', '.join(map(repr, _DTYPES))}")
    weights = _DTYPES[dtype]
    speculation = speculation or Speculation.TREE
    rows = rows_of_step(speculation, tree_size, draft_config)
    shared = {} if mesh is None else {"devices": mesh.size, "moe_sharding": moe_sharding, "processes": _processes(mesh)}
    request = Request(config, jnp.dtype(weights), activations, rows, **shared)
    num_devices = 1 if mesh is None else len(mesh.local_devices)
    runs_on = resolve_backend(backend, platform, NUMERICS[numerics], bool(config.nvfp4_layers), num_devices, request)
    has_tokenizer = (Path(path) / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None

    put = None if mesh is None else checkpoints.sharded_put(*sharding.placement(mesh, how))
    num_ranks = 1 if mesh is None else mesh.size
    params, _ = checkpoints.load_params(reader, dtype=weights, put=put, num_ranks=num_ranks, progress=progress)
    settings = {"dtype": jnp.dtype(weights), "sharding": how, "backend": runs_on}
    params = runs_on.stored_params(params, config, how, mesh)
    module = MuseSpark(config, numerics=NUMERICS[numerics], activations=activations, **settings)
    valid_vocab = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.vocab_size)
    draft_module = draft_params = None
    if draft_config is not None:
        if draft_config.selector_top_k > valid_vocab:
            raise ValueError(f"the draft's selector_top_k = {draft_config.selector_top_k}: there are {valid_vocab} tokens")
        draft_module = DFlash2(draft_config, **settings)
        draft_params, _ = checkpoints.load_params(draft_path, draft_config, dtype=weights, put=put, num_ranks=num_ranks)
        draft_params = runs_on.stored_params(draft_params, draft_config, how, mesh)
    model = Model.create(
        module,
        params,
        draft=draft_module,
        draft_params=draft_params,
        speculation=speculation,
        tree_size=tree_size,
        valid_vocab=valid_vocab,
        mesh=mesh,
    )
    return Muse(model, config, draft_config, tokenizer, mesh, runs_on.name, max_length, prefill_chunk)


def _processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


def _find_draft(path: str | Path, draft: str | Path | None, speculation: str | None) -> Path | None:
    """The directory of the draft to load, None if there is to be none. Raises ValueError if one is asked for and missing."""
    if speculation == Speculation.OFF:
        if draft is not None:
            raise ValueError(f"draft = {str(draft)!r} and speculation = 'off': choose one")
        return None
    if draft is not None:
        if not isinstance(draft, (str, os.PathLike)) or not str(draft):
            raise ValueError(f"draft = {draft!r}: expected a directory")
        return Path(draft)
    draft = Path(path) / DRAFT_DIRECTORY
    if os.path.lexists(draft):  # a link to nowhere, too, is meant to be a draft
        return draft
    if speculation is not None:
        raise ValueError(f"speculation = {str(speculation)!r} needs a draft: {draft} is not there")
    return None


@dataclasses.dataclass(eq=False, repr=False)
class Muse:
    """A loaded checkpoint. `model` is the pytree that `muse_jax.decode` takes; `draft_config` and `tokenizer` are None if
    there was none."""

    model: Model
    config: ModelConfig
    draft_config: DraftConfig | None
    tokenizer: Tokenizer | None
    mesh: Mesh | None
    backend: str
    max_length: int
    prefill_chunk: int

    def __post_init__(self) -> None:
        self._logits = jax.jit(decoding.full_logits)
        self._prefill_chunk = jax.jit(decoding.prefill_chunk, donate_argnames=("caches", "last"))
        self._first_token = jax.jit(decoding.first_token, donate_argnames="caches")
        self._decode = jax.jit(decoding.decode, donate_argnames="state")
        self._statuses: collections.deque[jax.Array] = collections.deque()  # of steps that nobody has looked at
        for name in ("_logits", "_prefill_chunk", "_first_token", "_decode"):
            setattr(self, name, distributed.one_at_a_time(getattr(self, name), self.mesh))

    def __repr__(self) -> str:
        layers, width, devices = (
            self.config.num_hidden_layers,
            self.config.hidden_size,
            1 if self.mesh is None else self.mesh.size,
        )
        speculation = f"{self.model.speculation} of {self.model.num_rows}" if self.draft_config else "no draft"
        return f"Muse({layers} layers of {width}, {self.model.module.dtype}, {speculation}, {self.backend}, devices={devices})"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of the tokenizer (see `Tokenizer.from_directory`), without one of config.json."""
        ids = self.config.eos_token_ids if self.tokenizer is None else self.tokenizer.stop_token_ids
        return tuple(token for token in ids if token < self.config.vocab_size)

    def logits(self, tokens: Tokens, lengths: Sequence[int] | None = None) -> jax.Array:
        """Logits of whole sequences, without a cache.

        Args:     tokens: list of lists, or a right-padded array [B, T] with `lengths`.
        Returns:  [B, T, V] fp32, T the longest length; rows past the end of a shorter sequence mean nothing.
        Raises:   ValueError for an empty sequence or a token outside the vocabulary.
        """
        padded, lengths = self._check_tokens(tokens, lengths)
        longest = int(lengths.max())
        # Padded to a power of two, so that sequences of similar length share a compiled forward pass.
        padded = np.pad(padded[:, :longest], ((0, 0), (0, _power_of_two(longest) - longest)))
        return self._logits(self.model, self._put(padded))[:, :longest]

    def prefill(
        self,
        tokens: Tokens,
        lengths: Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] = 0,
        max_new_tokens: int | Sequence[int] = 256,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> tuple[DecodeState, StepOutput]:
        """Reads the prompts and chooses each one's first token.

        Args:
          tokens: list of lists, or a right-padded array [B, T] with `lengths`.
          seed: of the noise; row b of the batch uses seed + b unless a list gives one per row.
          max_new_tokens: tokens to emit at most, the first one included; one number or one per row.
          temperature, top_k, top_p, min_p: as in `SamplingParams`; one number or one per row.
          stop_token_ids: None: those of the checkpoint.
        Returns:  the state for `muse_jax.decode`, and the output that holds the first tokens.
        Raises:   ValueError for an argument out of range, or when prompt and answer do not fit max_length.
        """
        padded, lengths = self._check_tokens(tokens, lengths)
        batch = len(lengths)
        self.model.module.backend.check_batch(batch)
        budget = np.asarray(max_new_tokens)
        if budget.dtype.kind not in "iu" or budget.shape not in ((), (batch,)) or (budget < 1).any():
            raise ValueError(f"max_new_tokens = {max_new_tokens!r}: expected an integer above 0, or one per row")
        budget = np.broadcast_to(budget, (batch,))
        budget = np.minimum(budget, _MAX_INT32).astype(np.int64)  # far beyond any max_length, and no sum wraps
        longest = int((lengths + budget).max())
        if longest > self.max_length:
            row = int((lengths + budget).argmax())
            raise ValueError(
                f"prompt of {lengths[row]} tokens + max_new_tokens of {budget[row]} = {longest}: "
                f"max_length is {self.max_length}"
            )
        sampling = SamplingParams.create(batch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        stops = np.tile(self._check_stops(stop_token_ids), (batch, 1))

        chunk = min(self.prefill_chunk, max(_MIN_CHUNK, _power_of_two(int(lengths.max()))))
        padded = np.pad(padded, ((0, 0), (0, -padded.shape[1] % chunk)))
        # The last chunk may reach past the prompts, and rows of the last step past the answers.
        slots = max(padded.shape[1], longest + self.model.num_rows)
        caches = self._empty_caches(batch, slots + -slots % _SLOT_STEP)
        device_lengths = self._put(lengths)
        last = self._put(np.zeros((batch, self.config.hidden_size), self._stream_dtype()))
        for start in range(0, padded.shape[1], chunk):
            rows = self._put(padded[:, start : start + chunk])
            caches, last = self._prefill_chunk(self.model, caches, last, rows, self._put(np.int32(start)), device_lengths)
        return self._first_token(
            self.model, caches, last, device_lengths, self._put(budget.astype(np.int32)), self._put(stops), self._put(sampling)
        )

    def decode(self, state: DecodeState) -> tuple[DecodeState, StepOutput]:
        """`muse_jax.decode`, jitted, with this model. The given state cannot be used again.

        Does not wait for the step.
        Raises:   StepError, and leaves the given state alone, if an earlier step that is over by now failed.
        """
        while self._statuses and self._statuses[0].is_ready():
            decoding.check_status(self._statuses.popleft())
        state, out = self._decode(self.model, state)
        if out.status is not None:
            self._statuses.append(out.status)
        return state, out

    def draft_seconds(self, state: DecodeState, repeats: int = 20) -> float:
        """Median time of the draft's part of a step, run alone on `state`, which stays usable.

        Raises:   ValueError without speculation, or for repeats below 1.
        """
        if self.model.speculation == Speculation.OFF or repeats < 1:
            raise ValueError(f"draft_seconds: expected repeats = {repeats} above 0, and a draft")
        propose = jax.jit(decoding.propose_nodes)
        times = []
        for _ in range(repeats + 1):  # the first run compiles
            began = time.perf_counter()
            jax.block_until_ready(propose(self.model, state))
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def generate(self, prompt: str | Sequence[int], **settings: Any) -> Generation:
        """Writes a continuation of one prompt.

        Args:     prompt: text, or token ids.  settings: those of `prefill`.
        Returns:  an iterator of pieces of text; it also collects tokens, finish reason and times. StepError from it: a step of
                  the megakernel failed.
        Raises:   ValueError if there is no tokenizer, or as `prefill` does; TypeError for a setting that it does not have.
        """
        if unknown := settings.keys() - inspect.signature(self.prefill).parameters.keys():
            raise TypeError(f"generate has no setting {', '.join(map(repr, sorted(unknown)))}: allowed are those of prefill")
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer.json: use prefill and decode with token ids")
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Generation(self, tokens, settings)

    def _check_tokens(self, tokens: Tokens, lengths: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
        """Right-padded [B, T] int32 and lengths [B] int32, checked."""
        if isinstance(tokens, (np.ndarray, jax.Array)):
            padded = np.asarray(tokens)
            if padded.ndim != 2 or padded.dtype.kind not in "iu":
                raise ValueError(f"tokens has shape {padded.shape} and dtype {padded.dtype}: expected integers [B, T]")
            lengths = np.full(len(padded), padded.shape[1]) if lengths is None else np.asarray(lengths)
            if lengths.shape != (len(padded),) or lengths.dtype.kind not in "iu" or (lengths > padded.shape[1]).any():
                raise ValueError(f"lengths = {lengths.tolist()}: expected one integer up to {padded.shape[1]} per row")
        else:
            if lengths is not None:
                raise ValueError("lengths goes with a padded array, not with a list of lists")
            rows = [np.asarray(row) for row in tokens]
            for row in rows:
                if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
                    raise ValueError("tokens: expected a list of lists of integers")
            lengths = np.asarray([len(row) for row in rows])
            padded = np.zeros((len(rows), max(lengths, default=0)), np.int64)
            for out, row in zip(padded, rows, strict=True):
                out[: len(row)] = row
        if len(lengths) == 0 or (lengths < 1).any():
            raise ValueError("tokens: every sequence needs at least one token, and there must be a sequence")
        padded = padded[:, : lengths.max()]
        inside = np.arange(padded.shape[1])[None, :] < lengths[:, None]
        wrong = inside & ((padded < 0) | (padded >= self.config.vocab_size))
        if wrong.any():
            raise ValueError(f"token {padded[wrong][0]}: expected ids from 0 to {self.config.vocab_size - 1}")
        return np.where(inside, padded, 0).astype(np.int32), lengths.astype(np.int32)

    def _check_stops(self, stop_token_ids: Sequence[int] | None) -> np.ndarray:
        """[S] int32, checked, S at least 1."""
        stops = np.asarray(self.stop_token_ids if stop_token_ids is None else stop_token_ids)
        wrong = stops.ndim != 1 or (stops.size and stops.dtype.kind not in "iu")
        if wrong or ((stops < 0) | (stops >= self.config.vocab_size)).any():
            allowed = f"a list of ids from 0 to {self.config.vocab_size - 1}"
            raise ValueError(f"stop_token_ids = {stop_token_ids!r}: expected {allowed}")
        # One that never comes, in place of none: XLA for GPUs (jax 0.11.2) crashes over an empty array that devices share.
        return stops.astype(np.int32) if stops.size else np.int32([decoding.NO_TOKEN])

    def _put(self, tree: Any) -> Any:
        """To the device, or to every device of the mesh."""
        return jax.device_put(tree) if self.mesh is None else distributed.put_replicated(tree, self.mesh)

    @functools.cached_property
    def _empty_caches(self) -> Callable:
        return jax.jit(functools.partial(decoding.empty_caches, self._abstract_model), static_argnums=(0, 1))

    @property
    def _abstract_model(self) -> Model:
        """The model without its arrays: a function of shapes must not keep them alive."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.model)

    def _stream_dtype(self) -> Any:
        module = self.model.module
        return module.dtype if module.numerics.stream_rounded else jnp.float32


class Generation:
    """One answer while it is being written: iterate for its text.

    tokens: ids emitted so far, the stop token included.  finish_reason: None until the end, then "stop" or "length".
    accepted, step_seconds: of every decode step the tokens it accepted, one of them the target's own (before clipping at the
    end), and what it took, compilation not included. The first step of a process also takes what XLA sets up when it runs a
    program for the first time (0.2 s for a tree step of muse_tiny on a CPU).
    prompt_tokens; seconds_prefill, until the first token was there.
    """

    def __init__(self, muse: Muse, prompt: list[int], settings: dict[str, Any]):
        self.prompt_tokens = len(prompt)
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self._counts: list[int] = []  # tokens that each step committed
        self.finish_reason: str | None = None
        self.step_seconds: list[float] = []
        self.seconds_prefill = 0.0
        stops = settings.get("stop_token_ids")
        self._stops = muse.stop_token_ids if stops is None else stops
        self._muse = muse
        self._decoder = StreamDecoder(muse.tokenizer)
        self._began = time.perf_counter()
        self._state, self._out = muse.prefill([prompt], **settings)
        self._text = self._run()

    @property
    def seconds_decode(self) -> float:
        """Of all steps."""
        return sum(self.step_seconds)

    @property
    def seconds_step(self) -> float | None:
        """The median step, the first one aside where there are others; None without steps."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds) if self.step_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the steps after the first, or of that one where there are no others; None without steps."""
        if not self.step_seconds:
            return None
        skipped = 1 if len(self.step_seconds) > 1 else 0
        return sum(self._counts[skipped:]) / sum(self.step_seconds[skipped:])

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per step, after clipping at the end; None without steps or without speculation."""
        if not self.accepted or self._muse.model.speculation == Speculation.OFF:
            return None
        return (len(self.tokens) - 1) / len(self.accepted)

    def __iter__(self) -> Iterator[str]:
        return self._text

    def __next__(self) -> str:
        return next(self._text)

    def draft_seconds(self, repeats: int = 20) -> float | None:
        """What the draft takes of a step: the median of `repeats` runs of it alone; None without speculation."""
        if self._muse.model.speculation == Speculation.OFF:
            return None
        return self._muse.draft_seconds(self._state, repeats)

    def _run(self) -> Iterator[str]:
        done, _ = self._take(self._out)
        self.seconds_prefill = time.perf_counter() - self._began
        piece = self._decoder.push(self.tokens)
        if piece:
            yield piece
        # The next step is dispatched before this one's tokens are read, so that the device does not wait for the host.
        pending = None if done else self._step()
        began = time.perf_counter()  # the first step's compilation is over
        while not done:
            out, pending = pending, self._step()
            before = len(self.tokens)
            done, accepted = self._take(out)
            began, previous = time.perf_counter(), began
            self.accepted.append(accepted)
            self._counts.append(len(self.tokens) - before)
            self.step_seconds.append(began - previous)
            piece = self._decoder.push(self.tokens[before:])
            if piece:
                yield piece
        self.finish_reason = "stop" if self.tokens[-1] in self._stops else "length"
        piece = self._decoder.flush()
        if piece:
            yield piece

    def _step(self) -> StepOutput:
        # Not by `Muse.decode`, which would say of this answer what went wrong with another.
        self._state, out = self._muse._decode(self._muse.model, self._state)
        return out

    def _take(self, out: StepOutput) -> tuple[bool, int]:
        """Reads a step's output (this waits for the device). Returns whether the text is finished, and what was accepted."""
        out = jax.device_get(out)  # all of it: an index into an array of the device would queue behind the next step
        out.check()
        self.tokens.extend(out.tokens[0, : out.count[0]].tolist())
        return bool(out.done[0]), int(out.accepted[0])


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
