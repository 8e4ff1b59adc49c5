// The verify step in plain C++, phase by phase as the kernel has it: the executable specification of "muse_verify".

#ifndef MUSE_FFI_HOST_REFERENCE_H_
#define MUSE_FFI_HOST_REFERENCE_H_

#include <string>
#include <vector>

#include "arguments.h"

namespace muse {

// What is wrong with the data of a call's operands; an empty string: nothing.
std::string problem_in_data(const VerifyArguments& args);

// Runs a step on one CPU thread and fills the results.
//
// calls: of all of the model's ranks in their order: one with all of them (or a loopback), or of each device of a mesh
// one with its rank. There is no problem in their data.
//
// Sums are fp32, in an order that does not depend on the number of ranks: 1, 2, 4 and 8 of them give the same bits.
void host_verify(const std::vector<const VerifyArguments*>& calls);

}  // namespace muse

#endif  // MUSE_FFI_HOST_REFERENCE_H_
