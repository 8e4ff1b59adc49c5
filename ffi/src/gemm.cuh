// x W^T for the rows of a step, in units of 64 output rows by up to 16 tiles of K.
//
// Rows are the M = 16 side of the MMA, weights its N = 8 side. Each consumer warp has one tile of a unit: activations
// of the tile's K stay in registers while units go by, weights come through the ring, and the warps' partial sums are
// added in the order of K. So the order of a sum depends on K alone, not on the number of ranks or CTAs.
#pragma once

#include "ring.cuh"

namespace muse {

enum class Kind { kBf16, kFp32, kNvfp4 };

// K of a tile.
__host__ __device__ constexpr int tile_k(Kind kind) {
  return kind == Kind::kBf16 ? 64 : kind == Kind::kFp32 ? 32 : 256;
}

// A unit of work: a row tile of a slice, or of a matrix of a stack. They follow each other row tile by row tile, then
// part by part.
struct Unit {
  int part, row_tile;
  __device__ static Unit create(const Geometry& geometry, int number) {
    const int part = quotient(number, geometry.row_tiles);
    return {part, number - part * geometry.row_tiles};
  }
  __device__ void advance(const Geometry& geometry) {
    if (++row_tile == geometry.row_tiles) row_tile = 0, ++part;
  }
};

// ---- Activations in registers ---------------------------------------------------------------------------------------
// The order of K within an MMA is free: lane (r, q) = (lane / 4, lane % 4) takes consecutive values of rows r and
// r + 8, and the same values of K of weight row n = lane / 4.

// Each step's (MMA's) four registers lie side by side, as the MMA wants them: [steps along a tile's K].
__host__ __device__ constexpr int steps_of(Kind kind) { return tile_k(kind) / 16; }

// Where steps 2 i and 2 i + 1 of lane (r, q) have their values: columns 8 q + 0..7 of 32 (bf16), 32 q + 8 i + 0..7 of
// 128 (NVFP4).
__device__ __forceinline__ constexpr int column_of_steps(Kind kind, int i, int q) {
  return kind == Kind::kNvfp4 ? 128 * (i / 4) + 32 * q + 8 * (i % 4) : 32 * i + 8 * q;
}

// rows: of row lane / 4 and of row lane / 4 + 8, at K = 0, or null for a row of zeros.  k: of the tile's first column.
// k_end: columns beyond are zero.
template <Kind kKind, int kSize>
__device__ __forceinline__ void load_fragments(const Cta& cta, const uint16_t* const (&rows)[2], int k, int k_end,
                                               uint4 (&to)[kSize]) {
  constexpr int kPairs = steps_of(kKind) / 2, kAtOnce = kPairs < 4 ? kPairs : 4;
  const int q = cta.lane % 4;
  // An MMA's four registers lie side by side. Words that were only renamed would stay where they were loaded, and be
  // copied for each MMA; so an operation puts them where they belong, with a zero that the compiler does not know.
  const uint32_t zero = cta.sizes().ranks >> 16;
  // Of this lane's columns, counted from its first one.
  const uint16_t* const begin[2] = {rows[0] + k + column_of_steps(kKind, 0, q),
                                    rows[1] + k + column_of_steps(kKind, 0, q)};
  int columns[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) columns[i] = rows[i] != nullptr ? k_end - k - column_of_steps(kKind, 0, q) : 0;
#pragma unroll
  for (int first = 0; first < kPairs; first += kAtOnce) {
    const uint4* from[2 * kAtOnce];
    int at[2 * kAtOnce], end[2 * kAtOnce];
    uint4 words[2 * kAtOnce];
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      at[i] = column_of_steps(kKind, first + i / 2, 0);
      end[i] = columns[i % 2];
      from[i] = reinterpret_cast<const uint4*>(begin[i % 2] + at[i]);
    }
    receive(cta.waiting, from, at, end, words);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint4 &low = words[2 * i], &high = words[2 * i + 1];
      to[2 * (first + i)] = make_uint4(low.x | zero, high.x | zero, low.y | zero, high.y | zero);
      to[2 * (first + i) + 1] = make_uint4(low.z | zero, high.z | zero, low.w | zero, high.w | zero);
    }
  }
}

