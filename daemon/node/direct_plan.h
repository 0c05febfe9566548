// What a worker does to copy a bucket straight from a trainer's memory on its
// own node, with no slot between.

#ifndef WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_
#define WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/optional.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/layouts.h"
#include "daemon/node/stream_sink.h"
#include "schedule/layout.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// Plans for one rank's memory and one worker. Not thread-safe while it is
// made; its methods may be called from many threads.
class DirectPlanner {
 public:
  // `ordinals`: OrdinalsOf(layout, tensors). All but `reachable`, which are the
  // GPUs that the worker reaches, outlive the planner. Takes time in proportion
  // to shards, regions and tensors.
  DirectPlanner(const NodeLayout& layout, const InPlaceSource& source,
                const WantedTensors& tensors,
                const std::vector<int32_t>& ordinals,
                std::vector<std::string> reachable = {});

  // Copies that read every element of `bucket` exactly once out of the rank's
  // arenas, or its allocations on GPUs that the worker reaches, and write it to
  // the worker's tensors; one entry for each parameter and arena, so that each
  // has a digest of its own. None when that cannot be: the worker wants only a
  // part of the bucket, the rank's memory is not ours or on another GPU, or a
  // tensor is not one stretch of the parameter's flattened elements (its digest
  // could not be computed on the way), or the rank holds it in another dtype:
  // workers do not cast. Takes time in proportion to the bucket's pieces.
  absl::optional<std::vector<v1::DirectCopies>> Copies(int32_t bucket) const;

  // Whether any of what Copies has returned lies on a GPU: workers compute no
  // digest of what they read there.
  bool ReadsDevice(const std::vector<v1::DirectCopies>& copies) const;

 private:
  const SourceShard* FindShard(const schedule::Piece& piece) const;
  const SourceRegion* FindRegion(const SourceShard& shard) const;

  const NodeLayout& layout_;
  const WantedTensors& tensors_;
  const std::vector<std::string> reachable_;
  // By ordinal; in the order in which they were registered.
  absl::flat_hash_map<uint32_t, std::vector<const SourceShard*>> shards_;
  absl::flat_hash_map<int32_t, std::vector<int>> wanted_;
  absl::flat_hash_set<std::string> device_arenas_;
  // Those that others can open, by address. They do not overlap.
  std::map<const char*, const SourceRegion*> regions_;
};

// The catalog's ordinal of each tensor; -1 for one that it does not have.
std::vector<int32_t> OrdinalsOf(const NodeLayout& layout,
                                const WantedTensors& tensors);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_
