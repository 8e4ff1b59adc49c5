"""scripts/bench_acceptance.py: what it measures and compares, its arguments and its files."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muse_jax
from checkpoints.hf import save_draft
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import parameter_tree
from muse_jax.sampling import gumbel_noise, split_seeds
from muse_jax.speculation import Speculation

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import bench_acceptance
from bench_acceptance import Check, Prompt, Run, Setting

TEXTS = ["One and one", "Two", "A longer prompt", "three"]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def draft(small_config, tmp_path_factory) -> Path:
    """Random weights, so that almost nothing is accepted."""
    config_json = {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel"],
        "vocab_size": small_config.vocab_size,
        "hidden_size": small_config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "dtype": "float32",
        "dflash_config": {
            "target_layer_ids": [0],
            "mask_token_id": 1,
            "block_size": BLOCK_SIZE,
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 4,
            "selector_top_k": 8,
        },
    }
    rng = np.random.default_rng(0)
    params = parameter_tree(
        DraftConfig.from_hf(config_json), lambda spec: rng.normal(size=spec.param_shape).astype(np.float32) * 0.3
    )
    directory = tmp_path_factory.mktemp("bench") / "draft"
    save_draft(params, config_json, directory, dtype=jnp.float32)
    return directory


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def arguments(checkpoint, draft, prompts_file) -> list[str]:
    files = ["--prompts", str(prompts_file), "--checkpoint", str(checkpoint), "--draft", str(draft)]
    small = ["--limit", "3", "--batch-size", "2", "--max-new-tokens", "6", "--sizes", "6", "--temperatures", "1"]
    return [*files, "--field", "text", *small, "--check"]


@pytest.fixture(scope="module")
def measured(arguments, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("results") / "results.json"
    jax.config.update("jax_disable_most_optimizations", True)  # XLA's; it compiles in half the time
    try:
        assert bench_acceptance.main([*arguments, "--json", str(path)]) == 0
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return json.loads(path.read_text())


# -------------------------------------------------------------------------------------------------------- measurements


def test_every_mode_is_measured_and_compared_with_plain_decoding(measured):
    assert measured["conditions"].keys() == {
        *("checkpoint", "prompts", "max_new_tokens", "batch_size", "seed", "dtype", "device", "jax")
    }
    runs = {(row["mode"], row["tree_size"]): row for row in measured["runs"]}
    assert list(runs) == [("off", 1), ("chain", BLOCK_SIZE), ("tree", 6), ("sampled_chain", BLOCK_SIZE)]
    for row in runs.values():
        assert row["temperature"] == 1
        assert sum(row["accepted_histogram"].values()) == row["steps"]
        assert row["acceptance_length"] == row["tokens"] / row["steps"]
        assert row["deepest"] == max(map(int, row["accepted_histogram"])) - 1 < BLOCK_SIZE
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    plain, chain, tree, sampled = runs.values()
    assert plain["acceptance_length"] == 1 and plain["steps"] == plain["tokens"] <= 3 * 5
    assert plain["tokens"] == chain["tokens"] == tree["tokens"]
    assert tree["ratio_to_chain"] == pytest.approx(tree["acceptance_length"] / chain["acceptance_length"])
    assert chain["ratio_to_chain"] is None
    compared = plain["tokens"] + 3  # with the first tokens
    assert chain["check"] == tree["check"] == {"compared": compared, "divergences": [], "fault": None}
    assert plain["check"] is sampled["check"] is None


def test_answers_do_not_depend_on_the_batch(muse):
    """Each prompt keeps its place, its seed and all its tokens, whatever batch it is in and however long that runs."""
    prompts = [Prompt(muse.tokenizer.encode(text), 5 + i) for i, text in enumerate(TEXTS[:3])]
    batches = []
    run = bench_acceptance.decode_all(muse, prompts, 1.0, 6, 2, batches.append)
    assert batches == [2, 1]
    for prompt, tokens, accepted in zip(prompts, run.tokens, run.accepted, strict=True):
        alone = muse.generate(prompt.tokens, seed=prompt.seed, temperature=1.0, max_new_tokens=6)
        assert len(list(alone)) > 0
        assert (tokens, accepted) == (alone.tokens, alone.accepted)


def test_summary_pools_steps_and_averages_over_prompts():
    run = Run([[1] * 9, [1] * 3, [1]], [[4, 5], [1, 1], []], seconds=2.0)
    row = bench_acceptance.summarize(Setting(Speculation.TREE, 16, 0.0), run, 2.0, None)
    assert row["tokens"] == 10  # the 9 accepted by the first prompt's steps were clipped to 8
    assert row["acceptance_length"] == 10 / 4
    assert row["acceptance_length_per_prompt"] == (8 / 2 + 2 / 2) / 2
    assert (row["ratio_to_chain"], row["deepest"], row["tokens_per_second"]) == (1.25, 4, 5.0)
    assert row["accepted_histogram"] == {"1": 2, "4": 1, "5": 1}
    nothing = bench_acceptance.summarize(Setting(Speculation.TREE, 16, 0.0), Run([[1]], [[]]), 2.0, None)
    assert nothing["acceptance_length"] is nothing["acceptance_length_per_prompt"] is nothing["deepest"] is None


def test_speculating_shares_the_weights(checkpoint, draft):
    muse = muse_jax.load(checkpoint, draft=draft, speculation="tree", tree_size=8)
    chain = bench_acceptance.speculating(muse, Speculation.CHAIN, 8)
    assert (chain.model.speculation, chain.model.num_rows) == ("chain", BLOCK_SIZE)
    leaves = [jax.tree.leaves(model) for model in (muse.model, chain.model)]
    assert all(a is b for a, b in zip(*leaves, strict=True))
    plain = bench_acceptance.speculating(muse, Speculation.OFF, 1)
    assert (plain.draft_config, plain.model.draft_params, plain.model.num_rows) == (None, None, 1)


# ---------------------------------------------------------------------------------------------------------- comparison


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_score_gap(muse, temperature):
    prompt, given = Prompt(muse.tokenizer.encode("One"), 2**33 + 1), [70, 71]
    logits = muse.logits([prompt.tokens + given])[0, -1, : muse.model.valid_vocab]
    position = jnp.asarray([len(prompt.tokens) + 2], jnp.int32)
    noise = gumbel_noise(*split_seeds(prompt.seed, 1), position, jnp.arange(len(logits), dtype=jnp.uint32))[0]
    scores = np.asarray(logits / temperature + noise if temperature else logits)
    best, second, *_ = np.argsort(scores)[::-1].tolist()
    worst = int(scores.argmin())
    for tokens in ((best, second), (second, best), (second, worst)):
        gap = bench_acceptance.score_gap(muse, prompt, temperature, given, tokens)
        # Scores are below 100, so a rounding is at most 4e-6; these are the same operations in one and two programs.
        assert gap == pytest.approx(scores[best] - min(scores[list(tokens)]), abs=1e-5)


def compare(monkeypatch, expected: list[list[int]], actual: list[list[int]], gap: float, exact: bool = True) -> Check:
    monkeypatch.setattr(bench_acceptance, "score_gap", lambda *_: gap)
    runs = [Run(tokens, [[] for _ in tokens]) for tokens in (expected, actual)]
    return bench_acceptance.check(None, [Prompt([1], 0)] * len(expected), 0.0, *runs, exact)


def test_ties_are_counted_and_rare(monkeypatch):
    long = [list(range(1000)), list(range(1000))]
    once = [long[0], [*range(500), 7, 8]]
    assert compare(monkeypatch, long, long, 0.0) == Check(2000)
    assert compare(monkeypatch, long, once, 9e-5) == Check(1501, [(1, 500, 9e-5)])
    twice = [[*range(400), 7], once[1]]
    fault = "2 ties in 902 tokens: at most one in 1000 is excused"
    assert compare(monkeypatch, long, twice, 9e-5) == Check(902, [(0, 400, 9e-5), (1, 500, 9e-5)], fault)


def test_differences_that_are_no_ties(monkeypatch):
    fault = compare(monkeypatch, [[1, 2, 3]], [[1, 9, 3]], 1e-4).fault
    assert fault == "prompt 0, token 1: 9 instead of 2, the scores 0.0001 below the best; a tie is less than 0.0001"
    assert compare(monkeypatch, [[1, 2, 3]], [[1, 2]], 0.0).fault == "prompt 0: 2 tokens, 3 by plain decoding"


def test_differences_in_bfloat16_are_reported(monkeypatch):
    assert compare(monkeypatch, [[1, 2, 3]], [[1, 9, 3]], 0.3, exact=False) == Check(2, [(0, 1, 0.3)])


def test_a_planted_difference_fails(arguments, monkeypatch, capsys):
    def decode_all(muse, prompts, *_):
        run = Run([[65, 66, 67] for _ in prompts], [[2] for _ in prompts], 1.0)
        if muse.model.speculation == Speculation.TREE:
            run.tokens[1][2] = 68
        return run

    monkeypatch.setattr(bench_acceptance, "decode_all", decode_all)
    assert bench_acceptance.main([*arguments, "--json"]) == 1
    out, errors = capsys.readouterr()
    rows = {row["mode"]: row["check"] for row in json.loads(out.splitlines()[-1])["runs"]}
    assert rows["chain"]["fault"] is None and rows["tree"]["fault"].startswith("prompt 1, token 2: 68 instead of 67")
    assert errors.startswith("bench_acceptance.py: tree 6 at temperature 1 is not plain decoding: prompt 1")
    assert errors.count("\n") == 1
    assert "NO" in out


# --------------------------------------------------------------------------------------------------- arguments and files


def test_table_says_what_the_figures_mean(measured, capsys):
    bench_acceptance.print_table(measured)
    out = capsys.readouterr().out
    assert "committed tokens / verify steps, prompts pooled" in out and "mean over prompts" in out
    for name in ("plain", f"chain {BLOCK_SIZE}", "tree 6", f"sampled chain {BLOCK_SIZE}"):
        assert name in out


def test_png(measured, arguments, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="--png draws with matplotlib")
    monkeypatch.setattr(bench_acceptance, "bench", lambda *_: measured)
    assert bench_acceptance.main([*arguments, "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_png_without_matplotlib(arguments, monkeypatch, capsys, tmp_path):
    """Said before anything is measured."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_acceptance, "bench", lambda *_: pytest.fail("measured first"))
    assert bench_acceptance.main([*arguments, "--png", str(tmp_path / "a.png")]) == 2
    expected = "bench_acceptance.py: --png: matplotlib is not installed: pip install -e '.[plot]'\n"
    assert capsys.readouterr().err == expected


