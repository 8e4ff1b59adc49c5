"""The operations of a decoder layer in plain jnp: the reference of every backend.

Those with one rounding only are the references of their kernels, in `pallas_kernels`; the others have `Numerics`.

Arrays between operations have the model's dtype (bfloat16 or float32) unless a name or docstring says fp32. Matrices are
[out, in] as in the checkpoint. `Numerics` says where to round; `round_to` does it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from muse_jax import nvfp4
from muse_jax.config import RESIDUAL_GATE_FLOOR, ModelConfig
from muse_jax.numerics import Numerics, fp32, product, round_to
from muse_jax.nvfp4 import NVFP4Weight
from pallas_kernels.dense_gemm.reference import dense as linears  # noqa: F401
from pallas_kernels.grouped_conv.reference import grouped_conv as grouped_conv
from pallas_kernels.lattice.reference import lattice as lattice
from pallas_kernels.numerics import linear, rms
from pallas_kernels.nvfp4_gemm.packing import PackedWeights
from pallas_kernels.route import reference as route_reference

# ---------------------------------------------------------------------------------------------------------------- GEMMs


def gated_linear(x: jax.Array, gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
    """silu(x gate^T) (x up^T), rounded. gate, up: [out, in]."""
    return swiglu(linear(x, gate), linear(x, up), numerics, x.dtype)


# ---------------------------------------------------------------------------------------------------------------- norms


def one_plus(weight: jax.Array, numerics: Numerics) -> jax.Array:
    """The scale of a zero-centred norm, fp32. transformers adds in the weight's own dtype."""
    scale = 1.0 + fp32(weight)
    return fp32(round_to(scale, weight.dtype)) if numerics.one_plus_w_rounded else scale


def centred_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """rms(x) (1 + w), rounded: the norms that feed a GEMM (input, pre-FFN, pre-expert)."""
    return round_to(rms(x, eps) * _row(one_plus(weight, numerics), x), dtype)


