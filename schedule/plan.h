// The plan of an update: what is cut how (layout), what moves where (flows) and
// how long that should take. Every daemon computes it from the same inputs and
// compares `digest` before the first byte moves.

#ifndef WEIGHTSYNC_SCHEDULE_PLAN_H_
#define WEIGHTSYNC_SCHEDULE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/cost.h"
#include "schedule/layout.h"
#include "schedule/route.h"

namespace weightsync {
namespace schedule {

struct UpdatePlan {
  UpdateLayout layout;
  std::vector<Flow> flows;
  // What the rates given led to expect; not part of the digest.
  CostEstimate cost;
  // Of the layout's digest and the flows (sources, classes, chains).
  uint64_t digest = 0;
};

struct PlanOptions {
  RouteOptions route;
  Rates rates;
};

// Routes and costs a layout. Errors: those of RouteFlows and EstimateCost.
absl::StatusOr<UpdatePlan> PlanUpdate(UpdateLayout layout,
                                      absl::Span<const NodeLabels> nodes,
                                      const PlanOptions& options = {});

// Of the flows' sources, classes, bytes and chains, in order.
uint64_t FlowsDigest(absl::Span<const Flow> flows);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_PLAN_H_
