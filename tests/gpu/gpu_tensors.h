// Tensors on a GPU of this process, for tests over the simulated GPU.
#ifndef WEIGHTSYNC_TESTS_GPU_GPU_TENSORS_H_
#define WEIGHTSYNC_TESTS_GPU_GPU_TENSORS_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "client/cc/tensor.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/process_gpu.h"

namespace weightsync {
namespace e2e {

// Parts of parameters, in one allocation of device `device`. REQUIRES:
// FindCudart() is OK.
class GpuTensors {
 public:
  GpuTensors(std::vector<client::Tensor> tensors, int device)
      : device_(device), tensors_(std::move(tensors)) {
    int64_t bytes = 0;
    std::vector<int64_t> offsets;
    for (const client::Tensor& tensor : tensors_) {
      offsets.push_back(bytes);
      bytes += (client::PartBytes(tensor) + 255) / 256 * 256;
    }
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory_, static_cast<size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].data = static_cast<char*>(memory_) + offsets[i];
      tensors_[i].on_gpu = true;
    }
  }
  ~GpuTensors() { Free(); }
  GpuTensors(const GpuTensors&) = delete;
  GpuTensors& operator=(const GpuTensors&) = delete;

  void Free() {
    if (memory_ != nullptr) {
      EXPECT_EQ(cudaFree(memory_), cudaSuccess);
    }
    memory_ = nullptr;
  }
  const std::vector<client::Tensor>& tensors() const { return tensors_; }

  // Each tensor's bytes.
  void Write(const std::vector<std::string>& content) {
    cudaSetDevice(device_);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      EXPECT_EQ(content[i].size(),
                static_cast<size_t>(client::PartBytes(tensors_[i])));
      EXPECT_EQ(cudaMemcpy(tensors_[i].data, content[i].data(),
                           content[i].size(), cudaMemcpyHostToDevice),
                cudaSuccess);
    }
    cudaSetDevice(0);
  }
  std::vector<std::string> Read() const {
    cudaSetDevice(device_);
    std::vector<std::string> content;
    for (const client::Tensor& tensor : tensors_) {
      content.emplace_back(static_cast<size_t>(client::PartBytes(tensor)),
                           '\0');
      EXPECT_EQ(cudaMemcpy(&content.back()[0], tensor.data,
                           content.back().size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
    }
    cudaSetDevice(0);
    return content;
  }
  void FlipBit() {
    std::vector<std::string> content = Read();
    content[0][content[0].size() / 2] ^= 1;
    Write(content);
  }

 private:
  const int device_;
  std::vector<client::Tensor> tensors_;
  void* memory_ = nullptr;
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_GPU_TENSORS_H_
