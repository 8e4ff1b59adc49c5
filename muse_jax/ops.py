"""The operations of a decoder layer in plain jnp: the reference of every backend.

Arrays between operations have the model's dtype (bfloat16 or float32) unless a name or docstring says fp32. Matrices are
[out, in] as in the checkpoint. `Numerics` says where to round; `round_to` does it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax import nvfp4
from muse_jax.config import RESIDUAL_GATE_FLOOR, ROUTER_RENORM_EPS
from muse_jax.numerics import Numerics, fp32, round_to
from muse_jax.nvfp4 import NVFP4Weight

# ---------------------------------------------------------------------------------------------------------------- GEMMs


def linear(x: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """x W^T with fp32 accumulation.

    Args:     x: [..., in].  weight_oi: [out, in], same dtype.
    Returns:  [..., out] fp32, not rounded.
    """
    # HIGHEST: float32 operands may otherwise go through TF32 on a GPU. It changes nothing for bfloat16.
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight_oi, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


# ---------------------------------------------------------------------------------------------------------------- norms


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, fp32."""
    x = fp32(x)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def one_plus(weight: jax.Array, numerics: Numerics) -> jax.Array:
    """The scale of a zero-centred norm, fp32. transformers adds in the weight's own dtype."""
    scale = 1.0 + fp32(weight)
    return fp32(round_to(scale, weight.dtype)) if numerics.one_plus_w_rounded else scale


def centred_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """rms(x) (1 + w), rounded: the norms that feed a GEMM (input, pre-FFN, pre-expert)."""
    return round_to(rms(x, eps) * _row(one_plus(weight, numerics), x), dtype)


def input_scaled_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """rms(x (1 + w)), fp32 and not rounded: scaled *before* the norm (post-expert, post-FFN)."""
    scaled = fp32(x) * _row(one_plus(weight, numerics), x)
    if numerics.input_scaled_rounded:
        scaled = round_to(scaled, dtype)
    return rms(scaled, eps)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


# ------------------------------------------------------------------------------------------------- residual gate, SwiGLU


def residual_gate(stream: jax.Array, branch: jax.Array, gate: jax.Array, temperature: float) -> jax.Array:
    """alpha stream + beta branch, fp32, with alpha^2 = 1 - beta^2 (floored).

    Args:     stream, branch: [B, T, D].  gate: [D] fp32.
    Source:   transformers 5.24.0, MuseSparkResidualGate.
    """
    w = gate / temperature
    beta = jax.nn.sigmoid(w)
    alpha = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-w) * (1.0 + beta), RESIDUAL_GATE_FLOOR))
    return _row(alpha, stream) * fp32(stream) + _row(beta, stream) * fp32(branch)


