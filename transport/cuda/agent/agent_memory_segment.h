// Of AgentMemory alone.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_SEGMENT_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_SEGMENT_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "glog/logging.h"
#include "transport/cuda/agent/agent_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// An arena that agents may have pinned.
class AgentMemory::ArenaSegment final : public Segment {
 public:
  ArenaSegment(AgentMemory* memory, std::unique_ptr<Segment> base)
      : memory_(memory), base_(std::move(base)) {}
  ~ArenaSegment() override {
    std::vector<Gpu*> gpus;
    {
      absl::MutexLock lock(&memory_->mutex_);
      memory_->arenas_.erase(base_->data());
      for (const auto& [uuid, gpu] : memory_->gpus_) gpus.push_back(gpu.get());
    }
    std::vector<std::pair<DeviceAgent*, Gpu::Pinned>> pinned;
    for (Gpu* gpu : gpus) {
      // One that is being pinned is unpinned when it is: the next arena may
      // have this address.
      absl::MutexLock pinning(&gpu->pin_mutex);
      absl::MutexLock lock(&memory_->mutex_);
      gpu->pin_tried.erase(base_->data());
      const auto at = gpu->pinned.find(base_->data());
      if (at == gpu->pinned.end()) continue;
      pinned.emplace_back(gpu->agent, at->second);
      gpu->pinned.erase(at);
    }
    for (const auto& [agent, what] : pinned) {
      memory_->Later([agent = agent, what = what] {
        const absl::Status status =
            agent->UnmapHost(what.epoch, what.host, kUnpinDeadline);
        if (!status.ok()) LOG(INFO) << "unpinning: " << status;
      });
    }
  }
  const Segment& base() const { return *base_; }

  MemoryKind kind() const override { return base_->kind(); }
  char* data() const override { return base_->data(); }
  int64_t bytes() const override { return base_->bytes(); }
  bool writable() const override { return base_->writable(); }
  int file(int64_t* offset) const override { return base_->file(offset); }
  int generation_slots() const override { return base_->generation_slots(); }
  uint64_t Generation(int slot) const override {
    return base_->Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return base_->AdvanceGeneration(slot);
  }

 private:
  static constexpr absl::Duration kUnpinDeadline = absl::Seconds(5);

  AgentMemory* const memory_;
  const std::unique_ptr<Segment> base_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_SEGMENT_H_
