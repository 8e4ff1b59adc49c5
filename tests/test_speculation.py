"""Speculative decoding: the tokens of plain decoding whatever is proposed, at every limit, and a step's program.

A random draft proposes little that the target accepts. So most tests plant the target's known continuation among the draft's
candidates, at random ranks, with random scores and up to a random depth: then every count and every form of path occurs.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import re
import shutil
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muse_jax
from muse_jax import decoding, speculation, tree
from muse_jax.config import ConfigError
from muse_jax.decoding import NO_TOKEN, Model
from muse_jax.draft import DFlash2
from muse_jax.kv_cache import ring_capacity
from muse_jax.model import MuseSpark
from muse_jax.muse import Muse
from muse_jax.sampling import SamplingParams, choose, gumbel_noise

LENGTHS = (1, 40, 70)  # the window is 8, the ring of a step of 16 nodes 24 slots, and the chunk 16 tokens
NEW_TOKENS = 60
SEEDS = [2**40 + 5, 3, 2**63]
SETTINGS = {"temperature": [0.0, 0.7, 1.0], "top_k": [0, 0, 20], "top_p": [1.0, 1.0, 0.9]}
NEVER = [263]  # of the padded vocabulary
VALID_VOCAB = 259
TIE = 1e-4  # sampling.md: two choices may differ where the two best perturbed scores are closer than this,
TIE_FRACTION = 1e-3  # for at most this part of the tokens
# Of the largest entry of a cache: fp32 sums in another order, through two layers (see test_cache_consistency.py).
TOLERANCE = 1e-4

PATHWISE = [("chain", 16), ("tree", 2), ("tree", 8), ("tree", 16), ("tree", 32)]

# Each shape runs for milliseconds, so compiling is most of the time: without LLVM's optimisations it is half, and with XLA's
# older code for fusions, while it has that, a third. The tests of a step's program leave the latter as it is served.
UNOPTIMISED = {"xla_backend_optimization_level": 0}
OLDER_FUSIONS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
compile_once = functools.partial(jax.jit, compiler_options=UNOPTIMISED | OLDER_FUSIONS)
prefill_chunk = compile_once(decoding.prefill_chunk, donate_argnames=("caches", "last"))
first_token = compile_once(decoding.first_token, donate_argnames="caches")
decode = compile_once(decoding.decode, donate_argnames="state")


class QuickMuse(Muse):
    """Shares compiled functions, also between copies that `dataclasses.replace` makes."""

    def __post_init__(self):
        super().__post_init__()
        self._prefill_chunk, self._first_token, self._decode = prefill_chunk, first_token, decode

    def prefill(self, *args, **settings):
        """Prefill asks only how many rows a step has, so that chains can have the program of a tree."""
        return Muse.prefill(self if self.model.speculation in ("tree", "off") else self._as_tree, *args, **settings)

    @functools.cached_property
    def _as_tree(self):
        return dataclasses.replace(self, model=dataclasses.replace(self.model, speculation=speculation.Speculation.TREE))


@pytest.fixture(scope="module")
def load(small_config, small_params, small_draft_config, small_draft_params):
    """(speculation, tree_size) -> Muse, each made once."""
    params, draft_params = jax.device_put((small_params, small_draft_params))

    @functools.cache
    def make(speculation, tree_size):
        model = Model.create(
            MuseSpark(small_config, dtype=jnp.dtype("float32")),
            params,
            draft=DFlash2(small_draft_config, dtype=jnp.dtype("float32")),
            draft_params=draft_params,
            speculation=speculation,
            tree_size=tree_size,
            valid_vocab=VALID_VOCAB,
        )
        return QuickMuse(model, small_config, small_draft_config, None, None, "xla", 512, 16)

    return make


@pytest.fixture(scope="module")
def plain(load):
    return load("off", 16)


@pytest.fixture(scope="module")
def cases(plain):
    """Every prompt length meets every sampling setting."""
    rng = np.random.default_rng(7)
    return [Case.create(plain, rng, np.roll(LENGTHS, turn)) for turn in range(len(LENGTHS))]


@dataclasses.dataclass
class Case:
    """Prompts and what plain decoding makes of them."""

    plain: Muse
    prompts: list
    texts: list

    @classmethod
    def create(cls, plain, rng, lengths, **settings):
        prompts = [rng.integers(0, VALID_VOCAB, n).tolist() for n in lengths]
        case = cls(plain, prompts, [])
        state, out = case.start(plain, **settings)
        texts = [[] for _ in prompts]
        for _ in range(NEW_TOKENS):
            for text, token in zip(texts, np.asarray(out.tokens)[:, 0], strict=True):
                text.append(int(token))
            state, out = plain.decode(state)
        return dataclasses.replace(case, texts=texts)

    def start(self, muse, **settings):
        defaults = {"seed": SEEDS, "max_new_tokens": NEW_TOKENS, "stop_token_ids": NEVER, **SETTINGS}
        return muse.prefill(self.prompts, **{**defaults, **settings})

    def planted_text(self, rng):
        """[B, T], tokens by position; noise where the text is over."""
        text = rng.integers(0, VALID_VOCAB, (len(self.prompts), 512)).astype(np.int32)
        for row, prompt, answer in zip(text, self.prompts, self.texts, strict=True):
            row[: len(prompt) + len(answer)] = prompt + answer
        return text

    def assert_same(self, others, expected=None):
        """Equal token by token; a row may part at a tie, after which it is not compared. Any other difference fails."""
        expected, ties = self.texts if expected is None else expected, 0
        for row, (text, other) in enumerate(zip(expected, others, strict=True)):
            i = next((i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
            if i is None:
                assert len(text) == len(other), f"row {row}: {len(other)} tokens instead of {len(text)}"
            else:
                gap = self.score_gap(row, i, text[i], other[i])
                assert gap < TIE, f"row {row}, token {i}: {other[i]} instead of {text[i]}, scores {gap:.2g} apart"
                ties += 1
        assert ties <= TIE_FRACTION * sum(map(len, expected))

    def score_gap(self, row, i, first, second):
        sequence = self.prompts[row] + self.texts[row][:i]
        scores = np.asarray(self.plain.logits([sequence]))[0, -1]
        if temperature := SETTINGS["temperature"][row]:
            words = jnp.uint32([SEEDS[row] % 2**32]), jnp.uint32([SEEDS[row] >> 32])
            noise = gumbel_noise(*words, jnp.int32([len(sequence)]), jnp.arange(len(scores), dtype=jnp.uint32))
            scores = scores / np.float32(temperature) + np.asarray(noise[0])
        return abs(float(scores[first] - scores[second]))


# ------------------------------------------------------------------------------------------------------------ planting


@functools.partial(jax.tree_util.register_dataclass, data_fields=["text", "reach", "rank", "margin"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a step's proposal holds the known text."""

    text: jax.Array  # [B, T] int32, by position
    reach: jax.Array  # [B] int32, positions of the lattice that hold the text
    rank: jax.Array  # [B, P] int32, candidate that is the text's token
    margin: jax.Array  # [B, P] fp32, its score after the text's token before, above the best other candidate's

    @classmethod
    def draw(cls, rng, text, block_size, top_k, deep=0.5):
        """A `deep` part of the rows proposes the text first; the others spread their nodes."""
        batch, positions = len(text), block_size - 1
        certain = rng.random((batch, 1)) < deep
        margin = np.where(certain, 12.0, rng.uniform(-1.5, 2.5, (batch, positions)))
        rank = rng.integers(0, top_k, (batch, positions))
        return cls(text, rng.integers(0, block_size, batch).astype(np.int32), rank.astype(np.int32), np.float32(margin))


