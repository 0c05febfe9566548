// The kernels' launches, and the tables that they read. Plain C++: whoever
// builds tables, and tests of what a kernel does, need no CUDA.
//
// All kernels are free of barriers, so that their bodies (kernel_body.h) run on
// a CPU, one thread after another, with the same result.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_KERNELS_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_KERNELS_H_

#include <cstdint>

namespace weightsync {
namespace transport {
namespace cuda {

constexpr int kMaxDims = 8;  // as transport/copy.h
// Bytes of a destination that one block of threads does: a frame of 64 KiB is
// four of them.
constexpr int64_t kUnitBytes = 16 << 10;
constexpr int kBlockThreads = 256;
// Enough blocks for every GPU of today, few enough that a launch is quick.
constexpr int64_t kMaxBlocks = 1 << 16;

enum class DeviceCast : int32_t {
  kNone = 0,
  kF32ToBF16 = 1,
  kF32ToF16 = 2,
  kBF16ToF8E4M3 = 3,  // with the scale of the element's block
};

struct DeviceDim {
  int64_t extent;
  int64_t src_stride;      // bytes
  int64_t dst_stride;      // bytes
  int64_t element_stride;  // elements of the global tensor
};

// One strided copy, as CopyTask.
struct DeviceCopy {
  const char* src;  // null: the destination becomes zero
  char* dst;        // null: only the digest is computed
  int64_t run_elements;
  int64_t first_element;
  // Where the destination's first byte counts as standing: units and frames are
  // cut at multiples of their size from there. Both are dense.
  int64_t place;
  int64_t bytes;          // of the destination
  const float* scales;    // kBF16ToF8E4M3: of the first block
  int64_t scale_columns;  // elements in a row of the whole matrix
  int64_t scale_row;      // where the first block begins in it
  int64_t scale_column;
  int64_t scale_stride;  // scales from one row of blocks to the next
  int32_t src_element_bytes;
  int32_t dst_element_bytes;
  int32_t vector_bytes;  // of the destination, that a thread moves at a time:
                         // whole elements
  int32_t unaligned;     // 1: a vector is one element, moved byte by byte
  int32_t dim_count;
  DeviceCast cast;
  uint32_t ordinal;
  DeviceDim dims[kMaxDims];  // outermost first
};

struct DeviceUnit {
  int32_t copy;   // index
  int32_t place;  // number of the unit: place / unit_bytes
};

// Many copies in one launch, each of any shape. All pointers are the device's.
struct CopyLaunch {
  const DeviceCopy* copies;
  const DeviceUnit* units;
  int64_t unit_count;
  int64_t unit_bytes;  // divides frame_bytes
  // Two lanes for each frame, to which the digests are added; null: none.
  unsigned long long* digests;  // NOLINT: CUDA's atomics have this type
  int64_t frame_bytes;          // 0: all is one frame
  const int16_t* inner_keys;    // DigestInnerKey(lane, i) at [lane * 64 + i]
};

// The scales of one box of bf16 that becomes E4M3.
struct DeviceScale {
  const char* src;
  int64_t rows, columns;
  int64_t row_stride, column_stride;  // bytes
  float* scales;
  int64_t scale_stride;
  int32_t unaligned;  // 1: elements are read byte by byte
};

// A block of 128 x 128 elements of one box.
struct ScaleUnit {
  int32_t scale;        // index
  int32_t row, column;  // of the block
};

struct ScaleLaunch {
  const DeviceScale* scales;
  const ScaleUnit* units;
  int64_t unit_count;
};

// Which elements differ.
struct ScanLaunch {
  const char* before;
  const char* after;
  int64_t element_count;
  int32_t element_bytes;  // 1, 2, 4 or 8
  // One bit for each element, in words of 64; and how many are set in each
  // group of kScanGroup elements (zero before).
  unsigned long long* changed;  // NOLINT: CUDA's atomics have this type
  unsigned int* counts;         // NOLINT
};
constexpr int64_t kScanWord = 64;
constexpr int64_t kScanGroup = 4096;

// The changed elements side by side, in their order.
struct CompactLaunch {
  ScanLaunch scan;
  const int64_t* first;  // of each group: where its changed elements go
  uint32_t* indices;
  char* values;
};

// Each puts one kernel on `stream` (a cudaStream_t) and returns a cudaError_t.
int LaunchCopy(const CopyLaunch& launch, void* stream);
// Writes largest magnitudes (as bits) into scales, which were zero; then
// LaunchScale makes them scales.
int LaunchBlockLargest(const ScaleLaunch& launch, void* stream);
int LaunchBlockScale(const ScaleLaunch& launch, void* stream);
int LaunchScan(const ScanLaunch& launch, void* stream);
int LaunchCompact(const CompactLaunch& launch, void* stream);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_KERNELS_H_