def swiglu(gate: jax.Array, up: jax.Array, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """silu(gate) up, rounded. gate and up are fp32 accumulators of one shape."""
    if numerics.swiglu_steps_rounded:
        gate, up = fp32(round_to(gate, dtype)), fp32(round_to(up, dtype))
        return round_to(fp32(round_to(gate * jax.nn.sigmoid(gate), dtype)) * up, dtype)
    return round_to(gate * jax.nn.sigmoid(gate) * up, dtype)


# ----------------------------------------------------------------------------------------------------------------- RoPE


def rope_inverse_frequencies(theta: float, head_dim: int) -> jax.Array:
    """[H/2] fp32, bit for bit those of transformers (muse_spark.md 8.2): the power is rounded to fp32, then inverted."""
    exponents = (np.arange(0, head_dim, 2) / head_dim).astype(np.float32)
    return jnp.asarray(np.float32(1) / np.power(theta, exponents, dtype=np.float64).astype(np.float32))


def rope_tables(positions: jax.Array, inv_freq: jax.Array, numerics: Numerics, dtype: jnp.dtype) -> tuple:
    """cos and sin of the angles at `positions`: two [B, T, H/2] fp32 arrays."""
    angles = fp32(positions)[..., None] * inv_freq[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if numerics.rope_tables_rounded:
        cos, sin = fp32(round_to(cos, dtype)), fp32(round_to(sin, dtype))
    return cos, sin


def apply_rope(x: jax.Array, tables: tuple, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """Rotates the pairs (x_j, x_{j + H/2}).

    Args:     x: [B, T, heads, H].  tables: cos and sin, [B, T, H/2] fp32.
    Returns:  [B, T, heads, H], rounded.
    """
    cos, sin = (table[:, :, None, :] for table in tables)
    first, second = jnp.split(fp32(x), 2, axis=-1)
    products = [first * cos, -second * sin, second * cos, first * sin]
    if numerics.rope_steps_rounded:
        products = [fp32(round_to(product, dtype)) for product in products]
    return round_to(jnp.concatenate([products[0] + products[1], products[2] + products[3]], axis=-1), dtype)


# ------------------------------------------------------------------------------------------------------------------ MoE


def route(
    x: jax.Array, router: jax.Array, bias: jax.Array, top_k: int, multiplier: float, scaling: float
) -> tuple[jax.Array, jax.Array]:
    """Chooses `top_k` experts per token; the bias affects the choice, not the weights.

    Args:     x: [R, D], after the pre-FFN norm.  router: [E, D] fp32.  bias: [E] fp32.
    Returns:  idx [R, top_k] int32, best first, ties to the lowest id; weights [R, top_k] fp32, sum `scaling`.
    Rounding: fp32 throughout, no TF32.    Source: transformers 5.24.0, MuseSparkTopkRouter.
    """
    scores = jax.nn.sigmoid(linear(fp32(x), router) * multiplier)
    _, idx = lax.top_k(scores + bias[None, :], top_k)
    chosen = jnp.take_along_axis(scores, idx, axis=-1)
    return idx, chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + ROUTER_RENORM_EPS) * scaling


def combine(rows: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """sum_k weights_k rows_k: products and sum fp32, one rounding. rows: [R, top_k, M]; weights: [R, top_k] fp32."""
    return round_to(jnp.sum(fp32(rows) * weights[..., None], axis=1), dtype)


ExpertWeight = jax.Array | NVFP4Weight
ACTIVATIONS = ("bf16", "nvfp4")  # of GEMMs with NVFP4 weights: W4A16 and W4A4


def expert_linear(x: jax.Array, weight: ExpertWeight, activations: str) -> jax.Array:
    """x W^T with one expert's matrix, or with its gate and up matrices.

    NVFP4 weights are contracted as the exact e2m1 e4m3, and the accumulator is multiplied by the global scale of each matrix.
    With activations "nvfp4" the rows of x are first rounded to bfloat16, in an fp32 model too: that is what the quantiser of
    the GPU kernels reads, so an fp32 model is a reference for them. What it decodes to is exact in the model's dtype.

    Args:     x: [R, in].  weight: [..., out, in]; an array has the dtype of x.
    Returns:  [R, ..., out] fp32, not rounded.
    """

    def gemm(x: jax.Array, matrices: jax.Array) -> jax.Array:
        # As one matrix: XLA for CPU takes up to three times as long over an axis of its own for gate and up.
        return linear(x, matrices.reshape(-1, matrices.shape[-1])).reshape(-1, *matrices.shape[:-1])

    if not isinstance(weight, NVFP4Weight):
        return gemm(x, weight)
    scale = weight.global_scale[None, ..., None]
    if activations == "nvfp4":
        codes, block_scales, row_scale = nvfp4.quantize_rows(round_to(fp32(x), jnp.bfloat16))
        x = nvfp4.decode(codes, block_scales, x.dtype)
        scale = scale * lax.expand_dims(row_scale, range(1, scale.ndim))
    return gemm(x, weight.decode(x.dtype)) * scale


def expert(x: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, numerics: Numerics, activations: str) -> jax.Array:
    """One expert on every row. x: [R, M].  gate_up: [2, F, M].  down: [M, F].  Returns [R, M], rounded."""
    hidden = expert_linear(x, gate_up, activations)
    hidden = swiglu(hidden[:, 0], hidden[:, 1], numerics, x.dtype)
    return round_to(expert_linear(hidden, down, activations), x.dtype)


def experts_dense(
    x: jax.Array, idx: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, numerics: Numerics, activations: str = "bf16"
) -> jax.Array:
    """Every expert on every row, then a choice: the reference of `experts`, and differentiable.

    Args:     x: [R, M].  idx: [R, top_k].  gate_up: [E, 2, F, M].  down: [E, M, F].  activations: with NVFP4 weights, "bf16",
              or "nvfp4" to quantise what enters either GEMM, row by row.
    Returns:  [R, top_k, M], each routed row's down projection, rounded.
    """
    dtype = x.dtype
    if isinstance(gate_up, NVFP4Weight):  # one expert after another, so that no more than one is there decoded
        out = lax.map(lambda weights: expert(x, *weights, numerics, activations), (gate_up, down))
        return out[idx, jnp.arange(x.shape[0])[:, None]]
    hidden = jnp.einsum("rm,ecfm->cref", x, gate_up, precision="highest", preferred_element_type=jnp.float32)
    hidden = swiglu(hidden[0], hidden[1], numerics, dtype)
    out = jnp.einsum("ref,emf->rem", hidden, down, precision="highest", preferred_element_type=jnp.float32)
    return jnp.take_along_axis(round_to(out, dtype), idx[:, :, None], axis=1)


_FEW_ROWS = 32  # rows of one step: a token, or a tree


def experts(
    x: jax.Array, idx: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, numerics: Numerics, activations: str = "bf16"
) -> jax.Array:
    """Each row through its own experts only. Arguments and result are those of `experts_dense`.

    Routed rows are sorted by expert and cut into blocks that belong to one expert each, so that a block is two small GEMMs
    with that expert's matrices and no matrix is copied per row. Shapes are fixed: the number of blocks is the most that
    any routing can need. NVFP4 weights are decoded within a block.
    """
    (rows, top_k), num_experts = idx.shape, gate_up.shape[0]
    routed = rows * top_k

    def one_block(x_block: jax.Array, expert_idx: jax.Array) -> jax.Array:
        of_expert = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert_idx, keepdims=False), (gate_up, down))
        return expert(x_block, *of_expert, numerics, activations)

    if rows <= _FEW_ROWS and routed >= 2 * num_experts:
        # About every expert has a row, so all weights are read anyhow, and few rows cost little: two GEMMs in place of a
        # loop over blocks (16 rows, 4 of 16 experts, two CPU cores: 0.3 ms against 0.5-0.8 ms).
        return experts_dense(x, idx, gate_up, down, numerics, activations)
    if rows == 1:  # one token: its experts are distinct, there is nothing to sort
        out = [one_block(x, idx[0, k]) for k in range(top_k)]
        return jnp.stack(out, axis=1)

    block = _block_rows(routed, num_experts)
    num_blocks = (routed + min(num_experts, routed) * (block - 1)) // block
    expert_of = idx.reshape(routed)
    order = jnp.argsort(expert_of, stable=True).astype(jnp.int32)
    counts = jnp.sum(expert_of[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    blocks_of = (counts + block - 1) // block
    last_block = jnp.cumsum(blocks_of, dtype=jnp.int32)
    # A routed row's place: its expert's first block, plus its rank among that expert's rows.
    sorted_expert = expert_of[order]
    rank = jnp.arange(routed, dtype=jnp.int32) - (jnp.cumsum(counts, dtype=jnp.int32) - counts)[sorted_expert]
    place = (last_block - blocks_of)[sorted_expert] * block + rank
    source = jnp.zeros(num_blocks * block, jnp.int32).at[place].set(order // top_k, unique_indices=True)
    expert_of_block = jnp.searchsorted(last_block, jnp.arange(num_blocks), side="right")
    expert_of_block = jnp.minimum(expert_of_block, num_experts - 1)

    def body(_, block_inputs):
        rows_of_block, expert_idx = block_inputs
        return None, one_block(x[rows_of_block], expert_idx)

    _, out = lax.scan(body, None, (source.reshape(num_blocks, block), expert_of_block))
    place_of = jnp.zeros(routed, jnp.int32).at[order].set(place, unique_indices=True)
    return out.reshape(num_blocks * block, -1)[place_of].reshape(rows, top_k, -1)


def _block_rows(routed: int, num_experts: int) -> int:
    """Rows per block: near the mean load of an expert, at most 128 (beyond that a GEMM gains nothing)."""
    mean_load = max(1, routed // num_experts)
    return min(128, 1 << (mean_load - 1).bit_length())


# ----------------------------------------------------------------------------------------------------------------- head


def vocabulary_logits(
    x: jax.Array, lm_head: jax.Array, multiplier: float, cap: float, numerics: Numerics, dtype: jnp.dtype
) -> jax.Array:
    """cap tanh(multiplier x W^T / cap).

    Args:     x: [B, T, D], after the final norm.  lm_head: [V, D].
    Returns:  [B, T, V] fp32; with HF numerics every value is one of `dtype`.
    """
    step = (lambda z: fp32(round_to(z, dtype))) if numerics.logits_rounded else (lambda z: z)
    z = step(linear(x, lm_head))
    z = step(z * multiplier)
    z = step(z / cap)
    return step(step(jnp.tanh(z)) * cap)
