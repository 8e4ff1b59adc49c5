// The verify step of the target: one launch for each decoder layer, or for several, or for all.
//
//   launch l:  attention of layer l  ...  post_ffn of layer l, qkv of layer l + 1
//   the first begins with the embedding and qkv of layer 0, the last ends with lm_head
//
// A CTA on each SM walks the same list of phases. Sixteen consumer warps compute; a producer warp streams weights and
// committed keys into shared memory as fast as there is room, across phases and layers; a janitor warp clears exchange
// buffers for the next round; a watchdog warp ends what makes no progress. What CTAs give each other goes through
// exchange buffers in which data is its own flag (sync.cuh): there is no grid barrier. Every wait ends: by data, or
// after a deadline with a status that says who waited for what.

#include "megakernel.h"

#include "phases/attention.cuh"
#include "phases/experts.cuh"
#include "phases/projections.cuh"
#include "phases/rows.cuh"

namespace muse {
namespace {

// ---- The phases of a layer, and who waits for whom in them ----------------------------------------------------------

// l: -1 stands for the embedding, which takes a layer's place before layer 0.
__device__ __forceinline__ bool has_phase(const Cta& cta, Phase phase, int l) {
  if (phase == Phase::kQkv) return l + 1 < cta.sizes().layers;
  if (phase == Phase::kLmHead) return l + 1 == cta.sizes().layers;
  return (phase == Phase::kEmbed) == (l < 0);
}

__device__ __forceinline__ Phase first_phase(int l) { return l < 0 ? Phase::kEmbed : Phase::kHeads; }
__device__ __forceinline__ Phase after(Phase phase) { return static_cast<Phase>(static_cast<int>(phase) + 1); }

// ---- Consumers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume_phase(const Cta& of_all, Consumer& consumer, Phase phase, int l,
                                              uint32_t layers_done) {
  const Cta cta = of_all.forgetful();
  switch (phase) {
    case Phase::kHeads:
    case Phase::kOSum:
    case Phase::kPooled:
    case Phase::kBranch: return finish_tiles(cta, phase, l);
    case Phase::kAttention: return run_attention(cta, consumer, l);
    case Phase::kMergeAttention: return merge_attention(cta, l);
    case Phase::kTopK: return finish_router(cta, l);
    case Phase::kEmbed:
    case Phase::kPostAttention:
    case Phase::kPostFfn: return finish_rows(cta, phase, l);
    case Phase::kMoeIn:
    case Phase::kQuantizeHidden: return finish_expert_rows(cta, phase, l);
    case Phase::kCombine:
      combine(cta, l);
      consumer_barrier();
      if (threadIdx.x == 0) mbarrier_arrive(shared_address(&cta.shared.experts_empty));
      return;
    case Phase::kExpertGateUp:
      wait_for_barrier(cta, &cta.shared.experts_full, layers_done & 1);
      __syncwarp();
      [[fallthrough]];
    default: return run_matrices(cta, consumer, phase, l);
  }
}

__device__ __forceinline__ void consume(Cta& cta, uint32_t base) {
  Consumer consumer;
  const Launch& launch = cta.launch;
#pragma unroll 1
  for (int l = launch.begin; l < launch.end; ++l) {
    cta.begin_round(base + 1 + l);
#pragma unroll 1
    for (Phase phase = first_phase(l); phase <= Phase::kLmHead; phase = after(phase)) {
      if (!has_phase(cta, phase, l)) continue;
      cta.enter(phase, l);
      consume_phase(cta, consumer, phase, l, l - max(launch.begin, 0));
      if (is_profiled(cta) && cta.thread == 0) record(cta, kConsumerRole, phase, l, 0);
    }
    // This CTA has read everything of the round.
    consumer_barrier();
    if (threadIdx.x == 0) add_release(&launch.workspaces[cta.rank]->signed_off[cta.round % 4], 1);
  }
}

// ---- Producer: what the phases need through the ring, in the same order ---------------------------------------------

__device__ __forceinline__ void produce(Cta& cta, uint32_t base) {
  Producer producer{cta, evict_first_policy()};
  const Launch& launch = cta.launch;
  const bool loads = cta.lane == 0;
#pragma unroll 1
  for (int l = launch.begin; l < launch.end; ++l) {
    cta.begin_round(base + 1 + l);
#pragma unroll 1
    for (Phase phase = first_phase(l); phase <= Phase::kLmHead; phase = after(phase)) {
      if (!has_phase(cta, phase, l)) continue;
      if (phase == Phase::kExpertGateUp) {
        wait_for_barrier(cta, &cta.shared.experts_empty, ((l - max(launch.begin, 0)) & 1) ^ 1);
        __syncwarp();
        build_experts(cta, l);
        if (loads) mbarrier_arrive(shared_address(&cta.shared.experts_full));
        // The wait for the routing counts as a phase: the ring may run dry in it.
        if (is_profiled(cta) && loads) record(cta, kProducerRole, Phase::kTopK, l, 0);
      }
      if (loads) {
        bool has_loads = true;
        switch (phase) {
          case Phase::kAttention: load_attention(cta, producer, l); break;
          case Phase::kOProj:
          case Phase::kRouter:
          case Phase::kPreExpertProj:
          case Phase::kExpertGateUp:
          case Phase::kExpertDown:
          case Phase::kPostExpertProj:
          case Phase::kQkv:
          case Phase::kLmHead: load_matrices(cta, producer, phase, l); break;
          default: has_loads = false;
        }
        if (has_loads && is_profiled(cta)) record(cta, kProducerRole, phase, l, producer.waited_ns);
        producer.waited_ns = 0;
      }
      __syncwarp();
    }
  }
  // Copies that nobody waited for (after an abort) end before shared memory is somebody else's.
  if (loads) {
#pragma unroll 1
    for (uint32_t stage = producer.next > kStages ? producer.next - kStages : 0; stage < producer.next; ++stage) {
      const RingPosition at{stage};
      while (!mbarrier_try_wait(shared_address(&cta.shared.full[at.slot()]), at.parity())) {
      }
    }
  }
}

// ---- Janitor: clears the buffers of the round after this one, and says when all have --------------------------------

// Waits until every rank has cleared its buffers of the round. In loopback there is no other rank.
__device__ __forceinline__ void open_round(const Cta& cta, uint32_t round) {
  const bool loopback = cta.sizes().loopback;
  if (cta.lane < (loopback ? 1 : cta.sizes().ranks)) {
    const int rank = loopback ? cta.rank : cta.lane;
    wait_for_count(cta.waiting, &cta.launch.workspaces[cta.rank]->opened[rank], round, rank);
  }
  __syncwarp();
  if (cta.lane == 0) *static_cast<volatile uint32_t*>(&cta.shared.open_round) = round;
}

__device__ __forceinline__ void clear_next_round(const Cta& cta) {
  Workspace* workspace = cta.launch.workspaces[cta.rank];
  const uint32_t round = cta.round, next = round + 1, count = cta.count;
  if (round >= 2) {
    // Its buffers are those of round - 2: everybody has read them.
    if (cta.lane == 0)
      wait_for_count(cta.waiting, &workspace->signed_off[(round - 2) % 4], count * ((round - 2) / 4 + 1), cta.rank);
    __syncwarp();
    const uint32_t words = cta.launch.buffers.bytes / sizeof(uint4);
    uint4* to = cta.own<uint4>(0, true);
    const uint4 absent = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
#pragma unroll 1
    for (uint32_t i = 32 * cta.index + cta.lane; i < words; i += 32 * count) store_relaxed(to + i, absent);
    __syncwarp();
  }
  if (cta.lane == 0) {
    add_release(&workspace->cleared[next % 4], 1);
    if (cta.index == 0) {
      // Round 0 is clear from the start, so its counter is one lap behind.
      wait_for_count(cta.waiting, &workspace->cleared[next % 4], count * (next / 4 + (next % 4 != 0)), cta.rank);
      __threadfence_system();
#pragma unroll 1
      for (int p = 0; p < (cta.sizes().loopback ? 1 : cta.sizes().ranks); ++p) {
        store_release(&cta.launch.workspaces[cta.sizes().loopback ? cta.rank : p]->opened[cta.rank], next);
      }
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void clean(Cta& cta, uint32_t base) {
  const Launch& launch = cta.launch;
  // The first launch of a call also waits for the round before which nothing is cleared, the embedding's.
#pragma unroll 1
  for (int l = launch.begin < 0 ? launch.begin - 1 : launch.begin; l < launch.end; ++l) {
    cta.begin_round(base + 1 + l);
    if (l >= -1) clear_next_round(cta);
    open_round(cta, cta.round + 1);
  }
}

// ---- Watchdog: a CTA that stays in a phase for longer than the deadline waits for something that does not come ------

__device__ __forceinline__ void give_up_everywhere(const Cta& cta) {
  const int ranks = cta.sizes().loopback ? 1 : cta.sizes().ranks;
#pragma unroll 1
  for (int i = 0; i < ranks; ++i) store_relaxed(&cta.launch.workspaces[ranks == 1 ? cta.rank : i]->aborted, 1u);
}

__device__ __forceinline__ void watch(const Cta& cta) {
  volatile Site& site = cta.shared.site;
  volatile bool& finished = cta.shared.finished;
  volatile uint32_t& aborted = cta.shared.aborted;
  Workspace* workspace = cta.launch.workspaces[cta.rank];
  uint32_t steps = site.steps;
  uint64_t since = global_timer_ns();
  while (!finished && !aborted) {
    __nanosleep(1000);  // short: a CTA ends when its watchdog has seen that the consumers have
    const uint64_t now = global_timer_ns();
    if (site.steps != steps) {
      steps = site.steps;
      since = now;
    }
    const bool late = now - since > cta.launch.deadline_ns;
    if (!late && load_relaxed(&workspace->aborted) == 0) continue;
    const int32_t layer = site.layer, phase = static_cast<int32_t>(site.phase);
    aborted = 1;
    if (!late || atomicCAS(&workspace->failure.code, kNoFailure, kDeadline) != kNoFailure) break;
    __nanosleep(100000);  // for those who wait to say whom they waited for
    workspace->failure.rank = cta.rank;
    workspace->failure.layer = layer;
    workspace->failure.phase = phase;
    workspace->failure.item = cta.index;
    workspace->failure.peer = site.peer;
    give_up_everywhere(cta);
  }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) decode_megakernel(const __grid_constant__ Launch launch) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory());
  const int here = __umulhi(blockIdx.x, launch.ctas_reciprocal), rank = launch.first_rank + here;
  Workspace* workspace = launch.workspaces[rank];
  if (workspace->call != launch.call) return;  // another call is running, `begin_call` has said so
  const uint32_t base = workspace->round;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), 1);
      mbarrier_init(shared_address(&shared.empty[i]), kTilesPerStage);
    }
    mbarrier_init(shared_address(&shared.experts_full), 1);
    mbarrier_init(shared_address(&shared.experts_empty), 1);
    mbarrier_init_fence();
    shared.site = {0, launch.begin, first_phase(launch.begin), -1};
    shared.finished = false;
    shared.aborted = workspace->aborted;
    shared.skipped = shared.aborted;
    shared.experts.count = 0;  // after an abort consumers may look before there are any
    if (launch.profile.ranks != nullptr)
      shared.phase_began[kConsumerRole] = shared.phase_began[kProducerRole] = global_timer_ns();
    // The round of this launch's first layer was opened by the launch before.
    shared.open_round = launch.begin < 0 ? base - 1 : base + 1 + launch.begin;
  }
  __syncthreads();
  Cta cta{launch,
          shared,
          Waiting{&shared.aborted, &shared.site},
          rank,
          here,
          static_cast<int>(blockIdx.x) - here * launch.ctas_per_rank,
          launch.ctas_per_rank,
          static_cast<int>(threadIdx.x),
          __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32,
                      0),  // so that the compiler knows that warps stay together
          static_cast<int>(threadIdx.x) % 32,
          reinterpret_cast<uint8_t*>(workspace + 1),
          base,
          0,
          0};
  if (shared.skipped) {
  } else if (cta.warp < kConsumerWarps) {
    take_registers<kConsumerRegisters>();
    consume(cta, base);
    consumer_barrier();
    if (threadIdx.x == 0) *static_cast<volatile bool*>(&shared.finished) = true;
  } else {
    give_registers<kOtherRegisters>();
    if (cta.warp == kProducerWarp) produce(cta, base);
    else if (cta.warp == kJanitorWarp) clean(cta, base);
    else if (cta.warp == kWatchdogWarp && cta.lane == 0) watch(cta);
  }
  __syncthreads();
  if (launch.end < launch.sizes.layers || threadIdx.x != 0) return;
  // The last CTA to leave ends the call.
  Workspace* first = launch.workspaces[launch.first_rank];
  __threadfence();
  if (atomicAdd(&first->exited, 1u) + 1 < gridDim.x) return;
  __threadfence();  // what the others wrote before they left is seen: the failure
  first->exited = 0;
