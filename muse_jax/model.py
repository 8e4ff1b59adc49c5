"""The text decoder of Muse Spark: the whole forward pass.

    tokens -> embedding norm -> [ attention, residual gate, MoE or MLP, residual gate ] x L -> final norm -> logits

Formulas: muse_spark.md section 3. Operations are in `ops`, attention and caches in `attention` and `kv_cache`; where a
value is rounded is in `numerics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax import nvfp4, ops
from muse_jax.backends import XLA, Backend, Config
from muse_jax.config import AttentionSizes, MLPKind, ModelConfig
from muse_jax.kv_cache import KV, DecodeContext, FullContext, KVCache, PrefillContext
from muse_jax.layout import TensorSpec, text_tensors
from muse_jax.numerics import SERVING, Numerics, fp32, round_to
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.sharded_experts import ShardedExperts
from muse_jax.sharding import ONE_DEVICE, Ranks, ShardingConfig, isolated

FP32 = jnp.dtype(jnp.float32)
Context = FullContext | PrefillContext | DecodeContext
Routing = tuple[jax.Array, jax.Array]  # expert ids int32 and weights fp32, [rows, num_experts_per_tok]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Makes the parameters of one part of the tree, with the shapes and dtypes of `layout`; abstract ones without `rngs`."""

    config: Config
    specs: dict[tuple, TensorSpec]
    dtype: jnp.dtype
    rngs: nnx.Rngs | None
    sharding: ShardingConfig = ONE_DEVICE
    backend: Backend = XLA
    path: tuple = ()

    def at(self, *path: str | int) -> Parameters:
        return dataclasses.replace(self, path=(*self.path, *path))

    def ranks(self, name: str) -> Ranks:
        """The ranks that the parameter `name` is cut for; one where it is not."""
        return Ranks() if self.specs[(*self.path, name)].shard_axis is None else self.sharding.ranks

    def __call__(self, name: str) -> nnx.Param | CompositeParam:
        """The parameter `name`, in the form in which the backend keeps it."""
        if (*self.path, name, "codes") in self.specs:
            value = self._nvfp4(name)
        else:
            value = self._array(name)
        value = self.backend.stored(name, value, self.config, self.sharding)
        return CompositeParam(value) if dataclasses.is_dataclass(value) else nnx.Param(value)

    def _array(self, name: str) -> jax.Array | jax.ShapeDtypeStruct:
        spec = self.specs[(*self.path, name)]
        dtype = spec.dtype_in(self.dtype)
        if self.rngs is None:
            return jax.ShapeDtypeStruct(spec.param_shape, dtype)
        if len(spec.shape) > 1:
            return nnx.initializers.normal(0.02)(self.rngs.params(), spec.param_shape, dtype)
        # Vectors are zero-centred norms, residual gates and the router bias; only the final norm is centred at one.
        return jnp.full(spec.param_shape, 1 if name == "final_norm" else 0, dtype)

    def _nvfp4(self, name: str) -> NVFP4Weight:
        part = self.at(name)
        if self.rngs is None:
            return NVFP4Weight(**{field.name: part._array(field.name) for field in dataclasses.fields(NVFP4Weight)})
        *rows, bytes_per_row = self.specs[(*part.path, "codes")].param_shape
        weight = nnx.initializers.normal(0.02)(self.rngs.params(), (*rows, 2 * bytes_per_row), jnp.float32)
        scale = nvfp4.matrix_scale(jnp.max(jnp.abs(weight), axis=(-2, -1)))
        return NVFP4Weight(*nvfp4.encode(weight, scale), scale, jnp.ones_like(scale))


class CompositeParam(nnx.Module):
    """A dataclass of arrays, such as an NVFP4 weight, among the parameters; `param[...]` is its value, as of an `nnx.Param`."""

    def __init__(self, value: Any):
        self.kind = type(value)
        for name, array in vars(value).items():
            setattr(self, name, nnx.Param(array))

    def __getitem__(self, _) -> Any:
        return self.kind(**{field.name: getattr(self, field.name)[...] for field in dataclasses.fields(self.kind)})


