// The replicas and workers of this node: their leases, what is relayed between
// them and the coordinator, and the arenas, plans and places that a worker
// needs to install an update.
//
//   control stream:  RegisterReplica -> ReplicaJoined -> ReplicaRegistered
//                    PauseReplica, ResumeReplica and their answers are relayed
//   worker stream:   RegisterWorker -> WorkerJoined -> room in the store ->
//   WorkerRegistered,
//                    then the store's arenas
//                    ApplyWorker -> (arenas, CopyPlan if new) ApplyUpdate ->
//                    WorkerApplied
//
// What the coordinator says to one that is not here (any more) is answered with
// a failure.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_REPLICA_SESSIONS_H_
#define WEIGHTSYNC_DAEMON_SERVICE_REPLICA_SESSIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/store.h"
#include "daemon/service/lease.h"
#include "daemon/service/node_context.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// All on the node's loop.
class ReplicaSessions {
 public:
  using ControlStream = ServerStream<v1::ReplicaReport, v1::ReplicaCommand>;
  using WorkerStream = ServerStream<v1::WorkerReport, v1::WorkerCommand>;

  // `node` outlives the sessions.
  explicit ReplicaSessions(const NodeContext* node) : node_(*node) {}

  // ---- Streams: what the service passes on ----
  void Open(std::shared_ptr<ControlStream> stream);
  void Heard(const ControlStream* stream, const v1::ReplicaReport& report);
  void Closed(const ControlStream* stream);
  void Open(std::shared_ptr<WorkerStream> stream);
  void Heard(const WorkerStream* stream, const v1::WorkerReport& report);
  void Closed(const WorkerStream* stream);

  // ---- The coordinator ----
  void Announce();
  void Pause(const v1::PauseReplicaCommand& command);
  void Resume(const v1::ResumeReplicaCommand& command);
  void Apply(const v1::ApplyWorker& command);
  void Refuse(const v1::RefuseReplica& command);
  void Refuse(const v1::RefuseWorker& command);

  // ---- The store ----
  void ArenaAdded(const std::string& arena_id);
  void ArenaDropped(const std::string& arena_id);

  // ---- Time, and the end ----
  void CheckLeases(absl::Time now);
  void ForgiveSilence(absl::Time now);
  // And whoever opens a stream later.
  void EndAll(const absl::Status& why);

 private:
  struct Control : Lease<v1::ReplicaReport, v1::ReplicaCommand> {
    // `paused` is kept as it is now.
    v1::RegisterReplica registration;
  };

  struct Worker : Lease<v1::WorkerReport, v1::WorkerCommand> {
    // `installed` is kept as it is now.
    v1::RegisterWorker registration;
    ArenaOffers offers;
    std::set<std::string> layouts;
    // The apply that the worker is at; command_id empty: none.
    std::string command_id;
    v1::ApplyWorker command;
    // Keeps the bytes where they are until the worker has answered.
    StorePin pin;
    Loop::TimerId timer = 0;
    // An apply that came before the worker was accepted.
    std::unique_ptr<v1::ApplyWorker> early;

    std::string Name() const;
  };

  Control* FindControl(uint64_t id);
  Worker* FindWorker(uint64_t id);
  Control* FindControl(const std::string& model, const std::string& replica,
                       const std::string& incarnation);
  Worker* FindWorker(const std::string& model, const std::string& replica,
                     int index, const std::string& incarnation);

  void Join(Control* control);
  void Join(Worker* worker);
  void Accept(Worker* worker, int64_t tensor_bytes);
  void EndControl(uint64_t id, const absl::Status& why);
  void EndWorker(uint64_t id, const absl::Status& why);

  // Sends the worker a token for it, once.
  absl::Status Offer(Worker* worker, const std::string& arena_id);
  // What an apply needs.
  struct Located;
  // The second half of Apply, when that was found.
  void Send(uint64_t id, const v1::ApplyWorker& command,
            const std::shared_ptr<Located>& located);
  void Applied(Worker* worker, const v1::WorkerApplied& applied);
  void EndApply(Worker* worker);
  void ReportApplyFailure(const v1::ApplyWorker& command,
                          const absl::Status& why,
                          const v1::InstalledState* installed);

  const NodeContext& node_;
  // Not OK: nobody new is let in.
  absl::Status down_;
  CopyPlanCache plans_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::unique_ptr<Control>> controls_;
  std::map<uint64_t, std::unique_ptr<Worker>> workers_;
  absl::flat_hash_map<const ControlStream*, uint64_t> control_streams_;
  absl::flat_hash_map<const WorkerStream*, uint64_t> worker_streams_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_REPLICA_SESSIONS_H_
