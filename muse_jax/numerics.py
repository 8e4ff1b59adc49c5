"""Where values are rounded: every point at which implementations of this model differ has a name here.

`HF` is what transformers 5.24.0 computes (muse_spark.md 3.1-3.6), `SERVING` what the GPU kernels compute (section 3.7).
A rounding is to the model's dtype: with float32 weights there is none, and the two differ only in the order of some sums.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.numerics import fp32 as fp32
from pallas_kernels.numerics import product as product
from pallas_kernels.numerics import round_to as round_to


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
