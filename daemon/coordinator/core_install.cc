// Install an update from a holder: one operation for late joins, repairs and
// rollbacks. Where the stores of a replica's nodes have all that its workers
// need, the replica is held, its workers are told to install, and it is
// released. Where they do not, the buckets that are missing come first
// (core_fetch.cc).

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr absl::Duration kFirstRetry = absl::Seconds(5);
constexpr absl::Duration kLastRetry = absl::Minutes(1);

}  // namespace

// ---- What a replica needs ----

bool CoordinatorCore::Drained(const ReplicaRun& replica) const {
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  if (entry == nullptr) return false;
  return std::any_of(entry->workers.begin(), entry->workers.end(),
                     [this](const WorkerEntry& worker) {
                       return journal_.drained.count(worker.node) != 0;
                     });
}

bool CoordinatorCore::NodesConnected(const ReplicaRun& replica) {
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  return std::all_of(entry->workers.begin(), entry->workers.end(),
                     [this](const WorkerEntry& worker) {
                       return ConnectedNode(worker.node) != nullptr;
                     });
}

Holdings::Holdings(const NodeRun& node, const CommittedUpdate& update)
    : node_(&node),
      update_(&update),
      any_(!node.lost && node.Holds(update.update_id)) {
  if (!any_) return;
  const auto fetched = node.fetched.find(update.update_id);
  if (fetched != node.fetched.end()) fetched_ = &fetched->second;
  const auto index = update.layout->node_index.find(node.name);
  if (index != update.layout->node_index.end()) index_ = index->second;
}

bool Holdings::Has(uint32_t bucket) const {
  if (!any_) return false;
  if (fetched_ != nullptr && fetched_->count(bucket) != 0) return true;
  if (index_ < 0) return false;
  const auto& plan = update_->layout->layout.plan;
  if (update_->SourcesHold() && plan.bucket(bucket).source_node == index_) {
    return true;
  }
  // Ascending.
  const auto& needed = plan.need_nodes(bucket);
  return update_->ReceiversHold() &&
         std::binary_search(needed.begin(), needed.end(), index_);
}

bool CoordinatorCore::AnyHolder(const CommittedUpdate& update) const {
  for (const auto& entry : nodes_) {
    const NodeRun& node = entry.second;
    if (!node.lost && node.Holds(update.update_id)) return true;
  }
  return false;
}

bool CoordinatorCore::Missing(
    const ReplicaRun& replica, const CommittedUpdate& update,
    std::map<std::string, std::set<uint32_t>>* missing) {
  missing->clear();
  if (update.layout == nullptr) return false;
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  ++missing_computed_;
  for (const WorkerEntry& worker : entry->workers) {
    const NodeRun* node = ConnectedNode(worker.node);
    if (node == nullptr) return false;
    const auto& needed = needs_.Of(*update.layout, worker);
    if (!needed.has_value()) return false;
    const Holdings holdings(*node, update);
    for (const uint32_t bucket : *needed) {
      if (!holdings.Has(bucket)) (*missing)[node->name].insert(bucket);
    }
  }
  return true;
}

bool CoordinatorCore::AwaitsFetch(const ReplicaRun& replica, UpdateKey update) {
  const FetchRun* fetch = Model(replica.model)->fetch.get();
  return replica.lacks && replica.installing == update && fetch != nullptr &&
         fetch->update == update;
}

std::vector<ReplicaRun*> CoordinatorCore::ReplicasOn(ModelRun* model,
                                                     const std::string& node) {
  std::vector<ReplicaRun*> on_it;
  for (auto& entry : model->replicas) {
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    if (replica != nullptr &&
        std::any_of(replica->workers.begin(), replica->workers.end(),
                    [&node](const WorkerEntry& w) { return w.node == node; })) {
      on_it.push_back(&entry.second);
    }
  }
  return on_it;
}

