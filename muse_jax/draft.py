"""The DFlash2 draft: one forward pass over [anchor, mask, mask, ...] proposes candidates for every following position.

    taps of the target -> fc -> norm = context, one row per committed token
    block -> [ convolution, attention to context and block, convolution, MLP, convolutions ] x layers -> norm
    -> the target's lm_head -> top candidates per position -> lattice of scores for pairs of neighbouring candidates

Formulas: dflash2.md section 2. Row i of the block predicts the token *at* its own position; row 0, the anchor, predicts
nothing. Values are rounded where they feed a GEMM; norms, convolutions, residual stream and scores are fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from muse_jax import ops
from muse_jax.config import AttentionKind
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import KV, DecodeContext, KVCache, heads_first
from muse_jax.layout import draft_tensors
from muse_jax.model import Parameters
from muse_jax.numerics import SERVING, fp32, round_to


class DynamicConv(nnx.Module):
    """Causal convolution over the rows of a block; per-channel kernels plus coefficients computed from the sublayer's input.

    It acts on both sides of a sublayer, on its input and on its output, and the input decides the coefficients of both.
    """

    def __init__(self, config: DraftConfig, param: Parameters):
        self.config = config
        self.base_kernel = param("base_kernel")
        self.kernel_projection = param("kernel_projection")

    def coefficients(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D], the sublayer's normed input. Returns [B, T, 2 sides, taps, groups] fp32."""
        config = self.config
        rows = ops.linear(x, self.kernel_projection[...])
        return rows.reshape(*x.shape[:2], 2, config.conv_kernel_size, config.conv_groups)

    def __call__(self, z: jax.Array, coefficients: jax.Array, side: int) -> jax.Array:
        """z: [B, T, D], T a multiple of block_size. Returns [B, T, D] fp32. No tap reaches into another block."""
        config = self.config
        batch, rows, _ = z.shape
        size = config.block_size
        # [B, blocks, rows of a block, groups, G]
        z = fp32(z).reshape(batch, rows // size, size, config.conv_groups, config.conv_group_size)
        base = fp32(self.base_kernel[...])[side].reshape(-1, 1, 1, 1, *z.shape[3:])
        delta = coefficients[:, :, side].reshape(*z.shape[:3], config.conv_kernel_size, config.conv_groups, 1)
        out = jnp.zeros_like(z)
        for tap in range(config.conv_kernel_size):
            shifted = jnp.pad(z[:, :, : size - tap], ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))
            out = out + (base[tap] + delta[:, :, :, tap]) * shifted
        return out.reshape(batch, rows, -1)


class DraftLayer(nnx.Module):
    """Attention of the block to context and block, then SwiGLU, each between two convolutions."""

    def __init__(self, layer_idx: int, config: DraftConfig, dtype: jnp.dtype, param: Parameters):
        self.config, self.dtype = config, dtype
        self.window = config.window(layer_idx)
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
        dtype = self.dtype
        x, coefficients = self._conv_in(stream, self.input_norm, self.attention_conv)
        q = self._normed_heads(self._project(x, "q"), self.q_norm, rope)
        k, v = self.keys_values(x, rope)
        out, _ = context.attend(q, k, v, cache, self.window, self.config.head_dim**-0.5, SERVING)
        out = self._project(round_to(out, dtype).reshape(*stream.shape[:2], -1), "o")
        stream = stream + self.attention_conv(out, coefficients, side=1)

        x, coefficients = self._conv_in(stream, self.pre_ffn_norm, self.mlp_conv)
        gate, up = ops.linear(x, self.gate_proj[...]), ops.linear(x, self.up_proj[...])
        out = ops.linear(ops.swiglu(gate, up, SERVING, dtype), self.down_proj[...])
        return stream + self.mlp_conv(out, coefficients, side=1)

    def keys_values(self, x: jax.Array, rope: tuple) -> KV:
        """Of rows of the block or of the context, [B, T, D]: two of [B, T, K, H]. Context is not convolved."""
        k = self._normed_heads(self._project(x, "k"), self.k_norm, rope)
        return k, round_to(self._heads(self._project(x, "v")), self.dtype)

    def _conv_in(self, stream: jax.Array, norm: nnx.Param, conv: DynamicConv) -> tuple[jax.Array, jax.Array]:
        x = plain_norm(stream, norm, self.config.rms_norm_eps, self.dtype)
        coefficients = conv.coefficients(x)
        return round_to(conv(x, coefficients, side=0), self.dtype), coefficients

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        """fp32, with bias where the checkpoint has one."""
        out = ops.linear(x, getattr(self, f"{name}_proj")[...])
        return out + fp32(getattr(self, f"{name}_bias")[...])[None, None, :] if self.config.attention_bias else out

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _normed_heads(self, x: jax.Array, norm: nnx.Param, rope: tuple) -> jax.Array:
        """[B, T, heads * H] fp32 -> [B, T, heads, H], normed, rotated and rounded."""
        x = ops.rms(self._heads(x), self.config.rms_norm_eps) * fp32(norm[...])[None, None, None, :]
        return ops.apply_rope(x, rope, SERVING, self.dtype)


