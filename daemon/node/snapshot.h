// Copies one trainer rank's tensors out of its registered memory into the
// buckets of an update: strided copies with the digest on the way. Frames are
// marked in the landings as they are packed, so that sending overlaps.

#ifndef WEIGHTSYNC_DAEMON_NODE_SNAPSHOT_H_
#define WEIGHTSYNC_DAEMON_NODE_SNAPSHOT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/layouts.h"
#include "schedule/box.h"
#include "schedule/dtype.h"
#include "transport/landing.h"
#include "transport/memory.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace daemon {

// One shard in the daemon's address space.
struct SourceShard {
  // The parameter's place in the layout's catalog, and the part of it.
  uint32_t ordinal = 0;
  schedule::Box box;
  // The box's first element.
  const char* data = nullptr;
  // Distance between neighbours in each dimension, in elements.
  schedule::Dims strides;
  // Of an element in memory, and what it becomes on its way into a bucket. One
  // of kBF16BlockScale has the scales of the shard at `of`: their box is of
  // their own parameter, `data` and `strides` are that shard's.
  schedule::DType dtype = schedule::DType::kUnspecified;
  schedule::Cast cast = schedule::Cast::kNone;
  schedule::Box of;
  int64_t of_columns = 0;  // of that shard's parameter, all of them
  // The memory may be truncated by its owner.
  bool guard = false;
};

// A mapped region that shards point into.
struct SourceRegion {
  const char* data = nullptr;
  int64_t size_bytes = 0;
  // Not an arena of ours: its owner may truncate it, and reading it is guarded.
  bool guard = false;
  // An arena of ours, which workers of this node may map and read: its name.
  // Null and empty otherwise.
  std::shared_ptr<const transport::Segment> arena;
  std::string arena_id;
  // Of an allocation of this GPU `arena` is only the control, by which workers
  // with tensors there open it (transport/cuda/segment_control.h).
  std::string device_uuid;
};

// What a rank registered, in the form that the snapshot reads, with the scales
// of those that are cast in blocks behind. Shards of
// parameters that `layout` does not have are an error: the layout was made for
// another catalog.
//   INVALID_ARGUMENT: MEMORY_OUT_OF_RANGE (some element lies outside its
//   region), BOX_OUT_OF_RANGE, STRIDES_INVALID (elements of one box overlap, or
//   a negative stride), DTYPE_UNKNOWN and DTYPE_MISMATCH of ShardDType;
//   FAILED_PRECONDITION: CATALOG_MISMATCH. Each names the parameter.
absl::StatusOr<std::vector<SourceShard>> ResolveShards(
    const NodeLayout& layout, const std::vector<SourceRegion>& regions,
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards);

// The same checks without a layout, and CheckParameter, for RegisterShards.
absl::Status CheckShardMemory(
    const std::vector<SourceRegion>& regions,
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards);

// Stops copies from outside: the trainer died, the update was given up.
// Thread-safe; the first call counts.
class CancelFlag {
 public:
  void Cancel(absl::Status why);
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // OK when not cancelled.
  absl::Status status() const;

 private:
  std::atomic<bool> cancelled_{false};
  mutable absl::Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
};

struct SnapshotResult {
  // One for each bucket of the rank, ascending.
  std::vector<v1::BucketDigest> buckets;
  // Of what the rank sends, by parameter.
  TensorDigests tensors;
  // Bytes of elements, without padding.
  int64_t copied_bytes = 0;
  absl::Duration copy_duration;
};

// Fills one bucket of `rank`, as TakeSnapshot does, and answers its digest.
absl::StatusOr<transport::Digest> PackSourceBucket(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards, transport::Landing* landing,
    transport::Memory* memory);

// The digest of what a bucket of `rank` would hold if it were packed now: reads
// the rank's memory and writes nothing. Adds its parts to *tensors. Errors of
// TakeSnapshot.
absl::StatusOr<transport::Digest> DigestSourceBucket(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards, int32_t bucket,
    transport::Memory* memory, TensorDigests* tensors);

// ABORTED (SOURCE_CHANGED): the bucket was read twice, and not the same bytes.
absl::Status SourceChanged(const NodeLayout& layout, int32_t rank,
                           int32_t bucket, const transport::Digest& before,
                           const transport::Digest& now);

// Fills the landings of all buckets of `rank` (one for each, in the order of
// layout.RankBuckets(rank)). Blocks; the copies run on the threads of `memory`,
// which other snapshots share. `cancels` are looked at before every bucket. On
// an error all landings that are not complete Fail with it.
//   The status of the flag that was cancelled; DATA_LOSS (SOURCE_MEMORY_LOST)
//   when the memory vanished under the copy; FAILED_PRECONDITION
//   (SHARD_NOT_HELD) when the shards do not have what the layout expects of the
//   rank.
absl::StatusOr<SnapshotResult> TakeSnapshot(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards,
    const std::vector<std::shared_ptr<transport::Landing>>& landings,
    transport::Memory* memory, absl::Span<const CancelFlag* const> cancels);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_SNAPSHOT_H_
