// The device agents of a node: one for each GPU that it serves.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENTS_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENTS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/cuda/agent/agent_job.h"
#include "transport/cuda/agent/device_agent.h"

namespace weightsync {
namespace transport {
namespace cuda {

// What is known of a GPU that somebody has asked for.
struct DeviceReport {
  enum class State { kStarting, kReady, kFailed };
  AgentDevice device;
  State state = State::kStarting;
  absl::Status failure;  // why it is not ready
  int restarts = 0;      // of its agent
  int slots = 0;
  // As of the last look; zeros before the first.
  AgentUsage usage;
};

// An agent takes memory of its GPU, and so is started when the GPU is first
// wanted, not before. One that cannot be started concerns those alone who want
// that GPU. Thread-safe.
class DeviceAgents {
 public:
  struct Options {
    // config.device_uuid is set for each; fd_socket_prefix gets a number.
    DeviceAgent::Options agent;
    // Those that are served; empty: all that are seen.
    std::vector<std::string> device_uuids;
    // How often memory is looked at.
    absl::Duration usage_interval = absl::Seconds(2);
  };

  // Looks which GPUs there are; starts no agent that stays. The errors of
  // DeviceAgent::ListDevices; NOT_FOUND (DEVICE_NOT_VISIBLE) where one of
  // `device_uuids` is not there.
  static absl::StatusOr<std::unique_ptr<DeviceAgents>> Create(Options options);
  // Ends all agents.
  ~DeviceAgents();
  DeviceAgents(const DeviceAgents&) = delete;
  DeviceAgents& operator=(const DeviceAgents&) = delete;

  // The agent of a GPU, or of the only one where `uuid` is empty; it lives as
  // long as this. The first call starts it, which takes seconds, and so does
  // each call after one that failed. NOT_FOUND (DEVICE_NOT_VISIBLE, with those
  // that are served), INVALID_ARGUMENT (DEVICE_NOT_NAMED), FAILED_PRECONDITION
  // (MIG_NO_IPC), and the errors of DeviceAgent::Start.
  absl::StatusOr<DeviceAgent*> Get(const std::string& uuid);

  // Of all agents, those too that are started later: DeviceAgent::EndBy.
  void EndBy(absl::Time when);

  // From now on called with a GPU's UUID when its agent has ended, before
  // another is started; on a thread that must not be held up, and that must not
  // call this. Null: nobody, and who was is not called any more.
  void OnLost(std::function<void(const std::string& device_uuid)> lost)
      ABSL_LOCKS_EXCLUDED(lost_mutex_);

  // Those that Get was called for, in the order of the machine. At once.
  std::vector<DeviceReport> Reports() const;

  // The UUID of the first that is served; empty where there is none.
  std::string first() const;

 private:
  struct Gpu {
    AgentDevice device;
    bool asked = false;
    bool starting = false;
    uint64_t epoch = 0;       // 0: none is ready
    uint64_t last_epoch = 0;  // that was
    absl::Status failure;
    AgentUsage usage;
    std::unique_ptr<DeviceAgent> agent;
  };

  explicit DeviceAgents(Options options) : options_(std::move(options)) {}
  std::string Names() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Look();

  const Options options_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time end_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  // Constant in number and order after Create.
  std::vector<std::unique_ptr<Gpu>> gpus_ ABSL_GUARDED_BY(mutex_);
  // Held while it is called.
  absl::Mutex lost_mutex_;
  std::function<void(const std::string&)> lost_ ABSL_GUARDED_BY(lost_mutex_);
  std::thread looker_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENTS_H_
