#include "transport/host/copy_range.h"

#include <algorithm>
#include <cstring>

#include "transport/host/cast_run.h"

namespace weightsync {
namespace transport {
namespace {

// Rows shorter than this are gathered first, so that stores and digests see
// long runs.
constexpr int64_t kShortRow = 512;
constexpr int64_t kScratchBytes = 8 << 10;

// Walks through the rows of a task.
class Rows {
 public:
  Rows(const CopyTask& task, int64_t row)
      : task_(task), dims_(static_cast<int>(task.dims.size())) {
    for (int i = dims_; i-- > 0;) {
      const CopyDim& dim = task.dims[i];
      index_[i] = row % dim.extent;
      row /= dim.extent;
      Move(dim, index_[i]);
    }
  }

  int64_t dst() const { return dst_; }  // bytes from task.dst
  const char* src() const { return task_.src + src_; }
  int64_t element() const { return task_.first_element + element_; }

  // Rows from here on that are one stride apart from each other.
  int64_t even() const {
    return dims_ == 0 ? 1 : task_.dims[dims_ - 1].extent - index_[dims_ - 1];
  }

  // REQUIRES: count <= even().
  void Advance(int64_t count) {
    if (dims_ == 0) return;
    int i = dims_ - 1;
    index_[i] += count;
    Move(task_.dims[i], count);
    while (index_[i] == task_.dims[i].extent && i > 0) {
      Move(task_.dims[i], -index_[i]);
      index_[i] = 0;
      --i;
      ++index_[i];
      Move(task_.dims[i], 1);
    }
  }

 private:
  void Move(const CopyDim& dim, int64_t count) {
    dst_ += count * dim.dst_stride;
    src_ += count * dim.src_stride;
    element_ += count * dim.element_stride;
  }

