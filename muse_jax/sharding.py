"""Placement of parameters and caches on a mesh with one axis, `tp`.

Attention is split by heads, experts on the output rows of both GEMMs (N), vocabulary by rows; norms, gates and the router
are replicated. `layout.TensorSpec.shard_axis` says which axis; an axis that the ranks do not divide is replicated.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec

AXIS = "tp"
MESH_SIZES = (1, 2, 4, 8)


def make_mesh(num_devices: int) -> Mesh:
    """A mesh of the first `num_devices` devices. Raises ValueError if there are fewer or the number is not allowed."""
    if num_devices not in MESH_SIZES:
        raise ValueError(f"devices = {num_devices}: allowed are {', '.join(map(str, MESH_SIZES))}")
    devices = jax.devices()
    if num_devices > len(devices):
        hint = f"; JAX_NUM_CPU_DEVICES={num_devices} makes virtual ones" if devices[0].platform == "cpu" else ""
        raise ValueError(f"devices = {num_devices}: this machine has {len(devices)} ({devices[0].platform}){hint}")
    return Mesh(devices[:num_devices], (AXIS,))


def check_mesh(mesh: Mesh) -> None:
    if mesh.axis_names != (AXIS,) or mesh.size not in MESH_SIZES:
        sizes = ", ".join(map(str, MESH_SIZES))
        raise ValueError(f"mesh has axes {dict(mesh.shape)}: expected one axis {AXIS!r} of {sizes} devices")


def param_sharding(spec: TensorSpec, mesh: Mesh) -> NamedSharding:
    """Where a parameter lives."""
    axes: list[str | None] = [None] * len(spec.param_shape)
    if spec.is_split(mesh.size):
        axes[spec.shard_axis] = AXIS
    return NamedSharding(mesh, PartitionSpec(*axes))


def cache_sharding(config: ModelConfig | DraftConfig, mesh: Mesh) -> NamedSharding:
    """Where a layer's keys or values [B, K, slots, H] live: by KV heads, or everywhere if the ranks do not divide them."""
    heads = AXIS if config.num_key_value_heads % mesh.size == 0 else None
    return NamedSharding(mesh, PartitionSpec(None, heads, None, None))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
