#include "schedule/plan.h"

#include <utility>

#include "schedule/stable_hash.h"

namespace weightsync {
namespace schedule {

absl::StatusOr<UpdatePlan> PlanUpdate(UpdateLayout layout,
                                      absl::Span<const NodeLabels> nodes,
                                      const PlanOptions& options) {
  UpdatePlan plan;
  absl::StatusOr<std::vector<Flow>> flows =
      RouteFlows(layout, nodes, options.route);
  if (!flows.ok()) return flows.status();
  plan.flows = *std::move(flows);
  absl::StatusOr<CostEstimate> cost =
      EstimateCost(layout, plan.flows, nodes, options.rates);
  if (!cost.ok()) return cost.status();
  plan.cost = *std::move(cost);
  StableHash hash;
  hash.Add(layout.digest);
  hash.Add(FlowsDigest(plan.flows));
  plan.digest = hash.Finish();
  plan.layout = std::move(layout);
  return plan;
}

uint64_t FlowsDigest(absl::Span<const Flow> flows) {
  StableHash hash;
  hash.Add(static_cast<uint64_t>(flows.size()));
  for (const Flow& flow : flows) {
    hash.Add(flow.source_node);
    hash.Add(flow.need_class);
    hash.Add(flow.bytes);
    hash.Add(static_cast<uint64_t>(flow.chain.size()));
    for (int32_t node : flow.chain) hash.Add(node);
  }
  return hash.Finish();
}

}  // namespace schedule
}  // namespace weightsync
