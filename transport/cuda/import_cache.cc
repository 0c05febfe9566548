#include "transport/cuda/import_cache.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/cuda/cuda_error.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

absl::Status Look(DeviceCore* core, const char* at, absl::Span<char> found) {
  absl::StatusOr<DeviceCore::LaneLease> lane = core->TakeLane();
  if (!lane.ok()) return lane.status();
  absl::Status status =
      core->Reserve(lane->get(), static_cast<int64_t>(found.size()), 0);
  if (status.ok()) {
    status = CheckCuda(cudaMemcpyAsync((*lane)->host, at, found.size(),
                                       cudaMemcpyDeviceToHost, (*lane)->stream),
                       "cudaMemcpyAsync from a probe");
  }
  if (status.ok()) status = core->Wait(*lane->get());
  if (status.ok()) memcpy(found.data(), (*lane)->host, found.size());
  return status;
}

IpcImports::Options OnCore(const std::shared_ptr<DeviceCore>& core) {
  IpcImports::Options options;
  options.look = [core](const char* at, absl::Span<char> found) {
    return Look(core.get(), at, found);
  };
  options.later = [core](std::function<void()> close) {
    core->Later(std::move(close));
  };
  options.opened =
      [core](const std::shared_ptr<const ImportedAllocation>& opened) {
        core->AddRange(opened->data, opened->bytes, DeviceCore::Place::kDevice,
                       false, opened);
      };
  options.let_go = [core](const ImportedAllocation& gone) {
    core->RemoveRange(gone.data);
  };
  options.otherwise = "use --memory=host";
  return options;
}

}  // namespace

ImportCache::ImportCache(std::shared_ptr<DeviceCore> core)
    : core_(std::move(core)), imports_(OnCore(core_)) {}

absl::StatusOr<std::shared_ptr<const ImportedAllocation>> ImportCache::Acquire(
    const DeviceHandle& handle, bool writable) {
  absl::Status status = CheckIpc(core_->device());
  if (!status.ok()) return status;
  if (handle.device_uuid != core_->device().uuid) {
    return MakeError(
        absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
        absl::StrCat("the memory lies on ", handle.device_uuid,
                     "; this is the agent of ", core_->device().uuid));
  }
  status = core_->Use();
  if (!status.ok()) return status;
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> opened =
      imports_.Acquire(handle);
  if (opened.ok() && writable) {
    core_->AddRange((*opened)->data, (*opened)->bytes,
                    DeviceCore::Place::kDevice, true, *opened);
  }
  return opened;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
