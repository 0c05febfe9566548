#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "glog/logging.h"
#include "transport/cuda/closing_thread.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/device_handle.h"
#include "transport/cuda/ipc_imports.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/peers.h"
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

thread_local bool keep_device = false;

// Threads that are not ours get their device back.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) {
    status_ = CheckCuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (!status_.ok()) return;
    // Also where it is the same: a thread that has done nothing yet has no
    // context, and the driver's calls want one.
    status_ = CheckCuda(cudaSetDevice(ordinal), "cudaSetDevice");
    changed_ = status_.ok() && before_ != ordinal && !keep_device;
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
  CudaProcessGpu(const DeviceInfo& device, std::vector<std::string> peers)
      : device_(device),
        peers_(std::move(peers)),
        closer_(std::make_shared<ClosingThread>(
            device_.uuid,
            [ordinal = device_.ordinal] { cudaSetDevice(ordinal); })),
        imports_(std::make_unique<IpcImports>(ImportOptions())),
        copier_(std::make_unique<ProcessCopier>(device_.uuid)) {}
  ~CudaProcessGpu() override {
    // Nothing is open any more; what is being closed is waited for.
    imports_ = nullptr;
    closer_ = nullptr;
    const OnDevice on(device_.ordinal);
    copier_ = nullptr;
    if (look_ != nullptr) cudaFreeHost(look_);
    exporter_ = nullptr;
  }

  const std::string& uuid() const override { return device_.uuid; }
  const std::vector<std::string>& peers() const override { return peers_; }

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
    const absl::Status status = CheckIpc(device_);
    if (!status.ok()) return status;
    if (handle.device_uuid != device_.uuid &&
        std::find(peers_.begin(), peers_.end(), handle.device_uuid) ==
            peers_.end()) {
      return MakeError(
          absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
          absl::StrCat("the memory lies on ", handle.device_uuid, ", and ",
                       device_.uuid, " has no way to it in this process"));
    }
    return imports_->Acquire(handle);
  }

  void Later(std::function<void()> then) override {
    closer_->Later(std::move(then));
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

  IpcImports::Options ImportOptions() {
    IpcImports::Options options;
    options.look = [this](const char* at, absl::Span<char> found) {
      return Look(at, found);
    };
    options.later = [closer = closer_](std::function<void()> close) {
      closer->Later(std::move(close));
    };
    options.otherwise = "start the daemon with --store=host";
    return options;
  }

  const DeviceInfo device_;
  const std::vector<std::string> peers_;
  std::shared_ptr<ClosingThread> closer_;
  std::unique_ptr<IpcImports> imports_;
  absl::Mutex mutex_;
  std::unique_ptr<DeviceExporter> exporter_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex look_mutex_;
  char* look_ ABSL_GUARDED_BY(look_mutex_) = nullptr;  // pinned, kLookBytes
  std::unique_ptr<ProcessCopier> copier_;
};

}  // namespace

void ProcessGpu::KeepDevice() { keep_device = true; }

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
    std::shared_ptr<ProcessGpu> made =
        std::make_shared<CudaProcessGpu>(device, PeersOf(device, *devices));
    (*gpus)[device.ordinal] = made;
    return made;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "NOT_DEVICE_MEMORY",
                   "the memory is of a GPU that this process does not see");
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
