"""scripts/train_tiny.py: text, batches, loss, load balance, and a run of a few steps through the command line."""

import argparse
import contextlib
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from checkpoints import load_params, read_config
from muse_jax import ops
from muse_jax import tokenizer as muse_tokenizer
from muse_jax.config import MLPKind, ModelConfig, default_layer_types, default_layer_uses_rope
from muse_jax.kv_cache import FullContext
from muse_jax.layout import text_tensors
from scripts import train_tiny
from scripts.train_tiny import ASSISTANT, BOS, END_OF_TEXT, END_OF_TURN, SPECIALS, Encoded, Problem

NAMES, THINGS = ("Ann", "Ben", "Chloé", "Dev"), ("apples", "pens", "coins")

SMALL = ModelConfig(  # one layer of each attention kind
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_hidden_size=16,
    moe_intermediate_size=16,
    num_local_experts=6,
    num_experts_per_tok=2,
    output_multiplier=0.5,
    sliding_window=8,
    layer_types=default_layer_types(2),
    layer_uses_rope=default_layer_uses_rope(2),
    mlp_layer_types=(MLPKind.SPARSE,) * 2,
    placeholder_token_ids=(),
    dtype="float32",
)
SMALL_FLAGS = (
    "vocab_size=400",
    "hidden_size=32",
    "num_hidden_layers=2",
    "num_attention_heads=4",
    "num_key_value_heads=2",
    "head_dim=8",
    "moe_hidden_size=16",
    "moe_intermediate_size=16",
    "num_local_experts=6",
    "num_experts_per_tok=2",
    "sliding_window=8",
)
RUN_FLAGS = (
    "--steps=3",
    "--eval-every=1",
    "--held-out=4",
    "--batch=4",
    "--answers=2",
    "--answer-tokens=4",
    "--widths=96",
    "--json",
)


def make_problems(count: int) -> list[Problem]:
    problems = []
    for i in range(count):
        name, thing, have, more = NAMES[i % 4], THINGS[i % 3], 3 + 7 * i, 2 + i % 5
        question = f"{name} has {have} {thing} and buys {more} more. How many {thing} does {name} have?"
        answer = f"{name} has {have} + {more} = {have + more} {thing}.\n#### {have + more}"
        problems.append(Problem(question, answer))
    return problems


def write_problems(path, problems) -> None:
    path.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Halves the time of this file, nearly all of which is compilation; how fast the code is does not matter here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tiny.train_tokenizer(make_problems(40), 310)


@pytest.fixture(scope="module")
def run(quick_compilation, tmp_path_factory):
    """A checkpoint of three steps, and what --json printed."""
    pytest.importorskip("optax")
    directory = tmp_path_factory.mktemp("run")
    write_problems(directory / "train.jsonl", make_problems(20))
    write_problems(directory / "dev.jsonl", make_problems(5))
    output = directory / "muse_small"
    paths = [f"--train={directory / 'train.jsonl'}", f"--dev={directory / 'dev.jsonl'}", f"--output={output}"]
    # optax adds Python floats to integers.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train_tiny.main([*paths, *RUN_FLAGS, "--config", *SMALL_FLAGS]) == 0
    return output, json.loads(printed.getvalue().splitlines()[-1])


# ----------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["Ann has 1234 apples.\n#### 1,234.5", "naïve “quotes” × 3½ 😀\tend ", "", "  two  spaces"])
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_every_digit_is_a_token():
    tokenizer = train_tiny.train_tokenizer(make_problems(40), 500)  # room for every merge the text allows
    pieces = tokenizer.encode("Ann has 1999 apples, 20.5", add_special_tokens=False).tokens
    assert [piece for piece in pieces if re.search(r"\d", piece)] == list("1999205")
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d.|.\d", token)]


def test_special_tokens_come_last_and_stay_whole(tokenizer):
    size = tokenizer.get_vocab_size()
    assert size == 310
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == list(range(size - len(SPECIALS), size))
    ids = tokenizer.encode(f"a{ASSISTANT}b{END_OF_TURN}").ids
    assert ids[0] == tokenizer.token_to_id(BOS)
    assert [i for i in ids[1:] if i >= size - len(SPECIALS)] == [tokenizer.token_to_id(t) for t in (ASSISTANT, END_OF_TURN)]
    assert tokenizer.decode(ids) == "ab"


def test_encode_equals_the_whole_text(tokenizer):
    (problem,) = make_problems(1)
    (encoded,) = train_tiny.encode(tokenizer, [problem])
    text = train_tiny.prompt_text(problem.question) + problem.answer + END_OF_TURN
    assert encoded.ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.id_to_token(encoded.ids[encoded.prompt_length - 1]) == ASSISTANT
    assert tokenizer.decode(encoded.ids[encoded.prompt_length :]) == problem.answer


