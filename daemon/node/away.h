// What a node does with one of its replicas while the coordinator is away: the
// node decides here alone, from what it sees, and by nothing else.
//
//   paused for an update, its commit not known:
//     KEEP PAUSED -> barrier_timeout -> REFUSE: durable first, then the engine
//       resumes on the old update. Only where every worker is on this node and
//       none has been written to; otherwise ALARM: it stays paused.
//   its commit known (an ApplyWorker came):
//     FINISH: what is missing is applied from this node's store, and when every
//       worker is INSTALLED on the update the engine resumes on it. Where a
//       worker is on another node: ALARM, it stays paused.
//   serving:
//     KEEP SERVING, or after max_staleness, where it was told so, HOLD: paused
//       until the coordinator is back.
// The node that has the replica's control stream leads it.

#ifndef WEIGHTSYNC_DAEMON_NODE_AWAY_H_
#define WEIGHTSYNC_DAEMON_NODE_AWAY_H_

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace weightsync {
namespace daemon {

// A worker that is registered at this node.
struct AwayWorker {
  // kOwn: what its engine loaded by itself; kNothing: it dropped its weights.
  enum class State { kOwn, kInstalled, kWriting, kNothing };
  State state = State::kOwn;
  // INSTALLED on, or WRITING.
  std::string update_id;
  // An apply runs.
  bool busy = false;
};

struct AwayReplica {
  // Since the coordinator was last heard of.
  absl::Duration away;
  bool paused = false;
  // The engine has a pause or resume to answer.
  bool busy = false;
  int worker_count = 0;
  std::vector<AwayWorker> workers;

  // The update that it is paused for; empty: none.
  std::string offered;
  bool committed = false;
  // Of the pause command.
  bool may_refuse = false;
  absl::Duration barrier_timeout;

  // How long it waits for a coordinator that may be back soon, before it does
  // anything by itself.
  absl::Duration grace;
  bool pause_on_isolation = false;
  absl::Duration max_staleness;
};

enum class AwayAction {
  kNothing,
  // Refuse the offer durably, then resume on the old update.
  kRefuse,
  // It has to stay paused: say so.
  kAlarm,
  // Apply the offered update to the workers that lack it.
  kApply,
  // Every worker has the offered update: resume on it.
  kResume,
  // Pause it: it was cut off for too long.
  kHold,
};

AwayAction DecideAway(const AwayReplica& replica);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_AWAY_H_
