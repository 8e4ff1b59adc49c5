"""The released model of 816 billion parameters as shapes: it builds, traces and lowers on a laptop."""

import collections
import functools
import re
import resource

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from muse_jax import decoding, sharding
from muse_jax.config import MUSE_SPARK_OPEN
from muse_jax.decoding import DecodeState, Model
from muse_jax.layout import text_tensors
from muse_jax.model import MuseSpark
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import make_mesh

BATCH, SLOTS, CHUNK, TREE = 1, 131_072, 512, 16
MAX_RSS_GROWTH_KB = 1 << 20  # the smallest sharded copy of the weights would be 190 GiB


@pytest.fixture(scope="module")
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(8)


@pytest.fixture(scope="module")
def model(memory, mesh) -> Model:
    params: dict = {}
    for spec in text_tensors(MUSE_SPARK_OPEN):
        node = params
        for key in spec.path[:-1]:
            node = node.setdefault(key, {})
        where = sharding.param_sharding(spec, MUSE_SPARK_OPEN, mesh)
        dtype = jnp.float32 if spec.keep_fp32 else jnp.bfloat16
        node[spec.path[-1]] = jax.ShapeDtypeStruct(spec.param_shape, dtype, sharding=where)
    return Model.create(MuseSpark(MUSE_SPARK_OPEN, dtype=jnp.dtype(jnp.bfloat16)), params, tree_size=TREE)


@pytest.fixture(scope="module")
def shaped(mesh):
    """Puts a tree of shapes on every device of the mesh."""
    everywhere = sharding.replicated(mesh)
    return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)


@pytest.fixture(scope="module")
def cache(model, mesh, shaped):
    cache = jax.eval_shape(functools.partial(decoding.empty_cache, batch=BATCH, slots=SLOTS), model)
    where = sharding.cache_sharding(MUSE_SPARK_OPEN, mesh)
    layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), cache.layers)
    return decoding.KVCache(layers, shaped(cache.ring_positions))


@pytest.fixture(scope="module")
def state(cache, shaped):
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    done = jax.ShapeDtypeStruct((BATCH,), jnp.bool)
    sampling = SamplingParams.create(BATCH, temperature=1.0)
    return DecodeState(cache, *shaped((row, row, row, done, row, sampling)))


@pytest.fixture(scope="module")
def traced(model, state):
    return jax.jit(decoding.decode, donate_argnames="state").trace(model, state)


def test_62_layers_build_as_shapes():
    module = MuseSpark(MUSE_SPARK_OPEN)
    leaves = jax.tree.leaves(nnx.state(module))
    assert len(leaves) == 62 * 18 + 3
    assert {type(x) for x in leaves} == {jax.ShapeDtypeStruct}
    assert sum(x.size * x.dtype.itemsize for x in leaves) == 1_640_243_214_336
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    logits = jax.eval_shape(decoding.full_logits, Model.create(module), tokens)
    assert (logits.shape, logits.dtype) == ((2, 4096, 202_048), jnp.float32)


def test_caches(cache):
    """Sixteen global layers keep every position; the others a ring of window - 1 + the largest tree."""
    sizes = collections.Counter(keys.shape for keys, _ in cache.layers)
    assert sizes == {(1, 16, SLOTS, 64): 16, (1, 16, 2047 + TREE, 64): 46}
    for leaf in jax.tree.leaves(cache.layers):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.sharding.shard_shape(leaf.shape)[1] == 2


def test_decode_lowers_for_eight_devices(traced, mesh):
    """Each kind of layer is one function of the module, called 62 times in all."""
    text = traced.lower().as_text()
    assert "mhlo.num_partitions = 8" in text
    assert len(re.findall(r"func\.func private @_run_layer", text)) == 2
    assert len(re.findall(r"call @_run_layer", text)) == 62
    new_state, out = traced.out_info
    assert new_state.cache.layers[1][0].shape == (BATCH, 16, SLOTS, 64)
    assert out.tokens.shape == (BATCH, TREE)


def test_decode_lowers_for_a_gpu(traced):
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"call @_run_layer", text)) == 62


def test_prefill_lowers_for_eight_devices(model, cache, shaped):
    last = jax.ShapeDtypeStruct((BATCH, MUSE_SPARK_OPEN.hidden_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct((BATCH, CHUNK), jnp.int32)
    start, lengths = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    step = jax.jit(decoding.prefill_chunk, donate_argnames=("cache", "last"))
    lowered = step.lower(model, cache, *shaped((last, tokens, start, lengths)))
    text = lowered.as_text()
    assert len(re.findall(r"func\.func private @_run_layer", text)) == 2
    assert len(re.findall(r"call @_run_layer", text)) == 62
    # Nothing has the size of queries x positions: chunks meet a long cache block by block.
    largest = max(int(a) * int(b) for a, b in re.findall(r"tensor<1x16x(\d+)x(\d+)xf32>", text))
    assert largest < CHUNK * SLOTS // 8


def test_nothing_was_allocated(memory, traced):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MAX_RSS_GROWTH_KB
    assert max((x.nbytes for x in jax.live_arrays()), default=0) < 1 << 20
