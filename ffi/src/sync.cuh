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

// What a waiting thread looks at now and then; the watchdog sets it.
struct Waiting {
  volatile uint32_t* aborted;
  volatile Site* site;

  // Whether to wait no longer: whoever waits in a loop asks each time. Over stays over.
  __device__ __forceinline__ bool is_over(int32_t peer = -1) const {
    pause();
    if (!*aborted) return false;
    if (peer >= 0) site->peer = peer;
    return true;
  }
};

// kAbsent is the largest of all words.
__device__ __forceinline__ uint32_t largest(uint32_t v) { return v; }
__device__ __forceinline__ uint32_t largest(const uint2& v) { return max(v.x, v.y); }
__device__ __forceinline__ uint32_t largest(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Loads words that another thread writes in this round. A whole warp calls it: it waits for the words of all its lanes,
// so that it stays together. Where at is not below end the result is zero and nothing is read.
template <int kCount, typename Word>
__device__ __forceinline__ void receive(const Waiting& waiting, const Word* const (&from)[kCount],
                                        const int (&at)[kCount], const int (&end)[kCount], Word (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = {};
  bool done;
#pragma unroll 1
  do {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_relaxed(from[i], at[i], end[i], to[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = max(top, largest(to[i]));
    done = __all_sync(0xffffffffu, top != kAbsent || waiting.is_over());
    if constexpr (kCount > 2) {
      if (!done) {
#pragma unroll 1
        do {
          load_relaxed(from[0], at[0], end[0], to[0]);
        } while (!__all_sync(0xffffffffu, largest(to[0]) != kAbsent || waiting.is_over()));
      }
    }
  } while (!done);
}

template <typename Word>
__device__ __forceinline__ Word receive(const Waiting& waiting, const Word* from, bool is_wanted = true) {
  const Word* const froms[1] = {from};
  const int at[1] = {0}, end[1] = {is_wanted};
  Word to[1];
  receive(waiting, froms, at, end, to);
  return to[0];
}

// Waits until a counter has reached a value, and sees what was written before it was raised.
__device__ __forceinline__ void wait_for_count(const Waiting& waiting, const uint32_t* counter, uint32_t value,
                                               int32_t peer) {
#pragma unroll 1
  while (static_cast<int32_t>(load_acquire(counter) - value) < 0 && !waiting.is_over(peer)) {
  }
}

// fp32 as it is published.
__device__ __forceinline__ uint32_t word_of(float x) { return __float_as_uint(x); }

}  // namespace muse
