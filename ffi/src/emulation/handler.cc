// The FFI handler that runs the kernel on the emulated device: "muse_verify_emulated", platform Host.

#define MUSE_EMULATED

#include <cfenv>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "../megakernel.h"
#include "../plan.h"
#include "xla/ffi/api/ffi.h"

namespace muse {
namespace {

// XLA runs with subnormal numbers flushed to zero, a GPU does not: codes of NVFP4 begin as such numbers.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

// The ranks' memory for exchange stays from call to call, as on a GPU.
struct Memory {
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<Workspace*> workspaces;
  std::vector<float> stream;
};

std::mutex memories_mutex;
std::map<std::tuple<int, int, uint32_t, int>, Memory> memories;

Memory& memory_of(const Launch& launch) {
  const Sizes& sizes = launch.sizes;
  Memory& memory = memories[{sizes.ranks, sizes.ranks_here, launch.buffers.bytes, launch.ctas_per_rank}];
  if (!memory.workspaces.empty()) return memory;
  memory.stream.resize(size_t{2} * sizes.ranks_here * kMaxRows * sizes.hidden);
  for (int rank = 0; rank < sizes.ranks_here; ++rank) {
    memory.bytes.emplace_back(sizeof(Workspace) + size_t{kRounds} * launch.buffers.bytes + alignof(Workspace), 0xff);
    uint8_t* begin = memory.bytes.back().data();
    begin += -reinterpret_cast<uintptr_t>(begin) % alignof(Workspace);
    memory.workspaces.push_back(new (begin) Workspace{});
  }
  return memory;
}

}  // namespace

xla::ffi::Error emulated_verify_handler(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                                        xla::ffi::Dictionary attributes) {
  VerifyArguments args;
  xla::ffi::Error error = parse_verify_arguments(operands, results, attributes, &args);
  if (error.failure()) return error;
  if (args.is_of_mesh()) {
    return xla::ffi::Error::InvalidArgument("muse_verify_emulated: embedding has 1 of " +
                                            std::to_string(args.shape.ranks) +
                                            " ranks: all of them are on the emulated device, or one is a loopback");
  }
  // One call at a time: the emulated device is one for all.
  const std::lock_guard<std::mutex> lock(memories_mutex);
  Launch launch = make_launch(args, emulation::settings.ctas_per_rank * args.ranks_here);
  Memory& memory = memory_of(launch);
  launch.stream = memory.stream.data();
  for (int rank = 0; rank < args.shape.ranks; ++rank)
    launch.workspaces[rank] = memory.workspaces[rank < args.ranks_here ? rank : 0];
  constexpr uint32_t kThisCall = 1, kOtherCall = 2;
  launch.call = kThisCall;
  uint32_t& running = launch.workspaces[0]->call;
  if (emulation::settings.is_taken) running = kOtherCall;
  const PlainArithmetic arithmetic;
  try {
    launch_megakernel(launch, args.layers_per_launch, args.trace_layer, args.trace_size > 0 ? args.trace : nullptr,
                      nullptr);
  } catch (const std::exception& problem) {
    memories.clear();
    return xla::ffi::Error::Internal(problem.what());
  }
  if (emulation::settings.is_taken) running = 0;
  return xla::ffi::Error::Success();
}

}  // namespace muse

XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyEmulated, muse::emulated_verify_handler,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

// For tests. stalled_cta: -1: none.
extern "C" void muse_ffi_emulation(uint64_t seed, int ctas_per_rank, int stalled_cta, int is_taken) {
  const std::lock_guard<std::mutex> lock(muse::memories_mutex);
  muse::emulation::settings.seed = seed;
  muse::emulation::settings.ctas_per_rank = ctas_per_rank;
  muse::emulation::settings.stalled_cta = stalled_cta;
  muse::emulation::settings.is_taken = is_taken != 0;
}
