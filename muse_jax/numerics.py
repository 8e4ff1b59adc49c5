"""Where values are rounded: every point at which implementations of this model differ has a name here.

`HF` is what transformers 5.24.0 computes (muse_spark.md 3.1-3.6), `SERVING` what the GPU kernels compute (section 3.7 and
DESIGN section 5). A rounding is to the model's dtype: with float32 weights there is none, and the two differ only in the
order of some sums.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Rounding points; True is what transformers does. `name` is what users ask for."""

    name: str
    stream_rounded: bool  # the residual stream is kept in the model's dtype, else in fp32
    one_plus_w_rounded: bool  # 1 + w of zero-centred norms
    input_scaled_rounded: bool  # the product before an input-scaled norm
    post_norm_rounded: bool  # post-attention and post-FFN norms, before the residual gate blends them
    post_expert_norm_rounded: bool
    qk_norm_rounded: bool  # q and k after their norm; q again after qk_scale_factor
    qk_scale_in_q: bool  # qk_scale_factor multiplies q, else it is part of the softmax scale
    rope_tables_rounded: bool  # cos and sin
    rope_steps_rounded: bool  # both products and their sum, else one rounding
    scores_rounded: bool  # q k^T, and again after the scale
    out_gate_steps_rounded: bool  # attention output, its norm, sigmoid and their product; else the product alone
    swiglu_steps_rounded: bool  # gate, up and silu(gate); else the product alone, from fp32 accumulators
    branch_rounded: bool  # outputs of o_proj and of the dense down_proj; else fp32 into the post-norm
    logits_rounded: bool  # lm_head output, multiplier, division, tanh, cap: each; else fp32


_EVERY_POINT = {field.name: True for field in dataclasses.fields(Numerics) if field.name != "name"}

HF = Numerics(name="hf", **_EVERY_POINT)
SERVING = Numerics(name="serving", **dict.fromkeys(_EVERY_POINT, False))
NUMERICS = {numerics.name: numerics for numerics in (HF, SERVING)}


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds fp32 values to `dtype` (bfloat16 or float32), nearest-even.

    The rounding is forced: XLA may drop a plain fp32 -> bf16 -> fp32 pair (xla_allow_excess_precision).
    """
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, rounded on its own where it is a term of a sum.

    A compiler may contract a product and a sum to one rounding (XLA does on CPUs and GPUs), and of two products that are
    added it takes either, depending on the code around them. A comparison between the two keeps it from that.
    """
    xy = x * y
    return lax.select(xy == xy, xy, lax.full_like(xy, jnp.nan))


def fp32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
