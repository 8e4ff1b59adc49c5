"""Each module of our model on the inputs that transformers gave its own, in bfloat16.

A check runs one part with HF's inputs and returns {output: (ours, theirs)}. HF's values replace ours wherever our module
hands an intermediate value to a replaceable part (attention, experts, a projection), so that one part is judged at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hf_reference import Recording

from muse_jax import ops
from muse_jax.backends import Backend
from muse_jax.config import ModelConfig
from muse_jax.kv_cache import FullContext
from muse_jax.model import MuseSpark
from muse_jax.numerics import HF, Numerics

# Where every rounding is in place only the order of fp32 sums is left: a relative error of about sqrt(n) 2^-24 for a sum of
# n = 32..128 terms. It moves a value over a bf16 rounding boundary (they are 2^-8 apart) about once in 10^4 times, and
# then by one unit in the last place. Where a sum cancels to a small fraction of its terms that error can be more than a unit
# of the result: differences below sqrt(128) 2^-24 = 2^-20.5 of the output's rms are the sum's, and count as one.
# An output with a projection and more roundings behind it (q, k, o_proj through the output gate, experts) can also carry a
# flip on: with four other seeds than the recording's, single elements of those were more than one unit off, and once
# 0.2 % of the experts' values differed. The gate is that of the recording, not a bound for every model.
EQUAL_VALUES = 0.999  # all 16 bits
MAX_ULPS = 1
SUM_ERROR = 2.0**-20.5
# A whole module or layer spreads such flips further: a bit of v reaches the queries of a window, each of them 64 features.
# Five recordings differed in 0 to 2 % of values, nearly all in their last bit: there single bits are counted. A misplaced
# rounding that changes fewer is left to the parts.
EQUAL_BITS_WHOLE = 0.999
# fp32 outputs (router): the same error, absolute, of values up to 1.
FP32_ERROR = 5e-7

# Each shape runs once, so compiling is most of the time: without LLVM's optimisations it is half. XLA's own, which may drop
# roundings, stay on.
compile_once = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

Outputs = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How an output compares. `representable`: ours needed no rounding to be bf16; `whole`: many parts in a row."""

    equal: float  # share of the values
    ulps: int
    bits: float = 1.0  # share of the bits
    representable: bool = True
    whole: bool = False

    @property
    def passes(self) -> bool:
        if self.whole:
            return self.bits >= EQUAL_BITS_WHOLE and self.representable
        return self.equal >= EQUAL_VALUES and self.ulps <= MAX_ULPS and self.representable

    def __str__(self) -> str:
        return f"{100 * self.equal:.3f} % of values and {100 * self.bits:.3f} % of bits equal, {self.ulps} ulp at most" + (
            "" if self.representable else ", not rounded"
        )


def judge(ours: np.ndarray, theirs: np.ndarray, whole: bool) -> Verdict:
    """Compares bf16 values. Ours are rounded first: a mutation that merely keeps fp32 shows in `representable`."""
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    rounded = ours.astype(jnp.bfloat16)
    distance = np.abs(_ordinal(rounded) - _ordinal(theirs.astype(jnp.bfloat16)))
    flipped = rounded.view(np.uint16) ^ theirs.astype(jnp.bfloat16).view(np.uint16)
    bits = 1 - float(np.mean(np.bitwise_count(flipped))) / 16
    cancelled = np.abs(rounded.astype(np.float32) - theirs) <= SUM_ERROR * np.sqrt(np.mean(np.square(theirs, dtype=float)))
    ulps = np.where(cancelled, np.minimum(distance, 1), distance)
    representable = bool(np.all(rounded.astype(np.float32) == ours))
    return Verdict(float(np.mean(distance == 0)), int(ulps.max()), bits, representable, whole)


def verdicts(check: Callable, *args) -> dict[str, Verdict]:
    """Runs a check on `args` and judges its outputs."""
    return {
        name: judge_fp32(*pair) if check is router else judge(*pair, whole=name == "whole")
        for name, pair in check(*args).items()
    }


