// Dense projections whose sums over K several CTAs share: o_proj, router, pre_expert_proj, post_expert_proj, qkv.
// Whoever has a unit publishes its partial sum; whoever finishes a tile adds the parts up in order, rounds, and sends
// the result on.
#pragma once

#include <cfloat>

#include "matrices.cuh"

namespace muse {

// ---- Finished tiles: thread (warp, lane) has row `warp`, columns 2 lane and 2 lane + 1 ------------------------------

// A pair of columns of [rows][width] to every rank: this rank's piece begins at column piece * columns.
__device__ __forceinline__ void send_pair(const Cta& cta, uint32_t buffer, int width, int columns, int column,
                                          float2 pair) {
#pragma unroll 1
  for (int p = 0; p < cta.sizes().ranks; ++p) {
    const int at = cta.piece_at(p) * columns + column;
    if (at >= width) continue;  // of the last tile
    uint32_t* to = cta.of_peer<uint32_t>(p, buffer) + cta.warp * width + at;
    store_relaxed(reinterpret_cast<uint2*>(to), make_uint2(word_of(pair.x), word_of(pair.y)));
  }
}

// A head of q, k, v or gate: norm and RoPE of q and k, one rounding. x: rounded.
__device__ __forceinline__ void finish_head(const Cta& cta, int l, int item, float2 x) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const Layer& layer = cta.layer(l);
  const int heads = cta.of_rank().heads, kv_heads = cta.of_rank().kv_heads, head_dim = sizes.head_dim,
            half = head_dim / 2;
  const int row = cta.warp, column = 2 * cta.lane;
  const bool is_q = item < heads, is_k = !is_q && item < heads + kv_heads, is_gate = item >= heads + 2 * kv_heads;
  if (is_q || is_k) {
    const float mean = divide(sum_over_warp(x.x * x.x + x.y * x.y), static_cast<float>(head_dim));
    const float factor = rsqrtf(mean + sizes.rms_eps);
    x.x *= factor;
    x.y *= factor;
    if (layer.flags & kRopeFlag) {
      float* values = &cta.shared.partial[0][cta.warp][0][0];  // this warp's own
      __syncwarp();
      values[column] = x.x;
      values[column + 1] = x.y;
      __syncwarp();
      if (column < head_dim) {
        float rotated[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool first = column + i < half;
          const int pair = first ? column + i : column + i - half;
          const float cosine = cta.launch.rope[row * half + pair],
                      sine = cta.launch.rope[(sizes.rows + row) * half + pair];
          const float other = values[first ? column + i + half : pair];
          rotated[i] = __fadd_rn(__fmul_rn(i ? x.y : x.x, cosine), __fmul_rn(first ? -other : other, sine));
        }
        x = make_float2(rotated[0], rotated[1]);
      }
    }
  }
  const uint32_t word = to_bf16x2(x.x, x.y);  // zero beyond head_dim
  uint32_t to = 0;
  int at = 0;
  if (is_q || is_gate) {
    to = is_q ? buffers.q : buffers.gate;
    at = (row * heads + (is_q ? item : item - heads - 2 * kv_heads)) * kHead;
  } else {
    const int head = is_k ? item - heads : item - heads - kv_heads;
    to = is_k ? buffers.k : buffers.v;
    at = (head * kMaxRows + row) * kHead;
    uint16_t* result = (is_k ? layer.new_keys : layer.new_values) +
                       ((cta.here * kv_heads + head) * sizes.rows + row) * head_dim + column;
    if (column < head_dim) *reinterpret_cast<uint32_t*>(result) = word;
  }
  store_relaxed(reinterpret_cast<uint32_t*>(cta.own<uint16_t>(to) + at + column), word);
}

