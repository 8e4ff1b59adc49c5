// Entry points of the CUDA side.
#pragma once

#include "launch.h"
#include "queue.h"

namespace muse {

// Once on each device, before the first launch there.
cudaError_t prepare_megakernel();

// Queues the launches of one verify step. launch: everything but begin and end.  trace: null, or where the intermediate
// values of layer `trace_layer` go, `TraceTable`; a launch then ends with that layer.
cudaError_t launch_megakernel(Launch& launch, int layers_per_launch, int trace_layer, float* trace,
                              cudaStream_t stream);

// What is in the exchange buffers after a launch that ended with layer `l`.
cudaError_t copy_trace(const Launch& launch, int l, float* trace, cudaStream_t stream);

}  // namespace muse
