#include "daemon/service/device_memory.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/service/node_context.h"
#include "proto/status.h"
#include "transport/cuda/handle.h"

namespace weightsync {
namespace daemon {
namespace {

using transport::cuda::DeviceHandle;
using transport::cuda::DeviceReport;

absl::Status Malformed(int region, absl::string_view what) {
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
      absl::StrCat("region ", region, ": ", what,
                   "; send what cudaIpcGetMemHandle gave, and a probe"));
}

template <size_t kBytes>
absl::Status Fill(int region, absl::string_view name, const std::string& from,
                  std::array<char, kBytes>* to) {
  if (from.size() != kBytes) {
    return Malformed(region, absl::StrCat(name, " has ", from.size(),
                                          " bytes, and not ", kBytes));
  }
  std::copy(from.begin(), from.end(), to->begin());
  return absl::OkStatus();
}

absl::StatusOr<DeviceHandle> HandleOf(int index,
                                      const v1::MemoryRegion& region) {
  const v1::CudaIpcMemory& memory = region.memory().cuda_ipc();
  DeviceHandle handle;
  absl::Status status = Fill(index, "handle", memory.handle(), &handle.ipc);
  if (status.ok()) {
    status =
        Fill(index, "probe_handle", memory.probe_handle(), &handle.probe_ipc);
  }
  if (status.ok()) status = Fill(index, "nonce", memory.nonce(), &handle.nonce);
  if (!status.ok()) return status;
  if (memory.device_uuid().empty())
    return Malformed(index, "it does not say of which GPU (device_uuid)");
  if (region.size_bytes() <= 0)
    return Malformed(index, "an allocation without bytes");
  handle.device_uuid = memory.device_uuid();
  handle.buffer_id = memory.buffer_id();
  handle.base = memory.base_address();
  handle.bytes = region.size_bytes();
  return handle;
}

}  // namespace

bool HasDeviceMemory(const v1::RegisterShardsRequest& request) {
  return std::any_of(request.regions().begin(), request.regions().end(),
                     [](const v1::MemoryRegion& region) {
                       return region.memory().has_cuda_ipc();
                     });
}

absl::StatusOr<std::vector<std::shared_ptr<const DeviceRegion>>>
OpenDeviceMemory(transport::cuda::AgentMemory* devices, pid_t pid,
                 const v1::RegisterShardsRequest& request) {
  if (devices == nullptr) {
    return ErrorStatus(
        absl::StatusCode::kUnimplemented, "MEMORY_KIND_DISABLED",
        "this daemon was not started with --memory=cuda, and cannot open GPU "
        "memory: start it so, or keep the tensors in an arena (AllocateArena) "
        "or in POSIX shared memory");
  }
  const transport::cuda::ProcessIdentity exporter =
      transport::cuda::IdentityOf(pid);
  std::vector<std::shared_ptr<const DeviceRegion>> opened(
      static_cast<size_t>(request.regions_size()));
  for (int i = 0; i < request.regions_size(); ++i) {
    if (!request.regions(i).memory().has_cuda_ipc()) continue;
    absl::StatusOr<DeviceHandle> handle = HandleOf(i, request.regions(i));
    if (!handle.ok()) return handle.status();
    handle->exporter = exporter;
    absl::StatusOr<std::shared_ptr<const DeviceRegion>> region =
        devices->Open(*handle);
    if (!region.ok()) return ApiStatus(region.status());
    opened[static_cast<size_t>(i)] = *std::move(region);
  }
  return opened;
}

v1::GpuUse ToProto(const DeviceReport& report) {
  v1::GpuUse use;
  use.set_device_uuid(report.device.uuid);
  use.set_device_name(report.device.name);
  switch (report.state) {
    case DeviceReport::State::kReady:
      use.set_state(v1::GpuUse::STATE_READY);
      break;
    case DeviceReport::State::kStarting:
      use.set_state(v1::GpuUse::STATE_STARTING);
      break;
    case DeviceReport::State::kFailed:
      use.set_state(v1::GpuUse::STATE_FAILED);
      break;
  }
  if (!report.failure.ok())
    *use.mutable_failure() = ToFailure(ApiStatus(report.failure));
  use.set_restart_count(report.restarts);
  use.set_total_bytes(report.usage.total_bytes > 0 ? report.usage.total_bytes
                                                   : report.device.total_bytes);
  use.set_free_bytes(report.usage.free_bytes);
  use.set_context_bytes(report.usage.scratch_bytes);
  use.set_nccl_bytes(report.usage.nccl_bytes);
  use.set_slot_bytes(report.usage.slots_bytes);
  use.set_slot_count(report.slots);
  use.set_device_store_bytes(report.usage.store_bytes);
  return use;
}

}  // namespace daemon
}  // namespace weightsync
