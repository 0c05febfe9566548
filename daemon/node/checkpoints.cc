#include "daemon/node/checkpoints.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/convert.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/error.h"
#include "transport/file/checkpoint.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::FileError;
using transport::MakeError;
using transport::RootedDirectory;
using transport::UniqueFd;

constexpr size_t kRememberedCommands = 64;
constexpr size_t kMaxRememberedBytes = 1 << 20;
// Between two looks at whether it was given up.
constexpr int64_t kChunkBytes = 8 << 20;
// For a network file system to show what another node has just written.
constexpr absl::Duration kSeePatience = absl::Seconds(3);
constexpr int kMaxTemplateFiles = 10000;
constexpr int64_t kMaxTemplateFileBytes = int64_t{1} << 30;
constexpr int kMaxTemplateDepth = 8;

std::string Join(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

absl::Duration TimeoutOf(bool has, const google::protobuf::Duration& timeout) {
  return has ? absl::Seconds(timeout.seconds()) +
                   absl::Nanoseconds(timeout.nanos())
             : absl::InfiniteDuration();
}

v1::NodeReport Written(const std::string& command_id,
                       const absl::Status& status, int64_t bytes = 0,
                       int shards = 0) {
  v1::NodeReport report;
  v1::CheckpointWritten* written = report.mutable_checkpoint_written();
  written->set_command_id(command_id);
  if (!status.ok()) *written->mutable_failure() = ToFailure(status);
  written->set_written_bytes(bytes);
  written->set_shard_count(shards);
  return report;
}

}  // namespace

Checkpoints::Checkpoints(Options options, LayoutBook* layouts, Store* store)
    : options_(std::move(options)), layouts_(layouts), store_(store) {
  RemoveLeftovers();
}

Checkpoints::~Checkpoints() { Shutdown(); }

// ---- Threads ----

void Checkpoints::Reap() {
  std::list<Thread> done;
  {
    absl::MutexLock lock(&mutex_);
    for (auto it = threads_.begin(); it != threads_.end();) {
      auto next = std::next(it);
      if (it->done) done.splice(done.end(), threads_, it);
      it = next;
    }
  }
  for (Thread& thread : done) thread.thread.join();
}

void Checkpoints::Start(const std::string& command_id, const std::string& job,
                        std::function<v1::NodeReport(const CancelFlag&)> work) {
  Reap();
  absl::MutexLock lock(&mutex_);
  if (shut_down_) return;
  for (const auto& known : commands_) {
    if (command_id.empty() || known.first != command_id) continue;
    // Said again: the answer may have been lost.
    if (known.second.has_value()) options_.report(*known.second);
    return;
  }
  if (!command_id.empty()) {
    commands_.emplace_back(command_id, absl::nullopt);
    if (commands_.size() > kRememberedCommands) commands_.pop_front();
  }
  std::shared_ptr<CancelFlag> cancel;
  if (job.empty()) {
    cancel = std::make_shared<CancelFlag>();
  } else {
    ++jobs_[job].running;
    cancel = jobs_[job].cancel;
  }
  threads_.emplace_back();
  Thread* self = &threads_.back();
  self->thread = std::thread([this, self, command_id, job, cancel,
                              work = std::move(work)] {
    v1::NodeReport report = work(*cancel);
    const bool says = report.report_case() != v1::NodeReport::REPORT_NOT_SET;
    {
      absl::MutexLock lock(&mutex_);
      auto known = std::find_if(
          commands_.begin(), commands_.end(),
          [&command_id](const auto& one) { return one.first == command_id; });
      if (says && known != commands_.end()) {
        if (report.ByteSizeLong() <= kMaxRememberedBytes) {
          known->second = report;
        } else {
          // What a checkpoint of very many tensors says; it is read again.
          commands_.erase(known);
        }
      }
      auto it = jobs_.find(job);
      if (it != jobs_.end()) --it->second.running;
    }
    if (says) options_.report(std::move(report));
    absl::MutexLock lock(&mutex_);
    self->done = true;
  });
}

