// GPU memory that trainers of this node register.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_
#define WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/device_agents.h"
#include "transport/cuda/handle.h"
#include "transport/memory.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace daemon {

using DeviceRegion = transport::cuda::AgentMemory::Region;

// An allocation of a trainer's, as workers on the same GPU may open it: by a
// segment control (segment_control.h) that holds its handle, and that they lock
// for as long as they have it open.
struct DeviceShare {
  std::string arena_id;  // what workers know it by
  std::string handle;    // DeviceHandle, encoded
  std::string device_uuid;
  std::shared_ptr<transport::Segment> control;
};

struct OpenedRegion {
  std::shared_ptr<const DeviceRegion> region;
  // Null where there was no room for a control: nobody opens it then.
  std::shared_ptr<const DeviceShare> share;
};

bool HasDeviceMemory(const v1::RegisterShardsRequest& request);

// Opens the allocations that the regions of `request` name; null for regions of
// other kinds. `exporter`: the trainer, as it was when it came: one that has
// ended since is told from one of another pid namespace. Blocks for as long as
// a device agent takes to start; not for the loop.
//   UNIMPLEMENTED (MEMORY_KIND_DISABLED): `devices` is null.
//   INVALID_ARGUMENT (HANDLE_MALFORMED); the errors of AgentMemory::Open.
absl::StatusOr<std::vector<OpenedRegion>> OpenDeviceMemory(
    transport::cuda::AgentMemory* devices,
    const transport::cuda::ProcessIdentity& exporter,
    const v1::RegisterShardsRequest& request);

// Until no worker has any of `shares` open, which are retired, so that their
// owner may free them. DEADLINE_EXCEEDED (REGION_IN_USE).
absl::Status AwaitSharesClosed(
    const std::vector<std::shared_ptr<const DeviceShare>>& shares,
    absl::Duration timeout);

v1::GpuUse ToProto(const transport::cuda::DeviceReport& report);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_DEVICE_MEMORY_H_
