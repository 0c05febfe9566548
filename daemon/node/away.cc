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

  bool installed = all_here;
  bool busy = false;
  bool alike = true;
  for (const AwayWorker& worker : replica.workers) {
    busy = busy || worker.busy;
    installed = installed && worker.state == AwayWorker::State::kInstalled &&
                worker.update_id == replica.offered;
    alike = alike && worker.state == replica.workers[0].state &&
            worker.update_id == replica.workers[0].update_id;
  }
  // Whoever has it whole was told to install it: it is committed.
  if (installed && !busy) return AwayAction::kResume;
  if (replica.committed) {
    if (!all_here) return AwayAction::kAlarm;
    return busy ? AwayAction::kNothing : AwayAction::kApply;
  }

  if (replica.away < replica.barrier_timeout) return AwayAction::kNothing;
  // The old update is what all workers hold, and nothing else: one that is
  // written to does not hold it any more, one whose engine dropped its weights
  // (deep sleep) holds none, and two that differ make a mix.
  if (!replica.may_refuse || !all_here || busy || !alike ||
      replica.workers[0].state == AwayWorker::State::kWriting ||
      replica.workers[0].state == AwayWorker::State::kNothing) {
    return AwayAction::kAlarm;
  }
  return AwayAction::kRefuse;
}

}  // namespace daemon
}  // namespace weightsync
