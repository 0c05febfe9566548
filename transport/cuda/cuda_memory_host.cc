// Between GPU memory and memory of the host.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/cuda_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kTransferBytes = 1 << 20;

}  // namespace

// ---- Small transfers ----

absl::Status CudaMemory::Transfer(char* device, char* host, int64_t bytes,
                                  bool to_host) {
  const absl::StatusOr<DeviceCore::Pinned> pinned =
      core_->Pin(device, bytes, !to_host);
  if (!pinned.ok()) return pinned.status();
  absl::StatusOr<DeviceCore::LaneLease> lease = core_->TakeLane();
  if (!lease.ok()) return lease.status();
  Lane* const lane = lease->get();
  absl::Status status =
      core_->Reserve(lane, std::min(bytes, kTransferBytes), 0);
  for (int64_t at = 0; status.ok() && at < bytes; at += kTransferBytes) {
    const int64_t part = std::min(kTransferBytes, bytes - at);
    if (!to_host) memcpy(lane->host, host + at, part);
    status = CheckCuda(
        to_host ? cudaMemcpyAsync(lane->host, device + at, part,
                                  cudaMemcpyDeviceToHost, lane->stream)
                : cudaMemcpyAsync(device + at, lane->host, part,
                                  cudaMemcpyHostToDevice, lane->stream),
        "cudaMemcpyAsync");
    if (status.ok()) status = core_->Wait(*lane);
    if (status.ok() && to_host) memcpy(host + at, lane->host, part);
  }
  return status;
}

absl::Status CudaMemory::Read(const char* from, absl::Span<char> to) {
  if (to.empty()) return absl::OkStatus();
  return Transfer(const_cast<char*>(from), to.data(),
                  static_cast<int64_t>(to.size()), true);
}

absl::Status CudaMemory::Write(absl::Span<const char> from, char* to) {
  if (from.empty()) return absl::OkStatus();
  return Transfer(to, const_cast<char*>(from.data()),
                  static_cast<int64_t>(from.size()), false);
}

CudaMemory::PinnedHost::~PinnedHost() {
  owner_.reset();
  core_->RemoveRange(data_);
  // Not let go of where the closing is forgotten, either.
  auto* const memory = new std::shared_ptr<const void>(std::move(memory_));
  core_->Later([data = data_, memory] {
    const absl::Status status =
        CheckCuda(cudaHostUnregister(data), "cudaHostUnregister");
    if (status.ok()) {
      delete memory;
    } else {
      LOG(WARNING) << status << "; the memory stays until this process ends";
    }
  });
}

absl::StatusOr<std::unique_ptr<CudaMemory::PinnedHost>> CudaMemory::PinHost(
    char* data, int64_t bytes, bool writable,
    std::shared_ptr<const void> memory) {
  absl::Status status = core_->Use();
  if (status.ok()) {
    status = CheckCuda(cudaHostRegister(data, bytes,
                                        writable ? cudaHostRegisterDefault
                                                 : cudaHostRegisterReadOnly),
                       "cudaHostRegister");
  }
  if (!status.ok()) return status;
  std::unique_ptr<PinnedHost> pinned(
      new PinnedHost(core_, data, std::move(memory)));
  pinned->owner_ = std::make_shared<char>();
  core_->AddRange(data, bytes, DeviceCore::Place::kPinnedHost, writable,
                  pinned->owner_);
  return pinned;
}

absl::StatusOr<CudaMemory::Usage> CudaMemory::GetUsage() {
  absl::Status status = core_->Use();
  size_t free = 0, total = 0;
  if (status.ok())
    status = CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (!status.ok()) return status;
  Usage usage;
  usage.segments_bytes = *segments_bytes_;
  usage.context_bytes = core_->context_bytes();
  usage.scratch_bytes = core_->scratch_bytes();
  usage.free_bytes = static_cast<int64_t>(free);
  usage.total_bytes = static_cast<int64_t>(total);
  return usage;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
