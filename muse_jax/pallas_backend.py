"""`backend="pallas"`: the operations of a step as kernels of `pallas_kernels`, where those support the shapes.

What a kernel does not support it says by NotImplementedError while a program is traced (the table in pallas_kernels/README.md);
then the plain form runs, and `Pallas.paths` has the reason. Weights are rearranged once, when they are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from muse_jax import ops, tree
from muse_jax.attention import hide
from muse_jax.backends import Backend, Config
from muse_jax.config import ModelConfig
from muse_jax.kv_cache import KV, DecodeContext, KVCache, heads_first, rows_in_window, seen_in_ring
from muse_jax.numerics import Numerics, round_to
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.ops import GateFactors, NVFP4Rows
from muse_jax.sharding import ShardingConfig
from muse_jax.tree import Tree
from pallas_kernels import compat
from pallas_kernels.blend_norm.kernel import BlendNorm, blend_norm
from pallas_kernels.build_tree.kernel import build_tree
from pallas_kernels.combine.kernel import Combine, combine
from pallas_kernels.decode_attention.kernel import DecodeAttentionConfig, attend_linear, attend_ring
from pallas_kernels.dense_gemm.kernel import Config as DenseConfig
from pallas_kernels.dense_gemm.kernel import dense, fitting, swiglu
from pallas_kernels.expert_gemm import kernel as expert_gemm
from pallas_kernels.grouped_conv.kernel import GroupedConvConfig, grouped_conv
from pallas_kernels.lattice.kernel import Lattice, lattice
from pallas_kernels.nvfp4_gemm.kernel import Config as GemmConfig
from pallas_kernels.nvfp4_gemm.kernel import Plan, down, gate_up, plan
from pallas_kernels.nvfp4_gemm.packing import PackedWeights, pack_weights
from pallas_kernels.out_gate.kernel import out_gate
from pallas_kernels.qk_rope.kernel import qk_rope
from pallas_kernels.quantize_rows.kernel import quantize_rows
from pallas_kernels.route.kernel import Route, route

_PIECE = 512  # values of a row that a warpgroup of the row kernels takes at a time
INTERPRETER_THREADS = 48
_INTERPRETED_CTAS = 4  # in place of one for each SM


@dataclasses.dataclass(frozen=True, eq=False)
class Pallas(Backend):
    """interpreted: run the kernels on a CPU, for tests."""

    name: ClassVar[str] = "pallas"
    interpreted: bool = False
    _paths: dict[str, set[str]] = dataclasses.field(default_factory=dict)

    @property
    def paths(self) -> dict[str, list[str]]:
        return {op: sorted(paths) for op, paths in sorted(self._paths.items())}

    def choose(self, op: str, kernel: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """The kernel's result, or, where it does not support something, the plain form's."""
        try:
            result, path = kernel(), "pallas"
            if self.interpreted:
                _check_threads()
        except NotImplementedError as reason:
            result, path = plain(), f"xla ({reason})"
        self._paths.setdefault(op, set()).add(path)
        return result

    @property
    def interpret(self) -> Any:
        # Races are for the tests of each kernel to find; blocks of a matrix that overlap write the same values twice.
        return compat.interpret_params(detect_races=False) if self.interpreted else None

    # ---------------------------------------------------------------------------------------------------------- weights

    def stored(self, name: str, value: Any, config: Config, sharding: ShardingConfig) -> Any:
        change = _rearrangement(name, value, config, sharding)
        if change is None:
            return value
        is_abstract = isinstance(jax.tree.leaves(value)[0], jax.ShapeDtypeStruct)
        return jax.eval_shape(change, value) if is_abstract else change(value)

    def stored_params(self, params: dict, config: Config, sharding: ShardingConfig, mesh: Mesh | None) -> dict:
        # One parameter after the other, and each is given up for its new form: there is room for one layer's experts twice.
        # (Donating them does not do that, as their shapes differ.)
        def store(name: str, value: Any) -> Any:
            change = _rearrangement(name, value, config, sharding)
            if change is None:
                return value
            if mesh is not None:
                change = _on_mesh(change, mesh, jax.tree.map(lambda x: x.sharding.spec, value))
            result = jax.block_until_ready(change(value))
            for old in jax.tree.leaves(value):
                old.delete()
            return result

        return _map_values(store, params)

    def stored_specs(self, specs: dict, params: dict) -> dict:
        def store(_: str, spec: Any, value: Any) -> Any:
            return spec if type(value) is type(spec) or not dataclasses.is_dataclass(value) else _stored_specs(spec)

        return _map_values(store, specs, params)

    def fuses_experts(self, weight: Any) -> bool:
        return isinstance(weight, PackedWeights) or (isinstance(weight, jax.Array) and weight.dtype == jnp.bfloat16)

    # ------------------------------------------------------------------------------------------------------------ GEMMs

    def linears(self, x: jax.Array, weights: Sequence[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
        def kernel() -> list[jax.Array]:
            flat = x.reshape(-1, x.shape[-1])
            outs = dense(flat, weights, dtype, self._dense(flat, weights), self.interpret)
            return [out.reshape(*x.shape[:-1], -1) for out in outs]

        return self.choose("dense_gemm", kernel, lambda: ops.linears(x, weights, dtype))

    def gated_linear(self, x: jax.Array, gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
        def kernel() -> jax.Array:
            flat = x.reshape(-1, x.shape[-1])
            return swiglu(flat, gate, up, self._dense(flat, (gate, up)), self.interpret).reshape(*x.shape[:-1], -1)

        return self.choose("dense_gemm", kernel, lambda: ops.gated_linear(x, gate, up, numerics))

    def _dense(self, x: jax.Array, weights: Sequence[jax.Array]) -> DenseConfig:
        config = fitting(*x.shape, [len(weight) for weight in weights])
        return dataclasses.replace(config, num_ctas=_INTERPRETED_CTAS) if self.interpreted else config

    # -------------------------------------------------------------------------------------------------------- attention

    def qk_norm_rope(
        self, q: jax.Array, k: jax.Array, rope: tuple | None, config: ModelConfig, numerics: Numerics
    ) -> tuple[jax.Array, jax.Array]:
        def kernel() -> tuple[jax.Array, jax.Array]:
            flat_q, flat_k = (x.reshape(-1, *x.shape[2:]) for x in (q, k))
            tables = None
            if rope is not None:
                tables = tuple(jnp.broadcast_to(x, (*q.shape[:2], x.shape[-1])).reshape(len(flat_q), -1) for x in rope)
            new_q, new_k = qk_rope(flat_q, flat_k, tables, config.rms_norm_eps, self.interpret)
            # The kernel writes keys in the order of the cache, in which `heads_first` puts them again.
            new_k = new_k.reshape(k.shape[2], *k.shape[:2], k.shape[3]).transpose(1, 2, 0, 3)
            return new_q.reshape(q.shape), new_k

        return self.choose("qk_rope", kernel, lambda: ops.qk_norm_rope(q, k, rope, config, numerics))

    def out_gate(self, out: jax.Array, gate: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
        def kernel() -> jax.Array:
            rows = math.prod(out.shape[:2])
            gated = out_gate(out.reshape(rows, *out.shape[2:]), gate.reshape(rows, -1), eps, self.interpret)
            return gated.reshape(gate.shape)

        return self.choose("out_gate", kernel, lambda: ops.out_gate(out, gate, eps, numerics))

    def decode_context(
        self, cache: KVCache, start: jax.Array, depth: jax.Array, visible: tuple[jax.Array, jax.Array], config: Config
    ) -> KernelContext:
        positions = start[:, None] + depth
        in_window = rows_in_window(positions, visible[1], config)
        return KernelContext(start, positions, cache.ring_positions, visible[0], in_window, self)

    # -------------------------------------------------------------------------------------------------- residual stream

    def blend_norm(
        self,
        stream: jax.Array,
        branch: jax.Array,
        gate: GateFactors,
        branch_weight: jax.Array | None,
        next_weight: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
        dtype: jnp.dtype,
    ) -> tuple[jax.Array, jax.Array | None]:
        def kernel() -> tuple[jax.Array, jax.Array]:
            if next_weight is None:
                raise NotImplementedError("after the last layer: the final norm is another")
            width = stream.shape[-1]
            sizes = BlendNorm(config.post_norm_eps, config.rms_norm_eps, _warpgroups(width, 4))
            flat_stream, flat_branch = (x.reshape(-1, width) for x in (stream, branch))
            weights = (gate.alpha, gate.beta, next_weight, branch_weight)
            new, normed = blend_norm(flat_stream, flat_branch, *weights, sizes, self.interpret)
            return new.reshape(stream.shape), normed.reshape(stream.shape)

        args = (stream, branch, gate, branch_weight, next_weight, config, numerics, dtype)
        return self.choose("blend_norm", kernel, lambda: ops.blend_norm(*args))

    # -------------------------------------------------------------------------------------------------------------- MoE

    def route(self, rows: jax.Array, router: jax.Array, bias: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
        def kernel() -> tuple[jax.Array, jax.Array]:
            sizes = Route(config.num_experts_per_tok, config.output_multiplier, config.routed_scaling_factor)
            return route(ops.linear(rows.astype(jnp.float32), router), bias, sizes, self.interpret)

        return self.choose("route", kernel, lambda: super(Pallas, self).route(rows, router, bias, config))

    def quantize_rows(self, x: jax.Array, amax: jax.Array | None = None) -> NVFP4Rows:
        def kernel() -> NVFP4Rows:
            lead, width = x.shape[:-1], x.shape[-1]
            flat = round_to(x.reshape(-1, width).astype(jnp.float32), jnp.bfloat16)
            largest = None if amax is None else amax.reshape(-1)
            arrays = quantize_rows(flat, largest, warpgroups=_warpgroups(width, 4), interpret=self.interpret)
            codes, scales, row_scale = (array.reshape(*lead, *array.shape[1:]) for array in arrays)
            return NVFP4Rows(codes, scales, row_scale, x.dtype)

        return self.choose("quantize_rows", kernel, lambda: ops.quantize_rows(x, amax))

    def plan_experts(self, idx: jax.Array, num_experts: int) -> Plan:
        """What `expert_gate_up` and `expert_down` need of the routing. NotImplementedError: for more rows than they take."""
        return plan(idx, num_experts)

    def expert_gate_up(self, x: jax.Array | NVFP4Rows, routing: Plan, weights: PackedWeights | jax.Array) -> jax.Array:
        """silu(gate) up of each routed row, rounded. x: [R, M]. Returns [R, top_k, F of the weights]."""
        if isinstance(weights, jax.Array):
            return expert_gemm.gate_up(x, routing, weights, **self._gemm(expert_gemm.fitting(weights.shape[-1])))
        x, row_scale = _decoded(x)
        # The scales of rows take the room of one of four stages.
        stages = {128: 4 if row_scale is None else 3, 64: 6}[weights.tile_rows]
        return gate_up(x, routing, weights, row_scale, **self._gemm(GemmConfig(stages)))

    def expert_down(self, hidden: jax.Array | NVFP4Rows, routing: Plan, weights: PackedWeights | jax.Array) -> jax.Array:
        """Each routed row's down projection, rounded. hidden: [R, top_k, F]. Returns [R, top_k, M of the weights]."""
        if isinstance(weights, jax.Array):
            return expert_gemm.down(hidden, routing, weights, **self._gemm(expert_gemm.fitting(weights.shape[-1])))
        hidden, row_scale = _decoded(hidden)
        return down(hidden, routing, weights, row_scale, **self._gemm(GemmConfig(stages=6)))

    def _gemm(self, config: GemmConfig | expert_gemm.Config) -> dict[str, Any]:
        if self.interpreted:
            config = dataclasses.replace(config, num_ctas=_INTERPRETED_CTAS)
        return {"config": config, "interpret": self.interpret}

    def combine_pieces(
        self,
        rows: jax.Array,
        norm: jax.Array,
        total: jax.Array,
        weights: jax.Array,
        chosen: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
    ) -> jax.Array:
        def kernel() -> jax.Array:
            if chosen is not None:
                raise NotImplementedError("slots that are added rank by rank")
            sizes = Combine(config.post_norm_eps, config.moe_hidden_size, _warpgroups(rows.shape[-1], 1))
            return combine(rows, weights, norm, sizes, total[..., 0], self.interpret)

        plain = functools.partial(ops.combine_pieces, rows, norm, total, weights, chosen, config, numerics)
        return self.choose("combine", kernel, plain)

    # ------------------------------------------------------------------------------------------------------------ draft

    def grouped_conv(
        self,
        z: jax.Array,
        base: jax.Array,
        coefficients: jax.Array,
        residual: jax.Array | None,
        *,
        side: int,
        block_size: int,
        dtype: jnp.dtype,
    ) -> jax.Array:
        settings = {"side": side, "block_size": block_size, "dtype": dtype}
        sizes = GroupedConvConfig(math.gcd(GroupedConvConfig.rows, block_size))
        return self.choose(
            "grouped_conv",
            lambda: grouped_conv(z, base, coefficients, residual, **settings, config=sizes, interpret=self.interpret),
            lambda: ops.grouped_conv(z, base, coefficients, residual, **settings),
        )

    def lattice(self, projected: jax.Array, before: jax.Array, rows: jax.Array, unary: jax.Array) -> jax.Array:
        args = projected, before, rows, unary
        sizes = Lattice(math.gcd(Lattice.before, unary.shape[-1]))
        return self.choose("lattice", lambda: lattice(*args, sizes, self.interpret), lambda: ops.lattice(*args))

    def build_tree(self, anchor: jax.Array, ids: jax.Array, log_probs: jax.Array, size: int) -> Tree:
        args = anchor, ids, log_probs, size
        return self.choose("build_tree", lambda: build_tree(*args, interpret=self.interpret), lambda: tree.build(*args))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "positions", "ring_positions", "rows_visible", "rows_in_window"],
    meta_fields=["backend"],
)
@dataclasses.dataclass(frozen=True)
class KernelContext:
    """`DecodeContext` for the attention kernels, which find out for themselves what each row sees of the cache."""

    start: jax.Array  # [B] int32
    positions: jax.Array  # [B, T] int32
    ring_positions: jax.Array  # [B, ring slots] int32
    rows_visible: jax.Array  # [B, T, T] bool, in global layers
    rows_in_window: jax.Array  # [B, T, T] bool, in sliding layers
    backend: Pallas

    def attend(self, q, k, v, cache: KV, window: int | None, scale: float, numerics: Numerics):
        """As `DecodeContext.attend`."""
        rows = heads_first(k), heads_first(v)

        def kernel() -> jax.Array:
            slots = cache[0].shape[2]
            if q.dtype != jnp.bfloat16:
                raise NotImplementedError(f"queries are {q.dtype}: the kernel takes bfloat16")
            if slots < 64:
                raise NotImplementedError(f"a cache of {slots} slots, fewer than 64")
            settings = {"scale": scale, "interpret": self.backend.interpret}
            # Five stages of 64 kB of keys and values fill shared memory.
            settings["config"] = DecodeAttentionConfig(block=128 if slots >= 128 and q.shape[-1] <= 64 else 64)
            if window is None:
                return attend_linear(q, *cache, *rows, self.start, self.rows_visible, **settings)
            where = self.ring_positions, self.start, self.positions, self.rows_in_window
            return attend_ring(q, *cache, *rows, *where, window=window, **settings)

        def plain() -> jax.Array:
            in_ring = seen_in_ring(self.ring_positions, self.start, self.positions, window)
            masks = map(hide, (in_ring, self.rows_in_window, self.rows_visible))
            context = DecodeContext(self.start, self.positions, *masks)
            return context.attend(q, k, v, cache, window, scale, numerics)[0]

        return self.backend.choose("decode_attention", kernel, plain), rows


