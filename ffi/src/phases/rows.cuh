// What needs whole rows: norms, residual gates, the weighted sum of experts. Each row belongs to one CTA of every rank,
// which keeps its part of the residual stream; a thread has the same columns in all of them.
#pragma once

#include "experts.cuh"

namespace muse {

// Rows of the step that this CTA has.
#define MUSE_FOR_OWN_ROWS(row) \
  _Pragma("unroll 1") for (int row = 0; row < cta.sizes().rows; ++row) if (owns_row(cta, row))

__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 operator*(const float4& x, const float4& y) {
  return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
__device__ __forceinline__ float4 operator*(const float4& x, float y) {
  return make_float4(x.x * y, x.y * y, x.z * y, x.w * y);
}
__device__ __forceinline__ float squares(const float4& x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
__device__ __forceinline__ float4 to_floats(const uint4& x) {
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
__device__ __forceinline__ uint2 to_bf16x4(const float4& x) {
  return make_uint2(to_bf16x2(x.x, x.y), to_bf16x2(x.z, x.w));
}

// 1 / sqrt(mean of squares + eps) of a row whose squares the threads have summed in part. which: one of two places,
// used in turn.
__device__ __forceinline__ float rms_factor(const Cta& cta, float squares, int width, float eps, int which) {
  const float sum = reduce_over_consumers(cta, squares, which);
  return rsqrtf(divide(sum, static_cast<float>(width)) + eps);
}

// ---- Rows of the residual stream: embed, post_attn, post_ffn --------------------------------------------------------
//   branch = what o_proj gave, or post_expert_proj (1 + w), or a row of the embedding
//   stream = alpha stream + beta branch / rms(branch); of the embedding branch / rms(branch)
//   next   = bf16(stream / rms(stream) (1 + w)), for the router and pre_expert_proj, or for qkv, or for lm_head

constexpr int kColumnsAtOnce = 4 * kConsumers;  // four a thread
constexpr int kPieces = 8192 / kColumnsAtOnce;  // of the widest row

// The rank that has the row sends it to all; in loopback a row that is not here is one of zeros.
__device__ __forceinline__ void send_embedding(const Cta& cta, int number) {
  const Sizes& sizes = cta.sizes();
  const int vocab = cta.of_rank().vocab, width = sizes.hidden, local = cta.launch.tokens[number] - cta.rank * vocab;
  const bool here = local >= 0 && local < vocab;
  if (!here && !sizes.loopback) return;
  const uint16_t* from = cta.launch.embedding + (static_cast<size_t>(cta.here) * vocab + (here ? local : 0)) * width;
#pragma unroll 1
  for (int column = 4 * cta.thread; column < width; column += kColumnsAtOnce) {
    const uint2 pairs = here ? *reinterpret_cast<const uint2*>(from + column) : make_uint2(0, 0);
    const uint4 words = make_uint4(pairs.x << 16, pairs.x & 0xffff0000u, pairs.y << 16, pairs.y & 0xffff0000u);
#pragma unroll 1
    for (int p = 0; p < (sizes.loopback ? 1 : sizes.ranks); ++p) {
      uint32_t* to = cta.of_peer<uint32_t>(p, cta.launch.buffers.branch) + number * width + column;
      store_relaxed(reinterpret_cast<uint4*>(to), words);
    }
  }
}

__device__ __forceinline__ void finish_rows(const Cta& cta, Phase phase, int l) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const int width = sizes.hidden;
  const bool is_embed = phase == Phase::kEmbed, is_ffn = phase == Phase::kPostFfn,
             is_last = is_ffn && l + 1 == sizes.layers;
  const float* scale = is_ffn ? cta.vector(l, &LayerOffsets::post_ffn_norm) : nullptr;
  const float* alpha =
      is_embed ? nullptr : cta.vector(l, is_ffn ? &LayerOffsets::post_ffn_alpha : &LayerOffsets::post_attention_alpha);
  const float* beta =
      is_embed ? nullptr : cta.vector(l, is_ffn ? &LayerOffsets::post_ffn_beta : &LayerOffsets::post_attention_beta);
  const float* next_scale =
      reinterpret_cast<const float*>(cta.launch.head + cta.here * cta.launch.head_bytes + cta.launch.final_norm_offset);
  if (!is_last)
    next_scale =
        is_embed || is_ffn ? cta.vector(l + 1, &LayerOffsets::input_norm) : cta.vector(l, &LayerOffsets::pre_ffn_norm);
  if (is_embed) wait_for_round(cta, cta.round);
  MUSE_FOR_OWN_ROWS(number) {
    if (is_embed) send_embedding(cta, number);
    const uint4* from[kPieces];
    int at_column[kPieces], end[kPieces];
    uint4 words[kPieces];
    const uint32_t* row = cta.own<uint32_t>(phase == Phase::kPostAttention ? buffers.o_sum : buffers.branch) +
                          number * width + 4 * cta.thread;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      from[i] = reinterpret_cast<const uint4*>(row + i * kColumnsAtOnce);
      at_column[i] = i * kColumnsAtOnce;
      end[i] = width - 4 * cta.thread;
    }
    receive(cta.waiting, from, at_column, end, words);
    float4 x[kPieces];  // columns beyond the row are zero
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      x[i] = to_floats(words[i]);
      if (is_ffn && at_column[i] < end[i]) x[i] = x[i] * load4(scale + 4 * cta.thread + i * kColumnsAtOnce);
      sum += squares(x[i]);
    }
    const float factor = rms_factor(cta, sum, width, is_embed ? sizes.rms_eps : sizes.post_eps, 0);
    // Each phase reads what the other one of the two wrote.
    const size_t at_row = (static_cast<size_t>(cta.here) * kMaxRows + number) * width + 4 * cta.thread;
    const size_t half = static_cast<size_t>(sizes.ranks_here) * kMaxRows * width;
    const float* stream = cta.launch.stream + (is_ffn ? half : 0) + at_row;
    float* new_stream = cta.launch.stream + (phase == Phase::kPostAttention ? half : 0) + at_row;
    float* tap = nullptr;
#pragma unroll 1
    for (int i = 0; i < cta.launch.num_taps && is_ffn && cta.here == 0; ++i) {
      if (cta.launch.taps_layers[i] == l)
        tap = cta.launch.taps + (static_cast<size_t>(i) * sizes.rows + number) * width + 4 * cta.thread;
    }
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (at_column[i] >= end[i]) continue;
      const int at = i * kColumnsAtOnce, column = 4 * cta.thread + at;
      x[i] = x[i] * factor;
      if (!is_embed) {
        const float4 a = load4(alpha + column), b = load4(beta + column), s = load4(stream + at);
        x[i].x = __fadd_rn(__fmul_rn(a.x, s.x), __fmul_rn(b.x, x[i].x));
        x[i].y = __fadd_rn(__fmul_rn(a.y, s.y), __fmul_rn(b.y, x[i].y));
        x[i].z = __fadd_rn(__fmul_rn(a.z, s.z), __fmul_rn(b.z, x[i].z));
        x[i].w = __fadd_rn(__fmul_rn(a.w, s.w), __fmul_rn(b.w, x[i].w));
      }
      *reinterpret_cast<float4*>(new_stream + at) = x[i];
      if (tap != nullptr) *reinterpret_cast<float4*>(tap + at) = x[i];
      sum += squares(x[i]);
    }
    const float next = rms_factor(cta, sum, width, sizes.rms_eps, 1);
    uint16_t* to = cta.own<uint16_t>(phase == Phase::kPostAttention ? buffers.ffn_in : buffers.next_in) +
                   number * width + 4 * cta.thread;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (at_column[i] >= end[i]) continue;
      const float4 normed = x[i] * next * load4(next_scale + 4 * cta.thread + i * kColumnsAtOnce);
      store_relaxed(reinterpret_cast<uint2*>(to + i * kColumnsAtOnce), to_bf16x4(normed));
    }
  }
}

