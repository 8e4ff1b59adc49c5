"""Choosing from parts of the vocabulary: 1, 2, 4 and 8 devices give the same bits and tokens, and those of the whole."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from muse_jax import sampling, speculation
from muse_jax.sampling import (
    SamplingMode,
    SamplingParams,
    choose,
    filter_scores,
    mask_padding,
    ordered_sum,
    partition_sums,
    top_candidates,
)
from muse_jax.sharding import AXIS, Ranks, make_mesh

SIZES = (1, 2, 4, 8)
VOCAB, VALID = 261, 259  # parts of 33 ids; the last has three beyond the vocabulary
UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiles in half the time; for tests of tokens rather than of bits
LARGE, LARGE_VALID = 20_003, 12_000  # parts of 2,501 ids, the last three without a token


def compiled(num_devices, function, logits, *args, options=None):
    """A program for `function(parts, *args, ranks) -> (what all devices have, parts)`, and the logits that it takes.

    Where the vocabulary has no eighths it gets ids that would win. What all devices have comes back once for each.
    """
    ranks = Ranks(8, num_devices)
    logits = np.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % 8)], constant_values=99)

    def of_device(logits, *args):
        same, parts = function(ranks.split(logits, -1), *args, ranks)
        return jax.tree.map(lambda x: x[None], same), ranks.join(parts, -1)

    cut = PartitionSpec(*[None] * (logits.ndim - 1), AXIS)
    specs = (cut, *(PartitionSpec() for _ in args))
    step = jax.shard_map(
        of_device, mesh=make_mesh(num_devices), in_specs=specs, out_specs=(PartitionSpec(AXIS), cut), check_vma=False
    )
    return jax.jit(step, compiler_options=options).lower(logits, *args).compile(), logits


def on_every_size(function, logits, *args, options=None):
    """What `function` gives without ranks, and what it gives for every number of devices, the same on each: NumPy arrays."""

    def uncut(logits, *args):
        same, (whole,) = function([logits], *args, Ranks())
        return same, whole

    plain = jax.device_get(jax.jit(uncut, compiler_options=options)(logits, *args))
    results = []
    for num_devices in SIZES:
        program, padded = compiled(num_devices, function, logits, *args, options=options)
        same, parts = jax.device_get(program(padded, *args))
        for x in jax.tree.leaves(same):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        results.append((jax.tree.map(lambda x: x[0], same), parts[..., : logits.shape[-1]]))
    for result in results[1:]:
        jax.tree.map(assert_same_bits, results[0], result)
    return plain, results[0]


def assert_same_bits(x, y):
    assert x.dtype == y.dtype and x.shape == y.shape
    np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


def choose_and_filter(parts, pos, params, ranks, valid_vocab):
    return choose(parts, pos, params, valid_vocab, ranks), filter_scores(parts, params, valid_vocab, ranks)


def check_choice(logits, params, valid_vocab):
    """Returns tokens and kept sets."""
    pos = np.arange(math.prod(logits.shape[:-1]), dtype=np.int32).reshape(logits.shape[:-1])
    function = functools.partial(choose_and_filter, valid_vocab=valid_vocab)
    (tokens, scores), (cut_tokens, cut_scores) = on_every_size(function, logits, pos, params)
    assert cut_tokens.dtype == np.int32 and (cut_tokens < valid_vocab).all()
    np.testing.assert_array_equal(cut_tokens, tokens)
    return tokens, check_kept(scores, cut_scores, valid_vocab)


def check_kept(scores, cut_scores, valid_vocab):
    """Returns the kept sets."""
    kept = scores > -np.inf
    np.testing.assert_array_equal(cut_scores > -np.inf, kept)
    np.testing.assert_allclose(cut_scores[kept], scores[kept], rtol=2.0**-22)
    assert not kept[..., valid_vocab:].any()
    return kept


def rows_to_choose_from(rng, vocab):
    """[5, vocab] f32: peaked, flat, two coarse grids full of ties, all equal."""
    return np.stack([
        rng.normal(size=vocab) * 4,
        rng.normal(size=vocab) * 0.1,
        np.round(rng.normal(size=vocab) * 2),
        np.round(rng.normal(size=vocab) * 2) / 4,
        np.full(vocab, -7.25),
    ]).astype(np.float32)  # fmt: skip


class TestChoice:
    @pytest.mark.parametrize(("valid_vocab", "batch"), [(VOCAB, 3), (70, 3), (5, 1)])
    def test_greedy(self, rng, valid_vocab, batch):
        """Of 70 tokens five parts have none, of 5 seven; equal scores in several parts go to the lowest id."""
        logits = rng.permuted(np.tile(rows_to_choose_from(rng, VOCAB), (batch, 1, 1)), axis=-1)
        logits[0, 0, [3, 40, 66]] = 50 if valid_vocab > 66 else 0
        logits = logits if batch > 1 else logits[0, 2:3]
        tokens, _ = check_choice(logits, SamplingParams.create(batch), valid_vocab)
        np.testing.assert_array_equal(tokens, logits[..., :valid_vocab].argmax(axis=-1))

    @pytest.mark.parametrize("shape", [(1,), (3, 5)])
    def test_noise(self, rng, shape):
        logits = rng.normal(size=(*shape, VOCAB)).astype(np.float32) * 2
        params = SamplingParams.create(shape[0], temperature=[0.8, 0.0, 1.7][: shape[0]], seed=2**40 + 5)
        if len(shape) > 1:
            logits[0, 0], logits[2, 0], logits[2, 1] = np.nan, np.nan, -np.inf
        tokens, _ = check_choice(logits, params, VALID)
        if len(shape) > 1:
            assert tokens[[0, 2], 0].tolist() == [VALID - 1, VALID - 1]
            np.testing.assert_array_equal(tokens[1], logits[1, :, :VALID].argmax(axis=-1))

    def test_filters(self, rng, monkeypatch):
        """Every filter on every row; with 16 candidates many borders need the bisection."""
        monkeypatch.setattr(sampling, "NUM_CANDIDATES", 16)
        settings = [
            *itertools.product((0, 1, 7, 40, VOCAB - 1), (1.0, 0.9503127, 0.3071), (0.0, 0.05)),
            *((0, 1e-6, 0.0), (0, 1.0, 1.0), (VOCAB, 0.999, 0.0), (1000, 1.0, 0.0)),
        ]
        rows = rows_to_choose_from(rng, VOCAB)
        top_k, top_p, min_p = (np.repeat(x, len(rows)).tolist() for x in zip(*settings, strict=True))
        batch = len(top_k)
        temperature = [(1.0, 0.7, 1.6, 1.0, 0.0)[i // len(rows) % 5] for i in range(batch)]
        params = SamplingParams.create(batch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
        logits = np.tile(rows, (len(settings), 1))
        tokens, kept = check_choice(logits, params, VALID)
        assert kept[np.arange(batch), tokens].all()
        counts = kept.sum(axis=-1)
        assert {1, 7, VALID} < set(counts[np.asarray(temperature) > 0].tolist()) and (counts > 16).sum() > batch / 4
        np.testing.assert_array_equal(counts[np.asarray(temperature) == 0], VALID)

    def test_real_number_of_candidates(self, rng):
        """Borders among the 1,024 best, and beyond for top-k and for top-p; equal scores there in several parts."""
        logits = np.stack([rows_to_choose_from(rng, LARGE)[[0, 1, 3]]] * 3)
        settings = {"temperature": [1.0, 1.0, 0.5], "top_k": [1500, 0, 1000], "top_p": [1.0, 0.75, 0.5]}
        params = SamplingParams.create(3, **settings)

        def function(parts, params, ranks):
            return params.seed_lo, filter_scores(parts, params, LARGE_VALID, ranks)

        (_, scores), (_, cut_scores) = on_every_size(function, logits, params, options=UNOPTIMISED)
        kept = check_kept(scores, cut_scores, LARGE_VALID)
        counts = kept.sum(axis=-1)
        assert (counts[0, :2] == 1500).all() and counts[0, 2] > 1500  # all of the tied ones stay
        assert counts[1, 0] < sampling.NUM_CANDIDATES < counts[1, 1] and (counts[2] < 1000).all()
        for row in (1, 2):  # of the tied ones at the border of top-p the lowest ids stay, here those of some parts
            scores = logits[row, 2, :LARGE_VALID]
            tied = scores == scores[kept[row, 2, :LARGE_VALID]].min()
            stay = kept[row, 2, :LARGE_VALID][tied]
            assert 0 < stay.sum() < len(stay) and not np.diff(stay.astype(int)).max() > 0
        assert len(set((np.flatnonzero(tied) // 2501).tolist())) > 1

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ([(2, 33)] * 7, r"^logits are of shapes .*: expected 8 of one shape, one for each of the ranks here$"),
            ([(2, 33)] * 7 + [(2, 30)], r"^logits are of shapes .*\[2, 30\]: expected 8 of one shape"),
            ([(3, 33)] * 8, r"^logits are float32\[3, 33\]: expected float32 \[B, V\] or \[B, T, V\] with B = 2$"),
        ],
    )
    def test_parts_that_do_not_fit(self, shapes, message):
        with pytest.raises(ValueError, match=message):
            filter_scores([jnp.zeros(shape) for shape in shapes], SamplingParams.create(2), 200, Ranks(8))

    def test_valid_vocab_is_of_all_parts(self):
        parts = [jnp.zeros((2, 33))] * 8
        with pytest.raises(ValueError, match=r"^valid_vocab = 265: expected an integer from 1 to V = 264$"):
            choose(parts, jnp.zeros(2, jnp.int32), SamplingParams.create(2), 265, Ranks(8))


class TestParts:
    @pytest.mark.parametrize("k", [16, 100])
    def test_top_candidates(self, rng, k):
        """Equal numbers by rising ids, in and across parts; k below and above the size of a part."""
        logits = np.stack([rows_to_choose_from(rng, VOCAB)] * 2)

        def function(parts, ranks):
            parts = mask_padding(parts, VALID, ranks)
            return top_candidates(parts, k, ranks), parts

        plain, ((values, ids), masked) = on_every_size(function, logits)
        order = np.argsort(-logits[..., :VALID], axis=-1, stable=True)[..., :k]
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=-1))
        np.testing.assert_array_equal(masked, np.where(np.arange(VOCAB) < VALID, logits, -np.inf))
        jax.tree.map(np.testing.assert_array_equal, plain, ((values, ids), masked))

    def test_sums_are_those_of_the_partitions(self, rng):
        """Eight ranks have the bits of the plain form's eight partitions."""
        x = rng.random((3, VOCAB)).astype(np.float32)

        def function(parts, ranks):
            parts = [jnp.where(part < 1, part, 0.0) for part in parts]  # not what was added to the vocabulary
            exponentials = ordered_sum(lambda x: jnp.where(x > 0, jnp.exp(x), 0.0), ranks, parts)
            return (ordered_sum(lambda x: x, ranks, parts), exponentials), parts

        (plain, _), ((total, exponentials), _) = on_every_size(function, x)
        assert_same_bits(total, plain[0])
        np.testing.assert_allclose(exponentials, plain[1], rtol=2.0**-20)
        partials = np.asarray(partition_sums(x))
        in_order, reverse = (functools.reduce(np.add, columns) for columns in (partials.T, partials.T[::-1]))
        assert_same_bits(total[:, 0], in_order)
        assert (in_order != reverse).any()


