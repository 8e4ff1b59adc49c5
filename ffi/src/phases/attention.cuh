// Attention of a step's rows to committed keys (a ring in sliding layers, else slot = position) and to each other,
// split over keys; the parts are merged by their maxima and sums, normed per head and gated.
//
//   an item      a KV head and a part of its committed keys, or a KV head and the step's own rows
//   a block      128 keys and values: two stages of the ring, copied to rows that MMAs read without bank conflicts
//   a warp       one query head and a share of the block's keys
//
// Hidden keys get probability 0, whatever their slots hold: what no row sees is replaced by zeros.
#pragma once

#include <climits>

#include "../gemm.cuh"

namespace muse {

struct AttentionPlan {
  int blocks;  // of committed keys
  int blocks_per_split, splits;
  int key_bytes;  // of a key or value in the cache

  __device__ static AttentionPlan create(const Cta& cta, int l) {
    const Layer& layer = cta.layer(l);
    const int committed = *cta.launch.length;
    const int keys = layer.flags & kSlidingFlag ? layer.slots : min(committed, layer.slots);
    AttentionPlan plan;
    plan.blocks = divide_up(keys, kKeyBlock);
    plan.blocks_per_split = max(1, divide_up(plan.blocks, kMaxSplits));
    plan.splits = quotient(plan.blocks + plan.blocks_per_split - 1, plan.blocks_per_split);
    plan.key_bytes = 2 * cta.sizes().head_dim;
    return plan;
  }
  // The step's own rows are the last split: old keys can be loaded while the rows are computed.
  __device__ int items(const Cta& cta) const { return cta.of_rank().kv_heads * (splits + 1); }
  __device__ int split(const Cta& cta, int item) const { return quotient(item, cta.of_rank().kv_heads); }
  __device__ int end_of_split(int split) const { return min((split + 1) * blocks_per_split, blocks); }
};

__device__ inline int keys_in_block(const Layer& layer, int block) {
  return min(kKeyBlock, layer.slots - block * kKeyBlock);
}

__device__ __forceinline__ void load_attention(const Cta& cta, Producer& producer, int l) {
  const AttentionPlan plan = AttentionPlan::create(cta, l);
  const Layer& layer = cta.layer(l);
  const int kv_heads = cta.of_rank().kv_heads;
#pragma unroll 1
  for (int item = cta.index; item < kv_heads * plan.splits; item += cta.count) {
    const int split = plan.split(cta, item), head = cta.here * kv_heads + item - split * kv_heads;
#pragma unroll 1
    for (int block = split * plan.blocks_per_split; block < plan.end_of_split(split); ++block) {
      const size_t at = (static_cast<size_t>(head) * layer.slots + block * kKeyBlock) * plan.key_bytes;
      const uint32_t bytes = keys_in_block(layer, block) * plan.key_bytes;
#pragma unroll 1
      for (int i = 0; i < 2; ++i)
        producer.load(reinterpret_cast<const uint8_t*>(i == 0 ? layer.keys : layer.values) + at, bytes);
    }
  }
}

// A warp's part of a softmax: for rows lane / 4 and lane / 4 + 8 of its query head.
struct PartialAttention {
  float out[8][4] = {};  // [eight values of the head][as an accumulator of an MMA]
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
};

constexpr float kLog2E = 1.4426950408889634f;

constexpr int kKeysAtOnce = 16;  // K of the MMA that probabilities are the A side of

// Shared-memory rows of keys and of values, kKeyStride bf16 numbers each.
__device__ __forceinline__ uint16_t* shared_keys(const Cta& cta) {
  return reinterpret_cast<uint16_t*>(cta.shared.partial);
}
__device__ __forceinline__ uint16_t* shared_values(const Cta& cta) { return shared_keys(cta) + kKeyBlock * kKeyStride; }

// What rows lane / 4 and lane / 4 + 8 see: positions from `oldest` on, and of each 16 keys those whose bits are set, in
// which bit 0 is key 2 (lane % 4).
struct Sight {
  int oldest[2];
  uint32_t keys[2];

