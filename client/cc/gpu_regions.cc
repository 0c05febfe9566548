#include "client/cc/gpu_regions.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace weightsync {
namespace client {
namespace {

absl::Status Of(const Tensor& tensor, const absl::Status& status) {
  return ErrorStatus(status.code(), ErrorReason(status),
                     absl::StrCat(tensor.name, ": ", status.message()));
}

}  // namespace

absl::Status GpuRegions::Add(const Tensor& shard,
                             v1::RegisterShardsRequest* request) {
  const int64_t bytes = SpanBytes(shard);
  const uint64_t address = reinterpret_cast<uint64_t>(shard.data);
  // Thousands of tensors lie in a few allocations, which are asked for once.
  auto known = regions_.upper_bound(address);
  if (known != regions_.begin()) {
    const Region& region = std::prev(known)->second;
    const int64_t offset = static_cast<int64_t>(address - region.handle.base);
    if (offset < region.handle.bytes) {
      const absl::Status inside =
          transport::cuda::CheckPlace(region.handle, offset, bytes);
      if (!inside.ok()) return Of(shard, inside);
      *request->add_shards() = ToTensorShard(shard, region.index, offset);
      return absl::OkStatus();
    }
  }
  const auto gpu = transport::cuda::ProcessGpu::Of(shard.data);
  if (!gpu.ok()) return Of(shard, gpu.status());
  const auto place = (*gpu)->Describe(shard.data, bytes);
  if (!place.ok()) return Of(shard, place.status());
  Region region;
  region.gpu = *gpu;
  region.handle = place->handle;
  region.index = request->regions_size();
  v1::MemoryRegion* added = request->add_regions();
  added->set_size_bytes(region.handle.bytes);
  v1::CudaIpcMemory* memory = added->mutable_memory()->mutable_cuda_ipc();
  const auto text = [](const auto& chars) {
    return std::string(chars.data(), chars.size());
  };
  memory->set_handle(text(region.handle.ipc));
  memory->set_device_uuid(region.handle.device_uuid);
  memory->set_buffer_id(region.handle.buffer_id);
  memory->set_probe_handle(text(region.handle.probe_ipc));
  memory->set_nonce(text(region.handle.nonce));
  memory->set_base_address(region.handle.base);
  *request->add_shards() = ToTensorShard(shard, region.index, place->offset);
  if (std::find(gpus_.begin(), gpus_.end(), *gpu) == gpus_.end())
    gpus_.push_back(*gpu);
  regions_.emplace(region.handle.base, region);
  return absl::OkStatus();
}

absl::Status GpuRegions::AwaitReady() const {
  for (const auto& [base, region] : regions_) {
    const absl::Status status = region.gpu->CheckStillThere(region.handle);
    if (!status.ok())
      return ErrorStatus(status.code(), ErrorReason(status), status.message());
  }
  for (const auto& gpu : gpus_) {
    const absl::Status status = gpu->Synchronize();
    if (!status.ok())
      return ErrorStatus(status.code(), ErrorReason(status), status.message());
  }
  return absl::OkStatus();
}

}  // namespace client
}  // namespace weightsync
