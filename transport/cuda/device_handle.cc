#include "transport/cuda/device_handle.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/driver.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == 64, "part of the format");

constexpr size_t kProbeBytes = 512;

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceExporter>> DeviceExporter::Create(
    const DeviceInfo& device) {
  absl::Status status = CheckIpc(device);
  if (!status.ok()) return status;
  std::unique_ptr<DeviceExporter> exporter(new DeviceExporter(device));
  std::random_device random;
  for (char& byte : exporter->nonce_) byte = static_cast<char>(random());
  status = CheckCuda(cudaSetDevice(device.ordinal), "cudaSetDevice");
  if (status.ok())
    status = CheckCuda(cudaMalloc(&exporter->probe_, kProbeBytes),
                       "cudaMalloc of the probe");
  if (status.ok()) {
    status =
        CheckCuda(cudaMemcpy(exporter->probe_, exporter->nonce_.data(),
                             exporter->nonce_.size(), cudaMemcpyHostToDevice),
                  "cudaMemcpy to the probe");
  }
  if (status.ok()) {
    cudaIpcMemHandle_t ipc;
    status = CheckCuda(cudaIpcGetMemHandle(&ipc, exporter->probe_),
                       "cudaIpcGetMemHandle");
    memcpy(exporter->probe_ipc_.data(), &ipc, sizeof(ipc));
  }
  if (!status.ok()) return status;
  return exporter;
}

DeviceExporter::~DeviceExporter() {
  if (probe_ == nullptr) return;
  cudaSetDevice(device_.ordinal);
  const absl::Status status = CheckCuda(cudaFree(probe_), "cudaFree");
  if (!status.ok()) LOG(WARNING) << "the probe: " << status;
}

absl::StatusOr<DevicePlace> DeviceExporter::Describe(const void* pointer,
                                                     int64_t bytes) const {
  const absl::StatusOr<const DriverApi*> driver = GetDriverApi();
  if (!driver.ok()) return driver.status();
  DevicePlace place;
  DeviceHandle& handle = place.handle;
  absl::Status status =
      (*driver)->AddressRange(pointer, &handle.base, &handle.bytes);
  if (!status.ok()) return status;
  place.offset =
      static_cast<int64_t>(reinterpret_cast<uint64_t>(pointer) - handle.base);
  status = CheckPlace(handle, place.offset, bytes);
  if (!status.ok()) return status;
  const absl::StatusOr<bool> capable = (*driver)->HasIpcHandle(pointer);
  if (!capable.ok()) return capable.status();
  if (!*capable) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "NOT_EXPORTABLE",
        absl::StrCat(
            "the ", handle.bytes,
            " bytes that this tensor lies in cannot be handed to another "
            "process: they were made by cuMemCreate (PyTorch's "
            "expandable_segments: unset it in PYTORCH_CUDA_ALLOC_CONF, or copy "
            "the tensors through host memory: bounce=True), or came from "
            "another process themselves"));
  }
  const absl::StatusOr<uint64_t> id = (*driver)->BufferId(pointer);
  if (!id.ok()) return id.status();
  handle.buffer_id = *id;
  cudaIpcMemHandle_t ipc;
  status =
      CheckCuda(cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(handle.base)),
                "cudaIpcGetMemHandle");
  if (!status.ok()) return status;
  memcpy(handle.ipc.data(), &ipc, sizeof(ipc));
  handle.device_uuid = device_.uuid;
  handle.exporter = ThisProcess();
  handle.probe_ipc = probe_ipc_;
  handle.nonce = nonce_;
  return place;
}

absl::Status DeviceExporter::CheckStillThere(const DeviceHandle& handle) {
  const absl::StatusOr<const DriverApi*> driver = GetDriverApi();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<uint64_t> id =
      (*driver)->BufferId(reinterpret_cast<const void*>(handle.base));
  if (id.ok() && *id == handle.buffer_id) return absl::OkStatus();
  if (!id.ok() && ReasonOf(id.status()) != "NOT_DEVICE_MEMORY")
    return id.status();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "ALLOCATION_FREED",
      absl::StrCat(
          "the allocation of ", handle.bytes, " bytes at ",
          absl::Hex(handle.base),
          id.ok() ? " was freed, and another one is there" : " was freed",
          ": register the tensors again before the next publish"));
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
