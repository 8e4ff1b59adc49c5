"""Eight virtual CPU devices: arrays are where the table says, and a mesh changes neither logits nor tokens."""

import logging

import jax
import numpy as np
import pytest

import muse_jax
from muse_jax.layout import text_tensors
from muse_jax.sharding import make_mesh, param_sharding

SIZES = (1, 2, 4, 8)
LENGTHS, NEW_TOKENS = (7, 10), 6


@pytest.fixture(scope="module", params=SIZES)
def sharded(request, checkpoint):
    return muse_jax.load(checkpoint, mesh=make_mesh(request.param))


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(sum(SIZES))
    return rng.integers(0, 259, (2, 16))


@pytest.fixture(scope="module")
def logits(muse, tokens):
    return np.asarray(muse.logits(tokens))


def at(params, path):
    for key in path:
        params = params[key]
    return params


def test_parameters_live_where_the_table_says(sharded, small_params):
    """By heads, by expert rows, by vocabulary; with eight devices and four KV heads, k and v are everywhere."""
    mesh, config = sharded.mesh, sharded.config
    held = dict.fromkeys(mesh.devices.flat, 0)
    expected = 0
    for spec in text_tensors(config):
        array, whole = at(sharded.model.params, spec.path), at(small_params, spec.path)
        assert array.sharding.is_equivalent_to(param_sharding(spec, mesh), array.ndim)
        shared = spec.shard_axis is None or (spec.path[-1] in ("k_proj", "v_proj") and mesh.size == 8)
        shape = list(spec.param_shape)
        if not shared:
            shape[spec.shard_axis] //= mesh.size
        expected += array.nbytes // (1 if shared else mesh.size)
        assert len(array.addressable_shards) == mesh.size
        for shard in array.addressable_shards:
            assert list(shard.data.shape) == shape
            np.testing.assert_array_equal(shard.data, whole[shard.index])
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {expected}


def test_logits_are_those_of_one_device(sharded, tokens, logits):
    """fp32 sums split over ranks differ by about 1e-7 an operation, and two layers enlarge that to 1e-6 of the largest."""
    np.testing.assert_allclose(sharded.logits(tokens), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def test_greedy_tokens_are_those_of_one_device(muse, checkpoint, tokens, caplog):
    """Eight devices; caches stay where they began, so that the second step is the program of the first."""
    sharded = muse_jax.load(checkpoint, mesh=make_mesh(8))
    prompts = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    state, out = sharded.prefill(prompts, max_new_tokens=NEW_TOKENS, stop_token_ids=[263])
    places = [x.sharding for x in jax.tree.leaves(state.cache)]
    texts = [[int(row[0])] for row in out.tokens]
    for i in range(1, NEW_TOKENS):
        with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
            caplog.clear()
            state, out = sharded.decode(state)
            compiled = [record for record in caplog.records if "XLA compilation" in record.getMessage()]
            assert bool(compiled) == (i == 1)
        for text, row in zip(texts, out.tokens, strict=True):
            text.append(int(row[0]))
    assert np.asarray(out.done).all()
    for x, place in zip(jax.tree.leaves(state.cache), places, strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)

    # Of one device: the largest logit at each position of what was written. The two best are further apart than errors.
    logits = np.asarray(muse.logits([prompt + text for prompt, text in zip(prompts, texts, strict=True)]))[:, :, :259]
    for row, text, n in zip(logits, texts, LENGTHS, strict=True):
        assert row[n - 1 : n - 1 + NEW_TOKENS].argmax(-1).tolist() == text


@pytest.mark.parametrize(("devices", "speculation"), [(2, "chain"), (8, "tree")])
def test_speculation_on_a_mesh(muse, draft_checkpoint, tokens, devices, speculation):
    """The tokens of one device without a draft, at T = 0 and 1; as above, choices are further apart than errors."""
    sharded = muse_jax.load(draft_checkpoint, mesh=make_mesh(devices), speculation=speculation)
    prompts = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    settings = {"max_new_tokens": 12, "stop_token_ids": [263], "temperature": [0.0, 1.0], "seed": 5}

    def finish(muse):
        state, out = muse.prefill(prompts, **settings)
        texts: list[list[int]] = [[] for _ in prompts]
        while True:
            for text, row, count in zip(texts, out.tokens, out.count, strict=True):
                text.extend(row[:count].tolist())
            if out.done.all():
                return texts, state
            state, out = muse.decode(state)

    texts, state = finish(sharded)
    assert texts == finish(muse)[0]
    for cache, config in ((state.cache, sharded.config), (state.draft_cache, sharded.draft_config)):
        split = config.num_key_value_heads % devices == 0
        for leaf in jax.tree.leaves(cache.layers):
            assert leaf.sharding.shard_shape(leaf.shape)[1] == leaf.shape[1] // (devices if split else 1)


def test_mesh_errors():
    for n in (0, 3, 16, -1):
        with pytest.raises(ValueError, match=rf"^devices = {n}: allowed are 1, 2, 4, 8$"):
            make_mesh(n)


def test_mesh_needs_devices(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    assert make_mesh(2).axis_names == ("tp",)
    with pytest.raises(ValueError, match=r"^devices = 4: this machine has 2 \(cpu\); JAX_NUM_CPU_DEVICES=4 makes "):
        make_mesh(4)
