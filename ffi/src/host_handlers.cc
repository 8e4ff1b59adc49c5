// FFI handlers of platform Host.

#include <string>
#include <utility>

#include "arguments.h"
#include "host_meeting.h"
#include "host_reference.h"
#include "xla/ffi/api/ffi.h"

namespace muse {

xla::ffi::Future host_verify_handler(xla::ffi::RunId run, xla::ffi::RemainingArgs operands,
                                     xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  VerifyArguments args;
  xla::ffi::Error error = parse_verify_arguments(operands, results, attributes, &args);
  if (error.success()) {
    const std::string problem = problem_in_data(args);
    if (!problem.empty()) error = xla::ffi::Error::InvalidArgument("muse_verify: " + problem);
  }
  if (error.success() && args.is_of_mesh()) return meet_peers(run.run_id, std::move(args));
  xla::ffi::Promise done;
  xla::ffi::Future future(done);
  if (error.failure()) {
    done.SetError(std::move(error));
  } else {
    host_verify({&args});
    done.SetAvailable();
  }
  return future;
}

}  // namespace muse

XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyHost, muse::host_verify_handler,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::RunId>().RemainingArgs().RemainingRets().Attrs());