def test_read_problems_strips_annotations(tmp_path):
    row = {"question": " Q? ", "answer": "48/2 = <<48/2=24>>24 clips at $<<0.5*2=1>>1\n#### 24"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert train_tiny.read_problems(tmp_path / "a.jsonl") == [Problem("Q?", "48/2 = 24 clips at $1\n#### 24")]


@pytest.mark.parametrize("line", ['{"question": "Q"}', "[]", '{"question": 1, "answer": "A"}', "{"])
def test_read_problems_names_the_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "Q", "answer": "A"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected"):
        train_tiny.read_problems(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 5.\n#### 5", "5"),
        ("a\n#### -1,250.5", "-1250.5"),
        ("a\n#### 5 ", None),
        ("#### 5\nmore", None),
        ("a #### 5", None),
        ("a\n#### five", None),
    ],
)
def test_final_number(text, number):
    assert train_tiny.final_number(text) == number


# -------------------------------------------------------------------------------------------------------------- batches


def test_buckets_weigh_questions_answers_and_padding():
    sequences = [Encoded([9, 8, 7, 6, 5], 3), Encoded([9, 8, 7], 2), Encoded([1] * 9, 4)]
    narrow, wide = train_tiny.make_buckets(sequences, [2, 5], pad=0, question_weight=0.25, multiple=2)
    np.testing.assert_array_equal(narrow.tokens, [[9, 8, 7], [0, 0, 0]])
    np.testing.assert_array_equal(narrow.weights, [[0.25, 1], [0, 0]])
    np.testing.assert_array_equal(wide.tokens, [[9, 8, 7, 6, 5, 0], [0] * 6])
    np.testing.assert_array_equal(wide.weights, [[0.25, 0.25, 1, 1, 0], [0] * 5])  # the sequence of 9 fits neither


def test_epoch_shows_every_sequence():
    buckets = [train_tiny.Bucket(np.zeros((n, 3), np.int32), np.zeros((n, 2), np.float32)) for n in (10, 3)]
    batches = list(train_tiny.epoch(buckets, 4, np.random.default_rng(0)))
    assert [rows.shape for _, rows in batches] == [(4,)] * 4
    for index, bucket in enumerate(buckets):
        seen = np.concatenate([rows for i, rows in batches if i == index])
        assert set(seen) == set(range(len(bucket.tokens)))


# ----------------------------------------------------------------------------------------------------------------- loss


def random_model(rng):
    """A model with parameters far from their first values, so that nothing is hidden by zeros."""
    params = train_tiny.fresh_parameters(SMALL, 0)
    params = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), params)
    return train_tiny.model_graph(SMALL, jnp.float32), params


def random_sequences(rng, lengths, prompt_length=3):
    return [Encoded(rng.integers(0, SMALL.vocab_size, n).tolist(), prompt_length) for n in lengths]


def test_loss_of_a_padded_batch_is_that_of_its_sequences(rng):
    graph, params = random_model(rng)
    sequences = random_sequences(rng, (17, 17))

    @jax.jit
    def logits(params, tokens):
        model = nnx.merge(graph, params)
        return model.logits(model(tokens, FullContext.create(tokens.shape[1]))[0])

    expected = 0.0
    for ids, prompt_length in sequences:
        rows = np.asarray(logits(params, jnp.asarray([ids[:-1]])), np.float64)[0]
        log_probs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        for t, target in enumerate(ids[1:]):
            expected -= log_probs[t, target] * (0.3 if t + 1 < prompt_length else 1)

    (batch,) = train_tiny.make_buckets(sequences, [24], pad=5, question_weight=0.3, multiple=3)
    loss = jax.jit(lambda params, *batch: train_tiny.nll(nnx.merge(graph, params), *batch))(params, *batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)  # sums of 32 fp32 terms


def test_load_arrives_as_the_gradient_of_the_bias(rng):
    """top_k experts in every layer for each position that the loss depends on, padding left out."""
    graph, params = random_model(rng)
    lengths = (20, 7)
    (batch,) = train_tiny.make_buckets(random_sequences(rng, lengths), [24], pad=0, question_weight=0.3)
    gradients = jax.jit(jax.grad(lambda params: train_tiny.nll(nnx.merge(graph, params), *batch)))(params)
    loads = [load for path, load in jax.tree.leaves_with_path(gradients) if train_tiny.is_router_bias(path)]
    assert len(loads) == SMALL.num_hidden_layers
    for load in loads:
        assert float(jnp.sum(load)) == SMALL.num_experts_per_tok * sum(n - 1 for n in lengths)
        np.testing.assert_array_equal(load, np.round(load))


