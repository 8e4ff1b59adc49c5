"""The profiler's buffer: when which thread was in which phase, as events, a table, and a trace for https://ui.perfetto.dev.

    config = dataclasses.replace(config, profile=places(len(config.layers)))
    profile = decode(len(config.layers), [verify(config, ...).profile])
    rows, tails = phase_table(profile), layer_tails(profile)

Two threads of each CTA record: the first of the consumers, and the one of the producer that loads. Within a launch phases
follow each other without gaps. A phase of the consumers begins with the wait for its inputs. That is not measured but follows
from the other CTAs' events: an input is there when the last CTA has ended the phase that gives it. A consumers' phase ends when
their first warp has ended it; CTAs without work in a phase leave it at once.

Times are %globaltimer's on a GPU (`Profile.timer_ns` is the smallest step seen), and a CPU's steady clock's in the Host
reference, which has fewer phases: what is missing is part of the one after it, and data of ranks is gathered between phases.
On the emulated device a "nanosecond" is a switch from one thread to another: an order, not a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# As `Phase` in src/phase.h.
PHASES = (
    "heads", "attention", "merge_attention", "o_proj", "o_sum", "post_attention", "router", "pre_expert_proj", "top_k",
    "pooled", "moe_in", "expert_gate_up", "quantize_hidden", "expert_down", "combine", "post_expert_proj", "branch",
    "post_ffn", "embed", "qkv", "lm_head",
)  # fmt: skip
CONSUMERS, PRODUCER = ROLES = ("consumers", "producer")
# Phases whose data a phase reads, of the same layer; those of `heads` come from the layer before. As in ffi/README.md.
INPUTS = {
    "heads": ("qkv",),
    "attention": ("heads",),
    "merge_attention": ("attention", "heads"),
    "o_proj": ("merge_attention",),
    "o_sum": ("o_proj",),
    "post_attention": ("o_sum",),
    "router": ("post_attention",),
    "pre_expert_proj": ("post_attention",),
    "top_k": ("router",),
    "pooled": ("pre_expert_proj",),
    "moe_in": ("pooled",),
    "expert_gate_up": ("moe_in", "top_k"),
    "quantize_hidden": ("expert_gate_up",),
    "expert_down": ("expert_gate_up", "quantize_hidden"),
    "combine": ("expert_down", "top_k"),
    "post_expert_proj": ("combine",),
    "branch": ("post_expert_proj",),
    "post_ffn": ("branch",),
    "embed": (),
    "qkv": ("post_ffn", "embed"),
    "lm_head": ("post_ffn",),
}
# What the producer records: phases that read something through the ring, and the wait for the routing, `top_k`.
LOADED = (
    *("attention", "o_proj", "router", "pre_expert_proj", "top_k", "expert_gate_up", "expert_down", "post_expert_proj"),
    *("qkv", "lm_head"),
)
# What the Host reference records in every layer.
HOST = (
    *("attention", "o_proj", "post_attention", "router", "pre_expert_proj", "expert_gate_up", "expert_down", "combine"),
    *("post_expert_proj", "post_ffn", "embed", "qkv", "lm_head"),
)
AFTER_DOWN = ("combine", "post_expert_proj", "branch", "post_ffn")

# Of src/profile.h.
_MOST_CTAS = 192
_HEADER = np.dtype([("ctas", "<u4"), ("roles", "<u4"), ("rank", "<u4"), ("reserved", "<u4")])
_STORED = np.dtype([("begin_ns", "<u8"), ("end_ns", "<u8"), ("waited_ns", "<u4"), ("place", "<u4")])

EVENT = np.dtype(
    [
        *[(name, np.int32) for name in ("device", "rank", "cta", "role", "layer", "phase")],
        *[(name, np.int64) for name in ("begin_ns", "end_ns", "waited_ns")],
    ]
)


def places(num_layers: int) -> int:
    """How many events a thread has to keep so that none is lost."""
    return (num_layers + 1) * len(PHASES)


def words(ranks_here: int, events: int) -> int:
    """Of a rank in the result of a call."""
    ctas = _MOST_CTAS // ranks_here
    return (_HEADER.itemsize + ctas * len(ROLES) * events * _STORED.itemsize) // 4 if events else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A step.

    events: of dtype `EVENT`, by device, rank, CTA, role and time. layer: -1 is the embedding; the qkv projection of layer l + 1
      belongs to layer l. waited_ns: of consumers until the inputs were there, of the producer until stages were free.
    lost: events that the buffer had no place for; the first ones are kept.
    by_kernel: else by the Host reference, one thread for all ranks.
    """

    events: np.ndarray
    lost: int
    by_kernel: bool

    @property
    def span_ns(self) -> int:
        """From the first begin to the last end, on the device where this is longest."""
        devices = [self.events[self.events["device"] == device] for device in np.unique(self.events["device"])]
        return max((int(np.ptp([each["begin_ns"].min(), each["end_ns"].max()])) for each in devices), default=0)

    @property
    def timer_ns(self) -> int:
        """The smallest step of the clock that was seen; times are not finer."""
        steps = np.diff(np.unique(np.concatenate([self.events["begin_ns"], self.events["end_ns"]])))
        return int(steps.min()) if len(steps) else 0


