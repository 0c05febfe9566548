// What a node does with its replicas while the coordinator is away: the real
// decision (daemon/node/away.h), carried out as daemon/service does.

#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

using daemon::AwayAction;
using daemon::AwayWorker;

void World::Relay(int e, const EngineCommand& command) {
  Engine& engine = engines_[e];
  By(&engine, LocalDelay(&engine.last_down),
     [this, e, command, generation = engine.generation] {
       Engine& engine = engines_[e];
       if (engine.generation != generation || !engine.open) return;
       engine.queue.push_back(command);
       EngineWork(e);
     });
}

void World::CheckAway(int index) {
  const Node& node = nodes_[index];
  if (now_ < node.away_since) return;
  for (size_t i = 0; i < engines_.size(); ++i) {
    const int e = static_cast<int>(i);
    Engine& engine = engines_[i];
    if (engine.node != index || !engine.open || !engine.accepted) continue;
    daemon::AwayReplica replica;
    replica.away = absl::Microseconds(now_ - node.away_since);
    replica.paused = engine.told_paused;
    replica.busy = !engine.own_command.empty();
    replica.worker_count = static_cast<int>(engine.workers.size());
    for (const Worker& worker : engine.workers) {
      if (worker.node != index || !worker.open || !worker.accepted) continue;
      AwayWorker seen;
      seen.update_id = worker.told.update_id;
      seen.busy = !worker.command_id.empty();
      switch (worker.told.kind) {
        case Memory::kOwn:
          break;
        case Memory::kInstalled:
          seen.state = AwayWorker::State::kInstalled;
          break;
        case Memory::kWriting:
          seen.state = AwayWorker::State::kWriting;
          break;
        case Memory::kNothing:
          seen.state = AwayWorker::State::kNothing;
          break;
      }
      replica.workers.push_back(seen);
    }
    replica.offered = engine.offer.pause().update_id();
    replica.committed = engine.commit != nullptr &&
                        engine.commit->update_id() == replica.offered;
    replica.may_refuse = engine.offer.may_refuse();
    replica.barrier_timeout = options_.barrier_timeout;
    replica.grace = options_.node_reconnect_grace;
    replica.pause_on_isolation = pause_on_isolation_;
    replica.max_staleness = absl::Seconds(4);
    switch (daemon::DecideAway(replica)) {
      case AwayAction::kNothing:
      case AwayAction::kAlarm:
        break;
      case AwayAction::kRefuse: {
        const std::string command = engine.offer.pause().command_id();
        Trace(node.name, " refuses the offer ", command, " for ", engine.name);
        ++outcome_.faults["(offer refused)"][StateNow()];
        engine.refused.push_back(command);
        ResumeItself(e, absl::StrCat("refused/", command),
                     engine.workers[0].told);
        break;
      }
      case AwayAction::kResume:
        Trace(node.name, " finishes ", replica.offered, " on ", engine.name);
        ++outcome_.faults["(finished alone)"][StateNow()];
        ResumeItself(e, absl::StrCat("finished/", replica.offered),
                     engine.workers[0].told);
        break;
      case AwayAction::kApply: {
        const Apply commit = engine.commit;
        for (size_t w = 0; w < engine.workers.size(); ++w) {
          const Memory& told = engine.workers[w].told;
          if (told.kind == Memory::kInstalled &&
              told.update_id == commit->update_id()) {
            continue;
          }
          auto apply = std::make_shared<v1::ApplyWorker>(*commit);
          apply->set_worker_index(static_cast<int>(w));
          apply->set_command_id(
              absl::StrCat("finish/", commit->update_id(), "/", w));
          OnApply(index, apply);
        }
        break;
      }
      case AwayAction::kHold: {
        Trace(node.name, " pauses ", engine.name, ": it was cut off");
        ++outcome_.faults["(isolation hold)"][StateNow()];
        engine.isolation_hold = true;
        engine.own_command = absl::StrCat("isolation/", next_id_++);
        EngineCommand pause;
        pause.pause = true;
        pause.command_id = engine.own_command;
        Relay(e, pause);
        break;
      }
    }
  }
}

void World::ResumeItself(int e, const std::string& command_id,
                         const Memory& memory) {
  Engine& engine = engines_[e];
  engine.own_command = command_id;
  engine.offer.Clear();
  engine.commit = nullptr;
  engine.resumed_itself = true;
  EngineCommand resume;
  resume.command_id = command_id;
  if (memory.kind == Memory::kInstalled) resume.update_id = memory.update_id;
  resume.removed = memory.kind == Memory::kNothing;
  Relay(e, resume);
}

}  // namespace simulation
}  // namespace weightsync
