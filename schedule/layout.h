// The update layout: how the bytes of one update are cut into buckets.
//
// From the catalog, the shards of every trainer rank and what the workers of
// every node need, BuildLayout makes a list of buckets. A bucket belongs to one
// source rank and to one need class (the set of nodes that need all of it), and
// holds pieces of tensors in catalog order. The same bucket format is used for
// the snapshot on the trainer's node, on the wire and in the store of every
// receiving node:
//   - a piece is stored dense, row-major over its own box;
//   - its offset in the bucket is a multiple of kPieceAlignment;
//   - a piece that does not fit into what is left opens the next bucket; one
//     that is larger than a bucket is split by rows of its outermost dimension
//     where a row fits, else within the row; an exact fit stays;
//   - only Bucket::bytes are sent, never the whole of bucket_bytes.
// Every element of every parameter is in exactly one piece, also those that no
// worker needs (their class is empty): whoever holds all buckets can save or
// serve the whole model.
//
// Pure functions of their arguments: equal inputs, in equal order, give equal
// layouts and equal digests on every machine.

#ifndef WEIGHTSYNC_SCHEDULE_LAYOUT_H_
#define WEIGHTSYNC_SCHEDULE_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/box.h"
#include "schedule/catalog.h"
#include "schedule/dtype.h"

namespace weightsync {
namespace schedule {

// max(16, size of any dtype): vector loads never straddle a piece.
inline constexpr int64_t kPieceAlignment = 16;
inline constexpr int64_t kDefaultBucketBytes = int64_t{256} << 20;
inline constexpr int64_t kMinBucketBytes = 16;
inline constexpr int64_t kMaxBucketBytes = int64_t{1} << 40;
// What a layout may cost to make and to keep: a piece takes 64 bytes, and time.
// DeepSeek-V3 from 2,048 ranks has 750,000.
inline constexpr int64_t kMaxPieces = int64_t{1} << 23;

// A box of a parameter. `dtype` is that of the holder's memory; kUnspecified
// means the catalog's.
struct OrdinalBox {
  uint32_t ordinal = 0;
  DType dtype = DType::kUnspecified;
  Box box;

  friend bool operator==(const OrdinalBox& a, const OrdinalBox& b) {
    return a.ordinal == b.ordinal && a.dtype == b.dtype && a.box == b.box;
  }
};

// An immutable list of boxes, shared by all ranks or workers that hold the same
// ones: plans cost by the number of different lists, not of workers.
class BoxList {
 public:
  explicit BoxList(std::vector<OrdinalBox> boxes);
  const std::vector<OrdinalBox>& boxes() const { return boxes_; }
  uint64_t digest() const { return digest_; }
  // Per box: equal for those that differ in their parameter alone. Experts have
  // equal boxes by the thousand.
  const std::vector<uint32_t>& box_ids() const { return box_ids_; }

 private:
  const std::vector<OrdinalBox> boxes_;
  const uint64_t digest_;
  std::vector<uint32_t> box_ids_;
};
using BoxListRef = std::shared_ptr<const BoxList>;
BoxListRef MakeBoxList(std::vector<OrdinalBox> boxes);

// What one trainer rank holds. Ranks are the caller's numbers, each once; nodes
// are indices into the caller's list of nodes.
struct SourceRank {
  int32_t rank = 0;
  int32_t node = 0;
  BoxListRef shards;  // may be empty (the last ranks of a small FSDP tensor)
};

// What one worker needs. Boxes of different workers may overlap in any way.
struct WorkerNeed {
  int32_t worker = 0;  // the caller's number, for messages
  int32_t node = 0;
  BoxListRef boxes;
};

// A part of a parameter in a bucket.
struct Piece {
  uint32_t ordinal = 0;
  Box box;
  int64_t offset = 0;  // bytes from the start of the bucket

  friend bool operator==(const Piece& a, const Piece& b) {
    return a.ordinal == b.ordinal && a.offset == b.offset && a.box == b.box;
  }
};

struct Bucket {
  int32_t source_rank = 0;  // SourceRank::rank of the owner
  int32_t source_node = 0;
  int32_t need_class = 0;  // index into UpdateLayout::classes
  int64_t bytes = 0;       // used bytes: end of the last piece
  uint32_t first_piece = 0;
  uint32_t piece_count = 0;
};

// What one trainer rank sends.
struct SourceLoad {
  int32_t rank = 0;
  int32_t node = 0;
  int64_t bytes = 0;
  // Of these, what no other rank holds.
  int64_t exclusive_bytes = 0;
};

// The part of a layout that does not name nodes that need something. Shared
// between layouts whose nodes need the same kinds of things (a replica joins or
// leaves): only `classes` then differs.
struct BucketTable {
  uint64_t catalog_digest = 0;
  int64_t bucket_bytes = 0;
  int64_t total_bytes = 0;  // sum of Bucket::bytes
  std::vector<Bucket> buckets;
  std::vector<Piece> pieces;
  std::vector<uint32_t> piece_bucket;  // per piece
  std::vector<SourceLoad> sources;
  // Pieces of a parameter: param_pieces[param_begin[o] .. param_begin[o + 1]).
  std::vector<uint32_t> param_begin;
  std::vector<uint32_t> param_pieces;
  // Need groups (kinds of nodes) of every class, sorted.
  std::vector<std::vector<int32_t>> class_groups;
  // Per need group, the sorted digests of the box lists its nodes need.
  std::vector<std::vector<uint64_t>> groups;
  uint64_t digest = 0;
};

struct UpdateLayout {
  std::shared_ptr<const BucketTable> table;
  // Per need class, the sorted nodes that need all of its buckets. Class 0 is
  // always the empty one.
  std::vector<std::vector<int32_t>> classes;
  // Of the table and the classes: the layout's id.
  uint64_t digest = 0;

