#include "transport/cuda/import_cache.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/driver.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

absl::Status Refuse(absl::string_view reason, absl::string_view sentence) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason, sentence);
}

absl::Status TooShort(const DeviceHandle& handle, int64_t room) {
  return MakeError(absl::StatusCode::kInvalidArgument, "PAST_ALLOCATION",
                   absl::StrCat("an allocation of ", handle.bytes,
                                " bytes was named, and the one that the "
                                "handle opens has ",
                                room));
}

// Remembered so that a thousand allocations of one process need one probe.
constexpr size_t kMaxProbed = 1024;

}  // namespace

absl::Status ImportCache::Open(const std::array<char, 64>& ipc,
                               const DeviceHandle& handle, void** pointer) {
  cudaIpcMemHandle_t cuda_handle;
  memcpy(&cuda_handle, ipc.data(), sizeof(cuda_handle));
  const cudaError_t error = cudaIpcOpenMemHandle(
      pointer, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (error == cudaSuccess) return absl::OkStatus();
  const absl::Status status = CheckCuda(error, "cudaIpcOpenMemHandle");
  if (ReasonOf(status) == "DEVICE_FAULT") return status;
  const std::string who = absl::StrCat("process ", handle.exporter.pid);
  switch (StateOf(handle.exporter)) {
    case ProcessState::kDead:
      return Refuse(
          "EXPORTER_DEAD",
          absl::StrCat(who, ", which exported this memory, has ended"));
    case ProcessState::kOtherNamespace:
      return Refuse(
          "FOREIGN_NAMESPACE",
          absl::StrCat(
              who,
              " is in another pid namespace, and its memory cannot be "
              "opened from here (",
              status.message(),
              "): run both in one pod with shareProcessNamespace and a shared "
              "/dev/shm, or use --memory=host"));
    case ProcessState::kAlive:
      break;
  }
  return Refuse("ALLOCATION_FREED",
                absl::StrCat("an allocation of ", handle.bytes, " bytes of ",
                             who, " cannot be opened (", status.message(),
                             "): it was probably freed; register the tensors "
                             "again"));
}

absl::Status ImportCache::Probe(const DeviceHandle& handle) {
  void* pointer = nullptr;
  absl::Status status = Open(handle.probe_ipc, handle, &pointer);
  if (!status.ok()) return status;
  std::array<char, 16> found = {};
  absl::StatusOr<DeviceCore::LaneLease> lane = core_->TakeLane();
  status = lane.status();
  if (status.ok()) status = core_->Reserve(lane->get(), found.size(), 0);
  if (status.ok()) {
    status = CheckCuda(cudaMemcpyAsync((*lane)->host, pointer, found.size(),
                                       cudaMemcpyDeviceToHost, (*lane)->stream),
                       "cudaMemcpyAsync from a probe");
  }
  if (status.ok()) status = core_->Wait(*lane->get());
  if (status.ok()) memcpy(found.data(), (*lane)->host, found.size());
  core_->Later([pointer] { cudaIpcCloseMemHandle(pointer); });
  if (!status.ok()) return status;
  if (found != handle.nonce) {
    return MakeError(
        absl::StatusCode::kUnavailable, "PROBE_FAILED",
        absl::StrCat("the memory that process ", handle.exporter.pid,
                     " has exported can be opened here, but it is other "
                     "memory: CUDA IPC does not work between these two "
                     "(containers?); use --memory=host"));
  }
  return absl::OkStatus();
}

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
  if (handle.exporter == ThisProcess())
    return Refuse("OWN_EXPORT", "this process exported the memory itself");
  if (StateOf(handle.exporter) == ProcessState::kDead) {
    return Refuse("EXPORTER_DEAD",
                  absl::StrCat("process ", handle.exporter.pid,
                               ", which exported this memory, has ended"));
  }
  status = core_->Use();
  if (!status.ok()) return status;
  const Key key(handle.ipc, handle.exporter.pid, handle.exporter.start_time,
                handle.exporter.pid_namespace, handle.base, handle.buffer_id);
  const Probed probe = {handle.exporter, handle.probe_ipc, handle.nonce};
  // Held while it is opened: two that come at once share one.
  absl::MutexLock lock(&mutex_);
  if (std::shared_ptr<const ImportedAllocation> found = open_[key].lock()) {
    if (found->bytes < handle.bytes) return TooShort(handle, found->bytes);
    if (writable) {
      core_->AddRange(found->data, found->bytes, DeviceCore::Place::kDevice,
                      true, found);
    }
    return found;
  }
  if (std::find(probed_.begin(), probed_.end(), probe) == probed_.end()) {
    status = Probe(handle);
    if (!status.ok()) {
      open_.erase(key);
      return status;
    }
    if (probed_.size() >= kMaxProbed) probed_.erase(probed_.begin());
    probed_.push_back(probe);
  }
  void* pointer = nullptr;
  status = Open(handle.ipc, handle, &pointer);
  if (!status.ok()) {
    open_.erase(key);
    return status;
  }
  // The exporter says how long it is; a kernel that went beyond the end would
  // take this context with it.
  uint64_t base = 0;
  int64_t room = 0;
  const absl::StatusOr<const DriverApi*> driver = GetDriverApi();
  status = driver.status();
  if (status.ok()) status = (*driver)->AddressRange(pointer, &base, &room);
  if (status.ok() &&
      (base != reinterpret_cast<uint64_t>(pointer) || room < handle.bytes)) {
    status = TooShort(handle, room);
  }
  if (!status.ok()) {
    core_->Later([pointer] { cudaIpcCloseMemHandle(pointer); });
    open_.erase(key);
    return status;
  }
  auto* allocation = new ImportedAllocation;
  allocation->data = static_cast<char*>(pointer);
  allocation->bytes = room;
  const std::shared_ptr<const ImportedAllocation> shared(
      allocation, [core = core_](const ImportedAllocation* closed) {
        core->RemoveRange(closed->data);
        core->Later([pointer = closed->data] {
          const absl::Status status = CheckCuda(cudaIpcCloseMemHandle(pointer),
                                                "cudaIpcCloseMemHandle");
          if (!status.ok()) LOG(WARNING) << status;
        });
        delete closed;
      });
  core_->AddRange(pointer, room, DeviceCore::Place::kDevice, writable, shared);
  open_[key] = shared;
  for (auto at = open_.begin(); at != open_.end();)
    at = at->second.expired() ? open_.erase(at) : std::next(at);
  return shared;
}

int ImportCache::size() const {
  absl::MutexLock lock(&mutex_);
  int open = 0;
  for (const auto& [key, allocation] : open_)
    open += allocation.expired() ? 0 : 1;
  return open;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
