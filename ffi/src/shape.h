// Sizes of a model, and where things are in the buffers of its weights: the tables of ffi/layout.py in C++.
//
// Plain C++17 that a kernel may include as well: everything here is made of numbers. What a tile looks like inside is
// said in the docstring of ffi/layout.py.

#ifndef MUSE_FFI_SHAPE_H_
#define MUSE_FFI_SHAPE_H_

#include <cstdint>

#ifdef __CUDACC__
#define MUSE_HOST_DEVICE __host__ __device__
#else
#define MUSE_HOST_DEVICE
#endif

namespace muse {

constexpr int kTileRows = 64;    // output rows
constexpr int kTileBytes = 128;  // of a row of a tile
constexpr int kTileScales = 16;  // of a row of a tile of NVFP4
constexpr int kChunk = 16;       // bytes that the swizzle moves together
constexpr int kScaleBlock = 16;  // NVFP4 values that share a scale
constexpr int kNumParts = 8;     // that a sum over K of o_proj is cut into, whatever the number of ranks
constexpr int kMaxRows = 16;     // of a step
constexpr int kMaxTopK = 8;
constexpr int kMaxRanks = 8;
constexpr int kStatusSize = 8;

// Bits of a word that hold sign, exponent (two) and mantissa of the even code of each pair; those of the odd code are
// 16 bits higher.
constexpr int kCodeBits[4][4] = {{15, 8, 7, 6}, {12, 5, 4, 3}, {9, 2, 1, 0}, {14, 11, 10, 13}};

// The place, among the 16 scales of a row of a tile, of the scale of block `block`.
MUSE_HOST_DEVICE constexpr int scale_place(int block) {
  const int half = block / 8, chunk = block % 8 / 2;
  return 4 * chunk + 2 * half + block % 2;
}

// Bits of an element of the attribute `layer_flags`.
constexpr int kSlidingFlag = 1, kRopeFlag = 2, kNvfp4Flag = 4;

struct ModelShape {
  int hidden;            // D
  int heads;             // N
  int kv_heads;          // K
  int head_dim;          // H
  int moe_hidden;        // M
  int moe_intermediate;  // F
  int experts;           // E
  int top_k;
  int vocab;  // V
  int ranks;  // R, that share the model

  MUSE_HOST_DEVICE constexpr int of_rank(int size) const { return size / ranks; }
  MUSE_HOST_DEVICE constexpr int parts_per_rank() const { return kNumParts / ranks; }
  MUSE_HOST_DEVICE constexpr int heads_per_part() const { return heads / kNumParts; }
};

enum class WeightKind { kBf16, kFp32, kNvfp4 };

// A matrix [rows, k], or a stack of them, in a rank's buffer.
struct Segment {
  int64_t offset;
  WeightKind kind;
  int count;  // matrices
  int rows, k;

  MUSE_HOST_DEVICE constexpr int tile_k() const {
    return kind == WeightKind::kBf16 ? kTileBytes / 2 : kind == WeightKind::kFp32 ? kTileBytes / 4 : kTileBytes * 2;
  }
  MUSE_HOST_DEVICE constexpr int tile_bytes() const {
    return kTileRows * (kTileBytes + (kind == WeightKind::kNvfp4 ? kTileScales : 0));
  }
  MUSE_HOST_DEVICE constexpr int row_tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  MUSE_HOST_DEVICE constexpr int k_tiles() const { return (k + tile_k() - 1) / tile_k(); }
  MUSE_HOST_DEVICE constexpr int64_t matrix_bytes() const {
    return int64_t{1} * row_tiles() * k_tiles() * tile_bytes();
  }
  MUSE_HOST_DEVICE constexpr int64_t end() const { return offset + count * matrix_bytes(); }
  // Of the tile that holds row `row` of matrix `matrix`, `k_tile` tiles along K.
  MUSE_HOST_DEVICE constexpr int64_t tile_offset(int matrix, int row, int k_tile) const {
    return offset + matrix * matrix_bytes() + (int64_t{1} * (row / kTileRows) * k_tiles() + k_tile) * tile_bytes();
  }
};

// fp32 numbers in a rank's buffer.
struct Vector {
  int64_t offset;
  int size;

  MUSE_HOST_DEVICE constexpr int64_t end() const {
    return offset + (int64_t{4} * size + kTileBytes - 1) / kTileBytes * kTileBytes;
  }
};

// A layer's buffer, in its order.
struct LayerTable {
  Segment qkv_gate;  // heads of q, k, v and gate, each padded to a tile's rows
  Segment o_proj;    // its K: heads, each padded to kTileRows columns
  Segment router;
  Segment pre_expert_proj;
  Segment gate_up;  // row 2 i is row i of gate, 2 i + 1 of up
  Segment down;
  Segment post_expert_proj;
  Vector input_norm;
  Vector post_attention_alpha, post_attention_beta;
  Vector pre_ffn_norm;
  Vector router_bias;
  Vector pre_expert_norm;
  Vector gate_up_scale;  // [E, 2]
  Vector down_scale;
  Vector post_expert_norm;
  Vector post_ffn_norm;
  Vector post_ffn_alpha, post_ffn_beta;