def propose_planted(plan, kind, lattice, ids, anchor, start, sampling, size, build_tree):
    """`propose`, from candidates and scores that the plan has changed."""
    slots = jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None, :]
    step = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    planted = step < plan.reach[:, None]
    truth = jnp.take_along_axis(plan.text, start[:, None] + 1 + step, axis=1)[:, :, None]
    chosen = slots == plan.rank[:, :, None]
    # Candidates stay distinct: where the text's token was one of them, it changes places.
    displaced = jnp.take_along_axis(ids, plan.rank[:, :, None], axis=2)
    moved = jnp.where(chosen, truth, jnp.where(ids == truth, displaced, ids))
    ids = jnp.where(planted[:, :, None], moved, ids)
    follows = jnp.concatenate([jnp.ones_like(chosen[:, :1]), chosen[:, :-1]], axis=1)
    edge = planted[:, :, None, None] & follows[:, :, :, None] & chosen[:, :, None, :]
    others = jnp.max(jnp.where(chosen[:, :, None, :], -jnp.inf, lattice), axis=3, keepdims=True)
    lattice = jnp.where(edge, others + plan.margin[:, :, None, None], lattice)
    return speculation.propose(kind, lattice, ids, anchor, start, sampling, size, build_tree)


@functools.partial(compile_once, donate_argnames="state")
def planted_decode(model, state, plan):
    with mock.patch.object(decoding, "propose", functools.partial(propose_planted, plan)):
        state, out, (nodes, path, _) = decoding.decode_and_trace(model, state)
    return state, out, (nodes, path)


@dataclasses.dataclass
class Run:
    """What a batch emitted, and step by step [steps, B]: how much, how much it accepted, and whether a path branched off."""

    texts: list
    count: np.ndarray
    accepted: np.ndarray
    branched: np.ndarray
    state: decoding.DecodeState


def finish(muse, case, rng, state, out, deep=0.5, each_step=lambda state, texts: None):
    """Decodes until every row is done, with the case's text planted; checks the form of each output."""
    text, config = case.planted_text(rng), muse.draft_config
    texts, log = [[] for _ in case.prompts], []
    path = np.zeros((len(texts), muse.model.num_rows), np.int32)
    was_done, remaining = np.zeros(len(texts), bool), np.asarray(state.remaining) + np.asarray(out.count)
    for step in range(NEW_TOKENS + 1):
        tokens, count, accepted, done = (np.asarray(x) for x in (out.tokens, out.count, out.accepted, out.done))
        assert tokens.shape == (len(texts), muse.model.num_rows)
        assert tokens.dtype == count.dtype == accepted.dtype == np.int32
        assert ((count >= 1) == ~was_done).all() and (count <= accepted).all() and (accepted <= muse.model.num_rows).all()
        np.testing.assert_array_equal(accepted == 0, was_done)
        for row, (answer, new, n) in enumerate(zip(texts, tokens, count, strict=True)):
            answer += new[:n].tolist()
            assert (new[:n] >= 0).all() and (new[:n] < VALID_VOCAB).all() and (new[n:] == NO_TOKEN).all()
            assert n == accepted[row] or done[row]  # less is emitted only at the end
        remaining = remaining - count
        np.testing.assert_array_equal(state.remaining, remaining)
        np.testing.assert_array_equal(state.token, [answer[-1] for answer in texts])
        # Committed is all but the last token, which has no keys and values yet.
        np.testing.assert_array_equal(state.length, [len(p) + len(t) - 1 for p, t in zip(case.prompts, texts, strict=True)])
        np.testing.assert_array_equal(state.done, done)
        assert (done >= was_done).all()
        each_step(state, texts)
        if step:
            inside = np.arange(path.shape[1]) < accepted[:, None]
            log.append((count, accepted, (inside & (path != np.arange(path.shape[1]))).any(axis=1)))
        was_done = done
        if done.all():
            columns = map(np.array, zip(*log, strict=True)) if log else (np.zeros((0, len(texts)), np.int32),) * 3
            return Run(texts, *columns, state)
        plan = Plan.draw(rng, text, config.block_size, config.selector_top_k, deep)
        state, out, (_, path) = planted_decode(muse.model, state, plan)
        path = np.asarray(path)
    raise AssertionError("not finished after max_new_tokens steps")


