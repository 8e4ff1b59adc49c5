"""scripts/generate.py: arguments and files in this process; streams, signals and devices in processes of their own."""

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.hf import save_draft, save_hf
from muse_jax.backends import BACKENDS, XLA
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import parameter_tree, text_tensors
from muse_jax.tokenizer import Tokenizer
from scripts import train_tiny

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import command_line
import generate

pytestmark = pytest.mark.usefixtures("interrupts_arrive")

ROOT = Path(__file__).resolve().parent.parent
KEYS = {
    *("text", "tokens", "finish_reason", "prompt_tokens", "new_tokens", "seconds_prefill", "seconds_decode"),
    *(
        "seconds_total",
        "tokens_per_second",
        "steps",
        "acceptance_length",
        "accepted_histogram",
        "seconds_step",
        "seconds_draft",
    ),
    *("seconds_verify", "speculation", "tree_size", "backend", "paths", "devices"),
}
PROMPT = "Ann has 3 pens.\nShe buys"
SAMPLED = ("--temperature", "0.9", "--seed", "7", "--max-new-tokens", "12")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_hidden_size": 16,
    "moe_intermediate_size": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 65536,
    "dtype": "float32",
}
DRAFT = {
    "model_type": "qwen3",
    "architectures": ["DFlash2DraftModel"],
    "vocab_size": SIZES["vocab_size"],
    "hidden_size": SIZES["hidden_size"],
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
        "block_size": 4,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 8,
    },
}


def write_draft(directory: Path, config_json: dict) -> Path:
    """A draft of random weights."""
    rng = np.random.default_rng(1)
    params = parameter_tree(
        DraftConfig.from_hf(config_json), lambda spec: rng.normal(size=spec.param_shape).astype(np.float32) * 0.3
    )
    save_draft(params, config_json, directory, dtype=jnp.float32)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """Random weights, the tokenizer of bytes and the chat template of the bundled model."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tiny.train_tokenizer([train_tiny.Problem("ab", "ab")], SIZES["vocab_size"])
    config_json = train_tiny.make_config(tokenizer, SIZES)
    rng = np.random.default_rng(0)
    params: dict = {}
    for spec in text_tensors(ModelConfig.from_hf(config_json)):
        node = params
        for key in spec.path[:-1]:
            node = node.setdefault(key, {})
        node[spec.path[-1]] = rng.normal(size=spec.param_shape).astype(np.float32) * (0.1 if len(spec.shape) > 1 else 0.2)
    # The special tokens come last but for the spare rows; none of them, stop tokens included, is ever chosen.
    params["lm_head"][:] += 0.05
    params["lm_head"][tokenizer.get_vocab_size() - len(train_tiny.SPECIALS) :] = 0
    train_tiny.save_tokenizer(tokenizer, directory, SIZES["max_position_embeddings"])
    save_hf(params, config_json, directory, dtype=jnp.float32)
    return directory


@pytest.fixture(scope="module")
def start(model_dir, tmp_path_factory):
    """Starts generate.py on the checkpoint; processes share a compilation cache, whose directory is `start.cache`."""
    cache = tmp_path_factory.mktemp("cache")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # XLA's; it compiles in half the time

    def start(*arguments: str, stdin=subprocess.DEVNULL, shell: str = "") -> subprocess.Popen:
        """shell: a redirection."""
        command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--checkpoint", str(model_dir), *arguments]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        return subprocess.Popen(command, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    start.cache = cache / "muse_jax"
    return start


def finish(process: subprocess.Popen, stdin: str | None = None) -> tuple[str, str, int]:
    try:
        out, errors = process.communicate(None if stdin is None else stdin.encode(), timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return out.decode(), errors.decode(), process.returncode


def split_json(out: str) -> tuple[str, dict]:
    """What was written before the last line, without the newline that ended it, and the object of the last line."""
    text, _, last = out.removesuffix("\n").rpartition("\n")
    return text, json.loads(last)


def one_line(captured) -> str:
    assert captured.out == ""
    assert captured.err.startswith("generate.py: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


# ------------------------------------------------------------------------------------------- processes of their own


@pytest.fixture(scope="module")
def sampled(start) -> tuple[str, dict]:
    out, errors, code = finish(start("--prompt", PROMPT, *SAMPLED, "--json"))
    assert code == 0, errors
    assert errors.count("\n") == 1 and "12 new tokens" in errors  # the figures, and no warning
    return split_json(out)


def test_json_is_the_last_line_and_tells_what_was_written(sampled, model_dir):
    text, answer = sampled
    tokenizer = Tokenizer.from_directory(model_dir)
    assert answer.keys() == KEYS
    assert answer["text"].removesuffix("\n") == text == tokenizer.decode(answer["tokens"]).removesuffix("\n")
    assert len(answer["tokens"]) == answer["new_tokens"] == 12
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len(tokenizer.encode(PROMPT))
    assert answer["tokens_per_second"] > 0 and 0 < answer["seconds_step"] < answer["seconds_decode"]
    assert (answer["steps"], answer["backend"], answer["devices"]) == (11, "xla", 1)
    assert answer["speculation"] == "off"
    drafted = ("acceptance_length", "accepted_histogram", "seconds_draft", "seconds_verify", "tree_size")
    assert [answer[name] for name in drafted] == [None] * 5


def test_draft_changes_the_figures_and_not_the_text(sampled, start, model_dir, tmp_path):
    """A draft in the checkpoint's directory is used without being asked for."""
    drafted = shutil.copytree(model_dir, tmp_path / "drafted")
    write_draft(drafted / "draft", DRAFT)
    out, errors, code = finish(start("--checkpoint", str(drafted), "--prompt", PROMPT, *SAMPLED, "--json"))
    assert code == 0, errors
    answer = split_json(out)[1]
    assert answer.keys() == KEYS
    assert (answer["tokens"], answer["text"]) == (sampled[1]["tokens"], sampled[1]["text"])
    assert (answer["speculation"], answer["tree_size"]) == ("tree", 16)
    histogram = {int(count): steps for count, steps in answer["accepted_histogram"].items()}
    assert sum(histogram.values()) == answer["steps"] <= 11
    assert max(histogram) <= DRAFT["dflash_config"]["block_size"]
    assert sum(count * steps for count, steps in histogram.items()) >= 11  # more where the limit cut the last step short
    assert answer["acceptance_length"] == pytest.approx(11 / answer["steps"])
    assert answer["seconds_draft"] > 0
    assert answer["seconds_verify"] == pytest.approx(max(0.0, answer["seconds_step"] - answer["seconds_draft"]))
    assert errors.count("\n") == 2 and f"tree of 16: {answer['acceptance_length']:.2f} tokens per step" in errors


