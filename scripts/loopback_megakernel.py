"""The megakernel as one rank of several without the others, for benchmarks: the CUDA kernel, on a CPU the plain reference.

Where other ranks' data would arrive it finds its own, as with `ShardingConfig.loopback` of the other backends. One thing
differs: each rank adds up some columns of o_proj, a part of each from every rank. In place of the others' parts the kernel adds
its own parts of other columns, while the other backends add their own part of the same column several times. With the weights
of `random_models.rank_zero` both give the same, so that backends can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ffi import layout, library
from ffi.verify import VerifyConfig, verify
from muse_jax import megakernel_backend
from muse_jax.backends import Backend, Config, Request
from muse_jax.config import ModelConfig
from muse_jax.kv_cache import KV, KVCache
from muse_jax.megakernel_backend import head_packer, layer_packer, operands_of_step
from muse_jax.model import MuseSpark
from muse_jax.numerics import SERVING
from muse_jax.sharding import ShardingConfig
from muse_jax.tree import Tree

PLATFORMS = {"cpu": "cpu", "gpu": "CUDA"}  # JAX's name, and that of the library's handlers


@dataclasses.dataclass(frozen=True, eq=False)
class LoopbackMegakernel(Backend):
    """tp: ranks.  platform: of JAX, "cpu" or "gpu".  layers_per_launch: of the kernel."""

    name: ClassVar[str] = "megakernel"
    max_batch: ClassVar[int | None] = 1
    reports_status: ClassVar[bool] = True
    tp: int
    platform: str
    layers_per_launch: int = 1

    @property
    def implementation(self) -> str:
        return "CUDA kernel" if self.platform == "gpu" else "Host reference"

    @property
    def paths(self) -> dict[str, list[str]]:
        return {"verify": [self.name if self.platform == "gpu" else f"{self.name} ({self.implementation})"]}

    def check(self, config: ModelConfig, dtype: jax.typing.DTypeLike, rows: int, activations: str) -> None:
        """Raises ValueError with every reason why it cannot run a step of such a model."""
        reasons = megakernel_backend.unsupported(SERVING, Request(config, jnp.dtype(dtype), activations, rows))
        if not reasons:
            try:
                self.verify_config(config, activations, ())
            except (NotImplementedError, ValueError) as error:
                reasons = [str(error)]
        if reasons:
            raise ValueError(f"--backend megakernel: {'; '.join(reasons)}")

    def prepare(self, config: ModelConfig, activations: str) -> None:
        """Loads the library, and on a GPU makes what calls need besides their operands.

        Raises:   ValueError in one line if it cannot serve here, does not compile, or the GPU refuses.
        """
        called = self.verify_config(config, activations, ())
        try:
            if self.platform == "gpu":
                device = jax.local_devices()[0].local_hardware_id
                library.prepare(called.numbers, called.quantized, [device])
            else:
                library.load(PLATFORMS[self.platform])
        except RuntimeError as error:
            raise ValueError(f"--backend megakernel: {' '.join(str(error).split())}") from error

    def verify_config(self, config: ModelConfig, activations: str, taps: tuple[int, ...]) -> VerifyConfig:
        of_model = megakernel_backend._verify_config(config, activations, taps, self.tp)
        return dataclasses.replace(of_model, loopback=True, layers_per_launch=self.layers_per_launch)

    # ---------------------------------------------------------------------------------------------------------- weights

    def arrange(self, module: MuseSpark) -> None:
        shape = self.verify_config(module.config, module.activations, ()).shape
        nvfp4 = module.config.nvfp4_layers
        module.layers = nnx.List(Packed(layout.layer_table(shape, i in nvfp4)) for i in range(module.config.num_hidden_layers))
        module.head = Packed(layout.head_table(shape))

    def stored_params(self, params: dict, config: Config, sharding: ShardingConfig, mesh: Mesh | None) -> dict:
        """params: of one rank, arrays, which are given up layer by layer, or their shapes."""
        if not isinstance(config, ModelConfig):
            return params
        shape = self.verify_config(config, "bf16", ()).shape

        def packed(pack: Callable[..., jax.Array], *arrays: Any) -> dict:
            if isinstance(jax.tree.leaves(arrays)[0], jax.ShapeDtypeStruct):
                return {"weights": jax.eval_shape(pack, *arrays)}
            return {"weights": jax.block_until_ready(pack(*arrays))}

        def store(i: int, layer: dict) -> dict:
            buffer = packed(layer_packer(shape, i in config.nvfp4_layers, config.residual_gate_temperature), layer)
            for old in jax.tree.leaves(layer):
                if isinstance(old, jax.Array):
                    old.delete()
            return buffer

        layers = {i: store(i, layer) for i, layer in params["layers"].items()}
        return params | {"layers": layers, "head": packed(head_packer(shape), params["lm_head"], params["final_norm"])}

    # ------------------------------------------------------------------------------------------------------------- step

    def verify(
        self,
        module: MuseSpark,
        nodes: Tree,
        length: jax.Array,
        cache: KVCache,
        taps: Sequence[int],
        routing: tuple[jax.Array, jax.Array],
    ) -> tuple[list[jax.Array], list[KV], jax.Array | None, jax.Array]:
        """routing: expert ids [L, rows, top_k] int32 and weights fp32."""
        self.check_batch(nodes.token.shape[0])
        tapped = sorted(set(taps))  # the first layers of a model may stand in for several of the draft's
        result = verify(
            self.verify_config(module.config, module.activations, tuple(tapped)),
            **operands_of_step(module, nodes, length, cache),
            head=module.head.weights[...],
            routing=routing,
        )
        # The axis of the only rank here takes the place of the batch of one.
        streams = jnp.concatenate([result.taps[tapped.index(i)] for i in taps], axis=-1)[None] if taps else None
        return module.vocab_ranks.split(result.logits, -1), result.rows, streams, result.status


class Packed(nnx.Module):
    """A buffer of weights, [1, bytes] uint8."""

    def __init__(self, table: tuple):
        self.weights = nnx.Param(jax.ShapeDtypeStruct((1, layout.table_bytes(table)), jnp.uint8))


def bytes_read(config: VerifyConfig, experts: int) -> int:
    """Bytes of a rank's buffers that a step reads, padding included, if each layer uses so many experts."""
    tables = [layout.layer_table(config.shape, layer.nvfp4) for layer in config.layers]
    entries = [entry for table in (*tables, layout.head_table(config.shape)) for entry in table]
    counts = (getattr(entry, "count", 1) for entry in entries)
    return sum(entry.nbytes // count * min(count, experts) for entry, count in zip(entries, counts, strict=True))
