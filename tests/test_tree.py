"""Trees of proposed tokens: which nodes they get, and how far the target's choices reach into them."""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import tree
from muse_jax.tree import Tree

FIELDS = ("token", "parent", "depth", "valid", "ancestors", "log_prob")
build = jax.jit(tree.build, static_argnums=3)
accept = jax.jit(tree.accept)


def log_softmax(scores):
    scores = scores - scores.max(axis=-1, keepdims=True)
    return (scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))).astype(np.float32)


def random_lattices(rng, batch, positions, top_k, scale=2.0):
    """Anchors, candidates (distinct within a position, not between positions) and log-probabilities."""
    anchor = rng.integers(0, 3 * top_k, batch).astype(np.int32)
    ids = rng.permuted(np.broadcast_to(np.arange(3 * top_k, dtype=np.int32), (batch, positions, 3 * top_k)), axis=2)
    log_probs = log_softmax(scale * rng.standard_normal((batch, positions, top_k, top_k)))
    log_probs[:, 0] = log_probs[:, 0, :1]
    return anchor, ids[..., :top_k], log_probs


def heap_tree(anchor, ids, log_probs, size):
    """The same tree from a priority queue that holds every child of every node; sums are fp32, in the same order."""
    positions = len(ids)
    nodes = [{"token": anchor, "parent": 0, "depth": 0, "candidate": 0, "log_prob": np.float32(0), "family": {0}}]
    queue = []

    def push(parent):
        node = nodes[parent]
        if node["depth"] < positions:
            for candidate, step in enumerate(log_probs[node["depth"], node["candidate"]]):
                if step > -np.inf:
                    heapq.heappush(queue, (-(node["log_prob"] + step), parent, candidate))

    push(0)
    while len(nodes) < size and queue:
        score, parent, candidate = heapq.heappop(queue)
        depth, family = nodes[parent]["depth"] + 1, nodes[parent]["family"] | {len(nodes)}
        token = ids[depth - 1, candidate]
        nodes.append(
            {"token": token, "parent": parent, "depth": depth, "candidate": candidate, "log_prob": -score, "family": family}
        )
        push(len(nodes) - 1)
    return nodes


def as_arrays(trees, size):
    """Trees of `heap_tree` in the form of `Tree`; slots beyond them are not valid and see only themselves."""
    batch = len(trees)
    out = {name: np.zeros((batch, size), np.int32) for name in ("token", "parent", "depth")}
    out["log_prob"] = np.zeros((batch, size), np.float32)
    out["valid"] = np.zeros((batch, size), bool)
    out["ancestors"] = np.zeros((batch, size, size), bool)
    out["ancestors"][:, np.arange(size), np.arange(size)] = True
    for b, nodes in enumerate(trees):
        out["token"][b] = nodes[0]["token"]
        for j, node in enumerate(nodes):
            for name in ("token", "parent", "depth", "log_prob"):
                out[name][b, j] = node[name]
            out["valid"][b, j] = True
            out["ancestors"][b, j, sorted(node["family"])] = True
    return out


def assert_equals_heap(anchor, ids, log_probs, size):
    """Every field, bit for bit. Returns the tree as numpy arrays."""
    ours = jax.device_get(build(anchor, ids, log_probs, size))
    trees = [heap_tree(*row, size) for row in zip(anchor, ids, log_probs, strict=True)]
    for name, expected in as_arrays(trees, size).items():
        array = getattr(ours, name)
        assert array.dtype == expected.dtype, name
        np.testing.assert_array_equal(array, expected, err_msg=name)
    return ours


SHAPES = [(15, 16, 16), (15, 16, 32), (7, 4, 8), (1, 2, 8), (2, 2, 32), (3, 1, 2), (3, 1, 8)]  # P, K, N


