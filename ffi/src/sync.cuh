// Waiting. Between CTAs and between GPUs data is its own flag: a reader looks at the words it needs until none of them
// is kAbsent, which no arithmetic gives (a NaN is 0x7fffffff or a pair of 0x7fff). The argument why nobody overwrites
// what somebody still reads, and why nobody waits for ever, is in ffi/README.md.
#pragma once

#include "launch.h"
#include "phase.h"
#include "ptx.cuh"

namespace muse {

// Where a CTA is, for the watchdog and its message. In shared memory.
struct Site {
  uint32_t steps;  // phases entered so far: while this grows, nobody is stuck
  int32_t layer;
  Phase phase;
  int32_t peer;  // whose data did not come, as the waiting threads say when they give up; -1: nobody's in particular
};

constexpr uint32_t kLooksBetween = 64;  // looks at what is waited for, between looks at whether to go on

// What a waiting thread looks at now and then; the watchdog sets it.
struct Waiting {
  volatile uint32_t* aborted;
  volatile Site* site;

  // Whether to wait no longer. looks: the thread's own count. Over stays over, whatever the other lanes count.
  __device__ __forceinline__ bool is_over(uint32_t& looks, int32_t peer) const {
    constexpr uint32_t kOver = 1u << 31;
    pause();
    if (looks == kOver) return true;
    looks = (looks + 1) % kLooksBetween;
    if (looks != 0 || !*aborted) return false;
    looks = kOver;
    if (peer >= 0) site->peer = peer;
    return true;
  }
};

// kAbsent is the largest of all words.
__device__ __forceinline__ bool present(uint32_t v) { return v != kAbsent; }
__device__ __forceinline__ bool present(const uint2& v) { return max(v.x, v.y) != kAbsent; }
__device__ __forceinline__ bool present(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)) != kAbsent; }

template <typename Word>
__device__ __forceinline__ Word absent();
template <>
__device__ __forceinline__ uint32_t absent() {
  return kAbsent;
}
template <>
__device__ __forceinline__ uint2 absent() {
  return make_uint2(kAbsent, kAbsent);
}
template <>
__device__ __forceinline__ uint4 absent() {
  return make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
}

// Loads words that another thread writes in this round. A whole warp calls it: it waits for the words of all its lanes,
// so that it stays together. wanted: where false, the result is zero and nothing is read.
template <int kCount, typename Word>
__device__ __forceinline__ void receive(const Waiting& waiting, const Word* const (&from)[kCount],
                                        const bool (&wanted)[kCount], Word (&to)[kCount], int32_t peer = -1) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = wanted[i] ? absent<Word>() : Word{};
  uint32_t looks = 0;
  // Many wait for the same: while nothing is there each lane looks at its first word only, which spares the L2.
  if constexpr (kCount > 2) {
#pragma unroll 1
    do {
      if (!present(to[0])) to[0] = load_relaxed(from[0]);
    } while (!__all_sync(0xffffffffu, present(to[0]) || waiting.is_over(looks, peer)));
  }
  bool complete;
#pragma unroll 1
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (present(to[i])) continue;
      to[i] = load_relaxed(from[i]);
      complete = false;
    }
  } while (!__all_sync(0xffffffffu, complete || waiting.is_over(looks, peer)));
}

template <typename Word>
__device__ __forceinline__ Word receive(const Waiting& waiting, const Word* from, int32_t peer = -1) {
  const Word* const froms[1] = {from};
  const bool wanted[1] = {true};
  Word to[1];
  receive(waiting, froms, wanted, to, peer);
  return to[0];
}

// Waits until a counter has reached a value, and sees what was written before it was raised.
__device__ __forceinline__ void wait_for_count(const Waiting& waiting, const uint32_t* counter, uint32_t value,
                                               int32_t peer) {
  uint32_t looks = 0;
  while (static_cast<int32_t>(load_acquire(counter) - value) < 0 && !waiting.is_over(looks, peer)) {
  }
}

// fp32 as it is published.
__device__ __forceinline__ uint32_t word_of(float x) { return __float_as_uint(x); }

}  // namespace muse
