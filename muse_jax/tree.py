"""Trees of proposed tokens: built from the draft's lattice, walked by the target's choices.

Node 0 is the anchor, every other node a candidate for the position after its parent's. Nodes are in the order in which they
were added, so a parent comes before its children; a chain is the tree in which every node has one child. B trees of N nodes
have fixed shapes; a slot that found no node is not valid, sees only itself, and is never accepted.

Source: dflash2.md section 5.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "parent", "depth", "valid", "ancestors", "log_prob"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """B trees of N nodes."""

    token: jax.Array  # [B, N] int32
    parent: jax.Array  # [B, N] int32, 0 for the root and for slots that are not valid
    depth: jax.Array  # [B, N] int32, position after the anchor's
    valid: jax.Array  # [B, N] bool
    ancestors: jax.Array  # [B, N, N] bool: [b, j, i] if i is j or an ancestor of j
    log_prob: jax.Array  # [B, N] fp32, of the path to the node under the draft


def chain(anchor: jax.Array, tokens: jax.Array, log_probs: jax.Array) -> Tree:
    """One path. anchor: [B]; tokens: [B, N - 1] int32; log_probs: [B, N - 1] fp32, of each token after the one before."""
    batch, size = tokens.shape[0], tokens.shape[1] + 1
    nodes = jnp.arange(size, dtype=jnp.int32)
    return Tree(
        token=jnp.concatenate([anchor[:, None], tokens], axis=1),
        parent=_rows(jnp.maximum(nodes - 1, 0), batch),
        depth=_rows(nodes, batch),
        valid=jnp.ones((batch, size), bool),
        ancestors=_rows(nodes[None, :] <= nodes[:, None], batch),
        log_prob=jnp.pad(jnp.cumsum(log_probs, axis=1), ((0, 0), (1, 0))),
    )


def build(anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int) -> Tree:
    """The `size` - 1 likeliest paths, which together form a tree, best first.

    Args:     anchor: [B] int32.  ids: [B, P, K] int32, candidates of each position, distinct within a position.
              log_probs: [B, P, K before, K] fp32, at most 0: of a candidate after a candidate of the position before; the
              rows of position 0 are equal.  size: static, nodes with the root, at least 2.
    Ties go to the oldest parent, then to the lowest candidate index.
    """
    return jax.vmap(functools.partial(_build_one, size=size))(anchor, ids, log_probs)


def _build_one(anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int) -> Tree:
    """Every node offers the children that it does not have yet; the best offer of all becomes a node."""
    num_positions, top_k = ids.shape
    nodes, candidates = jnp.arange(size, dtype=jnp.int32), jnp.arange(top_k, dtype=jnp.int32)
    # After the last position there is nothing.
    ids = jnp.pad(ids, ((0, 1), (0, 0)))
    log_probs = jnp.pad(log_probs, ((0, 1), (0, 0), (0, 0)), constant_values=-jnp.inf)
    root = Tree(
        token=jnp.full(size, anchor),
        parent=jnp.zeros(size, jnp.int32),
        depth=jnp.zeros(size, jnp.int32),
        valid=nodes == 0,
        ancestors=nodes[None, :] == nodes[:, None],
        log_prob=jnp.zeros(size, jnp.float32),
    )
    offers = jnp.where((nodes == 0)[:, None], log_probs[0, :1], -jnp.inf)  # [N, K], log-probability of the path to the child

    def add(j: jax.Array, carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
        tree, offers = carry
        best = jnp.argmax(offers).astype(jnp.int32)
        source, candidate = best // top_k, best % top_k
        score, depth = offers[source, candidate], tree.depth[source] + 1
        new = (nodes == j) & (score > -jnp.inf)
        tree = Tree(
            token=jnp.where(new, ids[depth - 1, candidate], tree.token),
            parent=jnp.where(new, source, tree.parent),
            depth=jnp.where(new, depth, tree.depth),
            valid=tree.valid | new,
            ancestors=tree.ancestors | (new[:, None] & tree.ancestors[source][None, :]),
            log_prob=jnp.where(new, score, tree.log_prob),
        )
        children = score + log_probs[jnp.minimum(depth, num_positions), candidate]
        taken = (nodes == source)[:, None] & (candidates == candidate)[None, :]
        offers = jnp.where(taken, -jnp.inf, jnp.where(new[:, None], children[None, :], offers))
        return tree, offers

    return lax.fori_loop(1, size, add, (root, offers))[0]


def accept(tree: Tree, choice: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Walks from the root as long as the target's choice at a node is one of its children.

    Args:     choice: [B, N] int32, the token that the target puts after each node.
    Returns:  n [B] int32, nodes on the path, root included; path [B, N] int32, these nodes by depth, then the node of the
              slot's own number.
    """
    size = tree.token.shape[1]
    nodes = jnp.arange(size, dtype=jnp.int32)
    chosen = tree.token == jnp.take_along_axis(choice, tree.parent, axis=1)
    chosen = tree.valid & (chosen | (nodes == 0)[None, :])
    # Siblings differ, so at most one child of a node is chosen, and what is chosen down from the root is one path.
    accepted = jnp.all(chosen[:, None, :] | ~tree.ancestors, axis=2)
    count = jnp.sum(accepted, axis=1, dtype=jnp.int32)
    at_depth = accepted[:, None, :] & (tree.depth[:, None, :] == nodes[None, :, None])
    path = jnp.sum(jnp.where(at_depth, nodes[None, None, :], 0), axis=2)
    return count, jnp.where(nodes[None, :] < count[:, None], path, nodes[None, :])


def _rows(x: jax.Array, batch: int) -> jax.Array:
    return jnp.broadcast_to(x[None], (batch, *x.shape))