void Checkpoints::AbandonAll(const absl::Status& why) {
  std::vector<std::string> made;
  {
    absl::MutexLock lock(&mutex_);
    for (auto& job : jobs_) {
      job.second.cancel->Cancel(why);
      made.push_back(job.first);
    }
  }
  for (const std::string& temporary : made) {
    Start("", "", [this, temporary](const CancelFlag&) {
      const absl::Status status = Remove(temporary);
      LOG_IF(WARNING, !status.ok()) << temporary << ": " << status;
      return v1::NodeReport();
    });
  }
}

void Checkpoints::Shutdown() {
  AbandonAll(
      MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
                absl::StrCat("node ", options_.node, " is shutting down")));
  std::list<Thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    shut_down_ = true;
    // They look at their flags; nobody adds to the list any more.
    auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return std::all_of(threads_.begin(), threads_.end(),
                         [](const Thread& thread) { return thread.done; });
    };
    mutex_.Await(absl::Condition(&idle));
    threads.swap(threads_);
    jobs_.clear();
  }
  for (Thread& thread : threads) thread.thread.join();
}

// ---- Commands ----

void Checkpoints::WriteCheckpoint(const v1::WriteCheckpoint& command) {
  Start(command.command_id(), command.checkpoint().path(),
        [this, command](const CancelFlag& cancel) {
          absl::Status status;
          int64_t bytes = 0;
          switch (command.step()) {
            case v1::WriteCheckpoint::STEP_BEGIN:
              status = Begin(command);
              break;
            case v1::WriteCheckpoint::STEP_SEE:
              status = See(command.checkpoint());
              if (status.ok()) {
                PinFor(command.checkpoint().path(), command.update_id());
              }
              break;
            case v1::WriteCheckpoint::STEP_WRITE: {
              auto written = Write(command, cancel);
              status = written.status();
              if (written.ok()) bytes = *written;
              break;
            }
            default:
              status = MakeError(
                  absl::StatusCode::kUnimplemented, "CHECKPOINT_STEP_UNKNOWN",
                  absl::StrCat("node ", options_.node, " knows no step ",
                               command.step()));
          }
          if (command.step() != v1::WriteCheckpoint::STEP_BEGIN &&
              (!status.ok() ||
               command.step() == v1::WriteCheckpoint::STEP_WRITE)) {
            // Who made it still needs it.
            StorePin pin;
            absl::MutexLock lock(&mutex_);
            auto it = jobs_.find(command.checkpoint().path());
            if (it != jobs_.end() && !it->second.made) {
              pin = std::move(it->second.pin);
              if (it->second.running == 1) jobs_.erase(it);
            }
          }
          return Written(command.command_id(), status, bytes);
        });
}

void Checkpoints::CompleteCheckpoint(const v1::CompleteCheckpoint& command) {
  if (command.give_up()) {
    {
      absl::MutexLock lock(&mutex_);
      auto it = jobs_.find(command.checkpoint().path());
      if (it != jobs_.end()) {
        it->second.cancel->Cancel(MakeError(
            absl::StatusCode::kAborted, "CHECKPOINT_GIVEN_UP",
            absl::StrCat(command.path(), " is not written after all")));
      }
    }
    // No part of the job: it waits for those who are.
    Start(command.command_id(), "", [this, command](const CancelFlag&) {
      return Written(command.command_id(), GiveUp(command));
    });
    return;
  }
  Start(command.command_id(), command.checkpoint().path(),
        [this, command](const CancelFlag& cancel) {
          auto shards = Complete(command, cancel);
          return Written(command.command_id(), shards.status(), 0,
                         shards.ok() ? *shards : 0);
        });
}

