// What tests over the simulated GPU are made of.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_TESTING_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_TESTING_H_

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// A process's memory: host and GPU.
class TestProcess {
 public:
  explicit TestProcess(const CudaMemory::Options& options = SmallOptions())
      : pool_(1), fds_(Start()), host_(&pool_, fds_.get(), {}) {
    absl::StatusOr<std::unique_ptr<CudaMemory>> memory =
        CudaMemory::Create(&host_, options);
    EXPECT_TRUE(memory.ok()) << memory.status();
    if (memory.ok()) memory_ = *std::move(memory);
  }
  static CudaMemory::Options SmallOptions() {
    CudaMemory::Options options;
    // Of a machine with several, the first.
    const auto devices = ListDevices();
    if (devices.ok()) options.device_uuid = (*devices)[0].uuid;
    options.keep_free_bytes = 1 << 20;
    // Several parts, and engines, for the small buckets of tests.
    options.pack_part_bytes = 128 << 10;
    options.copy_engine_bytes = 4 << 10;
    return options;
  }

  CudaMemory* operator->() const { return memory_.get(); }
  CudaMemory* get() const { return memory_.get(); }
  HostMemory* host() { return &host_; }

  std::unique_ptr<Segment> Allocate(int64_t bytes, int slots = 2) {
    AllocateOptions options;
    options.name = "test";
    options.generation_slots = slots;
    absl::StatusOr<std::unique_ptr<Segment>> segment =
        memory_->Allocate(bytes, options);
    EXPECT_TRUE(segment.ok()) << segment.status();
    return segment.ok() ? *std::move(segment) : nullptr;
  }
  void Write(const std::string& bytes, char* to) {
    const absl::Status status =
        memory_->Write(absl::MakeConstSpan(bytes.data(), bytes.size()), to);
    EXPECT_TRUE(status.ok()) << status;
  }
  std::string Read(const char* from, size_t count) {
    std::string bytes(count, '\0');
    const absl::Status status =
        memory_->Read(from, absl::MakeSpan(&bytes[0], count));
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }

 private:
  static std::unique_ptr<FdServer> Start() {
    static std::atomic<int> counter{0};
    // A simulated machine has a folder of its own.
    const char* dir = getenv("GPU_SIM_DIR");
    absl::StatusOr<std::unique_ptr<FdServer>> server = FdServer::Start(
        std::string(dir != nullptr ? dir : "/tmp") + "/fds_" +
            std::to_string(getpid()) + "_" + std::to_string(counter++),
        FdServer::Options());
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  }

  CopyPool pool_;
  const std::unique_ptr<FdServer> fds_;
  HostMemory host_;
  std::unique_ptr<CudaMemory> memory_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_TESTING_H_
