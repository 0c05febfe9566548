// The memory of a node with GPUs, as its daemon sees it, which has no CUDA
// itself.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_H_

#include <cstdint>
#include <deque>
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
#include "absl/types/optional.h"
#include "transport/cuda/agent/device_agents.h"
#include "transport/cuda/handle.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Segments are host memory, made by another Memory. Besides them there are
// DeviceRegions: allocations of GPU memory of other processes. A region has
// addresses here, so that copies name its bytes as any others; but nothing is
// mapped at them, and who follows one gets a SIGSEGV. Copies and packs out of
// regions are done by the device agent of the GPU, into the same segments:
// through one of its slots, and from there by copy engine.
//
// Segments of a GPU (AllocateOptions::device_uuid) are memory of its agent, and
// end with it; their addresses are names, too. Buckets are packed into one
// without a slot, out of regions of the same GPU; whole stretches are copied
// between them and the other segments; nothing else. Others import one as
// CudaMemory and LiveMemory do, by a ticket of its control.
//
// Segments with generations (the store's) are mapped and pinned by each agent
// that has opened a region, once. They are not sealed against writers
// (AllocateOptions::others_read_only): an agent is another process, and must
// write to them. Whoever imports one read-only still gets a descriptor that it
// cannot map for writing.
//
// Thread-safe.
class AgentMemory final : public Memory {
 public:
  class Region;

  struct Options {
    // Of everything that an agent is asked for; one that takes longer is killed
    // and started again.
    absl::Duration timeout = absl::Seconds(30);
  };

  // `slots` and `slot_bytes` are those of the agents' configuration. `host` and
  // `agents` outlive this.
  AgentMemory(Memory* host, DeviceAgents* agents, int slots, int64_t slot_bytes,
              const Options& options);
  // Regions and segments do not outlive it.
  ~AgentMemory() override;

  // Opens an allocation of another process. Takes as long as an agent takes to
  // start. The errors of DeviceAgents::Get and ImportCache::Acquire;
  // UNAVAILABLE (DEVICE_AGENT_LOST), DEADLINE_EXCEEDED (DEVICE_AGENT_HUNG).
  absl::StatusOr<std::shared_ptr<const Region>> Open(
      const DeviceHandle& handle);
  // Until nobody holds one of `regions` any more and their allocations are
  // closed: then their owner may free them. DEADLINE_EXCEEDED (REGION_IN_USE).
  absl::Status AwaitClosed(std::vector<std::weak_ptr<const Region>> regions,
                           absl::Duration timeout);

