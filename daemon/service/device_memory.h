// GPU memory that trainers of this node register.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_
#define WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_

#include <sys/types.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/device_agents.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace daemon {

using DeviceRegion = transport::cuda::AgentMemory::Region;

bool HasDeviceMemory(const v1::RegisterShardsRequest& request);

// Opens the allocations that the regions of `request` name; null for regions of
// other kinds. `pid`: of the trainer, as it says. Blocks for as long as a
// device agent takes to start; not for the loop.
//   UNIMPLEMENTED (MEMORY_KIND_DISABLED): `devices` is null.
//   INVALID_ARGUMENT (HANDLE_MALFORMED); the errors of AgentMemory::Open.
absl::StatusOr<std::vector<std::shared_ptr<const DeviceRegion>>>
OpenDeviceMemory(transport::cuda::AgentMemory* devices, pid_t pid,
                 const v1::RegisterShardsRequest& request);

v1::GpuUse ToProto(const transport::cuda::DeviceReport& report);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_
