// What a process says of an allocation of its own, so that another can open it.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_HANDLE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_HANDLE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/cuda/device.h"
#include "transport/cuda/handle.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Exports the allocations of this process on one GPU. Thread-safe. Keeps its
// probe until the end: it outlives whoever opens what it has described.
class DeviceExporter {
 public:
  // FAILED_PRECONDITION (MIG_NO_IPC), RESOURCE_EXHAUSTED (NO_DEVICE_MEMORY),
  // and the errors of CheckCuda.
  static absl::StatusOr<std::unique_ptr<DeviceExporter>> Create(
      const DeviceInfo& device);
  ~DeviceExporter();
  DeviceExporter(const DeviceExporter&) = delete;
  DeviceExporter& operator=(const DeviceExporter&) = delete;

  // INVALID_ARGUMENT (NOT_DEVICE_MEMORY; PAST_ALLOCATION when `bytes` from
  // `pointer` on are more than the allocation has), FAILED_PRECONDITION
  // (NOT_EXPORTABLE: made by cuMemCreate, or imported itself).
  absl::StatusOr<DevicePlace> Describe(const void* pointer,
                                       int64_t bytes) const;

  // Whether the allocation that `handle` describes is still what stands at its
  // address. FAILED_PRECONDITION (ALLOCATION_FREED), and the errors of
  // DriverApi. For the exporter, before it publishes again.
  static absl::Status CheckStillThere(const DeviceHandle& handle);

 private:
  explicit DeviceExporter(const DeviceInfo& device) : device_(device) {}

  const DeviceInfo device_;
  void* probe_ = nullptr;
  std::array<char, 64> probe_ipc_ = {};
  std::array<char, 16> nonce_ = {};
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_HANDLE_H_
