#include "schedule/box.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weightsync {
namespace schedule {

Box WholeBox(absl::Span<const int64_t> shape) {
  Box box;
  box.offset.assign(shape.size(), 0);
  box.extent.assign(shape.begin(), shape.end());
  return box;
}

Box SliceBox(absl::Span<const int64_t> shape, int dim, int64_t begin,
             int64_t end) {
  Box box = WholeBox(shape);
  box.offset[dim] = begin;
  box.extent[dim] = end - begin;
  return box;
}

bool InsideShape(const Box& box, absl::Span<const int64_t> shape) {
  if (box.offset.size() != shape.size() || box.extent.size() != shape.size()) {
    return false;
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.extent[d] <= 0) return false;
    // Written without a sum, which could overflow on hostile input.
    if (box.offset[d] > shape[d] || box.extent[d] > shape[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

bool Intersect(const Box& a, const Box& b, Box* out) {
  if (!Intersects(a, b)) return false;
  const int n = a.dims();
  out->offset.resize(n);
  out->extent.resize(n);
  const int64_t* a_offset = a.offset.data();
  const int64_t* a_extent = a.extent.data();
  const int64_t* b_offset = b.offset.data();
  const int64_t* b_extent = b.extent.data();
  int64_t* offset = out->offset.data();
  int64_t* extent = out->extent.data();
  for (int d = 0; d < n; ++d) {
    offset[d] = std::max(a_offset[d], b_offset[d]);
    extent[d] = std::min(a_offset[d] + a_extent[d], b_offset[d] + b_extent[d]) -
                offset[d];
  }
  return true;
}

bool Intersects(const Box& a, const Box& b) {
  const int n = a.dims();
  const int64_t* a_offset = a.offset.data();
  const int64_t* a_extent = a.extent.data();
  const int64_t* b_offset = b.offset.data();
  const int64_t* b_extent = b.extent.data();
  for (int d = 0; d < n; ++d) {
    if (a_offset[d] >= b_offset[d] + b_extent[d] ||
        b_offset[d] >= a_offset[d] + a_extent[d]) {
      return false;
    }
  }
  return true;
}

bool Contains(const Box& outer, const Box& inner) {
  for (int d = 0; d < outer.dims(); ++d) {
    if (inner.offset[d] < outer.offset[d] || inner.end(d) > outer.end(d)) {
      return false;
    }
  }
  return true;
}

void Subtract(const Box& a, const Box& b, std::vector<Box>* out) {
  Box rest = a;
  if (!Intersects(a, b)) {
    out->push_back(std::move(rest));
    return;
  }
  // Shave off what lies before and after b, dimension by dimension.
  for (int d = 0; d < a.dims(); ++d) {
    if (rest.offset[d] < b.offset[d]) {
      Box before = rest;
      before.extent[d] = b.offset[d] - rest.offset[d];
      rest.extent[d] -= before.extent[d];
      rest.offset[d] = b.offset[d];
      out->push_back(std::move(before));
    }
    if (rest.end(d) > b.end(d)) {
      Box after = rest;
      after.offset[d] = b.end(d);
      after.extent[d] = rest.end(d) - b.end(d);
      rest.extent[d] -= after.extent[d];
      out->push_back(std::move(after));
    }
  }
}

namespace {

// Tiles [begin, end) within dimensions [dim, n), whose enclosing index is
// already in `prefix` (offset set, extent 1, for dimensions before dim).
void TileFlat(absl::Span<const int64_t> shape, int dim, int64_t begin,
              int64_t end, const Box& prefix, std::vector<Box>* out) {
  const int n = static_cast<int>(shape.size());
  if (begin >= end) return;
  if (dim == n) {
    out->push_back(prefix);
    return;
  }
  int64_t row = 1;
  for (int d = dim + 1; d < n; ++d) row *= shape[d];
  int64_t first_row = begin / row;
  const int64_t last_row = end / row;  // exclusive for whole rows
  auto at_row = [&](int64_t index) {
    Box inner = prefix;
    inner.offset[dim] = index;
    inner.extent[dim] = 1;
    return inner;
  };
  if (begin % row != 0) {
    const int64_t stop = std::min(end, (first_row + 1) * row);
    TileFlat(shape, dim + 1, begin - first_row * row, stop - first_row * row,
             at_row(first_row), out);
    if (stop == end) return;
    ++first_row;
  }
  if (first_row < last_row) {
    Box whole = prefix;
    whole.offset[dim] = first_row;
    whole.extent[dim] = last_row - first_row;
    for (int d = dim + 1; d < n; ++d) {
      whole.offset[d] = 0;
      whole.extent[d] = shape[d];
    }
    out->push_back(std::move(whole));
  }
  if (end % row != 0) {
    TileFlat(shape, dim + 1, 0, end - last_row * row, at_row(last_row), out);
  }
}

}  // namespace

void BoxesOfFlatRange(absl::Span<const int64_t> shape, int64_t begin,
                      int64_t end, std::vector<Box>* out) {
  TileFlat(shape, 0, begin, end, WholeBox(shape), out);
}

Dims DenseStrides(absl::Span<const int64_t> shape, int64_t element_bytes) {
  Dims strides(shape.size());
  int64_t stride = element_bytes;
  for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

int64_t CountRuns(const Box& box, absl::Span<const int64_t> shape) {
  int tail = box.dims();
  while (tail > 0) {
    --tail;
    if (box.extent[tail] != shape[tail]) break;
  }
  int64_t runs = 1;
  for (int d = 0; d < tail; ++d) runs *= box.extent[d];
  return runs;
}

std::string BoxString(const Box& box) {
  std::string text = "[";
  for (int d = 0; d < box.dims(); ++d) {
    absl::StrAppend(&text, d == 0 ? "" : ", ", box.offset[d], ":", box.end(d));
  }
  text += "]";
  return text;
}

std::string DimsString(absl::Span<const int64_t> dims) {
  return absl::StrCat("[", absl::StrJoin(dims, ", "), "]");
}

}  // namespace schedule
}  // namespace weightsync
