"""Verify steps of small random models, for "muse_verify" and for muse_jax: what the tests of every platform have in common."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ffi import layout, library
from ffi.verify import LayerKind, VerifyConfig, VerifyResult, verify
from muse_jax import decoding, ops
from muse_jax.backends import XLA
from muse_jax.config import TINY, AttentionKind, MLPKind, ModelConfig
from muse_jax.decoding import DecodeState, Model
from muse_jax.kv_cache import DecodeContext, KVCache, ring_capacity
from muse_jax.layout import TensorSpec, parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.numerics import SERVING
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import ONE_DEVICE, ShardingConfig
from muse_jax.tree import Tree

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
QUICKLY = {"xla_backend_optimization_level": 0}  # to compile: what runs once
SLIDING, GLOBAL = AttentionKind.SLIDING, AttentionKind.GLOBAL

# Eight ranks can share it. Rows of NVFP4 experts end within a second tile; layers have every attention with and without RoPE.
SMALL = dataclasses.replace(
    TINY,
    vocab_size=256,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=24,
    moe_hidden_size=320,
    moe_intermediate_size=384,
    num_local_experts=24,
    num_experts_per_tok=3,
    routed_scaling_factor=1.5,
    sliding_window=40,
    layer_types=(SLIDING, GLOBAL, SLIDING, GLOBAL),
    layer_uses_rope=(True, False, False, True),
    mlp_layer_types=(MLPKind.SPARSE,) * 4,
    nvfp4_layers=(0, 3),
    dtype="bfloat16",
)
# As SMALL, with two layers.
TWO_LAYERS = dataclasses.replace(
    SMALL,
    num_hidden_layers=2,
    layer_types=SMALL.layer_types[:2],
    layer_uses_rope=SMALL.layer_uses_rope[:2],
    mlp_layer_types=SMALL.mlp_layer_types[:2],
    nvfp4_layers=(0,),
)
# The sizes of the bundled checkpoint.
TINY_SIZES = dataclasses.replace(
    SMALL,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    moe_hidden_size=96,
    moe_intermediate_size=128,
    num_local_experts=16,
    num_experts_per_tok=4,
    sliding_window=64,
    layer_types=(SLIDING, GLOBAL),
    layer_uses_rope=(True, False),
    mlp_layer_types=(MLPKind.SPARSE,) * 2,
    nvfp4_layers=(1,),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """length: committed positions.  rows: of the step.  slots: of global caches.  forced: routing is given.
    loopback: one rank plays the first of so many."""

    config: ModelConfig = SMALL
    length: int = 90
    rows: int = 16
    slots: int = 128
    activations: str = "bf16"
    forced: bool = False
    loopback: int | None = None

    def __str__(self) -> str:
        sizes = "tiny" if self.config == TINY_SIZES else "small"
        routing = ["forced"] if self.forced else []
        return "-".join([sizes, self.activations, f"{self.rows}rows", f"at{self.length}", *routing])

    @property
    def sharding(self) -> ShardingConfig:
        return (
            ONE_DEVICE
            if self.loopback is None
            else ShardingConfig(self.loopback, moe_exchange="rows", loopback=True, calls=False)
        )


def draw(spec: TensorSpec, width: int) -> np.ndarray:
    """Random everywhere: fresh norms, gates and biases are zero. Matrices are bf16, some block scales negative or zero."""
    rng, kind, shape = np.random.default_rng(zlib.crc32(repr(spec.path).encode())), spec.path[-1], spec.param_shape
    random_bytes = functools.partial(rng.integers, 0, 256, shape, np.uint8)
    if kind == "codes":
        return random_bytes()
    if kind == "block_scales":
        scales = 0x40 + (random_bytes() >> 3)
        scales = np.where(random_bytes() < 4, 0, scales).astype(np.uint8)
        return np.where(random_bytes() < 8, scales | 0x80, scales).astype(np.uint8).view(spec.dtype_in(BF16))
    if kind in ("global_scale", "input_scale"):
        return ((1 + rng.random(shape, np.float32)) / (60 * width**0.5)).astype(np.float32)
    scale = 0.3 if len(spec.shape) == 1 else 2 / shape[-1] ** 0.5
    return (scale * rng.uniform(-1, 1, shape) + float(kind == "final_norm")).astype(spec.dtype_in(BF16))


@functools.cache
def all_params(config: ModelConfig) -> dict:
    """Parameters of the whole model, numpy."""
    return parameter_tree(config, lambda spec: draw(spec, config.moe_hidden_size))


def make_model(case: Case, dtype: jnp.dtype) -> Model:
    """The model of muse_jax; with fp32 it has the same weights."""

    def leaf(spec: TensorSpec) -> jax.Array:
        value = functools.reduce(lambda tree, key: tree[key], spec.path, all_params(case.config))
        if case.loopback is not None:
            value = value[spec.rank_part(case.loopback, 0)]
        return jnp.asarray(value.astype(dtype) if value.dtype == BF16 else value)

    settings = {"dtype": dtype, "sharding": case.sharding, "backend": XLA, "activations": case.activations}
    model = Model.create(MuseSpark(case.config, **settings), parameter_tree(case.config, leaf))
    return dataclasses.replace(model, num_rows=case.rows)


def make_cache(case: Case, unused: float | None = None) -> KVCache:
    """Random keys and values. unused: what slots hold that no row may read; None: numbers as all others."""
    config, rng = case.config, np.random.default_rng(zlib.crc32(repr(case.length).encode()))
    ring = ring_capacity(config, case.slots, case.rows)
    newest = case.length - 1 - (case.length - 1 - np.arange(ring)) % ring
    ring_positions = np.where(newest >= 0, newest, -1).astype(np.int32)
    used = {True: newest >= max(0, case.length - config.sliding_window + 1), False: np.arange(case.slots) < case.length}
    heads = config.num_key_value_heads // (case.loopback or 1)

    def array(sliding: bool) -> jax.Array:
        x = rng.standard_normal((1, heads, len(used[sliding]), config.head_dim), np.float32)
        if unused is not None:
            x = np.where(used[sliding][None, None, :, None], x, np.float32(unused))
        return jnp.asarray(x.astype(BF16))

    layers = [tuple(array(config.window(i) is not None) for _ in "kv") for i in range(config.num_hidden_layers)]
    return KVCache(layers, jnp.asarray(ring_positions[None]))


def make_nodes(case: Case) -> Tree:
    """A random tree, in which node j's parent is one of the three before it."""
    rng, rows = np.random.default_rng(5), case.rows
    parent, depth, ancestors = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.eye(rows, dtype=bool)
    for j in range(1, rows):
        parent[j] = i = rng.integers(max(0, j - 3), j)
        depth[j] = depth[i] + 1
        ancestors[j] |= ancestors[i]
    token = rng.integers(0, case.config.vocab_size // (case.loopback or 1), rows, np.int32)
    valid, log_prob = np.ones(rows, bool), np.zeros(rows, np.float32)
    return jax.tree.map(lambda x: jnp.asarray(x[None]), Tree(token, parent, depth, valid, ancestors, log_prob))


def make_routing(case: Case) -> list[tuple[jax.Array, jax.Array] | None]:
    """For each layer expert ids and weights [T, top_k], or None: bf16 may turn a choice that is close, and that row is
    another then."""
    config, rng = case.config, np.random.default_rng(6)
    if not case.forced:
        return [None] * config.num_hidden_layers

    def of_layer() -> tuple[jax.Array, jax.Array]:
        few = rng.permutation(config.num_local_experts)[: config.num_experts_per_tok + 2]
        idx = np.stack([rng.permutation(few)[: config.num_experts_per_tok] for _ in range(case.rows)])
        return jnp.asarray(idx.astype(np.int32)), jnp.asarray(rng.random(idx.shape, np.float32) + np.float32(0.1))

    return [of_layer() for _ in range(config.num_hidden_layers)]


def make_context(case: Case, cache: KVCache, nodes: Tree) -> DecodeContext:
    start = jnp.asarray(np.int32([case.length]))
    return DecodeContext.create(cache, start, nodes.depth, (nodes.ancestors,) * 2, case.config)


def make_state(model: Model, case: Case) -> DecodeState:
    one = jnp.ones(1, jnp.int32)
    return DecodeState(
        cache=make_cache(case),
        draft_cache=None,
        length=case.length * one,
        token=one,
        remaining=one,
        done=jnp.zeros(1, bool),
        stop_ids=one[:, None],
        sampling=SamplingParams.create(1),
        num_rows=case.rows,
    )


# ---- The same for "muse_verify" -----------------------------------------------------------------------------------------


def verify_config(case: Case, ranks: int = 1, **settings) -> VerifyConfig:
    config = case.config
    kinds = zip(config.layer_types, config.layer_uses_rope, strict=True)
    return VerifyConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        moe_hidden=config.moe_hidden_size,
        moe_intermediate=config.moe_intermediate_size,
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        vocab=config.vocab_size,
        layers=tuple(LayerKind(kind == SLIDING, rope, i in config.nvfp4_layers) for i, (kind, rope) in enumerate(kinds)),
        window=config.sliding_window,
        score_scale=config.head_dim**-0.5 * config.qk_scale_factor,
        output_multiplier=config.output_multiplier,
        softcap=config.final_logit_softcapping,
        rms_eps=config.rms_norm_eps,
        post_eps=config.post_norm_eps,
        routed_scaling=config.routed_scaling_factor,
        ranks=case.loopback or ranks,
        loopback=case.loopback is not None,
        quantized=case.activations == "nvfp4",
        **settings,
    )


