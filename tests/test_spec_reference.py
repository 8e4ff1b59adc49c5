"""The model against a second transcription of its specification: numpy, float64, one token and one head at a time.

It shares nothing with `muse_jax` but `ModelConfig` and the parameters, and says in a page what the model computes. Rounding
is not its subject (tests/parity is): both numerics must agree with it in fp32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from muse_jax.config import TINY, AttentionKind, MLPKind
from muse_jax.kv_cache import FullContext
from muse_jax.model import MuseSpark
from muse_jax.numerics import NUMERICS

TOLERANCE = 1e-4  # of the largest logit: fp32 sums, through six layers (muse_spark.md 8.1)
# Choices of experts closer than this may fall either way in fp32; tokens are drawn so that there is none.
ROUTING_MARGIN = 1e-4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rotate(head, position, theta):
    half = len(head) // 2
    angles = position * theta ** -(np.arange(half) / half)
    first, second = head[:half], head[half:]
    return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)])


def attention_block(config, i, weights, x):
    """x: [T, D], normed. Returns [T, D]."""
    length, size = len(x), config.head_dim
    q, k, v, gate = (
        (x @ weights[name].T).reshape(length, -1, size) for name in ("q_proj", "k_proj", "v_proj", "attn_out_gate")
    )
    q = rms_norm(q, config.rms_norm_eps) * config.qk_scale_factor
    k = rms_norm(k, config.rms_norm_eps)
    out = np.zeros_like(q)
    for head in range(config.num_attention_heads):
        shared = head * config.num_key_value_heads // config.num_attention_heads
        for p in range(length):
            first = 0
            if config.layer_types[i] == AttentionKind.SLIDING:
                first = max(0, p - config.sliding_window + 1)
            query, keys = q[p, head], k[first : p + 1, shared]
            if config.layer_uses_rope[i]:
                query = rotate(query, p, config.rope_theta)
                keys = np.stack([rotate(key, first + j, config.rope_theta) for j, key in enumerate(keys)])
            scores = keys @ query / np.sqrt(size)
            attention = np.exp(scores - scores.max())
            attended = attention / attention.sum() @ v[first : p + 1, shared]
            out[p, head] = rms_norm(attended, config.rms_norm_eps) * sigmoid(gate[p, head])
    return out.reshape(length, -1) @ weights["o_proj"].T


def moe_block(config, weights, x, margins):
    """x: [T, D], normed. Returns [T, D]; appends how clear each token's choice of experts was."""
    out = []
    for row in x:
        scores = sigmoid(weights["router"] @ row * config.output_multiplier)
        biased = scores + weights["router_bias"]
        ranking = np.argsort(-biased, kind="stable")
        chosen, rest = np.split(ranking, [config.num_experts_per_tok])
        margins.append(biased[chosen[-1]] - biased[rest[0]] if len(rest) else np.inf)
        pooled = rms_norm(weights["pre_expert_proj"] @ row, config.rms_norm_eps) * (1 + weights["pre_expert_norm"])
        mixed = np.zeros_like(pooled)
        for expert in chosen:
            gate, up = weights["gate_up"][expert] @ pooled
            result = weights["down"][expert] @ (silu(gate) * up)
            result = rms_norm(result * (1 + weights["post_expert_norm"]), config.post_norm_eps)
            mixed += result * scores[expert] / (scores[chosen].sum() + 1e-15) * config.routed_scaling_factor
        out.append(weights["post_expert_proj"] @ mixed)
    return np.stack(out)


def dense_block(weights, x):
    return (silu(x @ weights["gate_proj"].T) * (x @ weights["up_proj"].T)) @ weights["down_proj"].T


def blend(config, gate, stream, branch):
    beta = sigmoid(gate / config.residual_gate_temperature)
    return np.sqrt(np.maximum(1 - beta**2, 1e-3)) * stream + beta * branch


