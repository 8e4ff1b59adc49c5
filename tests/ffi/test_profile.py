"""The profiler: the same bits with it, every phase of every layer once and in order, tables, the trace, what it costs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # of verify_steps

import verify_steps
from verify_steps import TWO_LAYERS, Case

from ffi import layout, library, profile
from ffi.profile import CONSUMERS, EVENT, HOST, LOADED, PHASES, PRODUCER, ROLES, Profile
from ffi.verify import LayerKind, VerifyConfig, profiled, verify

pytestmark = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))

SOURCE = Path(library.__file__).resolve().parent / "src"
CASE = Case(TWO_LAYERS, rows=3)
LAYERS = 2
ALL = profile.places(LAYERS)
on_every_device = pytest.mark.parametrize("target", ["host", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])


def step(target: str, ranks: int = 1, events: int = ALL, case: Case = CASE, **settings):
    return verify_steps.run(case, ranks, target=target, taps=(0,), profile=events, **settings)


def decoded(target: str, ranks: int = 1, events: int = ALL, **settings) -> Profile:
    result = step(target, ranks, events, **settings)
    assert not np.any(result.status)
    return profile.decode(LAYERS, [np.asarray(result.profile)])


def bits(result) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(dataclasses.replace(result, profile=None))]


def of(events: np.ndarray, phase: str, role: str = CONSUMERS, **where: int) -> np.ndarray:
    wanted = {"phase": PHASES.index(phase), "role": ROLES.index(role)} | where
    return events[np.logical_and.reduce([events[name] == value for name, value in wanted.items()])]


def test_phases_are_those_of_the_kernel():
    text = (SOURCE / "phase.h").read_text()
    names = re.findall(r"^  k(\w+),", text, re.M)
    assert tuple(re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower() for name in names) == PHASES
    assert set(profile.INPUTS) == set(PHASES)


@on_every_device
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_bits_are_those_without_a_profiler(target, activations):
    case = dataclasses.replace(CASE, activations=activations)
    for ranks in (1, 2):
        plain = step(target, ranks, 0, case)
        assert plain.profile is None and not np.any(plain.status)
        assert bits(step(target, ranks, ALL, case)) == bits(plain)
        assert bits(step(target, ranks, 40, case, layers_per_launch=2)) == bits(plain)


@pytest.mark.parametrize(
    "target, ranks, layers_per_launch",
    [
        ("emulated", 1, 1),
        ("emulated", 2, 2),
        pytest.param("cuda", 1, 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 4, 2, marks=pytest.mark.gpu),
    ],
)
def test_every_phase_of_every_layer_is_there_once(target, ranks, layers_per_launch):
    found = decoded(target, ranks, layers_per_launch=layers_per_launch)
    events = found.events
    assert found.by_kernel and found.lost == 0 and found.span_ns > 0 and found.timer_ns > 0
    assert sorted(np.unique(events["rank"])) == list(range(ranks))
    of_layer = PHASES[: PHASES.index("embed")]
    whole_step = [(-1, "embed"), (-1, "qkv")]
    for layer in range(LAYERS):
        whole_step += [(layer, phase) for phase in (*of_layer, "qkv" if layer + 1 < LAYERS else "lm_head")]
    for rank in range(ranks):
        for cta in np.unique(events["cta"]):
            for role, name in enumerate(ROLES):
                thread = events[(events["rank"] == rank) & (events["cta"] == cta) & (events["role"] == role)]
                begin, end = thread["begin_ns"], thread["end_ns"]
                assert np.all(begin <= end) and np.all(end[:-1] <= begin[1:])
                # There is a gap where a launch ends, and nowhere else.
                launch = np.maximum(thread["layer"], 0) // layers_per_launch
                assert np.array_equal(end[:-1] != begin[1:], launch[:-1] != launch[1:])
                order = [(int(layer), PHASES[phase]) for layer, phase in thread[["layer", "phase"]]]
                assert order == [(at, phase) for at, phase in whole_step if name == CONSUMERS or phase in LOADED]


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_the_host_reference_records_a_thread(activations):
    before = time.perf_counter_ns()
    found = decoded("host", 2, case=dataclasses.replace(CASE, activations=activations))
    assert 0 < found.span_ns < time.perf_counter_ns() - before
    assert not found.by_kernel and found.lost == 0
    order = np.argsort(found.events["begin_ns"])
    events = found.events[order]
    assert np.all(events["end_ns"][:-1] <= events["begin_ns"][1:]) and not np.any(events["waited_ns"])
    for rank in range(2):
        for phase in HOST:
            layers = of(events, phase, rank=rank)["layer"]
            first, end = (-1, LAYERS - 1) if phase == "qkv" else (-1, 0) if phase == "embed" else (0, LAYERS)
            assert list(layers) == ([LAYERS - 1] if phase == "lm_head" else list(range(first, end))), phase
        quantized = list(of(events, "quantize_hidden", rank=rank)["layer"])
        assert quantized == ([0] if activations == "nvfp4" else [])


def test_waits_are_within_phases():
    events = decoded("emulated", 2).events
    waits = events["waited_ns"]
    assert np.all((waits >= 0) & (waits <= events["end_ns"] - events["begin_ns"]))
    for phase in ("o_sum", "post_attention", "pooled", "combine", "branch", "post_ffn", "heads"):
        assert np.any(of(events, phase)["waited_ns"]), phase
    assert not np.any(of(events, "embed")["waited_ns"])


@pytest.mark.parametrize(
    "giver, taker, waits",
    [
        ((0, "o_proj"), (0, "o_sum"), 50),
        ((0, "qkv"), (1, "heads"), 50),  # of the layer after it
        ((-1, "embed"), (-1, "qkv"), 50),
        ((1, "qkv"), (1, "heads"), 0),
        ((0, "router"), (0, "pre_expert_proj"), 0),
    ],
)
def test_waits_follow_from_the_other_ctas(giver, taker, waits):
    events = np.zeros(4, EVENT)
    events["cta"] = [0, 0, 1, 1]
    events["layer"] = [giver[0], taker[0]] * 2
    events["phase"] = [PHASES.index(giver[1]), PHASES.index(taker[1])] * 2
    events["begin_ns"], events["end_ns"] = [10, 30, 10, 80], [30, 120, 80, 90]
    profile._add_waits(events)
    assert list(events["waited_ns"]) == [0, waits, 0, 0]


def test_the_producers_wait_for_free_stages():
    """Eight stages are free at first."""
    events = decoded("emulated").events
    producer = events[events["role"] == ROLES.index(PRODUCER)]
    assert np.any(producer["waited_ns"] > 0)
    assert np.all(producer["waited_ns"] <= producer["end_ns"] - producer["begin_ns"])
    assert not np.any(of(events, "top_k", PRODUCER)["waited_ns"])


@pytest.mark.parametrize("target", ["host", "emulated"])
@pytest.mark.parametrize("events", [1, 20, 21 + 5, ALL - 1])
def test_events_without_a_place_are_counted(target, events):
    whole, some = decoded(target), decoded(target, events=events)
    place = (whole.events["layer"] + 1) * len(PHASES) + whole.events["phase"]
    kept = whole.events[place < events]
    assert some.lost == len(whole.events) - len(kept) > 0
    names = ["rank", "cta", "role", "layer", "phase"]
    assert np.array_equal(some.events[names], kept[names])
    profile.phase_table(some), profile.layer_tails(some), profile.chrome_trace(some)


def test_more_ctas_than_there_are_places_for():
    """A rank alone has 192; the kernel leaves the others out."""
    buffer = np.array(step("emulated").profile)
    buffer[0, 0] = 200
    stored = buffer[0, 4:].reshape(192, -1)
    stored[3:] = stored[0]
    found = profile.decode(LAYERS, [buffer])
    assert found.lost == 8 * len(found.events) // 192 and found.events["cta"].max() == 191


@pytest.mark.parametrize(("setting", "status"), [({"is_taken": True}, 2), ({"stalled_cta": 1}, 1)], ids=["refused", "given up"])
def test_a_call_that_fails_has_no_profile(emulated_device, setting, status):
    step("emulated")
    emulated_device(**setting)
    result = step("emulated", deadline_ms=1)
    assert result.status[0] == status
    with pytest.raises(ValueError, match="the call was refused or given up and has no profile: its status says why"):
        profile.decode(LAYERS, [np.asarray(result.profile)])


def test_what_is_no_profile_is_named():
    good = np.asarray(step("emulated").profile)
    for wrong, shape in ((good[:, 1:], "uint32"), (good.astype(np.int32), "int32"), (good[0], "uint32")):
        with pytest.raises(ValueError, match=rf"^a buffer is {shape} \[.*expected VerifyResult.profile, uint32 \[Rh, words\]$"):
            profile.decode(LAYERS, [wrong])
    with pytest.raises(ValueError, match="buffers is empty"):
        profile.decode(LAYERS, [])
    torn = good.copy()
    torn[0, 4 + 6 * PHASES.index("embed") + 5] += 1  # its place
    with pytest.raises(ValueError, match="rank 0 has not recorded the whole step"):
        profile.decode(LAYERS, [torn])
    with pytest.raises(ValueError, match=re.escape("profile = -1: allowed are 0 to 65536 events")):
        step("host", events=-1)


# ---- Tables and the trace -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_up() -> Profile:
    """A rank, two CTAs, a layer of the last phases and the next one's: ns as they are easy to check."""
    phases = [PHASES.index(name) for name in ("expert_down", "combine", "post_expert_proj", "branch", "post_ffn", "qkv")]
    ends = {0: [1000, 3000, 4000, 6000, 7000, 9000], 1: [2000, 2500, 5000, 5500, 8000, 12000]}
    events = np.zeros(12, EVENT)
    for cta, times in ends.items():
        here = slice(6 * cta, 6 * cta + 6)
        events["cta"][here], events["phase"][here] = cta, phases
        events["end_ns"][here], events["begin_ns"][here] = times, [0, *times[:-1]]
    profile._add_waits(events)
    return Profile(events, 0, by_kernel=True)