def _check_threads() -> None:
    """Each warpgroup of an interpreted kernel keeps a thread of XLA's pool; without enough, one waits for ever."""
    threads = _pool_threads()
    if threads < INTERPRETER_THREADS:
        raise ValueError(
            f"backend = 'pallas' on a CPU interprets its kernels and needs {INTERPRETER_THREADS} threads, not {threads}: "
            f"set NPROC={INTERPRETER_THREADS} in the environment, or take 'xla'"
        )


def _pool_threads() -> int:
    """Of XLA's pool, as XLA counts: the first of two variables that is an int32, else the CPUs that this process may use."""
    for name in ("PJRT_NPROC", "NPROC"):
        with contextlib.suppress(KeyError, ValueError):
            threads = int(os.environ[name])
            if abs(threads) < 1 << 31:
                return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _decoded(x: jax.Array | NVFP4Rows) -> tuple[jax.Array, jax.Array | None]:
    """Rows, and the scales of rows where they are quantised."""
    return (x.decode(), x.row_scale) if isinstance(x, NVFP4Rows) else (x, None)


def _warpgroups(width: int, most: int) -> int:
    """Of a CTA that has a row: as many as there are whole pieces for; with 1 the kernel says what is wrong."""
    while most > 1 and width % (_PIECE * most):
        most //= 2
    return most


