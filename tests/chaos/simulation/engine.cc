// Engines and their workers: the client library's part, and the truth that it
// may not know.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

v1::InstalledState World::ToProto(const Memory& memory) {
  v1::InstalledState state;
  state.set_state(
      memory.kind == Memory::kWriting   ? v1::InstalledState::STATE_WRITING
      : memory.kind == Memory::kNothing ? v1::InstalledState::STATE_NOTHING
                                        : v1::InstalledState::STATE_INSTALLED);
  state.set_update_id(memory.update_id);
  state.set_version(memory.version);
  return state;
}

void World::StartEngine(int index) {
  Engine& engine = engines_[index];
  ++engine.life;
  engine.up = true;
  engine.stopped_until = 0;
  engine.incarnation = absl::StrCat(engine.name, "-", next_id_++);
  engine.running = true;
  engine.word = Engine::kRunning;
  engine.running_update.clear();
  engine.running_removed = false;
  engine.answers.clear();
  engine.queue.clear();
  engine.busy = false;
  engine.older = Memory();
  engine.refused.clear();
  checker_.Restarted(engine.name);
  Trace(engine.name, " starts as ", engine.incarnation);
  for (Worker& worker : engine.workers) {
    ++worker.life;
    worker.up = true;
    worker.stopped_until = 0;
    worker.memory = Memory();
    worker.served = Memory();
    worker.set = worker.served_set = 0;
    worker.busy = false;
    worker.queue.clear();
    worker.streaming.clear();
  }
  ConnectControl(index);
  for (size_t w = 0; w < engine.workers.size(); ++w) {
    ConnectWorker(index, static_cast<int>(w));
  }
}

void World::CrashEngine(int index) {
  Engine& engine = engines_[index];
  Trace(engine.name, " dies");
  ++engine.life;
  engine.up = false;
  engine.running = false;
  EndControl(index, /*client_sees=*/false);
  // A registration that was on its way ends with its socket.
  engine.generation = next_generation_++;
  for (size_t w = 0; w < engine.workers.size(); ++w) {
    Worker& worker = engine.workers[w];
    ++worker.life;
    worker.up = false;
    EndWorker(index, static_cast<int>(w), /*client_sees=*/false);
    worker.generation = next_generation_++;
  }
}

void World::Serve(int index) {
  Engine& engine = engines_[index];
  if (!engine.up || !engine.running || now_ < engine.stopped_until) return;
  std::vector<Memory> memories;
  for (const Worker& worker : engine.workers) {
    // A step waits for all workers.
    if (!worker.up || now_ < worker.stopped_until) return;
    memories.push_back(Served(worker));
  }
  checker_.Serves(engine.name, memories, engine.running_removed);
}

// ---- The control stream ----

void World::ConnectControl(int index) {
  Engine& engine = engines_[index];
  // Its node sees the end of the stream before.
  EndControl(index, /*client_sees=*/false);
  const int64_t generation = engine.generation = next_generation_++;
  engine.queue.clear();  // before_attempt
  By(&engine, random_.Between(kMillisecond, 100 * kMillisecond),
     [this, index, generation] {
       Engine& engine = engines_[index];
       if (engine.generation != generation) return;
       if (!nodes_[engine.node].up) return ConnectControl(index);
       const bool paused = engine.word != Engine::kRunning;
       By(&nodes_[engine.node], random_.Between(50, 2000),
          [this, index, generation, paused] {
            Engine& engine = engines_[index];
            if (engine.generation != generation) return;
            engine.open = true;
            engine.told_paused = paused;
            engine.offer.Clear();
            engine.commit = nullptr;
            engine.own_command.clear();
            engine.isolation_hold = false;
            engine.resumed_itself = false;
            JoinControl(index);
          });
     });
}

void World::EndControl(int index, bool client_sees) {
  Engine& engine = engines_[index];
  if (engine.open) {
    engine.open = false;
    engine.accepted = false;
    v1::NodeReport report;
    v1::ReplicaLeft* left = report.mutable_replica_left();
    left->set_model("models/m");
    left->set_replica(engine.name);
    left->set_incarnation(engine.incarnation);
    if (nodes_[engine.node].up) Report(engine.node, std::move(report));
  }
  if (!client_sees || !engine.up) return;
  const int64_t generation = engine.generation;
  By(&engine, random_.Between(kMillisecond, 300 * kMillisecond),
     [this, index, generation] {
       if (engines_[index].generation == generation) ConnectControl(index);
     });
}

