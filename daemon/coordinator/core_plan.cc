// Plans: of updates as they open, and of models as they would run now; and what
// ended updates teach about rates.

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"
#include "proto/plan.h"
#include "proto/status.h"
#include "schedule/describe.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

v1::DefineLayout CoordinatorCore::LayoutInputNow(
    const ModelRun& model, std::set<std::string>* replicas) const {
  replicas->clear();
  for (const auto& entry : model.replicas) {
    const ReplicaEntry* replica =
        registry_.FindReplica(model.name, entry.first);
    if (replica != nullptr && replica->Complete() &&
        entry.second.machine.Complete() && !Drained(entry.second)) {
      replicas->insert(entry.first);
    }
  }
  std::map<std::string, std::map<std::string, std::string>> labels;
  for (const auto& node : nodes_) {
    for (const auto& label : node.second.hello.labels()) {
      labels[node.first][label.first] = label.second;
    }
  }
  return registry_.LayoutInput(model.name, *replicas, labels,
                               options_.bucket_bytes);
}

absl::Status CoordinatorCore::PlanRun(v1::TransferPolicy policy,
                                      UpdateRun* update) {
  auto chosen =
      PlanLayout(*update->layout, PolicyFromProto(policy), rates_.rates());
  if (!chosen.ok()) return chosen.status();
  const schedule::CostEstimate& cost = chosen->plan.cost;
  v1::Version& record = update->record;
  record.set_transfer_policy(PolicyToProto(chosen->plan.policy));
  record.set_bound_by(cost.bound_by);
  *record.mutable_lower_bound() =
      ToProto(absl::Seconds(cost.lower_bound_seconds));
  update->predicted = PredictPhases(cost, update->model, rates_);
  update->plan =
      std::make_shared<const schedule::PolicyPlan>(std::move(chosen->plan));
  return absl::OkStatus();
}

void CoordinatorCore::ShowPrediction(const UpdateRun& update,
                                     v1::PhaseTime* phase) const {
  auto it = update.predicted.find(phase->phase());
  if (it != update.predicted.end()) {
    *phase->mutable_predicted() = ToProto(it->second);
  }
}

void CoordinatorCore::ShowSnapshotPhase(UpdateRun* update) {
  v1::Version& record = update->record;
  if (record.ranks().empty()) return;  // of a checkpoint
  absl::Duration longest;
  for (const v1::RankProgress& rank : record.ranks()) {
    if (!rank.has_copy_duration()) return;  // not all were copied
    longest = std::max(longest, FromProto(rank.copy_duration()));
  }
  v1::PhaseTime snapshot;
  snapshot.set_phase("snapshot");
  *snapshot.mutable_measured() = ToProto(longest);
  ShowPrediction(*update, &snapshot);
  // Beside the gathering, which it overlaps.
  *record.add_phases() = std::move(snapshot);
  for (int i = record.phases_size() - 1;
       i > 0 && record.phases(i - 1).phase() != "gather"; --i) {
    record.mutable_phases()->SwapElements(i, i - 1);
  }
}

void CoordinatorCore::LearnRates(const UpdateRun& update) {
  // Another route than the planned one measures something else; so does a
  // record without a plan, of an earlier term.
  if (update.plan == nullptr || update.machine.reconfigurations > 0 ||
      update.machine.disk) {
    return;
  }
  RateBook::Seen seen;
  seen.model = update.model;
  std::map<std::string, absl::Duration> measured;
  for (const v1::PhaseTime& phase : update.record.phases()) {
    measured[phase.phase()] = FromProto(phase.measured());
  }
  const schedule::CostEstimate& cost = update.plan->cost;
  seen.link_bytes = BusiestLink(cost);
  seen.transfer = measured["transfer"];
  for (const schedule::NodeCost& node : cost.nodes) {
    seen.apply_bytes = std::max(seen.apply_bytes, node.apply_bytes);
  }
  seen.apply = measured["apply"];
  std::map<int, std::pair<int64_t, absl::Duration>> copied;
  for (const v1::RankProgress& rank : update.record.ranks()) {
    auto index = update.rank_index.find(rank.rank());
    if (index == update.rank_index.end()) continue;
    auto& node = copied[update.machine.ranks[index->second].node];
    node.first += rank.copied_bytes();
    node.second = std::max(node.second, FromProto(rank.copy_duration()));
  }
  for (const auto& node : copied) {
    if (node.second.second > seen.snapshot) {
      seen.snapshot_bytes = node.second.first;
      seen.snapshot = node.second.second;
    }
  }
  for (const char* phase : {"prepare", "pause", "commit", "resume"}) {
    auto it = measured.find(phase);
    if (it != measured.end()) seen.rounds[phase] = it->second;
  }
  rates_.Learn(seen);
}

