"""Attention of a decode step: the reference against muse_jax, the kernels interpreted, lowered, and compiled on a GPU.

How near the kernel must be. Both sides round each weight to bfloat16, relative to maxima that may differ: half a unit in the
last place each, so outputs differ by at most 2^-8 of the mean of |v| under the softmax. Sums of fp32 in another order, and
exp2 for exp, are 2^-16 of it and less. As the signs of the errors are independent, the norm of the difference is much less
than that: weights with random mantissas are off by 2^-9 / sqrt(3) at most in the mean square, on either side, which makes
2^-9 sqrt(2/3) of the output's norm where values have a mean of zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from muse_jax import kv_cache
from muse_jax.config import TINY
from muse_jax.numerics import SERVING
from pallas_kernels import compat
from pallas_kernels.decode_attention import kernel, reference, shapes
from pallas_kernels.decode_attention.kernel import DecodeAttentionConfig, attend_linear, attend_ring

interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 does not interpret layout_cast")
SMALL = DecodeAttentionConfig(block=64, stages=2, splits=2, merge_warpgroups=2, merge_columns=64)
SCALE = 64**-0.5


def normal(rng, shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def tensors(rng, batch, rows, heads, kv_heads, slots, dtype=jnp.bfloat16, head_dim=64):
    """q, k, v, k_rows, v_rows and rows_visible."""
    cache, own = (batch, kv_heads, slots, head_dim), (batch, kv_heads, rows, head_dim)
    q = normal(rng, (batch, rows, heads, head_dim), dtype) * jnp.asarray(2, dtype)
    visible = jnp.asarray(rng.random((batch, rows, rows)) < 0.4) | jnp.eye(rows, dtype=bool)[None]
    return [q, *(normal(rng, shape, dtype) for shape in (cache, cache, own, own))], visible


def check_near(function, args, out):
    """function: of the reference; args[2] and args[4] are values."""
    expected = np.asarray(function(*args))
    magnitudes = function(*args[:2], jnp.abs(args[2]), args[3], jnp.abs(args[4]), *args[5:])
    out = np.asarray(out)
    assert np.all(np.isfinite(out))
    assert np.all(np.abs(out - expected) <= (2**-8 + 2**-16) * np.asarray(magnitudes))
    assert np.linalg.norm(out - expected) <= 2**-9 * np.sqrt(2 / 3) * np.linalg.norm(expected)


# ---- The reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_reference_is_what_the_model_does(rng, dtype):
    """In both kinds of layers, bit for bit, with the masks that a step makes once for all layers."""
    config, slots = TINY, 200
    (q, k, v, k_rows, v_rows), visible = tensors(rng, 2, 5, 4, 2, slots, dtype, head_dim=16)
    start = jnp.array([slots - 7, 31], jnp.int32)
    ring = kv_cache.ring_capacity(config, slots, 16)
    positions = start[:, None] - 1 - (start[:, None] - 1 - jnp.arange(ring, dtype=jnp.int32)[None]) % ring
    cache = kv_cache.KVCache([], jnp.maximum(positions, -1))
    depth = jnp.asarray(rng.integers(0, 4, (2, 5)), jnp.int32)
    context = kv_cache.DecodeContext.create(cache, start, depth, (visible, visible), config)
    rows = [x.transpose(0, 2, 1, 3) for x in (k_rows, v_rows)]  # as projections leave them

    def check(caches, window, ours):
        # Both turn the rows around inside of jit: XLA fuses differently where it sees that, and so rounds fp32 differently.
        theirs = jax.jit(lambda q, k, v, caches: context.attend(q, k, v, caches, window, 0.3, SERVING)[0])
        ours = jax.jit(lambda q, k, v, caches, ours=ours: ours(q, *caches, *map(kv_cache.heads_first, (k, v))))
        np.testing.assert_array_equal(theirs(q, *rows, caches), ours(q, *rows, caches))

    check((k, v), None, lambda *args: reference.attend_linear(*args, start, visible, scale=0.3))
    seen = (cache.ring_positions, start, context.positions, context.rows_in_window == 0)  # what a mask hides is very low
    window = config.sliding_window
    ring_only = lambda *args: reference.attend_ring(*args, *seen, window=window, scale=0.3)  # noqa: E731
    check((k[:, :, :ring], v[:, :, :ring]), window, ring_only)


# ---- The kernels, interpreted -------------------------------------------------------------------------------------------


def linear(config=SMALL):
    options = {"scale": SCALE, "config": config, "interpret": compat.interpret_params()}
    return jax.jit(lambda *args: attend_linear(*args, **options))


@interpreted
def test_lengths_at_edges(rng):
    """Of blocks and of the cache; the last block overlaps the one before, as 200 is not a multiple of 64."""
    lengths = jnp.array([0, 1, 63, 64, 65, 200], jnp.int32)
    arrays, visible = tensors(rng, len(lengths), 16, 8, 1, 200)
    args = (*arrays, lengths, visible)
    check_near(lambda *args: reference.attend_linear(*args, scale=SCALE), args, linear()(*args))


@interpreted
def test_what_nobody_sees_does_not_matter(rng):
    """Keys may be NaN; values may be huge, and NaN in blocks that are not read."""
    (q, k, v, k_rows, v_rows), visible = tensors(rng, 1, 16, 16, 2, 256)
    length = jnp.array([70], jnp.int32)
    function = linear()
    args = (q, k, v, k_rows, v_rows, length, visible)
    out = function(*args)
    check_near(lambda *args: reference.attend_linear(*args, scale=SCALE), args, out)
    k = k.at[:, :, 70:].set(jnp.nan)
    v = v.at[:, :, 70:128].set(3e38).at[:, :, 128:].set(jnp.nan)
    poisoned = function(q, k, v, k_rows, v_rows, length, visible)
    np.testing.assert_array_equal(out, poisoned)


@interpreted
def test_ring_filling_wrapped_and_beside_rows_that_see_only_themselves(rng):
    """Before a ring is full, when it has wrapped, and with nothing committed; 104 slots are not a multiple of 64."""
    window, slots, rows = 89, 104, 16
    start = jnp.array([40, 1003, 0], jnp.int32)
    arrays, visible = tensors(rng, 3, rows, 8, 1, slots)
    visible = visible.at[2].set(jnp.eye(rows, dtype=bool)).at[2, 3, 3].set(False)
    slot = jnp.arange(slots, dtype=jnp.int32)
    held = jnp.maximum(start[:, None] - 1 - (start[:, None] - 1 - slot[None]) % slots, -1)
    positions = start[:, None] + jnp.asarray(rng.integers(0, 7, (3, rows)), jnp.int32)
    # Rows of an unfinished step: not committed, so hidden, whatever their position.
    held = held.at[0, 50].set(45)
    args = (*arrays, held, start, positions, visible)
    options = {"window": window, "scale": SCALE, "config": SMALL, "interpret": compat.interpret_params()}
    out = jax.jit(lambda *args: attend_ring(*args, **options))(*args)
    np.testing.assert_array_equal(out[2, 3], 0)  # it sees nothing at all; the reference has a mean of what it does not see
    function = lambda *args: reference.attend_ring(*args, window=window, scale=SCALE)  # noqa: E731
    check_near(function, args, out.at[2, 3].set(function(*args)[2, 3]))


@interpreted
@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows(rng, rows):
    """They are padded to 8; more splits than blocks and fewer warpgroups than splits."""
    arrays, visible = tensors(rng, 1, rows, 16, 1, 128)
    args = (*arrays, jnp.array([100], jnp.int32), visible)
    config = DecodeAttentionConfig(block=64, stages=1, splits=9, merge_warpgroups=2, merge_columns=32)
    out = linear(config)(*args)
    check_near(lambda *args: reference.attend_linear(*args, scale=SCALE), args, out)


# ---- Refusals -----------------------------------------------------------------------------------------------------------


def test_refuses_what_it_does_not_do(rng):
    def attend(heads=16, kv_heads=2, rows=16, slots=128, head_dim=64, dtype=jnp.bfloat16, config=SMALL, lengths=1):
        arrays, visible = tensors(rng, 1, rows, heads, kv_heads, slots, dtype, head_dim)
        return attend_linear(*arrays, jnp.ones(lengths, jnp.int32), visible, scale=SCALE, config=config)

    for options, error, message in [
        ({"heads": 8}, NotImplementedError, "query heads per KV head"),
        ({"rows": 17}, NotImplementedError, "up to 16 rows"),
        ({"heads": 32}, NotImplementedError, "128 pairs"),
        ({"head_dim": 32}, NotImplementedError, "head_dim"),
        ({"slots": 130}, NotImplementedError, "multiple of 8"),
        ({"slots": 56}, ValueError, "fewer than a block"),
        ({"dtype": jnp.float32}, ValueError, "q must be bfloat16"),
        ({"lengths": 2}, ValueError, "lengths must be"),
        ({"config": DecodeAttentionConfig(stages=8)}, ValueError, "shared memory"),
    ]:
        with pytest.raises(error, match=message):
            attend(**options)
    for options in ({"block": 96}, {"stages": 0}, {"splits": 0}, {"merge_columns": 4}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DecodeAttentionConfig(**options)


# ---- Full size ----------------------------------------------------------------------------------------------------------


# Shapes that differ in what is committed alone lower to the same. Semantics other than those in use are a way out.
LOWERED = [("Lane", name) for name in ("sliding", "sliding_1", "global_100k", "global_100k_1", "global_32k_4")]
LOWERED += [("Warpgroup", name) for name in ("sliding", "global_100k")]


@pytest.mark.parametrize(("semantics", "name"), LOWERED)
def test_lowers_for_hopper(semantics, name, monkeypatch):
    """Two kernels; without a GPU, Mosaic lowers for compute capability 9.0."""
    monkeypatch.setattr(compat, "LOWERING_SEMANTICS", plgpu.LoweringSemantics[semantics])
    shape = next(shape for shape in shapes.SHAPES if shape.name == name)
    args = jax.eval_shape(shape.args, jax.random.key(0))
    lowered = jax.jit(shape.function(kernel)).trace(*args).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
def test_on_a_gpu(shape):
    args = shape.args(jax.random.key(1))
    function = jax.jit(shape.function(kernel))
    out = function(*args)
    check_near(jax.jit(shape.function(reference)), args, out)
    np.testing.assert_array_equal(out, function(*args))