void Checkpoints::ReadCheckpoint(const v1::ReadCheckpoint& command) {
  Start(command.command_id(), "", [this, command](const CancelFlag&) {
    // Headers of very many tensors are millions of small pieces, made here and
    // freed by whoever sends them: without this each thread's part of the heap
    // keeps as much as it ever took.
    malloc_trim(0);
    v1::NodeReport report;
    v1::CheckpointRead* read = report.mutable_checkpoint_read();
    read->set_command_id(command.command_id());
    const absl::Status status = [&]() -> absl::Status {
      auto root = Root();
      if (!root.ok()) return root.status();
      auto headers = transport::ReadCheckpointHeaders(**root, command.path());
      if (!headers.ok()) return headers.status();
      auto parameters = ParametersOf(*headers);
      if (!parameters.ok()) return parameters.status();
      for (v1::Parameter& parameter : *parameters) {
        absl::Status fits = CheckParameter(ParamFromProto(parameter));
        if (!fits.ok()) {
          return MakeError(absl::StatusCode::kFailedPrecondition,
                           "CHECKPOINT_MISMATCH", fits.message());
        }
        *read->add_parameters() = std::move(parameter);
      }
      return absl::OkStatus();
    }();
    if (!status.ok()) *read->mutable_failure() = ToFailure(status);
    return report;
  });
}

void Checkpoints::PruneCheckpoints(const v1::PruneCheckpoints& command) {
  Start("", "", [this, command](const CancelFlag&) {
    Prune(command);
    return v1::NodeReport();
  });
}

// ---- What they do ----

absl::StatusOr<std::shared_ptr<const RootedDirectory>> Checkpoints::Root()
    const {
  if (options_.root.empty()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "CHECKPOINT_ROOT_MISSING",
        absl::StrCat("node ", options_.node,
                     " was started without --checkpoint_root: start it with "
                     "the directory in which checkpoints may lie"));
  }
  return RootedDirectory::Open(options_.root);
}

absl::StatusOr<Checkpoints::Plan> Checkpoints::MakePlan(
    const std::string& layout_id, int64_t max_shard_bytes) const {
  Plan plan;
  auto layout = layouts_->Find(layout_id);
  if (!layout.ok()) return layout.status();
  plan.layout = *std::move(layout);
  auto files = transport::PlanCheckpoint(TensorsOf(plan.layout->catalog),
                                         max_shard_bytes);
  if (!files.ok()) return files.status();
  plan.files = *std::move(files);
  return plan;
}

absl::Status Checkpoints::See(const v1::Checkpoint& checkpoint) const {
  auto root = Root();
  if (!root.ok()) return root.status();
  const std::string seen = checkpoint.marker().empty()
                               ? checkpoint.path()
                               : Join(checkpoint.path(), checkpoint.marker());
  const absl::Time deadline = absl::Now() + kSeePatience;
  while (!(*root)->Exists(seen)) {
    if (absl::Now() >= deadline) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "CHECKPOINT_NOT_SHARED",
          absl::StrCat("node ", options_.node, " does not see ",
                       checkpoint.path(),
                       " below its --checkpoint_root=", options_.root,
                       ", where another node has it: let --checkpoint_root be "
                       "on a file system that all of them see"));
    }
    absl::SleepFor(absl::Milliseconds(100));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CheckpointData>> Checkpoints::OpenToRead(
    const std::string& path, std::shared_ptr<const NodeLayout> layout) const {
  auto root = Root();
  if (!root.ok()) return root.status();
  return CheckpointData::OpenToRead(**root, path, std::move(layout));
}

void Checkpoints::PinFor(const std::string& job, const std::string& update_id) {
  // One that is not in the store yet is kept by its mover.
  auto pin = store_->Pin(update_id);
  if (!pin.ok()) return;
  StorePin before;
  absl::MutexLock lock(&mutex_);
  auto it = jobs_.find(job);
  if (it == jobs_.end()) return;
  before = std::move(it->second.pin);
  it->second.pin = *std::move(pin);
}

