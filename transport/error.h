// How transport reports what went wrong: a status code, a sentence that says
// what to do, and a reason in UPPER_SNAKE that programs can branch on.
#ifndef WEIGHTSYNC_TRANSPORT_ERROR_H_
#define WEIGHTSYNC_TRANSPORT_ERROR_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {

// The status payload that carries the reason.
constexpr char kReasonPayloadUrl[] = "type.weightsync/reason";

// A status with a reason. `code` is not OK.
absl::Status MakeError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view message);

// MakeError with strerror(error_number) after the message.
absl::Status MakeErrnoError(absl::StatusCode code, absl::string_view reason,
                            absl::string_view message, int error_number);

// The reason of `status`, or "" if it has none.
std::string ReasonOf(const absl::Status& status);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_ERROR_H_
