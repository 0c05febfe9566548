// A named failure, as the pure parts of the coordinator keep it.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_

#include <string>
#include <utility>

#include "absl/status/status.h"

namespace weightsync {
namespace daemon {

// Default: no fault.
struct Fault {
  absl::StatusCode code = absl::StatusCode::kOk;
  // UPPER_SNAKE, as the protos list them.
  std::string reason;
  // One sentence that names the node, edge, rank, replica or worker.
  std::string message;

  Fault() = default;
  Fault(absl::StatusCode c, std::string r, std::string m)
      : code(c), reason(std::move(r)), message(std::move(m)) {}

  bool ok() const { return code == absl::StatusCode::kOk; }
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_
