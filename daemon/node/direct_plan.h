// What a worker does to copy a bucket straight from a trainer's memory on its
// own node, with no slot between.

#ifndef WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_
#define WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/layouts.h"
#include "daemon/node/stream_sink.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// Copies that read every element of `bucket` exactly once out of the rank's
// arenas, or its allocations on GPUs that the worker reaches, and write it to
// the worker's tensors; one entry for each parameter and arena, so that each
// has a digest of its own. None when that cannot be: the worker wants only a
// part of the bucket, the rank's memory is not ours or on another GPU, or a
// tensor is not one stretch of the parameter's flattened elements (its digest
// could not be computed on the way), or the rank holds it in another dtype:
// workers do not cast.
absl::optional<std::vector<v1::DirectCopies>> MakeDirectCopies(
    const NodeLayout& layout, int32_t bucket, const InPlaceSource& source,
    const WantedTensors& tensors,
    const std::vector<std::string>& reachable = {});

// Whether any of the bucket's bytes lie on a GPU: workers compute no digest of
// what they read there.
bool ReadsDevice(const std::vector<v1::DirectCopies>& copies,
                 const InPlaceSource& source);

// The catalog's ordinal of each tensor; -1 for one that it does not have.
std::vector<int32_t> OrdinalsOf(const NodeLayout& layout,
                                const WantedTensors& tensors);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_DIRECT_PLAN_H_
