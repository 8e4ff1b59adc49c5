"""Random weights on the device that uses them, and one rank's part of a model: what benchmarks without a checkpoint measure."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    import jax

    from muse_jax.backends import Backend
    from muse_jax.config import ModelConfig
    from muse_jax.decoding import Model
    from muse_jax.draft_config import DraftConfig
    from muse_jax.layout import TensorSpec


def draw(spec: TensorSpec, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, width: int, key: jax.Array) -> jax.Array:
    """Random values for a parameter or a part of it, of magnitudes that keep activations near one.

    Args:     shape: of the part.  dtype: the model's.  width: columns of the experts' matrices.
    """
    import jax
    import jax.numpy as jnp

    kind, leaf_dtype = spec.path[-1], spec.dtype_in(dtype)
    if kind == "codes":
        return jax.random.bits(key, shape, jnp.uint8)
    if kind == "block_scales":  # 2 to 15
        return jax.lax.bitcast_convert_type(0x40 + (jax.random.bits(key, shape, jnp.uint8) >> 3), leaf_dtype)
    if kind in ("global_scale", "input_scale"):
        return jnp.full(shape, 1 / (40 * width**0.5), leaf_dtype)
    scale = 0.3 if len(spec.shape) == 1 else 2 / spec.param_shape[-1] ** 0.5
    return (scale * jax.random.uniform(key, shape, minval=-1) + float(kind == "final_norm")).astype(leaf_dtype)


def key_of(spec: TensorSpec) -> jax.Array:
    """Different for each parameter, the same in every run."""
    import jax

    return jax.random.key(zlib.crc32(repr(spec.path).encode()))


def draw_for_rank_zero(
    spec: TensorSpec, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, width: int, key: jax.Array, tp: int
) -> jax.Array:
    """`draw`, for rank 0 of `tp`.

    In place of what other ranks would give it, it takes its own, and which of it is not the same in all backends. With these
    values it makes no difference: of o_proj's rows the tiles that different ranks would add up are alike, and the post-expert
    norm repeats this rank's part.
    """
    import jax.numpy as jnp

    from ffi.layout import TILE_ROWS

    if spec.path[-1] == "o_proj":
        row = jnp.arange(shape[0], dtype=jnp.int32)
        row = row // (tp * TILE_ROWS) * TILE_ROWS + row % TILE_ROWS
        return draw(spec, shape, dtype, width, key)[row]
    if spec.path[-1] == "post_expert_norm":
        return jnp.tile(draw(spec, (shape[0] // tp,), dtype, width, key), tp)
    return draw(spec, shape, dtype, width, key)


def rank_zero(
    config: ModelConfig,
    draft_config: DraftConfig | None,
    tp: int,
    dtype: jax.typing.DTypeLike,
    rows: int,
    activations: str,
    backend: str | Backend = "xla",
    abstract: bool = False,
) -> Model:
    """What rank 0 of `tp` has of a model with random weights, and its work: `ShardingConfig.loopback` stands in for the others.

    Args:     rows: of a step.  backend: the weights' values are the same for all.  abstract: shapes in place of arrays, with a
              backend that can keep them, such as `xla`.
    """
    import jax
    import jax.numpy as jnp

    from muse_jax.backends import resolve_backend
    from muse_jax.decoding import Model
    from muse_jax.draft import DFlash2
    from muse_jax.layout import parameter_tree
    from muse_jax.model import MuseSpark
    from muse_jax.sharding import ShardingConfig

    platform = jax.default_backend()
    how = ShardingConfig(tp, loopback=True, calls=platform != "gpu")
    runs_on = resolve_backend(backend, platform) if isinstance(backend, str) else backend
    settings = {"dtype": jnp.dtype(dtype), "sharding": how, "backend": runs_on}
    compiled = jax.jit(draw_for_rank_zero, static_argnums=(0, 1, 2, 3, 5))
    like: dict[tuple, TensorSpec] = {}

    def leaf(spec: TensorSpec) -> jax.Array | jax.ShapeDtypeStruct:
        if abstract:
            return jax.ShapeDtypeStruct(part_shape(spec, tp), spec.dtype_in(dtype))
        first = like.setdefault((spec.path[-1], spec.param_shape, spec.dtype_in(dtype)), spec)  # one program for all layers
        return compiled(first, part_shape(spec, tp), jnp.dtype(dtype), config.moe_hidden_size, key_of(spec), tp)

    def params(config: ModelConfig | DraftConfig) -> dict:
        return runs_on.stored_params(parameter_tree(config, leaf), config, how, None)

    drafted = {}
    if draft_config is not None:
        draft_config.check_fits(config)
        drafted = {"draft": DFlash2(draft_config, **settings), "draft_params": params(draft_config)}
    module = MuseSpark(config, activations=activations, **settings)
    return Model.create(module, params(config), **drafted, tree_size=rows)


def part_shape(spec: TensorSpec, tp: int) -> tuple[int, ...]:
    """Of what rank 0 has of a parameter."""
    return tuple(part.stop - part.start for part in spec.rank_part(tp, 0))
