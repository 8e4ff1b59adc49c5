"""Eight virtual CPU devices: a step has the same bits on 1, 2, 4 and 8 of them, and each does its part of it."""

import dataclasses
import functools
import logging
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import muse_jax
from muse_jax import decoding, hlo, sharding
from muse_jax.config import TINY
from muse_jax.decoding import Model
from muse_jax.draft import DFlash2
from muse_jax.layout import cuts_heads, draft_tensors, parameter_tree, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import ShardingConfig, make_mesh

SIZES = tuple(n for n in (1, 2, 4, 8) if n <= len(jax.devices()))  # all on a CPU; on GPUs as many as there are
LENGTHS = (7, 10)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(sum(SIZES))
    return rng.integers(0, 259, (2, 16))


def at(params, path):
    return functools.reduce(lambda tree, key: tree[key], path, params)


# ---- Where things are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", SIZES)
def test_arrays_are_where_the_table_says(devices, draft_checkpoint, small_params, small_draft_params):
    """By heads, by expert rows, by vocabulary; where KV heads are fewer than devices, neighbours hold the same one."""
    sharded = muse_jax.load(draft_checkpoint, mesh=make_mesh(devices))
    mesh, model = sharded.mesh, sharded.model
    held, expected = dict.fromkeys(mesh.devices.flat, 0), 0
    for specs, params, whole in (
        (text_tensors(sharded.config), model.params, small_params),
        (draft_tensors(sharded.draft_config), model.draft_params, small_draft_params),
    ):
        for spec in specs:
            array = at(params, spec.path)
            assert len(array.addressable_shards) == devices
            for rank, shard in enumerate(sorted(array.addressable_shards, key=lambda shard: shard.device.id)):
                np.testing.assert_array_equal(shard.data, at(whole, spec.path)[spec.rank_part(devices, rank)])
                held[shard.device] += shard.data.nbytes
            expected += array.dtype.itemsize * spec.size // (1 if spec.shard_axis is None else min(devices, spec.num_parts))
    assert set(held.values()) == {expected}

    state, _ = sharded.prefill([[1, 2, 3]])
    for cache, config in ((state.cache, sharded.config), (state.draft_cache, sharded.draft_config)):
        parts = devices if cuts_heads(config) else 1  # the draft has four heads, which eight ranks do not divide
        for leaf in jax.tree.leaves(cache.layers):
            assert leaf.sharding.shard_shape(leaf.shape)[1] == max(1, config.num_key_value_heads // parts)


# ---- The same bits for any number of devices ----------------------------------------------------------------------------


def draw_params(config, dtype, name: str) -> dict:
    """Random everywhere: fresh norms, gates and biases are zero."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))

    def draw(spec) -> np.ndarray:
        match spec.path[-1]:
            case "codes":
                return rng.integers(0, 256, spec.param_shape, np.uint8)
            case "block_scales":
                return rng.integers(0x40, 0x58, spec.param_shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
            case "global_scale":
                return (2 ** rng.uniform(-1.5, 1.5, spec.param_shape) / 300).astype(np.float32)
            case "input_scale":
                return np.ones(spec.param_shape, np.float32)
        array = rng.standard_normal(spec.param_shape, np.float32)
        array *= 0.3 if array.ndim == 1 else 2 / np.sqrt(array.shape[-1])
        return (array + (spec.path == ("final_norm",))).astype(spec.dtype_in(dtype))

    return parameter_tree(config, draw)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a draft, and what is asked of it."""

    target: dict  # fields of the small config to replace
    draft: dict
    dtype: str
    batch: int
    sampling: dict
    nvfp4: bool = False
    activations: str = "bf16"
    speculation: str = "tree"
    devices: tuple[int, ...] = (1, 8)

    def configs(self, small_config, small_draft_config):
        nvfp4 = {"nvfp4_layers": (0,)} if self.nvfp4 else {}
        target = dataclasses.replace(small_config, **self.target, **nvfp4)
        shared = {name: getattr(target, name) for name in ("vocab_size", "hidden_size")}
        return target, dataclasses.replace(small_draft_config, **shared, **self.draft)


NVFP4_WIDTHS = {"moe_hidden_size": 128, "moe_intermediate_size": 256}
CASES = {
    "fp32, tree, greedy": Case({}, {}, "float32", 1, {}, devices=(1, 2, 4, 8)),
    # Widths that no vector length divides, a vocabulary that eight ranks do not; a KV head is shared by four ranks.
    "fp32, uneven, batch 3, T = 1": Case(
        {"vocab_size": 269, "hidden_size": 104, "num_key_value_heads": 2, "head_dim": 6, "moe_hidden_size": 56,
         "moe_intermediate_size": 88, "intermediate_size": 200},
        {"num_attention_heads": 8, "conv_group_size": 8}, "float32", 3, {"temperature": 1.0},
    ),
    "bf16, tree, filtered": Case(
        {"hidden_size": 72}, {"num_attention_heads": 16, "num_key_value_heads": 8, "conv_group_size": 8}, "bfloat16", 1,
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ),
    "fp32, W4A16": Case(NVFP4_WIDTHS, {}, "float32", 1, {}, nvfp4=True),
    "bf16, W4A4, chain": Case(NVFP4_WIDTHS, {}, "bfloat16", 1, {}, nvfp4=True, activations="nvfp4", speculation="chain",
                              devices=(1, 2, 4, 8)),
    # A block of 16 values would be cut, heads and hidden values cannot be shared: these are everywhere.
    "fp32, W4A4, nothing divides": Case(
        {"hidden_size": 48, "moe_hidden_size": 48, "moe_intermediate_size": 80, "num_attention_heads": 12,
         "intermediate_size": 100},
        {}, "float32", 1, {"temperature": 1.0}, nvfp4=True, activations="nvfp4", speculation="sampled_chain",
    ),
}  # fmt: skip


def make_model(case: Case, devices: int, configs, put_on_mesh, name: str) -> Model:
    mesh, how = make_mesh(devices), ShardingConfig(devices)
    dtype = jnp.dtype(case.dtype)
    target, draft = configs
    params, draft_params = (put_on_mesh(c, draw_params(c, dtype, name), mesh, how) for c in configs)
    module = MuseSpark(target, dtype=dtype, activations=case.activations, sharding=how)
    drafted = {"draft": DFlash2(draft, dtype=dtype, sharding=how), "draft_params": draft_params}
    return Model.create(module, params, **drafted, speculation=case.speculation, valid_vocab=259, mesh=mesh)


@functools.partial(jax.jit, static_argnames="steps")
def prefill_and_decode(model, tokens, lengths, stops, sampling, steps: int):
    """Two chunks of a prompt, then steps, compiled as one program."""
    batch, width = tokens.shape
    caches = decoding.empty_caches(model, batch, 4 * width)
    last = jnp.zeros((batch, model.config.hidden_size), jnp.float32)

    def prefill(carry, chunk):
        return decoding.prefill_chunk(model, *carry, *chunk, lengths), None

    chunks = tokens.reshape(batch, 2, width // 2).swapaxes(0, 1), jnp.int32([0, width // 2])
    (caches, last), _ = jax.lax.scan(prefill, (caches, last), chunks)
    state, first = decoding.first_token(model, caches, last, lengths, jnp.full_like(lengths, 40), stops, sampling)

    def step(state, _):
        state, out, (*_, logits) = decoding.decode_and_trace(model, state)
        return state, (out, logits)

    state, (outs, logits) = jax.lax.scan(step, state, length=steps)
    return state, first, outs, logits


def same_bits(a, b, where: str = "") -> None:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    different = np.count_nonzero(a.view(np.uint8) != b.view(np.uint8))
    if different:
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        pytest.fail(f"{where}: {different} bytes of {a.nbytes} differ in {a.dtype}{list(a.shape)}, values by {apart:.3g}")


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_same_bits(small_config, small_draft_config, put_on_mesh, rng, name):
    """Tokens, logits, and keys and values of target and draft, after a prefill in two chunks and steps that wrap the ring."""
    case = CASES[name]
    configs = case.configs(small_config, small_draft_config)
    tokens = jnp.asarray(rng.integers(0, 259, (case.batch, 32)), jnp.int32)
    lengths = jnp.asarray([29, 11, 17][: case.batch], jnp.int32)
    sampling = SamplingParams.create(case.batch, **case.sampling)
    expected = None
    for devices in (n for n in case.devices if n in SIZES):
        model = make_model(case, devices, configs, put_on_mesh, name)
        stops = jnp.full((case.batch, 1), 263, jnp.int32)
        state, first, outs, logits = prefill_and_decode(model, tokens, lengths, stops, sampling, steps=3)
        assert np.isfinite(logits).all() and np.std(logits) > 0.1
        results = {"first": first, "outs": outs, "logits": logits, "length": state.length, "token": state.token}
        for of, cache, config in zip(("target", "draft"), (state.cache, state.draft_cache), configs, strict=True):
            copies = cache.layers[0][0].shape[1] // config.num_key_value_heads
            results[of] = [x[:, ::copies] for x in jax.tree.leaves(cache.layers)], cache.ring_positions
        results = jax.device_get(results)
        expected = expected or results
        for (path, ours), theirs in zip(jax.tree.leaves_with_path(results), jax.tree.leaves(expected), strict=True):
            same_bits(ours, theirs, f"{devices} devices, {jax.tree_util.keystr(path)}")


MIXTURE = dataclasses.replace(TINY, moe_hidden_size=128, moe_intermediate_size=256, num_local_experts=16, num_experts_per_tok=4)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "W4A16", "W4A4"])
def test_the_layouts_of_experts_have_the_same_bits(put_on_mesh, rng, kind):
    """N-sharded = replicated = by experts, whose slots are added by ranks: either exchange, any number of devices."""
    dtype = jnp.dtype(jnp.bfloat16 if kind in ("bf16", "W4A4") else jnp.float32)
    config = dataclasses.replace(MIXTURE, nvfp4_layers=(0,) if kind.startswith("W4") else ())
    activations = "nvfp4" if kind == "W4A4" else "bf16"
    params = draw_params(config, dtype, kind)
    rows = jnp.asarray(rng.standard_normal((3, 7, config.hidden_size)), dtype)

    def mixture(devices: int, *layout) -> np.ndarray:
        mesh, how = make_mesh(devices), ShardingConfig(devices, *layout)
        graph, _ = nnx.split(MuseSpark(config, dtype=dtype, activations=activations, sharding=how))
        on_mesh = put_on_mesh(config, params, mesh, how)
        specs = parameter_tree(config, lambda spec: sharding.param_spec(spec, how))

        def run(params, rows):
            return nnx.merge(graph, params).layers[0].mlp(rows)

        everywhere = PartitionSpec()
        step = jax.shard_map(run, mesh=mesh, in_specs=(specs, everywhere), out_specs=everywhere, check_vma=False)
        return np.asarray(jax.jit(step)(on_mesh, rows))

    def check(devices: int, *layout, expected: np.ndarray) -> None:
        same_bits(mixture(devices, *layout), expected, f"{devices} devices, {layout}")

    sizes = SIZES if kind in ("fp32", "W4A4") else (1, 8)
    in_order, by_ranks = mixture(1, "n"), mixture(1, "n", "sums", True)
    for devices in sizes[1:]:
        check(devices, "n", expected=in_order)
        # Not on one device, where it takes long to compile: eight ranks of eight pieces.
        check(devices, "expert", expected=by_ranks)
    check(8, "n", "rows", expected=in_order)
    check(8, "replicated", expected=in_order)
    check(8, "n", "rows", True, expected=by_ranks)
    # Adding slots by ranks is another sum, to about the same number.
    np.testing.assert_allclose(fp32(in_order), fp32(by_ranks), atol=0.02 if dtype == jnp.bfloat16 else 1e-5)


