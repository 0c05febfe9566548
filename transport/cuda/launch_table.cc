#include "transport/cuda/launch_table.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "transport/cast_definition.h"
#include "transport/digest_definition.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

static_assert(kMaxDims == kMaxCopyDims, "one limit");

using BlocksKey = std::tuple<const char*, int64_t, int64_t, int64_t, int64_t>;
// Where in the table of scales they begin.
using BlocksKnown = std::map<BlocksKey, int64_t>;

// Stands for the table of scales until it has an address: as aligned as that.
constexpr int64_t kNoTable = 4096;

DeviceCast CastOf(CopyCast cast) {
  switch (cast) {
    case CopyCast::kF32ToBF16:
      return DeviceCast::kF32ToBF16;
    case CopyCast::kF32ToF16:
      return DeviceCast::kF32ToF16;
    case CopyCast::kBF16ToF8E4M3:
      return DeviceCast::kBF16ToF8E4M3;
    case CopyCast::kNone:
    case CopyCast::kBF16BlockScale:
      break;
  }
  return DeviceCast::kNone;
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

DeviceCopy FromTask(const CopyTask& task) {
  DeviceCopy copy = {};
  copy.src = task.src;
  copy.dst = task.dst;
  copy.run_elements = task.run_bytes / task.element_bytes;
  copy.first_element = task.first_element;
  copy.bytes = task.bytes();
  copy.dst_element_bytes = task.element_bytes;
  copy.src_element_bytes = task.src_element_bytes();
  copy.ordinal = task.ordinal;
  copy.cast = CastOf(task.cast);
  copy.scale_columns = task.blocks.matrix_columns;
  copy.scale_row = task.blocks.first_row;
  copy.scale_column = task.blocks.first_column;
  copy.scale_stride = task.blocks.block_columns();
  copy.dim_count = static_cast<int32_t>(task.dims.size());
  for (int i = 0; i < copy.dim_count; ++i) {
    const CopyDim& dim = task.dims[i];
    copy.dims[i] = {dim.extent, dim.src_stride, dim.dst_stride,
                    dim.element_stride};
  }
  return copy;
}

// A unit must not cross the end of a frame.
int64_t UnitBytesOf(int64_t frame_bytes) {
  int64_t unit_bytes = 64;
  while (unit_bytes < kUnitBytes && frame_bytes % (unit_bytes * 2) == 0)
    unit_bytes *= 2;
  return unit_bytes;
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
  // A million of them for 16 GB, which a pause waits for.
  const size_t before = table->units.size();
  table->units.resize(before + static_cast<size_t>(last - first + 1));
  DeviceUnit* unit = table->units.data() + before;
  for (int64_t place = first; place <= last; ++place)
    *unit++ = {index, static_cast<int32_t>(place)};
  return absl::OkStatus();
}

// `copy` is of `task`, and goes to the table next. Blocks that several tasks
// have are computed once.
absl::Status AddBlocks(const CopyTask& task, BlocksKnown* known,
                       DeviceCopy* copy, LaunchTable* table) {
  if (!task.has_blocks() || task.bytes() == 0) return absl::OkStatus();
  const CopyBlocks& blocks = task.blocks;
  const int64_t rows = blocks.block_rows(), columns = blocks.block_columns();
  const auto found = known->emplace(
      BlocksKey{blocks.src, blocks.row_stride, blocks.column_stride,
                blocks.rows, blocks.columns},
      table->scale_count);
  const int64_t first = found.first->second;
  if (found.second) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (columns > kMost / rows ||
        table->scale_count + rows * columns > kMost / 4) {
      return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_COPIES",
                       "too many blocks at once; split the copy");
    }
    DeviceScale scale = {};
    scale.src = blocks.src;
    scale.rows = blocks.rows;
    scale.columns = blocks.columns;
    scale.row_stride = blocks.row_stride;
    scale.column_stride = blocks.column_stride;
    scale.scale_stride = columns;
    scale.unaligned = (reinterpret_cast<uint64_t>(blocks.src) |
                       static_cast<uint64_t>(blocks.row_stride) |
                       static_cast<uint64_t>(blocks.column_stride)) %
                                  2 !=
                              0
                          ? 1
                          : 0;
    const int32_t index = static_cast<int32_t>(table->scales.size());
    table->scale_uses.push_back({true, table->scales.size(), first});
    table->scales.push_back(scale);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        table->scale_units.push_back(
            {index, static_cast<int32_t>(row), static_cast<int32_t>(column)});
      }
    }
    // The next table begins as aligned as this one.
    table->scale_count += (rows * columns + 3) / 4 * 4;
  }
  int64_t at = first;
  if (task.cast == CopyCast::kBF16BlockScale) {
    at += (task.src - blocks.src) / 4;
    // For the choice of vectors.
    copy->src = reinterpret_cast<const char*>(kNoTable + at * 4);
  }
  table->scale_uses.push_back({false, table->copies.size(), at});
  return absl::OkStatus();
}

