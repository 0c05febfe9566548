// The coordinator's insides: one class whose member functions lie in several
// files, each with one idea.
//   core.cc          entry points, heartbeats, ticks
//   core_nodes.cc    the daemons of the cluster
//   core_forget.cc   what nobody names any more
//   core_members.cc  ranks, replicas and workers come and go
//   core_stale.cc    replicas that may serve on while their node is away
//   core_publish.cc  publishes: calls of ranks, opening an update
//   core_update.cc   events for the update machine, and what its actions mean
//   core_replica.cc  the same for the replica machines
//   core_install.cc  install an update from a holder: late join, repair,
//                    rollback
//   core_fetch.cc    fetching it to a node that lacks it
//   core_admin.cc    what operators ask for: pause, rollback, drain, adopt, …
//   core_remove.cc   RemoveModel: taking a model out of its engines
//   core_verify.cc   VerifyReplica
//   core_checkpoint.cc  checkpoints that nodes write: SaveVersion, updates by
//                    way of disk
//   core_load.cc     LoadVersion
//   core_prepare.cc  AdminService.Prepare
//   core_plan.cc     plans of updates, and what ended ones teach about rates
//   core_recovery.cc what a new term makes of the journal
//   queries.cc       what AdminService shows
//
// Events of updates are queued and worked off before an entry point returns, so
// that a machine is never stepped from inside one of its own actions.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_CORE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_CORE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/coordinator/actions.h"
#include "daemon/coordinator/core_runs.h"
#include "daemon/coordinator/costs.h"
#include "daemon/coordinator/journal_state.h"
#include "daemon/coordinator/known_layout.h"
#include "daemon/coordinator/need_book.h"
#include "daemon/coordinator/options.h"
#include "daemon/coordinator/registry.h"
#include "daemon/coordinator/update_plan.h"

namespace weightsync {
namespace daemon {

// What the machine has to know of the options.
void SetPolicies(const v1::UpdateOptions& options, UpdateConfig* config);
// With the defaults said; `medium`: the coordinator's.
v1::UpdateOptions ResolveOptions(const v1::UpdateOptions& options,
                                 v1::TransferMedium medium);
Fault CheckOptions(const v1::UpdateOptions& options, v1::TransferMedium medium);

class CoordinatorCore {
 public:
  CoordinatorCore(CoordinatorOptions options, JournalState recovered);

  Actions Start(absl::Time now);
  Actions OnReport(absl::Time now, const std::string& stream,
                   const v1::NodeReport& report);
  Actions OnDisconnected(absl::Time now, const std::string& stream);
  Actions OnTick(absl::Time now);
  Actions OnPrepareRequest(absl::Time now, int64_t request,
                           const v1::PrepareRequest& prepare);
  Actions OnAdminRequest(absl::Time now, int64_t request,
                         const AdminRequest& call);

  // For AdminService.Plan, of a registered model. Touches nothing.
  absl::StatusOr<PlanInputs> InputsOfPlan(const v1::PlanRequest& request) const;

  const std::string& cluster_id() const { return cluster_id_; }
  int64_t term() const { return term_; }
  CoordinatorCosts costs() const;

 private:
  friend class Queries;

  // ---- core.cc ----
  void Dispatch(NodeRun* node, const v1::NodeReport& report);
  void Hello(const std::string& stream, const v1::Hello& hello);
  Fault CheckHello(const v1::Hello& hello);
  void HelloDone(NodeRun* node);
  // Every connected node of its has said all that it has; and that noted for
  // all replicas with a part at the node.
  bool Named(const ReplicaRun& replica);
  void NoteNamed(const std::string& node);
  void Disconnected(NodeRun* node);
  // Everything on it is gone, its store too.
  void LoseNode(NodeRun* node, const Fault& fault);
  // What has a part at the node; `unsaid`: only what it has not named.
  void LoseParts(const NodeRun& node, const std::string& model, bool unsaid,
                 const Fault& fault);
  // What ended while the node may not have listened.
  void SendEnds(NodeRun* node);
  // What of what it holds is pinned, and what is not.
  void SendPins(const NodeRun& node);
  void Close(const std::string& stream, const Fault& fault);
  void JournalLost(const std::string& evidence);
  Fault LostFault() const;
  NodeRun* FindNode(const std::string& name);
  // Null unless its stream is up.
  NodeRun* ConnectedNode(const std::string& name);
  ModelRun* Model(const std::string& name);
  // The actions of this call, in order.
  Actions Take();
  // Another one, made in its place. Valid until the next.
  template <typename T>
  T* Add() {
    if (actions_.empty()) actions_.reserve(8);
    actions_.emplace_back(absl::in_place_type_t<T>());
    return &absl::get<T>(actions_.back());
  }
  // Sends to the node, or nowhere when its stream is down: what matters is said
  // again when it is back.
  v1::NodeCommand* SendTo(const std::string& node);
  v1::Reply* ReplyTo(const std::string& stream, int64_t correlation,
                     const Fault& fault);
  internal::v1::JournalRecord* Write();
  void Changed(const v1::Version& record);

