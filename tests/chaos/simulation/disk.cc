// Checkpoints: the disks that nodes see, and what a node does there. What
// counts is who may believe what: a directory is read only when it is complete,
// and complete only when all who write it have written; a node that dies leaves
// its own behind and takes it away when it comes back
// (daemon/node/checkpoints).

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

namespace {

v1::Failure DiskFailure(int code, const std::string& reason) {
  v1::Failure failure;
  failure.set_code(code);
  failure.set_reason(reason);
  failure.set_message("simulated");
  return failure;
}

}  // namespace

std::map<std::string, World::Directory>& World::DiskOf(int index) {
  return disks_[nodes_[index].own_disk ? index + 1 : 0];
}

bool World::Sees(int index, const v1::Checkpoint& checkpoint) {
  const auto& disk = DiskOf(index);
  const auto directory = disk.find(checkpoint.path());
  if (directory == disk.end()) return false;
  return checkpoint.marker().empty()
             ? directory->second.complete
             : directory->second.marker == checkpoint.marker();
}

void World::AnswerCheckpoint(int index, const std::string& command_id,
                             const std::string& reason) {
  v1::CheckpointWritten written;
  written.set_command_id(command_id);
  if (!reason.empty()) *written.mutable_failure() = DiskFailure(9, reason);
  nodes_[index].checkpoint_answers[command_id] = written;
  v1::NodeReport report;
  *report.mutable_checkpoint_written() = std::move(written);
  Report(index, std::move(report));
}

bool World::AnsweredBefore(int index, const std::string& command_id) {
  Node& node = nodes_[index];
  const auto answer = node.checkpoint_answers.find(command_id);
  if (answer != node.checkpoint_answers.end()) {
    v1::NodeReport report;
    *report.mutable_checkpoint_written() = answer->second;
    Report(index, std::move(report));
    return true;
  }
  return !node.checkpoint_commands.insert(command_id).second;
}

Time World::DiskTime() {
  return random_.Chance(odds_.disk_slow)
             ? random_.Below(5 * kSecond)
             : random_.Between(kMillisecond, 100 * kMillisecond);
}

void World::OnWriteCheckpoint(int index, const v1::WriteCheckpoint& command) {
  if (AnsweredBefore(index, command.command_id())) return;
  CheckpointJob& job =
      nodes_[index].checkpoint_jobs[command.checkpoint().path()];
  if (job.number == 0) job.number = next_order_++;
  const bool fails = random_.Chance(odds_.disk_fails);
  By(&nodes_[index], DiskTime(),
     [this, index, fails, number = job.number,
      command = std::make_shared<const v1::WriteCheckpoint>(command)] {
       AnswerCheckpoint(index, command->command_id(),
                        !HasJob(index, command->checkpoint().path(), number)
                            ? "CHECKPOINT_GIVEN_UP"
                        : fails ? "CHECKPOINT_IO"
                                : WriteCheckpoint(index, *command));
     });
}

bool World::HasJob(int index, const std::string& temporary, int64_t number) {
  const auto& jobs = nodes_[index].checkpoint_jobs;
  const auto job = jobs.find(temporary);
  return job != jobs.end() && job->second.number == number;
}

std::string World::WriteCheckpoint(int index,
                                   const v1::WriteCheckpoint& command) {
  Node& node = nodes_[index];
  auto& disk = DiskOf(index);
  const std::string& temporary = command.checkpoint().path();
  if (command.step() == v1::WriteCheckpoint::STEP_BEGIN) {
    if (!command.overwrite() && disk.count(command.path()) != 0) {
      return "CHECKPOINT_EXISTS";
    }
    node.checkpoint_jobs[temporary].made = true;
    node.leftovers.insert(temporary);
    Directory& fresh = disk[temporary];
    fresh.marker = command.checkpoint().marker();
    fresh.update_id = command.update_id();
    return "";
  }
  if (!Sees(index, command.checkpoint())) return "CHECKPOINT_NOT_SHARED";
  if (command.step() == v1::WriteCheckpoint::STEP_SEE) return "";
  const auto update = node.updates.find(command.update_id());
  if (update == node.updates.end() ||
      !(update->second.whole || update->second.snapshot)) {
    return "UPDATE_UNKNOWN";
  }
  std::set<int>& buckets = disk[temporary].buckets;
  buckets.insert(command.buckets().begin(), command.buckets().end());
  size_t& all = buckets_[command.layout_id()];
  if (!buckets.empty()) {
    all = std::max(all, static_cast<size_t>(*buckets.rbegin()) + 1);
  }
  return "";
}

