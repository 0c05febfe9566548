#include "schedule/layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"
#include "schedule/need.h"
#include "schedule/stable_hash.h"

namespace weightsync {
namespace schedule {
namespace {

// Ranks x classes of needs: there is a table of that size.
constexpr int64_t kMaxStreams = int64_t{1} << 26;

void AddBox(const Box& box, StableHash* hash) {
  hash->Add(static_cast<uint64_t>(box.offset.size()));
  for (int64_t v : box.offset) hash->Add(v);
  for (int64_t v : box.extent) hash->Add(v);
}

uint64_t ListDigest(const std::vector<OrdinalBox>& boxes) {
  StableHash hash;
  hash.Add(static_cast<uint64_t>(boxes.size()));
  for (const OrdinalBox& box : boxes) {
    hash.Add(box.ordinal);
    hash.Add(static_cast<uint64_t>(box.dtype));
    AddBox(box.box, &hash);
  }
  return hash.Finish();
}

// What one rank sends to one class, and how far it is packed.
struct Stream {
  int32_t source = 0;
  int32_t need_class = 0;
  uint32_t piece_count = 0;
  uint32_t next_piece = 0;  // index into the table's pieces
  int64_t bucket_bytes = 0;
  uint32_t bucket = 0;  // index into the packer's buckets
};

// The streams of a layout, found by (source, class).
class Streams {
 public:
  explicit Streams(size_t source_count) : source_count_(source_count) {}

  Stream& At(int32_t source, int32_t need_class) {
    const auto c = static_cast<size_t>(need_class);
    if (c >= index_.size()) index_.resize(c + 1);
    std::vector<int32_t>& of_class = index_[c];
    if (of_class.empty()) of_class.assign(source_count_, -1);
    int32_t& id = of_class[source];
    if (id < 0) {
      id = static_cast<int32_t>(streams_.size());
      streams_.emplace_back();
      streams_.back().source = source;
      streams_.back().need_class = need_class;
    }
    return streams_[id];
  }

  // Gives each stream its place among the pieces: by source, then class.
  void Place() {
    std::vector<Stream*> order;
    for (Stream& stream : streams_) order.push_back(&stream);
    std::sort(order.begin(), order.end(), [](const Stream* a, const Stream* b) {
      if (a->source != b->source) return a->source < b->source;
      return a->need_class < b->need_class;
    });
    uint32_t at = 0;
    for (Stream* stream : order) {
      stream->next_piece = at;
      at += stream->piece_count;
    }
  }

 private:
  const size_t source_count_;
  std::vector<std::vector<int32_t>> index_;
  std::vector<Stream> streams_;
};

// Cuts a box that is larger than a bucket into parts that are not: by rows of
// its outermost dimension where a row fits, else within the rows.
template <typename Fn>
void Split(const Box& box, int64_t limit, Fn fn) {
  if (box.Volume() <= limit) {
    fn(box);
    return;
  }
  int dim = 0;
  while (box.extent[dim] == 1) ++dim;
  const int64_t row = box.Volume() / box.extent[dim];
  const int64_t step = std::max<int64_t>(1, limit / row);
  const int64_t end = box.end(dim);
  for (int64_t at = box.offset[dim]; at < end; at += step) {
    Box part = box;
    part.offset[dim] = at;
    part.extent[dim] = std::min(step, end - at);
    Split(part, limit, fn);
  }
}

// Those of a parameter's cells that a region may meet. Both are sorted by where
// they begin in dimension 0, so that a window over the cells moves along with
// the regions.
class CellWindow {
 public:
  explicit CellWindow(absl::Span<const NeedMap::Cell> cells) : cells_(cells) {}

  // REQUIRES: regions in their order.
  absl::Span<const NeedMap::Cell> MayMeet(const Box& region) {
    if (region.dims() == 0) return cells_;
    const int64_t begin = region.offset[0];
    while (first_ < cells_.size() && cells_[first_].box.end(0) <= begin) {
      ++first_;
    }
    const int64_t end = region.end(0);
    size_t last = std::max(last_, first_);
    while (last < cells_.size() && cells_[last].box.offset[0] < end) ++last;
    last_ = last;
    // The region before may have reached further.
    while (last > first_ && cells_[last - 1].box.offset[0] >= end) --last;
    return cells_.subspan(first_, last - first_);
  }

