// A ring of stages in shared memory, filled by bulk copies in the order in which the consumers need them, across phases
// and layers: weights and committed keys do not depend on anything in flight.
#pragma once

#include "profile.cuh"

namespace muse {

struct RingPosition {
  uint32_t stage;  // since the launch began
  __device__ uint32_t slot() const { return stage % kStages; }
  __device__ uint32_t parity() const { return stage / kStages & 1; }
};

__device__ __forceinline__ void wait_for_barrier(const Cta& cta, uint64_t* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
#pragma unroll 1
  while (!mbarrier_try_wait(address, parity) && !cta.waiting.is_over()) {
  }
}

// The producer's side: one thread.
struct Producer {
  const Cta& cta;
  uint64_t policy;
  uint32_t next = 0;
  uint32_t waited_ns = 0;  // for free stages, if anybody wants to know

  __device__ void load(const void* from, uint32_t bytes) {
    const RingPosition at{next};
    const uint32_t before = profile_clock(cta);
    wait_for_barrier(cta, &cta.shared.empty[at.slot()], at.parity() ^ 1);
    waited_ns += profile_clock(cta) - before;
    // Consumers that wait no longer release stages to which something is still on its way.
    if (*cta.waiting.aborted) return;
    ++next;
    const uint32_t full = shared_address(&cta.shared.full[at.slot()]);
    mbarrier_arrive_expect(full, bytes);
    bulk_copy(shared_address(cta.shared.stages[at.slot()]), from, bytes, full, policy);
  }
};

// The consumers' side; every consumer warp counts the same stages.
struct Consumer {
  uint32_t next = 0;

  __device__ uint32_t wait(const Cta& cta, uint32_t offset) const {
    const RingPosition at{next + offset};
    wait_for_barrier(cta, &cta.shared.full[at.slot()], at.parity());
    __syncwarp();  // the compiler takes a warp for divergent after such a loop
    return shared_address(cta.shared.stages[at.slot()]);
  }
  // Two warps share a stage: each says that it has read it.
  __device__ void release(const Cta& cta, uint32_t offset) const {
    __syncwarp();
    if (cta.lane == 0) mbarrier_arrive(shared_address(&cta.shared.empty[RingPosition{next + offset}.slot()]));
  }
};

}  // namespace muse
