"""The Host reference on a mesh: the calls of a run's devices meet, or the step fails and its status says who did not come."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

sys.path.append(str(Path(__file__).resolve().parent))  # of verify_steps

import verify_steps
from verify_steps import QUICKLY, TINY_SIZES, TWO_LAYERS, Case

from ffi import library, profile
from ffi.verify import VerifyConfig, VerifyResult, problem, verify

pytestmark = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))

EVERYWHERE, BY_RANK, BY_HEAD = PartitionSpec(), PartitionSpec("tp"), PartitionSpec(None, "tp")
CASE = Case(TWO_LAYERS, rows=3, length=60)


def specs(config: VerifyConfig, arguments: dict) -> dict:
    by_rank = {"embedding": BY_RANK, "head": BY_RANK, "layers": BY_RANK, "caches": BY_HEAD}
    return {name: by_rank.get(name, EVERYWHERE) for name in arguments}


def on_mesh(
    config: VerifyConfig, arguments: dict, devices: list[jax.Device] | None = None, step: Callable = verify
) -> Callable:
    """step(config, **arguments) on each device with its rank, jitted. Logits, trace and status are those of all ranks."""
    library.load()
    mesh = Mesh(np.array(devices or jax.devices()[: config.ranks]), ("tp",))

    def run(arguments: dict) -> VerifyResult:
        result = step(config, **arguments, rank=lax.axis_index("tp").reshape(1))
        return dataclasses.replace(result, status=result.status[None])

    out = VerifyResult(BY_RANK, rows=BY_HEAD, taps=EVERYWHERE, trace=BY_RANK, profile=BY_RANK, status=BY_RANK)
    run = jax.shard_map(run, mesh=mesh, in_specs=(specs(config, arguments),), out_specs=out, check_vma=False)
    return jax.jit(run, compiler_options=QUICKLY)


def bits(result: VerifyResult) -> list[bytes]:
    assert not np.any(result.status)
    trace = result.trace or {}
    arrays = (np.concatenate(result.logits, axis=-1), result.taps, result.rows, trace)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(arrays)]


def prepared(case: Case, ranks: int, **settings: Any) -> tuple[VerifyConfig, dict]:
    config = verify_steps.verify_config(case, ranks, deadline_ms=60_000, **settings)
    return config, verify_steps.operands(case, config)


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("sizes", "ranks"), [(TINY_SIZES, 2), (TWO_LAYERS, 4), (TWO_LAYERS, 8)])
def test_bits_of_one_device(sizes, ranks, activations):
    case = Case(sizes, rows=5, length=60, activations=activations)
    config, arguments = prepared(case, ranks, taps=(0,), trace_layer=1)
    emulated = bits(verify_steps.call(config, arguments))
    assert bits(on_mesh(config, arguments)(arguments)) == emulated
    one = verify_steps.run(case, 1, taps=(0,))
    untraced, _ = prepared(case, ranks, taps=(0,))
    assert bits(on_mesh(untraced, arguments)(arguments)) == bits(one)


def test_ranks_are_those_of_the_mesh_not_of_the_devices():
    config, arguments = prepared(CASE, 4)
    devices = jax.devices()
    turned = on_mesh(config, arguments, [devices[i] for i in (6, 1, 3, 2)])
    assert bits(turned(arguments)) == bits(verify_steps.call(config, arguments))


def test_each_device_has_the_profile_of_its_rank():
    config, arguments = prepared(CASE, 4, profile=profile.places(2))
    recorded = np.asarray(on_mesh(config, arguments)(arguments).profile)
    events = profile.decode(2, np.split(recorded, 4)).events
    assert [set(events["rank"][events["device"] == device]) for device in range(4)] == [{0}, {1}, {2}, {3}]


def test_runs_in_flight_do_not_mix():
    """Of one program and of two, on devices of which they share some."""
    config, arguments = prepared(CASE, 4)
    others = arguments | {"tokens": (arguments["tokens"] + 1) % 256}
    devices = jax.devices()
    first, second = on_mesh(config, arguments, devices[:4]), on_mesh(config, arguments, devices[2:6])
    expected = [bits(verify_steps.call(config, each)) for each in (arguments, others)]
    assert expected[0] != expected[1]
    results = [(step(each), i) for _ in range(4) for step in (first, second) for i, each in enumerate((arguments, others))]
    for result, i in results:
        assert bits(result) == expected[i]


def absent(rank: int) -> Callable[..., VerifyResult]:
    """`verify` on all devices but one."""

    def step(config: VerifyConfig, **arguments: Any) -> VerifyResult:
        call = lambda: verify(config, **arguments)  # noqa: E731
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call))
        return lax.cond(arguments["rank"][0] == rank, lambda: nothing, call)

    return step


@pytest.mark.parametrize(("ranks", "missing"), [(4, 0), (8, 5)])
def test_a_rank_that_does_not_come_is_named_and_the_next_call_works(ranks, missing):
    config, arguments = prepared(CASE, ranks)
    hurried = dataclasses.replace(config, deadline_ms=300)
    alone = on_mesh(hurried, arguments, step=absent(missing))
    first = 1 if missing == 0 else 0
    for _ in range(2):
        status = np.asarray(alone(arguments).status)
        for rank in set(range(ranks)) - {missing}:
            assert status[rank].tolist() == [1, first, -1, -1, 0, missing, 0, 0]
        assert bits(on_mesh(config, arguments)(arguments)) == bits(verify_steps.call(config, arguments))
    assert problem(status[first]) == (
        f"rank {first} gave up waiting before the first phase: the call of rank {missing} did not come within deadline_ms"
    )


def test_a_rank_that_is_late_fails_too_and_the_runs_next_call_works():
    """It finds the meeting that failed, and takes no place in the next one."""
    late, deadline = 2, 1.5
    config, arguments = prepared(CASE, 4)
    config = dataclasses.replace(config, deadline_ms=int(1000 * deadline))

    def wait(rank: np.ndarray) -> np.ndarray:
        time.sleep(1.5 * deadline if rank[0] == late else 0.0)
        return rank

    def twice(config: VerifyConfig, tokens: jax.Array, rank: jax.Array, **arguments: Any) -> VerifyResult:
        rank = jax.pure_callback(wait, jax.ShapeDtypeStruct((1,), jnp.int32), rank)
        failed = verify(config, tokens=tokens, rank=rank, **arguments)
        tokens, code = lax.optimization_barrier((tokens, failed.status[0]))
        # The second call needs the first.
        second = verify(config, tokens=jnp.where(code < 9, tokens, 0), rank=rank, **arguments)
        return dataclasses.replace(second, status=jnp.concatenate([failed.status, second.status]))

    result = on_mesh(config, arguments, step=twice)(arguments)
    status = np.asarray(result.status)
    assert status[:, :8].tolist() == [[1, 0, -1, -1, 0, late, 0, 0]] * 4
    second = dataclasses.replace(result, status=status[:, 8:])
    assert bits(second) == bits(verify_steps.call(config, arguments))


def test_what_is_wrong_with_an_operand_is_said_at_once():
    config, arguments = prepared(CASE, 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"tokens\[0\] = 256: allowed are 0 to 255"):
        jax.block_until_ready(on_mesh(config, arguments)(arguments | {"tokens": arguments["tokens"].at[0].set(256)}))