void World::JoinControl(int index) {
  const Engine& engine = engines_[index];
  v1::NodeReport report;
  v1::RegisterReplica* r =
      report.mutable_replica_joined()->mutable_registration();
  r->set_model("models/m");
  r->set_replica(engine.name);
  r->set_worker_count(static_cast<int>(engine.workers.size()));
  r->set_incarnation(engine.incarnation);
  r->set_paused(engine.told_paused);
  r->set_atomic_swap(atomic_swap_);
  r->set_removable(removable_);
  for (const std::string& command : engine.refused) {
    report.mutable_replica_joined()->add_refused_command_ids(command);
  }
  report.mutable_replica_joined()->set_isolation_hold(engine.isolation_hold);
  Ask ask;
  ask.kind = Ask::kControl;
  ask.who = index;
  ask.generation = engine.generation;
  AskCoordinator(engine.node, std::move(report), ask);
}

void World::EngineWork(int index) {
  Engine& engine = engines_[index];
  if (engine.busy || engine.queue.empty()) return;
  const EngineCommand command = engine.queue.front();
  engine.queue.pop_front();
  const int64_t generation = engine.generation;
  auto answered = engine.answers.find(command.command_id);
  if (answered != engine.answers.end()) {
    AnswerEngine(index, generation, command, answered->second);
    return EngineWork(index);
  }
  const bool nothing_to_do =
      command.none    ? true
      : command.pause ? engine.word == Engine::kPaused
                      : engine.word == Engine::kRunning &&
                            engine.running_update == command.update_id &&
                            engine.running_removed == command.removed;
  if (nothing_to_do) {
    engine.answers[command.command_id] = false;
    AnswerEngine(index, generation, command, false);
    return EngineWork(index);
  }
  engine.busy = true;
  if (command.pause) engine.word = Engine::kUnsure;
  const Time takes = random_.Chance(odds_.hook_slow)
                         ? random_.Below(6 * kSecond)
                         : random_.Between(kMillisecond, 50 * kMillisecond);
  const bool goes_wrong = random_.Chance(odds_.hook_fails);
  By(&engine, takes, [this, index, command, generation, goes_wrong] {
    Engine& engine = engines_[index];
    bool fails = goes_wrong;
    for (const Worker& worker : engine.workers) {
      // An engine knows when it sleeps.
      if (!command.pause && !command.removed &&
          worker.memory.kind == Memory::kNothing) {
        fails = true;
      }
    }
    engine.busy = false;
    engine.answers[command.command_id] = fails;
    if (command.pause) {
      // A hook that failed may have paused all the same.
      engine.running = fails && engine.running && random_.Chance(700);
      if (!fails) engine.word = Engine::kPaused;
    } else if (fails) {
      engine.word = Engine::kUnsure;
    } else {
      const std::string before = engine.running_update;
      engine.running_update = command.update_id;
      engine.running_removed = command.removed;
      engine.word = Engine::kRunning;
      engine.running = true;
      for (Worker& worker : engine.workers) {
        worker.served = worker.memory;
        worker.served_set = worker.set;
      }
      if (planted_ == Planted::kOlderWeights && !planted_once_ &&
          engine.older.kind == Memory::kInstalled && !before.empty() &&
          before != engine.older.update_id) {
        planted_once_ = true;
        for (Worker& worker : engine.workers) {
          worker.memory = worker.served = engine.older;
        }
      }
    }
    Trace(engine.name, command.pause ? " pause " : " resume ",
          command.command_id, fails ? " fails" : " is done", ", it ",
          engine.running ? "generates" : "stands still");
    Serve(index);
    AnswerEngine(index, generation, command, fails);
    EngineWork(index);
  });
}

void World::AnswerEngine(int index, int64_t generation,
                         const EngineCommand& command, bool failed) {
  Engine& engine = engines_[index];
  if (engine.generation != generation || !engine.open) return;
  By(&nodes_[engine.node], LocalDelay(&engine.last_up),
     [this, index, generation, command, failed] {
       Engine& engine = engines_[index];
       if (engine.generation != generation || !engine.open) return;
       if (!failed && !command.none) {
         engine.told_paused = command.pause;
         if (command.pause) engine.resumed_itself = false;
       }
       if (command.command_id == engine.own_command) {
         engine.own_command.clear();
         return;
       }
       v1::NodeReport report;
       v1::Failure failure;
       failure.set_code(13);
       failure.set_reason("HOOK_FAILED");
       failure.set_message("simulated");
       if (command.pause) {
         v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
         paused->set_model("models/m");
         paused->set_replica(engine.name);
         paused->set_incarnation(engine.incarnation);
         paused->set_command_id(command.command_id);
         if (failed) *paused->mutable_failure() = failure;
       } else {
         v1::ReplicaResumedReport* resumed = report.mutable_replica_resumed();
         resumed->set_model("models/m");
         resumed->set_replica(engine.name);
         resumed->set_incarnation(engine.incarnation);
         resumed->set_command_id(command.command_id);
         if (failed) *resumed->mutable_failure() = failure;
       }
       Report(engine.node, std::move(report));
     });
}

