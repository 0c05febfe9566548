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

  // What is computed before: the scales of the copies' blocks, one table of
  // floats for all of them. It has no address yet (PlaceScales).
  std::vector<DeviceScale> scales;
  std::vector<ScaleUnit> scale_units;
  int64_t scale_count = 0;
  struct ScaleUse {
    bool by_scale;  // an entry of `scales` writes; otherwise a copy reads
    size_t index;
    int64_t first;  // float, of the table
  };
  std::vector<ScaleUse> scale_uses;
};

// The kernel's copies of valid tasks (CopyTask::Validate). RESOURCE_EXHAUSTED
// (TOO_MANY_COPIES) beyond 2^31 units.
absl::Status AddTasks(absl::Span<const CopyTask> tasks, LaunchTable* table);

// The pieces of one bucket, and zeros between them, with frames. REQUIRES:
// CheckPack(request) is OK.
absl::Status AddPack(const PackRequest& request, LaunchTable* table);

// Digests of the request's frames, in places of their own from that of the
// first on. INVALID_ARGUMENT (BAD_COPY); REQUIRES: its copies are valid.
absl::Status AddFrameDigests(const FrameDigestRequest& request,
                             LaunchTable* table);

// The scales shall lie at `floats`, scale_count of them, aligned to 16 bytes.
void PlaceScales(float* floats, LaunchTable* table);

// INVALID_ARGUMENT (BAD_COPY), as the host's engine says it.
absl::Status CheckPack(const PackRequest& request);

// DigestInnerKey(lane, i) at [lane * 64 + i].
std::vector<int16_t> InnerKeys();

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_LAUNCH_TABLE_H_
