"""Prefill and decode step: the tokens they emit, where they stop, and what a step costs the host.

One compiled step serves most tests: four rows of different lengths, each with its own sampling settings.
"""

import dataclasses
import itertools
import logging
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muse_jax
from muse_jax.decoding import NO_TOKEN
from muse_jax.sampling import SamplingParams, choose, gumbel_noise

LENGTHS = (1, 40, 13, 64)  # the window is 8 and the ring 24 slots
NEW_TOKENS = 30
SEED = 2**40 + 5
# Greedy; noise alone; top-k; top-p and min-p.
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.05},
]
PER_ROW = {
    field: [row.get(field, default) for row in SETTINGS]
    for field, default in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
}
NEVER = [263]  # of the padded vocabulary
TIE = 1e-4  # sampling.md: two choices may differ where the two best perturbed scores are closer than this,
TIE_FRACTION = 1e-3  # for at most this part of the tokens


@pytest.fixture(scope="module")
def prompts(muse):
    rng = np.random.default_rng(len(LENGTHS))
    return [rng.integers(0, muse.model.valid_vocab, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def texts(muse, prompts):
    """What four rows together emit."""
    return finish(muse, *start(muse, prompts))


@pytest.fixture(scope="module")
def logits(muse, prompts, texts):
    """[4, T, V] of prompts and texts, from whole sequences: no cache, no chunks, no steps."""
    return muse.logits([prompt + text for prompt, text in zip(prompts, texts, strict=True)])


def start(muse, prompts, **settings):
    return muse.prefill(prompts, **{"seed": SEED, "max_new_tokens": NEW_TOKENS, "stop_token_ids": NEVER, **PER_ROW, **settings})


def finish(muse, state, out) -> list[list[int]]:
    """Decodes until every row is done and joins what the steps emitted; checks the form of each output."""
    texts = [[] for _ in out.count]
    was_done = np.zeros(len(texts), bool)
    for _ in range(NEW_TOKENS + 1):
        tokens, count, accepted, done = (np.asarray(x) for x in (out.tokens, out.count, out.accepted, out.done))
        assert tokens.shape == (len(texts), muse.model.num_rows) and tokens.dtype == np.int32
        np.testing.assert_array_equal(count, ~was_done)
        np.testing.assert_array_equal(accepted, count)
        for text, row, n in zip(texts, tokens, count, strict=True):
            text += row[:n].tolist()
            assert (row[n:] == NO_TOKEN).all()
        assert (done >= was_done).all()
        was_done = done
        if done.all():
            return texts
        state, out = muse.decode(state)
    raise AssertionError("not finished after max_new_tokens steps")


def score_gap(logits, row: int, i: int, first: int, second: int) -> float:
    """How far apart the scores of two choices for token i of a row are, filters aside.

    logits: of whole sequences that agree with what was emitted before token i.
    """
    position = LENGTHS[row] + i
    scores = np.asarray(logits[row, position - 1])
    if temperature := PER_ROW["temperature"][row]:
        words = jnp.uint32([(SEED + row) % 2**32]), jnp.uint32([(SEED + row) >> 32])
        noise = gumbel_noise(*words, jnp.int32([position]), jnp.arange(len(scores), dtype=jnp.uint32))
        scores = scores / np.float32(temperature) + np.asarray(noise[0])
    return abs(float(scores[first] - scores[second]))


def assert_same(logits, texts, others, rows=range(4)) -> None:
    """Equal token by token; a row may part at a tie, after which it is not compared. Any other difference fails."""
    ties = 0
    for row, text, other in zip(rows, texts, others, strict=True):
        assert len(text) == len(other)
        i = next((i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), None)
        if i is not None:
            gap = score_gap(logits, row, i, text[i], other[i])
            assert gap < TIE, f"row {row}, token {i}: {other[i]} instead of {text[i]}, scores {gap:.2g} apart"
            ties += 1
    assert ties <= TIE_FRACTION * sum(map(len, texts))


class TestTokens:
    def test_each_token_is_the_choice_from_the_whole_sequence(self, muse, texts, logits):
        positions = jnp.broadcast_to(jnp.arange(1, logits.shape[1] + 1)[None], logits.shape[:2])
        params = SamplingParams.create(4, seed=SEED, **PER_ROW)
        chosen = jax.jit(choose, static_argnums=3)(logits, positions, params, muse.model.valid_vocab)
        chosen = [row[n - 1 : n - 1 + NEW_TOKENS].tolist() for row, n in zip(np.asarray(chosen), LENGTHS, strict=True)]
        assert_same(logits, texts, chosen)

    def test_greedy_row_takes_the_largest_logit(self, muse, texts, logits):
        answer = np.asarray(logits[0, LENGTHS[0] - 1 : LENGTHS[0] - 1 + NEW_TOKENS, : muse.model.valid_vocab])
        assert answer.argmax(-1).tolist() == texts[0]

    def test_padded_vocabulary_is_never_chosen(self, muse, texts, logits):
        """Its rows of lm_head are large, so that one of them often has the largest logit."""
        valid = muse.model.valid_vocab
        assert valid == 259 < muse.config.vocab_size
        assert np.mean(np.asarray(logits).argmax(-1) >= valid) > 0.3
        assert max(itertools.chain(*texts)) < valid

    @pytest.mark.parametrize("chunk", [1, 7])
    def test_chunk_size_changes_nothing(self, muse, prompts, texts, logits, chunk):
        chunked = dataclasses.replace(muse, prefill_chunk=chunk)
        assert_same(logits, texts, finish(muse, *start(chunked, prompts)))

    @pytest.mark.parametrize("row", range(4))
    def test_neighbours_in_the_batch_change_nothing(self, muse, prompts, texts, logits, row):
        """Row b of a batch has seed + b."""
        settings = {field: values[row] for field, values in PER_ROW.items()}
        alone = finish(muse, *start(muse, [prompts[row]], seed=SEED + row, **settings))
        assert_same(logits, [texts[row]], alone, rows=[row])

    def test_settings_and_seeds_matter(self, muse, prompts, texts):
        """Otherwise equal tokens would show nothing."""
        other = finish(muse, *start(muse, prompts, seed=SEED + 1))
        assert other[0] == texts[0]
        assert all(a != b for a, b in zip(other[1:], texts[1:], strict=True))
        assert len(set(texts[0])) > 5 and len(set(texts[1])) > 10

    def test_padded_arrays_say_the_same_as_lists(self, muse, prompts, texts):
        padded = np.full((4, 64), -1)  # what pads is not read
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        state, out = start(muse, padded, lengths=LENGTHS)
        np.testing.assert_array_equal(np.asarray(out.tokens)[:, 0], [text[0] for text in texts])
        np.testing.assert_array_equal(state.length, LENGTHS)

    def test_tie_rule_refuses_a_wrong_token(self, texts, logits):
        for row in range(4):
            wrong = [list(text) for text in texts]
            wrong[row][3] = (wrong[row][3] + 1) % 259
            with pytest.raises(AssertionError, match=f"^row {row}, token 3"):
                assert_same(logits, texts, wrong)


class TestStopping:
    def test_each_row_has_its_own_budget(self, muse, prompts, texts):
        budget = [1, 2, 11, NEW_TOKENS]
        stopped = finish(muse, *start(muse, prompts, max_new_tokens=budget))
        assert stopped == [text[:n] for text, n in zip(texts, budget, strict=True)]

    def test_stop_token_is_kept_and_last(self, muse, prompts, texts):
        stop = texts[1][7]
        stopped = finish(muse, *start(muse, prompts, stop_token_ids=[stop]))
        expected = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
        assert stopped == expected
        assert len(expected[1]) <= 8

    def test_stop_token_may_come_first(self, muse, prompts, texts):
        _, out = start(muse, prompts, stop_token_ids=[texts[2][0]])
        assert np.asarray(out.count).tolist() == [1] * 4
        assert np.asarray(out.done).tolist() == [text[0] == texts[2][0] for text in texts]

    def test_stop_token_at_the_limit(self, muse, prompts, texts):
        n = 5
        stopped = finish(muse, *start(muse, prompts, stop_token_ids=[texts[3][n - 1]], max_new_tokens=n))
        assert stopped[3] == texts[3][: texts[3].index(texts[3][n - 1]) + 1]
        assert max(map(len, stopped)) <= n

    def test_one_token(self, muse, prompts, texts):
        state, out = start(muse, prompts, max_new_tokens=1)
        assert np.asarray(out.done).all() and not np.asarray(state.remaining).any()
        assert np.asarray(out.tokens)[:, 0].tolist() == [text[0] for text in texts]

    def test_done_rows_emit_nothing_and_keep_their_state(self, muse, prompts):
        state, out = start(muse, prompts, max_new_tokens=[1, 3, NEW_TOKENS, NEW_TOKENS])
        for _ in range(3):
            state, out = muse.decode(state)
        assert np.asarray(out.done).tolist() == [True, True, False, False]
        before = jax.device_get(state)
        for _ in range(2):
            state, out = muse.decode(state)
        after = jax.device_get(state)
        assert np.asarray(out.count).tolist() == [0, 0, 1, 1]
        assert (np.asarray(out.tokens)[:2] == NO_TOKEN).all()
        for field in ("length", "token", "remaining", "done"):
            np.testing.assert_array_equal(getattr(after, field)[:2], getattr(before, field)[:2])
        np.testing.assert_array_equal(after.length[2:], before.length[2:] + 2)
        np.testing.assert_array_equal(before.length[:2], np.add(LENGTHS[:2], [0, 2]))  # the last token has no KV
        for old, new in zip(jax.tree.leaves(before.cache.layers), jax.tree.leaves(after.cache.layers), strict=True):
            np.testing.assert_array_equal(new[0], old[0])


@pytest.fixture(scope="module")
def compiled(muse, prompts) -> str:
    """The optimised program of a step of four rows."""
    state, _ = start(muse, prompts)
    return jax.jit(muse_jax.decode, donate_argnames="state").lower(muse.model, state).compile().as_text()


class TestStep:
    def test_jit_from_outside(self, muse, prompts, texts):
        step = jax.jit(muse_jax.decode, donate_argnames="state")
        state, out = start(muse, prompts)
        for i in range(1, 4):
            state, out = step(muse.model, state)
            assert isinstance(state, muse_jax.DecodeState) and isinstance(out, muse_jax.StepOutput)
            assert np.asarray(out.tokens)[:, 0].tolist() == [text[i] for text in texts]

    def test_no_compilation_after_the_first_step(self, muse, prompts, caplog):
        step = jax.jit(muse_jax.decode, donate_argnames="state")
        state, _ = start(muse, prompts)
        with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
            jax.jit(lambda x: x + 1)(jnp.int32(1))
            assert compilations(caplog)  # this is how one would look
            state, _ = step(muse.model, state)
            caplog.clear()
            for _ in range(5):
                state, _ = step(muse.model, state)
            assert not compilations(caplog)

    def test_no_transfer(self, muse, prompts):
        state, _ = start(muse, prompts)
        state, _ = muse.decode(state)
        with jax.transfer_guard("disallow"):
            with pytest.raises(Exception, match="Disallowed"):
                jnp.add(state.length, np.ones(4, np.int32))
            for _ in range(3):
                state, out = muse.decode(state)
        assert np.asarray(out.count).all()

    def test_no_operation_of_the_host(self, compiled):
        opcodes = set(re.findall(r"= \S+ ([a-z][a-z0-9-]*)\(", compiled))
        assert {"fusion", "dot"} & opcodes  # the pattern finds opcodes
        assert not opcodes & {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
        assert set(re.findall(r'custom_call_target="([^"]+)"', compiled)) <= {"TopK"}

    def test_caches_are_updated_in_place(self, muse, prompts, compiled):
        state, _ = start(muse, prompts)
        caches = jax.tree.leaves(state.cache)
        header, _, body = compiled.partition("\n")
        aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", header)[1]
        outputs = {int(i) for i in re.findall(r"\{(\d+)\}: \(", aliased)}
        assert outputs >= set(range(len(caches)))  # the state comes first in the result, and the caches in the state

        copies = [
            math.prod(map(int, filter(None, shape.split(",")))) for shape in re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", body)
        ]
        assert copies  # of other things
        assert not set(copies) & {math.prod(x.shape) for x in jax.tree.leaves(state.cache.layers)}

        before = [x.unsafe_buffer_pointer() for x in caches]
        state, _ = muse.decode(state)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.cache)] == before
        assert all(x.is_deleted() for x in caches)

    def test_donated_state_refuses_use(self, muse, prompts):
        old, _ = start(muse, prompts)
        muse.decode(old)
        for use in (muse.decode, jax.device_get, lambda state: jax.tree.map(jnp.shape, state)):
            with pytest.raises(ValueError, match=r"^this DecodeState was donated to an earlier step; use the state .*$"):
                use(old)

    def test_vmap_and_grad_are_refused(self, muse, prompts):
        state, _ = start(muse, prompts)
        with pytest.raises(
            ValueError, match=r"^decode takes a batch as it is, without jax.vmap: give several prompts to prefill"
        ):
            jax.vmap(muse_jax.decode, in_axes=(None, 0))(muse.model, state)
        with pytest.raises(ValueError, match=r"^decode chooses tokens and has no derivative: differentiate the logits"):
            jax.grad(muse_jax.decode)(muse.model, state)


def compilations(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]


def test_decode_is_the_function():
    assert muse_jax.decode is muse_jax.decoding.decode
    assert Path(muse_jax.decoding.__file__).name == "decoding.py"
