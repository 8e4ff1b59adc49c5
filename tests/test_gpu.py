"""The bundled model on an NVIDIA GPU: what CPU tests cannot see. Figures of a run are in BENCHMARKS.md."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # of pallas_steps

import pallas_steps

import muse_jax
from muse_jax import decoding
from muse_jax.backends import XLA, resolve_backend

pytestmark = pytest.mark.gpu

MUSE_TINY = Path(__file__).parent.parent / "checkpoints" / "muse_tiny"
QUESTION = "<|user|>A shop sells 14 pens a day for 5 days and 10 on Sunday. How many pens does it sell?<|assistant|>"
NEW_TOKENS = 96


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return muse_jax.load(MUSE_TINY).tokenizer.encode(QUESTION)


def greedy(muse: muse_jax.Muse, prompt: list[int]) -> list[int]:
    generation = muse.generate(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    list(generation)
    return generation.tokens


@pytest.mark.parametrize("numerics", ["hf", "serving"])
def test_fp32_logits_and_tokens_equal_those_of_the_cpu(prompt, numerics):
    gpu = muse_jax.load(MUSE_TINY, dtype="float32", numerics=numerics)
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = muse_jax.load(MUSE_TINY, dtype="float32", numerics=numerics)
        expected_tokens = greedy(cpu, prompt)
        expected = np.asarray(cpu.logits([prompt + expected_tokens]))
    actual = np.asarray(gpu.logits([prompt + expected_tokens]))
    # fp32 sums of up to 192 terms in another order, six layers deep; TF32 would show as 1e-3.
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()
    tokens = greedy(gpu, prompt)
    if tokens != expected_tokens:  # only where the two best logits are a tie
        first = next(i for i, (a, b) in enumerate(zip(tokens, expected_tokens, strict=True)) if a != b)
        best = np.sort(expected[0, len(prompt) + first - 1])[-2:]
        assert best[1] - best[0] < 1e-4


def test_bf16_is_the_default_and_close_to_fp32(prompt):
    half = muse_jax.load(MUSE_TINY)
    assert half.model.params["lm_head"].dtype == jnp.bfloat16
    full = muse_jax.load(MUSE_TINY, dtype="float32")
    tokens = greedy(full, prompt)
    expected, actual = (np.asarray(muse.logits([prompt + tokens])) for muse in (full, half))
    error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    # Each of the 6 x 2 branches is rounded to 8 bits about ten times: 2^-9 * sqrt(120) = 0.02.
    assert error < 0.02


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_speculation_gives_the_tokens_of_plain_decoding(prompt, temperature):
    """fp32. Long answers, past the stop token, where the draft is at a loss as well as where it is good."""

    def tokens(**settings):
        muse = muse_jax.load(MUSE_TINY, dtype="float32", **settings)
        generation = muse.generate(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=(), temperature=temperature, seed=3)
        list(generation)
        return generation.tokens, generation.acceptance_length

    plain, _ = tokens(speculation="off")
    for settings in ({"tree_size": 8}, {"tree_size": 16}, {"tree_size": 32}, {"speculation": "chain"}):
        speculative, acceptance = tokens(**settings)
        assert speculative == plain
        assert acceptance > 1.5


@pytest.mark.parametrize("speculation", ["tree", "off"])
def test_caches_are_updated_in_place(prompt, speculation):
    muse = muse_jax.load(MUSE_TINY, speculation=speculation)
    state, _ = muse.prefill([prompt], max_new_tokens=8)
    step = jax.jit(decoding.decode, donate_argnames="state")

    def pointers(state):
        caches = [state.cache, *([] if state.draft_cache is None else [state.draft_cache])]
        return [x.unsafe_buffer_pointer() for cache in caches for pair in cache.layers for x in pair]

    before = pointers(state)
    state, _ = step(muse.model, state)
    assert pointers(state) == before


def test_decode_step_moves_nothing_between_host_and_device(prompt):
    muse = muse_jax.load(MUSE_TINY)
    state, _ = muse.prefill([prompt], max_new_tokens=8)
    state, out = muse.decode(state)
    with jax.transfer_guard("disallow"):
        state, out = muse.decode(state)
        jax.block_until_ready(out)


def small_case(name: str) -> pallas_steps.Case:
    """A case of `pallas_steps`; that of the draft with experts in NVFP4, as all others."""
    case = pallas_steps.CASES[name]
    return dataclasses.replace(case, config=dataclasses.replace(case.config, nvfp4_layers=(1,)))


@pytest.mark.parametrize("name", pallas_steps.CASES)
def test_a_step_of_kernels_is_as_exact_as_that_of_xla(name):
    """Small random models whose shapes kernels take; as test_pallas_backend.py does it interpreted."""
    backend = resolve_backend("pallas", "gpu")
    result = pallas_steps.compare(small_case(name), backend)
    assert all("pallas" in paths for paths in backend.paths.values()), backend.paths
    for part, error in result["xla"].items():
        assert error <= 0.15
        assert result["ours"][part] <= 2 * error and result["between"][part] <= 2 * error, (part, result)


def test_kernels_decode_with_a_draft():
    """20 tokens, draft, tree and commit included; each token is the likeliest, or as good as that, for plain XLA in fp32."""
    case = small_case("draft")
    backend = resolve_backend("pallas", jax.default_backend())
    model = pallas_steps.make_model(case, backend, pallas_steps.BF16)
    state, step = pallas_steps.make_state(model, case.lengths), jax.jit(decoding.decode, donate_argnames="state")
    tokens: list[int] = []
    while len(tokens) < 20:
        before = int(state.length[0])
        state, out = step(model, state)
        count = int(out.count[0])
        assert 1 <= count <= case.rows and int(state.length[0]) == before + count
        tokens += out.tokens[0, :count].tolist()
    assert min(tokens) >= 0
    exact = pallas_steps.make_model(dataclasses.replace(case, draft=None), XLA, pallas_steps.FP32)
    state = pallas_steps.make_state(exact, case.lengths)
    step = jax.jit(decoding.decode_and_trace)
    for token in tokens:
        state, _, (_, _, logits) = step(exact, state)
        logits = np.asarray(logits[0, 0])
        # An error of bf16 of 0.014 of a logit's size, at most five times that; of the best two, twice.
        assert logits.max() - logits[token] <= 0.15 * logits.std()
        state = dataclasses.replace(state, token=jnp.full_like(state.token, token))