// ---- Workers ----

void World::ConnectWorker(int index, int w) {
  Worker& worker = engines_[index].workers[w];
  EndWorker(index, w, /*client_sees=*/false);
  const int64_t generation = worker.generation = next_generation_++;
  worker.queue.clear();
  By(&worker, random_.Between(kMillisecond, 100 * kMillisecond),
     [this, index, w, generation] {
       Worker& worker = engines_[index].workers[w];
       if (worker.generation != generation) return;
       // A copy that runs ends first.
       if (worker.busy || !nodes_[worker.node].up) {
         return ConnectWorker(index, w);
       }
       By(&nodes_[worker.node], random_.Between(50, 2000),
          [this, index, w, generation, memory = worker.memory] {
            Worker& worker = engines_[index].workers[w];
            if (worker.generation != generation) return;
            worker.open = true;
            worker.told = memory;
            worker.command_id.clear();
            worker.stream_told.clear();
            JoinWorker(index, w);
          });
     });
}

void World::EndWorker(int index, int w, bool client_sees) {
  Engine& engine = engines_[index];
  Worker& worker = engine.workers[w];
  if (worker.open) {
    worker.open = false;
    worker.accepted = false;
    worker.command_id.clear();
    worker.stream_told.clear();
    v1::NodeReport report;
    v1::WorkerLeft* left = report.mutable_worker_left();
    left->set_model("models/m");
    left->set_replica(engine.name);
    left->set_worker_index(w);
    left->set_incarnation(engine.incarnation);
    if (nodes_[worker.node].up) Report(worker.node, std::move(report));
  }
  if (!client_sees || !worker.up) return;
  const int64_t generation = worker.generation;
  By(&worker, random_.Between(kMillisecond, 300 * kMillisecond),
     [this, index, w, generation] {
       if (engines_[index].workers[w].generation == generation) {
         ConnectWorker(index, w);
       }
     });
}

Memory World::Believed(const Worker& worker) {
  Memory believed = worker.told;
  if (!worker.stream_told.empty()) {
    believed.kind = Memory::kWriting;
    believed.update_id = worker.stream_told;
    return believed;
  }
  if (!worker.command_id.empty() &&
      !(believed == Memory{Memory::kInstalled, worker.command_update, 0})) {
    believed.kind = Memory::kWriting;
    believed.update_id = worker.command_update;
  }
  return believed;
}

void World::JoinWorker(int index, int w) {
  const Engine& engine = engines_[index];
  const Worker& worker = engine.workers[w];
  v1::NodeReport report;
  v1::RegisterWorker* r =
      report.mutable_worker_joined()->mutable_registration();
  // Its room is there as soon as it is accepted.
  report.mutable_worker_joined()->set_ready(worker.accepted);
  r->set_model("models/m");
  r->set_replica(engine.name);
  r->set_worker_index(w);
  r->set_worker_count(static_cast<int>(engine.workers.size()));
  r->set_incarnation(engine.incarnation);
  *r->mutable_installed() = ToProto(Believed(worker));
  v1::WantedTensor* tensor = r->add_tensors();
  tensor->set_name("w");
  tensor->set_dtype(v1::DTYPE_BF16);
  tensor->add_shape(4 * static_cast<int64_t>(ranks_.size()));
  tensor->add_shape(8);
  Ask ask;
  ask.kind = Ask::kWorker;
  ask.who = index;
  ask.worker = w;
  ask.generation = worker.generation;
  AskCoordinator(worker.node, std::move(report), ask);
}

