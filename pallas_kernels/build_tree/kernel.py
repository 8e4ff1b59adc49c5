"""The tree of the likeliest paths through a lattice in one launch; a CTA has a sequence.

Nodes are added one after the other, and each needs the best offer of all before it: latency is all that counts. So the four
warps of a CTA do the same, each for itself, and nobody waits for another: a warp holds the offers of all nodes in registers,
and has one instruction for the largest of its integers. Shared memory holds the lattice, and depth and ancestors of each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.build_tree.reference import Tree
from pallas_kernels.common import kernel

MAX_NODES = 32  # ancestors are bits
_LANES = 32
# A value for every lane, the same in all warps.
_OF_WARP = plgpu.Layout.TILED(plgpu.Tiling(((_LANES,), (1,))), (plgpu.Replicated(4),), (-2,), -1)
# Layouts in which all warps together copy, by values.
_OF_WARPGROUP = {
    vector * 128: plgpu.Layout.TILED(plgpu.Tiling(((128 * vector,), (32 * vector,), (vector,))), (-3,), (-2,), -1)
    for vector in (4, 1)
}
_LOWEST, _HIGHEST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
_KEY_OF_MINUS_INF = -0x7F800000


def build_tree(anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int, interpret: Any = None) -> Tree:
    """`reference.build_tree`, whose arguments and results these are, in one launch; XLA makes of its bits what is bool.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError unless size is 2 to 32, K is a multiple of 4
              and at most 32, and all positions together have at least 32 candidates.
    Rounding: none but that of the sums, which are those of the reference. A sum of -0.0 is given as 0.0.
    """
    batch, num_positions, top_k = ids.shape
    for name, x, shape, dtype in (
        ("anchor", anchor, (batch,), jnp.int32),
        ("ids", ids, ids.shape, jnp.int32),
        ("log_probs", log_probs, (*ids.shape, top_k), jnp.float32),
    ):
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(f"build_tree: {name} must be {jnp.dtype(dtype).name}{shape}, got {x.dtype}{x.shape}")
    if not 2 <= size <= MAX_NODES:
        raise NotImplementedError(f"build_tree: {size} nodes; allowed are 2 to {MAX_NODES}")
    # Rows of the lattice are read from shared memory 16 bytes at a time.
    if top_k % 4 or not 0 < top_k <= _LANES or num_positions * top_k < _LANES:
        raise NotImplementedError(
            f"build_tree: {num_positions} positions of {top_k} candidates; allowed are multiples of 4 candidates up to "
            f"{_LANES}, and at least {_LANES} of all positions together"
        )
    per_row = _LANES // top_k  # nodes whose offers are side by side in a warp
    num_rows = -(-size // per_row)
    num_scores = num_positions * top_k * top_k

    def build(anchor_ref, ids_ref, scores_ref, *refs):
        token_ref, parent_ref, depth_ref, bits_ref, log_prob_ref, ids_smem, scores_smem, depths, bits, barrier = refs
        b = lax.axis_index("sequence")
        root = anchor_ref[b]
        # All loads are under way before the first store.
        pieces = [(ids_smem, 0, *x) for x in _pieces(ids_ref.at[b], interpret)]
        pieces += [(scores_smem, _LANES, *x) for x in _pieces(scores_ref.at[b], interpret)]
        for target, first, begin, piece in pieces:
            compat.store(target.at[pl.ds(first + begin, piece.shape[0])], piece)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        lane = lax.broadcasted_iota(jnp.int32, (_LANES,), 0)
        # Offers are numbered as lanes of rows of lanes: in the order of their nodes, then of their candidates.
        number = [lane + _LANES * row for row in range(num_rows)]

        def put(j: Any, token: Any, parent: Any, depth: Any, ancestors: Any, log_prob: Any) -> None:
            token_ref[b, j] = token
            parent_ref[b, j] = parent
            depth_ref[b, j] = depth
            bits_ref[b, j] = ancestors
            log_prob_ref[b, j] = log_prob
            # Every thread writes what it will read, so none has to wait for another.
            depths[j] = depth
            bits[j] = ancestors

        def scores_after(position: Any, candidate: Any, first: Any) -> jax.Array:
            """A row of the lattice, [lanes], beginning at lane `first`; other lanes have anything."""
            begin = _LANES + (position * top_k + candidate) * top_k - first
            return compat.load(scores_smem.at[pl.ds(begin, _LANES)], _OF_WARP, optimized=False, interpret=interpret)

        zero = jnp.int32(0)
        put(0, root, zero, zero, jnp.int32(1), zero)
        none = jnp.full((_LANES,), _KEY_OF_MINUS_INF, jnp.int32)
        of_root = jnp.where(lane < top_k, _key(scores_after(0, 0, 0)), none)
        offers = (of_root, *[none] * (num_rows - 1))

        def add(j: Any, offers: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            of_lane, number_of_lane = _best(list(zip(offers, number, strict=True)))
            highest = jnp.max(of_lane)
            best = -jnp.max(jnp.where(of_lane == highest, -number_of_lane, _LOWEST))  # the lowest number of equals
            in_row = best & (_LANES - 1)
            of_row = lax.div(in_row, jnp.int32(top_k))
            parent, candidate = (best >> 5) * per_row + of_row, in_row - of_row * top_k
            score = _flip(highest)
            is_node = (highest > _KEY_OF_MINUS_INF) & (highest < _HIGHEST)

            depth = depths[parent] + 1
            row = lax.div(j, jnp.int32(per_row))
            first = (j - row * per_row) * top_k
            after = scores_after(jnp.minimum(depth, num_positions - 1), candidate, first)
            of_parent = lax.bitcast_convert_type(jnp.full((_LANES,), score, jnp.int32), jnp.float32)
            has_children = jnp.full((_LANES,), depth, jnp.int32) < num_positions
            children = _key(of_parent + jnp.where(has_children, after, -jnp.inf))
            first = jnp.where(is_node, row * _LANES + first, num_rows * _LANES)
            offers = tuple(
                jnp.where((n >= first) & (n < first + top_k), children, jnp.where(n == best, _KEY_OF_MINUS_INF, keys))
                for keys, n in zip(offers, number, strict=True)
            )

            # NaN may be offered after the last position, but is no node.
            token = ids_smem[(jnp.minimum(depth, num_positions) - 1) * top_k + candidate]
            own = jnp.int32(1) << j
            put(
                j,
                jnp.where(is_node, token, root),
                jnp.where(is_node, parent, 0),
                jnp.where(is_node, depth, 0),
                jnp.where(is_node, own | bits[parent], own),
                jnp.where(is_node, score, 0),
            )
            return offers

        lax.fori_loop(1, size, add, offers)

    whole = jax.ShapeDtypeStruct((batch, size), jnp.int32)
    token, parent, depth, bits, log_prob = kernel(
        build,
        [whole] * 5,
        grid={"sequence": batch},
        scratch=[
            plgpu.SMEM((num_positions * top_k,), jnp.int32),
            plgpu.SMEM((num_scores + 2 * _LANES,), jnp.float32),
            plgpu.SMEM((size,), jnp.int32),
            plgpu.SMEM((size,), jnp.int32),
            plgpu.Barrier(),
        ],
        interpret=interpret,
    )(anchor, ids.reshape(batch, -1), log_probs.reshape(batch, -1))
    nodes = jnp.arange(size, dtype=jnp.int32)
    valid = (depth > 0) | (nodes == 0)[None, :]
    ancestors = ((bits[:, :, None] >> nodes[None, None, :]) & 1) == 1
    # Mosaic GPU has no scalars of the same bits.
    return Tree(token, parent, depth, valid, ancestors, lax.bitcast_convert_type(log_prob, jnp.float32))


def _pieces(source: Any, interpret: Any) -> list[tuple[int, jax.Array]]:
    """[n] in global memory as pieces that all warps load together, each after where it begins; the last may overlap."""
    n = source.shape[0]
    size, layout = next(((size, x) for size, x in _OF_WARPGROUP.items() if size <= n), (_LANES, _OF_WARP))
    begins = [min(begin, n - size) for begin in range(0, n, size)]
    return [
        (begin, compat.load(source.at[pl.ds(begin, size)], layout, optimized=False, interpret=interpret)) for begin in begins
    ]


def _best(offers: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """The highest key of each lane and its number; of equals the first."""
    while len(offers) > 1:
        rest = offers[len(offers) // 2 * 2 :]
        pairs = zip(offers[::2], offers[1::2], strict=False)
        offers = [(jnp.maximum(x, y), jnp.where(y > x, m, n)) for (x, n), (y, m) in pairs] + rest
    return offers[0]


def _flip(x: jax.Array) -> jax.Array:
    """Bits of fp32 numbers to int32 in their order, zeros equal, and back."""
    return jnp.where(x < 0, _LOWEST - x, x)


def _key(x: jax.Array) -> jax.Array:
    """int32 in the order of fp32 numbers as argmax has it: NaN is the highest."""
    return jnp.where(x == x, _flip(lax.bitcast_convert_type(x, jnp.int32)), _HIGHEST)
