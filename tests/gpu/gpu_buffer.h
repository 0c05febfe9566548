// Memory of a GPU of this process, for programs that know nothing of CUDA.
#ifndef WEIGHTSYNC_TESTS_GPU_GPU_BUFFER_H_
#define WEIGHTSYNC_TESTS_GPU_GPU_BUFFER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weightsync {
namespace demo {

class GpuBuffer {
 public:
  // Of the device of this number, as this process counts. FAILED_PRECONDITION
  // (CUDA_RUNTIME_MISSING, CUDA_NOT_BUILT), and what cudart says.
  static absl::StatusOr<std::unique_ptr<GpuBuffer>> Allocate(int device,
                                                             int64_t bytes);
  virtual ~GpuBuffer() = default;

  char* data() const { return data_; }
  // Of all bytes.
  virtual absl::Status Write(const char* from) = 0;
  virtual absl::Status Read(char* to) const = 0;

 protected:
  char* data_ = nullptr;
};

}  // namespace demo
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_GPU_BUFFER_H_
