// The verify step in plain C++, phase by phase as the kernel has it: the executable specification of "muse_verify".

#ifndef MUSE_FFI_HOST_REFERENCE_H_
#define MUSE_FFI_HOST_REFERENCE_H_

#include <string>

#include "arguments.h"

namespace muse {

// Runs a step on one CPU thread and fills the results. All of the model's ranks are here, or it is a loopback.
// Returns an empty string, or what is wrong with the data of an operand; the results are then not filled.
//
// Sums are fp32, in an order that does not depend on the number of ranks: 1, 2, 4 and 8 of them give the same bits.
std::string host_verify(const VerifyArguments& args);

}  // namespace muse

#endif  // MUSE_FFI_HOST_REFERENCE_H_
