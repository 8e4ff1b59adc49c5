"""What every phase of a layer should give for its inputs, and the comparison with a trace: for the tests of all platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import verify_steps
from verify_steps import BF16, QUICKLY, Case

from muse_jax import nvfp4, ops
from muse_jax.backends import XLA
from muse_jax.decoding import Model
from muse_jax.kv_cache import KV, DecodeContext
from muse_jax.numerics import SERVING, fp32, round_to
from muse_jax.ops import NVFP4Weight
from muse_jax.tree import Tree
from pallas_kernels.numerics import linear
from pallas_kernels.route import reference as route_reference

ROW_SCALE = nvfp4.E2M1_MAX * nvfp4.E4M3_MAX  # largest magnitude of a quantised row, by its scale


@functools.partial(jax.jit, static_argnames=("i", "quantized"), compiler_options=QUICKLY)
def reference_phases(
    model: Model,
    i: int,
    quantized: bool,
    trace: dict,
    before: jax.Array | None,
    cache: KV,
    context: DecodeContext,
    tokens: jax.Array,
) -> dict:
    """What muse_jax makes of each phase's traced inputs, by the name of the phase's output; of sums also what they are of.

    quantized: whether the layer's experts read NVFP4.  trace: arrays [1, T, ...] as bf16 where they are.  before: the stream
    before layer i, [1, T, D]; None: the first layer's.  cache: of the layer.
    """
    module = model.module
    layer, config = module.layers[i], module.config
    attention, mlp = layer.attention, layer.mlp
    num_rows = tokens.shape[1]
    expected = {}

    before = module.embed(tokens) if before is None else before
    expected["attn_in"] = layer.normed_input(before)
    rows = trace["attn_in"][0]
    weights = [getattr(attention, name)[...] for name in ("q_proj", "k_proj", "v_proj", "attn_out_gate")]
    q, k, v, gate = (x.reshape(1, num_rows, -1, config.head_dim) for x in XLA.linears(rows, weights, BF16))
    inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
    rope = ops.rope_tables(context.positions, inv_freq, SERVING, BF16) if attention.uses_rope else None
    q, k = ops.qk_norm_rope(q, k, rope, config, SERVING)
    expected |= {"q": q, "k": k, "v": v, "gate": gate}

    scale = config.head_dim**-0.5 * config.qk_scale_factor
    out, _ = context.attend(trace["q"], trace["k"], trace["v"], cache, attention.window, scale, SERVING)
    expected["attn_out"] = ops.out_gate(out, trace["gate"], config.rms_norm_eps, SERVING)
    o_proj, attn_out = attention.o_proj[...], trace["attn_out"].reshape(1, num_rows, -1)
    parts = zip(jnp.split(attn_out, 8, -1), jnp.split(o_proj, 8, 1), strict=True)
    expected["o_sum"] = functools.reduce(jnp.add, [linear(x, w) for x, w in parts])
    o_sum_of = linear(jnp.abs(attn_out), jnp.abs(o_proj))

    gate = layer.post_attention_gate[...]
    expected["stream_mid"], _ = layer._blend(before, trace["o_sum"], gate, None, layer.pre_ffn_norm[...])
    expected["ffn_in"] = ops.centred_norm(trace["stream_mid"], layer.pre_ffn_norm[...], config.rms_norm_eps, SERVING, BF16)

    router = mlp.router[...]
    expected["router_logits"] = linear(fp32(trace["ffn_in"]), router)
    logits_of = linear(jnp.abs(fp32(trace["ffn_in"])), jnp.abs(router))
    scalars = config.num_experts_per_tok, config.output_multiplier, config.routed_scaling_factor
    expected["idx"], expected["weights"] = (
        x[None] for x in route_reference.route(trace["router_logits"][0], mlp.router_bias[...], *scalars)
    )

    expected["pooled"] = round_to(linear(trace["ffn_in"], mlp.pre_expert_proj[...]), BF16)
    moe_in = ops.centred_norm(trace["pooled"], mlp.pre_expert_norm[...], config.rms_norm_eps, SERVING, BF16)

    def rounded(x: jax.Array) -> jax.Array:
        if not quantized:
            return x
        rows = ops.quantize_rows(x)
        return fp32(rows.decode()) * rows.row_scale[..., None]

    expected["moe_in"] = rounded(moe_in)
    idx = trace["idx"][0]
    moe_in, moe_in_scale = decoded(trace["moe_in"][0], quantized)  # [T, M], [T]
    hidden = of_experts(moe_in, moe_in_scale[:, None], mlp.gate_up[...])  # [E, T, 2, F]
    hidden = hidden[idx, jnp.arange(num_rows)[:, None]]
    expected["hidden"] = rounded(ops.swiglu(hidden[:, :, 0], hidden[:, :, 1], SERVING, BF16)[None])
    hidden, hidden_scale = decoded(trace["hidden"][0], quantized)  # [T, top_k, F], [T, top_k]
    down = of_experts(hidden, hidden_scale, mlp.down[...])  # [E, T, top_k, M]
    chosen = jnp.take_along_axis(down, idx[None, :, :, None], axis=0)[0]
    expected["down"] = round_to(chosen, BF16)[None]
    normed = ops.input_scaled_norm(trace["down"], mlp.post_expert_norm[...], config.post_norm_eps, SERVING, BF16)
    expected["mixed"] = ops.combine(normed[0], trace["weights"][0], BF16)[None]
    expected["branch"] = round_to(linear(trace["mixed"], mlp.post_expert_proj[...]), BF16)
    gate = layer.post_ffn_gate[...]
    expected["stream"], _ = layer._blend(trace["stream_mid"], trace["branch"], gate, layer.post_ffn_norm[...], None)
    return expected | {"o_sum of": o_sum_of, "router_logits of": logits_of}


def decoded(rows: jax.Array, quantized: bool) -> tuple[jax.Array, jax.Array]:
    """bf16 rows and their scales of traced rows [..., n]. A quantised row holds a largest value, 6 * 448 times its scale."""
    if not quantized:
        return rows, jnp.ones(rows.shape[:-1], jnp.float32)
    scale = jnp.max(jnp.abs(rows), axis=-1) / ROW_SCALE
    return round_to(rows / scale[..., None], BF16), scale


def of_experts(x: jax.Array, row_scale: jax.Array, weight: jax.Array | NVFP4Weight) -> jax.Array:
    """Every expert on every row, fp32. x: [T, K] or [T, top_k, K].  row_scale: [T, 1] or [T, top_k].
    weight: [E, ..., N, K].
    Returns [E, T, ..., N]."""

    def one(expert: jax.Array) -> jax.Array:
        matrices = ops.of_expert(weight, expert)
        plain = not isinstance(matrices, NVFP4Weight)
        decoded = matrices if plain else matrices.decode(BF16)
        sums = linear(x, decoded.reshape(-1, decoded.shape[-1])).reshape(*x.shape[:-1], *decoded.shape[:-1])
        if plain:
            return sums
        scale = matrices.global_scale[..., None]  # [2, 1] or [1]
        return sums * (scale.reshape((1,) * (sums.ndim - scale.ndim) + scale.shape) * row_scale[..., None])

    return jax.lax.map(one, jnp.arange(weight.shape[0], dtype=jnp.int32))


QUANTIZED = ("moe_in", "hidden")
SUMS = ("o_sum", "router_logits")
BF16_PHASES = ("attn_in", "q", "k", "v", "gate", "attn_out", "ffn_in", "pooled", "down", "mixed", "branch")


def check_phases(case: Case, i: int, nodes: Tree | None = None, target: str = "host") -> dict[str, np.ndarray]:
    """Runs a step that traces layer i and compares each phase of it. Returns the trace.

    target: of `verify_steps.run`. The kernel rounds probabilities relative to other maxima than the reference does.
    """
    nodes = verify_steps.make_nodes(case) if nodes is None else nodes
    cache, model = verify_steps.make_cache(case), verify_steps.make_model(Case(case.config), BF16)
    taps = (max(i - 1, 0),)
    result = verify_steps.run(case, nodes=nodes, target=target, trace_layer=i, taps=taps)
    assert not np.any(result.status)
    quantized = case.activations == "nvfp4" and i in case.config.nvfp4_layers
    kept = (*SUMS, "stream_mid", "stream", "weights", "idx") + (QUANTIZED if quantized else ())
    traced = {name: np.asarray(x) for name, x in result.trace.items()}
    trace = {name: x if name in kept else x.astype(BF16) for name, x in traced.items()}
    for name, x in trace.items():  # traced as fp32, they are bf16
        assert np.array_equal(x.astype(np.float32), traced[name]), name
    before = result.taps if i else None
    context = verify_steps.make_context(case, cache, nodes)
    expected = reference_phases(model, i, quantized, trace, before, cache.layers[i], context, nodes.token)
    actual = {name: np.asarray(x, np.float32) for name, x in trace.items()}
    expected = {name: np.asarray(x, np.float32) for name, x in expected.items()}
    for name in BF16_PHASES + (() if quantized else QUANTIZED):
        if target != "host" and name == "attn_out":
            same_attention(actual[name], expected[name])
        else:
            same_bf16(actual[name], expected[name], name)
    if quantized:
        for name in QUANTIZED:
            same_codes(actual[name], expected[name], name)
    for name in SUMS:
        # Two orders of sums with eight and more partial sums differ by a few roundings of what the sum is of.
        assert np.max(np.abs(actual[name] - expected[name]) / expected[f"{name} of"]) < 2**-21, name
    for name in ("stream_mid", "stream"):  # a norm's sum, its root, four products and a sum
        np.testing.assert_allclose(actual[name], expected[name], rtol=2**-20, atol=2**-20, err_msg=name)
    keys, values = (np.asarray(x, np.float32).transpose(0, 2, 1, 3) for x in result.rows[i])
    assert np.array_equal(keys, actual["k"]) and np.array_equal(values, actual["v"])
    if case.forced:
        idx, weights = verify_steps.make_routing(case)[i]
        assert np.array_equal(actual["idx"][0], idx) and np.array_equal(actual["weights"][0], weights)
    else:
        assert np.array_equal(actual["idx"], expected["idx"])
        np.testing.assert_allclose(actual["weights"], expected["weights"], rtol=2**-20)
    return actual


def same_bf16(actual: np.ndarray, expected: np.ndarray, name: str, fraction: float = 0.004) -> None:
    """fp32 sums in another order round to a neighbour in bf16 now and then: for a value in the middle of its binade an error of
    2^-20 of it does so once in 2^11 times; where terms cancel more often."""
    different = actual != expected
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 1e-30))) - 7)
    largest = np.max(np.abs(expected))
    assert np.all(np.abs(actual - expected) <= step + 2**-20 * largest), (name, np.max(np.abs(actual - expected) / step))
    assert np.mean(different) <= fraction + 4 / actual.size, (name, np.mean(different))


def same_attention(actual: np.ndarray, expected: np.ndarray) -> None:
    """Averages of values by probabilities, each of which is rounded to bf16 on either side: an error of up to 2^-8 of each,
    in different directions, and then one rounding of the result."""
    scale = np.sqrt(np.mean(expected**2))
    difference = np.abs(actual - expected)
    rms, largest = np.sqrt(np.mean(difference**2)) / scale, np.max(difference - 2**-7 * np.abs(expected)) / scale
    assert rms < 2**-9 and largest < 2**-6, (rms, largest)


def same_codes(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Quantised rows are the same where what was quantised is. One value that bf16 rounds elsewhere may get another code, a
    sixth and more away, the largest of a block moves the block, the largest of a row all of it, by 2^-8."""
    same = np.abs(actual - expected) <= 2**-7 * np.abs(expected)
    assert np.mean(same) > 0.99, (name, np.mean(same))
    exact = np.isclose(actual, expected, rtol=2**-22, atol=0)
    assert np.mean(exact) > 0.95, (name, np.mean(exact))


def chain(case: Case) -> Tree:
    rows = np.arange(case.rows, dtype=np.int32)
    nodes = verify_steps.make_nodes(case)
    return nodes._replace(depth=jnp.asarray(rows[None]), ancestors=jnp.asarray((rows[None, :] <= rows[:, None])[None]))