// fp32 weights have four values of K in 16 bytes: columns 4 q + 0..3 of 16.
template <int kSize>
__device__ __forceinline__ void load_fragments_of_fp32(const Cta& cta, const uint16_t* const (&rows)[2], int k,
                                                       int k_end, uint4 (&to)[kSize]) {
  const uint2* from[4];
  int at[4], end[4];
  uint2 words[4];
  const int q = cta.lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at[i] = 16 * (i / 2);
    end[i] = rows[i % 2] != nullptr ? k_end - k - 4 * q : 0;
    from[i] = reinterpret_cast<const uint2*>(rows[i % 2] + k + 4 * q + at[i]);
  }
  receive(cta.waiting, from, at, end, words);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to[i] = make_uint4(words[2 * i].x, words[2 * i + 1].x, words[2 * i].y, words[2 * i + 1].y);
}

// ---- Products with eight weight rows: an accumulator of an MMA ------------------------------------------------------
// Two chains of MMAs, as one would wait for itself.

// Weight row of a group of eight that is column n of the MMA. Neighbouring n differ in bit 2 of the row, so with the
// swizzle the eight lanes that read at once meet all banks.
__device__ __forceinline__ int row_of_column(int n) { return n >> 1 | (n & 1) << 2; }

// Where a lane's values of a tile are: of its row of each group of eight weight rows chunk q (16 bytes), and, of NVFP4,
// the scales of the chunks q and 4 + q.
struct LaneTile {
  uint32_t chunks[2], scales;

  __device__ static LaneTile create(const Cta& cta, uint32_t tile) {
    const uint32_t row = row_of_column(cta.lane / 4), q = cta.lane % 4;
    const uint32_t chunk = tile + 128 * row + 16 * (q ^ row);
    return {{chunk, chunk ^ 64}, tile + kTileSize + 16 * row + 4 * q};
  }
  __device__ uint4 load_chunk(int group, int which) const { return load_shared(chunks[which] + 1024 * group); }
  __device__ uint32_t load_scales(int group) const { return load_shared_word(scales + 128 * group); }
};

template <int kSize>
__device__ __forceinline__ void multiply_bf16(const LaneTile& tile, int group, const uint4 (&x)[kSize],
                                              float (&acc)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 w = tile.load_chunk(group, h);
    mma(acc[h], x[2 * h], w.x, w.y);
    mma(acc[h], x[2 * h + 1], w.z, w.w);
  }
}

// fp32 weights as three bf16 numbers that add up to them exactly: products are exact, and so is the router's precision.
template <int kSize>
__device__ __forceinline__ void multiply_fp32(const LaneTile& tile, int group, const uint4 (&x)[kSize],
                                              float (&acc)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 w = tile.load_chunk(group, h);
    float rest[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      uint32_t top[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        top[i] = __float_as_uint(rest[i]) & 0xffff0000u;
        rest[i] = __fsub_rn(rest[i], __uint_as_float(top[i]));
      }
      const uint32_t b0 = __byte_perm(top[0], top[1], 0x7632), b1 = __byte_perm(top[2], top[3], 0x7632);
      mma(acc[h], x[h], b0, b1);
    }
  }
}

// What bf16 makes of the bits of e2m1 (at bits 8..6 and 15) is 2^-126 times its value, of those of e4m3 (at bits
// 10..4) 2^-120 times.
constexpr uint32_t kTwo127 = 0x7f007f00u, kTwo110 = 0x76807680u;  // pairs of bf16
constexpr float kDecodedScale = 512.0f;  // decoded weights are 2^-9 of their values: (-126 + -120) + 127 + 110 = -9

