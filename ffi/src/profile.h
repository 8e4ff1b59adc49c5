// The result `profile` of a call: when each thread that records was in which phase. Plain C++; ffi/profile.py reads it.
//
//   of each rank: a header, then events [CTAs][roles][events kept], an event at the place of its layer and phase
//
// An event that has no place is not kept. Places of phases that a thread does not record stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phase.h"
#include "shape.h"

namespace muse {

enum ProfileRole { kConsumerRole, kProducerRole, kNumProfileRoles };

// CTAs of all ranks of a device that have places: as many as it may have SMs.
constexpr int kProfileCtas = 192;
constexpr int kMaxProfileEvents = 1 << 16;  // of a thread

struct ProfileHeader {
  uint32_t ctas;   // of this rank; 0: the call was refused or given up
  uint32_t roles;  // that record; 1: the Host reference, a CPU thread
  uint32_t rank;   // of the model
  uint32_t reserved;
};

struct ProfileEvent {
  uint64_t begin_ns, end_ns;
  uint32_t waited_ns;  // producer: for stages to become free
  uint32_t place;      // its own
};
static_assert(sizeof(ProfileHeader) == 16 && sizeof(ProfileEvent) == 24, "as in ffi/profile.py");

// layer: -1 for the embedding. The qkv projection of layer l + 1 belongs to layer l.
MUSE_HOST_DEVICE constexpr int profile_place(int layer, Phase phase) {
  return (layer + 1) * kNumPhases + static_cast<int>(phase);
}

struct ProfileTarget {
  uint8_t* ranks;       // [ranks here, rank_bytes]; null: nothing is recorded
  uint32_t rank_bytes;  // 0 if nothing is
  int ctas;             // of a rank that have places
  int events;           // that each thread keeps

  static ProfileTarget create(int ranks_here, int events) {
    const int ctas = kProfileCtas / ranks_here;
    const size_t bytes = sizeof(ProfileHeader) + sizeof(ProfileEvent) * ctas * kNumProfileRoles * events;
    return {nullptr, static_cast<uint32_t>(events == 0 ? 0 : bytes), ctas, events};
  }
  // here: a rank's number among those of this device.
  MUSE_HOST_DEVICE ProfileHeader* header(int here) const {
    return reinterpret_cast<ProfileHeader*>(ranks + static_cast<size_t>(here) * rank_bytes);
  }
  // For places in the buffer only.
  MUSE_HOST_DEVICE ProfileEvent* event(int here, int cta, ProfileRole role, int place) const {
    ProfileEvent* first = reinterpret_cast<ProfileEvent*>(header(here) + 1);
    return first + ((cta * kNumProfileRoles + role) * events + place);
  }
};

}  // namespace muse