def test_a_table(made_up):
    rows = {row.phase: row for row in profile.phase_table(made_up)}
    assert list(rows) == ["expert_down", "combine", "post_expert_proj", "branch", "post_ffn", "qkv"]
    row = rows["combine"]
    assert (row.role, row.count, row.mean_us, row.max_us) == (CONSUMERS, 2, 1.25, 2.0)
    assert (row.p10_us, row.p90_us) == (pytest.approx(0.65), pytest.approx(1.85))
    assert row.waited_us == 0.5  # CTA 0 from 1000 to 2000
    assert row.share == pytest.approx(2500 / 24000)
    # CTA 1 has ended qkv at 12000, CTA 0 at 9000.
    assert sum(row.share for row in rows.values()) == pytest.approx(21000 / 24000)


def test_what_comes_after_the_experts(made_up):
    (tail,) = profile.layer_tails(made_up)
    # Waits: combine 1000, 0; post_expert_proj 0, 500; branch 1000, 0; post_ffn 0, 500; qkv 1000, 0.
    assert dataclasses.astuple(tail) == (0, 6.0, 1.5, 10.0, 2.0)
    other = dataclasses.replace(tail, to_post_ffn_us=10.0, to_qkv_us=None, idle_with_qkv_us=None)
    summary = profile.tail_summary([tail, other, tail])
    assert summary["to_post_ffn_us"] == {"median": 6.0, "worst": 10.0} and summary["to_qkv_us"]["worst"] == 10.0


