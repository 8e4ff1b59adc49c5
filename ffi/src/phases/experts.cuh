// The routed experts: gate_up with SwiGLU, then down, each for all rows of the step that chose an expert. Outputs go to
// every rank as they are finished, so both gathers are part of the GEMMs' epilogues.
#pragma once

#include "projections.cuh"

namespace muse {

// ---- Which experts: built by the producer's warp, as the addresses of their weights wait for it ---------------------

__device__ __forceinline__ void build_experts(const Cta& cta, int l) {
  SharedStorage& shared = cta.shared;
  const Sizes& sizes = cta.sizes();
  Experts& experts = shared.experts;
  constexpr int kWords = kMaxExperts / 32;
  if (cta.lane < kWords) shared.chosen[cta.lane] = 0;
#pragma unroll 1
  for (int i = cta.lane; i < static_cast<int>(sizeof(experts.slot_of) / sizeof(uint4)); i += 32)
    reinterpret_cast<uint4*>(experts.slot_of)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  __syncwarp();
  // Lane i has choice i % 8 of rows i / 8, i / 8 + 4, and so on.
  constexpr int kEach = kMaxRows * kMaxTopK / 32, kRowsApart = 32 / kMaxTopK;
  const uint2* routing = cta.own<uint2>(cta.launch.buffers.routing) + cta.lane;
  const int slot = cta.lane % kMaxTopK, first_row = cta.lane / kMaxTopK;
  const uint2* from[kEach];
  int at_row[kEach], end[kEach];
  uint2 choice[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    from[i] = routing + 32 * i;
    at_row[i] = kRowsApart * i;
    end[i] = slot < sizes.top_k ? sizes.rows - first_row : 0;
  }
  receive(cta.waiting, from, at_row, end, choice);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    choice[i].x = min(choice[i].x, static_cast<uint32_t>(sizes.experts - 1));  // whatever comes after an abort
    if (at_row[i] < end[i]) atomicOr(&shared.chosen[choice[i].x / 32], 1u << choice[i].x % 32);
  }
  __syncwarp();
  // Lane i has word i of the chosen experts, and how many there are before it.
  const uint32_t word = cta.lane < kWords ? shared.chosen[cta.lane] : 0;
  int before = __popc(word);
#pragma unroll
  for (int i = 1; i < kWords; i *= 2) {
    const int of_others = __shfl_sync(0xffffffffu, before, max(cta.lane - i, 0));
    if (cta.lane >= i) before += of_others;
  }
  const int count = __shfl_sync(0xffffffffu, before, kWords - 1);
  before -= __popc(word);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int id = static_cast<int>(choice[i].x);
    const uint32_t its_word = __shfl_sync(0xffffffffu, word, id / 32);
    const int at = __shfl_sync(0xffffffffu, before, id / 32) + __popc(its_word & ((1u << id % 32) - 1));
    if (at_row[i] >= end[i]) continue;
    experts.ids[at] = static_cast<uint8_t>(id);
    experts.slot_of[at][first_row + kRowsApart * i] = static_cast<int8_t>(slot);
    experts.weights[first_row + kRowsApart * i][slot] = __uint_as_float(choice[i].y);
  }
  if (cta.lane == 0) experts.count = count;
  __syncwarp();
  const float *gate_up = cta.vector(l, &LayerOffsets::gate_up_scale), *down = cta.vector(l, &LayerOffsets::down_scale);
#pragma unroll 1
  for (int i = cta.lane; i < count; i += 32) {
    const int id = experts.ids[i];
    experts.scales[i][0] = gate_up[2 * id];
    experts.scales[i][1] = gate_up[2 * id + 1];
    experts.scales[i][2] = down[id];
  }
  __syncwarp();
}

// ---- NVFP4 of activations -------------------------------------------------------------------------------------------
// Operation for operation muse_jax.nvfp4.quantize_rows, so that the bits are the same.

struct RowScale {
  float scale, encode;
  __device__ static RowScale create(float amax) {
    const float scale = amax < 0x1p-100f ? 0.0f : __fmul_rn(amax, 1.0f / (6.0f * 448.0f));
    return {scale, __frcp_rn(scale == 0.0f ? 1.0f : scale)};
  }
};

__device__ __forceinline__ float nearest_e4m3(float x) {
  const float power = __uint_as_float(__float_as_uint(x) & 0x7f800000u);  // of two, at most x
  const float step = fmaxf(power, 0x1p-6f) * 0x1p-3f;
  return __fmul_rn(rintf(__fmul_rn(x, __uint_as_float((254u << 23) - __float_as_uint(step)))), step);
}

// The value, 0 to 6 with sign, that e2m1 makes of x; ties to the even code.
__device__ __forceinline__ float nearest_e2m1(float x) {
  const float a = fabsf(x);
  const float code = fminf(fminf(fminf(rintf(2.0f * a), rintf(a) + 2.0f), rintf(a * 0.5f) + 4.0f), 7.0f);
  return copysignf(fmaxf(fmaxf(0.5f * code, code - 2.0f), 2.0f * code - 8.0f), x);
}

// Eight values of a block of 16, of which the neighbouring lane has the others: quantised, and decoded without the
// row's scale.
__device__ __forceinline__ void quantize_eight(const RowScale& row, float (&x)[8]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  const float scale = nearest_e4m3(fminf(__fmul_rn(row.encode, __fmul_rn(amax, 1.0f / 6.0f)), 448.0f));
  const float reciprocal = __frcp_rn(__fmul_rn(scale == 0.0f ? 1.0f : scale, __frcp_rn(row.encode)));
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = scale == 0.0f ? 0.0f : nearest_e2m1(__fmul_rn(x[i], reciprocal)) * scale;
}

}  // namespace muse
