"""Routed experts cut among ranks: three layouts, one arithmetic.

    "n"           a rank has an eighth of the output rows of every matrix: hidden rows are gathered between the GEMMs
    "expert"      a rank has an eighth of the experts, whole: only weighted sums are exchanged
    "replicated"  a device has everything: nothing is exchanged

Whoever holds a matrix multiplies with it in eight pieces of its output rows, sums squares of a row in eight pieces added in
order, and weights and adds up piece by piece. So every operation has one shape in all layouts and for any number of devices,
and the results have the same bits (muse_spark.md 5.3). "expert" has to add up slots within a rank first, then over ranks;
`ShardingConfig.group_slots` makes the others do the same, for comparison.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax import nvfp4, ops
from muse_jax.config import NVFP4_BLOCK, ModelConfig
from muse_jax.layout import NUM_RANKS
from muse_jax.numerics import Numerics, fp32, round_to
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.ops import Blocks, ExpertWeight, NVFP4Rows
from muse_jax.sharding import Ranks, ShardingConfig, isolated


@dataclasses.dataclass(frozen=True)
class ShardedExperts:
    """The routed experts of one layer, from the pooled input to the weighted sum of normed rows."""

    config: ModelConfig
    numerics: Numerics
    dtype: jnp.dtype
    activations: str
    sharding: ShardingConfig

    def __call__(
        self, pooled: jax.Array, idx: jax.Array, weights: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, norm: jax.Array
    ) -> jax.Array:
        """
        Args:     pooled: [R, M].  idx, weights: [R, top_k], of the router.  gate_up: [E, 2, F, M] and down: [E, M, F], as
                  much as this device holds.  norm: [M], the post-expert norm's weight.
        Returns:  [R, M], rounded, on every device.
        """
        if self.sharding.moe_sharding == "expert":
            return self._by_experts(pooled, idx, weights, gate_up, down, norm)
        ranks = self.sharding.ranks
        ranks = ranks if self.sharding.moe_sharding == "n" else ranks.everywhere
        blocks = Blocks.create(idx, self.config.num_local_experts)
        rows = self._rows(pooled, blocks, gate_up, down, ranks)
        if self.sharding.moe_exchange == "rows":
            with jax.named_scope("moe.rows"):
                rows, ranks = ranks.everywhere.split(ranks.gather(rows, -1), -1), ranks.everywhere
        norm = ranks.select(norm, 0)
        total = self._total_squares(rows, norm, ranks)
        groups = range(NUM_RANKS) if self.sharding.group_slots else (None,)
        terms = [self._weighted(rows, total, norm, idx, weights, ranks, group) for group in groups]
        mixed = ranks.run(lambda *terms: round_to(sum(terms[1:], terms[0]), self.dtype), *terms)
        with jax.named_scope("moe.mixed"):
            return ranks.gather(mixed, -1)

    def _by_experts(self, pooled, idx, weights, gate_up, down, norm) -> jax.Array:
        ranks, pieces = self.sharding.ranks, self.sharding.ranks.everywhere
        held = self.config.num_local_experts // NUM_RANKS
        norm, terms = pieces.select(norm, 0), []
        for i, (of_rank_1, of_rank_2) in enumerate(zip(_split(gate_up, ranks, 0), _split(down, ranks, 0), strict=True)):
            group = ranks.index(i)
            blocks = Blocks.create(idx, self.config.num_local_experts, (group * held, held))
            rows = self._rows(pooled, blocks, of_rank_1, of_rank_2, pieces)
            total = self._total_squares(rows, norm, pieces)
            terms.append(pieces.gather(self._weighted(rows, total, norm, idx, weights, pieces, group), -1))
        with jax.named_scope("moe.mixed"):
            return round_to(ranks.sum(terms), self.dtype)

    def _rows(
        self, pooled: jax.Array, blocks: Blocks, gate_up: ExpertWeight, down: ExpertWeight, ranks: Ranks
    ) -> list[jax.Array]:
        """Pieces [R, top_k, M / 8] of each routed row's down projection, rounded."""
        top_k = blocks.place.shape[1]
        quantized = self.activations == "nvfp4" and isinstance(gate_up, NVFP4Weight)

        def first(pooled, blocks: Blocks, gate_up: ExpertWeight) -> jax.Array:
            def block(source: jax.Array, expert_idx: jax.Array) -> jax.Array:
                x = jax.tree.map(lambda x: x[lax.div(source, jnp.int32(top_k))], pooled)
                hidden = ops.expert_linear(x, ops.of_expert(gate_up, expert_idx), self.activations)
                return ops.swiglu(hidden[:, 0], hidden[:, 1], self.numerics, self.dtype)

            return blocks.run(isolated(block))

        def second(hidden, blocks: Blocks, down: ExpertWeight) -> jax.Array:
            hidden = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), hidden)

            def block(source: jax.Array, expert_idx: jax.Array) -> jax.Array:
                x = jax.tree.map(lambda x: x[source], hidden)
                return round_to(ops.expert_linear(x, ops.of_expert(down, expert_idx), self.activations), self.dtype)

            return blocks.run(isolated(block))

        # A block is a call of its own, so that XLA for CPU does not widen all experts at once before the loop.
        x = ops.quantize_rows(pooled) if quantized else pooled
        hidden = ranks.run(first, x, blocks, _split(gate_up, ranks, 2))
        with jax.named_scope("moe.hidden"):
            hidden = _exchange_quantized(hidden, ranks) if quantized else ranks.gather(hidden, -1)
        return ranks.run(second, hidden, blocks, _split(down, ranks, 1))

    def _total_squares(self, rows: list[jax.Array], norm: list[jax.Array], ranks: Ranks) -> jax.Array:
        """The sum of squares of each scaled row, [R, top_k, 1] fp32. rows, norm: pieces of the rows and of their weight."""

        def squares(rows: jax.Array, norm: jax.Array) -> jax.Array:
            scaled = self._scaled(rows, norm)
            return jnp.sum(scaled * scaled, axis=-1, keepdims=True)

        with jax.named_scope("moe.norm"):
            return ranks.sum(ranks.run(squares, rows, norm))

    def _weighted(self, rows, total, norm, idx, weights, ranks: Ranks, group) -> list[jax.Array]:
        """Pieces [R, M / 8] fp32 of the weighted sum of normed rows over all slots, or over those of one rank's experts."""
        config = self.config

        def weighted(rows: jax.Array, norm: jax.Array, total: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
            normed = self._scaled(rows, norm) * lax.rsqrt(total / config.moe_hidden_size + config.post_norm_eps)
            if self.numerics.post_expert_norm_rounded:
                normed = fp32(round_to(normed, self.dtype))
            return jnp.sum(jnp.where(chosen[..., None], normed * weights[..., None], 0.0), axis=1)

        in_group = jnp.ones_like(idx, bool) if group is None else idx // (config.num_local_experts // NUM_RANKS) == group
        return ranks.run(weighted, rows, norm, total, weights, in_group)

    def _scaled(self, rows: jax.Array, norm: jax.Array) -> jax.Array:
        """Rows [R, top_k, m] times 1 + w, before the norm."""
        return ops.input_scale(rows, norm, self.numerics, self.dtype)


def _split(weight: ExpertWeight, ranks: Ranks, axis: int) -> list[ExpertWeight]:
    """The pieces of a device's ranks; scales of whole matrices are cut only where experts are."""
    if not isinstance(weight, NVFP4Weight):
        return ranks.split(weight, axis)
    cut = [ranks.split(x, axis) for x in (weight.codes, weight.block_scales)]
    scalars = [ranks.split(x, 0) if axis == 0 else [x] * ranks.local for x in (weight.global_scale, weight.input_scale)]
    return [NVFP4Weight(*fields) for fields in zip(*cut, *scalars, strict=True)]


def _exchange_quantized(hidden: list[jax.Array], ranks: Ranks) -> NVFP4Rows:
    """Pieces [R, top_k, F / 8] of hidden rows -> whole rows in NVFP4; codes and scales travel, in one gather."""
    dtype, width = hidden[0].dtype, hidden[0].shape[-1]
    if width % NVFP4_BLOCK:  # a block would be cut
        return ops.quantize_rows(ranks.gather(hidden, -1))
    amax = ranks.max(ranks.run(lambda x: jnp.max(jnp.abs(fp32(round_to(fp32(x), jnp.bfloat16))), axis=-1), hidden))

    def quantize(x: jax.Array, amax: jax.Array) -> jax.Array:
        rows = ops.quantize_rows(x, amax)
        return jnp.concatenate([rows.codes, lax.bitcast_convert_type(rows.block_scales, jnp.uint8)], axis=-1)

    pieces = ranks.run(quantize, hidden, amax)
    whole = ranks.gather([piece[..., None, :] for piece in pieces], -2)  # [R, top_k, 8, bytes]
    codes, scales = jnp.split(whole, [width // 2], axis=-1)
    codes, scales = (x.reshape(*x.shape[:-2], -1) for x in (codes, scales))
    scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    return NVFP4Rows(codes, scales, nvfp4.row_scale(amax), dtype)
