"""The DFlash2 draft: one forward pass over [anchor, mask, mask, ...] proposes candidates for every following position.

    taps of the target -> fc -> norm = context, one row per committed token
    block -> [ convolution, attention to context and block, convolution, MLP, convolutions ] x layers -> norm
    -> the target's lm_head -> top candidates per position -> lattice of scores for pairs of neighbouring candidates

Formulas: dflash2.md section 2. Row i of the block predicts the token *at* its own position; row 0, the anchor, predicts
nothing. Values are rounded where they feed a GEMM; norms, convolutions, residual stream and scores are fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from muse_jax import ops
from muse_jax.backends import XLA, Backend
from muse_jax.config import AttentionKind
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import KV, DecodeContext, KVCache, heads_first
from muse_jax.layout import draft_tensors
from muse_jax.model import FP32, Parameters, join_caches, kv_parts_of, split_cache, swiglu_mlp
from muse_jax.numerics import SERVING, fp32, round_to
from muse_jax.sampling import mask_padding, top_candidates
from muse_jax.sharding import ONE_DEVICE, ShardingConfig


class DynamicConv(nnx.Module):
    """Causal convolution over the rows of a block; per-channel kernels plus coefficients computed from the sublayer's input.

    It acts on both sides of a sublayer, on its input and on its output, and the input decides the coefficients of both.
    """

    def __init__(self, config: DraftConfig, param: Parameters):
        self.config, self.backend, self.ranks = config, param.backend, param.ranks("kernel_projection")
        self.base_kernel = param("base_kernel")
        self.kernel_projection = param("kernel_projection")

    def coefficients(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D], the sublayer's normed input. Returns [B, T, 2 sides, taps, groups] fp32."""
        config = self.config
        ranks = self.ranks
        with jax.named_scope("draft.conv"):
            weights = ranks.split(self.kernel_projection[...], 0)
            rows = ranks.gather(ranks.run(functools.partial(_product, self.backend), x, weights), -1)
        return rows.reshape(*x.shape[:2], 2, config.conv_kernel_size, config.conv_groups)

    def before(self, z: jax.Array, coefficients: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Of the sublayer's normed input. z: [B, T, D], T a multiple of block_size. Returns [B, T, D], rounded."""
        return self._conv(z, coefficients, None, 0, dtype)

    def after(self, z: jax.Array, coefficients: jax.Array, stream: jax.Array) -> jax.Array:
        """Of the sublayer's output, added to the residual stream. z, stream: [B, T, D]. Returns [B, T, D] fp32."""
        return self._conv(z, coefficients, stream, 1, jnp.dtype(jnp.float32))

    def _conv(self, z: jax.Array, coefficients: jax.Array, residual: jax.Array | None, side: int, dtype: Any) -> jax.Array:
        settings = {"side": side, "block_size": self.config.block_size, "dtype": dtype}
        return self.backend.grouped_conv(z, self.base_kernel[...], coefficients, residual, **settings)


class DraftLayer(nnx.Module):
    """Attention of the block to context and block, then SwiGLU, each between two convolutions."""

    def __init__(self, layer_idx: int, config: DraftConfig, dtype: jnp.dtype, param: Parameters):
        self.config, self.dtype, self.backend = config, dtype, param.backend
        self.window = config.window(layer_idx)
        self.ranks, self.mlp_ranks = param.ranks("o_proj"), param.ranks("down_proj")
        self.input_norm, self.pre_ffn_norm = param("input_norm"), param("pre_ffn_norm")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = map(param, ("q_proj", "k_proj", "v_proj", "o_proj"))
        if config.attention_bias:
            self.q_bias, self.k_bias, self.v_bias, self.o_bias = map(param, ("q_bias", "k_bias", "v_bias", "o_bias"))
        self.q_norm, self.k_norm = param("q_norm"), param("k_norm")
        self.attention_conv = DynamicConv(config, param.at("attention_conv"))
        self.mlp_conv = DynamicConv(config, param.at("mlp_conv"))
        self.gate_proj, self.up_proj, self.down_proj = map(param, ("gate_proj", "up_proj", "down_proj"))

    def __call__(self, stream: jax.Array, rope: tuple, cache: KV, context: DecodeContext) -> jax.Array:
        """stream: [B, T, D] fp32, the rows of the block.  cache: context keys and values.  Returns the new stream."""
        x, coefficients = self._conv_in(stream, self.input_norm, self.attention_conv)
        ranks, kv_parts = self.ranks, kv_parts_of(self.config, self.ranks)
        weights, caches = (self._of_ranks(name, kv_parts) for name in "qkvo"), split_cache(cache, ranks, kv_parts)
        with jax.named_scope("draft.o_proj"):
            out = ranks.sum(ranks.run(self._attention_of_rank, x, rope, context, *weights, caches))
        if self.config.attention_bias:
            out = out + fp32(self.o_bias[...])[None, None, :]
        stream = self.attention_conv.after(out, coefficients, stream)

        x, coefficients = self._conv_in(stream, self.pre_ffn_norm, self.mlp_conv)
        with jax.named_scope("draft.down_proj"):
            out = swiglu_mlp(x, self.gate_proj, self.up_proj, self.down_proj, self.mlp_ranks, SERVING, self.backend)
        return self.mlp_conv.after(out, coefficients, stream)

    def keys_values(self, x: jax.Array, rope: tuple) -> KV:
        """Of rows of the context, [B, T, D], in the order of the caches: two of [B, K, T, H]. Context is not convolved."""
        ranks, kv_parts = self.ranks, kv_parts_of(self.config, self.ranks)
        results = ranks.run(self._keys_values_of_rank, x, rope, *(self._of_ranks(name, kv_parts) for name in "kv"))
        return join_caches([tuple(map(heads_first, pair)) for pair in results], ranks, kv_parts)

    def _attention_of_rank(self, x: jax.Array, rope: tuple, context: DecodeContext, q, k, v, o, cache: KV) -> jax.Array:
        """A rank's heads, and what they add to the output: [B, T, D] fp32."""
        queries, *keys_values = self._projected(x, q, k, v)
        queries = self._normed_heads(queries, self.q_norm, rope)
        keys, values = self._as_keys_values(*keys_values, rope)
        scale = self.config.head_dim**-0.5
        out, _ = context.attend(queries, keys, values, cache, self.window, scale, SERVING)
        return _product(self.backend, round_to(out, self.dtype).reshape(*x.shape[:2], -1), o[0])

    def _keys_values_of_rank(self, x: jax.Array, rope: tuple, k, v) -> KV:
        """Two of [B, T, K, H]."""
        return self._as_keys_values(*self._projected(x, k, v), rope)

    def _as_keys_values(self, keys: jax.Array, values: jax.Array, rope: tuple) -> KV:
        return self._normed_heads(keys, self.k_norm, rope), round_to(self._heads(values), self.dtype)

    def _projected(self, x: jax.Array, *projections: tuple[jax.Array, ...]) -> list[jax.Array]:
        """[B, T, in] -> for each projection, weight [out, in] and perhaps bias [out], [B, T, out] fp32."""
        outs = self.backend.linears(x, [weight for weight, *_ in projections], FP32)
        biases = [bias for _, *bias in projections]
        return [out + fp32(bias[0])[None, None, :] if bias else out for out, bias in zip(outs, biases, strict=True)]

    def _of_ranks(self, name: str, kv_parts: int) -> list[tuple[jax.Array, ...]]:
        """Each rank's part of a projection, and of its bias if the checkpoint has one; o_proj is cut by columns."""
        axis, parts = int(name == "o"), kv_parts if name in "kv" else None
        weights = self.ranks.split(getattr(self, f"{name}_proj")[...], axis, parts)
        if not self.config.attention_bias or name == "o":
            return [(weight,) for weight in weights]
        return list(zip(weights, self.ranks.split(getattr(self, f"{name}_bias")[...], 0, parts), strict=True))

    def _conv_in(self, stream: jax.Array, norm: nnx.Param, conv: DynamicConv) -> tuple[jax.Array, jax.Array]:
        x = plain_norm(stream, norm, self.config.rms_norm_eps, self.dtype)
        coefficients = conv.coefficients(x)
        return conv.before(x, coefficients, self.dtype), coefficients

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _normed_heads(self, x: jax.Array, norm: nnx.Param, rope: tuple) -> jax.Array:
        """[B, T, heads * H] fp32 -> [B, T, heads, H], normed, rotated and rounded."""
        x = ops.rms(self._heads(x), self.config.rms_norm_eps) * fp32(norm[...])[None, None, None, :]
        return ops.apply_rope(x, rope, SERVING, self.dtype)


def _product(backend: Backend, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W^T, fp32. x: [B, T, in].  weight: [out, in]."""
    return backend.linears(x, (weight,), FP32)[0]


class DFlash2(nnx.Module):
    """The draft model.

    Args:
      config: facts of the checkpoint.
      dtype: bfloat16 or float32, of parameters and GEMM inputs.
      sharding, backend: as in `MuseSpark`.

    It is made without arrays: parameters come from a checkpoint, or from whoever trains one.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        dtype: jnp.dtype = jnp.bfloat16,
        sharding: ShardingConfig = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.config, self.dtype, self.sharding, self.backend = config, dtype, sharding, backend
        specs = {spec.path: spec for spec in draft_tensors(config)}
        param = Parameters(config, specs, dtype, None, sharding, backend)
        self.fc_ranks, self.selector_ranks = param.ranks("fc"), param.ranks("selector_projection")
        self.vocab_ranks = param.ranks("predecessor_codebook")
        self.fc, self.hidden_norm = param("fc"), param("hidden_norm")
        self.layers = nnx.List(DraftLayer(i, config, dtype, param.at("layers", i)) for i in range(config.num_hidden_layers))
        self.final_norm = param("final_norm")
        self.predecessor_codebook, self.successor_codebook = param("predecessor_codebook"), param("successor_codebook")
        self.selector_projection = param("selector_projection")
        if config.has_mask_embedding:
            self.mask_embedding = param("mask_embedding")

    def context_keys_values(self, taps: jax.Array, positions: jax.Array) -> list[KV]:
        """What committed tokens add to the context, for every layer.

        Args:     taps: [B, T, taps * D], outputs of the target's layers `config.target_layer_ids`, side by side.
                  positions: [B or 1, T] int32, of the tokens.
        Returns:  a pair per layer in the order of the caches, [B, K, T, H]; keys are normed and rotated.
        """
        ranks = self.fc_ranks
        taps = ranks.select(round_to(fp32(taps), self.dtype), -1)
        with jax.named_scope("draft.fc"):
            x = ranks.sum(ranks.run(functools.partial(_product, self.backend), taps, ranks.split(self.fc[...], 1)))
        x = plain_norm(x, self.hidden_norm, self.config.rms_norm_eps, self.dtype)
        rope = self._rope(positions)
        return [layer.keys_values(x, rope) for layer in self.layers]

    def block_context(self, cache: KVCache, start: jax.Array) -> DecodeContext:
        """What the rows of a block see. cache: of the draft.  start: [B] int32, committed positions, so the anchors'."""
        rows = jnp.arange(self.config.block_size, dtype=jnp.int32)
        depth, *visible = (
            jnp.broadcast_to(x[None], (start.shape[0], *x.shape)) for x in (rows, *block_visibility(self.config))
        )
        return self.backend.decode_context(cache, start, depth, tuple(visible), self.config)

    def embed(self, anchor: jax.Array, embedding: jax.Array) -> jax.Array:
        """The block before the first layer.

        Args:     anchor: [B] int32, the last emitted tokens.  embedding: [V, D], the target's table (of a mesh, what this
                  device has), taken raw.
        Returns:  [B, block_size, D] fp32.
        """
        config = self.config
        ids = jnp.concatenate([anchor, jnp.int32([config.mask_token_id])])
        with jax.named_scope("draft.embed"):
            rows = self.vocab_ranks.lookup(embedding, ids)
        mask = self.mask_embedding[...] if config.has_mask_embedding else rows[-1]
        masks = jnp.broadcast_to(mask[None, None, :], (anchor.shape[0], config.num_predictions, config.hidden_size))
        block = fp32(jnp.concatenate([rows[:-1, None, :].astype(masks.dtype), masks], axis=1))
        return fp32(round_to(block * config.input_embedding_scale, self.dtype))

    def __call__(self, block: jax.Array, context: DecodeContext, caches: list[KV]) -> jax.Array:
        """Runs the layers over one block, or several of the same sequence side by side.

        Args:     block: [B, T, D] fp32, from `embed`.  context: positions and what each row sees.
                  caches: context keys and values of every layer, as `context.attend` takes them.
        Returns:  [B, T, D], after the final norm, rounded. Row 0 of a block predicts nothing.
        """
        rope = self._rope(context.positions)
        stream = block
        for layer, cache in zip(self.layers, caches, strict=True):
            stream = layer(stream, rope, cache, context)
        return plain_norm(stream, self.final_norm, self.config.rms_norm_eps, self.dtype)

    def logits(self, hidden: jax.Array, lm_head: jax.Array) -> jax.Array:
        """hidden: [B, T, D].  lm_head: [V, D], the target's.  Returns [B, T, V] fp32, with the draft's multiplier and cap."""
        return self._transform(_product(self.backend, hidden, lm_head))

    def candidates(self, hidden: jax.Array, lm_head: jax.Array, valid_vocab: int) -> tuple[jax.Array, jax.Array]:
        """The likeliest tokens of every position on their own.

        Args:     hidden: [B, P, D].  lm_head: [V, D], of a mesh what this device has.  valid_vocab: static; ids from here on
                  are never candidates.
        Returns:  ids [B, P, top_k] int32, best first, ties to the lowest id; their logits, fp32.
        """
        ranks = self.vocab_ranks
        raw = ranks.run(functools.partial(_product, self.backend), hidden, ranks.split(lm_head, 0))
        raw = mask_padding(raw, valid_vocab, ranks)
        # Multiplier and cap keep the order.
        with jax.named_scope("draft.candidates"):
            best, ids = top_candidates(raw, self.config.selector_top_k, ranks)
        return ids, self._transform(best)

    def lattice(self, hidden: jax.Array, anchor: jax.Array, ids: jax.Array, unary: jax.Array) -> jax.Array:
        """Scores of every candidate after every candidate of the position before.

        Args:     hidden: [B, P, D].  anchor: [B].  ids, unary: [B, P, top_k], from `candidates`.
        Returns:  [B, P, top_k before, top_k] fp32; before position 0 there is only the anchor, so its rows are equal.
        """
        ranks = self.selector_ranks
        with jax.named_scope("draft.selector"):
            weights = ranks.split(self.selector_projection[...], 0)
            projected = ranks.gather(ranks.run(functools.partial(_product, self.backend), hidden, weights), -1)
        first = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, ids.shape[2]))
        before = jnp.concatenate([first, ids[:, :-1]], axis=1)
        with jax.named_scope("draft.codebooks"):
            left = self.vocab_ranks.lookup(self.predecessor_codebook[...], before)
            right = self.vocab_ranks.lookup(self.successor_codebook[...], ids)
        return self.backend.lattice(projected, left, right, unary)

    def _rope(self, positions: jax.Array) -> tuple:
        inv_freq = ops.rope_inverse_frequencies(self.config.rope_theta, self.config.head_dim)
        return ops.rope_tables(positions, inv_freq, SERVING, self.dtype)

    def _transform(self, logits: jax.Array) -> jax.Array:
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def block_visibility(config: DraftConfig) -> tuple[jax.Array, jax.Array]:
    """Which rows of a block its rows see in full layers and in sliding layers: two of [block_size, block_size] bool."""
    rows = jnp.arange(config.block_size, dtype=jnp.int32)
    distance = rows[:, None] - rows[None, :]

    def visible(kind: AttentionKind) -> jax.Array:
        return distance >= 0 if config.causal(kind) else jnp.ones_like(distance, bool)

    near = jnp.abs(distance) < (config.sliding_window or 1)
    return visible(AttentionKind.GLOBAL), visible(AttentionKind.SLIDING) & near


def plain_norm(x: jax.Array, weight: nnx.Param, eps: float, dtype: jnp.dtype) -> jax.Array:
    """rms(x) w, rounded once. x: [B, T, D]."""
    return round_to(ops.rms(x, eps) * fp32(weight[...])[None, None, :], dtype)
