#include "daemon/coordinator/registry.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/fit.h"
#include "daemon/node/convert.h"
#include "schedule/dtype.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

bool IsShortName(absl::string_view name, bool strict) {
  if (name.empty() || name.size() > 63) return false;
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
  };
  if (strict && !letter(name[0])) return false;
  return std::all_of(name.begin(), name.end(), [&](char c) {
    return letter(c) || c == '.' || c == '_' || c == '-';
  });
}

bool IsResourceName(absl::string_view kind, absl::string_view name) {
  const std::string prefix = absl::StrCat(kind, "/");
  return name.substr(0, prefix.size()) == prefix &&
         IsShortName(name.substr(prefix.size()), true);
}

namespace {

Fault BadModelName(absl::string_view model) {
  return Fault(StatusCode::kInvalidArgument, "MODEL_NAME_INVALID",
               absl::StrCat("\"", model,
                            "\" is not models/{model} with 1 to 63 of "
                            "[a-z0-9._-], beginning with a letter or digit"));
}

}  // namespace

bool ReplicaEntry::Complete() const {
  return control && !workers.empty() &&
         std::all_of(workers.begin(), workers.end(),
                     [](const WorkerEntry& w) { return w.present && w.ready; });
}

bool ReplicaEntry::Empty() const {
  return !control &&
         std::none_of(workers.begin(), workers.end(),
                      [](const WorkerEntry& w) { return w.present; });
}

bool ModelEntry::Publishable() const { return Unpublishable().ok(); }

Fault ModelEntry::Unpublishable() const {
  std::vector<std::string> missing;
  for (int32_t rank = 0; rank < world_size && missing.size() < 16; ++rank) {
    auto it = ranks.find(rank);
    if (it == ranks.end() || !it->second.registered) {
      missing.push_back(absl::StrCat(rank));
    }
  }
  if (world_size == 0) {
    return Fault(StatusCode::kDeadlineExceeded, "WORLD_INCOMPLETE",
                 absl::StrCat("no trainer rank of ", name, " is here"));
  }
  if (!missing.empty()) {
    return Fault(StatusCode::kDeadlineExceeded, "WORLD_INCOMPLETE",
                 absl::StrCat("of ", world_size, " ranks of ", name,
                              " these have not registered their shards: ",
                              absl::StrJoin(missing, ", ")));
  }
  return misfit;
}

ModelEntry* Registry::MutableModel(absl::string_view model) {
  auto it = models_.find(model);
  return it == models_.end() ? nullptr : &it->second;
}

const ModelEntry* Registry::FindModel(absl::string_view model) const {
  auto it = models_.find(model);
  return it == models_.end() ? nullptr : &it->second;
}

ReplicaEntry* Registry::MutableReplica(absl::string_view model,
                                       absl::string_view replica) {
  return const_cast<ReplicaEntry*>(FindReplica(model, replica));
}

const ReplicaEntry* Registry::FindReplica(absl::string_view model,
                                          absl::string_view replica) const {
  const ModelEntry* entry = FindModel(model);
  if (entry == nullptr) return nullptr;
  auto it = entry->replicas.find(std::string(replica));
  return it == entry->replicas.end() ? nullptr : &it->second;
}

void Registry::AddModel(const std::string& model) {
  models_[model].name = model;
}

// ---- Trainer ranks ----

Fault Registry::ClaimRank(const std::string& node, const v1::ClaimRank& claim) {
  if (!IsResourceName("models", claim.model()))
    return BadModelName(claim.model());
  if (claim.world_size() < 1 || claim.rank() < 0 ||
      claim.rank() >= claim.world_size()) {
    return Fault(StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE",
                 absl::StrCat("rank ", claim.rank(), " of a world of ",
                              claim.world_size(), " does not exist"));
  }
  ModelEntry* model = MutableModel(claim.model());
  if (model != nullptr) {
    auto it = model->ranks.find(claim.rank());
    if (it != model->ranks.end() && it->second.session != claim.session()) {
      return Fault(
          StatusCode::kAlreadyExists, "RANK_TAKEN",
          absl::StrCat("rank ", claim.rank(), " of ", claim.model(),
                       " is held by process ", it->second.pid, " on node ",
                       it->second.node, "; end it first"));
    }
    const bool others =
        model->ranks.size() > (it != model->ranks.end() ? 1 : 0);
    if (model->world_size != claim.world_size() && others) {
      return Fault(StatusCode::kFailedPrecondition, "WORLD_SIZE_MISMATCH",
                   absl::StrCat("rank ", claim.rank(), " says a world of ",
                                claim.world_size(), ", the live ranks of ",
                                claim.model(), " say ", model->world_size));
    }
  } else {
    AddModel(claim.model());
    model = MutableModel(claim.model());
  }
  model->world_size = claim.world_size();
  RankEntry& rank = model->ranks[claim.rank()];
  rank.rank = claim.rank();
  rank.node = node;
  rank.session = claim.session();
  rank.pid = claim.pid();
  rank.client = claim.client();
  return Fault();
}

