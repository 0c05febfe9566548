// What a process tells another so that it can open an allocation of GPU memory,
// and find out why it cannot.
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

namespace weightsync {
namespace transport {
namespace cuda {

// A handle of CUDA names a whole allocation: tensors are (handle, offset,
// size).
struct DeviceHandle {
  std::array<char, 64> ipc = {};  // cudaIpcMemHandle_t
  std::string device_uuid;
  // Of the allocation, as the exporter knows it; its address there is only a
  // part of its name.
  uint64_t base = 0;
  int64_t bytes = 0;
  uint64_t buffer_id = 0;
  ProcessIdentity exporter;
  // A small allocation of the exporter and what stands in it: whoever opens it
  // and reads the same has the exporter's memory before it.
  std::array<char, 64> probe_ipc = {};
  std::array<char, 16> nonce = {};

  // A few hundred bytes, for a message.
  std::string Encode() const;
  // INVALID_ARGUMENT (HANDLE_MALFORMED) with both sizes.
  static absl::StatusOr<DeviceHandle> Decode(absl::string_view bytes);
};

// Where an address of the exporting process lies.
struct DevicePlace {
  DeviceHandle handle;
  int64_t offset = 0;  // of the address in the allocation
};

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
  // address. FAILED_PRECONDITION (ALLOCATION_FREED). For the exporter, before
  // it publishes again.
  static absl::Status CheckStillThere(const DeviceHandle& handle);

 private:
  explicit DeviceExporter(const DeviceInfo& device) : device_(device) {}

  const DeviceInfo device_;
  void* probe_ = nullptr;
  std::array<char, 64> probe_ipc_ = {};
  std::array<char, 16> nonce_ = {};
};

// [offset, offset + bytes) in the allocation. INVALID_ARGUMENT
// (PAST_ALLOCATION).
absl::Status CheckPlace(const DeviceHandle& handle, int64_t offset,
                        int64_t bytes);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_HANDLE_H_
