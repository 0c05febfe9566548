#include "daemon/coordinator/queries.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr int kDefaultPage = 100;
constexpr int kLargestPage = 1000;

absl::Status BadName(absl::string_view name, absl::string_view form) {
  return ErrorStatus(StatusCode::kInvalidArgument, "RESOURCE_NAME_INVALID",
                     absl::StrCat("\"", name, "\" is not ", form));
}

absl::Status Unknown(absl::string_view reason, absl::string_view name) {
  return ErrorStatus(StatusCode::kNotFound, reason,
                     absl::StrCat(name, " is not known here"));
}

// Which of `keys` (in order) a page shows: [*begin, *end).
absl::Status Page(const std::vector<std::string>& keys, int32_t page_size,
                  const std::string& page_token, size_t* begin, size_t* end,
                  std::string* next_page_token) {
  if (page_size < 0 || page_size > kLargestPage) {
    return ErrorStatus(
        StatusCode::kInvalidArgument, "PAGE_SIZE_INVALID",
        absl::StrCat("page_size is 0 to ", kLargestPage, ", not ", page_size));
  }
  *begin = 0;
  if (!page_token.empty()) {
    auto it = std::find(keys.begin(), keys.end(), page_token);
    if (it == keys.end()) {
      return ErrorStatus(StatusCode::kInvalidArgument, "PAGE_TOKEN_INVALID",
                         "the page_token is of another list, or what it named "
                         "is gone; begin again without one");
    }
    *begin = static_cast<size_t>(it - keys.begin());
  }
  const size_t size =
      static_cast<size_t>(page_size == 0 ? kDefaultPage : page_size);
  *end = std::min(keys.size(), *begin + size);
  if (*end < keys.size()) *next_page_token = keys[*end];
  return absl::OkStatus();
}

v1::Replica::State StateOf(const ReplicaRun& run) {
  const ReplicaState& machine = run.machine;
  if (!machine.Complete()) {
    return run.lost ? v1::Replica::STATE_LOST : v1::Replica::STATE_INCOMPLETE;
  }
  if (machine.fenced) return v1::Replica::STATE_FENCED;
  switch (machine.engine) {
    case EngineState::kRunning:
      return v1::Replica::STATE_SERVING;
    case EngineState::kPausing:
    case EngineState::kDoubtful:
      return v1::Replica::STATE_PAUSING;
    case EngineState::kPaused:
      for (const ReplicaWorker& worker : machine.workers) {
        if (worker.command != 0) return v1::Replica::STATE_APPLYING;
      }
      return v1::Replica::STATE_PAUSED;
    case EngineState::kResuming:
    case EngineState::kUnresumed:
      return v1::Replica::STATE_RESUMING;
  }
  return v1::Replica::STATE_UNSPECIFIED;
}

// Whether the weights of a removed model may lie in it. Those that have left
// have said what they held.
bool MayHold(const ReplicaState& machine) {
  return machine.workers.empty() ||
         std::any_of(machine.workers.begin(), machine.workers.end(),
                     [](const ReplicaWorker& worker) {
                       return worker.content.kind != Content::kNothing;
                     });
}

}  // namespace

void Queries::FillCluster(v1::Cluster* cluster) const {
  cluster->set_cluster_id(core_.cluster_id_);
  cluster->set_coordinator(
      absl::StrCat("nodes/", core_.options_.coordinator_node));
  cluster->set_term(core_.term_);
  *cluster->mutable_start_time() = ToProto(core_.start_time_);
  cluster->set_software_version(core_.options_.software_version);
  if (!core_.lost_evidence_.empty()) {
    *cluster->mutable_blocked() = ToProto(core_.LostFault());
  }
}

absl::StatusOr<const ModelRun*> Queries::FindModel(
    absl::string_view name) const {
  if (!IsResourceName("models", name)) {
    return BadName(name, "models/{model}");
  }
  auto it = core_.models_.find(std::string(name));
  if (it == core_.models_.end()) return Unknown("MODEL_UNKNOWN", name);
  return &it->second;
}

