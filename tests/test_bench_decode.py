"""One rank without the others, and the benchmark that times it."""

import dataclasses
import functools
import gc
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ffi.verify
from ffi import library
from muse_jax import backends, decoding
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.sharding import ShardingConfig, make_mesh, replicated

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import bench_decode
import loopback_megakernel
import random_models
from profiler_trace import Kernel

ROWS, TP = 16, 8
without_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
with_library = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_rank_alone_does_the_work_of_one_of_eight(put_on_mesh, activations):
    """On a mesh whose ranks all hold the same, every rank's data are its own: logits, keys and values have the same bits."""
    args = bench_decode.parse_arguments(["--context", "40", "--layers", "3", "--activations", activations])
    config, _ = bench_decode.shape(args)
    alone = dataclasses.replace(random_models.rank_zero(config, None, TP, "bfloat16", ROWS, activations), num_rows=ROWS)

    def repeated(spec) -> np.ndarray:
        part = np.asarray(at(alone.params, spec.path))
        if spec.path[-1] == "post_expert_norm":  # whole everywhere, and each rank reads its part of it
            part = np.tile(part[: len(part) // TP], TP)
        return part if spec.shard_axis is None else np.concatenate([part] * spec.num_parts, spec.shard_axis)

    everything = parameter_tree(config, repeated)
    own = parameter_tree(config, lambda spec: at(everything, spec.path)[spec.rank_part(TP, 0)])
    alone = dataclasses.replace(alone, params=jax.tree.map(jnp.asarray, own))

    mesh, how = make_mesh(TP), ShardingConfig(TP)
    module = MuseSpark(config, dtype=jnp.dtype(jnp.bfloat16), activations=activations, sharding=how)
    shared = decoding.Model.create(module, put_on_mesh(config, everything, mesh, how), mesh=mesh)
    shared = dataclasses.replace(shared, num_rows=ROWS)
    nodes, routing = bench_decode.make_nodes(alone, args), bench_decode.make_routing(config, args)

    def run(model, state, nodes, routing):
        logits, rows, _ = decoding.verify(model, state, nodes, routing)
        return jnp.concatenate(logits, axis=-1), rows

    state = bench_decode.make_state(alone, args)
    expected = jax.jit(run)(alone, state, nodes, routing)
    heads = config.num_key_value_heads

    def spread(cache):
        return [tuple(jnp.concatenate([x] * heads, axis=1) for x in pair) for pair in cache.layers]

    whole = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=spread(state.cache)))
    specs = decoding._state_specs(shared, whole)
    rows_spec = [(decoding.sharding.cache_spec(config),) * 2] * config.num_hidden_layers
    in_specs = (shared.specs, specs, decoding.EVERYWHERE, decoding.EVERYWHERE)
    on_mesh = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=(shared.logit_spec, rows_spec), check_vma=False)
    logits, rows = jax.jit(on_mesh)(shared, *jax.device_put((whole, nodes, routing), replicated(mesh)))
    assert np.std(expected[0]) > 0.1
    for rank in range(TP):
        part = np.split(np.asarray(logits), TP, axis=-1)[rank]
        np.testing.assert_array_equal(part, expected[0])
        for ours, theirs in zip(jax.tree.leaves(rows), jax.tree.leaves(expected[1]), strict=True):
            np.testing.assert_array_equal(np.split(np.asarray(ours), TP, axis=1)[rank], theirs)


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


@pytest.mark.parametrize("routing", [8, 11, 16])
def test_routing_reads_so_many_experts(routing):
    args = bench_decode.parse_arguments(["--routing", str(routing)])
    config, _ = bench_decode.shape(args)
    for layer in bench_decode.make_routing(config, args):
        if layer is not None:
            idx, weights = map(np.asarray, layer)
            assert len(np.unique(idx)) == routing
            assert all(len(set(row)) == config.num_experts_per_tok for row in idx.tolist())
            np.testing.assert_allclose(weights.sum(axis=1), config.routed_scaling_factor, rtol=1e-6)