  MUSE_HOST_DEVICE constexpr int64_t num_bytes() const { return post_ffn_beta.end(); }
};

// nvfp4: whether the layer's experts are.
MUSE_HOST_DEVICE constexpr LayerTable make_layer_table(const ModelShape& shape, bool nvfp4) {
  const int d = shape.hidden, m = shape.moe_hidden, f = shape.moe_intermediate, e = shape.experts;
  const int heads = shape.of_rank(shape.heads), kv_heads = shape.of_rank(shape.kv_heads);
  const WeightKind bf16 = WeightKind::kBf16, expert = nvfp4 ? WeightKind::kNvfp4 : bf16;
  LayerTable table{};
  table.qkv_gate = {0, bf16, 1, (2 * heads + 2 * kv_heads) * kTileRows, d};
  table.o_proj = {table.qkv_gate.end(), bf16, 1, d, heads * kTileRows};
  table.router = {table.o_proj.end(), WeightKind::kFp32, 1, e, d};
  table.pre_expert_proj = {table.router.end(), bf16, 1, shape.of_rank(m), d};
  table.gate_up = {table.pre_expert_proj.end(), expert, e, 2 * shape.of_rank(f), m};
  table.down = {table.gate_up.end(), expert, e, shape.of_rank(m), f};
  table.post_expert_proj = {table.down.end(), bf16, 1, shape.of_rank(d), m};
  table.input_norm = {table.post_expert_proj.end(), d};
  table.post_attention_alpha = {table.input_norm.end(), d};
  table.post_attention_beta = {table.post_attention_alpha.end(), d};
  table.pre_ffn_norm = {table.post_attention_beta.end(), d};
  table.router_bias = {table.pre_ffn_norm.end(), e};
  table.pre_expert_norm = {table.router_bias.end(), m};
  table.gate_up_scale = {table.pre_expert_norm.end(), 2 * e};
  table.down_scale = {table.gate_up_scale.end(), e};
  table.post_expert_norm = {table.down_scale.end(), m};
  table.post_ffn_norm = {table.post_expert_norm.end(), d};
  table.post_ffn_alpha = {table.post_ffn_norm.end(), d};
  table.post_ffn_beta = {table.post_ffn_alpha.end(), d};
  return table;
}

// The buffer of the output layer.
struct HeadTable {
  Segment lm_head;
  Vector final_norm;

  MUSE_HOST_DEVICE constexpr int64_t num_bytes() const { return final_norm.end(); }
};

MUSE_HOST_DEVICE constexpr HeadTable make_head_table(const ModelShape& shape) {
  HeadTable table{};
  table.lm_head = {0, WeightKind::kBf16, 1, shape.of_rank(shape.vocab), shape.hidden};
  table.final_norm = {table.lm_head.end(), shape.hidden};
  return table;
}

// What a rank has in its trace of a layer, in its order; every array is [T, width]. As `trace_shapes` of ffi/verify.py.
struct TraceEntry {
  int64_t offset;  // in fp32 numbers
  int width;       // of a row

  MUSE_HOST_DEVICE constexpr int64_t end(int rows) const { return offset + int64_t{1} * rows * width; }
};

struct TraceTable {
  TraceEntry attn_in;
  TraceEntry q, k, v, gate;  // heads of this rank
  TraceEntry attn_out;       // gated
  TraceEntry o_sum;
  TraceEntry stream_mid;
  TraceEntry ffn_in;
  TraceEntry router_logits;
  TraceEntry idx;
  TraceEntry weights;
  TraceEntry pooled;
  TraceEntry moe_in;
  TraceEntry hidden;  // [top_k, F] a row
  TraceEntry down;    // [top_k, M] a row
  TraceEntry mixed;
  TraceEntry branch;
  TraceEntry stream;
  int64_t size;
};

MUSE_HOST_DEVICE constexpr TraceTable make_trace_table(const ModelShape& shape, int rows) {
  const int d = shape.hidden, m = shape.moe_hidden, k = shape.top_k;
  const int q = shape.of_rank(shape.heads) * shape.head_dim, kv = shape.of_rank(shape.kv_heads) * shape.head_dim;
  TraceTable table{};
  table.attn_in = {0, d};
  table.q = {table.attn_in.end(rows), q};
  table.k = {table.q.end(rows), kv};
  table.v = {table.k.end(rows), kv};
  table.gate = {table.v.end(rows), q};
  table.attn_out = {table.gate.end(rows), q};
  table.o_sum = {table.attn_out.end(rows), d};
  table.stream_mid = {table.o_sum.end(rows), d};
  table.ffn_in = {table.stream_mid.end(rows), d};
  table.router_logits = {table.ffn_in.end(rows), shape.experts};
  table.idx = {table.router_logits.end(rows), k};
  table.weights = {table.idx.end(rows), k};
  table.pooled = {table.weights.end(rows), m};
  table.moe_in = {table.pooled.end(rows), m};
  table.hidden = {table.moe_in.end(rows), k * shape.moe_intermediate};
  table.down = {table.hidden.end(rows), k * m};
  table.mixed = {table.down.end(rows), m};
  table.branch = {table.mixed.end(rows), d};
  table.stream = {table.branch.end(rows), d};
  table.size = table.stream.end(rows);
  return table;
}

}  // namespace muse

#endif  // MUSE_FFI_SHAPE_H_
