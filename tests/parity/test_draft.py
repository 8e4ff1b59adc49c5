"""fp32: the draft equals that of the dflash package, round by round, and so does speculative decoding with it."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("dflash")

import json
import zlib
from pathlib import Path

import torch
from bf16_checks import compile_once
from dflash.model import DFlash2DraftModel
from dflash_reference import (
    CASES,
    HIDDEN_SIZE,
    NUM_TARGET_LAYERS,
    VOCAB_SIZE,
    Drafter,
    generate,
    make_draft,
    make_draft_config,
    make_target,
    plant_selector,
)
from flax import nnx
from transformers import MuseSparkForConditionalGeneration

import muse_jax
from checkpoints import load_params, read_draft_config, save_draft
from muse_jax.draft import DFlash2
from muse_jax.kv_cache import FullContext, KVCache, PrefillContext

pytestmark = pytest.mark.parity

# dflash2.md section 10 measured 4.6e-5 for hidden rows, of order one, between dflash and the formulas in float64. The lattice
# adds a sum of HIDDEN_SIZE such rows times lm_head and one of selector_rank products of three: about ten times that.
HIDDEN_ERROR = 1e-4
LATTICE_ERROR = 1e-3
# A target's residual stream, of order one; muse_spark.md 8.1 measured 4e-5 for six layers.
TAP_ERROR = 1e-4

PROMPTS = (45, 3)  # lengths; in ROUNDS rounds the shorter one, too, goes round every ring
CHUNK = 16
ROUNDS = 26  # 208 over the eight configs
NEW_TOKENS = 64  # of each sequence, compared to the end


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads gain these sizes nothing, and where cores are shared they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def carry_over(theirs: DFlash2DraftModel, directory) -> tuple[DFlash2DraftModel, nnx.GraphDef, dict]:
    """Both models from a directory that we wrote, with what we read from one that dflash wrote."""
    theirs.save_pretrained(directory / "theirs")
    config = read_draft_config(directory / "theirs")
    params, _ = load_params(directory / "theirs", config, dtype=np.float32)
    config_json = json.loads((directory / "theirs" / "config.json").read_text())
    save_draft(params, config_json, directory / "ours", dtype=np.float32)
    theirs, info = DFlash2DraftModel.from_pretrained(directory / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert read_draft_config(directory / "ours") == config
    params, _ = load_params(directory / "ours", config, dtype=np.float32)
    graph, _ = nnx.split(DFlash2(config, dtype=jnp.dtype(np.float32)))
    return theirs.eval(), graph, params


@functools.partial(compile_once, static_argnames="graph")
def fill(graph, params, cache, taps, start, lengths):
    model = nnx.merge(graph, params)
    context = PrefillContext.create(start, lengths, taps.shape[1])
    return cache.fill(model.context_keys_values(taps, context.positions), context, model.config)


@functools.partial(compile_once, static_argnames="graph")
def commit(graph, params, cache, taps, start):
    model = nnx.merge(graph, params)
    positions = start[:, None] + jnp.arange(taps.shape[1], dtype=jnp.int32)[None, :]
    return cache.commit(model.context_keys_values(taps, positions), start, model.config)


@functools.partial(compile_once, static_argnames="graph")
def draft(graph, params, cache, start, anchor, embedding, lm_head):
    model = nnx.merge(graph, params)
    hidden = model(model.embed(anchor, embedding), model.block_context(cache, start), cache.layers)[:, 1:]
    ids, unary = model.candidates(hidden, lm_head, VOCAB_SIZE)
    return hidden, ids, model.lattice(hidden, anchor, ids, unary), model.logits(hidden, lm_head)


@pytest.mark.parametrize("name", CASES)
def test_rounds(tmp_path, rng, name):
    """Taps and tokens are random; between rounds a random number of tokens is committed."""
    theirs, graph, params = carry_over(make_draft(make_draft_config(**CASES[name]), rng), tmp_path)
    config = read_draft_config(tmp_path / "ours")
    embedding, lm_head = rng.standard_normal((2, VOCAB_SIZE, HIDDEN_SIZE), np.float32)
    lm_head *= 3 / np.sqrt(HIDDEN_SIZE)
    drafters = [Drafter(theirs, torch.from_numpy(embedding), torch.from_numpy(lm_head)) for _ in PROMPTS]

    batch, size = len(PROMPTS), config.block_size
    features = (len(config.target_layer_ids) * HIDDEN_SIZE,)
    count = np.array(PROMPTS)
    taps = rng.standard_normal((batch, max(PROMPTS) + -max(PROMPTS) % CHUNK, *features), np.float32)
    cache = KVCache.empty(config, batch, taps.shape[1] + (ROUNDS + 1) * size, size, jnp.float32)
    for first in range(0, taps.shape[1], CHUNK):
        cache = fill(graph, params, cache, taps[:, first : first + CHUNK], np.int32(first), count.astype(np.int32))
    start = count

    worst = dict.fromkeys(("hidden", "logits", "lattice"), 0.0)
    for _ in range(ROUNDS):
        anchor = rng.integers(0, VOCAB_SIZE, batch)
        hidden, ids, lattice, logits = jax.device_get(
            draft(graph, params, cache, start.astype(np.int32), anchor.astype(np.int32), embedding, lm_head)
        )
        for b, drafter in enumerate(drafters):
            rows = drafter.round(taps[b, : count[b]], anchor[b])
            path, candidates = drafter.path(rows, anchor[b])
            for part, ours, expected in (
                ("hidden", hidden, rows.numpy()),
                ("logits", logits, drafter.logits(rows).numpy()),
                ("lattice", lattice, drafter.lattice(rows, anchor[b], ids[b])),
            ):
                assert ours[b].shape == expected.shape
                worst[part] = max(worst[part], np.abs(ours[b] - expected).max())
            np.testing.assert_array_equal(np.sort(ids[b], axis=1), np.sort(candidates, axis=1))
            np.testing.assert_array_equal(greedy_path(lattice[b], ids[b]), path)
        # Rows beyond the count are garbage that must stay hidden.
        count = rng.integers(1, size + 1, batch)
        taps = rng.standard_normal((batch, size, *features), np.float32)
        cache = commit(graph, params, cache, taps, start.astype(np.int32))
        start = start + count
    print(f"{name}: " + ", ".join(f"{part} {error:.1e}" for part, error in worst.items()))
    assert worst["hidden"] < HIDDEN_ERROR and worst["logits"] < LATTICE_ERROR and worst["lattice"] < LATTICE_ERROR


def greedy_path(lattice, ids):
    """lattice: [P, K before, K]; ids: [P, K]."""
    path, taken = [], 0
    for scores, tokens in zip(lattice, ids, strict=True):
        taken = scores[taken].argmax()
        path.append(tokens[taken])
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The directory of a target, the same loaded by transformers, each token's usual successor."""
    model, successor = make_target(np.random.default_rng(zlib.crc32(b"draft target")))
    directory = tmp_path_factory.mktemp("target")
    model.save_pretrained(directory)
    model = MuseSparkForConditionalGeneration.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="grouped_mm"
    )
    return directory, model.eval(), successor


