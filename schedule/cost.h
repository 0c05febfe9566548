// The cost model: how long an update should take, what binds it, and what it
// asks of every node. Pure arithmetic over flows: a link that carries `bytes`
// at `rate` is busy bytes / rate, the transfer ends when the busiest resource
// does, plus the time to fill the longest chain.
//
// simulate.h checks it event by event; the daemon prints it beside what it
// measured.

#ifndef WEIGHTSYNC_SCHEDULE_COST_H_
#define WEIGHTSYNC_SCHEDULE_COST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/layout.h"
#include "schedule/route.h"

namespace weightsync {
namespace schedule {

// Bytes per second unless said otherwise; 0 means "does not bind".
struct Rates {
  // A node's network link, each way by itself. Must be positive.
  double link = 12.5e9;
  // Per node instead of `link`, where links differ; empty: all alike.
  std::vector<double> node_links;
  // All that leaves a rack, and all that enters it; the same for a zone.
  double rack_uplink = 0;
  double zone_uplink = 0;
  // Hops that one machine can serve: a byte sent and received on it counts
  // once, a byte only sent or only received half. See NodeLabels::host.
  double host_hops = 0;
  // Copies into the store (snapshot) and out of it (apply), all threads of a
  // node together. Must be positive.
  double copy = 10e9;
  // Copies out of the store alone, where they differ; 0: as `copy`.
  double apply_copy = 0;
  // Device to host or back, all devices of a node together, where weights live
  // on devices; copies run at the smaller of the two.
  double device_copy = 0;

  // Seconds for a frame to be handed on by a node, beside its bytes.
  double hop_latency = 50e-6;
  // Seconds for one round of control messages: prepare, pause, commit, resume.
  double control_latency = 1e-3;
  // Bytes that a node takes in before it hands them on.
  int64_t frame_bytes = 64 << 10;
};

struct NodeCost {
  int64_t out_bytes = 0;       // leave over the network
  int64_t in_bytes = 0;        // enter
  int64_t snapshot_bytes = 0;  // copied from trainers into this node's store
  int64_t staging_bytes = 0;   // peak of the store: snapshot and received
  int64_t apply_bytes = 0;     // copied into live tensors
};

// Seconds of each phase. Snapshot, gather and transfer run at once, for frames
// are sent as they are copied and handed on as they arrive; the pause follows.
struct CostEstimate {
  // Among senders, by itself; PAIRED and BROADCAST alone.
  double gather_seconds = 0;
  double snapshot_seconds = 0;  // the trainer's stall
  // From the first frame that is sent to the last that arrives: gather and
  // transfer together, sharing their links.
  double transfer_seconds = 0;
  double apply_seconds = 0;  // copies into live tensors alone
  double pause_seconds = 0;  // of a replica: pause, commit, apply, resume
  // Prepare, the longer of snapshot and transfer, and the pause.
  double total_seconds = 0;
  // No policy's total is less: the transfer at its lower bound.
  double least_total_seconds = 0;
  // Largest of: bytes that must leave any sender (what it alone holds, and its
  // even share of all that must leave some sender), bytes that must enter any
  // receiver; each over its link. No order of sending is faster.
  double lower_bound_seconds = 0;
  // What the transfer waits for: "link out of NODE", "link into NODE",
  // "uplink of rack R", "processors of HOST", "latency", or "nothing to move".
  std::string bound_by;
  int64_t wire_bytes = 0;              // sum of in_bytes, gather included
  int64_t staging_bytes_per_node = 0;  // the largest
  std::vector<NodeCost> nodes;
};

// `gather`: flows that bring to senders what they send in `flows` (PAIRED and
// BROADCAST, whose senders collect what others hold); a bucket that a node
// sends without owning it and without a gather is one that it snapshots itself.
// `apply_bytes`: per node, what its workers copy in all; empty: what the node
// stores, once. INVALID_RATE for a rate that is zero, negative or not finite
// where it must be positive.
absl::StatusOr<CostEstimate> EstimateCost(
    const UpdateLayout& layout, absl::Span<const Flow> flows,
    absl::Span<const NodeLabels> nodes, const Rates& rates,
    absl::Span<const int64_t> apply_bytes = {},
    absl::Span<const Flow> gather = {});

// The transfer alone: fills out_bytes, in_bytes, wire_bytes, gather_seconds,
// transfer_seconds and bound_by of `cost`, whose `nodes` are as many as
// `nodes`.
void EstimateTransfer(absl::Span<const Flow> flows,
                      absl::Span<const NodeLabels> nodes, const Rates& rates,
                      CostEstimate* cost, absl::Span<const Flow> gather = {});

absl::Status CheckRates(const Rates& rates, size_t node_count);
double LinkOf(const Rates& rates, int32_t node);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_COST_H_
