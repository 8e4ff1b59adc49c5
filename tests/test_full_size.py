"""The released model of 816 billion parameters as shapes: it builds, traces and lowers on a laptop."""

import collections
import math
import re
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from muse_jax import decoding, sharding
from muse_jax.config import MUSE_SPARK_OPEN
from muse_jax.decoding import Model
from muse_jax.layout import draft_tensors, packed_tensors
from muse_jax.model import MuseSpark
from muse_jax.sharding import ShardingConfig, make_mesh

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import show_collectives

BATCH, SLOTS, CHUNK, TREE = 1, 131_072, 512, 16
RING = 2064  # 2047 before a row, and a tree, rounded up to a multiple of eight
MAX_RSS_GROWTH_KB = 1 << 20  # the smallest sharded copy of the weights would be 190 GiB


@pytest.fixture(scope="module")
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


MUSE_SPARK_NVFP4, DRAFT = show_collectives.full_size()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(8)


@pytest.fixture(scope="module")
def step(memory, mesh):
    """Model and state as shapes, each array where it lives."""
    how = ShardingConfig(mesh.size)
    return show_collectives.abstract_step(MUSE_SPARK_NVFP4, DRAFT, mesh, how, jnp.bfloat16, TREE, slots=SLOTS)


@pytest.fixture(scope="module")
def model(step) -> Model:
    return step[0]


@pytest.fixture(scope="module")
def caches(step):
    return step[1].cache, step[1].draft_cache


@pytest.fixture(scope="module")
def shaped(mesh):
    """Puts a tree of shapes on every device of the mesh."""
    everywhere = sharding.replicated(mesh)
    return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)


@pytest.fixture(scope="module")
def traced(step):
    return jax.jit(decoding.decode, donate_argnames="state").trace(*step)


def layer_calls(text: str) -> int:
    """XLA keeps each layer as a call of its own."""
    return len(re.findall(r'call @_run_layer\w*\(.*inlineable = "false"', text))


def test_62_layers_build_as_shapes():
    module = MuseSpark(MUSE_SPARK_OPEN)
    leaves = jax.tree.leaves(nnx.state(module))
    assert len(leaves) == 62 * 18 + 3
    assert {type(x) for x in leaves} == {jax.ShapeDtypeStruct}
    assert sum(x.size * x.dtype.itemsize for x in leaves) == 1_640_243_214_336
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    logits = jax.eval_shape(decoding.full_logits, Model.create(module), tokens)
    assert (logits.shape, logits.dtype) == ((2, 4096, 202_048), jnp.float32)


def test_caches(caches):
    """Sixteen global layers keep every position; the others and the draft a ring for window - 1 and the largest tree."""
    cache, draft_cache = caches
    sizes = collections.Counter(keys.shape for keys, _ in cache.layers)
    assert sizes == {(1, 16, SLOTS, 64): 16, (1, 16, RING, 64): 46}
    assert {keys.shape for keys, _ in draft_cache.layers} == {(1, 8, RING, 128)}
    for cache, heads in zip(caches, (2, 1), strict=True):
        for leaf in jax.tree.leaves(cache.layers):
            assert leaf.dtype == jnp.bfloat16
            assert leaf.sharding.shard_shape(leaf.shape)[1] == heads


def test_decode_lowers_for_eight_devices(traced, mesh):
    """Each kind of layer is one function of the module, called 62 times in all."""
    text = traced.lower().as_text()
    assert "mhlo.num_partitions = 8" in text
    assert (
        len(re.findall(r"func\.func private @_run_layer", text)) == 8
    )  # four kinds, as the first and the last have bf16 experts
    assert layer_calls(text) == 62
    new_state, out = traced.out_info
    assert new_state.cache.layers[1][0].shape == (BATCH, 16, SLOTS, 64)
    assert new_state.draft_cache.layers[0][0].shape == (BATCH, 8, RING, 128)
    assert out.tokens.shape == (BATCH, TREE)


def test_draft_is_as_large_as_the_specification_says():
    """dflash2.md section 7: 4.38 G parameters with an FFN of three times the width."""
    sizes = [spec.size for spec in draft_tensors(DRAFT)]
    assert len(sizes) == 81
    assert round(sum(sizes) / 1e9, 2) == 4.38


def test_decode_lowers_for_a_gpu(traced):
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert layer_calls(text) == 62


def test_prefill_lowers_for_eight_devices(model, caches, shaped):
    last = jax.ShapeDtypeStruct((BATCH, MUSE_SPARK_OPEN.hidden_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct((BATCH, CHUNK), jnp.int32)
    start, lengths = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    step = jax.jit(decoding.prefill_chunk, donate_argnames=("caches", "last"))
    lowered = step.lower(model, caches, *shaped((last, tokens, start, lengths)))
    text = lowered.as_text()
    assert layer_calls(text) == 62
    # Nothing has the size of queries x positions: chunks meet a long cache block by block.
    largest = max(int(a) * int(b) for a, b in re.findall(r"tensor<1x2x(\d+)x(\d+)xf32>", text))
    assert largest < CHUNK * SLOTS // 8


def test_nothing_was_allocated(memory, traced):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MAX_RSS_GROWTH_KB
    assert max((x.nbytes for x in jax.live_arrays()), default=0) < 1 << 20


def test_a_device_has_an_eighth_of_the_weights_and_needs_little_besides(traced, step):
    """Compiled, not only lowered. Temporaries on a CPU are what it widens: lm_head and the largest matrices of a layer."""
    _, state = step
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    weights = sum(tensor.nbytes for config in (MUSE_SPARK_NVFP4, DRAFT) for tensor in packed_tensors(config, 8))
    others = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert memory.argument_size_in_bytes == pytest.approx(weights + others, abs=4096)  # which also counts an alignment
    assert memory.temp_size_in_bytes < 2e9