absl::StatusOr<std::vector<const ModelRun*>> Queries::Parents(
    absl::string_view parent) const {
  std::vector<const ModelRun*> models;
  if (parent == "models/-") {
    for (const auto& entry : core_.models_) models.push_back(&entry.second);
    return models;
  }
  auto model = FindModel(parent);
  if (!model.ok()) return model.status();
  models.push_back(*model);
  return models;
}

// ---- Nodes ----

v1::Node Queries::ShowNode(const NodeRun& node) const {
  v1::Node out;
  out.set_name(absl::StrCat("nodes/", node.name));
  out.set_state(node.stream.empty() ? v1::Node::STATE_LOST
                                    : v1::Node::STATE_CONNECTED);
  out.set_data_address(node.hello.data_address());
  *out.mutable_labels() = node.hello.labels();
  *out.mutable_connect_time() = ToProto(node.connect_time);
  *out.mutable_memory() = node.memory;
  out.set_software_version(node.hello.software_version());
  for (const auto& held : node.held) out.add_update_ids(held.second);
  int ranks = 0;
  int workers = 0;
  for (const auto& model : core_.registry_.models()) {
    for (const auto& rank : model.second.ranks) {
      ranks += rank.second.node == node.name;
    }
    for (const auto& replica : model.second.replicas) {
      for (const WorkerEntry& worker : replica.second.workers) {
        workers += worker.present && worker.node == node.name;
      }
    }
  }
  out.set_trainer_rank_count(ranks);
  out.set_worker_count(workers);
  out.set_draining(node.draining);
  return out;
}

absl::StatusOr<v1::Node> Queries::GetNode(absl::string_view name) const {
  absl::string_view node = name;
  if (!absl::ConsumePrefix(&node, "nodes/") || !IsShortName(node, false)) {
    return BadName(name, "nodes/{node}");
  }
  auto it = core_.nodes_.find(std::string(node));
  if (it == core_.nodes_.end()) return Unknown("NODE_UNKNOWN", name);
  return ShowNode(it->second);
}

absl::StatusOr<v1::ListNodesResponse> Queries::ListNodes(
    const v1::ListNodesRequest& request) const {
  std::vector<std::string> keys;
  for (const auto& node : core_.nodes_) keys.push_back(node.first);
  v1::ListNodesResponse response;
  size_t begin = 0;
  size_t end = 0;
  absl::Status status = Page(keys, request.page_size(), request.page_token(),
                             &begin, &end, response.mutable_next_page_token());
  if (!status.ok()) return status;
  for (size_t i = begin; i < end; ++i) {
    *response.add_nodes() = ShowNode(core_.nodes_.at(keys[i]));
  }
  return response;
}

// ---- Models ----

v1::Model Queries::ShowModel(const ModelRun& model) const {
  v1::Model out;
  out.set_name(model.name);
  out.set_floor_version(model.book.floor());
  out.set_removed(model.removed);
  if (model.removed) {
    for (const std::string& replica : model.AbsentReplicas()) {
      const auto run = model.replicas.find(replica);
      if (run != model.replicas.end() && !MayHold(run->second.machine)) {
        continue;
      }
      out.add_absent_replicas(absl::StrCat(model.name, "/replicas/", replica));
    }
  }
  if (!model.commits.empty()) {
    out.set_active_version(
        absl::StrCat(model.name, "/versions/", model.Newest().version));
    out.set_active_update_id(model.Newest().update_id);
  }
  if (!model.held_update_id.empty()) {
    const CommittedUpdate* held = model.FindCommit(model.held_update_id);
    out.set_held_version(absl::StrCat(model.name, "/versions/",
                                      held == nullptr ? 0 : held->version));
  }
  if (!model.updates.empty()) {
    out.set_updating_version(model.updates[0]->record.name());
  }
  const ModelEntry* entry = core_.registry_.FindModel(model.name);
  if (entry == nullptr) return out;
  if (entry->catalog != nullptr) {
    out.set_parameter_count(entry->catalog->size());
    out.set_total_bytes(entry->catalog->total_bytes());
    out.set_catalog_digest(absl::StrFormat("%016x", entry->catalog->digest()));
  }
  out.set_world_size(entry->world_size);
  for (const auto& rank : entry->ranks) {
    v1::TrainerRank* shown = out.add_trainer_ranks();
    shown->set_rank(rank.first);
    shown->set_node(absl::StrCat("nodes/", rank.second.node));
    shown->set_pid(rank.second.pid);
    shown->set_shard_bytes(rank.second.shard_bytes);
    shown->set_registered(rank.second.registered);
    shown->set_client(rank.second.client);
  }
  int workers = 0;
  int replicas = 0;
  for (const auto& replica : entry->replicas) {
    replicas += !replica.second.Empty();
    for (const WorkerEntry& worker : replica.second.workers) {
      workers += worker.present;
    }
  }
  out.set_replica_count(replicas);
  out.set_worker_count(workers);
  const Fault blocked = entry->Unpublishable();
  if (!core_.lost_evidence_.empty()) {
    out.set_blocked_reason(
        absl::StrCat("JOURNAL_LOST: ", core_.lost_evidence_));
  } else if (!blocked.ok()) {
    out.set_blocked_reason(absl::StrCat(blocked.reason, ": ", blocked.message));
  }
  return out;
}

