// The operands, results and attributes of "muse_verify" as a plain struct, the same for every platform.

#ifndef MUSE_FFI_ARGUMENTS_H_
#define MUSE_FFI_ARGUMENTS_H_

#include <cstdint>
#include <vector>

#include "profile.h"
#include "shape.h"
#include "xla/ffi/api/ffi.h"

namespace muse {

// Of one layer. bf16 numbers are their 16 bits; pointers are the device's.
struct LayerArguments {
  bool sliding;  // else global
  bool rope;
  bool nvfp4;              // its experts are
  const uint8_t* weights;  // [ranks here, weight_bytes], `LayerTable`
  int64_t weight_bytes;    // of a rank
  const uint16_t* keys;    // bf16 [1, ranks here K/R, slots, H]
  const uint16_t* values;  // the same
  int slots;
  uint16_t* new_keys;    // bf16 [1, ranks here K/R, T, H]
  uint16_t* new_values;  // the same
};

struct VerifyArguments {
  ModelShape shape;
  int rows;        // T
  int ranks_here;  // all (emulated, on one device), or 1 (of a mesh, or of a loopback)
  bool loopback;   // rank 0, which reads its own data wherever it would read another rank's
  bool quantized;  // activations of NVFP4 experts are NVFP4
  int window;      // keys that a row sees in sliding layers, its own included
  int layers_per_launch;
  int trace_layer;  // -1: none
  int64_t deadline_ms;
  float rms_eps;
  float post_eps;
  float score_scale;
  float output_multiplier;
  float softcap;
  float routed_scaling;
  std::vector<int> taps;  // layers

  const int32_t* tokens;          // [T]
  const int32_t* positions;       // [T]
  const int32_t* length;          // [1], committed positions
  const int32_t* rank;            // [1], the first one here; a GPU's is known from muse_ffi_prepare, and must be this
  const uint8_t* visible;         // bool [T, T], row i sees row j
  const float* rope;              // [2, T, H/2], cos and sin
  const int32_t* ring_positions;  // [slots of sliding layers]
  const int32_t* forced_idx;      // [L, T, top_k]; null: the router chooses
  const float* forced_weights;    // the same
  const uint16_t* embedding;      // bf16 [ranks here, V/R, D]
  const uint8_t* head;            // [ranks here, head_bytes], `HeadTable`
  int64_t head_bytes;             // of a rank
  std::vector<LayerArguments> layers;

  float* logits;       // [ranks here, T, V/R]
  float* tap_streams;  // [taps, T, D]
  float* trace;        // [ranks here, trace_size], `TraceTable`
  int64_t trace_size;  // 0 without a trace
  ProfileTarget profile;
  int32_t* status;  // [kStatusSize]

  int num_layers() const { return static_cast<int>(layers.size()); }
  // The others' calls are for other devices.
  bool is_of_mesh() const { return ranks_here < shape.ranks && !loopback; }
};

// Fills `out` from the call frame. An error (InvalidArgument) names the first operand, result or attribute that is not
// what the contract says, what it is and what is allowed. Only sizes and types are looked at, no data.
xla::ffi::Error parse_verify_arguments(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                                       xla::ffi::Dictionary attributes, VerifyArguments* out);

}  // namespace muse

#endif  // MUSE_FFI_ARGUMENTS_H_
