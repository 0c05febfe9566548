// A kernel that a process loads by itself, by the driver. What nvcc compiles in
// registers its kernels with a cudart that is linked in; a library that finds
// cudart later, or never, has them as bytes.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_KERNEL_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_KERNEL_H_

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Belongs to the context of the device that was current when it was loaded;
// that device is the current one whenever anything here is called. Launch is
// thread-safe.
class DriverKernel {
 public:
  // `image` is a fat binary (or what else cuModuleLoadData takes); `name` as
  // the compiler has mangled it. FAILED_PRECONDITION (CUDA_NOT_BUILT: the image
  // is empty; DRIVER_TOO_OLD); the errors of CheckCuda: the driver refuses it,
  // or it has no such kernel.
  static absl::StatusOr<std::unique_ptr<DriverKernel>> Load(
      absl::Span<const char> image, const char* name);
  // REQUIRES: all that was launched has ended.
  ~DriverKernel();

  // With one argument, of the kernel's type; it is copied. The errors of
  // CheckCuda.
  absl::Status Launch(unsigned blocks, unsigned threads, const void* argument,
                      cudaStream_t stream) const;

 private:
  DriverKernel() = default;

  void* module_ = nullptr;
  void* function_ = nullptr;
  void* launch_ = nullptr;
  void* unload_ = nullptr;
};

// plain_copy_kernel.cu for every architecture; its argument is a CopyLaunch.
// Empty where this was built without nvcc.
absl::Span<const char> PlainCopyImage();
extern const char kPlainCopyName[];

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DRIVER_KERNEL_H_
