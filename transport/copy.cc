#include "transport/copy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "transport/cast_definition.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

absl::Status BadCopy(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
}

// The blocks of a copy have all of its elements, and nothing overflows.
absl::Status CheckBlocks(const CopyTask& task) {
  const CopyBlocks& blocks = task.blocks;
  constexpr int64_t kMost = int64_t{1} << 40;  // elements
  if (blocks.src == nullptr || blocks.rows <= 0 || blocks.rows > kMost ||
      blocks.columns <= 0 || blocks.columns > kMost || blocks.row_stride < 0 ||
      blocks.column_stride < 0 || blocks.first_row < 0 ||
      blocks.first_row > kMost || blocks.first_column < 0 ||
      blocks.first_column % kScaleBlock != 0 ||
      blocks.first_row % kScaleBlock != 0 || blocks.matrix_columns > kMost ||
      blocks.columns > blocks.matrix_columns - blocks.first_column) {
    return BadCopy("blocks of a matrix that are none");
  }
  int64_t rows, columns;
  if (__builtin_mul_overflow(blocks.rows, blocks.row_stride, &rows) ||
      __builtin_mul_overflow(blocks.columns, blocks.column_stride, &columns) ||
      __builtin_add_overflow(rows, columns, &rows)) {
    return BadCopy("blocks further apart than 63 bits can count");
  }
  int64_t last = task.run_bytes / task.element_bytes - 1;
  if (task.bytes() == 0) return absl::OkStatus();
  if (task.cast == CopyCast::kBF16BlockScale) {
    const int64_t table = blocks.block_rows() * blocks.block_columns() * 4;
    int64_t end = task.run_bytes;
    for (const CopyDim& dim : task.dims) {
      int64_t step;
      if (__builtin_mul_overflow(dim.extent - 1, dim.src_stride, &step) ||
          __builtin_add_overflow(end, step, &end)) {
        return BadCopy("scales of blocks that it does not have");
      }
    }
    const int64_t at = task.src - blocks.src;
    if (at < 0 || at % 4 != 0 || at > table || end > table - at) {
      return BadCopy("scales of blocks that it does not have");
    }
    return absl::OkStatus();
  }
  for (const CopyDim& dim : task.dims) {
    int64_t step;
    if (dim.element_stride < 0 ||
        __builtin_mul_overflow(dim.extent - 1, dim.element_stride, &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return BadCopy("elements beyond 63 bits");
    }
  }
  // Of a box, the first and the last one are its corners.
  if (task.first_element < 0 ||
      __builtin_add_overflow(task.first_element, last, &last)) {
    return BadCopy("elements beyond 63 bits");
  }
  for (int64_t element : {task.first_element, last}) {
    const int64_t row = element / blocks.matrix_columns - blocks.first_row;
    const int64_t column =
        element % blocks.matrix_columns - blocks.first_column;
    if (row < 0 || row >= blocks.rows || column < 0 ||
        column >= blocks.columns) {
      return BadCopy("elements outside of the blocks of their copy");
    }
  }
  return absl::OkStatus();
}

}  // namespace

int64_t CopyBlocks::block_rows() const {
  return (rows + kScaleBlock - 1) / kScaleBlock;
}

int64_t CopyBlocks::block_columns() const {
  return (columns + kScaleBlock - 1) / kScaleBlock;
}

int64_t CopyBlocks::extent() const {
  return (rows - 1) * row_stride + (columns - 1) * column_stride + 2;
}

int32_t CopyTask::src_element_bytes() const {
  switch (cast) {
    case CopyCast::kF32ToBF16:
    case CopyCast::kF32ToF16:
      return 4;
    case CopyCast::kBF16ToF8E4M3:
      return 2;
    case CopyCast::kNone:
    case CopyCast::kBF16BlockScale:
      break;
  }
  return element_bytes;
}

int64_t CopyTask::rows() const {
  int64_t rows = 1;
  for (const CopyDim& dim : dims) rows *= dim.extent;
  return rows;
}

int64_t CopyTask::src_extent() const {
  if (cast == CopyCast::kBF16BlockScale) return blocks.extent();
  int64_t extent = run_bytes / element_bytes * src_element_bytes();
  for (const CopyDim& dim : dims) {
    if (dim.extent == 0) return 0;
    extent += (dim.extent - 1) * dim.src_stride;
  }
  return extent;
}

bool CopyTask::dense_dst() const {
  int64_t expected = run_bytes;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i].dst_stride != expected) return false;
    expected *= dims[i].extent;
  }
  return true;
}

absl::Status CopyTask::Validate() const {
  if (dims.size() > kMaxCopyDims)
    return BadCopy(absl::StrCat("a copy of ", dims.size(),
                                " dimensions; the most is ", kMaxCopyDims));
  if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4 &&
      element_bytes != 8 && element_bytes != 16) {
    return BadCopy(absl::StrCat("elements of ", element_bytes, " bytes"));
  }
  if (run_bytes < 0 || run_bytes % element_bytes != 0) {
    return BadCopy(absl::StrCat("runs of ", run_bytes,
                                " bytes with elements of ", element_bytes));
  }
  // Products that a CopyTask computes stay in 63 bits when the sum of its bytes
  // does.
  int64_t bytes = run_bytes;
  for (const CopyDim& dim : dims) {
    if (dim.extent < 0 || dim.dst_stride < 0 || dim.src_stride < 0)
      return BadCopy("a negative extent or stride");
    if (__builtin_mul_overflow(bytes, dim.extent, &bytes))
      return BadCopy("more bytes than 63 bits can count");
  }
  if (bytes > 0 && src == nullptr) return BadCopy("no source");
  if (cast == CopyCast::kNone) return absl::OkStatus();
  const int32_t written = cast == CopyCast::kBF16ToF8E4M3     ? 1
                          : cast == CopyCast::kBF16BlockScale ? 4
                                                              : 2;
  if (cast > CopyCast::kBF16BlockScale || element_bytes != written) {
    return BadCopy(absl::StrCat("cast ", static_cast<int>(cast), " to ",
                                element_bytes, " bytes"));
  }
  return has_blocks() ? CheckBlocks(*this) : absl::OkStatus();
}