def judge_fp32(ours: np.ndarray, theirs: np.ndarray) -> Verdict:
    """Compares fp32 values of order one; `equal` is the share within FP32_ERROR."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return Verdict(float(np.mean(np.abs(ours - theirs) <= FP32_ERROR)), 0)


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the bf16 values, consecutive for neighbours; both zeros are 0."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@dataclasses.dataclass
class Subject:
    """Our model under test, with the recording it is compared with. Mutations change `model`, or what `ops` holds."""

    recording: Recording
    model: MuseSpark
    run: Callable  # compile_once, or the identity to run op by op

    @classmethod
    def create(
        cls, recording: Recording, numerics: Numerics = HF, config: ModelConfig | None = None, jit: bool = True
    ) -> Subject:
        """jit=False runs op by op and every expert on every row, which compiles next to nothing anew."""
        model = nnx.clone(recording.model(HF, jnp.bfloat16, dense_experts=not jit))
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "numerics"):
                module.numerics = numerics
            if hasattr(module, "config"):
                module.config = config or recording.config
        return cls(recording, model, compile_once if jit else lambda f: f)

    def given(self, name: str, index: int = 0) -> jax.Array:
        """HF's input of a module, bf16."""
        return jnp.asarray(self.recording.inputs[name][index]).astype(jnp.bfloat16)

    def theirs(self, name: str, index: int | None = None) -> np.ndarray:
        output = self.recording.outputs[name]
        return output if index is None else output[index]

    def bf16(self, name: str, index: int | None = None) -> jax.Array:
        return jnp.asarray(self.theirs(name, index)).astype(jnp.bfloat16)

    def rope(self, context: FullContext) -> tuple:
        config = self.model.config
        inv_freq = ops.rope_inverse_frequencies(config.rope_theta, config.head_dim)
        return ops.rope_tables(context.positions, inv_freq, self.model.numerics, jnp.bfloat16)

    def context(self) -> FullContext:
        return FullContext.create(self.recording.tokens.shape[1])


class _Attended:
    """A context that keeps q, k, v, and answers with a given attention output or with the real one."""

    def __init__(self, context: FullContext, answer: jax.Array | None = None):
        self.context, self.answer = context, answer

    def attend(self, q, k, v, *args):
        self.qkv = q, k, v
        return self.context.attend(q, k, v, *args) if self.answer is None else (self.answer, None)


def _identity_like(weight: nnx.Param) -> nnx.Param:
    """A matrix that hands a module's last GEMM input through."""
    return nnx.Param(jnp.eye(weight.shape[1], dtype=weight.dtype))


def embedding(subject: Subject) -> Outputs:
    tokens = jnp.asarray(subject.recording.tokens, jnp.int32)
    ours = subject.run(lambda model, tokens: model.embed(tokens))(subject.model, tokens)
    return {"embedding": (ours, subject.theirs("embed_tokens"))}


def attention(subject: Subject, layer_idx: int) -> Outputs:
    """One attention module; from its input ("whole", q, k, v), and each later part from HF's value before it."""
    name, module = f"layers.{layer_idx}.self_attn", subject.model.layers[layer_idx].attention
    x, config = subject.given(name), module.config
    their_qkv = [subject.bf16(f"layers.{layer_idx}.qkv", i).transpose(0, 2, 1, 3) for i in range(3)]
    their_attended = jnp.asarray(subject.theirs(f"layers.{layer_idx}.attended"))

    def run(module, x):
        context = subject.context()
        rope, watch = subject.rope(context), _Attended(context)
        whole, _ = module(x, rope, None, watch)
        scale = config.head_dim**-0.5 * (1.0 if module.numerics.qk_scale_in_q else config.qk_scale_factor)
        attended, _ = context.attend(*their_qkv, None, module.window, scale, module.numerics)
        projected, _ = module(x, rope, None, _Attended(context, their_attended))
        passing = nnx.clone(module)
        passing.o_proj = _identity_like(module.o_proj)
        gated, _ = passing(x, rope, None, _Attended(context, their_attended))
        return whole, watch.qkv, attended, projected, gated

    whole, qkv, attended, projected, gated = subject.run(run)(module, x)
    rounded = attended.astype(jnp.bfloat16)  # the module rounds what a context returns
    outputs = {part: (qkv[i], their_qkv[i]) for i, part in enumerate("qkv")}
    return outputs | {
        "attended": (rounded, their_attended),
        "gated": (gated, subject.recording.inputs[f"{name}.o_proj"][0]),
        "o_proj": (projected, subject.theirs(name, 0)),
        "whole": (whole, subject.theirs(name, 0)),
    }


def router(subject: Subject, layer_idx: int) -> Outputs:
    """fp32: the chosen experts' weights placed at their ids (so sets must agree), and the scores of all experts."""
    name, module = f"layers.{layer_idx}.mlp.gate", subject.model.layers[layer_idx].mlp
    rows = subject.given(name).reshape(-1, module.config.hidden_size)

    def run(module, rows):
        every_expert = nnx.clone(module)
        every_expert.config = dataclasses.replace(module.config, num_experts_per_tok=module.config.num_local_experts)
        return module.route(rows), every_expert.route(rows)

    (idx, weights), (all_idx, all_weights) = subject.run(run)(module, rows)
    logits, their_weights, their_idx = subject.recording.outputs[name]
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    shares = scores / scores.sum(axis=-1, keepdims=True) * module.config.routed_scaling_factor
    shape = logits.shape
    return {
        "weights": (_at_ids(idx, weights, shape), _at_ids(their_idx, their_weights, shape)),
        "scores": (_at_ids(all_idx, all_weights, shape), shares),
    }


