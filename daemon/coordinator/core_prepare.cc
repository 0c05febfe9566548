// AdminService.Prepare: a PrepareUpdate that no update follows.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "proto/plan.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

Actions CoordinatorCore::OnPrepareRequest(absl::Time now, int64_t request,
                                          const v1::PrepareRequest& prepare) {
  now_ = now;
  actions_.clear();
  const auto refuse = [&](Fault fault) {
    actions_.push_back(PrepareDone{request, ToProto(fault), {}});
    return Take();
  };
  const ModelEntry* entry = registry_.FindModel(prepare.model());
  if (entry == nullptr) {
    return refuse(Fault(StatusCode::kNotFound, "MODEL_UNKNOWN",
                        absl::StrCat(prepare.model(), " is not known here")));
  }
  Fault fault = entry->Unpublishable();
  if (!fault.ok()) {
    fault.code = StatusCode::kFailedPrecondition;
    return refuse(fault);
  }
  ModelRun* model = Model(prepare.model());
  absl::Duration timeout = options_.prepare_timeout;
  if (prepare.has_timeout() &&
      FromProto(prepare.timeout()) > absl::ZeroDuration()) {
    timeout = std::min(timeout, FromProto(prepare.timeout()));
  }
  std::set<std::string> replicas;
  auto layout = LayoutOfNow(model, &replicas);
  if (!layout.ok()) {
    return refuse(Fault(layout.status().code(), ErrorReason(layout.status()),
                        std::string(layout.status().message())));
  }
  if (replicas.empty()) {
    return refuse(
        Fault(StatusCode::kFailedPrecondition, "NO_WORKERS",
              absl::StrCat("no replica of ", model->name, " is complete yet")));
  }
  const KnownLayout& known = **layout;
  // The groups that the next update will want.
  const auto plan =
      PlanLayout(known, PolicyFromProto(NextPolicy(*model)), rates_.rates());
  if (!plan.ok()) {
    return refuse(Fault(plan.status().code(), ErrorReason(plan.status()),
                        std::string(plan.status().message())));
  }
  FlowOptions options;
  options.excluded.resize(known.labels.size());
  std::vector<v1::Flow> flows = FlowsOfPlan(known, plan->plan, options);
  v1::PrepareResponse response;
  response.set_layout_id(known.id());
  response.set_bucket_count(
      static_cast<int32_t>(known.layout.plan.bucket_count()));
  response.set_wire_bytes(WireBytes(known, flows));
  if (!model->updates.empty()) {
    // An update prepares for itself, and leaves what the next one needs.
    actions_.push_back(PrepareDone{request, {}, response});
    return Take();
  }
  if (model->prepare != nullptr &&
      model->prepare->response.layout_id() == known.id()) {
    model->prepare->requests.emplace_back(request, now_ + timeout);
    return Take();
  }
  if (model->prepare != nullptr) {
    EndPrepare(model,
               Fault(StatusCode::kAborted, "LAYOUT_CHANGED",
                     "ranks or replicas changed meanwhile; prepare again"));
  }

  auto job = std::make_unique<PrepareJob>();
  job->requests.emplace_back(request, now_ + timeout);
  job->update_id = options_.random_id();
  job->epoch = ++model->epoch;
  job->begin = now_;
  job->response = response;
  const std::string secret = options_.random_id();
  for (v1::Flow& flow : flows) {
    for (v1::FlowMember& member : *flow.mutable_members()) {
      const NodeRun* node = FindNode(member.node());
      if (node != nullptr) member.set_data_address(node->hello.data_address());
    }
  }
  for (size_t i = 0; i < known.labels.size(); ++i) {
    if (!known.source[i] && !known.receiver[i]) continue;
    const std::string& name = known.labels[i].name;
    job->waiting.insert(name);
    SendLayout(known, name);
    v1::PrepareUpdate* out = SendTo(name)->mutable_prepare_update();
    out->set_model(model->name);
    out->set_update_id(job->update_id);
    out->set_layout_id(known.id());
    out->mutable_epoch()->set_term(term_);
    out->mutable_epoch()->set_counter(job->epoch);
    out->set_group_secret(secret);
    out->set_dry(true);
    *out->mutable_timeout() = ToProto(timeout);
    for (const v1::Flow& flow : flows) {
      const bool member = std::any_of(
          flow.members().begin(), flow.members().end(),
          [&](const v1::FlowMember& m) { return m.node() == name; });
      if (member) *out->add_flows() = flow;
    }
  }
  model->prepare = std::move(job);
  return Take();
}

void CoordinatorCore::DryPrepared(ModelRun* model, const std::string& node,
                                  const v1::UpdatePrepared& report) {
  PrepareJob* job = model->prepare.get();
  if (job == nullptr || report.update_id() != job->update_id ||
      report.epoch().counter() != job->epoch) {
    return;
  }
  Fault fault = FromProto(report.failure());
  if (!fault.ok()) {
    fault.message = SaidBy(absl::StrCat("node ", node), fault.message);
    return EndPrepare(model, fault);
  }
  job->waiting.erase(node);
  if (job->waiting.empty()) {
    *job->response.mutable_prepare_duration() = ToProto(now_ - job->begin);
    EndPrepare(model, Fault());
  }
}

void CoordinatorCore::TickPrepare(ModelRun* model) {
  PrepareJob* job = model->prepare.get();
  if (job == nullptr) return;
  const Fault fault(StatusCode::kDeadlineExceeded, "PREPARE_TIMEOUT",
                    absl::StrCat("not ready to receive in time: node ",
                                 absl::StrJoin(job->waiting, ", ")));
  for (auto it = job->requests.begin(); it != job->requests.end();) {
    if (now_ < it->second) {
      ++it;
      continue;
    }
    actions_.push_back(PrepareDone{it->first, ToProto(fault), {}});
    it = job->requests.erase(it);
  }
  if (job->requests.empty()) model->prepare.reset();
}

void CoordinatorCore::EndPrepare(ModelRun* model, const Fault& fault) {
  const std::unique_ptr<PrepareJob> job = std::move(model->prepare);
  for (const auto& request : job->requests) {
    actions_.push_back(
        PrepareDone{request.first, ToProto(fault),
                    fault.ok() ? job->response : v1::PrepareResponse()});
  }
}

}  // namespace daemon
}  // namespace weightsync
