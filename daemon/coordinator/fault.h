// A named failure, as the pure parts of the coordinator keep it.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

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

// "node b: message", or the message alone where it begins with "node b" itself:
// who sent it may know, or may not, that it will be read elsewhere.
inline std::string SaidBy(const std::string& who, const std::string& message) {
  const bool named = absl::StartsWith(message, who) &&
                     (message.size() == who.size() ||
                      absl::string_view(" :,;").find(message[who.size()]) !=
                          absl::string_view::npos);
  return named ? message : absl::StrCat(who, ": ", message);
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_FAULT_H_
