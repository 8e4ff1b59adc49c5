"""One rank without the others, and the benchmark that times it."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import decoding
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.sharding import ShardingConfig, make_mesh, replicated

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import bench_decode
import random_models

ROWS, TP = 16, 8
without_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")


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


def test_a_toy_runs(capsys):
    assert bench_decode.main(["--steps", "2", "--context", "300", "--layers", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = figures["results"]
    assert figures["collectives"] == "loopback"
    assert result["verdict"]["good"]
    assert result["verify"]["ms"] > 0
    assert result["verify"]["launches"] is None


def test_a_bad_verdict_ends_it(capsys, monkeypatch):
    monkeypatch.setattr(bench_decode, "VERDICT_TOLERANCE", 1e-6)
    assert bench_decode.main(["--layers", "1", "--context", "20", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert not result["verdict"]["good"]
    assert "verify" not in result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routing", "3"], "--routing 3: 16 rows of 4 experts each can choose 4 to 16 distinct ones"),
        (["--routing", "17"], "--routing 17: "),
        (["--layers", "99"], "--layers 99: the tiny shape has"),
        (["--draft"], "--draft: the tiny shape has none"),
        pytest.param(["--shape", "full"], "--shape full needs an NVIDIA GPU, found cpu", marks=without_gpu),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert bench_decode.main(arguments) == 2
    assert f"bench_decode.py: {message}" in capsys.readouterr().err
