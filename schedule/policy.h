// Routes under PAIRED and BROADCAST, the compatible policies. SHARDED is
// RouteFlows. Both keep this project's store: a node takes each bucket once,
// however many of its workers are targets, and never one that it owns. A
// sender's gathered buckets serve its own workers, too.

#ifndef WEIGHTSYNC_SCHEDULE_POLICY_H_
#define WEIGHTSYNC_SCHEDULE_POLICY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/layout.h"
#include "schedule/route.h"

namespace weightsync {
namespace schedule {

struct PolicyFlows {
  // Among trainers' nodes, before the rest: brings to every sender's node what
  // it sends and does not hold.
  std::vector<Flow> gather;
  // source_node is the sender's node, not always the owner of the buckets.
  std::vector<Flow> flows;
};

// An inference worker and the node of its sender.
struct PairedRoute {
  int32_t sender_node = 0;
  int32_t node = 0;
  BoxListRef boxes;
};

// Buckets that come to nodes under any policy: a bucket counts once for every
// node that needs it.
int64_t ArrivalCount(const UpdateLayout& layout);
// More than RoutePaired takes.
inline constexpr int64_t kMaxArrivals = int64_t{1} << 23;

// One flow per (sender's node, receiving node), without chains. A bucket that
// several workers of a node need comes from the one of their senders that has
// the least to send there. `gather`: senders hold shards only; without it each
// is taken to hold all that it sends. INVALID_TOPOLOGY and PLAN_TOO_LARGE as
// for RouteFlows.
absl::StatusOr<PolicyFlows> RoutePaired(const UpdateLayout& layout,
                                        absl::Span<const NodeLabels> nodes,
                                        absl::Span<const PairedRoute> routes,
                                        bool gather);

// One chain per need class from the head's node. `head_of_node` says for every
// node of trainers which node's head sends what it holds (that of its pipeline
// stage). `gather` as above.
absl::StatusOr<PolicyFlows> RouteBroadcast(
    const UpdateLayout& layout, absl::Span<const NodeLabels> nodes,
    absl::Span<const int32_t> head_of_node, bool gather);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_POLICY_H_
