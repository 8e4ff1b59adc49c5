"""combine: post-expert norm and weighted sum in one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.numerics import SERVING, round_to
from pallas_kernels import compat
from pallas_kernels.combine import reference, shapes
from pallas_kernels.combine.kernel import Combine, combine


def draw(rng: np.random.Generator, dtype, m: int = 512) -> tuple:
    rows, norm = rng.standard_normal((5, 4, m), np.float32), rng.standard_normal(m, np.float32)
    return jnp.asarray(rows).astype(dtype), jnp.asarray(rng.random((5, 4), np.float32)), jnp.asarray(norm).astype(dtype)


def equal(x: jax.Array, y: jax.Array) -> None:
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_is_what_the_layer_does(rng, dtype, jit):
    args = draw(rng, dtype)

    @jit
    def layer(rows, weights, norm):
        return ops.combine(ops.input_scaled_norm(rows, norm, 1e-8, SERVING, dtype), weights, dtype)

    equal(jit(lambda *args: reference.combine(*args, 1e-8))(*args), layer(*args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_of_pieces_is_what_ranks_do(rng, dtype):
    """As `ShardedExperts` of muse_jax: squares of eight pieces added in order, then each piece weighted and summed."""
    rows, weights, norm = draw(rng, dtype)
    pieces = list(zip(jnp.split(rows, 8, axis=-1), jnp.split(norm, 8), strict=True))

    def squares(rows, norm):
        return ops.row_squares(rows, norm, SERVING)

    def weighted(rows, norm, total, weights):
        normed = ops.input_scale(rows, norm, SERVING, dtype) * jax.lax.rsqrt(total / 512 + 1e-8)
        return round_to(jnp.sum(normed * weights[..., None], axis=1), dtype)

    total = functools.reduce(jnp.add, [jax.jit(squares)(*piece) for piece in pieces])
    weigh = jax.jit(lambda rows, norm, total, weights: reference.combine(rows, weights, norm, 1e-8, total[..., 0], 512))
    for piece in pieces:
        equal(weigh(*piece, total, weights), jax.jit(weighted)(*piece, total, weights))


def test_pieces_side_by_side_are_the_whole(rng):
    rows, weights, norm = draw(rng, jnp.bfloat16, 1024)
    pieces = list(zip(jnp.split(rows, 2, axis=-1), jnp.split(norm, 2), strict=True))
    interpret = compat.interpret_params()
    total = functools.reduce(jnp.add, [ops.row_squares(*piece, SERVING)[..., 0] for piece in pieces])
    config = Combine(1e-8, 1024, warpgroups=1)
    parts = [combine(piece, weights, norm, config, total, interpret) for piece, norm in pieces]
    shapes.check(jnp.concatenate(parts, axis=-1), reference.combine(rows, weights, norm, 1e-8))


def test_shapes_that_do_not_fit_are_refused(rng):
    rows, weights, norm = draw(rng, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="rows of 512"):
        combine(rows, weights, norm, Combine(1e-8, 512, 4))
    with pytest.raises(ValueError, match="need the total"):
        combine(rows, weights, norm, Combine(1e-8, 4096, 1))
    with pytest.raises(ValueError, match="weights and totals"):
        combine(rows, weights[:, :2], norm, Combine(1e-8, 512, 1))
    with pytest.raises(ValueError, match="top_k, m"):
        combine(rows, weights, norm[:8], Combine(1e-8, 512, 1))
