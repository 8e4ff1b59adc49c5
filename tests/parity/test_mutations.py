"""The gates of the bfloat16 module tests notice every mistake that is easy to make (muse_spark.md sections 7 and 8.1).

Each mutation moves one rounding or changes the structure in one place; the output it touches must then fail its gate. The
share of equal bits is printed.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

from bf16_checks import Subject, attention, dense_mlp, embedding, head, layer, moe, router, verdicts

from muse_jax import ops
from muse_jax.numerics import HF, Numerics, fp32, round_to
from pallas_kernels.route.reference import RENORM_EPS

pytestmark = pytest.mark.parity

SLIDING, DENSE, FULL = 0, 2, 3


@dataclasses.dataclass(frozen=True)
class Mutation:
    """What is changed: rounding points that are dropped, config values, functions of `ops`, or the model itself."""

    check: Callable
    args: tuple
    output: str
    drop: tuple[str, ...] = ()
    config: dict | None = None
    ops: dict | None = None
    model: Callable | None = None


def bf16(x: jax.Array) -> jax.Array:
    return fp32(round_to(x, jnp.bfloat16))


def norm_rounded_before_scale(x, weight, eps, numerics, dtype):
    return round_to(bf16(ops.rms(x, eps)) * ops._row(ops.one_plus(weight, numerics), x), dtype)


def norm_before_scale(x, weight, eps, numerics, dtype):
    return ops.rms(x, eps) * ops._row(ops.one_plus(weight, numerics), x)


def gate_vectors(gate, temperature):
    beta = jax.nn.sigmoid(gate / temperature)
    return jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-gate / temperature) * (1.0 + beta), 1e-3)), beta


def gate_in_bf16(stream, branch, gate, temperature):
    return residual_gate(stream, branch, bf16(gate), temperature)


def gate_vectors_in_bf16(stream, branch, gate, temperature):
    alpha, beta = (ops._row(bf16(x), stream) for x in gate_vectors(gate, temperature))
    return alpha * fp32(stream) + beta * fp32(branch)


def gate_products_rounded(stream, branch, gate, temperature):
    alpha, beta = (ops._row(x, stream) for x in gate_vectors(gate, temperature))
    return bf16(alpha * fp32(stream)) + bf16(beta * fp32(branch))


def gate_without_floor(stream, branch, gate, temperature):
    beta = jax.nn.sigmoid(gate / temperature)
    alpha = jnp.sqrt(jax.nn.sigmoid(-gate / temperature) * (1.0 + beta))
    return ops._row(alpha, stream) * fp32(stream) + ops._row(beta, stream) * fp32(branch)


def gate_as_interpolation(stream, branch, gate, temperature):
    beta = ops._row(jax.nn.sigmoid(gate / temperature), stream)
    return (1.0 - beta) * fp32(stream) + beta * fp32(branch)


def swiglu_fused(gate, up, numerics, dtype):
    gate, up = bf16(gate), bf16(up)
    return round_to(gate * jax.nn.sigmoid(gate) * up, dtype)


def combine_bf16_weights(rows, weights, dtype):
    return combine(rows, bf16(weights), dtype)


def combine_running_sum(rows, weights, dtype):
    """What transformers' eager experts do, but for the order of the slots."""
    total = jnp.zeros((rows.shape[0], rows.shape[2]), jnp.float32)
    for slot in range(rows.shape[1]):
        total = bf16(total + bf16(fp32(rows[:, slot]) * weights[:, slot, None]))
    return total.astype(dtype)


def normed_after_sum() -> dict:
    """The post-expert norm, moved behind the weighted sum."""
    held = []

    def keep(x, *args):
        held.append(args)
        return fp32(x)

    def combine_then_norm(rows, weights, dtype):
        return round_to(input_scaled_norm(combine(rows, weights, dtype), *held.pop()), dtype)

    return {"input_scaled_norm": keep, "combine": combine_then_norm}


def route_with_bias_in_weights(x, router, bias, top_k, multiplier, scaling):
    scores = jax.nn.sigmoid(ops.linear(fp32(x), router) * multiplier) + bias[None, :]
    chosen, idx = jax.lax.top_k(scores, top_k)
    return idx, chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + RENORM_EPS) * scaling


def route_without_renormalising(x, router, bias, top_k, multiplier, scaling):
    scores = jax.nn.sigmoid(ops.linear(fp32(x), router) * multiplier)
    _, idx = jax.lax.top_k(scores + bias[None, :], top_k)
    return idx, jnp.take_along_axis(scores, idx, axis=-1) * scaling


