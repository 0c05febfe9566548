#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/device_handle.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/process_copy.h"
#include "transport/cuda/process_gpu.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// Of the few bytes of a probe.
constexpr absl::Duration kProbeTimeout = absl::Seconds(10);
constexpr size_t kLookBytes = 64;

// Threads that are not ours get their device back.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) {
    status_ = CheckCuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (!status_.ok()) return;
    // Also where it is the same: a thread that has done nothing yet has no
    // context, and the driver's calls want one.
    status_ = CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
    changed_ = status_.ok() && before_ != ordinal;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  absl::Status status_;
};

class CudaProcessGpu final : public ProcessGpu {
 public:
  explicit CudaProcessGpu(const DeviceInfo& device)
      : device_(device),
        copier_(std::make_unique<ProcessCopier>(device.uuid)) {}
  ~CudaProcessGpu() override {
    const OnDevice on(device_.ordinal);
    copier_ = nullptr;
    if (look_ != nullptr) cudaFreeHost(look_);
    exporter_ = nullptr;
  }

  const std::string& uuid() const override { return device_.uuid; }

  absl::StatusOr<DevicePlace> Describe(const void* pointer,
                                       int64_t bytes) override {
    const OnDevice on(device_.ordinal);
    if (!on.status().ok()) return on.status();
    absl::MutexLock lock(&mutex_);
    if (exporter_ == nullptr) {
      absl::StatusOr<std::unique_ptr<DeviceExporter>> made =
          DeviceExporter::Create(device_);
      if (!made.ok()) return made.status();
      exporter_ = *std::move(made);
    }
    return exporter_->Describe(pointer, bytes);
  }

  absl::Status CheckStillThere(const DeviceHandle& handle) override {
    const OnDevice on(device_.ordinal);
    if (!on.status().ok()) return on.status();
    return DeviceExporter::CheckStillThere(handle);
  }

  absl::Status Synchronize() override {
    const OnDevice on(device_.ordinal);
    if (!on.status().ok()) return on.status();
    return CheckCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  absl::Status Pin(const char* data, int64_t bytes, bool read_only) override {
    const OnDevice on(device_.ordinal);
    if (!on.status().ok()) return on.status();
    return CheckCuda(
        cudaHostRegister(const_cast<char*>(data), static_cast<size_t>(bytes),
                         cudaHostRegisterPortable |
                             (read_only ? cudaHostRegisterReadOnly : 0)),
        "cudaHostRegister");
  }
  void Unpin(const char* data) override {
    const OnDevice on(device_.ordinal);
    const absl::Status status = CheckCuda(
        cudaHostUnregister(const_cast<char*>(data)), "cudaHostUnregister");
    if (!status.ok()) LOG(WARNING) << status;
  }

  absl::StatusOr<std::shared_ptr<const Opened>> Open(
      const DeviceHandle& handle) override {
    const OnDevice on(device_.ordinal);
    if (!on.status().ok()) return on.status();
    absl::Status status = CheckIpc(device_);
    if (!status.ok()) return status;
    if (handle.device_uuid != device_.uuid) {
      return MakeError(absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
                       absl::StrCat("the memory lies on ", handle.device_uuid,
                                    ", and is opened on ", device_.uuid));
    }
    const absl::StatusOr<void*> probe = OpenIpc(handle, handle.probe_ipc);
    if (!probe.ok()) return probe.status();
    std::array<char, 16> found = {};
    status = Look(static_cast<const char*>(*probe), absl::MakeSpan(found));
    cudaIpcCloseMemHandle(*probe);
    if (!status.ok()) return status;
    if (found != handle.nonce) {
      return MakeError(
          absl::StatusCode::kUnavailable, "PROBE_FAILED",
          "the memory that the daemon has exported can be opened here, but it "
          "is other memory: CUDA IPC does not work between these two "
          "(containers?); start the daemon with --store=host");
    }
    const absl::StatusOr<void*> pointer = OpenIpc(handle, handle.ipc);
    if (!pointer.ok()) return pointer.status();
    // From here on it is closed by whoever lets it go.
    std::shared_ptr<Opened> opened(
        new Opened{static_cast<char*>(*pointer), handle.bytes},
        [ordinal = device_.ordinal](const Opened* closed) {
          const OnDevice on(ordinal);
          const absl::Status status = CheckCuda(
              cudaIpcCloseMemHandle(closed->data), "cudaIpcCloseMemHandle");
          if (!status.ok()) LOG(WARNING) << status;
          delete closed;
        });
    uint64_t base = 0;
    const absl::StatusOr<const DriverApi*> driver = GetDriverApi();
    status = driver.status();
    int64_t room = 0;
    if (status.ok()) status = (*driver)->AddressRange(*pointer, &base, &room);
    if (!status.ok()) return status;
    if (base != reinterpret_cast<uint64_t>(*pointer) || room < handle.bytes) {
      return MakeError(absl::StatusCode::kInvalidArgument, "PAST_ALLOCATION",
                       absl::StrCat("an allocation of ", handle.bytes,
                                    " bytes was named, and the one that the "
                                    "handle opens has ",
                                    room));
    }
    return std::shared_ptr<const Opened>(std::move(opened));
  }

  void PrepareCopies(absl::Duration timeout) override {
    const OnDevice on(device_.ordinal);
    if (on.status().ok()) copier_->Prepare(timeout);
  }
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    absl::Duration timeout) override {
    const OnDevice on(device_.ordinal);
    return on.status().ok() ? copier_->Copy(tasks, timeout) : on.status();
  }
  absl::Status CopyWithin(absl::Span<const CopyTask> tasks,
                          absl::Duration timeout) override {
    const OnDevice on(device_.ordinal);
    return on.status().ok() ? copier_->CopyWithin(tasks, timeout) : on.status();
  }

