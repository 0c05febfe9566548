// The few functions of the driver that the runtime has no equal for. They are
// asked from the runtime, never linked: a machine without a GPU has only a stub
// of libcuda.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightsync {
namespace transport {
namespace cuda {

class DriverApi {
 public:
  // All: INVALID_ARGUMENT (NOT_DEVICE_MEMORY), and the errors of CheckCuda
  // where the driver says nothing of the address: its context is lost, perhaps.

  // The allocation that an address of this process lies in.
  absl::Status AddressRange(const void* pointer, uint64_t* base,
                            int64_t* bytes) const;
  // Another number for each allocation of this process, also at an address that
  // had one before.
  absl::StatusOr<uint64_t> BufferId(const void* pointer) const;
  // Whether the allocation has a handle of cudaIpcGetMemHandle: those of
  // cuMemCreate (PyTorch's expandable segments) and imported ones have none.
  absl::StatusOr<bool> HasIpcHandle(const void* pointer) const;
  // Of the whole GPU, for a MIG instance too. False: unknown.
  bool device_uuid(int ordinal, unsigned char* uuid) const;

 private:
  friend absl::StatusOr<const DriverApi*> GetDriverApi();
  void* address_range_ = nullptr;
  void* pointer_attribute_ = nullptr;
  void* device_uuid_ = nullptr;
};

// FAILED_PRECONDITION: DRIVER_TOO_OLD, NO_DEVICE.
absl::StatusOr<const DriverApi*> GetDriverApi();

// The driver's function `symbol` as it was in a version of CUDA (1000 x major +
// 10 x minor). The errors of GetDriverApi and of CheckCuda.
absl::Status FindDriverFunction(const char* symbol, unsigned version,
                                void** function);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_H_
