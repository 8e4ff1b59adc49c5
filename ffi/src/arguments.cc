#include "arguments.h"

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

namespace muse {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

// A dimension of an expected shape: a size, or a name where any size will do.
struct Dim {
  Dim(int64_t size) : size(size) {}  // NOLINT: sizes are written as they are
  explicit Dim(const char* name) : name(name) {}

  bool any() const { return name != nullptr; }

  int64_t size = 0;
  const char* name = nullptr;
};
using Shape = std::vector<Dim>;

const char* type_name(DataType type) {
  switch (type) {
    case DataType::PRED: return "bool";
    case DataType::U8: return "u8";
    case DataType::U32: return "u32";
    case DataType::S32: return "i32";
    case DataType::S64: return "i64";
    case DataType::BF16: return "bf16";
    case DataType::F16: return "f16";
    case DataType::F32: return "f32";
    case DataType::F64: return "f64";
    default: return "another type";
  }
}

template <typename Dims, typename Show>
std::string listed(const Dims& dims, Show show) {
  std::ostringstream text;
  text << "[";
  const char* comma = "";
  for (const auto& dim : dims) {
    text << comma;
    show(text, dim);
    comma = ", ";
  }
  text << "]";
  return text.str();
}

std::string text_of(DataType type, ffi::AnyBuffer::Dimensions dims) {
  return std::string(type_name(type)) + " " + listed(dims, [](auto& text, int64_t dim) { text << dim; });
}

std::string text_of(DataType type, const Shape& shape) {
  return std::string(type_name(type)) + " " +
         listed(shape, [](auto& text, const Dim& dim) { dim.any() ? text << dim.name : text << dim.size; });
}

// Reads the call frame part by part and keeps the first problem; after that, what it returns is not to be used.
class Reader {
 public:
  Reader(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes)
      : operands_(operands), results_(results), attributes_(attributes) {}

  bool ok() const { return !problem_.has_value(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument("muse_verify: " + *problem_);
  }

  template <typename... Parts>
  void require(bool fulfilled, const Parts&... parts) {
    if (fulfilled || !ok()) return;
    std::ostringstream text;
    (text << ... << parts);
    problem_ = text.str();
  }

  int64_t integer(const char* name, int64_t least, int64_t most) {
    const auto value = attribute<int64_t>(name, "i64");
    if (!value) return least;
    require(least <= *value && *value <= most, "attribute ", name, " = ", *value, ": allowed are ", least, " to ",
            most);
    return *value;
  }

  int integer32(const char* name, int64_t least, int64_t most = kMaxInt) {
    return static_cast<int>(integer(name, least, most));
  }

  float positive(const char* name) {
    const auto value = attribute<float>(name, "f32");
    if (!value) return 1;
    require(std::isfinite(*value) && *value > 0, "attribute ", name, " = ", *value,
            ": a finite number above 0 is allowed");
    return *value;
  }

  std::vector<int> integers(const char* name) {
    const auto value = attribute<ffi::Span<const int32_t>>(name, "an array of i32");
    return value ? std::vector<int>(value->begin(), value->end()) : std::vector<int>();
  }

  void count(size_t num_operands, size_t num_results) {
    require(operands_.size() == num_operands, operands_.size(), " operands: expected ", num_operands);
    require(results_.size() == num_results, results_.size(), " results: expected ", num_results);
  }

  // The next operand. Dims of `shape` with a name may be any.
  std::optional<ffi::AnyBuffer> operand(const std::string& name, DataType type, const Shape& shape) {
    if (!ok()) return std::nullopt;
    auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++);
    require(buffer.has_value(), name, " is no buffer");
    if (!ok()) return std::nullopt;
    return checked(name, *buffer, type, shape);
  }

  std::optional<ffi::AnyBuffer> result(const std::string& name, DataType type, const Shape& shape) {
    if (!ok()) return std::nullopt;
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    require(buffer.has_value(), "result ", name, " is no buffer");
    if (!ok()) return std::nullopt;
    return checked("result " + name, **buffer, type, shape);
  }

  template <typename T>
  const T* operand_data(const std::string& name, DataType type, const Shape& shape) {
    return data<const T>(operand(name, type, shape));
  }

  template <typename T>
  T* result_data(const std::string& name, DataType type, const Shape& shape) {
    return data<T>(result(name, type, shape));
  }

