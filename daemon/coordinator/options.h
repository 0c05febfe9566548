// Deadlines and limits of the coordinator. Each is a flag of the daemon.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_OPTIONS_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

struct CoordinatorOptions {
  // This daemon: what Welcome and GetCluster name.
  std::string coordinator_node;
  std::string software_version;

  // From the first rank's arrival until all have arrived and been copied out.
  absl::Duration gather_timeout = absl::Seconds(60);
  // Reserve memory and join groups; again for every new epoch.
  absl::Duration prepare_timeout = absl::Seconds(30);
  // While bytes move: no progress on a receiving node.
  absl::Duration progress_timeout = absl::Seconds(15);
  // From the command until the answer, each.
  absl::Duration pause_timeout = absl::Seconds(60);
  absl::Duration apply_timeout = absl::Seconds(120);
  absl::Duration resume_timeout = absl::Seconds(30);
  // How long a publish waits for missing ranks or for the update before it.
  absl::Duration publish_timeout = absl::Seconds(120);

  // A replica's node whose coordinator is away for this long between pause and
  // commit may give the pause up, when all workers of the replica are its own.
  absl::Duration barrier_timeout = absl::Seconds(30);
  // How long an operator's call (pause, rollback, release, verify) waits at
  // most; what it asked for goes on.
  absl::Duration operation_timeout = absl::Minutes(10);

  absl::Duration heartbeat_interval = absl::Seconds(1);
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  // A node whose stream broke is lost, with all that it held, after this long.
  absl::Duration node_reconnect_grace = absl::Seconds(5);
  // Replicas whose node has been away for this long are flagged: they may serve
  // on, and nobody sees what.
  absl::Duration max_staleness = absl::Minutes(10);
  // After a restart, how long a committed update waits for its participants.
  absl::Duration recovery_timeout = absl::Seconds(30);

  // Applies of one update to one worker before its replica is fenced.
  int apply_attempts = 3;
  // Rebuilds of the groups of one update before it is aborted.
  int max_reconfigurations = 3;
  int64_t bucket_bytes = int64_t{256} << 20;
  // Slots of a bucket through which a flow of a STREAM or IN_PLACE update
  // passes on each of its nodes.
  int stream_slots = 3;

  // How updates travel that do not say it: NETWORK, DISK or NETWORK_OR_DISK.
  v1::TransferMedium transfer_medium = v1::TRANSFER_MEDIUM_NETWORK;
  // For the nodes of the trainers to write the checkpoint of an update that
  // comes by way of disk.
  absl::Duration checkpoint_timeout = absl::Minutes(10);
  // Of them, how many stay, the newest; 0: all.
  int checkpoints_kept = 2;

  // Ended updates of one model that ListVersions still shows.
  int kept_versions = 64;
  absl::Duration request_ttl = absl::Hours(1);
  // Replicas that left are shown as LOST for this long.
  absl::Duration lost_replica_ttl = absl::Hours(1);

  // 32 hex digits, never the same twice. Injected, so that tests are
  // deterministic. REQUIRED.
  std::function<std::string()> random_id;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_OPTIONS_H_
