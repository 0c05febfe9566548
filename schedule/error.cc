#include "schedule/error.h"

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace weightsync {
namespace schedule {

absl::Status PlanError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

absl::Status InvalidPlan(absl::string_view reason, absl::string_view message) {
  return PlanError(absl::StatusCode::kInvalidArgument, reason, message);
}

std::string ReasonOf(const absl::Status& status) {
  absl::optional<absl::Cord> payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace schedule
}  // namespace weightsync