#pragma unroll 1
  for (int r = launch.first_rank; r < launch.first_rank + launch.sizes.ranks_here; ++r) {
    Workspace* of_rank = launch.workspaces[r];
    of_rank->round = base + launch.sizes.layers + 1;
    const Failure& failure = of_rank->failure;
    if (failure.code == kNoFailure || launch.status[0] != kNoFailure) continue;
    const int32_t words[6] = {failure.code, failure.rank, failure.layer, failure.phase, failure.item, failure.peer};
    for (int i = 0; i < 6; ++i) launch.status[i] = words[i];
  }
  __threadfence();
#pragma unroll 1
  for (int r = launch.first_rank; r < launch.first_rank + launch.sizes.ranks_here; ++r) {
    if (launch.profile.ranks != nullptr && launch.workspaces[r]->aborted == 0)
      launch.profile.header(r - launch.first_rank)->ctas = launch.ctas_per_rank;
    launch.workspaces[r]->call = 0;
  }
}

// Takes the workspaces for this call, or says that another one has them. After a call that gave up, everything becomes
// as it was at the beginning. One CTA: whether the workspaces are free is decided once.
__global__ void begin_call(const __grid_constant__ Launch launch) {
  Workspace* first = launch.workspaces[launch.first_rank];
  const int end = launch.first_rank + launch.sizes.ranks_here;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStatusSize; ++i) launch.status[i] = 0;
    if (atomicCAS(&first->call, 0u, launch.call) != 0) launch.status[0] = kOverlap;
    // Until the call has ended.
    for (int r = launch.first_rank; launch.profile.ranks != nullptr && r < end; ++r)
      *launch.profile.header(r - launch.first_rank) = {0, kNumProfileRoles, static_cast<uint32_t>(r), 0};
  }
  __syncthreads();
  if (load_relaxed(&first->call) != launch.call) return;
  const bool gave_up = load_relaxed(&first->aborted) != 0;
  for (int r = launch.first_rank; gave_up && r < end; ++r) {
    uint4* words = reinterpret_cast<uint4*>(launch.workspaces[r] + 1);
    const size_t count = static_cast<size_t>(kRounds) * launch.buffers.bytes / sizeof(uint4);
    for (size_t i = threadIdx.x; i < count; i += blockDim.x) words[i] = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Workspace fresh = {};
  fresh.call = launch.call;  // never 0 on the way, when another stream's call would take the workspaces
  for (int r = launch.first_rank; r < end; ++r) {
    if (gave_up) *launch.workspaces[r] = fresh;
    else launch.workspaces[r]->call = launch.call;
  }
}