def test_png_of_answers_without_steps(measured):
    """As with --max-new-tokens 1; matplotlib would warn of a legend of nothing."""
    pytest.importorskip("matplotlib", reason="--png draws with matplotlib")
    row = bench_acceptance.summarize(Setting(Speculation.TREE, 16, 0.0), Run([[1]], [[]]), None, None)
    assert bench_acceptance.draw(measured | {"runs": [row]}).startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(("stdout", "code"), [("full", 2), ("pipe", 141), ("closed", 0)])
def test_files_are_written_whatever_becomes_of_stdout(measured, arguments, monkeypatch, tmp_path, capsys, stdout, code):
    if stdout == "full":
        stream = open("/dev/full", "w")  # noqa: SIM115 (closing it fails)
    elif stdout == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    else:
        stream = None
    monkeypatch.setattr(bench_acceptance, "bench", lambda *_: measured)
    monkeypatch.setattr("sys.stdout", stream)
    try:
        assert bench_acceptance.main([*arguments, "--json", str(tmp_path / "a.json")]) == code
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.close()
    assert json.loads((tmp_path / "a.json").read_text()) == measured
    assert capsys.readouterr().err.count("\n") == (stdout == "full")


def test_one_file_that_fails_does_not_cost_the_rest(measured, arguments, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="--png draws with matplotlib")
    monkeypatch.setattr(bench_acceptance, "bench", lambda *_: measured)
    assert bench_acceptance.main([*arguments, "--json", "/dev/full", "--png", str(tmp_path / "a.png")]) == 2
    out, errors = capsys.readouterr()
    assert errors == "bench_acceptance.py: /dev/full: No space left on device\n"
    assert "tree 6" in out and (tmp_path / "a.png").exists()


