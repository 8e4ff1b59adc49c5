"""scripts/show_collectives.py: what its rows say of a program, its tables, its arguments, and the steps that it builds."""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import muse_jax
from muse_jax import hlo
from muse_jax.sharding import ShardingConfig, make_mesh

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import show_collectives
from show_collectives import CARRIES, Row


def shown(capsys, *arguments) -> dict:
    assert show_collectives.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def total(figures: dict) -> int:
    return sum(row["payload_bytes"] * row["runs"] for row in figures["collectives"])


# ------------------------------------------------------------------------------------------------------ rows and tables


@jax.jit
def layer(x):
    with jax.named_scope("attention.o_proj"):
        x = x + lax.all_gather(x[:, :8], "tp", axis=1, tiled=True)
    with jax.named_scope("moe"), jax.named_scope("moe.hidden"):
        return x + lax.psum(lax.psum(x, "tp") * 2, "tp")


def step(x):
    with jax.named_scope("embed"):
        x = lax.psum(x, "tp")
    for _ in range(3):
        x = layer(x)
    with jax.named_scope("sampling"):
        x = lax.cond(x[0, 0] > 0, lambda: lax.pmax(x, "tp"), lambda: x)
    return lax.psum(x, "tp")


@pytest.fixture(scope="module")
def lowered():
    sharded = jax.shard_map(step, mesh=make_mesh(8), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(sharded).lower(jax.ShapeDtypeStruct((4, 64), jnp.bfloat16))


def test_rows(lowered):
    """Layers of a kind are counted, whatever stands once is once, and dtypes are those of the source."""
    rows = show_collectives.read_rows(hlo.parse(lowered.as_text("hlo", debug_info=True)))
    reduced = "bf16[4,64]", 512
    assert {row.place: row for row in rows} == {
        "attention.o_proj": Row("attention.o_proj", "eight partial sums", "all-gather", *reduced, 3, 3, False),
        "moe.hidden": Row("moe.hidden", "hidden rows of the experts", "all-reduce", *reduced, 6, 3, False),
        "embed": Row("embed", "rows of the embedding", "all-reduce", *reduced, 1, 1, False),
        "sampling": Row("sampling", CARRIES["sampling"], "all-reduce", *reduced, 1, 1, True),
        "(no scope)": Row("(no scope)", "", "all-reduce", *reduced, 1, 1, False),
    }
    assert [row.calls for row in rows] == [3, 3, 1, 1, 1]


def test_rows_of_the_compiled_program(lowered):
    rows = show_collectives.read_rows(hlo.parse(lowered.compile().as_text()))
    runs = {row.place: (row.runs, row.calls, row.may_vary) for row in rows}
    assert runs["attention.o_proj"] == (3, 1, False) and runs["moe.hidden"] == (6, 1, False)
    assert runs["sampling"] == (1, 1, True)


ROWS = [
    Row("moe.norm", "sums of squares", "all-gather", "f32[8,16]", 512, 60, 60, False),
    Row("sampling", "", "all-reduce", "2 x u32[4096]", 32_768, 2, 1, True),
]


def test_table(capsys):
    show_collectives.print_table(ROWS, markdown=False)
    assert capsys.readouterr().out == (
        "place     carries          collective  array           bytes    runs\n"
        "moe.norm  sums of squares  all-gather  f32[8,16]         512  1 x 60\n"
        "sampling                   all-reduce  2 x u32[4096]  32,768  2 x 1*\n"
        "step                                                  96,256      62\n"
    )


def test_markdown(capsys):
    show_collectives.print_table(ROWS, markdown=True)
    assert capsys.readouterr().out == (
        "| place | carries | collective | array | bytes | runs |\n"
        "|---|---|---|---|---:|---:|\n"
        "| moe.norm | sums of squares | all-gather | f32[8,16] | 512 | 1 x 60 |\n"
        "| sampling |  | all-reduce | 2 x u32[4096] | 32,768 | 2 x 1* |\n"
        "| step |  |  |  | 96,256 | 62 |\n"
    )


@pytest.mark.parametrize(
    ("scopes", "place"),
    [
        ((), "(no scope)"),
        (("embed",), "embed"),
        (("moe", "moe.hidden"), "moe.hidden"),
        (("draft", "mlp.down_proj"), "draft.mlp.down_proj"),
        (("draft.layer", "o_proj"), "draft.o_proj"),
        (("draft", "draft.fc"), "draft.fc"),
        (("draft",), "draft"),
        (("drafty", "fc"), "fc"),
    ],
)
def test_places(scopes, place):
    assert show_collectives.place_of(scopes) == place


def test_arrays_in_a_few_words():
    assert show_collectives.describe(["f32[2]"]) == "f32[2]"
    assert show_collectives.describe(["f32[2]"] * 8) == "8 x f32[2]"
    assert show_collectives.describe(["f32[2]", "u8[4]"]) == "f32[2] + u8[4]"


# ---------------------------------------------------------------------------------------------------------------- steps


def test_shapes_are_those_of_a_loaded_model(draft_checkpoint):
    """With more devices than KV heads, which some of them share."""
    mesh = make_mesh(8)
    muse = muse_jax.load(draft_checkpoint, mesh=mesh)
    loaded, _ = muse.prefill([[1, 2, 3]], max_new_tokens=4, temperature=1.0)
    configs = show_collectives.read_configs(draft_checkpoint)
    model, state = show_collectives.abstract_step(*configs, mesh, ShardingConfig(8), jnp.float32, 16)

    def described(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.shard_shape(x.shape)), tree)

    for name in ("params", "draft_params"):
        assert described(getattr(model, name)) == described(getattr(muse.model, name))
    assert jax.tree.structure(state) == jax.tree.structure(loaded)
    sliding = [cache.layers[0] for cache in (state.cache, loaded.cache)]  # of a size that does not depend on `slots`
    assert described(sliding[0]) == described(sliding[1])


