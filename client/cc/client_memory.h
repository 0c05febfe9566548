// The memory of a worker's process: imports arenas and copies out of them, into
// host memory and GPUs.
#ifndef WEIGHTSYNC_CLIENT_CC_CLIENT_MEMORY_H_
#define WEIGHTSYNC_CLIENT_CC_CLIENT_MEMORY_H_

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "transport/cuda/live_memory.h"
#include "transport/host/copy_pool.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace client {

class ClientMemory {
 public:
  using Engine = transport::cuda::LiveMemory::Engine;

  // `copy_threads` 0: as many as the machine has CPUs, at most 4. `engine`:
  // what it does while its weights are copied.
  explicit ClientMemory(int copy_threads, Engine engine = Engine::kStands)
      : pool_(Resolve(copy_threads)),
        memory_(&pool_, /*fds=*/nullptr, transport::HostMemory::Options()),
        live_(&memory_, engine) {}

  // Before anything is copied. The errors of ProcessGpu::Of.
  absl::Status AddGpuRange(const void* data, int64_t bytes) {
    return live_.AddRange(data, bytes);
  }

  // See LiveMemory.
  std::vector<std::string> device_uuids() const { return live_.device_uuids(); }
  bool CopiesStraight(const char* source, const char* target) const {
    return live_.CopiesStraight(source, target);
  }

  transport::Memory* get() { return &live_; }

 private:
  static int Resolve(int threads) {
    if (threads > 0) return threads;
    return std::max(
        1, std::min(4, static_cast<int>(std::thread::hardware_concurrency())));
  }

  transport::CopyPool pool_;
  transport::HostMemory memory_;
  transport::cuda::LiveMemory live_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_CLIENT_MEMORY_H_
