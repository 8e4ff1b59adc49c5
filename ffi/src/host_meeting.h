// Where the ranks of a mesh on platform Host find each other: each device of a run calls "muse_verify" for itself.

#ifndef MUSE_FFI_HOST_MEETING_H_
#define MUSE_FFI_HOST_MEETING_H_

#include <cstdint>

#include "arguments.h"
#include "xla/ffi/api/ffi.h"

namespace muse {

// Runs the step when the calls of all ranks are there, in the memory of all of them, and completes all. If one has not
// come deadline_ms after the first, those that have come end with status kDeadline, and so do the late ones.
//
// No thread of XLA's waits: however few it has, those of a rank that is behind can go on. run: the same for all devices
// of a run, and for no other. Calls of a program must need each other's results: a rank's first call of some sizes is
// taken to belong to the other ranks' first ones.
xla::ffi::Future meet_peers(int64_t run, VerifyArguments args);

}  // namespace muse

#endif  // MUSE_FFI_HOST_MEETING_H_