class TestBuild:
    @pytest.mark.parametrize(("positions", "top_k", "size"), SHAPES)
    def test_equals_a_priority_queue(self, rng, positions, top_k, size):
        batch = 400
        scales = rng.choice([0.3, 1.0, 4.0, 40.0], (batch, 1, 1, 1))  # from bushes to chains
        ours = assert_equals_heap(*random_lattices(rng, batch, positions, top_k, scales), size)
        room = sum(top_k**depth for depth in range(positions + 1))
        np.testing.assert_array_equal(ours.valid.sum(axis=1), min(size, room))
        assert ours.depth.max() == min(positions, size - 1)
        if top_k > 1:
            parents = ours.parent[:, 1:][ours.valid[:, 1:]].reshape(batch, -1)
            branching = [len(set(row.tolist())) < len(row) for row in parents]
            assert np.mean(branching) > 0.5

    @pytest.mark.parametrize(("positions", "top_k", "size"), [(15, 16, 16), (7, 4, 8), (2, 2, 32)])
    def test_ties_go_to_the_oldest_parent_then_to_the_lowest_candidate(self, rng, positions, top_k, size):
        anchor, ids, log_probs = random_lattices(rng, 200, positions, top_k)
        quantised = np.ceil(log_probs / 2) * 2  # few values, and 0, so that a child may be as likely as its parent
        ours = assert_equals_heap(anchor, ids, quantised, size)
        scores = np.where(ours.valid, ours.log_prob, np.nan)
        assert np.mean([len(np.unique(row[~np.isnan(row)])) < row.size - np.isnan(row).sum() for row in scores]) > 0.9

    def test_equal_scores_fill_level_by_level(self):
        """All ties: the root's children come first, then those of the oldest child."""
        ids = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
        ours = build(np.int32([9]), ids, np.zeros((1, 2, 3, 3), np.float32), 8)
        assert np.asarray(ours.token)[0].tolist() == [9, 0, 1, 2, 3, 4, 5, 3]
        assert np.asarray(ours.parent)[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
        assert np.asarray(ours.depth)[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 2]

    @pytest.mark.parametrize(("positions", "top_k", "size", "share"), [(15, 16, 16, 0.8), (4, 3, 32, 0.3)])
    def test_impossible_candidates_never_become_nodes(self, rng, positions, top_k, size, share):
        anchor, ids, log_probs = random_lattices(rng, 200, positions, top_k)
        log_probs[rng.random(log_probs.shape) < share] = -np.inf
        log_probs[:, 0] = log_probs[:, 0, :1]
        log_probs[0] = -np.inf  # nothing but the root
        ours = assert_equals_heap(anchor, ids, log_probs, size)
        assert ours.valid[0].tolist() == [True] + [False] * (size - 1)
        assert np.isfinite(ours.log_prob).all()
        assert not ours.valid.all(axis=1).all() and ours.valid.all(axis=1).any()

    @pytest.mark.parametrize(("positions", "top_k", "size"), [(3, 3, 8), (2, 4, 16), (4, 2, 12)])
    def test_equals_the_best_of_all_prefixes(self, rng, positions, top_k, size):
        anchor, ids, log_probs = random_lattices(rng, 50, positions, top_k)
        ours = jax.device_get(build(anchor, ids, log_probs, size))
        for b in range(len(anchor)):
            prefixes = []
            for depth in range(1, positions + 1):
                for path in itertools.product(range(top_k), repeat=depth):
                    score = np.float32(0)
                    for position, (before, candidate) in enumerate(itertools.pairwise((0, *path))):
                        score += log_probs[b, position, before, candidate]
                    prefixes.append((-score, tuple(ids[b, range(depth), path].tolist())))
            expected = {tokens for _, tokens in sorted(prefixes)[: size - 1]}
            assert {path_tokens(ours, b, j) for j in range(1, size)} == expected

    def test_slots_that_found_no_node(self, rng):
        anchor, ids, log_probs = random_lattices(rng, 20, 1, 2)
        ours = jax.device_get(build(anchor, ids, log_probs, 8))
        np.testing.assert_array_equal(ours.valid, [[True] * 3 + [False] * 5] * 20)
        np.testing.assert_array_equal(ours.ancestors[:, 3:], np.broadcast_to(np.eye(8, dtype=bool)[3:], (20, 5, 8)))
        assert (ours.depth[:, 3:] == 0).all()
        for token in range(6):  # even where the target chooses the token that such a slot repeats
            count, path = jax.device_get(accept(ours, np.full((20, 8), token, np.int32)))
            assert (count <= 2).all()
            np.testing.assert_array_equal(path[:, 2:], np.broadcast_to(np.arange(2, 8), (20, 6)))


def path_tokens(nodes, row, node):
    """Tokens from the root's child down to a node."""
    tokens = []
    while node:
        tokens.append(int(nodes.token[row, node]))
        node = nodes.parent[row, node]
    return tuple(reversed(tokens))


def test_chain(rng):
    anchor, tokens = rng.integers(0, 9, 5).astype(np.int32), rng.integers(0, 9, (5, 6)).astype(np.int32)
    log_probs = -rng.random((5, 6)).astype(np.float32)
    ours = jax.device_get(tree.chain(anchor, jnp.asarray(tokens), jnp.asarray(log_probs)))
    np.testing.assert_array_equal(ours.token, np.concatenate([anchor[:, None], tokens], axis=1))
    for row in range(5):
        assert ours.parent[row].tolist() == [0, 0, 1, 2, 3, 4, 5]
        assert ours.depth[row].tolist() == list(range(7))
        np.testing.assert_array_equal(ours.ancestors[row], np.tri(7, dtype=bool))
    assert ours.valid.all()
    # Sums of at most six numbers below one, in some order.
    np.testing.assert_allclose(ours.log_prob[:, 1:], np.cumsum(log_probs.astype(np.float64), axis=1), rtol=0, atol=1e-6)
    assert (ours.log_prob[:, 0] == 0).all()
    assert {name: getattr(ours, name).dtype for name in FIELDS} == {
        "token": np.int32, "parent": np.int32, "depth": np.int32, "valid": bool, "ancestors": bool, "log_prob": np.float32,
    }  # fmt: skip


def random_trees(rng, batch, size, vocab):
    """Trees of every form; siblings differ, other nodes may share a token, and some slots at the end are not valid."""
    nodes = as_arrays([[{"token": 0, "parent": 0, "depth": 0, "log_prob": 0, "family": {0}}]] * batch, size)
    for b in range(batch):
        used = rng.integers(1, size + 1) if rng.random() < 0.5 else size
        deep = rng.random()  # from bushes to chains
        nodes["token"][b] = rng.integers(0, vocab)
        taken = {j: set() for j in range(size)}
        for j in range(1, used):
            free = [i for i in range(j) if len(taken[i]) < vocab]
            parent = max(free) if rng.random() < deep else int(rng.choice(free))
            token = int(rng.choice(sorted(set(range(vocab)) - taken[parent])))
            taken[parent].add(token)
            nodes["token"][b, j], nodes["parent"][b, j] = token, parent
            nodes["depth"][b, j] = nodes["depth"][b, parent] + 1
            nodes["ancestors"][b, j] |= nodes["ancestors"][b, parent]
            nodes["valid"][b, j] = True
    return Tree(**nodes)


def walk(nodes, choice, row):
    """Nodes accepted in one row, from the root down."""
    path = [0]
    while True:
        children = [
            j
            for j in range(1, nodes.token.shape[1])
            if nodes.valid[row, j] and nodes.parent[row, j] == path[-1] and nodes.token[row, j] == choice[row, path[-1]]
        ]
        if not children:
            return path
        (child,) = children
        path.append(child)


def assert_equals_walk(nodes, choice):
    """Returns how many nodes each row accepted, and whether its path is not simply the first nodes."""
    count, path = jax.device_get(accept(nodes, choice))
    assert count.dtype == path.dtype == np.int32 and path.shape == choice.shape
    moved = []
    for row in range(len(count)):
        expected = walk(nodes, choice, row)
        assert count[row] == len(expected)
        assert path[row].tolist() == expected + list(range(len(expected), choice.shape[1]))
        moved.append(expected != list(range(len(expected))))
    return count, np.array(moved)


class TestAccept:
    @pytest.mark.parametrize("size", [2, 8, 16, 32])
    @pytest.mark.parametrize("vocab", [2, 5, 1000])
    def test_equals_a_walk(self, rng, size, vocab):
        nodes = random_trees(rng, 300, size, vocab)
        choice = rng.integers(0, vocab, (300, size)).astype(np.int32)
        for b in range(300):
            goal = int(rng.integers(0, nodes.valid[b].sum()))  # a node that the choices lead to, and perhaps beyond
            for j in np.flatnonzero(nodes.ancestors[b, goal])[1:]:
                choice[b, nodes.parent[b, j]] = nodes.token[b, j]
        count, moved = assert_equals_walk(nodes, choice)
        assert set(range(1, min(size, 12) + 1)) <= set(count.tolist())
        assert size == 2 or moved.mean() > 0.1

    def test_a_chain_is_accepted_up_to_the_first_difference(self, rng):
        size = 16
        tokens = rng.integers(0, 50, (size, size - 1)).astype(np.int32)
        nodes = tree.chain(jnp.zeros(size, jnp.int32), jnp.asarray(tokens), jnp.zeros((size, size - 1)))
        choice = np.pad(tokens, ((0, 0), (0, 1)))
        for row in range(size - 1):  # row r leaves the chain after r + 1 nodes, and agrees with it again later
            choice[row, row] += 1
        count, path = jax.device_get(accept(nodes, choice))
        np.testing.assert_array_equal(count, np.arange(1, size + 1))
        np.testing.assert_array_equal(path, np.broadcast_to(np.arange(size), (size, size)))

    @pytest.mark.parametrize(("positions", "top_k", "size"), [(15, 16, 16), (7, 4, 8)])
    def test_built_trees_accept_exactly_the_prefixes_they_hold(self, rng, positions, top_k, size):
        """The target follows one random path of candidates whatever node it is at."""
        batch = 200
        anchor, ids, log_probs = random_lattices(rng, batch, positions, top_k)
        nodes = jax.device_get(build(anchor, ids, log_probs, size))
        continuation = np.take_along_axis(ids, rng.integers(0, 3, (batch, positions, 1)), axis=2)[..., 0]
        choice = np.take_along_axis(np.pad(continuation, ((0, 0), (0, 1))), nodes.depth, axis=1)
        count, _ = assert_equals_walk(nodes, choice)
        for b in range(batch):
            held = {path_tokens(nodes, b, j) for j in range(size) if nodes.valid[b, j]}
            longest = max(n for n in range(positions + 1) if tuple(continuation[b, :n].tolist()) in held)
            assert count[b] == longest + 1
