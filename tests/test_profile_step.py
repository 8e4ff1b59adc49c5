"""The trace of one step: operations under the model's names."""

import gzip
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import profile_step


def test_operations_have_the_models_names(tmp_path, capsys):
    out = tmp_path / "step.trace.json.gz"
    assert profile_step.main(["--out", str(out), "--json", "--devices", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    parts = {scope.split("/")[0] for scope in figures["scopes"]}
    assert {"attention", "moe", "lm_head", "commit", "sampling", "draft"} <= parts
    events = [event for event in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] if event.get("ph") == "X"]
    assert len(events) >= figures["operations"] > 100
    assert all(event["args"]["hlo_op"] and event["name"].count("/") for event in events)
    # Each of six layers multiplies its experts' rows once or more on each device.
    assert sum(event["name"].startswith("moe") and event["name"].endswith("dot_general") for event in events) >= 6
    assert not list(tmp_path.glob(".*"))


def test_a_name_that_cannot_be_written(tmp_path, capsys):
    assert profile_step.main(["--out", str(tmp_path / "absent" / "trace.gz")]) == 2
    assert "profile_step.py: --out" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    assert profile_step.main(["--out", str(tmp_path / "taken")]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
