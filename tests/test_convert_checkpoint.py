"""scripts/convert_checkpoint.py and compare_checkpoints.py as command lines, with the bundled model."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BUNDLED = REPOSITORY / "checkpoints" / "muse_tiny"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The scripts' folder is importable, as it is for a script; and what `main` sets for its process is undone."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    monkeypatch.setattr("warnings.showwarning", None)


def run(*arguments, script="convert_checkpoint"):
    return importlib.import_module(script).main([str(argument) for argument in arguments])


def one_line(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("convert_checkpoint.py: ")
    return err


def test_dry_run_writes_nothing(tmp_path, capsys):
    assert run(BUNDLED, tmp_path / "out", "--to", "packed", "--tp", 8, "--dry-run", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (
        figures["fits"]
        and figures["tp"] == 8
        and figures["not_carried"]["target"]["families"]
        == [
            "model.audio_tower",
            "model.vision_adapter",
            "model.vision_projection",
            "model.vision_tower",
        ]
    )
    assert list(tmp_path.iterdir()) == []
    assert run(BUNDLED, tmp_path / "out", "--to", "packed", "--tp", 8, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    written = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.bin"))
    assert written == figures["bytes_out"] == done["bytes_out"] and done["bytes_in"] == figures["bytes_in"]
    assert run(BUNDLED, tmp_path / "other", "--to", "hf", "--dry-run") == 0
    assert "bytes in, " in capsys.readouterr().out
    assert run(BUNDLED, tmp_path / "out", "--to", "packed", "--tp", 8, "--dry-run") == 2
    assert "exists; choose another destination" in capsys.readouterr().err


def test_the_disk_is_too_small(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(BUNDLED, tmp_path / "out", "--to", "hf", "--dry-run") == 2
    assert "its file system has 1000 to give" in capsys.readouterr().err
    assert run(BUNDLED, tmp_path / "out", "--to", "hf") == 2
    assert "its file system has 1000 to give" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_verify_and_resume_of_what_is_complete(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(BUNDLED, out, "--to", "orbax") == 0
    assert f"\n{out}: 162 tensors, " in capsys.readouterr().out
    assert run(BUNDLED, out, "--to", "orbax") == 2
    assert "exists; choose another destination" in one_line(capsys)
    assert run(BUNDLED, out, "--to", "orbax", "--resume") == 0
    assert capsys.readouterr().out.endswith(", complete\n")
    assert run(BUNDLED, out, "--to", "orbax", "--verify", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["verified_tensors"] == 162 and figures["complete"]
    for other in (["--to", "hf", "--verify"], ["--to", "orbax", "--quantize", "nvfp4", "--resume"]):
        assert run(BUNDLED, out, *other) == 2
        assert "was made from another source or with other options" in one_line(capsys)
    chunk = next(path for path in sorted(out.rglob("c.*")) if path.is_file())
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    assert run(BUNDLED, out, "--to", "orbax", "--verify") == 1
    one_line(capsys)


def test_quantise_and_compare(tmp_path, capsys):
    """The bundled model with NVFP4 experts; bars from what `compare_checkpoints.py` measures on 100 prompts, with room."""
    assert run(BUNDLED, tmp_path / "nvfp4", "--to", "hf", "--quantize", "nvfp4") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[0] == "quantised" and table[8].startswith("model.") and not table[9].startswith("model.")
    for row in table[1:9]:
        # Rounding N(0, 1) to NVFP4 costs 9.5 % (muse_spark.md 4.3).
        assert 8 < float(row.split()[1].rstrip("%")) < 11
    prompts = tmp_path / "prompts.jsonl"
    questions = ("Tom has 3 bags of 7 apples. How many apples has he?", "A pen costs $2. How much do 12 pens cost?")
    prompts.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    arguments = (BUNDLED, tmp_path / "nvfp4", "--prompts", prompts, "--batch-size", 2, "--max-new-tokens", 48, "--json")
    assert run(*arguments, script="compare_checkpoints") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["prompts"] == 2 and figures["answer_tokens"] >= 20
    assert 0.001 < figures["logits_relative_rms"] < 0.1
    assert 0 < figures["kl"] < 0.02
    assert figures["acceptance_checkpoint"] > 2
    same = (BUNDLED, BUNDLED, "--prompts", prompts, "--batch-size", 2, "--max-new-tokens", 48)
    assert run(*same, script="compare_checkpoints") == 0
    assert "top-1 agreement         100.00%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "packed"], "--tp goes with --to packed, which needs it"),
        (["--to", "hf", "--tp", "2"], "--tp goes with --to packed, which needs it"),
        (["--to", "zip"], "invalid choice: 'zip'"),
        (["--to", "packed", "--tp", "3"], "invalid choice: 3"),
        ([], "the following arguments are required: --to"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        run(BUNDLED, tmp_path / "out", *arguments)
    assert error.value.code == 2
    assert message in one_line(capsys)


def test_bad_sources(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for source, message in (("missing", "no such directory"), ("empty", "config.json: no such file")):
        assert run(tmp_path / source, tmp_path / "out", "--to", "hf") == 2
        assert message in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_interrupted_by_the_user(tmp_path, interrupts_arrive):
    """Ctrl-C while it converts: exit code 130, a line that says how to go on, and --resume does."""
    slow = (
        "import sys, time; sys.path.insert(0, 'scripts')\n"
        "import checkpoints.convert as convert, convert_checkpoint\n"
        "inner = convert._convert_tensor\n"
        "convert._convert_tensor = lambda *a: (time.sleep(0.1), inner(*a))[1]\n"
        "sys.exit(convert_checkpoint.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", slow, str(BUNDLED), str(tmp_path / "out"), "--to", "hf"]
    child = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.partial" / "data").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert err == "convert_checkpoint.py: interrupted; what was converted is kept: the same command with --resume goes on\n"
    assert not (tmp_path / "out").exists()
    assert run(BUNDLED, tmp_path / "out", "--to", "hf", "--resume", "--verify", "--json") == 0