absl::Status Checkpoints::Begin(const v1::WriteCheckpoint& command) {
  auto root = Root();
  if (!root.ok()) return root.status();
  auto path = transport::CheckRootedPath(command.path());
  if (!path.ok()) return path.status();
  auto plan = MakePlan(command.layout_id(), command.max_shard_bytes());
  if (!plan.ok()) return plan.status();
  absl::Status place = CheckNotInside(**root, *path);
  if (!place.ok()) return place;
  if ((*root)->Exists(*path)) {
    place = CheckReplaceable(**root, *path);
    if (command.overwrite()) {
      if (!place.ok()) return place;
    } else if (place.ok()) {
      return FileError("make", *path, EEXIST);
    } else {
      // Nobody shall be sent from one refusal to the next.
      return MakeError(
          absl::StatusCode::kAlreadyExists, "CHECKPOINT_EXISTS",
          absl::StrCat(*path, " is there already, and overwrite would not ",
                       "replace it: ", place.message()));
    }
  }
  if (!command.template_path().empty()) {
    auto names = (*root)->List(command.template_path());
    if (!names.ok()) return names.status();
  }
  const std::string& temporary = command.checkpoint().path();
  {
    absl::MutexLock lock(&mutex_);
    Job& job = jobs_[temporary];
    job.made = true;
    job.path = *path;
  }
  NoteJob(temporary, *path);
  PinFor(temporary, command.update_id());
  absl::Status status = MakeFiles(**root, command, *plan);
  if (status.ok()) return status;
  {
    // Remove waits for the others.
    absl::MutexLock lock(&mutex_);
    --jobs_[temporary].running;
  }
  const absl::Status removed = Remove(temporary);
  LOG_IF(WARNING, !removed.ok()) << temporary << ": " << removed;
  return status;
}

absl::Status Checkpoints::MakeFiles(const RootedDirectory& root,
                                    const v1::WriteCheckpoint& command,
                                    const Plan& plan) {
  const std::string& temporary = command.checkpoint().path();
  absl::Status status = MakeTemporary(root, temporary, command.path());
  if (status.ok()) {
    status =
        root.WriteNewFile(Join(temporary, command.checkpoint().marker()), "");
  }
  for (const transport::CheckpointFile& file : plan.files.files) {
    if (!status.ok()) return status;
    const std::string path = Join(temporary, file.name);
    auto fd = root.OpenFile(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (!fd.ok()) return fd.status();
    // A disk that is too small is better known now.
    if (fallocate(fd->get(), 0, 0, file.bytes) != 0) {
      if (errno != EOPNOTSUPP && errno != ENOSYS) {
        return FileError("make", path, errno);
      }
      if (ftruncate(fd->get(), file.bytes) != 0) {
        return FileError("make", path, errno);
      }
    }
    status = transport::WriteAt(fd->get(), path, file.header.data(),
                                static_cast<int64_t>(file.header.size()), 0);
    if (status.ok() && fsync(fd->get()) != 0) {
      status = FileError("sync", path, errno);
    }
  }
  return status.ok() ? root.Sync(temporary) : status;
}

absl::StatusOr<int64_t> Checkpoints::Write(const v1::WriteCheckpoint& command,
                                           const CancelFlag& cancel) {
  const absl::Time deadline =
      absl::Now() + TimeoutOf(command.has_timeout(), command.timeout());
  auto root = Root();
  if (!root.ok()) return root.status();
  auto plan = MakePlan(command.layout_id(), command.max_shard_bytes());
  if (!plan.ok()) return plan.status();
  const auto no_holder = [&](const absl::Status& why) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "NO_HOLDER",
        absl::StrCat("node ", options_.node,
                     " has not got the bytes any more: ", why.message()));
  };
  auto pin = store_->Pin(command.update_id());
  if (!pin.ok()) return no_holder(pin.status());
  const std::vector<int32_t> buckets(command.buckets().begin(),
                                     command.buckets().end());
  if (device_copies_ != nullptr) {
    const absl::Status copied =
        device_copies_->ToHost(plan->layout, command.update_id(), buckets);
    if (!copied.ok()) return copied;
  }
  auto rooms = store_->Rooms(command.update_id(), buckets, /*incoming=*/true);
  if (!rooms.ok()) return no_holder(rooms.status());
  auto data = CheckpointData::OpenToWrite(**root, command.checkpoint().path(),
                                          plan->files, plan->layout);
  if (!data.ok()) return data.status();

  std::atomic<size_t> next{0};
  std::atomic<int64_t> written{0};
  absl::Mutex mutex;
  absl::Status status;
  std::atomic<bool> failed{false};
  const auto work = [&] {
    for (size_t i = next++; i < rooms->size() && !failed; i = next++) {
      const BucketRoom& room = (*rooms)[i];
      const int64_t size = plan->layout->bucket_bytes(room.bucket);
      for (int64_t at = 0; at < size && !failed; at += kChunkBytes) {
        absl::Status done =
            cancel.cancelled() ? cancel.status()
            : absl::Now() >= deadline
                ? MakeError(absl::StatusCode::kDeadlineExceeded, "SAVE_TIMEOUT",
                            absl::StrCat("node ", options_.node,
                                         " did not write its part of ",
                                         command.path(), " in time"))
                : (*data)->Write(room.bucket, at,
                                 std::min(size, at + kChunkBytes),
                                 room.data.data());
        if (!done.ok()) {
          absl::MutexLock lock(&mutex);
          if (!failed.exchange(true)) status = done;
          return;
        }
      }
      written += size;
    }
  };
  std::vector<std::thread> threads;
  const int count =
      std::min<int>(options_.threads, static_cast<int>(rooms->size()));
  for (int i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  {
    absl::MutexLock lock(&mutex);
    if (!status.ok()) return status;
  }
  absl::Status synced = (*data)->Sync();
  if (!synced.ok()) return synced;
  if (cancel.cancelled()) return cancel.status();
  return written.load();
}