def rope_adjacent_pairs(x, tables, numerics, dtype):
    half = x.shape[-1] // 2
    order = np.arange(x.shape[-1]).reshape(half, 2).T.reshape(-1)
    return apply_rope(x[..., order], tables, numerics, dtype)[..., np.argsort(order)]


def rms_over_all_heads(x, eps):
    if x.ndim < 4:
        return rms(x, eps)
    x = fp32(x)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=(-2, -1), keepdims=True) + eps)


rms, apply_rope, combine = ops.rms, ops.apply_rope, ops.combine
input_scaled_norm, residual_gate = ops.input_scaled_norm, ops.residual_gate


def widen_window(keys: int) -> Callable:
    def mutate(model):
        model.layers[SLIDING].attention.window += keys

    return mutate


def set_rope(layer_idx: int, used: bool) -> Callable:
    def mutate(model):
        model.layers[layer_idx].attention.uses_rope = used

    return mutate


def swap_residual_gates(model):
    for decoder_layer in model.layers:
        first, second = decoder_layer.post_attention_gate, decoder_layer.post_ffn_gate
        decoder_layer.post_attention_gate, decoder_layer.post_ffn_gate = second, first


def swap_gate_and_up(model):
    experts = model.layers[SLIDING].mlp
    experts.gate_up.set_value(experts.gate_up[...][:, ::-1])


def out_gate_dim_major(model):
    module = model.layers[SLIDING].attention
    rows = np.arange(module.config.q_size).reshape(module.config.num_attention_heads, -1).T.reshape(-1)
    module.attn_out_gate.set_value(module.attn_out_gate[...][rows])


def out_gate_is_q(model):
    module = model.layers[SLIDING].attention
    module.attn_out_gate.set_value(module.q_proj[...])


def route_on_pooled(model):
    """The router reads the experts' input (padded to its width) in place of the block's."""
    module = model.layers[SLIDING].mlp
    route = type(module).route

    def mutated(rows):
        pooled = round_to(ops.linear(rows, module.pre_expert_proj[...]), jnp.bfloat16)
        pooled = ops.centred_norm(pooled, module.pre_expert_norm[...], module.config.rms_norm_eps, HF, jnp.bfloat16)
        return route(module, jnp.pad(pooled, ((0, 0), (0, rows.shape[1] - pooled.shape[1]))))

    module.route = mutated


def without_bias(model):
    for decoder_layer in model.layers:
        if hasattr(decoder_layer.mlp, "router_bias"):
            decoder_layer.mlp.router_bias.set_value(jnp.zeros_like(decoder_layer.mlp.router_bias[...]))


def final_norm_zero_centred(model):
    model.final_norm.set_value(round_to(1.0 + fp32(model.final_norm[...]), jnp.bfloat16))


