#include "transport/cuda/ipc_imports.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

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

absl::Status Dead(const DeviceHandle& handle) {
  return Refuse("EXPORTER_DEAD",
                absl::StrCat("process ", handle.exporter.pid,
                             ", which exported this memory, has ended"));
}

void Close(void* pointer) {
  const absl::Status status =
      CheckCuda(cudaIpcCloseMemHandle(pointer), "cudaIpcCloseMemHandle");
  if (!status.ok()) LOG(WARNING) << status;
}

// Remembered so that a thousand allocations of one process need one probe.
constexpr size_t kMaxProbed = 1024;

}  // namespace

absl::StatusOr<void*> IpcImports::Open(const std::array<char, 64>& ipc,
                                       const DeviceHandle& handle) const {
  cudaIpcMemHandle_t cuda_handle;
  memcpy(&cuda_handle, ipc.data(), sizeof(cuda_handle));
  void* pointer = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(
      &pointer, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (error == cudaSuccess) return pointer;
  const absl::Status status = CheckCuda(error, "cudaIpcOpenMemHandle");
  if (ReasonOf(status) == "DEVICE_FAULT") return status;
  if (error == cudaErrorPeerAccessUnsupported || error == cudaErrorTooManyPeers)
    return Refuse(
        "NO_PEER_ACCESS",
        absl::StrCat("memory of ", handle.device_uuid,
                     " cannot be read from the GPU here: ", status.message()));
  const std::string who = absl::StrCat("process ", handle.exporter.pid);
  switch (StateOf(handle.exporter)) {
    case ProcessState::kDead:
      return Dead(handle);
    case ProcessState::kOtherNamespace:
      return Refuse(
          "FOREIGN_NAMESPACE",
          absl::StrCat(
              who,
              " is in another pid namespace, and its memory cannot be "
              "opened from here (",
              status.message(),
              "): run both in one pod with shareProcessNamespace and a shared "
              "/dev/shm, or ",
              options_.otherwise));
    case ProcessState::kAlive:
      break;
  }
  return Refuse("ALLOCATION_FREED",
                absl::StrCat("an allocation of ", handle.bytes, " bytes of ",
                             who, " cannot be opened (", status.message(),
                             "): it was probably freed; register the tensors "
                             "again"));
}

absl::Status IpcImports::Probe(const DeviceHandle& handle) const {
  const absl::StatusOr<void*> pointer = Open(handle.probe_ipc, handle);
  if (!pointer.ok()) return pointer.status();
  std::array<char, 16> found = {};
  const absl::Status status =
      options_.look(static_cast<const char*>(*pointer), absl::MakeSpan(found));
  options_.later([pointer = *pointer] { Close(pointer); });
  if (!status.ok()) return status;
  if (found != handle.nonce) {
    return MakeError(
        absl::StatusCode::kUnavailable, "PROBE_FAILED",
        absl::StrCat("the memory that process ", handle.exporter.pid,
                     " has exported can be opened here, but it is other "
                     "memory: CUDA IPC does not work between these two "
                     "(containers?); ",
                     options_.otherwise));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ImportedAllocation>> IpcImports::OpenWhole(
    const DeviceHandle& handle) const {
  const absl::StatusOr<void*> pointer = Open(handle.ipc, handle);
  if (!pointer.ok()) return pointer.status();
  // The exporter says how long it is; a kernel that went beyond the end would
  // take this context with it.
  uint64_t base = 0;
  int64_t room = 0;
  const absl::StatusOr<const DriverApi*> driver = GetDriverApi();
  absl::Status status = driver.status();
  if (status.ok()) status = (*driver)->AddressRange(*pointer, &base, &room);
  // A small allocation is a part of a larger block, and a driver may say where
  // that begins.
  const uint64_t opened = reinterpret_cast<uint64_t>(*pointer);
  if (status.ok()) {
    room = opened < base ? 0 : room - static_cast<int64_t>(opened - base);
    if (room < handle.bytes) status = TooShort(handle, room);
  }
  if (!status.ok()) {
    options_.later([pointer = *pointer] { Close(pointer); });
    return status;
  }
  auto* allocation = new ImportedAllocation;
  allocation->data = static_cast<char*>(*pointer);
  allocation->bytes = room;
  return std::shared_ptr<const ImportedAllocation>(
      allocation, [later = options_.later,
                   let_go = options_.let_go](const ImportedAllocation* gone) {
        if (let_go) let_go(*gone);
        later([pointer = gone->data] { Close(pointer); });
        delete gone;
      });
}

absl::StatusOr<std::shared_ptr<const ImportedAllocation>> IpcImports::Acquire(
    const DeviceHandle& handle) {
  if (handle.exporter == ThisProcess())
    return Refuse("OWN_EXPORT", "this process exported the memory itself");
  if (StateOf(handle.exporter) == ProcessState::kDead) return Dead(handle);
  const Key key(handle.ipc, handle.exporter.pid, handle.exporter.start_time,
                handle.exporter.pid_namespace, handle.base, handle.buffer_id);
  const Probed probe = {handle.exporter, handle.probe_ipc, handle.nonce};
  // Held while it is opened: two that come at once share one.
  absl::MutexLock lock(&mutex_);
  const auto known = open_.find(key);
  if (known != open_.end()) {
    if (std::shared_ptr<const ImportedAllocation> found =
            known->second.lock()) {
      if (found->bytes < handle.bytes) return TooShort(handle, found->bytes);
      return found;
    }
  }
  if (std::find(probed_.begin(), probed_.end(), probe) == probed_.end()) {
    const absl::Status status = Probe(handle);
    if (!status.ok()) return status;
    if (probed_.size() >= kMaxProbed) probed_.erase(probed_.begin());
    probed_.push_back(probe);
  }
  absl::StatusOr<std::shared_ptr<const ImportedAllocation>> opened =
      OpenWhole(handle);
  if (!opened.ok()) return opened.status();
  if (options_.opened) options_.opened(*opened);
  open_[key] = *opened;
  for (auto at = open_.begin(); at != open_.end();)
    at = at->second.expired() ? open_.erase(at) : std::next(at);
  return opened;
}

int IpcImports::size() const {
  absl::MutexLock lock(&mutex_);
  int open = 0;
  for (const auto& [key, allocation] : open_)
    open += allocation.expired() ? 0 : 1;
  return open;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
