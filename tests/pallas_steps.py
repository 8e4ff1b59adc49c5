"""Steps of small models with the kernels of `backend="pallas"`, beside those of plain XLA.

    NPROC=48 PYTHONPATH=. python tests/pallas_steps.py w4a16

interprets the kernels on a CPU and prints what test_pallas_backend.py looks at, as JSON. A program of its own: a warpgroup of
an interpreted kernel has a thread of XLA's pool and waits there for others, for ever if the pool is smaller than their number.
NPROC is its size, read when JAX makes its client.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muse_jax import decoding, sharding
from muse_jax.backends import XLA, Backend
from muse_jax.config import TINY, AttentionKind, MLPKind, ModelConfig
from muse_jax.decoding import DecodeState, Model
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec, parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.pallas_backend import Pallas
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import ONE_DEVICE, ShardingConfig
from muse_jax.tree import Tree
from pallas_kernels import compat

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
SLOTS = 128
# As small as every kernel takes it: rows of 512, heads of 64, eight of them to a KV head, experts of whole tiles, 128 of them.
CONFIG = dataclasses.replace(
    TINY,
    vocab_size=256,
    hidden_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=64,
    moe_hidden_size=512,
    moe_intermediate_size=512,
    num_local_experts=128,
    num_experts_per_tok=2,
    sliding_window=72,
    layer_types=(AttentionKind.SLIDING, AttentionKind.GLOBAL),
    layer_uses_rope=(True, False),
    mlp_layer_types=(MLPKind.SPARSE,) * 2,
    nvfp4_layers=(1,),
    dtype="bfloat16",
)
# One rank of eight has 64 rows of gate and of up, and pieces of 512 of the experts' output.
OF_EIGHT = dataclasses.replace(CONFIG, num_attention_heads=64, num_key_value_heads=8, moe_hidden_size=4096)
# Convolutions take 64 groups of 16 channels.
DRAFTED = dataclasses.replace(CONFIG, hidden_size=1024, nvfp4_layers=())
DRAFT = DraftConfig(
    vocab_size=256,
    hidden_size=1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=64,
    intermediate_size=512,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    layer_types=(AttentionKind.SLIDING,),
    sliding_window=72,
    is_causal=False,
    attention_bias=False,
    target_layer_ids=(0,),
    mask_token_id=5,
    block_size=8,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """lengths: of each sequence before the step.  rows: of the step.  draft: a block of it is what is compared."""

    config: ModelConfig = CONFIG
    how: ShardingConfig = ONE_DEVICE
    activations: str = "bf16"
    lengths: tuple[int, ...] = (90,)
    rows: int = 8
    draft: DraftConfig | None = None


# A mesh is not among them: its devices share the pool, and eight ranks would be as many times as slow.
CASES = {
    "w4a16": Case(),
    "one_row": Case(rows=1),
    "batch_w4a4": Case(activations="nvfp4", lengths=(90, 37), rows=4),
    "rank_of_eight": Case(OF_EIGHT, ShardingConfig(8, loopback=True, calls=False)),
    "draft": Case(DRAFTED, draft=DRAFT),
}


def draw(spec: TensorSpec, shape: tuple[int, ...], width: int) -> np.ndarray:
    """As `random_models.draw`, which has JAX compile a program for each shape."""
    rng, kind = np.random.default_rng(zlib.crc32(repr(spec.path).encode())), spec.path[-1]
    if kind == "codes":
        return np.frombuffer(rng.bytes(np.prod(shape)), np.uint8).reshape(shape)
    if kind == "block_scales":
        return (0x40 + (np.frombuffer(rng.bytes(np.prod(shape)), np.uint8).reshape(shape) >> 3)).view(spec.dtype_in(BF16))
    if kind in ("global_scale", "input_scale"):
        # Another for each matrix.
        return ((1 + rng.random(shape, np.float32)) / (60 * width**0.5)).astype(np.float32)
    scale = 0.3 if len(spec.shape) == 1 else 2 / spec.param_shape[-1] ** 0.5
    return (scale * rng.uniform(-1, 1, shape) + float(kind == "final_norm")).astype(spec.dtype_in(BF16))


def make_model(case: Case, backend: Backend, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None = None) -> Model:
    """Random weights, the same for every backend, and for fp32 too."""
    how = case.how

    def leaf(spec) -> jax.Array:
        shape = spec.param_shape
        if how.loopback:
            shape = tuple(part.stop - part.start for part in spec.rank_part(how.num_devices, 0))
        value = draw(spec, shape, case.config.moe_hidden_size)
        return jnp.asarray(value.astype(dtype) if value.dtype == BF16 else value)

    def params(config: ModelConfig | DraftConfig) -> dict:
        values = parameter_tree(config, leaf)
        if mesh is not None:
            values = jax.device_put(values, parameter_tree(config, sharding.placement(mesh, how)[0]))
        return backend.stored_params(values, config, how, mesh)

    settings = {"dtype": dtype, "sharding": how, "backend": backend}
    drafted = {}
    if case.draft is not None:
        drafted = {"draft": DFlash2(case.draft, **settings), "draft_params": params(case.draft), "tree_size": case.rows}
    module = MuseSpark(case.config, activations=case.activations, **settings)
    model = Model.create(module, params(case.config), mesh=mesh, **drafted)
    return dataclasses.replace(model, num_rows=case.rows)


def make_state(model: Model, lengths: tuple[int, ...], slots: int = SLOTS) -> DecodeState:
    """Sequences with random keys and values of so many committed positions."""
    batch, length = len(lengths), np.asarray(lengths, np.int32)

    def fill(path: tuple, x: jax.Array) -> jax.Array:
        if x.dtype == jnp.int32:  # the newest position that belongs into each slot of a ring
            ring = x.shape[1]
            newest = length[:, None] - 1 - (length[:, None] - 1 - np.arange(ring, dtype=np.int32)) % ring
            return jnp.asarray(np.where(newest >= 0, newest, -1), jnp.int32)
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.normal(key, x.shape).astype(BF16).astype(x.dtype)

    cache, draft_cache = jax.tree_util.tree_map_with_path(fill, decoding.empty_caches(model, batch, slots))
    return DecodeState(
        cache=cache,
        draft_cache=draft_cache,
        length=jnp.asarray(length),
        token=jnp.full(batch, 3, jnp.int32),
        remaining=jnp.full(batch, 99, jnp.int32),
        done=jnp.zeros(batch, bool),
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
        sampling=SamplingParams.create(batch),
        num_rows=model.num_rows,
    )


def make_nodes(batch: int, rows: int) -> Tree:
    """Random trees, in which node j's parent is one of the three before it."""
    rng = np.random.default_rng(5)
    parent, depth = np.zeros((batch, rows), np.int32), np.zeros((batch, rows), np.int32)
    ancestors = np.broadcast_to(np.eye(rows, dtype=bool), (batch, rows, rows)).copy()
    for b in range(batch):
        for j in range(1, rows):
            parent[b, j] = i = rng.integers(max(0, j - 3), j)
            depth[b, j] = depth[b, i] + 1
            ancestors[b, j] |= ancestors[b, i]
    token = rng.integers(0, 32, (batch, rows), np.int32)  # as many rows of the vocabulary does a rank of eight have
    valid, log_prob = np.ones((batch, rows), bool), np.zeros((batch, rows), np.float32)
    return jax.tree.map(jnp.asarray, Tree(token, parent, depth, valid, ancestors, log_prob))


