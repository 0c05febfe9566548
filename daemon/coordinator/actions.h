// What the coordinator wants done. Its executor (daemon/service) carries
// actions out in the order given.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_ACTIONS_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_ACTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/variant.h"
#include "weightsync/internal/v1/journal.pb.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

// To the node at the other end of the stream. A stream that is gone: drop it.
struct SendCommand {
  std::string node_stream;
  v1::NodeCommand command;
};

// End the stream with this error. The coordinator has forgotten it already; do
// not call OnDisconnected for it (it would do no harm).
struct CloseNode {
  std::string node_stream;
  v1::Failure failure;
};

// Write and fsync before any later action is carried out. When that fails, end
// the process and tell nobody.
struct JournalAppend {
  internal::v1::JournalRecord record;
};

// GetVersion would answer otherwise than before: wake who watches or waits.
// Waiters that look for an update_id must ask with it; `version` may be that of
// a new attempt.
struct VersionChanged {
  // "models/{model}".
  std::string model;
  int64_t version = 0;
  std::string update_id;
};

// Answers OnPrepareRequest.
struct PrepareDone {
  int64_t request = 0;
  // Code 0: `response` holds.
  v1::Failure failure;
  v1::PrepareResponse response;
};

// The calls of AdminService that change something.
using AdminRequest = absl::variant<
    v1::PauseReplicaRequest, v1::ResumeReplicaRequest, v1::RollbackModelRequest,
    v1::ReleaseModelRequest, v1::VerifyReplicaRequest, v1::DrainNodeRequest,
    v1::DeleteVersionRequest, v1::DeleteReplicaRequest, v1::AdoptClusterRequest,
    v1::SaveVersionRequest, v1::LoadVersionRequest, v1::RemoveModelRequest>;
using AdminResponse =
    absl::variant<v1::Replica, v1::Model, v1::VerifyReplicaResponse, v1::Node,
                  v1::DeleteVersionResponse, v1::DeleteReplicaResponse,
                  v1::Cluster, v1::SaveVersionResponse, v1::Version>;

// Answers OnAdminRequest.
struct AdminDone {
  int64_t request = 0;
  // Code 0: `response` holds, of the type that the call has.
  v1::Failure failure;
  AdminResponse response;
};

using Action = absl::variant<SendCommand, CloseNode, JournalAppend,
                             VersionChanged, PrepareDone, AdminDone>;
using Actions = std::vector<Action>;

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_ACTIONS_H_
