#include "schedule/reshard.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/block_scale.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

std::string Named(const Catalog& catalog, uint32_t ordinal) {
  return absl::StrCat("parameter '", catalog.param(ordinal).name, "'");
}

absl::Status CheckLayout(const Catalog& catalog, const UpdateLayout& layout) {
  if (layout.table == nullptr ||
      layout.table->catalog_digest != catalog.digest()) {
    return InvalidPlan(kInvalidLayout,
                       "the layout was made for another catalog");
  }
  return absl::OkStatus();
}

// `who`: "trainer shard" or "worker".
absl::Status CheckMemoryBox(const Catalog& catalog, const MemoryBox& box,
                            absl::string_view who) {
  if (box.ordinal >= catalog.size()) {
    return InvalidPlan(
        kUnknownOrdinal,
        absl::StrCat("parameter number ", box.ordinal, " of a ", who,
                     " is not in the catalog of ", catalog.size()));
  }
  const Param& param = catalog.param(box.ordinal);
  if (!InsideShape(box.box, param.shape)) {
    return InvalidPlan(
        kBoxOutsideTensor,
        absl::StrCat(Named(catalog, box.ordinal), " of shape ",
                     DimsString(param.shape), " does not contain the box ",
                     BoxString(box.box), " of a ", who));
  }
  if (box.strides.size() != param.shape.size()) {
    return InvalidPlan(kInvalidLayout,
                       absl::StrCat(Named(catalog, box.ordinal), " has ",
                                    param.shape.size(), " dimensions and the ",
                                    who, " ", box.strides.size(), " strides"));
  }
  return absl::OkStatus();
}

// Boxes of one call by ordinal.
class BoxIndex {
 public:
  BoxIndex(uint32_t param_count, absl::Span<const MemoryBox> boxes)
      : begin_(param_count + 1, 0), order_(boxes.size()) {
    for (const MemoryBox& box : boxes) ++begin_[box.ordinal + 1];
    for (size_t o = 1; o < begin_.size(); ++o) begin_[o] += begin_[o - 1];
    std::vector<uint32_t> next(begin_.begin(), begin_.end() - 1);
    for (size_t i = 0; i < boxes.size(); ++i) {
      order_[next[boxes[i].ordinal]++] = static_cast<uint32_t>(i);
    }
  }
  absl::Span<const uint32_t> of(uint32_t ordinal) const {
    return absl::MakeConstSpan(order_.data() + begin_[ordinal],
                               begin_[ordinal + 1] - begin_[ordinal]);
  }

 private:
  std::vector<uint32_t> begin_;
  std::vector<uint32_t> order_;
};

}  // namespace

StridedCopy CopyBox(const Box& part, const Box& src_box, int64_t src_offset,
                    absl::Span<const int64_t> src_strides, const Box& dst_box,
                    int64_t dst_offset, absl::Span<const int64_t> dst_strides,
                    int64_t src_size, int64_t dst_size, Cast cast) {
  StridedCopy copy;
  copy.cast = cast;
  copy.src_offset = src_offset;
  copy.dst_offset = dst_offset;
  // From the innermost dimension out; the innermost is built as a run.
  int64_t extents[kMaxDims];
  int64_t src[kMaxDims];
  int64_t dst[kMaxDims];
  int count = 0;
  int64_t run = 1;  // elements
  for (int d = part.dims() - 1; d >= 0; --d) {
    copy.src_offset += (part.offset[d] - src_box.offset[d]) * src_strides[d];
    copy.dst_offset += (part.offset[d] - dst_box.offset[d]) * dst_strides[d];
    const int64_t extent = part.extent[d];
    if (extent == 1) continue;
    if (count == 0 && src_strides[d] == run * src_size &&
        dst_strides[d] == run * dst_size) {
      run *= extent;
    } else if (count > 0 &&
               src_strides[d] == src[count - 1] * extents[count - 1] &&
               dst_strides[d] == dst[count - 1] * extents[count - 1]) {
      extents[count - 1] *= extent;
    } else {
      extents[count] = extent;
      src[count] = src_strides[d];
      dst[count] = dst_strides[d];
      ++count;
    }
  }
  for (int i = count - 1; i >= 0; --i) {
    copy.extents.push_back(extents[i]);
    copy.src_strides.push_back(src[i]);
    copy.dst_strides.push_back(dst[i]);
  }
  copy.run_bytes = run * dst_size;
  return copy;
}

