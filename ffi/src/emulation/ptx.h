// What ptx.cuh gives the kernel, on the emulated device.
#pragma once

#include "device.h"

namespace muse {

inline uint64_t global_timer_ns() { return emulation::time_ns(); }
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}
template <int kBarrier, int kThreads>
void named_barrier() {
  emulation::wait_at(kBarrier, kThreads);
}
inline void forget(int&) {}
inline void forget(uint32_t&) {}
inline void pause() { emulation::yield(); }

// ---- Shared memory: addresses are offsets in the CTA's --------------------------------------------------------------

inline uint8_t* shared_memory() { return emulation::current().shared; }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulation::current().shared);
}
inline uint8_t* at_shared(uint32_t address) { return emulation::current().shared + address; }

struct Mbarrier {
  int8_t count, pending;
  uint16_t phase;
  int32_t bytes;

  void step() {
    if (pending != 0 || bytes != 0) return;
    pending = count;
    ++phase;
  }
};
static_assert(sizeof(Mbarrier) == 8, "as on a GPU");
inline Mbarrier& mbarrier_at(uint32_t address) { return *reinterpret_cast<Mbarrier*>(at_shared(address)); }

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  mbarrier_at(barrier) = {static_cast<int8_t>(arrivals), static_cast<int8_t>(arrivals), 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  if (mbarrier_at(barrier).pending == 0) emulation::fail("more arrivals at an mbarrier than its phase has");
  --mbarrier_at(barrier).pending;
  mbarrier_at(barrier).step();
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  mbarrier_at(barrier).bytes += static_cast<int32_t>(bytes);
  mbarrier_arrive(barrier);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  emulation::finish_copies();
  if ((mbarrier_at(barrier).phase & 1) != parity) return true;
  emulation::yield();
  emulation::finish_copies();
  return (mbarrier_at(barrier).phase & 1) != parity;
}
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  emulation::copy_later(to, from, bytes, barrier, [](uint32_t its_barrier, uint32_t its_bytes) {
    mbarrier_at(its_barrier).bytes -= static_cast<int32_t>(its_bytes);
    mbarrier_at(its_barrier).step();
  });
}
inline uint4 load_shared(uint32_t address) { return *reinterpret_cast<const uint4*>(at_shared(address)); }
inline uint32_t load_shared_word(uint32_t address) { return *reinterpret_cast<const uint32_t*>(at_shared(address)); }

inline void store_shared(uint32_t address, float x) { *reinterpret_cast<float*>(at_shared(address)) = x; }

// ---- Global memory --------------------------------------------------------------------------------------------------

inline uint32_t load_relaxed(const uint32_t* from) { return *from; }
template <typename Word>
void load_relaxed(const Word* from, int at, int end, Word& v) {
  if (at < end) v = *from;
}
template <typename Word>
void store_relaxed(Word* to, Word v) {
  *to = v;
}
inline uint32_t load_acquire(const uint32_t* from) { return *from; }
inline void store_release(uint32_t* to, uint32_t v) { *to = v; }
inline void add_release(uint32_t* to, uint32_t v) { *to += v; }

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
inline uint32_t bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float round_bf16(float x) { return low_bf16(bf16_bits(x)); }
inline uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  return to_bf16x2(low_bf16(x) * low_bf16(y), high_bf16(x) * high_bf16(y));
}
inline float divide(float x, float y) { return x / y; }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
  const uint32_t* all = emulation::exchange(mine, 6);
  const int r = this_lane() / 4, q = this_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = r + 8 * (i / 2), column = 2 * q + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t a_pair = all[(row % 8 * 4 + k % 8 / 2) * 6 + row / 8 + 2 * (k / 8)];
      const uint32_t b_pair = all[(column * 4 + k % 8 / 2) * 6 + 4 + k / 8];
      sum += (k % 2 ? high_bf16(a_pair) : low_bf16(a_pair)) * (k % 2 ? high_bf16(b_pair) : low_bf16(b_pair));
    }
    d[i] += sum;
  }
}

inline uint4 load_matrices_transposed(uint32_t address) {
  const uint32_t* rows = emulation::exchange(&address, 1);
  const int r = this_lane() / 4, q = this_lane() % 4;
  uint32_t words[4];
  for (int m = 0; m < 4; ++m) {
    const auto value = [&](int row) { return reinterpret_cast<const uint16_t*>(at_shared(rows[8 * m + row]))[r]; };
    words[m] = value(2 * q) | static_cast<uint32_t>(value(2 * q + 1)) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace muse
