// Which GPUs of a process can read each other's memory.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_PEERS_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_PEERS_H_

#include <string>
#include <vector>

#include "transport/cuda/device.h"

namespace weightsync {
namespace transport {
namespace cuda {

// UUIDs of those of `devices`, which this process sees, out of whose memory
// copies can go straight to `device`, by NVLink or over PCIe; not itself, and
// none where either is a MIG instance. Makes no context.
std::vector<std::string> PeersOf(const DeviceInfo& device,
                                 const std::vector<DeviceInfo>& devices);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_PEERS_H_