// ---- What experts read: moe_in, the normed rows of pre_expert_proj, and hidden rows where activations are quantised -

static_assert(8 * kConsumers >= 4096, "a row of the experts' width, eight columns a thread");

__device__ __forceinline__ void unpack(const uint4& words, float (&x)[8]) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_bf16(pairs[i]);
    x[2 * i + 1] = high_bf16(pairs[i]);
  }
}

__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
  return make_uint4(to_bf16x2(x[0], x[1]), to_bf16x2(x[2], x[3]), to_bf16x2(x[4], x[5]), to_bf16x2(x[6], x[7]));
}

__device__ __forceinline__ void finish_expert_rows(const Cta& cta, Phase phase, int l) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const bool is_input = phase == Phase::kMoeIn, quantized = sizes.quantized && cta.has_nvfp4(l);
  if (!is_input && !quantized) return;
  const int width = is_input ? sizes.moe_hidden : sizes.moe_intermediate, column = 8 * cta.thread;
  const int items = is_input ? sizes.rows : sizes.rows * sizes.top_k;
  const bool wanted = column < width;
#pragma unroll 1
  for (int item = 0; item < items; ++item) {
    // Hidden rows are anybody's.
    if (is_input ? !owns_row(cta, item) : item % cta.count != cta.index) continue;
    float x[8] = {};
    if (is_input) {
      const uint4* row = reinterpret_cast<const uint4*>(cta.own<uint32_t>(buffers.pooled) + item * width + column);
      const uint4* const from[2] = {row, row + 1};
      const int at[2] = {0, 0}, end[2] = {wanted, wanted};
      uint4 words[2];
      receive(cta.waiting, from, at, end, words);
      const float4 low = to_floats(words[0]), high = to_floats(words[1]);
      const float factor = rms_factor(cta, squares(low) + squares(high), width, sizes.rms_eps, 0);
      if (wanted) {
        const float* scale = cta.vector(l, &LayerOffsets::pre_expert_norm) + column;
        const uint2 first = to_bf16x4(low * factor * load4(scale)),
                    second = to_bf16x4(high * factor * load4(scale + 4));
        unpack(make_uint4(first.x, first.y, second.x, second.y), x);
      }
    } else {
      const uint16_t* row = cta.own<uint16_t>(buffers.hidden) + item * width + column;
      unpack(receive(cta.waiting, reinterpret_cast<const uint4*>(row), wanted), x);
    }
    if (quantized) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
      const RowScale row = RowScale::create(reduce_over_consumers<true>(cta, amax, 1));
      quantize_eight(row, x);
      if (cta.thread == 0)
        store_relaxed(cta.own<uint32_t>(is_input ? buffers.moe_scale : buffers.hidden_scale) + item,
                      word_of(row.scale));
    }
    uint16_t* to = cta.own<uint16_t>(is_input ? buffers.moe_in : buffers.hidden_decoded) + item * width + column;
    if (wanted) store_relaxed(reinterpret_cast<uint4*>(to), pack(x));
    consumer_barrier();  // before the sums of the next row
  }
}

