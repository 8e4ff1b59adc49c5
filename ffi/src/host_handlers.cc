// FFI handlers of platform Host.

#include "arguments.h"
#include "host_reference.h"
#include "xla/ffi/api/ffi.h"

namespace muse {

xla::ffi::Error host_verify_handler(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                                    xla::ffi::Dictionary attributes) {
  VerifyArguments args;
  xla::ffi::Error error = parse_verify_arguments(operands, results, attributes, &args);
  if (error.failure()) return error;
  const std::string problem = host_verify(args);
  return problem.empty() ? xla::ffi::Error::Success() : xla::ffi::Error::InvalidArgument("muse_verify: " + problem);
}

}  // namespace muse

XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyHost, muse::host_verify_handler,
                              xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