void CoordinatorCore::NodeHasNews(const std::string& node) {
  for (auto& entry : models_) {
    for (ReplicaRun* replica : ReplicasOn(&entry.second, node)) {
      replica->lacks = false;
    }
  }
}

// ---- What is done about it ----

void CoordinatorCore::Settle(ReplicaRun* replica) {
  // What a journal that knows too little wants installed may be older than what
  // is there. After AdoptCluster all say hello again.
  if (!lost_evidence_.empty() || !replica->machine.Complete()) return;
  ModelRun* model = Model(replica->model);
  for (const auto& update : model->updates) {
    auto index = update->replica_index.find(replica->name);
    if (index == update->replica_index.end()) continue;
    const UpdateReplica::Stage stage =
        update->machine.replicas[index->second].stage;
    if (stage == UpdateReplica::kAwaited) {
      // Of an earlier term's commit.
      UpdateEvent back;
      back.kind = UpdateEvent::kReplicaBack;
      back.replica = index->second;
      back.installed = replica->machine.InstalledEverywhere(update->key);
      const CommittedUpdate* commit = model->FindCommit(update->update_id);
      std::map<std::string, std::set<uint32_t>> missing;
      if (back.installed ||
          (commit != nullptr && !AwaitsFetch(*replica, update->key) &&
           Missing(*replica, *commit, &missing) && missing.empty())) {
        Post(*update, std::move(back));
        return;
      }
      // Its nodes lack the bytes: they are fetched first, below.
    } else if (stage == UpdateReplica::kIn) {
      // The update will hold it. What was begun before is ended first.
      if (replica->installing == 0) return;
    } else if (stage != UpdateReplica::kLeft &&
               stage != UpdateReplica::kResumed) {
      return;  // the update takes care of it
    }
  }

  const UpdateKey key = WantedBy(*replica);
  // One that held nothing before anybody removed the model (it slept, and could
  // not be given what it was to have) does not know that it may run so.
  const bool there =
      key == 0 || (replica->machine.InstalledEverywhere(key) &&
                   (key != kRemoval ||
                    (replica->machine.Servable() && !replica->machine.fenced)));
  // While a node of its is away nobody knows what that has: it stays as it is,
  // and is settled when the node is back, or lost.
  if (!there && !NodesConnected(*replica)) return;
  // What was begun before ends only when this one holds the replica: in between
  // it would be resumed with what it has.
  const Holder before{Holder::kInstall, replica->installing};
  const bool replaced =
      replica->installing != 0 && (there || replica->installing != key);
  if (replaced) ForgetInstall(replica);
  if (!there && replica->given_up != key && now_ >= replica->not_before) {
    if (key == kRemoval) {
      StartRemoval(replica);
    } else if (!Drained(*replica)) {
      StartInstall(replica, *model->Wanted());
    }
  }
  if (replaced) {
    if (replica->machine.HeldBy(before)) ReleaseInstall(replica, before);
    Unpin(model);
  }
  if (replica->installing != 0) return;
  const Holder isolation{Holder::kIsolation, 0};
  if (replica->machine.HeldBy(isolation)) {
    // It is connected again, and has what there is for it.
    ReplicaEvent release;
    release.kind = ReplicaEvent::kRelease;
    release.holder = isolation;
    Step(replica, release);
  }
  if (!replica->machine.Servable() && !replica->machine.fenced) {
    FenceMix(replica);
  }
}

UpdateKey CoordinatorCore::WantedBy(const ReplicaRun& replica) {
  ModelRun* model = Model(replica.model);
  if (model->removed) return replica.machine.removable ? kRemoval : 0;
  const CommittedUpdate* wanted = model->Wanted();
  return wanted == nullptr ? 0 : KeyOf(wanted->update_id);
}

void CoordinatorCore::SettleAll(ModelRun* model) {
  for (auto& entry : model->replicas) Settle(&entry.second);
}

