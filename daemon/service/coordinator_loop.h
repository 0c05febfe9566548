// Carries out what the coordinator decides: one thread, a clock, the journal,
// and the streams of the nodes. The coordinator itself (daemon/coordinator) has
// none of these.
//
// Actions are carried out in the order given; the journal records among them
// are written first, together, and are on the disk before anything is told to
// anybody. When the disk fails, the process ends at once and says nothing: what
// it would say might be forgotten by its successor.
//
// Nothing that runs on the loop waits for a network or a client.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_COORDINATOR_LOOP_H_
#define WEIGHTSYNC_DAEMON_SERVICE_COORDINATOR_LOOP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/journal.h"
#include "daemon/coordinator/options.h"
#include "daemon/options.h"
#include "daemon/service/loop.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// Thread-safe. Never blocks its callers.
class CoordinatorLoop {
 public:
  // The coordinator's way to one node. Both are called on the loop and must not
  // block.
  struct NodePeer {
    std::function<void(v1::NodeCommand)> send;
    std::function<void(const absl::Status&)> close;
  };
  using Query =
      std::function<void(const Coordinator& coordinator, absl::Time now)>;
  using Watcher = std::function<void(const VersionChanged& change)>;
  using WatcherId = uint64_t;

  // Opens the journal in `state_dir`, which must exist, and takes the next
  // term. Errors of Journal::Open. `files` outlives it; null: the machine's own
  // file system. A record that cannot be written ends the process, before
  // anybody is told of it.
  static absl::StatusOr<std::unique_ptr<CoordinatorLoop>> Start(
      CoordinatorOptions options, const std::string& state_dir,
      FaultPoint fault_point = nullptr, JournalFiles* files = nullptr);
  // As Stop.
  ~CoordinatorLoop();
  CoordinatorLoop(const CoordinatorLoop&) = delete;
  CoordinatorLoop& operator=(const CoordinatorLoop&) = delete;

  // As it was at the start: an adoption changes both (GetCluster).
  const std::string& cluster_id() const { return cluster_id_; }
  int64_t term() const { return term_; }

  // A stream to a node was opened; the name that the other calls give it.
  std::string Connected(NodePeer peer);
  void Report(const std::string& stream, v1::NodeReport report);
  void Disconnected(const std::string& stream);

  // Calls `query` on the loop, where it must not block.
  void Ask(Query query);
  // Calls `done` on the loop. DEADLINE_EXCEEDED (PREPARE_TIMEOUT) at the
  // deadline.
  void Prepare(v1::PrepareRequest request, absl::Time deadline,
               std::function<void(absl::StatusOr<v1::PrepareResponse>)> done);

  // One of the calls that change something; `done` is called on the loop, with
  // a response of the call's own type. DEADLINE_EXCEEDED (CALL_TIMEOUT) at the
  // deadline, should the coordinator not have answered by itself.
  void Change(AdminRequest request, absl::Time deadline,
              std::function<void(absl::StatusOr<AdminResponse>)> done);

  // Calls `watcher` on the loop at every change of any version, until Unwatch.
  // After Unwatch it may be called once more.
  WatcherId Watch(Watcher watcher);
  void Unwatch(WatcherId id);

  // Ends the loop; afterwards nothing is decided any more. Idempotent.
  void Stop();

  // For timers of those who ask on it.
  Loop* loop() { return &loop_; }

 private:
  struct PendingPrepare {
    std::function<void(absl::StatusOr<v1::PrepareResponse>)> done;
    Loop::TimerId timer = 0;
  };

  struct PendingChange {
    std::function<void(absl::StatusOr<AdminResponse>)> done;
    Loop::TimerId timer = 0;
  };

  CoordinatorLoop(CoordinatorOptions options, std::unique_ptr<Journal> journal,
                  FaultPoint fault_point);

  // All below on the loop.
  void Do(Actions actions);
  // Ends the process unless OK.
  static void Written(const absl::Status& status);
  void Tick();
  absl::Time Now();
  void FinishPrepare(int64_t request,
                     absl::StatusOr<v1::PrepareResponse> result);
  void FinishChange(int64_t request, absl::StatusOr<AdminResponse> result);

  Loop loop_{"ws-coordinator"};
  const std::unique_ptr<Journal> journal_;
  Coordinator coordinator_;
  const FaultPoint fault_point_;
  // Constant after Start.
  std::string cluster_id_;
  int64_t term_ = 0;

  absl::Time now_ = absl::InfinitePast();
  std::map<std::string, NodePeer> peers_;
  std::map<WatcherId, Watcher> watchers_;
  std::map<int64_t, PendingPrepare> prepares_;
  int64_t next_prepare_ = 1;
  std::map<int64_t, PendingChange> changes_;
  int64_t next_change_ = 1;

  std::atomic<uint64_t> next_stream_{1};
  std::atomic<WatcherId> next_watcher_{1};
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_COORDINATOR_LOOP_H_