def test_bytes_of_the_released_model():
    """muse_spark.md section 6: 17.0 GB for a verify step of one rank at 49 experts."""
    args = bench_decode.parse_arguments(["--shape", "full", "--draft"])
    config, draft = bench_decode.shape(args)
    found = bench_decode.step_bytes(config, draft, args)
    assert found["verify"] / 1e9 == pytest.approx(17.0, abs=0.1)
    one_less = bench_decode.step_bytes(config, draft, bench_decode.parse_arguments(["--shape", "full", "--routing", "48"]))
    # 3.54 MB of an NVFP4 expert in 60 layers, 12.6 MB of a bf16 one in two.
    assert (found["verify"] - one_less["verify"]) / 1e6 == pytest.approx(60 * 3.54 + 2 * 12.58, rel=0.01)


@with_library
@without_gpu
def test_a_toy_runs(capsys):
    arguments = ["--steps", "2", "--context", "300", "--layers", "2", "--backend", "xla,megakernel", "--json"]
    assert bench_decode.main(arguments) == 0
    out, errors = capsys.readouterr()
    *lines, last = out.splitlines()
    figures = json.loads(last)
    xla, result = figures["results"]
    assert figures["collectives"] == "loopback"
    for each in (xla, result):
        assert each["verdict"]["good"] and each["verdict"]["differences"]["logits"] > 0
        assert each["verify"]["ms"] > 0 and each["verify"]["launches"] is None
    assert result["verify"]["bytes"] == figures["bytes"]["verify"] < result["packed_bytes"]
    assert result["implementation"] == "Host reference" and result["speed_up"]["over"] == "xla"
    assert sum(line.startswith("megakernel   is the Host reference, layers in a launch: 1;") for line in lines) == 1
    assert "megakernel: verify: megakernel (Host reference)" in errors.splitlines()


