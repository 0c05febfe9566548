#include "transport/cuda/driver_kernel.h"

#include <cuda.h>

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/driver.h"
#include "transport/error.h"

// third_party/cuda/cuda.bzl, cuda_fatbin.
extern "C" {
extern const char ws_plain_copy_image[];
extern const char ws_plain_copy_image_end[];
}

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

using LoadFunction = CUresult (*)(CUmodule*, const void*);
using UnloadFunction = CUresult (*)(CUmodule);
using GetFunction = CUresult (*)(CUfunction*, CUmodule, const char*);
using LaunchFunction = CUresult (*)(CUfunction, unsigned, unsigned, unsigned,
                                    unsigned, unsigned, unsigned, unsigned,
                                    CUstream, void**, void**);

// The runtime has the numbers of the driver.
absl::Status CheckDriver(CUresult result, absl::string_view call) {
  return CheckCuda(static_cast<cudaError_t>(result), call);
}

}  // namespace

// process_copy_test.cc notices when the compiler has another opinion.
const char kPlainCopyName[] =
    "_ZN10weightsync9transport4cuda15PlainCopyKernelENS1_10CopyLaunchE";

absl::Span<const char> PlainCopyImage() {
  return absl::MakeConstSpan(
      ws_plain_copy_image,
      static_cast<size_t>(ws_plain_copy_image_end - ws_plain_copy_image));
}

absl::StatusOr<std::unique_ptr<DriverKernel>> DriverKernel::Load(
    absl::Span<const char> image, const char* name) {
  if (image.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "CUDA_NOT_BUILT",
                     "this library was built without nvcc, and has no kernels");
  }
  std::unique_ptr<DriverKernel> kernel(new DriverKernel);
  void* load = nullptr;
  void* get = nullptr;
  absl::Status status = FindDriverFunction("cuModuleLoadData", 2000, &load);
  if (status.ok())
    status = FindDriverFunction("cuModuleGetFunction", 2000, &get);
  if (status.ok())
    status = FindDriverFunction("cuModuleUnload", 2000, &kernel->unload_);
  if (status.ok())
    status = FindDriverFunction("cuLaunchKernel", 4000, &kernel->launch_);
  // Before CUDA 12 cudaSetDevice alone makes no context current, and this does.
  if (status.ok()) status = CheckCuda(cudaFree(nullptr), "cudaFree");
  if (!status.ok()) return status;
  CUmodule module = nullptr;
  status =
      CheckDriver(reinterpret_cast<LoadFunction>(load)(&module, image.data()),
                  "cuModuleLoadData");
  if (!status.ok()) return status;
  kernel->module_ = module;
  CUfunction function = nullptr;
  status =
      CheckDriver(reinterpret_cast<GetFunction>(get)(&function, module, name),
                  absl::StrCat("cuModuleGetFunction of ", name));
  if (!status.ok()) return status;
  kernel->function_ = function;
  return kernel;
}

DriverKernel::~DriverKernel() {
  if (module_ == nullptr) return;
  const absl::Status status = CheckDriver(
      reinterpret_cast<UnloadFunction>(unload_)(static_cast<CUmodule>(module_)),
      "cuModuleUnload");
  // With a lost context all of it is gone already.
  if (!status.ok() && ReasonOf(status) != "DEVICE_FAULT")
    LOG(WARNING) << status;
}

absl::Status DriverKernel::Launch(unsigned blocks, unsigned threads,
                                  const void* argument,
                                  cudaStream_t stream) const {
  void* arguments[] = {const_cast<void*>(argument)};
  return CheckDriver(reinterpret_cast<LaunchFunction>(launch_)(
                         static_cast<CUfunction>(function_), blocks, 1, 1,
                         threads, 1, 1, 0, stream, arguments, nullptr),
                     "cuLaunchKernel");
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
