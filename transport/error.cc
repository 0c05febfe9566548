#include "transport/error.h"

#include <system_error>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"

namespace weightsync {
namespace transport {

absl::Status MakeError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kReasonPayloadUrl, absl::Cord(reason));
  return status;
}

absl::Status MakeErrnoError(absl::StatusCode code, absl::string_view reason,
                            absl::string_view message, int error_number) {
  return MakeError(code, reason,
                   absl::StrCat(message, ": ",
                                std::generic_category().message(error_number)));
}

std::string ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason =
      status.GetPayload(kReasonPayloadUrl);
  return reason.has_value() ? std::string(*reason) : std::string();
}

}  // namespace transport
}  // namespace weightsync