def test_a_bad_verdict_ends_it(capsys, monkeypatch):
    monkeypatch.setattr(bench_decode, "VERDICT_TOLERANCE", 1e-6)
    assert bench_decode.main(["--layers", "1", "--context", "20", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert not result["verdict"]["good"]
    assert "verify" not in result


@pytest.fixture
def second_backend(monkeypatch):
    """A backend "pallas" whose models are those of "xla", but for what a function does with them. Returns what was asked for:
    backends, each with the bytes of all arrays that were there before."""
    asked, rank_zero = [], random_models.rank_zero

    def use(change=lambda model: model):
        def build(*args, backend="xla", abstract=False):
            if abstract:  # for the plan
                return rank_zero(*args, abstract=True)
            asked.append((backend, sum(x.nbytes for x in jax.live_arrays())))
            model = rank_zero(*args)
            cycle = [model]
            cycle.append(cycle)
            return model if backend == "xla" else change(model)

        monkeypatch.setattr(backends, "BACKENDS", ("xla", "pallas"))
        monkeypatch.setattr(random_models, "rank_zero", build)
        return asked

    return use


TOY = ["--steps", "2", "--context", "40", "--layers", "1"]


def test_two_backends(second_backend, capsys):
    asked = second_backend()
    gc.disable()  # what is collected by chance is of no use
    try:
        assert bench_decode.main([*TOY, "--backend", "xla,pallas", "--json"]) == 0
    finally:
        gc.enable()
    *lines, last = capsys.readouterr().out.splitlines()
    first, second = json.loads(last)["results"]
    assert (first["backend"], second["backend"]) == ("xla", "pallas")
    assert "speed_up" not in first
    ratio = first["verify"]["ms"] / second["verify"]["ms"]
    assert second["speed_up"] == {"over": "xla", "verify": pytest.approx(ratio)}
    (line,) = (line for line in lines if "as fast as" in line)
    assert line.startswith("pallas") and f", {ratio:.2f} times as fast as xla" in line
    # The reference, then each for its verdict and for its times; what one had is gone when the next is built.
    assert [backend for backend, _ in asked] == ["xla", "xla", "xla", "pallas", "pallas"]
    before = asked[0][1]
    assert all(nbytes < before + 100_000 for _, nbytes in asked), asked


def test_verdict_is_against_xla(second_backend, capsys):
    """Weights of its own would hide that a backend has packed them wrongly."""

    def packed_wrongly(model):
        params = model.params | {"lm_head": jax.tree.map(lambda x: -x, model.params["lm_head"])}
        return dataclasses.replace(model, params=params)

    second_backend(packed_wrongly)
    assert bench_decode.main([*TOY, "--backend", "xla", "pallas", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert first["verdict"]["good"] and not second["verdict"]["good"]
    assert second["verdict"]["differences"]["logits"] > 1 > 0.1 > second["verdict"]["differences"]["keys and values"]
    assert "verify" in first and not {"verify", "speed_up"} & set(second)


def test_it_is_said_which_kernels_ran(capsys):
    """The toy's rows and heads are too small for any: its times are those of XLA under another name."""
    assert bench_decode.main([*TOY, "--backend", "pallas", "--json"]) == 0
    out, errors = capsys.readouterr()
    (result,) = json.loads(out.splitlines()[-1])["results"]
    assert {"blend_norm", "decode_attention", "dense_gemm"} <= result["paths"].keys()
    for op, paths in result["paths"].items():
        assert all(path.startswith("xla (") for path in paths)
        assert errors.splitlines().count(f"pallas: {op}: {', '.join(paths)}") == 1


def test_a_backend_that_does_not_do_it(second_backend, capsys):
    def refuse(model):
        raise NotImplementedError("heads of 16, expected 128")

    second_backend(refuse)
    assert bench_decode.main([*TOY, "--backend", "xla,pallas"]) == 2
    assert capsys.readouterr().err.endswith("bench_decode.py: --backend pallas: heads of 16, expected 128\n")


@with_library
@without_gpu
def test_a_call_that_gives_up_is_said(monkeypatch, capsys):
    verify, status = loopback_megakernel.verify, [1, 0, 3, 5, 7, -1, 0, 0]
    said = ffi.verify.problem(status)

    def give_up(*args, **operands):
        return dataclasses.replace(verify(*args, **operands), status=jnp.asarray(status, jnp.int32))

    def judge(config, args, backend, expected):
        model = bench_decode.build(config, None, args, backend)
        step = bench_decode.make_state(model, args), bench_decode.make_nodes(model, args)
        _, problem = bench_decode.outcome(model, *step, bench_decode.routing_for(backend, config, args))
        assert problem == said
        return {"good": True, "differences": {}}

    monkeypatch.setattr(loopback_megakernel, "verify", give_up)
    monkeypatch.setattr(bench_decode, "reference", lambda *_: None)
    monkeypatch.setattr(bench_decode, "judge", judge)
    assert bench_decode.main([*TOY, "--backend", "megakernel", "--json"]) == 1
    out, errors = capsys.readouterr()
    (result,) = json.loads(out.splitlines()[-1])["results"]
    assert result["failure"] == said and f"megakernel: {said}" in errors.splitlines() and "verify" not in result


@with_library
@without_gpu
def test_loopback_of_the_kernel_is_that_of_the_others(monkeypatch):
    """Its own source, on the emulated device, beside the Host reference, whose loopback is that of the other backends: with
    several tiles of o_proj a rank, the last of them alone."""
    arguments = ["--layers", "1", "--context", "40", "--rows", "2", "--routing", "4", "--backend", "megakernel"]
    args = bench_decode.parse_arguments(arguments)
    config = dataclasses.replace(bench_decode.shape(args)[0], hidden_size=64 * (TP + 2))
    bench_decode.megakernel(config, args).prepare(config, "bf16")
    model = bench_decode.build(config, None, args, "megakernel")
    step = bench_decode.make_state(model, args), bench_decode.make_nodes(model, args)
    routing = bench_decode.routing_for("megakernel", config, args)
    (expected, _), problem = bench_decode.outcome(model, *step, routing)
    assert problem is None
    emulated = functools.partial(loopback_megakernel.verify, emulated=True)
    monkeypatch.setattr(loopback_megakernel, "verify", emulated)
    (logits, _), problem = bench_decode.outcome(model, *step, routing)
    assert problem is None
    assert 0 < np.sqrt(np.mean(np.square(logits - expected)) / np.mean(np.square(expected))) < 0.02


@pytest.mark.parametrize("draft", [False, True])
def test_megakernel_lowers_for_cuda_at_full_size(draft):
    """All 62 layers; nothing of the model but the packed layers goes into the call."""
    args = bench_decode.parse_arguments(["--shape", "full", "--backend", "megakernel", *(["--draft"] if draft else [])])
    config, draft_config = bench_decode.shape(args)
    how = bench_decode.megakernel(config, args, "gpu")
    model = bench_decode.abstract_model(config, draft_config, args, how)
    state = jax.eval_shape(functools.partial(bench_decode.make_state, args=args), model)
    routing = jax.eval_shape(lambda: bench_decode.routing_for("megakernel", config, args))
    nodes = [] if draft else [jax.eval_shape(functools.partial(bench_decode.make_nodes, args=args), model)]
    step = jax.jit(bench_decode.step if draft else bench_decode.verify, donate_argnums=1)
    traced = step.trace(model, state, *nodes, routing)
    _, out = traced.out_info
    assert out.status.shape == (8,) and how.implementation == "CUDA kernel"
    (call,) = re.findall(r"custom_call @muse_verify\(.*", traced.lower(lowering_platforms=("cuda",)).as_text())
    sizes = re.search(r": \((.*)\) -> ", call).group(1).split(", ")
    _, *packed = (int(re.search(r"x(\d+)xui8", size).group(1)) for size in sizes if size.endswith("xui8>"))  # after the head
    assert "loopback = 1 : i64" in call and "layers_per_launch = 1 : i64" in call and "ranks = 8 : i64" in call
    assert {"tensor<62x16x8xi32>", "tensor<62x16x8xf32>", "tensor<1x25256x8192xbf16>"} <= set(sizes)
    assert sum(size.startswith("tensor<1x2x") and size.endswith("x64xbf16>") for size in sizes) == 2 * 62
    assert packed == [packed[0], *[packed[1]] * 60, packed[0]] and sum(packed) / 1e9 == pytest.approx(65.8, abs=0.1)


def test_memory_at_full_size(capsys):
    """README: 66.6 GB of weights. Packed layers take their place one by one, and need no more than a layer besides."""
    assert bench_decode.main(["--shape", "full", "--draft", "--backend", "xla,megakernel", "--plan", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    natural, packed = json.loads(last)["plans"]
    assert natural["weights"] / 1e9 == pytest.approx(66.6, abs=0.05)
    lm_head = 202_048 // 8 * 8192 * 2  # there twice: the draft reads it as it is
    assert packed["weights"] - natural["weights"] == pytest.approx(lm_head, abs=1e8)
    assert packed["weights"] < packed["peak"] < packed["weights"] + 8e9
    assert natural["peak"] == natural["weights"] + natural["draft"] + natural["caches"]
    assert [line.split()[:2] for line in lines] == [["xla", "memory"], ["megakernel", "memory"]]


def test_what_does_not_fit_is_refused_before_it_is_tried(monkeypatch, capsys):
    small = type("Device", (), {"platform": "gpu", "device_kind": "a GPU", "memory_stats": lambda _: {"bytes_limit": 60e9}})
    monkeypatch.setattr(jax, "devices", lambda: [small()])
    monkeypatch.setattr(bench_decode, "streaming_bandwidth", lambda: pytest.fail("something was run"))
    assert bench_decode.main(["--shape", "full", "--backend", "xla"]) == 2
    message = "bench_decode.py: --backend xla needs 66.6 GB, JAX may take 60.0 GB of this device: fewer --layers need less"
    assert message in capsys.readouterr().err


def test_what_a_gpu_did(monkeypatch):
    """Two kernels that overlap, a gap, and one more: all add up, the gap is what none of them fills."""
    kernels = [Kernel(1e6, 4e6), Kernel(2e6, 5e6), Kernel(9e6, 1e6)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench_decode, "run_kernels", lambda work: kernels)
    expected = {"launches": 3, "device_ms": 10.0, "span_ms": 9.0, "gaps_ms": 2.0}
    assert bench_decode.on_device(lambda: None) == pytest.approx(expected)


def figures_of(results) -> dict:
    conditions = {"shape": "full", "tp": 8, "rank": 0, "layers": 62, "rows": 16, "context": 2048, "routing": 49}
    conditions |= {"activations": "bf16", "device": "a GPU"}
    return conditions | {"bandwidth_bytes_per_s": 4e12, "bytes": {"verify": 16e9, "draft": 2e9}, "results": results}


def result_of(backend: str, verify: float, draft: float, **rest) -> dict:
    whole = {"ms": verify + draft, "bandwidth_share": 0.5, "launches": 1234, "gaps_ms": 0.25}
    return {"backend": backend, "verify": whole | {"ms": verify}, "step": whole, "draft_ms": draft, "paths": {}, **rest}


def test_chart():
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    paths = {"blend_norm": ["pallas", "xla (why)"], "combine": ["pallas"], "route": ["xla (why)"]}
    faster = result_of("pallas", 6, 1.5, speed_up={"over": "xla", "verify": 1.5, "step": 1.6}, paths=paths)
    figure = bench_decode.draw(figures_of([result_of("xla", 9, 3), faster, {"backend": "other"}]))
    (axes,) = figure.axes
    bars = sorted((round(bar.get_y() + 0.3, 3), bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert bars == [(0, 0, 9), (0, 9, 3), (1, 0, 6), (1, 6, 1.5)]
    (line,) = axes.lines
    assert list(line.get_xdata()) == [4.5, 4.5]  # 18 GB at 4 TB/s
    assert [text.get_text() for text in axes.texts] == ["12 ms", "7.5 ms, 1.60 times as fast"]
    labels = [text.get_text().splitlines() for text in axes.get_yticklabels()]
    assert labels[0] == ["xla", "50.0% of the bandwidth", "1,234 launches, gaps 0.25 ms"]
    assert labels[1][1] == "kernels of 2 of 3 operations"
    assert labels[2] == ["other", "verdict bad"]
    assert "62" in figure.get_suptitle() and "a GPU" in figure.get_suptitle()


@pytest.mark.parametrize("name", ["step.png", "step.SVG", "step.pdf"])
def test_chart_of_nothing_measured(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="--plot draws with matplotlib")
    monkeypatch.setattr(bench_decode, "bench", lambda args: figures_of([{"backend": "xla", "verdict": {"good": False}}]))
    assert bench_decode.main(["--plot", str(tmp_path / name)]) == 1
    assert (tmp_path / name).read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_step_commits_more_than_its_rows():
    found = [bench_decode.parse_arguments(["--rows", rows]).acceptance for rows in ("1", "6", "7", "16")]
    assert found == [1, 6, bench_decode.PUBLISHED_ACCEPTANCE, bench_decode.PUBLISHED_ACCEPTANCE]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "step.nosuch"], "--plot: 'step.nosuch': expected a name that ends in .png, .svg or .pdf"),
        (["--backend", "cuda"], "--backend: 'cuda': expected one or several of xla"),
        (["--backend", "xla,cuda"], "--backend: 'cuda': expected one or several of xla"),
        (["--backend", ","], "--backend: '': expected one or several of xla"),
        (["--backend", "xla", "xla"], "--backend xla,xla: each of them once"),
        (["--rows", "33"], "--rows: '33': expected an integer from 1 to 32"),
        (["--steps", "10001"], "--steps: '10001': expected an integer from 1 to 10000"),
        (["--memory-fraction", "1.5"], "--memory-fraction: '1.5': expected a number above 0, at most 1"),
        (["--memory-fraction", "x"], "--memory-fraction: 'x': expected a number above 0, at most 1"),
        (["--layers-per-launch", "0"], "--layers-per-launch: '0': expected an integer above 0"),
        (["--acceptance", "0.5"], "--acceptance 0.5: expected 1 to 16 tokens of a step of 16 rows"),
        (["--acceptance", "nan"], "--acceptance nan: expected 1 to 16 tokens"),
        (["--acceptance", "inf"], "--acceptance inf: expected 1 to 16 tokens"),
        (["--rows", "4", "--acceptance", "5"], "--acceptance 5: expected 1 to 4 tokens of a step of 4 rows"),
    ],
)
def test_arguments_that_do_not_parse(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        bench_decode.main(arguments)
    errors = capsys.readouterr().err
    assert re.sub("argument ", "", errors).startswith(f"bench_decode.py: {message}") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "missing/a.png"], "--plot missing/a.png: cannot be written: No such file or directory"),
        (["--routing", "3"], "--routing 3: 16 rows of 4 experts each can choose 4 to 16 distinct ones"),
        (["--routing", "17"], "--routing 17: "),
        (["--layers", "99"], "--layers 99: the tiny shape has"),
        (["--context", "4081"], "--context 4081: at most 4080, which leaves room for the rows of the step"),
        (["--context", "99999999999"], "--context 99999999999: at most 4080, "),
        (["--draft"], "--draft: the tiny shape has none"),
        (["--backend", "megakernel", "--rows", "17"], "--backend megakernel: steps of 17 rows (tree_size): at most 16"),
        (["--backend", "xla,megakernel", "--dtype", "float32"], "--backend megakernel: dtype = 'float32': it takes 'bfloat16'"),
        pytest.param(["--shape", "full"], "--shape full needs an NVIDIA GPU, found cpu", marks=without_gpu),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert bench_decode.main(arguments) == 2
    assert f"bench_decode.py: {message}" in capsys.readouterr().err