void CoordinatorCore::FenceMix(ReplicaRun* replica) {
  ReplicaEvent fence;
  fence.kind = ReplicaEvent::kFence;
  for (size_t i = 0; i < replica->machine.workers.size(); ++i) {
    const WorkerContent& content = replica->machine.workers[i].content;
    const char* what = content.kind == Content::kNothing   ? "nothing"
                       : content.kind == Content::kOwn     ? "its own weights"
                       : content.kind == Content::kWriting ? "a mix"
                                                           : "update ";
    absl::StrAppend(&fence.fault.message, i == 0 ? "" : ", ", "worker ", i,
                    " holds ", what,
                    content.kind == Content::kInstalled ? IdOf(content.update)
                                                        : std::string());
  }
  fence.fault.code = StatusCode::kFailedPrecondition;
  fence.fault.reason = "WORKER_TAINTED";
  fence.fault.message = absl::StrCat(
      replica->machine.name, " cannot serve: ", fence.fault.message,
      ", and no holder of a committed update can mend it now; the next publish "
      "does");
  Step(replica, fence);
}

bool CoordinatorCore::FindBytes(ReplicaRun* replica,
                                const CommittedUpdate& update) {
  ModelRun* model = Model(replica->model);
  std::map<std::string, std::set<uint32_t>> missing;
  if (!Missing(*replica, update, &missing)) {
    // Its workers want what this update does not have.
    DropInstall(replica);
    return false;
  }
  const UpdateKey key = KeyOf(update.update_id);
  if (missing.empty()) {
    replica->installing = key;
    replica->fetch_failures = 0;
    replica->lacks = false;
    HoldForInstall(replica);
    if (replica->installing == key && replica->machine.PausedForAll() &&
        replica->machine.target != key) {
      ReplicaEvent install;
      install.kind = ReplicaEvent::kInstall;
      install.update = key;
      Step(replica, install);
    }
    return false;
  }
  const UpdateRun* running = model->FindUpdate(update.update_id);
  if (running != nullptr && !running->recovered) {
    // Its groups are in use: settled again when it has ended.
    DropInstall(replica);
    return false;
  }
  const auto unheld = Unheld(update, missing);
  if (!unheld.has_value()) return true;
  DropInstall(replica);
  const absl::Time patience = start_time_ + options_.recovery_timeout;
  if (now_ < patience) {
    // Nodes are still coming back.
    replica->not_before = patience;
    return false;
  }
  if (!AnyHolder(update)) {
    MarkLost(model, update.update_id);
    return false;
  }
  replica->last_failure = ToProto(
      Fault(StatusCode::kUnavailable, "NO_HOLDER",
            absl::StrCat("no node that can be reached holds bucket ",
                         unheld->second, " of version ", update.version, " of ",
                         model->name, ", which node ", unheld->first,
                         " lacks; it is looked for again")));
  replica->not_before = now_ + kFirstRetry;
  return false;
}

void CoordinatorCore::StartInstall(ReplicaRun* replica,
                                   const CommittedUpdate& update) {
  const UpdateKey key = KeyOf(update.update_id);
  const bool awaits = AwaitsFetch(*replica, key);
  if (!awaits && !FindBytes(replica, update)) return;
  replica->lacks = true;
  replica->installing = key;
  // What an engine came with is no version at all: it waits for one, paused.
  // One that serves an older version goes on until the bytes are here. But one
  // that stands still for another install, with what it may never have served
  // (a rollback that was released meanwhile) or with half of that, or that
  // swaps and may not have flipped to it yet, must not begin to serve that now.
  const ReplicaState& machine = replica->machine;
  const bool held = std::any_of(
      machine.holders.begin(), machine.holders.end(),
      [](const Holder& holder) { return holder.kind == Holder::kInstall; });
  const bool waits = machine.Servable()
                         ? machine.workers[0].content.kind == Content::kOwn ||
                               machine.Unflipped() ||
                               (held && machine.WouldGoOver())
                         : held;
  if (waits && replica->fetch_failures == 0) HoldForInstall(replica);
  if (!awaits) TryFetch(Model(replica->model));
}

