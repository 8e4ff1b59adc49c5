"""Models with NVFP4 experts: the arithmetic of muse_spark.md 4.4 in numpy, whole models, decoding, memory, a mesh."""

import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import muse_jax
from muse_jax import decoding, nvfp4, ops
from muse_jax.config import MUSE_SPARK_OPEN, TINY, AttentionKind, MLPKind, ModelConfig
from muse_jax.decoding import Model
from muse_jax.draft import DFlash2
from muse_jax.layout import parameter_tree, text_tensors
from muse_jax.model import MuseSpark
from muse_jax.numerics import HF, NUMERICS, SERVING, Numerics
from muse_jax.nvfp4 import NVFP4Weight
from muse_jax.sampling import SamplingParams
from muse_jax.sharding import ShardingConfig, make_mesh

E2M1, E4M3, BF16 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def random_packed(rng, *stack: int, n: int, k: int) -> NVFP4Weight:
    """Every code, scales from 2 to 15, and global scales that differ by up to 8 between matrices; outputs near 1."""
    codes = rng.integers(0, 256, (*stack, n, k // 2), np.uint8)
    block_scales = rng.integers(0x40, 0x58, (*stack, n, k // 16), np.uint8).view(E4M3)
    global_scale = (2 ** rng.uniform(-1.5, 1.5, stack) / (20 * np.sqrt(k))).astype(np.float32)
    return NVFP4Weight(codes, block_scales, global_scale, rng.uniform(1, 2, stack).astype(np.float32))


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def jit(function, **static):
    """Compiled in a hurry, since it runs once."""
    return jax.jit(functools.partial(function, **static), compiler_options={"xla_backend_optimization_level": 0})


# ---- The experts against muse_spark.md 4.2 and 4.4, written once more ----


def exact_matrix(packed, at):
    """e2m1 e4m3 of one matrix, float64, from the bytes."""
    codes, scales = packed.codes[at], packed.block_scales[at].astype(np.float64)
    values = np.empty((codes.shape[0], 2 * codes.shape[1]))
    values[:, 0::2] = (codes % 16).view(E2M1)
    values[:, 1::2] = (codes // 16).view(E2M1)
    return values * np.repeat(scales, 16, axis=1)


def quantised_row(row):
    """What a row of bf16 is to a W4A4 GEMM: e2m1 sf, and the row's scale (muse_spark.md 4.3, per-token)."""
    f32 = np.float32
    x = row.astype(BF16).astype(f32)
    scale = np.abs(x).max() * f32(1 / 2688)
    if scale == 0:
        return np.zeros(len(x)), 0.0
    g = f32(1) / scale
    blocks = x.reshape(-1, 16)
    sf = np.minimum(f32(448), g * (np.abs(blocks).max(1) * f32(1 / 6))).astype(E4M3).astype(f32)
    o = np.divide(f32(1), sf * (f32(1) / g), where=sf > 0, out=np.zeros_like(sf))
    codes = (blocks * o[:, None]).astype(E2M1).astype(np.float64)
    return (codes * sf[:, None]).reshape(-1), float(scale)


def reference(x, idx, gate_up, down, numerics: Numerics, dtype, activations):
    """[R, top_k, M] in float64, with the roundings of muse_spark.md 3.5 and 3.7 in `dtype`."""

    def r(value):
        return np.asarray(value, np.float32).astype(dtype).astype(np.float64)

    def gemm(row, packed, at):
        values, scale = quantised_row(row) if activations == "nvfp4" else (np.asarray(row, np.float64), 1.0)
        return exact_matrix(packed, at) @ values * scale * float(packed.global_scale[at])

    out = np.zeros((*idx.shape, x.shape[1]))
    for row, experts in enumerate(idx):
        for slot, e in enumerate(experts):
            gate, up = (gemm(x[row], gate_up, (e, half)) for half in (0, 1))
            if numerics.swiglu_steps_rounded:
                gate, up = r(gate), r(up)
                hidden = r(r(gate / (1 + np.exp(-gate))) * up)
            else:
                hidden = r(gate / (1 + np.exp(-gate)) * up)
            out[row, slot] = r(gemm(hidden.astype(np.float32).astype(dtype), down, e))
    return out


M, F = 48, 32
# rows, top_k, experts: one row; few rows and every expert (a form of its own); few and many rows, experts without rows; many
# rows in the differentiable form.
CASES = [(1, 3, 5, "blocks"), (16, 2, 8, "blocks"), (5, 2, 32, "blocks"), (70, 2, 6, "blocks"), (70, 2, 6, "dense")]


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("rows", "top_k", "num_experts", "form"), CASES)
def test_experts_are_the_specification(rng, rows, top_k, num_experts, form, activations, dtype):
    numerics = HF if rows == 16 else SERVING
    gate_up = random_packed(rng, num_experts, 2, n=F, k=M)
    down = random_packed(rng, num_experts, n=M, k=F)
    x = rng.standard_normal((rows, M)).astype(dtype)
    x[0, :16] = 0
    # The last expert has no row, but where all have one.
    idx = np.stack([rng.permutation(max(num_experts - (rows != 16), top_k))[:top_k] for _ in range(rows)]).astype(np.int32)
    expected = reference(x, idx, gate_up, down, numerics, dtype, activations)

    run = ops.experts_dense if form == "dense" else ops.experts
    ours = jit(run, numerics=numerics, activations=activations)(*on_device((x, idx, gate_up, down)))
    assert ours.dtype == dtype
    error = np.abs(np.asarray(ours).astype(np.float64) - expected) / np.abs(expected).max(-1, keepdims=True)
    if activations == "bf16" and dtype == np.float32:
        assert error.max() < 3e-6  # fp32 sums of 48 and 32 terms
        return
    # A value next to a tie may round the other way. Rows without such a value, nearly all, agree as fp32 does, or to their own
    # rounding. In the others one of 32 terms is off, by a bf16 ulp or by a step of e2m1: a third of its block's largest.
    ulp = 2.0**-7 if dtype == BF16 else 1e-5
    assert np.mean(error.max(-1) < ulp) > 0.9
    assert error.max() < (0.25 if activations == "nvfp4" else 2.0**-5)


def test_gate_and_up_have_scales_of_their_own(rng):
    """Scaling up's global scale scales the outputs; scaling gate's does something else; a swap of the halves is seen."""
    gate_up, down = random_packed(rng, 3, 2, n=F, k=M), random_packed(rng, 3, n=M, k=F)
    x = jnp.asarray(rng.standard_normal((4, M)), jnp.float32)
    idx = jnp.asarray([[0, 1], [1, 2], [2, 0], [0, 2]], jnp.int32)
    run = jit(ops.experts, numerics=SERVING)

    def scaled(by):
        return np.asarray(run(x, idx, *on_device((dataclasses.replace(gate_up, global_scale=gate_up.global_scale * by), down))))

    plain = scaled(np.float32([[1, 1]]))
    np.testing.assert_allclose(scaled(np.float32([[1, 4]])), 4 * plain, rtol=1e-6)  # a power of two moves no rounding
    difference = np.abs(scaled(np.float32([[4, 1]])) - 4 * plain).max() / np.abs(plain).max()
    assert difference > 0.5
    swapped = jax.tree.map(lambda leaf: leaf[:, ::-1], gate_up)
    assert np.abs(np.asarray(run(x, idx, *on_device((swapped, down)))) - plain).max() > 0.1 * np.abs(plain).max()


def test_input_scales_change_nothing(rng):
    """Per-token scales take their place (muse_spark.md 4.3)."""
    gate_up, down = random_packed(rng, 3, 2, n=F, k=M), random_packed(rng, 3, n=M, k=F)
    x, idx = jnp.asarray(rng.standard_normal((4, M)), jnp.float32), jnp.asarray([[0, 1]] * 4, jnp.int32)
    run = jit(ops.experts, numerics=SERVING, activations="nvfp4")
    plain = run(x, idx, *on_device((gate_up, down)))
    other = dataclasses.replace(gate_up, input_scale=7 * gate_up.input_scale)
    np.testing.assert_array_equal(run(x, idx, *on_device((other, down))), plain)


def test_w4a4_of_an_fp32_model_quantises_what_a_bf16_model_does(rng):
    """Rows are rounded to bf16 first: bits below are not seen by GEMM1, and differ in GEMM2 only through SwiGLU's rounding."""
    weight = on_device(random_packed(rng, 2, n=F, k=M))
    x = rng.standard_normal((64, M)).astype(np.float32)
    rounded = x.astype(BF16)
    run = jit(ops.expert_linear, activations="nvfp4")
    full = run(jnp.asarray(x), weight)
    np.testing.assert_array_equal(full, run(jnp.asarray(rounded.astype(np.float32)), weight))
    # Operands of the two are the same numbers; products of them are exact in fp32, sums of 48 are not.
    half = run(jnp.asarray(rounded), weight)
    np.testing.assert_allclose(half, full, rtol=0, atol=3e-6 * float(jnp.abs(full).max()))
    plain = jit(ops.expert_linear, activations="bf16")(jnp.asarray(x), weight)
    error = float(jnp.sqrt(jnp.mean((full - plain) ** 2) / jnp.mean(plain**2)))
    assert 0.05 < error < 0.15  # 9.5 % for normal rows (muse_spark.md 4.3)


# ---- Whole models ----


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def pack_experts(config: ModelConfig, params: dict, *, powers_of_two: bool = False) -> tuple[ModelConfig, dict, dict]:
    """NVFP4 experts in every mixture but the last (if there are others): config, parameters, and these in fp32, decoded.

    Global scales may be made powers of two: decoded weights are then exact in bf16, global scale and all.
    """
    sparse = tuple(i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.SPARSE)
    packed_config = dataclasses.replace(config, nvfp4_layers=sparse[:-1] or sparse)
    packed, decoded = (parameter_tree(config, lambda spec: at(params, spec.path)) for _ in range(2))
    for i in packed_config.nvfp4_layers:
        for name in ("gate_up", "down"):
            # Gate and up halves of different sizes get different global scales.
            sizes = np.float32([1, 3]).reshape(1, 2, 1, 1) if name == "gate_up" else np.float32(1)
            weight = nvfp4.quantize(params["layers"][i]["mlp"][name] * sizes, name)
            if powers_of_two:
                weight = dataclasses.replace(weight, global_scale=2 ** np.round(np.log2(weight.global_scale)))
            packed["layers"][i]["mlp"][name] = vars(weight)
            decoded["layers"][i]["mlp"][name] = weight.dequantize()
    return packed_config, packed, decoded


@pytest.fixture
def tiny_params(rng):
    """Of TINY, random; layers 0 to 4 have experts, layer 5 is dense."""

    def draw(spec):
        array = rng.standard_normal(spec.param_shape, np.float32)
        array *= 0.3 if array.ndim == 1 else 1 / np.sqrt(array.shape[-1])
        return array + (spec.path == ("final_norm",))

    return parameter_tree(TINY, draw)


def full_logits(config, params, tokens, dtype=jnp.float32, **settings):
    def cast(spec):
        return jnp.asarray(at(params, spec.path)).astype(spec.dtype_in(dtype))

    model = Model.create(MuseSpark(config, dtype=jnp.dtype(dtype), **settings), parameter_tree(config, cast))
    return np.asarray(jit(decoding.full_logits)(model, jnp.asarray(tokens, jnp.int32)))


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
def test_logits_are_those_of_the_decoded_weights(rng, tiny_params, numerics, dense):
    """fp32 sums, one scaled before and one after, through six layers: 1e-4 of the largest logit (muse_spark.md 8.1)."""
    config, packed, decoded = pack_experts(TINY, tiny_params)
    assert config.nvfp4_layers == (0, 1, 2, 3)
    tokens = rng.integers(0, config.vocab_size, (2, 24))
    settings = {"numerics": numerics, "dense_experts": dense}
    expected = full_logits(TINY, decoded, tokens, **settings)
    ours = full_logits(config, packed, tokens, **settings)
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
def test_bf16_logits_are_those_of_the_decoded_weights(rng, tiny_params, numerics):
    """With global scales that are powers of two nothing depends on when they multiply: the same bits."""
    config, packed, decoded = pack_experts(TINY, tiny_params, powers_of_two=True)
    tokens = rng.integers(0, config.vocab_size, (2, 24))
    expected = full_logits(TINY, decoded, tokens, jnp.bfloat16, numerics=numerics)
    np.testing.assert_array_equal(full_logits(config, packed, tokens, jnp.bfloat16, numerics=numerics), expected)


def test_w4a4_changes_packed_layers_only(rng, tiny_params):
    config, packed, decoded = pack_experts(TINY, tiny_params)
    tokens = rng.integers(0, config.vocab_size, (2, 24))
    plain, quantised = (full_logits(config, packed, tokens, activations=a) for a in ("bf16", "nvfp4"))
    assert np.isfinite(quantised).all()
    assert np.abs(quantised - plain).max() > 1e-3
    np.testing.assert_array_equal(*(full_logits(TINY, decoded, tokens, activations=a) for a in ("bf16", "nvfp4")))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_and_abstract_parameters(dtype):
    config = dataclasses.replace(
        TINY,
        num_hidden_layers=2,
        layer_types=TINY.layer_types[:2],
        layer_uses_rope=(True, True),
        mlp_layer_types=(MLPKind.SPARSE,) * 2,
        nvfp4_layers=(1,),
    )
    fresh = nnx.to_pure_dict(nnx.state(MuseSpark(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))))
    abstract = nnx.to_pure_dict(nnx.state(MuseSpark(config, dtype=jnp.dtype(dtype))))
    for spec in text_tensors(config):
        for tree in (fresh, abstract):
            leaf = at(tree, spec.path)
            assert (leaf.shape, leaf.dtype) == (spec.param_shape, spec.dtype_in(dtype))
    mlp = fresh["layers"][1]["mlp"]
    for name in ("gate_up", "down"):
        weight = NVFP4Weight(**mlp[name])
        values = np.asarray(weight.dequantize())
        assert values.std() == pytest.approx(0.02, rel=0.03)
        assert len(np.unique(weight.global_scale)) > 1
        assert (weight.input_scale == 1).all()
    assert set(fresh["layers"][0]["mlp"]) == set(mlp)  # the same names, arrays in one and packed in the other


# ---- Decoding ----


def make_muse(config, params, draft_config=None, draft_params=None, mesh=None, put_on_mesh=None, **settings) -> muse_jax.Muse:
    how = ShardingConfig(None if mesh is None else mesh.size)
    draft = None if draft_config is None else DFlash2(draft_config, dtype=jnp.dtype(jnp.float32), sharding=how)
    module = MuseSpark(config, dtype=jnp.dtype(jnp.float32), sharding=how, **settings)

    def put(config, params):
        return on_device(params) if mesh is None else put_on_mesh(config, params, mesh, how)

    drafted = None if draft is None else put(draft_config, draft_params)
    model = Model.create(module, put(config, params), draft=draft, draft_params=drafted, valid_vocab=259, mesh=mesh)
    return muse_jax.Muse(model, config, draft_config, None, mesh, "xla", 512, 64)


def greedy(muse, prompts, new_tokens):
    state, out = muse.prefill(prompts, max_new_tokens=new_tokens, stop_token_ids=[263])
    texts = [[] for _ in prompts]
    while True:
        for text, row, count in zip(texts, out.tokens, out.count, strict=True):
            text.extend(row[:count].tolist())
        if out.done.all():
            return texts
        state, out = muse.decode(state)


def best_tokens(muse, prompts, texts):
    """Of the logits without a cache: the largest at each position of what was written."""
    logits = np.asarray(muse.logits([prompt + text for prompt, text in zip(prompts, texts, strict=True)]))[:, :, :259]
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(text)].argmax(-1).tolist()
        for row, prompt, text in zip(logits, prompts, texts, strict=True)
    ]


@pytest.fixture(scope="module")
def packed_small(small_config, small_params):
    config, params, _ = pack_experts(small_config, small_params)
    assert config.nvfp4_layers == (0,)
    return config, params


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_decoding_plain_and_speculative(rng, packed_small, small_draft_config, small_draft_params, activations):
    """The tokens of the whole sequence's logits. A row's quantised activations depend on nothing but that row."""
    prompts = [rng.integers(0, 259, n).tolist() for n in (7, 20)]
    plain = make_muse(*packed_small, activations=activations)
    texts = greedy(plain, prompts, 12)
    assert [len(text) for text in texts] == [12, 12]
    assert texts == best_tokens(plain, prompts, texts)
    drafted = make_muse(*packed_small, small_draft_config, small_draft_params, activations=activations)
    assert drafted.model.num_rows == 16
    assert greedy(drafted, prompts, 12) == texts


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_a_mesh_of_eight(rng, packed_small, small_draft_config, small_draft_params, put_on_mesh, activations):
    """Codes and block scales are split by rows, global scales are everywhere; tokens are those of one device."""
    config, params = packed_small
    prompts = [rng.integers(0, 259, n).tolist() for n in (7, 10)]
    mesh = make_mesh(8)
    drafted = (config, params, small_draft_config, small_draft_params)
    sharded = make_muse(*drafted, mesh=mesh, put_on_mesh=put_on_mesh, activations=activations)
    gate_up = sharded.model.params["layers"][0]["mlp"]["gate_up"]
    assert gate_up["codes"].sharding.shard_shape(gate_up["codes"].shape) == (8, 2, 4, 16)
    assert gate_up["block_scales"].sharding.shard_shape(gate_up["block_scales"].shape) == (8, 2, 4, 2)
    assert gate_up["global_scale"].sharding.is_fully_replicated
    texts = greedy(sharded, prompts, 8)
    assert texts == greedy(make_muse(config, params, activations=activations), prompts, 8)


# ---- Memory ----


def test_released_experts_take_the_bytes_of_the_specification():
    """muse_spark.md 5.1: 28,311,552 bytes and six fp32 scalars an expert, 4.5 bits a weight."""
    config = dataclasses.replace(MUSE_SPARK_OPEN, nvfp4_layers=tuple(range(1, 61)))
    layers = nnx.to_pure_dict(nnx.state(MuseSpark(config)))["layers"]

    def nbytes(layer):
        experts = [layers[layer]["mlp"][name] for name in ("gate_up", "down")]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experts))

    assert nbytes(1) == nbytes(60) == 256 * (28_311_552 + 24)
    assert nbytes(0) == nbytes(61) == 256 * 100_663_296
    weights = 256 * 3 * 4096 * 4096
    assert nbytes(1) / weights == pytest.approx(0.5625, rel=1e-6)


