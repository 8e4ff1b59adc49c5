// What a launch of the verify kernel is given: sizes, pointers and the places of its exchange buffers. Plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

#include "profile.h"
#include "shape.h"

namespace muse {

constexpr int kTileSize = kTileRows * kTileBytes;
constexpr int kTileScalesSize = kTileRows * kTileScales;  // after the codes of a tile of NVFP4
constexpr int kHead = 64;                                 // a head's values, padded
constexpr int kMaxExperts = 256;
constexpr int kMaxLayers = 128;
constexpr int kMaxTaps = 16;
constexpr int kMaxSplits = 32;       // parts of a KV head's committed keys
constexpr int kKeyBlock = 128;       // keys that a CTA loads at a time
constexpr int kPartial = kHead + 4;  // fp32 numbers of a partial attention row: values, maximum, sum, padding

struct Sizes : ModelShape {
  int rows;  // T
  int ranks_here, layers, window;
  bool loopback, quantized;
  float rms_eps, post_eps, score_scale, output_multiplier, softcap, routed_scaling;
};

// Of one rank, to spare the kernel the divisions.
struct RankSizes {
  int heads, kv_heads, qkv_rows, hidden, moe_hidden, moe_intermediate, vocab;
  int column_tiles, own_column_tiles;  // of 64 columns of D: of all ranks, and at most of one
  int parts_of_sum;                    // of o_proj's eight
  int groups;                          // query heads of a KV head
  int parts_of_keys, keys_of_part;     // of a block, among the warps of each query head
  int log2_ranks;
};

// A matrix in tiles of 64 rows, cut along K into slices of at most 16 tiles, or a stack of such matrices.
struct Geometry {
  int rows, row_tiles, k_tiles, slice_tiles, slices, tile_bytes;
  int shift;  // CTAs are turned by another step in each phase: who has a unit more in one has one less in another
  int width;  // of rows of activations
  uint32_t x, partial;  // buffers of activations, and of partial sums
  size_t offset;        // in the weights of its layer, or of the output layer
};
enum class MatrixId { kQkv, kO, kRouter, kPre, kGateUp, kDown, kPost, kHead, kCount };

// Offsets of the vectors of a layer's weights, of one rank.
struct LayerOffsets {
  size_t input_norm, post_attention_alpha, post_attention_beta, pre_ffn_norm, router_bias, pre_expert_norm;
  size_t gate_up_scale, down_scale, post_expert_norm, post_ffn_norm, post_ffn_alpha, post_ffn_beta;
  size_t bytes;
};

struct Layer {
  const uint8_t* weights;  // [ranks here, bytes of the layer]
  const uint16_t* keys;    // bf16 [KV heads here, slots, head_dim]
  const uint16_t* values;
  uint16_t* new_keys;  // bf16 [KV heads here, T, head_dim]
  uint16_t* new_values;
  int slots;
  uint32_t flags;
};

// Exchange buffers, of one rank and one round (a layer): offsets in bytes. ffi/README.md says who writes and who reads
// them. Every word of them is kAbsent until it is written, once a round.
constexpr uint32_t kAbsent = 0xffffffffu;
// Partial sums are [parts of K][row tiles of the matrix][rows][64].
struct Buffers {
  uint32_t qkv_partial;     // f32
  uint32_t q, gate;         // bf16 [rows][heads][64]
  uint32_t k, v;            // bf16 [KV heads][rows][64]
  uint32_t attn_partial;    // f32 [KV heads][splits + 1][q heads of one][rows][kPartial]
  uint32_t attn_out;        // bf16 [rows][heads][64]
  uint32_t o_partial;       // f32, of the column tiles that this rank adds up, parts of all ranks
  uint32_t o_sum;           // f32 [rows][D]
  uint32_t ffn_in;          // bf16 [rows][D]
  uint32_t router_partial;  // f32
  uint32_t routing;         // {u32 expert, f32 weight} [rows][kMaxTopK]
  uint32_t pre_partial;     // f32
  uint32_t pooled;          // f32 [rows][M], rounded to bf16
  uint32_t moe_in;          // bf16 [rows][M]
  uint32_t moe_scale;       // f32 [rows], where activations are quantised
  uint32_t hidden;          // bf16 [rows x top_k][F]
  uint32_t hidden_decoded;  // bf16 [rows x top_k][F], where activations are quantised
  uint32_t hidden_scale;    // f32 [rows x top_k], there, too
  uint32_t down;            // bf16 [rows x top_k][M]
  uint32_t mixed;           // bf16 [rows][M]
  uint32_t post_partial;    // f32
  uint32_t branch;          // f32 [rows][D], rounded to bf16
  uint32_t next_in;         // bf16 [rows][D]: after the next layer's input norm, or the final one
  uint32_t bytes;           // of all
};

constexpr int kRounds = 3;  // sets of exchange buffers, used in turn

// Why a call failed.
enum FailureCode : int32_t { kNoFailure = 0, kDeadline = 1, kOverlap = 2 };
constexpr int32_t kBeforePhases = -1;  // in place of a phase
struct Failure {
  int32_t code;
  int32_t rank, layer, phase;
  int32_t item;  // the CTA of the rank
  int32_t peer, reserved[2];
};

// A rank's memory for exchange; the buffers follow it. Counters only grow.
struct alignas(256) Workspace {
  uint32_t call;               // which is running; 0: none
  uint32_t round;              // the first round of the next call
  uint32_t exited;             // CTAs that left the last launch of a call
  uint32_t signed_off[4];      // CTAs that have read everything of a round: round r in [r % 4]
  uint32_t cleared[4];         // CTAs that have cleared their part of the buffers of round r: [r % 4]
  uint32_t opened[kMaxRanks];  // the newest round for which rank r has cleared its buffers
  uint32_t aborted;            // somebody gave up: nobody waits any more
  Failure failure;
};

struct Launch {
  Sizes sizes;
  RankSizes of_rank;
  Geometry matrices[2][static_cast<int>(MatrixId::kCount)];  // of layers with bf16 experts, with NVFP4 ones
  Buffers buffers;
  LayerOffsets offsets[2];  // as `matrices`
  const uint8_t* head;      // [ranks here, head_bytes]
  size_t head_bytes, final_norm_offset;
  const uint16_t* embedding;  // bf16 [ranks here, V / R, D]
  const int32_t* tokens;
  const int32_t* positions;
  const int32_t* length;
  const uint8_t* visible;
  const float* rope;
  const int32_t* ring_positions;
  const int32_t* forced_idx;  // null: the router chooses
  const float* forced_weights;
  float* logits;  // [ranks here, T, V / R]
  float* taps;    // [taps, T, D]
  float* stream;  // [2, ranks here, rows, D]: the residual stream after post_ffn and after post_attn
  int32_t* status;
  ProfileTarget profile;
  Workspace* workspaces[kMaxRanks];  // of every rank, in this device's address space; in loopback all are the own
  int first_rank;                    // of those here
  int ctas_per_rank;
  uint32_t ctas_reciprocal;  // 2^32 / ctas_per_rank, rounded up
  uint64_t deadline_ns;
  uint32_t call;   // another number for each
  int begin, end;  // layers of this launch; -1 is the embedding
  int num_taps;
  int taps_layers[kMaxTaps];
  Layer layers[kMaxLayers];
};

}  // namespace muse