def test_links_are_followed_and_pipes_kept(monkeypatch, tmp_path):
    for name, target in (("link", "file"), ("dangling", "later")):
        (tmp_path / name).symlink_to(tmp_path / target)
    (tmp_path / "file").write_bytes(b"old")
    for name, target in (("link", "file"), ("dangling", "later")):
        bench_acceptance.check_output(tmp_path / name)
        bench_acceptance.write_file(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink() and (tmp_path / target).read_bytes() == b"new"
        assert not (tmp_path / target).is_symlink()

    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        bench_acceptance.check_output(tmp_path / "pipe")
        bench_acceptance.write_file(tmp_path / "pipe", b"piped")
        assert reader.read() == b"piped"
    assert (tmp_path / "pipe").is_fifo()

    with open(tmp_path / "out", "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        bench_acceptance.write_file(tmp_path / "out", b"first\n")  # as /dev/stdout
        print("second", flush=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\n"


def test_an_interrupted_write_leaves_what_was_there(monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    bench_acceptance.write_file(path, b"old")

    def write_bytes(self, data):
        with open(self, "wb") as file:
            file.write(data[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(KeyboardInterrupt):
        bench_acceptance.write_file(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--sizes", "33"], "--sizes: '33': expected an integer from 2 to 32"),
        (["--modes", "off"], "--modes: invalid choice: 'off'"),
        (["--temperatures", "-1"], "--temperatures: '-1': expected a finite number of at least 0"),
        (["--modes", "sampled_chain", "--temperatures", "0"], "sampled_chain: needs a temperature above 0"),
        (["--png", "missing/a.png"], "--png missing/a.png: cannot be written: No such file or directory"),
        (["--json", "missing/a.json"], "--json missing/a.json: cannot be written: No such file or directory"),
        (["--json", "/"], "--json /: cannot be written: Is a directory"),
        (["--json", "/proc/a.json"], "--json /proc/a.json: cannot be written: "),
        (["--json", "a.out", "--png", "./a.out"], "--json a.out: is the file of --png, too"),
        (["--draft", ""], "--draft: '': expected a directory"),
        (["--limit", "0"], "--limit: '0': expected an integer above 0"),
    ],
)
def test_arguments_that_do_not_parse(arguments, changed, message, capsys):
    with pytest.raises(SystemExit) as error:
        bench_acceptance.main([*arguments, *changed])
    assert error.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts"),
        (b'{"text": "a"}\n{"text"\n', "line 2: not JSON"),
        (b'{"text": "a"}\n["text"]\n', "line 2: expected an object with a string 'text'"),
        (b'{"text": 1}\n', "line 1: expected an object with a string 'text'"),
        (b'\n{"text": "\xff"}\n', "line 2: not UTF-8 (byte 10 of the line)"),
        (b'{"text": ' + b"9" * 6000 + b"}\n", "line 1: a number is too long"),
        (b"[" * 200_000 + b"\n", "line 1: a number is too long, or values are nested too deeply"),
    ],
)
def test_prompts_that_cannot_be_used(arguments, content, message, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert bench_acceptance.main([*arguments, "--prompts", str(path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("bench_acceptance.py: ") and message in errors and errors.count("\n") == 1


def test_blank_lines_are_no_prompts(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}\n{"text": "c"}\nnot read\n')
    assert bench_acceptance.read_prompts(tmp_path / "prompts.jsonl", "text", 3) == ["a", "b", "c"]


def test_a_draft_is_needed(prompts_file, checkpoint, capsys):
    files = ["--prompts", str(prompts_file), "--field", "text", "--checkpoint", str(checkpoint)]
    assert bench_acceptance.main(files) == 2
    assert "needs a draft" in capsys.readouterr().err


def test_chat_form_needs_a_template(arguments, capsys):
    assert bench_acceptance.main([*arguments, "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_interrupt_and_failing_device(arguments, monkeypatch, capsys):
    def fail(error):
        def bench(*_):
            raise error

        monkeypatch.setattr(bench_acceptance, "bench", bench)
        code = bench_acceptance.main(arguments)
        return code, capsys.readouterr().err

    assert fail(KeyboardInterrupt()) == (130, "bench_acceptance.py: interrupted\n")
    code, errors = fail(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore"))
    assert (code, errors) == (1, "bench_acceptance.py: the device failed: RESOURCE_EXHAUSTED: no memory\n")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells by /proc when JAX is being imported")
@pytest.mark.parametrize("compiling", [False, True], ids=["imports", "compilation"])
def test_interrupt_ends_cleanly(prompts_file, compiling, interrupts_arrive):
    """While JAX is imported, which bears no exception, and while XLA's threads compile the bundled model."""
    process = subprocess.Popen(
        [sys.executable, bench_acceptance.__file__, "--prompts", str(prompts_file), "--field", "text"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_LOG_COMPILES": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        if compiling:
            assert any("Compiling jit(" in line and "prefill" in line for line in process.stderr)
            time.sleep(0.5)  # of about three seconds
        else:
            while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
                time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert errors.endswith("bench_acceptance.py: interrupted\n") and "Traceback" not in errors