def _at_ids(idx: np.ndarray, weights: np.ndarray, shape: tuple) -> np.ndarray:
    placed = np.zeros(shape, np.float32)
    np.put_along_axis(placed, np.asarray(idx), np.asarray(weights), axis=-1)
    return placed


def moe(subject: Subject, layer_idx: int) -> Outputs:
    """A sparse MLP from its input ("whole", and "pre_expert", what the experts read), and the experts from HF's input."""
    name, module = f"layers.{layer_idx}.mlp", subject.model.layers[layer_idx].mlp
    x, their_pooled, their_mixed = (subject.given(part) for part in (name, f"{name}.experts", f"{name}.post_expert_proj"))

    def run(module, x):
        kind = "experts_dense" if module.dense_experts else "experts"
        experts, seen = getattr(ops, kind), []

        def watch(pooled, *args):
            seen.append(pooled)
            return experts(pooled, *args)

        with mock.patch.object(ops, kind, watch):
            whole = module(x)
        passing = nnx.clone(module)
        # The block returns as wide a row as it got: the pass-through is padded with zero columns.
        identity = jnp.eye(*module.post_expert_proj.shape, dtype=jnp.bfloat16)
        passing.post_expert_proj = nnx.Param(identity)
        with mock.patch.object(ops, kind, lambda pooled, *args: experts(their_pooled, *args)):
            mixed = passing(x)
        with mock.patch.object(ops, "combine", lambda *_: their_mixed):
            projected = module(x)
        return whole, seen[0], mixed, projected

    whole, pooled, mixed, projected = subject.run(run)(module, x)
    return {
        "pre_expert": (pooled, their_pooled),
        "experts": (mixed.reshape(-1, x.shape[-1])[:, : their_pooled.shape[-1]], subject.theirs(f"{name}.experts")),
        "post_expert_proj": (projected, subject.theirs(name)),
        "whole": (whole, subject.theirs(name)),
    }


def dense_mlp(subject: Subject, layer_idx: int) -> Outputs:
    name, module = f"layers.{layer_idx}.mlp", subject.model.layers[layer_idx].mlp

    def run(module, x):
        passing = nnx.clone(module)
        passing.down_proj = _identity_like(module.down_proj)
        return module(x), passing(x)

    whole, hidden = subject.run(run)(module, subject.given(name))
    return {
        "hidden": (hidden, subject.recording.inputs[f"{name}.down_proj"][0]),
        "whole": (whole, subject.theirs(name)),
    }


def layer(subject: Subject, layer_idx: int) -> Outputs:
    """Norms and residual gates of a layer around HF's attention and MLP; and the layer from its input alone ("whole")."""
    name, module = f"layers.{layer_idx}", subject.model.layers[layer_idx]
    attention_answer = subject.bf16(f"{name}.self_attn", 0)
    mlp_answer = subject.bf16(f"{name}.mlp")

    def run(module, stream):
        context = subject.context()
        rope, seen = subject.rope(context), []
        x = module.normed_input(stream)
        whole, *_ = module(stream, x, rope, None, context, None)

        def answer(value):
            return lambda x, *args: (seen.append(x), value)[1]

        around = nnx.clone(module)
        around.attention = answer((attention_answer, None))
        around.mlp = answer(mlp_answer)
        out, *_ = around(stream, x, rope, None, context, None)
        return whole, out, *seen

    whole, out, attention_input, mlp_input = subject.run(run)(module, subject.given(name))
    return {
        "input_norm": (attention_input, subject.theirs(f"{name}.input_layernorm")),
        "pre_ffn_norm": (mlp_input, subject.theirs(f"{name}.pre_feedforward_layernorm")),
        "residual": (out, subject.theirs(name)),
        "whole": (whole, subject.theirs(name)),
    }


def head(subject: Subject) -> Outputs:
    def run(model, stream, normed):
        linears, seen = ops.linears, []

        def given(x, *args):
            seen.append(x)
            return linears(normed, *args)

        logits = model.logits(stream)
        with mock.patch.object(Backend, "linears", staticmethod(given)):
            from_normed = model.logits(stream)
        return logits, seen[0], from_normed

    logits, normed, from_normed = subject.run(run)(subject.model, subject.given("norm"), subject.given("lm_head"))
    return {
        "final_norm": (normed, subject.theirs("norm")),
        "logits": (from_normed, subject.theirs("logits")),
        "whole": (logits, subject.theirs("logits")),
    }
