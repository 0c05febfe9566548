// Of a build without the CUDA toolkit's headers.
#include "transport/cuda/process_gpu.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {

absl::StatusOr<std::shared_ptr<ProcessGpu>> ProcessGpu::Of(const void*) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "CUDA_NOT_BUILT",
                   "this library was built without CUDA, and knows no memory "
                   "of GPUs: build it where the CUDA toolkit's headers are, or "
                   "copy the tensors through host memory");
}

void ProcessGpu::KeepDevice() {}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