def decode(num_layers: int, buffers: Sequence[np.ndarray]) -> Profile:
    """Reads what a step recorded.

    Args:     num_layers: of the model.  buffers: `VerifyResult.profile`, [Rh, words] uint32, of each device.
    Raises:   ValueError for something else, and for a call that was refused or given up.
    """
    if not buffers:
        raise ValueError("buffers is empty: expected one of each device")
    parts, lost, roles = [], 0, 0
    for device, buffer in enumerate(buffers):
        buffer = np.ascontiguousarray(buffer)
        kept = _events_kept(buffer)
        ranks = []
        for rank_buffer in buffer:
            rank, missing, roles = _decode_rank(num_layers, rank_buffer, kept, _MOST_CTAS // len(buffer))
            rank["device"] = device
            ranks.append(rank)
            lost += missing
        of_device = np.concatenate(ranks)
        _add_waits(of_device)
        parts.append(of_device)
    return Profile(np.concatenate(parts), lost, by_kernel=roles == len(ROLES))


def _events_kept(buffer: np.ndarray) -> int:
    """Of each thread."""
    shape = list(buffer.shape)
    if buffer.dtype == np.uint32 and buffer.ndim == 2 and 1 <= shape[0] <= 8:
        kept = (4 * shape[1] - _HEADER.itemsize) // (_MOST_CTAS // shape[0] * len(ROLES) * _STORED.itemsize)
        if kept > 0 and words(shape[0], kept) == shape[1]:
            return kept
    raise ValueError(f"a buffer is {buffer.dtype} {shape}: expected VerifyResult.profile, uint32 [Rh, words]")


def _decode_rank(num_layers: int, buffer: np.ndarray, kept: int, most_ctas: int) -> tuple[np.ndarray, int, int]:
    """buffer: [words].  kept: events of each thread.  Returns the events, how many are lost, and the roles that recorded."""
    header = buffer[:4].view(_HEADER)[0]
    ctas, roles, rank = (int(header[name]) for name in ("ctas", "roles", "rank"))
    if not ctas:
        raise ValueError("the call was refused or given up and has no profile: its status says why")
    stored = buffer[4:].view(_STORED).reshape(most_ctas, len(ROLES), kept)
    by_kernel = roles == len(ROLES)
    parts, lost = [], 0
    for role in range(roles):
        wanted = _places_of(num_layers, PHASES if by_kernel and role == 0 else LOADED if by_kernel else HOST)
        here = wanted[wanted < kept]
        lost += ctas * len(wanted) - min(ctas, most_ctas) * len(here)
        if not by_kernel:  # phases that not every layer has: zeros where there is none
            more = _places_of(num_layers, ("quantize_hidden",))
            more = more[more < kept]
            here = np.sort(np.concatenate([here, more[stored["end_ns"][0, role, more] > 0]]))
        found = stored[:ctas, role, here]
        if not (np.all(found["place"] == here) and np.all(found["begin_ns"] <= found["end_ns"])):
            raise ValueError(f"rank {rank} has not recorded the whole step: does num_layers = {num_layers} fit?")
        events = np.zeros(found.shape, EVENT)
        events["rank"], events["role"], events["cta"] = rank, role, np.arange(len(found), dtype=np.int32)[:, None]
        events["layer"], events["phase"] = here // len(PHASES) - 1, here % len(PHASES)
        for name in ("begin_ns", "end_ns", "waited_ns"):
            events[name] = found[name]
        order = np.lexsort((events["phase"], events["begin_ns"], events["layer"]))
        parts.append(np.take_along_axis(events, order, axis=1).reshape(-1))
    return np.concatenate(parts), lost, roles


def _places_of(num_layers: int, phases: Sequence[str]) -> np.ndarray:
    """Of the events of these phases in a step, ascending."""
    found = []
    for layer in range(-1, num_layers):
        for i, phase in enumerate(PHASES):
            ends = "lm_head" if layer + 1 == num_layers else "qkv"
            there = phase == ends if phase in ("qkv", "lm_head") else (phase == "embed") == (layer < 0)
            if there and phase in phases:
                found.append((layer + 1) * len(PHASES) + i)
    return np.asarray(found, np.int64)


def _add_waits(events: np.ndarray) -> None:
    """Fills `waited_ns` of consumers.  events: of one device, whose ranks and CTAs have one clock."""
    consumers = events["role"] == ROLES.index(CONSUMERS)
    keys = (events["layer"] + 1) * len(PHASES) + events["phase"]
    ends = np.zeros(keys.max(initial=0) + 1, np.int64)
    np.maximum.at(ends, keys[consumers], events["end_ns"][consumers])
    threads = np.unique(events[["rank", "cta"]][consumers])
    if len(threads) < 2:
        return  # nobody to wait for
    for key in np.unique(keys[consumers]):
        layer, phase = key // len(PHASES), PHASES[key % len(PHASES)]
        layer -= phase == "heads"
        inputs = [layer * len(PHASES) + PHASES.index(name) for name in INPUTS[phase]]
        ready = max((ends[i] for i in inputs), default=0)
        here = consumers & (keys == key)
        begin, end = events["begin_ns"][here], events["end_ns"][here]
        events["waited_ns"][here] = np.clip(ready - begin, 0, end - begin)


# ---- What it says -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PhaseRow:
    """A phase, over CTAs and layers. count: events; times of one: how long it took, and how much of that it waited.
    share: of all that the role's threads had of the step."""

    role: str
    phase: str
    count: int
    mean_us: float
    p10_us: float
    p90_us: float
    max_us: float
    waited_us: float
    share: float


def phase_table(profile: Profile) -> list[PhaseRow]:
    """Of consumers and of producers, in the order of time."""
    rows = []
    order = sorted(range(len(PHASES)), key=lambda i: (PHASES[i] != "embed", i))
    for role, name in enumerate(ROLES):
        events = profile.events[profile.events["role"] == role]
        threads = len(np.unique(events[["device", "rank", "cta"]])) if profile.by_kernel else 1
        for phase in order:
            here = events[events["phase"] == phase]
            if not len(here):
                continue
            us = (here["end_ns"] - here["begin_ns"]) / 1e3
            p10, p90 = np.percentile(us, (10, 90))
            numbers = (us.mean(), p10, p90, us.max(), here["waited_ns"].mean() / 1e3)
            share = us.sum() * 1e3 / (threads * max(profile.span_ns, 1))
            rows.append(PhaseRow(name, PHASES[phase], len(here), *map(float, numbers), float(share)))
    return rows


@dataclasses.dataclass(frozen=True)
class LayerTail:
    """What comes after the second GEMM of a layer's experts, where little is left to stream: from when the last CTA has ended
    `expert_down` until the last has ended `post_ffn`, and until it has ended `qkv` of the next layer (None in the last layer).
    idle: how much of it a CTA waited for inputs, on average; of `post_ffn`, and then with `qkv`."""

    layer: int
    to_post_ffn_us: float
    idle_us: float
    to_qkv_us: float | None
    idle_with_qkv_us: float | None


def layer_tails(profile: Profile) -> list[LayerTail]:
    """Of each layer that is there to its end; of several devices the one that takes longest."""
    consumers = profile.events[profile.events["role"] == ROLES.index(CONSUMERS)]
    tails = []
    for layer in np.unique(consumers["layer"][consumers["layer"] >= 0]):
        of_layer = consumers[consumers["layer"] == layer]
        tails += max(
            ([tail] for device in np.unique(of_layer["device"]) if (tail := _tail(of_layer[of_layer["device"] == device]))),
            key=lambda tail: tail[0].to_post_ffn_us,
            default=[],
        )
    return tails


def _tail(events: np.ndarray) -> LayerTail | None:
    """events: of a layer and a device."""

    def of(*phases: str) -> np.ndarray:
        return events[np.isin(events["phase"], [PHASES.index(phase) for phase in phases])]

    down, last, qkv = of("expert_down")["end_ns"], of("post_ffn")["end_ns"], of("qkv")["end_ns"]
    if not (len(down) and len(last)):
        return None

    def idle_us(*phases: str) -> float:
        return float(of(*phases)["waited_ns"].sum() / len(last) / 1e3)

    def us_to(ends: np.ndarray) -> float:
        return float(ends.max() - down.max()) / 1e3

    with_qkv = (us_to(qkv), idle_us(*AFTER_DOWN, "qkv")) if len(qkv) else (None, None)
    return LayerTail(int(events["layer"][0]), us_to(last), idle_us(*AFTER_DOWN), *with_qkv)


def tail_summary(tails: Sequence[LayerTail]) -> dict[str, dict[str, float]]:
    """Median and worst of each number of the tails, without those that have none."""
    numbers = {
        field.name: [value for tail in tails if (value := getattr(tail, field.name)) is not None]
        for field in dataclasses.fields(LayerTail)[1:]
    }
    return {
        name: {"median": float(np.median(values)), "worst": float(np.max(values))} for name, values in numbers.items() if values
    }


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """For Perfetto: a process is a rank, a thread a CTA's consumers or producer; times in us since the device's first event."""
    events: list[dict[str, Any]] = []
    for device in np.unique(profile.events["device"]):
        of_device = profile.events[profile.events["device"] == device]
        start = of_device["begin_ns"].min()
        for rank, cta, role in np.unique(of_device[["rank", "cta", "role"]]):
            where = {"ph": "M", "pid": int(rank), "tid": len(ROLES) * int(cta) + int(role)}
            if cta == 0 and role == 0:
                events.append(where | {"name": "process_name", "args": {"name": f"rank {rank}"}})
            events.append(where | {"name": "thread_name", "args": {"name": f"CTA {cta} {ROLES[role]}"}})
            events.append(where | {"name": "thread_sort_index", "args": {"sort_index": where["tid"]}})
        for event in of_device:
            events.append(
                {
                    "ph": "X",
                    "name": PHASES[event["phase"]],
                    "cat": ROLES[event["role"]],
                    "pid": int(event["rank"]),
                    "tid": len(ROLES) * int(event["cta"]) + int(event["role"]),
                    "ts": int(event["begin_ns"] - start) / 1e3,
                    "dur": int(event["end_ns"] - event["begin_ns"]) / 1e3,
                    "args": {"layer": int(event["layer"]), "waited_us": int(event["waited_ns"]) / 1e3},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ns"}
