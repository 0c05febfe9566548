// STREAM, where workers take buckets into live memory before the commit, and
// IN_PLACE, where a rank's memory is read while its call waits.

#include <utility>

#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

void World::Send(int e, int w, int64_t generation, Job job) {
  Worker& worker = engines_[e].workers[w];
  By(&worker, LocalDelay(&worker.last_down),
     [this, e, w, generation, job = std::move(job)] {
       Worker& worker = engines_[e].workers[w];
       if (!worker.open || worker.generation != generation) return;
       worker.queue.push_back(job);
       WorkerWork(e, w);
     });
}

void World::BeginStream(int index, const v1::MoveUpdate& move) {
  NodeUpdate& update = nodes_[index].updates.at(move.update_id());
  // Another way for the same bytes: the workers know.
  if (update.begun) return;
  update.begun = true;
  for (const v1::StreamWorker& taker : move.stream_workers()) {
    const int e = taker.replica().back() - '0';
    const int w = taker.worker_index();
    Worker& worker = engines_[e].workers[w];
    if (worker.node != index || !worker.open || !worker.accepted ||
        engines_[e].incarnation != taker.incarnation()) {
      continue;  // its replica has left
    }
    update.members.push_back({e, w, worker.generation});
    worker.stream_told = move.update_id();
    auto apply = std::make_shared<v1::ApplyWorker>();
    apply->set_update_id(move.update_id());
    Send(e, w, worker.generation, Job{Job::kStream, std::move(apply)});
  }
}

void World::StreamWork(int index, int w, const Job& job) {
  Engine& engine = engines_[index];
  Worker& worker = engine.workers[w];
  const std::string& id = job.apply->update_id();
  const int64_t generation = worker.generation;
  const bool has =
      worker.memory.kind == Memory::kInstalled && worker.memory.update_id == id;
  if (job.kind == Job::kStream) {
    if (has || worker.streaming == id) return;
    worker.streaming.clear();
    if (!worker.open) return;  // nothing is written
    Writes(engine, w, id);
    if (!atomic_swap_) {
      worker.memory.kind = Memory::kWriting;
      worker.memory.update_id = id;
      worker.memory.version = 0;
    }
    worker.streaming = id;
    Trace(engine.name, " worker ", w, " takes ", id, " bucket by bucket");
    Serve(index);
    By(&nodes_[worker.node], LocalDelay(&worker.last_up),
       [this, index, w, generation, memory = worker.memory] {
         Worker& worker = engines_[index].workers[w];
         if (worker.open && worker.generation == generation) {
           worker.told = memory;
         }
       });
    return;
  }
  if (worker.streaming != id) {
    // Aborted before it had begun here: nothing is left of it.
    return ReportApplied(index, w, job.apply,
                         !job.complete ? "UPDATE_ABORTED"
                         : has         ? ""
                                       : "STREAM_UNKNOWN",
                         generation);
  }
  worker.streaming.clear();
  if (job.complete) {
    Installs(&worker, Memory{Memory::kInstalled, id, job.apply->version()});
  }
  Trace(engine.name, " worker ", w, " holds ", Describe(worker.memory));
  Serve(index);
  ReportApplied(index, w, job.apply, job.complete ? "" : "UPDATE_ABORTED",
                generation);
}

bool World::StreamTaken(int index, NodeUpdate* update) {
  std::vector<Member> here;
  bool all = true;
  for (const Member& member : update->members) {
    const Worker& worker = engines_[member.engine].workers[member.worker];
    // Who has gone takes its replica along.
    if (!worker.open || worker.generation != member.generation) continue;
    here.push_back(member);
    all =
        all && now_ >= worker.stopped_until &&
        (!worker.streaming.empty() || worker.memory.kind == Memory::kInstalled);
  }
  update->members = std::move(here);
  (void)index;
  return all;
}

void World::AbortStream(int index, const std::string& update_id) {
  auto update = nodes_[index].updates.find(update_id);
  if (update == nodes_[index].updates.end()) return;
  const std::vector<Member> members = std::move(update->second.members);
  update->second.members.clear();
  for (const Member& member : members) {
    auto apply = std::make_shared<v1::ApplyWorker>();
    apply->set_update_id(update_id);
    Send(member.engine, member.worker, member.generation,
         Job{Job::kEndStream, std::move(apply), /*complete=*/false});
  }
}

void World::Release(int index, const std::string& update_id,
                    const std::string& reason) {
  auto update = nodes_[index].updates.find(update_id);
  if (update == nodes_[index].updates.end()) return;
  const auto calls = std::move(update->second.unreleased);
  update->second.unreleased.clear();
  for (const auto& call : calls) {
    if (ranks_[call.first].call != call.second) continue;
    Answer(call.first, reason.empty() ? update_id : "", reason);
  }
}

}  // namespace simulation
}  // namespace weightsync
