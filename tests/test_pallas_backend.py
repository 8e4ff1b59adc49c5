"""`backend="pallas"`: where it serves, how it keeps weights, which kernels a step uses, and a step beside that of `xla`."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "scripts")]

import pallas_steps
from pallas_steps import BF16, CONFIG, OF_EIGHT, Case, make_model
from show_collectives import full_size

import muse_jax
from muse_jax import backends, pallas_backend, sharding
from muse_jax.backends import XLA, resolve_backend
from muse_jax.decoding import Model
from muse_jax.draft import DFlash2
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.numerics import HF, SERVING
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.ops import GateFactors, unpacked
from muse_jax.pallas_backend import Pallas
from muse_jax.sharding import ShardingConfig
from pallas_kernels.nvfp4_gemm.packing import PackedWeights

ROOT = Path(__file__).resolve().parent.parent
MUSE_TINY = ROOT / "checkpoints" / "muse_tiny"
interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 cannot interpret all kernels")

# What runs where every kernel takes the shapes.
LAST = "xla (after the last layer: the final norm is another)"
TARGET = {
    "blend_norm": ["pallas", LAST],
    "combine": ["pallas"],
    "decode_attention": ["pallas"],
    "dense_gemm": ["pallas"],
    "expert_gemm": ["pallas"],
    "nvfp4_gemm": ["pallas"],
    "out_gate": ["pallas"],
    "qk_rope": ["pallas"],
    "route": ["pallas"],
}
DRAFT = {name: ["pallas"] for name in ("decode_attention", "dense_gemm", "grouped_conv", "lattice")}
QUANTIZED = {"quantize_rows": ["pallas"]}
NARROW = "xla (matrix 0 has 32 rows: at least 64, and a multiple of 32, are possible)"  # a rank's part of a small matrix
SOME_NARROW = {"dense_gemm": ["pallas", NARROW]}


# ------------------------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def gpu(monkeypatch):
    """Makes believe that there is a GPU of a compute capability."""

    def gpu(capability: str) -> None:
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(backends.jax, "local_devices", lambda backend: [device] if backend == "gpu" else [])

    return gpu


@pytest.mark.parametrize("name", ["cuda", "", "Pallas", None])
def test_unknown_backends(name):
    with pytest.raises(ValueError, match=rf"^backend = {name!r}: this version has 'auto', 'xla', 'pallas', 'megakernel'$"):
        resolve_backend(name)


@pytest.mark.parametrize(
    ("platform", "capability", "numerics", "problem"),
    [
        ("cpu", None, HF, "its kernels round as serving does, not as 'hf'"),
        ("gpu", "9.0", HF, "its kernels round as serving does, not as 'hf'"),
        ("tpu", None, SERVING, "it needs an NVIDIA GPU, or a CPU to interpret it, not a tpu"),
        ("gpu", "8.0", SERVING, "its kernels are for GPUs of compute capability 9.0, this one has 8.0"),
        ("gpu", "10.0", SERVING, "its kernels are for GPUs of compute capability 9.0, this one has 10.0"),
    ],
)
def test_where_pallas_cannot_serve(gpu, platform, capability, numerics, problem):
    """Asked for it is refused, and "auto" does without."""
    gpu(capability)
    with pytest.raises(ValueError) as error:
        resolve_backend("pallas", platform, numerics)
    assert str(error.value) == f"backend = 'pallas': {problem}; 'xla' serves everywhere"
    assert resolve_backend("auto", platform, numerics) is XLA
    assert resolve_backend("xla", platform, numerics) is XLA


def test_where_pallas_serves(gpu):
    gpu("9.0")
    on_gpu, on_cpu = resolve_backend("pallas", "gpu"), resolve_backend("pallas", "cpu")
    assert (on_gpu.name, on_gpu.interpreted, on_gpu.interpret) == ("pallas", False, None)
    assert (on_cpu.name, on_cpu.interpreted) == ("pallas", True) and on_cpu.interpret is not None
    # Where it was timed: interpreted it is slow, and other models have not been.
    assert resolve_backend("auto", "gpu", has_nvfp4=True).name == "pallas"
    assert resolve_backend("auto", "gpu") is resolve_backend("auto", "cpu", has_nvfp4=True) is XLA
    assert [resolve_backend(name, "gpu").name for name in ("xla", "pallas")] == ["xla", "pallas"]
    assert on_gpu.paths == XLA.paths == {}


def test_hf_numerics_are_refused_by_load():
    with pytest.raises(ValueError, match=r"^backend = 'pallas': its kernels round as serving does, not as 'hf'"):
        muse_jax.load(MUSE_TINY, backend="pallas", numerics="hf")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="GPUs run the kernels on any mesh")
def test_a_mesh_of_a_cpu_is_refused_by_load():
    """Its devices would share one interpreter, which sooner or later fails."""
    problem = r"^backend = 'pallas': on a CPU its kernels are interpreted, by one device and not by 2; 'xla' serves everywhere$"
    with pytest.raises(ValueError, match=problem):
        muse_jax.load(MUSE_TINY, mesh=sharding.make_mesh(2), backend="pallas")
    assert muse_jax.load(MUSE_TINY, mesh=sharding.make_mesh(1), backend="pallas").backend == "pallas"
    assert resolve_backend("auto", "cpu", num_devices=2) is XLA


def test_a_checkpoint_that_no_kernel_takes_is_served_by_xla():
    """And it is said why."""

    def tokens(backend: str) -> tuple[list[int], muse_jax.Muse]:
        muse = muse_jax.load(MUSE_TINY, backend=backend, speculation="off")
        generation = muse.generate(muse.tokenizer.encode("Ann has 3 pens."), max_new_tokens=8)
        list(generation)
        return generation.tokens, muse

    expected, _ = tokens("xla")
    found, muse = tokens("pallas")
    assert found == expected
    assert muse.backend == "pallas"
    paths = muse.model.module.backend.paths
    assert set(TARGET) - {"combine", "nvfp4_gemm", "expert_gemm"} == set(paths)  # those belong to experts that it takes
    assert all(path.startswith("xla (") and path.endswith(")") for each in paths.values() for path in each)
    reasons = {op: " ".join(each) for op, each in paths.items()}
    for op, reason in {
        "blend_norm": "rows of 192; 1 warpgroups need a multiple of 512",
        "decode_attention": "queries are float32",
        "dense_gemm": "x is float32",
        "qk_rope": "heads of 24",
        "out_gate": "heads of 24",
        "route": "16 experts; multiples of 128",
    }.items():
        assert reason in reasons[op]


# ------------------------------------------------------------------------------------------------------------ the weights


def plain_model(case: Case) -> Model:
    return make_model(case, XLA, BF16)


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


SMALL = dataclasses.replace(CONFIG, num_local_experts=16, nvfp4_layers=(1,))


def test_weights_are_kept_as_the_kernels_read_them_and_nothing_is_lost():
    case = Case(SMALL)
    plain, stored = plain_model(case).params, make_model(case, Pallas(), BF16).params
    for layer, (before, after) in enumerate(zip(plain["layers"].values(), stored["layers"].values(), strict=True)):
        for name in ("gate_up", "down"):
            weight = before["mlp"][name]
            if layer not in SMALL.nvfp4_layers:
                assert_same(after["mlp"][name], weight)
                continue
            packed = PackedWeights(**after["mlp"][name])
            assert packed.tile_rows == {"gate_up": 128, "down": 64}[name]
            assert packed.shape == (*weight["codes"].shape[:-1], 512)
            assert_same(unpacked(packed), NVFP4Weight(**weight | {"input_scale": jnp.ones_like(weight["input_scale"])}))
        for name in ("post_attention_gate", "post_ffn_gate"):
            assert_same(GateFactors(**after[name]), GateFactors.create(before[name], SMALL.residual_gate_temperature))
            assert jnp.any(after[name]["alpha"] != after[name]["beta"])
    changed = {"gate_up", "down", "post_attention_gate", "post_ffn_gate"}

    def rest(tree: dict) -> dict:
        return {key: rest(value) if isinstance(value, dict) else value for key, value in tree.items() if key not in changed}

    assert_same(rest(stored), rest(plain))


def test_the_given_parameters_are_used_up():
    """There would not be room for both."""
    plain = plain_model(Case(SMALL)).params
    layer = plain["layers"][1]
    given = [layer["mlp"]["gate_up"]["codes"], layer["mlp"]["down"]["codes"], layer["post_ffn_gate"]]
    Pallas().stored_params(plain, SMALL, sharding.ONE_DEVICE, None)
    assert all(x.is_deleted() for x in given)
    assert not layer["pre_ffn_norm"].is_deleted()


@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        ({}, {"gate_up", "down"}),
        ({"moe_hidden_size": 768}, {"down"}),  # a kernel takes 512 columns at a time
        ({"moe_intermediate_size": 768}, {"gate_up"}),
        ({"moe_intermediate_size": 528}, set()),
    ],
)
def test_weights_that_no_kernel_takes_stay(sizes, packed):
    """And the step runs with them, however few of a layer's are packed."""
    case = Case(dataclasses.replace(SMALL, **sizes))
    backend = Pallas()
    model = make_model(case, backend, BF16)
    mlp = model.params["layers"][1]["mlp"]
    assert {name for name in ("gate_up", "down") if "words" in mlp[name]} == packed
    args = pallas_steps.make_state(model, case.lengths), pallas_steps.make_nodes(1, case.rows), pallas_steps.make_routing(case)
    xla = plain_model(case)
    shapes = [jax.eval_shape(pallas_steps.run_step, each, *args) for each in (model, xla)]
    assert shapes[0] == shapes[1]
    assert ("nvfp4_gemm" in backend.paths) == (packed == {"gate_up", "down"})


