// GPU memory of a trainer, as its daemon is told of it.
#ifndef WEIGHTSYNC_CLIENT_CC_GPU_REGIONS_H_
#define WEIGHTSYNC_CLIENT_CC_GPU_REGIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "client/cc/tensor.h"
#include "transport/cuda/process_gpu.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace client {

// The allocations in which tensors lie, each once. Copies share what keeps
// their probes.
class GpuRegions {
 public:
  // Adds a shard to `request`, and the region that it lies in where that is not
  // there yet. `shard.on_gpu`. The errors of ProcessGpu::Of and Describe, with
  // the tensor's name.
  absl::Status Add(const Tensor& shard, v1::RegisterShardsRequest* request);

  // Until what this process has given its GPUs to do is done, so that others
  // read what was written; and whether the allocations are still there.
  // FAILED_PRECONDITION (ALLOCATION_FREED).
  absl::Status AwaitReady() const;

 private:
  struct Region {
    std::shared_ptr<transport::cuda::ProcessGpu> gpu;
    transport::cuda::DeviceHandle handle;
    int index = 0;  // in the request
  };
  // By where they begin.
  std::map<uint64_t, Region> regions_;
  // Each once.
  std::vector<std::shared_ptr<transport::cuda::ProcessGpu>> gpus_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_GPU_REGIONS_H_
