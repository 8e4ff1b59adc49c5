// Dense projections whose sums over K several CTAs share: o_proj, router, pre_expert_proj, post_expert_proj, qkv.
// Whoever has a unit publishes its partial sum; whoever finishes a tile adds the parts up in order, rounds, and sends
// the result on.
#pragma once

#include <cfloat>

#include "../gemm.cuh"

namespace muse {

// ---- Which matrix, and from where to where --------------------------------------------------------------------------

struct Projection {
  const uint8_t* tiles;
  MatrixId id;
  int shift;   // CTAs are turned by another step in each phase: who has a unit more in one has one less in another
  uint32_t x;  // the buffer of activations
  int width;   // and its columns
  uint32_t partial;  // the buffer of partial sums

  __device__ Matrix matrix(const Cta& cta) const { return {tiles, cta.geometry(id)}; }
};

// l: for qkv, the layer that begins with it, which is the next one.
__device__ __forceinline__ Projection projection_of(const Cta& cta, Phase phase, int l) {
  const Buffers& buffers = cta.launch.buffers;
  const uint8_t* weights = cta.weights(l);
  const LayerOffsets& offsets = cta.offsets(l);
  const int hidden = cta.sizes().hidden;
  if (phase == Phase::kOProj) {
    return {weights + offsets.o_proj,    MatrixId::kO,     0, buffers.attn_out,
            cta.of_rank().heads * kHead, buffers.o_partial};
  }
  if (phase == Phase::kRouter)
    return {weights + offsets.router, MatrixId::kRouter, 29, buffers.ffn_in, hidden, buffers.router_partial};
  if (phase == Phase::kPreExpertProj) {
    return {weights + offsets.pre_expert_proj, MatrixId::kPre, 93, buffers.ffn_in, hidden, buffers.pre_partial};
  }
  if (phase == Phase::kPostExpertProj) {
    return {weights + offsets.post_expert_proj,
            MatrixId::kPost,
            47,
            buffers.mixed,
            cta.sizes().moe_hidden,
            buffers.post_partial};
  }
  return {weights + offsets.qkv_gate, MatrixId::kQkv, 83, buffers.next_in, hidden, buffers.qkv_partial};
}

// ---- Partial sums ---------------------------------------------------------------------------------------------------
// [parts][row tiles][rows][64]. Those of o_proj go to the rank that adds up the tile: t % ranks for tile t; of its
// eight parts each rank has 8 / ranks. Results of qkv belong to the next round.

template <Kind kKind>
__device__ __forceinline__ void run_projection(const Cta& cta, Consumer& consumer, Phase phase, int l) {
  const Projection projection = projection_of(cta, phase, l);
  const RankSizes& of_rank = cta.of_rank();
  const Matrix matrix = projection.matrix(cta);
  const bool travels = phase == Phase::kOProj, next = phase == Phase::kQkv;
  if (next) wait_for_round(cta, cta.round + 1);
  const int tiles = travels ? of_rank.own_column_tiles : matrix.geometry.row_tiles;
  run_slices<kKind>(cta, consumer, matrix, projection.shift, cta.own<uint16_t>(projection.x), projection.width,
                    [&](int slice, int tile, int column, float sum) {
                      if (cta.warp >= cta.sizes().rows) return;
                      const auto store = [&](int rank, int part, int number) {
                        uint32_t* to = cta.of_peer<uint32_t>(rank, projection.partial, next);
                        store_relaxed(to + ((part * tiles + number) * kMaxRows + cta.warp) * kTileRows + column,
                                      word_of(sum));
                      };
                      if (!travels) return store(cta.rank, slice, tile);
                      int owner = tile & (cta.sizes().ranks - 1);
                      const int number = tile >> of_rank.log2_ranks;
                      // In loopback the sums for other ranks take the place of those from them, the last also of what
                      // is missing.
                      const bool fills = cta.sizes().loopback && tile + 1 == of_rank.column_tiles;
                      do {
                        store(owner, cta.piece_at(owner) * of_rank.parts_of_sum + slice, number);
                      } while (fills && ++owner < cta.sizes().ranks);
                    });
}

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
  const Projection projection = projection_of(cta,
                                              phase == Phase::kOSum     ? Phase::kOProj
                                              : phase == Phase::kPooled ? Phase::kPreExpertProj
                                              : phase == Phase::kBranch ? Phase::kPostExpertProj
                                                                        : Phase::kQkv,
                                              l);
  const Geometry& geometry = cta.geometry(projection.id);
  const bool is_o = phase == Phase::kOSum;
  const int parts = is_o ? kNumParts : geometry.slices, tiles = is_o ? of_rank.own_column_tiles : geometry.row_tiles;
  const float* partial = cta.own<float>(projection.partial) + cta.warp * kTileRows + 2 * cta.lane;
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
  const Geometry& geometry = cta.geometry(MatrixId::kRouter);
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