# One layer of 96 experts, which are 4.7 MB each of gate, up and down in fp32; nothing else is near that.
MANY_EXPERTS = dataclasses.replace(
    TINY,
    num_hidden_layers=1,
    layer_types=(AttentionKind.GLOBAL,),
    layer_uses_rope=(False,),
    mlp_layer_types=(MLPKind.SPARSE,),
    moe_hidden_size=128,
    moe_intermediate_size=128,
    num_local_experts=96,
    nvfp4_layers=(0,),
)


def abstract_step(activations, batch, dtype, **settings):
    """A model of MANY_EXPERTS and a state for its decode step, as shapes."""
    model = Model.create(MuseSpark(MANY_EXPERTS, dtype=jnp.dtype(dtype), activations=activations, **settings))
    last = jnp.zeros((batch, MANY_EXPERTS.hidden_size), jnp.float32)
    rows = jnp.ones(batch, jnp.int32)

    def start(model):
        caches = decoding.empty_caches(model, batch, 64)
        sampling = SamplingParams.create(batch)
        return decoding.first_token(model, caches, last, rows, 4 * rows, jnp.zeros((batch, 1), jnp.int32), sampling)[0]

    return model, jax.eval_shape(start, model)


@pytest.mark.parametrize(("batch", "form"), [(1, "blocks"), (16, "blocks"), (16, "dense")])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_no_step_holds_all_experts_decoded(batch, form, activations):
    one_expert = 3 * 128 * 128 * 4
    model, state = abstract_step(activations, batch, jnp.float32, dense_experts=form == "dense")
    packed = [x for name in ("gate_up", "down") for x in jax.tree.leaves(model.params["layers"][0]["mlp"][name])]
    assert sum(x.size * x.dtype.itemsize for x in packed) < 0.57 * 96 * one_expert / 4
    compiled = jit(decoding.decode).lower(model, state).compile()
    # An expert decoded, its codes unpacked, and the rows of the step.
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * one_expert + (1 << 20) < 96 * one_expert / 4
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
    assert max(sizes) < 96 * 128 * 128


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_decode_lowers_for_a_gpu(activations):
    step = jax.jit(decoding.decode).trace(*abstract_step(activations, 1, jnp.bfloat16))
    assert "f8E4M3FN" in step.lower(lowering_platforms=("cuda",)).as_text()


