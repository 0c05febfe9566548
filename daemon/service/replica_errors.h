// Of the sessions of replicas alone.
#ifndef WEIGHTSYNC_DAEMON_SERVICE_REPLICA_ERRORS_H_
#define WEIGHTSYNC_DAEMON_SERVICE_REPLICA_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

inline std::string ReplicaName(const std::string& model,
                               const std::string& replica) {
  return absl::StrCat(model, "/replicas/", replica);
}

inline absl::Status NotHere(absl::string_view reason, const std::string& who) {
  return ErrorStatus(
      absl::StatusCode::kUnavailable, reason,
      absl::StrCat(who, " is not connected to its node any more"));
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_REPLICA_ERRORS_H_
