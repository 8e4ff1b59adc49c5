#include "host_reference.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

namespace muse {
namespace {

using Floats = std::vector<float>;

// ---- Numbers --------------------------------------------------------------------------------------------------------

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float from_bf16(uint16_t x) { return from_bits(uint32_t{x} << 16); }

// Of a value that is one of bf16.
uint16_t as_bf16(float x) { return static_cast<uint16_t>(bits_of(x) >> 16); }

// Rounded to bf16, ties to even. Activations that are bf16 are kept as such fp32 numbers.
float to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (std::isnan(x)) return from_bits((bits | 0x00400000u) & 0xffff0000u);
  return from_bits((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

float from_e2m1(int code) {
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// Of e4m3 without a sign.
float from_e4m3(uint8_t x) {
  const int exponent = x >> 3, mantissa = x & 7;
  if (x == 0x7f) return NAN;
  return exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
}

// n is a multiple of 8. Eight sums side by side, which a compiler may keep in vector registers without changing any.
float dot(const float* x, const float* y, int n) {
  float sums[8] = {};
  for (int i = 0; i < n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// What x [n] is multiplied by so that its mean square is 1.
float rms_factor(const float* x, int n, float eps) { return 1 / std::sqrt(dot(x, x, n) / n + eps); }

// bf16(rms(x) weight)
void norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  const float factor = rms_factor(x, n, eps);
  for (int i = 0; i < n; ++i) out[i] = to_bf16(x[i] * factor * weight[i]);
}

// The larger one, or NaN if one is.
float max_or_nan(float x, float y) { return std::isnan(x) || x > y ? x : y; }

float largest_magnitude(const float* x, int n) {
  float largest = 0;
  for (int i = 0; i < n; ++i) largest = max_or_nan(std::abs(x[i]), largest);
  return largest;
}

// ---- NVFP4 activations: muse_jax.nvfp4.quantize_rows, the same bits -------------------------------------------------

constexpr float kE4m3Max = 448, kInverseE2m1Max = 1 / 6.0;

// The scale of a row with this largest magnitude; 0 for a row of (nearly) zeros.
float row_scale(float amax) {
  return amax < std::ldexp(1.0f, -100) ? 0.0f : amax * static_cast<float>(1 / (6.0 * 448.0));
}

// The nearest e4m3 value of x from 0 to 448.
float nearest_e4m3(float x) {
  const float power = from_bits(bits_of(x) & 0x7f800000u);  // of two, at most x
  const float step = max_or_nan(power, std::ldexp(1.0f, -6)) * 0.125f;
  return std::nearbyint(x / step) * step;
}

// The nearest e2m1 value, saturating; NaN gives 6.
float nearest_e2m1(float x) {
  const float a = std::abs(x);
  // Steps are 0.5 up to 2, 1 up to 4, 2 up to 6.
  const float step = a < 2 ? 0.5f : a < 4 ? 1.0f : 2.0f;
  const float magnitude = a < 6 ? std::nearbyint(a / step) * step : 6.0f;
  return std::copysign(magnitude, x);
}

// Replaces x [n], a piece of a row with the scale `scale_of_row`, by what its codes and block scales stand for.
void quantize(float* x, int n, float scale_of_row) {
  const float encode_scale = 1 / (scale_of_row == 0 ? 1.0f : scale_of_row);
  for (float* block = x; block < x + n; block += kScaleBlock) {
    const float sixth = largest_magnitude(block, kScaleBlock) * kInverseE2m1Max;
    const float wanted = encode_scale * sixth;
    const float scale = nearest_e4m3(wanted > kE4m3Max ? kE4m3Max : wanted);
    const float reciprocal = 1 / ((scale == 0 ? 1.0f : scale) * (1 / encode_scale));
    for (int i = 0; i < kScaleBlock; ++i) block[i] = scale == 0 ? 0.0f : nearest_e2m1(block[i] * reciprocal) * scale;
  }
}

// ---- Weights: what the docstring of ffi/layout.py says --------------------------------------------------------------

// Code i of the eight in a word.
int code_of(uint32_t word, int i) {
  const int* bits = kCodeBits[i / 2];
  const int half = 16 * (i % 2);
  int code = 0;
  for (int b = 0; b < 4; ++b) code = code << 1 | static_cast<int>(word >> (bits[b] + half) & 1);
  return code;
}

// Row `row` of matrix `matrix`, without the global scale. out: [segment.k].
void decode_row(const uint8_t* buffer, const Segment& segment, int matrix, int row, float* out) {
  const int r = row % kTileRows;
  for (int k_tile = 0; k_tile < segment.k_tiles(); ++k_tile) {
    const uint8_t* tile = buffer + segment.tile_offset(matrix, row, k_tile);
    uint8_t line[kTileBytes];
    for (int c = 0; c < kTileBytes / kChunk; ++c) {
      std::memcpy(line + kChunk * c, tile + kTileBytes * r + kChunk * (c ^ (r & 7)), kChunk);
    }
    float* values = out + k_tile * segment.tile_k();
    const int n = std::min(segment.tile_k(), segment.k - k_tile * segment.tile_k());
    switch (segment.kind) {
      case WeightKind::kFp32: std::memcpy(values, line, 4 * n); break;
      case WeightKind::kBf16: {
        uint16_t numbers[kTileBytes / 2];
        std::memcpy(numbers, line, sizeof(numbers));
        for (int i = 0; i < n; ++i) values[i] = from_bf16(numbers[i]);
        break;
      }
      case WeightKind::kNvfp4: {
        const uint8_t* scales = tile + kTileRows * kTileBytes + kTileScales * r;
        uint32_t words[kTileBytes / 4];
        std::memcpy(words, line, sizeof(words));
        for (int block = 0; block < n / kScaleBlock; ++block) {
          const float scale = from_e4m3(scales[scale_place(block)]);
          for (int i = kScaleBlock * block; i < kScaleBlock * (block + 1); ++i) {
            values[i] = from_e2m1(code_of(words[i / 8], i % 8)) * scale;
          }
        }
        break;
      }
    }
  }
}

// use(n, row n [k]) for every row of a matrix: decoded once, for all rows of x that need it.
template <typename Use>
void for_each_row(const uint8_t* buffer, const Segment& segment, int matrix, Use use) {
  Floats row(segment.k);
  for (int n = 0; n < segment.rows; ++n) {
    decode_row(buffer, segment, matrix, n, row.data());
    use(n, row.data());
  }
}

const float* vector_at(const uint8_t* buffer, const Vector& vector) {
  return reinterpret_cast<const float*>(buffer + vector.offset);
}

// ---- The step -------------------------------------------------------------------------------------------------------

// The memory of one rank. A name with `own_` is what the rank computes of something that all ranks gather; without it,
// what it gathered. P is T top_k, the routed rows: row t's slot s is routed row t top_k + s.
struct Rank {
  const VerifyArguments* args;  // of the call that it is in
  int index;                    // of its part of their operands and results

  Floats stream;                // [T, D] fp32
  Floats x;                     // [T, D] bf16, what qkv_gate and lm_head read
  Floats q, gate;               // [T, N/R, H] bf16
  Floats k, v;                  // [T, K/R, H] bf16
  Floats attn_out;              // [T, N/R, H] bf16
  Floats own_o_parts, o_parts;  // [8/R, T, D], [8, T, D] fp32
  Floats ffn_in;                // [T, D] bf16
  std::vector<int> idx;         // [T, top_k]
  Floats weights;               // [T, top_k]
  Floats own_pooled, pooled;    // [T, M/R], [T, M] bf16
  Floats moe_in;                // [T, M] bf16, or decoded NVFP4
  Floats moe_in_scale;          // [T], of the rows of moe_in; 1 where they are bf16
  Floats own_hidden, hidden;    // [P, F/R], [P, F] bf16, or decoded NVFP4
  Floats own_amax, amax;        // [P, 1], [P, R], largest magnitudes of the pieces of rows of hidden
  Floats hidden_scale;          // [P], as moe_in_scale
  Floats own_down, down;        // [P, M/R], [P, M] bf16
  Floats mixed;                 // [T, M] bf16
  Floats own_branch, branch;    // [T, D/R], [T, D] bf16
};

class Step {
 public:
  explicit Step(const std::vector<const VerifyArguments*>& calls)
      : args_(*calls[0]),
        shape_(args_.shape),
        rows_(args_.rows),
        routed_(args_.rows * shape_.top_k),
        trace_table_(make_trace_table(shape_, args_.rows)) {
    for (const VerifyArguments* call : calls) {
      for (int i = 0; i < call->ranks_here; ++i) {
        ranks_.emplace_back();
        ranks_.back().args = call;
        ranks_.back().index = i;
      }
    }
  }

  void run() {
    begin_profile();
    phase(Phase::kEmbed, -1, [&](Rank& rank) { embed(rank); });
    phase(Phase::kQkv, -1, [&](Rank& rank) { qkv(0, rank); });
    for (int layer = 0; layer < args_.num_layers(); ++layer) {
      phase(Phase::kAttention, layer, [&](Rank& rank) { attention(layer, rank); });
      phase(Phase::kOProj, layer, [&](Rank& rank) { o_proj(layer, rank); });
      gather(1, &Rank::own_o_parts, &Rank::o_parts);
      phase(Phase::kPostAttention, layer, [&](Rank& rank) { post_attn(layer, rank); });
      phase(Phase::kRouter, layer, [&](Rank& rank) { router(layer, rank); });
      phase(Phase::kPreExpertProj, layer, [&](Rank& rank) { pre_expert_proj(layer, rank); });
      gather(rows_, &Rank::own_pooled, &Rank::pooled);
      phase(Phase::kExpertGateUp, layer, [&](Rank& rank) { expert_gate_up(layer, rank); });
      if (quantized(layer)) {  // gather_fp4
        gather(routed_, &Rank::own_amax, &Rank::amax);
        phase(Phase::kQuantizeHidden, layer, [&](Rank& rank) { quantize_hidden(rank); });
      }
      gather(routed_, &Rank::own_hidden, &Rank::hidden);
      phase(Phase::kExpertDown, layer, [&](Rank& rank) { expert_down(layer, rank); });
      gather(routed_, &Rank::own_down, &Rank::down);  // gather_bf16
      phase(Phase::kCombine, layer, [&](Rank& rank) { combine(layer, rank); });
      phase(Phase::kPostExpertProj, layer, [&](Rank& rank) { post_expert_proj(layer, rank); });
      gather(rows_, &Rank::own_branch, &Rank::branch);
      phase(Phase::kPostFfn, layer, [&](Rank& rank) { post_ffn(layer, rank); });
      if (layer + 1 < args_.num_layers()) {
        phase(Phase::kQkv, layer, [&](Rank& rank) { qkv(layer + 1, rank); });
      } else {
        phase(Phase::kLmHead, layer, [&](Rank& rank) { lm_head(rank); });
      }
    }
    for (const Rank& rank : ranks_) std::fill_n(rank.args->status, kStatusSize, 0);
  }

 private:
  // run(rank) for each of them, as a phase of the profile: the kernel's that it stands for, with the work of those
  // before it that have no own one here.
  template <typename Run>
  void phase(Phase phase, int layer, const Run& run) {
    for (Rank& rank : ranks_) {
      const uint64_t began = now_ns();
      run(rank);
      const ProfileTarget& profile = rank.args->profile;
      const int place = profile_place(layer, phase);
      if (profile.ranks == nullptr || place >= profile.events) continue;
      *profile.event(rank.index, 0, kConsumerRole, place) = {began, now_ns(), 0, static_cast<uint32_t>(place)};
    }
  }

  void begin_profile() {
    if (args_.profile.ranks == nullptr) return;
    for (size_t number = 0; number < ranks_.size(); ++number) {
      ProfileHeader* header = ranks_[number].args->profile.header(ranks_[number].index);
      std::memset(header, 0, args_.profile.rank_bytes);
      *header = {1, 1, static_cast<uint32_t>(number), 0};
    }
  }

  static uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  // stream = rms(row of the embedding); the first layer's input norm
  void embed(Rank& rank) {
    const int hidden = shape_.hidden, vocab = shape_.of_rank(shape_.vocab);
    rank.stream.resize(rows_ * hidden);
    for (int t = 0; t < rows_; ++t) {
      const Rank& owner = args_.loopback ? rank : ranks_[args_.tokens[t] / vocab];
      const int64_t at = int64_t{1} * owner.index * vocab + args_.tokens[t] % vocab;
      const uint16_t* row = owner.args->embedding + at * hidden;
      float* out = &rank.stream[t * hidden];
      for (int i = 0; i < hidden; ++i) out[i] = from_bf16(row[i]);
      const float factor = rms_factor(out, hidden, args_.rms_eps);
      for (int i = 0; i < hidden; ++i) out[i] *= factor;
    }
    norm_rows(rank.stream, vector_at(weights(0, rank), table(0).input_norm), hidden, &rank.x);
  }

  // q, k, v, gate = bf16(x W^T) of this rank's heads; norm and RoPE of q and k; new keys and values
  void qkv(int layer, Rank& rank) {
    const int hidden = shape_.hidden, head_dim = shape_.head_dim;
    const int heads = shape_.of_rank(shape_.heads), kv_heads = shape_.of_rank(shape_.kv_heads);
    for (Floats* out : {&rank.q, &rank.gate}) out->resize(rows_ * heads * head_dim);
    for (Floats* out : {&rank.k, &rank.v}) out->resize(rows_ * kv_heads * head_dim);
    struct Part {
      Floats* out;
      int heads;
    };
    const Part parts[] = {{&rank.q, heads}, {&rank.k, kv_heads}, {&rank.v, kv_heads}, {&rank.gate, heads}};
    int first_row = 0;
    Floats weight(hidden);
    for (const Part& part : parts) {
      for (int head = 0; head < part.heads; ++head) {
        for (int i = 0; i < head_dim; ++i) {
          decode_row(weights(layer, rank), table(layer).qkv_gate, 0, first_row + kTileRows * head + i, weight.data());
          for (int t = 0; t < rows_; ++t) {
            const float sum = dot(&rank.x[t * hidden], weight.data(), hidden);
            (*part.out)[(t * part.heads + head) * head_dim + i] = to_bf16(sum);
          }
        }
      }
      first_row += kTileRows * part.heads;
    }
    for (int t = 0; t < rows_; ++t) {
      for (int head = 0; head < heads; ++head) norm_rope(layer, t, &rank.q[(t * heads + head) * head_dim]);
      for (int head = 0; head < kv_heads; ++head) norm_rope(layer, t, &rank.k[(t * kv_heads + head) * head_dim]);
    }
    for (int head = 0; head < kv_heads; ++head) {
      for (int t = 0; t < rows_; ++t) {
        const int64_t to = (int64_t{1} * (rank.index * kv_heads + head) * rows_ + t) * head_dim;
        const int from = (t * kv_heads + head) * head_dim;
        for (int i = 0; i < head_dim; ++i) {
          rank.args->layers[layer].new_keys[to + i] = as_bf16(rank.k[from + i]);
          rank.args->layers[layer].new_values[to + i] = as_bf16(rank.v[from + i]);
        }
      }
    }
    trace(layer, rank, trace_table_.attn_in, rank.x);
    trace(layer, rank, trace_table_.q, rank.q);
    trace(layer, rank, trace_table_.k, rank.k);
    trace(layer, rank, trace_table_.v, rank.v);
    trace(layer, rank, trace_table_.gate, rank.gate);
  }

  // A head of q or k of row t: rms, rotation of the pairs (j, j + H/2), one rounding.
  void norm_rope(int layer, int t, float* x) const {
    const int half = shape_.head_dim / 2;
    const float factor = rms_factor(x, shape_.head_dim, args_.rms_eps);
    const float* cos = args_.rope + t * half;
    const float* sin = args_.rope + (rows_ + t) * half;
    for (int j = 0; j < half; ++j) {
      const float first = x[j] * factor, second = x[j + half] * factor;
      const bool rope = args_.layers[layer].rope;
      x[j] = to_bf16(rope ? first * cos[j] - second * sin[j] : first);
      x[j + half] = to_bf16(rope ? second * cos[j] + first * sin[j] : second);
    }
  }

  // attn_out = bf16(rms(softmax(score_scale q k^T) v) sigmoid(gate)), over visible committed keys and rows of the step
  void attention(int layer, Rank& rank) {
    const LayerArguments& arguments = rank.args->layers[layer];
    const int head_dim = shape_.head_dim;
    const int heads = shape_.of_rank(shape_.heads), kv_heads = shape_.of_rank(shape_.kv_heads);
    const int group = heads / kv_heads;
    rank.attn_out.resize(rank.q.size());
    for (int t = 0; t < rows_; ++t) {
      const std::vector<int> slots = visible_slots(arguments, t), rows = visible_rows(arguments, t);
      const int num_slots = static_cast<int>(slots.size()), num_keys = num_slots + static_cast<int>(rows.size());
      Floats keys(num_keys * head_dim), values(num_keys * head_dim);
      for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
        for (int s = 0; s < num_keys; ++s) {
          for (int i = 0; i < head_dim; ++i) {
            const int to = s * head_dim + i;
            if (s < num_slots) {
              const int64_t head = rank.index * kv_heads + kv_head;
              const int64_t from = (head * arguments.slots + slots[s]) * head_dim + i;
              keys[to] = from_bf16(arguments.keys[from]);
              values[to] = from_bf16(arguments.values[from]);
            } else {
              const int from = (rows[s - num_slots] * kv_heads + kv_head) * head_dim + i;
              keys[to] = rank.k[from];
              values[to] = rank.v[from];
            }
          }
        }
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const int at = (t * heads + head) * head_dim;
          float out[kTileRows];
          attend(&rank.q[at], keys, values, num_keys, out);
          const float factor = rms_factor(out, head_dim, args_.rms_eps);
          for (int i = 0; i < head_dim; ++i) {
            rank.attn_out[at + i] = to_bf16(out[i] * factor * sigmoid(rank.gate[at + i]));
          }
        }
      }
    }
    trace(layer, rank, trace_table_.attn_out, rank.attn_out);
  }

  // One query over keys and values [num_keys, H]. out: [H].
  void attend(const float* q, const Floats& keys, const Floats& values, int num_keys, float* out) const {
    const int head_dim = shape_.head_dim;
    Floats p(num_keys);
    float maximum = -INFINITY, total = 0;
    for (int s = 0; s < num_keys; ++s) {
      p[s] = dot(q, &keys[s * head_dim], head_dim) * args_.score_scale;
      maximum = max_or_nan(p[s], maximum);
    }
    std::fill_n(out, head_dim, 0.0f);
    for (int s = 0; s < num_keys; ++s) {
      p[s] = std::exp(p[s] - maximum);
      total += p[s];
      const float rounded = to_bf16(p[s]);
      for (int i = 0; i < head_dim; ++i) out[i] += rounded * values[s * head_dim + i];
    }
    for (int i = 0; i < head_dim; ++i) out[i] /= total;
  }

  // Slots of the cache that row t sees.
  std::vector<int> visible_slots(const LayerArguments& layer, int t) const {
    const int length = *args_.length;
    std::vector<int> slots;
    for (int slot = 0; slot < layer.slots; ++slot) {
      const int64_t position = layer.sliding ? args_.ring_positions[slot] : slot;
      const bool in_window = !layer.sliding || args_.positions[t] - position < args_.window;
      if (0 <= position && position < length && in_window) slots.push_back(slot);
    }
    return slots;
  }

  // Rows of the step that row t sees.
  std::vector<int> visible_rows(const LayerArguments& layer, int t) const {
    std::vector<int> rows;
    for (int row = 0; row < rows_; ++row) {
      const int64_t distance = int64_t{1} * args_.positions[t] - args_.positions[row];
      if (args_.visible[t * rows_ + row] && (!layer.sliding || distance < args_.window)) rows.push_back(row);
    }
    return rows;
  }

  // Partial sums over this rank's heads, heads_per_part at a time.
  void o_proj(int layer, Rank& rank) {
    const int hidden = shape_.hidden, head_dim = shape_.head_dim, heads = shape_.of_rank(shape_.heads);
    const int parts = shape_.parts_per_rank(), per_part = shape_.heads_per_part();
    rank.own_o_parts.resize(parts * rows_ * hidden);
    for_each_row(weights(layer, rank), table(layer).o_proj, 0, [&](int n, const float* weight) {
      for (int part = 0; part < parts; ++part) {
        for (int t = 0; t < rows_; ++t) {
          float sum = 0;
          for (int head = part * per_part; head < (part + 1) * per_part; ++head) {
            sum += dot(&rank.attn_out[(t * heads + head) * head_dim], weight + kTileRows * head, head_dim);
          }
          rank.own_o_parts[(part * rows_ + t) * hidden + n] = sum;
        }
      }
    });
  }

  // The eight partial sums in order; their norm, the residual gate, the norm that router and pre_expert_proj read
  void post_attn(int layer, Rank& rank) {
    const int hidden = shape_.hidden;
    const uint8_t* buffer = weights(layer, rank);
    Floats sum(rows_ * hidden, 0.0f);
    for (int part = 0; part < kNumParts; ++part) {
      for (int i = 0; i < rows_ * hidden; ++i) {
        const float term = rank.o_parts[part * rows_ * hidden + i];
        sum[i] = part == 0 ? term : sum[i] + term;
      }
    }
    trace(layer, rank, trace_table_.o_sum, sum);
    blend(sum, vector_at(buffer, table(layer).post_attention_alpha),
          vector_at(buffer, table(layer).post_attention_beta), rank);
    trace(layer, rank, trace_table_.stream_mid, rank.stream);
    norm_rows(rank.stream, vector_at(buffer, table(layer).pre_ffn_norm), hidden, &rank.ffn_in);
    trace(layer, rank, trace_table_.ffn_in, rank.ffn_in);
  }

  // fp32 logits; the best of sigmoid + bias, ties to the lowest expert; weights of the chosen ones from their sigmoids
  void router(int layer, Rank& rank) {
    const int hidden = shape_.hidden, experts = shape_.experts, top_k = shape_.top_k;
    const uint8_t* buffer = weights(layer, rank);
    Floats logits(rows_ * experts);
    for_each_row(buffer, table(layer).router, 0, [&](int expert, const float* weight) {
      for (int t = 0; t < rows_; ++t) logits[t * experts + expert] = dot(&rank.ffn_in[t * hidden], weight, hidden);
    });
    trace(layer, rank, trace_table_.router_logits, logits);
    rank.idx.resize(routed_);
    rank.weights.resize(routed_);
    if (args_.forced_idx != nullptr) {
      std::copy_n(args_.forced_idx + int64_t{1} * layer * routed_, routed_, rank.idx.begin());
      std::copy_n(args_.forced_weights + int64_t{1} * layer * routed_, routed_, rank.weights.begin());
    } else {
      const float* bias = vector_at(buffer, table(layer).router_bias);
      for (int t = 0; t < rows_; ++t) {
        choose(&logits[t * experts], bias, &rank.idx[t * top_k], &rank.weights[t * top_k]);
      }
    }
    trace(layer, rank, trace_table_.idx, Floats(rank.idx.begin(), rank.idx.end()));
    trace(layer, rank, trace_table_.weights, rank.weights);
  }

  void choose(const float* logits, const float* bias, int* idx, float* chosen_weights) const {
    const int experts = shape_.experts, top_k = shape_.top_k;
    Floats scores(experts);
    for (int e = 0; e < experts; ++e) scores[e] = sigmoid(logits[e] * args_.output_multiplier);
    std::vector<bool> taken(experts, false);
    float sum = 0;
    for (int slot = 0; slot < top_k; ++slot) {
      int best = -1;
      for (int e = 0; e < experts; ++e) {
        if (!taken[e] && (best < 0 || scores[e] + bias[e] > scores[best] + bias[best])) best = e;
      }
      taken[best] = true;
      idx[slot] = best;
      chosen_weights[slot] = scores[best];
      sum += scores[best];
    }
    for (int slot = 0; slot < top_k; ++slot) {
      chosen_weights[slot] = chosen_weights[slot] / (sum + 1e-15f) * args_.routed_scaling;
    }
  }

  // own_pooled = bf16(ffn_in W^T)
  void pre_expert_proj(int layer, Rank& rank) {
    const int hidden = shape_.hidden, width = shape_.of_rank(shape_.moe_hidden);
    rank.own_pooled.resize(rows_ * width);
    for_each_row(weights(layer, rank), table(layer).pre_expert_proj, 0, [&](int n, const float* weight) {
      for (int t = 0; t < rows_; ++t) {
        rank.own_pooled[t * width + n] = to_bf16(dot(&rank.ffn_in[t * hidden], weight, hidden));
      }
    });
  }

  // The pre-expert norm, quantised or not; own_hidden = bf16(silu(gate) up) of this rank's rows of each chosen expert
  void expert_gate_up(int layer, Rank& rank) {
    const int moe_hidden = shape_.moe_hidden, width = shape_.of_rank(shape_.moe_intermediate);
    const uint8_t* buffer = weights(layer, rank);
    trace(layer, rank, trace_table_.pooled, rank.pooled);
    norm_rows(rank.pooled, vector_at(buffer, table(layer).pre_expert_norm), moe_hidden, &rank.moe_in);
    rank.moe_in_scale.assign(rows_, 1.0f);
    if (quantized(layer)) {
      for (int t = 0; t < rows_; ++t) {
        float* row = &rank.moe_in[t * moe_hidden];
        rank.moe_in_scale[t] = row_scale(largest_magnitude(row, moe_hidden));
        quantize(row, moe_hidden, rank.moe_in_scale[t]);
      }
    }
    trace_scaled(layer, rank, trace_table_.moe_in, rank.moe_in, rank.moe_in_scale);

    const float* scales = vector_at(buffer, table(layer).gate_up_scale);
    rank.own_hidden.resize(routed_ * width);
    Floats gates(routed_);
    for_each_chosen(rank, [&](int expert, const std::vector<int>& routed) {
      for_each_row(buffer, table(layer).gate_up, expert, [&](int n, const float* weight) {
        const bool is_up = n % 2 == 1;
        const float scale = scales[2 * expert + is_up];
        for (int row : routed) {
          const int t = row / shape_.top_k;
          const float y = dot(&rank.moe_in[t * moe_hidden], weight, moe_hidden) * (scale * rank.moe_in_scale[t]);
          if (is_up) {
            rank.own_hidden[row * width + n / 2] = to_bf16(gates[row] * sigmoid(gates[row]) * y);
          } else {
            gates[row] = y;
          }
        }
      });
    });
    rank.own_amax.resize(routed_);
    for (int row = 0; row < routed_; ++row) {
      rank.own_amax[row] = largest_magnitude(&rank.own_hidden[row * width], width);
    }
    rank.hidden_scale.assign(routed_, 1.0f);
  }

  // This rank's piece of each row of hidden, with the scale of the whole row
  void quantize_hidden(Rank& rank) {
    const int width = shape_.of_rank(shape_.moe_intermediate);
    for (int row = 0; row < routed_; ++row) {
      rank.hidden_scale[row] = row_scale(largest_magnitude(&rank.amax[row * shape_.ranks], shape_.ranks));
      quantize(&rank.own_hidden[row * width], width, rank.hidden_scale[row]);
    }
  }

  // own_down = bf16(hidden W^T) of this rank's rows of each chosen expert
  void expert_down(int layer, Rank& rank) {
    const int intermediate = shape_.moe_intermediate, width = shape_.of_rank(shape_.moe_hidden);
    const uint8_t* buffer = weights(layer, rank);
    trace_scaled(layer, rank, trace_table_.hidden, rank.hidden, rank.hidden_scale);
    const float* scales = vector_at(buffer, table(layer).down_scale);
    rank.own_down.resize(routed_ * width);
    for_each_chosen(rank, [&](int expert, const std::vector<int>& routed) {
      for_each_row(buffer, table(layer).down, expert, [&](int n, const float* weight) {
        for (int row : routed) {
          const float sum = dot(&rank.hidden[row * intermediate], weight, intermediate);
          rank.own_down[row * width + n] = to_bf16(sum * (scales[expert] * rank.hidden_scale[row]));
        }
      });
    });
  }

  // mixed = bf16(sum over slots of weight rms(down (1 + w)))
  void combine(int layer, Rank& rank) {
    const int moe_hidden = shape_.moe_hidden, top_k = shape_.top_k;
    const float* norm = vector_at(weights(layer, rank), table(layer).post_expert_norm);
    trace(layer, rank, trace_table_.down, rank.down);
    rank.mixed.resize(rows_ * moe_hidden);
    Floats scaled(moe_hidden), sum(moe_hidden);
    for (int t = 0; t < rows_; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int row = t * top_k; row < (t + 1) * top_k; ++row) {
        for (int i = 0; i < moe_hidden; ++i) scaled[i] = rank.down[row * moe_hidden + i] * norm[i];
        const float factor = rms_factor(scaled.data(), moe_hidden, args_.post_eps);
        for (int i = 0; i < moe_hidden; ++i) sum[i] += scaled[i] * factor * rank.weights[row];
      }
      for (int i = 0; i < moe_hidden; ++i) rank.mixed[t * moe_hidden + i] = to_bf16(sum[i]);
    }
    trace(layer, rank, trace_table_.mixed, rank.mixed);
  }

  // own_branch = bf16(mixed W^T)
  void post_expert_proj(int layer, Rank& rank) {
    const int moe_hidden = shape_.moe_hidden, width = shape_.of_rank(shape_.hidden);
    rank.own_branch.resize(rows_ * width);
    for_each_row(weights(layer, rank), table(layer).post_expert_proj, 0, [&](int n, const float* weight) {
      for (int t = 0; t < rows_; ++t) {
        rank.own_branch[t * width + n] = to_bf16(dot(&rank.mixed[t * moe_hidden], weight, moe_hidden));
      }
    });
  }

  // The branch times 1 + w, its norm, the residual gate; the norm that the next layer, or the output layer, reads
  void post_ffn(int layer, Rank& rank) {
    const int hidden = shape_.hidden;
    const uint8_t* buffer = weights(layer, rank);
    trace(layer, rank, trace_table_.branch, rank.branch);
    const float* norm = vector_at(buffer, table(layer).post_ffn_norm);
    Floats scaled(rank.branch);
    for (int i = 0; i < rows_ * hidden; ++i) scaled[i] *= norm[i % hidden];
    blend(scaled, vector_at(buffer, table(layer).post_ffn_alpha), vector_at(buffer, table(layer).post_ffn_beta), rank);
    trace(layer, rank, trace_table_.stream, rank.stream);
    for (size_t i = 0; i < args_.taps.size() && rank.index == 0; ++i) {
      if (args_.taps[i] != layer) continue;
      std::copy(rank.stream.begin(), rank.stream.end(), rank.args->tap_streams + i * rows_ * hidden);
    }
    const bool last = layer + 1 == args_.num_layers();
    const float* next_norm = last ? vector_at(head(rank), make_head_table(shape_).final_norm)
                                  : vector_at(weights(layer + 1, rank), table(layer + 1).input_norm);
    norm_rows(rank.stream, next_norm, hidden, &rank.x);
  }

  // logits = c tanh(multiplier x W^T / c) of this rank's part of the vocabulary
  void lm_head(Rank& rank) {
    const int hidden = shape_.hidden, vocab = shape_.of_rank(shape_.vocab);
    float* logits = rank.args->logits + int64_t{1} * rank.index * rows_ * vocab;
    for_each_row(head(rank), make_head_table(shape_).lm_head, 0, [&](int n, const float* weight) {
      for (int t = 0; t < rows_; ++t) {
        const float z = dot(&rank.x[t * hidden], weight, hidden) * args_.output_multiplier;
        logits[int64_t{1} * t * vocab + n] = std::tanh(z / args_.softcap) * args_.softcap;
      }
    });
  }

  // ---- What phases share

  // x [rows, n] -> bf16(rms(x) weight)
  void norm_rows(const Floats& x, const float* weight, int n, Floats* out) const {
    out->resize(x.size());
    for (size_t i = 0; i < x.size(); i += n) norm_row(&x[i], weight, n, args_.rms_eps, &(*out)[i]);
  }

  // stream = alpha stream + beta rms(branch). branch: [T, D].
  void blend(const Floats& branch, const float* alpha, const float* beta, Rank& rank) const {
    const int hidden = shape_.hidden;
    for (int t = 0; t < rows_; ++t) {
      const float factor = rms_factor(&branch[t * hidden], hidden, args_.post_eps);
      for (int i = 0; i < hidden; ++i) {
        float& stream = rank.stream[t * hidden + i];
        const float kept = alpha[i] * stream, added = beta[i] * (branch[t * hidden + i] * factor);
        stream = kept + added;
      }
    }
  }

  // Pieces [rows, n] of all ranks, side by side, [rows, R n], in the memory of each.
  void gather(int rows, Floats Rank::* own, Floats Rank::* all) {
    const int ranks = shape_.ranks;
    for (Rank& reader : ranks_) {
      (reader.*all).resize((reader.*own).size() * ranks);
      for (int writer = 0; writer < ranks; ++writer) {
        const Floats& pieces = (args_.loopback ? reader : ranks_[writer]).*own;
        const size_t n = pieces.size() / rows;
        for (int row = 0; row < rows; ++row) {
          std::copy_n(&pieces[row * n], n, &(reader.*all)[(size_t(row) * ranks + writer) * n]);
        }
      }
    }
  }

  // use(expert, its routed rows) for the experts that a row has chosen.
  template <typename Use>
  void for_each_chosen(const Rank& rank, Use use) const {
    for (int expert = 0; expert < shape_.experts; ++expert) {
      std::vector<int> routed;
      for (int row = 0; row < routed_; ++row) {
        if (rank.idx[row] == expert) routed.push_back(row);
      }
      if (!routed.empty()) use(expert, routed);
    }
  }

  // Whether the layer's experts read NVFP4.
  bool quantized(int layer) const { return args_.quantized && args_.layers[layer].nvfp4; }

  LayerTable table(int layer) const { return make_layer_table(shape_, args_.layers[layer].nvfp4); }
  const uint8_t* weights(int layer, const Rank& rank) const {
    const LayerArguments& arguments = rank.args->layers[layer];
    return arguments.weights + rank.index * arguments.weight_bytes;
  }
  const uint8_t* head(const Rank& rank) const { return rank.args->head + rank.index * args_.head_bytes; }

  void trace(int layer, const Rank& rank, const TraceEntry& entry, const Floats& values) const {
    if (layer != args_.trace_layer) return;
    std::copy(values.begin(), values.end(), rank.args->trace + rank.index * args_.trace_size + entry.offset);
  }

  // values: [rows, n].  scales: [rows].
  void trace_scaled(int layer, const Rank& rank, const TraceEntry& entry, Floats values, const Floats& scales) const {
    const size_t n = values.size() / scales.size();
    for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i / n];
    trace(layer, rank, entry, values);
  }

  const VerifyArguments& args_;  // of the first call; what is the same in all of them
  const ModelShape& shape_;
  const int rows_;    // T
  const int routed_;  // P
  const TraceTable trace_table_;
  std::vector<Rank> ranks_;
};

}  // namespace

std::string problem_in_data(const VerifyArguments& args) {
  const auto at = [](const char* name, int64_t i, int64_t value) {
    return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value);
  };
  const int last_rank = args.is_of_mesh() ? args.shape.ranks - 1 : 0;
  if (*args.rank < 0 || *args.rank > last_rank) {
    return at("rank", 0, *args.rank) + ": allowed are 0 to " + std::to_string(last_rank);
  }
  for (int t = 0; t < args.rows; ++t) {
    if (args.tokens[t] < 0 || args.tokens[t] >= args.shape.vocab) {
      return at("tokens", t, args.tokens[t]) + ": allowed are 0 to " + std::to_string(args.shape.vocab - 1);
    }
    if (!args.visible[t * args.rows + t]) return "visible: row " + std::to_string(t) + " does not see itself";
  }
  for (int i = 0; i < args.num_layers(); ++i) {
    const LayerArguments& layer = args.layers[i];
    if (*args.length < 0 || (!layer.sliding && *args.length > layer.slots)) {
      return at("length", 0, *args.length) + ": allowed are 0 to " + std::to_string(layer.slots) +
             ", the slots of layer " + std::to_string(i);
    }
  }
  const int64_t routed = args.forced_idx == nullptr ? 0 : int64_t{1} * args.num_layers() * args.rows * args.shape.top_k;
  for (int64_t i = 0; i < routed; ++i) {
    if (args.forced_idx[i] < 0 || args.forced_idx[i] >= args.shape.experts) {
      return at("forced_idx", i, args.forced_idx[i]) + ": allowed are 0 to " + std::to_string(args.shape.experts - 1);
    }
  }
  return "";
}

void host_verify(const std::vector<const VerifyArguments*>& calls) { Step(calls).run(); }

}  // namespace muse
