"""The tree of the likeliest paths through a lattice in plain jnp."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Tree(NamedTuple):
    """B trees of N nodes. Node 0 is the root; a slot that found no node is not valid and sees only itself."""

    token: jax.Array  # [B, N] int32; the root's where there is no node
    parent: jax.Array  # [B, N] int32, 0 for the root and where there is no node
    depth: jax.Array  # [B, N] int32, position after the root's; 0 as parent
    valid: jax.Array  # [B, N] bool
    ancestors: jax.Array  # [B, N, N] bool: [b, j, i] if i is j or an ancestor of j
    log_prob: jax.Array  # [B, N] fp32, of the path to the node under the draft; 0 as parent


def build_tree(anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int) -> Tree:
    """The `size` - 1 likeliest paths, which together form a tree, best first.

    Args:     anchor: [B] int32, tokens of the roots.  ids: [B, P, K] int32, candidates of each position, distinct within a
              position.  log_probs: [B, P, K before, K] fp32, of a candidate after a candidate of the position before; before
              position 0 there is only the root, whose row is the first.  size: static, nodes with the root.
    Ties go to the oldest parent, then to the lowest candidate index. A path of log-probability -inf is no node. One of NaN
    is taken before all others, as by argmax, but is no node: its slot is not valid.
    """
    return jax.vmap(functools.partial(_build_one, size=size))(anchor, ids, log_probs)


def _build_one(anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int) -> Tree:
    """Every node offers the children that it does not have yet; the best offer of all becomes a node."""
    num_positions, top_k = ids.shape
    nodes, candidates = jnp.arange(size, dtype=jnp.int32), jnp.arange(top_k, dtype=jnp.int32)
    # After the last position there is nothing.
    ids = jnp.pad(ids, ((0, 1), (0, 0)))
    log_probs = jnp.pad(log_probs, ((0, 1), (0, 0), (0, 0)), constant_values=-jnp.inf)
    none = jnp.zeros(size, jnp.int32)
    root = Tree(jnp.full(size, anchor), none, none, nodes == 0, nodes[None, :] == nodes[:, None], jnp.zeros(size, jnp.float32))
    offers = jnp.where((nodes == 0)[:, None], log_probs[0, :1], -jnp.inf)  # [N, K], log-probability of the path to the child

    def add(j: jax.Array, carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
        tree, offers = carry
        best = jnp.argmax(offers).astype(jnp.int32)
        parent, candidate = best // top_k, best % top_k
        score, depth = offers[parent, candidate], tree.depth[parent] + 1
        new = (nodes == j) & (score > -jnp.inf)
        tree = Tree(
            jnp.where(new, ids[depth - 1, candidate], tree.token),
            jnp.where(new, parent, tree.parent),
            jnp.where(new, depth, tree.depth),
            tree.valid | new,
            tree.ancestors | (new[:, None] & tree.ancestors[parent][None, :]),
            jnp.where(new, score, tree.log_prob),
        )
        children = score + log_probs[jnp.minimum(depth, num_positions), candidate]
        taken = (nodes == parent)[:, None] & (candidates == candidate)[None, :]
        return tree, jnp.where(taken, -jnp.inf, jnp.where(new[:, None], children[None, :], offers))

    return lax.fori_loop(1, size, add, (root, offers))[0]
