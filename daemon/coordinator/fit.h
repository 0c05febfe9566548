// Whether tensors fit together: what ranks hold, what workers want, in both
// directions. Pure checks, with the reasons of trainer.proto and replica.proto;
// every sentence begins with the parameter or the replica at fault.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_FIT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_FIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/coordinator/fault.h"
#include "schedule/catalog.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// One rank by itself: DTYPE_UNKNOWN, SHAPE_INVALID, DUPLICATE_NAME,
// BOX_OUT_OF_RANGE, DTYPE_MISMATCH (there is no cast from a shard to its
// parameter, or the shard has parts of blocks). *bytes: of its shards, after
// casts.
Fault CheckShards(const v1::RankShards& shards, int64_t* bytes);

// Whether the two say the same of one parameter.
bool SameParameter(const v1::Parameter& a, const v1::Parameter& b);

// CATALOG_MISMATCH: the two say different things of one parameter.
Fault CheckAgreement(const v1::RankShards& known, const v1::RankShards& fresh);

// All ranks of a world, in order: SHARDS_OVERLAP, SHARDS_HOLE, SHAPE_INVALID
// (the sum of all is too large), DTYPE_MISMATCH (some hold an F8_E4M3 parameter
// as it is, and others as BF16). A parameter that is cast in blocks is followed
// by that of its scales, unless a rank has one of that name.
Fault FitCatalog(const std::vector<const v1::RankShards*>& ranks,
                 std::shared_ptr<const schedule::Catalog>* fitted);

// How a shard of `parameter` is held, as an OrdinalBox says it: unset where
// that is as the parameter has it.
v1::DType HeldOtherwise(const v1::ShardBox& shard,
                        const v1::Parameter& parameter);

// One worker by itself: DTYPE_UNKNOWN, SHAPE_INVALID, DUPLICATE_NAME,
// BOX_OUT_OF_RANGE. *bytes: of what it wants.
Fault CheckTensors(const v1::RegisterWorker& registration, int64_t* bytes);

// Against the catalog: PARAMETER_UNKNOWN, DTYPE_MISMATCH, SHAPE_MISMATCH.
Fault CheckWanted(const schedule::Catalog& catalog,
                  const v1::RegisterWorker& registration);

// REPLICA_INCOMPLETE: the workers together leave some parameter out, or a part.
Fault CheckCoverage(const schedule::Catalog& catalog,
                    const std::vector<const v1::RegisterWorker*>& workers,
                    absl::string_view replica);

// Whether `wanted` lies inside the union of `held`. All of one parameter.
bool Covered(const schedule::Box& wanted,
             const std::vector<schedule::Box>& held);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_FIT_H_
