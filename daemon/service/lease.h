// What a client's open stream gives it: a place in the cluster for as long as
// it shows that it lives. A lease ends with its stream, without heartbeats, and
// with its process.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_LEASE_H_
#define WEIGHTSYNC_DAEMON_SERVICE_LEASE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/service/node_context.h"
#include "daemon/service/proto_time.h"
#include "daemon/service/stream.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/host/pid_namespace.h"

namespace weightsync {
namespace daemon {

// The part that trainers, replicas and workers share. On the node's loop.
template <typename In, typename Out>
struct Lease {
  using Stream = ServerStream<In, Out>;

  std::shared_ptr<Stream> stream;
  // Names it in callbacks that may come when it is over.
  uint64_t id = 0;
  // What the client said it is has been checked and told to the coordinator.
  bool named = false;
  // The coordinator has taken it; the node makes room for it, which may take as
  // long as fresh memory does.
  bool taken = false;
  // The client knows, too.
  bool accepted = false;
  absl::Time opened = absl::Now();
  absl::Time last_heard = absl::Now();
  // The process that is watched, and that memory is offered to; 0 where nobody
  // knows it.
  ProcessWatcher::WatchId watch = 0;
  pid_t process = 0;

  // Why it ends now, or OK.
  absl::Status CheckTime(absl::Time now, const NodeContext& node) const {
    const Deadlines& deadlines = node.options->deadlines;
    if (!taken && !accepted && now - opened > deadlines.registration) {
      if (!named) {
        return ErrorStatus(
            absl::StatusCode::kDeadlineExceeded, "REGISTRATION_MISSING",
            "the stream was opened, but no registration came on it");
      }
      return node.link->up() ? ErrorStatus(absl::StatusCode::kUnavailable,
                                           "REGISTRATION_TIMEOUT",
                                           "the coordinator did not answer in "
                                           "time; register again later")
                             : node.link->DownStatus();
    }
    if (accepted && now - last_heard > deadlines.heartbeat) {
      return ErrorStatus(
          absl::StatusCode::kDeadlineExceeded, "HEARTBEAT_LOST",
          absl::StrCat("nothing was heard for ",
                       absl::FormatDuration(now - last_heard), ", more than ",
                       absl::FormatDuration(deadlines.heartbeat),
                       "; the lease is over, register again"));
    }
    return absl::OkStatus();
  }
};

// Has `ended` called on the loop when process `pid` of that pid namespace (its
// inode, or 0) ends; 0 for a client that does not say. Of another namespace the
// number may be anybody's here: such a client has its stream and heartbeats.
template <typename In, typename Out>
void WatchProcess(const NodeContext& node, int pid, uint64_t pid_namespace,
                  Lease<In, Out>* lease,
                  std::function<void(const absl::Status&)> ended) {
  if (pid <= 0) return;
  if (pid_namespace != 0 && pid_namespace != transport::PidNamespace()) return;
  absl::StatusOr<ProcessWatcher::WatchId> watch = node.processes->Watch(
      pid, [loop = node.loop, pid, ended = std::move(ended)] {
        loop->Post([pid, ended] {
          ended(ErrorStatus(absl::StatusCode::kAborted, "PROCESS_ENDED",
                            absl::StrCat("process ", pid, " has ended")));
        });
      });
  if (watch.ok()) {
    lease->watch = *watch;
    lease->process = pid;
  } else {
    // Perhaps it counts in another pid namespace. Its stream and heartbeats
    // remain.
    LOG(WARNING) << watch.status();
  }
}

// Ends the stream with `status`, and cuts it off when the client does not read
// that in time.
template <typename In, typename Out>
void EndStream(const NodeContext& node, const Lease<In, Out>& lease,
               const absl::Status& status) {
  node.processes->Unwatch(lease.watch);
  lease.stream->Finish(status);
  std::weak_ptr<ServerStream<In, Out>> weak = lease.stream;
  node.loop->PostAfter(node.options->deadlines.shutdown, [weak] {
    if (auto stream = weak.lock()) stream->Cancel();
  });
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_LEASE_H_
