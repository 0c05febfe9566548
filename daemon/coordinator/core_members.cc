// Ranks, replicas and workers come and go.

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

// ---- Trainer ranks ----

void CoordinatorCore::ClaimRank(NodeRun* node, int64_t correlation,
                                const v1::ClaimRank& claim) {
  const ModelEntry* entry = registry_.FindModel(claim.model());
  bool known = false;
  if (entry != nullptr) {
    auto it = entry->ranks.find(claim.rank());
    known = it != entry->ranks.end() && it->second.session == claim.session();
  }
  const Fault fault = registry_.ClaimRank(node->name, claim);
  v1::Reply* reply = ReplyTo(node->stream, correlation, fault);
  if (!fault.ok()) return;
  node->said.insert(absl::StrCat("rank/", claim.model(), "/", claim.rank()));
  ModelRun* model = Model(claim.model());
  absl::optional<Publish> failed;
  if (!known) {
    failed = model->book.RankClaimed(claim.rank(), claim.publish_index());
  }
  entry = registry_.FindModel(claim.model());
  int registered = 0;
  for (const auto& rank : entry->ranks) registered += rank.second.registered;
  reply->mutable_rank_accepted()->set_registered_rank_count(registered);
  reply->mutable_rank_accepted()->set_world_size(entry->world_size);
  if (failed.has_value()) FailPublish(*failed);
}

void CoordinatorCore::RankShards(NodeRun* node, int64_t correlation,
                                 const v1::RankShards& shards) {
  std::vector<Refusal> refusals;
  const Fault fault = registry_.RegisterShards(shards, &refusals);
  v1::Reply* reply = ReplyTo(node->stream, correlation, fault);
  if (!fault.ok()) return;
  const ModelEntry* entry = registry_.FindModel(shards.model());
  int registered = 0;
  for (const auto& rank : entry->ranks) registered += rank.second.registered;
  reply->mutable_rank_accepted()->set_registered_rank_count(registered);
  reply->mutable_rank_accepted()->set_world_size(entry->world_size);
  Refuse(shards.model(), refusals);
  TryOpen(Model(shards.model()));
}

void CoordinatorCore::LoseRank(const std::string& model, int32_t rank,
                               const std::string& session, const Fault& fault) {
  if (!registry_.RemoveRank(model, rank, session)) return;
  ModelRun* run = Model(model);
  run->book.RankGone(rank);
  for (const auto& update : run->updates) {
    auto it = update->rank_index.find(rank);
    if (it == update->rank_index.end()) continue;
    UpdateEvent event;
    event.kind = UpdateEvent::kRankLost;
    event.rank = it->second;
    event.fault = fault;
    Post(*update, event);
  }
}

// ---- Replicas and workers ----

namespace {

// So many commands a replica can be given before its numbers meet those of
// another.
constexpr int kCommandBits = 32;

}  // namespace

ReplicaRun* CoordinatorCore::EnterReplica(const std::string& model,
                                          const std::string& replica,
                                          const std::string& incarnation,
                                          size_t worker_count, bool is_new) {
  ReplicaRun& run = Model(model)->replicas[replica];
  Model(model)->unseen_replicas.erase(replica);
  if (is_new) {
    // A restart: nothing of the old engine's state is its own. Its history is.
    std::deque<v1::ReplicaTimes> history = std::move(run.history);
    run = ReplicaRun();
    run.history = std::move(history);
  }
  if (run.name.empty()) {
    run.machine.next_command = (++replica_runs_ << kCommandBits) + 1;
  }
  run.model = model;
  run.name = replica;
  run.incarnation = incarnation;
  run.machine.name = absl::StrCat(model, "/replicas/", replica);
  run.machine.workers.resize(worker_count);
  if (Model(model)->held_replicas.count(replica) != 0) {
    const Holder holder{Holder::kOperator, 0};
    if (!run.machine.HeldBy(holder)) run.machine.holders.push_back(holder);
  }
  return &run;
}

namespace {

Fault NodeDraining(const std::string& node, const std::string& replica) {
  return Fault(StatusCode::kFailedPrecondition, "NODE_DRAINING",
               absl::StrCat("node ", node, " is drained and takes no new ",
                            "replicas: start ", replica,
                            " on another, or take the drain back"));
}

}  // namespace

void CoordinatorCore::ReplicaJoined(NodeRun* node, int64_t correlation,
                                    const v1::ReplicaJoined& joined) {
  const v1::RegisterReplica& registration = joined.registration();
  bool is_new = false;
  Fault fault;
  const ReplicaRun* known = FindReplica(
      registration.model(), registration.replica(), registration.incarnation());
  // Before HelloDone it names those that it has had all along.
  if (node->draining && node->ready && known == nullptr) {
    fault = NodeDraining(node->name, registration.replica());
  } else {
    fault = registry_.JoinReplica(node->name, registration, &is_new);
  }
  ReplyTo(node->stream, correlation, fault);
  if (!fault.ok()) return;
  node->said.insert(absl::StrCat("replica/", registration.model(), "/",
                                 registration.replica()));
  ReplicaRun* run = EnterReplica(
      registration.model(), registration.replica(), registration.incarnation(),
      static_cast<size_t>(registration.worker_count()), is_new);
  for (const std::string& command : joined.refused_command_ids()) {
    // The offer is over, not what was offered: it is asked to pause anew.
    LOG(WARNING) << run->machine.name << " gave up pause " << command
                 << " while its node was cut off, and serves what it had";
    UpdateEvent unpaused;
    unpaused.kind = UpdateEvent::kReplicaUnpaused;
    if (!registration.paused()) PostReplica(*run, unpaused);
  }
  if (joined.isolation_hold()) {
    const Holder holder{Holder::kIsolation, 0};
    if (!run->machine.HeldBy(holder)) run->machine.holders.push_back(holder);
  }
  ReplicaEvent event;
  event.kind = ReplicaEvent::kControlJoined;
  event.paused = registration.paused();
  event.swaps = registration.atomic_swap();
  event.removable = registration.removable();
  run->machine.named = Named(*run);
  Step(run, event);
  // It was complete all along: its node alone was away.
  if (run->machine.Complete()) Settle(run);
}