def test_tails_of_a_step():
    found = decoded("emulated")
    tails = profile.layer_tails(found)
    assert [tail.layer for tail in tails] == [0, 1]
    assert all(tail.to_post_ffn_us > 0 and tail.idle_us > 0 for tail in tails)
    assert tails[0].to_qkv_us > tails[0].to_post_ffn_us and tails[1].to_qkv_us is None


@pytest.mark.parametrize("target", ["host", "emulated"])
def test_a_trace_has_what_perfetto_needs(target):
    found = decoded(target, 2)
    trace = json.loads(json.dumps(profile.chrome_trace(found)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert sorted(processes) == ["rank 0", "rank 1"] and len(slices) == len(found.events)
    assert len(named) == (2 if target == "host" else 12) and named[1, 0] == "CTA 0 consumers"
    for event in slices:
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= set(event)
        assert event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in named
        assert event["name"] in PHASES and -1 <= event["args"]["layer"] < LAYERS
        assert named[event["pid"], event["tid"]].endswith(event["cat"])
    assert min(event["ts"] for event in slices) == 0
    assert max(event["ts"] + event["dur"] for event in slices) * 1e3 == pytest.approx(found.span_ns)


def test_calls_of_others_are_recorded():
    """Of a program that makes the call somewhere inside."""
    config = verify_steps.verify_config(CASE)
    arguments = verify_steps.operands(CASE, config)
    library.load()
    with profiled(ALL) as buffers:
        compiled = jax.jit(lambda arguments: verify(config, **arguments).logits).lower(arguments).compile()
    plain = jax.jit(lambda arguments: verify(config, **arguments).logits)
    logits = compiled(arguments)
    jax.effects_barrier()
    assert len(buffers) == 1 and profile.decode(LAYERS, buffers).lost == 0
    assert np.array_equal(logits, plain(arguments))
    jax.effects_barrier()
    assert len(buffers) == 1


# ---- On hardware --------------------------------------------------------------------------------------------------------


def full_width(layers: int) -> tuple[VerifyConfig, dict]:
    """A rank of eight, in loopback, of layers as wide as the released model's with fewer experts. Weights are zeros; routing is
    given, so that most experts are read. Its phases take as long as those that matter."""
    config = VerifyConfig(
        hidden=8192,
        heads=128,
        kv_heads=16,
        head_dim=64,
        moe_hidden=4096,
        moe_intermediate=4096,
        experts=64,
        top_k=8,
        vocab=8192,
        ranks=8,
        loopback=True,
        layers=(LayerKind(sliding=True, rope=True, nvfp4=True),) * layers,
        window=2048,
        score_scale=0.125,
        output_multiplier=1.0,
        softcap=20.0,
    )
    rows, length, slots, shape = 16, 1024, 2064, config.shape
    rng, positions = np.random.default_rng(3), np.arange(length, length + rows, dtype=np.int32)
    idx = np.stack([np.stack([rng.permutation(64)[:8] for _ in range(rows)]) for _ in range(layers)]).astype(np.int32)
    ring_positions = np.where(np.arange(slots) < length, np.arange(slots), -1).astype(np.int32)
    cache = jnp.zeros((1, 2, slots, 64), jnp.bfloat16)
    layer_bytes, head_bytes = (layout.table_bytes(x) for x in (layout.layer_table(shape, True), layout.head_table(shape)))
    return config, {
        "tokens": jnp.arange(rows, dtype=jnp.int32),
        "positions": jnp.asarray(positions),
        "length": jnp.asarray(np.int32([length])),
        "visible": jnp.asarray(np.tri(rows, dtype=bool)),
        "rope": jnp.ones((2, rows, 32), jnp.float32),
        "ring_positions": jnp.asarray(ring_positions),
        "embedding": jnp.ones((1, 1024, 8192), jnp.bfloat16),
        "head": jnp.zeros((1, head_bytes), jnp.uint8),
        "layers": [jnp.zeros((1, layer_bytes), jnp.uint8) for _ in range(layers)],
        "caches": [(cache, cache)] * layers,
        "routing": (jnp.asarray(idx), jnp.full(idx.shape, 0.125, jnp.float32)),
    }


@pytest.mark.gpu
def test_what_it_costs():
    """At most 2.8 % of a step, what is published for another profiler of this kind."""
    layers = 8
    config, arguments = full_width(layers)
    arguments = jax.device_put(arguments, jax.devices("gpu")[0])
    configs = [dataclasses.replace(config, profile=events) for events in (0, profile.places(layers))]
    seconds: list[list[float]] = [[], []]
    for repeat in range(210):
        for which, config in enumerate(configs):
            before = time.perf_counter()
            jax.block_until_ready(verify_steps.call(config, arguments, "cuda").logits)
            if repeat >= 10:
                seconds[which].append(time.perf_counter() - before)
    plain, recorded = map(np.median, seconds)
    assert recorded <= 1.028 * plain, (recorded, plain)
