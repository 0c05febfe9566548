#include "transport/cuda/driver.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "transport/cuda/cuda_error.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

using AddressRangeFunction = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
using PointerAttributeFunction = CUresult (*)(void*, CUpointer_attribute,
                                              CUdeviceptr);
using DeviceUuidFunction = CUresult (*)(CUuuid*, CUdevice);

// Of a question about `pointer`.
absl::Status DriverError(const void* pointer, CUresult result,
                         const char* call) {
  // Anything else says nothing of the pointer. The runtime has the numbers of
  // the driver.
  if (result != CUDA_ERROR_INVALID_VALUE && result != CUDA_ERROR_NOT_FOUND)
    return CheckCuda(static_cast<cudaError_t>(result), call);
  return MakeError(
      absl::StatusCode::kInvalidArgument, "NOT_DEVICE_MEMORY",
      absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(pointer)),
                   " is in no allocation of GPU memory of this process "
                   "(driver error ",
                   static_cast<int>(result), ")"));
}

}  // namespace

absl::Status FindDriverFunction(const char* symbol, unsigned version,
                                void** function) {
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
  const absl::Status status =
      CheckCuda(cudaGetDriverEntryPointByVersion(symbol, function, version,
                                                 cudaEnableDefault, &result),
                symbol);
  if (!status.ok()) return status;
  if (*function == nullptr || result != cudaDriverEntryPointSuccess) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DRIVER_TOO_OLD",
                     absl::StrCat("the driver has no ", symbol));
  }
  return absl::OkStatus();
}

absl::StatusOr<const DriverApi*> GetDriverApi() {
  static absl::Mutex mutex(absl::kConstInit);
  static const DriverApi* found = nullptr;
  absl::MutexLock lock(&mutex);
  if (found != nullptr) return found;
  DriverApi api;
  absl::Status status =
      FindDriverFunction("cuMemGetAddressRange", 3020, &api.address_range_);
  if (status.ok())
    status = FindDriverFunction("cuPointerGetAttribute", 4000,
                                &api.pointer_attribute_);
  if (!status.ok()) return status;
  // As it was before MIG: the whole GPU's. A driver that has forgotten it is no
  // worse for it: MIG shows in names too.
  if (!FindDriverFunction("cuDeviceGetUuid", 9020, &api.device_uuid_).ok())
    api.device_uuid_ = nullptr;
  found = new DriverApi(api);
  return found;
}

absl::Status DriverApi::AddressRange(const void* pointer, uint64_t* base,
                                     int64_t* bytes) const {
  CUdeviceptr found = 0;
  size_t size = 0;
  const CUresult result = reinterpret_cast<AddressRangeFunction>(
      address_range_)(&found, &size, reinterpret_cast<CUdeviceptr>(pointer));
  if (result != CUDA_SUCCESS)
    return DriverError(pointer, result, "cuMemGetAddressRange");
  *base = found;
  *bytes = static_cast<int64_t>(size);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DriverApi::BufferId(const void* pointer) const {
  unsigned long long id = 0;  // NOLINT: the driver's type
  const CUresult result = reinterpret_cast<PointerAttributeFunction>(
      pointer_attribute_)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                          reinterpret_cast<CUdeviceptr>(pointer));
  if (result != CUDA_SUCCESS)
    return DriverError(pointer, result, "cuPointerGetAttribute");
  return uint64_t{id};
}

absl::StatusOr<bool> DriverApi::HasIpcHandle(const void* pointer) const {
  int capable = 0;
  const CUresult result =
      reinterpret_cast<PointerAttributeFunction>(pointer_attribute_)(
          &capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
          reinterpret_cast<CUdeviceptr>(pointer));
  if (result != CUDA_SUCCESS)
    return DriverError(pointer, result, "cuPointerGetAttribute");
  return capable != 0;
}

bool DriverApi::device_uuid(int ordinal, unsigned char* uuid) const {
  if (device_uuid_ == nullptr) return false;
  CUuuid found;
  if (reinterpret_cast<DeviceUuidFunction>(device_uuid_)(&found, ordinal) !=
      CUDA_SUCCESS)
    return false;
  memcpy(uuid, found.bytes, sizeof(found.bytes));
  return true;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