# -------------------------------------------------------------------------------------------------------------- tokens


class TestLossless:
    @pytest.mark.parametrize(("kind", "size"), PATHWISE)
    def test_tokens_of_plain_decoding(self, load, cases, rng, kind, size):
        """Every temperature with every prompt length; every count that a step can have; paths that branch off."""
        muse = load(kind, size)
        most = min(size, muse.draft_config.block_size)
        assert muse.model.num_rows == (most if kind == "chain" else size)
        assert ring_capacity(muse.config, 512, size) < max(LENGTHS)  # rings wrap in prefill and while decoding
        runs = []
        for case in cases * 2:
            run = finish(muse, case, rng, *case.start(muse))
            case.assert_same(run.texts)
            runs.append(run)
        accepted = np.concatenate([run.accepted.ravel() for run in runs])
        assert set(accepted[accepted > 0].tolist()) == set(range(1, most + 1))
        assert np.concatenate([run.branched.ravel() for run in runs]).any() == (kind == "tree" and size > 2)

    @pytest.mark.parametrize(("kind", "size"), [("chain", 16), ("tree", 16)])
    def test_without_planting(self, load, cases, rng, kind, size):
        muse = load(kind, size)
        with mock.patch.object(Plan, "draw", lambda rng, text, block_size, top_k, deep: blank_plan(text, block_size)):
            case = cases[2]
            run = finish(muse, case, rng, *case.start(muse))
        case.assert_same(run.texts)
        assert 1 <= run.accepted[run.accepted > 0].mean() < 3

    def test_each_row_alone(self, load, plain, cases, rng):
        """Neighbours in the batch change nothing: their lengths, seeds, temperatures and how much they accept."""
        muse, case = load("tree", 8), cases[1]
        for row in range(3):
            keep = [row] * 3
            alone = Case(plain, [case.prompts[i] for i in keep], [case.texts[i] for i in keep])
            settings = {name: [values[i] for i in keep] for name, values in SETTINGS.items()}
            run = finish(muse, alone, rng, *alone.start(muse, seed=[SEEDS[i] for i in keep], **settings))
            for text in run.texts:
                assert text == case.texts[row]
            assert len(set(map(tuple, run.accepted.T.tolist()))) == 3  # each copy by its own steps

    def test_texts_are_worth_comparing(self, cases):
        for case in cases:
            assert len(set(map(tuple, case.texts))) == 3
            assert all(len(set(text)) > 8 for text in case.texts)


def blank_plan(text, block_size):
    shape = (len(text), block_size - 1)
    return Plan(text, np.zeros(len(text), np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32))


# -------------------------------------------------------------------------------------------------------------- limits


def clip(text, budget=NEW_TOKENS, stop=None):
    text = text[:budget]
    return text[: text.index(stop) + 1] if stop in text else text


