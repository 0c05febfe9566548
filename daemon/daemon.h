// A whole weightsyncd: what main.cc runs, and what tests start several of in
// one process.
//
//   auto daemon = Daemon::Start(options);
//   ... daemon->addresses() ...
//   daemon->Shutdown();
//
// It is made of
//   the sockets              where it may listen, and who else does
//   transport's parts        memory, copy threads, the endpoint for data
//   the coordinator's loop   if it is its own coordinator
//   the agent                this node: sessions, store, mover, the link to the
//   coordinator services                 gRPC in front of the two
// and ended in the opposite order.

#ifndef WEIGHTSYNC_DAEMON_DAEMON_H_
#define WEIGHTSYNC_DAEMON_DAEMON_H_

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/options.h"

namespace weightsync {
namespace daemon {

class Daemon {
 public:
  // Serves when it returns. Whether the coordinator can be reached is found out
  // later, again and again.
  //   INVALID_ARGUMENT  NODE_NAME_INVALID, ADDRESS_INVALID,
  //   BUCKET_BYTES_INVALID,
  //     SOCKET_PATH_TOO_LONG, NOTHING_TO_LISTEN_AT.
  //   FAILED_PRECONDITION  INSECURE_REQUIRED, NOT_A_SOCKET,
  //   JOURNAL_FORMAT_UNSUPPORTED. ALREADY_EXISTS  SOCKET_IN_USE,
  //   STATE_DIR_IN_USE: another daemon, which is not disturbed.
  //   RESOURCE_EXHAUSTED  NO_PORT.  DATA_LOSS  JOURNAL_DAMAGED.
  //   UNAVAILABLE  LISTEN_FAILED, DIRECTORY_FAILED, FILE_FAILED: with what the
  //   system says.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(Options options);

  // As Shutdown.
  virtual ~Daemon() = default;

  virtual const Addresses& addresses() const = 0;
  // Of the coordinator that runs here; empty for a daemon that follows another.
  virtual std::string cluster_id() const = 0;

  // Ends everything: clients' streams with UNAVAILABLE (SHUTTING_DOWN), calls
  // likewise, and removes sockets and the ready file. Returns when no thread of
  // the daemon runs any more. Idempotent.
  virtual void Shutdown() = 0;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_DAEMON_H_