void World::OnCompleteCheckpoint(int index,
                                 const v1::CompleteCheckpoint& command) {
  const std::string temporary = command.checkpoint().path();
  if (command.give_up()) {
    GiveUpJob(index, temporary);
    auto& disk = DiskOf(index);
    const auto done = disk.find(command.path());
    if (!command.update_id().empty() && done != disk.end() &&
        done->second.of_update &&
        done->second.update_id == command.update_id()) {
      // The update was aborted with its checkpoint complete.
      disk.erase(done);
    }
    return;
  }
  if (AnsweredBefore(index, command.command_id())) return;
  const auto job = nodes_[index].checkpoint_jobs.find(temporary);
  const int64_t number =
      job == nodes_[index].checkpoint_jobs.end() ? 0 : job->second.number;
  const bool fails = random_.Chance(odds_.disk_fails);
  By(&nodes_[index], DiskTime(),
     [this, index, fails, number,
      command = std::make_shared<const v1::CompleteCheckpoint>(command)] {
       AnswerCheckpoint(
           index, command->command_id(),
           fails || !HasJob(index, command->checkpoint().path(), number)
               ? "CHECKPOINT_IO"
               : CompleteCheckpoint(index, *command));
     });
}

std::string World::CompleteCheckpoint(int index,
                                      const v1::CompleteCheckpoint& command) {
  Node& node = nodes_[index];
  auto& disk = DiskOf(index);
  const std::string& temporary = command.checkpoint().path();
  if (!Sees(index, command.checkpoint())) return "CHECKPOINT_IO";
  if (disk.count(command.path()) != 0 && !command.overwrite()) {
    return "CHECKPOINT_EXISTS";
  }
  Directory done = std::move(disk[temporary]);
  const size_t all = buckets_[command.layout_id()];
  if (all == 0 || done.buckets.size() != all) {
    checker_.Violation(absl::StrCat("a checkpoint of ", done.update_id,
                                    " is complete, and not all have written "
                                    "their part"));
  }
  done.complete = true;
  done.of_update = !command.update_id().empty();
  done.version = command.version();
  done.marker.clear();
  disk.erase(temporary);
  disk[command.path()] = std::move(done);
  node.checkpoint_jobs.erase(temporary);
  node.leftovers.erase(temporary);
  Trace(node.name, " has completed ", command.path());
  return "";
}

void World::GiveUpJob(int index, const std::string& temporary) {
  Node& node = nodes_[index];
  const auto job = node.checkpoint_jobs.find(temporary);
  if (job == node.checkpoint_jobs.end()) return;
  if (job->second.made) {
    DiskOf(index).erase(temporary);
    node.leftovers.erase(temporary);
  }
  node.checkpoint_jobs.erase(job);
}

void World::GiveUpJobs(int index) {
  while (!nodes_[index].checkpoint_jobs.empty()) {
    GiveUpJob(index, nodes_[index].checkpoint_jobs.begin()->first);
  }
}

void World::RemoveLeftovers(int index) {
  Node& node = nodes_[index];
  for (const std::string& temporary : node.leftovers) {
    DiskOf(index).erase(temporary);
  }
  node.leftovers.clear();
  node.checkpoint_jobs.clear();
  node.checkpoint_commands.clear();
  node.checkpoint_answers.clear();
}

void World::OnPrune(int index, const v1::PruneCheckpoints& command) {
  auto& disk = DiskOf(index);
  std::vector<std::pair<int64_t, std::string>> noted;
  for (const auto& directory : disk) {
    if (directory.second.complete && directory.second.of_update &&
        absl::StartsWith(directory.first, command.path() + "/")) {
      noted.emplace_back(directory.second.version, directory.first);
    }
  }
  std::sort(noted.rbegin(), noted.rend());
  for (size_t i = static_cast<size_t>(command.kept()); i < noted.size(); ++i) {
    const std::string& path = noted[i].second;
    if (std::find(command.busy_paths().begin(), command.busy_paths().end(),
                  path) == command.busy_paths().end()) {
      disk.erase(path);
    }
  }
}

void World::OnReadCheckpoint(int index, const v1::ReadCheckpoint& command) {
  By(&nodes_[index], DiskTime(),
     [this, index, id = command.command_id(), path = command.path()] {
       v1::NodeReport report;
       v1::CheckpointRead* read = report.mutable_checkpoint_read();
       read->set_command_id(id);
       v1::Checkpoint checkpoint;
       checkpoint.set_path(path);
       if (Sees(index, checkpoint)) {
         v1::Parameter* parameter = read->add_parameters();
         parameter->set_name("w");
         parameter->set_dtype(v1::DTYPE_BF16);
         parameter->add_shape(4 * static_cast<int64_t>(ranks_.size()));
         parameter->add_shape(8);
       } else {
         *read->mutable_failure() = DiskFailure(5, "CHECKPOINT_NOT_FOUND");
       }
       Report(index, std::move(report));
     });
}

std::string World::ReadDisk(int index, const NodeUpdate& update,
                            const std::string& update_id) {
  const auto& disk = DiskOf(index);
  const auto directory = disk.find(update.checkpoint);
  if (directory == disk.end()) return "CHECKPOINT_NOT_SHARED";
  if (!directory->second.complete) {
    checker_.Violation(absl::StrCat(nodes_[index].name, " reads ",
                                    update.checkpoint,
                                    ", which is not complete"));
  } else if (!update.load && directory->second.update_id != update_id) {
    checker_.Violation(absl::StrCat(nodes_[index].name, " reads ", update_id,
                                    " from a checkpoint of ",
                                    directory->second.update_id));
  }
  return random_.Chance(odds_.disk_fails) ? "CHECKPOINT_IO" : "";
}

}  // namespace simulation
}  // namespace weightsync