  MemoryKind kind() const override { return MemoryKind::kHost; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override;
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override;
  void Withdraw(const MemoryTicket& ticket) override {
    MemoryTicket control = ticket;
    control.kind = MemoryKind::kHost;
    host_->Withdraw(control);
  }
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override {
    return host_->Import(ticket, timeout);
  }
  std::string DeviceOf(const char* address) const override
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Out of regions: DATA_LOSS (SOURCE_MEMORY_LOST) where a region cannot be
  // opened again by an agent that was started anew; INTERNAL (DEVICE_FAULT),
  // UNAVAILABLE (DEVICE_AGENT_LOST), DEADLINE_EXCEEDED (DEVICE_AGENT_HUNG,
  // DEVICE_BUSY: no slot became free), FAILED_PRECONDITION (SLOT_TOO_SMALL).
  // Then nothing of an agent writes to `dst` any more. Nobody copies into a
  // region: INVALID_ARGUMENT (BAD_COPY). Of a GPU's segment also UNAVAILABLE
  // (DEVICE_STORE_LOST): its agent has ended; FAILED_PRECONDITION
  // (OTHER_DEVICE): what is packed lies elsewhere.
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  absl::StatusOr<std::vector<Digest>> DigestFrames(
      const FrameDigestRequest& request) override;
  // Out of regions: each GPU's in one request, and through no slot.
  absl::Status DigestEach(absl::Span<const CopyTask> tasks,
                          const CopyOptions& options,
                          absl::Span<Digest> digests) override;
  absl::Status Pack(const PackRequest& request, PackResult* result) override;
  absl::Status Read(const char* from, absl::Span<char> to) override;
  // Not into GPU memory: INVALID_ARGUMENT (BAD_COPY).
  absl::Status Write(absl::Span<const char> from, char* to) override;

  // What `agent`, of this epoch, calls [address, address + bytes) for channels
  // of it: in a segment of its GPU, or in an arena that it has pinned. Nothing:
  // it is in neither; an arena is pinned meanwhile, once for each epoch.
  // UNAVAILABLE (DEVICE_STORE_LOST): of an agent that has ended; FAILED_
  // PRECONDITION (OTHER_DEVICE): of another GPU.
  absl::StatusOr<absl::optional<AgentPlace>> PlaceForChannel(
      DeviceAgent* agent, uint64_t epoch, const char* address, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on arenas are pinned by `agent` when they are made, and not when
  // their first bytes go over a channel. It outlives this.
  void PinFor(DeviceAgent* agent) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class ArenaSegment;
  class DeviceSegment;
  class SlotLease;

  // What an agent has of ours.
  struct Gpu {
    std::string uuid;
    DeviceAgent* agent = nullptr;
    std::vector<uint64_t> free_slots;
    struct Pinned {
      uint64_t epoch = 0, host = 0;
    };
    std::map<const char*, Pinned> pinned;  // by arena
    // By channels, which go on without: in which epoch.
    std::map<const char*, uint64_t> pin_tried;
    // Held while arenas are pinned, which takes long.
    absl::Mutex pin_mutex;
  };
  struct ArenaInfo {
    const Segment* segment = nullptr;
    int64_t bytes = 0;
  };

  // A segment of a GPU.
  struct DeviceInfo {
    int64_t bytes = 0;
    Gpu* gpu = nullptr;
    uint64_t epoch = 0;
    uint64_t store = 0;  // the agent's name for it
  };

  Gpu* GpuOf(DeviceAgent* agent, const std::string& uuid)
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<const Region> FindRegion(const char* address) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<uint64_t> AwaitEpoch(const Gpu& gpu) const;
  absl::StatusOr<SlotLease> TakeSlot(Gpu* gpu);
  // What `address` is called by the agent of `epoch`; pins the arena if need
  // be.
  absl::StatusOr<AgentPlace> PlaceOf(Gpu* gpu, uint64_t epoch,
                                     const char* address, int64_t bytes);
  // An arena of ours that is pinned already, `begin` being its first byte. No
  // place: it is not. BAD_COPY: it is in no arena.
  absl::StatusOr<absl::optional<AgentPlace>> FindPinned(
      const Gpu& gpu, uint64_t epoch, const char* address, int64_t bytes,
      ArenaInfo* arena, const char** begin) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status PinAll(Gpu* gpu, uint64_t epoch);
  // PlaceForChannel of what is in no segment of a GPU.
  absl::StatusOr<absl::optional<AgentPlace>> ArenaForChannel(
      DeviceAgent* agent, uint64_t epoch, const char* address, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // ---- Segments of GPUs: agent_memory_device.cc ----
  absl::StatusOr<std::unique_ptr<Segment>> AllocateOnDevice(
      int64_t bytes, const AllocateOptions& options);
  // The segment of a GPU that `address` is in. gpu null: in none.
  DeviceInfo FindDevice(const char* address, int64_t* offset) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Of the agent that has it now; DEVICE_STORE_LOST where that has ended.
  absl::StatusOr<AgentPlace> DevicePlaceOf(const DeviceInfo& device,
                                           int64_t offset, int64_t bytes) const;
  // Stretches of bytes of which one side is a GPU's segment; or only their
  // digest.
  absl::Status CopyOnDevice(absl::Span<const CopyTask* const> tasks,
                            Digest* digest);

  using Regions = std::vector<std::shared_ptr<const Region>>;
  // Of a request, those pieces whose region is of `gpu`, into `bucket`.
  absl::Status PackOn(
      Gpu* gpu, const AgentPlace& bucket, const PackRequest& request,
      const Regions& regions, bool to_host,
      std::function<void(int64_t, int64_t, absl::Span<const Digest>)> on_frames,
      uint64_t* epoch);
  absl::Status PackMixed(const PackRequest& request, const Regions& regions,
                         const std::vector<Gpu*>& gpus, PackResult* result);
  absl::Status CopyFrom(Gpu* gpu, absl::Span<const CopyTask> tasks,
                        const Regions& regions, Digest* digest);

  void Later(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunLater();

  Memory* const host_;
  DeviceAgents* const agents_;
  const int slots_;
  const int64_t slot_bytes_;
  const Options options_;

  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<Gpu>> gpus_ ABSL_GUARDED_BY(mutex_);
  std::map<const char*, ArenaInfo> arenas_ ABSL_GUARDED_BY(mutex_);
  std::map<const char*, std::weak_ptr<const Region>> regions_
      ABSL_GUARDED_BY(mutex_);
  std::map<const char*, DeviceInfo> devices_ ABSL_GUARDED_BY(mutex_);
  // What must not keep anybody waiting.
  std::deque<std::function<void()>> later_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread worker_;
};

// An allocation of GPU memory of another process. Its addresses are names. It
// stays open while somebody holds it.
class AgentMemory::Region {
 public:
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class AgentMemory;
  Region(AgentMemory* memory, Gpu* gpu, const DeviceHandle& handle)
      : memory_(memory), gpu_(gpu), handle_(handle.Encode()) {}

  // Of the agent of `epoch`, which opens it if need be.
  absl::StatusOr<uint64_t> ImportOf(uint64_t epoch) const;

  AgentMemory* const memory_;
  Gpu* const gpu_;
  const std::string handle_;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  mutable absl::Mutex mutex_;
  mutable uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable uint64_t import_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_MEMORY_H_