  // ---- core_forget.cc ----
  void Forget();
  void ForgetReplicas(ModelRun* model);
  void ForgetNodes();
  // Layouts, keys of updates and needs of workers that nobody names.
  void ForgetUnnamed();

  // ---- core_members.cc ----
  void ClaimRank(NodeRun* node, int64_t correlation,
                 const v1::ClaimRank& claim);
  void RankShards(NodeRun* node, int64_t correlation,
                  const v1::RankShards& shards);
  void LoseRank(const std::string& model, int32_t rank,
                const std::string& session, const Fault& fault);
  void ReplicaJoined(NodeRun* node, int64_t correlation,
                     const v1::ReplicaJoined& joined);
  void WorkerJoined(NodeRun* node, int64_t correlation,
                    const v1::WorkerJoined& joined);
  void LoseControl(const std::string& model, const std::string& replica,
                   const std::string& incarnation, const Fault& fault);
  void LoseWorker(const std::string& model, const std::string& replica,
                  int worker, const std::string& incarnation,
                  const Fault& fault);
  void Refuse(const std::string& model, const std::vector<Refusal>& refusals);
  // The run of that incarnation, made anew when `is_new`.
  ReplicaRun* EnterReplica(const std::string& model, const std::string& replica,
                           const std::string& incarnation, size_t worker_count,
                           bool is_new);

  // ---- core_stale.cc ----
  // The replicas with a part at the node: it is away, and back.
  void NoteAway(const NodeRun& node);
  std::string MayServe(const ReplicaRun& replica) const;
  void NoteBack(const std::string& node);
  // STALE_REPLICA, for those whose node has been away for max_staleness.
  void FlagStale(ModelRun* model);

  // ---- core_publish.cc ----
  void PublishArrived(NodeRun* node, int64_t correlation,
                      const v1::PublishArrived& arrived);
  // True when the request_id had been seen, and was answered.
  bool AnswerRepeated(NodeRun* node, int64_t correlation,
                      const v1::PublishArrived& arrived);
  void JoinUpdate(UpdateRun* update, const PublishCall& call);
  void SendOpened(UpdateRun* update, const std::string& node,
                  const std::string& stream, int64_t correlation);
  void Disagree(ModelRun* model, const PublishBook::Decision& decision);
  void TryOpen(ModelRun* model);
  // Of a version that is opened: all but its ranks and replicas.
  std::unique_ptr<UpdateRun> NewRun(ModelRun* model,
                                    const std::string& update_id,
                                    std::shared_ptr<const KnownLayout> layout,
                                    const v1::UpdateOptions& options,
                                    int64_t version, int64_t step,
                                    absl::Time begin);
  void AddReplicas(const std::set<std::string>& replicas, ModelRun* model,
                   UpdateRun* update);
  // Whether what the ranks ask for can be had now: NO_RECOVERY_SOURCE,
  // ATOMIC_SWAP_REQUIRED.
  Fault CheckPossible(ModelRun* model, const v1::UpdateOptions& options,
                      const std::set<std::string>& replicas);
  // That an update has not ended, and who it waits for: "version 3 of models/m
  // is MOVING and waits for node n2".
  std::string StillRuns(const UpdateRun& update) const;
  void ExpirePublishes(ModelRun* model);
  void FailPublish(const Publish& publish);
  absl::StatusOr<std::shared_ptr<const KnownLayout>> LayoutOfNow(
      ModelRun* model, std::set<std::string>* replicas);
  void SendLayout(const KnownLayout& layout, const std::string& node);

