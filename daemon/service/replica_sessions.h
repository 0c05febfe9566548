// The replicas and workers of this node: their leases, what is relayed between
// them and the coordinator, and the arenas, plans and places that a worker
// needs to install an update.
//
//   control stream:  RegisterReplica -> ReplicaJoined -> ReplicaRegistered
//                    PauseReplica, ResumeReplica and their answers are relayed
//   worker stream:   RegisterWorker -> WorkerJoined -> room in the store ->
//                    WorkerRegistered, the store's arenas, then WorkerJoined
//                    once more: ready
//                    ApplyWorker -> (arenas, CopyPlan if new) ApplyUpdate ->
//                    WorkerApplied
//                    RemoveWorker -> RemoveWeights -> WorkerApplied
//                    DigestWorker -> DigestTensors -> TensorDigests
//                    STREAM: worker_streams.h
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
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/node/away.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/store.h"
#include "daemon/service/lease.h"
#include "daemon/service/node_context.h"
#include "daemon/service/worker_streams.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// All on the node's loop.
class ReplicaSessions : private WorkerStreams::Host {
 public:
  using ControlStream = ServerStream<v1::ReplicaReport, v1::ReplicaCommand>;
  using WorkerStream = ServerStream<v1::WorkerReport, v1::WorkerCommand>;

  // `node` outlives the sessions.
  explicit ReplicaSessions(const NodeContext* node)
      : node_(*node), streams_(node, &plans_, this) {}

  // For the mover, on any thread.
  StreamSink* stream_sink() { return &streams_; }

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
  void Remove(const v1::RemoveWorker& command);
  void Digest(const v1::DigestWorker& command);
  void Refuse(const v1::RefuseReplica& command);
  void Refuse(const v1::RefuseWorker& command);

  // ---- The store ----
  void ArenaAdded(const std::string& arena_id);
  void ArenaDropped(const std::string& arena_id);

  // ---- While the coordinator is away: daemon/node/away.h ----
  void CoordinatorLost(absl::Time now);
  // Replicas that have to stay paused until the coordinator is back.
  int alarms() const;

  // ---- Time, and the end ----
  void CheckLeases(absl::Time now);
  void ForgiveSilence(absl::Time now);
  // And whoever opens a stream later.
  void EndAll(const absl::Status& why);

 private:
  struct Control : Lease<v1::ReplicaReport, v1::ReplicaCommand> {
    // `paused` is kept as it is now.
    v1::RegisterReplica registration;
    // The update that it was asked to pause for last, until it is resumed.
    v1::PauseReplicaCommand offer;
    // Of the first ApplyWorker for that update.
    v1::ApplyWorker commit;
    // What the node itself has asked the engine for; empty: nothing, or it has
    // been answered.
    std::string own_command_id;
    // What the engine is asked again at `own_retry`, because its hook failed.
    v1::ResumeReplica own_resume;
    absl::Time own_retry = absl::InfiniteFuture();
    // Paused by the node itself.
    bool isolation_hold = false;
    // Said that it has to stay paused, and nothing has ended that since.
    bool alarmed = false;
  };

  struct Worker : Lease<v1::WorkerReport, v1::WorkerCommand> {
    // `installed` is kept as it is now.
    v1::RegisterWorker registration;
    ArenaOffers offers;
    std::set<std::string> layouts;
    // The apply that it was commanded last and has not answered; command_id
    // empty: none. Without an update: to drop what it holds.
    std::string command_id;
    v1::ApplyWorker command;
    // The update that it was told to take bucket by bucket, until it has said
    // what became of it. Empty: none.
    std::string streamed;
    // Keeps the bytes where they are until the worker has answered.
    StorePin pin;
    Loop::TimerId timer = 0;
    // An apply that came before the worker was accepted.
    std::unique_ptr<v1::ApplyWorker> early;

    std::string Name() const;
  };

  void CheckAway(absl::Time now);
  AwayReplica LookAt(const Control& control, absl::Time now) const;
  void Act(Control* control, AwayAction action);
  void ResumeOwn(Control* control, const std::string& command_id,
                 const v1::InstalledState& installed, bool weights_changed);
  void SendOwnResume(Control* control);
  void OwnResumeAnswered(Control* control, const v1::ReplicaResumed& resumed);
  std::vector<Worker*> WorkersOf(const Control& control) const;

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

  // What a coordinator must take its memory for: its own word, but WRITING as
  // long as a command is on its way to it or waits there. A coordinator of a
  // later term may not know of that command, and must not resume the engine
  // before it has been answered.
  v1::InstalledState BelievedContent(const Worker& worker) const;

  // Sends the worker a token for it, once.
  absl::Status Offer(Worker* worker, const std::string& arena_id);
  // What an apply needs.
  struct Located;
  // GPUs out of whose memory the worker can copy.
  static std::vector<std::string> ReachableFrom(const Worker& worker);
  // What a worker cannot reach on a GPU gets a copy in host memory. Blocks.
  absl::Status BringInReach(const v1::ApplyWorker& command,
                            const std::vector<int32_t>& buckets,
                            const std::vector<std::string>& reachable,
                            LocatedUpdate* update);
  // The second half of Apply, when that was found.
  void Send(uint64_t id, const v1::ApplyWorker& command,
            const std::shared_ptr<Located>& located);
  void Applied(Worker* worker, const v1::WorkerApplied& applied);
  void Digested(Worker* worker, const v1::TensorDigests& digests);
  // Who the worker is at now, and until when.
  void StartApply(Worker* worker, const v1::ApplyWorker& command);
  v1::ApplyUpdate MakeApply(const v1::ApplyWorker& command) const;

  // WorkerStreams::Host.
  uint64_t FindStreamWorker(const std::string& model,
                            const v1::StreamWorker& worker) override;
  const WantedTensors* TensorsOf(uint64_t worker) override;
  std::vector<std::string> ReachableBy(uint64_t worker) override;
  std::string NameOf(uint64_t worker) override;
  void Send(uint64_t worker, v1::WorkerCommand command) override;
  void SendPlan(uint64_t worker, const v1::CopyPlan& plan) override;
  absl::Status OfferStore(uint64_t worker,
                          const std::string& arena_id) override;
  absl::Status OfferMemory(uint64_t worker,
                           const SourceRegion& region) override;
  void GiveUp(uint64_t worker, const absl::Status& why) override;
  void EndApply(Worker* worker);
  void ReportApplyFailure(const v1::ApplyWorker& command,
                          const absl::Status& why,
                          const v1::InstalledState* installed,
                          bool not_held = false);

  const NodeContext& node_;
  // Not OK: nobody new is let in.
  absl::Status down_;
  // Since when the coordinator is away; InfiniteFuture: it is there.
  absl::Time away_since_ = absl::InfiniteFuture();
  CopyPlanCache plans_;
  WorkerStreams streams_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::unique_ptr<Control>> controls_;
  std::map<uint64_t, std::unique_ptr<Worker>> workers_;
  absl::flat_hash_map<const ControlStream*, uint64_t> control_streams_;
  absl::flat_hash_map<const WorkerStream*, uint64_t> worker_streams_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_REPLICA_SESSIONS_H_
