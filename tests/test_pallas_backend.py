"""`backend="pallas"`: which kernels a step uses, and a step beside that of `xla`, interpreted; compiled on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
from show_collectives import full_size

import muse_jax
from muse_jax import decoding, sharding
from muse_jax.backends import XLA, resolve_backend
from muse_jax.config import TINY, MLPKind, default_layer_types, default_layer_uses_rope
from muse_jax.decoding import Model
from muse_jax.draft import DFlash2
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import parameter_tree
from muse_jax.model import MuseSpark
from muse_jax.numerics import HF
from muse_jax.pallas_backend import Pallas
from muse_jax.sampling import SamplingParams

# Small, and yet every kernel takes it: rows of 512, heads of 64, experts of whole tiles, more of them than a warp has lanes.
CONFIG = dataclasses.replace(
    TINY,
    vocab_size=256,
    hidden_size=512,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=64,
    moe_hidden_size=512,
    moe_intermediate_size=512,
    num_local_experts=128,
    num_experts_per_tok=2,
    sliding_window=72,
    layer_types=default_layer_types(3),
    layer_uses_rope=default_layer_uses_rope(3),
    mlp_layer_types=(MLPKind.SPARSE,) * 3,
    nvfp4_layers=(1, 2),
    dtype="bfloat16",
)
BF16 = jnp.dtype(jnp.bfloat16)
interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax before 0.12 cannot interpret all kernels")


def make_model(backend, config=CONFIG, how=sharding.ONE_DEVICE, activations="bf16", mesh=None) -> Model:
    """Random weights, the same for every backend."""

    def leaf(spec):
        return random_models.draw(spec, spec.param_shape, BF16, config.moe_hidden_size, random_models.key_of(spec))

    params = parameter_tree(config, leaf)
    if mesh is not None:
        place, _ = sharding.placement(mesh, how)
        specs = parameter_tree(config, place)
        params = jax.device_put(params, specs)
    params = backend.stored_params(params, config, how, mesh)
    module = MuseSpark(config, dtype=BF16, activations=activations, sharding=how, backend=backend)
    return dataclasses.replace(Model.create(module, params, mesh=mesh), num_rows=8)


def logits_of(model: Model, length: int = 90, rows: int = 8) -> list[np.ndarray]:
    """Of a prompt's last token and, at its end, of a chain of `rows` tokens; then keys and values of the chain."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, length + rows)), jnp.int32)

    @jax.jit
    def run(model: Model, tokens: jax.Array) -> tuple:
        caches = decoding.empty_caches(model, 1, 256)
        lengths, zeros = jnp.full(1, length, jnp.int32), jnp.zeros((1, CONFIG.hidden_size), jnp.float32)
        caches, last = decoding.prefill_chunk(model, caches, zeros, tokens[:, :length], jnp.int32(0), lengths)
        settings = (jnp.full(1, 99, jnp.int32), jnp.full((1, 1), -1, jnp.int32), SamplingParams.create(1))
        state, out = decoding.first_token(model, caches, last, lengths, *settings)
        chain = muse_jax.tree.chain(tokens[:, length], tokens[:, length + 1 :], jnp.zeros((1, rows - 1), jnp.float32))
        _, _, (_, _, logits) = decoding.verify_and_commit(model, state, chain)
        return last, logits

    return [np.asarray(x, np.float32) for x in run(model, tokens)]


def assert_close(actual, expected, relative):
    for ours, reference in zip(actual, expected, strict=True):
        error = np.sqrt(np.mean(np.square(ours - reference)) / np.mean(np.square(reference)))
        assert error <= relative, error