  // ---- core_update.cc ----
  void Post(const UpdateRun& update, UpdateEvent event);
  // The same for the member with that name of every update that it is in.
  void PostNode(const std::string& node, UpdateEvent event);
  void PostReplica(const ReplicaRun& replica, UpdateEvent event);
  void DrainQueue();
  void Carry(ModelRun* model, UpdateRun* update,
             const std::vector<UpdateAction>& actions);
  void EnterPhase(UpdateRun* update, UpdatePhase phase);
  void MakeUpdateFlows(ModelRun* model, UpdateRun* update);
  void SendPrepare(ModelRun* model, UpdateRun* update, int node);
  void SendMove(ModelRun* model, UpdateRun* update, int node);
  void SendManifest(const UpdateRun& update, int node);
  void BeginStream(ModelRun* model, UpdateRun* update);
  // LATEST: `update` is complete behind an older one.
  void Supersede(ModelRun* model, const UpdateRun& update);
  void Commit(ModelRun* model, UpdateRun* update);
  void RankMayChange(UpdateRun* update, int32_t rank);
  void Finish(ModelRun* model, UpdateRun* update);
  void RankSnapshotted(const std::string& node,
                       const v1::RankSnapshotted& report);
  void UpdateProgress(const std::string& node,
                      const v1::UpdateProgress& report);
  void UpdatePrepared(const std::string& node,
                      const v1::UpdatePrepared& report);
  void UpdateVerified(const std::string& node,
                      const v1::UpdateVerified& report);
  // Null when it does not run; or is of an earlier term, which has no more to
  // do with nodes and ranks.
  UpdateRun* Running(const std::string& model, const std::string& update_id);
  v1::Version* FindRecord(ModelRun* model, const std::string& update_id);
  void EndPhase(UpdateRun* update, const std::string& next);

  // ---- core_replica.cc ----
  void Step(ReplicaRun* replica, const ReplicaEvent& event);
  bool MayRefuse(const ReplicaRun& replica, const ReplicaEntry& entry) const;
  void SendApply(ReplicaRun* replica, const ReplicaAction& action);
  void ReplicaPaused(const v1::ReplicaPausedReport& report);
  void WorkerApplied(const v1::WorkerAppliedReport& report);
  void ReplicaResumed(const v1::ReplicaResumedReport& report);
  ReplicaRun* FindReplica(const std::string& model, const std::string& replica,
                          const std::string& incarnation);
  WorkerContent ContentOf(const v1::InstalledState& installed);
  // The entry of its history for the update, made when there is none.
  v1::ReplicaTimes* Times(ReplicaRun* replica, UpdateKey update);
  void ShowTimes(ReplicaRun* replica);
  // What is known of an update by name, but for its digests; zeros for one
  // that was forgotten.
  CommittedUpdate Describe(const std::string& model, UpdateKey update) const;
  std::string CommandId(int64_t number) const;
  int64_t CommandNumber(const std::string& command_id) const;