 private:
  const absl::Span<const NeedMap::Cell> cells_;
  size_t first_ = 0;
  size_t last_ = 0;
};

// Puts pieces into the buckets of their streams, which it fills side by side:
// pieces come in catalog order, so reading and indexing are sequential.
class Packer {
 public:
  Packer(const SourcePartition& partition, int64_t bucket_bytes,
         BucketTable* table)
      : partition_(partition), bucket_bytes_(bucket_bytes), table_(table) {}

  void Add(uint32_t ordinal, const Box& box, int64_t element_bytes,
           Stream* stream) {
    const int64_t bytes = box.Volume() * element_bytes;
    int64_t offset = (stream->bucket_bytes + kPieceAlignment - 1) /
                     kPieceAlignment * kPieceAlignment;
    if (stream->bucket_bytes == 0 || offset > bucket_bytes_ - bytes) {
      Open(stream);
      offset = 0;
    }
    Piece& piece = table_->pieces[stream->next_piece];
    piece.ordinal = ordinal;
    piece.box = box;
    piece.offset = offset;
    table_->piece_bucket[stream->next_piece] = stream->bucket;
    table_->param_pieces.push_back(stream->next_piece);
    ++stream->next_piece;
    stream->bucket_bytes = offset + bytes;
    Bucket& bucket = buckets_[stream->bucket];
    bucket.bytes = stream->bucket_bytes;
    ++bucket.piece_count;
  }

  // Numbers the buckets in the order of their pieces.
  void Finish() {
    std::vector<uint32_t> order(buckets_.size());
    for (size_t b = 0; b < order.size(); ++b) {
      order[b] = static_cast<uint32_t>(b);
    }
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return buckets_[a].first_piece < buckets_[b].first_piece;
    });
    std::vector<uint32_t> number(buckets_.size());
    for (uint32_t b : order) {
      number[b] = static_cast<uint32_t>(table_->buckets.size());
      table_->total_bytes += buckets_[b].bytes;
      table_->buckets.push_back(buckets_[b]);
    }
    for (uint32_t& b : table_->piece_bucket) b = number[b];
  }

 private:
  void Open(Stream* stream) {
    const SourceLoad& source = partition_.sources()[stream->source];
    Bucket bucket;
    bucket.source_rank = source.rank;
    bucket.source_node = source.node;
    bucket.need_class = stream->need_class;
    bucket.first_piece = stream->next_piece;
    stream->bucket = static_cast<uint32_t>(buckets_.size());
    stream->bucket_bytes = 0;
    buckets_.push_back(bucket);
  }