namespace {

// Index `index` of the outermost dimension, without it.
CopyTask Inner(const CopyTask& task, int64_t index) {
  CopyTask inner = task;
  const CopyDim& outer = task.dims[0];
  inner.dims.erase(inner.dims.begin());
  if (inner.dst != nullptr) inner.dst += index * outer.dst_stride;
  inner.src += index * outer.src_stride;
  inner.first_element += index * outer.element_stride;
  return inner;
}

void Split(const CopyTask& task, int64_t max_bytes,
           std::vector<CopyTask>* parts) {
  if (task.bytes() == 0) return;
  if (task.bytes() <= max_bytes) {
    parts->push_back(task);
    return;
  }
  if (task.dims.empty()) {
    const int64_t most =
        std::max<int64_t>(max_bytes / task.element_bytes * task.element_bytes,
                          task.element_bytes);
    for (int64_t at = 0; at < task.run_bytes; at += most) {
      CopyTask part = task;
      if (part.dst != nullptr) part.dst += at;
      part.src += at / task.element_bytes * task.src_element_bytes();
      part.run_bytes = std::min(most, task.run_bytes - at);
      part.first_element += at / task.element_bytes;
      parts->push_back(part);
    }
    return;
  }
  const CopyDim& outer = task.dims[0];
  const int64_t inner_bytes = task.bytes() / outer.extent;
  if (inner_bytes > max_bytes) {
    for (int64_t i = 0; i < outer.extent; ++i)
      Split(Inner(task, i), max_bytes, parts);
    return;
  }
  const int64_t most = max_bytes / inner_bytes;
  for (int64_t i = 0; i < outer.extent; i += most) {
    CopyTask part = task;
    if (part.dst != nullptr) part.dst += i * outer.dst_stride;
    part.src += i * outer.src_stride;
    part.first_element += i * outer.element_stride;
    part.dims[0].extent = std::min(most, outer.extent - i);
    parts->push_back(part);
  }
}

void Rows(const CopyTask& task, std::vector<CopyTask>* rows) {
  if (task.bytes() == 0) return;
  if (task.dense_dst()) {
    rows->push_back(task);
    return;
  }
  for (int64_t i = 0; i < task.dims[0].extent; ++i) Rows(Inner(task, i), rows);
}

}  // namespace

std::vector<CopyTask> SplitCopy(const CopyTask& task, int64_t max_bytes) {
  std::vector<CopyTask> parts;
  Split(task, max_bytes, &parts);
  return parts;
}

std::vector<CopyTask> DenseRows(const CopyTask& task) {
  std::vector<CopyTask> rows;
  Rows(task, &rows);
  return rows;
}

absl::InlinedVector<int64_t, 4> DenseStrides(
    absl::Span<const int64_t> extents) {
  absl::InlinedVector<int64_t, 4> strides(extents.size());
  int64_t stride = 1;
  for (size_t i = extents.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= extents[i];
  }
  return strides;
}

CopyTask MakeBoxCopy(absl::Span<const int64_t> extents, int32_t element_bytes,
                     char* dst, absl::Span<const int64_t> dst_strides,
                     const char* src, absl::Span<const int64_t> src_strides,
                     absl::optional<GlobalBox> global, CopyCast cast) {
  CopyTask task;
  task.dst = dst;
  task.src = src;
  task.element_bytes = element_bytes;
  task.run_bytes = element_bytes;
  task.cast = cast;
  const int64_t src_bytes = task.src_element_bytes();
  absl::InlinedVector<int64_t, 4> global_strides;
  if (global.has_value()) {
    task.ordinal = global->ordinal;
    global_strides = DenseStrides(global->shape);
    for (size_t i = 0; i < extents.size(); ++i)
      task.first_element += global->offset[i] * global_strides[i];
  }
  // From the innermost dimension out; `dims` is turned round at the end.
  for (size_t i = extents.size(); i-- > 0;) {
    if (extents[i] == 1) continue;
    CopyDim dim;
    dim.extent = extents[i];
    dim.dst_stride = dst_strides[i] * element_bytes;
    dim.src_stride = src_strides[i] * src_bytes;
    if (global.has_value()) dim.element_stride = global_strides[i];
    if (task.dims.empty()) {
      if (dim.dst_stride == task.run_bytes &&
          dim.src_stride == task.run_bytes / element_bytes * src_bytes &&
          (!global.has_value() ||
           dim.element_stride == task.run_bytes / element_bytes)) {
        task.run_bytes *= dim.extent;
        continue;
      }
    } else {
      CopyDim& inner = task.dims.back();
      if (dim.dst_stride == inner.dst_stride * inner.extent &&
          dim.src_stride == inner.src_stride * inner.extent &&
          dim.element_stride == inner.element_stride * inner.extent) {
        inner.extent *= dim.extent;
        continue;
      }
    }
    task.dims.push_back(dim);
  }
  std::reverse(task.dims.begin(), task.dims.end());
  return task;
}

}  // namespace transport
}  // namespace weightsync
