// Which policy an update is sent under: the flows and the cost of each one, and
// the cheapest. For described clusters and for real ones.

#ifndef WEIGHTSYNC_SCHEDULE_CHOOSE_H_
#define WEIGHTSYNC_SCHEDULE_CHOOSE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/cost.h"
#include "schedule/layout.h"
#include "schedule/policy.h"
#include "schedule/route.h"
#include "schedule/transfer_schedule.h"

namespace weightsync {
namespace schedule {

struct PlanCluster {
  // For the arithmetic of PAIRED and BROADCAST. `counts.targets()` is the
  // number of `workers`.
  TransferCounts counts;
  // Pipeline stages of the trainers: BROADCAST has a head for each.
  int stages = 1;
  std::vector<NodeLabels> nodes;
  // The node of every rank that may send; senders are indices into it.
  std::vector<int32_t> rank_nodes;
  // In order of replicas, and within one of tensor-parallel ranks.
  std::vector<WorkerNeed> workers;
  // (replica, tensor-parallel rank) of each of them.
  std::vector<std::pair<int, int>> worker_ids;
  // Copied into live tensors, by node.
  std::vector<int64_t> apply_bytes;
  // A sender can send only what it owns in the layout or has been given before
  // (PAIRED and BROADCAST then gather). False where every rank holds
  // everything and copies out itself what it sends.
  bool gather = true;
};

struct PolicyPlan {
  Policy policy = Policy::kSharded;
  PolicyFlows flows;
  CostEstimate cost;
  // Of the policy that it is.
  PairedSchedule paired;
  BroadcastSchedule broadcast;
};

// What a policy would cost, or why it cannot be had.
struct PolicyReport {
  Policy policy = Policy::kSharded;
  double total_seconds = 0;
  // total_seconds is what it would take at least. The policy was not planned:
  // it cannot be cheaper enough to be taken.
  bool at_least = false;
  absl::Status status;
};

struct ChosenPlan {
  PolicyPlan plan;                     // never kAuto
  std::vector<PolicyReport> policies;  // all that were weighed
};

// Errors: those of SchedulePaired, ScheduleBroadcast, the routes and
// EstimateCost. REQUIRES: not kAuto; `layout` was made for these nodes and
// workers.
absl::StatusOr<PolicyPlan> PlanPolicy(Policy policy, const PlanCluster& cluster,
                                      const UpdateLayout& layout,
                                      const Rates& rates);

// Under kAuto SHARDED stays unless another policy's total is lower by more than
// this factor: the model is not better than that, and SHARDED copes best with
// failures.
inline constexpr double kWorthChanging = 1.05;

// Under kAuto: how many arrivals (see ArrivalCount) a plan may have for
// policies to be weighed that cannot win, for people to see what they would
// take. It takes milliseconds.
inline constexpr int64_t kWeighedForPeople = 1 << 14;

// The same for the cheapest when kAuto is asked for; see kWorthChanging. Under
// kAuto policies that cannot be had are left out, and those that could not win
// if they reached the transfer's lower bound are only bounded, not planned,
// where there are more than `weigh_up_to` arrivals. PLAN_TOO_LARGE of SHARDED
// is an error under kAuto, too: the others would not be chosen for their
// merits.
absl::StatusOr<ChosenPlan> ChoosePlan(Policy policy, const PlanCluster& cluster,
                                      const UpdateLayout& layout,
                                      const Rates& rates,
                                      int64_t weigh_up_to = kWeighedForPeople);

// Of the layout, the policy and all flows.
uint64_t PlanDigest(const PolicyPlan& plan, const UpdateLayout& layout);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_CHOOSE_H_
