// The phases that read weights: o_proj, router, pre_expert_proj, gate_up, down, post_expert_proj, qkv, lm_head.
//
// Of a projection a unit is a slice of a row tile: its partial sums are published, and added up by whoever finishes the
// tile. Of experts and of lm_head a unit is a row tile with all of its K, so its sums are finished here:
//   gate_up  moe_in [rows, M] -> hidden [rows x top_k, F / R] = silu(gate) up, to every rank
//   down     hidden [rows x top_k, F] -> [rows x top_k, M / R], to every rank
//   lm_head  next_in [rows, D] -> logits [rows, V / R]
#pragma once

#include "../gemm.cuh"

namespace muse {

__device__ __forceinline__ MatrixId matrix_of(Phase phase) {
  switch (phase) {
    case Phase::kOProj:
    case Phase::kOSum: return MatrixId::kO;
    case Phase::kRouter: return MatrixId::kRouter;
    case Phase::kPreExpertProj:
    case Phase::kPooled: return MatrixId::kPre;
    case Phase::kExpertGateUp: return MatrixId::kGateUp;
    case Phase::kExpertDown: return MatrixId::kDown;
    case Phase::kPostExpertProj:
    case Phase::kBranch: return MatrixId::kPost;
    case Phase::kLmHead: return MatrixId::kHead;
    default: return MatrixId::kQkv;
  }
}

// A phase's matrix, or the stack of the experts', and this CTA's units of it.
struct Work {
  const uint8_t* tiles;  // of the first matrix
  const Geometry& geometry;
  bool is_head, is_experts;
  Kind kind;
  Share share;

  __device__ static Work create(const Cta& cta, Phase phase, int l) {
    const int of_layer = phase == Phase::kQkv ? l + 1 : l;
    const Geometry& geometry = cta.geometry(of_layer, matrix_of(phase));
    const bool is_head = phase == Phase::kLmHead,
               is_experts = phase == Phase::kExpertGateUp || phase == Phase::kExpertDown;
    const uint8_t* weights = is_head ? cta.launch.head + cta.here * cta.launch.head_bytes : cta.weights(of_layer);
    const Kind kind = phase == Phase::kRouter                 ? Kind::kFp32
                      : is_experts && cta.has_nvfp4(of_layer) ? Kind::kNvfp4
                                                              : Kind::kBf16;
    const int parts = is_head ? 1 : is_experts ? cta.shared.experts.count : geometry.slices;
    return {weights + geometry.offset,
            geometry,
            is_head,
            is_experts,
            kind,
            share_of(cta, parts * geometry.row_tiles, geometry.shift)};
  }
  __device__ bool is_sliced() const { return !is_head && !is_experts; }
  __device__ int tiles_in(int slice) const {
    return min(geometry.slice_tiles, geometry.k_tiles - slice * geometry.slice_tiles);
  }
};

// ---- The producer's side --------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(const Cta& cta, Producer& producer, Phase phase, int l) {
  const Work work = Work::create(cta, phase, l);
  const Geometry& geometry = work.geometry;
  Unit unit = Unit::create(geometry, work.share.begin);
#pragma unroll 1
  for (int i = work.share.begin; i < work.share.end; ++i, unit.advance(geometry)) {
    const int matrix = work.is_experts ? cta.shared.experts.ids[unit.part] : 0;
    int at = (matrix * geometry.row_tiles + unit.row_tile) * geometry.k_tiles, tiles = geometry.k_tiles;
    if (work.is_sliced()) {
      at += unit.part * geometry.slice_tiles;
      tiles = work.tiles_in(unit.part);
    }
    const uint8_t* from = work.tiles + static_cast<size_t>(at) * geometry.tile_bytes;
#pragma unroll 1
    for (; tiles > 0; tiles -= kTilesPerStage) {
      const int bytes = min(tiles, kTilesPerStage) * geometry.tile_bytes;
      producer.load(from, bytes);
      from += bytes;
    }
  }
}

// ---- What becomes of a sum, of row `warp` of the step ---------------------------------------------------------------

// [parts][row tiles][rows][64]. Those of o_proj go to the rank that adds up the tile: t % ranks for tile t; of its
// eight parts each rank has 8 / ranks. Results of qkv belong to the next round.
__device__ __forceinline__ void publish_partial_sum(const Cta& cta, const Geometry& geometry, Phase phase,
                                                    const Unit& unit, int column, float sum) {
  if (cta.warp >= cta.sizes().rows) return;
  const RankSizes& of_rank = cta.of_rank();
  const bool travels = phase == Phase::kOProj, next = phase == Phase::kQkv;
  int owner = cta.rank, number = unit.row_tile, tiles = geometry.row_tiles;
  // In loopback the sums for other ranks take the place of those from them, the last also of what is missing.
  bool fills = false;
  if (travels) {
    owner = number & (cta.sizes().ranks - 1);
    fills = cta.sizes().loopback && number + 1 == of_rank.column_tiles;
    number >>= of_rank.log2_ranks;
    tiles = of_rank.own_column_tiles;
  }
#pragma unroll 1
  do {
    const int part = unit.part + (travels ? cta.piece_at(owner) * of_rank.parts_of_sum : 0);
    uint32_t* to = cta.of_peer<uint32_t>(owner, geometry.partial, next);
    store_relaxed(to + ((part * tiles + number) * kMaxRows + cta.warp) * kTileRows + column, word_of(sum));
  } while (fills && ++owner < cta.sizes().ranks);
}

