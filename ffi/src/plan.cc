#include "plan.h"

#include <algorithm>

namespace muse {
namespace {

constexpr int kTilesPerUnit = 16;  // a tile for each of the kernel's consumer warps

int divide_up(int x, int y) { return (x + y - 1) / y; }

Geometry geometry_of(const Segment& segment, int slice_tiles = kTilesPerUnit) {
  const int k_tiles = segment.k_tiles();
  Geometry geometry = {};
  geometry.rows = segment.rows;
  geometry.row_tiles = segment.row_tiles();
  geometry.k_tiles = k_tiles;
  geometry.slice_tiles = slice_tiles;
  geometry.slices = divide_up(k_tiles, slice_tiles);
  geometry.tile_bytes = segment.tile_bytes();
  geometry.offset = segment.offset;
  return geometry;
}

RankSizes rank_sizes(const Sizes& sizes) {
  RankSizes of_rank;
  of_rank.heads = sizes.of_rank(sizes.heads);
  of_rank.kv_heads = sizes.of_rank(sizes.kv_heads);
  of_rank.qkv_rows = (2 * of_rank.heads + 2 * of_rank.kv_heads) * kTileRows;
  of_rank.hidden = sizes.of_rank(sizes.hidden);
  of_rank.moe_hidden = sizes.of_rank(sizes.moe_hidden);
  of_rank.moe_intermediate = sizes.of_rank(sizes.moe_intermediate);
  of_rank.vocab = sizes.of_rank(sizes.vocab);
  of_rank.column_tiles = divide_up(sizes.hidden, kTileRows);
  of_rank.own_column_tiles = divide_up(of_rank.column_tiles, sizes.ranks);
  of_rank.parts_of_sum = sizes.parts_per_rank();
  of_rank.log2_ranks = 0;
  while (1 << of_rank.log2_ranks < sizes.ranks) ++of_rank.log2_ranks;
  of_rank.groups = sizes.heads / sizes.kv_heads;
  of_rank.parts_of_keys = std::min(kTilesPerUnit / of_rank.groups, kNumParts);
  of_rank.keys_of_part = kKeyBlock / of_rank.parts_of_keys;
  return of_rank;
}

Geometry geometry_of(const Sizes& sizes, MatrixId id, bool nvfp4) {
  const LayerTable table = make_layer_table(sizes, nvfp4);
  switch (id) {
    case MatrixId::kQkv: return geometry_of(table.qkv_gate);
    case MatrixId::kO: return geometry_of(table.o_proj, sizes.heads_per_part());
    case MatrixId::kRouter: return geometry_of(table.router);
    case MatrixId::kPre: return geometry_of(table.pre_expert_proj);
    case MatrixId::kGateUp: return geometry_of(table.gate_up);
    case MatrixId::kDown: return geometry_of(table.down);
    case MatrixId::kPost: return geometry_of(table.post_expert_proj);
    case MatrixId::kHead: return geometry_of(make_head_table(sizes).lm_head);
    case MatrixId::kCount: break;
  }
  return {};
}

void fill_matrices(Launch& launch, bool nvfp4) {
  Geometry* matrices = launch.matrices[nvfp4];
  const Sizes& sizes = launch.sizes;
  const Buffers& buffers = launch.buffers;
  const auto fill = [&](MatrixId id, int shift, uint32_t x, int width, uint32_t partial = 0) {
    Geometry& geometry = matrices[static_cast<int>(id)];
    geometry = geometry_of(sizes, id, nvfp4);
    geometry.shift = shift;
    geometry.x = x;
    geometry.width = width;
    geometry.partial = partial;
  };
  fill(MatrixId::kQkv, 83, buffers.next_in, sizes.hidden, buffers.qkv_partial);
  fill(MatrixId::kO, 0, buffers.attn_out, launch.of_rank.heads * kHead, buffers.o_partial);
  fill(MatrixId::kRouter, 29, buffers.ffn_in, sizes.hidden, buffers.router_partial);
  fill(MatrixId::kPre, 93, buffers.ffn_in, sizes.hidden, buffers.pre_partial);
  fill(MatrixId::kGateUp, 11, buffers.moe_in, sizes.moe_hidden);
  fill(MatrixId::kDown, 71, nvfp4 && sizes.quantized ? buffers.hidden_decoded : buffers.hidden, sizes.moe_intermediate);
  fill(MatrixId::kPost, 47, buffers.mixed, sizes.moe_hidden, buffers.post_partial);
  fill(MatrixId::kHead, 0, buffers.next_in, sizes.hidden);
}

LayerOffsets offsets_of(const LayerTable& table) {
  LayerOffsets offsets;
  offsets.input_norm = table.input_norm.offset;
  offsets.post_attention_alpha = table.post_attention_alpha.offset;
  offsets.post_attention_beta = table.post_attention_beta.offset;
  offsets.pre_ffn_norm = table.pre_ffn_norm.offset;
  offsets.router_bias = table.router_bias.offset;
  offsets.pre_expert_norm = table.pre_expert_norm.offset;
  offsets.gate_up_scale = table.gate_up_scale.offset;
  offsets.down_scale = table.down_scale.offset;
  offsets.post_expert_norm = table.post_expert_norm.offset;
  offsets.post_ffn_norm = table.post_ffn_norm.offset;
  offsets.post_ffn_alpha = table.post_ffn_alpha.offset;
  offsets.post_ffn_beta = table.post_ffn_beta.offset;
  offsets.bytes = table.num_bytes();
  return offsets;
}

}  // namespace

Buffers make_buffers(const Sizes& sizes) {
  const RankSizes of_rank = rank_sizes(sizes);
  const int groups = sizes.heads / sizes.kv_heads, pairs = kMaxRows * sizes.top_k;
  Buffers buffers;
  buffers.bytes = 0;
  const auto place = [&](size_t numbers, int bytes_each) {
    const uint32_t offset = buffers.bytes;
    buffers.bytes += static_cast<uint32_t>((numbers * bytes_each + 127) / 128 * 128);
    return offset;
  };
  const auto partial = [&](MatrixId id) {
    const Geometry geometry = geometry_of(sizes, id, false);
    return place(static_cast<size_t>(geometry.slices) * geometry.row_tiles * kMaxRows * kTileRows, 4);
  };
  buffers.qkv_partial = partial(MatrixId::kQkv);
  buffers.q = place(kMaxRows * of_rank.heads * kHead, 2);
  buffers.gate = place(kMaxRows * of_rank.heads * kHead, 2);
  buffers.k = place(of_rank.kv_heads * kMaxRows * kHead, 2);
  buffers.v = place(of_rank.kv_heads * kMaxRows * kHead, 2);
  buffers.attn_partial =
      place(static_cast<size_t>(of_rank.kv_heads) * (kMaxSplits + 1) * groups * kMaxRows * kPartial, 4);
  buffers.attn_out = place(kMaxRows * of_rank.heads * kHead, 2);
  buffers.o_partial = place(static_cast<size_t>(kNumParts) * of_rank.own_column_tiles * kMaxRows * kTileRows, 4);
  buffers.o_sum = place(kMaxRows * sizes.hidden, 4);
  buffers.ffn_in = place(kMaxRows * sizes.hidden, 2);
  buffers.router_partial = partial(MatrixId::kRouter);
  buffers.routing = place(kMaxRows * kMaxTopK, 8);
  buffers.pre_partial = partial(MatrixId::kPre);
  buffers.pooled = place(kMaxRows * sizes.moe_hidden, 4);
  buffers.moe_in = place(kMaxRows * sizes.moe_hidden, 2);
  buffers.moe_scale = place(kMaxRows, 4);
  buffers.hidden = place(static_cast<size_t>(pairs) * sizes.moe_intermediate, 2);
  buffers.hidden_decoded = place(sizes.quantized ? static_cast<size_t>(pairs) * sizes.moe_intermediate : 0, 2);
  buffers.hidden_scale = place(pairs, 4);
  buffers.down = place(static_cast<size_t>(pairs) * sizes.moe_hidden, 2);
  buffers.mixed = place(kMaxRows * sizes.moe_hidden, 2);
  buffers.post_partial = partial(MatrixId::kPost);
  buffers.branch = place(kMaxRows * sizes.hidden, 4);
  buffers.next_in = place(kMaxRows * sizes.hidden, 2);
  return buffers;
}

Launch make_launch(const VerifyArguments& args, int num_sms) {
  Launch launch = {};
  Sizes& sizes = launch.sizes;
  static_cast<ModelShape&>(sizes) = args.shape;
  sizes.rows = args.rows;
  sizes.ranks_here = args.ranks_here;
  sizes.layers = args.num_layers();
  sizes.window = args.window;
  sizes.loopback = args.loopback;
  sizes.quantized = args.quantized;
  sizes.rms_eps = args.rms_eps;
  sizes.post_eps = args.post_eps;
  sizes.score_scale = args.score_scale;
  sizes.output_multiplier = args.output_multiplier;
  sizes.softcap = args.softcap;
  sizes.routed_scaling = args.routed_scaling;
  launch.of_rank = rank_sizes(sizes);
  launch.buffers = make_buffers(sizes);
  for (bool nvfp4 : {false, true}) fill_matrices(launch, nvfp4);
  launch.offsets[0] = offsets_of(make_layer_table(sizes, false));
  launch.offsets[1] = offsets_of(make_layer_table(sizes, true));
  launch.head = args.head;
  launch.head_bytes = args.head_bytes;
  launch.final_norm_offset = make_head_table(sizes).final_norm.offset;
  launch.embedding = args.embedding;
  launch.tokens = args.tokens;
  launch.positions = args.positions;
  launch.length = args.length;
  launch.visible = args.visible;
  launch.rope = args.rope;
  launch.ring_positions = args.ring_positions;
  launch.forced_idx = args.forced_idx;
  launch.forced_weights = args.forced_weights;
  launch.logits = args.logits;
  launch.taps = args.tap_streams;
  launch.status = args.status;
  launch.profile = args.profile;
  launch.ctas_per_rank = num_sms / args.ranks_here;
  launch.ctas_reciprocal =
      static_cast<uint32_t>(((uint64_t{1} << 32) + launch.ctas_per_rank - 1) / launch.ctas_per_rank);
  launch.deadline_ns = static_cast<uint64_t>(args.deadline_ms) * 1000000;
  launch.num_taps = static_cast<int>(args.taps.size());
  std::copy(args.taps.begin(), args.taps.end(), launch.taps_layers);
  for (int l = 0; l < sizes.layers; ++l) {
    const LayerArguments& from = args.layers[l];
    Layer& layer = launch.layers[l];
    layer.weights = from.weights;
    layer.keys = from.keys;
    layer.values = from.values;
    layer.new_keys = from.new_keys;
    layer.new_values = from.new_values;
    layer.slots = from.slots;
    layer.flags = (from.sliding ? kSlidingFlag : 0) | (from.rope ? kRopeFlag : 0) | (from.nvfp4 ? kNvfp4Flag : 0);
  }
  return launch;
}

}  // namespace muse
