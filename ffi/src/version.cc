// What a library was built from and for, for whoever loads it: words `key=value`, with spaces between.
//
//   sources         hash of the sources
//   architectures   of the machine code, such as 90a,103a; absent: there are no CUDA handlers
//   cuda            version of nvcc

#include "xla/ffi/api/c_api.h"

#define MUSE_STRING(x) #x
#define MUSE_STRING_OF(x) MUSE_STRING(x)

extern "C" const char* muse_ffi_version() {
  return MUSE_FFI_VERSION " api=" MUSE_STRING_OF(XLA_FFI_API_MAJOR) "." MUSE_STRING_OF(XLA_FFI_API_MINOR);
}