# ------------------------------------------------------------------------------------------------------- sampled chain

ROWS, NODES, CANDIDATES = 250, 4, 4  # rows of each setting
SETTINGS = {"temperature": (1.0, 0.7, 0.0), "top_k": (0, 40, 0), "top_p": (1.0, 0.9, 1.0)}


def chain_choice(parts, start, ids, lattice, params, ranks, valid_vocab):
    """A step of the sampled chain after an anchor: the target's choices, and the tokens that were proposed."""
    batch = len(start)
    nodes, proposal = speculation.propose(
        speculation.Speculation.SAMPLED_CHAIN, lattice, ids, jnp.zeros(batch, jnp.int32), start, params, NODES
    )
    choice = speculation.target_choice(parts, nodes, start, params, valid_vocab, ids, proposal, ranks)
    return (choice, nodes.token), parts


def chain_inputs(rng, batch, vocab, valid_vocab):
    """Logits [batch, NODES, vocab], start, candidates and lattice; the draft agrees in part."""
    logits = rng.normal(size=(NODES, vocab)) * 2
    ids = np.stack([np.argsort(-row[:valid_vocab])[[0, 2, 5, 30]] for row in logits[:-1]])
    draft = np.take_along_axis(logits[:-1], ids, axis=-1) + rng.normal(size=ids.shape) * 0.7
    lattice = np.broadcast_to(draft[:, None, :], (NODES - 1, CANDIDATES, CANDIDATES))
    everywhere = (np.broadcast_to(x[None], (batch, *x.shape)) for x in (logits, ids, lattice))
    logits, ids, lattice = (np.asarray(x, dtype) for x, dtype in zip(everywhere, "fif", strict=True))
    return logits, np.full(batch, 17, np.int32), ids, lattice


