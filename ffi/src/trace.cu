// The intermediate values of a layer, for tests: copied from the exchange buffers, after the launch that ended with the
// layer. Its own kernel, so that the other one is not longer for it.

#include "megakernel.h"
#include "ptx.cuh"

namespace muse {
namespace {

struct Tracer {
  const Launch& launch;
  TraceTable table;
  float* to;              // of this rank
  const uint8_t* set;     // exchange buffers of the layer's round
  const uint8_t* before;  // and of the round before
  int thread, threads;

  // element(row, column) of [T, width].
  template <typename Element>
  __device__ void copy(const TraceEntry& entry, const Element& element) const {
    for (int i = thread; i < launch.sizes.rows * entry.width; i += threads)
      to[entry.offset + i] = element(i / entry.width, i % entry.width);
  }
  __device__ float f32(const uint8_t* from, uint32_t buffer, size_t at) const {
    return reinterpret_cast<const float*>(from + buffer)[at];
  }
  __device__ float bf16(const uint8_t* from, uint32_t buffer, size_t at) const {
    return low_bf16(reinterpret_cast<const uint16_t*>(from + buffer)[at]);
  }
};

__global__ void trace_kernel(const __grid_constant__ Launch launch, int l, float* trace) {
  const Sizes& sizes = launch.sizes;
  const Buffers& b = launch.buffers;
  const int here = blockIdx.y, rank = launch.first_rank + here;
  const Workspace* workspace = launch.workspaces[rank];
  // The launch that ended with the layer may have ended the call, too.
  const uint32_t base = workspace->call == 0 ? workspace->round - sizes.layers - 1 : workspace->round,
                 round = base + 1 + l;
  const uint8_t* sets = reinterpret_cast<const uint8_t*>(workspace + 1);
  const TraceTable table = make_trace_table(sizes, sizes.rows);
  const Tracer t{launch,
                 table,
                 trace + here * table.size,
                 sets + static_cast<size_t>(round % kRounds) * b.bytes,
                 sets + static_cast<size_t>((round - 1) % kRounds) * b.bytes,
                 static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
                 static_cast<int>(gridDim.x * blockDim.x)};
  const int d = sizes.hidden, m = sizes.moe_hidden, f = sizes.moe_intermediate, h = sizes.head_dim,
            heads = launch.of_rank.heads;
  const bool quantized = sizes.quantized && (launch.layers[l].flags & kNvfp4Flag);
  const auto head = [&](uint32_t buffer) {
    return
        [&t, buffer, h, heads](int row, int i) { return t.bf16(t.set, buffer, (row * heads + i / h) * kHead + i % h); };
  };
  const auto kv = [&](uint32_t buffer) {
    return [&t, buffer, h](int row, int i) { return t.bf16(t.set, buffer, (i / h * kMaxRows + row) * kHead + i % h); };
  };
  t.copy(table.attn_in, [&](int row, int i) { return t.bf16(t.before, b.next_in, row * d + i); });
  t.copy(table.q, head(b.q));
  t.copy(table.k, kv(b.k));
  t.copy(table.v, kv(b.v));
  t.copy(table.gate, head(b.gate));
  t.copy(table.attn_out, head(b.attn_out));
  t.copy(table.o_sum, [&](int row, int i) { return t.f32(t.set, b.o_sum, row * d + i); });
  const float* stream = launch.stream + static_cast<size_t>(here) * kMaxRows * d;
  const float* stream_mid = stream + static_cast<size_t>(sizes.ranks_here) * kMaxRows * d;
  t.copy(table.stream_mid, [&](int row, int i) { return stream_mid[row * d + i]; });
  t.copy(table.ffn_in, [&](int row, int i) { return t.bf16(t.set, b.ffn_in, row * d + i); });
  const Geometry& router = launch.matrices[0][static_cast<int>(MatrixId::kRouter)];
  t.copy(table.router_logits, [&](int row, int i) {
    float sum = 0.0f;
    for (int slice = 0; slice < router.slices; ++slice) {
      sum += t.f32(t.set, b.router_partial,
                   ((slice * router.row_tiles + i / kTileRows) * kMaxRows + row) * kTileRows + i % kTileRows);
    }
    return sum;
  });
  const uint2* routing = reinterpret_cast<const uint2*>(t.set + b.routing);
  t.copy(table.idx, [&](int row, int i) { return static_cast<float>(routing[row * kMaxTopK + i].x); });
  t.copy(table.weights, [&](int row, int i) { return __uint_as_float(routing[row * kMaxTopK + i].y); });
  t.copy(table.pooled, [&](int row, int i) { return t.f32(t.set, b.pooled, row * m + i); });
  t.copy(table.moe_in, [&](int row, int i) {
    return t.bf16(t.set, b.moe_in, row * m + i) * (quantized ? t.f32(t.set, b.moe_scale, row) : 1.0f);
  });
  t.copy(table.hidden, [&](int row, int i) {
    const int pair = row * sizes.top_k + i / f;
    if (!quantized) return t.bf16(t.set, b.hidden, pair * f + i % f);
    return t.bf16(t.set, b.hidden_decoded, pair * f + i % f) * t.f32(t.set, b.hidden_scale, pair);
  });
  t.copy(table.down, [&](int row, int i) { return t.bf16(t.set, b.down, (row * sizes.top_k + i / m) * m + i % m); });
  t.copy(table.mixed, [&](int row, int i) { return t.bf16(t.set, b.mixed, row * m + i); });
  t.copy(table.branch, [&](int row, int i) { return t.f32(t.set, b.branch, row * d + i); });
  t.copy(table.stream, [&](int row, int i) { return stream[row * d + i]; });
}

}  // namespace

cudaError_t copy_trace(const Launch& launch, int l, float* trace, cudaStream_t stream) {
  const uint32_t ranks_here = launch.sizes.ranks_here;
  return queue(trace_kernel, {64, ranks_here}, 256, 0, stream, launch, l, trace);
}

}  // namespace muse
