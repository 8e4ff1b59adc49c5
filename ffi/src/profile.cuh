// The self-profiler: when asked for, two threads of each CTA record when they were in which phase (profile.h). Else it
// is a branch that all threads take alike.
#pragma once

#include "cta.cuh"

namespace muse {

__device__ __forceinline__ bool is_profiled(const Cta& cta) { return cta.launch.profile.ranks != nullptr; }

// For differences; 0 where nothing is recorded.
__device__ __forceinline__ uint32_t profile_clock(const Cta& cta) {
  return is_profiled(cta) ? static_cast<uint32_t>(global_timer_ns()) : 0;
}

// One thread of a role has ended a phase, and begins the next one.
__device__ __forceinline__ void record(const Cta& cta, ProfileRole role, Phase phase, int l, uint32_t waited_ns) {
  const ProfileTarget& target = cta.launch.profile;
  const uint64_t now = global_timer_ns(), began = cta.shared.phase_began[role];
  cta.shared.phase_began[role] = now;
  const int place = profile_place(l, phase);
  if (place >= target.events || cta.index >= target.ctas) return;
  *target.event(cta.here, cta.index, role, place) = {began, now, waited_ns, static_cast<uint32_t>(place)};
}

}  // namespace muse
