"""Which implementation runs a step. The choice is explicit: asking for one that cannot serve is an error.

A `Backend` has the operations of a step that may be fused. The modules of target and draft call them through it; everything
else is the same for all backends.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from muse_jax import kv_cache, ops, tree
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.numerics import SERVING, Numerics
from muse_jax.sharding import ShardingConfig

BACKENDS = ("xla", "pallas")
Config = ModelConfig | DraftConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """`xla`: every operation in plain jnp, the reference of the other backends, which override what they have kernels for."""

    name: ClassVar[str] = "xla"

    linears = staticmethod(ops.linears)
    gated_linear = staticmethod(ops.gated_linear)
    qk_norm_rope = staticmethod(ops.qk_norm_rope)
    out_gate = staticmethod(ops.out_gate)
    blend_norm = staticmethod(ops.blend_norm)
    quantize_rows = staticmethod(ops.quantize_rows)
    combine_pieces = staticmethod(ops.combine_pieces)
    grouped_conv = staticmethod(ops.grouped_conv)
    lattice = staticmethod(ops.lattice)
    build_tree = staticmethod(tree.build)
    decode_context = staticmethod(kv_cache.DecodeContext.create)

    def route(self, rows: jax.Array, router: jax.Array, bias: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
        scalars = config.num_experts_per_tok, config.output_multiplier, config.routed_scaling_factor
        return ops.route(rows, router, bias, *scalars)

    @property
    def paths(self) -> dict[str, list[str]]:
        """For each operation that has a kernel, what ran it in the programs traced so far, with the reason if that was not the
        kernel."""
        return {}

    def stored(self, name: str, value: Any, config: Config, sharding: ShardingConfig) -> Any:
        """The parameter `name` as this backend keeps it. value: arrays or their shapes, as in the checkpoint."""
        return value

    def stored_params(self, params: dict, config: Config, sharding: ShardingConfig, mesh: Mesh | None) -> dict:
        """A parameter tree as this backend keeps it; the given one is used up."""
        return params

    def stored_specs(self, specs: dict, params: dict) -> dict:
        """Where the parameters of such a tree live on the mesh. specs: of the tree as in the checkpoint."""
        return specs

    def fuses_experts(self, weight: Any) -> bool:
        """Whether there is a kernel for experts stored like this."""
        return False


XLA = Backend()


def resolve_backend(
    backend: str, platform: str = "cpu", numerics: Numerics = SERVING, has_nvfp4: bool = False, num_devices: int = 1
) -> Backend:
    """The backend that serves a request for `backend` on so many devices of a platform in this process.

    "auto" takes `pallas` where it serves and was timed to be faster: on Hopper GPUs, for models with NVFP4 experts; else `xla`.
    On a CPU `pallas` runs its kernels interpreted, which is for tests, on one device.

    Raises: ValueError that names the backends there are, or why this one cannot serve.
    """
    if backend not in ("auto", *BACKENDS):
        allowed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend = {backend!r}: this version has {allowed}")
    if backend == "xla":
        return XLA
    problem = _why_not_pallas(platform, numerics, num_devices)
    if problem is None and (backend == "pallas" or (platform == "gpu" and has_nvfp4)):
        from muse_jax.pallas_backend import Pallas  # takes a second to import, on top of JAX

        return Pallas(interpreted=platform == "cpu")
    if backend == "auto":
        return XLA
    raise ValueError(f"backend = 'pallas': {problem}; 'xla' serves everywhere")


def _why_not_pallas(platform: str, numerics: Numerics, num_devices: int) -> str | None:
    if numerics != SERVING:
        return f"its kernels round as serving does, not as {numerics.name!r}"
    if platform == "cpu":
        # All devices share the interpreter's memory; at the end of a kernel it takes barriers of the others for forgotten ones.
        return None if num_devices == 1 else f"on a CPU its kernels are interpreted, by one device and not by {num_devices}"
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, or a CPU to interpret it, not a {platform}"
    capability = str(getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "unknown"))
    return None if capability == "9.0" else f"its kernels are for GPUs of compute capability 9.0, this one has {capability}"