absl::StatusOr<std::vector<BucketCopy>> SnapshotCopies(
    const Catalog& catalog, const UpdateLayout& layout, int32_t rank,
    absl::Span<const MemoryBox> shards) {
  absl::Status ok = CheckLayout(catalog, layout);
  if (!ok.ok()) return ok;
  for (const MemoryBox& shard : shards) {
    ok = CheckMemoryBox(catalog, shard, "trainer shard");
    if (!ok.ok()) return ok;
  }
  absl::StatusOr<std::vector<MemoryBox>> scales = ScalesFor(catalog, shards);
  if (!scales.ok()) return scales.status();
  const size_t first_scale = shards.size();
  if (!scales->empty()) {
    scales->insert(scales->begin(), shards.begin(), shards.end());
    shards = *scales;
  }
  const BoxIndex index(catalog.size(), shards);
  std::vector<BucketCopy> copies;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    if (layout.bucket(b).source_rank != rank) continue;
    for (const Piece& piece : layout.pieces(b)) {
      const Param& param = catalog.param(piece.ordinal);
      const int64_t size = DTypeSize(param.dtype);
      const Dims dense = DenseStrides(piece.box.extent, size);
      std::vector<Box> missing = {piece.box};
      for (uint32_t s : index.of(piece.ordinal)) {
        if (missing.empty()) break;
        const MemoryBox& shard = shards[s];
        const DType dtype =
            shard.dtype == DType::kUnspecified ? param.dtype : shard.dtype;
        std::vector<Box> rest;
        for (const Box& box : missing) {
          Box part;
          if (!Intersect(box, shard.box, &part)) {
            rest.push_back(box);
            continue;
          }
          absl::StatusOr<Cast> cast = s >= first_scale
                                          ? Cast::kBF16BlockScale
                                          : CastBetween(dtype, param.dtype);
          if (!cast.ok()) {
            return InvalidPlan(
                kDTypeMismatch,
                absl::StrCat(Named(catalog, piece.ordinal), " is held by rank ",
                             rank, " as ", DTypeName(dtype), ": ",
                             cast.status().message()));
          }
          BucketCopy copy;
          copy.bucket = b;
          copy.memory = shard.memory;
          copy.copy =
              CopyBox(part, shard.box, shard.offset, shard.strides, piece.box,
                      piece.offset, dense, DTypeSize(dtype), size, *cast);
          if (*cast == Cast::kBF16ToF8E4M3 || *cast == Cast::kBF16BlockScale) {
            copy.ordinal = piece.ordinal;
            copy.part = part;
          }
          copies.push_back(std::move(copy));
          Subtract(box, shard.box, &rest);
        }
        missing.swap(rest);
      }
      if (!missing.empty()) {
        return InvalidPlan(
            kShardNotHeld,
            absl::StrCat(Named(catalog, piece.ordinal), ": rank ", rank,
                         " no longer holds ", BoxString(missing.front()),
                         " that the layout takes from it"));
      }
    }
  }
  return copies;
}