@pytest.mark.parametrize(("size", "gate_up", "down"), [(512, 128, 64), (256, 64, None), (128, None, None), (768, 64, None)])
def test_tiles_are_of_what_a_rank_has(size, gate_up, down):
    """size: of M and F, which eight ranks share. Columns are whole; a kernel takes 512 at a time."""
    config = dataclasses.replace(SMALL, moe_hidden_size=size, moe_intermediate_size=size)

    def tile_rows(name: str, *lead: int, columns: int = 512) -> int | None:
        arrays = [
            jax.ShapeDtypeStruct((16, *lead, size, columns // 2), jnp.uint8),
            jax.ShapeDtypeStruct((16, *lead, size, columns // 16), jnp.float8_e4m3fn),
            *[jax.ShapeDtypeStruct((16, *lead), jnp.float32)] * 2,
        ]
        value = Pallas().stored(name, NVFP4Weight(*arrays), config, ShardingConfig(8))
        return value.tile_rows if isinstance(value, PackedWeights) else None

    assert (tile_rows("gate_up", 2), tile_rows("down")) == (gate_up, down)
    assert tile_rows("gate_up", 2, columns=256) is tile_rows("down", columns=256) is None


def test_fp32_models_are_served_by_xla_where_kernels_take_bf16():
    backend = Pallas()
    model = make_model(Case(SMALL), backend, jnp.dtype(jnp.float32))
    case = Case(SMALL)
    args = pallas_steps.make_state(model, case.lengths), pallas_steps.make_nodes(1, case.rows), pallas_steps.make_routing(case)
    jax.eval_shape(pallas_steps.run_step, model, *args)
    assert "xla (" in backend.paths["decode_attention"][0] and "xla (" in backend.paths["nvfp4_gemm"][0]


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"NPROC": "48"}, 48),
        ({"NPROC": " 7 "}, 7),
        ({"NPROC": "-1"}, -1),
        ({"PJRT_NPROC": "5", "NPROC": "48"}, 5),
        ({"PJRT_NPROC": "five", "NPROC": "48"}, 48),
        ({}, 3),
        ({"NPROC": ""}, 3),
        ({"NPROC": "48.0"}, 3),
        ({"NPROC": "99999999999"}, 3),
    ],
)
def test_threads_are_counted_as_xla_counts_them(monkeypatch, variables, threads):
    """Of a machine with many CPUs a process may have few, and a pool that is smaller than thought waits for ever."""
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert pallas_backend._pool_threads() == threads
    if threads < 48:
        with pytest.raises(ValueError, match=rf"needs 48 threads, not {threads}: set NPROC=48"):
            pallas_backend._check_threads()