__device__ __forceinline__ void finish_logit(const Cta& cta, const Geometry& geometry, int column, float sum) {
  const Sizes& sizes = cta.sizes();
  if (cta.warp >= sizes.rows || column >= geometry.rows) return;
  const float logit = sizes.softcap * tanhf(divide(sum * sizes.output_multiplier, sizes.softcap));
  cta.launch.logits[(static_cast<size_t>(cta.here) * sizes.rows + cta.warp) * geometry.rows + column] = logit;
}

// SwiGLU of gate_up, scales; two bf16 numbers of a routed row to every rank. column: of the matrix.
__device__ __forceinline__ void finish_routed(const Cta& cta, const Geometry& geometry, int l, Phase phase, int part,
                                              int column, float sum) {
  const bool is_down = phase == Phase::kExpertDown, nvfp4 = cta.has_nvfp4(l);
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const Experts& experts = cta.shared.experts;
  const int row = cta.warp, slot = experts.slot_of[part][row], pair = row * sizes.top_k + max(slot, 0);
  float scale = nvfp4 ? kDecodedScale : 1.0f;
  if (nvfp4 && sizes.quantized) {
    const uint32_t* row_scale = cta.own<uint32_t>(is_down ? buffers.hidden_scale : buffers.moe_scale);
    const uint32_t its = receive(cta.waiting, row_scale + (is_down ? pair : row), slot >= 0);
    scale *= __uint_as_float(its);
  }
  // Of gate_up even columns are gates and odd ones ups: a word of two values is that of four lanes, of down that of
  // two lanes.
  const float* of_matrix = experts.scales[part];
  float value = sum * (scale * of_matrix[is_down ? 2 : 0]);
  const float neighbour = __shfl_down_sync(0xffffffffu, is_down ? value : sum * (scale * of_matrix[1]), 1);
  if (!is_down) value *= sigmoid(value) * neighbour;
  const float next = is_down ? neighbour : __shfl_down_sync(0xffffffffu, value, 2);
  if (cta.lane % (is_down ? 2 : 4) != 0 || slot < 0 || column >= geometry.rows) return;
  const uint32_t buffer = is_down ? buffers.down : buffers.hidden, word = to_bf16x2(value, next);
  const int width = is_down ? sizes.moe_hidden : sizes.moe_intermediate, halve = is_down ? 0 : 1;
  const int columns = geometry.rows >> halve, at = pair * width + (column >> halve);
#pragma unroll 1
  for (int p = 0; p < sizes.ranks; ++p)
    store_relaxed(reinterpret_cast<uint32_t*>(cta.of_peer<uint16_t>(p, buffer) + at + cta.piece_at(p) * columns), word);
}

// column: of the row tile.
__device__ __forceinline__ void finish_sum(const Cta& of_phase, Phase phase, int l, const Unit& unit, int column,
                                           float sum) {
  const Cta cta = of_phase.forgetful();
  forget(l);
  const Geometry& geometry = cta.geometry(phase == Phase::kQkv ? l + 1 : l, matrix_of(phase));
  switch (phase) {
    case Phase::kLmHead: return finish_logit(cta, geometry, unit.row_tile * kTileRows + column, sum);
    case Phase::kExpertGateUp:
    case Phase::kExpertDown:
      return finish_routed(cta, geometry, l, phase, unit.part, unit.row_tile * kTileRows + column, sum);
    default: return publish_partial_sum(cta, geometry, phase, unit, column, sum);
  }
}

// ---- The consumers' side --------------------------------------------------------------------------------------------

// What a warp has in registers while units go by: of fp32 and NVFP4 matrices the activations of its tile's K. Those of
// bf16 take four places, the others are sums of all the unit's columns, each an accumulator of an MMA.
struct WarpTile {
  static constexpr int kSums = 4;
  uint4 x[steps_of(Kind::kNvfp4)];
};