def _rearrangement(name: str, value: Any, config: Config, sharding: ShardingConfig) -> Callable[[Any], Any] | None:
    """How a parameter is changed for the kernels; None: not at all."""
    if name in ("post_attention_gate", "post_ffn_gate"):
        return _factors(config.residual_gate_temperature)
    if isinstance(value, NVFP4Weight):
        tile_rows = _tile_rows(name, value, config, sharding)
        return None if tile_rows is None else _packer(tile_rows)
    return None


# Cached, so that layers of one shape share a compiled program.
@functools.cache
def _factors(temperature: float) -> Callable[[jax.Array], GateFactors]:
    return jax.jit(functools.partial(GateFactors.create, temperature=temperature))


@functools.cache
def _packer(tile_rows: int) -> Callable[[NVFP4Weight], PackedWeights]:
    return jax.jit(lambda weight: pack_weights(weight.codes, weight.block_scales, weight.global_scale, tile_rows))


@functools.cache
def _on_mesh(change: Callable[[Any], Any], mesh: Mesh, specs: Any) -> Callable[[Any], Any]:
    """`change` of what each device has. specs: of the parameter as in the checkpoint."""
    return jax.jit(jax.shard_map(change, mesh=mesh, in_specs=(specs,), out_specs=_stored_specs(specs), check_vma=False))