// ---- combine: post-expert norm of each routed row, weighted sum -----------------------------------------------------

__device__ __forceinline__ void combine(const Cta& cta, int l) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const int width = sizes.moe_hidden, column = 8 * cta.thread;
  const bool there = column < width;
  // This thread's columns of each routed row, for the second pass over them.
  uint4* kept = reinterpret_cast<uint4*>(cta.shared.partial) + cta.thread;
  static_assert(kMaxTopK * kConsumers * sizeof(uint4) <= sizeof(SharedStorage::partial), "the routed rows of a row");
  MUSE_FOR_OWN_ROWS(number) {
    consumer_barrier();  // what lay there has been read, as have the sums of the row before
    const uint4* from[kMaxTopK];
    int at[kMaxTopK], end[kMaxTopK];
    uint4 words[kMaxTopK];
#pragma unroll
    for (int k = 0; k < kMaxTopK; ++k) {
      from[k] =
          reinterpret_cast<const uint4*>(cta.own<uint16_t>(buffers.down) + (number * sizes.top_k + k) * width + column);
      at[k] = k;
      end[k] = there ? sizes.top_k : 0;
    }
    receive(cta.waiting, from, at, end, words);
    float scale[8] = {}, sums[kMaxTopK] = {}, mixed[8] = {};
    if (there) {
      const float* norm = cta.vector(l, &LayerOffsets::post_expert_norm) + column;
      const float4 low = load4(norm), high = load4(norm + 4);
      scale[0] = low.x, scale[1] = low.y, scale[2] = low.z, scale[3] = low.w;
      scale[4] = high.x, scale[5] = high.y, scale[6] = high.z, scale[7] = high.w;
    }
#pragma unroll
    for (int k = 0; k < kMaxTopK; ++k) {
      float x[8];
      unpack(words[k], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[k] += x[i] * scale[i] * (x[i] * scale[i]);
      kept[k * kConsumers] = words[k];
    }
    const int its = cta.lane / 4;  // the routed row whose sum this lane gets
    const float of_warp = sum_eight_over_warp(cta, sums);
    if (cta.lane % 4 == 0) cta.shared.reduced[0][its][cta.warp] = of_warp;
    consumer_barrier();
    const float sum = sum_of_reduced(cta, 0, its);
    const float factor = rsqrtf(divide(sum, static_cast<float>(width)) + sizes.post_eps);
#pragma unroll 1
    for (int k = 0; k < sizes.top_k; ++k) {
      const float its_factor = __shfl_sync(0xffffffffu, factor, 4 * k), weight = cta.shared.experts.weights[number][k];
      float x[8];
      unpack(kept[k * kConsumers], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[i] += x[i] * scale[i] * its_factor * weight;
    }
    uint16_t* to = cta.own<uint16_t>(buffers.mixed) + number * width + column;
    if (there) store_relaxed(reinterpret_cast<uint4*>(to), pack(mixed));
  }
}

}  // namespace muse