namespace {

bool SameShards(const v1::RankShards& a, const v1::RankShards& b) {
  return a.ByteSizeLong() == b.ByteSizeLong() &&
         a.SerializeAsString() == b.SerializeAsString();
}

void Say(const RankEntry& rank, ModelEntry* model) {
  for (const v1::Parameter& parameter : rank.shards.parameters()) {
    ModelEntry::Said& said = model->said[parameter.name()];
    if (said.ranks++ == 0) said.parameter = parameter;
  }
}

void Unsay(const RankEntry& rank, ModelEntry* model) {
  for (const v1::Parameter& parameter : rank.shards.parameters()) {
    const auto said = model->said.find(parameter.name());
    if (said != model->said.end() && --said->second.ranks == 0) {
      model->said.erase(said);
    }
  }
}

}  // namespace

Fault Registry::CheckSaid(const ModelEntry& model,
                          const v1::RankShards& fresh) const {
  const bool agrees =
      std::all_of(fresh.parameters().begin(), fresh.parameters().end(),
                  [&model](const v1::Parameter& parameter) {
                    const auto said = model.said.find(parameter.name());
                    return said == model.said.end() ||
                           SameParameter(said->second.parameter, parameter);
                  });
  if (agrees) return Fault();
  // Who says otherwise; or it is this rank alone that does, and has changed.
  for (const auto& other : model.ranks) {
    if (!other.second.registered || other.first == fresh.rank()) continue;
    Fault fault = CheckAgreement(other.second.shards, fresh);
    if (!fault.ok()) return fault;
  }
  return Fault();
}

Fault Registry::RegisterShards(const v1::RankShards& shards,
                               std::vector<Refusal>* refusals) {
  ModelEntry* model = MutableModel(shards.model());
  RankEntry* rank = nullptr;
  if (model != nullptr) {
    auto it = model->ranks.find(shards.rank());
    if (it != model->ranks.end()) rank = &it->second;
  }
  if (rank == nullptr || rank->session != shards.session()) {
    return Fault(StatusCode::kNotFound, "SESSION_UNKNOWN",
                 absl::StrCat("rank ", shards.rank(), " of ", shards.model(),
                              " has no such session; open one first"));
  }
  // A node that is back says again what it has, and so does a trainer at every
  // publish that names its tensors.
  if (rank->registered && SameShards(rank->shards, shards)) return Fault();
  int64_t bytes = 0;
  Fault fault = CheckShards(shards, &bytes);
  if (fault.ok()) fault = CheckSaid(*model, shards);
  if (!fault.ok()) return fault;

  const bool registered = rank->registered;
  if (registered) Unsay(*rank, model);
  rank->shards = shards;
  rank->shard_bytes = bytes;
  rank->registered = true;
  Say(*rank, model);
  fault = Fit(model, refusals);
  // A rank that changes its layout comes before the others that do: the model
  // waits for them. A new one that does not fit is told.
  if (!fault.ok() && !registered) {
    Unsay(*rank, model);
    rank->shards.Clear();
    rank->shard_bytes = 0;
    rank->registered = false;
    model->misfit = Fault();
    return fault;
  }
  model->misfit = fault;
  return Fault();
}

