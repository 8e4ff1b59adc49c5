// Queueing a kernel on a stream; on the emulated device it runs at once.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef MUSE_EMULATED

#include "emulation/device.h"

enum cudaError_t { cudaSuccess, cudaErrorUnknown };
using cudaStream_t = void*;

namespace muse {

template <typename... Params, typename... Args>
cudaError_t queue(void (*kernel)(Params...), dim3 grid, uint32_t threads, size_t shared_bytes, cudaStream_t,
                  Args&&... args) {
  emulation::run(grid, threads, shared_bytes, [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace muse

#else

#include <cuda_runtime.h>

namespace muse {

// shared_bytes: above 0: CTAs wait for each other, so all have to be there together.
template <typename... Params, typename... Args>
cudaError_t queue(void (*kernel)(Params...), dim3 grid, uint32_t threads, size_t shared_bytes, cudaStream_t stream,
                  Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = shared_bytes > 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
}

}  // namespace muse

#endif  // MUSE_EMULATED
