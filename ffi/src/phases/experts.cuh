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
  for (int i = cta.lane; i < kMaxRows * kMaxTopK * kMaxRows / 4; i += 32)
    reinterpret_cast<uint32_t*>(experts.slot_of)[i] = 0xffffffffu;
  __syncwarp();
  const uint2* routing = cta.own<uint2>(cta.launch.buffers.routing);
  constexpr int kEach = kMaxRows * kMaxTopK / 32;
  const uint2* from[kEach];
  bool wanted[kEach];
  uint2 choice[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = cta.lane + 32 * i;
    from[i] = routing + at;
    wanted[i] = at / kMaxTopK < sizes.rows && at % kMaxTopK < sizes.top_k;
  }
  receive(cta.waiting, from, wanted, choice);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    choice[i].x = min(choice[i].x, static_cast<uint32_t>(sizes.experts - 1));  // whatever comes after an abort
    if (wanted[i]) atomicOr(&shared.chosen[choice[i].x / 32], 1u << choice[i].x % 32);
  }
  __syncwarp();
  int before[kWords + 1] = {};
#pragma unroll
  for (int i = 0; i < kWords; ++i) before[i + 1] = before[i] + __popc(shared.chosen[i]);
  auto place = [&](uint32_t id) {
    int at = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) at = static_cast<int>(id) / 32 == i ? before[i] : at;
    return at + __popc(shared.chosen[id / 32] & ((1u << id % 32) - 1));
  };
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!wanted[i]) continue;
    const int row = (cta.lane + 32 * i) / kMaxTopK, slot = (cta.lane + 32 * i) % kMaxTopK, at = place(choice[i].x);
    experts.ids[at] = static_cast<uint8_t>(choice[i].x);
    experts.slot_of[at][row] = static_cast<int8_t>(slot);
    experts.weights[row][slot] = __uint_as_float(choice[i].y);
  }
  if (cta.lane == 0) experts.count = before[kWords];
  __syncwarp();
  const float *gate_up = cta.vector(l, &LayerOffsets::gate_up_scale), *down = cta.vector(l, &LayerOffsets::down_scale);
#pragma unroll 1
  for (int i = cta.lane; i < experts.count; i += 32) {
    const int id = experts.ids[i];
    experts.scales[i][0] = gate_up[2 * id];
    experts.scales[i][1] = gate_up[2 * id + 1];
    experts.scales[i][2] = down[id];
  }
  __syncwarp();
}

// ---- Which matrices -------------------------------------------------------------------------------------------------
// The experts' matrices of a layer, of expert 0, and how CTAs are turned; lm_head is a stack of one.
struct Stack {
  Matrix matrix;
  int shift, count;
};

__device__ __forceinline__ Stack stack_of(const Cta& cta, Phase phase, int l) {
  if (phase == Phase::kLmHead)
    return {{cta.launch.head + cta.here * cta.launch.head_bytes, cta.geometry(MatrixId::kHead)}, 0, 1};
  const bool nvfp4 = cta.layer(l).flags & kNvfp4Flag, is_down = phase == Phase::kExpertDown;
  const MatrixId id = is_down ? (nvfp4 ? MatrixId::kDownNvfp4 : MatrixId::kDown)
                      : nvfp4 ? MatrixId::kGateUpNvfp4
                              : MatrixId::kGateUp;
  const uint8_t* tiles = cta.weights(l) + (is_down ? cta.offsets(l).down : cta.offsets(l).gate_up);
  return {{tiles, cta.geometry(id)}, is_down ? 71 : 11, cta.shared.experts.count};
}

__device__ __forceinline__ void load_stack(const Cta& cta, Producer& producer, Phase phase, int l) {
  const Stack stack = stack_of(cta, phase, l);
  const Geometry& geometry = stack.matrix.geometry;
  const Share share = share_of(cta, stack.count * geometry.row_tiles, stack.shift);
  Unit unit = Unit::create(geometry, share.begin);
#pragma unroll 1
  for (int i = share.begin; i < share.end; ++i, unit.advance(geometry)) {
    const Matrix matrix = stack.matrix.of_expert(phase == Phase::kLmHead ? 0 : cta.shared.experts.ids[unit.part]);
#pragma unroll 1
    for (int slice = 0; slice < geometry.slices; ++slice) load_slice(producer, matrix, unit.row_tile, slice);
  }
}

// ---- gate_up, down and lm_head --------------------------------------------------------------------------------------
//   gate_up  moe_in [rows, M] -> hidden [rows x top_k, F / R] = silu(gate) up, to every rank
//   down     hidden [rows x top_k, F] -> [rows x top_k, M / R], to every rank
//   lm_head  next_in [rows, D] -> logits [rows, V / R]

// Two bf16 numbers of a routed row to every rank. width: of the whole row; columns: of a rank's piece.
__device__ __forceinline__ void send_routed(const Cta& cta, uint32_t buffer, int pair, int width, int columns,
                                            int column, uint32_t word) {
#pragma unroll 1
  for (int p = 0; p < cta.sizes().ranks; ++p) {
    uint16_t* to = cta.of_peer<uint16_t>(p, buffer) + pair * width + cta.piece_at(p) * columns + column;
    store_relaxed(reinterpret_cast<uint32_t*>(to), word);
  }
}