def fp32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def test_the_bundled_model_writes_the_same_tokens():
    """Trained weights: tokens, keys and values of one, two and eight devices, and the tokens without a mesh."""
    path = Path(__file__).resolve().parent.parent / "checkpoints" / "muse_tiny"
    prompt, texts, caches = "Tom has 3 apples and buys 4 more.", [], []
    for mesh in (None, *map(make_mesh, (1, 2, 8))):
        muse = muse_jax.load(path, mesh=mesh, max_length=256)
        state, out = muse.prefill([muse.tokenizer.encode(prompt)], max_new_tokens=24)
        text = out.tokens[0, :1].tolist()
        while not out.done.all():
            state, out = muse.decode(state)
            text += out.tokens[0, : out.count[0]].tolist()
        texts.append(text)
        caches.append([np.asarray(x)[:, :: x.shape[1] // 2] for x in jax.tree.leaves(state.cache.layers)])
    assert texts == texts[:1] * len(texts)
    for cache in caches[2:]:
        for ours, theirs in zip(cache, caches[1], strict=True):
            same_bits(ours, theirs)


# ---- The work is shared ---------------------------------------------------------------------------------------------------


def test_each_device_does_its_part_of_the_work(put_on_mesh, small_config, small_draft_config):
    """Products of a step without the router's, which every device forms, and bytes of weights without vectors."""
    config = dataclasses.replace(small_config, num_key_value_heads=8, moe_hidden_size=64, moe_intermediate_size=64)
    draft_config = dataclasses.replace(small_draft_config, num_attention_heads=8, num_key_value_heads=8)
    case = Case({}, {}, "float32", 1, {})
    flops, weights = {}, {}
    for devices in SIZES:
        model = make_model(case, devices, (config, draft_config), put_on_mesh, "work")
        caches = jax.eval_shape(functools.partial(decoding.empty_caches, batch=1, slots=256), model)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        fields = (one, one, one, jax.ShapeDtypeStruct((1,), bool), jax.ShapeDtypeStruct((1, 1), jnp.int32))
        state = decoding.DecodeState(*caches, *fields, SamplingParams.create(1), num_rows=model.num_rows)
        program = hlo.parse(jax.jit(decoding.decode).lower(model, state).compile().as_text())
        assert not program.unknown_loops()
        router = [dot for dot in program.dots() if config.num_local_experts in dot.result.dims and 16 in dot.result.dims]
        flops[devices] = program.dot_flops() - sum(dot.flops for dot in router)
        matrices = [x for x in jax.tree.leaves((model.params, model.draft_params)) if x.ndim > 1]
        shared = [x for x in matrices if x.shape != (config.num_local_experts, config.hidden_size)]
        weights[devices] = sum(x.addressable_shards[0].data.nbytes for x in shared)
    for devices in SIZES:
        assert flops[devices] == pytest.approx(flops[1] / devices, rel=0.05)
        assert weights[devices] == pytest.approx(weights[1] / devices, rel=0.05)


# ---- As without a mesh ------------------------------------------------------------------------------------------------------


def test_logits_are_those_without_a_mesh(muse, checkpoint, tokens):
    """Sums are formed in other orders: fp32 errors of 1e-7 an operation, which two layers enlarge to 1e-6 of the largest."""
    logits = np.asarray(muse.logits(tokens))
    for devices in (1, 8):
        sharded = muse_jax.load(checkpoint, mesh=make_mesh(devices)).logits(tokens)
        assert sharded.sharding.shard_shape(sharded.shape)[2] == 264 // devices
        np.testing.assert_allclose(sharded, logits, rtol=0, atol=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize(("devices", "speculation"), [(2, "chain"), (8, "tree")])
def test_speculation_on_a_mesh(muse, draft_checkpoint, tokens, devices, speculation, caplog):
    """The tokens of no mesh and no draft, at T = 0 and 1: choices are further apart than errors. One program for all steps."""
    sharded = muse_jax.load(draft_checkpoint, mesh=make_mesh(devices), speculation=speculation)
    prompts = [row[:n].tolist() for row, n in zip(tokens, LENGTHS, strict=True)]
    settings = {"max_new_tokens": 12, "stop_token_ids": [], "temperature": [0.0, 1.0], "seed": 5}

    def finish(muse):
        state, out = muse.prefill(prompts, **settings)
        texts: list[list[int]] = [[] for _ in prompts]
        steps = 0
        while True:
            for text, row, count in zip(texts, out.tokens, out.count, strict=True):
                text.extend(row[:count].tolist())
            if out.done.all():
                return texts
            with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
                caplog.clear()
                state, out = muse.decode(state)
                compiled = [record for record in caplog.records if "XLA compilation" in record.getMessage()]
                assert not compiled or steps == 0
            steps += 1

    assert finish(sharded) == finish(muse)


# ---- Errors -----------------------------------------------------------------------------------------------------------------


def test_a_state_of_another_mesh(muse, checkpoint):
    """With four KV heads: eight devices hold each twice."""
    state, _ = muse_jax.load(checkpoint, mesh=jax.make_mesh((8,), ("tp",))).prefill([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"^this DecodeState was made with another mesh"):
        decoding.decode(muse.model, jax.device_get(state))


def test_mesh_errors():
    for n in (0, 3, 16, -1, 2.0, True):
        with pytest.raises(ValueError, match=rf"^devices = {n}: allowed are 1, 2, 4, 8$"):
            make_mesh(n)


def test_mesh_needs_devices(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    assert make_mesh(2).axis_names == ("tp",)
    with pytest.raises(ValueError, match=r"^devices = 4: this machine has 2 \(cpu\); JAX_NUM_CPU_DEVICES=4 makes "):
        make_mesh(4)


def test_layout_errors(checkpoint, small_config):
    with pytest.raises(ValueError, match=r"^moe_sharding = 'k': allowed are 'n', 'expert', 'replicated'$"):
        muse_jax.load(checkpoint, mesh=make_mesh(2), moe_sharding="k")
    with pytest.raises(ValueError, match=r"^moe_exchange = 'all': allowed are 'sums', 'rows'$"):
        ShardingConfig(2, moe_exchange="all")
    odd = dataclasses.replace(small_config, num_local_experts=12)
    with pytest.raises(ValueError, match=r"^moe_sharding = 'expert': 12 experts cannot be shared by 8 ranks; allowed are "):
        ShardingConfig(8, "expert").check_fits(odd)
    with pytest.raises(ValueError, match=r"^moe_sharding = 'expert' needs a mesh"):
        muse_jax.load(checkpoint, moe_sharding="expert")
    with pytest.raises(ValueError, match=r"^mesh is a int: expected what muse_jax.sharding.make_mesh makes$"):
        muse_jax.load(checkpoint, mesh=4)
    module = MuseSpark(small_config, sharding=ShardingConfig(4))
    with pytest.raises(ValueError, match="sharding is not for the mesh's 8 devices"):
        Model.create(module, mesh=make_mesh(8))