  // is_rows: of the step's own rows, else of committed keys.
  __device__ static Sight create(const Cta& cta, bool sliding, bool is_rows) {
    const int rows = cta.sizes().rows;
    Sight sight = {{INT_MAX, INT_MAX}, {0xffffu, 0xffffu}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = cta.lane / 4 + 8 * i;
      if (row >= rows) continue;
      sight.oldest[i] = sliding ? max(cta.launch.positions[row] - cta.sizes().window + 1, 0) : 0;
      if (!is_rows) continue;
      sight.keys[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int bit = 8 * (j / 2) + j % 2, key = bit + 2 * (cta.lane % 4);
        const bool seen = key < rows && cta.launch.visible[row * rows + key];
        sight.keys[i] |= static_cast<uint32_t>(seen) << bit;
      }
    }
    return sight;
  }
};

// Takes 16 keys from `first` on into a softmax.
__device__ __forceinline__ void attend_keys(const Cta& cta, int first, const uint4 (&query)[steps_of(Kind::kBf16)],
                                            const Sight& sight, PartialAttention& part) {
  constexpr int kGroups = kKeysAtOnce / 8;
  const uint32_t keys = shared_address(shared_keys(cta) + first * kKeyStride);
  const uint32_t values = shared_address(shared_values(cta) + first * kKeyStride);
  const int r = cta.lane / 4, q = cta.lane % 4;
  float score[kGroups][4] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 k = load_shared(keys + (8 * g + r) * (2 * kKeyStride) + 16 * (4 * h + q));
      mma(score[g], query[2 * h], k.x, k.y);
      mma(score[g], query[2 * h + 1], k.z, k.w);
    }
  }
  float maximum[2] = {part.maximum[0], part.maximum[1]};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = cta.shared.key_positions[first + 8 * g + 2 * q + i % 2];
      const bool seen = position >= sight.oldest[i / 2] && (sight.keys[i / 2] & 1u << (8 * g + i % 2)) != 0;
      score[g][i] = seen ? score[g][i] * cta.sizes().score_scale : -INFINITY;
      maximum[i / 2] = fmaxf(maximum[i / 2], score[g][i]);
    }
  }
  float rescale[2], base[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffffu, maximum[i], 1));
    maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(0xffffffffu, maximum[i], 2));
    base[i] = maximum[i] == -INFINITY ? 0.0f : maximum[i];
    rescale[i] = exp2f((part.maximum[i] - base[i]) * kLog2E);  // 0 where nothing was seen yet
    part.maximum[i] = maximum[i];
    part.sum[i] *= rescale[i];
  }
#pragma unroll
  for (int d = 0; d < 8; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part.out[d][i] *= rescale[i / 2];
  }
  float sum[2] = {};
  uint32_t weights[4];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = exp2f((score[g][2 * i] - base[i]) * kLog2E),
                  high = exp2f((score[g][2 * i + 1] - base[i]) * kLog2E);
      sum[i] += low + high;
      weights[2 * g + i] = to_bf16x2(low, high);
    }
  }
  const uint4 probabilities = make_uint4(weights[0], weights[1], weights[2], weights[3]);
  const int matrix = cta.lane / 8, key = 8 * (matrix % 2) + cta.lane % 8;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const uint4 v = load_matrices_transposed(values + key * (2 * kKeyStride) + 16 * (2 * d + matrix / 2));
    mma(part.out[2 * d], probabilities, v.x, v.y);
    mma(part.out[2 * d + 1], probabilities, v.z, v.w);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    part.sum[i] += sum[i];
  }
}

// A block from the ring to its rows. Slots of which no row of the step sees anything become zeros.
__device__ __forceinline__ void copy_block(const Cta& cta, const Layer& layer, int block, uint32_t keys,
                                           uint32_t values) {
  const int committed = *cta.launch.length, num_keys = keys_in_block(layer, block), chunks = cta.sizes().head_dim / 8;
  const bool sliding = layer.flags & kSlidingFlag;
  if (cta.thread < kKeyBlock) {
    const int key = cta.thread, slot = block * kKeyBlock + key;
    const int position = key >= num_keys ? -1 : sliding ? cta.launch.ring_positions[slot] : slot;
    // The oldest position that the step's first row sees: the others are after it.
    const int oldest = sliding ? committed - cta.sizes().window + 1 : 0;
    cta.shared.key_positions[key] = position >= max(oldest, 0) && position < committed ? position : -1;
  }
  consumer_barrier();
#pragma unroll 1
  for (int i = cta.thread; i < kKeyBlock * kHead / 8; i += kConsumers) {
    const int key = i / (kHead / 8), chunk = i % (kHead / 8);
    const bool there = chunk < chunks && cta.shared.key_positions[key] >= 0;
    const uint32_t from = (key * chunks + chunk) * 16;
    const uint4 zero = {};
    *reinterpret_cast<uint4*>(shared_keys(cta) + key * kKeyStride + 8 * chunk) =
        there ? load_shared(keys + from) : zero;
    *reinterpret_cast<uint4*>(shared_values(cta) + key * kKeyStride + 8 * chunk) =
        there ? load_shared(values + from) : zero;
  }
}

