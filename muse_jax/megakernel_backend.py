"""`backend="megakernel"`: the verify step as the one call `ffi.verify.verify`; all else is that of `xla`.

Layers are kept as the buffers of `ffi.layout` alone. Prefill, which needs natural arrays, makes them again layer by layer; the
arrays that the draft reads, embedding and lm_head, stay as they are, beside the buffer of the output layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from ffi import layout, library
from ffi.verify import MAX_ROWS, LayerKind, VerifyConfig, verify
from muse_jax import ops
from muse_jax.backends import Backend, Config, Request
from muse_jax.config import AttentionKind, MLPKind, ModelConfig
from muse_jax.kv_cache import KV, KVCache
from muse_jax.model import CompositeParam, DecoderLayer, MuseSpark, Routing
from muse_jax.numerics import SERVING, Numerics
from muse_jax.ops import GateFactors
from muse_jax.sharding import ONE_DEVICE, ShardingConfig
from muse_jax.tree import Tree

GATES = ("post_attention_gate", "post_ffn_gate")


@dataclasses.dataclass(frozen=True, eq=False)
class Megakernel(Backend):
    """On a CPU the call is the Host reference: for tests, as it is slow.

    deadline_ms: `VerifyConfig.deadline_ms`.  emulated: run the kernel's own source on an emulated device, for tests of what
      only the kernel does.
    """

    name: ClassVar[str] = "megakernel"
    max_batch: ClassVar[int | None] = 1
    reports_status: ClassVar[bool] = True
    deadline_ms: int = VerifyConfig.deadline_ms
    emulated: bool = False
    _traced: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        library.load("cpu")

    @property
    def paths(self) -> dict[str, list[str]]:
        what = "emulated device" if self.emulated else "Host reference"
        return {op: [f"megakernel ({what})"] for op in sorted(self._traced)}

    # ---------------------------------------------------------------------------------------------------------- weights

    def arrange(self, module: MuseSpark) -> None:
        config, sharding = module.config, module.sharding
        request = Request(config, module.dtype, module.activations, devices=sharding.num_devices)
        if reasons := unsupported(module.numerics, request):
            raise refusal(reasons)
        if not isinstance(module.embedding.get_value(), jax.ShapeDtypeStruct):
            raise refusal(["it takes parameters from a checkpoint, not fresh ones"])
        shape = _shape(config)
        module.layers = nnx.List(PackedLayer(i, layer, shape) for i, layer in enumerate(module.layers))
        module.head = _abstract_buffer(layout.head_table(shape))

    def stored_params(self, params: dict, config: Config, sharding: ShardingConfig, mesh: Mesh | None) -> dict:
        if not isinstance(config, ModelConfig):
            return params
        if sharding != ONE_DEVICE or mesh is not None:
            raise refusal([_one_device(sharding.num_devices)])
        shape = _shape(config)

        def store(i: int, layer: dict) -> dict:
            # One layer after the other, each given up for its buffer: there is room for one layer twice.
            kept = layer["input_norm"]
            pack = _packer(shape, i in config.nvfp4_layers, config.residual_gate_temperature)
            weights = jax.block_until_ready(pack(layer))
            for old in jax.tree.leaves(layer):
                if old is not kept:
                    old.delete()
            return {"input_norm": kept, "weights": weights}

        layers = {i: store(i, layer) for i, layer in params["layers"].items()}
        return params | {"layers": layers, "head": _head_packer(shape)(params["lm_head"], params["final_norm"])}

    # ------------------------------------------------------------------------------------------------------------- step

    def verify(
        self,
        module: MuseSpark,
        nodes: Tree,
        length: jax.Array,
        cache: KVCache,
        taps: Sequence[int],
        routing: Sequence[Routing | None] | None,
    ) -> tuple[list[jax.Array], list[KV], jax.Array | None, jax.Array]:
        batch, rows = nodes.token.shape
        self.check_batch(batch)
        if rows > MAX_ROWS:
            raise refusal([_too_many_rows(rows)])
        self._traced.add("verify")
        config = module.config
        positions = length[:, None] + nodes.depth
        inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
        call = _verify_config(config, module.activations, tuple(taps))
        result = verify(
            dataclasses.replace(call, deadline_ms=self.deadline_ms),
            tokens=module.known_tokens(nodes.token)[0],
            positions=positions[0],
            length=length,
            visible=nodes.ancestors[0],
            rope=jnp.concatenate(ops.rope_tables(positions, inv_freq, module.numerics, module.dtype)),
            ring_positions=cache.ring_positions[0],
            embedding=module.embedding[...][None],
            head=module.head[...],
            layers=[layer.weights[...] for layer in module.layers],
            caches=cache.layers,
            routing=_given_routing(routing),
            emulated=self.emulated,
        )
        # The axis of the only rank takes the place of the batch of one.
        tapped = jnp.concatenate(list(result.taps), axis=-1)[None] if taps else None
        return [result.logits], result.rows, tapped, result.status


class PackedLayer(nnx.Module):
    """A `DecoderLayer` as its buffer of weights, from which each call makes its parameters. The input norm, which the layer
    before applies, is beside it, too."""

    def __init__(self, layer_idx: int, layer: DecoderLayer, shape: layout.Shape):
        """layer: with abstract parameters."""
        config = layer.config
        self.config, self.numerics, self.dtype = config, layer.numerics, layer.dtype
        self.shape, self.nvfp4 = shape, layer_idx in config.nvfp4_layers
        self.input_norm = layer.input_norm
        self.weights = _abstract_buffer(layout.layer_table(shape, self.nvfp4))
        factor = jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)
        for gate in GATES:
            setattr(layer, gate, CompositeParam(GateFactors(factor, factor)))
        self.graph = nnx.graphdef(layer)

    def __call__(self, stream: jax.Array, *args: Any) -> tuple:
        """As `DecoderLayer`."""
        # After the layer before: all layers' arrays at once would be the model twice.
        weights, stream = lax.optimization_barrier((self.weights[...], stream))
        params = layout.unpack_layer(weights, self.shape, self.nvfp4)
        if self.nvfp4:
            for name in ("gate_up", "down"):
                weight = params["mlp"][name]
                weight["input_scale"] = jnp.ones_like(weight["global_scale"])  # which nothing reads
        return nnx.merge(self.graph, params)(stream, *args)

    normed_input = DecoderLayer.normed_input


# -------------------------------------------------------------------------------------------------------- what it supports


def why_not(platform: str, numerics: Numerics, request: Request | None) -> list[str]:
    """Every reason why this backend cannot serve; none: it can."""
    return _unavailable(platform) + unsupported(numerics, request)


def refusal(reasons: Sequence[str]) -> ValueError:
    return ValueError(f"backend = 'megakernel': {'; '.join(reasons)}; 'xla' serves everywhere")


def _unavailable(platform: str) -> list[str]:
    if platform not in ("cpu", "gpu"):
        return [f"it needs a CPU or an NVIDIA GPU, not a {platform}"]
    if platform == "gpu":
        return library.unavailable("CUDA") or ["it has not run on a GPU yet"]
    return library.unavailable("cpu")


def unsupported(numerics: Numerics, request: Request | None) -> list[str]:
    """The reasons that do not depend on the platform."""
    reasons = [] if numerics == SERVING else [f"it rounds as serving does, not as {numerics.name!r}"]
    if request is None:
        return reasons
    config = request.config
    if request.dtype != jnp.bfloat16:
        reasons.append(f"dtype = '{request.dtype}': it takes 'bfloat16'")
    if request.rows > MAX_ROWS:
        reasons.append(_too_many_rows(request.rows))
    if request.devices is not None:
        reasons.append(_one_device(request.devices))
    dense = [i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.DENSE]
    if dense:
        reasons.append(f"layers without experts ({', '.join(map(str, dense))}): it has sparse ones only")
    try:
        _verify_config(config, request.activations, ())
    except (NotImplementedError, ValueError) as error:
        reasons.append(str(error))
    return reasons


def _too_many_rows(rows: int) -> str:
    return f"steps of {rows} rows (tree_size): at most {MAX_ROWS} are possible"


def _one_device(devices: int | None) -> str:
    return f"a mesh of {devices} devices: it runs on one device, without a mesh"


# ------------------------------------------------------------------------------------------------------------ for the call


def _shape(config: ModelConfig) -> layout.Shape:
    return layout.Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        moe_hidden=config.moe_hidden_size,
        moe_intermediate=config.moe_intermediate_size,
        experts=config.num_local_experts,
        vocab=config.vocab_size,
    )


def _verify_config(config: ModelConfig, activations: str, taps: tuple[int, ...]) -> VerifyConfig:
    kinds = zip(config.layer_types, config.layer_uses_rope, strict=True)
    return VerifyConfig(
        **dataclasses.asdict(_shape(config)),
        top_k=config.num_experts_per_tok,
        layers=tuple(
            LayerKind(kind == AttentionKind.SLIDING, rope, i in config.nvfp4_layers) for i, (kind, rope) in enumerate(kinds)
        ),
        window=config.sliding_window or 0,
        score_scale=config.head_dim**-0.5 * config.qk_scale_factor,
        output_multiplier=config.output_multiplier,
        softcap=config.final_logit_softcapping,
        rms_eps=config.rms_norm_eps,
        post_eps=config.post_norm_eps,
        routed_scaling=config.routed_scaling_factor,
        quantized=activations == "nvfp4",
        taps=taps,
    )


def _given_routing(routing: Sequence[Routing | None] | None) -> Routing | None:
    """[L, rows, top_k] each."""
    if routing is None or all(each is None for each in routing):
        return None
    if any(each is None for each in routing):
        raise ValueError("routing: of every layer, or of none")
    return tuple(jnp.stack(arrays) for arrays in zip(*routing, strict=True))


def _abstract_buffer(table: tuple) -> nnx.Param:
    """[1, bytes] uint8: of the only rank."""
    return nnx.Param(jax.ShapeDtypeStruct((1, layout.table_bytes(table)), jnp.uint8))


# Cached, so that layers of one kind share a compiled program.
@functools.cache
def _packer(shape: layout.Shape, nvfp4: bool, temperature: float) -> Callable[[dict], jax.Array]:
    return jax.jit(lambda layer: layout.pack_layer(layer, shape, nvfp4, None, temperature=temperature)[None])


@functools.cache
def _head_packer(shape: layout.Shape) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return jax.jit(lambda lm_head, final_norm: layout.pack_head(lm_head, final_norm, shape, None)[None])
