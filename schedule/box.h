// N-dimensional boxes in a global tensor: what a shard holds, what a worker
// needs, what a piece of a bucket carries.

#ifndef WEIGHTSYNC_SCHEDULE_BOX_H_
#define WEIGHTSYNC_SCHEDULE_BOX_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "schedule/dims.h"

namespace weightsync {
namespace schedule {

// Half-open: [offset[d], offset[d] + extent[d]) in each dimension d, in
// elements. A scalar has no dimension and one element.
struct Box {
  Dims offset;
  Dims extent;

  int dims() const { return static_cast<int>(offset.size()); }
  // Elements. REQUIRES: the box lies in a tensor of a valid catalog.
  int64_t Volume() const {
    int64_t volume = 1;
    for (int64_t e : extent) volume *= e;
    return volume;
  }
  int64_t end(int d) const { return offset[d] + extent[d]; }

  friend bool operator==(const Box& a, const Box& b) {
    return a.offset == b.offset && a.extent == b.extent;
  }
  friend bool operator!=(const Box& a, const Box& b) { return !(a == b); }
  template <typename H>
  friend H AbslHashValue(H h, const Box& box) {
    return H::combine(std::move(h), box.offset, box.extent);
  }
  // Lexicographic by offset, then extent.
  friend bool operator<(const Box& a, const Box& b) {
    if (a.offset != b.offset) return a.offset < b.offset;
    return a.extent < b.extent;
  }
};

// The whole of a tensor.
Box WholeBox(absl::Span<const int64_t> shape);

// A box of the whole tensor but for [begin, end) in dimension `dim`.
Box SliceBox(absl::Span<const int64_t> shape, int dim, int64_t begin,
             int64_t end);

// False when `box` has other dimensions than `shape`, an empty or negative
// extent, or reaches outside.
bool InsideShape(const Box& box, absl::Span<const int64_t> shape);

// True and *out set when the two share an element. `out` may alias neither.
// REQUIRES: equal dims.
bool Intersect(const Box& a, const Box& b, Box* out);
bool Intersects(const Box& a, const Box& b);
bool Contains(const Box& outer, const Box& inner);

// Appends to `out` disjoint boxes that cover `a` without `b`; at most 2 x dims.
void Subtract(const Box& a, const Box& b, std::vector<Box>* out);

// Appends the boxes that tile flat elements [begin, end) of a tensor (row-major
// order), in flat order: at most 2 x dims - 1 boxes. An FSDP1 flat shard that
// cuts through a tensor is such a range.
void BoxesOfFlatRange(absl::Span<const int64_t> shape, int64_t begin,
                      int64_t end, std::vector<Box>* out);

// Row-major strides in bytes of a dense tensor.
Dims DenseStrides(absl::Span<const int64_t> shape, int64_t element_bytes);

// The contiguous runs of `box` in the flattened tensor, in ascending order:
// calls fn(first_element, element_count). A box of full rows is one run.
template <typename Fn>
void ForEachRun(const Box& box, absl::Span<const int64_t> shape, Fn fn);
int64_t CountRuns(const Box& box, absl::Span<const int64_t> shape);

// "[0:512, 128:256]", for messages.
std::string BoxString(const Box& box);
std::string DimsString(absl::Span<const int64_t> dims);

// ---- implementation ----

template <typename Fn>
void ForEachRun(const Box& box, absl::Span<const int64_t> shape, Fn fn) {
  const int n = box.dims();
  // [tail, n) are the dimensions that one run spans: dimension d-1 may join as
  // long as all dimensions from d on are full.
  int tail = n;
  int64_t run = 1;
  while (tail > 0) {
    --tail;
    run *= box.extent[tail];
    if (box.extent[tail] != shape[tail]) break;
  }
  // Strides of the outer dimensions.
  int64_t stride[kMaxDims];
  int64_t index[kMaxDims];
  int64_t s = 1;
  int64_t first = 0;
  for (int d = n - 1; d >= 0; --d) {
    stride[d] = s;
    s *= shape[d];
    first += box.offset[d] * stride[d];
    index[d] = 0;
  }
  while (true) {
    fn(first, run);
    int d = tail - 1;
    for (; d >= 0; --d) {
      first += stride[d];
      if (++index[d] < box.extent[d]) break;
      first -= stride[d] * box.extent[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_BOX_H_