// The step's own rows.
__device__ __forceinline__ void copy_rows(const Cta& cta, int kv_head) {
  const Buffers& buffers = cta.launch.buffers;
  const int i = cta.thread, rows = cta.sizes().rows;
  if (i < kMaxRows) cta.shared.key_positions[i] = i < rows ? cta.launch.positions[i] : -1;
  if (cta.warp < 2 * kMaxRows * kHead / 8 / 32) {
    const bool is_value = i >= kMaxRows * kHead / 8;
    const int row = i / (kHead / 8) % kMaxRows, chunk = i % (kHead / 8);
    const uint16_t* from = cta.own<uint16_t>(is_value ? buffers.v : buffers.k);
    const uint4* words = reinterpret_cast<const uint4*>(from + (kv_head * kMaxRows + row) * kHead + 8 * chunk);
    const uint4 word = receive(cta.waiting, words, row < rows);
    *reinterpret_cast<uint4*>((is_value ? shared_values(cta) : shared_keys(cta)) + row * kKeyStride + 8 * chunk) = word;
  }
}

// Adds up what the warps of each query head have, and publishes it.
__device__ __forceinline__ void publish_partial(const Cta& cta, int kv_head, int split, int groups, int parts,
                                                const PartialAttention& part) {
  float* rows = reinterpret_cast<float*>(cta.shared.partial);  // [warps][rows][kPartial]
  consumer_barrier();                                          // keys and values have been read
  const int r = cta.lane / 4, q = cta.lane % 4;
  if (cta.warp < groups * parts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = rows + (cta.warp * kMaxRows + r + 8 * i) * kPartial;
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        to[8 * d + 2 * q] = part.out[d][2 * i];
        to[8 * d + 2 * q + 1] = part.out[d][2 * i + 1];
      }
      if (q == 0) to[kHead] = part.maximum[i], to[kHead + 1] = part.sum[i];
    }
  }
  consumer_barrier();
  float* partial = cta.own<float>(cta.launch.buffers.attn_partial);
  if (cta.warp < cta.sizes().rows) {
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      float maximum = -INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll 1
      for (int p = 0; p < parts; ++p)
        maximum = fmaxf(maximum, rows[((p * groups + g) * kMaxRows + cta.warp) * kPartial + kHead]);
#pragma unroll 1
      for (int p = 0; p < parts && maximum != -INFINITY; ++p) {
        const float* from = rows + ((p * groups + g) * kMaxRows + cta.warp) * kPartial;
        const float factor = exp2f((from[kHead] - maximum) * kLog2E);
        sum += factor * from[kHead + 1];
        low += factor * from[2 * cta.lane];
        high += factor * from[2 * cta.lane + 1];
      }
      float* to =
          partial +
          (((static_cast<size_t>(kv_head) * (kMaxSplits + 1) + split) * groups + g) * kMaxRows + cta.warp) * kPartial;
      store_relaxed(reinterpret_cast<uint2*>(to + 2 * cta.lane), make_uint2(word_of(low), word_of(high)));
      if (cta.lane == 0)
        store_relaxed(reinterpret_cast<uint2*>(to + kHead), make_uint2(word_of(maximum), word_of(sum)));
    }
  }
  consumer_barrier();  // before the next block is copied there
}

