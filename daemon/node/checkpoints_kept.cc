// What stays of checkpoints: those of older updates are removed, and so is what
// a daemon that was killed has left, and what one that was given up had made.

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
#include "absl/strings/strip.h"
#include "daemon/node/checkpoints.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::RootedDirectory;
using transport::UniqueFd;

constexpr char kRemovedSuffix[] = ".weightsync-removed";
// To make a directory while others remove it as empty.
constexpr int kMakeAttempts = 5;
// Of checkpoints whose directories were made for them.
constexpr size_t kRememberedDirectories = 64;

std::string Join(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

std::string LastPart(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

// As the coordinator calls the directory of an update.
std::string UpdateName(const CheckpointNote& note) {
  return absl::StrCat(note.version, "-", note.update_id.substr(0, 8));
}

}  // namespace

void Checkpoints::Prune(const v1::PruneCheckpoints& command) {
  auto root = Root();
  if (!root.ok() || command.kept() < 1) return;
  auto names = (*root)->List(command.path());
  if (!names.ok()) return;
  const std::set<std::string> busy(command.busy_paths().begin(),
                                   command.busy_paths().end());
  struct Noted {
    int64_t version;
    std::string path;
    bool ours;
  };
  std::vector<Noted> noted;
  for (const std::string& name : *names) {
    const std::string path = Join(command.path(), name);
    const auto note = ReadCheckpointNote(**root, path);
    // A copy of one, or one that was moved, is somebody's.
    if (!note.has_value() || note->update_id.empty() ||
        LastPart(note->model) != LastPart(command.path()) ||
        absl::StripSuffix(name, kRemovedSuffix) != UpdateName(*note)) {
      continue;
    }
    const bool removed = absl::EndsWith(name, kRemovedSuffix);
    const absl::Status ours = CheckWritten(**root, path, *note);
    if (!ours.ok()) {
      LOG(WARNING) << "an older update's checkpoint stays: " << ours.message();
    } else if (removed) {
      // Of a removal that was cut short.
      (*root)->RemoveTree(path).IgnoreError();
    }
    // One that stays counts all the same: what is newer is kept.
    if (!removed) noted.push_back({note->version, path, ours.ok()});
  }
  std::sort(noted.begin(), noted.end(), [](const Noted& a, const Noted& b) {
    return a.version > b.version;
  });
  for (size_t i = static_cast<size_t>(command.kept()); i < noted.size(); ++i) {
    const std::string& path = noted[i].path;
    if (busy.count(path) != 0 || !noted[i].ours) continue;
    // Half of it shall never be taken for all.
    const std::string removed = absl::StrCat(path, kRemovedSuffix);
    absl::Status status = (*root)->Put(path, removed, false);
    if (status.ok()) status = (*root)->RemoveTree(removed);
    LOG_IF(WARNING, !status.ok()) << path << " is not removed: " << status;
    LOG_IF(INFO, status.ok()) << "removed " << path << ", an older update's";
  }
}

// ---- Directories that hold checkpoints ----

absl::Status Checkpoints::MakeTemporary(const RootedDirectory& root,
                                        const std::string& temporary,
                                        const std::string& path) {
  const std::string parent = DirectoryOf(temporary);
  absl::Status status;
  for (int attempt = 0; attempt < kMakeAttempts; ++attempt) {
    absl::MutexLock lock(&directories_mutex_);
    std::vector<std::string> made;
    for (size_t slash = parent.find('/'); !parent.empty();
         slash = parent.find('/', slash + 1)) {
      const std::string above = parent.substr(0, slash);
      if (!root.Exists(above)) made.push_back(above);
      if (slash == std::string::npos) break;
    }
    if (!made.empty()) {
      made_directories_.emplace_back(path, std::move(made));
      if (made_directories_.size() > kRememberedDirectories) {
        made_directories_.pop_front();
      }
    }
    status = parent.empty() ? absl::OkStatus()
                            : root.MakeDirectory(parent, /*fresh=*/false);
    if (status.ok()) status = root.MakeDirectory(temporary, /*fresh=*/true);
    // Another node may have removed one that it had made, and found empty.
    if (!absl::IsNotFound(status)) break;
  }
  return status;
}

void Checkpoints::RemoveMade(const RootedDirectory& root,
                             const std::string& path) {
  absl::MutexLock lock(&directories_mutex_);
  for (auto it = made_directories_.begin(); it != made_directories_.end();) {
    if (it->first == path) {
      std::vector<std::string>& made = it->second;
      while (!made.empty() && root.RemoveIfEmpty(made.back())) made.pop_back();
      if (made.empty()) {
        it = made_directories_.erase(it);
        continue;
      }
    }
    ++it;
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
