// The FFI handler of platform CUDA, and the memory for exchange that its calls use.
//
// muse_ffi_prepare makes that memory, once for each model and set of devices, before the first call: nothing is
// allocated and nothing is waited for while a call is queued, so XLA may capture it in a CUDA graph.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arguments.h"
#include "megakernel.h"
#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace muse {
namespace {

// What the ranks of a model have on their devices.
struct Group {
  ModelShape shape;
  bool quantized;
  std::vector<int> devices;  // of each rank; all the same where one device emulates them
  uint32_t bytes;            // of a set of exchange buffers
  std::vector<Workspace*> workspaces;
  std::vector<float*> streams;  // of each device that is among them
  int num_sms;

  // One rank without the others.
  bool is_loopback() const { return devices.size() < static_cast<size_t>(shape.ranks); }
  int here(int device) const { return static_cast<int>(std::count(devices.begin(), devices.end(), device)); }
};

std::mutex groups_mutex;
std::vector<std::unique_ptr<Group>> groups;
std::atomic<uint32_t> calls{0};

bool same_shape(const ModelShape& x, const ModelShape& y) { return std::memcmp(&x, &y, sizeof(x)) == 0; }

bool same_model(const Group& x, const Group& y) {
  return same_shape(x.shape, y.shape) && x.quantized == y.quantized && x.is_loopback() == y.is_loopback();
}

// The group whose ranks here are on `device`: there is one at most (muse_ffi_prepare).
Group* find_group(const VerifyArguments& args, int device, int* first_rank) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  for (const auto& group : groups) {
    if (!same_shape(group->shape, args.shape) || group->quantized != args.quantized) continue;
    if (group->is_loopback() != (args.loopback && args.shape.ranks > 1)) continue;
    const auto at = std::find(group->devices.begin(), group->devices.end(), device);
    if (at == group->devices.end() || group->here(device) != args.ranks_here) continue;
    *first_rank = static_cast<int>(at - group->devices.begin());
    return group.get();
  }
  return nullptr;
}

std::string problem_of(cudaError_t error, const char* what) {
  return std::string(what) + ": " + cudaGetErrorString(error);
}

// Memory of every rank, cleared; peers can reach each other's. Returns what went wrong.
std::string fill(Group& group) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  const auto done = [&](const std::string& problem) {
    cudaSetDevice(before);
    return problem;
  };
  if (error != cudaSuccess) return problem_of(error, "no CUDA device");
  Sizes sizes = {};
  static_cast<ModelShape&>(sizes) = group.shape;
  sizes.quantized = group.quantized;
  group.bytes = make_buffers(sizes).bytes;
  for (size_t rank = 0; rank < group.devices.size(); ++rank) {
    const int device = group.devices[rank];
    if ((error = cudaSetDevice(device)) != cudaSuccess) return done(problem_of(error, "cudaSetDevice"));
    if ((error = prepare_megakernel()) != cudaSuccess) return done(problem_of(error, "the kernel"));
    if ((error = cudaDeviceGetAttribute(&group.num_sms, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) {
      return done(problem_of(error, "cudaDeviceGetAttribute"));
    }
    for (const int peer : group.devices) {
      if (peer == device) continue;
      error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) cudaGetLastError();
      else if (error != cudaSuccess) return done(problem_of(error, "peer access between the GPUs"));
    }
    const size_t bytes = sizeof(Workspace) + size_t{kRounds} * group.bytes;
    void* memory = nullptr;
    if ((error = cudaMalloc(&memory, bytes)) != cudaSuccess) return done(problem_of(error, "memory for exchange"));
    group.workspaces.push_back(static_cast<Workspace*>(memory));
    if ((error = cudaMemset(memory, 0xff, bytes)) != cudaSuccess) return done(problem_of(error, "cudaMemset"));
    if ((error = cudaMemset(memory, 0, sizeof(Workspace))) != cudaSuccess) return done(problem_of(error, "cudaMemset"));
    if (rank == 0 || group.devices[rank - 1] != device) {
      const size_t numbers = size_t{2} * group.here(device) * kMaxRows * group.shape.hidden;
      if ((error = cudaMalloc(&memory, numbers * sizeof(float))) != cudaSuccess) {
        return done(problem_of(error, "memory for the stream"));
      }
      group.streams.push_back(static_cast<float*>(memory));
    } else {
      group.streams.push_back(group.streams.back());
    }
    if ((error = cudaDeviceSynchronize()) != cudaSuccess) return done(problem_of(error, "cudaDeviceSynchronize"));
  }
  return done("");
}

}  // namespace