absl::StatusOr<std::vector<BucketCopy>> ApplyCopies(
    const Catalog& catalog, const UpdateLayout& layout,
    absl::Span<const MemoryBox> boxes) {
  absl::Status ok = CheckLayout(catalog, layout);
  if (!ok.ok()) return ok;
  std::vector<BucketCopy> copies;
  for (const MemoryBox& live : boxes) {
    ok = CheckMemoryBox(catalog, live, "worker");
    if (!ok.ok()) return ok;
    const Param& param = catalog.param(live.ordinal);
    if (live.dtype != DType::kUnspecified && live.dtype != param.dtype) {
      return InvalidPlan(
          kDTypeMismatch,
          absl::StrCat(Named(catalog, live.ordinal), " is ",
                       DTypeName(param.dtype), " in the catalog and ",
                       DTypeName(live.dtype), " in a worker"));
    }
    const int64_t size = DTypeSize(param.dtype);
    int64_t filled = 0;
    for (uint32_t p : layout.pieces_of(live.ordinal)) {
      const Piece& piece = layout.table->pieces[p];
      Box part;
      if (!Intersect(piece.box, live.box, &part)) continue;
      filled += part.Volume();
      BucketCopy copy;
      copy.bucket = layout.table->piece_bucket[p];
      copy.memory = live.memory;
      copy.copy = CopyBox(part, piece.box, piece.offset,
                          DenseStrides(piece.box.extent, size), live.box,
                          live.offset, live.strides, size, size, Cast::kNone);
      copies.push_back(std::move(copy));
    }
    // Pieces are disjoint, so the sum tells.
    if (filled != live.box.Volume()) {
      return InvalidPlan(
          kUnfilledBox,
          absl::StrCat(Named(catalog, live.ordinal), ": nobody sends all of ",
                       BoxString(live.box), "; ", live.box.Volume() - filled,
                       " elements are missing"));
    }
  }
  std::stable_sort(copies.begin(), copies.end(),
                   [](const BucketCopy& a, const BucketCopy& b) {
                     return a.bucket < b.bucket;
                   });
  return copies;
}

absl::StatusOr<std::vector<DirectCopy>> DirectCopies(
    const Catalog& catalog, absl::Span<const MemoryBox> src,
    absl::Span<const MemoryBox> dst) {
  for (const MemoryBox& box : src) {
    absl::Status ok = CheckMemoryBox(catalog, box, "trainer shard");
    if (!ok.ok()) return ok;
  }
  const BoxIndex index(catalog.size(), src);
  std::vector<DirectCopy> copies;
  for (const MemoryBox& to : dst) {
    absl::Status ok = CheckMemoryBox(catalog, to, "worker");
    if (!ok.ok()) return ok;
    const DType catalog_dtype = catalog.param(to.ordinal).dtype;
    const DType dst_dtype =
        to.dtype == DType::kUnspecified ? catalog_dtype : to.dtype;
    for (uint32_t s : index.of(to.ordinal)) {
      const MemoryBox& from = src[s];
      Box part;
      if (!Intersect(from.box, to.box, &part)) continue;
      const DType src_dtype =
          from.dtype == DType::kUnspecified ? catalog_dtype : from.dtype;
      absl::StatusOr<Cast> cast = CastBetween(src_dtype, dst_dtype);
      if (!cast.ok()) {
        return InvalidPlan(kDTypeMismatch,
                           absl::StrCat(Named(catalog, to.ordinal), ": ",
                                        cast.status().message()));
      }
      copies.push_back(
          DirectCopy{from.memory, to.memory,
                     CopyBox(part, from.box, from.offset, from.strides, to.box,
                             to.offset, to.strides, DTypeSize(src_dtype),
                             DTypeSize(dst_dtype), *cast)});
    }
  }
  return copies;
}

std::vector<ElementRun> RunsOf(const Catalog& catalog, const Piece& piece) {
  const Param& param = catalog.param(piece.ordinal);
  const int64_t size = DTypeSize(param.dtype);
  std::vector<ElementRun> runs;
  runs.reserve(CountRuns(piece.box, param.shape));
  int64_t offset = piece.offset;
  ForEachRun(piece.box, param.shape, [&](int64_t first, int64_t count) {
    runs.push_back(ElementRun{piece.ordinal, first, count, offset});
    offset += count * size;
  });
  return runs;
}

std::vector<ElementRun> RunsOfBucket(const Catalog& catalog,
                                     const UpdateLayout& layout,
                                     uint32_t bucket) {
  std::vector<ElementRun> all;
  for (const Piece& piece : layout.pieces(bucket)) {
    const std::vector<ElementRun> runs = RunsOf(catalog, piece);
    all.insert(all.end(), runs.begin(), runs.end());
  }
  return all;
}

}  // namespace schedule
}  // namespace weightsync