  const SourcePartition& partition_;
  const int64_t bucket_bytes_;
  BucketTable* const table_;
  std::vector<Bucket> buckets_;
};

uint64_t TableDigest(const BucketTable& table) {
  StableHash hash;
  hash.Add(table.catalog_digest);
  hash.Add(table.bucket_bytes);
  hash.Add(static_cast<uint64_t>(table.class_groups.size()));
  for (const std::vector<int32_t>& groups : table.class_groups) {
    hash.Add(static_cast<uint64_t>(groups.size()));
    for (int32_t group : groups) hash.Add(group);
  }
  hash.Add(static_cast<uint64_t>(table.buckets.size()));
  for (const Bucket& bucket : table.buckets) {
    hash.Add(bucket.source_rank);
    hash.Add(bucket.source_node);
    hash.Add(bucket.need_class);
    hash.Add(bucket.bytes);
    hash.Add(bucket.piece_count);
  }
  for (const Piece& piece : table.pieces) {
    hash.Add((static_cast<uint64_t>(piece.ordinal) << 32) ^
             static_cast<uint64_t>(piece.offset));
    AddBox(piece.box, &hash);
  }
  return hash.Finish();
}

absl::Status TooManyPieces(int64_t at_least, int64_t bucket_bytes) {
  return PlanError(
      absl::StatusCode::kResourceExhausted, kPlanTooLarge,
      absl::StrCat("shards and buckets of ", bucket_bytes,
                   " bytes would cut the catalog into ", at_least,
                   " pieces or more; a plan has at most ", kMaxPieces,
                   ": larger buckets (bucket_size) or fewer trainer ranks "
                   "make fewer"));
}

UpdateLayout Bind(std::shared_ptr<const BucketTable> table,
                  const NeedGroups& groups) {
  UpdateLayout layout;
  StableHash hash;
  hash.Add(table->digest);
  for (const std::vector<int32_t>& members : table->class_groups) {
    layout.classes.push_back(groups.Nodes(members));
    hash.Add(static_cast<uint64_t>(layout.classes.back().size()));
    for (int32_t node : layout.classes.back()) hash.Add(node);
  }
  layout.digest = hash.Finish();
  layout.table = std::move(table);
  return layout;
}

absl::StatusOr<UpdateLayout> BuildFromGroups(const Catalog& catalog,
                                             const SourcePartition& partition,
                                             const NeedGroups& groups,
                                             int64_t bucket_bytes) {
  if (bucket_bytes < kMinBucketBytes || bucket_bytes > kMaxBucketBytes) {
    return InvalidPlan(
        kInvalidBucketBytes,
        absl::StrCat("bucket_bytes is ", bucket_bytes, "; it must be between ",
                     kMinBucketBytes, " and ", kMaxBucketBytes));
  }
  if (catalog.total_bytes() / bucket_bytes > kMaxPieces) {
    return TooManyPieces(catalog.total_bytes() / bucket_bytes, bucket_bytes);
  }
  absl::StatusOr<NeedMap> needs = NeedMap::Create(catalog, groups);
  if (!needs.ok()) return needs.status();

  // Two passes over all regions and cells: count the pieces of every stream,
  // then put each in its place.
  std::vector<absl::Span<const NeedMap::Cell>> cells(catalog.size());
  Streams streams(partition.sources().size());
  int64_t piece_count = 0;
  for (uint32_t o = 0; o < catalog.size(); ++o) {
    cells[o] = needs->Cells(o);
    const auto tables = static_cast<int64_t>(needs->classes().size()) *
                        static_cast<int64_t>(partition.sources().size());
    if (tables > kMaxStreams) {
      return PlanError(
          absl::StatusCode::kResourceExhausted, kPlanTooLarge,
          absl::StrCat(partition.sources().size(), " trainer ranks times ",
                       needs->classes().size(),
                       " kinds of need are more than the ", kMaxStreams,
                       " that a plan may have; describe fewer ranks, or "
                       "replicas of fewer workers"));
    }
    const int64_t limit = bucket_bytes / DTypeSize(catalog.param(o).dtype);
    CellWindow window(cells[o]);
    for (const SourcePartition::Region& region : partition.regions(o)) {
      const bool small = region.box.Volume() <= limit;
      if (piece_count > kMaxPieces) {
        return TooManyPieces(piece_count, bucket_bytes);
      }
      for (const NeedMap::Cell& cell : window.MayMeet(region.box)) {
        if (!Intersects(region.box, cell.box)) continue;
        uint32_t parts = small ? 1 : 0;
        if (!small) {
          Box shared;
          Intersect(region.box, cell.box, &shared);
          // At least as many as fit by their bytes; counted before they are
          // cut one by one.
          const int64_t least = shared.Volume() / limit;
          if (piece_count + least > kMaxPieces) {
            return TooManyPieces(piece_count + least, bucket_bytes);
          }
          Split(shared, limit, [&](const Box&) { ++parts; });
        }
        streams.At(region.source, cell.need_class).piece_count += parts;
        piece_count += parts;
      }
    }
  }

  auto table = std::make_shared<BucketTable>();
  table->catalog_digest = catalog.digest();
  table->bucket_bytes = bucket_bytes;
  table->groups = groups.signature;
  table->sources = partition.sources();
  table->pieces.resize(piece_count);
  table->piece_bucket.resize(piece_count);
  table->param_pieces.reserve(piece_count);
  table->param_begin.reserve(catalog.size() + 1);
  streams.Place();
  Packer packer(partition, bucket_bytes, table.get());
  Box shared;
  for (uint32_t o = 0; o < catalog.size(); ++o) {
    table->param_begin.push_back(
        static_cast<uint32_t>(table->param_pieces.size()));
    const int64_t size = DTypeSize(catalog.param(o).dtype);
    const int64_t limit = bucket_bytes / size;
    CellWindow window(cells[o]);
    for (const SourcePartition::Region& region : partition.regions(o)) {
      for (const NeedMap::Cell& cell : window.MayMeet(region.box)) {
        if (!Intersect(region.box, cell.box, &shared)) continue;
        Stream& stream = streams.At(region.source, cell.need_class);
        Split(shared, limit,
              [&](const Box& part) { packer.Add(o, part, size, &stream); });
      }
    }
  }
  table->param_begin.push_back(
      static_cast<uint32_t>(table->param_pieces.size()));
  packer.Finish();
  table->class_groups = needs->classes();
  table->digest = TableDigest(*table);
  return Bind(std::move(table), groups);
}

}  // namespace

