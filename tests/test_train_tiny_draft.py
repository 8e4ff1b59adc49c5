"""scripts/train_tiny_draft.py: what blocks see, losses, acceptance on paper, and a run of a few steps."""

import contextlib
import csv
import functools
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from checkpoints import load_params, read_config, read_draft_config, save_hf
from muse_jax.config import ModelConfig
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.kv_cache import FullContext, KVCache, PrefillContext
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark
from scripts import train_tiny, train_tiny_draft
from scripts.train_tiny import Encoded

LENGTH = 24
SETTINGS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "intermediate_size": 24,
    "target_layer_ids": [0],
    "block_size": 5,
    "conv_group_size": 8,
    "selector_rank": 4,
    "selector_top_k": 4,
}
TARGET = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_hidden_size": 16,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
FLAGS = (
    "--texts=8",
    "--write-batch=4",
    "--length=64",
    "--room=64",
    "--cut=0.25",
    "--steps=18",
    "--batch=4",
    "--anchors=4",
    "--learning-rate=0.02",
    "--average=0",
    "--eval-every=6",
    "--held-out=4",
    "--answers=1",
    "--json",
    "--config",
    "num_hidden_layers=1",
    "block_size=4",
    "intermediate_size=16",
)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Nearly all the time of this file is compilation; how fast the code is does not matter here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", params=[False, True, None], ids=lambda causal: f"causal={causal}")
def config(request, small_config) -> DraftConfig:
    return DraftConfig.from_hf(train_tiny_draft.make_config(small_config, 5, SETTINGS | {"is_causal": request.param}))


@pytest.fixture
def draft(config, rng) -> DFlash2:
    """Random everywhere, convolutions and selector too."""

    def draw(spec) -> jax.Array:
        array = rng.standard_normal(spec.param_shape, np.float32)
        return jnp.asarray(1 + 0.3 * array if array.ndim == 1 else array / np.sqrt(array.shape[-1]))

    graph = nnx.split(DFlash2(config, dtype=jnp.float32))[0]
    return nnx.merge(graph, parameter_tree(config, draw))


@pytest.fixture
def inputs(config, rng):
    """Embedding, tokens, taps and anchors of two texts."""
    width = len(config.target_layer_ids) * config.hidden_size
    embedding = rng.standard_normal((config.vocab_size, config.hidden_size), np.float32)
    tokens = rng.integers(config.vocab_size, size=(2, LENGTH)).astype(np.int32)
    taps = rng.standard_normal((2, LENGTH, width), np.float32)
    anchors = np.array([[3, 9, LENGTH - 1], [1, 14, 9]], np.int32)
    return tuple(map(jnp.asarray, (embedding, tokens, taps, anchors)))


def block_hidden(draft: DFlash2, *inputs: jax.Array) -> np.ndarray:
    """In training; compiled, which takes less time than every operation on its own."""
    graph, state = nnx.split(draft)
    return np.asarray(_block_hidden(graph, state, *inputs))


@functools.partial(jax.jit, static_argnums=0)
def _block_hidden(graph: nnx.GraphDef, state: nnx.State, *inputs: jax.Array) -> jax.Array:
    return train_tiny_draft.block_hidden(nnx.merge(graph, state), *inputs)


# --------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_of_training_are_those_of_serving(config, draft, inputs):
    """The same taps through caches and `DecodeContext`, one block at a time, in fp32."""
    embedding, tokens, taps, anchors = inputs

    @jax.jit
    def serve(tokens: jax.Array, taps: jax.Array, start: jax.Array) -> jax.Array:
        cache = KVCache.empty(config, 1, LENGTH + config.block_size, config.block_size, jnp.float32)
        prefill = PrefillContext.create(jnp.int32(0), start[None], LENGTH)
        cache = cache.fill(draft.context_keys_values(taps[None], prefill.positions), prefill, config)
        block = draft.embed(tokens[start][None], embedding)
        return draft(block, draft.block_context(cache, start[None]), cache.layers)[0, 1:]

    served = [serve(tokens[row], taps[row], start) for row in range(2) for start in anchors[row]]
    # Sums of the softmax run over more hidden keys here and there: fp32 noise of values near 1.
    np.testing.assert_allclose(block_hidden(draft, *inputs), jnp.stack(served), atol=1e-4)


