"""What a step proposes to the target, and how the target's logits become its choices.

    tree           the likeliest paths through the draft's lattice
    chain          one path: at every position the best candidate after the one before
    sampled_chain  one path drawn from the draft, verified by rejection sampling

Tree and chain emit what the target draws at each node, so they give the tokens of plain decoding whatever is proposed. That
also lets the proposal use the noise that those draws will use: the draft's scores plus that noise tell best what the target
will choose. The sampled chain has the target's distribution, but other tokens for the same seed than plain decoding.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import lax

from muse_jax import tree
from muse_jax.sampling import Draw, SamplingMode, SamplingParams, choose, filter_scores, gumbel_noise, uniforms
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
) -> tuple[Tree, jax.Array | None]:
    """The nodes to verify.

    Args:     lattice: [B, P, K before, K] fp32; ids: [B, P, K], of the positions after `start`.  anchor, start: [B].
              size: static, nodes with the root; for a chain at most P + 1.
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
        return tree.build(anchor, ids, log_probs, size), None
    tokens, rows, picks = _walk(jnp.argmax(log_probs, axis=-1).astype(jnp.int32)[:, : size - 1], ids, log_probs)
    return tree.chain(anchor, tokens, _pick(rows, picks)), None


def target_choice(
    logits: jax.Array, nodes: Tree, start: jax.Array, sampling: SamplingParams, valid_vocab: int,
    ids: jax.Array, proposal: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """The token that the target puts after each node, [B, N] int32.

    Args:     logits: [B, N, V] fp32.  start: [B], position of the root.  ids: [B, P, K].  proposal: as `propose` gave it.
    """
    positions = start[:, None] + nodes.depth + 1
    choice = choose(logits, positions, sampling, valid_vocab)
    if proposal is None or sampling.mode == SamplingMode.GREEDY:
        return choice
    sampled = (sampling.temperature > 0)[:, None]
    return jnp.where(sampled, _rejection_sampled(logits, nodes, positions, sampling, valid_vocab, ids, proposal), choice)


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
    logits: jax.Array, nodes: Tree, positions: jax.Array, sampling: SamplingParams, valid_vocab: int,
    ids: jax.Array, proposal: jax.Array,
) -> jax.Array:  # fmt: skip
    """Keeps a proposed token d with probability min(1, p(d) / q(d)), else draws from what p has more of than q.

    Source: dflash2.md section 4. The last node has no proposal after it, so that its token is drawn from p.
    """
    probs = jax.nn.softmax(filter_scores(logits, sampling, valid_vocab), axis=-1)
    proposed = nodes.token[:, 1:]
    length = proposed.shape[1]
    ids = ids[:, :length]
    p = _pick(probs[:, :length], proposed)
    q = jnp.sum(jnp.where(ids == proposed[:, :, None], proposal, 0.0), axis=-1)
    kept = uniforms(sampling, positions[:, :length], Draw.ACCEPT) * q < p

    rows, steps = (lax.broadcasted_iota(jnp.int32, ids.shape, axis) for axis in (0, 1))
    residual = jnp.maximum(probs.at[rows, steps, ids].add(-proposal), 0.0)
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, probs)
    drawn = _invert(residual, uniforms(sampling, positions, Draw.RESIDUAL))
    return jnp.concatenate([jnp.where(kept, proposed, drawn[:, :length]), drawn[:, length:]], axis=1)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws by inverting the distribution function. weights: [..., V], not normalised; uniform: [...]. Returns [...] int32."""
    below = jnp.cumsum(weights, axis=-1)
    # The first index above the number has a weight; rounding must not carry it past the last one that has.
    reached = below > jnp.minimum(uniform[..., None] * below[..., -1:], jnp.nextafter(below[..., -1:], 0.0))
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)
