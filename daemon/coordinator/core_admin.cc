// What operators ask for. Holds are journalled before anybody is told.

#include <algorithm>
#include <functional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// An adopted cluster's term is one of so many above what is known.
constexpr size_t kAdoptionTerms = size_t{1} << 20;

absl::Status Error(StatusCode code, absl::string_view reason,
                   absl::string_view message) {
  return ErrorStatus(code, reason, message);
}

// "models/{model}" of a longer name.
std::string ModelOf(const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  return parts.size() < 2 ? name : absl::StrCat(parts[0], "/", parts[1]);
}

}  // namespace

Actions CoordinatorCore::OnAdminRequest(absl::Time now, int64_t request,
                                        const AdminRequest& call) {
  now_ = now;
  actions_.clear();
  AdminWait wait;
  wait.request = request;
  wait.call = call;
  wait.deadline = now + options_.operation_timeout;
  struct Visitor {
    CoordinatorCore* core;
    AdminWait wait;
    void operator()(const v1::PauseReplicaRequest& c) {
      core->PauseByHand(wait, c);
    }
    void operator()(const v1::ResumeReplicaRequest& c) {
      core->ResumeByHand(wait, c);
    }
    void operator()(const v1::RollbackModelRequest& c) {
      core->Rollback(wait, c);
    }
    void operator()(const v1::ReleaseModelRequest& c) {
      core->Release(wait, c);
    }
    void operator()(const v1::VerifyReplicaRequest& c) {
      core->Verify(wait, c);
    }
    void operator()(const v1::DrainNodeRequest& c) { core->Drain(wait, c); }
    void operator()(const v1::DeleteVersionRequest& c) {
      core->DeleteVersion(wait, c);
    }
    void operator()(const v1::DeleteReplicaRequest& c) {
      core->DeleteReplica(wait, c);
    }
    void operator()(const v1::RemoveModelRequest& c) { core->Remove(wait, c); }
    void operator()(const v1::AdoptClusterRequest& c) { core->Adopt(wait, c); }
    void operator()(const v1::SaveVersionRequest& c) { core->Save(wait, c); }
    void operator()(const v1::LoadVersionRequest& c) { core->Load(wait, c); }
  };
  // Nothing is decided on a journal that knows too little.
  if (!lost_evidence_.empty() &&
      !absl::holds_alternative<v1::AdoptClusterRequest>(call)) {
    Answer(wait, ToStatus(LostFault()));
  } else {
    absl::visit(Visitor{this, wait}, call);
  }
  DrainQueue();
  CheckWaits();
  return Take();
}

absl::Duration CoordinatorCore::Patience(bool given,
                                         const google::protobuf::Duration& said,
                                         absl::Duration most) const {
  const absl::Duration asked = FromProto(said);
  return given && asked > absl::ZeroDuration() ? std::min(asked, most) : most;
}

void CoordinatorCore::Answer(const AdminWait& wait,
                             absl::StatusOr<AdminResponse> response) {
  AdminDone done;
  done.request = wait.request;
  if (response.ok()) {
    done.response = *std::move(response);
  } else {
    done.failure =
        ToProto(Fault(response.status().code(), ErrorReason(response.status()),
                      std::string(response.status().message())));
  }
  actions_.push_back(std::move(done));
}

// ---- Pausing by hand ----

