// Small conversions between the coordinator's plain types and protos.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_CONVERT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_CONVERT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/coordinator/fault.h"
#include "daemon/coordinator/replica_machine.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

google::protobuf::Timestamp ToProto(absl::Time time);
google::protobuf::Duration ToProto(absl::Duration duration);
absl::Time FromProto(const google::protobuf::Timestamp& time);
absl::Duration FromProto(const google::protobuf::Duration& duration);

// No fault is the default Failure, and back. A failure whose code was left out
// is INTERNAL.
v1::Failure ToProto(const Fault& fault);
Fault FromProto(const v1::Failure& failure);
bool IsFailure(const v1::Failure& failure);

// UNSPECIFIED is DRAIN.
PauseKind PauseOf(v1::PauseMode mode);
v1::PauseMode ToProto(PauseKind kind);

absl::Status ToStatus(const Fault& fault);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_CONVERT_H_
