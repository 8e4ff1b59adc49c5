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
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax import nvfp4, ops
from muse_jax.backends import Backend
from muse_jax.config import NVFP4_BLOCK, ModelConfig
from muse_jax.layout import NUM_RANKS
from muse_jax.numerics import Numerics, fp32, round_to
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.ops import Blocks, ExpertWeight, NVFP4Rows
from muse_jax.sharding import Ranks, ShardingConfig


@dataclasses.dataclass(frozen=True)
class ShardedExperts:
    """The routed experts of one layer, from the pooled input to the weighted sum of normed rows."""

    config: ModelConfig
    numerics: Numerics
    dtype: jnp.dtype
    activations: str
    sharding: ShardingConfig
    backend: Backend

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
        rows = self._rows(pooled, idx, gate_up, down, ranks)
        if self.sharding.moe_exchange == "rows":
            with jax.named_scope("moe.rows"):
                rows, ranks = ranks.everywhere.split(ranks.gather(rows, -1), -1), ranks.everywhere
        norm = ranks.select(norm, 0)
        total = self._total_squares(rows, norm, ranks)
        if self.sharding.group_slots:
            terms = [self._weighted(rows, total, norm, idx, weights, ranks, group) for group in range(NUM_RANKS)]
            mixed = ranks.run(lambda *terms: round_to(sum(terms[1:], terms[0]), self.dtype), *terms)
        else:
            mixed = self._weighted(rows, total, norm, idx, weights, ranks, None)
        with jax.named_scope("moe.mixed"):
            return ranks.gather(mixed, -1)

    def _by_experts(self, pooled, idx, weights, gate_up, down, norm) -> jax.Array:
        ranks, pieces = self.sharding.ranks, self.sharding.ranks.everywhere
        held = self.config.num_local_experts // NUM_RANKS
        norm, terms = pieces.select(norm, 0), []
        for i, (of_rank_1, of_rank_2) in enumerate(zip(_split(gate_up, ranks, 0), _split(down, ranks, 0), strict=True)):
            group = ranks.index(i)
            rows = self._rows(pooled, idx, of_rank_1, of_rank_2, pieces, (group * held, held))
            total = self._total_squares(rows, norm, pieces)
            terms.append(pieces.gather(self._weighted(rows, total, norm, idx, weights, pieces, group), -1))
        with jax.named_scope("moe.mixed"):
            return round_to(ranks.sum(terms), self.dtype)

    def _rows(
        self,
        pooled: jax.Array,
        idx: jax.Array,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        ranks: Ranks,
        held: tuple[jax.Array, int] | None = None,
    ) -> list[jax.Array]:
        """Pieces [R, top_k, M / 8] of each routed row's down projection, rounded. held: as in `Blocks.create`."""

        def in_blocks() -> list[jax.Array]:
            return self._rows_in_blocks(pooled, idx, gate_up, down, ranks, held)

        def fused() -> list[jax.Array]:
            if held is not None:
                raise NotImplementedError("some experts of a layer alone")
            return self._rows_fused(pooled, idx, gate_up, down, ranks)

        if self.backend.fuses_experts(gate_up) and self.backend.fuses_experts(down):
            return self.backend.choose("expert_gemm" if isinstance(gate_up, jax.Array) else "nvfp4_gemm", fused, in_blocks)
        return in_blocks()

    def _quantizes(self, weight: ExpertWeight) -> bool:
        """Whether what meets these weights is quantised: not where they are plain."""
        return self.activations == "nvfp4" and not isinstance(weight, jax.Array)

    def _rows_fused(
        self, pooled: jax.Array, idx: jax.Array, gate_up: ExpertWeight, down: ExpertWeight, ranks: Ranks
    ) -> list[jax.Array]:
        backend, quantized = self.backend, self._quantizes(gate_up)
        routing = backend.plan_experts(idx, self.config.num_local_experts)
        x = backend.quantize_rows(pooled) if quantized else pooled
        hidden = ranks.run(backend.expert_gate_up, x, routing, _split(gate_up, ranks, 2))
        with jax.named_scope("moe.hidden"):
            hidden = self._exchange_quantized(hidden, ranks) if quantized else ranks.gather(hidden, -1)
        return ranks.run(backend.expert_down, hidden, routing, _split(down, ranks, 1))

    def _rows_in_blocks(
        self,
        pooled: jax.Array,
        idx: jax.Array,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        ranks: Ranks,
        held: tuple[jax.Array, int] | None,
    ) -> list[jax.Array]:
        num_rows, top_k = idx.shape
        quantized = self._quantizes(gate_up)

        # A step is a call of its own, so that XLA for CPU does not widen all experts at once before the loop.
        def first(blocks: Blocks, pooled, gate_up: ExpertWeight) -> jax.Array:
            def block(source: jax.Array, gate_up: ExpertWeight) -> jax.Array:
                x = jax.tree.map(lambda x: x[lax.div(source, jnp.int32(top_k))], pooled)
                hidden = ops.expert_linear(x, gate_up, self.activations)
                return ops.swiglu(hidden[:, 0], hidden[:, 1], self.numerics, self.dtype)

            return blocks.run(block, gate_up, ranks.isolate)

        def second(blocks: Blocks, hidden, down: ExpertWeight) -> jax.Array:
            hidden = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), hidden)

            def block(source: jax.Array, down: ExpertWeight) -> jax.Array:
                x = jax.tree.map(lambda x: x[source], hidden)
                return round_to(ops.expert_linear(x, down, self.activations), self.dtype)

            return blocks.run(block, down, ranks.isolate)

        # Both are for all ranks, and XLA drops the one that is not used.
        cut = functools.partial(Blocks.create, idx, self.config.num_local_experts, held)
        blocks, chunks = cut(), cut(chunked=True)

        def run(function: Callable, x, weights: list[ExpertWeight]) -> list[jax.Array]:
            few, others = (functools.partial(ranks.run, function, form, x, weights) for form in (chunks, blocks))
            return ops.few_on_gpu(num_rows, few, others)

        x = self.backend.quantize_rows(pooled) if quantized else pooled
        hidden = run(first, x, _split(gate_up, ranks, 2))
        with jax.named_scope("moe.hidden"):
            hidden = self._exchange_quantized(hidden, ranks) if quantized else ranks.gather(hidden, -1)
        return run(second, hidden, _split(down, ranks, 1))

    def _total_squares(self, rows: list[jax.Array], norm: list[jax.Array], ranks: Ranks) -> jax.Array:
        """The sum of squares of each scaled row, [R, top_k, 1] fp32. rows, norm: pieces of the rows and of their weight."""

        with jax.named_scope("moe.norm"):
            return ranks.sum(ranks.run(functools.partial(ops.row_squares, numerics=self.numerics), rows, norm))

    def _weighted(self, rows, total, norm, idx, weights, ranks: Ranks, group) -> list[jax.Array]:
        """Pieces [R, M / 8] of the weighted sum of normed rows: of all slots, rounded, or of those of one rank's experts."""
        held = self.config.num_local_experts // NUM_RANKS
        chosen = None if group is None else idx // held == group
        combine = functools.partial(self.backend.combine_pieces, config=self.config, numerics=self.numerics)
        return ranks.run(combine, rows, norm, total, weights, chosen)

    def _exchange_quantized(self, hidden: list[jax.Array], ranks: Ranks) -> NVFP4Rows:
        """Pieces [R, top_k, F / 8] of hidden rows -> whole rows in NVFP4; codes and scales travel, in one gather."""
        dtype, width = hidden[0].dtype, hidden[0].shape[-1]
        if width % NVFP4_BLOCK:  # a block would be cut
            return self.backend.quantize_rows(ranks.gather(hidden, -1))
        amax = ranks.max(ranks.run(lambda x: jnp.max(jnp.abs(fp32(round_to(fp32(x), jnp.bfloat16))), axis=-1), hidden))

        def quantize(x: jax.Array, amax: jax.Array) -> jax.Array:
            rows = self.backend.quantize_rows(x, amax)
            return jnp.concatenate([rows.codes, lax.bitcast_convert_type(rows.block_scales, jnp.uint8)], axis=-1)

        pieces = ranks.run(quantize, hidden, amax)
        whole = ranks.gather([piece[..., None, :] for piece in pieces], -2)  # [R, top_k, 8, bytes]
        codes, scales = jnp.split(whole, [width // 2], axis=-1)
        codes, scales = (x.reshape(*x.shape[:-2], -1) for x in (codes, scales))
        scales = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
        return NVFP4Rows(codes, scales, nvfp4.row_scale(amax), dtype)


def _split(weight: ExpertWeight, ranks: Ranks, axis: int) -> list[ExpertWeight]:
    """The pieces of a device's ranks; scales of whole matrices are cut only where experts are. axis: of a plain weight."""
    if isinstance(weight, jax.Array):
        return ranks.split(weight, axis)
    if not isinstance(weight, NVFP4Weight) and axis > 0:
        axis = 1  # of the tiles of packed rows
    pieces = {}
    for name, x in vars(weight).items():
        is_scalar = name in ("global_scale", "input_scale")
        pieces[name] = [x] * ranks.local if is_scalar and axis > 0 else ranks.split(x, axis)
    return [type(weight)(**dict(zip(pieces, fields, strict=True))) for fields in zip(*pieces.values(), strict=True)]