// Where the launch that would end the call could not be queued: otherwise every later call would be refused.
__global__ void abandon_call(const __grid_constant__ Launch launch) {
  const int end = launch.first_rank + launch.sizes.ranks_here;
  for (int r = launch.first_rank; r < end; ++r) {
    Workspace* workspace = launch.workspaces[r];
    if (workspace->call != launch.call) continue;
    workspace->aborted = 1;  // so that the next call begins with everything as new
    workspace->call = 0;
  }
}

}  // namespace

#ifndef MUSE_EMULATED
cudaError_t prepare_megakernel() {
  // All are loaded now: when a kernel is first used a stream may be being captured, which does not allow it.
  cudaFuncAttributes attributes;
  for (const auto kernel : {begin_call, abandon_call}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaFuncSetAttribute(decode_megakernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
}
#endif

cudaError_t launch_megakernel(Launch& launch, int layers_per_launch, int trace_layer, float* trace,
                              cudaStream_t stream) {
  const uint32_t ctas = launch.ctas_per_rank * launch.sizes.ranks_here;
  const int layers = launch.sizes.layers;
  cudaError_t error = queue(begin_call, {1}, 1024, 0, stream, launch);
  if (error != cudaSuccess) return error;
  for (int begin = 0, end = 0; begin < layers && error == cudaSuccess; begin = end) {
    end = begin + layers_per_launch < layers ? begin + layers_per_launch : layers;
    // The buffers of a layer are there until the one after the next.
    if (trace != nullptr && begin <= trace_layer && trace_layer < end) end = trace_layer + 1;
    launch.begin = begin == 0 ? -1 : begin;
    launch.end = end;
    error = queue(decode_megakernel, {ctas}, kThreads, sizeof(SharedStorage), stream, launch);
    if (error == cudaSuccess && trace != nullptr && end == trace_layer + 1)
      error = copy_trace(launch, trace_layer, trace, stream);
  }
  if (error != cudaSuccess) queue(abandon_call, {1}, 1, 0, stream, launch);
  return error;
}

}  // namespace muse
