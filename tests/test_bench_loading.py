"""scripts/bench_loading.py: what it measures of a small checkpoint, and figures that it must not accept."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import bench_loading

GOOD = {
    "device_bytes": 2_100_000_000,
    "layout_bytes": 2_100_000_000,
    "largest_tensor": 300_000_000,
    "rss_growth": 2_500_000_000,
    "beyond_arrays": 400_000_000,
}


def test_a_small_checkpoint_of_every_format(tmp_path, capfd):
    assert bench_loading.main(["--gb", "0.02", "--directory", str(tmp_path), "--json"]) == 0
    out, err = capfd.readouterr()
    *table, last = out.splitlines()
    assert [line.split()[0] for line in table] == ["MB", "hf", "orbax", "packed"]
    assert [line.split()[-1] for line in table] == ["verdict", "ok", "ok", "ok"]
    rows = json.loads(last)["formats"]
    for row in rows:
        assert row["device_bytes"] == row["live_bytes"] == row["layout_bytes"]
        assert 0.018e9 < row["stored_bytes"] < row["layout_bytes"] < 1.2 * row["stored_bytes"]
        assert row["rss_growth"] >= 0.5 * row["device_bytes"]  # the arrays are in the memory that is measured
    assert err.count("bench_loading.py: loading") == 3
    assert not list(tmp_path.iterdir())


def test_limits():
    assert bench_loading.faults(GOOD) == []
    assert bench_loading.faults(GOOD | {"rss_growth": 2_699_999_999, "beyond_arrays": 599_999_999}) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device_bytes": GOOD["layout_bytes"] + 7 * 300_000_000}, "4200000000 bytes on the devices"),
        ({"device_bytes": GOOD["layout_bytes"] - 1}, "the layout asks for 2100000000"),
        ({"rss_growth": 2_700_000_000}, "the limit is 2700000000"),
        ({"beyond_arrays": 600_000_000}, "the limit is 600000000"),
        ({"beyond_arrays": 7 * 300_000_000}, "above the arrays"),  # copies for every device that are gone at the end
    ],
)
def test_replicated_copies_fail(wrong, message, monkeypatch, capsys):
    faults = bench_loading.faults(GOOD | wrong)
    assert len(faults) == 1 and message in faults[0]
    figures = dict.fromkeys(("stored_bytes", "live_bytes", "seconds"), 0) | GOOD | wrong
    row = {"format": "hf", "faults": faults} | figures
    monkeypatch.setattr(bench_loading, "measure", lambda directory, gigabytes: [row])
    assert bench_loading.main([]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--gb", "0"], ["--gb", "nan"], ["--gb", "x"], ["--directory", "/nonexistent"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_loading.main(arguments)
    assert capsys.readouterr().err.count("\n") == 1