class Attention(nnx.Module):
    """Grouped-query attention with q/k norm, RoPE or NoPE, per-head output norm and a sigmoid output gate."""

    def __init__(self, layer_idx: int, config: ModelConfig, numerics: Numerics, dtype: jnp.dtype, param: Parameters):
        self.config, self.numerics, self.dtype = config, numerics, dtype
        self.window, self.uses_rope = config.window(layer_idx), config.layer_uses_rope[layer_idx]
        self.backend = param.backend
        self.ranks = param.ranks("q_proj")
        self.q_proj = param("q_proj")
        self.k_proj = param("k_proj")
        self.v_proj = param("v_proj")
        self.attn_out_gate = param("attn_out_gate")
        self.o_proj = param("o_proj")

    def __call__(self, x: jax.Array, rope: tuple, cache, context: Context):
        """x: [B, T, D], normed.  rope: tables of the rows' positions.  Returns [B, T, D] and the layer's new cache."""
        ranks, kv_parts = self.ranks, kv_parts_of(self.config, self.ranks)
        results = ranks.run(
            self._of_rank,
            *(x, rope, context),
            ranks.split(self.q_proj[...], 0),
            ranks.split(self.k_proj[...], 0, kv_parts),
            ranks.split(self.v_proj[...], 0, kv_parts),
            ranks.split(self.attn_out_gate[...], 0),
            ranks.split(self.o_proj[...], 1),
            split_cache(cache, ranks, kv_parts),
        )
        outs, caches = zip(*results, strict=True)
        with jax.named_scope("attention.o_proj"):
            out = ranks.sum(outs)
        return round_to(out, self.dtype) if self.numerics.branch_rounded else out, join_caches(caches, ranks, kv_parts)

    def _of_rank(self, x: jax.Array, rope: tuple, context: Context, q_proj, k_proj, v_proj, attn_out_gate, o_proj, cache):
        """A rank's heads, and what they add to the output: [B, T, D] fp32."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        rows = x.reshape(-1, x.shape[-1])
        q, k, v, gate = self.backend.linears(rows, (q_proj, k_proj, v_proj, attn_out_gate), dtype)
        q, k, v = (y.reshape(*x.shape[:2], -1, config.head_dim) for y in (q, k, v))

        rope = rope if self.uses_rope else None
        q, k = self.backend.qk_norm_rope(q, k, rope, config, numerics)
        scale = config.head_dim**-0.5 * (1.0 if numerics.qk_scale_in_q else config.qk_scale_factor)
        out, cache = context.attend(q, k, v, cache, self.window, scale, numerics)
        gated = self.backend.out_gate(out, gate.reshape(out.shape), config.rms_norm_eps, numerics)
        [out] = self.backend.linears(gated.reshape(*x.shape[:2], -1), (o_proj,), FP32)
        return out, cache


class SparseMLP(nnx.Module):
    """Mixture of experts at width M between two projections; the router reads the full-width input."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        dtype: jnp.dtype,
        dense_experts: bool,
        param: Parameters,
        activations: str = "bf16",
    ):
        self.config, self.numerics, self.dtype = config, numerics, dtype
        self.dense_experts, self.activations = dense_experts, activations
        self.sharding, self.backend = param.sharding, param.backend
        self.pooled_ranks, self.output_ranks = param.ranks("pre_expert_proj"), param.ranks("post_expert_proj")
        self.router = param("router")
        self.router_bias = param("router_bias")
        self.pre_expert_proj = param("pre_expert_proj")
        self.pre_expert_norm = param("pre_expert_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")
        self.post_expert_norm = param("post_expert_norm")
        self.post_expert_proj = param("post_expert_proj")

    def __call__(self, x: jax.Array, routing: Routing | None = None) -> jax.Array:
        """x: [B, T, D], normed.  routing: in place of the router's, which runs all the same: so benchmarks know what is read.
        Returns [B, T, D], rounded."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        rows = x.reshape(-1, x.shape[-1])
        idx, weights = self.route(rows)
        if routing is not None:
            idx, weights = routing[0], routing[1] + 0.0 * weights
        with jax.named_scope("moe.pre_expert_proj"):
            pooled = self._projected(rows, self.pre_expert_proj, self.pooled_ranks)
        pooled = ops.centred_norm(pooled, self.pre_expert_norm[...], config.rms_norm_eps, numerics, dtype)
        mixed = self._mixed(pooled, idx, weights)
        with jax.named_scope("moe.post_expert_proj"):
            return self._projected(mixed, self.post_expert_proj, self.output_ranks).reshape(x.shape)

    def _projected(self, x: jax.Array, weight: nnx.Param, ranks: Ranks) -> jax.Array:
        """x W^T, rounded; each rank has some of the output's columns. x: [R, in].  weight: [out, in]."""
        columns = ranks.run(lambda x, weight: self.backend.linears(x, (weight,), self.dtype)[0], x, ranks.split(weight[...], 0))
        return ranks.gather(columns, -1)

    def _mixed(self, pooled: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
        """The experts' weighted sum, [R, M], rounded."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        if self.sharding.num_devices is not None or self.backend.fuses_experts(self.gate_up[...]):
            experts = ShardedExperts(config, numerics, dtype, self.activations, self.sharding, self.backend)
            return experts(pooled, idx, weights, self.gate_up[...], self.down[...], self.post_expert_norm[...])
        run = ops.experts_dense if self.dense_experts else ops.experts
        out = run(pooled, idx, self.gate_up[...], self.down[...], numerics, self.activations)
        # Each routed row is normalised before it is weighted.
        out = ops.input_scaled_norm(out, self.post_expert_norm[...], config.post_norm_eps, numerics, dtype)
        if numerics.post_expert_norm_rounded:
            out = round_to(out, dtype)
        return ops.combine(out, weights, dtype)

    def route(self, rows: jax.Array) -> Routing:
        """rows: [R, D], normed. Returns expert ids and weights, [R, num_experts_per_tok]."""
        return self.backend.route(rows, self.router[...], self.router_bias[...], self.config)


class DenseMLP(nnx.Module):
    """Plain SwiGLU."""

    def __init__(self, numerics: Numerics, dtype: jnp.dtype, param: Parameters):
        self.numerics, self.dtype, self.ranks, self.backend = numerics, dtype, param.ranks("down_proj"), param.backend
        self.gate_proj = param("gate_proj")
        self.up_proj = param("up_proj")
        self.down_proj = param("down_proj")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D], normed. Returns [B, T, D]."""
        with jax.named_scope("mlp.down_proj"):
            out = swiglu_mlp(x, self.gate_proj, self.up_proj, self.down_proj, self.ranks, self.numerics, self.backend)
        return round_to(out, self.dtype) if self.numerics.branch_rounded else out


def swiglu_mlp(
    x: jax.Array, gate: nnx.Param, up: nnx.Param, down: nnx.Param, ranks: Ranks, numerics: Numerics, backend: Backend
) -> jax.Array:
    """down(silu(gate x) up x), fp32; each rank has some of the hidden values.

    x: [B, T, D].  gate, up: [F, D].  down: [D, F].  Returns [B, T, D].
    """

    def of_rank(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        [out] = backend.linears(backend.gated_linear(x, gate, up, numerics), (down,), FP32)
        return out

    weights = (ranks.split(weight[...], axis) for weight, axis in ((gate, 0), (up, 0), (down, 1)))
    return ranks.sum(ranks.run(of_rank, x, *weights))


def kv_parts_of(config: AttentionSizes, ranks: Ranks) -> int:
    """Different KV heads, or groups of them, that the ranks of a device have; neighbours share one where heads are few."""
    return min(ranks.local, max(1, config.num_key_value_heads // ranks.devices))


def split_cache(cache: KV | None, ranks: Ranks, kv_parts: int) -> list:
    """A layer's pair [B, K, slots, H] by ranks."""
    if cache is None:
        return [None] * ranks.local
    return list(zip(*(ranks.split(x, 1, kv_parts) for x in cache), strict=True))


def join_caches(caches: Sequence, ranks: Ranks, kv_parts: int) -> KV | None:
    """The inverse of `split_cache`."""
    if caches[0] is None:
        return None
    return tuple(ranks.join(x, 1, kv_parts) for x in zip(*caches, strict=True))


class DecoderLayer(nnx.Module):
    """One layer. It does not know its index, so layers of one kind are traced and lowered once."""

    def __init__(
        self,
        layer_idx: int,
        config: ModelConfig,
        numerics: Numerics,
        dtype: jnp.dtype,
        dense_experts: bool,
        param: Parameters,
        activations: str,
    ):
        self.config, self.numerics, self.dtype, self.backend = config, numerics, dtype, param.backend
        self.input_norm = param("input_norm")
        self.attention = Attention(layer_idx, config, numerics, dtype, param.at("attention"))
        self.post_attention_gate = param("post_attention_gate")
        self.pre_ffn_norm = param("pre_ffn_norm")
        self.mlp: SparseMLP | DenseMLP
        if config.mlp_layer_types[layer_idx] == MLPKind.SPARSE:
            self.mlp = SparseMLP(config, numerics, dtype, dense_experts, param.at("mlp"), activations)
        else:
            self.mlp = DenseMLP(numerics, dtype, param.at("mlp"))
        self.post_ffn_norm = param("post_ffn_norm")
        self.post_ffn_gate = param("post_ffn_gate")

    def __call__(
        self,
        stream: jax.Array,
        x: jax.Array,
        rope: tuple,
        cache,
        context: Context,
        next_norm: jax.Array | None,
        routing: Routing | None = None,
    ):
        """One layer, from after its input norm to after the next layer's.

        Args:     stream: [B, T, D], the residual stream.  x: [B, T, D], what the input norm made of it, rounded.
                  next_norm: [D], weight of the next layer's input norm; None after the last layer.  routing: as in `SparseMLP`.
        Returns:  the new stream, what the next layer's norm made of it, and the layer's new cache.
        """
        with jax.named_scope("attention"):
            branch, cache = self.attention(x, rope, cache, context)
        stream, x = self._blend(stream, branch, self.post_attention_gate[...], None, self.pre_ffn_norm[...])
        with jax.named_scope("moe" if isinstance(self.mlp, SparseMLP) else "mlp"):
            branch = self.mlp(x) if routing is None else self.mlp(x, routing)
        stream, x = self._blend(stream, branch, self.post_ffn_gate[...], self.post_ffn_norm[...], next_norm)
        return stream, x, cache

    def normed_input(self, stream: jax.Array) -> jax.Array:
        """What the input norm makes of the stream, [B, T, D], rounded: of the first layer, as each does it for the next."""
        return ops.centred_norm(stream, self.input_norm[...], self.config.rms_norm_eps, self.numerics, self.dtype)

    def _blend(self, *args: Any) -> tuple[jax.Array, jax.Array | None]:
        with jax.named_scope("blend_norm"):
            return self.backend.blend_norm(*args, self.config, self.numerics, self.dtype)


@jax.jit
def _run_layer(
    layer: DecoderLayer,
    stream: jax.Array,
    x: jax.Array,
    rope: tuple,
    cache,
    context: Context,
    next_norm: jax.Array | None,
    routing: Routing | None,
):
    return layer(stream, x, rope, cache, context, next_norm, routing)


# On a mesh XLA keeps each layer as a call, too: it compiles many layers faster so (62 layers, two CPU cores: 41 s against 50).
_run_layer_as_call = isolated(_run_layer)


class MuseSpark(nnx.Module):
    """The text decoder.

    Args:
      config: facts of the checkpoint.
      numerics: where to round, `numerics.HF` or `numerics.SERVING`.
      dtype: bfloat16 or float32, of parameters and GEMM inputs.
      dense_experts: run every expert on every row. Differentiable, and slower by E / top_k; for training.
      activations: "bf16", or "nvfp4" to quantise what the GEMMs of NVFP4 experts read; other experts stay as they are.
      sharding: how devices share the work; with other than the default, calls belong inside `jax.shard_map`.
      backend: what runs the operations of a step.
      rngs: for fresh parameters (their values are those transformers starts from); None: shapes in place of arrays.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        numerics: Numerics = SERVING,
        dtype: jnp.dtype = jnp.bfloat16,
        dense_experts: bool = False,
        activations: str = "bf16",
        sharding: ShardingConfig = ONE_DEVICE,
        backend: Backend = XLA,
        rngs: nnx.Rngs | None = None,
    ):
        self.config, self.numerics, self.dtype, self.activations = config, numerics, dtype, activations
        specs = {spec.path: spec for spec in text_tensors(config)}
        param = Parameters(config, specs, dtype, rngs, sharding, backend)
        self.sharding, self.backend, self.vocab_ranks = sharding, backend, param.ranks("lm_head")
        self.embedding = param("embedding")
        self.layers = nnx.List(
            DecoderLayer(i, config, numerics, dtype, dense_experts, param.at("layers", i), activations)
            for i in range(config.num_hidden_layers)
        )
        self.final_norm = param("final_norm")
        self.lm_head = param("lm_head")
        backend.arrange(self)

    def __call__(
        self,
        tokens: jax.Array,
        context: Context,
        cache: KVCache | None = None,
        taps: Sequence[int] = (),
        routing: Sequence[Routing | None] | None = None,
    ) -> tuple[jax.Array, list, jax.Array | None]:
        """Runs the layers.

        Args:     tokens: [B, T] int32.  context: positions and the way to the cache.  cache: None with FullContext.
                  taps: static; layers whose outputs a draft wants.  routing: for each layer expert ids and weights to use in
                  place of the router's, or None.
        Returns:  the residual stream after the last layer, [B, T, D] (fp32, or `dtype` with HF numerics); what
                  `context.attend` gave for each layer; outputs of the layers of `taps` side by side in their order,
                  [B, T, taps * D], None without taps.
        """
        config = self.config
        stream = self.embed(tokens)
        inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
        rope = ops.rope_tables(context.positions, inv_freq, self.numerics, self.dtype)
        outputs, kept = {}, []
        sharding = self.sharding
        run_layer = _run_layer_as_call if sharding.num_devices is not None and sharding.calls else _run_layer
        norms = [layer.input_norm[...] for layer in self.layers]
        x = self.layers[0].normed_input(stream)
        for i, (layer, next_norm) in enumerate(zip(self.layers, [*norms[1:], None], strict=True)):
            layer_cache = None if cache is None else cache.layers[i]
            layer_routing = None if routing is None else routing[i]
            stream, x, keep = run_layer(layer, stream, x, rope, layer_cache, context, next_norm, layer_routing)
            kept.append(keep)
            if i in taps:
                outputs[i] = stream
        return stream, kept, jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else None

    def known_tokens(self, tokens: jax.Array) -> jax.Array:
        """Placeholders of images, video and audio embed as token 0, as in transformers."""
        for placeholder in self.config.placeholder_token_ids:
            tokens = jnp.where(tokens == placeholder, 0, tokens)
        return tokens

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, D], normed."""
        tokens = self.known_tokens(tokens)
        with jax.named_scope("embed"):
            rows = self.vocab_ranks.lookup(self.embedding[...], tokens)
        normed = ops.rms(rows, self.config.rms_norm_eps)
        return round_to(normed, self.dtype) if self.numerics.stream_rounded else normed

    def logits(self, stream: jax.Array) -> jax.Array:
        """Residual stream [B, T, D] -> [B, T, V] fp32, after multiplier and soft cap; of a mesh, what this device has of V."""
        return self.vocab_ranks.join(self.logit_parts(stream), -1)

    def logit_parts(self, stream: jax.Array) -> list[jax.Array]:
        """`logits` as one part of the vocabulary for each of `vocab_ranks` on this device."""
        config, ranks = self.config, self.vocab_ranks

        def of_rank(x: jax.Array, lm_head: jax.Array) -> jax.Array:
            [z] = self.backend.linears(x, (lm_head,), FP32)
            cap = config.final_logit_softcapping
            return ops.vocabulary_logits(z, config.output_multiplier, cap, self.numerics, self.dtype)

        weight = fp32(self.final_norm[...])[None, None, :]
        x = round_to(ops.rms(stream, config.rms_norm_eps) * weight, self.dtype)
        with jax.named_scope("lm_head"):
            return ranks.run(of_rank, x, ranks.split(self.lm_head[...], 0))