absl::StatusOr<v1::Model> Queries::GetModel(absl::string_view name) const {
  auto model = FindModel(name);
  if (!model.ok()) return model.status();
  v1::Model out = ShowModel(**model);
  const ModelEntry* entry = core_.registry_.FindModel(name);
  if (entry != nullptr) {
    for (const v1::Parameter& parameter : entry->parameters) {
      *out.add_parameters() = parameter;
    }
  }
  return out;
}

absl::StatusOr<v1::ListModelsResponse> Queries::ListModels(
    const v1::ListModelsRequest& request) const {
  std::vector<std::string> keys;
  for (const auto& model : core_.models_) keys.push_back(model.first);
  v1::ListModelsResponse response;
  size_t begin = 0;
  size_t end = 0;
  absl::Status status = Page(keys, request.page_size(), request.page_token(),
                             &begin, &end, response.mutable_next_page_token());
  if (!status.ok()) return status;
  for (size_t i = begin; i < end; ++i) {
    *response.add_models() = ShowModel(core_.models_.at(keys[i]));
  }
  return response;
}

// ---- Replicas ----

v1::Replica Queries::ShowReplica(const ModelRun& model,
                                 const ReplicaRun& run) const {
  v1::Replica out;
  out.set_name(absl::StrCat(model.name, "/replicas/", run.name));
  out.set_state(StateOf(run));
  out.set_incarnation(run.incarnation);
  out.set_worker_count(static_cast<int32_t>(run.machine.workers.size()));
  const auto version_of = [&](UpdateKey update) {
    return core_.Describe(model.name, update).version;
  };
  if (run.machine.Servable() &&
      run.machine.workers[0].content.kind == Content::kInstalled) {
    out.set_update_id(core_.IdOf(run.machine.workers[0].content.update));
    out.set_version(version_of(run.machine.workers[0].content.update));
  }
  const ReplicaEntry* entry = core_.registry_.FindReplica(model.name, run.name);
  if (entry != nullptr) {
    if (entry->control) out.set_node(absl::StrCat("nodes/", entry->node));
    out.set_client(entry->registration.client());
  }
  for (size_t i = 0; i < run.machine.workers.size(); ++i) {
    const ReplicaWorker& worker = run.machine.workers[i];
    if (!worker.present) continue;
    v1::Worker* shown = out.add_workers();
    shown->set_index(static_cast<int32_t>(i));
    v1::InstalledState* installed = shown->mutable_installed();
    switch (worker.content.kind) {
      case Content::kOwn:
        break;
      case Content::kInstalled:
        installed->set_state(v1::InstalledState::STATE_INSTALLED);
        break;
      case Content::kWriting:
        installed->set_state(v1::InstalledState::STATE_WRITING);
        break;
      case Content::kNothing:
        installed->set_state(v1::InstalledState::STATE_NOTHING);
        break;
    }
    installed->set_update_id(core_.IdOf(worker.content.update));
    installed->set_version(version_of(worker.content.update));
    if (entry != nullptr && i < entry->workers.size()) {
      shown->set_node(absl::StrCat("nodes/", entry->workers[i].node));
      shown->set_pid(entry->workers[i].registration.pid());
      shown->set_client(entry->workers[i].registration.client());
      shown->set_tensor_bytes(entry->workers[i].tensor_bytes);
    }
  }
  for (const Holder& holder : run.machine.holders) {
    switch (holder.kind) {
      case Holder::kUpdate:
        out.add_pause_holders(
            absl::StrCat("update/", core_.IdOf(holder.update)));
        break;
      case Holder::kInstall:
        out.add_pause_holders(
            holder.update == kRemoval
                ? "remove"
                : absl::StrCat("install/", core_.IdOf(holder.update)));
        break;
      case Holder::kOperator:
        out.add_pause_holders("operator");
        break;
      case Holder::kIsolation:
        out.add_pause_holders("isolation");
        break;
    }
  }
  if (!model.commits.empty()) {
    const UpdateKey newest = core_.FindKey(model.Newest().update_id);
    out.set_behind(run.machine.Complete() &&
                   !run.machine.InstalledEverywhere(newest));
  } else if (model.removed) {
    out.set_behind(run.machine.Complete() &&
                   !run.machine.InstalledEverywhere(kRemoval));
  }
  for (const v1::ReplicaTimes& times : run.history) {
    *out.add_history() = times;
  }
  if (IsFailure(run.last_failure))
    *out.mutable_last_failure() = run.last_failure;
  return out;
}