  const CopyTask& task_;
  const int dims_;
  int64_t index_[kMaxCopyDims] = {};
  int64_t dst_ = 0;
  int64_t src_ = 0;
  int64_t element_ = 0;
};

template <int kBytes>
void CopyEvenOf(char* dst, int64_t dst_stride, const char* src,
                int64_t src_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

// Copies `count` short rows, each one stride from the one before.
void CopyEven(char* dst, int64_t dst_stride, const char* src,
              int64_t src_stride, int64_t bytes, int64_t count) {
  switch (bytes) {
    case 1:
      return CopyEvenOf<1>(dst, dst_stride, src, src_stride, count);
    case 2:
      return CopyEvenOf<2>(dst, dst_stride, src, src_stride, count);
    case 4:
      return CopyEvenOf<4>(dst, dst_stride, src, src_stride, count);
    case 8:
      return CopyEvenOf<8>(dst, dst_stride, src, src_stride, count);
    case 16:
      return CopyEvenOf<16>(dst, dst_stride, src, src_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(dst + i * dst_stride, src + i * src_stride, bytes);
  }
}

// One run, as it is.
void CopyPlainRun(const CopyTask& task, int64_t dst, const char* src,
                  int64_t element, int64_t bytes, Digest* digest) {
  const DigestRun run = {task.ordinal, element, bytes / task.element_bytes,
                         task.element_bytes};
  if (task.dst == nullptr) {
    if (digest != nullptr) DigestAccumulate(src, run, digest);
  } else if (digest != nullptr) {
    CopyAccumulateUnfenced(task.dst + dst, src, run, digest);
  } else {
    CopyNonTemporalUnfenced(task.dst + dst, src, bytes);
  }
}

// One run. What is cast stays in the cache on its way.
void CopyRun(const CopyTask& task, int64_t dst, const char* src,
             int64_t element, int64_t bytes, Digest* digest) {
  if (task.cast == CopyCast::kNone) {
    CopyPlainRun(task, dst, src, element, bytes, digest);
    return;
  }
  alignas(64) char scratch[kScratchBytes];
  const int64_t most = kScratchBytes / task.element_bytes;
  const int64_t count = bytes / task.element_bytes;
  for (int64_t at = 0; at < count; at += most) {
    const int64_t part = std::min(most, count - at);
    CastRun(task.cast, task.blocks, scratch,
            src + at * task.src_element_bytes(), part, element + at);
    CopyPlainRun(task, dst + at * task.element_bytes, scratch, element + at,
                 part * task.element_bytes, digest);
  }
}

// Gathers `count` short rows, each one stride from the one before, side by
// side, and casts them where that is asked for.
void GatherRows(const CopyTask& task, char* scratch, const char* src,
                int64_t src_stride, int64_t count, int64_t element,
                int64_t element_stride) {
  const int64_t elements = task.run_bytes / task.element_bytes;
  if (task.cast == CopyCast::kNone) {
    CopyEven(scratch, task.run_bytes, src, src_stride, task.run_bytes, count);
    return;
  }
  // No cast makes more than half of what it reads.
  alignas(64) char raw[2 * kScratchBytes];
  const int64_t raw_bytes = elements * task.src_element_bytes();
  CopyEven(raw, raw_bytes, src, src_stride, raw_bytes, count);
  if (count == 1 || element_stride == elements) {
    CastRun(task.cast, task.blocks, scratch, raw, count * elements, element);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    CastRun(task.cast, task.blocks, scratch + i * task.run_bytes,
            raw + i * raw_bytes, elements, element + i * element_stride);
  }
}

// Whole short rows [first, last). They are gathered in a buffer that stays in
// the cache; from there they go on as long runs where the other side lets them.
void CopyShortRows(const CopyTask& task, int64_t first, int64_t last,
                   bool dense_dst, Digest* digest) {
  alignas(64) char scratch[kScratchBytes];
  const int64_t row_bytes = task.run_bytes;
  const int64_t row_elements = row_bytes / task.element_bytes;
  const int64_t most = kScratchBytes / row_bytes;
  Rows rows(task, first);
  for (int64_t row = first; row < last;) {
    const int64_t count = std::min({most, rows.even(), last - row});
    const CopyDim dim = task.dims.empty() ? CopyDim() : task.dims.back();
    if (digest == nullptr && !dense_dst && task.cast == CopyCast::kNone) {
      if (task.dst != nullptr) {
        CopyEven(task.dst + rows.dst(), dim.dst_stride, rows.src(),
                 dim.src_stride, row_bytes, count);
      }
    } else {
      GatherRows(task, scratch, rows.src(), dim.src_stride, count,
                 rows.element(), dim.element_stride);
      const bool element_runs =
          count == 1 || dim.element_stride == row_elements;
      if (digest != nullptr && element_runs && dense_dst) {
        CopyPlainRun(task, rows.dst(), scratch, rows.element(),
                     count * row_bytes, digest);
      } else {
        if (digest != nullptr) {
          const int64_t runs = element_runs ? 1 : count;
          const DigestRun run = {
              task.ordinal, 0,
              element_runs ? count * row_elements : row_elements,
              task.element_bytes};
          for (int64_t i = 0; i < runs; ++i) {
            DigestRun at = run;
            at.first_element = rows.element() + i * dim.element_stride;
            DigestAccumulate(scratch + i * row_bytes, at, digest);
          }
        }
        if (task.dst != nullptr) {
          if (dense_dst) {
            CopyNonTemporalUnfenced(task.dst + rows.dst(), scratch,
                                    count * row_bytes);
          } else {
            CopyEven(task.dst + rows.dst(), dim.dst_stride, scratch, row_bytes,
                     row_bytes, count);
          }
        }
      }
    }
    rows.Advance(count);
    row += count;
  }
}

}  // namespace

void CopyRange(const CopyTask& task, int64_t begin, int64_t end,
               Digest* digest) {
  if (begin >= end) return;
  const int64_t row_bytes = task.run_bytes;
  int64_t row = begin / row_bytes;
  const int64_t inside = begin % row_bytes;
  // The end of a row that the range before has begun.
  if (inside > 0) {
    const int64_t bytes = std::min(row_bytes - inside, end - begin);
    Rows rows(task, row);
    const int64_t elements = inside / task.element_bytes;
    CopyRun(task, rows.dst() + inside,
            rows.src() + elements * task.src_element_bytes(),
            rows.element() + elements, bytes, digest);
    begin += bytes;
    ++row;
  }
  const int64_t whole_end = end / row_bytes;
  if (row < whole_end) {
    if (row_bytes < kShortRow) {
      CopyShortRows(task, row, whole_end,
                    task.dst != nullptr && task.dense_dst(), digest);
    } else {
      Rows rows(task, row);
      for (int64_t i = row; i < whole_end; ++i) {
        CopyRun(task, rows.dst(), rows.src(), rows.element(), row_bytes,
                digest);
        rows.Advance(1);
      }
    }
    begin = whole_end * row_bytes;
    row = whole_end;
  }
  if (begin < end) {
    Rows rows(task, row);
    CopyRun(task, rows.dst(), rows.src(), rows.element(), end - begin, digest);
  }
}

}  // namespace transport
}  // namespace weightsync
