// What would be sent, and under which names.

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/ctl/ctl.h"
#include "client/ctl/mapping.h"
#include "client/ctl/plan.h"
#include "proto/plan.h"
#include "proto/status.h"
#include "schedule/catalog.h"
#include "schedule/describe.h"

namespace weightsync {
namespace ctl {

absl::StatusOr<v1::PlanResponse> Ctl::AskPlan(const PlanOrder& order) {
  v1::PlanRequest request;
  request.set_model(order.registered);
  // Without one it is the model's own, as it would run now.
  if (!order.spec.policy().empty()) {
    const absl::StatusOr<schedule::Policy> policy =
        schedule::ParsePolicy(order.spec.policy());
    if (!policy.ok()) return policy.status();
    request.set_policy(PolicyToProto(*policy));
  }
  v1::PlanResponse response;
  const absl::Status status = Call("Plan", [&](grpc::ClientContext* context) {
    return stub_->Plan(context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

int Ctl::Plan() {
  if (!arguments_.positional.empty()) {
    return Usage(
        "plan takes options only: --registered MODEL for one that is "
        "registered, --model NAME for a known one");
  }
  const absl::StatusOr<PlanOrder> order = ReadPlanOrder(arguments_.options);
  if (!order.ok()) {
    const bool usage = !order.status().GetPayload(kReasonPayload).has_value();
    return usage ? UsageOf(order.status()) : Fail(order.status());
  }
  v1::PlanResponse response;
  std::string copies;
  if (!order->registered.empty()) {
    absl::StatusOr<v1::PlanResponse> asked = AskPlan(*order);
    if (!asked.ok()) return Fail(asked.status());
    response = *std::move(asked);
  } else {
    const absl::Time start = absl::Now();
    const absl::StatusOr<schedule::PlanReport> report =
        PlanOfSpec(order->spec, order->catalog.get(), order->workers);
    if (!report.ok()) return Fail(report.status());
    response = ToPlanResponse(*report, absl::Now() - start);
    if (!arguments_.json) copies = RenderCopies(*report);
  }
  if (arguments_.json && response.json().empty()) {
    return Fail(ErrorStatus(
        absl::StatusCode::kResourceExhausted, "PLAN_TOO_LARGE",
        "the daemon left the JSON of this plan out, for one answer does not "
        "hold it; the table, without --json, is there"));
  }
  if (arguments_.json) {
    *screen_.out << response.json() << "\n";
  } else {
    *screen_.out << RenderPlan(PlanTitle(*order), response) << copies;
  }
  return kExitOk;
}

absl::StatusOr<std::vector<NamedTensor>> Ctl::ReadNames(
    const std::string& source) {
  std::vector<NamedTensor> tensors;
  if (!absl::StartsWith(source, "models/")) {
    const absl::StatusOr<schedule::Catalog> catalog = ReadCatalog(source);
    if (!catalog.ok()) return catalog.status();
    for (const schedule::Param& param : catalog->params()) {
      tensors.push_back({param.name,
                         std::string(schedule::DTypeName(param.dtype)),
                         {param.shape.begin(), param.shape.end()}});
    }
    return tensors;
  }
  const auto add = [&tensors](const auto& tensor) {
    tensors.push_back({tensor.name(),
                       std::string(absl::StripPrefix(
                           v1::DType_Name(tensor.dtype()), "DTYPE_")),
                       {tensor.shape().begin(), tensor.shape().end()}});
  };
  if (absl::StrContains(source, "/replicas/")) {
    v1::GetReplicaRequest request;
    request.set_name(source);
    v1::Replica replica;
    const absl::Status status =
        Call("GetReplica", [&](grpc::ClientContext* context) {
          return stub_->GetReplica(context, request, &replica);
        });
    if (!status.ok()) return status;
    // Each worker has its part of most of them.
    std::set<std::string> seen;
    for (const v1::Worker& worker : replica.workers()) {
      for (const v1::WantedTensor& tensor : worker.tensors()) {
        if (seen.insert(tensor.name()).second) add(tensor);
      }
    }
    return tensors;
  }
  v1::GetModelRequest request;
  request.set_name(source);
  v1::Model model;
  const absl::Status status =
      Call("GetModel", [&](grpc::ClientContext* context) {
        return stub_->GetModel(context, request, &model);
      });
  if (!status.ok()) return status;
  for (const v1::Parameter& parameter : model.parameters()) add(parameter);
  return tensors;
}

int Ctl::Names() {
  if (arguments_.positional.size() != 2) {
    return Usage("names needs a TRAINER and an ENGINE");
  }
  std::vector<NameRule> rules;
  if (!Value("--rules").empty()) {
    const absl::StatusOr<std::string> text = ReadTextFile(Value("--rules"));
    if (!text.ok()) return Fail(text.status());
    absl::StatusOr<std::vector<NameRule>> parsed = ParseNameRules(*text);
    if (!parsed.ok()) return Fail(parsed.status());
    rules = *std::move(parsed);
  }
  std::vector<NamedTensor> sides[2];
  for (int side = 0; side < 2; ++side) {
    auto read = ReadNames(arguments_.positional[side]);
    if (!read.ok()) return Fail(read.status());
    sides[side] = *std::move(read);
  }
  const absl::StatusOr<NameMapping> mapping =
      MapNames(sides[0], sides[1], rules);
  if (!mapping.ok()) return Fail(mapping.status());
  *screen_.out << (arguments_.json ? MappingJson(*mapping)
                                   : RenderMapping(*mapping));
  return mapping->Fits() ? kExitOk : kExitError;
}

}  // namespace ctl
}  // namespace weightsync