absl::Status Checkpoints::CopyTemplate(const RootedDirectory& root,
                                       const std::string& from,
                                       const std::string& to, int depth,
                                       const CancelFlag& cancel, int* files) {
  auto names = root.List(from);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (name[0] == '.' || transport::IsWeightFile(name)) continue;
    if (cancel.cancelled()) return cancel.status();
    const std::string source = Join(from, name);
    if (root.OpenDirectory(source).ok()) {
      if (depth >= kMaxTemplateDepth) continue;
      absl::Status status = root.MakeDirectory(Join(to, name), true);
      if (status.ok()) {
        status = CopyTemplate(root, source, Join(to, name), depth + 1, cancel,
                              files);
      }
      if (!status.ok()) return status;
      continue;
    }
    if (++*files > kMaxTemplateFiles) {
      return MakeError(absl::StatusCode::kInvalidArgument,
                       "CHECKPOINT_PATH_INVALID",
                       absl::StrCat("the template ", from, " has more than ",
                                    kMaxTemplateFiles, " files"));
    }
    auto bytes = root.ReadFile(source, kMaxTemplateFileBytes);
    if (!bytes.ok()) return bytes.status();
    absl::Status status = root.WriteNewFile(Join(to, name), *bytes);
    if (!status.ok()) return status;
  }
  return depth == 0 ? absl::OkStatus() : root.Sync(to);
}