@pytest.mark.parametrize(
    ("sizes", "paths"),
    [
        ({"block_size": 7}, {"grouped_conv": ["pallas"], "lattice": ["pallas"]}),
        (
            {"selector_top_k": 6},
            {"grouped_conv": ["pallas"], "lattice": ["xla (lattice: 6 candidates; allowed are multiples of 16)"]},
        ),
    ],
    ids=["odd block", "six candidates"],
)
def test_drafts_of_odd_sizes_are_served(sizes, paths):
    """What a CTA has must divide a block, and the candidates: by default two rows and four."""
    case = Case(
        dataclasses.replace(pallas_steps.DRAFTED, num_local_experts=16), draft=dataclasses.replace(pallas_steps.DRAFT, **sizes)
    )
    backend = Pallas()
    model = make_model(case, backend, BF16)
    jax.eval_shape(muse_jax.decode, model, pallas_steps.make_state(model, case.lengths))
    assert {op: backend.paths[op] for op in paths} == paths


MESH = Case(dataclasses.replace(OF_EIGHT, num_local_experts=16, moe_hidden_size=512), ShardingConfig(8))


def test_each_device_of_a_mesh_has_its_part_packed_as_it_would_be_alone():
    mesh, backend = sharding.make_mesh(8), Pallas()
    model = make_model(MESH, backend, BF16, mesh)
    alone = dataclasses.replace(MESH, how=ShardingConfig(8, loopback=True))
    first, plain = make_model(alone, backend, BF16).params, plain_model(dataclasses.replace(MESH, how=sharding.ONE_DEVICE))
    for name, axis in (("gate_up", 2), ("down", 1)):
        weight, whole = model.params["layers"][1]["mlp"][name], NVFP4Weight(**plain.params["layers"][1]["mlp"][name])
        for device, words, scales in zip(
            mesh.devices, weight["words"].addressable_shards, weight["block_scales"].addressable_shards, strict=True
        ):
            assert words.device == scales.device == device
            part = PackedWeights(words.data, scales.data, weight["global_scale"].addressable_data(0))
            assert part.words.shape == first["layers"][1]["mlp"][name]["words"].shape
            rank = words.index[1].start // words.data.shape[1]
            rows = whole.codes.shape[axis] // 8
            own = [
                jax.lax.slice_in_dim(x, rank * rows, (rank + 1) * rows, axis=axis) for x in (whole.codes, whole.block_scales)
            ]
            assert_same(unpacked(part), NVFP4Weight(*own, whole.global_scale, jnp.ones_like(whole.global_scale)))
    specs = jax.tree.map(lambda x: x.sharding.spec, model.params)
    assert jax.tree.map(normal, model.specs.params, is_leaf=is_spec) == jax.tree.map(normal, specs, is_leaf=is_spec)


