"""The text decoder of Muse Spark: the whole forward pass.

    tokens -> embedding norm -> [ attention, residual gate, MoE or MLP, residual gate ] x L -> final norm -> logits

Formulas: muse_spark.md section 3. Operations are in `ops`, attention and caches in `attention` and `kv_cache`; where a
value is rounded is in `numerics`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax import nvfp4, ops
from muse_jax.config import MLPKind, ModelConfig
from muse_jax.kv_cache import DecodeContext, FullContext, KVCache, PrefillContext
from muse_jax.layout import TensorSpec, text_tensors
from muse_jax.numerics import SERVING, Numerics, fp32, round_to
from muse_jax.nvfp4 import NVFP4Weight

Context = FullContext | PrefillContext | DecodeContext


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Makes the parameters of one part of the tree, with the shapes and dtypes of `layout`; abstract ones without `rngs`."""

    specs: dict[tuple, TensorSpec]
    dtype: jnp.dtype
    rngs: nnx.Rngs | None
    path: tuple = ()

    def at(self, *path: str | int) -> Parameters:
        return dataclasses.replace(self, path=(*self.path, *path))

    def __call__(self, name: str) -> nnx.Param | PackedParam:
        """The parameter `name`; a packed one where the table has its codes and scales."""
        if (*self.path, name, "codes") in self.specs:
            return PackedParam(self.at(name))
        spec = self.specs[(*self.path, name)]
        dtype = spec.dtype_in(self.dtype)
        if self.rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(spec.param_shape, dtype))
        if len(spec.shape) > 1:
            return nnx.Param(nnx.initializers.normal(0.02)(self.rngs.params(), spec.param_shape, dtype))
        # Vectors are zero-centred norms, residual gates and the router bias; only the final norm is centred at one.
        return nnx.Param(jnp.full(spec.param_shape, 1 if name == "final_norm" else 0, dtype))


class PackedParam(nnx.Module):
    """An NVFP4 weight among the parameters; `param[...]` is its value, as of an `nnx.Param`."""

    def __init__(self, param: Parameters):
        fields = [field.name for field in dataclasses.fields(NVFP4Weight)]
        if param.rngs is None:
            values = {name: param(name) for name in fields}
        else:
            *rows, bytes_per_row = param.specs[(*param.path, "codes")].param_shape
            weight = nnx.initializers.normal(0.02)(param.rngs.params(), (*rows, 2 * bytes_per_row), jnp.float32)
            scale = nvfp4.matrix_scale(jnp.max(jnp.abs(weight), axis=(-2, -1)))
            arrays = (*nvfp4.encode(weight, scale), scale, jnp.ones_like(scale))
            values = {name: nnx.Param(array) for name, array in zip(fields, arrays, strict=True)}
        for name, value in values.items():
            setattr(self, name, value)

    def __getitem__(self, _) -> NVFP4Weight:
        return NVFP4Weight(self.codes[...], self.block_scales[...], self.global_scale[...], self.input_scale[...])


