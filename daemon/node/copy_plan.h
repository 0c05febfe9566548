// What a worker does to install an update: strided copies from the buckets of
// a layout to its live tensors.

#ifndef WEIGHTSYNC_DAEMON_NODE_COPY_PLAN_H_
#define WEIGHTSYNC_DAEMON_NODE_COPY_PLAN_H_

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/node/layouts.h"
#include "google/protobuf/repeated_field.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

using WantedTensors = google::protobuf::RepeatedPtrField<v1::WantedTensor>;

// Buckets ascend; within one, copies stand in the order of the bucket's bytes,
// so that it is read once, forwards. Together the copies write every element of
// every wanted box exactly once.
//   NOT_FOUND (PARAMETER_UNKNOWN), FAILED_PRECONDITION (DTYPE_MISMATCH,
//   SHAPE_MISMATCH), INVALID_ARGUMENT (BOX_OUT_OF_RANGE, STRIDES_INVALID),
//   FAILED_PRECONDITION (UNFILLED_BOX: the layout was made before this worker
//   joined, and has no bucket for some of what it wants).
// Each names the parameter.
absl::StatusOr<v1::CopyPlan> MakeCopyPlan(const NodeLayout& layout,
                                          const WantedTensors& tensors);

// The buckets that a plan reads, ascending.
std::vector<int32_t> BucketsOf(const v1::CopyPlan& plan);
// Bytes that carrying out the plan writes.
int64_t BytesOf(const v1::CopyPlan& plan);

// Workers with equal tensors (data-parallel replicas) share one plan.
// Thread-safe; plans are made on the caller's thread, without the lock.
class CopyPlanCache {
 public:
  explicit CopyPlanCache(size_t capacity = 32) : capacity_(capacity) {}

  // Errors of MakeCopyPlan; they are not remembered.
  absl::StatusOr<std::shared_ptr<const v1::CopyPlan>> PlanFor(
      const NodeLayout& layout, const WantedTensors& tensors);

 private:
  using Entry = std::pair<std::string, std::shared_ptr<const v1::CopyPlan>>;

  const size_t capacity_;
  absl::Mutex mutex_;
  // Most recently used first.
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_COPY_PLAN_H_