void CoordinatorCore::WorkerJoined(NodeRun* node, int64_t correlation,
                                   const v1::WorkerJoined& joined) {
  const v1::RegisterWorker& registration = joined.registration();
  bool is_new = false;
  Fault fault;
  const ReplicaRun* known = FindReplica(
      registration.model(), registration.replica(), registration.incarnation());
  // Before HelloDone it names those that it has had all along.
  if (node->draining && node->ready && known == nullptr) {
    fault = NodeDraining(node->name, registration.replica());
  } else {
    fault =
        registry_.JoinWorker(node->name, registration, joined.ready(), &is_new);
  }
  v1::Reply* reply = ReplyTo(node->stream, correlation, fault);
  if (!fault.ok()) return;
  const ReplicaEntry* entry =
      registry_.FindReplica(registration.model(), registration.replica());
  const int index = registration.worker_index();
  reply->mutable_worker_accepted()->set_tensor_bytes(
      entry->workers[index].tensor_bytes);
  reply->mutable_worker_accepted()->set_store_bytes(
      registry_.StoreBytes(registration.model(), node->name));
  node->said.insert(absl::StrCat("worker/", registration.model(), "/",
                                 registration.replica(), "/", index));
  ReplicaRun* run =
      EnterReplica(registration.model(), registration.replica(),
                   registration.incarnation(), entry->workers.size(), is_new);
  // Until its room is there the replica is not complete: nobody pauses it, and
  // no update counts on it.
  if (!joined.ready()) return;
  LearnInstalled(registration.model(), registration.installed());
  CheckInstalled(registration);
  ReplicaEvent event;
  event.kind = ReplicaEvent::kWorkerJoined;
  event.worker = index;
  event.content = ContentOf(registration.installed());
  run->lacks = false;
  run->machine.named = Named(*run);
  Step(run, event);
  if (run->machine.Complete()) Settle(run);
}

void CoordinatorCore::LoseControl(const std::string& model,
                                  const std::string& replica,
                                  const std::string& incarnation,
                                  const Fault& fault) {
  if (!registry_.RemoveControl(model, replica, incarnation)) return;
  ReplicaRun* run = FindReplica(model, replica, incarnation);
  if (run == nullptr) return;
  ReplicaEvent event;
  event.kind = ReplicaEvent::kControlLeft;
  event.fault = fault;
  Step(run, event);
}

void CoordinatorCore::LoseWorker(const std::string& model,
                                 const std::string& replica, int worker,
                                 const std::string& incarnation,
                                 const Fault& fault) {
  if (!registry_.RemoveWorker(model, replica, worker, incarnation)) return;
  ReplicaRun* run = FindReplica(model, replica, incarnation);
  if (run == nullptr) return;
  ReplicaEvent event;
  event.kind = ReplicaEvent::kWorkerLeft;
  event.worker = worker;
  event.fault = fault;
  Step(run, event);
}

void CoordinatorCore::Refuse(const std::string& model,
                             const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    if (refusal.worker >= 0) {
      v1::RefuseWorker* out = SendTo(refusal.node)->mutable_refuse_worker();
      out->set_model(model);
      out->set_replica(refusal.replica);
      out->set_worker_index(refusal.worker);
      out->set_incarnation(refusal.incarnation);
      *out->mutable_failure() = ToProto(refusal.fault);
      LoseWorker(model, refusal.replica, refusal.worker, refusal.incarnation,
                 refusal.fault);
    } else {
      v1::RefuseReplica* out = SendTo(refusal.node)->mutable_refuse_replica();
      out->set_model(model);
      out->set_replica(refusal.replica);
      out->set_incarnation(refusal.incarnation);
      *out->mutable_failure() = ToProto(refusal.fault);
      LoseControl(model, refusal.replica, refusal.incarnation, refusal.fault);
    }
    ReplicaRun* run = FindReplica(model, refusal.replica, refusal.incarnation);
    if (run != nullptr) run->last_failure = ToProto(refusal.fault);
  }
}

ReplicaRun* CoordinatorCore::FindReplica(const std::string& model,
                                         const std::string& replica,
                                         const std::string& incarnation) {
  auto it = models_.find(model);
  if (it == models_.end()) return nullptr;
  auto found = it->second.replicas.find(replica);
  if (found == it->second.replicas.end() ||
      found->second.incarnation != incarnation) {
    return nullptr;
  }
  return &found->second;
}

}  // namespace daemon
}  // namespace weightsync
