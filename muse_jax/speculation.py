"""What a step proposes to the target, and how the target's logits become its choices.

    tree           the likeliest paths through the draft's lattice
    chain          one path: at every position the best candidate after the one before
    sampled_chain  one path drawn from the draft, verified by rejection sampling

Tree and chain emit what the target draws at each node, so they give the tokens of plain decoding whatever is proposed. That
also lets the proposal use the noise that those draws will use: the draft's scores plus that noise tell best what the target
will choose. The sampled chain has the target's distribution, but other tokens for the same seed than plain decoding.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax import tree
from muse_jax.layout import NUM_RANKS
from muse_jax.sampling import (
    UNCUT,
    Draw,
    Logits,
    SamplingMode,
    SamplingParams,
    choose,
    filter_scores,
    first_ids,
    gumbel_noise,
    partition_sums,
    sum_in_order,
    uniforms,
)
from muse_jax.sharding import Ranks
from muse_jax.tree import Tree


class Speculation(enum.StrEnum):
    """How a step speculates."""

    TREE = "tree"
    CHAIN = "chain"
    SAMPLED_CHAIN = "sampled_chain"
    OFF = "off"


def propose(
    speculation: Speculation,
    lattice: jax.Array,
    ids: jax.Array,
    anchor: jax.Array,
    start: jax.Array,
    sampling: SamplingParams,
    size: int,
    build_tree: Callable = tree.build,
) -> tuple[Tree, jax.Array | None]:
    """The nodes to verify.

    Args:     lattice: [B, P, K before, K] fp32; ids: [B, P, K], of the positions after `start`.  anchor, start: [B].
              size: static, nodes with the root; for a chain at most P + 1.  build_tree: `tree.build`, or a backend's.
    Returns:  the tree, and for a sampled chain the distributions its tokens were drawn from, [B, size - 1, K] fp32.
    """
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scores = lattice / temperature[:, None, None, None]
    positions = start[:, None] + 1 + jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    sampled = (sampling.temperature > 0)[:, None, None]
    if speculation == Speculation.SAMPLED_CHAIN:
        return _sampled_chain(scores[:, : size - 1], ids[:, : size - 1], positions[:, : size - 1], anchor, sampling, sampled)
    if sampling.mode != SamplingMode.GREEDY:
        noise = gumbel_noise(sampling.seed_lo, sampling.seed_hi, positions, ids.astype(jnp.uint32))
        scores = scores + jnp.where(sampled, noise, 0.0)[:, :, None, :]
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    if speculation == Speculation.TREE:
        return build_tree(anchor, ids, log_probs, size), None
    tokens, rows, picks = _walk(jnp.argmax(log_probs, axis=-1).astype(jnp.int32)[:, : size - 1], ids, log_probs)
    return tree.chain(anchor, tokens, _pick(rows, picks)), None


def target_choice(
    logits: Logits, nodes: Tree, start: jax.Array, sampling: SamplingParams, valid_vocab: int,
    ids: jax.Array, proposal: jax.Array | None, ranks: Ranks = UNCUT,
) -> jax.Array:  # fmt: skip
    """The token that the target puts after each node, [B, N] int32.

    Args:     logits: [B, N, V] fp32, or parts of it as `choose` takes them.  start: [B], position of the root.
              ids: [B, P, K].  proposal: as `propose` gave it.
    """
    positions = start[:, None] + nodes.depth + 1
    if proposal is None or sampling.mode == SamplingMode.GREEDY:
        return choose(logits, positions, sampling, valid_vocab, ranks)
    drawn = _rejection_sampled(logits, nodes, positions, sampling, valid_vocab, ids, proposal, ranks)
    greedy = choose(logits, positions, dataclasses.replace(sampling, mode=SamplingMode.GREEDY), valid_vocab, ranks)
    return jnp.where((sampling.temperature > 0)[:, None], drawn, greedy)


def _walk(choice: jax.Array, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Follows, from the anchor, the candidate chosen after each candidate.

    Args:     choice: [B, T, K] int32, candidate chosen at a position after each candidate before.  ids: [B, P, K].
              values: [B, P, K before, K].
    Returns:  tokens [B, T]; the rows of `values` along the path, [B, T, K]; candidates taken, [B, T].
    """
    taken = [jnp.zeros(choice.shape[0], jnp.int32)]
    for position in range(choice.shape[1]):
        taken.append(_pick(choice[:, position], taken[-1]))
    taken = jnp.stack(taken, axis=1)
    length = choice.shape[1]
    rows = jnp.take_along_axis(values[:, :length], taken[:, :-1, None, None], axis=2)[:, :, 0]
    return _pick(ids[:, :length], taken[:, 1:]), rows, taken[:, 1:]


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[..., index] along the last axis: [..., K] and [...] -> [...]."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def _sampled_chain(
    scores: jax.Array, ids: jax.Array, positions: jax.Array, anchor: jax.Array, sampling: SamplingParams, sampled: jax.Array
) -> tuple[Tree, jax.Array]:
    """Draws a path; rows of temperature 0 take the best candidates."""
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    probs = jax.nn.softmax(scores, axis=-1)
    drawn = _invert(probs, uniforms(sampling, positions, Draw.PROPOSE)[:, :, None])
    tokens, rows, picks = _walk(jnp.where(sampled, drawn, best), ids, probs)
    return tree.chain(anchor, tokens, jnp.log(_pick(rows, picks))), rows


