#include "transport/copy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

absl::Status BadCopy(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
}

}  // namespace

int64_t CopyTask::rows() const {
  int64_t rows = 1;
  for (const CopyDim& dim : dims) rows *= dim.extent;
  return rows;
}

int64_t CopyTask::src_extent() const {
  int64_t extent = run_bytes;
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
  return absl::OkStatus();
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
                     absl::optional<GlobalBox> global) {
  CopyTask task;
  task.dst = dst;
  task.src = src;
  task.element_bytes = element_bytes;
  task.run_bytes = element_bytes;
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
    dim.src_stride = src_strides[i] * element_bytes;
    if (global.has_value()) dim.element_stride = global_strides[i];
    if (task.dims.empty()) {
      if (dim.dst_stride == task.run_bytes &&
          dim.src_stride == task.run_bytes &&
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
