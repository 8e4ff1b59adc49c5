// What the roles of a CTA share: its place among the others, shared memory, and the exchange buffers.
#pragma once

#include "launch.h"
#include "sync.cuh"

namespace muse {

constexpr int kConsumerWarps = 16;  // one for each tile of a unit's K, and for each row of a step
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 128;  // and a warpgroup for producer, janitor and watchdog
constexpr int kProducerWarp = kConsumerWarps, kJanitorWarp = kConsumerWarps + 1, kWatchdogWarp = kConsumerWarps + 2;
// A CTA is launched with so many for each thread as all can have; what consumers take the others must have given back,
// or they wait for it for ever.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kConsumerRegisters = 104, kOtherRegisters = 64;
static_assert(kConsumers * kConsumerRegisters + 128 * kOtherRegisters <= kThreads * kLaunchRegisters,
              "registers of a CTA");
static_assert(kConsumerWarps == kMaxRows, "a warp for each row where rows are finished");

constexpr int kTilesPerStage = 2;
constexpr int kStageBytes = kTilesPerStage * (kTileSize + kTileScalesSize);
constexpr int kStages = 8;
constexpr int kTilesPerUnit = kConsumerWarps;

constexpr int kHalf = 32;        // output rows of a unit that are added up at a time
constexpr int kHalfStride = 36;  // floats: rows of eight lanes meet different banks
constexpr int kKeyStride = 72;   // bf16 numbers of a key or value in shared memory, for the same reason

// The experts of a step, from the routing of its rows.
struct Experts {
  int count;                         // experts that at least one row chose
  uint8_t ids[kMaxRows * kMaxTopK];  // ascending
  alignas(16) int8_t
      slot_of[kMaxRows * kMaxTopK][kMaxRows];  // of the i-th of them: which choice of the row it is; -1: not chosen
  float weights[kMaxRows][kMaxTopK];
  float scales[kMaxRows * kMaxTopK][3];  // global scales of gate, up and down
};

struct SharedStorage {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  // Partial sums of the warps, two halves of a unit in turn. Attention has its keys, values and partial results here,
  // combine its routed rows.
  alignas(16) float partial[2][kConsumerWarps][kMaxRows][kHalfStride];
  Experts experts;
  alignas(16) float reduced[2][kMaxTopK][kConsumerWarps];
  float scores[kMaxExperts];
  int key_positions[kKeyBlock];
  uint32_t chosen[kMaxExperts / 32];
  alignas(8) uint64_t full[kStages], empty[kStages];
  uint64_t experts_full, experts_empty;
  Site site;
  uint64_t phase_began[kNumProfileRoles];  // of those who record, by global_timer_ns
  uint32_t aborted;
  bool skipped;         // the call was given up before this launch
  bool finished;        // the consumers are
  uint32_t open_round;  // rounds up to this one may be written to
};
static_assert(sizeof(SharedStorage) <= 232448, "shared memory of a CTA on Hopper and Blackwell");
static_assert(2 * kKeyBlock * kKeyStride * 2 <= sizeof(SharedStorage::partial), "keys and values of a block");
static_assert(kConsumerWarps * kMaxRows * kPartial * 4 <= sizeof(SharedStorage::partial),
              "partial attention of the warps");

struct Cta {
  const Launch& launch;
  SharedStorage& shared;
  Waiting waiting;
  int rank;          // of the model
  int here;          // its number among the ranks of this device
  int index, count;  // this CTA among those of its rank
  int thread, warp, lane;
  uint8_t* sets;                  // of this rank's exchange buffers
  uint32_t round, set, next_set;  // and where its buffers and those of the next one begin

  __device__ const Sizes& sizes() const { return launch.sizes; }
  __device__ const RankSizes& of_rank() const { return launch.of_rank; }
  __device__ const Geometry& geometry(int l, MatrixId id) const {
    return launch.matrices[has_nvfp4(l)][static_cast<int>(id)];
  }

  // Exchange buffers of this round, or of the next: of this rank, and of peer p where this rank's data belong. In
  // loopback every peer is this rank itself, and its own data take the place of what the others would send.
  template <typename T>
  __device__ T* own(uint32_t offset, bool next = false) const {
    return reinterpret_cast<T*>(sets + ((next ? next_set : set) + offset));
  }
  template <typename T>
  __device__ T* of_peer(int p, uint32_t offset, bool next = false) const {
    return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(launch.workspaces[p] + 1) +
                                ((next ? next_set : set) + offset));
  }
  __device__ int piece_at(int p) const { return launch.sizes.loopback ? p : rank; }

  __device__ void begin_round(uint32_t number) {
    round = number;
    set = number % kRounds * launch.buffers.bytes;
    next_set = (number + 1) % kRounds * launch.buffers.bytes;
  }

