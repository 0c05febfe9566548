// Install an update from a holder: one operation for late joins, repairs and
// rollbacks. Where the stores of a replica's nodes have all that its workers
// need, the replica is held, its workers are told to install, and it is
// released. Where they do not, the buckets that are missing come first, from
// the nearest nodes that hold them, pinned there meanwhile.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr absl::Duration kFirstRetry = absl::Seconds(5);
constexpr absl::Duration kLastRetry = absl::Minutes(1);

std::string LabelOf(const NodeRun& node, const char* key) {
  auto it = node.hello.labels().find(key);
  return it == node.hello.labels().end() ? std::string() : it->second;
}

// Greater is nearer.
int Nearness(const NodeRun& a, const NodeRun& b) {
  int nearness = 3;
  for (const char* key : {"host", "rack", "zone"}) {
    const std::string label = LabelOf(a, key);
    if (!label.empty() && label == LabelOf(b, key)) return nearness;
    --nearness;
  }
  return 0;
}

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

bool CoordinatorCore::HasBucket(const NodeRun& node,
                                const CommittedUpdate& update,
                                uint32_t bucket) const {
  if (node.lost || !node.Holds(update.update_id)) return false;
  auto fetched = node.fetched.find(update.update_id);
  if (fetched != node.fetched.end() && fetched->second.count(bucket) != 0) {
    return true;
  }
  auto index = update.layout->node_index.find(node.name);
  if (index == update.layout->node_index.end()) return false;
  const auto& plan = update.layout->layout.plan;
  if (update.SourcesHold() &&
      plan.bucket(bucket).source_node == index->second) {
    return true;
  }
  const auto needed = plan.need_nodes(bucket);
  return update.ReceiversHold() &&
         std::find(needed.begin(), needed.end(), index->second) != needed.end();
}

bool CoordinatorCore::AnyHolder(const CommittedUpdate& update) const {
  for (const auto& entry : nodes_) {
    const NodeRun& node = entry.second;
    if (!node.lost && node.Holds(update.update_id)) return true;
  }
  return false;
}

const NodeRun* CoordinatorCore::HolderOf(const CommittedUpdate& update,
                                         uint32_t bucket,
                                         const std::string& target) const {
  const NodeRun& to = nodes_.at(target);
  const NodeRun* best = nullptr;
  int best_score = 0;
  for (const auto& entry : nodes_) {
    const NodeRun& node = entry.second;
    if (node.stream.empty() || node.draining || node.name == target ||
        !HasBucket(node, update, bucket)) {
      continue;
    }
    // One that has just failed this node comes last.
    const bool failed = failed_edges_.count({node.name, target}) != 0;
    const int score = 1 + Nearness(node, to) + (failed ? 0 : 10);
    if (score <= best_score) continue;
    best = &node;
    best_score = score;
  }
  return best;
}

