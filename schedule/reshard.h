// Resharding without gather: the strided copies that move a trainer's shards
// into buckets (snapshot) and buckets into a worker's live tensors (apply).
//
// Neither side needs the other's layout: both meet in the bucket, whose pieces
// are dense. A fused tensor (qkv, gate_up) is several boxes in one memory; a
// transposed one has other strides.

#ifndef WEIGHTSYNC_SCHEDULE_RESHARD_H_
#define WEIGHTSYNC_SCHEDULE_RESHARD_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/box.h"
#include "schedule/catalog.h"
#include "schedule/dtype.h"
#include "schedule/layout.h"

namespace weightsync {
namespace schedule {

// A box of a parameter as it lies in some memory.
struct MemoryBox {
  uint32_t ordinal = 0;
  Box box;
  // Which memory: the caller's number (a registered tensor).
  int32_t memory = 0;
  // Bytes from the start of that memory to the box's first element.
  int64_t offset = 0;
  // Bytes per step of each dimension; as many as the box has. Any value,
  // negative ones too, that keeps the elements apart.
  Dims strides;
  // kUnspecified: the catalog's. A trainer's may differ where CastBetween
  // allows it; a worker's may not.
  DType dtype = DType::kUnspecified;
};

// For every index in `extents` (outermost first): copy run_bytes from
// src_offset + sum(index * src_strides) to dst_offset + sum(index *
// dst_strides). Dimensions that are contiguous on both sides are merged, so a
// copy of full rows has no extents at all.
struct StridedCopy {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  Dims extents;
  Dims src_strides;
  Dims dst_strides;
  // Bytes written per run. Equal to the bytes read unless `cast` is set: then
  // a run is of run_bytes / (size of the destination's dtype) elements. Of
  // kBF16BlockScale every element is read from the block that begins there.
  int64_t run_bytes = 0;
  Cast cast = Cast::kNone;

  int64_t Runs() const {
    int64_t n = 1;
    for (int64_t extent : extents) n *= extent;
    return n;
  }
  // Bytes written in all.
  int64_t Bytes() const { return Runs() * run_bytes; }
};

// A copy between one memory and one bucket. In a snapshot the memory is the
// source, in an apply the destination. Bucket offsets count from the start of
// the bucket.
struct BucketCopy {
  uint32_t bucket = 0;
  int32_t memory = 0;
  StridedCopy copy;
  // Of kBF16ToF8E4M3 and kBF16BlockScale alone: the elements of the parameter,
  // from which the blocks follow. All of every block lies in `memory`.
  uint32_t ordinal = 0;
  Box part;
};

// A contiguous stretch of elements, both in the flattened global tensor and in
// the bucket: what a digest is keyed by.
struct ElementRun {
  uint32_t ordinal = 0;
  int64_t first_element = 0;  // of the flattened global tensor
  int64_t element_count = 0;
  int64_t bucket_offset = 0;  // bytes
};

// The copy of `part` between two memories that hold it. REQUIRES: part lies in
// both boxes; equal dims; src_size and dst_size are the element sizes and equal
// unless `cast` is set.
StridedCopy CopyBox(const Box& part, const Box& src_box, int64_t src_offset,
                    absl::Span<const int64_t> src_strides, const Box& dst_box,
                    int64_t dst_offset, absl::Span<const int64_t> dst_strides,
                    int64_t src_size, int64_t dst_size, Cast cast);

// Every piece of every bucket that `rank` owns, from its shards, in bucket
// order. A piece may come from several shards; those of scales come from the
// tensors that they belong to (block_scale.h).
//   INVALID_LAYOUT   the layout is of another catalog; strides do not fit
//   SHARD_NOT_HELD   the layout expects an element that the shards lack
//   DTYPE_MISMATCH   no cast leads to the catalog's dtype
absl::StatusOr<std::vector<BucketCopy>> SnapshotCopies(
    const Catalog& catalog, const UpdateLayout& layout, int32_t rank,
    absl::Span<const MemoryBox> shards);

// Fills every box of a worker from the buckets, in bucket order; each element
// of each box is written exactly once.
//   INVALID_LAYOUT   as above
//   UNKNOWN_ORDINAL, BOX_OUTSIDE_TENSOR, DTYPE_MISMATCH  a bad box
//   UNFILLED_BOX     the layout has no piece for some element
absl::StatusOr<std::vector<BucketCopy>> ApplyCopies(
    const Catalog& catalog, const UpdateLayout& layout,
    absl::Span<const MemoryBox> boxes);

// One trainer's memory straight to one worker's (both on one node): fills the
// part of `dst` that `src` holds. Appends nothing where they do not meet.
struct DirectCopy {
  int32_t src_memory = 0;
  int32_t dst_memory = 0;
  StridedCopy copy;
};
absl::StatusOr<std::vector<DirectCopy>> DirectCopies(
    const Catalog& catalog, absl::Span<const MemoryBox> src,
    absl::Span<const MemoryBox> dst);

// The runs of a piece, ascending in both element and offset.
std::vector<ElementRun> RunsOf(const Catalog& catalog, const Piece& piece);
// Those of all pieces of a bucket. Many for a tensor cut along its last
// dimension: one per row.
std::vector<ElementRun> RunsOfBucket(const Catalog& catalog,
                                     const UpdateLayout& layout,
                                     uint32_t bucket);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_RESHARD_H_