class DFlash2(nnx.Module):
    """The draft model.

    Args:
      config: facts of the checkpoint.
      dtype: bfloat16 or float32, of parameters and GEMM inputs.

    It is made without arrays: parameters come from a checkpoint, or from whoever trains one.
    """

    def __init__(self, config: DraftConfig, *, dtype: jnp.dtype = jnp.bfloat16):
        self.config, self.dtype = config, dtype
        param = Parameters({spec.path: spec for spec in draft_tensors(config)}, dtype, rngs=None)
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
        x = plain_norm(
            ops.linear(round_to(fp32(taps), self.dtype), self.fc[...]), self.hidden_norm, self.config.rms_norm_eps, self.dtype
        )
        rope = self._rope(positions)
        return [tuple(map(heads_first, layer.keys_values(x, rope))) for layer in self.layers]

    def block_context(self, cache: KVCache, start: jax.Array) -> DecodeContext:
        """What the rows of a block see. cache: of the draft.  start: [B] int32, committed positions, so the anchors'."""
        rows = jnp.arange(self.config.block_size, dtype=jnp.int32)
        depth, *visible = (
            jnp.broadcast_to(x[None], (start.shape[0], *x.shape)) for x in (rows, *block_visibility(self.config))
        )
        return DecodeContext.create(cache, start, depth, tuple(visible), self.config)

    def embed(self, anchor: jax.Array, embedding: jax.Array) -> jax.Array:
        """The block before the first layer.

        Args:     anchor: [B] int32, the last emitted tokens.  embedding: [V, D], the target's table, taken raw.
        Returns:  [B, block_size, D] fp32.
        """
        config = self.config
        mask = self.mask_embedding[...] if config.has_mask_embedding else embedding[config.mask_token_id]
        masks = jnp.broadcast_to(mask[None, None, :], (anchor.shape[0], config.num_predictions, config.hidden_size))
        block = fp32(jnp.concatenate([embedding[anchor][:, None, :].astype(masks.dtype), masks], axis=1))
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
        return self._transform(ops.linear(hidden, lm_head))

    def candidates(self, hidden: jax.Array, lm_head: jax.Array, valid_vocab: int) -> tuple[jax.Array, jax.Array]:
        """The likeliest tokens of every position on their own.

        Args:     hidden: [B, P, D].  lm_head: [V, D].  valid_vocab: static; ids from here on are never candidates.
        Returns:  ids [B, P, top_k] int32, best first, ties to the lowest id; their logits, fp32.
        """
        raw = ops.linear(hidden, lm_head)
        if valid_vocab < raw.shape[-1]:
            raw = jnp.where(lax.broadcasted_iota(jnp.int32, raw.shape, 2) < valid_vocab, raw, -jnp.inf)
        # Multiplier and cap keep the order. The barriers keep slices of the results from reaching the top-k: XLA would see a
        # sort of the whole vocabulary in it (15 x 3,072 logits on two CPU cores: 6.6 ms against 0.1 ms, jax 0.10.2). One
        # barrier for both would make its partitioner fail.
        best, ids = map(lax.optimization_barrier, lax.top_k(raw, self.config.selector_top_k))
        return ids, self._transform(best)

    def lattice(self, hidden: jax.Array, anchor: jax.Array, ids: jax.Array, unary: jax.Array) -> jax.Array:
        """Scores of every candidate after every candidate of the position before.

        Args:     hidden: [B, P, D].  anchor: [B].  ids, unary: [B, P, top_k], from `candidates`.
        Returns:  [B, P, top_k before, top_k] fp32; before position 0 there is only the anchor, so its rows are equal.
        """
        projected = ops.linear(hidden, self.selector_projection[...])
        first = jnp.broadcast_to(anchor[:, None, None], (ids.shape[0], 1, ids.shape[2]))
        before = jnp.concatenate([first, ids[:, :-1]], axis=1)
        left = fp32(self.predecessor_codebook[...][before]) * projected[:, :, None, :]
        right = fp32(self.successor_codebook[...][ids])
        return unary[:, :, None, :] + jnp.einsum("bpir,bpjr->bpij", left, right, precision="highest")

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