 private:
  // A few bytes. To memory that is not pinned a copy would hold this thread up
  // within the runtime, for as long as the GPU likes and whatever the timeout.
  absl::Status Look(const char* at, absl::Span<char> found) {
    absl::MutexLock lock(&look_mutex_);
    if (look_ == nullptr) {
      void* pinned = nullptr;
      const absl::Status status =
          CheckCuda(cudaHostAlloc(&pinned, kLookBytes, cudaHostAllocDefault),
                    "cudaHostAlloc");
      if (!status.ok()) return status;
      look_ = static_cast<char*>(pinned);
    }
    CopyTask look;
    look.src = at;
    look.dst = look_;
    look.run_bytes = static_cast<int64_t>(found.size());
    // Not on the stream that all others of the process wait for.
    const absl::Status status = Copy({look}, kProbeTimeout);
    if (status.ok()) {
      memcpy(found.data(), look_, found.size());
    } else if (ReasonOf(status) == "DEVICE_STALLED") {
      look_ = nullptr;  // may still be written to
    }
    return status;
  }

  static absl::StatusOr<void*> OpenIpc(const DeviceHandle& handle,
                                       const std::array<char, 64>& ipc) {
    cudaIpcMemHandle_t cuda_handle;
    memcpy(&cuda_handle, ipc.data(), sizeof(cuda_handle));
    void* pointer = nullptr;
    const absl::Status status =
        CheckCuda(cudaIpcOpenMemHandle(&pointer, cuda_handle,
                                       cudaIpcMemLazyEnablePeerAccess),
                  "cudaIpcOpenMemHandle");
    if (status.ok()) return pointer;
    if (ReasonOf(status) == "DEVICE_FAULT") return status;
    const bool dead = StateOf(handle.exporter) == ProcessState::kDead;
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     dead ? "EXPORTER_DEAD" : "ALLOCATION_FREED",
                     absl::StrCat("memory of process ", handle.exporter.pid,
                                  dead ? ", which has ended," : "",
                                  " cannot be opened: ", status.message()));
  }

  const DeviceInfo device_;
  absl::Mutex mutex_;
  std::unique_ptr<DeviceExporter> exporter_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex look_mutex_;
  char* look_ ABSL_GUARDED_BY(look_mutex_) = nullptr;  // pinned, kLookBytes
  std::unique_ptr<ProcessCopier> copier_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<ProcessGpu>> ProcessGpu::Of(
    const void* pointer) {
  absl::Status status = FindCudart();
  if (!status.ok()) return status;
  cudaPointerAttributes attributes = {};
  status = CheckCuda(cudaPointerGetAttributes(&attributes, pointer),
                     "cudaPointerGetAttributes");
  if (!status.ok()) return status;
  if (attributes.type != cudaMemoryTypeDevice &&
      attributes.type != cudaMemoryTypeManaged) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "NOT_DEVICE_MEMORY",
        absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(pointer)),
                     " is in no allocation of GPU memory of this process"));
  }
  static absl::Mutex mutex(absl::kConstInit);
  static auto* const gpus = new std::map<int, std::weak_ptr<ProcessGpu>>;
  absl::MutexLock lock(&mutex);
  if (std::shared_ptr<ProcessGpu> known = (*gpus)[attributes.device].lock())
    return known;
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok()) return devices.status();
  for (const DeviceInfo& device : *devices) {
    if (device.ordinal != attributes.device) continue;
    std::shared_ptr<ProcessGpu> made = std::make_shared<CudaProcessGpu>(device);
    (*gpus)[device.ordinal] = made;
    return made;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "NOT_DEVICE_MEMORY",
                   "the memory is of a GPU that this process does not see");
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
