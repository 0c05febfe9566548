#include "transport/cuda/agent/device_agents.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kUsageDeadline = absl::Seconds(2);

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceAgents>> DeviceAgents::Create(
    Options options) {
  const absl::StatusOr<std::vector<AgentDevice>> devices =
      DeviceAgent::ListDevices(options.agent);
  if (!devices.ok()) return devices.status();
  std::unique_ptr<DeviceAgents> agents(new DeviceAgents(std::move(options)));
  const std::vector<std::string>& wanted = agents->options_.device_uuids;
  {
    absl::MutexLock lock(&agents->mutex_);
    std::vector<std::string> seen;
    for (const AgentDevice& device : *devices) {
      seen.push_back(device.uuid);
      if (!wanted.empty() &&
          std::find(wanted.begin(), wanted.end(), device.uuid) == wanted.end())
        continue;
      auto gpu = std::make_unique<Gpu>();
      gpu->device = device;
      agents->gpus_.push_back(std::move(gpu));
    }
    for (const std::string& uuid : wanted) {
      if (std::find(seen.begin(), seen.end(), uuid) != seen.end()) continue;
      return MakeError(
          absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
          absl::StrCat("there is no ", uuid, " here; there is ",
                       seen.empty() ? "none" : absl::StrJoin(seen, ", "),
                       " (CUDA_VISIBLE_DEVICES, and the devices that the "
                       "container was given)"));
    }
  }
  agents->looker_ = std::thread([agents = agents.get()] { agents->Look(); });
  return agents;
}

DeviceAgents::~DeviceAgents() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (looker_.joinable()) looker_.join();
  // Their threads tell of changes until they have ended.
  std::vector<std::unique_ptr<DeviceAgent>> ending;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& gpu : gpus_) ending.push_back(std::move(gpu->agent));
  }
  ending.clear();
}

void DeviceAgents::OnLost(std::function<void(const std::string&)> lost) {
  absl::MutexLock lock(&lost_mutex_);
  lost_ = std::move(lost);
}

void DeviceAgents::EndBy(absl::Time when) {
  absl::MutexLock lock(&mutex_);
  end_by_ = when;
  for (const auto& gpu : gpus_) {
    if (gpu->agent != nullptr) gpu->agent->EndBy(when);
  }
}

std::string DeviceAgents::Names() const {
  std::vector<std::string> names;
  for (const auto& gpu : gpus_) names.push_back(gpu->device.uuid);
  return names.empty() ? "none" : absl::StrJoin(names, ", ");
}

std::string DeviceAgents::first() const {
  absl::MutexLock lock(&mutex_);
  return gpus_.empty() ? "" : gpus_[0]->device.uuid;
}

absl::StatusOr<DeviceAgent*> DeviceAgents::Get(const std::string& uuid) {
  Gpu* gpu = nullptr;
  DeviceAgent::Options options = options_.agent;
  {
    absl::MutexLock lock(&mutex_);
    if (uuid.empty() && gpus_.size() != 1) {
      return MakeError(absl::StatusCode::kInvalidArgument, "DEVICE_NOT_NAMED",
                       absl::StrCat("this node serves several GPUs: name one "
                                    "of ",
                                    Names()));
    }
    size_t index = 0;
    for (size_t i = 0; i < gpus_.size(); ++i) {
      if (!uuid.empty() && gpus_[i]->device.uuid != uuid) continue;
      gpu = gpus_[i].get();
      index = i;
    }
    if (gpu == nullptr) {
      return MakeError(absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
                       absl::StrCat("this node does not serve ", uuid,
                                    "; it serves ", Names(),
                                    " (CUDA_VISIBLE_DEVICES of the daemon, "
                                    "the devices that its container was given, "
                                    "and --device_uuid)"));
    }
    if (gpu->device.mig) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "MIG_NO_IPC",
          absl::StrCat(gpu->device.uuid, " (", gpu->device.name,
                       ") is a MIG instance, and these have no CUDA IPC: use "
                       "a whole GPU, or --memory=host"));
    }
    gpu->asked = true;
    const auto settled = [gpu] { return !gpu->starting; };
    mutex_.Await(absl::Condition(&settled));
    if (gpu->agent != nullptr) return gpu->agent.get();
    gpu->starting = true;
    options.config.device_uuid = gpu->device.uuid;
    absl::StrAppend(&options.fd_socket_prefix, ".", index);
  }
  options.on_change = [this, gpu](uint64_t epoch, const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      gpu->epoch = epoch;
      gpu->last_epoch = std::max(gpu->last_epoch, epoch);
      gpu->failure = status;
    }
    if (epoch != 0) return;
    absl::MutexLock lock(&lost_mutex_);
    if (lost_ != nullptr) lost_(gpu->device.uuid);
  };
  absl::StatusOr<std::unique_ptr<DeviceAgent>> started =
      DeviceAgent::Start(std::move(options));
  absl::MutexLock lock(&mutex_);
  gpu->starting = false;
  gpu->failure = started.status();
  if (!started.ok()) {
    LOG(WARNING) << gpu->device.uuid << ": " << started.status();
    return started.status();
  }
  // Unless it has gone again already.
  if (gpu->last_epoch == 0) gpu->epoch = gpu->last_epoch = 1;
  gpu->agent = *std::move(started);
  gpu->agent->EndBy(end_by_);
  LOG(INFO) << "a device agent serves " << gpu->device.uuid << " ("
            << gpu->device.name << ")";
  return gpu->agent.get();
}

std::vector<DeviceReport> DeviceAgents::Reports() const {
  std::vector<DeviceReport> reports;
  absl::MutexLock lock(&mutex_);
  for (const auto& gpu : gpus_) {
    if (!gpu->asked) continue;
    DeviceReport report;
    report.device = gpu->device;
    report.failure = gpu->failure;
    report.usage = gpu->usage;
    report.restarts =
        gpu->last_epoch > 0 ? static_cast<int>(gpu->last_epoch) - 1 : 0;
    if (gpu->agent == nullptr) {
      report.state = gpu->starting ? DeviceReport::State::kStarting
                                   : DeviceReport::State::kFailed;
    } else if (gpu->epoch != 0) {
      report.state = DeviceReport::State::kReady;
      report.slots = options_.agent.config.slots;
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

void DeviceAgents::Look() {
  while (true) {
    std::vector<std::pair<Gpu*, DeviceAgent*>> ready;
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_),
                                  options_.usage_interval))
        return;
      for (const auto& gpu : gpus_) {
        if (gpu->epoch == 0) gpu->usage = AgentUsage();
        if (gpu->agent != nullptr && gpu->epoch != 0)
          ready.emplace_back(gpu.get(), gpu->agent.get());
      }
    }
    for (const auto& [gpu, agent] : ready) {
      const absl::StatusOr<AgentUsage> usage = agent->GetUsage(kUsageDeadline);
      if (!usage.ok()) continue;
      absl::MutexLock lock(&mutex_);
      gpu->usage = *usage;
    }
  }
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