def is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)


def normal(spec: PartitionSpec) -> tuple:
    """Without the trailing None that say nothing."""
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


def test_a_step_of_a_mesh_lowers():
    mesh, backend = sharding.make_mesh(8), Pallas()
    model = make_model(MESH, backend, BF16, mesh)
    model = dataclasses.replace(model, num_rows=1)
    state = pallas_steps.make_state(model, (90,))
    lowered = jax.jit(muse_jax.decode).trace(model, state).lower(lowering_platforms=("cuda",))
    assert kernels_of(lowered) >= 2 * 8
    small = {"combine": ["xla (combine: rows of 64; 1 warpgroups need a multiple of 512)"]}
    small["route"] = ["xla (route: 16 experts; multiples of 128 are possible)"]
    assert backend.paths == TARGET | SOME_NARROW | small


# --------------------------------------------------------------------------------------------------------------- lowering


def kernels_of(lowered) -> int:
    return lowered.as_text().count("mosaic_gpu")


no_layouts = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 finds no layouts for quantised rows")


@pytest.mark.parametrize(
    ("activations", "more"), [("bf16", {}), pytest.param("nvfp4", QUANTIZED, marks=no_layouts)], ids=["w4a16", "w4a4"]
)
def test_all_of_a_full_size_step_is_for_kernels(activations, more):
    """One rank of eight: the first two layers, one of them NVFP4, and the draft, as shapes."""
    config, draft_config = full_size()
    names = ("layer_types", "layer_uses_rope", "mlp_layer_types")
    layers = {name: getattr(config, name)[:2] for name in names}
    config = dataclasses.replace(config, num_hidden_layers=2, nvfp4_layers=(1,), **layers)
    draft_config = dataclasses.replace(draft_config, num_hidden_layers=1, layer_types=draft_config.layer_types[:1])
    draft_config = dataclasses.replace(draft_config, target_layer_ids=(0, 1))
    backend, how = Pallas(), ShardingConfig(8, loopback=True, calls=False)
    settings = {"dtype": BF16, "sharding": how, "backend": backend}
    module, draft = MuseSpark(config, activations=activations, **settings), DFlash2(draft_config, **settings)
    whole = Model.create(module, draft=draft, tree_size=16)

    def of_rank(config, params):
        specs = backend.stored_specs(parameter_tree(config, lambda spec: sharding.param_spec(spec, how)), params)

        def part(x, spec):
            shape = [size // (8 if axis == sharding.AXIS else 1) for size, axis in itertools.zip_longest(x.shape, spec)]
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        return jax.tree.map(part, params, specs)

    params, draft_params = of_rank(config, whole.params), of_rank(draft_config, whole.draft_params)
    model = dataclasses.replace(whole, params=params, draft_params=draft_params)
    state = jax.eval_shape(lambda model: pallas_steps.make_state(model, (2048,), slots=4096), model)
    lowered = jax.jit(muse_jax.decode).trace(model, state).lower(lowering_platforms=("cuda",))
    assert backend.paths == TARGET | DRAFT | SOME_NARROW | {"build_tree": ["pallas"]} | more
    assert kernels_of(lowered) > 20


# ---------------------------------------------------------------------------------------------------- steps, interpreted


def run_case(name: str) -> dict:
    """The result of a case of pallas_steps.py, which says why it is a program of its own."""
    env = os.environ | {"NPROC": "48", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests" / "pallas_steps.py"), name]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        pytest.fail(f"{name} has not ended in 400 s: {out}{errors}")
    assert process.returncode == 0, out + errors
    return json.loads(out)


# Root mean square of the difference from fp32 over that of the values. On the way through two layers to a logit a value is
# rounded 25 times, each time by up to 2^-9 of its size: so much if all errors added up. 0.002 to 0.014 were seen.
LARGEST = 25 * 2.0**-9


@interpreted
@pytest.mark.parametrize(
    ("name", "paths", "largest"),
    [
        ("w4a16", TARGET, LARGEST),
        ("one_row", TARGET, LARGEST),
        # A value that bf16 puts on the other side of the middle between two codes of 4 bits moves by a sixth and more.
        ("batch_w4a4", TARGET | QUANTIZED, 3 * LARGEST),
        ("rank_of_eight", TARGET | SOME_NARROW, LARGEST),
        ("draft", DRAFT, LARGEST),
    ],
)
def test_a_step_is_as_exact_as_that_of_xla(name, paths, largest):
    """Both round where serving does, and add up in their own order: errors that are alike, and not the same. 1.4 was seen."""
    result = run_case(name)
    assert result["paths"] == paths
    for part, error in result["xla"].items():
        assert error <= largest, (part, result)
        assert result["ours"][part] <= 2 * error, (part, result)
        assert result["between"][part] <= 2 * error, (part, result)
