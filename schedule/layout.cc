#include "schedule/layout.h"

#include <algorithm>
#include <limits>
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

// A box that one rank sends to one class; where it goes is decided in order.
struct Cut {
  uint32_t ordinal;
  Box box;
};

class Packer {
 public:
  Packer(const Catalog& catalog, int64_t bucket_bytes, BucketTable* table)
      : catalog_(catalog), bucket_bytes_(bucket_bytes), table_(table) {}

  void Open(int32_t rank, int32_t node, int32_t need_class) {
    Close();
    bucket_ = Bucket();
    bucket_.source_rank = rank;
    bucket_.source_node = node;
    bucket_.need_class = need_class;
    bucket_.first_piece = static_cast<uint32_t>(table_->pieces.size());
  }

  void Add(uint32_t ordinal, Box box) {
    const int64_t size = DTypeSize(catalog_.param(ordinal).dtype);
    if (box.Volume() <= bucket_bytes_ / size) {
      AddPiece(ordinal, std::move(box), size);
    } else {
      Split(ordinal, std::move(box), size);
    }
  }

  void Close() {
    bucket_.piece_count =
        static_cast<uint32_t>(table_->pieces.size()) - bucket_.first_piece;
    if (bucket_.piece_count == 0) return;
    table_->total_bytes += bucket_.bytes;
    table_->buckets.push_back(bucket_);
  }

 private:
  void AddPiece(uint32_t ordinal, Box box, int64_t size) {
    const int64_t bytes = box.Volume() * size;
    int64_t offset = (bucket_.bytes + kPieceAlignment - 1) / kPieceAlignment *
                     kPieceAlignment;
    if (offset > bucket_bytes_ - bytes) {
      Open(bucket_.source_rank, bucket_.source_node, bucket_.need_class);
      offset = 0;
    }
    table_->pieces.push_back(Piece{ordinal, std::move(box), offset});
    bucket_.bytes = offset + bytes;
  }

  // REQUIRES: the box is larger than a bucket.
  void Split(uint32_t ordinal, Box box, int64_t size) {
    const int64_t limit = bucket_bytes_ / size;
    int dim = 0;
    while (box.extent[dim] == 1) ++dim;
    const int64_t row = box.Volume() / box.extent[dim];
    const int64_t step = std::max<int64_t>(1, limit / row);
    const int64_t end = box.end(dim);
    for (int64_t at = box.offset[dim]; at < end; at += step) {
      Box part = box;
      part.offset[dim] = at;
      part.extent[dim] = std::min(step, end - at);
      Add(ordinal, std::move(part));
    }
  }

  const Catalog& catalog_;
  const int64_t bucket_bytes_;
  BucketTable* const table_;
  Bucket bucket_;
};

// Walks the regions and cells of every parameter, and calls
// fn(ordinal, source, need class, box) in catalog order.
template <typename Fn>
void ForEachCut(const Catalog& catalog, const SourcePartition& partition,
                NeedMap* needs, Fn fn) {
  Box shared;
  for (uint32_t o = 0; o < catalog.size(); ++o) {
    const absl::Span<const NeedMap::Cell> cells = needs->Cells(o);
    for (const SourcePartition::Region& region : partition.regions(o)) {
      if (cells.size() == 1) {
        fn(o, region.source, cells[0].need_class, region.box);
        continue;
      }
      for (const NeedMap::Cell& cell : cells) {
        if (Intersect(region.box, cell.box, &shared)) {
          fn(o, region.source, cell.need_class, shared);
        }
      }
    }
  }
}

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

void IndexByParam(uint32_t param_count, BucketTable* table) {
  table->piece_bucket.resize(table->pieces.size());
  table->param_begin.assign(param_count + 1, 0);
  for (size_t b = 0; b < table->buckets.size(); ++b) {
    const Bucket& bucket = table->buckets[b];
    for (uint32_t i = 0; i < bucket.piece_count; ++i) {
      table->piece_bucket[bucket.first_piece + i] = static_cast<uint32_t>(b);
      ++table->param_begin[table->pieces[bucket.first_piece + i].ordinal + 1];
    }
  }
  for (size_t o = 1; o < table->param_begin.size(); ++o) {
    table->param_begin[o] += table->param_begin[o - 1];
  }
  table->param_pieces.resize(table->pieces.size());
  std::vector<uint32_t> next(table->param_begin.begin(),
                             table->param_begin.end() - 1);
  for (size_t p = 0; p < table->pieces.size(); ++p) {
    table->param_pieces[next[table->pieces[p].ordinal]++] =
        static_cast<uint32_t>(p);
  }
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
  if (bucket_bytes < kMinBucketBytes) {
    return InvalidPlan(kInvalidBucketBytes,
                       absl::StrCat("bucket_bytes is ", bucket_bytes,
                                    "; it must be at least ", kMinBucketBytes));
  }
  absl::StatusOr<NeedMap> needs = NeedMap::Create(catalog, groups);
  if (!needs.ok()) return needs.status();

  // Two passes: count the cuts of every stream, then place them.
  std::vector<Cut> cuts;
  std::vector<uint64_t> keys;  // (source, class) of each cut
  cuts.reserve(partition.region_count());
  keys.reserve(partition.region_count());
  ForEachCut(catalog, partition, &*needs,
             [&](uint32_t ordinal, int32_t source, int32_t need_class,
                 const Box& box) {
               cuts.push_back(Cut{ordinal, box});
               keys.push_back((static_cast<uint64_t>(source) << 32) |
                              static_cast<uint32_t>(need_class));
             });
  if (cuts.size() > std::numeric_limits<uint32_t>::max() / 2) {
    return InvalidPlan(kInvalidLayout,
                       "the shards cut the catalog into more than 2^31 pieces");
  }
  absl::flat_hash_map<uint64_t, uint32_t> counts;
  for (uint64_t key : keys) ++counts[key];
  std::vector<uint64_t> streams;
  streams.reserve(counts.size());
  for (const auto& entry : counts) streams.push_back(entry.first);
  std::sort(streams.begin(), streams.end());
  absl::flat_hash_map<uint64_t, uint32_t> next;
  uint32_t at = 0;
  for (uint64_t key : streams) {
    next[key] = at;
    at += counts[key];
  }
  std::vector<uint32_t> order(cuts.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    order[next[keys[i]]++] = static_cast<uint32_t>(i);
  }

  auto table = std::make_shared<BucketTable>();
  table->catalog_digest = catalog.digest();
  table->bucket_bytes = bucket_bytes;
  table->class_groups = needs->classes();
  table->groups = groups.signature;
  table->sources = partition.sources();
  table->pieces.reserve(cuts.size());
  Packer packer(catalog, bucket_bytes, table.get());
  size_t i = 0;
  for (uint64_t key : streams) {
    const SourcePartition::Source& source = partition.sources()[key >> 32];
    packer.Open(source.rank, source.node, static_cast<int32_t>(key));
    for (const size_t end = i + counts[key]; i < end; ++i) {
      Cut& cut = cuts[order[i]];
      packer.Add(cut.ordinal, std::move(cut.box));
    }
  }
  packer.Close();
  std::vector<Cut>().swap(cuts);
  IndexByParam(catalog.size(), table.get());
  table->digest = TableDigest(*table);
  return Bind(std::move(table), groups);
}

}  // namespace

BoxList::BoxList(std::vector<OrdinalBox> boxes)
    : boxes_(std::move(boxes)), digest_(ListDigest(boxes_)) {}

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
