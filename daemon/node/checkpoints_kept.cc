// What stays of checkpoints: those of older updates are removed, and so is what
// a daemon that was killed has left.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/node/checkpoints.h"
#include "glog/logging.h"
#include "nlohmann/json.hpp"

namespace weightsync {
namespace daemon {

namespace {

using transport::RootedDirectory;
using transport::UniqueFd;

constexpr char kRemovedSuffix[] = ".weightsync-removed";

std::string Join(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

}  // namespace

absl::optional<CheckpointNote> ReadCheckpointNote(
    const RootedDirectory& root, const std::string& directory) {
  auto text = root.ReadFile(Join(directory, kCheckpointNote), 4096);
  if (!text.ok()) return absl::nullopt;
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  if (!json.is_object() || !json.contains("update_id") ||
      !json["update_id"].is_string() || !json.contains("version") ||
      !json["version"].is_number_integer()) {
    return absl::nullopt;
  }
  return CheckpointNote{json["update_id"].get<std::string>(),
                        json["version"].get<int64_t>()};
}

void Checkpoints::Prune(const v1::PruneCheckpoints& command) {
  auto root = Root();
  if (!root.ok() || command.kept() < 1) return;
  auto names = (*root)->List(command.path());
  if (!names.ok()) return;
  const std::set<std::string> busy(command.busy_paths().begin(),
                                   command.busy_paths().end());
  std::vector<std::pair<int64_t, std::string>> noted;
  for (const std::string& name : *names) {
    const std::string path = Join(command.path(), name);
    const auto note = ReadCheckpointNote(**root, path);
    if (!note.has_value()) continue;
    if (absl::EndsWith(name, kRemovedSuffix)) {
      // Of a removal that was cut short.
      (*root)->RemoveTree(path).IgnoreError();
    } else {
      noted.emplace_back(note->version, path);
    }
  }
  std::sort(noted.rbegin(), noted.rend());
  for (size_t i = static_cast<size_t>(command.kept()); i < noted.size(); ++i) {
    const std::string& path = noted[i].second;
    if (busy.count(path) != 0) continue;
    // Half of it shall never be taken for all.
    const std::string removed = absl::StrCat(path, kRemovedSuffix);
    absl::Status status = (*root)->Put(path, removed, false);
    if (status.ok()) status = (*root)->RemoveTree(removed);
    LOG_IF(WARNING, !status.ok()) << path << " is not removed: " << status;
    LOG_IF(INFO, status.ok()) << "removed " << path << ", an older update's";
  }
}

// ---- What a process that ended has left ----

void Checkpoints::NoteJob(const std::string& temporary,
                          const std::string& path) {
  absl::MutexLock lock(&notes_mutex_);
  notes_[temporary] = path;
  WriteNotes();
}

void Checkpoints::ForgetJob(const std::string& temporary) {
  absl::MutexLock lock(&notes_mutex_);
  notes_.erase(temporary);
  WriteNotes();
}

void Checkpoints::WriteNotes() {
  if (options_.state_dir.empty()) return;
  const std::string path = absl::StrCat(options_.state_dir, "/checkpoints");
  const std::string fresh = path + ".new";
  std::string text;
  for (const auto& note : notes_) {
    absl::StrAppend(&text, absl::CEscape(note.first), "\t",
                    absl::CEscape(note.second), "\n");
  }
  UniqueFd fd(
      open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const bool written = fd.valid() &&
                       transport::WriteAt(fd.get(), fresh, text.data(),
                                          static_cast<int64_t>(text.size()), 0)
                           .ok() &&
                       fsync(fd.get()) == 0 &&
                       rename(fresh.c_str(), path.c_str()) == 0;
  // Without it a kill leaves a directory that a person must remove.
  LOG_IF(WARNING, !written) << path << " cannot be written";
}

void Checkpoints::RemoveLeftovers() {
  if (options_.state_dir.empty() || options_.root.empty()) return;
  std::ifstream file(absl::StrCat(options_.state_dir, "/checkpoints"));
  std::string line;
  std::map<std::string, std::string> left;
  while (std::getline(file, line)) {
    const std::vector<std::string> parts = absl::StrSplit(line, '\t');
    std::string temporary;
    std::string path;
    if (parts.size() == 2 && absl::CUnescape(parts[0], &temporary) &&
        absl::CUnescape(parts[1], &path)) {
      left[temporary] = path;
    }
  }
  if (left.empty()) return;
  auto root = Root();
  absl::MutexLock lock(&notes_mutex_);
  for (const auto& job : left) {
    absl::Status status = root.status();
    if (status.ok()) status = (*root)->RecoverPut(job.second);
    if (status.ok()) status = (*root)->RemoveTree(job.first);
    if (status.ok()) {
      LOG(INFO) << "removed " << job.first
                << ", which was not complete when this daemon last ended";
    } else {
      LOG(WARNING) << job.first << " is not removed: " << status;
      notes_[job.first] = job.second;
    }
  }
  WriteNotes();
}

}  // namespace daemon
}  // namespace weightsync