def test_same_seed_same_text_from_stdin_and_compiles_nothing_again(sampled, start):
    compiled = {path.name for path in start.cache.iterdir()}
    assert any("decode" in name for name in compiled)
    assert stat.S_IMODE(start.cache.stat().st_mode) == 0o700
    out, errors, code = finish(start(*SAMPLED, stdin=subprocess.PIPE), stdin=PROMPT + "\n")
    assert code == 0, errors
    assert out.removesuffix("\n") == sampled[1]["text"].removesuffix("\n")
    assert errors.count("\n") == 1
    assert {path.name for path in start.cache.iterdir()} == compiled


def test_virtual_devices_write_the_same_text(sampled, start):
    out, errors, code = finish(start("--prompt", PROMPT, *SAMPLED, "--json", "--devices", "2"))
    assert code == 0, errors
    assert "2 virtual devices" in errors and errors.count("\n") == 2
    answer = split_json(out)[1]
    assert (answer["tokens"], answer["devices"]) == (sampled[1]["tokens"], 2)


def test_interrupt_keeps_the_text_and_reports_it(start):
    process = start("--prompt", PROMPT, "--max-new-tokens", "60000", "--json")
    begun = os.read(process.stdout.fileno(), 100)
    assert begun
    process.send_signal(signal.SIGINT)
    out, errors, code = finish(process)
    assert code == 130
    text, answer = split_json(begun.decode(errors="replace") + out)
    assert answer["finish_reason"] == "interrupted"
    assert 0 < answer["new_tokens"] == len(answer["tokens"]) < 60000
    assert answer["text"].startswith(text[:10]) and len(answer["text"]) >= len(text.removesuffix("\n"))
    assert "interrupted" in errors and "Traceback" not in errors


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells by /proc when JAX is being imported")
def test_interrupt_waits_for_the_imports(start):
    """An exception inside JAX's C++ initialisers ends the process at once."""
    process = start("--prompt", PROMPT, "--json")
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, errors, code = finish(process)
    assert (code, json.loads(out)["finish_reason"]) == (130, "interrupted"), errors
    assert errors.count("\n") == 1