bool Registry::RemoveRank(const std::string& model, int32_t rank,
                          const std::string& session) {
  ModelEntry* entry = MutableModel(model);
  if (entry == nullptr) return false;
  auto it = entry->ranks.find(rank);
  if (it == entry->ranks.end() || it->second.session != session) return false;
  if (it->second.registered) Unsay(it->second, entry);
  entry->ranks.erase(it);
  entry->misfit = Fault();
  return true;
}

Fault Registry::Fit(ModelEntry* model, std::vector<Refusal>* refusals) {
  model->misfit = Fault();
  if (!model->Publishable()) return Fault();
  std::vector<const v1::RankShards*> ranks;
  for (const auto& entry : model->ranks) ranks.push_back(&entry.second.shards);
  std::shared_ptr<const schedule::Catalog> catalog;
  ++fits_;
  Fault fault = FitCatalog(ranks, &catalog);
  if (!fault.ok()) return fault;
  if (model->catalog == nullptr ||
      model->catalog->digest() != catalog->digest()) {
    model->catalog = std::move(catalog);
    model->parameters.clear();
    model->parameters.reserve(model->catalog->size());
    for (const schedule::Param& param : model->catalog->params()) {
      model->parameters.push_back(ToProto(param));
    }
  }
  // Also where it is the same: some came while no trainer was whole, and were
  // not checked.
  for (const auto& entry : model->replicas) {
    const ReplicaEntry& replica = entry.second;
    for (size_t i = 0; i < replica.workers.size(); ++i) {
      const WorkerEntry& worker = replica.workers[i];
      if (!worker.present) continue;
      Fault unfit = CheckWanted(*model->catalog, worker.registration);
      if (unfit.ok()) continue;
      refusals->push_back({worker.node, replica.name, replica.incarnation,
                           static_cast<int>(i), std::move(unfit)});
    }
    Fault incomplete = CheckReplica(model->name, replica.name);
    if (!incomplete.ok()) {
      refusals->push_back({replica.node, replica.name, replica.incarnation, -1,
                           std::move(incomplete)});
    }
  }
  return Fault();
}

// ---- Replicas ----

Fault Registry::EnterReplica(const std::string& model,
                             const std::string& replica,
                             const std::string& incarnation,
                             int32_t worker_count,
                             absl::string_view taken_reason,
                             ReplicaEntry** entry, bool* is_new) {
  if (!IsResourceName("models", model)) return BadModelName(model);
  if (!IsShortName(replica, false)) {
    return Fault(
        StatusCode::kInvalidArgument, "REPLICA_NAME_INVALID",
        absl::StrCat("\"", replica, "\" is not 1 to 63 of [a-z0-9._-]"));
  }
  if (worker_count < 1 || worker_count > 4096) {
    return Fault(StatusCode::kInvalidArgument, "WORKER_COUNT_INVALID",
                 absl::StrCat("replica ", replica, " says ", worker_count,
                              " workers; it has 1 to 4096"));
  }
  *is_new = true;
  const ReplicaEntry* known = FindReplica(model, replica);
  if (known != nullptr && known->incarnation == incarnation) {
    if (static_cast<int32_t>(known->workers.size()) != worker_count) {
      return Fault(StatusCode::kInvalidArgument, "WORKER_COUNT_INVALID",
                   absl::StrCat("replica ", replica, " says ", worker_count,
                                " workers here and ", known->workers.size(),
                                " elsewhere"));
    }
    *is_new = false;
  } else if (known != nullptr && !known->Empty()) {
    return Fault(
        StatusCode::kAlreadyExists, std::string(taken_reason),
        absl::StrCat(model, "/replicas/", replica, " is alive as incarnation ",
                     known->incarnation, " on node ", known->node,
                     "; end it, or take another name"));
  }
  AddModel(model);
  *entry = &models_[model].replicas[replica];
  if (*is_new) {
    **entry = ReplicaEntry();
    (*entry)->name = replica;
    (*entry)->incarnation = incarnation;
    (*entry)->workers.resize(worker_count);
  }
  return Fault();
}

Fault Registry::JoinReplica(const std::string& node,
                            const v1::RegisterReplica& registration,
                            bool* is_new) {
  ReplicaEntry* replica = nullptr;
  Fault fault = EnterReplica(
      registration.model(), registration.replica(), registration.incarnation(),
      registration.worker_count(), "REPLICA_TAKEN", &replica, is_new);
  if (!fault.ok()) return fault;
  replica->control = true;
  replica->node = node;
  replica->registration = registration;
  fault = CheckReplica(registration.model(), registration.replica());
  if (!fault.ok()) replica->control = false;
  return fault;
}

