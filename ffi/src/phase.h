// The phases of a step. Plain C++.
#pragma once

#include <cstdint>

namespace muse {

// What a layer's launch does, in this order; the embedding comes before layer 0, lm_head after the last.
enum class Phase : int32_t {
  kHeads,  // of q, k, v and gate: sums of the qkv projection, norm, RoPE
  kAttention,
  kMergeAttention,
  kOProj,
  kOSum,
  kPostAttention,
  kRouter,
  kPreExpertProj,
  kTopK,
  kPooled,
  kMoeIn,
  kExpertGateUp,
  kQuantizeHidden,
  kExpertDown,
  kCombine,
  kPostExpertProj,
  kBranch,
  kPostFfn,
  kEmbed,
  kQkv,
  kLmHead,
};
constexpr int kNumPhases = static_cast<int>(Phase::kLmHead) + 1;

}  // namespace muse