absl::StatusOr<v1::Replica> Queries::GetReplica(absl::string_view name,
                                                bool tensors) const {
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  if (parts.size() != 4 || parts[0] != "models" || parts[2] != "replicas" ||
      !IsShortName(parts[1], true) || !IsShortName(parts[3], false)) {
    return BadName(name, "models/{model}/replicas/{replica}");
  }
  auto model = FindModel(absl::StrCat("models/", parts[1]));
  if (!model.ok()) return model.status();
  auto it = (*model)->replicas.find(parts[3]);
  if (it == (*model)->replicas.end()) return Unknown("REPLICA_UNKNOWN", name);
  v1::Replica out = ShowReplica(**model, it->second);
  const ReplicaEntry* entry =
      core_.registry_.FindReplica((*model)->name, parts[3]);
  for (v1::Worker& worker : *out.mutable_workers()) {
    if (!tensors || entry == nullptr ||
        worker.index() >= static_cast<int>(entry->workers.size())) {
      break;
    }
    *worker.mutable_tensors() =
        entry->workers[worker.index()].registration.tensors();
  }
  return out;
}

absl::StatusOr<v1::ListReplicasResponse> Queries::ListReplicas(
    const v1::ListReplicasRequest& request) const {
  auto parents = Parents(request.parent());
  if (!parents.ok()) return parents.status();
  std::vector<std::string> keys;
  std::vector<std::pair<const ModelRun*, const ReplicaRun*>> runs;
  for (const ModelRun* model : *parents) {
    for (const auto& replica : model->replicas) {
      keys.push_back(absl::StrCat(model->name, "/replicas/", replica.first));
      runs.emplace_back(model, &replica.second);
    }
  }
  v1::ListReplicasResponse response;
  size_t begin = 0;
  size_t end = 0;
  absl::Status status = Page(keys, request.page_size(), request.page_token(),
                             &begin, &end, response.mutable_next_page_token());
  if (!status.ok()) return status;
  for (size_t i = begin; i < end; ++i) {
    *response.add_replicas() = ShowReplica(*runs[i].first, *runs[i].second);
  }
  return response;
}

// ---- Versions ----

bool Queries::StillAbsent(const ModelRun& model, const std::string& replica,
                          const std::string& update_id) const {
  if (model.unseen_replicas.count(replica) != 0) return true;
  const auto run = model.replicas.find(replica);
  // One that was deleted, or not seen for too long, is not waited for.
  if (run == model.replicas.end()) return false;
  const ReplicaState& machine = run->second.machine;
  const auto& history = run->second.history;
  // Of those that are remembered: it, and what was committed after it.
  auto commit = std::find_if(model.commits.begin(), model.commits.end(),
                             [&update_id](const CommittedUpdate& known) {
                               return known.update_id == update_id;
                             });
  if (commit == model.commits.end()) commit = model.commits.begin();
  return std::none_of(
      commit, model.commits.end(), [&](const CommittedUpdate& known) {
        const UpdateKey key = core_.FindKey(known.update_id);
        if (key != 0 && machine.DoneWith(key)) return true;
        // It has gone since.
        return std::any_of(history.begin(), history.end(),
                           [&known](const v1::ReplicaTimes& times) {
                             return times.update_id() == known.update_id &&
                                    times.has_resumed_time() &&
                                    !IsFailure(times.failure());
                           });
      });
}

