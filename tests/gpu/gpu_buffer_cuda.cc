#include <cuda_runtime_api.h>

#include "tests/gpu/gpu_buffer.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/late_cudart.h"

namespace weightsync {
namespace demo {
namespace {

using transport::cuda::CheckCuda;

class CudaBuffer final : public GpuBuffer {
 public:
  CudaBuffer(int device, int64_t bytes) : device_(device), bytes_(bytes) {}
  ~CudaBuffer() override {
    if (data_ == nullptr) return;
    cudaSetDevice(device_);
    cudaFree(data_);
  }

  absl::Status Make() {
    absl::Status status = CheckCuda(cudaSetDevice(device_), "cudaSetDevice");
    void* made = nullptr;
    if (status.ok()) {
      status = CheckCuda(cudaMalloc(&made, static_cast<size_t>(bytes_)),
                         "cudaMalloc");
    }
    data_ = static_cast<char*>(made);
    return status;
  }
  absl::Status Write(const char* from) override {
    cudaSetDevice(device_);
    return CheckCuda(cudaMemcpy(data_, from, static_cast<size_t>(bytes_),
                                cudaMemcpyHostToDevice),
                     "cudaMemcpy");
  }
  absl::Status Read(char* to) const override {
    cudaSetDevice(device_);
    return CheckCuda(cudaMemcpy(to, data_, static_cast<size_t>(bytes_),
                                cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
  }

 private:
  const int device_;
  const int64_t bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuBuffer>> GpuBuffer::Allocate(int device,
                                                               int64_t bytes) {
  absl::Status status = transport::cuda::FindCudart();
  if (!status.ok()) return status;
  auto made = std::make_unique<CudaBuffer>(device, bytes);
  status = made->Make();
  if (!status.ok()) return status;
  return std::unique_ptr<GpuBuffer>(std::move(made));
}

}  // namespace demo
}  // namespace weightsync