  __device__ const Layer& layer(int l) const { return launch.layers[l]; }
  __device__ bool has_nvfp4(int l) const { return layer(l).flags & kNvfp4Flag; }
  __device__ const LayerOffsets& offsets(int l) const { return launch.offsets[has_nvfp4(l)]; }
  __device__ const uint8_t* weights(int l) const { return layer(l).weights + here * offsets(l).bytes; }
  __device__ const float* vector(int l, size_t LayerOffsets::* name) const {
    return reinterpret_cast<const float*>(weights(l) + offsets(l).*name);
  }

  // For a phase: otherwise what each of them computes from these numbers would be computed once and kept by all.
  __device__ Cta forgetful() const {
    Cta cta = *this;
    forget(cta.thread);
    forget(cta.warp);
    forget(cta.lane);
    forget(cta.index);
    forget(cta.rank);
    forget(cta.here);
    forget(cta.count);
    forget(cta.set);
    return cta;
  }

  __device__ void enter(Phase phase, int l) const {
    if (thread != 0) return;
    volatile Site& site = shared.site;
    site.layer = l;
    site.phase = phase;
    site.steps = site.steps + 1;
  }
};

__device__ __forceinline__ void consumer_barrier() { named_barrier<1, kConsumers>(); }

__host__ __device__ constexpr int divide_up(int x, int y) { return (x + y - 1) / y; }
// x / y for 0 <= x < 2^20 and y > 0, exact: x + 1/2 is further from a multiple of y than the division errs.
__device__ __forceinline__ int quotient(int x, int y) {
  return static_cast<int>(divide(static_cast<float>(x) + 0.5f, static_cast<float>(y)));
}

// ---- Shares of work -------------------------------------------------------------------------------------------------

// Units [begin, end) of n that a CTA takes: neighbours, which often need the same activations. shift: turns the CTAs,
// so that those that get one unit more are not the same in every phase.
struct Share {
  int begin, end;
};
__device__ __forceinline__ Share share_of(const Cta& cta, int n, int shift) {
  int i = cta.index + shift;
  while (i >= cta.count) i -= cta.count;
  // A division by the number of CTAs: exact below 2^24.
  const auto part = [&](int x) {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(x * n), cta.launch.ctas_reciprocal));
  };
  return {part(i), part(i + 1)};
}

__device__ __forceinline__ bool owns_row(const Cta& cta, int row) {
  // Far from each other, where there are CTAs enough.
  int owner = row * (cta.count / kMaxRows);
  if (cta.count < kMaxRows) {
    owner = row;
    while (owner >= cta.count) owner -= cta.count;
  }
  return owner == cta.index;
}

// ---- Sums over the consumers ----------------------------------------------------------------------------------------

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

__device__ __forceinline__ float max_over_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

// Eight sums over the warp: lane i gets that of x[i / 4]. Lanes exchange halves of what is left, so that numbers are
// added up as by `sum_over_warp`.
__device__ __forceinline__ float sum_eight_over_warp(const Cta& cta, float (&x)[8]) {
#pragma unroll
  for (int n = 4; n > 0; n /= 2) {
    const bool high = cta.lane & 4 * n;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float given = high ? x[i] : x[i + n], kept = high ? x[i + n] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * n);
    }
  }
  x[0] += __shfl_xor_sync(0xffffffffu, x[0], 2);
  return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
}

// The sum (or maximum) of what all warps have put into a place.
template <bool kMax = false>
__device__ __forceinline__ float sum_of_reduced(const Cta& cta, int which, int i) {
  float total = kMax ? -INFINITY : 0.0f;
#pragma unroll
  for (int w = 0; w < kConsumerWarps; w += 4) {
    const float4 v = *reinterpret_cast<const float4*>(&cta.shared.reduced[which][i][w]);
    total = kMax ? fmaxf(fmaxf(total, fmaxf(v.x, v.y)), fmaxf(v.z, v.w)) : total + v.x + v.y + v.z + v.w;
  }
  return total;
}

// A sum (or maximum) over all consumers, the same bits in each. which: one of two places, used in turn.
template <bool kMax = false>
__device__ __forceinline__ float reduce_over_consumers(const Cta& cta, float x, int which) {
  const float of_warp = kMax ? max_over_warp(x) : sum_over_warp(x);
  if (cta.lane == 0) cta.shared.reduced[which][0][cta.warp] = of_warp;
  consumer_barrier();
  return sum_of_reduced<kMax>(cta, which, 0);
}

// ---- Publishing -----------------------------------------------------------------------------------------------------

// Until every CTA of every rank has cleared the buffers of a round nobody may write there. Long over when it is asked.
__device__ __forceinline__ void wait_for_round(const Cta& cta, uint32_t round) {
  volatile uint32_t* open = &cta.shared.open_round;
#pragma unroll 1
  while (static_cast<int32_t>(*open - round) < 0 && !cta.waiting.is_over()) {
  }
  __syncwarp();
}

}  // namespace muse
