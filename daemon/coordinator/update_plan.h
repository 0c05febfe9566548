// The plan of one update: under which policy it is sent, along which flows, and
// how long each phase should take. Pure; what was measured comes in as rates.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_PLAN_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/coordinator/known_layout.h"
#include "schedule/choose.h"
#include "schedule/describe.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// What updates of this cluster were seen to do. Before the first one the
// defaults of schedule::Rates hold: links of 100 Gbit/s, copies at 10 GB/s, a
// millisecond for a round of commands. Each value is the mean of the last few
// updates, the newest counting half.
class RateBook {
 public:
  // An update that ended well.
  struct Seen {
    std::string model;
    // Through the busiest link, by the plan; 0: nothing crossed the network.
    int64_t link_bytes = 0;
    absl::Duration transfer;
    // Of the node that copied longest.
    int64_t snapshot_bytes = 0;
    absl::Duration snapshot;
    // Of the node whose workers copy most.
    int64_t apply_bytes = 0;
    absl::Duration apply;
    // Phases that depend on engines and disks, not on bytes: "prepare",
    // "pause", "commit", "resume".
    std::map<std::string, absl::Duration> rounds;
  };

  const schedule::Rates& rates() const { return rates_; }
  // Of the phases that Seen::rounds names.
  absl::Duration Round(const std::string& model,
                       const std::string& phase) const;
  void Learn(const Seen& seen);

 private:
  schedule::Rates rates_;
  bool knows_link_ = false;
  bool knows_copy_ = false;
  bool knows_apply_ = false;
  std::map<std::pair<std::string, std::string>, absl::Duration> rounds_;
};

// The cluster of a layout as the policies see it: workers in order of replica
// names. Senders gather, for each element is copied out by one rank alone.
schedule::PlanCluster ClusterOf(const KnownLayout& known);

// The plan that is asked about, as it would run now. Not the coordinator's any
// more: PlanOf may run on any thread.
struct PlanInputs {
  v1::DefineLayout define;  // without its id
  // The layout that `define` makes; null: it is still to be made.
  std::shared_ptr<const KnownLayout> known;
  schedule::Policy policy = schedule::Policy::kAuto;
  schedule::Rates rates;
  // Nodes with device agents at work.
  std::set<std::string> gpu_nodes;
  // Workers, as replica and index, that have said that they can copy out of the
  // memory of all GPUs of their node that are at work, and whose node's store
  // lies there. Of others, that of updates to come is not known.
  std::set<std::pair<std::string, int32_t>> gpu_to_gpu;
};
// Errors: those of MakeKnownLayout and schedule::ChoosePlan.
absl::StatusOr<schedule::PlanReport> PlanOf(const PlanInputs& inputs);

// Of an update. INVALID_ARGUMENT and the other errors of schedule::ChoosePlan.
absl::StatusOr<schedule::ChosenPlan> PlanLayout(const KnownLayout& known,
                                                schedule::Policy policy,
                                                const schedule::Rates& rates);

// The flows of a plan, with members by name and without addresses. Where nodes
// are excluded or edges are bad, what the plan sends goes from its owners in
// chains instead, which can go round them, to whomever the plan gives it.
std::vector<v1::Flow> FlowsOfPlan(const KnownLayout& known,
                                  const schedule::PolicyPlan& plan,
                                  const FlowOptions& options);

// How long each phase of an update should take, "snapshot" and "total" among
// them. Snapshot, gathering and transfer run at once: frames leave as they are
// copied, and are handed on as they arrive.
std::map<std::string, absl::Duration> PredictPhases(
    const schedule::CostEstimate& cost, const std::string& model,
    const RateBook& book);

// Bytes through the busiest link.
int64_t BusiestLink(const schedule::CostEstimate& cost);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_UPDATE_PLAN_H_