v1::TransferPolicy CoordinatorCore::NextPolicy(const ModelRun& model) {
  v1::UpdateOptions options;
  if (model.book.pending() != nullptr) {
    google::protobuf::TextFormat::ParseFromString(model.book.pending()->options,
                                                  &options);
  } else if (!model.updates.empty()) {
    options = model.updates.back()->options;
  } else if (!model.ended.empty()) {
    options = model.ended.back().options();
  } else {
    options = model.Newest().options;
  }
  return options.transfer_policy();
}

absl::StatusOr<PlanInputs> CoordinatorCore::InputsOfPlan(
    const v1::PlanRequest& request) const {
  if (!IsResourceName("models", request.model())) {
    return ErrorStatus(
        StatusCode::kInvalidArgument, "RESOURCE_NAME_INVALID",
        absl::StrCat("\"", request.model(), "\" is not models/{model}"));
  }
  auto model = models_.find(request.model());
  const ModelEntry* entry = registry_.FindModel(request.model());
  if (model == models_.end() || entry == nullptr) {
    return ErrorStatus(StatusCode::kNotFound, "MODEL_UNKNOWN",
                       absl::StrCat(request.model(), " is not known here"));
  }
  const Fault fault = entry->Unpublishable();
  if (!fault.ok()) {
    return ErrorStatus(StatusCode::kFailedPrecondition, fault.reason,
                       fault.message);
  }
  std::set<std::string> replicas;
  PlanInputs inputs;
  inputs.define = LayoutInputNow(model->second, &replicas);
  if (replicas.empty()) {
    return ErrorStatus(
        StatusCode::kFailedPrecondition, "NO_WORKERS",
        absl::StrCat("no replica of ", request.model(), " is complete yet"));
  }
  inputs.known = model->second.layouts.Find(inputs.define);
  inputs.policy =
      PolicyFromProto(request.policy() == v1::TRANSFER_POLICY_UNSPECIFIED
                          ? NextPolicy(model->second)
                          : request.policy());
  inputs.rates = rates_.rates();
  // By node: GPUs with slots, and whether the store has memory there.
  struct Gpus {
    std::vector<std::string> at_work;
    bool store = false;
  };
  std::map<std::string, Gpus> gpus;
  for (const auto& node : nodes_) {
    for (const v1::GpuUse& gpu : node.second.memory.gpus()) {
      // Agents that are only for NCCL have no slots.
      if (gpu.slot_count() == 0) continue;
      inputs.gpu_nodes.insert(node.first);
      gpus[node.first].at_work.push_back(gpu.device_uuid());
      gpus[node.first].store |= gpu.device_store_bytes() > 0;
    }
  }
  for (const std::string& name : replicas) {
    for (const WorkerEntry& worker : entry->replicas.at(name).workers) {
      const auto on = gpus.find(worker.node);
      if (on == gpus.end() || !on->second.store) continue;
      const auto& reached = worker.registration.device_uuids();
      const bool all =
          std::all_of(on->second.at_work.begin(), on->second.at_work.end(),
                      [&reached](const std::string& uuid) {
                        return std::find(reached.begin(), reached.end(),
                                         uuid) != reached.end();
                      });
      if (all) {
        inputs.gpu_to_gpu.insert({name, worker.registration.worker_index()});
      }
    }
  }
  return inputs;
}

}  // namespace daemon
}  // namespace weightsync