class Attention(nnx.Module):
    """Grouped-query attention with q/k norm, RoPE or NoPE, per-head output norm and a sigmoid output gate."""

    def __init__(self, layer_idx: int, config: ModelConfig, numerics: Numerics, dtype: jnp.dtype, param: Parameters):
        self.config, self.numerics, self.dtype = config, numerics, dtype
        self.window, self.uses_rope = config.window(layer_idx), config.layer_uses_rope[layer_idx]
        self.q_proj = param("q_proj")
        self.k_proj = param("k_proj")
        self.v_proj = param("v_proj")
        self.attn_out_gate = param("attn_out_gate")
        self.o_proj = param("o_proj")

    def __call__(self, x: jax.Array, rope: tuple, cache, context: Context):
        """x: [B, T, D], normed.  rope: tables of the rows' positions.  Returns [B, T, D] and the layer's new cache."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        q = self._heads(x, self.q_proj)
        k = self._heads(x, self.k_proj)
        v = self._heads(x, self.v_proj)
        gate = self._heads(x, self.attn_out_gate)

        step = (lambda y: fp32(round_to(y, dtype))) if numerics.qk_norm_rounded else (lambda y: y)
        q = step(ops.rms(q, config.rms_norm_eps))
        k = step(ops.rms(k, config.rms_norm_eps))
        scale = config.head_dim**-0.5
        if numerics.qk_scale_in_q:
            q = step(q * config.qk_scale_factor)
        else:
            scale *= config.qk_scale_factor
        if self.uses_rope:
            q = ops.apply_rope(q, rope, numerics, dtype)
            k = ops.apply_rope(k, rope, numerics, dtype)
        out, cache = context.attend(round_to(fp32(q), dtype), round_to(fp32(k), dtype), v, cache, self.window, scale, numerics)

        step = (lambda y: fp32(round_to(y, dtype))) if numerics.out_gate_steps_rounded else (lambda y: y)
        out = step(ops.rms(step(out), config.rms_norm_eps))
        gated = round_to(out * step(jax.nn.sigmoid(fp32(gate))), dtype)
        gated = gated.reshape(*x.shape[:2], config.q_size)
        out = ops.linear(gated, self.o_proj[...])
        return round_to(out, dtype) if numerics.branch_rounded else out, cache

    def _heads(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        """[B, T, D] -> [B, T, heads, H], rounded."""
        return round_to(ops.linear(x, weight[...]), self.dtype).reshape(*x.shape[:2], -1, self.config.head_dim)


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
        self.router = param("router")
        self.router_bias = param("router_bias")
        self.pre_expert_proj = param("pre_expert_proj")
        self.pre_expert_norm = param("pre_expert_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")
        self.post_expert_norm = param("post_expert_norm")
        self.post_expert_proj = param("post_expert_proj")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D], normed. Returns [B, T, D], rounded."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        rows = x.reshape(-1, x.shape[-1])
        idx, weights = self.route(rows)
        pooled = round_to(ops.linear(rows, self.pre_expert_proj[...]), dtype)
        pooled = ops.centred_norm(pooled, self.pre_expert_norm[...], config.rms_norm_eps, numerics, dtype)
        run = ops.experts_dense if self.dense_experts else ops.experts
        out = run(pooled, idx, self.gate_up[...], self.down[...], numerics, self.activations)
        # Each routed row is normalised before it is weighted.
        out = ops.input_scaled_norm(out, self.post_expert_norm[...], config.post_norm_eps, numerics, dtype)
        if numerics.post_expert_norm_rounded:
            out = round_to(out, dtype)
        mixed = ops.combine(out, weights, dtype)
        return round_to(ops.linear(mixed, self.post_expert_proj[...]), dtype).reshape(x.shape)

    def route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """rows: [R, D], normed. Returns expert ids and weights, [R, num_experts_per_tok]."""
        config = self.config
        return ops.route(
            rows,
            self.router[...],
            self.router_bias[...],
            config.num_experts_per_tok,
            config.output_multiplier,
            config.routed_scaling_factor,
        )


class DenseMLP(nnx.Module):
    """Plain SwiGLU."""

    def __init__(self, numerics: Numerics, dtype: jnp.dtype, param: Parameters):
        self.numerics, self.dtype = numerics, dtype
        self.gate_proj = param("gate_proj")
        self.up_proj = param("up_proj")
        self.down_proj = param("down_proj")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D], normed. Returns [B, T, D]."""
        gate, up = ops.linear(x, self.gate_proj[...]), ops.linear(x, self.up_proj[...])
        hidden = ops.swiglu(gate, up, self.numerics, self.dtype)
        out = ops.linear(hidden, self.down_proj[...])
        return round_to(out, self.dtype) if self.numerics.branch_rounded else out


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
        self.config, self.numerics, self.dtype = config, numerics, dtype
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

    def __call__(self, stream: jax.Array, rope: tuple, cache, context: Context):
        """stream: [B, T, D], the residual stream. Returns the new stream and the layer's new cache."""
        config, numerics, dtype = self.config, self.numerics, self.dtype
        x = ops.centred_norm(stream, self.input_norm[...], config.rms_norm_eps, numerics, dtype)
        branch, cache = self.attention(x, rope, cache, context)
        stream = self._blend(stream, ops.rms(branch, config.post_norm_eps), self.post_attention_gate)

        x = ops.centred_norm(stream, self.pre_ffn_norm[...], config.rms_norm_eps, numerics, dtype)
        branch = ops.input_scaled_norm(self.mlp(x), self.post_ffn_norm[...], config.post_norm_eps, numerics, dtype)
        return self._blend(stream, branch, self.post_ffn_gate), cache

    def _blend(self, stream: jax.Array, branch: jax.Array, gate: nnx.Param) -> jax.Array:
        if self.numerics.post_norm_rounded:
            branch = round_to(branch, self.dtype)
        blended = ops.residual_gate(stream, branch, gate[...], self.config.residual_gate_temperature)
        return round_to(blended, self.dtype) if self.numerics.stream_rounded else blended


