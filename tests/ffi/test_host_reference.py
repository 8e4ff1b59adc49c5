"""The Host reference of "muse_verify" against muse_jax: phase by phase from its trace, whole steps, ranks, errors."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # of verify_steps

import verify_steps
from verify_phases import chain, check_phases, same_bf16
from verify_steps import BF16, FP32, QUICKLY, SMALL, TINY_SIZES, TWO_LAYERS, Case

from ffi import library
from ffi.verify import VerifyConfig, verify
from muse_jax import nvfp4, ops
from muse_jax.attention import hide
from muse_jax.kv_cache import KV, DecodeContext
from muse_jax.numerics import SERVING
from pallas_kernels.decode_attention import reference as attention_reference

pytestmark = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))

# ---- Phases ---------------------------------------------------------------------------------------------------------------


# Layers of SMALL: 0 sliding, RoPE, NVFP4; 1 global, NoPE, bf16; 2 sliding, NoPE, bf16; 3 global, RoPE, NVFP4.
@pytest.mark.parametrize(
    "case, i",
    [
        (Case(), 0),
        (Case(), 1),
        (Case(forced=True), 2),
        (Case(activations="nvfp4"), 0),
        (Case(activations="nvfp4"), 1),  # bf16 experts stay as they are
        (Case(activations="nvfp4", forced=True), 3),
        (Case(rows=7, length=1), 0),
        (Case(rows=7, length=15), 0),
        (Case(rows=7, length=16), 0),
        (Case(length=15), 1),
        (Case(length=16), 1),
        (Case(rows=1, length=1), 3),
        (Case(rows=1, length=128), 3),  # the cache is full
        (Case(TINY_SIZES, length=75), 0),
        (Case(TINY_SIZES, activations="nvfp4"), 1),
    ],
    ids=str,
)
def test_phases(case, i):
    check_phases(case, i)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def masked_attention(trace: dict, cache: KV, *masks: jax.Array) -> jax.Array:
    """The traced rows' attention to those keys of cache and rows that the masks [T, S] show."""
    q, k, v, gate = (trace[name].astype(BF16) for name in ("q", "k", "v", "gate"))
    rows = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    parts = [(*pair, hide(mask[None])) for pair, mask in zip((cache, rows), masks, strict=True)]
    out = attention_reference.attend(q, parts, 24**-0.5 * SMALL.qk_scale_factor)
    return ops.out_gate(out, gate, SMALL.rms_norm_eps, SERVING)


@pytest.mark.parametrize("length", [38, 39, 40, 41, 95, 96, 97])
def test_attention_at_edges_of_window_and_ring(length):
    """The window is 40, the ring has 56 slots. Wide steps of a chain: its last rows are at a distance of 15 from the first.

    Masks say once more which keys are seen.
    """
    case = Case(length=length, rows=16)
    nodes, cache = chain(case), verify_steps.make_cache(case)
    trace = verify_steps.run(case, cache=cache, nodes=nodes, trace_layer=2).trace
    ring, positions = np.asarray(cache.ring_positions[0]), length + np.arange(16)
    distance, of_rows = positions[:, None] - ring[None, :], positions[:, None] - positions[None, :]
    in_ring = (ring >= 0) & (ring < length) & (distance < 40)
    in_rows = (of_rows >= 0) & (of_rows < 40)

    expected = masked_attention(trace, cache.layers[2], in_ring, in_rows)
    same_bf16(np.asarray(trace["attn_out"]), np.asarray(expected, np.float32), "attn_out")


def test_a_window_smaller_than_a_step():
    """Rows then hide from each other, too."""
    check_phases(Case(dataclasses.replace(SMALL, sliding_window=5), length=30), 0, chain(Case(length=30)))