def test_report_load_counts(rng):
    idx = jnp.asarray([[0, 2], [2, 1], [0, 1]], jnp.int32)
    weights = jnp.asarray(rng.random((3, 2)), jnp.float32)
    used = jnp.asarray([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])  # the loss does not depend on the last row
    loss = jax.grad(lambda w, bias: jnp.sum(train_tiny.report_load(w, bias, idx) * used), argnums=(0, 1))
    weights_gradient, load = loss(weights, jnp.zeros(4))
    np.testing.assert_array_equal(weights_gradient, used)
    np.testing.assert_array_equal(load, [1, 1, 2, 0])


def test_balancing_evens_the_load(rng):
    num_experts, top_k = 8, 2
    x = jnp.asarray(rng.normal(size=(512, 16)) + 1.0, jnp.float32)  # off centre, so that some experts are favourites
    router = jnp.asarray(rng.normal(size=(num_experts, 16)), jnp.float32)
    route = jax.jit(lambda bias: ops.route(x, router, bias, top_k, 0.5, 1.0)[0])
    bias = jnp.zeros(num_experts)
    imbalances = []
    for _ in range(300):
        load = jnp.bincount(route(bias).ravel(), length=num_experts).astype(jnp.float32)
        imbalances.append(float(jnp.max(load) / jnp.mean(load)))
        bias = train_tiny.balance(bias, load, 0.01)
    assert imbalances[0] > 2
    assert imbalances[-1] < 1.3


def test_fit_returns_the_best_step_and_not_the_last():
    class Stub:
        """Parameters count steps; a step takes the buffers of the state, as that of Trainer does."""

        args = argparse.Namespace(steps=5, eval_every=1, batch=2, seed=0, max_seconds=np.inf)
        state = train_tiny.TrainState({"x": jnp.zeros(3)}, None, jnp.int32(0))
        losses = iter([4.0, 2.0, 3.0, np.nan, 5.0])

        def step(self, state, bucket, rows):
            metrics = train_tiny.StepMetrics(jnp.float32(1), jnp.float32(1))
            after = train_tiny.TrainState({"x": state.params["x"] + 1}, None, state.step + 1)
            jax.tree.map(lambda x: x.delete(), state)
            return after, metrics

        def shipped(self, masters):
            return masters

        def evaluate(self, params, bucket):
            return next(self.losses)

    bucket = train_tiny.Bucket(np.zeros((4, 3), np.int32), np.zeros((4, 2), np.float32))
    best = train_tiny.fit(Stub(), [bucket], bucket, Console(quiet=True))
    np.testing.assert_array_equal(best.params["x"], [2, 2, 2])
    assert (best.step, best.loss, best.epochs) == (2, 2.0, 3)
    assert [row["step"] for row in best.log] == [1, 2, 3, 4, 5]


def test_unigram_loss():
    train = [Encoded([3, 3, 0, 1], 2), Encoded([2, 0], 1)]  # answers 0 1 and 0: counts with one more each 3 2 1 1
    dev = [Encoded([3, 0, 1], 1)]
    expected = -(np.log(3 / 7) + np.log(2 / 7)) / 2
    assert train_tiny.unigram_loss(train, dev, 4) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------- command line


def test_run_writes_a_checkpoint(run):
    output, results = run
    config = read_config(output)
    assert config.placeholder_token_ids and max(config.placeholder_token_ids) < config.vocab_size == 400
    assert (config.output_multiplier, config.sliding_window) == ((32 / 256) ** -0.5, 8)
    params, report = load_params(output, config, dtype=jnp.bfloat16)
    assert report.num_tensors == len(text_tensors(config)) and report.dtypes == ("BF16", "F32")
    for i in range(2):
        assert np.any(params["layers"][i]["mlp"]["router_bias"])
        assert np.any(params["layers"][i]["post_ffn_gate"])
    assert results["files"]["model.safetensors"] == (output / "model.safetensors").stat().st_size
    rows = (output / "training_log.csv").read_text().splitlines()
    assert rows[0].startswith("step,") and len(rows) == 4