bool CoordinatorCore::Missing(
    const ReplicaRun& replica, const CommittedUpdate& update,
    std::map<std::string, std::set<uint32_t>>* missing) {
  missing->clear();
  if (update.layout == nullptr) return false;
  const ReplicaEntry* entry =
      registry_.FindReplica(replica.model, replica.name);
  for (const WorkerEntry& worker : entry->workers) {
    const NodeRun* node = ConnectedNode(worker.node);
    const auto needed = NeededBuckets(*update.layout, worker.registration);
    if (node == nullptr || !needed.has_value()) return false;
    for (const uint32_t bucket : *needed) {
      if (!HasBucket(*node, update, bucket)) {
        (*missing)[node->name].insert(bucket);
      }
    }
  }
  return true;
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
          (commit != nullptr && Missing(*replica, *commit, &missing) &&
           missing.empty())) {
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

void CoordinatorCore::StartInstall(ReplicaRun* replica,
                                   const CommittedUpdate& update) {
  ModelRun* model = Model(replica->model);
  std::map<std::string, std::set<uint32_t>> missing;
  if (!Missing(*replica, update, &missing)) {
    // Its workers want what this update does not have.
    DropInstall(replica);
    return;
  }
  const UpdateKey key = KeyOf(update.update_id);
  if (missing.empty()) {
    replica->installing = key;
    replica->fetch_failures = 0;
    HoldForInstall(replica);
    if (replica->installing == key && replica->machine.PausedForAll() &&
        replica->machine.target != key) {
      ReplicaEvent install;
      install.kind = ReplicaEvent::kInstall;
      install.update = key;
      Step(replica, install);
    }
    return;
  }
  const UpdateRun* running = model->FindUpdate(update.update_id);
  if (running != nullptr && !running->recovered) {
    // Its groups are in use: settled again when it has ended.
    DropInstall(replica);
    return;
  }
  for (const auto& node : missing) {
    for (const uint32_t bucket : node.second) {
      if (HolderOf(update, bucket, node.first) != nullptr) continue;
      DropInstall(replica);
      const absl::Time patience = start_time_ + options_.recovery_timeout;
      if (now_ < patience) {
        // Nodes are still coming back.
        replica->not_before = patience;
        return;
      }
      if (!AnyHolder(update)) {
        MarkLost(model, update.update_id);
        return;
      }
      replica->last_failure = ToProto(
          Fault(StatusCode::kUnavailable, "NO_HOLDER",
                absl::StrCat("no node that can be reached holds bucket ",
                             bucket, " of version ", update.version, " of ",
                             model->name, ", which node ", node.first,
                             " lacks; it is looked for "
                             "again")));
      replica->not_before = now_ + kFirstRetry;
      return;
    }
  }
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
  TryFetch(model);
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

// ---- Fetching ----

void CoordinatorCore::TryFetch(ModelRun* model) {
  const CommittedUpdate* wanted = model->Wanted();
  if (wanted == nullptr || model->fetch != nullptr) return;
  const UpdateKey key = KeyOf(wanted->update_id);
  std::map<std::string, std::set<uint32_t>> lacking;
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    std::map<std::string, std::set<uint32_t>> missing;
    if (replica.installing != key || !replica.machine.Complete() ||
        !Missing(replica, *wanted, &missing)) {
      continue;
    }
    for (const auto& node : missing) {
      lacking[node.first].insert(node.second.begin(), node.second.end());
    }
  }
  auto fetch = std::make_unique<FetchRun>();
  fetch->update = key;
  fetch->of = *wanted;
  fetch->epoch = ++model->epoch;
  fetch->secret = options_.random_id();
  fetch->deadline = now_ + options_.prepare_timeout;
  for (const auto& node : lacking) {
    std::map<std::string, std::vector<uint32_t>> from;
    bool complete = true;
    for (const uint32_t bucket : node.second) {
      const NodeRun* holder = HolderOf(*wanted, bucket, node.first);
      complete = complete && holder != nullptr;
      if (holder != nullptr) from[holder->name].push_back(bucket);
    }
    if (!complete) continue;
    for (const auto& holder : from) {
      v1::Flow flow;
      flow.set_flow_id(absl::StrCat("fetch/", holder.first, "/", node.first));
      for (const std::string& name : {holder.first, node.first}) {
        v1::FlowMember* member = flow.add_members();
        member->set_node(name);
        member->set_data_address(nodes_.at(name).hello.data_address());
      }
      for (const uint32_t bucket : holder.second) {
        flow.add_buckets(static_cast<int32_t>(bucket));
      }
      fetch->flows.push_back(std::move(flow));
      fetch->holders.insert(holder.first);
      fetch->preparing.insert(holder.first);
    }
    fetch->targets.insert(node.first);
    fetch->preparing.insert(node.first);
  }
  if (fetch->targets.empty()) return;
  model->fetch = std::move(fetch);
  for (const std::string& holder : model->fetch->holders) {
    Pin(model, holder, wanted->update_id, true);
  }
  const std::set<std::string> told = model->fetch->preparing;
  for (const std::string& node : told) SendFetchPrepare(model, node);
}

void CoordinatorCore::SendFetchPrepare(ModelRun* model,
                                       const std::string& name) {
  const FetchRun& fetch = *model->fetch;
  SendLayout(*fetch.of.layout, name);
  v1::PrepareUpdate* prepare = SendTo(name)->mutable_prepare_update();
  prepare->set_model(model->name);
  prepare->set_update_id(fetch.of.update_id);
  prepare->set_version(fetch.of.version);
  prepare->set_step(fetch.of.step);
  prepare->set_layout_id(fetch.of.layout_id);
  prepare->mutable_epoch()->set_term(term_);
  prepare->mutable_epoch()->set_counter(fetch.epoch);
  prepare->set_group_secret(fetch.secret);
  *prepare->mutable_timeout() = ToProto(options_.prepare_timeout);
  prepare->set_fetch(true);
  prepare->set_update_mode(v1::UPDATE_MODE_STAGE);
  prepare->set_publish_mode(v1::PUBLISH_MODE_SNAPSHOT);
  for (const v1::Flow& flow : fetch.flows) {
    if (flow.members(0).node() == name || flow.members(1).node() == name) {
      *prepare->add_flows() = flow;
    }
  }
}

bool CoordinatorCore::FetchPrepared(ModelRun* model, const std::string& node,
                                    const v1::UpdatePrepared& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id ||
      report.epoch().counter() != fetch->epoch) {
    return false;
  }
  Fault fault = FromProto(report.failure());
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", node), fault.message);
    FetchFailed(model, node, fault);
    return true;
  }
  fetch->preparing.erase(node);
  // It has room for it now. Once whole it is one of the older ones in its
  // store, and would be the first to be evicted.
  if (fetch->targets.count(node) != 0) {
    Pin(model, node, fetch->of.update_id, true);
  }
  MoveFetch(model);
  return true;
}