def test_a_long_context():
    """Longer than what muse_jax reads of a cache at a time: its probabilities are rounded relative to another maximum."""
    case = Case(TINY_SIZES, length=1100, slots=1152, rows=2)
    cache, trace = verify_steps.make_cache(case), verify_steps.run(case, trace_layer=1).trace
    context = verify_steps.make_context(case, cache, verify_steps.make_nodes(case))

    @jax.jit
    def attention(trace: dict, cache: KV, context: DecodeContext) -> jax.Array:
        q, k, v, gate = (trace[name].astype(BF16) for name in ("q", "k", "v", "gate"))
        out, _ = context.attend(q, k, v, cache, None, 24**-0.5 * SMALL.qk_scale_factor, SERVING)
        return ops.out_gate(out, gate, SMALL.rms_norm_eps, SERVING)

    # Of one rounding of each of many probabilities, and of the result.
    assert relative(trace["attn_out"], attention(trace, cache.layers[1], context)) < 2**-9


def test_quantised_rows_are_those_of_muse_jax():
    """Bit for bit: the same step without quantisation has what is quantised first."""
    case = Case(length=20, rows=9)
    plain = np.asarray(verify_steps.run(case, trace_layer=0).trace["moe_in"])
    actual = np.asarray(verify_steps.run(dataclasses.replace(case, activations="nvfp4"), trace_layer=0).trace["moe_in"])
    codes, block_scales, row_scale = nvfp4.quantize_rows(plain.astype(BF16))
    expected = nvfp4.decode(codes, block_scales, np.float32) * row_scale[..., None]
    assert not np.array_equal(plain, actual) and np.array_equal(actual, expected)


def test_router_ties_go_to_the_lowest_expert():
    case = Case(rows=3)
    config, settings = case.config, verify_steps.verify_config(case, trace_layer=0)
    arguments = verify_steps.operands(case, settings)
    # All experts get one score: a router of zeros and a bias of one value.
    buffer = np.array(arguments["layers"][0])
    tables = {entry.name: entry for entry in verify_steps.layout.layer_table(settings.shape, True)}
    for name, value in (("router", 0.0), ("router_bias", 0.25)):
        begin = tables[name].offset
        buffer[:, begin : begin + tables[name].nbytes].view(np.float32)[:] = value
    arguments["layers"] = [jnp.asarray(buffer), *arguments["layers"][1:]]
    trace = verify_steps.jitted_verify(settings, **arguments).trace
    top_k = config.num_experts_per_tok
    assert np.array_equal(trace["idx"][0], np.tile(np.arange(top_k), (3, 1)))
    np.testing.assert_allclose(trace["weights"], config.routed_scaling_factor / top_k, rtol=2**-22)


def test_logits_of_the_last_stream():
    case = Case(rows=5)
    result = verify_steps.run(case, taps=(3,))
    expected = jax.jit(lambda model, stream: model.module.logits(stream))(verify_steps.make_model(case, BF16), result.taps)
    # bf16 rounds the normed stream; a value that it rounds elsewhere is one of 192 terms.
    np.testing.assert_allclose(result.logits, expected, rtol=0, atol=2e-3)
    assert np.mean(np.abs(np.asarray(result.logits) - np.asarray(expected)) > 1e-5) < 0.05


# ---- Whole steps ----------------------------------------------------------------------------------------------------------


