// A layout that the coordinator has given out, and what it can tell from it.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_KNOWN_LAYOUT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_KNOWN_LAYOUT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "daemon/node/layouts.h"
#include "schedule/route.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// Immutable.
struct KnownLayout {
  // With its layout_id.
  v1::DefineLayout define;
  NodeLayout layout;
  std::vector<schedule::NodeLabels> labels;
  std::map<std::string, int> node_index;
  // By node: some rank of it owns a bucket; some worker of it needs one.
  std::vector<bool> source;
  std::vector<bool> receiver;
  // Of the catalog; buckets have padding beside.
  int64_t total_bytes = 0;

  const std::string& id() const { return layout.id; }
};

// Computes what every node computes from the same message. `define` has no id.
absl::StatusOr<std::shared_ptr<const KnownLayout>> MakeKnownLayout(
    v1::DefineLayout define);

// The layouts of a model that were made last. A replica that leaves and comes
// back brings the one before back, and of a large model each takes a second.
class RecentLayouts {
 public:
  // `define` has no id. The errors of MakeKnownLayout.
  absl::StatusOr<std::shared_ptr<const KnownLayout>> Make(
      v1::DefineLayout define);
  // Null: it would have to be made.
  std::shared_ptr<const KnownLayout> Find(const v1::DefineLayout& define) const;
  std::vector<std::string> ids() const;

 private:
  static constexpr size_t kKept = 2;
  struct Made {
    std::string inputs;
    std::shared_ptr<const KnownLayout> layout;
  };
  // Newest last.
  std::vector<Made> made_;
};

// The buckets that have all that the worker wants, ascending; nullopt when it
// wants what the catalog does not have.
absl::optional<std::vector<uint32_t>> NeededBuckets(
    const KnownLayout& known, const v1::RegisterWorker& worker);

struct FlowOptions {
  // By node of the layout.
  std::vector<bool> excluded;
  // (from, to): not next to each other in a chain, where that can be had.
  std::vector<std::pair<int, int>> bad_edges;
};
// Bytes that cross the network for these flows.
int64_t WireBytes(const KnownLayout& known, const std::vector<v1::Flow>& flows);
// Of them, what comes to each node.
std::map<std::string, int64_t> NeededBytes(const KnownLayout& known,
                                           const std::vector<v1::Flow>& flows);

// `chain` (without the source) in an order that uses no bad edge, as close to
// the given one as a search from its front finds; unchanged where there is
// none.
std::vector<int32_t> AvoidEdges(
    int32_t source, std::vector<int32_t> chain,
    const std::vector<std::pair<int, int>>& bad_edges);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_KNOWN_LAYOUT_H_
