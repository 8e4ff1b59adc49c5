"""The call of "muse_verify": the target model's forward pass over the rows of one decode step.

    config = VerifyConfig(hidden=..., ..., layers=(LayerKind(...), ...), ranks=8)
    result = verify(config, tokens, ..., embedding, head, layers, caches)

Below, R is `config.ranks`; Rh are the ranks on this device: all of them (emulated, one after the other on a CPU), or 1.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ffi import profile as profiler
from ffi.layout import Shape

MAX_ROWS, MAX_TOP_K, STATUS_SIZE = 16, 8, 8
MAX_PROFILE_EVENTS = 1 << 16
_SLIDING, _ROPE, _NVFP4 = 1, 2, 4  # bits of an element of `layer_flags`


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """sliding: it sees a window, and its cache is a ring; else global.  nvfp4: its experts are."""

    sliding: bool
    rope: bool
    nvfp4: bool

    @property
    def flags(self) -> int:
        return _SLIDING * self.sliding + _ROPE * self.rope + _NVFP4 * self.nvfp4


@dataclasses.dataclass(frozen=True)
class VerifyConfig:
    """Everything static about a call.

    window: keys a row sees in sliding layers, its own included; 0: there are none.
    score_scale: of q k^T.
    output_multiplier: of the logits of vocabulary and router.
    ranks: that share the model.  loopback: this device is the first of them, without the others: where it would read their
      data it reads its own. For measuring; the results mean nothing.
    quantized: activations of NVFP4 experts are NVFP4.
    taps: layers whose outputs are wanted.  trace_layer: the layer whose intermediate values are wanted.
    profile: events that each thread of the profiler keeps, 0: none; `profile.places` says how many there are.
    layers_per_launch: that the kernel runs in one launch.
    deadline_ms: after which the step is given up: how long a CTA of the kernel may stay in one phase, or on a mesh of CPU
      devices the first rank's call may wait for the others'.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_hidden: int
    moe_intermediate: int
    experts: int
    top_k: int
    vocab: int
    layers: tuple[LayerKind, ...]
    window: int
    score_scale: float
    output_multiplier: float
    softcap: float
    rms_eps: float = 1e-5
    post_eps: float = 1e-8
    routed_scaling: float = 1.0
    ranks: int = 1
    loopback: bool = False
    quantized: bool = False
    taps: tuple[int, ...] = ()
    trace_layer: int | None = None
    profile: int = 0
    layers_per_launch: int = 1
    deadline_ms: int = 1000

    def __post_init__(self) -> None:
        shape = self.shape  # which has its own requirements
        problems = []

        def check(ok: bool, problem: str) -> None:
            if not ok:
                problems.append(problem)

        most = min(MAX_TOP_K, self.experts)
        check(1 <= self.top_k <= most, f"top_k = {self.top_k}: allowed are 1 to {most}")
        numbers = range(len(self.layers))
        check(len(numbers) > 0, "layers is empty: at least one is needed")
        for layer in self.taps:
            check(layer in numbers, f"taps = {self.taps}: allowed are numbers from 0 to {len(numbers) - 1}")
        check(len(set(self.taps)) == len(self.taps), f"taps = {self.taps}: each layer once")
        traced = self.trace_layer
        check(traced is None or traced in numbers, f"trace_layer = {traced}: allowed are None and 0 to {len(numbers) - 1}")
        sliding = any(layer.sliding for layer in self.layers)
        check(self.window > 0 if sliding else self.window >= 0, f"window = {self.window}: sliding layers need one above 0")
        for name in ("layers_per_launch", "deadline_ms"):
            check(getattr(self, name) > 0, f"{name} = {getattr(self, name)}: expected a number above 0")
        most = MAX_PROFILE_EVENTS
        check(0 <= self.profile <= most, f"profile = {self.profile}: allowed are 0 to {most} events")
        for name in _FLOATS:
            value = getattr(self, name)
            check(math.isfinite(value) and value > 0, f"{name} = {value}: expected a finite number above 0")
        if any(layer.nvfp4 for layer in self.layers):
            for name in ("moe_hidden", "moe_intermediate"):
                check(getattr(self, name) % 16 == 0, f"{name} = {getattr(self, name)}: NVFP4 experts need a multiple of 16")
            of_rank = shape.of_rank(self.moe_intermediate)
            whole = not self.quantized or of_rank % 16 == 0
            check(whole, f"moe_intermediate = {self.moe_intermediate}: quantized needs a multiple of {16 * self.ranks}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def shape(self) -> Shape:
        """Sizes of the buffers of weights."""
        return Shape(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Shape)})

    @property
    def numbers(self) -> tuple[int, ...]:
        """For `library.prepare`: the fields of ModelShape in src/shape.h, in their order."""
        return (
            *(self.hidden, self.heads, self.kv_heads, self.head_dim, self.moe_hidden, self.moe_intermediate),
            *(self.experts, self.top_k, self.vocab, self.ranks),
        )

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a rank has in its trace, in its order, without the axis of rows that each array has first."""
        d, m, h, k = self.hidden, self.moe_hidden, self.head_dim, self.top_k
        heads, kv_heads = self.shape.of_rank(self.heads), self.shape.of_rank(self.kv_heads)
        return {
            "attn_in": (d,),
            "q": (heads, h),
            "k": (kv_heads, h),
            "v": (kv_heads, h),
            "gate": (heads, h),
            "attn_out": (heads, h),
            "o_sum": (d,),
            "stream_mid": (d,),
            "ffn_in": (d,),
            "router_logits": (self.experts,),
            "idx": (k,),
            "weights": (k,),
            "pooled": (m,),
            "moe_in": (m,),
            "hidden": (k, self.moe_intermediate),
            "down": (k, m),
            "mixed": (m,),
            "branch": (d,),
            "stream": (d,),
        }

    @property
    def _attributes(self) -> dict[str, np.ndarray | np.generic]:
        integers = {name: getattr(self, name) for name in _INTEGERS}
        integers["trace_layer"] = -1 if self.trace_layer is None else self.trace_layer
        arrays = {"layer_flags": [layer.flags for layer in self.layers], "taps": self.taps}
        return (
            {name: np.int64(value) for name, value in integers.items()}
            | {name: np.float32(getattr(self, name)) for name in _FLOATS}
            | {name: np.asarray(value, np.int32) for name, value in arrays.items()}
        )


_INTEGERS = (
    "hidden", "heads", "kv_heads", "head_dim", "moe_hidden", "moe_intermediate", "experts", "top_k", "vocab", "ranks", "window",
    "layers_per_launch", "loopback", "quantized", "profile", "deadline_ms",
)  # fmt: skip
_FLOATS = ("rms_eps", "post_eps", "score_scale", "output_multiplier", "softcap", "routed_scaling")


_RESULTS = ["logits", "rows", "taps", "trace", "profile", "status"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=_RESULTS, meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class VerifyResult:
    """What a step gives.

    logits: [Rh, T, V/R] fp32, after multiplier and soft cap.
    rows: for each layer keys and values of the rows, [1, Rh K/R, T, H] bf16 each; `KVCache.commit` writes those accepted.
    taps: [taps, T, D] fp32, the stream after each layer of `config.taps`.
    trace: arrays [Rh, T, ...] by the names of `config.trace_shapes`, fp32 (idx int32); None without a layer to trace.
    profile: [Rh, words] uint32, for `profile.decode`; None where `config.profile` is 0.
    status: [8] int32, zeros if all is well; else the other results mean nothing, and `problem` says in words what happened.
    """

    logits: jax.Array
    rows: list[tuple[jax.Array, jax.Array]]
    taps: jax.Array
    trace: dict[str, jax.Array] | None
    profile: jax.Array | None
    status: jax.Array


def verify(
    config: VerifyConfig,
    tokens: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    visible: jax.Array,
    rope: jax.Array,
    ring_positions: jax.Array,
    embedding: jax.Array,
    head: jax.Array,
    layers: Sequence[jax.Array],
    caches: Sequence[tuple[jax.Array, jax.Array]],
    routing: tuple[jax.Array, jax.Array] | None = None,
    *,
    rank: jax.Array | None = None,
    emulated: bool = False,
) -> VerifyResult:
    """Runs the step.

    Args:     tokens: [T] int32, 1 to 16 rows of one sequence.  positions: [T] int32, theirs.  length: [1] int32, committed
              positions.  visible: [T, T] bool: row i sees row j (in sliding layers, if it is in the window too); each sees
              itself.  rope: [2, T, H/2] fp32, cos and sin.  ring_positions: [slots of sliding layers] int32, the position
              in each slot, -1 if none.  embedding: [Rh, V/R, D] bf16.  head, layers: [Rh, bytes] uint8, from
              `layout.pack_head` and `layout.pack_layer`.  caches: for each layer keys and values [1, Rh K/R, slots, H] bf16,
              of sliding layers a ring, else slot = position.  routing: expert ids [L, T, top_k] int32 and weights fp32,
              in place of the router's.  rank: [1] int32, which one is here, for a device of a mesh: this is then called inside
              `jax.shard_map`, once a step, and on a CPU the calls of a run meet in the process.  emulated: on a CPU, run the
              kernel's own source on an emulated device, for tests.
    Raises:   ValueError for what does not fit together; the call itself fails with INVALID_ARGUMENT and the name of an operand
              of another shape or dtype, and on a CPU also for tokens or expert ids that do not exist.
    """
    num_layers = len(config.layers)
    for name, given in (("layers", layers), ("caches", caches)):
        if len(given) != num_layers:
            raise ValueError(f"{name} has {len(given)} entries: expected {num_layers}, one for each layer of the config")
    for i, pair in enumerate(caches):
        if len(pair) != 2:
            raise ValueError(f"caches[{i}] has {len(pair)} entries: expected keys and values")
    for name, array, axes in (("tokens", tokens, "[T]"), ("embedding", embedding, "[Rh, V/R, D]")):
        if array.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {list(array.shape)}: expected {axes}")
    if routing is None:
        routing = jnp.zeros((0, 0, 0), jnp.int32), jnp.zeros((0, 0, 0), jnp.float32)
    recording = _recording.get()
    if recording is not None:
        config = dataclasses.replace(config, profile=recording.events)

    if rank is None:
        rank = jnp.zeros(1, jnp.int32)

    rows, here, shape = tokens.shape[0], embedding.shape[0], config.shape
    cache_rows = jax.ShapeDtypeStruct((1, here * shape.of_rank(config.kv_heads), rows, config.head_dim), jnp.bfloat16)
    entries = {} if config.trace_layer is None else config.trace_shapes
    trace_size = rows * sum(map(math.prod, entries.values()))
    results = [
        jax.ShapeDtypeStruct((here, rows, shape.of_rank(config.vocab)), jnp.float32),
        *[cache_rows] * (2 * num_layers),
        jax.ShapeDtypeStruct((len(config.taps), rows, config.hidden), jnp.float32),
        jax.ShapeDtypeStruct((here, trace_size), jnp.float32),
        jax.ShapeDtypeStruct((here, profiler.words(here, config.profile)), jnp.uint32),
        jax.ShapeDtypeStruct((STATUS_SIZE,), jnp.int32),
    ]
    operands = [tokens, positions, length, rank, visible, rope, ring_positions, *routing, embedding, head, *layers]
    operands += [x for pair in caches for x in pair]
    target = "muse_verify_emulated" if emulated else "muse_verify"
    logits, *new, taps, trace, profile, status = jax.ffi.ffi_call(target, results)(*operands, **config._attributes)
    if recording is not None:
        jax.debug.callback(recording.keep, profile)
    return VerifyResult(
        logits=logits,
        rows=list(zip(new[::2], new[1::2], strict=True)),
        taps=taps,
        trace=_named(trace, entries, rows) if entries else None,
        profile=profile if config.profile else None,
        status=status,
    )


@dataclasses.dataclass(frozen=True)
class _Recording:
    events: int
    buffers: list[np.ndarray]

    def keep(self, profile: jax.Array) -> None:
        self.buffers.append(np.asarray(profile))


_recording: contextvars.ContextVar[_Recording | None] = contextvars.ContextVar("recording", default=None)


@contextlib.contextmanager
def profiled(events: int) -> Iterator[list[np.ndarray]]:
    """Profiles calls that are traced in the block, for programs that make them somewhere inside.

    Gives the list that gets `VerifyResult.profile` of every such call, and of every device, whenever it has run and
    `jax.effects_barrier` has passed. A function that was traced before stays as it is: trace a new one.
    """
    recording = _Recording(events, [])
    token = _recording.set(recording)
    try:
        yield recording.buffers
    finally:
        _recording.reset(token)


def problem(status: Sequence[int]) -> str | None:
    """What a call's status says, for a person; None: all is well. status: [8], on the host."""
    code, rank, layer, phase, cta, peer, *_ = map(int, status)
    if code == 0:
        return None
    if code == 2:
        return "another call for the same model and devices was running; repeat this one when that is over"
    if code != 1:
        return f"it has status {code}, which this version does not know"
    if phase < 0:
        return f"rank {rank} gave up waiting before the first phase: the call of rank {peer} did not come within deadline_ms"
    where = "the embedding" if layer < 0 else f"layer {layer}"
    name = profiler.PHASES[phase] if 0 <= phase < len(profiler.PHASES) else str(phase)
    waited = f"rank {rank} gave up waiting in {where}, phase {name}, CTA {cta}"
    if peer < 0:
        return f"{waited}: something did not come within deadline_ms; if that is too short here, raise it"
    return f"{waited}: data of rank {peer} did not come within deadline_ms; see what stopped rank {peer}, or raise it"


def _named(trace: jax.Array, entries: dict[str, tuple[int, ...]], rows: int) -> dict[str, jax.Array]:
    """trace: [Rh, size]."""
    named, end = {}, 0
    for name, shape in entries.items():
        begin, end = end, end + rows * math.prod(shape)
        named[name] = trace[:, begin:end].reshape(-1, rows, *shape)
    named["idx"] = named["idx"].astype(jnp.int32)
    return named
