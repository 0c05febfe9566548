// How often the coordinator has made what takes long with many nodes and
// tensors.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_COSTS_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_COSTS_H_

#include <cstdint>

namespace weightsync {
namespace daemon {

struct CoordinatorCosts {
  // A catalog from the shards of all ranks.
  int64_t catalogs = 0;
  // The buckets that a worker needs, from its tensors and a layout.
  int64_t needed_buckets = 0;
  // What the nodes of a replica lack, from the buckets that its workers need.
  int64_t missing_buckets = 0;
  // Passes over all that may be forgotten.
  int64_t collections = 0;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_COSTS_H_
