// What the leases of replicas and workers have in common.
#ifndef WEIGHTSYNC_CLIENT_CC_REGISTERED_STREAM_H_
#define WEIGHTSYNC_CLIENT_CC_REGISTERED_STREAM_H_

#include <string>

#include "client/cc/lease.h"
#include "client/cc/wire_time.h"
#include "glog/logging.h"

namespace weightsync {
namespace client {

// `options` is a WorkerOptions or ReplicaOptions; `what` names its owner.
template <typename Options>
LeaseOptions RegisteredLeaseOptions(std::string what, const Options& options) {
  LeaseOptions lease;
  lease.what = std::move(what);
  lease.register_timeout = options.register_timeout;
  lease.max_backoff = options.max_backoff;
  lease.outlives_misfit = true;
  return lease;
}

// The callbacks of a stream on which the daemon answers a registration with
// `registered` and both sides send heartbeats. What is left to the caller:
// start, registration, message.
template <typename Report, typename Command>
typename Lease<Report, Command>::Callbacks RegisteredCallbacks(
    std::string what) {
  typename Lease<Report, Command>::Callbacks callbacks;
  callbacks.heartbeat = [] {
    Report report;
    report.mutable_heartbeat();
    return report;
  };
  callbacks.accepted = [](const Command& command, LeaseTerms* terms) {
    if (!command.has_registered()) return false;
    terms->heartbeat_interval =
        FromProto(command.registered().heartbeat_interval());
    terms->heartbeat_timeout =
        FromProto(command.registered().heartbeat_timeout());
    terms->node = command.registered().node();
    return true;
  };
  callbacks.lost = [what = std::move(what)](const absl::Status& status) {
    LOG(WARNING) << what << " lost its stream: " << status;
  };
  return callbacks;
}

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_REGISTERED_STREAM_H_