xla::ffi::Error cuda_verify_handler(cudaStream_t stream, int32_t device, xla::ffi::RemainingArgs operands,
                                    xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  VerifyArguments args;
  xla::ffi::Error error = parse_verify_arguments(operands, results, attributes, &args);
  if (error.failure()) return error;
  int first_rank = 0;
  // The thread may have launched for another device before.
  const cudaError_t chosen = cudaSetDevice(device);
  if (chosen != cudaSuccess) return xla::ffi::Error::Internal("muse_verify: " + problem_of(chosen, "cudaSetDevice"));
  const Group* group = find_group(args, device, &first_rank);
  if (group == nullptr) {
    return xla::ffi::Error(
        xla::ffi::ErrorCode::kFailedPrecondition,
        "muse_verify: muse_ffi_prepare has not been called for this model on device " + std::to_string(device));
  }
  if (args.num_layers() > kMaxLayers || args.taps.size() > kMaxTaps) {
    return xla::ffi::Error::InvalidArgument("muse_verify: at most " + std::to_string(kMaxLayers) + " layers and " +
                                            std::to_string(kMaxTaps) + " taps are possible");
  }
  Launch launch = make_launch(args, group->num_sms);
  launch.first_rank = first_rank;
  launch.stream = group->streams[first_rank];
  for (int rank = 0; rank < args.shape.ranks; ++rank) {
    launch.workspaces[rank] = group->workspaces[args.loopback ? 0 : rank];
  }
  launch.call = ++calls;
  const cudaError_t launched = launch_megakernel(launch, args.layers_per_launch, args.trace_layer,
                                                 args.trace_size > 0 ? args.trace : nullptr, stream);
  return launched == cudaSuccess ? xla::ffi::Error::Success()
                                 : xla::ffi::Error::Internal("muse_verify: " + problem_of(launched, "launching"));
}

}  // namespace muse

XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyCuda, muse::cuda_verify_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

// Makes what calls of a model need on these devices; nothing happens if it is there. shape: the fields of ModelShape in
// their order.  devices: of each rank; in loopback one. As many ranks of a model may be on a device for one set of
// devices only.  Returns 0, or 1 with a message of at most `size` bytes.
extern "C" int muse_ffi_prepare(const int32_t* shape, int quantized, const int32_t* devices, int num_devices,
                                char* message, int size) {
  auto group = std::make_unique<muse::Group>();
  static_assert(sizeof(muse::ModelShape) == 10 * sizeof(int32_t), "fields of ModelShape");
  std::memcpy(&group->shape, shape, sizeof(muse::ModelShape));
  group->quantized = quantized != 0;
  group->devices.assign(devices, devices + num_devices);
  const std::lock_guard<std::mutex> lock(muse::groups_mutex);
  std::string problem;
  for (const auto& other : muse::groups) {
    if (!muse::same_model(*other, *group)) continue;
    if (other->devices == group->devices) return 0;
    // A call knows its device, and by that its rank.
    for (const int device : group->devices) {
      if (other->here(device) != group->here(device)) continue;
      problem = "device " + std::to_string(device) + " has a rank of this model already, with other devices";
    }
  }
  if (problem.empty()) problem = muse::fill(*group);
  if (!problem.empty()) {
    std::snprintf(message, size, "%s", problem.c_str());
    return 1;
  }
  muse::groups.push_back(std::move(group));
  return 0;
}
