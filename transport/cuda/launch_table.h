// From copy tasks to the tables that the copy kernel reads.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_LAUNCH_TABLE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_LAUNCH_TABLE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/copy.h"
#include "transport/cuda/kernels.h"

namespace weightsync {
namespace transport {
namespace cuda {

struct LaunchTable {
  std::vector<DeviceCopy> copies;
  std::vector<DeviceUnit> units;
  int64_t unit_bytes = kUnitBytes;
  int64_t frame_bytes = 0;
  int64_t frames = 1;
};

// What a cast needs beside the copy's task, whose run_bytes, element_bytes and
// dst strides are those of the destination; its src strides are the source's.
struct CastSpec {
  DeviceCast cast = DeviceCast::kNone;
  const float* scales = nullptr;
  int64_t scale_columns = 0;
  int64_t scale_stride = 0;
};

// The kernel's copies of valid tasks (CopyTask::Validate). `casts`: none, or
// one for each task. RESOURCE_EXHAUSTED (TOO_MANY_COPIES) beyond 2^31 units.
absl::Status AddTasks(absl::Span<const CopyTask> tasks,
                      absl::Span<const CastSpec> casts, LaunchTable* table);

// The pieces of one bucket, and zeros between them, with frames. `casts` as
// above. REQUIRES: CheckPack(request) is OK.
absl::Status AddPack(const PackRequest& request,
                     absl::Span<const CastSpec> casts, LaunchTable* table);

// INVALID_ARGUMENT (BAD_COPY), as the host's engine says it.
absl::Status CheckPack(const PackRequest& request);

// The scales of bf16 boxes.
struct ScaleTable {
  std::vector<DeviceScale> scales;
  std::vector<ScaleUnit> units;
};
void AddScale(const DeviceScale& scale, ScaleTable* table);

// DigestInnerKey(lane, i) at [lane * 64 + i].
std::vector<int16_t> InnerKeys();

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_LAUNCH_TABLE_H_