// Tiles that this CTA finishes are every count-th.
__device__ __forceinline__ void finish_tiles(const Cta& cta, Phase phase, int l) {
  const RankSizes& of_rank = cta.of_rank();
  const Buffers& buffers = cta.launch.buffers;
  const Geometry& geometry = cta.geometry(l, matrix_of(phase));
  const bool is_o = phase == Phase::kOSum;
  const int parts = is_o ? kNumParts : geometry.slices, tiles = is_o ? of_rank.own_column_tiles : geometry.row_tiles;
  const float* partial = cta.own<float>(geometry.partial) + cta.warp * kTileRows + 2 * cta.lane;
  const bool wanted = cta.warp < cta.sizes().rows;
#pragma unroll 1
  for (int tile = cta.index; tile < tiles; tile += cta.count) {
    if (is_o && tile * cta.sizes().ranks + cta.rank >= of_rank.column_tiles) break;
    float2 sum = sum_of_parts(cta, partial + tile * kMaxRows * kTileRows, parts, tiles * kMaxRows * kTileRows, wanted);
    if (!wanted) continue;
    const int column = tile * kTileRows + 2 * cta.lane;
    if (is_o) {
      send_pair(cta, buffers.o_sum, cta.sizes().hidden, kTileRows,
                (tile << of_rank.log2_ranks) * kTileRows + 2 * cta.lane, sum);
      continue;
    }
    sum.x = round_bf16(sum.x);
    sum.y = round_bf16(sum.y);
    if (phase == Phase::kHeads) finish_head(cta, l, tile, sum);
    else if (column < geometry.rows) {
      const bool is_pooled = phase == Phase::kPooled;
      send_pair(cta, is_pooled ? buffers.pooled : buffers.branch,
                is_pooled ? cta.sizes().moe_hidden : cta.sizes().hidden, geometry.rows, column, sum);
    }
  }
}

// ---- The router's choice --------------------------------------------------------------------------------------------
// Sigmoid, bias and the best top_k of a row, ties to the lowest id; the weights are those of the chosen, without bias.
// One warp, with the scores in shared memory.
__device__ __forceinline__ void choose_experts(const Cta& cta, int l, int row) {
  const Sizes& sizes = cta.sizes();
  const float* bias = cta.vector(l, &LayerOffsets::router_bias);
  constexpr int kEach = kMaxExperts / 32;
  float key[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = cta.lane + 32 * i;
    // The choice has to be one of different experts, whatever the scores are.
    key[i] = e < sizes.experts ? fmaxf(cta.shared.scores[e] + bias[e], -FLT_MAX) : -INFINITY;
  }
  int chosen = 0;  // of lane i: the i-th choice
  float weight = 0.0f, total = 0.0f;
#pragma unroll 1
  for (int choice = 0; choice < sizes.top_k; ++choice) {
    float best = -INFINITY;
    int id = kMaxExperts - 1;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (key[i] > best) best = key[i], id = cta.lane + 32 * i;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, i);
      const int other_id = __shfl_xor_sync(0xffffffffu, id, i);
      if (other > best || (other == best && other_id < id)) best = other, id = other_id;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (cta.lane + 32 * i == id) key[i] = -INFINITY;
    }
    const float score = cta.shared.scores[id];
    if (cta.lane == choice) chosen = id, weight = score;
    total += score;
  }
  weight = weight / (total + 1e-15f) * sizes.routed_scaling;
  if (cta.lane >= sizes.top_k) return;
  if (cta.launch.forced_idx != nullptr) {
    const int at = (l * sizes.rows + row) * sizes.top_k + cta.lane;
    chosen = min(max(cta.launch.forced_idx[at], 0), sizes.experts - 1);
    weight = cta.launch.forced_weights[at] + 0.0f * weight;
  }
  store_relaxed(cta.own<uint2>(cta.launch.buffers.routing) + row * kMaxTopK + cta.lane,
                make_uint2(static_cast<uint32_t>(chosen), word_of(weight)));
}

__device__ __forceinline__ void finish_router(const Cta& cta, int l) {
  const Sizes& sizes = cta.sizes();
  const Geometry& geometry = cta.geometry(l, MatrixId::kRouter);
  const int expert = 2 * cta.thread, tile = expert / kTileRows;
  static_assert(kMaxExperts <= 2 * kConsumers, "a thread for each pair of experts");
#pragma unroll 1
  for (int row = 0; row < sizes.rows; ++row) {
    if (!owns_row(cta, row)) continue;
    const float* from =
        cta.own<float>(cta.launch.buffers.router_partial) + (tile * kMaxRows + row) * kTileRows + expert % kTileRows;
    const bool wanted = tile < geometry.row_tiles;
    const float2 logit = sum_of_parts(cta, from, geometry.slices, geometry.row_tiles * kMaxRows * kTileRows, wanted);
    if (expert < sizes.experts) cta.shared.scores[expert] = 1.0f / (1.0f + expf(-(logit.x * sizes.output_multiplier)));
    if (expert + 1 < sizes.experts)
      cta.shared.scores[expert + 1] = 1.0f / (1.0f + expf(-(logit.y * sizes.output_multiplier)));
    consumer_barrier();
    if (cta.warp == 0) choose_experts(cta, l, row);
    consumer_barrier();  // before scores are written again
  }
}

}  // namespace muse