BoxList::BoxList(std::vector<OrdinalBox> boxes)
    : boxes_(std::move(boxes)), digest_(ListDigest(boxes_)) {
  absl::flat_hash_map<Box, uint32_t> ids;
  box_ids_.reserve(boxes_.size());
  for (const OrdinalBox& box : boxes_) {
    box_ids_.push_back(
        ids.try_emplace(box.box, static_cast<uint32_t>(ids.size()))
            .first->second);
  }
}

BoxListRef MakeBoxList(std::vector<OrdinalBox> boxes) {
  return std::make_shared<const BoxList>(std::move(boxes));
}

absl::StatusOr<UpdateLayout> BuildLayout(const Catalog& catalog,
                                         const SourcePartition& partition,
                                         absl::Span<const WorkerNeed> workers,
                                         int64_t bucket_bytes) {
  absl::StatusOr<NeedGroups> groups = NeedGroups::Create(workers);
  if (!groups.ok()) return groups.status();
  return BuildFromGroups(catalog, partition, *groups, bucket_bytes);
}

absl::StatusOr<UpdateLayout> BuildLayout(const Catalog& catalog,
                                         absl::Span<const SourceRank> sources,
                                         absl::Span<const WorkerNeed> workers,
                                         int64_t bucket_bytes) {
  absl::StatusOr<std::shared_ptr<const SourcePartition>> partition =
      SourcePartition::Create(catalog, sources);
  if (!partition.ok()) return partition.status();
  return BuildLayout(catalog, **partition, workers, bucket_bytes);
}

absl::StatusOr<UpdateLayout> RebuildLayout(
    const UpdateLayout& old, const Catalog& catalog,
    const SourcePartition& partition, absl::Span<const WorkerNeed> workers) {
  absl::StatusOr<NeedGroups> groups = NeedGroups::Create(workers);
  if (!groups.ok()) return groups.status();
  if (groups->signature == old.table->groups &&
      old.table->catalog_digest == catalog.digest()) {
    return Bind(old.table, *groups);
  }
  return BuildFromGroups(catalog, partition, *groups, old.table->bucket_bytes);
}

std::vector<uint32_t> BucketsFor(const UpdateLayout& layout,
                                 absl::Span<const OrdinalBox> boxes) {
  std::vector<bool> wanted(layout.bucket_count(), false);
  for (const OrdinalBox& need : boxes) {
    for (uint32_t p : layout.pieces_of(need.ordinal)) {
      const uint32_t bucket = layout.table->piece_bucket[p];
      if (!wanted[bucket] &&
          Intersects(layout.table->pieces[p].box, need.box)) {
        wanted[bucket] = true;
      }
    }
  }
  std::vector<uint32_t> ids;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    if (wanted[b]) ids.push_back(b);
  }
  return ids;
}

}  // namespace schedule
}  // namespace weightsync