void CoordinatorCore::PauseByHand(AdminWait wait,
                                  const v1::PauseReplicaRequest& call) {
  const auto shown = Queries(*this).GetReplica(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  if (call.mode() == v1::PAUSE_MODE_NONE ||
      !v1::PauseMode_IsValid(call.mode())) {
    return Answer(wait,
                  Error(StatusCode::kInvalidArgument, "PAUSE_MODE_INVALID",
                        "a pause by hand stops the engine: say ABORT, "
                        "DRAIN or KEEP"));
  }
  wait.model = ModelOf(call.name());
  wait.replica = call.name().substr(call.name().rfind('/') + 1);
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(wait.model);
  if (model->held_replicas.insert(wait.replica).second) {
    auto* hold = Write()->mutable_hold_placed();
    hold->set_model(wait.model);
    hold->set_replica(wait.replica);
    *hold->mutable_time() = ToProto(now_);
  }
  ReplicaEvent event;
  event.kind = ReplicaEvent::kHold;
  event.holder = Holder{Holder::kOperator, 0, PauseOf(call.mode())};
  Step(&model->replicas.at(wait.replica), event);
  waits_.push_back(std::move(wait));
}

void CoordinatorCore::ResumeByHand(AdminWait wait,
                                   const v1::ResumeReplicaRequest& call) {
  const auto shown = Queries(*this).GetReplica(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  wait.model = ModelOf(call.name());
  wait.replica = call.name().substr(call.name().rfind('/') + 1);
  wait.deadline =
      now_ + std::min(options_.operation_timeout, options_.resume_timeout);
  ModelRun* model = Model(wait.model);
  if (model->held_replicas.erase(wait.replica) != 0) {
    auto* hold = Write()->mutable_hold_released();
    hold->set_model(wait.model);
    hold->set_replica(wait.replica);
    *hold->mutable_time() = ToProto(now_);
  }
  ReplicaRun* replica = &model->replicas.at(wait.replica);
  ReplicaEvent event;
  event.kind = ReplicaEvent::kRelease;
  event.holder = Holder{Holder::kOperator, 0};
  Step(replica, event);
  Settle(replica);
  waits_.push_back(std::move(wait));
}

// What was tried in vain is tried at once: an operator has changed something.
void CoordinatorCore::ResetPatience(ModelRun* model) {
  for (auto& entry : model->replicas) {
    entry.second.given_up = 0;
    entry.second.fetch_failures = 0;
    entry.second.not_before = absl::InfinitePast();
  }
}

// ---- Rollback ----

void CoordinatorCore::Rollback(AdminWait wait,
                               const v1::RollbackModelRequest& call) {
  const auto shown = Queries(*this).GetVersion(call.version(), "", now_);
  if (!shown.ok()) return Answer(wait, shown.status());
  wait.model = ModelOf(call.version());
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(wait.model);
  const CommittedUpdate* target = nullptr;
  for (const CommittedUpdate& commit : model->commits) {
    if (commit.version == shown->version()) target = &commit;
  }
  if (target == nullptr) {
    return Answer(
        wait, Error(StatusCode::kFailedPrecondition, "VERSION_NOT_COMMITTED",
                    absl::StrCat(call.version(),
                                 " was never committed, or too long ago: the "
                                 "newest ",
                                 kOlderCommits + 1, " are known")));
  }
  wait.update = KeyOf(target->update_id);
  bool anybody = false;
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    anybody = anybody || (replica.machine.Complete() && !Drained(replica));
    if (!replica.machine.Complete() || Drained(replica) ||
        replica.machine.InstalledEverywhere(wait.update)) {
      continue;
    }
    std::map<std::string, std::set<uint32_t>> missing;
    if (Missing(replica, *target, &missing) &&
        !Unheld(*target, missing).has_value()) {
      continue;
    }
    return Answer(
        wait, Error(StatusCode::kFailedPrecondition, "NO_HOLDER",
                    absl::StrCat("no node holds what ", replica.machine.name,
                                 " needs of ", call.version(),
                                 " any more; nothing was changed")));
  }
  // After a restart nobody may have come yet whose needs could be looked at.
  if (!anybody && (target->layout == nullptr || !AnyHolder(*target))) {
    return Answer(
        wait, Error(StatusCode::kFailedPrecondition, "NO_HOLDER",
                    absl::StrCat("no replica of ", wait.model,
                                 " is here, and no node that is holds what ",
                                 "one would need of ", call.version(),
                                 "; nothing was changed; try again when they "
                                 "have come")));
  }
  if (model->held_update_id != target->update_id) {
    auto* hold = Write()->mutable_hold_placed();
    hold->set_model(wait.model);
    hold->set_update_id(target->update_id);
    hold->set_version(target->version);
    *hold->mutable_time() = ToProto(now_);
    model->held_update_id = target->update_id;
  }
  // Replicas that have a part in an update which runs are taken back when it
  // has ended; updates that begin from now on have no replicas. Newer ones
  // shall not push it out of the stores.
  for (const auto& entry : nodes_) {
    if (entry.second.Holds(model->held_update_id)) {
      Pin(model, entry.first, model->held_update_id, true);
    }
  }
  ResetPatience(model);
  SettleAll(model);
  waits_.push_back(std::move(wait));
}

void CoordinatorCore::Release(AdminWait wait,
                              const v1::ReleaseModelRequest& call) {
  const auto shown = Queries(*this).GetModel(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  wait.model = call.name();
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(wait.model);
  ReleaseHold(model);
  waits_.push_back(std::move(wait));
}

void CoordinatorCore::ReleaseHold(ModelRun* model) {
  if (model->held_update_id.empty()) return;
  auto* hold = Write()->mutable_hold_released();
  hold->set_model(model->name);
  *hold->mutable_time() = ToProto(now_);
  model->held_update_id.clear();
  Unpin(model);
  ResetPatience(model);
  SettleAll(model);
}

bool CoordinatorCore::RollbackIsLost(ModelRun* model, const AdminWait& wait) {
  const CommittedUpdate* target = model->FindCommit(IdOf(wait.update));
  if (target != nullptr && !target->lost) return false;
  // Looked for when it was asked for, and evicted before the pin came. A call
  // that fails leaves no hold behind that nobody knows of.
  if (model->held_update_id == IdOf(wait.update)) {
    ReleaseHold(model);
    DrainQueue();
  }
  Answer(wait, Error(StatusCode::kFailedPrecondition, "NO_HOLDER",
                     absl::StrCat("the last node that had what ", wait.model,
                                  " was to be rolled back to has evicted it "
                                  "meanwhile; the rollback is taken back, and "
                                  "replicas get the newest version")));
  return true;
}

namespace {

// How far a replica has come on the way to an update, for people.
std::string Standing(const ReplicaRun& replica, UpdateKey key) {
  const ReplicaState& machine = replica.machine;
  if (machine.InstalledEverywhere(key)) return "has it, and does not run yet";
  if (replica.installing == key) {
    if (machine.target == key) return "its workers install it";
    const Holder hold{Holder::kInstall, key};
    return machine.HeldBy(hold) && !machine.PausedForAll()
               ? "its engine is asked to pause"
               : "its nodes fetch it";
  }
  const v1::Failure& failure = replica.last_failure;
  if (failure.reason().empty()) return "not begun";
  return absl::StrCat("tried again, after ", failure.reason(), ": ",
                      failure.message());
}

}  // namespace

std::vector<std::string> CoordinatorCore::NotThere(ModelRun* model) {
  std::vector<std::string> names;
  const CommittedUpdate* wanted = model->Wanted();
  if (wanted == nullptr) return names;
  const UpdateKey key = KeyOf(wanted->update_id);
  for (const auto& entry : model->replicas) {
    const ReplicaState& machine = entry.second.machine;
    if (!machine.Complete() || Drained(entry.second)) continue;
    const bool held_by_us = std::any_of(
        machine.holders.begin(), machine.holders.end(), [](const Holder& h) {
          return h.kind == Holder::kInstall || h.kind == Holder::kUpdate;
        });
    const bool runs =
        machine.engine == EngineState::kRunning || !machine.holders.empty();
    if (!machine.InstalledEverywhere(key) || held_by_us || !runs) {
      names.push_back(
          absl::StrCat(machine.name, " (", Standing(entry.second, key), ")"));
    }
  }
  return names;
}

// ---- Nodes, versions, replicas ----

void CoordinatorCore::Drain(AdminWait wait, const v1::DrainNodeRequest& call) {
  const auto shown = Queries(*this).GetNode(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  const std::string name = call.name().substr(6);
  NodeRun* node = FindNode(name);
  if (node->draining == call.undo()) {
    node->draining = !call.undo();
    auto* drained = Write()->mutable_node_drained();
    drained->set_node(name);
    drained->set_drained(!call.undo());
    if (call.undo()) {
      journal_.drained.erase(name);
    } else {
      journal_.drained.insert(name);
    }
    for (auto& model : models_) {
      // What was looked for in vain may be on this node.
      if (call.undo()) ResetPatience(&model.second);
      SettleAll(&model.second);
    }
  }
  Answer(wait, *Queries(*this).GetNode(call.name()));
}

void CoordinatorCore::DeleteVersion(AdminWait wait,
                                    const v1::DeleteVersionRequest& call) {
  const auto shown = Queries(*this).GetVersion(call.name(), "", now_);
  if (!shown.ok()) return Answer(wait, shown.status());
  ModelRun* model = Model(ModelOf(call.name()));
  const std::string update_id = shown->update_id();
  const UpdateKey key = FindKey(update_id);
  std::string user;
  if (model->FindUpdate(update_id) != nullptr) user = "it still runs";
  if (model->Newest().update_id == update_id) user = "it is the active one";
  if (model->held_update_id == update_id) user = "a rollback holds it";
  for (const auto& entry : model->replicas) {
    const ReplicaState& machine = entry.second.machine;
    const bool has =
        std::any_of(machine.workers.begin(), machine.workers.end(),
                    [key](const ReplicaWorker& worker) {
                      return worker.present && worker.content.update == key;
                    });
    if (key != 0 && has) user = absl::StrCat(machine.name, " serves it");
  }
  if (!user.empty()) {
    return Answer(
        wait, Error(StatusCode::kFailedPrecondition, "VERSION_IN_USE",
                    absl::StrCat(shown->name(), " cannot be deleted: ", user)));
  }
  auto* deleted = Write()->mutable_version_deleted();
  deleted->set_model(model->name);
  deleted->set_update_id(update_id);
  for (auto& entry : nodes_) {
    if (entry.second.Holds(update_id)) {
      DropHeld(&entry.second, model->name, update_id);
    }
  }
  // A rank of a node that is away may wait to be told (IN_PLACE).
  NoteForgotten(*shown, model);
  model->commits.erase(
      std::remove_if(model->commits.begin(), model->commits.end(),
                     [&](const CommittedUpdate& commit) {
                       return commit.update_id == update_id;
                     }),
      model->commits.end());
  model->ended.erase(std::remove_if(model->ended.begin(), model->ended.end(),
                                    [&](const v1::Version& version) {
                                      return version.update_id() == update_id;
                                    }),
                     model->ended.end());
  Answer(wait, v1::DeleteVersionResponse());
}

void CoordinatorCore::DropHeld(NodeRun* node, const std::string& model,
                               const std::string& update_id) {
  v1::DropUpdate* drop = SendTo(node->name)->mutable_drop_update();
  drop->set_model(model);
  drop->set_update_id(update_id);
  ForgetHeld(node, model, update_id);
}

void CoordinatorCore::DeleteReplica(AdminWait wait,
                                    const v1::DeleteReplicaRequest& call) {
  const auto shown = Queries(*this).GetReplica(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  ModelRun* model = Model(ModelOf(call.name()));
  const std::string name = call.name().substr(call.name().rfind('/') + 1);
  const ReplicaEntry* entry = registry_.FindReplica(model->name, name);
  if (entry != nullptr && !entry->Empty()) {
    return Answer(
        wait, Error(StatusCode::kFailedPrecondition, "REPLICA_ALIVE",
                    absl::StrCat(call.name(), " is alive as incarnation ",
                                 entry->incarnation, " on node ", entry->node,
                                 "; end it first")));
  }
  if (model->held_replicas.erase(name) != 0) {
    auto* hold = Write()->mutable_hold_released();
    hold->set_model(model->name);
    hold->set_replica(name);
    *hold->mutable_time() = ToProto(now_);
  }
  registry_.ForgetReplica(model->name, name);
  model->replicas.erase(name);
  Answer(wait, v1::DeleteReplicaResponse());
}

// ---- A journal that was lost ----

void CoordinatorCore::Adopt(AdminWait wait,
                            const v1::AdoptClusterRequest& call) {
  if (lost_evidence_.empty()) {
    return Answer(wait, Error(StatusCode::kFailedPrecondition, "NOT_LOST",
                              "this coordinator's journal is not lost; there "
                              "is nothing to adopt"));
  }
  if (seen_clusters_.empty()) {
    return Answer(wait,
                  Error(StatusCode::kUnavailable, "NO_NODE_SEEN",
                        "no node that knows more has come since this "
                        "coordinator was started; try again when one has"));
  }
  std::string cluster = call.cluster_id();
  // Other nodes than the coordinator's own are of this cluster already: it may
  // be the stranger who is not meant.
  const auto ours = std::count_if(
      nodes_.begin(), nodes_.end(),
      [](const auto& entry) { return !entry.second.stream.empty(); });
  if (cluster.empty() && seen_clusters_.size() == 1 &&
      (ours < 2 || *seen_clusters_.begin() == cluster_id_)) {
    cluster = *seen_clusters_.begin();
  }
  // Its own: whoever came is a stranger.
  if (seen_clusters_.count(cluster) == 0 && cluster != cluster_id_) {
    return Answer(wait,
                  Error(StatusCode::kInvalidArgument, "CLUSTER_MISMATCH",
                        absl::StrCat("the nodes that came belong to cluster ",
                                     absl::StrJoin(seen_clusters_, ", "), ", ",
                                     ours, " others to this one, ", cluster_id_,
                                     "; name the one to adopt")));
  }
  LOG(WARNING) << "adopting cluster " << cluster
               << " after: " << lost_evidence_;
  // Nodes that have not come may have followed a higher term than those that
  // have. One of theirs given out again would be taken for it, and commands for
  // those that were answered then: nobody knows this one.
  term_ = std::max(term_, seen_term_) + 1 +
          static_cast<int64_t>(std::hash<std::string>()(options_.random_id()) %
                               kAdoptionTerms);
  auto* adopted = Write()->mutable_adopted();
  adopted->set_cluster_id(cluster);
  adopted->set_term(term_);
  *adopted->mutable_time() = ToProto(now_);
  journal_.adopted_term = term_;
  journal_.former_clusters.insert(cluster_id_);
  journal_.former_clusters.erase(cluster);
  cluster_id_ = cluster;
  fresh_ = false;
  lost_evidence_.clear();
  seen_clusters_.clear();
  seen_term_ = term_;
  adopting_until_ = now_ + options_.recovery_timeout;
  // Everybody says hello again, and learns the term and the cluster.
  for (auto& entry : nodes_) {
    if (entry.second.stream.empty()) continue;
    const std::string stream = entry.second.stream;
    Disconnected(&entry.second);
    Close(stream, Fault(StatusCode::kUnavailable, "CLUSTER_ADOPTED",
                        "the coordinator adopted a cluster; say hello again"));
  }
  v1::Cluster cluster_shown;
  Queries(*this).FillCluster(&cluster_shown);
  Answer(wait, std::move(cluster_shown));
}

void CoordinatorCore::LearnFrom(const v1::HeldUpdate& held) {
  if (now_ >= adopting_until_) return;
  LearnFloor(held.model(), held.update_id(), held.version());
}

void CoordinatorCore::LearnFloor(const std::string& name,
                                 const std::string& update_id,
                                 int64_t version) {
  if (!IsResourceName("models", name)) return;
  ModelRun* model = Model(name);
  registry_.AddModel(name);
  if (version <= model->book.floor()) return;
  const auto outdated = model->book.RaiseFloor(version);
  if (outdated.has_value()) FailPublish(*outdated);
  auto* opened = Write()->mutable_update_opened();
  opened->set_model(name);
  opened->set_update_id(update_id);
  opened->set_version(version);
  opened->set_publish_index(model->book.newest_index());
  opened->set_learned(true);
  *opened->mutable_time() = ToProto(now_);
}

void CoordinatorCore::LearnInstalled(const std::string& name,
                                     const v1::InstalledState& installed) {
  if (now_ >= adopting_until_ || installed.update_id().empty() ||
      installed.state() != v1::InstalledState::STATE_INSTALLED) {
    return;
  }
  LearnFloor(name, installed.update_id(), installed.version());
  ModelRun* model = Model(name);
  if (installed.version() <= model->Newest().version) return;
  // Nobody installs what was not committed. How it was laid out is not known:
  // it is served, and cannot be given to others.
  CommittedUpdate commit;
  commit.update_id = installed.update_id();
  commit.version = installed.version();
  model->commits.push_back(commit);
  model->removed = false;
  auto* committed = Write()->mutable_update_committed();
  committed->set_model(name);
  committed->set_update_id(commit.update_id);
  committed->set_version(commit.version);
  committed->set_learned(true);
  *committed->mutable_time() = ToProto(now_);
  v1::Version record;
  record.set_name(absl::StrCat(name, "/versions/", commit.version));
  record.set_version(commit.version);
  record.set_update_id(commit.update_id);
  record.set_state(v1::Version::STATE_ACTIVE);
  model->ended.push_back(std::move(record));
}

void CoordinatorCore::CheckInstalled(const v1::RegisterWorker& worker) {
  const v1::InstalledState& installed = worker.installed();
  // A cluster of which all is new knows nothing of the engines it meets.
  if (fresh_ || installed.update_id().empty() ||
      installed.state() != v1::InstalledState::STATE_INSTALLED) {
    return;
  }
  const ModelRun* model = Model(worker.model());
  // Of a model that was removed nothing is known but how far it had come.
  const int64_t newest =
      model->removed ? model->book.floor() : model->Newest().version;
  if (installed.version() <= newest) return;
  // A commit is journalled before anybody installs it: this is a journal of
  // some time ago, and what it would install is older.
  JournalLost(absl::StrCat("worker ", worker.worker_index(), " of ",
                           worker.model(), "/replicas/", worker.replica(),
                           " holds version ", installed.version(),
                           ", the newest that this journal knows to be "
                           "committed is ",
                           newest));
  seen_clusters_.insert(cluster_id_);
}

// ---- Waiting ----

namespace {

// What an engine answered instead of doing what it was asked to.
std::string SaidNo(const ReplicaState& machine) {
  if (machine.fault.ok() || (machine.engine != EngineState::kDoubtful &&
                             machine.engine != EngineState::kUnresumed)) {
    return "";
  }
  return absl::StrCat(" (", machine.fault.reason, ": ", machine.fault.message,
                      ")");
}

}  // namespace

void CoordinatorCore::CheckWaits() {
  const auto done = [&](AdminWait* wait) {
    const bool late = now_ >= wait->deadline;
    if (absl::holds_alternative<v1::VerifyReplicaRequest>(wait->call)) {
      return FinishVerify(wait);
    }
    if (absl::holds_alternative<v1::LoadVersionRequest>(wait->call)) {
      return FinishLoad(wait);
    }
    // Answered when its checkpoint has ended.
    if (absl::holds_alternative<v1::SaveVersionRequest>(wait->call)) {
      return checkpoints_.count(wait->job) == 0;
    }
    ModelRun* model = Model(wait->model);
    if (absl::holds_alternative<v1::RemoveModelRequest>(wait->call)) {
      return FinishRemove(model, *wait);
    }
    if (absl::holds_alternative<v1::RollbackModelRequest>(wait->call) ||
        absl::holds_alternative<v1::ReleaseModelRequest>(wait->call)) {
      if (absl::holds_alternative<v1::RollbackModelRequest>(wait->call) &&
          RollbackIsLost(model, *wait)) {
        return true;
      }
      const std::vector<std::string> names = NotThere(model);
      if (names.empty()) {
        Answer(*wait, *Queries(*this).GetModel(wait->model));
      } else if (late) {
        Answer(*wait, Error(StatusCode::kDeadlineExceeded, "ROLLBACK_TIMEOUT",
                            absl::StrCat("it goes on; not there yet: ",
                                         absl::StrJoin(names, ", "))));
      }
      return names.empty() || late;
    }
    const std::string name =
        absl::StrCat(wait->model, "/replicas/", wait->replica);
    auto it = model->replicas.find(wait->replica);
    if (it == model->replicas.end()) {
      Answer(*wait, Error(StatusCode::kNotFound, "REPLICA_UNKNOWN",
                          absl::StrCat(name, " was forgotten meanwhile")));
      return true;
    }
    const ReplicaState& machine = it->second.machine;
    if (absl::holds_alternative<v1::PauseReplicaRequest>(wait->call)) {
      if (machine.Complete() && machine.PausedForAll()) {
        Answer(*wait, *Queries(*this).GetReplica(name));
        return true;
      }
      if (!machine.Complete()) {
        Answer(*wait, Error(StatusCode::kUnavailable, "REPLICA_LOST",
                            absl::StrCat(name,
                                         " is not whole now; it is held, and "
                                         "is paused when it comes, until "
                                         "`weightsyncctl resume`")));
        return true;
      }
      if (late) {
        Answer(*wait,
               Error(StatusCode::kDeadlineExceeded, "PAUSE_TIMEOUT",
                     absl::StrCat(name, " is held, but its engine has not ",
                                  "said that it paused", SaidNo(machine),
                                  "; it is held until `weightsyncctl "
                                  "resume`")));
      }
      return late;
    }
    // A resume: it runs, or somebody else holds it.
    if (machine.engine == EngineState::kRunning || !machine.holders.empty() ||
        !machine.Complete() || machine.fenced) {
      Answer(*wait, *Queries(*this).GetReplica(name));
      return true;
    }
    if (late) {
      Answer(*wait,
             Error(StatusCode::kDeadlineExceeded, "RESUME_TIMEOUT",
                   absl::StrCat(name, " is held no more, but its engine has ",
                                "not said that it runs again", SaidNo(machine),
                                "; look at its log")));
    }
    return late;
  };
  std::vector<AdminWait> waiting;
  waiting.swap(waits_);
  for (AdminWait& wait : waiting) {
    if (!done(&wait)) waits_.push_back(std::move(wait));
  }
}

}  // namespace daemon
}  // namespace weightsync