MUTATIONS = {
    # 8.1, in its order
    "1+w in fp32": Mutation(layer, (SLIDING,), "input_norm", drop=("one_plus_w_rounded",)),
    "norm rounded before its scale": Mutation(layer, (SLIDING,), "input_norm", ops={"centred_norm": norm_rounded_before_scale}),
    "qk_scale in the softmax scale": Mutation(attention, (SLIDING,), "whole", drop=("qk_scale_in_q",)),
    "fp32 RoPE tables": Mutation(attention, (SLIDING,), "k", drop=("rope_tables_rounded",)),
    "RoPE rounded once": Mutation(attention, (SLIDING,), "k", drop=("rope_steps_rounded",)),
    "RoPE in fp32": Mutation(attention, (SLIDING,), "k", drop=("rope_tables_rounded", "rope_steps_rounded")),
    "fp32 scores": Mutation(attention, (FULL,), "attended", drop=("scores_rounded",)),
    "output norm and gate rounded once": Mutation(attention, (SLIDING,), "gated", drop=("out_gate_steps_rounded",)),
    "alpha and beta in bf16": Mutation(layer, (SLIDING,), "residual", ops={"residual_gate": gate_vectors_in_bf16}),
    "residual products rounded": Mutation(layer, (SLIDING,), "residual", ops={"residual_gate": gate_products_rounded}),
    "residual gate in bf16": Mutation(layer, (SLIDING,), "residual", ops={"residual_gate": gate_in_bf16}),
    "SwiGLU rounded once": Mutation(dense_mlp, (DENSE,), "hidden", ops={"swiglu": swiglu_fused}),
    "SwiGLU of experts rounded once": Mutation(moe, (SLIDING,), "experts", ops={"swiglu": swiglu_fused}),
    "SwiGLU from accumulators": Mutation(dense_mlp, (DENSE,), "hidden", drop=("swiglu_steps_rounded",)),
    "bf16 routing weights": Mutation(moe, (SLIDING,), "experts", ops={"combine": combine_bf16_weights}),
    "post-expert norm not rounded": Mutation(moe, (SLIDING,), "experts", drop=("post_expert_norm_rounded",)),
    "post-expert norm in fp32": Mutation(
        moe,
        (SLIDING,),
        "experts",
        drop=("post_expert_norm_rounded", "input_scaled_rounded", "one_plus_w_rounded"),
    ),
    "input-scaled norm not rounded inside": Mutation(moe, (SLIDING,), "experts", drop=("input_scaled_rounded",)),
    "the same after the MLP": Mutation(layer, (SLIDING,), "residual", drop=("input_scaled_rounded",)),
    "experts added in bf16": Mutation(moe, (SLIDING,), "experts", ops={"combine": combine_running_sum}),
    "window one key wider": Mutation(attention, (SLIDING,), "attended", model=widen_window(1)),
    "window one key narrower": Mutation(attention, (SLIDING,), "attended", model=widen_window(-1)),
    "soft cap in fp32": Mutation(head, (), "logits", drop=("logits_rounded",)),
    # the other rounding points
    "fp32 stream": Mutation(layer, (SLIDING,), "pre_ffn_norm", drop=("stream_rounded",)),
    "post-norms not rounded": Mutation(layer, (SLIDING,), "residual", drop=("post_norm_rounded",)),
    "q and k norms not rounded": Mutation(attention, (SLIDING,), "k", drop=("qk_norm_rounded",)),
    "o_proj not rounded": Mutation(attention, (SLIDING,), "o_proj", drop=("branch_rounded",)),
    # section 7
    "router without multiplier (3)": Mutation(router, (SLIDING,), "weights", config={"output_multiplier": 1.0}),
    "logits without multiplier (3)": Mutation(head, (), "logits", config={"output_multiplier": 1.0}),
    "bias in the routing weights (4)": Mutation(router, (SLIDING,), "weights", ops={"route": route_with_bias_in_weights}),
    "no bias in the choice (4)": Mutation(router, (SLIDING,), "weights", model=without_bias),
    "weights not renormalised (4)": Mutation(router, (SLIDING,), "weights", ops={"route": route_without_renormalising}),
    "weights not scaled": Mutation(router, (SLIDING,), "weights", config={"routed_scaling_factor": 1.0}),
    "router reads the pooled vector (5)": Mutation(router, (SLIDING,), "weights", model=route_on_pooled),
    "post-expert norm after the sum (6)": Mutation(moe, (SLIDING,), "experts", ops=normed_after_sum()),
    "post-expert scale after its norm (7)": Mutation(moe, (SLIDING,), "experts", ops={"input_scaled_norm": norm_before_scale}),
    "post-FFN scale after its norm (7)": Mutation(layer, (SLIDING,), "residual", ops={"input_scaled_norm": norm_before_scale}),
    "no +1, input norm (8)": Mutation(layer, (SLIDING,), "input_norm", ops={"one_plus": lambda w, _: fp32(w)}),
    "no +1, pre-FFN norm (8)": Mutation(layer, (SLIDING,), "pre_ffn_norm", ops={"one_plus": lambda w, _: fp32(w)}),
    "no +1, post-FFN norm (8)": Mutation(layer, (SLIDING,), "residual", ops={"one_plus": lambda w, _: fp32(w)}),
    "no +1, pre-expert norm (8)": Mutation(moe, (SLIDING,), "pre_expert", ops={"one_plus": lambda w, _: fp32(w)}),
    "no +1, post-expert norm (8)": Mutation(moe, (SLIDING,), "experts", ops={"one_plus": lambda w, _: fp32(w)}),
    "final norm zero-centred (8)": Mutation(head, (), "final_norm", model=final_norm_zero_centred),
    "post eps in the embedding norm (9)": Mutation(embedding, (), "embedding", config={"rms_norm_eps": 1e-8}),
    "post eps in the input norm (9)": Mutation(layer, (SLIDING,), "input_norm", config={"rms_norm_eps": 1e-8}),
    "post eps in the pre-FFN norm (9)": Mutation(layer, (SLIDING,), "pre_ffn_norm", config={"rms_norm_eps": 1e-8}),
    "post eps in the k norm (9)": Mutation(attention, (SLIDING,), "k", config={"rms_norm_eps": 1e-8}),
    "post eps in the output norm (9)": Mutation(attention, (SLIDING,), "gated", config={"rms_norm_eps": 1e-8}),
    "post eps in the pre-expert norm (9)": Mutation(moe, (SLIDING,), "pre_expert", config={"rms_norm_eps": 1e-8}),
    "post eps in the final norm (9)": Mutation(head, (), "final_norm", config={"rms_norm_eps": 1e-8}),
    "rms eps in the post-attention norm (9)": Mutation(layer, (SLIDING,), "pre_ffn_norm", config={"post_norm_eps": 1e-5}),
    "rms eps in the post-FFN norm (9)": Mutation(layer, (SLIDING,), "residual", config={"post_norm_eps": 1e-5}),
    "rms eps in the post-expert norm (9)": Mutation(moe, (SLIDING,), "experts", config={"post_norm_eps": 1e-5}),
    "k norm over all heads (10)": Mutation(attention, (SLIDING,), "k", ops={"rms": rms_over_all_heads}),
    "output norm over all heads (10)": Mutation(attention, (SLIDING,), "gated", ops={"rms": rms_over_all_heads}),
    "output gate dimension-major (11)": Mutation(attention, (SLIDING,), "gated", model=out_gate_dim_major),
    "output gate is q_proj (11, 12)": Mutation(attention, (SLIDING,), "gated", model=out_gate_is_q),
    "residual gates swapped (12)": Mutation(layer, (SLIDING,), "residual", model=swap_residual_gates),
    "gate and up swapped (16)": Mutation(moe, (SLIDING,), "experts", model=swap_gate_and_up),
    "plain residual sum (13)": Mutation(
        layer, (SLIDING,), "residual", ops={"residual_gate": lambda stream, branch, *_: fp32(stream) + fp32(branch)}
    ),
    "residual interpolated (13)": Mutation(layer, (SLIDING,), "residual", ops={"residual_gate": gate_as_interpolation}),
    "residual gate without floor (13)": Mutation(layer, (SLIDING,), "residual", ops={"residual_gate": gate_without_floor}),
    "residual gate without temperature (13)": Mutation(
        layer, (SLIDING,), "residual", config={"residual_gate_temperature": 1.0}
    ),
    "embedding not normed (14)": Mutation(embedding, (), "embedding", ops={"rms": lambda x, _: fp32(x)}),
    "RoPE on adjacent pairs (15)": Mutation(attention, (SLIDING,), "k", ops={"apply_rope": rope_adjacent_pairs}),
    "RoPE missing": Mutation(attention, (SLIDING,), "k", model=set_rope(SLIDING, False)),
    "RoPE in a layer without": Mutation(attention, (FULL,), "k", model=set_rope(FULL, True)),
}


def test_every_rounding_point_has_a_mutation():
    dropped = {field for mutation in MUTATIONS.values() for field in mutation.drop}
    assert dropped == {field.name for field in dataclasses.fields(Numerics)} - {"name"}


@pytest.fixture(scope="module")
def unmutated(bf16_recording):
    """Verdicts of the right model, one run per check."""
    return functools.cache(lambda check, args: verdicts(check, Subject.create(bf16_recording, jit=False), *args))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_fails_its_gate(bf16_recording, unmutated, monkeypatch, name):
    mutation = MUTATIONS[name]
    assert unmutated(mutation.check, mutation.args)[mutation.output].passes

    numerics = dataclasses.replace(HF, **dict.fromkeys(mutation.drop, False))
    config = dataclasses.replace(bf16_recording.config, **(mutation.config or {}))
    subject = Subject.create(bf16_recording, numerics, config, jit=False)
    if mutation.model is not None:
        mutation.model(subject.model)
    for function, replacement in (mutation.ops or {}).items():
        monkeypatch.setattr(ops, function, replacement)
    verdict = verdicts(mutation.check, subject, *mutation.args)[mutation.output]
    print(f"{name}: {mutation.check.__name__}.{mutation.output}: {verdict}")
    assert not verdict.passes