void CoordinatorCore::MoveFetch(ModelRun* model) {
  FetchRun* fetch = model->fetch.get();
  if (fetch->moving || !fetch->preparing.empty()) return;
  fetch->moving = true;
  fetch->deadline = now_ + 2 * options_.progress_timeout;
  std::set<std::string> members = fetch->holders;
  members.insert(fetch->targets.begin(), fetch->targets.end());
  for (const std::string& member : members) {
    v1::MoveUpdate* move = SendTo(member)->mutable_move_update();
    move->set_model(model->name);
    move->set_update_id(fetch->of.update_id);
    move->mutable_epoch()->set_term(term_);
    move->mutable_epoch()->set_counter(fetch->epoch);
    *move->mutable_progress_timeout() = ToProto(options_.progress_timeout);
    v1::UpdateManifest* manifest = SendTo(member)->mutable_update_manifest();
    manifest->set_model(model->name);
    manifest->set_update_id(fetch->of.update_id);
    for (const v1::BucketDigest& bucket : fetch->of.manifest) {
      *manifest->add_buckets() = bucket;
    }
  }
}

bool CoordinatorCore::FetchProgress(ModelRun* model, const std::string& node,
                                    const v1::UpdateProgress& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id) {
    return false;
  }
  int64_t& received = fetch->received_bytes[node];
  if (report.received_bytes() > received) {
    received = report.received_bytes();
    fetch->deadline = now_ + 2 * options_.progress_timeout;
  }
  return true;
}

bool CoordinatorCore::FetchVerified(ModelRun* model, const std::string& name,
                                    const v1::UpdateVerified& report) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr || report.update_id() != fetch->of.update_id ||
      report.epoch().counter() != fetch->epoch) {
    return false;
  }
  Fault fault = FromProto(report.failure());
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", name), fault.message);
    if (!report.edge_from().empty()) {
      failed_edges_.insert({report.edge_from(), report.edge_to()});
      fault.message = absl::StrCat("edge ", report.edge_from(), " -> ",
                                   report.edge_to(), ": ", fault.message);
    }
    // A holder tells of the edge; the target at its end is who lacks bytes.
    const bool of_target = fetch->targets.count(report.edge_to()) != 0;
    FetchFailed(model, of_target ? report.edge_to() : name, fault);
    return true;
  }
  if (fetch->targets.erase(name) == 0) return true;  // a holder's, or again
  NodeRun* node = FindNode(name);
  const std::string update_id = fetch->of.update_id;
  if (!node->Holds(update_id)) {
    node->held.emplace_back(model->name, update_id);
  }
  for (const v1::Flow& flow : fetch->flows) {
    if (flow.members(1).node() != name) continue;
    for (const int32_t bucket : flow.buckets()) {
      node->fetched[update_id].insert(static_cast<uint32_t>(bucket));
    }
  }
  fetch->done.insert(name);
  Pin(model, name, update_id, true);
  if (fetch->targets.empty()) EndFetch(model);
  SettleAll(model);
  return true;
}

void CoordinatorCore::FetchFailed(ModelRun* model, const std::string& name,
                                  const Fault& fault) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr) return;
  std::set<std::string> failed;
  if (fetch->holders.count(name) != 0) {
    for (const v1::Flow& flow : fetch->flows) {
      const std::string& target = flow.members(1).node();
      if (flow.members(0).node() != name || fetch->targets.count(target) == 0) {
        continue;
      }
      failed_edges_.insert({name, target});
      failed.insert(target);
    }
    fetch->preparing.erase(name);
  }
  if (fetch->targets.count(name) != 0) {
    for (const v1::Flow& flow : fetch->flows) {
      if (flow.members(1).node() == name) {
        failed_edges_.insert({flow.members(0).node(), name});
      }
    }
    failed.insert(name);
  }
  for (const std::string& target : failed) {
    fetch->targets.erase(target);
    fetch->preparing.erase(target);
    EndFetchOn(model, *fetch, target, fault);
  }
  const UpdateKey key = fetch->update;
  if (fetch->targets.empty()) {
    EndFetch(model);
  } else {
    MoveFetch(model);
  }
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    const ReplicaEntry* known =
        registry_.FindReplica(model->name, replica.name);
    if (replica.installing != key || known == nullptr) continue;
    const bool on_it = std::any_of(
        known->workers.begin(), known->workers.end(),
        [&](const WorkerEntry& w) { return failed.count(w.node) != 0; });
    if (on_it) InstallFailed(&replica, fault);
  }
  if (model->fetch == nullptr) SettleAll(model);
}