_pack_layer = jax.jit(layout.pack_layer, static_argnames=("shape", "nvfp4", "temperature"), compiler_options=QUICKLY)
_pack_head = jax.jit(layout.pack_head, static_argnames="shape", compiler_options=QUICKLY)


@functools.cache
def packed(config: ModelConfig, shape: layout.Shape, ranks_here: int) -> tuple[jax.Array, list[jax.Array]]:
    """Buffers of the head and of the layers, [ranks here, bytes] each."""
    params, ranks = all_params(config), np.arange(ranks_here, dtype=np.int32)
    temperature = config.residual_gate_temperature

    def stacked(pack: Callable[[np.int32], jax.Array]) -> jax.Array:
        return jnp.asarray(np.stack([pack(rank) for rank in ranks]))

    layers = [
        stacked(lambda rank: _pack_layer(layer, shape, i in config.nvfp4_layers, rank, temperature=temperature))  # noqa: B023
        for i, layer in params["layers"].items()
    ]
    return stacked(lambda rank: _pack_head(params["lm_head"], params["final_norm"], shape, rank)), layers


def operands(case: Case, config: VerifyConfig, cache: KVCache | None = None, nodes: Tree | None = None) -> dict:
    """Arguments of `verify` by name."""
    cache = make_cache(case) if cache is None else cache
    nodes = make_nodes(case) if nodes is None else nodes
    here = 1 if config.loopback else config.ranks
    head, layers = packed(case.config, config.shape, here)
    positions = jnp.asarray(case.length + np.asarray(nodes.depth[0]))
    embedding, routing = all_params(case.config)["embedding"], make_routing(case)
    return {
        "tokens": jnp.asarray(np.asarray(nodes.token)[0]),
        "positions": positions,
        "length": jnp.asarray(np.int32([case.length])),
        "visible": jnp.asarray(np.asarray(nodes.ancestors)[0]),
        "rope": _rope(positions, case.config),
        "ring_positions": jnp.asarray(np.asarray(cache.ring_positions)[0]),
        "embedding": jnp.asarray(embedding.reshape(config.ranks, -1, embedding.shape[1])[:here]),
        "head": head,
        "layers": layers,
        "caches": cache.layers,
        "routing": None if routing[0] is None else tuple(jnp.asarray(np.stack(x)) for x in zip(*routing, strict=True)),
    }