  // ---- core_install.cc ----
  // What has to be done with a replica that is complete: nothing, a late join,
  // a repair, a rollback, a fence.
  void Settle(ReplicaRun* replica);
  void SettleAll(ModelRun* model);
  void FenceMix(ReplicaRun* replica);
  void StartInstall(ReplicaRun* replica, const CommittedUpdate& update);
  // Begins to install it where all bytes are there, or gives up where they
  // cannot be had now; true: they have to be fetched.
  bool FindBytes(ReplicaRun* replica, const CommittedUpdate& update);
  void HoldForInstall(ReplicaRun* replica);
  // What the replica shall have now: a key, kRemoval, or 0: nothing is wanted.
  UpdateKey WantedBy(const ReplicaRun& replica);
  // Buckets of the update that the replica's workers need and the stores of
  // their nodes lack, by node; false: it does not fit the update's layout.
  bool Missing(const ReplicaRun& replica, const CommittedUpdate& update,
               std::map<std::string, std::set<uint32_t>>* missing);
  // Of an install under way: a fetch runs, and what it brings is waited for.
  bool AwaitsFetch(const ReplicaRun& replica, UpdateKey update);
  // The replicas with a worker there.
  std::vector<ReplicaRun*> ReplicasOn(ModelRun* model, const std::string& node);
  // Something came to the node's store, or the node is back.
  void NodeHasNews(const std::string& node);
  void ForgetFailedEdges(const std::string& node);
  // A fetch over it, from and to, failed not long ago.
  bool EdgeFailed(const std::pair<std::string, std::string>& edge) const;
  // Who has something of the update and can send it to `target`, the nearest
  // first.
  std::vector<Holdings> HoldersFor(const CommittedUpdate& update,
                                   const std::string& target) const;
  // Null: none of them.
  static const NodeRun* HolderOf(const std::vector<Holdings>& holders,
                                 uint32_t bucket);
  // The first of the buckets that are missing, with the node that lacks it,
  // that nobody can send there; nullopt: all can be had.
  absl::optional<std::pair<std::string, uint32_t>> Unheld(
      const CommittedUpdate& update,
      const std::map<std::string, std::set<uint32_t>>& missing) const;
  bool AnyHolder(const CommittedUpdate& update) const;
  bool Drained(const ReplicaRun& replica) const;
  bool NodesConnected(const ReplicaRun& replica);
  void DropInstall(ReplicaRun* replica);
  // Its two halves: it is wanted no more, and does not hold the replica.
  void ForgetInstall(ReplicaRun* replica);
  void ReleaseInstall(ReplicaRun* replica, const Holder& holder);
  void InstallFailed(ReplicaRun* replica, const Fault& fault);
  void MarkLost(ModelRun* model, const std::string& update_id);
  void TryFetch(ModelRun* model);
  void SendFetchPrepare(ModelRun* model, const std::string& node);
  // A report about what the model fetches; false: about something else.
  bool FetchPrepared(ModelRun* model, const std::string& node,
                     const v1::UpdatePrepared& report);
  bool FetchVerified(ModelRun* model, const std::string& node,
                     const v1::UpdateVerified& report);
  bool FetchProgress(ModelRun* model, const std::string& node,
                     const v1::UpdateProgress& report);
  // `node` has no more part in the fetch; a holder ends it.
  void FetchFailed(ModelRun* model, const std::string& node,
                   const Fault& fault);
  void MoveFetch(ModelRun* model);
  void EndFetchOn(ModelRun* model, const FetchRun& fetch,
                  const std::string& name, const Fault& fault);
  void EndFetch(ModelRun* model);
  void TickFetch(ModelRun* model);
  // The node has said that it lacks bytes that were thought to be there.
  void ForgetHeld(NodeRun* node, const std::string& model,
                  const std::string& update_id);
  void Pin(ModelRun* model, const std::string& node,
           const std::string& update_id, bool pin);
  void SendPin(const std::string& model, const std::string& node,
               const std::string& update_id, bool pin);
  // Lets go of what nobody installs any more.
  void Unpin(ModelRun* model);

  // ---- core_admin.cc ----
  // Each answers, or leaves `wait` to be answered by CheckWaits.
  void PauseByHand(AdminWait wait, const v1::PauseReplicaRequest& call);
  void ResumeByHand(AdminWait wait, const v1::ResumeReplicaRequest& call);
  void ResetPatience(ModelRun* model);
  void Rollback(AdminWait wait, const v1::RollbackModelRequest& call);
  void Release(AdminWait wait, const v1::ReleaseModelRequest& call);
  void ReleaseHold(ModelRun* model);
  // Nobody has the bytes that a rollback which is waited for needs: it is
  // answered, and its hold is gone.
  bool RollbackIsLost(ModelRun* model, const AdminWait& wait);
  void Drain(AdminWait wait, const v1::DrainNodeRequest& call);
  void DeleteVersion(AdminWait wait, const v1::DeleteVersionRequest& call);
  void DeleteReplica(AdminWait wait, const v1::DeleteReplicaRequest& call);
  // The node gives its bytes up.
  void DropHeld(NodeRun* node, const std::string& model,
                const std::string& update_id);
  void Adopt(AdminWait wait, const v1::AdoptClusterRequest& call);
  // What a node of an adopted cluster says is known from now on.
  void LearnFrom(const v1::HeldUpdate& held);
  void LearnFloor(const std::string& model, const std::string& update_id,
                  int64_t version);
  void LearnInstalled(const std::string& model,
                      const v1::InstalledState& installed);
  // JOURNAL_LOST where an engine has what this journal never committed.
  void CheckInstalled(const v1::RegisterWorker& worker);
  void CheckWaits();
  absl::Duration Patience(bool given, const google::protobuf::Duration& said,
                          absl::Duration most) const;
  void Answer(const AdminWait& wait, absl::StatusOr<AdminResponse> response);
  // Who is not where a rollback or release wants all; empty: nobody.
  std::vector<std::string> NotThere(ModelRun* model);