absl::Status AddTask(const CopyTask& task, DeviceCopy copy, BlocksKnown* known,
                     LaunchTable* table) {
  const absl::Status status = AddBlocks(task, known, &copy, table);
  return status.ok() ? Add(copy, table) : status;
}

}  // namespace

absl::Status AddTasks(absl::Span<const CopyTask> tasks, LaunchTable* table) {
  BlocksKnown known;
  for (const CopyTask& task : tasks) {
    const absl::Status status = AddTask(task, FromTask(task), &known, table);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status AddDigests(absl::Span<const CopyTask> tasks, LaunchTable* table,
                        std::vector<int64_t>* first_frames) {
  static_assert(kFrameBytes % kUnitBytes == 0, "units do not cross frames");
  BlocksKnown known;
  table->unit_bytes = kUnitBytes;
  table->frame_bytes = kFrameBytes;
  table->frames = 0;
  for (const CopyTask& task : tasks) {
    first_frames->push_back(table->frames);
    DeviceCopy copy = FromTask(task);
    copy.dst = nullptr;
    copy.place = table->frames * table->frame_bytes;
    const absl::Status status = AddTask(task, copy, &known, table);
    if (!status.ok()) return status;
    table->frames += (copy.bytes + table->frame_bytes - 1) / table->frame_bytes;
  }
  first_frames->push_back(table->frames);
  return absl::OkStatus();
}

void PlaceScales(float* floats, LaunchTable* table) {
  for (const LaunchTable::ScaleUse& use : table->scale_uses) {
    if (use.by_scale) {
      table->scales[use.index].scales = floats + use.first;
      continue;
    }
    DeviceCopy& copy = table->copies[use.index];
    if (copy.cast == DeviceCast::kBF16ToF8E4M3) {
      copy.scales = floats + use.first;
    } else {
      copy.src = reinterpret_cast<const char*>(floats + use.first);
    }
  }
}

absl::Status AddPack(const PackRequest& request, LaunchTable* table) {
  BlocksKnown known;
  table->frame_bytes = request.frame_bytes;
  table->frames =
      (request.bucket_bytes + request.frame_bytes - 1) / request.frame_bytes;
  table->unit_bytes = UnitBytesOf(request.frame_bytes);
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
    DeviceCopy copy = FromTask(piece.copy);
    copy.dst = request.bucket + piece.offset;
    copy.place = piece.offset;
    int64_t stride = piece.copy.run_bytes;
    for (int d = copy.dim_count; d-- > 0;) {
      copy.dims[d].dst_stride = stride;
      stride *= copy.dims[d].extent;
    }
    status = AddTask(piece.copy, copy, &known, table);
    if (!status.ok()) return status;
    end = piece.offset + copy.bytes;
  }
  return fill(request.bucket_bytes);
}

absl::Status AddFrameDigests(const FrameDigestRequest& request,
                             LaunchTable* table) {
  const auto bad = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
  };
  const absl::Span<const uint32_t> frames = request.frames;
  if (frames.empty()) return bad("no frames to digest");
  if (request.frame_bytes <= 0 || request.frame_bytes % 64 != 0)
    return bad(absl::StrCat("frames of ", request.frame_bytes, " bytes"));
  for (size_t i = 1; i < frames.size(); ++i) {
    if (frames[i] <= frames[i - 1]) return bad("frames that are not in order");
  }
  table->frame_bytes = request.frame_bytes;
  table->frames = int64_t{frames.back()} - frames.front() + 1;
  table->unit_bytes = UnitBytesOf(request.frame_bytes);
  const int64_t units = request.frame_bytes / table->unit_bytes;
  if (table->frames > std::numeric_limits<int32_t>::max() / units)
    return bad("frames that are too far apart");
  int64_t last = -1;
  for (const PackPiece& piece : request.pieces) {
    if (piece.copy.bytes() == 0) continue;
    if (piece.copy.cast != CopyCast::kNone || piece.copy.dst != nullptr)
      return bad("what is digested is not copied");
    if (piece.offset < last) return bad("pieces that are not in order");
    const int64_t end = piece.offset + piece.copy.bytes();
    last = end;
    DeviceCopy copy = FromTask(piece.copy);
    // From the first frame on; what stands before it has no units.
    copy.place = piece.offset - int64_t{frames.front()} * request.frame_bytes;
    ChooseVector(&copy);
    const int32_t index = static_cast<int32_t>(table->copies.size());
    bool any = false;
    for (const uint32_t frame : frames) {
      const int64_t from =
          std::max(piece.offset, int64_t{frame} * request.frame_bytes);
      const int64_t to =
          std::min(end, (int64_t{frame} + 1) * request.frame_bytes);
      if (from >= to) continue;
      any = true;
      const int64_t shift = piece.offset - copy.place;
      for (int64_t unit = (from - shift) / table->unit_bytes;
           unit <= (to - 1 - shift) / table->unit_bytes; ++unit) {
        table->units.push_back({index, static_cast<int32_t>(unit)});
      }
    }
    if (any) table->copies.push_back(copy);
  }
  return absl::OkStatus();
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