@functools.partial(jax.jit, static_argnames="config")
def _rope(positions: jax.Array, config: ModelConfig) -> jax.Array:
    inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
    return jnp.concatenate(ops.rope_tables(positions[None], inv_freq, SERVING, BF16))


jitted_verify = jax.jit(verify, static_argnames=("config", "emulated"), compiler_options=QUICKLY)
_verify_on_gpu = jax.jit(verify, static_argnames=("config", "emulated"))  # XLA for GPUs does not support QUICKLY


def run(
    case: Case,
    ranks: int = 1,
    cache: KVCache | None = None,
    nodes: Tree | None = None,
    target: str = "host",
    **settings,
) -> VerifyResult:
    """target: "host", the reference; "emulated", the kernel on the emulated device; "cuda", the kernel on the first GPU."""
    config = verify_config(case, ranks, **settings)
    result = call(config, operands(case, config, cache, nodes), target)
    return jax.device_get(result) if target == "cuda" else result  # references are computed on the CPU


def call(config: VerifyConfig, operands: dict, target: str = "host") -> VerifyResult:
    if target == "cuda":
        library.prepare(config.numbers, config.quantized, [0] * (1 if config.loopback else config.ranks))
        return _verify_on_gpu(config, **jax.device_put(operands, jax.devices("gpu")[0]))
    library.load()
    return jitted_verify(config, **operands, emulated=target == "emulated")


# ---- muse_jax -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="taps", compiler_options=QUICKLY)
def reference_step(model: Model, state: DecodeState, nodes: Tree, routing: list, taps: tuple[int, ...] = ()) -> tuple:
    """As `decoding.verify`, which has taps for a draft only: logits [T, V], rows, taps [taps, T, D]."""
    module = model.module
    context = module.backend.decode_context(state.cache, state.length, nodes.depth, (nodes.ancestors,) * 2, module.config)
    stream, rows, tapped = module(nodes.token, context, state.cache, taps=taps, routing=routing)
    tapped = jnp.stack(jnp.split(tapped[0], len(taps), axis=-1)) if taps else None
    return module.logits(stream)[0], rows, tapped


@functools.partial(jax.jit, static_argnames="case", compiler_options=QUICKLY)
def reference_logits(model: Model, case: Case) -> jax.Array:
    """[T, V], by `decoding.verify` itself."""
    logits, _, _ = decoding.verify(model, make_state(model, case), make_nodes(case), make_routing(case))
    return model.module.vocab_ranks.join(logits, -1)[0]