__device__ __forceinline__ void run_attention(const Cta& cta, Consumer& consumer, int l) {
  const Sizes& sizes = cta.sizes();
  const Layer& layer = cta.layer(l);
  const AttentionPlan plan = AttentionPlan::create(cta, l);
  const int groups = cta.of_rank().groups, parts = cta.of_rank().parts_of_keys,
            keys_per_part = cta.of_rank().keys_of_part;
  const bool sliding = layer.flags & kSlidingFlag, works = cta.warp < groups * parts;
  const int part_index = quotient(cta.warp, groups), group = cta.warp - part_index * groups;
  consumer_barrier();  // the sums of a GEMM that lay where keys go have been read
#pragma unroll 1
  for (int item = cta.index; item < plan.items(cta); item += cta.count) {
    const int split = plan.split(cta, item), kv_head = item - split * cta.of_rank().kv_heads,
              head = kv_head * groups + group;
    const uint16_t* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = cta.lane / 4 + 8 * i;
      const uint16_t* q = cta.own<uint16_t>(cta.launch.buffers.q) + (row * cta.of_rank().heads + head) * kHead;
      rows[i] = row < sizes.rows ? q : nullptr;
    }
    uint4 query[steps_of(Kind::kBf16)] = {};
    PartialAttention part;
    const bool is_rows = split == plan.splits;
    const int begin = is_rows ? 0 : split * plan.blocks_per_split, end = is_rows ? 1 : plan.end_of_split(split);
    const Sight sight = Sight::create(cta, sliding, is_rows);
    const int num_keys = !is_rows ? keys_per_part : part_index == 0 ? kKeysAtOnce : 0;
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      if (is_rows) copy_rows(cta, kv_head);
      else copy_block(cta, layer, block, consumer.wait(cta, 0), consumer.wait(cta, 1));
      if (block == begin && works) load_fragments<Kind::kBf16>(cta, rows, 0, kHead, query);
      consumer_barrier();
      if (!is_rows) {
        if (cta.warp < kTilesPerStage) {
          consumer.release(cta, 0);
          consumer.release(cta, 1);
        }
        consumer.next += 2;
      }
#pragma unroll 1
      for (int key = part_index * keys_per_part; works && key < part_index * keys_per_part + num_keys;
           key += kKeysAtOnce) {
        attend_keys(cta, key, query, sight, part);
      }
      consumer_barrier();  // before the next block is copied
    }
    publish_partial(cta, kv_head, split, groups, parts, part);
  }
}

// Merges the parts of each query head; norm over the head, sigmoid gate, one rounding.
__device__ __forceinline__ void merge_attention(const Cta& cta, int l) {
  const Sizes& sizes = cta.sizes();
  const Buffers& buffers = cta.launch.buffers;
  const AttentionPlan plan = AttentionPlan::create(cta, l);
  const int groups = cta.of_rank().groups, parts = plan.splits + 1, row = cta.warp;
  constexpr int kAtOnce = 6;
#pragma unroll 1
  for (int head = cta.index; head < cta.of_rank().heads; head += cta.count) {
    if (row >= sizes.rows) continue;
    const int kv_head = quotient(head, groups), g = head - kv_head * groups;
    const float* partial = cta.own<float>(buffers.attn_partial) +
                           ((static_cast<size_t>(kv_head) * (kMaxSplits + 1) * groups + g) * kMaxRows + row) * kPartial;
    const size_t stride = static_cast<size_t>(groups) * kMaxRows * kPartial;
    float maximum = -INFINITY, sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll 1
    for (int first = 0; first < parts; first += kAtOnce) {
      const uint2* from[2 * kAtOnce];
      int at[2 * kAtOnce], end[2 * kAtOnce];
      uint2 words[2 * kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* of_part = partial + (first + i) * stride;
        from[2 * i] = reinterpret_cast<const uint2*>(of_part + 2 * cta.lane);
        from[2 * i + 1] = reinterpret_cast<const uint2*>(of_part + kHead);
        at[2 * i] = at[2 * i + 1] = i;
        end[2 * i] = end[2 * i + 1] = parts - first;
      }
      receive(cta.waiting, from, at, end, words);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float its_maximum = __uint_as_float(words[2 * i + 1].x);
        if (first + i >= parts || its_maximum == -INFINITY) continue;
        const float both = fmaxf(maximum, its_maximum);
        const float old = exp2f((maximum - both) * kLog2E), its = exp2f((its_maximum - both) * kLog2E);
        maximum = both;
        sum = sum * old + __uint_as_float(words[2 * i + 1].y) * its;
        low = low * old + __uint_as_float(words[2 * i].x) * its;
        high = high * old + __uint_as_float(words[2 * i].y) * its;
      }
    }
    low = divide(low, sum);
    high = divide(high, sum);
    const float mean = divide(sum_over_warp(low * low + high * high), static_cast<float>(sizes.head_dim));
    const float factor = rsqrtf(mean + sizes.rms_eps);
    const size_t at = (static_cast<size_t>(row) * cta.of_rank().heads + head) * kHead + 2 * cta.lane;
    const uint32_t gate = receive(cta.waiting, reinterpret_cast<const uint32_t*>(cta.own<uint16_t>(buffers.gate) + at));
    const float gate_low = sigmoid(low_bf16(gate)), gate_high = sigmoid(high_bf16(gate));
    uint32_t* to = reinterpret_cast<uint32_t*>(cta.own<uint16_t>(buffers.attn_out) + at);
    store_relaxed(to, to_bf16x2(low * factor * gate_low, high * factor * gate_high));
  }
}

}  // namespace muse
