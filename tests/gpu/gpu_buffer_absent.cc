// Of a build without the CUDA toolkit's headers.
#include "tests/gpu/gpu_buffer.h"
#include "transport/error.h"

namespace weightsync {
namespace demo {

absl::StatusOr<std::unique_ptr<GpuBuffer>> GpuBuffer::Allocate(int, int64_t) {
  return transport::MakeError(absl::StatusCode::kFailedPrecondition,
                              "CUDA_NOT_BUILT",
                              "this program was built without CUDA");
}

}  // namespace demo
}  // namespace weightsync