class TestLimits:
    def test_stop_token_inside_a_path(self, load, cases, rng):
        muse, clipped = load("tree", 16), set()
        for i in range(20):
            case = cases[i % 3]
            stop = case.texts[i // 3 % 3][i]
            run = finish(muse, case, rng, *case.start(muse, stop_token_ids=[stop]), deep=0.9)
            case.assert_same(run.texts, [clip(text, stop=stop) for text in case.texts])
            clipped |= set(run.count[run.accepted > run.count].tolist())
        assert clipped >= set(range(1, 8))

    def test_budget_ends_inside_a_path(self, load, cases, rng):
        muse, clipped = load("tree", 16), set()
        for n in range(1, 21):
            case = cases[n % 3]
            budget = [n, 21 - n, 1 + n // 2]
            run = finish(muse, case, rng, *case.start(muse, max_new_tokens=budget), deep=0.9)
            case.assert_same(run.texts, [clip(text, limit) for text, limit in zip(case.texts, budget, strict=True)])
            assert not np.asarray(run.state.remaining).any()
            clipped |= set(run.count[run.accepted > run.count].tolist())
        assert clipped >= set(range(1, 8))

    def test_stop_token_and_budget_together(self, load, cases, rng):
        """The stop token may be the last one that the budget allows, or the first one that it does not."""
        muse, case = load("tree", 16), cases[2]
        for i, shift in itertools.product((2, 5, 9), (0, 1)):
            stop, budget = case.texts[1][i], i + 1 - shift
            run = finish(muse, case, rng, *case.start(muse, stop_token_ids=[stop], max_new_tokens=budget), deep=1.0)
            case.assert_same(run.texts, [clip(text, budget, stop) for text in case.texts])

    @pytest.mark.parametrize("spare", [0, 1])
    def test_full_cache(self, load, plain, rng, spare):
        """The last step's rows reach the end of the 256 slots, and prompt + answer is max_length."""
        muse = load("tree", 16)
        longest = 256 - muse.model.num_rows - spare
        muse = dataclasses.replace(muse, max_length=longest)
        lengths = (longest - NEW_TOKENS, 1, longest - NEW_TOKENS - 1)
        case = Case.create(plain, rng, lengths)
        budget = [longest - n for n in lengths]
        budget[1] = NEW_TOKENS
        state, out = case.start(muse, max_new_tokens=[NEW_TOKENS, NEW_TOKENS, NEW_TOKENS])
        assert state.cache.layers[1][0].shape[2] == 256
        run = finish(muse, case, rng, state, out, each_step=functools.partial(assert_as_fresh, muse, case))
        case.assert_same(run.texts)
        with pytest.raises(ValueError, match=f"= {longest + 1}: max_length is {longest}"):
            case.start(muse, max_new_tokens=NEW_TOKENS + 1)

    @pytest.mark.parametrize(("kind", "size"), [("chain", 16), ("tree", 8), ("tree", 32)])
    def test_caches_hold_what_a_prefill_of_the_text_gives(self, load, cases, rng, kind, size):
        """After every step, of target and draft, also where the end cut a path short: a state can be continued."""
        muse = load(kind, size)
        for case, stop in zip(cases, (NEVER[0], cases[1].texts[1][11], cases[2].texts[0][17]), strict=True):
            settings = {"stop_token_ids": [stop], "max_new_tokens": [NEW_TOKENS, 23, 38]}
            check = functools.partial(assert_as_fresh, muse, case)
            finish(muse, case, rng, *case.start(muse, **settings), each_step=check)

    def test_done_rows_stay_as_they_are(self, load, cases, rng):
        muse, case = load("tree", 16), cases[0]
        run = finish(muse, case, rng, *case.start(muse, max_new_tokens=[1, 9, 30]))
        state, before = run.state, jax.device_get(run.state)
        for _ in range(3):
            plan = Plan.draw(rng, case.planted_text(rng), 16, 16)
            state, out, _ = planted_decode(muse.model, state, plan)
            assert not np.asarray(out.count).any() and not np.asarray(out.accepted).any() and np.asarray(out.done).all()
            assert (np.asarray(out.tokens) == NO_TOKEN).all()
        after = jax.device_get(state)
        for name in ("length", "token", "remaining", "done"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        for config, cache, old in (
            (muse.config, after.cache, before.cache),
            (muse.draft_config, after.draft_cache, before.draft_cache),
        ):
            for ours, expected in committed(config, cache, old, before.length):
                np.testing.assert_array_equal(ours, expected)


def committed(config, cache, other, lengths):
    """Pairs of what two caches hold for the committed positions that a later row can still see, layer by layer."""
    for i, (ours, theirs) in enumerate(zip(cache.layers, other.layers, strict=True)):
        window = config.window(i)
        for b, length in enumerate(np.asarray(lengths)):
            positions = np.arange(0 if window is None else max(0, length - window + 1), length)
            slots = positions
            if window is not None:
                slots = positions % cache.ring_positions.shape[1]
                for each in (cache, other):
                    np.testing.assert_array_equal(np.asarray(each.ring_positions)[b, slots], positions)
            for x, y in zip(ours, theirs, strict=True):
                yield np.asarray(x)[b][:, slots], np.asarray(y)[b][:, slots]


def assert_as_fresh(muse, case, state, texts):
    """The caches hold what a prefill of prompt and text, but the last token, puts there."""
    sequences = [prompt + text[:-1] for prompt, text in zip(case.prompts, texts, strict=True)]
    fresh, _ = muse.prefill(sequences, max_new_tokens=1, stop_token_ids=NEVER)
    np.testing.assert_array_equal(state.length, fresh.length)
    for config, cache, other in (
        (muse.config, state.cache, fresh.cache),
        (muse.draft_config, state.draft_cache, fresh.draft_cache),
    ):
        for ours, expected in committed(config, cache, other, state.length):
            if expected.size:
                np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


# ------------------------------------------------------------------------------------------------------- sampled chain

VOCAB, CANDIDATES, POSITIONS, CHECKED = 8, 4, 3, 3  # of the tables below; the law of the first CHECKED tokens is compared
ROWS = 10_000  # of each setting
SIGNIFICANCE = 1e-4  # seeds are fixed: what passes once does not fail by chance
LAW = {
    "noise": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


@dataclasses.dataclass
class Tables:
    """A target whose next token depends on the two before, and a draft that knows only the one before."""

    target: np.ndarray  # [index of the token, token two before, token before, V], logits
    draft: np.ndarray  # [index, token before, K], scores
    ids: np.ndarray  # [index, K]

    @classmethod
    def draw(cls, rng):
        indices = CHECKED + POSITIONS
        ids = np.stack([rng.permutation(VOCAB)[:CANDIDATES] for _ in range(indices)])
        target = rng.normal(size=(indices, VOCAB, VOCAB, VOCAB)) * 1.5
        # The draft agrees in part: its scores are the target's without the token two before, and some error.
        draft = np.take_along_axis(target.mean(axis=1), ids[:, None, :], axis=2)
        draft += 0.7 * rng.normal(size=draft.shape)
        return cls(target.astype(np.float32), draft.astype(np.float32), ids.astype(np.int32))

    def law(self, anchor, temperature, top_k=0, top_p=1.0):
        """The exact distribution of the first tokens, [V] * CHECKED, float64."""

        def distribution(logits):
            order = np.argsort(-logits)
            scores = logits[order].astype(np.float64) / temperature
            weights = np.exp(scores - scores[0])
            weights[top_k or VOCAB :] = 0
            weights /= weights.sum()
            weights[np.cumsum(weights) - weights >= top_p] = 0
            out = np.zeros(VOCAB)
            out[order] = weights / weights.sum()
            return out

        law = np.zeros((VOCAB,) * CHECKED)
        for tokens in itertools.product(range(VOCAB), repeat=CHECKED):
            history = (0, anchor, *tokens)
            law[tokens] = math.prod(distribution(self.target[i, history[i], history[i + 1]])[t] for i, t in enumerate(tokens))
        return law


@functools.partial(compile_once, static_argnames="rule")
def chain_step(tables, index, before, anchor, sampling, rule):
    """One step of rows whose next token has number `index`. rule: a context manager that may patch the rule."""
    target, draft, ids = tables
    steps = jnp.minimum(index[:, None] + jnp.arange(POSITIONS + 1)[None, :], len(ids) - 1)
    candidates = ids[steps[:, :-1]]
    first = jnp.broadcast_to(anchor[:, None, None], (len(anchor), 1, CANDIDATES))
    previous = jnp.concatenate([first, candidates[:, :-1]], axis=1)
    lattice = draft[steps[:, :-1, None], previous]
    with rule():
        nodes, proposal = speculation.propose(
            speculation.Speculation.SAMPLED_CHAIN, lattice, candidates, anchor, 5 + index, sampling, POSITIONS + 1
        )
        two_before = jnp.concatenate([before[:, None], nodes.token[:, :-1]], axis=1)
        logits = target[steps, two_before, nodes.token]
        choice = speculation.target_choice(logits, nodes, 5 + index, sampling, VOCAB, candidates, proposal)
    count, path = tree.accept(nodes, choice)
    return jnp.take_along_axis(choice, path, axis=1), count, nodes.token


def first_tokens(tables, anchor, sampling, rule):
    """[B, CHECKED], and how many nodes the first step accepted."""
    batch = len(sampling.temperature)
    out = np.zeros((batch, CHECKED + POSITIONS + 2), np.int32)  # token two before, anchor, the text
    out[:, 1] = anchor
    index, rows, counts = np.zeros(batch, np.int32), np.arange(batch), []
    while (index < CHECKED).any():
        arrays = (tables.target, tables.draft, tables.ids)
        emitted, count, _ = map(np.asarray, chain_step(arrays, index, out[rows, index], out[rows, index + 1], sampling, rule))
        for j in range(POSITIONS + 1):
            new = (j < count) & (index < CHECKED)
            out[rows[new], index[new] + 2 + j] = emitted[new, j]
        index = np.where(index < CHECKED, index + count, index)
        counts.append(count)
    return out[:, 2 : 2 + CHECKED], counts[0]


def p_value(tokens, law):
    """Of a chi-square test; cells with few expected counts are taken together."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    assert not counts[law == 0].any()
    expected, few = law * len(tokens), law * len(tokens) < 5
    expected = np.append(expected[~few], max(expected[few].sum(), 1e-9))
    counts = np.append(counts[~few], counts[few].sum())
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(jax.scipy.special.gammaincc((expected.size - 1) / 2, statistic / 2))


def accept_always():
    real = speculation.uniforms

    def uniforms(params, pos, draw):
        return jnp.zeros(pos.shape) if draw == speculation.Draw.ACCEPT else real(params, pos, draw)

    return mock.patch.object(speculation, "uniforms", uniforms)


def one_number_for_all_draws():
    real = speculation.uniforms
    return mock.patch.object(speculation, "uniforms", lambda params, pos, _: real(params, pos, speculation.Draw.ACCEPT))


def rejected_draws_from_all_of_p():
    real = speculation._rejection_sampled

    def rule(logits, nodes, positions, sampling, *rest):
        kept = real(logits, nodes, positions, sampling, *rest)
        proposed = jnp.pad(nodes.token[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return jnp.where(kept == proposed, kept, choose(logits, positions, sampling, VOCAB))

    return mock.patch.object(speculation, "_rejection_sampled", rule)


@pytest.fixture(scope="module")
def tables():
    return Tables.draw(np.random.default_rng(11))


@pytest.fixture(scope="module")
def law_sampling():
    """Rows of all settings in one batch."""
    columns = {
        name: [settings.get(name, default) for settings in LAW.values() for _ in range(ROWS)]
        for name, default in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0))
    }
    return SamplingParams.create(ROWS * len(LAW), seed=2**33, **columns)


class TestSampledChain:
    @pytest.mark.parametrize("anchor", [2, 5])
    def test_law_of_the_target(self, tables, law_sampling, anchor):
        tokens, count = first_tokens(tables, anchor, law_sampling, contextlib.nullcontext)
        assert set(count.tolist()) == set(range(1, POSITIONS + 2))
        for i, name in enumerate(("noise", "filtered")):
            of_setting, law = tokens[i * ROWS : (i + 1) * ROWS], tables.law(anchor, **LAW[name])
            for n in range(1, CHECKED + 1):
                assert p_value(of_setting[:, :n], law.sum(axis=tuple(range(n, CHECKED)))) > SIGNIFICANCE, (name, n)
        best, history = [], [0, anchor]
        for i in range(CHECKED):
            best.append(int(tables.target[i, history[-2], history[-1]].argmax()))
            history.append(best[-1])
        assert (tokens[2 * ROWS :] == best).all()

    def test_first_token_is_kept_as_often_as_it_can_be(self, tables, law_sampling):
        """min(p, q) summed over the vocabulary."""
        _, count = first_tokens(tables, 2, law_sampling, contextlib.nullcontext)
        q = np.zeros(VOCAB)
        q[tables.ids[0]] = np.exp(tables.draft[0, 2]) / np.exp(tables.draft[0, 2]).sum()
        p = np.exp(tables.target[0, 0, 2]) / np.exp(tables.target[0, 0, 2]).sum()
        share = np.minimum(p, q).sum()
        assert 0.2 < share < 0.8
        # Four standard deviations of a mean of ROWS coins.
        assert abs(np.mean(count[:ROWS] > 1) - share) < 4 * np.sqrt(share * (1 - share) / ROWS)

    @pytest.mark.parametrize("rule", [accept_always, one_number_for_all_draws, rejected_draws_from_all_of_p])
    def test_other_rules_fail(self, tables, rule):
        tokens, _ = first_tokens(tables, 2, SamplingParams.create(ROWS, seed=2**33, **LAW["noise"]), rule)
        assert p_value(tokens, tables.law(2, **LAW["noise"])) < 1e-3 * SIGNIFICANCE

    def test_end_to_end(self, load, cases, rng):
        """The row of temperature 0 emits plain decoding's tokens, the others their own; same seed, same tokens."""
        muse = load("sampled_chain", 16)
        assert muse.model.num_rows == 16
        for case in cases[:2]:
            run = finish(muse, case, np.random.default_rng(1), *case.start(muse), deep=1.0)
            again = finish(muse, case, np.random.default_rng(1), *case.start(muse), deep=1.0)
            assert run.texts == again.texts and len(set(map(len, run.texts))) == 1
            assert run.texts[0] == case.texts[0]
            for text, answer in zip(run.texts[1:], case.texts[1:], strict=True):
                assert text[0] == answer[0] and text != answer  # prefill chose the first token
            assert run.accepted[:, 0].max() > 8 and run.accepted[:, 1:].max() > 1 and not run.branched.any()
        other = finish(muse, case, np.random.default_rng(1), *case.start(muse, seed=[9, 8, 7]), deep=1.0)
        assert [a == b for a, b in zip(other.texts, run.texts, strict=True)] == [True, False, False]

    def test_caches(self, load, cases, rng):
        muse = load("sampled_chain", 16)
        check = functools.partial(assert_as_fresh, muse, cases[0])
        finish(muse, cases[0], rng, *cases[0].start(muse), deep=1.0, each_step=check)


class TestInvert:
    def test_never_draws_what_has_no_weight(self):
        """At both ends of the numbers, with weights of zero around; sums that round."""
        weights = jnp.float32([[0, 0.3, 0, 0.1, 0, 0], [0, 0, 0, 0, 0, 1e-30], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
        for uniform, expected in ((2.0**-33, [1, 5, 0]), (1 - 2.0**-24, [3, 5, 5]), (0.7, [1, 5, 4])):
            drawn = speculation._invert(weights, jnp.full(3, uniform, jnp.float32))
            assert np.asarray(drawn).tolist() == expected


# --------------------------------------------------------------------------------------------------- a step's program


LONG = 1280  # slots; with three rows no other array is as large as a cache


@pytest.fixture(scope="module")
def long_case(load, plain):
    """A step of a tree of 24 nodes, greedy, compiled for caches of LONG slots, and of twice as many."""
    muse = dataclasses.replace(load("tree", 24), max_length=4 * LONG)
    step = jax.jit(muse_jax.decode, donate_argnames="state", compiler_options=UNOPTIMISED)

    # Prompt and answer fill a multiple of 256 slots; the rows of the last step need room beyond.
    state, _ = muse.prefill([[1, 2, 3]] * 3, max_new_tokens=[LONG - 256 - 3, 5, 5], stop_token_ids=NEVER)
    assert state.cache.layers[1][0].shape[2] == LONG
    cache, draft_cache = jax.eval_shape(functools.partial(decoding.empty_caches, muse.model, 3, 2 * LONG))
    longer = dataclasses.replace(state, cache=cache, draft_cache=draft_cache)
    return muse, step, step.lower(muse.model, state).compile(), state, step.lower(muse.model, longer).compile()


def cache_sized(program, state):
    """Instructions of a compiled program that give an array with as many numbers as some cache has, but for parameters and
    updates in place: (opcode, shape) each."""
    sizes = {math.prod(x.shape) for cache in (state.cache, state.draft_cache) for x in jax.tree.leaves(cache.layers)}
    roots = {}
    instructions = []
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = opened[1]
        if found := re.match(r"\s+(ROOT )?%?[\w.-]+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line):
            shape = tuple(map(int, filter(None, found[2].split(","))))
            called = re.search(r"calls=%?([\w.-]+)", line)
            instructions.append((found[3], shape, called and called[1]))
            if found[1]:
                roots[computation] = found[3]
    updates = {"parameter", "get-tuple-element", "dynamic-update-slice"}
    return [
        (opcode, shape)
        for opcode, shape, called in instructions
        if math.prod(shape) in sizes and opcode not in updates and roots.get(called) != "dynamic-update-slice"
    ]


class TestStep:
    def test_caches_are_updated_in_place(self, long_case):
        """Nothing copies, converts, transposes or cuts out a cache, of target or draft."""
        muse, _, program, state, _ = long_case
        text = program.as_text()
        assert cache_sized(text, state) == []
        arrays = jax.tree.leaves((state.cache, state.draft_cache))
        aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text.partition("\n")[0])[1]
        outputs = {int(i) for i in re.findall(r"\{(\d+)\}: \(", aliased)}
        assert outputs >= set(range(len(arrays)))  # the state comes first in the result, and the caches in the state
        # The check sees what is not in place: a program that keeps its input, or turns it round.
        like = state.cache.layers[1][0]
        for other in (lambda x: x.at[0, 0, 0, 0].set(1.0), lambda x: x.transpose(0, 2, 1, 3) + 1):
            assert cache_sized(jax.jit(other).lower(like).compile().as_text(), state)

        state, _ = muse.prefill([[1, 2, 3]] * 3, max_new_tokens=[LONG - 100, 5, 5], stop_token_ids=NEVER)
        arrays = jax.tree.leaves((state.cache, state.draft_cache))
        before = [x.unsafe_buffer_pointer() for x in arrays]
        state, _ = program(muse.model, state)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.cache, state.draft_cache))] == before
        assert all(x.is_deleted() for x in arrays)

    def test_temporaries_do_not_grow_with_the_cache(self, long_case):
        """Caches of 1,280 and of 2,560 slots: what lies beyond one block of keys is read block by block."""
        _, _, program, _, longer = long_case
        short, long = (each.memory_analysis() for each in (program, longer))
        assert long.argument_size_in_bytes > 1.5 * short.argument_size_in_bytes
        assert long.temp_size_in_bytes == short.temp_size_in_bytes

    def test_no_operation_of_the_host(self, long_case):
        text = long_case[2].as_text()
        opcodes = set(re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", text))
        assert {"fusion", "dot"} & opcodes  # the pattern finds opcodes
        assert not opcodes & {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
        assert set(re.findall(r'custom_call_target="([^"]+)"', text)) <= {"TopK"}

    def test_one_compilation_and_no_transfer(self, long_case, cases, caplog):
        """For all steps, prompts of the same number of slots, seeds, budgets and stop tokens; and the tokens are right."""
        muse, step = long_case[:2]
        budgets = [LONG - 200, NEW_TOKENS, NEW_TOKENS]

        def begin(case, **settings):
            settings = {"max_new_tokens": budgets, "temperature": 0.0, "top_k": 0, "top_p": 1.0, **settings}
            return case.start(muse, **settings)

        state, _ = begin(cases[0])
        with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
            state, _ = step(muse.model, state)
            jax.jit(lambda x: x + 1)(jnp.int32(1))
            assert compilations(caplog)  # this is how one would look
            for case, settings in ((cases[0], {}), (cases[1], {"seed": 5}), (cases[2], {"stop_token_ids": [7]})):
                state, out = begin(case, **settings)
                caplog.clear()
                text = []
                for _ in range(4):
                    text += np.asarray(out.tokens)[0, : np.asarray(out.count)[0]].tolist()
                    with jax.transfer_guard("disallow"):
                        state, out = step(muse.model, state)
                assert not compilations(caplog)
                assert text == case.texts[0][: len(text)] or 7 in text

    def test_donated_state_refuses_use(self, load, cases):
        muse = load("tree", 16)
        old, _ = cases[0].start(muse)
        planted_decode(muse.model, old, blank_plan(np.zeros((3, 512), np.int32), 16))
        with pytest.raises(ValueError, match=r"^this DecodeState was donated to an earlier step"):
            muse.decode(old)


def compilations(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]


# -------------------------------------------------------------------------------------------------------------- loading


def test_state_of_another_model(checkpoint, draft_checkpoint):
    """Caches have room for the rows of the model that made them."""
    models = {n: muse_jax.load(draft_checkpoint, tree_size=n) for n in (2, 32)}
    models[1] = muse_jax.load(checkpoint)
    for made, used in ((2, 32), (1, 2)):
        state, _ = models[made].prefill([[1, 2, 3]])
        with pytest.raises(ValueError, match=rf"^this DecodeState has room for steps of {made} rows, .* has steps of {used}: "):
            models[used].decode(state)
    state, _ = models[32].prefill([[1, 2, 3]])
    state, out = models[2].decode(state)  # has room enough
    assert 1 <= int(out.count[0]) <= 2 and state.num_rows == 32


@pytest.mark.parametrize("speculation", ["tree", "off"])
def test_draft_seconds(draft_checkpoint, speculation):
    muse = muse_jax.load(draft_checkpoint, speculation=speculation)
    state, _ = muse.prefill([[1, 2, 3]])
    if speculation == "tree":
        assert 0 < muse.draft_seconds(state, repeats=2) < 10
    for repeats in (0, -1) if speculation == "tree" else (0, 1):
        with pytest.raises(ValueError, match=r"^draft_seconds: expected repeats = -?[01] above 0, and a draft$"):
            muse.draft_seconds(state, repeats)


class TestLoad:
    def test_draft_of_the_directory(self, draft_checkpoint, small_draft_config, small_draft_params):
        muse = muse_jax.load(draft_checkpoint)
        assert (muse.model.speculation, muse.model.num_rows) == ("tree", 16)
        assert muse.draft_config == small_draft_config
        jax.tree.map(np.testing.assert_array_equal, muse.model.draft_params, small_draft_params)

    @pytest.mark.parametrize(
        ("settings", "speculation", "rows"),
        [
            ({"tree_size": 32}, "tree", 32),
            ({"tree_size": 2}, "tree", 2),
            ({"speculation": "chain", "tree_size": 32}, "chain", 16),
            ({"speculation": "chain", "tree_size": 5}, "chain", 5),
            ({"speculation": "sampled_chain"}, "sampled_chain", 16),
        ],
    )
    def test_draft_elsewhere(self, checkpoint, draft_checkpoint, settings, speculation, rows):
        model = muse_jax.load(checkpoint, draft=draft_checkpoint / "draft", **settings).model
        assert (model.speculation, model.num_rows) == (speculation, rows)

    def test_off(self, checkpoint, draft_checkpoint):
        for path, settings in (
            (checkpoint, {}),
            (checkpoint, {"speculation": "off"}),
            (draft_checkpoint, {"speculation": "off"}),
        ):
            model = muse_jax.load(path, **settings).model
            assert (model.speculation, model.num_rows, model.draft_params, model.draft_graph) == ("off", 1, None, None)

    @pytest.mark.parametrize("speculation", ["tree", "chain", "sampled_chain"])
    def test_needs_a_draft(self, checkpoint, speculation):
        with pytest.raises(ValueError, match=f"^speculation = '{speculation}' needs a draft: .*draft is not there$"):
            muse_jax.load(checkpoint, speculation=speculation)

    def test_draft_that_is_not_there(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / "other"))):
            muse_jax.load(checkpoint, draft=tmp_path / "other")

    def test_draft_that_is_no_directory(self, checkpoint, tmp_path):
        """A file, or a link to nowhere as caches of downloads may leave, is an error and not a checkpoint without draft."""
        for name, make in (("file", Path.touch), ("link", lambda path: path.symlink_to("gone"))):
            directory = tmp_path / name
            shutil.copytree(checkpoint, directory)
            make(directory / "draft")
            with pytest.raises(ValueError, match=re.escape(str(directory / "draft"))):
                muse_jax.load(directory)
            assert muse_jax.load(directory, speculation="off").draft_config is None

    @pytest.mark.parametrize("draft", ["", 3, b"x"])
    def test_draft_that_is_no_path(self, checkpoint, draft):
        with pytest.raises(ValueError, match=rf"^draft = {draft!r}: expected a directory$"):
            muse_jax.load(checkpoint, draft=draft)

    def test_draft_and_off(self, checkpoint, draft_checkpoint):
        with pytest.raises(ValueError, match=r"^draft = .* and speculation = 'off': choose one$"):
            muse_jax.load(checkpoint, draft=draft_checkpoint / "draft", speculation="off")

    @pytest.mark.parametrize("size", [0, 1, 33, -4, True, 2.0, "16", None])
    def test_tree_size(self, checkpoint, draft_checkpoint, size):
        for path in (checkpoint, draft_checkpoint):
            with pytest.raises(ValueError, match=rf"^tree_size = {size!r}: expected an integer from 2 to 32$"):
                muse_jax.load(path, tree_size=size)

    @pytest.mark.parametrize("kind", ["Tree", "", "beam", True, 3])
    def test_unknown_speculation(self, draft_checkpoint, kind):
        allowed = "'tree', 'chain', 'sampled_chain', 'off'"
        with pytest.raises(ValueError, match=rf"^speculation = {kind!r}: allowed are {allowed}$"):
            muse_jax.load(draft_checkpoint, speculation=kind)

    @pytest.mark.parametrize(
        ("fields", "dflash", "reasons"),
        [
            ({"hidden_size": 32}, {}, "hidden_size = 32, the target has 64"),
            ({"vocab_size": 300}, {}, "vocab_size = 300, the target has 264"),
            ({}, {"target_layer_ids": [0, 2]}, "target_layer_ids has 2, the target's layers are 0 to 1"),
            (
                {"vocab_size": 300},
                {"mask_token_id": 280},
                "vocab_size = 300, the target has 264; mask_token_id = 280, the target's ids are below 264",
            ),
        ],
    )
    def test_draft_that_does_not_fit(self, checkpoint, small_draft_json, tmp_path, fields, dflash, reasons):
        """Said before any weight is read: this draft has none."""
        raw = small_draft_json | fields | {"dflash_config": small_draft_json["dflash_config"] | dflash}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=f"^the draft does not fit its target: {re.escape(reasons)}$"):
            muse_jax.load(checkpoint, draft=tmp_path)

    def test_more_candidates_than_tokens(self, checkpoint, small_draft_json, tmp_path):
        inner = small_draft_json["dflash_config"] | {"selector_top_k": 262}
        (tmp_path / "config.json").write_text(json.dumps(small_draft_json | {"dflash_config": inner}))
        with pytest.raises(ValueError, match=r"^the draft's selector_top_k = 262: there are 259 tokens$"):
            muse_jax.load(checkpoint, draft=tmp_path)
