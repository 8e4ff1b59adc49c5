// The kernel's own source, compiled for the emulated device.

#define MUSE_EMULATED

#include "../decode_megakernel.cu"  // NOLINT
#include "../trace.cu"              // NOLINT