def test_held_interrupts_are_raised_afterwards():
    interrupts, held = generate.Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            held.append(interrupts.arrived)
        pytest.fail("not raised")
    assert held == [True]


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_interrupt_while_compiling_ends_cleanly(start, seconds):
    process = start("--json", "--no-compilation-cache")
    while b"the question is" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, errors, code = finish(process)
    assert (code, json.loads(out.splitlines()[-1])["finish_reason"]) == (130, "interrupted")
    assert "interrupted" in errors and "Traceback" not in errors


def test_interrupt_that_an_import_turns_into_its_own_error(monkeypatch, capsys):
    def write_answer(args, answer, interrupts):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("could not initialise an extension") from None

    monkeypatch.setattr(generate, "write_answer", write_answer)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert generate.main(["--json"]) == generate.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "interrupted"


def test_ignored_interrupts_stay_ignored():
    """As nohup and shells ask of programs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with generate.Interrupts().raised():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stream, shell", [("stdout", ">&-"), ("stderr", "2>&-"), ("stderr", "2>/dev/full")])
def test_closed_and_full_streams(start, stream, shell):
    """A stream that is not there costs nobody the answer."""
    process = start("--prompt", PROMPT, *SAMPLED, "--json", shell=shell)
    out, errors, code = finish(process)
    assert code == 0 and "Traceback" not in errors
    if stream == "stderr":
        assert split_json(out)[1]["new_tokens"] > 0


def test_broken_pipe_ends_quietly(start):
    process = start("--prompt", PROMPT, "--max-new-tokens", "60000")
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    with process:  # closes stderr, too
        errors = process.stderr.read()
        assert (process.wait(timeout=60), errors) == (command_line.BROKEN_PIPE, b"")


# --------------------------------------------------------------------------------------------------- in this process


def run(monkeypatch, *arguments: str) -> int:
    """main() as with an empty stdin, without touching the compilation cache."""
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        return generate.main(["--no-compilation-cache", *arguments])


def test_sample_question_in_chat_form_is_streamed(model_dir, monkeypatch, capsys):
    class Recorder(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed += 1

    recorder = Recorder()
    monkeypatch.setattr("sys.stdout", recorder)
    writes, emit = [], generate.emit

    def record(answer, piece):
        emit(answer, piece)
        writes.append((recorder.getvalue(), recorder.flushed))

    notes, report = [], generate.report

    def record_note(line):
        report(line)
        notes.append((line, recorder.getvalue()))

    monkeypatch.setattr(generate, "emit", record)
    monkeypatch.setattr(generate, "report", record_note)
    assert run(monkeypatch, "--checkpoint", str(model_dir), "--max-new-tokens", "8", "--json", "--verbose") == 0
    answer = split_json(recorder.getvalue())[1]
    assert len(writes) > 1
    lengths, flushes = [len(text) for text, _ in writes], [count for _, count in writes]
    assert lengths == sorted(set(lengths)) and flushes == list(range(1, len(writes) + 1))
    assert writes[-1][0] == answer["text"]
    assert not answer["text"].endswith("\n")  # or the next line shows nothing
    assert [text for line, text in notes if "start-up: " in line] == [answer["text"] + "\n"]
    rendered = train_tiny.prompt_text(generate.SAMPLE_QUESTION)
    tokens = Tokenizer.from_directory(model_dir).encode(rendered, add_special_tokens=False)
    assert answer["prompt_tokens"] == len(tokens)
    errors = capsys.readouterr().err
    assert generate.SAMPLE_QUESTION in errors and "start-up: imports" in errors


def test_backends_and_what_ran_each_operation(monkeypatch, capsys):
    """The bundled target is too small for kernels: it is said of each why it did not run."""

    def answer(backend: str) -> tuple[dict, list[str]]:
        settings = ("--prompt", PROMPT, "--max-new-tokens", "4", "--json", "--verbose", "--no-draft")
        assert run(monkeypatch, *settings, "--backend", backend) == 0
        out, errors = capsys.readouterr()
        assert f"backend {backend}, " in errors
        return split_json(out)[1], [line.removeprefix("generate.py: ") for line in errors.splitlines()]

    (xla, quiet), (pallas, lines) = answer("xla"), answer("pallas")
    assert (xla["backend"], pallas["backend"], pallas["tokens"]) == ("xla", "pallas", xla["tokens"])
    assert xla["paths"] == {} and not any(line.startswith("route: ") for line in quiet)
    assert {"blend_norm", "decode_attention", "dense_gemm", "out_gate", "qk_rope", "route"} == set(pallas["paths"])
    for op, paths in pallas["paths"].items():
        assert lines.count(f"{op}: {', '.join(paths)}") == 1
    assert pallas["paths"]["route"] == ["xla (route: 16 experts; multiples of 128 are possible)"]


def test_kernels_are_not_interpreted_where_they_would_wait_for_each_other(monkeypatch, capsys):
    """Those of the draft's lattice and tree fit the bundled model."""
    monkeypatch.setenv("NPROC", "2")
    assert run(monkeypatch, "--prompt", PROMPT, "--max-new-tokens", "4", "--backend", "pallas") == 2
    assert "set NPROC=48 in the environment" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("line_open", "is_terminal", "before"), [(True, True, "\n"), (True, False, ""), (False, True, "")])
