"""Sampling: the noise is the specified one, the filters are transformers', and a choice depends on nothing else."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import sampling
from muse_jax.sampling import SamplingMode, SamplingParams, choose, filter_scores, gumbel_noise, noise_bits, split_seeds

jit_choose = jax.jit(choose, static_argnums=3)
jit_filter = jax.jit(filter_scores, static_argnums=2)

# seed, pos, token, bits, noise: the table of the definition
VECTORS = [
    (0, 0, 0, 0x62381E37, 0.72573078),
    (0, 0, 1, 0x841F572A, 0.32036555),
    (0, 1, 0, 0xEFB6EDEB, -1.01338363),
    (1, 0, 0, 0xA46264FC, -0.02720202),
    (7, 2048, 202047, 0x27F360CB, 1.77389514),
    (2**40 + 5, 131071, 200001, 0x11DC51F7, 2.62663603),
]
FILTERS = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.3},
}


def normal(rng, *shape, scale=3.0):
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)


def seeds(seed, batch=1):
    return map(jnp.asarray, split_seeds(seed, batch))


def chi_square_limit(freedom):
    """Exceeded once in 10,000 draws (Wilson-Hilferty, 3.72 standard deviations)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


class TestNoise:
    @pytest.mark.parametrize("compile_it", [False, True])
    @pytest.mark.parametrize("pos_dtype", [jnp.int32, jnp.uint32])
    def test_vectors(self, compile_it, pos_dtype):
        bits_of, noise_of = (jax.jit(noise_bits), jax.jit(gumbel_noise)) if compile_it else (noise_bits, gumbel_noise)
        for seed, pos, token, bits, noise in VECTORS:
            args = (*seeds(seed), jnp.asarray([pos], pos_dtype), jnp.asarray([token], jnp.uint32))
            assert int(bits_of(*args)[0, 0]) == bits
            assert float(noise_of(*args)[0, 0]) == pytest.approx(noise, abs=1e-6)

    @pytest.mark.parametrize("compile_it", [False, True])
    def test_accuracy(self, compile_it):
        """Both logarithms are good to 2^-22 relative: an error of 2^-22 in the inner one and of 2^-22 |g| in the outer."""
        args = (*seeds(3), jnp.asarray([17], jnp.int32), jnp.arange(400_000, dtype=jnp.uint32))
        noise = np.asarray((jax.jit(gumbel_noise) if compile_it else gumbel_noise)(*args))
        uniform = ((np.asarray(noise_bits(*args)) + 0.5) * 2.0**-32).astype(np.float32)
        uniform = np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)
        expected = -np.log(-np.log1p(-uniform))
        assert noise.dtype == np.float32
        assert np.all(np.abs(noise - expected) <= 2.0**-22 * (1 + np.abs(expected)))

    def test_ends_of_the_range_are_finite(self, monkeypatch):
        bits = jnp.asarray([[0, 1, 2**24 + 1, 2**32 - 257, 2**32 - 1]], jnp.uint32)
        monkeypatch.setattr(sampling, "noise_bits", lambda *args: bits)
        noise = np.asarray(gumbel_noise(None, None, None, None))[0]
        assert np.all(np.diff(noise) <= 0)
        np.testing.assert_allclose(noise[[0, -1]], [33 * np.log(2), -np.log(24 * np.log(2))], rtol=1e-6)

    def test_broadcasting(self, rng):
        lo, hi = seeds([5, 2**63 + 1], 2)
        pos = jnp.asarray(rng.integers(0, 10**6, (2, 3)), jnp.int32)
        ids = jnp.arange(40, dtype=jnp.uint32)
        noise = gumbel_noise(lo, hi, pos, ids)
        assert noise.shape == (2, 3, 40)
        for t in range(3):
            np.testing.assert_array_equal(noise[:, t], gumbel_noise(lo, hi, pos[:, t], ids))

    def test_uniform_and_independent(self):
        num_pos, num_ids, bins = 65, 4096, 16
        pos, ids = jnp.arange(num_pos, dtype=jnp.int32)[None], jnp.arange(num_ids, dtype=jnp.uint32)
        bits = np.asarray(noise_bits(*seeds(11), pos, ids))[0]
        other_seed = np.asarray(noise_bits(*seeds(12), pos, ids))[0]
        for shift in (28, 14, 0):
            cell = (bits >> shift) & (bins - 1)
            counts = np.bincount(cell.ravel(), minlength=bins)
            expected = bits.size / bins
            assert np.sum((counts - expected) ** 2) / expected < chi_square_limit(bins - 1)
            neighbours = {
                "position": (cell[:-1], cell[1:]),
                "token": (cell[:, :-1], cell[:, 1:]),
                "seed": (cell, (other_seed >> shift) & (bins - 1)),
            }
            for name, (a, b) in neighbours.items():
                counts = np.bincount((a * bins + b).ravel(), minlength=bins**2)
                expected = a.size / bins**2
                assert np.sum((counts - expected) ** 2) / expected < chi_square_limit(bins**2 - 1), (name, shift)

    def test_moments(self):
        noise = np.asarray(gumbel_noise(*seeds(2), jnp.arange(64)[None], jnp.arange(4096, dtype=jnp.uint32)), np.float64)
        std = np.pi / 6**0.5
        assert abs(noise.mean() - np.euler_gamma) < 4 * std / noise.size**0.5
        assert abs(noise.std() - std) < 4 * std * (4.4 / 4 / noise.size) ** 0.5  # excess kurtosis 2.4

    def test_shapes_are_checked(self):
        with pytest.raises(ValueError, match=r"pos \(3,\)"):
            gumbel_noise(*seeds(0, 2), jnp.arange(3), jnp.arange(4, dtype=jnp.uint32))