def test_blocks_see_nothing_of_the_text_they_predict(draft, inputs, rng):
    """Tokens after an anchor, and taps from the anchor on, can be anything; what is before them counts."""
    embedding, tokens, taps, anchors = inputs
    hidden = block_hidden(draft, *inputs)
    anchor = 9
    later = jnp.asarray(rng.standard_normal(taps[:, anchor:].shape, np.float32))
    other = jnp.asarray(rng.integers(draft.config.vocab_size, size=(2, LENGTH - anchor - 1)), jnp.int32)
    changed = block_hidden(draft, embedding, tokens.at[:, anchor + 1 :].set(other), taps.at[:, anchor:].set(later), anchors)
    blocks = np.asarray(anchors).reshape(-1)
    np.testing.assert_array_equal(hidden[blocks <= anchor], changed[blocks <= anchor])
    assert np.all(np.any(np.asarray(hidden != changed)[blocks > anchor], axis=(1, 2)))
    before = block_hidden(draft, embedding, tokens, taps.at[:, anchor - 1].add(1), anchors)
    assert np.all(np.any(np.asarray(hidden != before)[blocks == anchor], axis=(1, 2)))


def test_what_follows_an_anchor():
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 0]], jnp.int32)
    index, after, exists = train_tiny_draft.following(tokens, jnp.asarray([[1, 3]], jnp.int32), jnp.asarray([5], jnp.int32), 3)
    assert exists.tolist() == [[True, True, True], [True, False, False]]
    assert after[exists].tolist() == [12, 13, 14, 14]
    assert index.tolist() == [[2, 3, 4, 4, 5, 5]]  # the last one is that of a token that the text does not have


# --------------------------------------------------------------------------------------------------------------- losses


def test_the_right_token_is_always_a_candidate():
    best = jnp.asarray([[7, 8]], jnp.int32)
    ids = jnp.asarray([[[1, 7, 2], [3, 4, 5]]], jnp.int32)
    assert train_tiny_draft.candidates_with(best, ids).tolist() == [[[1, 7, 2], [3, 4, 8]]]


def test_selector_scores_are_rows_of_the_lattice(config, draft, rng):
    hidden = jnp.asarray(rng.standard_normal((2, 3, config.hidden_size), np.float32))
    ids = jnp.asarray(rng.permuted(np.tile(np.arange(config.vocab_size), (2, 3, 1)), axis=-1)[..., :4], jnp.int32)
    unary = jnp.asarray(rng.standard_normal((2, 3, 4), np.float32))
    anchor = jnp.asarray([1, 2], jnp.int32)
    lattice = draft.lattice(hidden, anchor, ids, unary)
    for chosen in range(4):
        before = jnp.concatenate([anchor[:, None], ids[:, :-1, chosen]], axis=1)
        scores = train_tiny_draft.selector_scores(draft, hidden, before, ids, unary)
        np.testing.assert_allclose(scores, lattice[:, :, chosen], rtol=1e-5, atol=1e-5)  # fp32, sums of four products


def test_losses(config, draft, rng):
    """Against the formulas, written out for one position at a time."""
    hidden = jnp.asarray(rng.standard_normal((2, 2, config.hidden_size), np.float32))
    lm_head = jnp.asarray(rng.standard_normal((config.vocab_size, config.hidden_size), np.float32))
    teacher = 3 * rng.standard_normal((2, 2, config.vocab_size), np.float32)
    before = jnp.asarray(rng.integers(config.vocab_size, size=(2, 2)), jnp.int32)
    weights = np.float32([[1, 0.5], [0.25, 0]])
    losses = train_tiny_draft.block_losses(draft, hidden, lm_head, jnp.asarray(teacher), before, jnp.asarray(weights))

    logits = np.asarray(draft.logits(hidden, lm_head), np.float64)
    divergence, selection = 0.0, 0.0
    for b, i in np.ndindex(2, 2):
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (teacher[b, i].astype(np.float64), logits[b, i]))
        divergence += weights[b, i] * np.sum(p * np.log(p / q))
        best = int(teacher[b, i].argmax())
        ids = np.argsort(-logits[b, i])[:4]
        if best not in ids:
            ids[-1] = best
        left = np.asarray(draft.predecessor_codebook[...])[before[b, i]] * (draft.selector_projection[...] @ hidden[b, i])
        scores = logits[b, i, ids] + np.asarray(draft.successor_codebook[...])[ids] @ np.asarray(left)
        selection -= (
            weights[b, i] * np.log(np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum())[ids == best].item()
        )
    assert float(losses.draft) == pytest.approx(divergence / weights.sum(), rel=1e-4)  # fp32 sums over the vocabulary
    assert float(losses.selector) == pytest.approx(selection / weights.sum(), rel=1e-4)


def test_fresh_convolutions_pass_their_input_on(config, rng):
    params = train_tiny_draft.fresh_parameters(config, seed=0)
    draft = nnx.merge(nnx.split(DFlash2(config, dtype=jnp.float32))[0], params)
    x = jnp.asarray(rng.standard_normal((1, config.block_size, config.hidden_size), np.float32))
    conv = draft.layers[0].attention_conv
    coefficients = conv.coefficients(x)
    np.testing.assert_array_equal(conv.before(x, coefficients, jnp.dtype(jnp.float32)), x)
    np.testing.assert_array_equal(conv.after(x, coefficients, jnp.zeros_like(x)), x)