# ---- load ----


@pytest.fixture(scope="module")
def packed_checkpoint(checkpoint, packed_small, tmp_path_factory):
    """The small model's directory with the packed tensors in place of its own."""
    config, params = packed_small
    directory = tmp_path_factory.mktemp("packed") / "checkpoint"
    shutil.copytree(checkpoint, directory)
    tensors = {spec.name: np.asarray(at(params, spec.path)).reshape(spec.shape) for spec in text_tensors(config)}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_load(rng, packed_checkpoint, packed_small, activations):
    tokens = rng.integers(0, 259, (2, 16))
    loaded = muse_jax.load(packed_checkpoint, activations=activations)
    assert loaded.model.module.activations == activations
    experts = loaded.model.params["layers"][0]["mlp"]["down"]
    assert {name: x.dtype for name, x in experts.items()} == {
        "codes": jnp.uint8, "block_scales": jnp.float8_e4m3fn, "global_scale": jnp.float32, "input_scale": jnp.float32
    }  # fmt: skip
    expected = make_muse(*packed_small, activations=activations).logits(tokens)
    np.testing.assert_array_equal(loaded.logits(tokens), expected)


def test_load_refuses_other_activations(checkpoint):
    with pytest.raises(ValueError, match=r"^activations = 'fp8': allowed are 'bf16', 'nvfp4'$"):
        muse_jax.load(checkpoint, activations="fp8")
    message = r"^activations = 'nvfp4': this checkpoint has no NVFP4 experts, so only 'bf16' is allowed$"
    with pytest.raises(ValueError, match=message):
        muse_jax.load(checkpoint, activations="nvfp4")
