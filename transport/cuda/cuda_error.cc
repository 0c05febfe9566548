#include "transport/cuda/cuda_error.h"

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {

bool IsContextLost(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsRpcFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

absl::Status CheckCuda(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  // It has been told: the next call's cudaGetLastError is about the next call.
  cudaGetLastError();
  const std::string what = absl::StrCat(call, ": ", cudaGetErrorName(error),
                                        " (", cudaGetErrorString(error), ")");
  if (error == cudaErrorMemoryAllocation) {
    return MakeError(absl::StatusCode::kResourceExhausted, "NO_DEVICE_MEMORY",
                     absl::StrCat(what,
                                  "; the GPU's memory is taken: free some of "
                                  "it, or leave more to this process"));
  }
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    const auto text = [](int version) {
      return absl::StrCat(version / 1000, ".", version % 1000 / 10);
    };
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "DRIVER_TOO_OLD",
        driver == 0
            ? absl::StrCat("this machine has no NVIDIA driver; the CUDA "
                           "runtime is ",
                           text(runtime))
            : absl::StrCat("the driver serves CUDA ", text(driver),
                           " and the runtime is ", text(runtime),
                           ": install a newer driver, or run --memory=host"));
  }
  if (error == cudaErrorNoDevice) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NO_DEVICE",
                     "this process sees no GPU (CUDA_VISIBLE_DEVICES, and the "
                     "devices that the container was given)");
  }
  if (IsContextLost(error)) {
    return MakeError(absl::StatusCode::kInternal, "DEVICE_FAULT",
                     absl::StrCat(what,
                                  "; the GPU context of this process is lost "
                                  "and the process must be started again"));
  }
  return MakeError(absl::StatusCode::kUnavailable, "CUDA_ERROR", what);
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
