"""The end of a branch in one launch; a CTA has a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import (
    PIECE,
    PIECE_LAYOUT,
    exchange,
    exchange_scratch,
    in_pieces,
    kernel,
    loader,
    per_warp,
    pieces_of_warpgroup,
    product,
    store,
)


@dataclasses.dataclass(frozen=True)
class BlendNorm:
    """post_eps, eps: of the branch's norm and of the next.  warpgroups: of a CTA, 1, 2, 4 or 8."""

    post_eps: float
    eps: float
    warpgroups: int = 4


def blend_norm(
    stream: jax.Array,
    branch: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    next_weight: jax.Array,
    branch_weight: jax.Array | None,
    config: BlendNorm,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.blend_norm`, whose arguments and results these are, in one launch.

    A row is loaded once and stays in registers: with four warpgroups a thread has 16 values of each of the five or six arrays.

    Raises:   ValueError for shapes or dtypes that do not fit; NotImplementedError if D is no multiple of 512 warpgroups.
    Rounding: that of the reference, but squares are summed in another order.
    """
    (rows, n), warpgroups = stream.shape, config.warpgroups
    weights = [alpha, beta, next_weight, *([] if branch_weight is None else [branch_weight])]
    if branch.shape != stream.shape or any(w.shape != (n,) for w in weights):
        shapes = [x.shape for x in (branch, *weights)]
        raise ValueError(f"blend_norm: a stream {stream.shape} needs a branch of its shape and vectors of {n}, got {shapes}")
    if any(x.dtype != jnp.float32 for x in (stream, alpha, beta)):
        raise ValueError(f"blend_norm: stream, alpha and beta must be float32: {stream.dtype}, {alpha.dtype}, {beta.dtype}")
    if n % (PIECE * warpgroups):
        raise NotImplementedError(f"blend_norm: rows of {n}; {warpgroups} warpgroups need a multiple of {PIECE * warpgroups}")
    load = loader(interpret)

    def blend_norm_row(stream_ref, branch_ref, alpha_ref, beta_ref, next_ref, *refs):
        *scale_ref, new_ref, normed_ref, shared, barriers = refs
        row, numbers = lax.axis_index("row"), pieces_of_warpgroup(n, warpgroups)

        def load_all(ref: Any) -> list[jax.Array]:
            return [load(ref.at[i], PIECE_LAYOUT) for i in numbers]

        def inverse_rms(arrays: list[jax.Array], eps: float, use: int) -> jax.Array:
            [total] = exchange([per_warp([x * x for x in arrays])], shared.at[use], barriers.at[use], load)
            return lax.rsqrt(jnp.sum(total) / n + eps)

        # Everything is asked for before anything is waited for.
        stream, branch = load_all(stream_ref.at[row]), load_all(branch_ref.at[row])
        alpha, beta, scale = load_all(alpha_ref), load_all(beta_ref), load_all(next_ref)
        if scale_ref:
            branch = [x * (1.0 + w) for x, w in zip(branch, load_all(scale_ref[0]), strict=True)]
        inverse = inverse_rms(branch, config.post_eps, 0)
        new = [product(a, x) + product(b, y * inverse) for a, x, b, y in zip(alpha, stream, beta, branch, strict=True)]
        for i, x in zip(numbers, new, strict=True):
            store(new_ref.at[row, i], x)
        inverse = inverse_rms(new, config.eps, 1)
        for i, x, w in zip(numbers, new, scale, strict=True):
            store(normed_ref.at[row, i], x * inverse * (1.0 + w))

    arrays = [in_pieces(x) for x in (stream, branch, *weights)]
    shape = arrays[0].shape
    new, normed = kernel(
        blend_norm_row,
        [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, next_weight.dtype)],
        grid={"row": rows},
        warpgroups=warpgroups,
        scratch=exchange_scratch(1, warpgroups, uses=2),
        interpret=interpret,
    )(*arrays)
    return new.reshape(stream.shape), normed.reshape(stream.shape)
