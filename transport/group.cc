#include "transport/group.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr char kEdgePayload[] = "weightsync/edge";

}  // namespace

absl::Status EdgeError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view from, absl::string_view to,
                       absl::string_view sentence) {
  const std::string edge = absl::StrCat(from, "->", to);
  absl::Status status =
      MakeError(code, reason, absl::StrCat("edge ", edge, ": ", sentence));
  SetEdge(&status, edge);
  return status;
}

absl::optional<std::string> EdgeOf(const absl::Status& status) {
  absl::optional<absl::Cord> payload = status.GetPayload(kEdgePayload);
  if (!payload) return absl::nullopt;
  return std::string(*payload);
}

void SetEdge(absl::Status* status, absl::string_view edge) {
  status->SetPayload(kEdgePayload, absl::Cord(edge));
}

}  // namespace transport
}  // namespace weightsync