def test_shipped_weights_have_the_reported_loss(run):
    output, results = run
    config = read_config(output)
    graph = train_tiny.model_graph(config, jnp.float32)
    params, _ = load_params(output, config, dtype=jnp.float32)
    tokenizer = muse_tokenizer.Tokenizer.from_directory(output)
    problems = make_problems(5)
    sequences = []
    for problem in problems:
        prompt = tokenizer.encode(train_tiny.prompt_text(problem.question), add_special_tokens=False)
        sequences.append(
            Encoded(prompt + tokenizer.encode(problem.answer + END_OF_TURN, add_special_tokens=False), len(prompt))
        )
    (bucket,) = train_tiny.make_buckets(sequences, [96], pad=0, question_weight=0.0)
    total = jax.jit(lambda params, *bucket: train_tiny.nll(nnx.merge(graph, params), *bucket))(params, *bucket)
    loss = float(total) / bucket.weights.sum()
    losses = results["loss_per_token"]
    assert loss == pytest.approx(losses["trained"], rel=1e-5)
    assert losses["trained"] < losses["fresh weights"]
    assert results["dev_answer_tokens"] == bucket.weights.sum()
    per_byte = losses["trained"] * bucket.weights.sum() / sum(len(p.answer.encode()) for p in problems)
    assert results["loss_per_byte"]["trained"] == pytest.approx(per_byte)
    assert losses["uniform"] == pytest.approx(np.log(tokenizer.vocab_size))


def test_measuring_the_checkpoint_repeats_the_results(run, capsys):
    """Another program (caches, batched decoding, float32 on a CPU) finds what training reported."""
    output, results = run
    arguments = ["--stage=measure", f"--dev={output.parent / 'dev.jsonl'}", f"--output={output}", *RUN_FLAGS]
    assert train_tiny.main(arguments) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["loss_per_token"] == pytest.approx(results["loss_per_token"]["trained"], rel=1e-5)
    assert measured["loss_per_byte"] == pytest.approx(results["loss_per_byte"]["trained"], rel=1e-5)
    assert measured["generation"] == results["generation"]


def test_model_card_shows_the_measurements(run):
    output, results = run
    card = (output / "README.md").read_text()
    for name, loss in results["loss_per_token"].items():
        assert f"| {name} | {loss:.3f} | {results['loss_per_byte'][name]:.3f} |" in card
    assert "--steps 3" in card and "--config vocab_size=400" in card
    assert str(output.parent) not in card


def test_files_serve_the_text_side(run):
    output, _ = run
    tokenizer = muse_tokenizer.Tokenizer.from_directory(output)
    backend = tokenizer.encode(END_OF_TEXT + END_OF_TURN, add_special_tokens=False)
    assert set(tokenizer.stop_token_ids) == set(backend)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": " 1+1? "}]
    assert tokenizer.apply_chat_template(chat, reasoning_effort="low") == f"{BOS}<|system|>S<|user|>1+1?{ASSISTANT}"
    assert tokenizer.apply_chat_template(chat[1:]) == train_tiny.prompt_text("1+1?")
    chat.append({"role": "assistant", "content": "2"})
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=False)
    assert text.endswith(f"{ASSISTANT}2{END_OF_TURN}")
    with pytest.raises(ValueError, match="role tool: allowed are"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parity
def test_towers_complete_the_checkpoint_for_transformers(run):
    from transformers import AutoTokenizer, MuseSparkForConditionalGeneration, PreTrainedTokenizerFast

    output, _ = run
    before, _ = load_params(output, read_config(output), dtype=jnp.bfloat16)
    assert train_tiny.main(["--stage", "towers", "--output", str(output)]) == 0
    after, report = load_params(output, read_config(output), dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert report.num_skipped > 0 and report.skipped_bytes < 100_000

    _, info = MuseSparkForConditionalGeneration.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    theirs, ours = AutoTokenizer.from_pretrained(output), muse_tokenizer.Tokenizer.from_directory(output)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    text = "Chloé has 24 pens.\n#### 24"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    chat = [{"role": "user", "content": "1+1?"}]
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == train_tiny.prompt_text("1+1?")
    assert (theirs.bos_token, theirs.eos_token) == (BOS, END_OF_TEXT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --train and --dev"),
        (["--steps", "0"], "0: expected an integer above 0"),
        (["--token-dropout", "1"], "--token-dropout 1.0: allowed are"),
        (["--config", "hidden_size"], "expected KEY=VALUE"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        train_tiny.main(["--output", str(tmp_path), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_bad_files_are_one_line(tmp_path, capsys):
    write_problems(tmp_path / "train.jsonl", make_problems(2))
    arguments = ["--output", str(tmp_path / "out"), "--train", str(tmp_path / "train.jsonl"), "--held-out", "1", "--dev"]
    for dev, config, message in (
        ("train.jsonl", ["--held-out", "2"], "--held-out 2"),
        ("missing.jsonl", [], "missing.jsonl"),
        ("train.jsonl", ["--config", "head_dim=3"], "head_dim = 3: must be even"),
        ("train.jsonl", ["--widths", "4"], "no training problem fits 4 tokens"),
    ):
        assert train_tiny.main([*arguments, str(tmp_path / dev), *config]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
