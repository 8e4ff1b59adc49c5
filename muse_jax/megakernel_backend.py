"""`backend="megakernel"`: the verify step as the one call `ffi.verify.verify`; all else is that of `xla`.

Layers are kept as the buffers of `ffi.layout` alone. Prefill, which needs natural arrays, makes them again layer by layer; the
arrays that the draft reads, embedding and lm_head, stay as they are, beside the buffer of the output layer.

Each device of a mesh is a rank of the call. Its buffers are made of its own parts of the parameters, its caches are those of
`xla`, and so are the parts of the vocabulary that its logits come in; the ranks' calls exchange the rest among themselves.
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
from jax.sharding import Mesh, PartitionSpec

from ffi import layout, library
from ffi.verify import MAX_ROWS, LayerKind, VerifyConfig, verify
from muse_jax import ops
from muse_jax.backends import Backend, Config, Request
from muse_jax.config import AttentionKind, MLPKind, ModelConfig
from muse_jax.kv_cache import KV, KVCache
from muse_jax.layout import cuts_heads, parameter_tree
from muse_jax.model import CompositeParam, DecoderLayer, MuseSpark, Routing
from muse_jax.numerics import SERVING, Numerics
from muse_jax.ops import GateFactors
from muse_jax.sharding import AXIS, ShardingConfig, param_spec
from muse_jax.tree import Tree

GATES = ("post_attention_gate", "post_ffn_gate")
BY_RANK = PartitionSpec(AXIS)
# Of the Host reference, whose ranks share CPUs with everything else. Less than the 20 s after which XLA for CPU finds that a
# collective takes long: a device that waits for others in one should see them give up.
HOST_DEADLINE_MS = 15_000


@dataclasses.dataclass(frozen=True, eq=False)
class Megakernel(Backend):
    """On a CPU the call is the Host reference: for tests, as it is slow.

    deadline_ms: `VerifyConfig.deadline_ms`.  emulated: run the kernel's own source on an emulated device, for tests of what
      only the kernel does; not on a mesh.
    """

    name: ClassVar[str] = "megakernel"
    max_batch: ClassVar[int | None] = 1
    reports_status: ClassVar[bool] = True
    deadline_ms: int = HOST_DEADLINE_MS
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
        shared = {"devices": sharding.num_devices, "moe_sharding": sharding.moe_sharding}
        request = Request(config, module.dtype, module.activations, **shared)
        if reasons := unsupported(module.numerics, request) + self._not_shared(sharding):
            raise refusal(reasons)
        if not isinstance(module.embedding.get_value(), jax.ShapeDtypeStruct):
            raise refusal(["it takes parameters from a checkpoint, not fresh ones"])
        shape = _shape(config, sharding.num_devices)
        module.layers = nnx.List(PackedLayer(i, layer, shape) for i, layer in enumerate(module.layers))
        module.head = _abstract_buffer(layout.head_table(shape), shape)

    def stored_params(self, params: dict, config: Config, sharding: ShardingConfig, mesh: Mesh | None) -> dict:
        if not isinstance(config, ModelConfig):
            return params
        if reasons := self._not_shared(sharding):
            raise refusal(reasons)
        shape = _shape(config, sharding.num_devices)
        specs = parameter_tree(config, lambda spec: param_spec(spec, sharding))

        @functools.cache
        def packer(nvfp4: bool) -> Callable[[dict], jax.Array]:
            like = next(i for i in params["layers"] if (i in config.nvfp4_layers) == nvfp4)
            pack = layer_packer(shape, nvfp4, config.residual_gate_temperature)
            return _per_device(pack, mesh, specs["layers"][like])

        def store(i: int, layer: dict) -> dict:
            # One layer after the other, each given up for its buffer: there is room for one layer twice.
            kept = layer["input_norm"]
            weights = jax.block_until_ready(packer(i in config.nvfp4_layers)(layer))
            for old in jax.tree.leaves(layer):
                if old is not kept:
                    old.delete()
            return {"input_norm": kept, "weights": weights}

        layers = {i: store(i, layer) for i, layer in params["layers"].items()}
        pack_head = _per_device(head_packer(shape), mesh, specs["lm_head"], specs["final_norm"])
        return params | {"layers": layers, "head": pack_head(params["lm_head"], params["final_norm"])}

    def stored_specs(self, specs: dict, params: dict) -> dict:
        if "head" not in params:
            return specs  # of a draft
        layers = {i: {"input_norm": layer["input_norm"], "weights": BY_RANK} for i, layer in specs["layers"].items()}
        return specs | {"layers": layers, "head": BY_RANK}

    def _not_shared(self, sharding: ShardingConfig) -> list[str]:
        """Why it does not share a model so; beyond `unsupported`."""
        reasons = ["one rank without the others (loopback): it runs all of them"] if sharding.loopback else []
        if self.emulated and (sharding.num_devices or 1) > 1:
            reasons.append("a mesh of emulated devices: there is one")
        return reasons

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
        config, ranks, devices = module.config, module.vocab_ranks, module.sharding.num_devices
        call = _verify_config(config, module.activations, tuple(taps), devices)
        result = verify(
            dataclasses.replace(call, deadline_ms=self.deadline_ms),
            **operands_of_step(module, nodes, length, cache),
            head=module.head[...],
            routing=_given_routing(routing),
            rank=None if devices is None else lax.axis_index(AXIS).reshape(1),
            emulated=self.emulated,
        )
        # The axis of the only rank here takes the place of the batch of one.
        tapped = jnp.concatenate(list(result.taps), axis=-1)[None] if taps else None
        status = result.status
        if devices is not None and devices > 1:  # a step fails on all devices or on none
            every = lax.all_gather(status, AXIS)
            status = every[jnp.argmax(every[:, 0] != 0)]
        return ranks.split(result.logits, -1), result.rows, tapped, status


class PackedLayer(nnx.Module):
    """A `DecoderLayer` as its buffer of weights, from which each call makes its parameters. The input norm, which the layer
    before applies, is beside it, too."""

    def __init__(self, layer_idx: int, layer: DecoderLayer, shape: layout.Shape):
        """layer: with abstract parameters."""
        config = layer.config
        self.config, self.numerics, self.dtype = config, layer.numerics, layer.dtype
        self.shape, self.nvfp4 = shape, layer_idx in config.nvfp4_layers
        self.input_norm = layer.input_norm
        self.weights = _abstract_buffer(layout.layer_table(shape, self.nvfp4), shape)
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
    if request.moe_sharding != "n":
        reasons.append(f"moe_sharding = {request.moe_sharding!r}: a rank has a part of every expert, 'n'")
    if request.processes > 1:
        reasons.append(f"a mesh of {request.processes} processes: its ranks are in one")
    if request.devices is not None and request.devices > 1 and not cuts_heads(config):
        heads = f"{config.num_attention_heads} heads with {config.num_key_value_heads} KV heads"
        reasons.append(f"a mesh of {request.devices} devices: attention of {heads} is not cut")
    dense = [i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.DENSE]
    if dense:
        reasons.append(f"layers without experts ({', '.join(map(str, dense))}): it has sparse ones only")
    try:
        _verify_config(config, request.activations, (), request.devices)
    except (NotImplementedError, ValueError) as error:
        reasons.append(str(error))
    return reasons


def _too_many_rows(rows: int) -> str:
    return f"steps of {rows} rows (tree_size): at most {MAX_ROWS} are possible"


# ------------------------------------------------------------------------------------------------------------ for the call


def _shape(config: ModelConfig, devices: int | None) -> layout.Shape:
    """devices: of the mesh, None: there is none."""
    return layout.Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        moe_hidden=config.moe_hidden_size,
        moe_intermediate=config.moe_intermediate_size,
        experts=config.num_local_experts,
        vocab=config.vocab_size,
        ranks=devices or 1,
    )


def _verify_config(config: ModelConfig, activations: str, taps: tuple[int, ...], devices: int | None) -> VerifyConfig:
    kinds = zip(config.layer_types, config.layer_uses_rope, strict=True)
    return VerifyConfig(
        **dataclasses.asdict(_shape(config, devices)),
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


def operands_of_step(module: MuseSpark, nodes: Tree, length: jax.Array, cache: KVCache) -> dict[str, Any]:
    """Operands of `verify`, but for head and routing, of a module whose layers have buffers as `weights`."""
    config, positions = module.config, length[:, None] + nodes.depth
    inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
    return {
        "tokens": module.known_tokens(nodes.token)[0],
        "positions": positions[0],
        "length": length,
        "visible": nodes.ancestors[0],
        "rope": jnp.concatenate(ops.rope_tables(positions, inv_freq, module.numerics, module.dtype)),
        "ring_positions": cache.ring_positions[0],
        "embedding": module.embedding[...][None],
        "layers": [layer.weights[...] for layer in module.layers],
        "caches": cache.layers,
    }


def _given_routing(routing: Sequence[Routing | None] | None) -> Routing | None:
    """[L, rows, top_k] each."""
    if routing is None or all(each is None for each in routing):
        return None
    if any(each is None for each in routing):
        raise ValueError("routing: of every layer, or of none")
    return tuple(jnp.stack(arrays) for arrays in zip(*routing, strict=True))


def _abstract_buffer(table: tuple, shape: layout.Shape) -> nnx.Param:
    """[ranks, bytes] uint8."""
    return nnx.Param(jax.ShapeDtypeStruct((shape.ranks, layout.table_bytes(table)), jnp.uint8))


def _per_device(pack: Callable, mesh: Mesh | None, *specs: Any) -> Callable:
    """`pack` of what each device of a mesh has. specs: of its arguments."""
    if mesh is None:
        return pack
    return jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=specs, out_specs=BY_RANK, check_vma=False))


# Cached, so that layers of one kind share a compiled program.
@functools.cache
def layer_packer(shape: layout.Shape, nvfp4: bool, temperature: float) -> Callable[[dict], jax.Array]:
    return jax.jit(lambda layer: layout.pack_layer(layer, shape, nvfp4, None, temperature=temperature)[None])


@functools.cache
def head_packer(shape: layout.Shape) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return jax.jit(lambda lm_head, final_norm: layout.pack_head(lm_head, final_norm, shape, None)[None])