void CoordinatorCore::EndFetchOn(ModelRun* model, const FetchRun& fetch,
                                 const std::string& name, const Fault& fault) {
  const NodeRun* node = FindNode(name);
  // What it had before stays.
  const bool holds = node != nullptr && node->Holds(fetch.of.update_id);
  v1::EndUpdate* end = SendTo(name)->mutable_end_update();
  end->set_model(model->name);
  end->set_update_id(fetch.of.update_id);
  end->set_committed(holds);
  if (!fault.ok()) *end->mutable_failure() = ToProto(fault);
  // With what it had of it the node gives up the pin: the next fetch has it
  // pinned anew.
  if (!holds) model->pins.erase({name, fetch.of.update_id});
}

void CoordinatorCore::EndFetch(ModelRun* model) {
  const std::unique_ptr<FetchRun> fetch = std::move(model->fetch);
  std::set<std::string> members = fetch->holders;
  members.insert(fetch->targets.begin(), fetch->targets.end());
  members.insert(fetch->done.begin(), fetch->done.end());
  for (const std::string& member : members) {
    EndFetchOn(model, *fetch, member, Fault());
  }
  Unpin(model);
}

void CoordinatorCore::TickFetch(ModelRun* model) {
  FetchRun* fetch = model->fetch.get();
  if (fetch == nullptr) return;
  const UpdateKey key = fetch->update;
  const bool wanted =
      std::any_of(model->replicas.begin(), model->replicas.end(),
                  [key](const auto& r) { return r.second.installing == key; });
  if (!wanted) {
    EndFetch(model);
    SettleAll(model);
    return;
  }
  if (now_ < fetch->deadline) return;
  const bool preparing = !fetch->moving;
  const std::set<std::string> late =
      preparing ? fetch->preparing : fetch->targets;
  const Fault fault(
      StatusCode::kDeadlineExceeded,
      preparing ? "PREPARE_TIMEOUT" : "PROGRESS_TIMEOUT",
      absl::StrCat(preparing ? "not ready to send or receive version "
                             : "no bytes came in of version ",
                   fetch->of.version, " of ", model->name, ": node ",
                   absl::StrJoin(late, ", ")));
  for (const std::string& node : late) FetchFailed(model, node, fault);
}

void CoordinatorCore::Pin(ModelRun* model, const std::string& node,
                          const std::string& update_id, bool pin) {
  const std::pair<std::string, std::string> key(node, update_id);
  if (pin ? !model->pins.insert(key).second : model->pins.erase(key) == 0) {
    return;
  }
  v1::PinUpdate* out = SendTo(node)->mutable_pin_update();
  out->set_model(model->name);
  out->set_update_id(update_id);
  out->set_pin(pin);
}

void CoordinatorCore::ForgetHeld(NodeRun* node, const std::string& name,
                                 const std::string& update_id) {
  node->fetched.erase(update_id);
  node->held.erase(std::remove(node->held.begin(), node->held.end(),
                               std::make_pair(name, update_id)),
                   node->held.end());
  // A pin that came too late holds nothing.
  auto model = models_.find(name);
  if (model != models_.end()) model->second.pins.erase({node->name, update_id});
}

void CoordinatorCore::Unpin(ModelRun* model) {
  std::set<std::pair<std::string, std::string>> needed;
  for (const auto& entry : model->replicas) {
    if (entry.second.installing <= 0) continue;
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    if (replica == nullptr) continue;
    for (const WorkerEntry& worker : replica->workers) {
      needed.insert({worker.node, IdOf(entry.second.installing)});
    }
  }
  if (model->fetch != nullptr) {
    for (const auto* nodes : {&model->fetch->holders, &model->fetch->targets,
                              &model->fetch->done}) {
      for (const std::string& node : *nodes) {
        needed.insert({node, model->fetch->of.update_id});
      }
    }
  }
  const auto pins = model->pins;
  for (const auto& pin : pins) {
    if (needed.count(pin) != 0 || pin.second == model->held_update_id) continue;
    Pin(model, pin.first, pin.second, false);
  }
}

}  // namespace daemon
}  // namespace weightsync
