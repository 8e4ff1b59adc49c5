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
from muse_jax.config import MUSE_SPARK_OPEN, AttentionKind
from muse_jax.decoding import DecodeState, Model
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig, default_target_layer_ids
from muse_jax.layout import draft_tensors, parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import make_mesh

BATCH, SLOTS, CHUNK, TREE = 1, 131_072, 512, 16
MAX_RSS_GROWTH_KB = 1 << 20  # the smallest sharded copy of the weights would be 190 GiB


@pytest.fixture(scope="module")
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# A draft of the published shape; head size and FFN width are those of a relative, the file's are not known.
DRAFT = DraftConfig(
    vocab_size=202_048,
    hidden_size=8192,
    num_hidden_layers=5,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=24_576,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    layer_types=(AttentionKind.SLIDING,) * 5,
    sliding_window=2048,
    is_causal=False,
    attention_bias=False,
    target_layer_ids=default_target_layer_ids(62, 5),
    mask_token_id=201_818,
    block_size=16,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
    output_multiplier=MUSE_SPARK_OPEN.output_multiplier,
    final_logit_softcapping=MUSE_SPARK_OPEN.final_logit_softcapping,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(8)


@pytest.fixture(scope="module")
def model(memory, mesh) -> Model:
    def shapes(config):
        def leaf(spec):
            where = sharding.param_sharding(spec, mesh)
            dtype = spec.dtype_in(jnp.bfloat16)
            return jax.ShapeDtypeStruct(spec.param_shape, dtype, sharding=where)

        return parameter_tree(config, leaf)

    dtype = jnp.dtype(jnp.bfloat16)
    module, draft = MuseSpark(MUSE_SPARK_OPEN, dtype=dtype), DFlash2(DRAFT, dtype=dtype)
    params = {"params": shapes(MUSE_SPARK_OPEN), "draft": draft, "draft_params": shapes(DRAFT)}
    return Model.create(module, **params, speculation="tree", tree_size=TREE)


@pytest.fixture(scope="module")
def shaped(mesh):
    """Puts a tree of shapes on every device of the mesh."""
    everywhere = sharding.replicated(mesh)
    return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)


@pytest.fixture(scope="module")
def caches(model, mesh, shaped):
    def placed(cache, config):
        where = sharding.cache_sharding(config, mesh)
        layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), cache.layers)
        return decoding.KVCache(layers, shaped(cache.ring_positions))

    caches = jax.eval_shape(functools.partial(decoding.empty_caches, batch=BATCH, slots=SLOTS), model)
    return tuple(placed(cache, config) for cache, config in zip(caches, (MUSE_SPARK_OPEN, DRAFT), strict=True))


@pytest.fixture(scope="module")
def state(caches, shaped):
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    done = jax.ShapeDtypeStruct((BATCH,), jnp.bool)
    stops = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)
    sampling = SamplingParams.create(BATCH, temperature=1.0)
    return DecodeState(*caches, *shaped((row, row, row, done, stops, sampling)), num_rows=TREE)


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


def test_caches(caches):
    """Sixteen global layers keep every position; the others, and the draft's, a ring of window - 1 + the largest tree."""
    cache, draft_cache = caches
    sizes = collections.Counter(keys.shape for keys, _ in cache.layers)
    assert sizes == {(1, 16, SLOTS, 64): 16, (1, 16, 2047 + TREE, 64): 46}
    assert {keys.shape for keys, _ in draft_cache.layers} == {(1, 8, 2047 + TREE, 128)}
    for cache, heads in zip(caches, (2, 1), strict=True):
        for leaf in jax.tree.leaves(cache.layers):
            assert leaf.dtype == jnp.bfloat16
            assert leaf.sharding.shard_shape(leaf.shape)[1] == heads


def test_decode_lowers_for_eight_devices(traced, mesh):
    """Each kind of layer is one function of the module, called 62 times in all."""
    text = traced.lower().as_text()
    assert "mhlo.num_partitions = 8" in text
    assert len(re.findall(r"func\.func private @_run_layer", text)) == 2
    assert len(re.findall(r"call @_run_layer", text)) == 62
    new_state, out = traced.out_info
    assert new_state.cache.layers[1][0].shape == (BATCH, 16, SLOTS, 64)
    assert new_state.draft_cache.layers[0][0].shape == (BATCH, 8, 2047 + TREE, 128)
    assert out.tokens.shape == (BATCH, TREE)


def test_draft_is_as_large_as_the_specification_says():
    """dflash2.md section 7: 4.38 G parameters with an FFN of three times the width."""
    sizes = [spec.size for spec in draft_tensors(DRAFT)]
    assert len(sizes) == 81
    assert round(sum(sizes) / 1e9, 2) == 4.38


def test_decode_lowers_for_a_gpu(traced):
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"call @_run_layer", text)) == 62


def test_prefill_lowers_for_eight_devices(model, caches, shaped):
    last = jax.ShapeDtypeStruct((BATCH, MUSE_SPARK_OPEN.hidden_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct((BATCH, CHUNK), jnp.int32)
    start, lengths = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    step = jax.jit(decoding.prefill_chunk, donate_argnames=("caches", "last"))
    lowered = step.lower(model, caches, *shaped((last, tokens, start, lengths)))
    text = lowered.as_text()
    assert len(re.findall(r"func\.func private @_run_layer", text)) == 2
    assert len(re.findall(r"call @_run_layer", text)) == 62
    # Nothing has the size of queries x positions: chunks meet a long cache block by block.
    largest = max(int(a) * int(b) for a, b in re.findall(r"tensor<1x16x(\d+)x(\d+)xf32>", text))
    assert largest < CHUNK * SLOTS // 8


def test_nothing_was_allocated(memory, traced):
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MAX_RSS_GROWTH_KB
    assert max((x.nbytes for x in jax.live_arrays()), default=0) < 1 << 20
