// Ends of edges over NCCL whose communicators live in a device agent.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_CHANNEL_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_CHANNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/device_agent.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Makes the payload channels of an Endpoint out of a device agent's. The
// connections of the chain, and so who is there, which frames come and what
// became of them, stay in the daemon; the agent moves bytes between its GPU's
// memory, or the host's, and its peers' GPUs. An agent that dies is a lost
// edge.
//
// Memory that the agent has goes straight: segments of its GPU, and arenas,
// which it pins (`memory`). Any other is copied through a buffer that both
// have. Thread-safe; outlives its channels.
class AgentChannels {
 public:
  // `agent`, and `memory` where there is one, outlive this. `staging_bytes`: as
  // in the agent's configuration. After a channel that did not connect there is
  // none for `rest`, for those who have another way: what cannot be is not
  // tried at each update.
  AgentChannels(DeviceAgent* agent, int64_t staging_bytes,
                absl::Duration rest = absl::ZeroDuration(),
                AgentMemory* memory = nullptr)
      : agent_(agent),
        staging_bytes_(staging_bytes),
        rest_(rest),
        memory_(memory) {
    if (memory_ != nullptr) memory_->PinFor(agent_);
  }

  tcp::PayloadChannelFactory Factory();

 private:
  friend class AgentChannel;
  // UNAVAILABLE (CHANNEL_RESTS), with what the last one failed of.
  absl::Status CheckRested() const;
  void NoteFailure(const absl::Status& status);
  // Nothing: the agent of this epoch does not have it. The errors of
  // AgentMemory::PlaceForChannel.
  absl::StatusOr<absl::optional<AgentPart>> Find(const char* data,
                                                 int64_t bytes, uint64_t epoch);

  DeviceAgent* const agent_;
  const int64_t staging_bytes_;
  const absl::Duration rest_;
  AgentMemory* const memory_;
  mutable absl::Mutex mutex_;
  absl::Time failed_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_CHANNEL_H_