class TestSeeds:
    def test_rows_count_up_from_one_seed(self):
        lo, hi = split_seeds(2**64 - 2, 4)
        assert lo.dtype == hi.dtype == np.uint32
        assert lo.tolist() == [2**32 - 2, 2**32 - 1, 0, 1]
        assert hi.tolist() == [2**32 - 1, 2**32 - 1, 0, 0]

    def test_a_list_is_taken_as_it_is(self):
        lo, hi = split_seeds([7, 2**40 + 5], 2)
        assert (lo.tolist(), hi.tolist()) == ([7, 5], [0, 2**8])

    @pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1"])
    def test_other_seeds_are_refused(self, seed):
        with pytest.raises(ValueError, match=r"seed = .*expected an integer from 0 to 2\^64 - 1"):
            split_seeds(seed, 2)
        with pytest.raises(ValueError, match=r"seed\[1\] = "):
            split_seeds([0, seed], 2)


class TestParams:
    @pytest.mark.parametrize(
        "settings, mode",
        [
            ({}, SamplingMode.GREEDY),
            ({"top_k": 5, "top_p": 0.5, "min_p": 0.5}, SamplingMode.GREEDY),
            ({"temperature": 1e-31}, SamplingMode.GREEDY),
            ({"temperature": [0, 0.5]}, SamplingMode.NOISE),
            ({"temperature": [0, 0.5], "top_k": [3, 0]}, SamplingMode.NOISE),
            ({"temperature": [0, 0.5], "top_k": [0, 3]}, SamplingMode.FILTERED),
            ({"temperature": 1, "top_p": 0.9}, SamplingMode.FILTERED),
            ({"temperature": np.float32(1), "min_p": [0.0, 0.1]}, SamplingMode.FILTERED),
        ],
    )
    def test_mode(self, settings, mode):
        assert SamplingParams.create(2, **settings).mode == mode

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"temperature": -0.5}, r"temperature = -0.5: expected a finite number of at least 0"),
            ({"temperature": float("nan")}, "temperature = nan"),
            ({"temperature": float("inf")}, "temperature = inf"),
            ({"temperature": 1e39}, "temperature = 1e\\+39"),
            ({"temperature": "1"}, "temperature = '1'"),
            ({"temperature": [0.5, None]}, r"temperature\[1\] = None"),
            ({"temperature": [0.5]}, "temperature has 1 entries: expected one value or a list of batch = 2"),
            ({"top_k": -1}, "top_k = -1: expected an integer from 0"),
            ({"top_k": 2**31}, "top_k = 2147483648"),
            ({"top_k": 1.0}, "top_k = 1.0"),
            ({"top_k": True}, "top_k = True"),
            ({"top_p": 0.0}, "top_p = 0.0: expected a number above 0 and at most 1"),
            ({"top_p": 1.01}, "top_p = 1.01"),
            ({"min_p": -0.1}, "min_p = -0.1: expected a number from 0 to 1"),
            ({"min_p": 1.5}, "min_p = 1.5"),
            ({"seed": -1}, "seed = -1"),
        ],
    )
    def test_refusals(self, settings, message):
        with pytest.raises(ValueError, match=message):
            SamplingParams.create(2, **settings)

    @pytest.mark.parametrize("batch", [0, 1.0, True])
    def test_batch(self, batch):
        with pytest.raises(ValueError, match="batch = "):
            SamplingParams.create(batch)

    def test_is_a_pytree_with_a_static_mode(self):
        params = SamplingParams.create(3, temperature=0.5, top_k=[0, 1, 2], seed=2**32 - 1)
        leaves, tree = jax.tree.flatten(params)
        assert [(x.shape, x.dtype.name) for x in leaves] == [
            ((3,), name) for name in ("float32", "int32", "float32", "float32", "uint32", "uint32")
        ]
        assert jax.tree.unflatten(tree, leaves).mode == SamplingMode.FILTERED
        other = SamplingParams.create(3, temperature=0.5)
        assert tree != jax.tree.structure(other)
        assert params.seed_lo.tolist() == [2**32 - 1, 0, 1] and params.seed_hi.tolist() == [0, 1, 1]

    def test_a_mode_compiles_only_its_work(self):
        def text(**settings):
            params = SamplingParams.create(1, **settings)
            return str(jax.make_jaxpr(lambda x: choose(x, jnp.zeros(1, jnp.int32), params, 16))(jnp.zeros((1, 16))))

        greedy, noise, filtered = text(), text(temperature=1.0), text(temperature=1.0, top_p=0.5)
        assert ["log1p" in t for t in (greedy, noise, filtered)] == [False, True, True]
        assert ["top_k" in t for t in (greedy, noise, filtered)] == [False, False, True]