Fault Registry::JoinWorker(const std::string& node,
                           const v1::RegisterWorker& registration, bool ready,
                           bool* is_new) {
  int64_t bytes = 0;
  Fault fault = CheckTensors(registration, &bytes);
  const ModelEntry* model = FindModel(registration.model());
  // A trainer with another catalog may be on its way where none is whole.
  if (fault.ok() && model != nullptr && model->catalog != nullptr &&
      model->Publishable()) {
    fault = CheckWanted(*model->catalog, registration);
  }
  if (fault.ok() &&
      (registration.worker_index() < 0 ||
       registration.worker_index() >= registration.worker_count())) {
    fault = Fault(
        StatusCode::kInvalidArgument, "WORKER_INDEX_INVALID",
        absl::StrCat("worker ", registration.worker_index(), " of ",
                     registration.worker_count(), " does not exist in replica ",
                     registration.replica()));
  }
  if (!fault.ok()) return fault;
  ReplicaEntry* replica = nullptr;
  fault = EnterReplica(registration.model(), registration.replica(),
                       registration.incarnation(), registration.worker_count(),
                       "WORKER_TAKEN", &replica, is_new);
  if (!fault.ok()) return fault;
  WorkerEntry& worker = replica->workers[registration.worker_index()];
  worker.present = true;
  worker.ready = ready;
  worker.node = node;
  worker.registration = registration;
  worker.registration_number = next_registration_++;
  worker.tensor_bytes = bytes;
  return Fault();
}

Fault Registry::CheckReplica(const std::string& model,
                             const std::string& replica) const {
  const ModelEntry* entry = FindModel(model);
  const ReplicaEntry* found = FindReplica(model, replica);
  if (found == nullptr || entry->catalog == nullptr || !entry->Publishable() ||
      !found->Complete() || found->registration.partial()) {
    return Fault();
  }
  std::vector<const v1::RegisterWorker*> workers;
  for (const WorkerEntry& worker : found->workers) {
    workers.push_back(&worker.registration);
  }
  return CheckCoverage(*entry->catalog, workers,
                       absl::StrCat(model, "/replicas/", replica));
}

bool Registry::RemoveControl(const std::string& model,
                             const std::string& replica,
                             const std::string& incarnation) {
  ReplicaEntry* entry = MutableReplica(model, replica);
  if (entry == nullptr || entry->incarnation != incarnation ||
      !entry->control) {
    return false;
  }
  entry->control = false;
  return true;
}

bool Registry::RemoveWorker(const std::string& model,
                            const std::string& replica, int worker,
                            const std::string& incarnation) {
  ReplicaEntry* entry = MutableReplica(model, replica);
  if (entry == nullptr || entry->incarnation != incarnation || worker < 0 ||
      worker >= static_cast<int>(entry->workers.size()) ||
      !entry->workers[worker].present) {
    return false;
  }
  entry->workers[worker].present = false;
  return true;
}

void Registry::ForgetReplica(const std::string& model,
                             const std::string& replica) {
  ModelEntry* entry = MutableModel(model);
  if (entry != nullptr) entry->replicas.erase(replica);
}

int64_t Registry::StoreBytes(const std::string& model,
                             const std::string& node) const {
  const ModelEntry* entry = FindModel(model);
  if (entry == nullptr) return 0;
  struct Wanted {
    std::set<std::string> boxes;
    int64_t bytes = 0;
    int64_t whole = 0;
  };
  std::map<std::string, Wanted> wanted;
  for (const auto& replica : entry->replicas) {
    for (const WorkerEntry& worker : replica.second.workers) {
      if (!worker.present || worker.node != node) continue;
      for (const v1::WantedTensor& tensor : worker.registration.tensors()) {
        Wanted& part = wanted[tensor.name()];
        const int64_t element = schedule::DTypeSize(FromProto(tensor.dtype()));
        int64_t whole = element;
        for (const int64_t extent : tensor.shape()) whole *= extent;
        int64_t box = element;
        for (const int64_t extent : tensor.box().extent()) box *= extent;
        if (!tensor.has_box()) box = whole;
        if (part.boxes.insert(tensor.box().SerializeAsString()).second) {
          part.bytes += box;
        }
        part.whole = whole;
      }
    }
  }
  int64_t bytes = 0;
  for (const auto& part : wanted) {
    bytes += std::min(part.second.bytes, part.second.whole);
  }
  return bytes;
}