v1::Version Queries::Show(const ModelRun& model,
                          const v1::Version& record) const {
  v1::Version out = record;
  // Before the commit nobody has it, and of one that failed nobody gets it.
  if (!record.has_commit_time()) return out;
  out.clear_absent_replicas();
  for (const std::string& name : record.absent_replicas()) {
    const std::string replica = name.substr(name.rfind('/') + 1);
    if (StillAbsent(model, replica, record.update_id())) {
      out.add_absent_replicas(name);
    }
  }
  return out;
}

v1::Version Queries::ShowRunning(const ModelRun& model, const UpdateRun& update,
                                 absl::Time now) const {
  v1::Version out = Show(model, update.record);
  if (update.phase_name.empty()) return out;
  v1::PhaseTime* phase = nullptr;
  for (v1::PhaseTime& known : *out.mutable_phases()) {
    if (known.phase() == update.phase_name) phase = &known;
  }
  if (phase == nullptr) {
    phase = out.add_phases();
    phase->set_phase(update.phase_name);
    core_.ShowPrediction(update, phase);
  }
  *phase->mutable_measured() =
      ToProto(FromProto(phase->measured()) + now - update.phase_begin);
  return out;
}

std::vector<v1::Version> Queries::Versions(const ModelRun& model,
                                           absl::Time now) const {
  std::vector<v1::Version> versions;
  for (auto it = model.updates.rbegin(); it != model.updates.rend(); ++it) {
    versions.push_back(ShowRunning(model, **it, now));
  }
  for (auto it = model.ended.rbegin(); it != model.ended.rend(); ++it) {
    versions.push_back(Show(model, *it));
  }
  return versions;
}

absl::StatusOr<v1::Version> Queries::GetVersion(absl::string_view name,
                                                absl::string_view update_id,
                                                absl::Time now) const {
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  int64_t number = 0;
  if (parts.size() != 4 || parts[0] != "models" || parts[2] != "versions" ||
      !IsShortName(parts[1], true) ||
      (parts[3] != "latest" && !absl::SimpleAtoi(parts[3], &number))) {
    return BadName(name,
                   "models/{model}/versions/{version}, or …/versions/latest");
  }
  auto model = FindModel(absl::StrCat("models/", parts[1]));
  if (!model.ok()) return model.status();
  const auto meant = [&](const v1::Version& version) {
    return (parts[3] == "latest" || version.version() == number) &&
           (update_id.empty() || version.update_id() == update_id);
  };
  for (auto it = (*model)->updates.rbegin(); it != (*model)->updates.rend();
       ++it) {
    if (meant((*it)->record)) return ShowRunning(**model, **it, now);
  }
  for (auto it = (*model)->ended.rbegin(); it != (*model)->ended.rend(); ++it) {
    if (meant(*it)) return Show(**model, *it);
  }
  return Unknown("VERSION_UNKNOWN",
                 update_id.empty()
                     ? std::string(name)
                     : absl::StrCat(name, " (update ", update_id, ")"));
}

absl::StatusOr<v1::ListVersionsResponse> Queries::ListVersions(
    const v1::ListVersionsRequest& request, absl::Time now) const {
  auto parents = Parents(request.parent());
  if (!parents.ok()) return parents.status();
  std::vector<std::string> keys;
  std::vector<v1::Version> all;
  for (const ModelRun* model : *parents) {
    for (v1::Version& version : Versions(*model, now)) {
      keys.push_back(version.update_id());
      all.push_back(std::move(version));
    }
  }
  v1::ListVersionsResponse response;
  size_t begin = 0;
  size_t end = 0;
  absl::Status status = Page(keys, request.page_size(), request.page_token(),
                             &begin, &end, response.mutable_next_page_token());
  if (!status.ok()) return status;
  for (size_t i = begin; i < end; ++i) {
    *response.add_versions() = std::move(all[i]);
  }
  return response;
}

}  // namespace daemon
}  // namespace weightsync