template <Kind kKind>
__device__ __forceinline__ void run_stack(const Cta& cta, Consumer& consumer, Phase phase, int l) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const Experts& experts = cta.shared.experts;
  const Stack stack = stack_of(cta, phase, l);
  const Geometry& geometry = stack.matrix.geometry;
  const bool is_head = kKind == Kind::kBf16 && phase == Phase::kLmHead, is_down = phase == Phase::kExpertDown;
  const bool quantized = kKind == Kind::kNvfp4 && sizes.quantized;
  const int row = cta.warp;
  const int width = is_head ? sizes.hidden : is_down ? sizes.moe_intermediate : sizes.moe_hidden;
  const uint16_t* x = cta.own<uint16_t>(is_head     ? buffers.next_in
                                        : !is_down  ? buffers.moe_in
                                        : quantized ? buffers.hidden_decoded
                                                    : buffers.hidden);
  const uint32_t* row_scales = cta.own<uint32_t>(is_down ? buffers.hidden_scale : buffers.moe_scale);
  const Share share = share_of(cta, stack.count * geometry.row_tiles, stack.shift);
  Unit unit = Unit::create(geometry, share.begin);
  const auto epilogue = [&](int column, float sum) {
    const int at = unit.row_tile * kTileRows + column;
    if (is_head) {
      if (row >= sizes.rows || at >= geometry.rows) return;
      const float logit = sizes.softcap * tanhf(divide(sum * sizes.output_multiplier, sizes.softcap));
      cta.launch.logits[(static_cast<size_t>(cta.here) * sizes.rows + row) * geometry.rows + at] = logit;
      return;
    }
    const int slot = experts.slot_of[unit.part][row], pair = row * sizes.top_k + max(slot, 0);
    float scale = kKind == Kind::kNvfp4 ? kDecodedScale : 1.0f;
    if (quantized && slot >= 0) scale *= __uint_as_float(receive(cta.waiting, row_scales + (is_down ? pair : row)));
    // Of gate_up even columns are gates and odd ones ups: four lanes have a word of two values, of down two lanes have
    // one.
    const float* of_matrix = experts.scales[unit.part];
    float value = sum * (scale * of_matrix[is_down ? 2 : 0]);
    const float neighbour = __shfl_down_sync(0xffffffffu, is_down ? value : sum * (scale * of_matrix[1]), 1);
    if (!is_down) value *= sigmoid(value) * neighbour;
    const float next = is_down ? neighbour : __shfl_down_sync(0xffffffffu, value, 2);
    if (cta.lane % (is_down ? 2 : 4) != 0 || slot < 0 || at >= geometry.rows) return;
    if (is_down) send_routed(cta, buffers.down, pair, sizes.moe_hidden, geometry.rows, at, to_bf16x2(value, next));
    else
      send_routed(cta, buffers.hidden, pair, sizes.moe_intermediate, geometry.rows / 2, at / 2, to_bf16x2(value, next));
  };
  int i = share.begin;
#pragma unroll 1
  while (i < share.end) {
    // Rows of the step, or, of `hidden`, those that chose the expert. They change with the expert at most.
    const int at = unit.part;
    const uint16_t* rows[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int its_row = cta.lane / 4 + 8 * j, its_slot = is_down ? experts.slot_of[at][its_row] : 0;
      const bool there = its_row < sizes.rows && its_slot >= 0;
      rows[j] = there ? x + (is_down ? its_row * sizes.top_k + its_slot : its_row) * width : nullptr;
    }
    if constexpr (kKind == Kind::kNvfp4) {
      // All of K is one slice.
      Fragments<kKind> fragments = {};
      if (cta.warp < geometry.k_tiles) load_fragments(cta, rows, cta.warp * tile_k(kKind), width, fragments);
#pragma unroll 1
      do {
        run_unit(cta, consumer, stack.matrix.of_expert(experts.ids[unit.part]), 0, fragments, epilogue);
        unit.advance(geometry);
      } while (++i < share.end && !(is_down && unit.part != at));
    } else {
      const Matrix matrix = stack.matrix.of_expert(is_head ? 0 : experts.ids[at]);
      run_row_tile(
          cta, consumer, matrix,
          [&](int slice, Fragments<Kind::kBf16>& to) {
            if (cta.warp < matrix.tiles_in(slice))
              load_fragments(cta, rows, (slice * geometry.slice_tiles + cta.warp) * tile_k(kKind), width, to);
          },
          epilogue);
      unit.advance(geometry);
      ++i;
    }
  }
}

// ---- NVFP4 of activations -------------------------------------------------------------------------------------------
// ------------------------------------------------------------------------------------------------------ Operation for
// operation muse_jax.nvfp4.quantize_rows, so that the bits are the same.

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
