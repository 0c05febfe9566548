#include "transport/cuda/launch_table.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "transport/cuda/cast_definition.h"
#include "transport/digest_definition.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

static_assert(kMaxDims == kMaxCopyDims, "one limit");

int32_t SourceBytes(DeviceCast cast, int32_t element_bytes) {
  switch (cast) {
    case DeviceCast::kNone:
      return element_bytes;
    case DeviceCast::kF32ToBF16:
    case DeviceCast::kF32ToF16:
      return 4;
    case DeviceCast::kBF16ToF8E4M3:
      return 2;
  }
  return element_bytes;
}

// Vectors of the destination are the largest power of two, up to 16, that
// divides everything which decides where they start and end; or one element,
// byte by byte, where not even that is aligned.
void ChooseVector(DeviceCopy* copy) {
  uint64_t dst =
      reinterpret_cast<uint64_t>(copy->dst) |
      static_cast<uint64_t>(copy->run_elements * copy->dst_element_bytes) |
      static_cast<uint64_t>(copy->place);
  uint64_t src = reinterpret_cast<uint64_t>(copy->src);
  for (int i = 0; i < copy->dim_count; ++i) {
    dst |= static_cast<uint64_t>(copy->dims[i].dst_stride);
    src |= static_cast<uint64_t>(copy->dims[i].src_stride);
  }
  // A source of wider elements is read element by element.
  const bool cast = copy->cast != DeviceCast::kNone;
  if (!cast) dst |= src;
  int32_t vector = 16;
  while (vector > 1 && dst % vector != 0) vector /= 2;
  copy->unaligned = vector < copy->dst_element_bytes ||
                    (cast && src % copy->src_element_bytes != 0);
  // Casts know two widths.
  if (cast && vector < 16) vector = copy->dst_element_bytes;
  copy->vector_bytes = copy->unaligned ? copy->dst_element_bytes : vector;
}

DeviceCopy FromTask(const CopyTask& task, const CastSpec& cast) {
  DeviceCopy copy = {};
  copy.src = task.src;
  copy.dst = task.dst;
  copy.run_elements = task.run_bytes / task.element_bytes;
  copy.first_element = task.first_element;
  copy.bytes = task.bytes();
  copy.dst_element_bytes = task.element_bytes;
  copy.src_element_bytes = SourceBytes(cast.cast, task.element_bytes);
  copy.ordinal = task.ordinal;
  copy.cast = cast.cast;
  copy.scales = cast.scales;
  copy.scale_columns = cast.scale_columns;
  copy.scale_stride = cast.scale_stride;
  copy.dim_count = static_cast<int32_t>(task.dims.size());
  for (int i = 0; i < copy.dim_count; ++i) {
    const CopyDim& dim = task.dims[i];
    copy.dims[i] = {dim.extent, dim.src_stride, dim.dst_stride,
                    dim.element_stride};
  }
  return copy;
}

absl::Status Add(DeviceCopy copy, LaunchTable* table) {
  if (copy.bytes == 0) return absl::OkStatus();
  ChooseVector(&copy);
  const int64_t first = copy.place / table->unit_bytes;
  const int64_t last = (copy.place + copy.bytes - 1) / table->unit_bytes;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (last > kMost || static_cast<int64_t>(table->copies.size()) >= kMost) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "TOO_MANY_COPIES",
        absl::StrCat("a copy of ", copy.bytes, " bytes at once; split it"));
  }
  const int32_t index = static_cast<int32_t>(table->copies.size());
  table->copies.push_back(copy);
  for (int64_t unit = first; unit <= last; ++unit)
    table->units.push_back({index, static_cast<int32_t>(unit)});
  return absl::OkStatus();
}

}  // namespace

absl::Status AddTasks(absl::Span<const CopyTask> tasks,
                      absl::Span<const CastSpec> casts, LaunchTable* table) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    const absl::Status status =
        Add(FromTask(tasks[i], casts.empty() ? CastSpec() : casts[i]), table);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status AddPack(const PackRequest& request,
                     absl::Span<const CastSpec> casts, LaunchTable* table) {
  table->frame_bytes = request.frame_bytes;
  table->frames =
      (request.bucket_bytes + request.frame_bytes - 1) / request.frame_bytes;
  // A unit must not cross the end of a frame.
  table->unit_bytes = 64;
  while (table->unit_bytes < kUnitBytes &&
         request.frame_bytes % (table->unit_bytes * 2) == 0)
    table->unit_bytes *= 2;
  int64_t end = 0;
  const auto fill = [&](int64_t to) -> absl::Status {
    DeviceCopy zeros = {};
    zeros.dst = request.bucket + end;
    zeros.place = end;
    zeros.bytes = zeros.run_elements = to - end;
    zeros.src_element_bytes = zeros.dst_element_bytes = 1;
    return to > end ? Add(zeros, table) : absl::OkStatus();
  };
  for (size_t i = 0; i < request.pieces.size(); ++i) {
    const PackPiece& piece = request.pieces[i];
    absl::Status status = fill(piece.offset);
    if (!status.ok()) return status;
    DeviceCopy copy =
        FromTask(piece.copy, casts.empty() ? CastSpec() : casts[i]);
    copy.dst = request.bucket + piece.offset;
    copy.place = piece.offset;
    int64_t stride = piece.copy.run_bytes;
    for (int d = copy.dim_count; d-- > 0;) {
      copy.dims[d].dst_stride = stride;
      stride *= copy.dims[d].extent;
    }
    status = Add(copy, table);
    if (!status.ok()) return status;
    end = piece.offset + copy.bytes;
  }
  return fill(request.bucket_bytes);
}

absl::Status CheckPack(const PackRequest& request) {
  const auto bad = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
  };
  if (request.bucket == nullptr || request.bucket_bytes < 0)
    return bad("no bucket");
  if (request.frame_bytes <= 0 || request.frame_bytes % 64 != 0)
    return bad(absl::StrCat("frames of ", request.frame_bytes, " bytes"));
  int64_t end = 0;
  for (const PackPiece& piece : request.pieces) {
    const absl::Status status = piece.copy.Validate();
    if (!status.ok()) return status;
    if (piece.offset < end)
      return bad("pieces of a bucket overlap, or are not in order");
    if (piece.offset % std::max(16, piece.copy.element_bytes) != 0)
      return bad(
          absl::StrCat("a piece at offset ", piece.offset, " of a bucket"));
    if (piece.copy.bytes() > request.bucket_bytes - piece.offset)
      return bad("a piece goes beyond its bucket");
    end = piece.offset + piece.copy.bytes();
  }
  return absl::OkStatus();
}

void AddScale(const DeviceScale& scale, ScaleTable* table) {
  const int32_t index = static_cast<int32_t>(table->scales.size());
  table->scales.push_back(scale);
  for (int64_t row = 0; row * kScaleBlock < scale.rows; ++row) {
    for (int64_t column = 0; column * kScaleBlock < scale.columns; ++column) {
      table->units.push_back(
          {index, static_cast<int32_t>(row), static_cast<int32_t>(column)});
    }
  }
}

std::vector<int16_t> InnerKeys() {
  std::vector<int16_t> keys;
  for (int lane = 0; lane < kDigestLanes; ++lane) {
    for (int i = 0; i < kDigestBlockWords; ++i)
      keys.push_back(DigestInnerKey(lane, i));
  }
  return keys;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