def reference_logits(config, weights, tokens, margins):
    """tokens: [T]. Returns [T, V]."""
    tokens = np.where(np.isin(tokens, config.placeholder_token_ids), 0, tokens)
    stream = rms_norm(weights["embedding"][tokens], config.rms_norm_eps)
    for i in range(config.num_hidden_layers):
        layer = weights["layers"][i]
        x = rms_norm(stream, config.rms_norm_eps) * (1 + layer["input_norm"])
        branch = rms_norm(attention_block(config, i, layer["attention"], x), config.post_norm_eps)
        stream = blend(config, layer["post_attention_gate"], stream, branch)
        x = rms_norm(stream, config.rms_norm_eps) * (1 + layer["pre_ffn_norm"])
        if config.mlp_layer_types[i] == MLPKind.SPARSE:
            branch = moe_block(config, layer["mlp"], x, margins)
        else:
            branch = dense_block(layer["mlp"], x)
        branch = rms_norm(branch * (1 + layer["post_ffn_norm"]), config.post_norm_eps)
        stream = blend(config, layer["post_ffn_gate"], stream, branch)
    logits = rms_norm(stream, config.rms_norm_eps) * weights["final_norm"] @ weights["lm_head"].T
    return config.final_logit_softcapping * np.tanh(logits * config.output_multiplier / config.final_logit_softcapping)


def random_weights(config, rng):
    """Every parameter random, vectors too: initial norms, gates and bias (0 and 1) hide mistakes."""
    model = MuseSpark(config, dtype=jnp.float32)

    def draw(path, shape):
        name = path[-1].key
        values = rng.normal(size=shape.shape)
        if name in ("router", "lm_head"):
            values /= np.sqrt(shape.shape[-1]) * config.output_multiplier
        elif len(shape.shape) > 1:
            values *= 0.05 / np.sqrt(shape.shape[-1])  # small: the epsilons of the norms count
        elif name == "final_norm":
            values = 1 + 0.3 * values
        else:
            values *= 0.3
            if name.endswith("_gate"):
                values[:2] = 3, -3  # wide open, where alpha has its floor, and shut
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(nnx.state(model)))


CONFIGS = {
    "tiny": TINY,
    "dense, no window edge": dataclasses.replace(
        TINY,
        num_hidden_layers=2,
        layer_types=TINY.layer_types[:2],
        layer_uses_rope=(True, True),
        mlp_layer_types=(MLPKind.DENSE,) * 2,
        sliding_window=64,
        num_key_value_heads=1,
    ),
    "other sizes": dataclasses.replace(
        TINY,
        hidden_size=30,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=6,
        moe_hidden_size=20,
        moe_intermediate_size=14,
        num_local_experts=5,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        sliding_window=1,
        layer_types=(AttentionKind.GLOBAL, AttentionKind.SLIDING, AttentionKind.GLOBAL),
        layer_uses_rope=(True, False, False),
        mlp_layer_types=(MLPKind.SPARSE,) * 3,
        placeholder_token_ids=(3, 4),
    ),
}


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _logits(model, tokens):
    stream, _, _ = model(tokens, FullContext.create(tokens.shape[1]))
    return model.logits(stream)


@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_the_specification(rng, name):
    config = CONFIGS[name]
    parameters = random_weights(config, rng)
    weights = jax.tree.map(lambda x: x.astype(np.float64), parameters)
    for _ in range(20):
        tokens, margins = rng.integers(0, config.vocab_size, 24), [np.inf]
        tokens[3] = 3
        reference = reference_logits(config, weights, tokens, margins)
        if min(margins) > ROUTING_MARGIN:
            break
    assert min(margins) > ROUTING_MARGIN
    for numerics in NUMERICS.values():
        model = MuseSpark(config, numerics=numerics, dtype=jnp.float32)
        graph, state = nnx.split(model)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, parameters))
        ours = _logits(nnx.merge(graph, state), jnp.asarray(tokens, jnp.int32)[None])[0]
        error = np.abs(ours - reference).max() / np.abs(reference).max()
        print(f"{name}, {numerics.name}: {error:.1e} (routing margin {min(margins):.1e})")
        assert error < TOLERANCE