  // ---- core_checkpoint.cc ----
  void Save(AdminWait wait, const v1::SaveVersionRequest& call);
  // Who holds which of the update's buckets; empty, with the fault, when nobody
  // that can be reached has one of them.
  std::vector<CheckpointRun::Writer> WritersOf(const CommittedUpdate& update,
                                               Fault* fault);
  void BeginCheckpoint(std::unique_ptr<CheckpointRun> run);
  void PostCheckpoint(const std::string& id, CheckpointEvent event);
  // Gives `writer` a command about it, to be said again until it is answered.
  void Command(CheckpointRun* run, int writer, v1::NodeCommand command);
  void GiveUpCheckpoint(CheckpointRun* run, int writer);
  void FillWrite(const CheckpointRun& run, v1::WriteCheckpoint* write);
  void FillComplete(const CheckpointRun& run, v1::CompleteCheckpoint* complete);
  void EndCheckpoint(CheckpointRun* run);
  void CheckpointWritten(const v1::CheckpointWritten& report);
  void TickCheckpoints();
  // The node is back, or lost.
  void SayCheckpointsAgain(const std::string& node);
  void LoseCheckpoints(const std::string& node, const Fault& fault);
  // An update by way of disk.
  void GoByDisk(ModelRun* model, UpdateRun* update);
  void SendDiskPrepare(ModelRun* model, UpdateRun* update, int node);
  void SendDiskMove(ModelRun* model, UpdateRun* update, int node);
  void NoteCopied(const UpdateRun& update);
  // Says of ended versions that their checkpoints were removed.
  void ForgetPruned(ModelRun* model, const std::set<std::string>& busy);
  void EndDisk(ModelRun* model, UpdateRun* update, bool active);

  // ---- core_load.cc ----
  void Load(AdminWait wait, const v1::LoadVersionRequest& call);
  void CheckpointRead(const std::string& node,
                      const v1::CheckpointRead& report);
  void SendRead(const LoadRun& load);
  // Opens the first load that waits, if it can be now.
  void TryLoad(ModelRun* model);
  void OpenLoad(ModelRun* model, const LoadRun& load);
  void FailLoad(ModelRun* model, const std::string& id, const Fault& fault);
  void TickLoads(ModelRun* model);
  void LoadDigests(const std::string& node, UpdateRun* update,
                   const v1::RankSnapshotted& report);
  // True when it was answered.
  bool FinishLoad(AdminWait* wait);

  // ---- core_remove.cc ----
  void Remove(AdminWait wait, const v1::RemoveModelRequest& call);
  void StartRemoval(ReplicaRun* replica);
  // That it has not been committed, as far as anybody knows.
  // An update that ended is known to nodes alone from now on.
  void NoteForgotten(const v1::Version& version, ModelRun* model);
  void SayUnknown(const std::string& node, const std::string& model,
                  const std::string& update_id);
  void SendRemove(ReplicaRun* replica, const ReplicaAction& action);
  // True when it was answered.
  bool FinishRemove(ModelRun* model, const AdminWait& wait);

  // ---- core_verify.cc ----
  void Verify(AdminWait wait, const v1::VerifyReplicaRequest& call);
  void WorkerDigests(const v1::WorkerDigests& report);
  // True when it was answered.
  bool FinishVerify(AdminWait* wait);

