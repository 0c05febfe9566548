#include "daemon/node/away.h"

namespace weightsync {
namespace daemon {

AwayAction DecideAway(const AwayReplica& replica) {
  if (replica.away < replica.grace || replica.busy) return AwayAction::kNothing;
  const bool all_here =
      static_cast<int>(replica.workers.size()) == replica.worker_count;

  if (!replica.paused) {
    return replica.pause_on_isolation && replica.away >= replica.max_staleness
               ? AwayAction::kHold
               : AwayAction::kNothing;
  }
  // Somebody else's pause is not ours to end.
  if (replica.offered.empty()) return AwayAction::kNothing;

  if (replica.committed) {
    if (!all_here) return AwayAction::kAlarm;
    bool installed = true;
    bool busy = false;
    for (const AwayWorker& worker : replica.workers) {
      busy = busy || worker.busy;
      installed = installed && worker.state == AwayWorker::State::kInstalled &&
                  worker.update_id == replica.offered;
    }
    if (installed) return AwayAction::kResume;
    return busy ? AwayAction::kNothing : AwayAction::kApply;
  }

  if (replica.away < replica.barrier_timeout) return AwayAction::kNothing;
  if (!replica.may_refuse || !all_here) return AwayAction::kAlarm;
  for (const AwayWorker& worker : replica.workers) {
    // Whatever the old update is, it does not hold it any more.
    if (worker.state == AwayWorker::State::kWriting || worker.busy) {
      return AwayAction::kAlarm;
    }
  }
  return AwayAction::kRefuse;
}

}  // namespace daemon
}  // namespace weightsync
