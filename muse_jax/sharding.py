"""Work and memory of eight ranks on a mesh of 1, 2, 4 or 8 devices with one axis, `tp`.

Attention is cut by heads, experts and projections by output rows (N), what is added up afterwards (o_proj, dense down_proj)
by columns, the vocabulary by rows; norms, residual gates and the router are everywhere. `layout` says which axis.

A step is written for eight ranks, and a device runs 8 / tp of them, one after the other. So every operation has the same
shape whatever tp is, and as XLA chooses algorithms by shape, a step has the same bits on 1, 2, 4 and 8 devices. `Ranks` holds
that form: modules cut their arrays with `split`, run a function once per rank with `run`, and put the results together with
`gather` and `sum`, the only places where something travels. What a rank does, and what stands in for a collective on one
device, is isolated: fusing across its borders would depend on tp, and a fused product and sum may be contracted to one
rounding. On CPUs it is a call that XLA does not inline (`isolated`); XLA for GPUs fuses nothing within such a call, so there it
is fenced by optimization barriers, which XLA for CPUs drops before it fuses.

Without a mesh there is one rank, nothing is cut, and the same code is the plain step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import NUM_RANKS, TensorSpec, cuts_heads

AXIS = "tp"
MESH_SIZES = (1, 2, 4, 8)
MOE_SHARDINGS = ("n", "expert", "replicated")


def isolated(function: Callable) -> Callable:
    """`function` as a call that XLA keeps as one, so that nothing in it is fused with anything outside."""

    @jax.jit
    @functools.wraps(function)
    def called(*args: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # calls inside, such as those of a loop, are ordinary ones
            return function(*args)

    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return called(*args)

    return call


def _fenced(function: Callable) -> Callable:
    def call(*args: Any) -> Any:
        return lax.optimization_barrier(function(*lax.optimization_barrier(args)))

    return call


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The parts that work is cut into, and the devices that share them: device d of a mesh runs ranks d * local and on.

    count: NUM_RANKS, or 1 where nothing is cut.
    devices: 1: this device runs every rank, and nothing travels; else the size of the mesh axis, inside `jax.shard_map`.
    loopback: this device is the first of `devices`, without the others: wherever it waits for their data it finds its own. The
      work of one rank of a large mesh, for measuring; the results mean nothing.

    calls: the work of a rank is isolated by a call, else by barriers.

    Lists have one entry for each rank of this device, in order.
    """

    count: int = 1
    devices: int = 1
    loopback: bool = False
    calls: bool = True

    @property
    def local(self) -> int:
        """Ranks of a device."""
        return self.count // self.devices

    @property
    def everywhere(self) -> Ranks:
        """The same ranks, all of them on every device: for what is there as a whole and yet done part by part."""
        return Ranks(self.count, calls=self.calls)

    def isolate(self, function: Callable) -> Callable:
        """`function` with nothing in it fused with anything outside."""
        return isolated(function) if self.calls else _fenced(function)

    def index(self, i: int) -> jax.Array:
        """The number of this device's rank i, int32."""
        first = lax.axis_index(AXIS) * self.local if self.devices > 1 and not self.loopback else 0
        return jnp.int32(first + i)

    def split(self, x: jax.Array, axis: int, parts: int | None = None) -> list[jax.Array]:
        """Cuts what this device holds into one piece a rank.

        Args:     parts: different pieces, where several ranks share one (KV heads fewer than ranks).
        """
        parts = self.local if parts is None else parts
        pieces = jnp.split(x, parts, axis) if parts > 1 else [x]
        return [pieces[i * parts // self.local] for i in range(self.local)]

    def join(self, pieces: Sequence[jax.Array], axis: int, parts: int | None = None) -> jax.Array:
        """The inverse of `split`."""
        pieces = pieces[:: self.local // (self.local if parts is None else parts)]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)

    def select(self, x: jax.Array, axis: int) -> list[jax.Array]:
        """The pieces of this device's ranks from an array that every device has whole."""
        if self.count == 1:
            return [x]
        axis %= x.ndim
        sizes = (*x.shape[:axis], x.shape[axis] // self.count, *x.shape[axis + 1 :])
        zeros = [jnp.int32(0)] * x.ndim

        def of_rank(i: int) -> jax.Array:
            begin = [*zeros[:axis], self.index(i) * sizes[axis], *zeros[axis + 1 :]]
            return lax.dynamic_slice(x, begin, sizes, allow_negative_indices=False)

        return [of_rank(i) for i in range(self.local)]

    def run(self, function: Callable, *args: Any) -> list:
        """[function(*args) for each rank]. A list among the arguments has an entry per rank; others are the same for all."""
        if self.count == 1:
            return [function(*(arg[0] if isinstance(arg, list) else arg for arg in args))]
        function = self.isolate(function)
        return [function(*(arg[i] if isinstance(arg, list) else arg for arg in args)) for i in range(self.local)]

    def gather(self, pieces: Sequence[jax.Array], axis: int) -> jax.Array:
        """The pieces of all ranks side by side, on every device."""
        if self.count == 1:
            return pieces[0]
        axis %= pieces[0].ndim
        if self.devices == 1:
            return self.isolate(lambda *pieces: jnp.concatenate(pieces, axis))(*pieces)
        return self._gather(jnp.stack(pieces), axis)

    def sum(self, terms: Sequence[jax.Array]) -> jax.Array:
        """The terms of all ranks added from rank 0 to rank 7, on every device.

        Small terms go to every device in one exchange. Of large ones each device adds up a part of the last axis for all.
        """
        if self.count == 1:
            return terms[0]

        def in_order(stacked: jax.Array) -> jax.Array:
            # The axis of ranks is dropped at the end: XLA moves a reshape past one addition in each round of simplifications.
            return functools.reduce(jnp.add, jnp.split(stacked, self.count))[0]

        add = self.isolate(in_order)
        stacked, axis = jnp.stack(terms), terms[0].ndim  # of the last axis of `stacked`
        if self.devices == 1:
            return add(stacked)
        if self.loopback or stacked.shape[axis] % self.devices or terms[0].size * self.count * 4 <= _ONE_SHOT_BYTES:
            return add(self._of_all_devices(stacked))
        stacked = lax.all_to_all(stacked, AXIS, split_axis=axis, concat_axis=0, tiled=True)
        return self._gather(add(stacked)[None], axis - 1)

    def _gather(self, stacked: jax.Array, axis: int) -> jax.Array:
        """Pieces [n, ...] of every device -> all of them side by side along `axis`.

        They travel along an axis of their own, and a call puts them side by side: XLA would lay out what it gathers along
        another axis as it likes, and compile what reads it for that layout.
        """
        stacked = self._of_all_devices(stacked)
        return self.isolate(lambda stacked: lax.collapse(jnp.moveaxis(stacked, 0, axis), axis, axis + 2))(stacked)

    def max(self, terms: Sequence[jax.Array]) -> jax.Array:
        """The largest of all ranks, elementwise, on every device: exact in any order."""
        if self.count == 1:
            return terms[0]
        largest = self.isolate(lambda *terms: functools.reduce(jnp.maximum, terms))(*terms)
        return self._reduced(lax.pmax, largest)

    def count_sum(self, terms: Sequence[jax.Array]) -> jax.Array:
        """Integers of all ranks added up, on every device."""
        total = functools.reduce(jnp.add, terms)
        return self._reduced(lax.psum, total)

    def _of_all_devices(self, x: jax.Array) -> jax.Array:
        """The arrays of all devices one after the other along axis 0."""
        if self.loopback:  # nothing is fused over what would be a collective
            return lax.optimization_barrier(jnp.concatenate([lax.optimization_barrier(x)] * self.devices))
        return lax.all_gather(x, AXIS, axis=0, tiled=True)

    def _reduced(self, collective: Callable, x: jax.Array) -> jax.Array:
        return x if self.devices == 1 or self.loopback else collective(x, AXIS)

    def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows of a table that is cut by rows.

        Args:     table: [rows of this device, D].  ids: any shape, int32, of the whole table.
        Returns:  [*ids.shape, D], on every device.
        """
        if self.count == 1:
            return table[ids]
        if self.devices == 1:
            return self.isolate(lambda table, ids: table[ids])(table, ids)
        rows = table.shape[0]
        here = ids - self.index(0) * (rows // self.local)
        inside = ((here >= 0) & (here < rows))[..., None]
        found = table[jnp.clip(here, 0, rows - 1)]  # [*ids.shape, D]
        found = jnp.where(inside, found, jnp.zeros_like(found))
        # One device has the row and the others zeros: as integers their sum keeps every bit, -0 and NaN too.
        width = max(1, 4 // found.dtype.itemsize)
        padding = -found.shape[-1] % width
        found = jnp.pad(found, [(0, 0)] * ids.ndim + [(0, padding)])
        words = found.reshape(*ids.shape, -1, width) if width > 1 else found
        words = self._reduced(lax.psum, lax.bitcast_convert_type(words, jnp.uint32))
        rows = lax.bitcast_convert_type(words, found.dtype).reshape(found.shape)
        return rows[..., : table.shape[1]]


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """How a model is shared among devices; static.

    num_devices: of the mesh; None: no mesh, one rank, nothing is cut.
    moe_sharding: which part of the routed experts a device has: "n", an eighth (or more) of the output rows of every matrix
      of every expert; "expert", some experts whole; "replicated", all of them.
    moe_exchange: what travels after the second GEMM with "n": "sums", each row's sums of squares, then the mixed rows;
      "rows", the rows themselves. The same bits.
    group_slots: the weighted sum over a token's experts is formed as "expert" has to, first within each rank's experts, then
      over ranks; always so with "expert".
    loopback: one device plays the first of `num_devices` (`Ranks.loopback`), without a mesh.
    calls: `Ranks.calls`: True for CPUs, False for GPUs.
    """

    num_devices: int | None = None
    moe_sharding: str = "n"
    moe_exchange: str = "sums"
    group_slots: bool = False
    loopback: bool = False
    calls: bool = True

    def __post_init__(self) -> None:
        if self.moe_sharding not in MOE_SHARDINGS:
            allowed = ", ".join(map(repr, MOE_SHARDINGS))
            raise ValueError(f"moe_sharding = {self.moe_sharding!r}: allowed are {allowed}")
        if self.moe_exchange not in ("sums", "rows"):
            raise ValueError(f"moe_exchange = {self.moe_exchange!r}: allowed are 'sums', 'rows'")

    def check_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if the experts cannot be shared in this way."""
        by_expert = self.num_devices is not None and (self.moe_sharding == "expert" or self.group_slots)
        if by_expert and config.num_local_experts % NUM_RANKS:
            raise ValueError(
                f"moe_sharding = {self.moe_sharding!r}: {config.num_local_experts} experts cannot be shared by "
                f"{NUM_RANKS} ranks; allowed are 'n' and 'replicated'"
            )

    @property
    def ranks(self) -> Ranks:
        """Of what is cut."""
        return Ranks() if self.num_devices is None else Ranks(NUM_RANKS, self.num_devices, self.loopback, self.calls)

    @property
    def mesh_size(self) -> int | None:
        """Devices of the mesh that arrays live on."""
        return None if self.loopback else self.num_devices


# All terms of a sum that go to every device at once rather than a part to each: those of a step of the released model, 16
# rows of 8192 numbers.
_ONE_SHOT_BYTES = 4 << 20

ONE_DEVICE = ShardingConfig()


def make_mesh(num_devices: int) -> Mesh:
    """A mesh of the first `num_devices` devices, as many of each process. Raises ValueError if there are fewer or the number
    is not allowed."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices not in MESH_SIZES:
        raise ValueError(f"devices = {num_devices!r}: allowed are {', '.join(map(str, MESH_SIZES))}")
    devices = jax.devices() if jax.process_count() == 1 else _evenly(num_devices)
    if num_devices > len(devices):
        hint = f"; JAX_NUM_CPU_DEVICES={num_devices} makes virtual ones" if devices[0].platform == "cpu" else ""
        raise ValueError(f"devices = {num_devices}: this machine has {len(devices)} ({devices[0].platform}){hint}")
    return Mesh(devices[:num_devices], (AXIS,))


def _evenly(num_devices: int) -> list[jax.Device]:
    """The first devices of every process, `num_devices` in all."""
    processes, devices = jax.process_count(), []
    if num_devices % processes:
        raise ValueError(f"devices = {num_devices}: {processes} processes cannot have the same number of them")
    for process in range(processes):
        own, share = jax.local_devices(process_index=process), num_devices // processes
        if len(own) < share:
            raise ValueError(f"devices = {num_devices}: {share} in each process, but process {process} has {len(own)}")
        devices += own[:share]
    return devices


def check_mesh(mesh: Mesh) -> Mesh:
    """The mesh with the kind of axis that a step needs (`jax.make_mesh` makes another).

    Raises ValueError if it does not fit.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: expected what muse_jax.sharding.make_mesh makes")
    if mesh.axis_names != (AXIS,) or mesh.size not in MESH_SIZES:
        sizes = ", ".join(map(str, MESH_SIZES))
        raise ValueError(f"mesh has axes {dict(mesh.shape)}: expected one axis {AXIS!r} of {sizes} devices")
    return Mesh(mesh.devices, (AXIS,))


def param_spec(spec: TensorSpec, sharding: ShardingConfig) -> PartitionSpec:
    """Which axis of a parameter the devices share."""
    axis = spec.shard_axis
    if sharding.moe_sharding != "n" and not {"gate_up", "down"}.isdisjoint(spec.path):
        axis = 0 if sharding.moe_sharding == "expert" else None
    axes: list[str | None] = [None] * len(spec.param_shape)
    if axis is not None:
        axes[axis] = AXIS
    return PartitionSpec(*axes)


def copies(spec: TensorSpec, num_devices: int) -> int:
    """Neighbouring devices that hold the same part, and so how often the array of a mesh has it."""
    return 1 if spec.shard_axis is None else max(1, num_devices // spec.num_parts)


def placement(
    mesh: Mesh, sharding: ShardingConfig
) -> tuple[Callable[[TensorSpec], NamedSharding], Callable[[TensorSpec], int]]:
    """Where each parameter's array lives, and its `copies`: what `checkpoints.sharded_put` takes."""
    return lambda spec: NamedSharding(mesh, param_spec(spec, sharding)), lambda spec: copies(spec, mesh.size)


def cache_spec(config: ModelConfig | DraftConfig) -> PartitionSpec:
    """Of a layer's keys or values [B, K, slots, H]: by KV heads."""
    return PartitionSpec(None, AXIS if cuts_heads(config) else None, None, None)


def cache_heads(config: ModelConfig | DraftConfig, sharding: ShardingConfig) -> int:
    """KV heads of the caches' arrays: as `copies`, every device has one of its own."""
    heads, devices = config.num_key_value_heads, sharding.num_devices
    if devices is None or not cuts_heads(config):
        return heads
    return max(heads, devices) // (devices if sharding.loopback else 1)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