def _tile_rows(name: str, weight: NVFP4Weight, config: ModelConfig, sharding: ShardingConfig) -> int | None:
    """Rows of a tile of which a rank's matrices are made up; None: the kernel has none such."""
    is_pair = name == "gate_up"
    rows = (config.moe_intermediate_size if is_pair else config.moe_hidden_size) // sharding.ranks.count
    if weight.codes.shape[-1] * 2 % 512:
        return None
    if is_pair:
        return 128 if rows % 64 == 0 else 64 if rows % 32 == 0 else None
    return 64 if rows % 64 == 0 else None


def _stored_specs(specs: Any) -> Any:
    """Where what `_rearrangement` makes of a parameter lives on the mesh."""
    if not isinstance(specs, NVFP4Weight):
        return GateFactors(specs, specs)
    experts, *_, rows, _ = specs.codes
    tiles = PartitionSpec(experts, rows, None, None, None)
    return PackedWeights(tiles, tiles, specs.global_scale)


_KINDS = {
    frozenset(field.name for field in dataclasses.fields(kind)): kind for kind in (NVFP4Weight, PackedWeights, GateFactors)
}


def _map_values(function: Callable, *trees: Any, name: str | int = "") -> Any:
    """function(name, value of each tree) for each parameter of nested dicts of one structure; a dict of a dataclass's fields is
    that dataclass, given and returned."""

    def value(tree: Any) -> Any:
        kind = _KINDS.get(frozenset(tree)) if isinstance(tree, dict) else None
        return tree if kind is None else kind(**tree)

    values = [value(tree) for tree in trees]
    if isinstance(values[0], dict):
        return {key: _map_values(function, *(each[key] for each in values), name=key) for key in values[0]}
    result = function(name, *values)
    return vars(result) if dataclasses.is_dataclass(result) else result
