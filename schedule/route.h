// Routes: along which nodes the buckets of an update travel.
//
// A flow takes all buckets of one source node and one need class along a chain
// of nodes; every node keeps what it receives and hands it on at once, so one
// copy per node crosses the network and a chain is as fast as its slowest link.
// Chains are ordered by topology: nodes of the source's rack first, then of its
// zone, then zone by zone and rack by rack, so that a rack is entered once and
// left once. Chains of several sources start at different nodes of a rack, in
// different racks of a zone: no node is everybody's first hop or everybody's
// last.

#ifndef WEIGHTSYNC_SCHEDULE_ROUTE_H_
#define WEIGHTSYNC_SCHEDULE_ROUTE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/layout.h"

namespace weightsync {
namespace schedule {

// Where a node stands. Equal labels mean near; empty ones are a place, too.
struct NodeLabels {
  std::string zone;
  std::string rack;
  std::string name;  // breaks ties, so that order does not hang on numbers
  // The machine, where several nodes share one (tests, virtual machines): they
  // share its processors. Empty: a machine of its own.
  std::string host;
};

struct Flow {
  int32_t source_node = 0;
  int32_t need_class = 0;
  // Receivers in order of the chain; without the source, which holds the
  // buckets already. Never empty.
  std::vector<int32_t> chain;
  std::vector<uint32_t> buckets;  // ascending
  int64_t bytes = 0;
  // Flows of one wave share no link (no node's way out, none's way in): run
  // one wave after another and no link carries two at once. Running all at
  // once is as fast where the fabric shares links fairly.
  int32_t wave = 0;
};

enum class RouteShape {
  kChain,  // SHARDED
  kStar,   // one flow per receiver, straight from the source: PAIRED
};

struct RouteOptions {
  RouteShape shape = RouteShape::kChain;
  // Nodes that go to the tail of every chain (slow ones), in this order.
  std::vector<int32_t> last;
};

// Flows in order of (source node, need class). Empty classes, and classes of
// the source node alone, move nothing and have no flow.
//   INVALID_TOPOLOGY  the layout names a node that `nodes` lacks
//   PLAN_TOO_LARGE    RESOURCE_EXHAUSTED; see CheckHops
absl::StatusOr<std::vector<Flow>> RouteFlows(const UpdateLayout& layout,
                                             absl::Span<const NodeLabels> nodes,
                                             const RouteOptions& options = {});

// Hops of all chains that a plan may have: 2,048 sending nodes to 1,024
// receiving ones. PLAN_TOO_LARGE for more.
inline constexpr int64_t kMaxHops = int64_t{1} << 21;
absl::Status CheckHops(int64_t hops);

// The order of a chain over `receivers` from `source`; `turn` rotates it within
// racks, racks within zones and zones (give each source another one).
std::vector<int32_t> ChainOrder(absl::Span<const NodeLabels> nodes,
                                int32_t source,
                                absl::Span<const int32_t> receivers, int turn);

// Sets Flow::wave: longest flows first, each in the first wave whose links it
// finds free.
void AssignWaves(size_t node_count, std::vector<Flow>* flows);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_ROUTE_H_