def _rejection_sampled(
    logits: Logits, nodes: Tree, positions: jax.Array, sampling: SamplingParams, valid_vocab: int,
    ids: jax.Array, proposal: jax.Array, ranks: Ranks,
) -> jax.Array:  # fmt: skip
    """Keeps a proposed token d with probability min(1, p(d) / q(d)), else draws from what p has more of than q.

    Source: dflash2.md section 4. The last node has no proposal after it, so that its token is drawn from p.
    """
    parts = logits if isinstance(logits, list) else [logits]
    scores = filter_scores(parts, sampling, valid_vocab, ranks)
    firsts, per_part = first_ids(parts, ranks), NUM_RANKS // ranks.count
    top = ranks.max(ranks.run(lambda scores: jnp.max(scores, axis=-1, keepdims=True), scores))
    length = nodes.token.shape[1] - 1
    proposed, ids = nodes.token[:, 1:], ids[:, :length]

    def weigh(scores: jax.Array, first: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
        """p times its total; what travels of it: sums of partitions, then that of the proposed token if it is here."""
        weights, place = jnp.exp(scores - top), _place(proposed, first, scores)
        found = jnp.take_along_axis(weights[:, :length], place[:, :, None], axis=-1, mode="fill", fill_value=0)
        return weights, jnp.concatenate([partition_sums(weights, per_part), jnp.pad(found, ((0, 0), (0, 1), (0, 0)))], axis=-1)

    weights, sums = map(list, zip(*ranks.run(weigh, scores, firsts, top), strict=True))
    sums = ranks.gather(sums, axis=-1).reshape(*positions.shape, ranks.count, per_part + 1)
    masses = sums[..., :per_part].reshape(*positions.shape, NUM_RANKS)
    p = jnp.sum(sums[:, :length, :, per_part], axis=-1)  # one part has the token, the others 0
    # q takes the total of p, so that no number of the vocabulary has to be divided.
    proposal = proposal * sum_in_order(masses[:, :length])
    q = jnp.sum(jnp.where(ids == proposed[:, :, None], proposal, 0.0), axis=-1)
    kept = uniforms(sampling, positions[:, :length], Draw.ACCEPT) * q < p

    def subtract(weights: jax.Array, first: jax.Array, proposal: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, steps = (lax.broadcasted_iota(jnp.int32, ids.shape, axis) for axis in (0, 1))
        residual = weights.at[rows, steps, _place(ids, first, weights)].add(-proposal, mode="drop")
        residual = jnp.maximum(residual, 0.0)
        return residual, partition_sums(residual, per_part)

    residual, sums = map(list, zip(*ranks.run(subtract, weights, firsts, proposal), strict=True))
    residual_masses = ranks.gather(sums, axis=-1)
    is_left = sum_in_order(residual_masses) > 0

    def of_partition(partition: jax.Array) -> jax.Array:
        return jnp.where(is_left, *(_partition(x, partition, ranks) for x in (residual, weights)))

    masses = jnp.where(is_left, residual_masses, masses)
    drawn = _invert_partitions(masses, of_partition, uniforms(sampling, positions, Draw.RESIDUAL), ranks)
    return jnp.concatenate([jnp.where(kept, proposed, drawn[:, :length]), drawn[:, length:]], axis=1)


def _place(ids: jax.Array, first: jax.Array, part: jax.Array) -> jax.Array:
    """Where ids are in a part [..., W] that begins with id `first`; W, which is outside, for ids of other parts."""
    place, size = ids - first, part.shape[-1]
    return jnp.where((place >= 0) & (place < size), place, size)


def _partition(parts: list[jax.Array], partition: jax.Array, ranks: Ranks) -> jax.Array:
    """The numbers of one of eight vocabulary partitions, [..., V / 8]; on devices without it those of another.

    Args:     parts: of this device's ranks.  partition: [..., 1] int32.
    """
    count = NUM_RANKS // ranks.count
    padding = [(0, 0)] * (parts[0].ndim - 1) + [(0, -parts[0].shape[-1] % count)]
    here = jnp.concatenate([jnp.pad(x, padding).reshape(*x.shape[:-1], count, -1) for x in parts], axis=-2)
    place = jnp.clip(partition - ranks.index(0) * count, 0, here.shape[-2] - 1)
    return jnp.take_along_axis(here, place[..., None], axis=-2)[..., 0, :]


def _invert_partitions(
    masses: jax.Array, of_partition: Callable[[jax.Array], jax.Array], uniform: jax.Array, ranks: Ranks
) -> jax.Array:
    """`_invert` for eight vocabulary partitions: first which of them, then which token in it.

    Args:     masses: [..., 8], sums of the partitions' weights.  of_partition: [..., 1] int32 -> weights [..., V / 8], where
              this device has them.  uniform: [...].
    Returns:  [...] int32, on every device.
    """
    below = jnp.concatenate(list(itertools.accumulate(jnp.split(masses, NUM_RANKS, axis=-1), jnp.add)), axis=-1)
    number = uniform[..., None] * below[..., -1:]
    partition = _first_above(masses, below, number)
    before = jnp.concatenate([jnp.zeros_like(below[..., :1]), below[..., :-1]], axis=-1)
    before = jnp.take_along_axis(before, partition, axis=-1)

    def find(weights: jax.Array, before: jax.Array, number: jax.Array) -> jax.Array:
        return _first_above(weights, before + jnp.cumsum(weights, axis=-1), number)

    # Each device looks into one partition, whatever number it has, so that the sums have the same shape.
    find = find if ranks.count == 1 else ranks.isolate(find)
    weights = of_partition(partition)
    token = partition * weights.shape[-1] + find(weights, before, number)
    is_here = partition // (NUM_RANKS // ranks.devices) == ranks.index(0) // ranks.local
    return ranks.count_sum([jnp.where(is_here, token, 0)])[..., 0]


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws by inverting the distribution function. weights: [..., V], not normalised; uniform: [...]. Returns [...] int32."""
    below = jnp.cumsum(weights, axis=-1)
    return _first_above(weights, below, uniform[..., None] * below[..., -1:])[..., 0]


def _first_above(weights: jax.Array, below: jax.Array, number: jax.Array) -> jax.Array:
    """The first index that has a weight and up to which, itself included, they sum to more than `number`, [..., 1] int32.

    below: [..., V], the sums, rounded, so that they may fall. The number is taken for a smaller one where none is above it.
    """
    below = jnp.where(weights > 0, below, 0.0)
    number = jnp.minimum(number, jnp.nextafter(jnp.max(below, axis=-1, keepdims=True), 0.0))
    return jnp.argmax(below > number, axis=-1, keepdims=True).astype(jnp.int32)