class TestSampledChain:
    def test_tokens_and_law(self, rng):
        """The tokens of every number of devices and of the whole, and they are draws from the target's distribution."""
        settings = {name: [value for value in values for _ in range(ROWS)] for name, values in SETTINGS.items()}
        params = SamplingParams.create(3 * ROWS, seed=2**33, **settings)
        inputs = chain_inputs(rng, 3 * ROWS, VOCAB, VALID)
        function = functools.partial(chain_choice, valid_vocab=VALID)
        ((plain, _), _), ((choice, proposed), logits) = on_every_size(function, *inputs, params, options=UNOPTIMISED)
        assert choice.dtype == np.int32
        np.testing.assert_array_equal(choice, plain)
        np.testing.assert_array_equal(logits, inputs[0])

        kept = (choice[:, :-1] == proposed[:, 1:]).mean(axis=0)
        assert ((kept > 0.1) & (kept < 0.9)).all()
        np.testing.assert_array_equal(choice[2 * ROWS :], inputs[0][2 * ROWS :, :, :VALID].argmax(axis=-1))
        scores = jax.jit(filter_scores, static_argnums=2)(inputs[0][::ROWS], rows(params, [0, ROWS, 2 * ROWS]), VALID)
        scores = np.asarray(scores[:2], np.float64)
        law = np.exp(scores - scores.max(axis=-1, keepdims=True))
        law /= law.sum(axis=-1, keepdims=True)
        for setting, node in itertools.product(range(2), (0, NODES - 1)):  # with a proposal after it, and without
            drawn = choice[setting * ROWS : (setting + 1) * ROWS, node]
            assert p_value(np.bincount(drawn, minlength=VOCAB), law[setting, node]) > 1e-4

    def test_never_draws_what_has_no_weight(self):
        """At both ends of the numbers, with partitions without weight around, and with sums that round."""
        weights = np.zeros((4, 24), np.float32)
        weights[0, [4, 13]] = 0.3, 0.1
        weights[1, 23] = 1e-30
        weights[2, 0] = 1e-30
        weights[3] = 0.1
        numbers = {2.0**-33: [4, 23, 0, 0], 0.7: [4, 23, 0, 16], 0.8: [13, 23, 0, 19], 1 - 2.0**-24: [13, 23, 0, 23]}
        uniform = np.broadcast_to(np.asarray(list(numbers), np.float32)[:, None], (4, 4))

        def function(parts, uniform, ranks):
            masses = ranks.gather(ranks.run(lambda x: partition_sums(x, 8 // ranks.count), parts), -1)
            of_partition = functools.partial(speculation._partition, parts, ranks=ranks)
            return speculation._invert_partitions(masses, of_partition, uniform, ranks), parts

        (plain, _), (drawn, _) = on_every_size(function, np.tile(weights, (4, 1, 1)), uniform, options=UNOPTIMISED)
        assert plain.tolist() == drawn.tolist() == list(numbers.values())

    def test_sums_that_rise_where_there_is_no_weight(self, rng):
        """Prefix sums are not added one by one, so that two of the same weights may differ; numbers between such two."""
        weights = (rng.random((50, 1024)) * (rng.random((50, 1024)) < 0.3)).astype(np.float32)
        below = np.asarray(jnp.cumsum(weights, axis=-1))
        row, index = np.nonzero((weights[:, 1:] == 0) & (below[:, 1:] > below[:, :-1]))
        assert len(row) > 100
        weights, low, total = weights[row], below[row, index], below[row, -1]
        for uniform in (low / total, np.nextafter(low / total, np.float32(1))):
            drawn = np.asarray(speculation._invert(jnp.asarray(weights), jnp.asarray(uniform)))
            assert (weights[np.arange(len(row)), drawn] > 0).all()


def rows(params, index):
    return jax.tree.map(lambda x: x[jnp.asarray(index)], params)


def p_value(counts, law):
    """Of a chi-square test; cells with few expected counts are taken together."""
    assert not counts[law == 0].any()
    expected = law * counts.sum()
    few = expected < 5
    expected, counts = (np.append(x[~few], x[few].sum()) for x in (expected, counts))
    expected[-1] = max(expected[-1], 1e-9)
    return float(jax.scipy.special.gammaincc((expected.size - 1) / 2, np.sum((counts - expected) ** 2 / expected) / 2))


# ---------------------------------------------------------------------------------------------------------- collectives


def collectives(program):
    """(opcode, numbers) of everything that travels."""
    found = []
    for line in program.as_text().splitlines():
        if match := re.search(
            r" = (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\(", line
        ):
            shapes = re.findall(r"\[([\d,]*)\]", match[1])
            found.append((match[2], max(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)))
    return found


class TestWhatTravels:
    @pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
    def test_one_exchange_chooses(self, settings):
        """Of each part's best score and its id."""
        params = SamplingParams.create(2, **settings)

        def function(parts, pos, params, ranks):
            return choose(parts, pos, params, LARGE_VALID, ranks), parts

        program, _ = compiled(8, function, np.zeros((2, 3, LARGE), np.float32), np.zeros((2, 3), np.int32), params)
        assert collectives(program) == [("all-gather", 2 * 8 * 6)]

    def test_no_logits(self, rng):
        """At most the scores and ids of 1,024 candidates of each part, also in the bisection and the sampled chain."""
        inputs = chain_inputs(rng, 1, LARGE, LARGE_VALID)
        params = SamplingParams.create(1, temperature=1.0, top_k=2000, top_p=0.9)
        assert params.mode == SamplingMode.FILTERED
        function = functools.partial(chain_choice, valid_vocab=LARGE_VALID)
        program, _ = compiled(8, function, *inputs, params, options=UNOPTIMISED)
        sizes = [size for _, size in collectives(program)]
        assert max(sizes) == NODES * 2 * 8 * 1024 < NODES * LARGE
        assert sorted(sizes)[-2] <= NODES * 8 * 2
