// Strided copies: what a copy engine is asked to do.
#ifndef WEIGHTSYNC_TRANSPORT_COPY_H_
#define WEIGHTSYNC_TRANSPORT_COPY_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "transport/digest.h"

namespace weightsync {
namespace transport {

constexpr int kMaxCopyDims = 8;
constexpr int64_t kFrameBytes = 64 << 10;

// One loop around the run of a copy.
struct CopyDim {
  int64_t extent = 1;
  int64_t dst_stride = 0;  // bytes
  int64_t src_stride = 0;  // bytes
  int64_t element_stride =
      0;  // elements of the flattened global tensor; only for digests
};

// What becomes of an element on its way: cast_definition.h.
enum class CopyCast : uint8_t {
  kNone = 0,
  kF32ToBF16 = 1,
  kF32ToF16 = 2,
  // A matrix, with the scale of the element's block.
  kBF16ToF8E4M3 = 3,
  // Those scales themselves, one F32 for each block.
  kBF16BlockScale = 4,
};

// Blocks of kScaleBlock x kScaleBlock elements of a matrix of bf16 that is cast
// to E4M3: all that a copy needs, as they lie in the memory of the source.
struct CopyBlocks {
  const char* src = nullptr;  // of the first block's first element
  int64_t row_stride = 0;     // bytes
  int64_t column_stride = 0;
  // Elements from `src` on; the last blocks may be smaller than the others.
  int64_t rows = 0;
  int64_t columns = 0;
  // Where `src` stands in the matrix: multiples of kScaleBlock.
  int64_t first_row = 0;
  int64_t first_column = 0;
  int64_t matrix_columns = 0;
  // One for each block, row by row: made by the engine that copies.
  const float* scales = nullptr;

  int64_t block_rows() const;
  int64_t block_columns() const;
  // Bytes from `src` to the end of the last one that is read.
  int64_t extent() const;
};

// For every index of `dims` (outermost first), `run_bytes` bytes go from `src`
// to `dst`, which do not overlap. A copy whose digest is wanted also says where
// it stands in its tensor, and its runs are contiguous there too.
//
// With a cast, run_bytes, element_bytes, dst_stride and the digest are of what
// is written; src_stride is of what is read, whose runs have as many elements.
// Only a Memory's Copy and Pack know casts.
struct CopyTask {
  char* dst = nullptr;  // null: only the digest is computed
  const char* src = nullptr;
  absl::InlinedVector<CopyDim, 3> dims;  // at most kMaxCopyDims
  int64_t run_bytes = 0;
  uint32_t ordinal = 0;
  int64_t first_element = 0;
  int32_t element_bytes = 1;  // 1, 2, 4, 8 or 16; run_bytes is a multiple of it
  CopyCast cast = CopyCast::kNone;
  // Of kBF16ToF8E4M3, which needs first_element and the element strides, and of
  // kBF16BlockScale: that has its src and src strides as if its scales lay at
  // blocks.src, row by row.
  CopyBlocks blocks;

  int64_t rows() const;
  int64_t bytes() const { return rows() * run_bytes; }
  int32_t src_element_bytes() const;
  // Where the memory is that is read, and its bytes to the end of the last one.
  // The blocks of kBF16ToF8E4M3 are beside it.
  const char* source() const {
    return cast == CopyCast::kBF16BlockScale ? blocks.src : src;
  }
  int64_t src_extent() const;
  bool has_blocks() const {
    return cast == CopyCast::kBF16ToF8E4M3 || cast == CopyCast::kBF16BlockScale;
  }
  // True when the rows follow one another in `dst`.
  bool dense_dst() const;
  // INVALID_ARGUMENT (BAD_COPY).
  absl::Status Validate() const;
};

// Where a box lies in its global tensor.
struct GlobalBox {
  uint32_t ordinal = 0;
  absl::Span<const int64_t> shape;   // of the tensor
  absl::Span<const int64_t> offset;  // of the box; as many as shape
};

// The copy of a box of `extents` elements, between memory with the given
// strides (in elements), in the fewest and longest runs. With `global` the runs
// are cut where they are not contiguous in the global tensor, and the digest
// may be asked for; without it two dense sides make one run. All spans have the
// same length, at most kMaxCopyDims. Blocks are the caller's to fill in.
CopyTask MakeBoxCopy(absl::Span<const int64_t> extents, int32_t element_bytes,
                     char* dst, absl::Span<const int64_t> dst_strides,
                     const char* src, absl::Span<const int64_t> src_strides,
                     absl::optional<GlobalBox> global,
                     CopyCast cast = CopyCast::kNone);

// The same copy in parts of at most `max_bytes` (whole elements, but at least
// one), in the order of its indices. REQUIRES: task.Validate() is OK.
std::vector<CopyTask> SplitCopy(const CopyTask& task, int64_t max_bytes);

// The same copy in parts whose destination is one run each (their sources need
// not be), in the order of its indices. REQUIRES: task.Validate() is OK.
std::vector<CopyTask> DenseRows(const CopyTask& task);

// Row-major strides, in elements.
absl::InlinedVector<int64_t, 4> DenseStrides(absl::Span<const int64_t> extents);

struct CopyOptions {
  // The sources lie in memory that another process may truncate: SIGBUS there
  // becomes DATA_LOSS (SOURCE_MEMORY_LOST).
  bool guard_source = false;
};

// A piece of a bucket, and where its bytes come from. In the bucket it is
// dense.
struct PackPiece {
  int64_t offset = 0;  // bytes from the start of the bucket; a multiple of the
                       // element size and of 16
  CopyTask copy;       // its dst is not used
};

// Fill one bucket from strided memory, with the digest of every frame on the
// way.
struct PackRequest {
  char* bucket = nullptr;
  int64_t bucket_bytes = 0;
  absl::Span<const PackPiece>
      pieces;  // by offset, not overlapping. Bytes between them become zero
  int64_t frame_bytes = kFrameBytes;  // a multiple of 64
  bool guard_source = false;
  // Called as frames land, for ranges that follow one another from frame 0 to
  // the last: frames [first, last) are in place for every thread and process,
  // and `digests`[i] is that of frame first + i. One call at a time, on any
  // thread of the engine; it should be short and must not call the engine. May
  // be null.
  std::function<void(int64_t first, int64_t last,
                     absl::Span<const Digest> digests)>
      on_frames;
};

struct PackResult {
  std::vector<Digest> frames;
  Digest bucket;  // their sum
};

// Frames of a bucket that was packed, or received, and lies in memory of a GPU.
struct FrameDigestRequest {
  // Those of the bucket that have bytes in the frames, as they were packed;
  // `copy` reads them where they lie now, and writes nothing.
  absl::Span<const PackPiece> pieces;
  int64_t frame_bytes = kFrameBytes;
  absl::Span<const uint32_t> frames;  // ascending, none twice
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_COPY_H_
