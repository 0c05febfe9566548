// The node's part in writing and reading checkpoints below --checkpoint_root:
// the commands of the stream between daemons (node.proto) that name one.
//
//   WriteCheckpoint BEGIN  -> the temporary directory beside the target, the
//                             marker, files of their full size
//                   SEE    -> the marker is seen here
//                   WRITE  -> the node's pieces are in the files, synced
//   CompleteCheckpoint     -> index, template, rename; or nothing left of it
//   ReadCheckpoint         -> CheckpointRead: what the headers say
//   PruneCheckpoints
// Only what was written by one of these is ever replaced or removed
// (checkpoint_note.h). Each returns at once, and is carried out on a thread of
// its own; all but the last two are answered with CheckpointWritten.
//
// A directory is temporary until it is renamed, and noted in --state_dir while
// it is: what a daemon that was killed has left is removed at its next start.

#ifndef WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_H_
#define WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/node/checkpoint_bytes.h"
#include "daemon/node/checkpoint_note.h"
#include "daemon/node/device_copies.h"
#include "daemon/node/layouts.h"
#include "daemon/node/snapshot.h"
#include "daemon/node/store.h"
#include "transport/file/rooted_directory.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class Checkpoints {
 public:
  struct Options {
    // This node's name.
    std::string node;
    // --checkpoint_root; empty: none, and everything is refused.
    std::string root;
    // Where temporary directories are noted; empty: nowhere.
    std::string state_dir;
    // As of Mover::Options.
    std::function<void(v1::NodeReport)> report;
    // That write one checkpoint, or read one.
    int threads = 4;
  };

  // Both outlive it. Removes what an earlier process has left.
  Checkpoints(Options options, LayoutBook* layouts, Store* store);
  // As Shutdown.
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  // For a store that has buckets on GPUs; outlives this. Before the first
  // command.
  void SetDeviceCopies(DeviceCopies* copies) { device_copies_ = copies; }

  void WriteCheckpoint(const v1::WriteCheckpoint& command);
  void CompleteCheckpoint(const v1::CompleteCheckpoint& command);
  void ReadCheckpoint(const v1::ReadCheckpoint& command);
  void PruneCheckpoints(const v1::PruneCheckpoints& command);

  // The coordinator is lost, or another one: what was begun is given up.
  void AbandonAll(const absl::Status& why);
  // Ends everything; at return no thread of it runs. Later commands are
  // ignored.
  void Shutdown();

  // ---- For an update that comes by way of a checkpoint, on the caller's
  // thread ----

  // Whether this node sees it. FAILED_PRECONDITION (CHECKPOINT_ROOT_MISSING,
  // CHECKPOINT_NOT_SHARED).
  absl::Status See(const v1::Checkpoint& checkpoint) const;
  // Errors of CheckpointData::OpenToRead.
  absl::StatusOr<std::unique_ptr<CheckpointData>> OpenToRead(
      const std::string& path, std::shared_ptr<const NodeLayout> layout) const;
  int threads() const { return options_.threads; }

 private:
  // One that is being written; by its temporary directory.
  struct Job {
    std::shared_ptr<CancelFlag> cancel = std::make_shared<CancelFlag>();
    // This node made the directory.
    bool made = false;
    std::string path;
    StorePin pin;
    int running = 0;
  };
  struct Plan {
    std::shared_ptr<const NodeLayout> layout;
    transport::CheckpointFiles files;
  };

  absl::StatusOr<std::shared_ptr<const transport::RootedDirectory>> Root()
      const;
  absl::StatusOr<Plan> MakePlan(const std::string& layout_id,
                                int64_t max_shard_bytes) const;
  // Carries `work` out on a thread, once for each command_id, and reports what
  // it answers.
  void Start(const std::string& command_id, const std::string& job,
             std::function<v1::NodeReport(const CancelFlag&)> work)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Reap() ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Begin(const v1::WriteCheckpoint& command);
  absl::Status MakeFiles(const transport::RootedDirectory& root,
                         const v1::WriteCheckpoint& command, const Plan& plan);
  // With the directories above it that are missing.
  absl::Status MakeTemporary(const transport::RootedDirectory& root,
                             const std::string& temporary,
                             const std::string& path)
      ABSL_LOCKS_EXCLUDED(directories_mutex_);
  // Those that were made for the checkpoint at `path`, and hold nothing now.
  void RemoveMade(const transport::RootedDirectory& root,
                  const std::string& path)
      ABSL_LOCKS_EXCLUDED(directories_mutex_);
  absl::StatusOr<int64_t> Write(const v1::WriteCheckpoint& command,
                                const CancelFlag& cancel);
  absl::StatusOr<int> Complete(const v1::CompleteCheckpoint& command,
                               const CancelFlag& cancel);
  absl::Status GiveUp(const v1::CompleteCheckpoint& command);
  absl::Status PutInPlace(const transport::RootedDirectory& root,
                          const v1::CompleteCheckpoint& command);
  void Prune(const v1::PruneCheckpoints& command);
  // Copies what is no weight, and is no link.
  absl::Status CopyTemplate(const transport::RootedDirectory& root,
                            const std::string& from, const std::string& to,
                            int depth, const CancelFlag& cancel, int* files);
  // Removes the temporary directory when nobody of this node writes there any
  // more, and forgets it; or forgets it alone (`keep`).
  absl::Status Remove(const std::string& temporary, bool keep = false);
  void PinFor(const std::string& job, const std::string& update_id);

  // What lies half done, in --state_dir.
  void NoteJob(const std::string& temporary, const std::string& path);
  void ForgetJob(const std::string& temporary);
  void WriteNotes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(notes_mutex_);
  void RemoveLeftovers();

  const Options options_;
  LayoutBook* const layouts_;
  Store* const store_;
  DeviceCopies* device_copies_ = nullptr;

  mutable absl::Mutex mutex_;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Job> jobs_ ABSL_GUARDED_BY(mutex_);
  // Newest last; without a report while it runs.
  std::deque<std::pair<std::string, absl::optional<v1::NodeReport>>> commands_
      ABSL_GUARDED_BY(mutex_);
  struct Thread {
    std::thread thread;
    bool done = false;
  };
  std::list<Thread> threads_ ABSL_GUARDED_BY(mutex_);

  // No job of this node makes a directory while another removes it as empty.
  absl::Mutex directories_mutex_;
  // By the checkpoint's path, outermost first.
  std::deque<std::pair<std::string, std::vector<std::string>>> made_directories_
      ABSL_GUARDED_BY(directories_mutex_);

  absl::Mutex notes_mutex_;
  std::map<std::string, std::string> notes_ ABSL_GUARDED_BY(notes_mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_CHECKPOINTS_H_