namespace {

using NodeIndices = std::map<std::string, int32_t>;
using NodesLabels = std::map<std::string, std::map<std::string, std::string>>;

// Those that the map names, in its order; it gets their indices.
void AddNodes(const NodesLabels& labels, NodeIndices* nodes,
              v1::DefineLayout* define) {
  for (auto& node : *nodes) {
    node.second = define->nodes_size();
    v1::LayoutNode* out = define->add_nodes();
    out->set_node(node.first);
    auto it = labels.find(node.first);
    if (it == labels.end()) continue;
    for (const auto& label : it->second) {
      (*out->mutable_labels())[label.first] = label.second;
    }
  }
}

void AddWorkers(const ModelEntry& entry, const std::set<std::string>& replicas,
                const NodeIndices& nodes,
                const std::function<int32_t(const std::string&)>& ordinal_of,
                v1::DefineLayout* define) {
  for (const std::string& name : replicas) {
    const ReplicaEntry& replica = entry.replicas.at(name);
    for (size_t i = 0; i < replica.workers.size(); ++i) {
      const WorkerEntry& worker = replica.workers[i];
      v1::LayoutWorker* out = define->add_workers();
      out->set_replica(name);
      out->set_worker_index(static_cast<int32_t>(i));
      out->set_node(nodes.at(worker.node));
      for (const v1::WantedTensor& tensor : worker.registration.tensors()) {
        v1::OrdinalBox* box = out->add_boxes();
        box->set_ordinal(ordinal_of(tensor.name()));
        if (tensor.has_box()) *box->mutable_box() = tensor.box();
      }
    }
  }
}

std::string Show(const v1::Parameter& parameter) {
  return absl::StrCat(schedule::DTypeName(FromProto(parameter.dtype())), " [",
                      absl::StrJoin(parameter.shape(), ", "), "]");
}

}  // namespace

v1::DefineLayout Registry::LayoutInput(
    const std::string& model, const std::set<std::string>& replicas,
    const std::map<std::string, std::map<std::string, std::string>>& labels,
    int64_t bucket_bytes) const {
  const ModelEntry& entry = *FindModel(model);
  v1::DefineLayout define;
  define.set_model(model);
  define.set_bucket_bytes(bucket_bytes);
  for (const v1::Parameter& parameter : entry.parameters) {
    *define.add_catalog() = parameter;
  }
  NodeIndices nodes;
  for (const auto& rank : entry.ranks) nodes[rank.second.node] = 0;
  for (const std::string& name : replicas) {
    for (const WorkerEntry& worker : entry.replicas.at(name).workers) {
      nodes[worker.node] = 0;
    }
  }
  AddNodes(labels, &nodes, &define);
  const auto ordinal_of = [&entry](const std::string& name) {
    return static_cast<int32_t>(*entry.catalog->Find(name));
  };
  for (const auto& rank : entry.ranks) {
    v1::LayoutSource* source = define.add_sources();
    source->set_rank(rank.first);
    source->set_node(nodes[rank.second.node]);
    for (const v1::ShardBox& shard : rank.second.shards.shards()) {
      v1::OrdinalBox* box = source->add_shards();
      box->set_ordinal(
          ordinal_of(rank.second.shards.parameters(shard.parameter()).name()));
      if (shard.has_box()) *box->mutable_box() = shard.box();
      box->set_dtype(HeldOtherwise(
          shard, rank.second.shards.parameters(shard.parameter())));
    }
  }
  AddWorkers(entry, replicas, nodes, ordinal_of, &define);
  return define;
}

