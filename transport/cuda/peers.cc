#include "transport/cuda/peers.h"

#include <cuda_runtime_api.h>

#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"

namespace weightsync {
namespace transport {
namespace cuda {

std::vector<std::string> PeersOf(const DeviceInfo& device,
                                 const std::vector<DeviceInfo>& devices) {
  std::vector<std::string> peers;
  if (!CheckIpc(device).ok()) return peers;
  for (const DeviceInfo& other : devices) {
    if (other.uuid == device.uuid || !CheckIpc(other).ok()) continue;
    int can = 0;
    const absl::Status asked =
        CheckCuda(cudaDeviceCanAccessPeer(&can, device.ordinal, other.ordinal),
                  "cudaDeviceCanAccessPeer");
    // Bytes go by way of host memory then, as without peers.
    LOG_IF(WARNING, !asked.ok())
        << "whether " << device.uuid << " can read memory of " << other.uuid
        << " is not known: " << asked;
    if (asked.ok() && can != 0) peers.push_back(other.uuid);
  }
  return peers;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
