"""Trees of proposed tokens: built from the draft's lattice, walked by the target's choices.

Node 0 is the anchor, every other node a candidate for the position after its parent's. Nodes are in the order in which they
were added, so a parent comes before its children; a chain is the tree in which every node has one child. B trees of N nodes
have fixed shapes; a slot that found no node is not valid, sees only itself, and is never accepted.

Source: dflash2.md section 5.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.build_tree.reference import Tree as Tree
from pallas_kernels.build_tree.reference import build_tree as build  # noqa: F401


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