# ------------------------------------------------------------------------------------------------------- text, acceptance


def test_prompts_are_whole_or_cut(rng):
    questions = [Encoded([1, 2, *range(10, 20), 3, 90, 91], 13), Encoded([1, 2, *range(30, 60), 3, 90], 33)]
    whole, given = train_tiny_draft.make_prompts(questions, 8, 0.0, LENGTH, 0, rng)
    assert whole.shape == (8, LENGTH) and set(given) == {13}  # the other one leaves no room
    assert np.all(whole[:, :13] == questions[0].ids[:13]) and np.all(whole[:, 13:] == 0)
    cut, given = train_tiny_draft.make_prompts(questions, 50, 1.0, LENGTH, 0, rng)
    assert set(given) == set(range(2, 13))
    assert all(row[:n].tolist() == questions[0].ids[:n] and not row[n:].any() for row, n in zip(cut, given, strict=True))
    with pytest.raises(train_tiny.InputError, match="--length 9"):
        train_tiny_draft.make_prompts(questions, 1, 0.0, 9, 0, rng)


def test_committed_per_round():
    lengths = np.array([[2, 9, 1, 4, 9], [3, 9, 9, 9, 9]])
    # The first answer takes 2, 1 and 4 tokens, of which the last one would go beyond its end; the second 3.
    assert train_tiny_draft.committed_per_round(lengths, np.array([5, 3])) == pytest.approx(8 / 4)


# ---------------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Directory of a fresh target, with problems beside it."""
    directory = tmp_path_factory.mktemp("target")
    rows = [
        {"question": f"Ann has {i} pens and buys {i % 5} more. How many?", "answer": f"{i} + {i % 5} = {i + i % 5}\n#### {i}"}
        for i in range(12)
    ]
    for name in ("train", "dev"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tiny.train_tokenizer(train_tiny.read_problems(directory / "train.jsonl"), 310)
    raw = train_tiny.make_config(tokenizer, TARGET)
    target = ModelConfig.from_hf(raw)
    output = directory / "muse_small"
    train_tiny.save_tokenizer(tokenizer, output, 512)
    # Larger than fresh: a target that writes one token as gladly as any other teaches nothing.
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, train_tiny.fresh_parameters(target, seed=0))
    save_hf(params, raw, output, dtype=jnp.bfloat16)
    return output


def command(target: Path, *flags: str) -> list[str]:
    paths = [f"--{name}={target.parent / f'{name}.jsonl'}" for name in ("train", "dev")]
    return ["--stage=draft", *paths, f"--output={target}", *FLAGS, *flags]


@pytest.fixture(scope="module")
def run(target):
    """A draft of a few steps: its directory, and what --json printed."""
    pytest.importorskip("optax")
    # optax adds Python floats to integers.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train_tiny.main(command(target)) == 0
    return target / "draft", json.loads(printed.getvalue().splitlines()[-1])


def test_run_writes_a_draft(run, target):
    directory, results = run
    config = read_draft_config(directory)
    config.check_fits(read_config(target))
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (1, 4, (0,))
    assert config.output_multiplier == read_config(target).output_multiplier
    params, report = load_params(directory, config, dtype=jnp.float32)
    assert report.dtypes == ("BF16",)
    assert results["parameters"] == sum(x.size for x in jax.tree.leaves(params))
    for path, x in jax.tree.leaves_with_path(params):
        assert np.all(np.isfinite(x)) and np.any(x), path
    raw = json.loads((directory / "config.json").read_text())
    assert raw["use_sliding_window"] is True and raw["num_target_layers"] == 2
    assert not list(target.glob(".draft*"))  # of the trial