Fault Registry::FitCheckpoint(const std::string& model,
                              const std::set<std::string>& replicas,
                              std::vector<v1::Parameter>* parameters) const {
  const auto mismatch = [](const std::string& message) {
    return Fault(StatusCode::kFailedPrecondition, "CHECKPOINT_MISMATCH",
                 message);
  };
  const ModelEntry& entry = *FindModel(model);
  if (entry.catalog != nullptr) {
    std::map<std::string, const v1::Parameter*> found;
    for (const v1::Parameter& parameter : *parameters) {
      found[parameter.name()] = &parameter;
    }
    for (const v1::Parameter& known : entry.parameters) {
      auto it = found.find(known.name());
      if (it == found.end()) {
        return mismatch(absl::StrCat("the checkpoint lacks \"", known.name(),
                                     "\" of ", model));
      }
      if (Show(*it->second) != Show(known)) {
        return mismatch(absl::StrCat(
            "\"", known.name(), "\" is ", Show(*it->second),
            " in the checkpoint and ", Show(known), " in ", model));
      }
      found.erase(it);
    }
    if (!found.empty()) {
      return mismatch(absl::StrCat("the checkpoint has \"",
                                   found.begin()->first, "\", which ", model,
                                   " has not"));
    }
    *parameters = entry.parameters;
  }
  std::vector<schedule::Param> params;
  for (const v1::Parameter& parameter : *parameters) {
    params.push_back(ParamFromProto(parameter));
  }
  const auto catalog = schedule::Catalog::Create(std::move(params));
  if (!catalog.ok()) return mismatch(std::string(catalog.status().message()));
  for (const std::string& name : replicas) {
    const ReplicaEntry& replica = entry.replicas.at(name);
    std::vector<const v1::RegisterWorker*> workers;
    for (const WorkerEntry& worker : replica.workers) {
      Fault fault = CheckWanted(*catalog, worker.registration);
      if (!fault.ok()) {
        return mismatch(absl::StrCat(
            model, "/replicas/", name,
            " wants what the checkpoint has not: ", fault.message));
      }
      workers.push_back(&worker.registration);
    }
    if (replica.registration.partial()) continue;
    Fault fault = CheckCoverage(*catalog, workers,
                                absl::StrCat(model, "/replicas/", name));
    if (!fault.ok()) return fault;
  }
  return Fault();
}

v1::DefineLayout Registry::LoadInput(
    const std::string& model, const std::set<std::string>& replicas,
    const std::vector<v1::Parameter>& parameters,
    const std::map<std::string, std::map<std::string, std::string>>& labels,
    int64_t bucket_bytes) const {
  const ModelEntry& entry = *FindModel(model);
  v1::DefineLayout define;
  define.set_model(model);
  define.set_bucket_bytes(bucket_bytes);
  std::map<std::string, int32_t> ordinals;
  for (const v1::Parameter& parameter : parameters) {
    ordinals[parameter.name()] = define.catalog_size();
    *define.add_catalog() = parameter;
  }
  NodeIndices nodes;
  nodes[kCheckpointSource] = 0;
  for (const std::string& name : replicas) {
    for (const WorkerEntry& worker : entry.replicas.at(name).workers) {
      nodes[worker.node] = 0;
    }
  }
  AddNodes(labels, &nodes, &define);
  v1::LayoutSource* source = define.add_sources();
  source->set_node(nodes[kCheckpointSource]);
  for (int i = 0; i < define.catalog_size(); ++i) {
    source->add_shards()->set_ordinal(i);
  }
  AddWorkers(
      entry, replicas, nodes,
      [&ordinals](const std::string& name) { return ordinals.at(name); },
      &define);
  return define;
}

void Registry::SetCatalog(const std::string& model,
                          const std::vector<v1::Parameter>& parameters) {
  ModelEntry* entry = MutableModel(model);
  if (entry == nullptr || entry->catalog != nullptr) return;
  std::vector<schedule::Param> params;
  for (const v1::Parameter& parameter : parameters) {
    params.push_back(ParamFromProto(parameter));
  }
  auto catalog = schedule::Catalog::Create(std::move(params));
  if (!catalog.ok()) return;
  entry->catalog =
      std::make_shared<const schedule::Catalog>(*std::move(catalog));
  entry->parameters = parameters;
}

}  // namespace daemon
}  // namespace weightsync