def order_and_border(scores, top_k, top_p, min_p):
    """The filters once more, by a full sort in float64.

    Returns the ids in descending order (ties: rising ids), how many of them stay, and for each its distance from the
    nearest border of top-p and min-p.
    """
    scores = np.asarray(scores, np.float64)
    order = np.lexsort((np.arange(scores.size), -scores))
    ranked = scores[order]
    stay = np.ones(scores.size, bool)
    if top_k:
        stay &= ranked >= ranked[min(top_k, scores.size) - 1]
    weights = np.where(stay, np.exp(ranked - ranked[0]), 0)
    before = np.concatenate([[0], np.cumsum(weights)[:-1]]) / weights.sum()
    distance = np.minimum(np.abs(before - top_p) if top_p < 1 else np.inf, np.abs(weights - min_p) if min_p else np.inf)
    if top_p < 1:
        stay &= before < top_p
    stay &= weights >= min_p
    stay[0] = True
    return order, int(stay.sum()), np.broadcast_to(distance, scores.shape)


def scores_to_filter(rng, vocab):
    """Rows [vocab] f32: peaked, flat, coarse grids full of ties, all equal, and one with a single finite score."""
    lone = np.full(vocab, -np.inf)
    lone[vocab // 2] = 1
    return np.stack([
        rng.normal(size=vocab) * 4,
        rng.normal(size=vocab) * 0.1,
        np.round(rng.normal(size=vocab) * 2),
        np.round(rng.normal(size=vocab) * 2) / 4,
        np.full(vocab, -7.25),
        lone,
    ]).astype(np.float32)  # fmt: skip


def settings_to_filter(vocab):
    """(temperature, top_k, top_p, min_p), as f32 sees them; equal scores do not sum to such a top_p."""
    ks = (0, 1, 3, 50, vocab // 2, vocab - 1, vocab, 4 * vocab)
    settings = [*itertools.product(ks, (1.0, 0.9503127, 0.3071), (0.0, 0.05)), (0, 1.0, 1.0), (50, 0.999, 0.0), (0, 1e-6, 0.0)]
    temperatures = itertools.cycle((0.7, 1.0, 1.6, 1.0))
    return [tuple(float(np.float32(x)) if isinstance(x, float) else x for x in (next(temperatures), *s)) for s in settings]


def filter_all(rows, settings, filter_fn=jit_filter):
    """Every setting on every row in one batch, and the scores before the filters. Both [settings, rows, V]."""
    t, k, p, m = (np.repeat(x, len(rows)).tolist() for x in zip(*settings, strict=True))
    logits = jnp.asarray(np.tile(rows, (len(settings), 1)))
    shape = (len(settings), *rows.shape)
    vocab = rows.shape[-1]
    filtered = filter_fn(logits, SamplingParams.create(len(t), temperature=t, top_k=k, top_p=p, min_p=m), vocab)
    scores = jit_filter(logits, SamplingParams.create(len(t), temperature=t), vocab)
    np.testing.assert_allclose(scores, logits / jnp.asarray(t, jnp.float32)[:, None], rtol=2.0**-22)
    return np.asarray(filtered).reshape(shape), np.asarray(scores).reshape(shape)


def every(settings, *results):
    """One (setting, row of each result) at a time."""
    for setting, *rows_of_setting in zip(settings, *results, strict=True):
        for rows in zip(*rows_of_setting, strict=True):
            yield setting, *rows


class TestFilters:
    @pytest.mark.parametrize("vocab, num_candidates", [(5, 1024), (101, 4), (5000, 1024)])
    def test_against_a_full_sort(self, rng, monkeypatch, vocab, num_candidates):
        """Few candidates force the bisection. Sums in f32 are good to 1e-6 (a tree of 10 additions, a prefix sum of
        1,024: about 2^-24 for each level); nearer borders are excused."""
        monkeypatch.setattr(sampling, "NUM_CANDIDATES", num_candidates)
        fresh_filter = jax.jit(lambda *args: filter_scores(*args), static_argnums=2)  # not the trace of another number
        settings = settings_to_filter(vocab)
        filtered, unfiltered = filter_all(scores_to_filter(rng, vocab), settings, fresh_filter)
        excused = 0
        for (t, k, p, m), result, scores in every(settings, filtered, unfiltered):
            order, count, distance = order_and_border(scores, k, p, m)
            kept = result > -np.inf
            np.testing.assert_array_equal(result[kept], scores[kept])
            expected = np.zeros(vocab, bool)
            expected[order[:count]] = True
            differs = (kept != (expected & (scores > -np.inf)))[order]
            assert np.all(distance[differs] < 1e-6), (t, k, p, m, kept.sum(), count)
            excused += differs.any()
        assert excused <= 0.01 * filtered.shape[0] * filtered.shape[1]

    @pytest.mark.parity
    @pytest.mark.parametrize("vocab", [5, 300, 5000])
    def test_against_transformers(self, rng, vocab):
        """Where equal scores straddle the border of top-p transformers keeps any of them: how many must agree."""
        import torch
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        rows, settings = scores_to_filter(rng, vocab), settings_to_filter(vocab)
        filtered, unfiltered = filter_all(rows, settings)
        theirs = []
        for t, k, p, m in settings:
            warpers = [TemperatureLogitsWarper(t)]
            warpers += [TopKLogitsWarper(k)] if k else []
            warpers += [TopPLogitsWarper(p)] if p < 1 else []
            warpers += [MinPLogitsWarper(m)] if m else []
            theirs.append(functools.reduce(lambda x, warper: warper(None, x), warpers, torch.tensor(rows)).numpy())
        excused = 0
        for (t, k, p, m), ours, their, scores in every(settings, filtered, theirs, unfiltered):
            ranked = np.sort(scores)[::-1]
            for kept in (ours > -np.inf, their > -np.inf):
                np.testing.assert_array_equal(np.sort(scores[kept])[::-1], ranked[: kept.sum()])
            both = (ours > -np.inf) & (their > -np.inf)
            np.testing.assert_allclose(ours[both], their[both], rtol=2.0**-22)
            low, high = sorted(((ours > -np.inf).sum(), (their > -np.inf).sum()))
            if low != high:
                _, _, distance = order_and_border(scores, k, p, m)
                assert np.all(distance[low:high] < 1e-6), (t, k, p, m, low, high)
                excused += 1
        assert excused <= 0.01 * filtered.shape[0] * filtered.shape[1]

    def test_ties(self):
        logits = jnp.asarray([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0, -0.0, 1.0]] * 4)
        params = SamplingParams.create(4, temperature=1.0, top_k=[3, 7, 0, 0], top_p=[1, 1, 0.6, 0.4])
        kept = jit_filter(logits, params, 8) > -jnp.inf
        masses = np.exp([2, 2, 1, 1, 1, 1])
        assert masses[:2].sum() < 0.6 * (masses.sum() + 2) < masses[:3].sum()
        assert [np.flatnonzero(row).tolist() for row in kept] == [
            [0, 1, 2, 3, 4, 7],  # the third best is tied with three others: all stay
            [0, 1, 2, 3, 4, 5, 6, 7],  # 0.0 and -0.0 are equal
            [0, 1, 3],  # of the tied ones at the border of top-p the lowest id
            [1, 3],
        ]

    def test_rows_of_temperature_0_are_not_touched(self, rng):
        logits = normal(rng, 2, 20)
        filtered = jit_filter(logits, SamplingParams.create(2, temperature=[0, 0.5], top_k=2, min_p=0.5), 18)
        np.testing.assert_array_equal(filtered[0], jnp.where(jnp.arange(20) < 18, logits[0], -jnp.inf))
        assert jnp.sum(filtered[1] > -jnp.inf) <= 2

    def test_real_vocabulary(self, rng):
        vocab = 202_048
        rows = np.stack([rng.normal(size=vocab) * 3, rng.normal(size=vocab) * 0.2]).astype(np.float32)
        settings = [(1.0, 50, 0.5, 0.0), (0.5, 0, 0.5, 0.0), (1.0, 5000, 0.75, 0.0625)]
        filtered, unfiltered = filter_all(rows, settings)
        for (_, k, p, m), result, scores in every(settings, filtered, unfiltered):
            order, count, distance = order_and_border(scores, k, p, m)
            expected = np.zeros(vocab, bool)
            expected[order[:count]] = True
            assert np.all(distance[((result > -np.inf) != expected)[order]] < 1e-6)


class TestChoice:
    @pytest.mark.parametrize("filters", [{}, *FILTERS.values()], ids=["none", *FILTERS])
    def test_frequencies(self, rng, filters):
        vocab, draws = 12, 20_000
        logits = jnp.asarray(rng.permutation(np.linspace(0, 2.5, vocab)), jnp.float32)[None]
        params = SamplingParams.create(1, temperature=0.8, seed=int(rng.integers(2**63)), **filters)
        pos = jnp.arange(draws, dtype=jnp.int32)[None]
        tokens = jit_choose(jnp.broadcast_to(logits[:, None], (1, draws, vocab)), pos, params, vocab)
        counts = np.bincount(np.asarray(tokens)[0], minlength=vocab)
        expected = draws * np.asarray(jax.nn.softmax(jit_filter(logits, params, vocab)))[0].astype(np.float64)
        assert np.all(counts[expected == 0] == 0)
        counts, expected = counts[expected > 0], expected[expected > 0]
        assert counts.size > 1 and (not filters or counts.size < vocab)
        assert np.sum((counts - expected) ** 2 / expected) < chi_square_limit(counts.size - 1)

    @pytest.mark.parametrize("filters", [{}, FILTERS["all"]], ids=["none", "all"])
    def test_does_not_depend_on_batch_shape_or_jit(self, rng, filters):
        batch, length, vocab = 4, 6, 1203
        logits = normal(rng, batch, length, vocab)
        pos = jnp.asarray(rng.integers(0, 10**5, (batch, length)), jnp.int32)
        row_seeds = [int(s) for s in rng.integers(0, 2**63, batch)]
        temperature = [0.9, 1.3, 0.0, 1.0]
        params = SamplingParams.create(batch, temperature=temperature, seed=row_seeds, **filters)
        tokens = jit_choose(logits, pos, params, vocab)
        assert tokens.dtype == jnp.int32 and tokens.shape == (batch, length)
        np.testing.assert_array_equal(tokens, choose(logits, pos, params, vocab))
        np.testing.assert_array_equal(tokens[2], jnp.argmax(logits[2], axis=-1))
        for t in range(length):
            np.testing.assert_array_equal(tokens[:, t], jit_choose(logits[:, t], pos[:, t], params, vocab))
        for b in range(batch):
            alone = SamplingParams.create(1, temperature=temperature[b], seed=row_seeds[b], **filters)
            np.testing.assert_array_equal(tokens[b], jit_choose(logits[b : b + 1], pos[b : b + 1], alone, vocab)[0])

    def test_the_bisection_of_one_row_leaves_the_others_alone(self, rng):
        """The flat row needs it, the peaked one does not."""
        vocab = 3000
        logits = jnp.concatenate([normal(rng, 1, vocab, scale=0.1), normal(rng, 1, vocab, scale=6.0)])
        params = SamplingParams.create(2, temperature=1.0, top_p=0.95)
        both = jit_filter(logits, params, vocab)
        for b in range(2):
            alone = SamplingParams.create(1, temperature=1.0, top_p=0.95)
            np.testing.assert_array_equal(both[b], jit_filter(logits[b : b + 1], alone, vocab)[0])
        kept = (both > -jnp.inf).sum(axis=-1)
        assert kept[0] > sampling.NUM_CANDIDATES > kept[1]

    def test_neutral_filters_change_nothing(self, rng):
        vocab, pos = 40, jnp.arange(32, dtype=jnp.int32)[None]
        logits = normal(rng, 1, 32, vocab)
        plain = SamplingParams.create(1, temperature=0.8, seed=4)
        filtered = SamplingParams.create(1, temperature=0.8, seed=4, top_k=vocab)
        assert (plain.mode, filtered.mode) == (SamplingMode.NOISE, SamplingMode.FILTERED)
        np.testing.assert_array_equal(jit_choose(logits, pos, plain, vocab), jit_choose(logits, pos, filtered, vocab))

    def test_greedy_ties_go_to_the_lowest_id(self):
        logits = jnp.asarray([[0.0, 3.0, 1.0, 3.0], [-0.0, -1.0, 0.0, -2.0]])
        tokens = jit_choose(logits, jnp.zeros(2, jnp.int32), SamplingParams.create(2), 4)
        assert tokens.tolist() == [1, 0]

    @pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 1000}])
    @pytest.mark.parametrize("level", [0.0, -3e38, -np.inf, np.nan])
    def test_padding_is_never_chosen(self, settings, level):
        vocab, valid, length = 64, 3, 200
        logits = jnp.full((2, length, vocab), level, jnp.float32).at[..., valid:].set(30.0)
        pos = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (2, length))
        tokens = np.asarray(jit_choose(logits, pos, SamplingParams.create(2, **settings), valid))
        assert tokens.min() >= 0 and tokens.max() < valid
        if np.isnan(level):
            assert tokens.min() == valid - 1
        if level == 0.0 and settings:
            assert set(tokens.ravel()) == set(range(valid)) if "top_p" not in settings else tokens.max() > 0

    def test_extreme_temperatures(self, rng):
        logits = normal(rng, 1, 32, 40)
        pos = jnp.arange(32, dtype=jnp.int32)[None]
        for filters in ({}, {"top_p": 0.9}):
            cold = SamplingParams.create(1, temperature=1e-30, **filters)
            np.testing.assert_array_equal(jit_choose(logits, pos, cold, 40), jnp.argmax(logits, axis=-1))
            hot = SamplingParams.create(1, temperature=3e38, **filters)
            impossible = logits.at[..., 7].set(-jnp.inf)
            drawn = set(np.asarray(jit_choose(impossible, pos, hot, 38)).ravel().tolist())
            assert len(drawn) > 10 and not drawn & {7, 38, 39}
            assert (jit_filter(impossible, hot, 38)[..., jnp.array([7, 38, 39])] == -jnp.inf).all()

    @pytest.mark.parametrize(
        "shape, pos_shape, valid, message",
        [
            ((2, 8), (2, 1), 8, "pos has shape"),
            ((3, 8), (3,), 8, "expected float32 \\[B, V\\] or \\[B, T, V\\] with B = 2"),
            ((2, 1, 1, 8), (2, 1, 1), 8, "logits are float32"),
            ((2, 8), (2,), 9, "valid_vocab = 9: expected an integer from 1 to V = 8"),
            ((2, 8), (2,), 0, "valid_vocab = 0"),
        ],
    )
    def test_shapes_are_checked(self, shape, pos_shape, valid, message):
        with pytest.raises(ValueError, match=message):
            choose(jnp.zeros(shape), jnp.zeros(pos_shape, jnp.int32), SamplingParams.create(2), valid)

    def test_bf16_logits_are_refused(self):
        with pytest.raises(ValueError, match="logits are bfloat16"):
            choose(jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros(2, jnp.int32), SamplingParams.create(2), 8)


class TestPartitions:
    @pytest.mark.parametrize("vocab", [5, 64, 4096, 5001])
    def test_sums_do_not_depend_on_how_partitions_are_held(self, rng, vocab):
        x = jnp.asarray(rng.random((2, vocab)), jnp.float32)
        partials = jax.jit(sampling.partition_sums)(x)
        assert partials.shape == (2, 8)
        size = -(-vocab // 8)
        padded = jnp.pad(x, ((0, 0), (0, 8 * size - vocab)))
        for block in range(8):
            alone = jnp.zeros(8 * size).at[:size].set(padded[0, block * size : (block + 1) * size])
            assert sampling.partition_sums(alone)[0] == partials[0, block]
        total = np.zeros(2, np.float32)
        for i in range(8):
            total = total + np.asarray(partials[:, i])
        np.testing.assert_array_equal(sampling.sum_in_order(partials)[:, 0], total)
        np.testing.assert_allclose(total, np.asarray(x, np.float64).sum(axis=-1), rtol=1e-6)