def test_training_lowers_the_loss(run):
    directory, _ = run
    rows = list(csv.DictReader((directory / "training_log.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [6, 12, 18]
    for name in ("draft_loss", "selector_loss"):
        assert float(rows[-1][name]) < 0.8 * float(rows[0][name])


def test_results_are_those_of_the_directory(run, target):
    """The reported acceptance, measured again with the weights that were written, by a loop in plain Python."""
    directory, results = run
    config, draft_config = read_config(target), read_draft_config(directory)
    params, _ = load_params(target, config, dtype=jnp.float32)
    draft_params, _ = load_params(directory, draft_config, dtype=jnp.float32)
    model = nnx.merge(nnx.split(MuseSpark(config, dtype=jnp.float32, dense_experts=True))[0], params)
    draft = nnx.merge(nnx.split(DFlash2(draft_config, dtype=jnp.float32))[0], draft_params)
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    (question,) = train_tiny.encode(tokenizer, train_tiny.read_problems(target.parent / "dev.jsonl")[:1])
    vocab, stop = tokenizer.get_vocab_size(), {tokenizer.token_to_id(train_tiny.END_OF_TURN)}
    room = 64
    forward = jax.jit(lambda tokens: model(tokens, FullContext.create(room), taps=draft_config.target_layer_ids))
    propose = jax.jit(
        lambda tokens, taps, at: draft.candidates(
            train_tiny_draft.block_hidden(draft, model.embedding[...], tokens, taps, at), model.lm_head[...], vocab
        )
    )
    text = question.ids[: question.prompt_length]
    while len(text) < room and not (len(text) > question.prompt_length and text[-1] in stop):
        stream, _, taps = forward(jnp.asarray([text + [0] * (room - len(text))], jnp.int32))
        text.append(int(jnp.argmax(model.logits(stream)[0, len(text) - 1, :vocab])))
    tokens = jnp.asarray([text + [0] * (room - len(text))], jnp.int32)
    _, _, taps = forward(tokens)
    place, rounds = question.prompt_length, 0
    while place < len(text) - 1:
        ids, _ = propose(tokens, taps, jnp.asarray([[place]], jnp.int32))
        after = text[place + 1 :]
        right = [after[i] in ids[0, i].tolist() for i in range(min(len(after), ids.shape[1]))]
        place += 1 + (right.index(False) if False in right else len(right))
        rounds += 1
    assert results["dev"]["oracle"] == pytest.approx((len(text) - 1 - question.prompt_length) / rounds)
    assert 1 <= results["dev"]["chain"] <= results["dev"]["oracle"]


def test_model_card_shows_the_measurements(run, target):
    directory, results = run
    card = (directory / "README.md").read_text()
    for name in ("chain", "tree", "oracle"):
        assert f"| {name} | {results['held_out'][name]:.2f} | {results['dev'][name]:.2f} |" in card
    assert "ends at 64 tokens" in " ".join(card.split())
    assert "--stage draft" in card and "--config num_hidden_layers=1" in card
    assert str(target.parent) not in card


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--room=8"], "--room 8: there are questions of"),
        (["--held-out=12"], "--held-out 12: "),
        (["--config", "block_size=99"], "block_size = 99: expected an integer from 2 to 16"),
        (["--config", 'dtype="float32"'], "dtype = 'float32': the draft is saved in bfloat16"),
        (["--config", "target_layer_ids=[2]"], "target_layer_ids = [2]: must be below"),
    ],
)
def test_bad_input(target, capsys, flags, message):
    with jax.numpy_dtype_promotion("standard"):
        assert train_tiny.main(command(target, *flags)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("place", "message"), [("file", "draft: not a directory"), ("link", "/proc/")])
def test_places_that_no_draft_can_be_saved_in(target, capsys, monkeypatch, tmp_path, place, message):
    """Said before anything is written or trained."""
    monkeypatch.setattr(train_tiny_draft.Trainer, "write", lambda *_: pytest.fail("wrote first"))
    output = shutil.copytree(target, tmp_path / "muse_small", ignore=shutil.ignore_patterns("draft"))
    if place == "file":
        (output / "draft").touch()
    else:
        (output / "draft").symlink_to("/proc/draft")  # not even root may write there
    with jax.numpy_dtype_promotion("standard"):
        assert train_tiny.main(command(target, f"--output={output}")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0]


def test_cards_are_filled():
    long = "word " * 40
    card = (
        f"---\na: b\n---\n\n# Title\n\none\n{long}\n\n- two\n  {long}\n- three\n\n```bash\n{long}\n```\n\n| a |\n|---|\n| b |\n"
    )
    lines = train_tiny_draft.wrap(card).splitlines()
    assert lines[:6] == ["---", "a: b", "---", "", "# Title", ""]
    assert lines[6] == "one" + 25 * " word" and lines[7] == "word " * 14 + "word"
    assert lines[9] == "- two" + 24 * " word" and lines[10] == "  " + "word " * 15 + "word" and lines[11] == "- three"
    assert lines[13:16] == ["```bash", long, "```"] and lines[17:] == ["| a |", "|---|", "| b |"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cut=2"], "--cut 2.0: allowed are 0 to 1"),
        (["--average=1"], "--average 1.0: allowed are 0 and above, below 1"),
        (["--gamma=0"], "--gamma 0.0: must be above 0"),
        (["--steps=0"], "0: expected an integer above 0"),
        (["--widths=8"], "unrecognized arguments: --widths=8"),
    ],
)
def test_bad_arguments(target, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        train_tiny.main(command(target, *flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