  // ---- core_prepare.cc ----
  void DryPrepared(ModelRun* model, const std::string& node,
                   const v1::UpdatePrepared& report);
  void TickPrepare(ModelRun* model);
  void EndPrepare(ModelRun* model, const Fault& fault);

  // ---- core_plan.cc ----
  // The inputs of a layout of now; `replicas` are those in it. REQUIRES: the
  // model can be published.
  v1::DefineLayout LayoutInputNow(const ModelRun& model,
                                  std::set<std::string>* replicas) const;
  // Chooses how the update is sent, and what to expect. REQUIRES: its layout.
  absl::Status PlanRun(v1::TransferPolicy policy, UpdateRun* update);
  // The policy that the next update will most likely ask for: that of the
  // publish whose ranks arrive, else the one asked for last.
  static v1::TransferPolicy NextPolicy(const ModelRun& model);
  void ShowPrediction(const UpdateRun& update, v1::PhaseTime* phase) const;
  // Adds "snapshot" to the record when every rank was copied.
  void ShowSnapshotPhase(UpdateRun* update);
  void LearnRates(const UpdateRun& update);

  // ---- core_recovery.cc ----
  void Recover(const std::string& name, const JournalModel& journal);

  UpdateKey KeyOf(const std::string& update_id);
  // 0 for one that has no key.
  UpdateKey FindKey(const std::string& update_id) const;
  const std::string& IdOf(UpdateKey key) const;

  const CoordinatorOptions options_;
  const ReplicaTimeouts replica_timeouts_;
  JournalState journal_;  // requests are kept up to date, the rest is as found
  std::string cluster_id_;
  // Of the ids of commands to replicas: of this life of this coordinator alone.
  // A term does not do: one that has lost its journal counts from 1 again.
  std::string command_prefix_;
  // ReplicaRuns that were begun: each counts its commands from another number
  // on, so that none of one replica has the number of another before it.
  int64_t replica_runs_ = 0;
  int64_t term_ = 0;
  // The journal was empty at the start, and no update was committed since by a
  // cluster of several nodes: it may be one that was lost.
  bool fresh_ = false;
  std::string lost_evidence_;
  // While that is set: the clusters whose nodes came, and the newest term that
  // they, or our own, have seen.
  std::set<std::string> seen_clusters_;
  int64_t seen_term_ = 0;
  // Until then nodes of an adopted cluster say what there is, and nothing is
  // opened.
  absl::Time adopting_until_ = absl::InfinitePast();
  absl::Time start_time_;

  absl::Time now_;
  Actions actions_;
  struct Posted {
    std::string model;
    UpdateKey update = 0;
    UpdateEvent event;
  };
  std::deque<Posted> queue_;
  // Replicas that have just become complete, (model, name): they are told what
  // is wanted of them when the queue is empty, for an update may want them.
  std::deque<std::pair<std::string, std::string>> complete_;

  Registry registry_;
  RateBook rates_;
  std::map<std::string, NodeRun> nodes_;
  std::map<std::string, std::string> streams_;  // stream -> node
  std::map<std::string, ModelRun> models_;
  std::map<std::string, std::shared_ptr<const KnownLayout>> layouts_;
  // Numbers of updates by the word of workers that hold them: a record may be
  // gone before the last replica that serves it.
  std::map<UpdateKey, int64_t> told_versions_;
  // Update ids by key; 0 is "". Those that nothing names any more are trimmed.
  std::map<UpdateKey, std::string> ids_;
  std::map<std::string, UpdateKey> keys_;
  UpdateKey next_key_ = 1;
  std::vector<AdminWait> waits_;
  std::map<std::string, std::unique_ptr<CheckpointRun>> checkpoints_;
  // (from, to) that a fetch failed over, with when: for a while other holders
  // are tried first.
  std::map<std::pair<std::string, std::string>, absl::Time> failed_edges_;
  NeedBook needs_;
  int64_t missing_computed_ = 0;
  int64_t collections_ = 0;
  absl::Time forget_time_ = absl::InfinitePast();
  int64_t next_verify_ = 1;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_CORE_H_