def make_routing(case: Case) -> list:
    """Experts and weights of each row in every layer: bf16 may turn a choice that is close, and that row is another then."""
    rows, config, rng = len(case.lengths) * case.rows, case.config, np.random.default_rng(6)
    chosen = rng.permutation(config.num_local_experts)[:3]
    idx = np.resize(chosen, (rows, config.num_experts_per_tok)).astype(np.int32)
    return [(jnp.asarray(idx), jnp.asarray(rng.random(idx.shape, np.float32) + 0.1)) for _ in range(config.num_hidden_layers)]


def run_step(model: Model, state: DecodeState, nodes: Tree, routing: list) -> dict[str, Any]:
    logits, rows, _ = decoding.verify(model, state, nodes, routing)
    named = {f"{name} {i}": x for i, pair in enumerate(rows) for name, x in zip(("keys", "values"), pair, strict=True)}
    return {"logits": model.module.vocab_ranks.join(logits, -1), **named}


def run_draft(model: Model, state: DecodeState) -> dict[str, Any]:
    """What a draft makes of its block, and the lattice of fixed candidates."""
    draft, batch = model.draft, state.token.shape[0]
    context = draft.block_context(state.draft_cache, state.length)
    hidden = draft(draft.embed(state.token, model.params["embedding"]), context, state.draft_cache.layers)[:, 1:]
    ids = jnp.asarray(np.random.default_rng(7).permutation(256)[: 7 * 16].reshape(1, 7, 16), jnp.int32)
    ids = jnp.broadcast_to(ids, (batch, *ids.shape[1:]))
    return {"hidden": hidden, "lattice": draft.lattice(hidden, state.token, ids, jnp.zeros(ids.shape, jnp.float32))}


def outcome(case: Case, backend: Backend, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    model = make_model(case, backend, dtype)
    state = make_state(model, case.lengths)
    if case.draft is not None:
        found = jax.jit(run_draft)(model, state)
    else:
        found = jax.jit(run_step)(model, state, make_nodes(len(case.lengths), case.rows), make_routing(case))
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def compare(case: Case, backend: Backend) -> dict[str, dict[str, float]]:
    """Root mean squares of differences, relative to those of the values: of "xla" and of the backend, "ours", from fp32, and
    "between" the two. All have the same weights, keys and values."""
    exact, xla, ours = outcome(case, XLA, FP32), outcome(case, XLA, BF16), outcome(case, backend, BF16)

    def differences(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
        squares = {name: (np.mean(np.square(actual[name] - x)), np.mean(np.square(x))) for name, x in expected.items()}
        return {name: float(np.sqrt(difference / value)) for name, (difference, value) in squares.items()}

    return {"xla": differences(xla, exact), "ours": differences(ours, exact), "between": differences(ours, xla)}


class Interpreted(Pallas):
    """Without race detection, which the kernels' own tests have on: a third faster."""

    @property
    def interpret(self) -> Any:
        return compat.interpret_params(detect_races=False)


def main(name: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    backend = Interpreted(interpreted=True)
    print(json.dumps(compare(CASES[name], backend) | {"paths": backend.paths}))


if __name__ == "__main__":
    main(sys.argv[1])
