// What goes with a segment of GPU memory between processes: a small arena of
// host memory, its control. In it are the generations, which a CPU must read,
// and the handle by which the memory is opened.
//
// Whoever has the memory open holds a shared lock on the control's file, from
// before it is opened until after it is closed. Its maker, who must not free
// what is open elsewhere, frees it when it gets the lock for itself: also when
// an importer has died.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_SEGMENT_CONTROL_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_SEGMENT_CONTROL_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/cuda/handle.h"
#include "transport/host/unique_fd.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Arenas whose memory a client has made, and not their daemon, have names that
// begin so. That one of them cannot be opened says nothing of the daemon's.
inline constexpr char kClientArena[] = "client/";

// What stands in a control's data.
struct SegmentControl {
  char magic[8];
  int64_t bytes;
  std::atomic<uint32_t> retired;  // its maker does not need it any more
  uint32_t handle_bytes;
  char handle[512];
};

// Writes everything but `retired`. REQUIRES: control.bytes() suffices.
void WriteSegmentControl(const DeviceHandle& handle, int64_t bytes,
                         Segment* control);
// INVALID_ARGUMENT (NOT_AN_ARENA): it is no control of `bytes` or more.
absl::StatusOr<DeviceHandle> ReadSegmentControl(const Segment& control,
                                                int64_t bytes);
// A description of the control's file that is nobody else's: locks belong to
// these. Negative on an error.
transport::UniqueFd OpenSegmentControl(const Segment& control);
// The shared lock. FAILED_PRECONDITION (SEGMENT_GONE): its maker has given the
// memory back.
absl::StatusOr<transport::UniqueFd> LockSegmentControl(const Segment& control);

// Nobody opens it from now on.
void RetireSegmentControl(Segment* control);
bool SegmentControlIsRetired(const Segment& control);
// Whether nobody has it open any more. REQUIRES: it is retired.
bool SegmentControlIsClosed(const Segment& control);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_SEGMENT_CONTROL_H_