absl::StatusOr<int> Checkpoints::Complete(const v1::CompleteCheckpoint& command,
                                          const CancelFlag& cancel) {
  auto root = Root();
  if (!root.ok()) return root.status();
  auto plan = MakePlan(command.layout_id(), command.max_shard_bytes());
  if (!plan.ok()) return plan.status();
  const std::string& temporary = command.checkpoint().path();
  if (!(*root)->Exists(Join(temporary, command.checkpoint().marker()))) {
    return MakeError(
        absl::StatusCode::kInternal, "CHECKPOINT_IO",
        absl::StrCat(temporary, " has gone while it was being written"));
  }
  absl::Status status;
  if (!command.template_path().empty()) {
    int files = 0;
    status = CopyTemplate(**root, command.template_path(), temporary, 0, cancel,
                          &files);
  }
  if (status.ok() && !plan->files.index.empty()) {
    status = (*root)->WriteNewFile(
        Join(temporary, transport::kCheckpointIndexName), plan->files.index);
  }
  if (status.ok()) {
    CheckpointNote note;
    note.model = command.model();
    note.version = command.version();
    note.update_id = command.update_id();
    auto files = FilesOf(**root, temporary);
    status = files.status();
    if (files.ok()) {
      files->erase(command.checkpoint().marker());
      note.files = *std::move(files);
      status = (*root)->WriteNewFile(Join(temporary, kCheckpointNote),
                                     note.ToJson());
    }
  }
  if (status.ok()) {
    status =
        (*root)->RemoveFile(Join(temporary, command.checkpoint().marker()));
  }
  if (status.ok()) status = (*root)->Sync(temporary);
  // Who has said that it was given up shall be right.
  if (status.ok() && cancel.cancelled()) status = cancel.status();
  if (status.ok()) status = PutInPlace(**root, command);
  if (!status.ok()) return status;
  // Somebody may have put something into the old one at the last moment.
  const absl::Status old = (*root)->Exists(temporary)
                               ? CheckReplaceable(**root, temporary)
                               : absl::OkStatus();
  {
    absl::MutexLock lock(&mutex_);
    auto it = jobs_.find(temporary);
    if (it != jobs_.end()) --it->second.running;
  }
  // What was there before lies under the temporary name.
  absl::Status removed = Remove(temporary, /*keep=*/!old.ok());
  if (!old.ok()) removed = old;
  LOG_IF(WARNING, !removed.ok())
      << "what " << command.path() << " was before stays at " << temporary
      << ": " << removed;
  return static_cast<int>(plan->files.files.size());
}

absl::Status Checkpoints::PutInPlace(const RootedDirectory& root,
                                     const v1::CompleteCheckpoint& command) {
  // It took a while since Begin has looked.
  absl::Status status = CheckNotInside(root, command.path());
  if (status.ok() && command.overwrite() && root.Exists(command.path())) {
    status = CheckReplaceable(root, command.path());
  }
  if (!status.ok()) return status;
  return root.Put(command.checkpoint().path(), command.path(),
                  command.overwrite());
}

absl::Status Checkpoints::GiveUp(const v1::CompleteCheckpoint& command) {
  auto root = Root();
  if (!root.ok()) return root.status();
  absl::Status status = Remove(command.checkpoint().path());
  if (!status.ok() || command.update_id().empty()) return status;
  // The update was aborted with its checkpoint complete.
  const auto note = ReadCheckpointNote(**root, command.path());
  if (!note.has_value() || note->update_id != command.update_id()) {
    return absl::OkStatus();
  }
  status = CheckWritten(**root, command.path(), *note);
  if (status.ok()) status = (*root)->RemoveTree(command.path());
  if (status.ok()) RemoveMade(**root, command.path());
  return status;
}

absl::Status Checkpoints::Remove(const std::string& temporary, bool keep) {
  bool made = false;
  std::string path;
  {
    absl::MutexLock lock(&mutex_);
    auto it = jobs_.find(temporary);
    if (it == jobs_.end()) return absl::OkStatus();
    auto idle = [this, &temporary]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      auto job = jobs_.find(temporary);
      return job == jobs_.end() || job->second.running <= 0;
    };
    mutex_.Await(absl::Condition(&idle));
    it = jobs_.find(temporary);
    if (it == jobs_.end()) return absl::OkStatus();
    made = it->second.made;
    path = it->second.path;
  }
  if (made) {
    auto root = Root();
    absl::Status status = root.status();
    if (status.ok() && !keep) status = (*root)->RemoveTree(temporary);
    // Noted still: the next start tries again.
    if (!status.ok()) return status;
    RemoveMade(**root, path);
    ForgetJob(temporary);
  }
  StorePin pin;
  absl::MutexLock lock(&mutex_);
  auto it = jobs_.find(temporary);
  if (it == jobs_.end()) return absl::OkStatus();
  pin = std::move(it->second.pin);
  jobs_.erase(it);
  return absl::OkStatus();
}

}  // namespace daemon
}  // namespace weightsync
