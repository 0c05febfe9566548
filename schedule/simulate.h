// A discrete-event simulation of the transfer of a plan: the same flows, over
// links that share their rate fairly, with nodes that slow down or die. It
// checks the cost model, and shows what a failure would cost.
//
// Every hop of every chain is a stream of its own. At any time each stream has
// a rate: links share evenly (max-min fairness) among the streams that cross
// them, and a node that holds nothing more to hand on passes bytes at the rate
// at which it takes them in. Events are streams that end, nodes that have
// caught up, and what the caller scripts. Bytes move as a fluid; the time to
// fill a chain, frame by frame, is added to each node's end.

#ifndef WEIGHTSYNC_SCHEDULE_SIMULATE_H_
#define WEIGHTSYNC_SCHEDULE_SIMULATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/cost.h"
#include "schedule/route.h"

namespace weightsync {
namespace schedule {

struct SimulatedEvent {
  enum class Kind {
    kSlow,  // the node's link has `factor` of its rate from now on
    kFail,  // the node is dead
  };
  double time = 0;  // seconds
  int32_t node = 0;
  Kind kind = Kind::kSlow;
  double factor = 1;
};

struct SimulationOptions {
  std::vector<SimulatedEvent> events;
  // From a death to the chains without the dead node: noticing, aborting and
  // joining again. Chains through the node stand still meanwhile.
  double rebuild_seconds = 0;
  // Run the waves one after another instead of all flows at once.
  bool by_wave = false;
};

struct SimulationResult {
  // When the last living receiver had everything.
  double seconds = 0;
  // Per node: when it had everything; 0 for nodes that receive nothing,
  // negative for dead ones.
  std::vector<double> node_seconds;
  // A source died before the first node of its chain had all: ABORT.
  bool aborted = false;
  int64_t wire_bytes = 0;  // bytes that arrived, of dead nodes too
  int64_t event_count = 0;
};

// Errors: those of CheckRates; INVALID_TOPOLOGY for an event on no node.
absl::StatusOr<SimulationResult> SimulateTransfer(
    absl::Span<const Flow> flows, absl::Span<const NodeLabels> nodes,
    const Rates& rates, const SimulationOptions& options = {});

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_SIMULATE_H_
