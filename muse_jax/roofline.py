"""What one decode step reads, launches and waits for, phase by phase, and the least time that takes on a device.

Bytes of weights are those of the layout's tables, so there is no second list of shapes. Phases are those of a megakernel:
one launch covers a layer from its attention to the qkv projection of the next, as little as possible waits for the whole grid,
and every weight is read once. Activations, partial results and what is written are not counted: they stay in the L2 cache.

The time of the bytes alone is the floor. The other terms come on top only as far as nothing hides them; their sum with the
floor is the time *in series*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from muse_jax.config import MLPKind, ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import NUM_RANKS, PackedTensor, packed_tensors

# ------------------------------------------------------------------------------------------------------------- devices


class Constant(NamedTuple):
    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class Device:
    """What a step is timed with."""

    bandwidth: Constant  # of the memory
    launch: Constant  # of a kernel
    sync: Constant  # a point where every SM waits for all others of its GPU
    latency: Constant  # of what another GPU sends
    link: Constant  # into a GPU from all others


_PROBED = "measured on one H200, Nov 2026"
# 62 layers of weights through a ring, 8 grid barriers a layer: 58.6 us a layer with relaxed adds, 53 without barriers.
_SYNC_US = (58.6 - 53) / 8
_H200_SYNC = f"{_PROBED}: a barrier without fence while copies are in flight, (58.6 - 53) / 8"
_H200_LAUNCH = f"{_PROBED}: empty kernels of a graph with dependent launch (0.9 where XLA captured a step of 75)"
H200 = Device(
    bandwidth=Constant(4.55, "TB/s", f"{_PROBED}: 2 GiB through a ring of bulk copies"),
    launch=Constant(0.55, "us", _H200_LAUNCH),
    sync=Constant(_SYNC_US, "us", _H200_SYNC),
    latency=Constant(0.73, "us", "measured between two H200s, Nov 2026: a flag, one way"),
    link=Constant(365, "GB/s", "measured between two H200s, Nov 2026: stores of 16 bytes from 132 blocks"),
)
GB300 = Device(
    bandwidth=Constant(8.0, "TB/s", "nominal, the figure of the published floor (2.13 ms for 17.0 GB)"),
    launch=Constant(0.55, "us", f"none published; {_H200_LAUNCH}"),
    sync=Constant(_SYNC_US, "us", f"none published; {_H200_SYNC}"),
    latency=Constant(1.9, "us", "published, Nov 2026: a flag, one way"),
    link=Constant(900, "GB/s", "none published; nominal for NVLink 5, one direction"),
)
DEVICES = {"h200": H200, "gb300": GB300}
GRAPH_LAUNCH = Constant(0.86, "us", f"{_PROBED}: empty kernels of a graph, no dependent launch")


def _start_and_end_us() -> float:
    """A kernel that streams b bytes takes t + b / rate; two sizes give t, from which its launch is taken off."""
    (large, large_rate), (small, small_rate) = (2**31, 4.55e6), (245 * 2**20, 4.1e6)  # bytes, bytes per us
    rate = (large - small) / (large / large_rate - small / small_rate)
    return small / small_rate - small / rate - GRAPH_LAUNCH.value


START_AND_END = Constant(
    _start_and_end_us(), "us", f"{_PROBED}: 4.55 TB/s on 2 GiB, 4.1 on 245 MiB, less a launch; within 1 us, as 4.1 is rounded"
)


# -------------------------------------------------------------------------------------------------------------- phases


class _Kind(NamedTuple):
    group: str
    points: int = 0  # of a run, where every SM needs what all others made; the end of a launch is not counted
    launches: int = 0  # that begin with a run of it


# In the order of a step.
_KINDS = {
    "draft.fc": _Kind("draft layers", 1, 1),
    "draft.embed": _Kind("draft layers"),
    "draft.attention_conv": _Kind("draft layers", 1, 1),
    "draft.qkv": _Kind("draft layers", 1),
    "draft.attention": _Kind("draft layers", 1),
    "draft.o_proj": _Kind("draft layers", 1),
    "draft.mlp_conv": _Kind("draft layers", 1),
    "draft.gate_up": _Kind("draft layers", 1),
    "draft.down": _Kind("draft layers"),
    "draft.final_norm": _Kind("draft head"),
    "draft.lm_head": _Kind("draft head", 0, 1),
    "draft.selector": _Kind("draft head", 1, 1),
    "embed": _Kind("embedding and head", 0, 1),
    "attention": _Kind("attention", 1, 1),
    "o_proj": _Kind("attention", 1),
    "post_attn": _Kind("attention"),
    "router": _Kind("router and projections", 1),
    "pre_expert_proj": _Kind("router and projections", 1),
    "expert_gate_up": _Kind("experts"),
    "gather_fp4": _Kind("experts", 1),
    "expert_down": _Kind("experts"),
    "gather_bf16": _Kind("experts", 1),
    "combine": _Kind("experts"),
    "post_expert_proj": _Kind("router and projections", 1),
    "dense_gate_up": _Kind("dense FFN", 1),
    "dense_down": _Kind("dense FFN", 1),
    "post_ffn": _Kind("router and projections"),
    "qkv": _Kind("attention"),
    "final_norm": _Kind("embedding and head"),
    "lm_head": _Kind("embedding and head", 0, 1),
    "sampling": _Kind("embedding and head", 1, 1),
}

# The phase that reads a parameter, by a name in its path.
_READ_BY = {
    "embedding": "embed",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "attn_out_gate": "qkv",
    "o_proj": "o_proj",
    "post_attention_gate": "post_attn",
    "pre_ffn_norm": "post_attn",
    "router": "router",
    "router_bias": "router",
    "pre_expert_proj": "pre_expert_proj",
    "pre_expert_norm": "pre_expert_proj",
    "gate_up": "expert_gate_up",
    "down": "expert_down",
    "post_expert_norm": "combine",
    "post_expert_proj": "post_expert_proj",
    "gate_proj": "dense_gate_up",
    "up_proj": "dense_gate_up",
    "down_proj": "dense_down",
    "post_ffn_norm": "post_ffn",
    "post_ffn_gate": "post_ffn",
    "input_norm": "post_ffn",  # of the layer before
    "final_norm": "final_norm",
    "lm_head": "lm_head",
}
_DRAFT_READ_BY = {
    "fc": "fc",
    "hidden_norm": "fc",
    "mask_embedding": "embed",
    "input_norm": "attention_conv",
    "attention_conv": "attention_conv",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "q_bias": "qkv",
    "k_bias": "qkv",
    "v_bias": "qkv",
    "q_norm": "qkv",
    "k_norm": "qkv",
    "o_proj": "o_proj",
    "o_bias": "o_proj",
    "pre_ffn_norm": "mlp_conv",
    "mlp_conv": "mlp_conv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "final_norm": "final_norm",
    "predecessor_codebook": "selector",
    "successor_codebook": "selector",
    "selector_projection": "selector",
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step: what one rank does in all its layers together."""

    name: str
    group: str
    runs: int
    weight_bytes: int = 0
    kv_bytes: int = 0
    launches: int = 0
    syncs: int = 0
    exchanges: int = 0  # points that wait for other ranks; each is one of `syncs`, too
    exchange_bytes: int = 0  # that come from other ranks
    streams: int = 0  # GEMMs that read weights: as many kernels at least, in a chain of kernels

    @property
    def in_draft(self) -> bool:
        return self.name.startswith("draft.")

    def times(self, device: Device) -> dict[str, float]:
        """Microseconds, by what they are spent on."""
        return {
            "weights": self.weight_bytes / device.bandwidth.value / 1e6,
            "kv": self.kv_bytes / device.bandwidth.value / 1e6,
            "launches": self.launches * device.launch.value,
            "syncs": self.syncs * device.sync.value,
            "exchanges": self.exchanges * device.latency.value + self.exchange_bytes / device.link.value / 1e3,
        }


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a step of one sequence.

    tp: ranks.  rows: that the target verifies.  context: positions in the caches before the step.  experts: different ones
    that the rows of a layer use.  activations: "nvfp4" gathers codes and scales between the experts' GEMMs, where the layer
    is NVFP4, else rows of the model's dtype (scales of a whole row would be one more exchange).  moe_exchange: "rows" gathers
    what experts give, "sums" sums of squares and then mixed rows.
    """

    tp: int = 8
    rows: int = 16
    context: int = 2048
    experts: float = 49.0
    activations: str = "nvfp4"
    moe_exchange: str = "rows"


def uniform_experts(config: ModelConfig, rows: int) -> float:
    """Different experts that rows use on average, if each takes any `num_experts_per_tok` of them with equal chance."""
    return config.num_local_experts * (1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** rows)


def busiest_rank(experts: int, num_experts: int, tp: int) -> float:
    """Experts in use on the rank that has most, on average, if ranks hold whole experts and any set is equally likely."""
    size, mean = num_experts // tp, 0.0
    for most in range(min(experts, size)):
        ways = [1]  # to choose n experts with at most `most` of each rank so far, by n
        for _ in range(tp):
            grown = [0] * (len(ways) + most)
            for n, count in enumerate(ways):
                for more in range(most + 1):
                    grown[n + more] += count * math.comb(size, more)
            ways = grown[: experts + 1]
        at_most = ways[experts] if experts < len(ways) else 0
        mean += 1 - at_most / math.comb(size * tp, experts)
    return mean


def weight_bytes(config: ModelConfig, draft: DraftConfig | None, settings: Settings) -> dict[tuple[str, int | None], int]:
    """Bytes of weights that one rank reads, by phase and layer (None: outside the layers)."""
    found: dict[tuple[str, int | None], int] = {}
    for phase, layer, _, nbytes in _reads(config, draft, settings):
        found[phase, layer] = found.get((phase, layer), 0) + nbytes
    return found


def step(config: ModelConfig, draft: DraftConfig | None, settings: Settings) -> list[Phase]:
    """The phases of a step, in order; those that the model does not have are left out."""
    layers: dict[str, set[int | None]] = {name: set() for name in _KINDS}
    streams: dict[str, set[int | None]] = {name: set() for name in _KINDS}
    nbytes, kv_bytes = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS, 0)
    cut: set[str] = set()
    for phase, layer, tensor, count in _reads(config, draft, settings):
        layers[phase].add(layer)
        nbytes[phase] += count
        if tensor.tile is not None:
            streams[phase].add(layer)
        if tensor.spec.shard_axis is not None:
            cut.add(phase)
        if tensor.spec.path[-1] in ("k_proj", "v_proj"):  # what a row of them gives is what the cache holds of a position
            of_draft = phase.startswith("draft.")
            attention = "draft.attention" if of_draft else "attention"
            layers[attention].add(layer)
            row = tensor.shape[0] * tensor.dtype.itemsize
            kv_bytes[attention] += row * _positions(draft if of_draft else config, layer, settings)
    sparse = {i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.SPARSE}
    layers["gather_fp4"] |= sparse
    layers["gather_bf16"] |= sparse
    layers["sampling"].add(None)

    phases = []
    for name, kind in _KINDS.items():
        if not layers[name]:
            continue
        exchanges = [_exchanges(name, layer, config, draft, settings, cut) for layer in layers[name]]
        phases.append(
            Phase(
                name,
                kind.group,
                runs=len(layers[name]),
                weight_bytes=nbytes[name],
                kv_bytes=kv_bytes[name],
                launches=kind.launches * len(layers[name]),
                syncs=sum(max(kind.points, len(sizes)) for sizes in exchanges),
                exchanges=sum(map(len, exchanges)),
                exchange_bytes=sum(map(sum, exchanges)),
                streams=len(streams[name]),
            )
        )
    return phases


def _reads(
    config: ModelConfig, draft: DraftConfig | None, settings: Settings
) -> Iterator[tuple[str, int | None, PackedTensor, int]]:
    """(phase, layer, tensor, bytes that a rank reads of it) for all tensors of target and draft."""
    share = settings.experts / config.num_local_experts

    def some_rows(tensor: PackedTensor, count: int) -> int:
        """Of a table from which rows are taken, which may all be on one rank."""
        return tensor.nbytes // tensor.shape[0] * min(count, tensor.shape[0])

    for tensor in packed_tensors(config, settings.tp):
        path = tensor.spec.path
        layer = path[1] if path[0] == "layers" else None
        phase = next(_READ_BY[name] for name in reversed(path) if name in _READ_BY)
        nbytes = tensor.nbytes
        if phase in ("expert_gate_up", "expert_down"):
            nbytes = 0 if path[-1] == "input_scale" else round(nbytes * share)
        if phase == "embed":
            nbytes = some_rows(tensor, settings.rows)
            if draft is not None:
                yield "draft.embed", None, tensor, some_rows(tensor, 2)  # the anchor's and the mask's
        if phase == "lm_head" and draft is not None:
            yield "draft.lm_head", None, tensor, nbytes
        yield phase, layer, tensor, nbytes
    if draft is None:
        return
    for tensor in packed_tensors(draft, settings.tp):
        path = tensor.spec.path
        layer = path[1] if path[0] == "layers" else None
        phase = next(_DRAFT_READ_BY[name] for name in reversed(path) if name in _DRAFT_READ_BY)
        nbytes = tensor.nbytes
        if path[-1] in ("predecessor_codebook", "successor_codebook"):
            nbytes = some_rows(tensor, draft.num_predictions * draft.selector_top_k)
        yield f"draft.{phase}", layer, tensor, nbytes


def _positions(config: ModelConfig | DraftConfig, layer: int, settings: Settings) -> int:
    """Keys that the rows of a layer see together: those before the step and the rows themselves."""
    rows = config.block_size if isinstance(config, DraftConfig) else settings.rows
    window = config.window(layer)
    return rows + (settings.context if window is None else min(settings.context, window - 1))


def _exchanges(
    phase: str,
    layer: int | None,
    config: ModelConfig,
    draft: DraftConfig | None,
    settings: Settings,
    cut: set[str],  # phases whose weights are shared by ranks
) -> list[int]:
    """Bytes that a rank receives in one run of a phase, in each exchange; empty where the rank has what it needs."""
    tp, rows = settings.tp, settings.rows
    if tp == 1:
        return []
    d, m = config.hidden_size, config.moe_hidden_size
    value = 2 if config.dtype == "bfloat16" else 4

    def gathered(nbytes: int) -> int:
        return nbytes * (tp - 1) // tp

    def summed(rows: int) -> list[int]:
        """Eight partial sums in fp32, each rank adding its columns in order and sending the sums on."""
        return [gathered(rows * d * 4 * NUM_RANKS // tp), gathered(rows * d * 4)]

    slots = rows * config.num_experts_per_tok
    sums = settings.moe_exchange == "sums"
    hidden = value * config.moe_intermediate_size
    if settings.activations == "nvfp4" and layer in config.nvfp4_layers:
        hidden = config.moe_intermediate_size * 9 // 16  # a code of half a byte, and a scale for sixteen
    target = {
        "embed": ("embed", [rows * d * value]),
        "pre_expert_proj": ("pre_expert_proj", [rows * m * value]),
        "gather_fp4": ("expert_gate_up", [slots * hidden]),
        "gather_bf16": ("expert_down", [slots * 4 * tp if sums else slots * m * value]),
        "combine": ("expert_down", [rows * m * value] if sums else []),
        "post_expert_proj": ("post_expert_proj", [rows * d * value]),
        "sampling": ("lm_head", [rows * 8 * tp]),  # the best token of each part, and its score
    }
    if phase in target:
        weights, sizes = target[phase]
        return [gathered(size) for size in sizes] if weights in cut else []
    if phase in ("o_proj", "dense_down"):
        return summed(rows) if phase in cut else []
    if draft is None or phase not in cut:
        return []
    block, candidates = draft.block_size, draft.num_predictions * draft.selector_top_k
    if phase in ("draft.fc", "draft.o_proj", "draft.down"):
        return summed(block)
    coefficients = block * 2 * draft.conv_kernel_size * draft.conv_groups * 4
    in_draft = {
        "draft.embed": [2 * d * value],
        "draft.attention_conv": [coefficients],
        "draft.mlp_conv": [coefficients],
        # Candidates with their scores and the projected rows at once, then the rows of both codebooks.
        "draft.selector": [
            candidates * 8 * tp + draft.num_predictions * draft.selector_rank * 4,
            2 * candidates * draft.selector_rank * value,
        ],
    }
    return [gathered(size) for size in in_draft.get(phase, [])]
