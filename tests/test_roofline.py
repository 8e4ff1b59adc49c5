"""muse_jax.roofline and scripts/roofline.py: bytes against the layout and the published figures, the story, the arguments."""

import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest

from muse_jax.config import MUSE_SPARK_OPEN, TINY
from muse_jax.layout import packed_tensors
from muse_jax.roofline import DEVICES, H200, Settings, busiest_rank, step, uniform_experts, weight_bytes

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import roofline
import show_collectives

FULL, DRAFT = show_collectives.full_size()
MB = 1_000_000
TABLES = ("embedding", "predecessor_codebook", "successor_codebook")  # from which rows are taken


def shown(capsys, *arguments) -> dict:
    assert roofline.main([*map(str, arguments), "--json"]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    return json.loads(out)


def by_name(config=FULL, draft=DRAFT, **settings) -> dict:
    return {phase.name: phase for phase in step(config, draft, Settings(**settings))}


# ------------------------------------------------------------------------------------------------------ bytes of weights


class TestReleased:
    """Of one of eight ranks, 49 experts a layer: muse_spark.md 5.1 and 6, megakernel.md 2 and 3."""

    reads = weight_bytes(FULL, DRAFT, Settings())

    def layer(self, i: int) -> dict[str, int]:
        return {phase: count for (phase, at), count in self.reads.items() if at == i and not phase.startswith("draft.")}

    def test_step(self):
        verify = sum(count for (phase, _), count in self.reads.items() if not phase.startswith("draft."))
        not_in_the_table = 16 * 8192 * 2 + 8192 * 2 + 60 * 49 * 3 * 4  # embedded rows, final norm, experts' global scales
        assert verify == 17_000_495_104 + not_in_the_table

    def test_layers(self):
        experts = ("expert_gate_up", "expert_down")
        nvfp4, bf16 = self.layer(1), self.layer(61)
        assert sum(nvfp4.values()) == 54_525_952 + 16_777_216 + 8_388_608 + 132_096 + 173_408_256 + 49 * 12
        assert round(sum(nvfp4.values()) / MB) == 253
        assert sum(bf16[phase] for phase in experts) == sum(self.layer(0)[phase] for phase in experts) == 616_562_688
        rounded = {phase: round(count / MB, 1) for phase, count in nvfp4.items()}
        assert (rounded["o_proj"], rounded["router"], rounded["pre_expert_proj"], rounded["qkv"]) == (16.8, 8.4, 8.4, 37.7)
        assert (rounded["expert_gate_up"], rounded["expert_down"]) == (115.6, 57.8)

    def test_heads(self):
        assert self.reads["lm_head", None] == self.reads["draft.lm_head", None] == 413_794_304

    def test_draft(self):
        """dflash2.md 7, all of it shared; it leaves out norms and the rows of tables."""
        drafted = sum(count for (phase, _), count in self.reads.items() if phase.startswith("draft."))
        assert 1_483 * MB < drafted < 1_486 * MB


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_all_that_is_no_table_is_read_whole(tp, small_draft_config):
    """With all experts in use; lm_head twice, where there is a draft."""
    config = dataclasses.replace(TINY, vocab_size=264, nvfp4_layers=(1, 3))
    full_of_options = dataclasses.replace(small_draft_config, attention_bias=True, has_mask_embedding=True)
    for target, draft in ((config, None), (config, small_draft_config), (config, full_of_options), (FULL, DRAFT)):
        tensors = [tensor for each in (target, draft) if each is not None for tensor in packed_tensors(each, tp)]
        whole = sum(tensor.nbytes for tensor in tensors if tensor.spec.path[-1] not in (*TABLES, "input_scale"))
        head = sum(tensor.nbytes for tensor in tensors if tensor.spec.path == ("lm_head",))
        value = 2 if target.dtype == "bfloat16" else 4
        rows = 16 * target.hidden_size
        if draft is not None:
            whole += head
            rows += 2 * target.hidden_size
            # Candidates of all positions, or all of a rank's part.
            rows += 2 * min(15 * draft.selector_top_k, target.vocab_size // tp) * draft.selector_rank
        reads = weight_bytes(target, draft, Settings(tp=tp, experts=target.num_local_experts))
        assert sum(reads.values()) == whole + rows * value


def test_tp_divides_what_is_cut():
    counts = {name: [] for name in by_name()}
    for tp in (1, 2, 4, 8):
        for name, phase in by_name(tp=tp).items():
            counts[name].append(phase.weight_bytes)
    for name in ("qkv", "o_proj", "lm_head", "draft.o_proj", "draft.gate_up", "draft.down", "draft.lm_head"):
        assert [count * tp for count, tp in zip(counts[name], (1, 2, 4, 8), strict=True)] == counts[name][:1] * 4
    for name in ("router", "post_attn", "combine", "post_ffn", "final_norm", "draft.final_norm"):
        assert counts[name] == counts[name][:1] * 4
    for name in ("expert_gate_up", "expert_down", "pre_expert_proj"):  # scales of experts and a norm are whole
        assert counts[name][0] / 8 < counts[name][3] < 1.001 * counts[name][0] / 8


def test_experts_scale():
    few, many = by_name(experts=8), by_name(experts=64)
    assert many["expert_down"].weight_bytes == 8 * few["expert_down"].weight_bytes
    assert many["router"] == few["router"]


# -------------------------------------------------------------------------------------------------------------- experts


def test_uniform_experts():
    """muse_spark.md 6 and dflash2.md 7."""
    assert [round(uniform_experts(MUSE_SPARK_OPEN, rows)) for rows in (1, 8, 16, 32)] == [8, 57, 102, 163]


def test_busiest_rank():
    assert busiest_rank(49, 256, 8) == pytest.approx(9.41, abs=0.01)  # muse_spark.md 6, simulated
    sets = itertools.combinations(range(8), 3)
    every = [max(sum(expert // 2 == rank for expert in chosen) for rank in range(4)) for chosen in sets]
    assert busiest_rank(3, 8, 4) == pytest.approx(statistics.mean(every))
    assert (busiest_rank(8, 8, 4), busiest_rank(5, 8, 1)) == (2, 5)


# ------------------------------------------------------------------------------------------------------------- KV caches


def test_kv_of_the_released_model():
    """megakernel.md 2: 1.06 MB of a sliding layer, 0.5 KB a position of a global one; muse_spark.md 6 in the last case."""
    kv = [by_name(context=context)["attention"].kv_bytes for context in (100_000, 100_001, 2032)]
    assert kv[1] - kv[0] == 16 * 512
    assert (kv[0] - 16 * 512 * 100_016) / 46 == 2063 * 512 == 1_056_256
    assert kv[2] == 65_011_712


def test_kv_grows_with_context():
    contexts = (1, 100, 2046, 2047, 2048, 5000, 1_000_000)
    figures = [by_name(context=context) for context in contexts]
    seen = [phases["attention"].kv_bytes for phases in figures]
    assert seen == sorted(set(seen))
    drafted = [phases["draft.attention"].kv_bytes for phases in figures]
    assert drafted[:4] == sorted(set(drafted[:4])) and set(drafted[3:]) == {drafted[3]}  # all its layers slide
    times = [sum(sum(phase.times(H200).values()) for phase in phases.values()) for phases in figures]
    assert times == sorted(set(times))


def test_ranks_share_a_kv_head():
    """Two heads: none of the ranks beyond the second has less."""
    kv = [by_name(TINY, None, tp=tp, experts=8)["attention"].kv_bytes for tp in (1, 2, 4, 8)]
    assert kv == [kv[0], kv[0] // 2, kv[0] // 2, kv[0] // 2]


# --------------------------------------------------------------------------------------------- launches, waits, transfers


def test_launches_and_grid_wide_points():
    """megakernel.md: one launch a layer, eight of the draft, 75 in all at most; about eight points a layer."""
    phases = by_name().values()
    launches = [sum(phase.launches for phase in phases if phase.in_draft == drafted) for drafted in (False, True)]
    assert launches == [62 + 3, 8]
    in_layers = sum(phase.syncs for phase in phases if not phase.in_draft and phase.runs == 62)
    assert in_layers == 62 * 8


def test_transfers_are_those_of_the_collectives():
    """README's table, of which a rank lacks 7/8. Sums of o_proj travel as columns of eight, then as one sum."""
    rows, sums = by_name(), by_name(moe_exchange="sums")
    assert rows["pre_expert_proj"].exchange_bytes == 62 * 131_072 * 7 // 8
    assert rows["gather_fp4"].exchange_bytes == (60 * 294_912 + 2 * 1_048_576) * 7 // 8
    assert rows["gather_bf16"].exchange_bytes == 62 * 1_048_576 * 7 // 8
    assert rows["post_expert_proj"].exchange_bytes == 62 * 262_144 * 7 // 8
    assert rows["o_proj"].exchange_bytes == 62 * (4_194_304 // 8 + 524_288) * 7 // 8
    assert by_name(tp=4)["o_proj"].exchange_bytes == 62 * (4_194_304 // 4 + 524_288) * 3 // 4  # still eight of each column
    assert rows["draft.attention_conv"].exchange_bytes == 5 * 131_072 * 7 // 8
    assert rows["draft.selector"].exchange_bytes == (15_360 + 15_360 + 2 * 122_880) * 7 // 8
    assert sums["gather_bf16"].exchange_bytes == 62 * 4_096 * 7 // 8
    assert sums["combine"].exchange_bytes == 62 * 131_072 * 7 // 8
    assert by_name(activations="bf16")["gather_fp4"].exchange_bytes == 62 * 1_048_576 * 7 // 8


def test_one_rank_waits_for_none():
    phases = by_name(tp=1).values()
    assert not any(phase.exchanges or phase.exchange_bytes for phase in phases)
    assert sum(phase.syncs for phase in phases if not phase.in_draft and phase.runs == 62) == 62 * 7  # o_proj sums once


def test_widths_that_ranks_do_not_divide_are_whole():
    config = dataclasses.replace(TINY, num_attention_heads=4, moe_intermediate_size=36, vocab_size=130)
    phases = by_name(config, None, tp=8, experts=8)
    assert phases["o_proj"].exchanges == phases["gather_fp4"].exchanges == phases["sampling"].exchanges == 0
    assert phases["pre_expert_proj"].exchanges == 5 and phases["dense_down"].exchanges == 2


def test_times():
    phase = by_name()["attention"]
    assert phase.times(H200)["kv"] == pytest.approx(phase.kv_bytes / 4.55e6)
    assert phase.times(H200)["launches"] == pytest.approx(62 * 0.55)
    gathered = by_name()["gather_bf16"]
    assert gathered.times(H200)["exchanges"] == pytest.approx(62 * 0.73 + gathered.exchange_bytes / 365e3)
    assert all(constant.source for device in DEVICES.values() for constant in vars(device).values())


# --------------------------------------------------------------------------------------------------------------- command


def test_json(capsys):
    figures = shown(capsys, "--full-size")
    assert set(figures) == {"conditions", "constants", "phases", "totals", "computed_tokens_per_second"}
    assert figures["conditions"]["experts"] == 49 and "published" in figures["conditions"]["experts_source"]
    fields = {
        "name",
        "group",
        "runs",
        "weight_bytes",
        "kv_bytes",
        "launches",
        "syncs",
        "exchanges",
        "exchange_bytes",
        "streams",
    }
    times = {f"{term}_us" for term in ("weights", "kv", "launches", "syncs", "exchanges", "floor", "in_series")}
    for phase in figures["phases"]:
        assert set(phase) == fields | times
    totals = figures["totals"]
    for name in {"weight_bytes", "kv_bytes", *times}:
        whole = sum(phase[name] for phase in figures["phases"])
        assert totals["step"][name] == pytest.approx(whole) == pytest.approx(totals["draft"][name] + totals["verify"][name])
    assert figures["computed_tokens_per_second"]["floor"] == pytest.approx(6.6e6 / totals["step"]["floor_us"])
    for constant in figures["constants"].values():
        assert set(constant) == {"value", "unit", "source"}


def test_constants_can_be_given(capsys):
    options = ("--bandwidth", 2.275, "--launch-us", 0, "--sync-us", 2, "--latency-us", 3, "--link", 100)
    plain, given = shown(capsys, "--full-size"), shown(capsys, "--full-size", *options)
    before, after = (figures["totals"]["step"] for figures in (plain, given))
    assert after["floor_us"] == pytest.approx(2 * before["floor_us"])
    assert (after["launches_us"], {constant["source"] for constant in given["constants"].values()}) == (0, {"given"})


def test_table(draft_checkpoint, capsys):
    assert roofline.main(["--checkpoint", str(draft_checkpoint), "--tp", "4", "--rows", "8", "--acceptance", "2.5"]) == 0
    out, errors = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("model checkpoint, draft of 2 layers, device h200, tp 4, rows 8, context 504, experts 7.")
    names = {line.split()[0] for line in lines if line}
    assert {"draft.fc", "attention", "dense_down", "expert_down", "sampling", "draft", "verify", "step", "bandwidth"} <= names
    assert "computed, not measured: " in out and "at 2.5 tokens a step (given)" in out
    assert max(map(len, lines)) <= 110 and errors == ""


def test_bundled_model(capsys):
    figures = shown(capsys)
    assert (figures["conditions"]["model"], figures["computed_tokens_per_second"]) == ("muse_tiny", None)
    assert figures["conditions"]["experts"] == pytest.approx(16 * (1 - 0.75**16))


def test_without_draft(capsys):
    figures = shown(capsys, "--full-size", "--rows", 1)
    assert figures["conditions"]["experts"] == pytest.approx(8) and figures["conditions"]["acceptance"] == 1
    assert not any(phase["name"].startswith("draft.") for phase in figures["phases"])


def test_story(capsys):
    """What was published is where it was said to be, remainders close every table, and a constant moves its own terms only."""
    figures = shown(capsys, "--story")
    tables = {name: {line["what"]: line for line in lines} for name, lines in figures["story"].items()}
    assert [tables[name]["published"]["step_ms"] for name in ("chain", "megakernel")] == [12.9, 5.9]
    for name in ("chain", "megakernel", "bought"):
        *terms, explained, published, remainder = figures["story"][name]
        for part in ("verify_ms", "draft_ms", "step_ms"):
            assert explained[part] == pytest.approx(sum(line[part] for line in terms))
            assert published[part] == pytest.approx(explained[part] + remainder[part])
            assert remainder[part] > 0  # no term is said to explain more than was seen
    gap = tables["chain"]["these terms"]["step_ms"] - tables["megakernel"]["these terms"]["step_ms"]
    assert tables["bought"]["these terms"]["step_ms"] == pytest.approx(gap)
    floor = tables["megakernel"]["weights and KV, each byte once"]
    assert floor["verify_ms"] == pytest.approx(2.13, abs=0.005)  # as published
    assert figures["totals"]["verify"]["floor_us"] == pytest.approx(1e3 * floor["verify_ms"])

    faster = shown(capsys, "--story", "--bandwidth", 16)["story"]
    moved = {line["what"] for line, other in zip(faster["chain"], figures["story"]["chain"], strict=True) if line != other}
    of_bytes = {"weights and KV, each byte once", "whole experts on ranks", "draft's fc, convs, selector on all ranks"}
    assert moved == of_bytes | {"these terms", "remainder"}

    assert roofline.main(["--story"]) == 0
    out = capsys.readouterr().out
    assert all(line["what"] in out for table in figures["story"].values() for line in table)


@pytest.mark.parametrize("arguments", [["--full-size"], ["--rows", "1", "--tp", "1"], ["--story"]])
def test_png(arguments, tmp_path):
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    assert roofline.main([*arguments, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_png_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert roofline.main(["--plot", str(tmp_path / "a.png")]) == 2
    expected = "roofline.py: --plot: matplotlib is not installed: pip install -e '.[plot]'\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "33"], "--rows: '33': expected an integer from 1 to 32"),
        (["--tp", "3"], "--tp: invalid choice"),
        (["--context", "0"], "--context: '0': expected an integer above 0"),
        (["--experts", "nan"], "--experts: 'nan': expected a number above 0, at most 1e9"),
        (["--bandwidth", "0"], "--bandwidth: '0': expected a number above 0"),
        (["--launch-us", "-1"], "--launch-us: '-1': expected a number of at least 0"),
        (["--link", "inf"], "--link: 'inf': expected a number above 0"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--plot", "x.nosuch"], "--plot: 'x.nosuch': expected a name that ends in .png, .svg or .pdf"),
        (["--plot", "png"], "--plot: 'png': expected a name that ends in .png"),
        (["--full-size", "--story"], "--story: not allowed with argument --full-size"),
        (["--story", "--tp", "4"], "--tp: not allowed with --story, which has the published conditions"),
        (["--story", "--moe-exchange", "sums"], "--moe-exchange: not allowed with --story"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        roofline.main(arguments)
    assert error.value.code == 2
    out, errors = capsys.readouterr()
    assert message in errors and errors.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--rows 16: there is no draft, so a step has one row"),
        (["--rows", "1", "--context", "512"], "--context 512: at most 511, which leaves room for the rows of the step"),
        (["--rows", "1", "--experts", "3"], "--experts 3: expected 2 (one row's) to 2"),
        (["--rows", "1", "--acceptance", "2"], "--acceptance 2: expected 1 to 1 tokens of a step of 1 rows"),
        (["--rows", "1", "--activations", "nvfp4"], "--activations nvfp4: this checkpoint has no NVFP4 experts"),
        (["--plot", "missing/a.png"], "--plot missing/a.png: cannot be written: No such file or directory"),
        (["--checkpoint", "missing"], "missing"),
    ],
)
def test_settings_that_do_not_fit(checkpoint, arguments, message, capsys):
    assert roofline.main(["--checkpoint", str(checkpoint), *arguments]) == 2
    out, errors = capsys.readouterr()
    assert errors.startswith("roofline.py: ") and message in errors and errors.count("\n") == 1
    assert out == ""
