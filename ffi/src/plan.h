// From the arguments of a call to what its launches are given: sizes, how matrices are cut into units of work, places
// in the exchange buffers.
#pragma once

#include "arguments.h"
#include "launch.h"

namespace muse {

// Exchange buffers of a rank for these sizes. rows and layers do not matter: every call of a model has the same.
Buffers make_buffers(const Sizes& sizes);

// Everything of a launch that follows from the arguments and the number of CTAs; no workspaces.
Launch make_launch(const VerifyArguments& args, int num_sms);

}  // namespace muse