def test_every_collective_has_a_place(draft_checkpoint, capsys):
    for setting in (("--moe-exchange", "rows"), ("--moe-sharding", "expert"), ("--moe-sharding", "n", "--devices", 2)):
        figures = shown(capsys, "--checkpoint", draft_checkpoint, *setting)
        places = {row["place"] for row in figures["collectives"]}
        assert places <= set(CARRIES)
        assert {"embed", "attention.o_proj", "mlp.down_proj"} < places


def test_settings_change_what_travels(draft_checkpoint, capsys):
    settings = {
        "n": (),
        "rows": ("--moe-exchange", "rows"),
        "replicated": ("--moe-sharding", "replicated"),
        "bf16": ("--dtype", "bfloat16"),
        "no draft": ("--rows", 1),
        "tree of 8": ("--rows", 8),
        "one device": ("--devices", 1, "--rows", 1),
    }
    figures = {name: shown(capsys, "--checkpoint", draft_checkpoint, *arguments) for name, arguments in settings.items()}
    sizes = {name: total(each) for name, each in figures.items()}
    assert sizes["rows"] > sizes["n"] > sizes["replicated"] > sizes["no draft"] > 0 == sizes["one device"]
    assert sizes["bf16"] < sizes["n"] > sizes["tree of 8"] > sizes["no draft"]
    assert (figures["n"]["devices"], figures["n"]["rows"], figures["n"]["dtype"]) == (8, 16, "float32")
    assert (figures["no draft"]["draft"], figures["replicated"]["moe_exchange"]) == ("none", None)


