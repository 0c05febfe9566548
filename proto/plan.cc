#include "proto/plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "schedule/error.h"
#include "schedule/models.h"

namespace weightsync {

namespace {

// The longest that google.protobuf.Duration allows: 10,000 years.
constexpr absl::Duration kLongest = absl::Seconds(315576000000);
// Slower than 1 Mbit/s and faster than 1 Pbit/s are slips of units; and what is
// left cannot take the arithmetic out of its range.
constexpr double kLeastRate = 1e-3;
constexpr double kMostRate = 1e6;

google::protobuf::Duration DurationProto(double seconds) {
  google::protobuf::Duration out;
  const absl::Duration duration = std::min(absl::Seconds(seconds), kLongest);
  out.set_seconds(absl::ToInt64Seconds(duration));
  out.set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(duration - absl::Seconds(out.seconds()))));
  return out;
}

// Counts of which 0 means one.
int OrOne(int32_t count) { return count == 0 ? 1 : count; }

// Sets *rate to value x unit, where it is given.
absl::Status ReadRate(const char* name, double value, double unit,
                      double* rate) {
  if (value == 0) return absl::OkStatus();
  if (!(value >= kLeastRate && value <= kMostRate)) {
    return schedule::InvalidPlan(
        schedule::kInvalidRate,
        absl::StrCat(name, " is ", value, "; it must be between ", kLeastRate,
                     " and ", kMostRate));
  }
  *rate = value * unit;
  return absl::OkStatus();
}

}  // namespace

schedule::Policy PolicyFromProto(v1::TransferPolicy policy) {
  switch (policy) {
    case v1::TRANSFER_POLICY_SHARDED:
      return schedule::Policy::kSharded;
    case v1::TRANSFER_POLICY_PAIRED:
      return schedule::Policy::kPaired;
    case v1::TRANSFER_POLICY_BROADCAST:
      return schedule::Policy::kBroadcast;
    default:
      return schedule::Policy::kAuto;
  }
}

v1::TransferPolicy PolicyToProto(schedule::Policy policy) {
  switch (policy) {
    case schedule::Policy::kAuto:
      return v1::TRANSFER_POLICY_AUTO;
    case schedule::Policy::kSharded:
      return v1::TRANSFER_POLICY_SHARDED;
    case schedule::Policy::kPaired:
      return v1::TRANSFER_POLICY_PAIRED;
    case schedule::Policy::kBroadcast:
      return v1::TRANSFER_POLICY_BROADCAST;
  }
  return v1::TRANSFER_POLICY_UNSPECIFIED;
}

absl::StatusOr<schedule::PlanReport> PlanOfSpec(
    const v1::PlanSpec& spec, const schedule::Catalog* catalog,
    absl::Span<const std::pair<int, int>> workers) {
  if (spec.model().empty() == (catalog == nullptr)) {
    return ErrorStatus(
        absl::StatusCode::kInvalidArgument, "PLAN_SUBJECT_MISSING",
        catalog == nullptr
            ? "nothing is named to be planned: name a model or a catalog"
            : "both a model and a catalog are named; name one of them");
  }
  schedule::PlanRequest request;
  schedule::Catalog generated;
  if (catalog == nullptr) {
    absl::StatusOr<schedule::ModelConfig> model =
        schedule::FindModel(spec.model());
    if (!model.ok()) return model.status();
    absl::StatusOr<schedule::Catalog> made = schedule::ModelCatalog(*model);
    if (!made.ok()) return made.status();
    request.model = *std::move(model);
    generated = *std::move(made);
    catalog = &generated;
  }
  request.catalog = catalog;
  schedule::TransferConfig& config = request.config;
  config.training_sharding = spec.training_sharding();
  config.training_gpus = spec.training_gpus();
  config.inference_replicas = spec.inference_replicas();
  config.inference_tp = spec.inference_tp();
  config.base_port = spec.base_port();
  config.bucket_size = spec.bucket_size();
  config.weight_chunked_mem_mb = spec.weight_chunked_mem_mb();
  if (!spec.policy().empty()) {
    absl::StatusOr<schedule::Policy> policy =
        schedule::ParsePolicy(spec.policy());
    if (!policy.ok()) return policy.status();
    request.policy = *policy;
  }
  request.training_pp = OrOne(spec.training_pp());
  request.training_tp = OrOne(spec.training_tp());
  request.training_ep = OrOne(spec.training_ep());
  request.inference_ep = OrOne(spec.inference_ep());
  if (spec.gpus_per_node() != 0) request.gpus_per_node = spec.gpus_per_node();
  absl::Status ok =
      ReadRate("link_gbps", spec.link_gbps(), 1e9 / 8, &request.rates.link);
  if (!ok.ok()) return ok;
  ok = ReadRate("copy_gbytes_per_second", spec.copy_gbytes_per_second(), 1e9,
                &request.rates.copy);
  if (!ok.ok()) return ok;
  request.workers.assign(workers.begin(), workers.end());
  return schedule::DescribePlan(request);
}

v1::PlanResponse ToPlanResponse(const schedule::PlanReport& report,
                                absl::Duration duration) {
  v1::PlanResponse response;
  response.set_policy(PolicyToProto(report.policy));
  for (int rank : report.sender_ranks) response.add_sender_ranks(rank);
  for (const schedule::GroupReport& group : report.groups) {
    v1::PlanGroup* out = response.add_groups();
    out->set_group_id(group.group_id);
    out->set_sender_rank(group.sender_rank);
    out->set_world_size(group.world_size);
    for (size_t i = 0; i < group.targets.size(); ++i) {
      v1::PlanGroup::Target* target = out->add_targets();
      target->set_replica(group.targets[i].first);
      target->set_tp(group.targets[i].second);
      if (i < group.ports.size()) target->set_port(group.ports[i]);
    }
    out->set_bytes(group.bytes);
    if (group.sender_node >= 0) {
      out->add_nodes(report.nodes[group.sender_node]);
    }
    for (int node : group.nodes) out->add_nodes(report.nodes[node]);
  }
  response.set_bucket_count(static_cast<int32_t>(report.num_buckets));
  response.set_total_bytes(report.total_bytes);
  response.set_wire_bytes(report.wire_bytes);
  const schedule::CostEstimate& cost = report.cost;
  const std::pair<const char*, double> phases[] = {
      {"gather", cost.gather_seconds},
      {"snapshot", cost.snapshot_seconds},
      {"transfer", cost.transfer_seconds},
      {"pause", cost.pause_seconds},
      {"total", cost.total_seconds}};
  for (const auto& phase : phases) {
    v1::PhaseTime* out = response.add_phases();
    out->set_phase(phase.first);
    *out->mutable_predicted() = DurationProto(phase.second);
  }
  response.set_bound_by(cost.bound_by);
  *response.mutable_lower_bound() = DurationProto(cost.lower_bound_seconds);
  response.set_staging_bytes_per_node(cost.staging_bytes_per_node);
  response.set_plan_digest(schedule::DigestString(report.plan_digest));
  const double seconds = absl::ToDoubleSeconds(duration);
  *response.mutable_plan_duration() = DurationProto(seconds);
  std::string explanation = schedule::ExplainPolicies(report);
  const std::string paths = schedule::ExplainPaths(report);
  if (!paths.empty()) absl::StrAppend(&explanation, "\n", paths);
  response.set_explanation(std::move(explanation));
  response.set_json(schedule::PlanJson(report, seconds));
  return response;
}

}  // namespace weightsync
