#include "schedule/choose.h"

#include <algorithm>

#include "schedule/error.h"
#include "schedule/plan.h"
#include "schedule/stable_hash.h"

namespace weightsync {
namespace schedule {

absl::StatusOr<PolicyPlan> PlanPolicy(Policy policy, const PlanCluster& cluster,
                                      const UpdateLayout& layout,
                                      const Rates& rates) {
  PolicyPlan plan;
  plan.policy = policy;
  const auto ranks = static_cast<int>(cluster.rank_nodes.size());
  if (ranks == 0 && policy != Policy::kSharded) {
    return InvalidPlan(kInvalidCount, "there is no rank that could send");
  }
  if (policy == Policy::kSharded) {
    absl::StatusOr<std::vector<Flow>> flows = RouteFlows(layout, cluster.nodes);
    if (!flows.ok()) return flows.status();
    plan.flows.flows = *std::move(flows);
  } else if (policy == Policy::kPaired) {
    absl::StatusOr<PairedSchedule> paired = SchedulePaired(cluster.counts);
    if (!paired.ok()) return paired.status();
    plan.paired = *std::move(paired);
    const size_t senders = plan.paired.sender_ranks.size();
    std::vector<PairedRoute> routes;
    routes.reserve(cluster.workers.size());
    for (size_t i = 0; i < cluster.workers.size(); ++i) {
      const WorkerNeed& worker = cluster.workers[i];
      const int rank = plan.paired.sender_ranks[i % senders];
      routes.push_back(PairedRoute{cluster.rank_nodes[rank % ranks],
                                   worker.node, worker.boxes});
    }
    absl::StatusOr<PolicyFlows> flows =
        RoutePaired(layout, cluster.nodes, routes, cluster.gather);
    if (!flows.ok()) return flows.status();
    plan.flows = *std::move(flows);
  } else {
    absl::StatusOr<BroadcastSchedule> broadcast =
        ScheduleBroadcast(cluster.counts, cluster.stages);
    if (!broadcast.ok()) return broadcast.status();
    plan.broadcast = *std::move(broadcast);
    // A node's buckets are sent by the head of its ranks' stage.
    const int stage_ranks = ranks / cluster.stages;
    std::vector<int32_t> head_of_node(
        cluster.nodes.size(),
        cluster.rank_nodes[plan.broadcast.head_ranks[0] % ranks]);
    for (int rank = ranks - 1; rank >= 0; --rank) {
      const int stage =
          std::min(rank / std::max(1, stage_ranks), cluster.stages - 1);
      head_of_node[cluster.rank_nodes[rank]] =
          cluster.rank_nodes[plan.broadcast.head_ranks[stage] % ranks];
    }
    absl::StatusOr<PolicyFlows> flows =
        RouteBroadcast(layout, cluster.nodes, head_of_node, cluster.gather);
    if (!flows.ok()) return flows.status();
    plan.flows = *std::move(flows);
  }
  absl::StatusOr<CostEstimate> cost =
      EstimateCost(layout, plan.flows.flows, cluster.nodes, rates,
                   cluster.apply_bytes, plan.flows.gather);
  if (!cost.ok()) return cost.status();
  plan.cost = *std::move(cost);
  return plan;
}

namespace {

// Whether a policy can be had at all, which its counts say.
absl::Status CheckPolicy(Policy policy, const PlanCluster& cluster) {
  if (policy != Policy::kSharded && cluster.rank_nodes.empty()) {
    return InvalidPlan(kInvalidCount, "there is no rank that could send");
  }
  if (policy == Policy::kPaired) return CheckPaired(cluster.counts);
  if (policy == Policy::kBroadcast) {
    return ScheduleBroadcast(cluster.counts, cluster.stages).status();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChosenPlan> ChoosePlan(Policy policy, const PlanCluster& cluster,
                                      const UpdateLayout& layout,
                                      const Rates& rates, int64_t weigh_up_to) {
  ChosenPlan chosen;
  if (policy != Policy::kAuto) {
    absl::StatusOr<PolicyPlan> plan =
        PlanPolicy(policy, cluster, layout, rates);
    if (!plan.ok()) return plan.status();
    chosen.plan = *std::move(plan);
    chosen.policies.push_back(
        PolicyReport{policy, chosen.plan.cost.total_seconds, false, {}});
    return chosen;
  }
  absl::StatusOr<PolicyPlan> sharded =
      PlanPolicy(Policy::kSharded, cluster, layout, rates);
  if (!sharded.ok()) return sharded.status();
  chosen.plan = *std::move(sharded);
  const double least = chosen.plan.cost.least_total_seconds;
  chosen.policies.push_back(PolicyReport{
      Policy::kSharded, chosen.plan.cost.total_seconds, false, {}});
  const bool small = ArrivalCount(layout) <= weigh_up_to;
  for (Policy candidate : {Policy::kPaired, Policy::kBroadcast}) {
    PolicyReport report;
    report.policy = candidate;
    report.status = CheckPolicy(candidate, cluster);
    const auto wins = [&chosen](double seconds) {
      return seconds * kWorthChanging < chosen.plan.cost.total_seconds;
    };
    if (report.status.ok() && !small && !wins(least)) {
      report.total_seconds = least;
      report.at_least = true;
    } else if (report.status.ok()) {
      absl::StatusOr<PolicyPlan> plan =
          PlanPolicy(candidate, cluster, layout, rates);
      report.status = plan.status();
      if (plan.ok()) {
        report.total_seconds = plan->cost.total_seconds;
        if (wins(report.total_seconds)) chosen.plan = *std::move(plan);
      }
    }
    chosen.policies.push_back(std::move(report));
  }
  return chosen;
}

uint64_t PlanDigest(const PolicyPlan& plan, const UpdateLayout& layout) {
  StableHash hash;
  hash.Add(layout.digest);
  hash.Add(absl::string_view(PolicyName(plan.policy)));
  hash.Add(FlowsDigest(plan.flows.gather));
  hash.Add(FlowsDigest(plan.flows.flows));
  return hash.Finish();
}

}  // namespace schedule
}  // namespace weightsync