def test_xla_sends_what_the_source_says(draft_checkpoint, capsys):
    """In float32, which no backend widens; it may join collectives."""
    arguments = ("--checkpoint", draft_checkpoint, "--rows", 1)
    source, compiled = (shown(capsys, *arguments, *flags) for flags in ((), ("--compiled",)))
    assert total(source) == total(compiled)
    counts = [sum(row["runs"] for row in figures["collectives"]) for figures in (source, compiled)]
    assert counts[0] >= counts[1] > 0
    assert (source["program"], compiled["program"]) == ("before XLA", f"compiled for {jax.devices()[0].platform}")


def test_nothing_else_travels(draft_checkpoint, capsys):
    """In the compiled program: nothing without a place, and nothing as wide as the vocabulary, a part of it or a matrix."""
    figures = shown(capsys, "--checkpoint", draft_checkpoint, "--compiled")
    assert {row["place"] for row in figures["collectives"]} <= set(CARRIES)
    vocab_size = show_collectives.read_configs(draft_checkpoint)[0].vocab_size
    widths = {int(n) for row in figures["collectives"] for n in re.findall(r"\d+", row["array"].split("[", 1)[1])}
    assert not widths & {vocab_size, vocab_size // 8}


def test_the_readme_has_the_table(capsys):
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    assert show_collectives.main(["--full-size", "--activations", "nvfp4", "--markdown"]) == 0
    table = capsys.readouterr().out.split("\n", 1)[1].strip()
    assert table in readme
    assert (
        max(int(row.split("|")[5].replace(",", "")) for row in table.splitlines()[2:-1]) < 16 * 202_048 * 4 / 3
    )  # logits: 13 MB


def test_full_size(capsys):
    """62 layers, all of experts, 16 rows of 8192 columns; the released NVFP4 checkpoint has 60 layers of NVFP4 experts."""
    figures = shown(capsys, "--full-size", "--activations", "nvfp4")
    rows = {(row["place"], row["kind"], row["array"]): row for row in figures["collectives"]}
    row = rows["attention.o_proj", "all-gather", "f32[8,1,16,8192]"]
    assert (row["payload_bytes"], row["runs"], row["calls"]) == (8 * 16 * 8192 * 4, 62, 62)
    hidden = [row for row in figures["collectives"] if row["place"] == "moe.hidden"]
    assert sorted((row["array"][: row["array"].index("[")], row["calls"]) for row in hidden) == [
        ("bf16", 2),
        ("f32", 60),  # the largest values, for the scales
        ("u8", 60),
    ]


def test_table_of_a_model(draft_checkpoint, capsys):
    assert show_collectives.main(["--checkpoint", str(draft_checkpoint), "--devices", "4", "--rows", "1"]) == 0
    out, errors = capsys.readouterr()
    assert out.startswith("model checkpoint, draft none, devices 4, rows 1, dtype float32, moe sharding n, moe exchange sums, ")
    assert out.splitlines()[1].split() == ["place", "carries", "collective", "array", "bytes", "runs"]
    assert errors == ""


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "33"], "--rows: '33': expected an integer from 1 to 32"),
        (["--devices", "0"], "--devices: '0': expected an integer above 0"),
        (["--moe-sharding", "k"], "--moe-sharding: invalid choice: 'k'"),
        (["--full-size", "--checkpoint", "."], "--checkpoint: not allowed with argument --full-size"),
        (["--json", "--markdown"], "--markdown: not allowed with argument --json"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        show_collectives.main(arguments)
    assert error.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--rows 16: there is no draft, so a step has one row"),
        (["--devices", "3", "--rows", "1"], "devices = 3: allowed are 1, 2, 4, 8"),
        (["--activations", "nvfp4"], "--activations nvfp4: this checkpoint has no NVFP4 experts"),
        (["--checkpoint", "missing"], "missing"),
    ],
)
def test_settings_that_do_not_fit(checkpoint, arguments, message, capsys):
    assert show_collectives.main(["--checkpoint", str(checkpoint), *arguments]) == 2
    out, errors = capsys.readouterr()
    assert errors.startswith("show_collectives.py: ") and message in errors and errors.count("\n") == 1
    assert out == ""