def relative(actual: jax.Array, expected: jax.Array) -> float:
    """Root mean square of the difference, by that of the values."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    return float(np.sqrt(np.mean(np.square(actual - expected)) / np.mean(np.square(expected))))


@pytest.mark.parametrize(
    "case",
    [
        Case(forced=True),
        Case(TINY_SIZES, forced=True, activations="nvfp4", rows=7, length=100),
        Case(TWO_LAYERS, forced=True, loopback=8, length=60),
    ],
    ids=["bf16", "nvfp4", "loopback"],
)
def test_a_step_is_as_exact_as_that_of_muse_jax(case):
    """Both round to bf16 at the same places: neither is further from fp32 than twice the other, nor is their difference."""
    taps = (1, 0)
    result = verify_steps.run(case, taps=taps)
    steps = {}
    for dtype in (BF16, FP32):
        model = verify_steps.make_model(case, dtype)
        state = verify_steps.make_state(model, case)
        state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == BF16 else x, state)  # noqa: B023
        nodes, routing = verify_steps.make_nodes(case), verify_steps.make_routing(case)
        steps[dtype] = verify_steps.reference_step(model, state, nodes, routing, taps)
    ours = result.logits[0], result.rows, result.taps
    assert not np.any(result.status)
    for actual, expected, exact in zip(*map(jax.tree.leaves, (ours, steps[BF16], steps[FP32])), strict=True):
        assert actual.shape == expected.shape
        error = relative(expected, exact)
        assert relative(actual, exact) <= 2 * error and relative(actual, expected) <= 2 * error


def test_a_step_of_decoding():
    """`decoding.verify` itself, with the router's own choice: a row whose choice turns is another, the others are not."""
    case = Case(TINY_SIZES, rows=16)
    expected = verify_steps.reference_logits(verify_steps.make_model(case, BF16), case)
    actual = verify_steps.run(case).logits[0]
    errors = [relative(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)]
    assert np.median(errors) < 0.03 and sum(error < 0.06 for error in errors) >= 12, errors


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
@pytest.mark.parametrize("config, all_ranks", [(SMALL, (2, 4, 8)), (TINY_SIZES, (2,))], ids=["small", "tiny"])
def test_any_number_of_ranks_gives_the_same_bits(config, all_ranks, activations):
    case = Case(config, rows=7, activations=activations)

    def step(ranks: int) -> list[np.ndarray]:
        result = verify_steps.run(case, ranks, taps=(0,), trace_layer=1)
        trace = {name: np.asarray(x) for name, x in result.trace.items()}
        for name in ("q", "k", "v", "gate", "attn_out"):
            trace[name] = np.concatenate(trace[name], axis=1)[None]
        assert all(np.array_equal(x, np.broadcast_to(x[:1], x.shape)) for x in trace.values())
        logits = np.concatenate(result.logits, axis=-1)
        return jax.tree.leaves((logits, result.rows, result.taps, {name: x[0] for name, x in trace.items()}))

    one = step(1)
    assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in one)
    for ranks in all_ranks:
        for x, y in zip(one, step(ranks), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("length", [1, 20, 90])
def test_what_no_row_sees_is_not_read(length):
    case = Case(length=length, rows=5)
    # A row that none but itself sees, with NaN for its embedding.
    nodes = chain(case)
    lonely = np.array(nodes.ancestors[0])
    lonely[2] = np.arange(5) == 2
    lonely[:, 2] = np.arange(5) == 2
    nodes = nodes._replace(ancestors=jnp.asarray(lonely)[None])
    config = verify_steps.verify_config(case, taps=(3,))
    library.load()

    def step(unused: float | None, poisoned: bool) -> list[np.ndarray]:
        arguments = verify_steps.operands(case, config, verify_steps.make_cache(case, unused), nodes)
        if poisoned:
            token = int(arguments["tokens"][2])
            others = np.delete(np.asarray(arguments["tokens"]), 2)
            assert token not in others
            arguments["embedding"] = arguments["embedding"].at[0, token].set(jnp.nan)
        result = jax.tree.map(np.asarray, verify_steps.jitted_verify(config, **arguments))
        outputs = result.logits[0], result.taps[0], *(x[0].transpose(1, 0, 2) for pair in result.rows for x in pair)
        return [np.delete(np.asarray(x, np.float32), 2, axis=0) for x in outputs]

    for x, y in zip(step(None, False), step(np.nan, True), strict=True):
        assert np.array_equal(x, y)


# ---- Errors ---------------------------------------------------------------------------------------------------------------

CASE = Case(TINY_SIZES, rows=4, length=20)
CONFIG = verify_steps.verify_config(CASE)


def fails(message: str, config: VerifyConfig = CONFIG, **changed) -> None:
    library.load()
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        jax.block_until_ready(verify(config, **(verify_steps.operands(CASE, config) | changed)))


@pytest.mark.parametrize(
    "name, shape, dtype, message",
    [
        ("tokens", (17,), "int32", "tokens is i32 [17]: expected i32 [T] with T from 1 to 16"),
        ("tokens", (4,), "float32", "tokens is f32 [4]: expected i32 [T]"),
        ("positions", (3,), "int32", "positions is i32 [3]: expected i32 [4]"),
        ("length", (2,), "int32", "length is i32 [2]: expected i32 [1]"),
        ("rank", (), "int32", "rank is i32 []: expected i32 [1]"),
        ("visible", (4, 4), "uint8", "visible is u8 [4, 4]: expected bool [4, 4]"),
        ("rope", (2, 4, 24), "float32", "rope is f32 [2, 4, 24]: expected f32 [2, 4, 12]"),
        ("ring_positions", (1, 8), "int32", "ring_positions is i32 [1, 8]: expected i32 [slots]"),
        ("ring_positions", (8,), "int32", "keys of layer 0 is bf16 [1, 2, 72, 24]: expected bf16 [1, 2, 8, 24]"),
        ("embedding", (1, 256, 184), "bfloat16", "embedding is bf16 [1, 256, 184]: expected bf16 [ranks here, 256, 192]"),
        ("embedding", (2, 256, 192), "bfloat16", "embedding is bf16 [2, 256, 192]: ranks here are 1 or all of 1"),
        ("head", (1, 5), "uint8", "head is u8 [1, 5]: expected u8 [1, 99072]"),
    ],
)
def test_an_operand_that_does_not_fit_is_named(name, shape, dtype, message):
    fails(message, **{name: jnp.zeros(shape, dtype)})


def test_a_layers_operand_that_does_not_fit_is_named():
    arguments = verify_steps.operands(CASE, CONFIG)
    weights, caches = arguments["layers"], arguments["caches"]
    (k0, v0), (k1, v1) = caches
    size = weights[1].shape[1]
    fails(
        f"layer 1 is u8 [1, {size + 128}]: expected u8 [1, {size}]",
        layers=[weights[0], jnp.pad(weights[1], ((0, 0), (0, 128)))],
    )
    fails("values of layer 1 is bf16 [1, 2, 127, 24]: expected bf16 [1, 2, 128, 24]", caches=[(k0, v0), (k1, v1[:, :, 1:])])
    fails("values of layer 0 is f32 [1, 2, 72, 24]: expected bf16", caches=[(k0, v0.astype(FP32)), (k1, v1)])
    weights = jnp.zeros((2, 4, 4), jnp.float32)
    fails(
        "forced_idx is i32 [2, 4, 3]: expected i32 [2, 4, 4], or i32 [0, 0, 0]",
        routing=(jnp.zeros((2, 4, 3), jnp.int32), weights),
    )
    fails("forced_weights is f32 [2, 4, 3]", routing=(jnp.zeros((2, 4, 4), jnp.int32), weights[..., :3]))


def test_numbers_that_do_not_exist_are_named():
    tokens, positions = jnp.int32([3, 1, 256, 2]), jnp.int32([20, 21, 21, 22])
    fails("tokens[2] = 256: allowed are 0 to 255", tokens=tokens, positions=positions)
    fails("length[0] = 129: allowed are 0 to 128, the slots of layer 1", length=jnp.int32([129]))
    fails("length[0] = -1: allowed are 0 to", length=jnp.int32([-1]))
    fails("visible: row 0 does not see itself", visible=jnp.zeros((4, 4), bool))
    routing = jnp.full((2, 4, 4), 16, jnp.int32), jnp.zeros((2, 4, 4), jnp.float32)
    fails("forced_idx[0] = 16: allowed are 0 to 15", routing=routing)


def test_a_rank_that_does_not_exist_is_named():
    fails("rank[0] = 1: allowed are 0 to 0", rank=jnp.int32([1]))
    config = verify_steps.verify_config(CASE, 2)
    arguments = verify_steps.operands(CASE, config)
    caches = [tuple(x[:, :1] for x in pair) for pair in arguments["caches"]]
    one = {"layers": [x[:1] for x in arguments["layers"]], "head": arguments["head"][:1], "caches": caches}
    one |= {"embedding": arguments["embedding"][:1]}
    fails("rank[0] = 2: allowed are 0 to 1", config, **one, rank=jnp.int32([2]))
    fails("embedding has 1 of 2 ranks: all of them are on the emulated device", config, **one, emulated=True)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("hidden", np.int64(8200), "attribute hidden = 8200: allowed are 1 to 8192"),
        ("hidden", np.int32(200), "attribute hidden is missing or of another type: expected i64"),
        ("hidden", np.int64(100), "attribute hidden = 100: allowed are multiples of 8"),
        ("heads", np.int64(12), "attribute heads = 12: allowed are multiples of 8"),
        ("kv_heads", np.int64(0), "attribute kv_heads = 0: allowed are 1 to 2147483647"),
        ("kv_heads", np.int64(3), "attribute heads = 8: allowed are multiples of 3"),
        ("head_dim", np.int64(20), "attribute head_dim = 20: allowed are multiples of 8"),
        ("moe_intermediate", np.int64(120), "moe_hidden = 96, moe_intermediate = 120: multiples of 16 are allowed with NVFP4"),
        ("top_k", np.int64(9), "attribute top_k = 9: allowed are 1 to 8"),
        ("experts", np.int64(3), "attribute top_k = 4: at most experts = 3 is allowed"),
        ("ranks", np.int64(0), "attribute ranks = 0: allowed are 1 to 8"),
        ("ranks", np.int64(3), "attribute ranks = 3: allowed are 1, 2, 4, 8"),
        ("ranks", np.int64(4), "attribute kv_heads = 2: allowed are multiples of 4"),
        ("window", np.int64(0), "attribute window = 0: layer 0 is sliding"),
        ("loopback", np.int64(2), "attribute loopback = 2: allowed are 0 to 1"),
        ("trace_layer", np.int64(2), "attribute trace_layer = 2: allowed are -1 to 1"),
        ("rms_eps", np.float32(0), "attribute rms_eps = 0: a finite number above 0 is allowed"),
        ("softcap", np.float32(np.inf), "attribute softcap = inf: a finite number"),
        ("layer_flags", np.int32([3, 8]), "attribute layer_flags[1] = 8: allowed are 0 to 7"),
        ("layer_flags", np.int32([]), "attribute layer_flags is empty"),
        ("layer_flags", np.int32([3]), "17 operands: expected 14"),
        ("taps", np.int32([0, 2]), "attribute taps[1] = 2: allowed are 0 to 1"),
        ("taps", np.int32([0]), "result taps is f32 [0, 4, 192]: expected f32 [1, 4, 192]"),
        ("trace_layer", np.int64(0), "result trace is f32 [1, 0]: expected f32 [1, "),
    ],
)
def test_an_attribute_that_does_not_fit_is_named(monkeypatch, name, value, message):
    """`VerifyConfig` would not have them; another caller might."""
    attributes = CONFIG._attributes | {name: value}
    monkeypatch.setattr(VerifyConfig, "_attributes", property(lambda _: attributes))
    fails(message)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"top_k": 9}, "top_k = 9: allowed are 1 to 8"),
        ({"layers": ()}, "layers is empty"),
        ({"taps": (1, 1)}, r"taps = (1, 1): each layer once"),
        ({"taps": (2,)}, r"taps = (2,): allowed are numbers from 0 to 1"),
        ({"trace_layer": 5}, "trace_layer = 5: allowed are None and 0 to 1"),
        ({"window": 0}, "window = 0: sliding layers need one above 0"),
        ({"deadline_ms": 0}, "deadline_ms = 0: expected a number above 0"),
        ({"softcap": float("nan")}, "softcap = nan: expected a finite number above 0"),
        ({"moe_intermediate": 120}, "moe_intermediate = 120: NVFP4 experts need a multiple of 16"),
        (
            {"moe_intermediate": 16 * 9, "ranks": 2, "quantized": True},
            "moe_intermediate = 144: quantized needs a multiple of 32",
        ),
    ],
)
def test_a_config_that_is_not_possible_is_refused(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CONFIG, **changed)


def test_arguments_that_do_not_belong_together_are_refused():
    arguments = verify_steps.operands(CASE, CONFIG)
    for changed, message in (
        ({"layers": arguments["layers"][:1]}, "layers has 1 entries: expected 2"),
        ({"caches": arguments["caches"][:1]}, "caches has 1 entries: expected 2"),
        ({"caches": [pair[:1] for pair in arguments["caches"]]}, "caches[0] has 1 entries: expected keys and values"),
        ({"tokens": arguments["tokens"][None]}, "tokens has shape [1, 4]: expected [T]"),
        ({"embedding": arguments["embedding"][0]}, "embedding has shape [256, 192]: expected [Rh, V/R, D]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            verify(CONFIG, **(arguments | changed))