void CoordinatorCore::HoldForInstall(ReplicaRun* replica) {
  const CommittedUpdate update = Describe(replica->model, replica->installing);
  Holder holder{Holder::kInstall, replica->installing,
                PauseOf(update.options.pause_mode())};
  const ReplicaEntry* entry =
      registry_.FindReplica(replica->model, replica->name);
  // Its workers differ while they build beside, so it must have declared it.
  if (holder.pause == PauseKind::kNone && !entry->registration.atomic_swap()) {
    holder.pause = PauseKind::kDrain;
  }
  if (replica->machine.HeldBy(holder)) return;
  for (const WorkerEntry& worker : entry->workers) {
    const NodeRun* node = FindNode(worker.node);
    if (node != nullptr && node->Holds(update.update_id)) {
      Pin(Model(replica->model), worker.node, update.update_id, true);
    }
  }
  *Times(replica, replica->installing)->mutable_pause_request_time() =
      ToProto(now_);
  ShowTimes(replica);
  ReplicaEvent hold;
  hold.kind = ReplicaEvent::kHold;
  hold.holder = holder;
  for (const Holder& other : replica->machine.holders) {
    if (other.kind == Holder::kInstall) hold.replaces = other;
  }
  Step(replica, hold);
}

void CoordinatorCore::DropInstall(ReplicaRun* replica) {
  if (replica->installing == 0) return;
  const Holder holder{Holder::kInstall, replica->installing};
  ForgetInstall(replica);
  ReleaseInstall(replica, holder);
}

void CoordinatorCore::ForgetInstall(ReplicaRun* replica) {
  replica->installing = 0;
  replica->lacks = false;
  ReplicaEvent forget;
  forget.kind = ReplicaEvent::kForget;
  Step(replica, forget);
}

void CoordinatorCore::ReleaseInstall(ReplicaRun* replica,
                                     const Holder& holder) {
  ReplicaEvent release;
  release.kind = ReplicaEvent::kRelease;
  release.holder = holder;
  Step(replica, release);
  Unpin(Model(replica->model));
}

void CoordinatorCore::InstallFailed(ReplicaRun* replica, const Fault& fault) {
  LOG(WARNING) << replica->machine.name
               << " cannot be given the update it lacks: " << fault.message;
  ++replica->fetch_failures;
  DropInstall(replica);
  replica->last_failure = ToProto(fault);
  replica->not_before =
      now_ +
      std::min(kLastRetry,
               kFirstRetry * (1 << std::min(replica->fetch_failures - 1, 4)));
  if (!replica->machine.Servable() && !replica->machine.fenced &&
      replica->machine.Complete()) {
    FenceMix(replica);
  }
}

void CoordinatorCore::MarkLost(ModelRun* model, const std::string& update_id) {
  for (CommittedUpdate& commit : model->commits) {
    if (commit.update_id != update_id || commit.lost) continue;
    commit.lost = true;
    const Fault fault(
        StatusCode::kDataLoss, "NO_HOLDER",
        absl::StrCat("version ", commit.version, " of ", model->name,
                     " was committed, and no node holds its bytes any more: "
                     "replicas keep what they have until the next publish"));
    LOG(ERROR) << fault.message;
    auto* ended = Write()->mutable_update_ended();
    ended->set_model(model->name);
    ended->set_update_id(update_id);
    ended->set_version(commit.version);
    ended->set_lost(true);
    *ended->mutable_failure() = ToProto(fault);
    *ended->mutable_time() = ToProto(now_);
    v1::Version* record = FindRecord(model, update_id);
    if (record != nullptr) {
      record->set_state(v1::Version::STATE_LOST);
      *record->mutable_failure() = ToProto(fault);
      Changed(*record);
    }
  }
  SettleAll(model);
}

}  // namespace daemon
}  // namespace weightsync