@jax.jit
def _run_layer(layer: DecoderLayer, stream: jax.Array, rope: tuple, cache, context: Context):
    return layer(stream, rope, cache, context)


class MuseSpark(nnx.Module):
    """The text decoder.

    Args:
      config: facts of the checkpoint.
      numerics: where to round, `numerics.HF` or `numerics.SERVING`.
      dtype: bfloat16 or float32, of parameters and GEMM inputs.
      dense_experts: run every expert on every row. Differentiable, and slower by E / top_k; for training.
      activations: "bf16", or "nvfp4" to quantise what the GEMMs of NVFP4 experts read; other experts stay as they are.
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
        rngs: nnx.Rngs | None = None,
    ):
        self.config, self.numerics, self.dtype, self.activations = config, numerics, dtype, activations
        param = Parameters({spec.path: spec for spec in text_tensors(config)}, dtype, rngs)
        self.embedding = param("embedding")
        self.layers = nnx.List(
            DecoderLayer(i, config, numerics, dtype, dense_experts, param.at("layers", i), activations)
            for i in range(config.num_hidden_layers)
        )
        self.final_norm = param("final_norm")
        self.lm_head = param("lm_head")

    def __call__(
        self, tokens: jax.Array, context: Context, cache: KVCache | None = None, taps: Sequence[int] = ()
    ) -> tuple[jax.Array, list, jax.Array | None]:
        """Runs the layers.

        Args:     tokens: [B, T] int32.  context: positions and the way to the cache.  cache: None with FullContext.
                  taps: static; layers whose outputs a draft wants.
        Returns:  the residual stream after the last layer, [B, T, D] (fp32, or `dtype` with HF numerics); what
                  `context.attend` gave for each layer; outputs of the layers of `taps` side by side in their order,
                  [B, T, taps * D], None without taps.
        """
        config = self.config
        stream = self.embed(tokens)
        inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
        rope = ops.rope_tables(context.positions, inv_freq, self.numerics, self.dtype)
        outputs, kept = {}, []
        for i, layer in enumerate(self.layers):
            stream, keep = _run_layer(layer, stream, rope, None if cache is None else cache.layers[i], context)
            kept.append(keep)
            if i in taps:
                outputs[i] = stream
        return stream, kept, jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else None

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, D], normed. Placeholders of images, video and audio embed as token 0, as in transformers."""
        for placeholder in self.config.placeholder_token_ids:
            tokens = jnp.where(tokens == placeholder, 0, tokens)
        normed = ops.rms(self.embedding[...][tokens], self.config.rms_norm_eps)
        return round_to(normed, self.dtype) if self.numerics.stream_rounded else normed

    def logits(self, stream: jax.Array) -> jax.Array:
        """Residual stream [B, T, D] -> [B, T, V] fp32, after multiplier and soft cap."""
        config = self.config
        weight = fp32(self.final_norm[...])[None, None, :]
        x = round_to(ops.rms(stream, config.rms_norm_eps) * weight, self.dtype)
        return ops.vocabulary_logits(
            x,
            self.lm_head[...],
            config.output_multiplier,
            config.final_logit_softcapping,
            self.numerics,
            self.dtype,
        )