def input_scaled_norm(x: jax.Array, weight: jax.Array, eps: float, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """rms(x (1 + w)), fp32 and not rounded: scaled *before* the norm (post-expert, post-FFN)."""
    return rms(input_scale(x, weight, numerics, dtype), eps)


def input_scale(x: jax.Array, weight: jax.Array, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """x (1 + w), fp32."""
    scaled = fp32(x) * _row(one_plus(weight, numerics), x)
    return fp32(round_to(scaled, dtype)) if numerics.input_scaled_rounded else scaled


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


# ------------------------------------------------------------------------------------------------- residual gate, SwiGLU


@functools.partial(jax.tree_util.register_dataclass, data_fields=["alpha", "beta"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class GateFactors:
    """What a residual gate multiplies stream and branch by, [D] fp32 each; they depend on weights alone."""

    alpha: jax.Array
    beta: jax.Array

    @classmethod
    def create(cls, gate: jax.Array, temperature: float) -> GateFactors:
        """beta = sigmoid(gate / temperature); alpha^2 = 1 - beta^2, floored."""
        w = gate / temperature
        beta = jax.nn.sigmoid(w)
        return cls(jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-w) * (1.0 + beta), RESIDUAL_GATE_FLOOR)), beta)


def residual_gate(stream: jax.Array, branch: jax.Array, gate: jax.Array | GateFactors, temperature: float) -> jax.Array:
    """alpha stream + beta branch, fp32.

    Args:     stream, branch: [B, T, D].  gate: [D] fp32, or its factors.
    Source:   transformers 5.24.0, MuseSparkResidualGate.
    """
    factors = gate if isinstance(gate, GateFactors) else GateFactors.create(gate, temperature)
    return product(_row(factors.alpha, stream), fp32(stream)) + product(_row(factors.beta, stream), fp32(branch))


def blend_norm(
    stream: jax.Array,
    branch: jax.Array,
    gate: jax.Array | GateFactors,
    branch_weight: jax.Array | None,
    next_weight: jax.Array | None,
    config: ModelConfig,
    numerics: Numerics,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """The end of a branch: its post-norm, the residual gate, and the norm that feeds the next GEMM.

    Args:     stream, branch: [B, T, D].  gate: of `residual_gate`.  branch_weight: [D], scales the branch before its norm;
              None: it has no weight.  next_weight: [D]; None: there is no next norm here.
    Returns:  the new stream, and what is next read of it, rounded.
    """
    if branch_weight is None:
        branch = rms(branch, config.post_norm_eps)
    else:
        branch = input_scaled_norm(branch, branch_weight, config.post_norm_eps, numerics, dtype)
    if numerics.post_norm_rounded:
        branch = round_to(branch, dtype)
    stream = residual_gate(stream, branch, gate, config.residual_gate_temperature)
    if numerics.stream_rounded:
        stream = round_to(stream, dtype)
    return stream, None if next_weight is None else centred_norm(stream, next_weight, config.rms_norm_eps, numerics, dtype)


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
    products = [product(first, cos), product(-second, sin), product(second, cos), product(first, sin)]
    if numerics.rope_steps_rounded:
        products = [fp32(round_to(xy, dtype)) for xy in products]
    return round_to(jnp.concatenate([products[0] + products[1], products[2] + products[3]], axis=-1), dtype)


# ------------------------------------------------------------------------------------------------------------ attention


def qk_norm_rope(
    q: jax.Array, k: jax.Array, rope: tuple | None, config: ModelConfig, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Norm of each head of q and k, q's factor where it is not part of the softmax scale, and RoPE.

    Args:     q: [B, T, N, H] and k: [B, T, K, H], rounded.  rope: of `rope_tables`; None for a layer without positions.
    Returns:  both, of the same shapes, rounded.
    """
    dtype, heads = q.dtype, q.shape[2]
    step = (lambda y: fp32(round_to(y, dtype))) if numerics.qk_norm_rounded else (lambda y: y)
    qk = step(rms(jnp.concatenate([q, k], axis=2), config.rms_norm_eps))  # one array: fewer operations to compile
    if numerics.qk_scale_in_q:
        factors = jnp.where(jnp.arange(qk.shape[2]) < heads, config.qk_scale_factor, 1.0)
        qk = step(qk * factors[None, None, :, None])
    qk = round_to(qk, dtype) if rope is None else apply_rope(qk, rope, numerics, dtype)
    q, k = jnp.split(qk, [heads], axis=2)
    return q, k


def out_gate(out: jax.Array, gate: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """rms of each head's output times sigmoid(gate).

    Args:     out: [B, T, N, H] fp32.  gate: [B, T, N, H], rounded.
    Returns:  [B, T, N, H] of gate's dtype.
    """
    dtype = gate.dtype
    step = (lambda y: fp32(round_to(y, dtype))) if numerics.out_gate_steps_rounded else (lambda y: y)
    out = step(rms(step(out), eps))
    return round_to(out * step(jax.nn.sigmoid(fp32(gate))), dtype)


# ------------------------------------------------------------------------------------------------------------------ MoE


def route(
    x: jax.Array, router: jax.Array, bias: jax.Array, top_k: int, multiplier: float, scaling: float
) -> tuple[jax.Array, jax.Array]:
    """Chooses `top_k` experts per token; the bias affects the choice, not the weights.

    Args:     x: [R, D], after the pre-FFN norm.  router: [E, D] fp32.  bias: [E] fp32.
    Returns:  idx [R, top_k] int32, best first, ties to the lowest id; weights [R, top_k] fp32, sum `scaling`.
    Rounding: fp32 throughout, no TF32.    Source: transformers 5.24.0, MuseSparkTopkRouter.
    """
    return route_reference.route(linear(fp32(x), router), bias, top_k, multiplier, scaling)


def combine(rows: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """sum_k weights_k rows_k: products and sum fp32, one rounding. rows: [R, top_k, M]; weights: [R, top_k] fp32."""
    return round_to(jnp.sum(fp32(rows) * weights[..., None], axis=1), dtype)


ExpertWeight = jax.Array | NVFP4Weight | PackedWeights
ACTIVATIONS = ("bf16", "nvfp4")  # of GEMMs with NVFP4 weights: W4A16 and W4A4


def expert_linear(x: jax.Array | NVFP4Rows, weight: ExpertWeight, activations: str) -> jax.Array:
    """x W^T with one expert's matrix, or with its gate and up matrices.

    NVFP4 weights are contracted as the exact e2m1 e4m3, and the accumulator is multiplied by the global scale of each matrix.
    With activations "nvfp4" the rows of x are quantised first, if they are not yet (`quantize_rows`). What they decode to is
    exact in the model's dtype.

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
        rows = x if isinstance(x, NVFP4Rows) else quantize_rows(x)
        x = rows.decode()
        scale = scale * lax.expand_dims(rows.row_scale, range(1, scale.ndim))
    return gemm(x, weight.decode(x.dtype)) * scale


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "block_scales", "row_scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class NVFP4Rows:
    """Quantised activations [..., K] of a model of `dtype`."""

    codes: jax.Array  # [..., K/2] uint8
    block_scales: jax.Array  # [..., K/16] float8_e4m3fn
    row_scale: jax.Array  # [...] fp32, multiplies
    dtype: jnp.dtype

    def decode(self) -> jax.Array:
        """[..., K] without the scales of the rows."""
        return nvfp4.decode(self.codes, self.block_scales, self.dtype)


def quantize_rows(x: jax.Array, amax: jax.Array | None = None) -> NVFP4Rows:
    """Rows of activations, or pieces of rows with these largest magnitudes, in NVFP4.

    They are first rounded to bfloat16, in an fp32 model too: that is what the quantiser of the GPU kernels reads, so an fp32
    model is a reference for them.
    """
    return NVFP4Rows(*nvfp4.quantize_rows(round_to(fp32(x), jnp.bfloat16), amax), dtype=x.dtype)


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
    if not isinstance(gate_up, jax.Array):  # one expert after another, so that no more than one is there decoded
        experts = jnp.arange(gate_up.shape[0])
        out = lax.map(lambda i: expert(x, *of_expert((gate_up, down), i), numerics, activations), experts)
        return out[idx, jnp.arange(x.shape[0])[:, None]]
    hidden = jnp.einsum("rm,ecfm->cref", x, gate_up, precision="highest", preferred_element_type=jnp.float32)
    hidden = swiglu(hidden[0], hidden[1], numerics, dtype)
    out = jnp.einsum("ref,emf->rem", hidden, down, precision="highest", preferred_element_type=jnp.float32)
    return jnp.take_along_axis(round_to(out, dtype), idx[:, :, None], axis=1)


_FEW_ROWS = 32  # rows of one step: a token, or a tree
_CHUNK = 8  # experts of a step on a GPU: enough to keep an H200 busy, and few to run in vain at the end
_FEW_ROUTED = 512  # routed rows up to which counting is quick; XLA compiles running sums and a scatter for each layer anew


def experts(
    x: jax.Array, idx: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, numerics: Numerics, activations: str = "bf16"
) -> jax.Array:
    """Each row through its own experts only. Arguments and result are those of `experts_dense`.

    Routed rows are cut into blocks that belong to one expert each, so that a block is two small GEMMs with that expert's
    matrices and no matrix is copied per row. NVFP4 weights are decoded within a block, or a chunk of them.
    """
    (rows, top_k), num_experts = idx.shape, gate_up.shape[0]
    weights = gate_up, down

    def one_block(x_block: jax.Array, weights: tuple[ExpertWeight, ExpertWeight]) -> jax.Array:
        return expert(x_block, *weights, numerics, activations)

    def one_token() -> jax.Array:  # its experts are distinct, there is nothing to sort
        return jnp.stack([one_block(x, of_expert(weights, idx[0, k])) for k in range(top_k)], axis=1)

    def in_blocks(chunked: bool = False) -> jax.Array:
        blocks = Blocks.create(idx, num_experts, chunked=chunked)
        return blocks.run(lambda source, weights: one_block(x[lax.div(source, jnp.int32(top_k))], weights), weights)

    if rows <= _FEW_ROWS and rows * top_k >= 2 * num_experts:
        # About every expert has a row, so all weights are read anyhow, and few rows cost little: two GEMMs in place of a
        # loop over blocks (16 rows, 4 of 16 experts, two CPU cores: 0.3 ms against 0.5-0.8 ms).
        return experts_dense(x, idx, gate_up, down, numerics, activations)
    return few_on_gpu(rows, functools.partial(in_blocks, chunked=True), one_token if rows == 1 else in_blocks)


def few_on_gpu(rows: int, few: Callable[[], Any], others: Callable[[], Any]) -> Any:
    """few() where a program for a GPU runs a step of so few rows, else others(): two forms of one result.

    Blocks of few rows, one after the other, leave most of a GPU idle; a CPU is faster with them. The platform is known when a
    program is lowered: both forms are traced, one is lowered and compiled.
    """
    return lax.platform_dependent(cuda=few, rocm=few, default=others) if rows <= _FEW_ROWS else others()


def of_expert(weights: Any, expert_idx: jax.Array) -> Any:
    """One expert's part of stacked weights, or of several of them; packed ones are unpacked.

    expert_idx: int32, an expert; or [n], for the parts of n experts side by side.
    """
    several = expert_idx.ndim > 0

    def of_one(weight: ExpertWeight) -> jax.Array | NVFP4Weight:
        part = jax.tree.map(lambda x: x[expert_idx] if several else lax.dynamic_index_in_dim(x, expert_idx), weight)
        part = part if isinstance(weight, (jax.Array, NVFP4Weight)) else unpacked(part)
        return part if several else jax.tree.map(lambda x: lax.squeeze(x, [0]), part)

    return jax.tree.map(of_one, weights, is_leaf=lambda x: not isinstance(x, tuple))


def unpacked(weight: PackedWeights) -> NVFP4Weight:
    """Weights of experts in the order of the checkpoint."""
    codes, block_scales, global_scale = weight.unpack()
    return NVFP4Weight(codes, block_scales, global_scale, jnp.ones_like(global_scale))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["source", "expert", "place", "used"], meta_fields=["all_held"]
)
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Routed rows (row r's slot k is routed row r * top_k + k) in the order of experts and cut into blocks of one expert each.

    Shapes are fixed: the number of blocks is the most that any routing can need.

    In chunks, a block has room for every row, so that each chosen expert has one, and a step runs several blocks as batched
    GEMMs, whose batch is the experts. How many does not depend on the number of experts held: these GEMMs have one shape on
    every device in every layout, and which experts share a batch makes no difference to any of them.
    """

    source: jax.Array  # [steps, (blocks of a step,) rows of a block] int32: the routed row in each place; anything if left over
    expert: jax.Array  # [steps, (blocks of a step)] int32; of blocks left over, that of the last used
    place: jax.Array  # [R, top_k] int32: the place of each routed row, in all blocks; beyond them, of an expert not held
    used: jax.Array  # int32: steps that hold a row
    all_held: bool

    @classmethod
    def create(
        cls, idx: jax.Array, num_experts: int, held: tuple[jax.Array, int] | None = None, chunked: bool = False
    ) -> Blocks:
        """idx: [R, top_k], expert ids.  held: first and number of the experts to run; None: all."""
        routed = idx.size
        first, num_held = (jnp.int32(0), num_experts) if held is None else held
        block = len(idx) if chunked else _block_rows(routed, num_experts)
        num_blocks = (routed + min(num_held, routed) * (block - 1)) // block
        at_once = min(_CHUNK, num_experts, routed) if chunked else 1
        num_blocks += -num_blocks % at_once
        rows, held_idx = jnp.arange(routed, dtype=jnp.int32), jnp.arange(num_held, dtype=jnp.int32)
        expert_of = idx.reshape(routed) - first

        def sum_rows(x: jax.Array) -> jax.Array:
            return jnp.sum(x, axis=1, dtype=jnp.int32)

        is_of = expert_of[:, None] == held_idx[None, :]
        blocks_of = lax.div(jnp.sum(is_of, axis=0, dtype=jnp.int32) + (block - 1), jnp.int32(block))
        last_block = sum_rows(jnp.where(held_idx[None, :] <= held_idx[:, None], blocks_of[None, :], 0))
        first_block = sum_rows(jnp.where(held_idx[None, :] < expert_of[:, None], blocks_of[None, :], 0))
        few = routed <= _FEW_ROUTED
        if few:
            rank = sum_rows((expert_of[None, :] == expert_of[:, None]) & (rows[None, :] < rows[:, None]))
        else:
            rank = sum_rows(jnp.where(is_of, jnp.cumsum(is_of, axis=0, dtype=jnp.int32) - 1, 0))
        # A routed row's place: its expert's first block, plus its rank among that expert's rows.
        place = first_block * block + rank
        if held is not None:
            place = jnp.where(jnp.any(is_of, axis=1), place, num_blocks * block)
        places = jnp.arange(num_blocks * block, dtype=jnp.int32)
        if few:
            source = sum_rows(jnp.where(places[:, None] == place[None, :], rows[None, :], 0))
        else:
            source = jnp.zeros_like(places).at[place].set(rows, mode="drop", unique_indices=held is None)
        block_idx = jnp.minimum(jnp.arange(num_blocks, dtype=jnp.int32), last_block[-1] - 1)
        expert = sum_rows(last_block[None, :] <= block_idx[:, None])
        shape = (num_blocks // at_once, at_once) if chunked else (num_blocks,)
        return cls(
            source=source.reshape(*shape, block),
            expert=expert.reshape(shape),
            place=place.reshape(idx.shape),
            used=lax.div(last_block[-1] + (at_once - 1), jnp.int32(at_once)),
            all_held=held is None,
        )

    def run(
        self,
        function: Callable[[jax.Array, Any], jax.Array],
        weights: Any,
        as_call: Callable[[Callable], Callable] = lambda step: step,
    ) -> jax.Array:
        """function(routed rows of a block, weights of its expert) -> [rows of a block, N], one step after the other.

        Args:     weights: of all experts held, as `of_expert` takes them.  as_call: makes a call of a step.
        Returns:  [R, top_k, N]; garbage for rows of experts that are not held.
        """
        chunked = self.expert.ndim > 1
        of_step = jax.vmap(function) if chunked else function

        @as_call
        def step(source: jax.Array, expert_idx: jax.Array) -> jax.Array:
            return of_step(source, of_expert(weights, expert_idx))

        if self.all_held and not chunked:
            _, out = lax.scan(lambda _, inputs: (None, step(*inputs)), None, (self.source, self.expert))
        else:  # most steps may be empty

            def body(i: jax.Array, out: jax.Array) -> jax.Array:
                return lax.dynamic_update_index_in_dim(out, step(self.source[i], self.expert[i]), i, 0)

            shape = jax.eval_shape(step, self.source[0], self.expert[0])
            out = lax.fori_loop(0, self.used, body, jnp.zeros((len(self.source), *shape.shape), shape.dtype))
        return out.reshape(self.source.size, -1)[self.place]


def _block_rows(routed: int, num_experts: int) -> int:
    """Rows per block: near the mean load of an expert, at most 128 (beyond that a GEMM gains nothing)."""
    mean_load = max(1, routed // num_experts)
    return min(128, 1 << (mean_load - 1).bit_length())


def row_squares(rows: jax.Array, norm: jax.Array, numerics: Numerics) -> jax.Array:
    """The sum of squares of each piece of a row, scaled as the post-expert norm does first.

    Args:     rows: [R, top_k, m], pieces of routed rows, rounded.  norm: [m], the piece of the norm's weight.
    Returns:  [R, top_k, 1] fp32.
    """
    scaled = input_scale(rows, norm, numerics, rows.dtype)
    return jnp.sum(scaled * scaled, axis=-1, keepdims=True)


def combine_pieces(
    rows: jax.Array,
    norm: jax.Array,
    total: jax.Array,
    weights: jax.Array,
    chosen: jax.Array | None,
    config: ModelConfig,
    numerics: Numerics,
) -> jax.Array:
    """The weighted sum of normed rows over their slots, or over the chosen ones.

    Args:     rows, norm: as `row_squares`.  total: [R, top_k, 1] fp32, of whole rows.  weights: [R, top_k] fp32.
              chosen: [R, top_k] bool; None: all.
    Returns:  [R, m]: fp32 where slots were chosen, as more will be added, else rounded.
    """
    normed = input_scale(rows, norm, numerics, rows.dtype) * lax.rsqrt(total / config.moe_hidden_size + config.post_norm_eps)
    if numerics.post_expert_norm_rounded:
        normed = fp32(round_to(normed, rows.dtype))
    weighted = product(normed, weights[..., None])
    if chosen is None:
        return round_to(jnp.sum(weighted, axis=1), rows.dtype)
    return jnp.sum(jnp.where(chosen[..., None], weighted, 0.0), axis=1)


# ----------------------------------------------------------------------------------------------------------------- head


def vocabulary_logits(z: jax.Array, multiplier: float, cap: float, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """cap tanh(multiplier z / cap).

    Args:     z: [B, T, V] fp32, products of what the final norm gave and lm_head.
    Returns:  [B, T, V] fp32; with HF numerics every value is one of `dtype`.
    """
    step = (lambda z: fp32(round_to(z, dtype))) if numerics.logits_rounded else (lambda z: z)
    z = step(step(z) * multiplier)
    z = step(z / cap)
    return step(step(jnp.tanh(z)) * cap)