def test_taps(rng, target):
    """In the order asked for, what the layers give to the next ones; the last layer's, too, before the final norm."""
    directory, model, _ = target
    tokens = rng.integers(0, VOCAB_SIZE, (2, 30))
    before_norm = []
    with (
        torch.inference_mode(),
        model.model.language_model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0])),
    ):
        hidden = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    taps = (NUM_TARGET_LAYERS - 1, 0, 3)
    expected = torch.cat([before_norm[0], hidden[1], hidden[4]], dim=-1).numpy()
    module = muse_jax.load(directory, dtype="float32").model.module
    run = compile_once(lambda module, tokens: module(tokens, FullContext.create(tokens.shape[1]), taps=taps)[2])
    np.testing.assert_allclose(run(module, tokens.astype(np.int32)), expected, atol=TAP_ERROR, rtol=0)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # dflash is older than transformers 5.24
@pytest.mark.parametrize("name", CASES)
def test_greedy_decoding(tmp_path, rng, target, name):
    """Both from the same files: every token, and how many each step accepts."""
    directory, model, successor = target
    settings = CASES[name] | {"selector_rank": 32, "selector_top_k": 104}
    theirs = make_draft(make_draft_config(**settings), rng)
    plant_selector(theirs, model, successor, rng)
    theirs.save_pretrained(tmp_path / "draft")
    theirs = DFlash2DraftModel.from_pretrained(tmp_path / "draft").eval()
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    muse = muse_jax.load(tmp_path, speculation="chain", dtype="float32", prefill_chunk=16)

    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (27, 18)]
    histogram = same_greedy_decoding(muse, theirs, model, prompts, NEW_TOKENS)
    print(f"{name}: {sum(histogram.values())} rounds, accepted {dict(sorted(histogram.items()))}")
    assert len(histogram) >= min(4, theirs.block_size)  # short and long ones, or this would say little


BUNDLED = Path(muse_jax.__file__).parents[1] / "checkpoints" / "muse_tiny"
QUESTIONS = (
    "A baker fills 4 trays with 12 rolls each. She sells 30 rolls in the morning. How many rolls are left?",
    "Tom reads 15 pages a day. His book has 180 pages, and he has read 60 of them. How many more days does he need?",
    "A ticket costs $8, and children pay half of that. What do 2 adults and 3 children pay together?",
)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_bundled_pair():
    """The trained draft with its target: real text and a real number of accepted tokens."""
    target = MuseSparkForConditionalGeneration.from_pretrained(
        BUNDLED, dtype=torch.float32, attn_implementation="eager", experts_implementation="grouped_mm"
    )
    draft = DFlash2DraftModel.from_pretrained(BUNDLED / "draft", dtype=torch.float32)
    muse = muse_jax.load(BUNDLED, speculation="chain", dtype="float32")
    texts = [muse.tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [muse.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    histogram = same_greedy_decoding(muse, draft.eval(), target.eval(), prompts, max_new_tokens=80)
    print(f"bundled: {sum(histogram.values())} rounds, accepted {dict(sorted(histogram.items()))}")
    assert len(histogram) >= 4


def same_greedy_decoding(muse, draft, target, prompts, max_new_tokens) -> collections.Counter:
    """Checks ours, all prompts in one batch, against dflash. Returns how often each number of tokens was accepted."""
    state, out = muse.prefill(prompts, max_new_tokens=max_new_tokens, stop_token_ids=[])
    step = compile_once(muse_jax.decode, donate_argnames="state")
    outs = [out]
    while not outs[-1].done.all():
        state, out = step(muse.model, state)
        outs.append(jax.device_get(out))
    histogram = collections.Counter()
    for b, prompt in enumerate(prompts):
        tokens, accepted = generate(draft, target, prompt, max_new_tokens)
        assert len(tokens) == max_new_tokens
        assert [int(token) for out in outs for token in out.tokens[b, : out.count[b]]] == tokens
        assert [int(out.accepted[b]) for out in outs[1 : len(accepted) + 1]] == accepted
        histogram.update(accepted)
    return histogram