  uint32_t bucket_count() const {
    return static_cast<uint32_t>(table->buckets.size());
  }
  const Bucket& bucket(uint32_t id) const { return table->buckets[id]; }
  absl::Span<const Piece> pieces(uint32_t bucket_id) const {
    const Bucket& b = table->buckets[bucket_id];
    return absl::MakeConstSpan(table->pieces.data() + b.first_piece,
                               b.piece_count);
  }
  // Indices into table->pieces of the pieces of a parameter, in order of the
  // regions that its trainers hold, not of buckets.
  absl::Span<const uint32_t> pieces_of(uint32_t ordinal) const {
    return absl::MakeConstSpan(
        table->param_pieces.data() + table->param_begin[ordinal],
        table->param_begin[ordinal + 1] - table->param_begin[ordinal]);
  }
  const std::vector<int32_t>& need_nodes(uint32_t bucket_id) const {
    return classes[table->buckets[bucket_id].need_class];
  }
};

// Which rank sends which element. Replicas (the same box on several ranks)
// share the load: contiguous spans in catalog order, levelled over what each
// rank sends anyway. Made once per set of trainers, used for every layout.
class SourcePartition {
 public:
  struct Region {
    Box box;
    int32_t source = 0;  // index into sources()
  };
  using Source = SourceLoad;

  // INVALID_ARGUMENT, with the parameter's name first:
  //   UNKNOWN_ORDINAL     a shard of no parameter
  //   BOX_OUTSIDE_TENSOR  a shard is empty or reaches outside its tensor
  //   DTYPE_MISMATCH      no cast leads from the shard to the catalog
  //   OVERLAPPING_SHARDS  two shards overlap without being equal; names ranks
  //   HOLE_IN_PARAMETER   elements that no rank holds; names a box of them
  //   INVALID_TOPOLOGY    a rank twice, or a negative node
  static absl::StatusOr<std::shared_ptr<const SourcePartition>> Create(
      const Catalog& catalog, absl::Span<const SourceRank> sources);

  const std::vector<Source>& sources() const { return sources_; }
  // Disjoint, sorted, and together the whole parameter.
  absl::Span<const Region> regions(uint32_t ordinal) const {
    return absl::MakeConstSpan(regions_.data() + begin_[ordinal],
                               begin_[ordinal + 1] - begin_[ordinal]);
  }
  uint64_t catalog_digest() const { return catalog_digest_; }
  size_t region_count() const { return regions_.size(); }

 private:
  friend class PartitionBuilder;
  std::vector<Source> sources_;
  std::vector<Region> regions_;
  std::vector<size_t> begin_;
  uint64_t catalog_digest_ = 0;
};

// REQUIRES: `partition` was made from `catalog`. Errors, beside those of
// SourcePartition::Create (for the boxes of workers):
//   INVALID_BUCKET_BYTES  bucket_bytes below kMinBucketBytes, or above
//                         kMaxBucketBytes
// and RESOURCE_EXHAUSTED
//   PLAN_TOO_LARGE        more than kMaxPieces pieces, or ranks x classes of
//                         needs past 2^26; found before they are made
absl::StatusOr<UpdateLayout> BuildLayout(const Catalog& catalog,
                                         const SourcePartition& partition,
                                         absl::Span<const WorkerNeed> workers,
                                         int64_t bucket_bytes);

// Both steps at once.
absl::StatusOr<UpdateLayout> BuildLayout(const Catalog& catalog,
                                         absl::Span<const SourceRank> sources,
                                         absl::Span<const WorkerNeed> workers,
                                         int64_t bucket_bytes);

// The layout after workers came or went: equal to BuildLayout's answer for the
// new workers, and shares `old`'s table when its kinds of nodes stay the same.
// REQUIRES: `old` was made from `catalog` and `partition`.
absl::StatusOr<UpdateLayout> RebuildLayout(
    const UpdateLayout& old, const Catalog& catalog,
    const SourcePartition& partition, absl::Span<const WorkerNeed> workers);

// The sorted buckets of which one of `boxes` needs something: what a late
// joiner fetches.
std::vector<uint32_t> BucketsFor(const UpdateLayout& layout,
                                 absl::Span<const OrdinalBox> boxes);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_LAYOUT_H_
