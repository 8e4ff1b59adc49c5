// As much of a CUDA device as the kernel needs, on a CPU: every CUDA thread is a fiber, and one of them runs at a time.
// So the kernel's own source can be run and debugged where there is no GPU. Bulk copies take a while here, too, but
// whatever is relaxed on a GPU is in order: what this finds is wrong, what it does not find may still be.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace muse::emulation {

struct Thread {
  dim3 thread, block, block_size, grid_size;
  uint8_t* shared;  // of its CTA
};
Thread& current();

// What a test may choose.
struct Settings {
  uint64_t seed = 1;      // of the order in which warps run
  int ctas_per_rank = 3;  // of as many SMs has the device for each rank
  bool is_taken = false;  // by another call
  int stalled_cta = -1;   // runs only when all others have ended
};
inline Settings settings;

// Runs kernel() as every thread of a grid; returns when all have ended. Throws std::runtime_error if none can go on.
void run(dim3 grid, uint32_t threads, size_t shared_bytes, const std::function<void()>& kernel);

// Time goes on with every switch from one thread to another, from kernel to kernel, as if it took so many nanoseconds:
// times are an order, and say nothing about how long something takes on a GPU.
constexpr uint64_t kSwitchNs = 1;
uint64_t time_ns();

// Lets others run. Whoever waits for something in a loop calls it.
void yield();

// All threads of a barrier wait for each other. barrier: -1: of the CTA, -2: of the warp.
void wait_at(int barrier, int threads);

// Ends the kernel: `run` throws what is wrong.
[[noreturn]] void fail(const char* what);

// A copy into the CTA's shared memory that happens some time later, in `finish_copies`: whoever looks at an mbarrier
// calls it. done(barrier, bytes) follows.
using CopyDone = void (*)(uint32_t barrier, uint32_t bytes);
void copy_later(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, CopyDone done);
void finish_copies();

// Gives every lane of the warp all lanes' words.
const uint32_t* exchange(const uint32_t* words, int count);

}  // namespace muse::emulation

#define threadIdx (muse::emulation::current().thread)
#define blockIdx (muse::emulation::current().block)
#define blockDim (muse::emulation::current().block_size)
#define gridDim (muse::emulation::current().grid_size)

// ---- What CUDA C++ has besides PTX ----------------------------------------------------------------------------------

using std::max;
using std::min;
inline uint32_t max(uint32_t x, int y) { return std::max(x, static_cast<uint32_t>(y)); }
inline uint32_t min(uint32_t x, int y) { return std::min(x, static_cast<uint32_t>(y)); }

inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 32); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline void __nanosleep(uint32_t) { muse::emulation::yield(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __syncthreads() { muse::emulation::wait_at(-1, static_cast<int>(blockDim.x)); }
inline void __syncwarp() { muse::emulation::wait_at(-2, 32); }

inline uint32_t atomicAdd(uint32_t* to, uint32_t x) { return (*to += x) - x; }
inline uint32_t atomicOr(uint32_t* to, uint32_t x) {
  const uint32_t old = *to;
  *to |= x;
  return old;
}
inline int32_t atomicCAS(int32_t* to, int32_t expected, int32_t x) {
  const int32_t old = *to;
  if (old == expected) *to = x;
  return old;
}
inline uint32_t atomicCAS(uint32_t* to, uint32_t expected, uint32_t x) {
  const uint32_t old = *to;
  if (old == expected) *to = x;
  return old;
}

template <typename T>
T shuffle(T x, int lane) {
  static_assert(sizeof(T) == 4, "a word");
  uint32_t word;
  std::memcpy(&word, &x, 4);
  word = muse::emulation::exchange(&word, 1)[lane];
  std::memcpy(&x, &word, 4);
  return x;
}
inline int this_lane() { return static_cast<int>(threadIdx.x % 32); }
template <typename T>
T __shfl_sync(uint32_t, T x, int lane) {
  return shuffle(x, lane);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return shuffle(x, this_lane() ^ mask);
}
template <typename T>
T __shfl_down_sync(uint32_t, T x, int distance) {
  return shuffle(x, std::min(this_lane() + distance, 31));
}
inline bool __all_sync(uint32_t, bool x) {
  const uint32_t word = x;
  const uint32_t* all = muse::emulation::exchange(&word, 1);
  for (int i = 0; i < 32; ++i) {
    if (!all[i]) return false;
  }
  return true;
}
