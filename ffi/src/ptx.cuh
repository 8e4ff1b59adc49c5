// Every piece of inline PTX, under names that say what it does.
#pragma once

#ifdef MUSE_EMULATED
#include "emulation/ptx.h"
#else

#include <cstdint>

namespace muse {

// ---- Warps and time -------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What the compiler knows of x it forgets: it does not compute in advance, and keep in registers, what follows from it.
__device__ __forceinline__ void forget(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void forget(uint32_t& x) { asm volatile("" : "+r"(x)); }

// In a loop that waits for others.
__device__ __forceinline__ void pause() {}

// A barrier of some of the CTA's threads, all of which call it.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// ---- Shared memory: mbarriers and bulk copies -----------------------------------------------------------------------

// The CTA's, of the size that it was launched with.
__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  return dynamic_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is over; the hardware waits a little before it says no.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// An L2 policy: lines of a stream that is read once leave before everything else.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// bytes: a multiple of 16, as are both addresses.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// ---- Global memory that other CTAs and GPUs write while we look at it -----------------------------------------------

// Relaxed: each word arrives by itself, and whether it is there can be seen in it.

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Loads where at < end, else v stays as it is. No branches, so that a warp's loads follow each other, and no predicates
// that would have to be kept.
__device__ __forceinline__ void load_relaxed(const uint4* from, int at, int end, uint4& v) {
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.lt.s32 p, %5, %6;\n"
      " @p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(at), "r"(end)
      : "memory");
}

__device__ __forceinline__ void load_relaxed(const uint2* from, int at, int end, uint2& v) {
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.lt.s32 p, %3, %4;\n"
      " @p ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];\n}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(from), "r"(at), "r"(end)
      : "memory");
}

__device__ __forceinline__ void load_relaxed(const uint32_t* from, int at, int end, uint32_t& v) {
  asm volatile(
      "{\n .reg .pred p;\n"
      " setp.lt.s32 p, %2, %3;\n"
      " @p ld.relaxed.sys.global.u32 %0, [%1];\n}"
      : "+r"(v)
      : "l"(from), "r"(at), "r"(end)
      : "memory");
}

__device__ __forceinline__ void store_relaxed(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_relaxed(uint2* to, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void add_release(uint32_t* to, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

// d += a b^T for 16 rows of a and 8 of b over 16 values of K, bf16 in, fp32 out.
__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values, each transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 load_matrices_transposed(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Two fp32 numbers rounded to bf16, the first in the low half. A NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  uint32_t z;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
  return z;
}

// Without the calls that exact divisions may make, which registers of the loops around would not survive. Wrong by up
// to 2 ulp.
__device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float round_bf16(float x) { return low_bf16(to_bf16x2(x, 0.0f)); }

}  // namespace muse

#endif  // MUSE_EMULATED
