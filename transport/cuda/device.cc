#include "transport/cuda/device.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/driver.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

std::string UuidText(const unsigned char* bytes) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    snprintf(hex, sizeof(hex), "%02x", bytes[i]);
    text += hex;
  }
  return text;
}

}  // namespace

absl::StatusOr<std::vector<DeviceInfo>> ListDevices() {
  int count = 0;
  absl::Status status =
      CheckCuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status.ok()) return status;
  absl::StatusOr<const DriverApi*> driver = GetDriverApi();
  if (!driver.ok()) return driver.status();
  std::vector<DeviceInfo> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties;
    status = CheckCuda(cudaGetDeviceProperties(&properties, ordinal),
                       "cudaGetDeviceProperties");
    if (!status.ok()) return status;
    DeviceInfo device;
    device.ordinal = ordinal;
    device.name = properties.name;
    device.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    const auto* uuid =
        reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
    device.uuid = UuidText(uuid);
    // The whole GPU's; that of a slice is another.
    unsigned char whole[16];
    device.mig = absl::StrContains(device.name, " MIG ") ||
                 ((*driver)->device_uuid(ordinal, whole) &&
                  memcmp(whole, uuid, sizeof(whole)) != 0);
    devices.push_back(std::move(device));
  }
  return devices;
}

absl::StatusOr<DeviceInfo> FindDevice(absl::string_view uuid) {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok()) return devices.status();
  std::vector<std::string> seen;
  for (const DeviceInfo& device : *devices) {
    if (device.uuid == uuid || (uuid.empty() && devices->size() == 1))
      return device;
    seen.push_back(device.uuid);
  }
  if (uuid.empty()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "DEVICE_NOT_NAMED",
        absl::StrCat("this process sees ", seen.size(), " GPUs: name one of ",
                     absl::StrJoin(seen, ", ")));
  }
  return MakeError(
      absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
      absl::StrCat("this process does not see ", uuid, "; it sees ",
                   seen.empty() ? "none" : absl::StrJoin(seen, ", "),
                   " (CUDA_VISIBLE_DEVICES, and the devices that the "
                   "container was given)"));
}

absl::Status CheckIpc(const DeviceInfo& device) {
  if (!device.mig) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "MIG_NO_IPC",
      absl::StrCat(device.uuid, " (", device.name,
                   ") is a MIG instance, and these have no CUDA IPC: use a "
                   "whole GPU, or --memory=host"));
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