void World::WorkerWork(int index, int w) {
  Engine& engine = engines_[index];
  Worker& worker = engine.workers[w];
  if (worker.busy || worker.queue.empty()) return;
  const Job job = std::move(worker.queue.front());
  worker.queue.pop_front();
  if (job.kind == Job::kRemove) {
    RemoveWork(index, w, job);
    return WorkerWork(index, w);
  }
  if (job.kind != Job::kApply) {
    StreamWork(index, w, job);
    return WorkerWork(index, w);
  }
  const Apply apply = job.apply;
  // An update that was streamed and never completed is written over.
  worker.streaming.clear();
  const int64_t generation = worker.generation;
  if (worker.memory.kind == Memory::kInstalled &&
      worker.memory.update_id == apply->update_id()) {
    ReportApplied(index, w, apply, "", generation);
    return WorkerWork(index, w);
  }
  if (apply->commit_term() <= 0) {
    checker_.Violation(
        absl::StrCat("an apply of ", apply->update_id(), " names no commit"));
    return;
  }
  if (random_.Chance(odds_.apply_fails)) {
    ReportApplied(index, w, apply, "COPY_PLAN_UNKNOWN", generation);
    return WorkerWork(index, w);
  }
  if (!worker.open) return WorkerWork(index, w);  // nothing is written
  Writes(engine, w, apply->update_id());
  if (worker.memory.kind == Memory::kInstalled &&
      engine.older.kind != Memory::kInstalled) {
    engine.older = worker.memory;  // the first that it served
  }
  Memory writing;
  writing.kind = Memory::kWriting;
  writing.update_id = apply->update_id();
  writing.version = apply->version();
  // One that swaps writes beside, and never holds a mix.
  if (!atomic_swap_) worker.memory = writing;
  worker.busy = true;
  Trace(engine.name, " worker ", w, " writes ", apply->update_id());
  Serve(index);
  By(&nodes_[worker.node], LocalDelay(&worker.last_up),
     [this, index, w, generation, memory = worker.memory] {
       Worker& worker = engines_[index].workers[w];
       if (worker.open && worker.generation == generation) {
         worker.told = memory;
       }
     });
  const Time takes = random_.Chance(odds_.apply_slow)
                         ? random_.Below(6 * kSecond)
                         : random_.Between(kMillisecond, 60 * kMillisecond);
  const bool fails = random_.Chance(odds_.apply_fails);
  By(&worker, takes, [this, index, w, apply, generation, fails, writing] {
    Engine& engine = engines_[index];
    Worker& worker = engine.workers[w];
    worker.busy = false;
    const Node& node = nodes_[worker.node];
    auto update = node.updates.find(apply->update_id());
    // A daemon that has died took its memory along no more than its mapping.
    const bool recycled = node.up && worker.open &&
                          worker.generation == generation &&
                          update == node.updates.end();
    if (!fails && !recycled) Installs(&worker, writing);
    Trace(engine.name, " worker ", w, " holds ", Describe(worker.memory));
    Serve(index);
    ReportApplied(index, w, apply,
                  fails      ? "COPY_FAILED"
                  : recycled ? "STORE_SLOT_RECYCLED"
                             : "",
                  generation);
    WorkerWork(index, w);
  });
}

void World::RemoveWork(int index, int w, const Job& job) {
  Engine& engine = engines_[index];
  Worker& worker = engine.workers[w];
  worker.streaming.clear();
  const bool fails = worker.memory.kind != Memory::kNothing &&
                     random_.Chance(odds_.apply_fails);
  if (fails) {
    // The engine's hook has dropped something, or nothing.
    worker.memory.kind = Memory::kWriting;
  } else {
    worker.memory = Memory{Memory::kNothing, "", 0};
  }
  Trace(engine.name, " worker ", w, " holds ", Describe(worker.memory));
  Serve(index);
  ReportApplied(index, w, job.apply, fails ? "HOOK_FAILED" : "",
                worker.generation);
}

void World::Writes(const Engine& engine, int w, const std::string& update_id) {
  const Worker& worker = engine.workers[w];
  const bool beside = atomic_swap_ && worker.set == worker.served_set;
  checker_.Writes(engine.name, w, engine.up && engine.running && !beside,
                  update_id);
}

void World::Installs(Worker* worker, Memory memory) {
  worker->memory = std::move(memory);
  worker->memory.kind = Memory::kInstalled;
  if (atomic_swap_) worker->set = 1 - worker->set;
}

void World::ReportApplied(int index, int w, const Apply& apply,
                          const std::string& reason, int64_t generation) {
  Worker& worker = engines_[index].workers[w];
  if (worker.generation != generation || !worker.open) return;
  By(&nodes_[worker.node], LocalDelay(&worker.last_up),
     [this, index, w, apply, reason, generation, memory = worker.memory] {
       Worker& worker = engines_[index].workers[w];
       if (worker.generation != generation || !worker.open) return;
       worker.told = memory;
       if (worker.stream_told == apply->update_id()) worker.stream_told.clear();
       if (worker.command_id == apply->command_id()) worker.command_id.clear();
       v1::NodeReport report;
       v1::WorkerAppliedReport* applied = report.mutable_worker_applied();
       applied->set_model("models/m");
       applied->set_replica(engines_[index].name);
       applied->set_worker_index(w);
       applied->set_incarnation(engines_[index].incarnation);
       applied->set_update_id(apply->update_id());
       applied->set_command_id(apply->command_id());
       if (!reason.empty()) {
         applied->mutable_failure()->set_code(13);
         applied->mutable_failure()->set_reason(reason);
         applied->mutable_failure()->set_message("simulated");
       }
       *applied->mutable_installed() = ToProto(memory);
       Report(worker.node, std::move(report));
     });
}

}  // namespace simulation
}  // namespace weightsync