// rows: as for load_fragments, of the activations that the unit multiplies.
__device__ __forceinline__ void rows_of_unit(const Cta& cta, const Geometry& geometry, bool is_down, int part,
                                             const uint16_t* (&rows)[2]) {
  const uint16_t* x = cta.own<uint16_t>(geometry.x);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = cta.lane / 4 + 8 * i, slot = is_down ? cta.shared.experts.slot_of[part][row] : 0;
    const bool there = row < cta.sizes().rows && slot >= 0;
    rows[i] = there ? x + (is_down ? row * cta.sizes().top_k + slot : row) * geometry.width : nullptr;
  }
}

__device__ __forceinline__ void run_matrices(const Cta& cta, Consumer& consumer, Phase phase, int l) {
  const Work work = Work::create(cta, phase, l);
  const Geometry& geometry = work.geometry;
  const bool is_down = phase == Phase::kExpertDown, is_bf16 = work.kind == Kind::kBf16;
  const int stage = cta.warp / kTilesPerStage;
  const uint32_t sums = sums_of_lane(cta);
  if (phase == Phase::kQkv) wait_for_round(cta, cta.round + 1);
  Unit unit = Unit::create(geometry, work.share.begin);
  WarpTile mine = {};
  int loaded = -1;  // the part whose activations are there
#pragma unroll 1
  for (int i = work.share.begin; i < work.share.end; ++i, unit.advance(geometry)) {
    const int first = work.is_sliced() ? unit.part : 0, end = work.is_sliced() ? first + 1 : geometry.slices;
    const int wanted = work.is_sliced() || is_down ? unit.part : 0;  // gate_up and lm_head have the same for all parts
    const int warps = work.tiles_in(first);                          // that have something to add up
    LaneTile tile = {};
#pragma unroll 1
    for (int slice = first; slice < end; ++slice) {  // of fp32 and NVFP4 there is one
      const int tiles = work.tiles_in(slice);
      if (cta.warp < tiles && (wanted != loaded || end - first > 1)) {
        const uint16_t* rows[2];
        const Cta now = cta.forgetful();
        rows_of_unit(now, geometry, is_down, unit.part, rows);
        const int k_tile = slice * geometry.slice_tiles + cta.warp;
        if (is_bf16) load_fragments<Kind::kBf16>(now, rows, k_tile * tile_k(Kind::kBf16), geometry.width, mine.x);
        else if (work.kind == Kind::kNvfp4)
          load_fragments<Kind::kNvfp4>(now, rows, k_tile * tile_k(Kind::kNvfp4), geometry.width, mine.x);
        else load_fragments_of_fp32(now, rows, k_tile * tile_k(Kind::kFp32), geometry.width, mine.x);
      }
      const bool has_stage = stage < divide_up(tiles, kTilesPerStage);
      if (has_stage)
        tile = LaneTile::create(cta, consumer.wait(cta, stage) + cta.warp % kTilesPerStage * geometry.tile_bytes);
      if (!is_bf16) break;
      if (cta.warp < tiles) {
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          float acc[2][4] = {};
          multiply_bf16(tile, g, mine.x, acc);
          uint4& to = mine.x[WarpTile::kSums + g];
          to.x = word_of(__uint_as_float(to.x) + (acc[0][0] + acc[1][0]));
          to.y = word_of(__uint_as_float(to.y) + (acc[0][1] + acc[1][1]));
          to.z = word_of(__uint_as_float(to.z) + (acc[0][2] + acc[1][2]));
          to.w = word_of(__uint_as_float(to.w) + (acc[0][3] + acc[1][3]));
        }
      }
      if (has_stage) consumer.release(cta, stage);
      consumer.next += divide_up(tiles, kTilesPerStage);
    }
    loaded = wanted;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (cta.warp < warps) {
        uint32_t to = sums + half * static_cast<uint32_t>(sizeof(SharedStorage::partial) / 2);
        if (is_bf16) {
#pragma unroll
          for (int g = 0; g < 8; ++g) {
            if (g / 4 == half) store_group(to, g % 4, mine.x[WarpTile::kSums + g]);
            if (half == 1) mine.x[WarpTile::kSums + g] = {};
          }
        } else {
          int g = 4 * half;
#pragma unroll 1
          do {
            float acc[2][4] = {};
            if (work.kind == Kind::kNvfp4) multiply_nvfp4(tile, g, mine.x, acc);
            else multiply_fp32(tile, g, mine.x, acc);
            store_group(to, g % 4, sum_of_chains(acc));
          } while (++g % 4 != 0);
        }
      }
      if (half == 1 && !is_bf16) {
        if (stage < divide_up(warps, kTilesPerStage)) consumer.release(cta, stage);
        consumer.next += divide_up(warps, kTilesPerStage);
      }
      const float sum = sum_of_warps(cta, half, warps);
      finish_sum(cta, phase, l, unit, half * kHalf + cta.lane, sum);
    }
  }
}

}  // namespace muse