template <int kSize>
__device__ __forceinline__ void multiply_nvfp4(const LaneTile& tile, int group, const uint4 (&x)[kSize],
                                               float (&acc)[2][4]) {
  const uint32_t scales = tile.load_scales(group);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 codes = tile.load_chunk(group, h);
    // Two scales, of the words 0, 1 and of the words 2, 3 of the chunk.
    const uint32_t pair =
        multiply_bf16x2(multiply_bf16x2(__byte_perm(scales, 0, h ? 0x4342 : 0x4140) << 4, kTwo127), kTwo110);
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t scale = __byte_perm(pair, 0, i < 2 ? 0x1010 : 0x3232), w = words[i];
      const uint32_t pairs[4] = {
          w & 0x81c081c0u,
          w << 3 & 0x81c081c0u,
          w << 6 & 0x81c081c0u,
          (w << 1 & 0x80008000u) | (w >> 3 & 0x01800180u) | (w >> 7 & 0x00400040u),
      };
      uint32_t b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = multiply_bf16x2(pairs[j], scale);
      mma(acc[h], x[8 * h + 2 * i], b[0], b[1]);
      mma(acc[h], x[8 * h + 2 * i + 1], b[2], b[3]);
    }
  }
}

// ---- The consumers' side --------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 sum_of_chains(const float (&acc)[2][4]) {
  return make_uint4(__float_as_uint(acc[0][0] + acc[1][0]), __float_as_uint(acc[0][1] + acc[1][1]),
                    __float_as_uint(acc[0][2] + acc[1][2]), __float_as_uint(acc[0][3] + acc[1][3]));
}

// Where this lane puts its sums of the first group of eight output columns, for `sum_of_warps`.
__device__ __forceinline__ uint32_t sums_of_lane(const Cta& cta) {
  return shared_address(&cta.shared.partial[0][cta.warp][cta.lane / 4][cta.lane % 4]);
}
// acc: fp32.
__device__ __forceinline__ void store_group(uint32_t sums, int group, const uint4& acc) {
  constexpr int kRow = kHalfStride * sizeof(float);
  const uint32_t to = sums + 32 * group;
  store_shared(to, __uint_as_float(acc.x));
  store_shared(to + 16, __uint_as_float(acc.y));
  store_shared(to + 8 * kRow, __uint_as_float(acc.z));
  store_shared(to + 8 * kRow + 16, __uint_as_float(acc.w));
}

// Adds up what the warps have of 32 output columns, in the order of K. Thread (warp, lane) gets row `warp`, column
// `lane`. One barrier is enough: a place is written again only after the barrier of the other half, which all its
// readers pass.
__device__ __forceinline__ float sum_of_warps(const Cta& cta, int half, int warps) {
  consumer_barrier();
  const auto& partial = cta.shared.partial[half];
  float sum = partial[0][cta.warp][cta.lane];
#pragma unroll 5
  for (int w = 1; w < warps; ++w) sum += partial[w][cta.warp][cta.lane];
  return sum;
}

// Two neighbouring columns, summed over parts of K in order. from: of part 0.  stride: floats from part to part.
__device__ __forceinline__ float2 sum_of_parts(const Cta& cta, const float* from, int parts, int stride, bool wanted) {
  constexpr int kAtOnce = 8;
  float2 sum = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += kAtOnce) {
    const uint2* froms[kAtOnce];
    int at[kAtOnce], end[kAtOnce];
    uint2 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      froms[i] = reinterpret_cast<const uint2*>(from + (first + i) * stride);
      at[i] = i;
      end[i] = wanted ? parts - first : 0;
    }
    receive(cta.waiting, froms, at, end, words);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // what is not wanted is zero
      sum.x += __uint_as_float(words[i].x);
      sum.y += __uint_as_float(words[i].y);
    }
  }
  return sum;
}

}  // namespace muse
