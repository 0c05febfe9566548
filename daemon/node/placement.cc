#include "daemon/node/placement.h"

#include <algorithm>
#include <set>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace daemon {

namespace {

bool Has(const std::vector<std::string>& devices, const std::string& device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

}  // namespace

std::string Placement::DeviceOfShards(
    const transport::Memory& memory, const std::vector<SourceRegion>& regions,
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards) {
  std::string device;
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(static_cast<size_t>(shards.size()));
  std::set<int32_t> looked_at;
  for (const v1::TensorShard& shard : shards) {
    if (!names.insert(shard.parameter().name()).second) return "";
    if (shard.region() < 0 ||
        static_cast<size_t>(shard.region()) >= regions.size()) {
      return "";
    }
    if (!looked_at.insert(shard.region()).second) continue;
    const std::string on =
        memory.DeviceOf(regions[static_cast<size_t>(shard.region())].data);
    if (on.empty() || (!device.empty() && on != device)) return "";
    device = on;
  }
  return device;
}

void Placement::SetRank(const std::string& model, int32_t rank,
                        const std::string& device) {
  absl::MutexLock lock(&mutex_);
  if (device.empty()) {
    ranks_.erase({model, rank});
  } else {
    ranks_[{model, rank}] = device;
  }
}

void Placement::SetWorker(const std::string& model, const std::string& worker,
                          std::vector<std::string> reachable) {
  absl::MutexLock lock(&mutex_);
  workers_[model][worker] = std::move(reachable);
}

void Placement::RemoveWorker(const std::string& model,
                             const std::string& worker) {
  absl::MutexLock lock(&mutex_);
  auto workers = workers_.find(model);
  if (workers == workers_.end()) return;
  workers->second.erase(worker);
  if (workers->second.empty()) workers_.erase(workers);
}

std::map<int32_t, std::string> Placement::ForPacked(
    const NodeLayout& layout, const std::vector<int32_t>& buckets) const {
  std::map<int32_t, std::string> devices;
  absl::MutexLock lock(&mutex_);
  bool on_host = false;
  auto workers = workers_.find(layout.model);
  if (workers != workers_.end()) {
    for (const auto& worker : workers->second) {
      on_host = on_host || worker.second.empty();
    }
  }
  for (int32_t bucket : buckets) {
    const int32_t rank =
        layout.plan.bucket(static_cast<uint32_t>(bucket)).source_rank;
    auto device = ranks_.find({layout.model, rank});
    if (device == ranks_.end()) continue;
    if (on_host && std::binary_search(layout.needed_buckets.begin(),
                                      layout.needed_buckets.end(), bucket)) {
      continue;
    }
    devices[bucket] = device->second;
  }
  return devices;
}

std::map<int32_t, std::string> Placement::ForReceived(
    const NodeLayout& layout, const std::vector<int32_t>& buckets) const {
  std::map<int32_t, std::string> devices;
  std::vector<std::string> common;
  {
    absl::MutexLock lock(&mutex_);
    auto workers = workers_.find(layout.model);
    if (workers == workers_.end()) return devices;
    // Of GPUs that are in reach alone, others have the memory and the work.
    for (const auto& worker : workers->second) {
      if (!worker.second.empty() && !Has(common, worker.second[0]))
        common.push_back(worker.second[0]);
    }
    for (const auto& worker : workers->second) {
      common.erase(std::remove_if(common.begin(), common.end(),
                                  [&worker](const std::string& device) {
                                    return !Has(worker.second, device);
                                  }),
                   common.end());
    }
  }
  if (common.empty()) return devices;
  std::sort(common.begin(), common.end());
  // Spread: none of them is to hold it all.
  for (int32_t bucket : buckets) {
    devices[bucket] = common[static_cast<size_t>(bucket) % common.size()];
  }
  return devices;
}

bool Placement::AllReach(const std::string& model,
                         const std::string& device) const {
  absl::MutexLock lock(&mutex_);
  auto workers = workers_.find(model);
  if (workers == workers_.end()) return true;
  return std::all_of(
      workers->second.begin(), workers->second.end(),
      [&device](const auto& worker) { return Has(worker.second, device); });
}

}  // namespace daemon
}  // namespace weightsync