  template <typename T>
  static T* data(std::optional<ffi::AnyBuffer> buffer) {
    return buffer ? static_cast<T*>(buffer->untyped_data()) : nullptr;
  }

 private:
  template <typename T>
  std::optional<T> attribute(const char* name, const char* type) {
    if (!ok()) return std::nullopt;
    auto value = attributes_.get<T>(name);
    require(value.has_value(), "attribute ", name, " is missing or of another type: expected ", type);
    if (!ok()) return std::nullopt;
    return *value;
  }

  std::optional<ffi::AnyBuffer> checked(const std::string& name, ffi::AnyBuffer buffer, DataType type,
                                        const Shape& shape) {
    const auto dims = buffer.dimensions();
    bool fits = buffer.element_type() == type && dims.size() == shape.size();
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i].any() || shape[i].size == dims[i];
    require(fits, name, " is ", text_of(buffer.element_type(), dims), ": expected ", text_of(type, shape));
    if (!ok()) return std::nullopt;
    return buffer;
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::optional<std::string> problem_;
};

// As `Shape` of ffi/layout.py.
void read_shape(Reader& reader, ModelShape* shape) {
  shape->hidden = reader.integer32("hidden", 1, 8192);
  shape->heads = reader.integer32("heads", 1, 16 * kNumParts);
  shape->kv_heads = reader.integer32("kv_heads", 1);
  shape->head_dim = reader.integer32("head_dim", 1, kTileRows);
  shape->moe_hidden = reader.integer32("moe_hidden", 1, 4096);
  shape->moe_intermediate = reader.integer32("moe_intermediate", 1, 4096);
  shape->experts = reader.integer32("experts", 1, 256);
  shape->top_k = reader.integer32("top_k", 1, kMaxTopK);
  shape->vocab = reader.integer32("vocab", 1);
  shape->ranks = reader.integer32("ranks", 1, kMaxRanks);
  if (!reader.ok()) return;
  const int ranks = shape->ranks;
  reader.require((ranks & (ranks - 1)) == 0, "attribute ranks = ", ranks, ": allowed are 1, 2, 4, 8");
  const auto multiple = [&](const char* name, int size, int of) {
    reader.require(size % of == 0, "attribute ", name, " = ", size, ": allowed are multiples of ", of);
  };
  multiple("heads", shape->heads, kNumParts);
  multiple("heads", shape->heads, shape->kv_heads);
  multiple("kv_heads", shape->kv_heads, ranks);
  const int group = shape->heads / shape->kv_heads;
  reader.require(group == 1 || group == 2 || group == 4 || group == 8, "heads / kv_heads = ", group,
                 ": allowed are 1, 2, 4, 8");
  multiple("head_dim", shape->head_dim, 8);
  multiple("hidden", shape->hidden, 8 * ranks);
  multiple("moe_hidden", shape->moe_hidden, 8 * ranks);
  multiple("moe_intermediate", shape->moe_intermediate, 8 * ranks);
  multiple("vocab", shape->vocab, 8 * ranks);
  reader.require(shape->top_k <= shape->experts, "attribute top_k = ", shape->top_k,
                 ": at most experts = ", shape->experts, " is allowed");
}

void read_attributes(Reader& reader, VerifyArguments* out) {
  read_shape(reader, &out->shape);
  if (!reader.ok()) return;
  out->window = reader.integer32("window", 0);
  out->layers_per_launch = reader.integer32("layers_per_launch", 1);
  out->loopback = reader.integer("loopback", 0, 1) == 1;
  out->quantized = reader.integer("quantized", 0, 1) == 1;
  out->deadline_ms = reader.integer("deadline_ms", 1, std::numeric_limits<int64_t>::max());
  out->rms_eps = reader.positive("rms_eps");
  out->post_eps = reader.positive("post_eps");
  out->score_scale = reader.positive("score_scale");
  out->output_multiplier = reader.positive("output_multiplier");
  out->softcap = reader.positive("softcap");
  out->routed_scaling = reader.positive("routed_scaling");

  const ModelShape& shape = out->shape;
  const std::vector<int> flags = reader.integers("layer_flags");
  reader.require(!flags.empty(), "attribute layer_flags is empty: expected one number for each layer");
  for (size_t i = 0; i < flags.size(); ++i) {
    const int known = kSlidingFlag | kRopeFlag | kNvfp4Flag;
    reader.require((flags[i] & ~known) == 0, "attribute layer_flags[", i, "] = ", flags[i], ": allowed are 0 to ",
                   known);
    LayerArguments layer{};
    layer.sliding = (flags[i] & kSlidingFlag) != 0;
    layer.rope = (flags[i] & kRopeFlag) != 0;
    layer.nvfp4 = (flags[i] & kNvfp4Flag) != 0;
    out->layers.push_back(layer);
    reader.require(!layer.sliding || out->window > 0, "attribute window = 0: layer ", i,
                   " is sliding and needs one above 0");
    if (!layer.nvfp4) continue;
    reader.require(shape.moe_hidden % kScaleBlock == 0 && shape.moe_intermediate % kScaleBlock == 0,
                   "moe_hidden = ", shape.moe_hidden, ", moe_intermediate = ", shape.moe_intermediate,
                   ": multiples of ", kScaleBlock, " are allowed with NVFP4 experts");
    reader.require(!out->quantized || shape.of_rank(shape.moe_intermediate) % kScaleBlock == 0,
                   "moe_intermediate = ", shape.moe_intermediate, ": quantized activations need a multiple of ",
                   kScaleBlock * shape.ranks, " for ", shape.ranks, " ranks");
  }
  out->trace_layer = reader.integer32("trace_layer", -1, static_cast<int64_t>(flags.size()) - 1);
  out->profile.events = reader.integer32("profile", 0, kMaxProfileEvents);
  out->taps = reader.integers("taps");
  for (size_t i = 0; i < out->taps.size(); ++i) {
    reader.require(0 <= out->taps[i] && out->taps[i] < out->num_layers(), "attribute taps[", i, "] = ", out->taps[i],
                   ": allowed are 0 to ", out->num_layers() - 1);
  }
}

void read_operands(Reader& reader, VerifyArguments* out) {
  const ModelShape& shape = out->shape;
  const int num_layers = out->num_layers(), top_k = shape.top_k, kv_heads = shape.of_rank(shape.kv_heads);

  const auto tokens = reader.operand("tokens", DataType::S32, {Dim("T")});
  if (!reader.ok()) return;
  const int64_t rows = tokens->dimensions()[0];
  reader.require(1 <= rows && rows <= kMaxRows, "tokens is ", text_of(DataType::S32, tokens->dimensions()),
                 ": expected i32 [T] with T from 1 to ", kMaxRows);
  out->rows = static_cast<int>(rows);
  out->tokens = Reader::data<const int32_t>(tokens);
  out->positions = reader.operand_data<int32_t>("positions", DataType::S32, {rows});
  out->length = reader.operand_data<int32_t>("length", DataType::S32, {1});
  out->rank = reader.operand_data<int32_t>("rank", DataType::S32, {1});
  out->visible = reader.operand_data<uint8_t>("visible", DataType::PRED, {rows, rows});
  out->rope = reader.operand_data<float>("rope", DataType::F32, {2, rows, shape.head_dim / 2});

  const auto ring = reader.operand("ring_positions", DataType::S32, {Dim("slots")});
  if (!reader.ok()) return;
  const int64_t ring_slots = ring->dimensions()[0];
  out->ring_positions = Reader::data<const int32_t>(ring);

  const auto idx = reader.operand("forced_idx", DataType::S32, {Dim("L"), Dim("T"), Dim("top_k")});
  if (!reader.ok()) return;
  const bool forced = idx->element_count() > 0;
  const Shape routing = forced ? Shape{num_layers, rows, top_k} : Shape{0, 0, 0};
  for (size_t i = 0; i < routing.size(); ++i) {
    reader.require(idx->dimensions()[i] == routing[i].size, "forced_idx is ", text_of(DataType::S32, idx->dimensions()),
                   ": expected ", text_of(DataType::S32, {num_layers, rows, top_k}),
                   ", or i32 [0, 0, 0] for the router");
  }
  out->forced_idx = forced ? Reader::data<const int32_t>(idx) : nullptr;
  const float* weights = reader.operand_data<float>("forced_weights", DataType::F32, routing);
  out->forced_weights = forced ? weights : nullptr;

  const Shape table{Dim("ranks here"), shape.of_rank(shape.vocab), shape.hidden};
  const auto embedding = reader.operand("embedding", DataType::BF16, table);
  if (!reader.ok()) return;
  const int64_t here = embedding->dimensions()[0];
  const bool possible = here == 1 || (here == shape.ranks && !out->loopback);
  reader.require(possible, "embedding is ", text_of(DataType::BF16, embedding->dimensions()), ": ",
                 out->loopback ? "a loopback has 1 rank here" : "ranks here are 1 or all", " of ", shape.ranks);
  out->ranks_here = static_cast<int>(here);
  out->embedding = Reader::data<const uint16_t>(embedding);
  out->head_bytes = make_head_table(shape).num_bytes();
  out->head = reader.operand_data<uint8_t>("head", DataType::U8, {here, out->head_bytes});

  for (int i = 0; i < num_layers; ++i) {
    LayerArguments& layer = out->layers[i];
    layer.weight_bytes = make_layer_table(shape, layer.nvfp4).num_bytes();
    const std::string name = "layer " + std::to_string(i);
    layer.weights = reader.operand_data<uint8_t>(name, DataType::U8, {here, layer.weight_bytes});
  }
  for (int i = 0; i < num_layers; ++i) {
    LayerArguments& layer = out->layers[i];
    const std::string of_layer = " of layer " + std::to_string(i);
    const Dim slots = layer.sliding ? Dim(ring_slots) : Dim("slots");
    const auto keys = reader.operand("keys" + of_layer, DataType::BF16, {1, here * kv_heads, slots, shape.head_dim});
    if (!reader.ok()) return;
    const auto dims = keys->dimensions();
    reader.require(dims[2] <= kMaxInt, "keys", of_layer, " has ", dims[2], " slots: at most ", kMaxInt, " are allowed");
    layer.slots = static_cast<int>(dims[2]);
    layer.keys = Reader::data<const uint16_t>(keys);
    const Shape same{1, here * kv_heads, dims[2], shape.head_dim};
    layer.values = reader.operand_data<uint16_t>("values" + of_layer, DataType::BF16, same);
  }
}

void read_results(Reader& reader, VerifyArguments* out) {
  const ModelShape& shape = out->shape;
  const int64_t here = out->ranks_here, rows = out->rows;
  out->logits = reader.result_data<float>("logits", DataType::F32, {here, rows, shape.of_rank(shape.vocab)});
  const Shape cache_rows{1, here * shape.of_rank(shape.kv_heads), rows, shape.head_dim};
  for (int i = 0; i < out->num_layers(); ++i) {
    LayerArguments& layer = out->layers[i];
    const std::string of_layer = " of layer " + std::to_string(i);
    layer.new_keys = reader.result_data<uint16_t>("keys" + of_layer, DataType::BF16, cache_rows);
    layer.new_values = reader.result_data<uint16_t>("values" + of_layer, DataType::BF16, cache_rows);
  }
  const int64_t num_taps = static_cast<int64_t>(out->taps.size());
  out->tap_streams = reader.result_data<float>("taps", DataType::F32, {num_taps, rows, shape.hidden});
  out->trace_size = out->trace_layer < 0 ? 0 : make_trace_table(shape, out->rows).size;
  out->trace = reader.result_data<float>("trace", DataType::F32, {here, out->trace_size});
  out->profile = ProfileTarget::create(out->ranks_here, out->profile.events);
  const int64_t words = out->profile.rank_bytes / sizeof(uint32_t);
  uint8_t* profile = reader.result_data<uint8_t>("profile", DataType::U32, {here, words});
  out->profile.ranks = words > 0 ? profile : nullptr;
  out->status = reader.result_data<int32_t>("status", DataType::S32, {kStatusSize});
}

}  // namespace

xla::ffi::Error parse_verify_arguments(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                       ffi::Dictionary attributes, VerifyArguments* out) {
  *out = VerifyArguments{};
  Reader reader(operands, results, attributes);
  read_attributes(reader, out);
  if (!reader.ok()) return reader.error();
  const size_t layers = out->layers.size();
  reader.count(11 + 3 * layers, 5 + 2 * layers);
  read_operands(reader, out);
  if (!reader.ok()) return reader.error();
  read_results(reader, out);
  return reader.error();
}

}  // namespace muse
