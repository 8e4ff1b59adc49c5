"""Which implementation runs a step. The choice is explicit: asking for one that cannot serve is an error.

A `Backend` has the operations of a step that may be fused. The modules of target and draft call them through it; everything
else is the same for all backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from muse_jax import kv_cache, ops, tree
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.numerics import SERVING, Numerics
from muse_jax.sharding import ShardingConfig

if TYPE_CHECKING:
    from muse_jax.model import MuseSpark, Routing

BACKENDS = ("xla", "pallas", "megakernel")
Config = ModelConfig | DraftConfig


@dataclasses.dataclass(frozen=True)
class Request:
    """What a backend is asked to serve.

    dtype, activations: of the model.  rows: of a step.  devices: of the mesh, None: there is none.  moe_sharding: as in
      `ShardingConfig`.  processes: that have the mesh's devices.
    """

    config: ModelConfig
    dtype: jnp.dtype
    activations: str = "bf16"
    rows: int = 1
    devices: int | None = None
    moe_sharding: str = "n"
    processes: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """`xla`: every operation in plain jnp, the reference of the other backends, which override what they have kernels for."""

    name: ClassVar[str] = "xla"
    max_batch: ClassVar[int | None] = None  # sequences of a step; None: any number
    reports_status: ClassVar[bool] = False  # of each step: it may fail

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

    def verify(
        self,
        module: MuseSpark,
        nodes: tree.Tree,
        length: jax.Array,
        cache: kv_cache.KVCache,
        taps: Sequence[int],
        routing: Sequence[Routing | None] | None,
    ) -> tuple[list[jax.Array], list[kv_cache.KV], jax.Array | None, jax.Array | None]:
        """The target's forward pass over the nodes of a step, which leaves the cache as it is.

        Args:     length: [B] int32, committed positions.  taps, routing: as `MuseSpark` takes them.
        Returns:  logits [B, N, V] in parts of the vocabulary, keys and values of the rows, their taps [B, N, taps * D], and
                  the step's status, [8] int32, the same on every device; None where it cannot fail.
        """
        context = self.decode_context(cache, length, nodes.depth, (nodes.ancestors,) * 2, module.config)
        stream, rows, tapped = module(nodes.token, context, cache, taps=taps, routing=routing)
        return module.logit_parts(stream), rows, tapped, None

    def check_batch(self, batch: int) -> None:
        """Raises ValueError if a step cannot have so many sequences."""
        if self.max_batch is not None and batch > self.max_batch:
            raise ValueError(f"a batch of {batch}: backend = {self.name!r} decodes at most {self.max_batch} at a time")

    @property
    def paths(self) -> dict[str, list[str]]:
        """For each operation that has a kernel, what ran it in the programs traced so far, with the reason if that was not the
        kernel."""
        return {}

    def arrange(self, module: MuseSpark) -> None:
        """Gives a fresh target the structure of `stored_params`. Raises ValueError if this backend cannot serve it."""

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
    backend: str,
    platform: str = "cpu",
    numerics: Numerics = SERVING,
    has_nvfp4: bool = False,
    num_devices: int = 1,
    request: Request | None = None,
) -> Backend:
    """The backend that serves a request for `backend` on so many devices of a platform in this process.

    "auto" takes `pallas` where it serves and was timed to be faster: on Hopper GPUs, for models with NVFP4 experts; else `xla`.
    On a CPU `pallas` runs its kernels interpreted, on one device, and `megakernel` its plain reference, which is for tests.

    Args:   request: what it is for, where that is known; a backend that serves some models only is refused for others.
    Raises: ValueError that names the backends there are, or every reason why this one cannot serve.
    """
    if backend not in ("auto", *BACKENDS):
        allowed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend = {backend!r}: this version has {allowed}")
    if backend == "xla":
        return XLA
    if backend == "megakernel":
        return _megakernel(platform, numerics, request)
    problem = _why_not_pallas(platform, numerics, num_devices)
    if problem is None and (backend == "pallas" or (platform == "gpu" and has_nvfp4)):
        from muse_jax.pallas_backend import Pallas  # takes a second to import, on top of JAX

        return Pallas(interpreted=platform == "cpu")
    if backend == "auto":
        return XLA
    raise ValueError(f"backend = 'pallas': {problem}; 'xla' serves everywhere")


def _megakernel(platform: str, numerics: Numerics, request: Request | None) -> Backend:
    from muse_jax.megakernel_backend import Megakernel, refusal, why_not  # imports the model, and that this module

    reasons = why_not(platform, numerics, request)
    try:
        if not reasons:
            return Megakernel()
    except RuntimeError as error:  # the library does not compile, or load
        reasons = [" ".join(str(error).split())]
    raise refusal(reasons)


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
