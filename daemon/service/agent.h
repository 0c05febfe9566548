// The node: its clients' sessions, its store and mover, and its link to the
// coordinator, on one loop. Whatever may take long happens elsewhere: on the
// loop for data (layouts, plans, the mover's commands, in the coordinator's
// order), on the one that faults memory in, on threads that copy tensors out,
// on the mover's own.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_AGENT_H_
#define WEIGHTSYNC_DAEMON_SERVICE_AGENT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/http/metrics.h"
#include "daemon/node/checkpoints.h"
#include "daemon/node/device_copies.h"
#include "daemon/node/layouts.h"
#include "daemon/node/mover.h"
#include "daemon/node/placement.h"
#include "daemon/node/store.h"
#include "daemon/options.h"
#include "daemon/service/asker.h"
#include "daemon/service/loop.h"
#include "daemon/service/node_context.h"
#include "daemon/service/node_link.h"
#include "daemon/service/process_watcher.h"
#include "daemon/service/replica_sessions.h"
#include "daemon/service/store_room.h"
#include "daemon/service/task_threads.h"
#include "daemon/service/trainer_sessions.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/device_agents.h"
#include "transport/group.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {

// How bytes move, by the daemon's flags.
Mover::Options MoverOptions(const Options& options,
                            std::function<void(v1::NodeReport)> report);

class Agent final : public NodeLink::Handler, public Store::Observer {
 public:
  // What the agent works with; all outlive it.
  struct Parts {
    transport::Memory* memory = nullptr;
    // The same as `memory` where trainers may use GPUs, null otherwise.
    transport::cuda::AgentMemory* devices = nullptr;
    // Null without GPUs.
    transport::cuda::DeviceAgents* device_agents = nullptr;
    transport::GroupFactory* groups = nullptr;
    ProcessWatcher* processes = nullptr;
    NodeJournal* journal = nullptr;
    // For sentences.
    std::string coordinator;
    // Of the cluster that this node belonged to before; empty: none.
    std::string cluster_id;
    // The highest term of its coordinators that it has followed; 0: none. A
    // coordinator of an older one finds out from our Hello that it is over.
    int64_t newest_term = 0;
    // Called on the agent's loop when the coordinator has welcomed the node. An
    // error ends the stream, and another attempt is made later.
    std::function<absl::Status(const v1::Welcome&)> welcomed;
  };

  // `options.store_budget_bytes` and `copy_threads` are resolved.
  Agent(const Options& options, Parts parts);
  // As Shutdown and StopLoops.
  ~Agent() override;
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // `coordinator`: the channel to it. Once.
  void Start(std::shared_ptr<grpc::Channel> coordinator);

  // Ends all clients' streams with UNAVAILABLE (SHUTTING_DOWN) and waits until
  // what runs has ended. The loop itself goes on, for streams that still close;
  // see StopLoops.
  void Shutdown();
  // When no stream is left. Idempotent.
  void StopLoops();

  // How it is, now. From any other thread than the loop's. UNAVAILABLE
  // (NODE_BUSY): the loop has not come to it in `timeout`; (SHUTTING_DOWN): nor
  // when EndAsking's time had come.
  absl::StatusOr<NodeFigures> AskFigures(absl::Duration timeout);
  // Whoever asks is not waited for longer.
  void EndAsking(absl::Time deadline) { asker_.EndBy(deadline); }

  // Runs `task` on the loop.
  void Post(Loop::Task task) { loop_.Post(std::move(task)); }
  // On the loop only.
  TrainerSessions* trainers() { return &trainers_; }
  ReplicaSessions* replicas() { return &replicas_; }

 private:
  // NodeLink::Handler, on the loop.
  v1::Hello MakeHello() override;
  v1::NodeHeartbeat MakeHeartbeat() override;
  absl::Status OnWelcome(const v1::Welcome& welcome) override;
  void OnCommand(v1::NodeCommand command) override;
  void OnLost(const absl::Status& why) override;

  // Store::Observer, on any thread.
  void OnArenaAdded(const std::string& arena_id) override;
  void OnArenaDropped(const std::string& arena_id) override;
  void OnUpdateEvicted(const std::string& model,
                       const std::string& update_id) override;

  void CheckLeases();
  v1::MemoryUse MemoryUse();
  // What the mover says, on the loop.
  void MoverReport(v1::NodeReport report);
  // Of an update that has ended.
  void ForgetSnapshots(const std::string& update_id);

  const Options options_;
  const Parts parts_;
  const std::string incarnation_;

  // Destroyed in the opposite order: sessions and pins before the store, loops
  // first of all are stopped in Shutdown and StopLoops.
  LayoutBook layouts_;
  Loop loop_{"ws-node"};
  Asker asker_{&loop_};
  Loop data_{"ws-data"};
  Loop reserving_{"ws-reserve"};
  TaskThreads copies_{"ws-snapshot"};
  Store store_;
  Placement placement_;
  DeviceCopies device_copies_;
  Checkpoints checkpoints_;
  Mover mover_;
  NodeLink link_;
  StoreRoom room_;
  NodeContext context_;
  TrainerSessions trainers_;
  ReplicaSessions replicas_;

  std::string cluster_id_;
  int64_t newest_term_ = 0;
  // What this term's coordinator was told, or would have been had it been
  // there, of copies of updates that have not ended: it asks again for
  // everything else when this node comes back. By model and rank.
  std::map<std::pair<std::string, int32_t>, v1::RankSnapshotted> snapshots_;
  absl::Time last_check_;
  // Counts losses of the coordinator: a grace period that was begun for an
  // older one is void.
  uint64_t losses_ = 0;
  bool started_ = false;
  bool shut_down_ = false;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_AGENT_H_
