#include "daemon/service/device_memory.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/service/node_context.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/cuda/handle.h"
#include "transport/cuda/segment_control.h"

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

std::shared_ptr<const DeviceShare> Share(transport::Memory* memory,
                                         const DeviceHandle& handle) {
  transport::AllocateOptions options;
  options.name = "a trainer's GPU memory";
  absl::StatusOr<std::unique_ptr<transport::Segment>> control =
      memory->Allocate(sizeof(transport::cuda::SegmentControl), options);
  if (!control.ok()) {
    LOG(WARNING) << "workers cannot open memory of a trainer on "
                 << handle.device_uuid << ": " << control.status();
    return nullptr;
  }
  transport::cuda::WriteSegmentControl(handle, handle.bytes, control->get());
  auto share = std::make_shared<DeviceShare>();
  share->arena_id = absl::StrCat(transport::cuda::kClientArena, RandomId());
  share->handle = handle.Encode();
  share->device_uuid = handle.device_uuid;
  share->control = *std::move(control);
  return share;
}

}  // namespace

bool HasDeviceMemory(const v1::RegisterShardsRequest& request) {
  return std::any_of(request.regions().begin(), request.regions().end(),
                     [](const v1::MemoryRegion& region) {
                       return region.memory().has_cuda_ipc();
                     });
}

absl::StatusOr<std::vector<OpenedRegion>> OpenDeviceMemory(
    transport::cuda::AgentMemory* devices,
    const transport::cuda::ProcessIdentity& exporter,
    const v1::RegisterShardsRequest& request) {
  if (devices == nullptr) {
    return ErrorStatus(
        absl::StatusCode::kUnimplemented, "MEMORY_KIND_DISABLED",
        "this daemon was not started with --memory=cuda, and cannot open GPU "
        "memory: start it so, or keep the tensors in an arena (AllocateArena) "
        "or in POSIX shared memory");
  }
  std::vector<OpenedRegion> opened(static_cast<size_t>(request.regions_size()));
  for (int i = 0; i < request.regions_size(); ++i) {
    if (!request.regions(i).memory().has_cuda_ipc()) continue;
    absl::StatusOr<DeviceHandle> handle = HandleOf(i, request.regions(i));
    if (!handle.ok()) return handle.status();
    handle->exporter = exporter;
    absl::StatusOr<std::shared_ptr<const DeviceRegion>> region =
        devices->Open(*handle);
    if (!region.ok()) return ApiStatus(region.status());
    OpenedRegion& to = opened[static_cast<size_t>(i)];
    to.region = *std::move(region);
    to.share = Share(devices, *handle);
  }
  return opened;
}

absl::Status AwaitSharesClosed(
    const std::vector<std::shared_ptr<const DeviceShare>>& shares,
    absl::Duration timeout) {
  const absl::Time until = absl::Now() + timeout;
  for (const auto& share : shares) {
    while (!transport::cuda::SegmentControlIsClosed(*share->control)) {
      if (absl::Now() >= until) {
        return ErrorStatus(
            absl::StatusCode::kDeadlineExceeded, "REGION_IN_USE",
            absl::StrCat("workers still have GPU memory of a trainer open "
                         "after ",
                         absl::FormatDuration(timeout)));
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  return absl::OkStatus();
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
  use.set_context_bytes(report.usage.context_bytes +
                        report.usage.scratch_bytes);
  use.set_nccl_bytes(report.usage.nccl_bytes);
  use.set_slot_bytes(report.usage.slots_bytes);
  use.set_slot_count(report.slots);
  use.set_device_store_bytes(report.usage.store_bytes);
  return use;
}

}  // namespace daemon
}  // namespace weightsync
