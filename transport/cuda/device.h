// The GPUs that this process sees. They are named by UUID: an ordinal means
// another device in every process that sees others.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/cuda/handle.h"

namespace weightsync {
namespace transport {
namespace cuda {

struct DeviceInfo {
  int ordinal = 0;   // in this process
  std::string uuid;  // "GPU-a0b1c2d3-…", as nvidia-smi -L has it
  std::string name;
  int64_t total_bytes = 0;
  // A slice of a GPU: CUDA IPC does not work from or to it.
  bool mig = false;
};

// FAILED_PRECONDITION: DRIVER_TOO_OLD, NO_DEVICE.
absl::StatusOr<std::vector<DeviceInfo>> ListDevices();

// NOT_FOUND (DEVICE_NOT_VISIBLE), with the UUIDs that this process sees; the
// errors of ListDevices. The only device of the process where `uuid` is empty,
// INVALID_ARGUMENT (DEVICE_NOT_NAMED) when there are several.
absl::StatusOr<DeviceInfo> FindDevice(absl::string_view uuid);

// FAILED_PRECONDITION (MIG_NO_IPC) for a slice.
absl::Status CheckIpc(const DeviceInfo& device);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_H_
