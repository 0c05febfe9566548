#ifndef WEIGHTSYNC_TRANSPORT_CUDA_CUDA_ERROR_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_CUDA_ERROR_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {
namespace cuda {

// What a CUDA call says, as a status with a reason:
//   RESOURCE_EXHAUSTED   NO_DEVICE_MEMORY
//   FAILED_PRECONDITION  DRIVER_TOO_OLD, NO_DEVICE
//   INTERNAL             DEVICE_FAULT: the context of this process is lost for
//                        good; only another process can use the GPU again
//   UNAVAILABLE          CUDA_ERROR: anything else
// `call` is for the message. OK for cudaSuccess.
absl::Status CheckCuda(cudaError_t error, absl::string_view call);

// True for errors that stay until the process ends.
bool IsContextLost(cudaError_t error);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_CUDA_ERROR_H_