def test_errors_begin_a_line(monkeypatch, capsys, line_open, is_terminal, before):
    """Also in the middle of the text, where stdout and stderr are one terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert generate.fail(generate.Answer(line_open=line_open), "out of memory", 1) == 1
    assert capsys.readouterr() == ("", f"{before}generate.py: out of memory\n")


def test_help_names_the_backends(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    text = capsys.readouterr().out.split("  --backend ")[1].split("  --")[0]
    assert all(name in text for name in (*BACKENDS, "auto"))


def test_chat_renders_the_template_with_what_was_given(model_dir):
    tokenizer = Tokenizer.from_directory(model_dir)
    muse = types.SimpleNamespace(tokenizer=tokenizer)

    def text(*arguments: str) -> str:
        args = generate.parse_arguments(arguments)
        return tokenizer.decode(generate.encode(muse, args, args.prompt), skip_special_tokens=False)

    assert text("--prompt", "Hi ") == "<|begin_of_text|>Hi "
    assert text("--chat", "--prompt", "Hi ") == "<|begin_of_text|><|user|>Hi<|assistant|>"
    system = text("--chat", "--prompt", "Hi", "--system", "Be brief.")
    assert system == "<|begin_of_text|><|system|>Be brief.<|user|>Hi<|assistant|>"
    tokenizer._chat_templates["default"] = "{{ messages[0].content }} {{ reasoning_effort }} {{ add_generation_prompt }}"
    assert text("--chat", "--prompt", "Hi", "--reasoning-effort", "low") == "Hi low True"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens: '0': expected an integer above 0"),
        (["--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
        (["--numerics", "exact"], "--numerics: invalid choice: 'exact'"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with argument --prompt"),
        (["--system", "Be brief.", "--prompt", "a"], "--system needs --chat"),
        (["--promt", "a"], "unrecognized arguments: --promt"),
        (["--tree-size", "33"], "--tree-size: '33': expected an integer from 2 to 32"),
        (["--tree-size", "1"], "--tree-size: '1': expected an integer from 2 to 32"),
        (["--chain", "random"], "--chain: invalid choice: 'random'"),
        (["--draft", ""], "--draft: '': expected a directory"),
        (["--no-draft", "--draft", "d"], "--draft: not allowed with argument --no-draft"),
        (["--no-draft", "--chain"], "--chain needs a draft: not allowed with --no-draft"),
        (["--tree-size", "8", "--no-draft"], "--tree-size needs a draft: not allowed with --no-draft"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main(arguments)
    assert error.value.code == 2
    assert message in one_line(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "speculation"),
    [
        ([], None),  # the library's choice: a tree where there is a draft
        (["--no-draft"], "off"),
        (["--draft", "d"], "tree"),
        (["--tree-size", "8"], "tree"),
        (["--chain"], "chain"),
        (["--chain", "greedy", "--tree-size", "8"], "chain"),
        (["--draft", "d", "--chain", "sampled"], "sampled_chain"),
    ],
)
def test_speculation_that_is_asked_for(arguments, speculation):
    assert generate.parse_arguments(arguments).speculation == speculation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature = -1.0: expected"),
        (["--top-p", "0"], "top_p = 0.0: expected"),
        (["--seed", "-1"], "seed = -1: expected"),
        (["--backend", "fast"], "backend = 'fast': this version has"),
        (["--devices", "3"], "devices = 3: allowed are 1, 2, 4, 8"),
        (["--prompt", "abc", "--max-length", "20"], "max_new_tokens of 256 = 259: max_length is 20"),
        (["--prompt", "a\udce4"], "lone surrogate"),
        (["--prompt-file", "missing.txt"], "missing.txt: No such file or directory"),
        (["--tree-size", "8"], "speculation = 'tree' needs a draft"),
        (["--chain", "sampled"], "speculation = 'sampled_chain' needs a draft"),
        (["--draft", "missing"], "missing"),
    ],
)
def test_settings_out_of_range(model_dir, monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, "--checkpoint", str(model_dir), *arguments) == 2
    assert message in one_line(capsys.readouterr())


@pytest.mark.parametrize(("content", "message"), [(b"ab\xff", "not UTF-8 (byte 2)"), (b"12345678 ", "longer than the")])
def test_prompt_file_that_cannot_be_used(model_dir, monkeypatch, capsys, tmp_path, content, message):
    monkeypatch.setattr(generate, "MAX_PROMPT_BYTES", 8)
    (tmp_path / "prompt").write_bytes(content)
    assert run(monkeypatch, "--checkpoint", str(model_dir), "--prompt-file", str(tmp_path / "prompt")) == 2
    assert message in one_line(capsys.readouterr())


def test_checkpoints_that_cannot_be_used(model_dir, monkeypatch, capsys, tmp_path):
    def message(directory: Path) -> str:
        assert run(monkeypatch, "--checkpoint", str(directory), "--prompt", "a", "--chat") == 2
        return one_line(capsys.readouterr())

    assert "no such directory" in message(tmp_path / "none")
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 5000)
    assert "model.safetensors" in message(broken)
    plain = shutil.copytree(model_dir, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    assert "no chat template" in message(plain)
    (plain / "tokenizer.json").unlink()
    assert "no tokenizer.json" in message(plain)


def test_draft_that_does_not_fit_is_refused(model_dir, monkeypatch, capsys, tmp_path):
    draft = write_draft(tmp_path / "draft", DRAFT | {"vocab_size": 301})
    assert run(monkeypatch, "--checkpoint", str(model_dir), "--draft", str(draft), "--prompt", "a") == 2
    assert "the draft does not fit its target: vocab_size = 301, the target has 300" in one_line(capsys.readouterr())


def finished(accepted: list[int]) -> generate.Answer:
    """An answer whose steps accepted so many tokens each, by a tree."""
    generation = types.SimpleNamespace(
        tokens=[0] * (1 + sum(accepted)),
        accepted=accepted,
        acceptance_length=sum(accepted) / len(accepted),
        finish_reason="stop",
        seconds_prefill=1.0,
        seconds_decode=0.005 * len(accepted),
        seconds_step=0.005,
        tokens_per_second=1.0,
    )
    muse = types.SimpleNamespace(
        draft_config=object(),
        model=types.SimpleNamespace(speculation="sampled_chain", num_rows=16, module=types.SimpleNamespace(backend=XLA)),
        backend="xla",
        mesh=None,
    )
    return generate.Answer(muse=muse, generation=generation, seconds_draft=0.002)


def test_histogram_and_times_of_a_step(capsys):
    args = generate.parse_arguments(["--json"])
    answer = finished([1, 3, 3, 12, 3, 1])
    generate.print_figures(args, answer)
    out, errors = capsys.readouterr()
    figures = json.loads(out)
    assert figures["accepted_histogram"] == {"1": 2, "3": 3, "12": 1}
    assert list(figures["accepted_histogram"]) == ["1", "3", "12"]
    assert figures["seconds_draft"] + figures["seconds_verify"] == pytest.approx(0.005)
    expected = "[sampled chain of 16: 3.83 tokens per step over 6 steps, accepted 1▆ 3█ 12▃, draft 2.00 ms + verify 3.00 ms]"
    assert errors.splitlines()[1:] == [expected]


@pytest.mark.parametrize(
    ("accepted", "warns"),
    [
        ([1] * 64, True),
        ([1] * 63, False),  # too few steps to tell
        ([1] * 80 + [2] * 19, True),  # 1.19
        ([1] * 80 + [2] * 20, False),  # 1.2
    ],
)
def test_warning_where_the_draft_hardly_helps(accepted, warns, capsys):
    generate.print_figures(generate.parse_arguments([]), finished(accepted))
    warning = capsys.readouterr().err.splitlines()[2:]
    assert len(warning) == warns
    for word in ("another target", "block size", "target_layer_ids", "mask_token_id", "training", "temperature") * warns:
        assert word in warning[0]


def test_compilation_cache_only_where_no_one_else_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "shared" / "muse_jax").mkdir(parents=True)
    (tmp_path / "shared" / "muse_jax").chmod(0o777)
    for base, reason in (("file", "Not a directory"), ("shared", "other users may write")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / base))
        generate.use_compilation_cache()
        assert reason in one_line(capsys.readouterr())
        assert jax.config.jax_compilation_cache_dir is None
