// The inference side, one per engine instance: pauses and resumes it around the
// installation of an update.
//
//   ReplicaOptions options;
//   options.model = "qwen";
//   options.replica = "replica-0";
//   options.incarnation = RandomId();
//   ReplicaHooks hooks;
//   hooks.on_pause = [&](const PauseRequest& pause) ->
//   absl::StatusOr<std::string> {
//     return absl::StrCat("drained ", engine.Drain(pause.deadline), "
//     requests");
//   };
//   hooks.on_resume = [&](const ResumeInfo& info) {
//     if (info.weights_changed) engine.DropCaches();
//     return engine.Resume();
//   };
//   auto replica = Replica::Start(options, hooks);
//
// The engine's workers are Worker objects (client/cc/worker.h), here or in
// other processes; the replica serves when all of them and this are registered.
//
// A command that comes twice does nothing twice: an engine that is paused is
// not paused again, one that runs on the same weights is not resumed again, and
// a command that is said again, word for word, gets the same answer. After a
// broken stream the library registers again and says whether the engine stands
// paused; it stays paused until the daemon says otherwise.
//
// Thread-safe. Two threads: one for the daemon, one for the hooks.
#ifndef WEIGHTSYNC_CLIENT_CC_REPLICA_H_
#define WEIGHTSYNC_CLIENT_CC_REPLICA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace client {

struct PauseRequest {
  // What the pause is for; empty: an operator asked for it.
  std::string update_id;
  int64_t version = 0;
  // What becomes of the requests that the engine is working on: ABORT, DRAIN
  // or KEEP. A replica that declares atomic_swap is not asked to pause for an
  // update with PAUSE_MODE_NONE.
  v1::PauseMode mode = v1::PAUSE_MODE_DRAIN;
  // When the daemon gives up waiting.
  absl::Time deadline;
};

struct ResumeInfo {
  // What every worker of the replica holds; empty: what they came with.
  std::string update_id;
  int64_t version = 0;
  int64_t step = 0;
  // Caches made with older weights (prefix, KV) must go.
  bool weights_changed = false;
  // How the pause before it was asked for: with KEEP, frozen requests go on;
  // with NONE the engine never stood still: all of its workers now hold the
  // update in the set that WorkerOptions::swap named, and it flips to it, all
  // workers at the same step.
  v1::PauseMode mode = v1::PAUSE_MODE_DRAIN;
  // The model was removed (ReplicaOptions::removable): the engine generates
  // without it until it is resumed with an update again.
  bool removed = false;
};

// Called on one thread, one at a time, never while the library holds a lock. A
// hook may take its time (heartbeats go on), but the daemon gives up at the
// deadline of the pause.
struct ReplicaHooks {
  // Stop generating. Returns what it did, for people ("drained 3 requests").
  // After an error the engine counts as neither paused nor running: a pause or
  // a resume will follow, and its hook is called.
  std::function<absl::StatusOr<std::string>(const PauseRequest&)> on_pause;
  // Generate again. After an error the engine counts as neither paused nor
  // running: a resume is tried again, and the next pause calls on_pause.
  std::function<absl::Status(const ResumeInfo&)> on_resume;
};

struct ReplicaOptions {
  // See NormalizeAddress in client/cc/rpc.h; empty: DefaultAddress().
  std::string address;
  // With or without "models/".
  std::string model;
  std::string replica;
  // The same for the replica and all of its workers, another after every
  // restart of the engine.
  std::string incarnation;
  int worker_count = 1;
  // For people; the library's name is put before it.
  std::string client;
  // The workers may leave parameters of the model out.
  bool partial = false;
  // All workers have a spare set of tensors (WorkerOptions::swap): updates may
  // be published with PAUSE_MODE_NONE.
  bool atomic_swap = false;
  // The engine can go on without the model, an adapter: it may be removed.
  bool removable = false;
  // The engine stands paused now.
  bool paused = false;
  absl::Duration register_timeout = absl::Seconds(20);
  absl::Duration max_backoff = absl::Seconds(5);
};

class Replica {
 public:
  // Starts to register.
  //   INVALID_ARGUMENT  NAME_INVALID, WORKER_COUNT_INVALID, HOOK_MISSING,
  //     ADDRESS_INVALID.
  static absl::StatusOr<std::unique_ptr<Replica>> Start(ReplicaOptions options,
                                                        ReplicaHooks hooks);

  // As Close.
  ~Replica();

  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  // Waits until the daemon knows the replica. The daemon's own error when it
  // has refused for good; DEADLINE_EXCEEDED (REGISTER_TIMEOUT) otherwise: it
  // goes on trying.
  absl::Status WaitRegistered(absl::Duration timeout);

  // True from the beginning of on_pause to the end of an on_resume that
  // succeeded.
  bool paused() const;

  // OK while registered; why not, otherwise.
  absl::Status status() const;
  // No further attempt to register will be made: closed, or refused for good.
  bool ended() const;

  // Ends the registration; waits for a hook that runs. Idempotent; not from a
  // hook. An engine that stands paused is left so.
  void Close();

 private:
  class Impl;
  explicit Replica(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_REPLICA_H_
