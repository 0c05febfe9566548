// A device agent, as its daemon sees it: a process that is started, asked,
// watched, killed and started again.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENT_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENT_H_

#include <sys/types.h>

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
#include "absl/types/span.h"
#include "transport/cuda/agent/agent_job.h"
#include "transport/cuda/agent/agent_wire.h"
#include "transport/memory.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace transport {
namespace cuda {

// The daemon has no CUDA context, and so nothing that a fault of one can take
// from it. What an agent had open, mapped or exported ends with it: numbers
// that it gave are good for one epoch, which every call names and every start
// raises.
//
// Thread-safe.
class DeviceAgent {
 public:
  struct Options {
    // What is executed; "--device_agent=FD" is added, with the file descriptor
    // for RunDeviceAgent.
    std::vector<std::string> command;
    AgentConfig config;
    // Given a suffix for each start.
    std::string fd_socket_prefix;
    // An agent that answers no ping for so long is killed.
    absl::Duration hang_deadline = absl::Seconds(5);
    absl::Duration start_deadline = absl::Seconds(30);
    // Between an end and the next start; doubled for each start that comes to
    // nothing, up to max_backoff.
    absl::Duration backoff = absl::Milliseconds(100);
    absl::Duration max_backoff = absl::Seconds(5);
    // Told of every start that succeeded and every end (then `status` says
    // why), on a thread of the agent. Must not call it.
    std::function<void(uint64_t epoch, const absl::Status& status)> on_change;
  };

  // The GPUs that an agent would see, whatever options.config says; from a
  // process that ends again. The errors of cuda::ListDevices; UNAVAILABLE
  // (DEVICE_AGENT_LOST), DEADLINE_EXCEEDED (DEVICE_AGENT_HUNG).
  static absl::StatusOr<std::vector<AgentDevice>> ListDevices(Options options);

  // Starts the first process. The errors of CudaMemory::Create and Allocate,
  // with nothing left behind: a GPU that cannot serve at all is the caller's to
  // know. UNAVAILABLE (DEVICE_AGENT_LOST).
  static absl::StatusOr<std::unique_ptr<DeviceAgent>> Start(Options options);
  // Ends the process; kills it when it does not end by itself.
  ~DeviceAgent();

  // The caller is about to end: what the process still has at work then is not
  // waited for. It is killed, and none is started any more.
  void EndBy(absl::Time when);

  // Of the process that runs; 0 while none does.
  uint64_t epoch() const;
  pid_t pid() const;
  // Whether the process of `epoch` has not ended yet: it may be dying.
  bool Runs(uint64_t epoch) const;
  // After an end of work that `status` tells of: until the process that did it
  // has ended, where that is what it means (it may still write to memory that
  // it was given), or for as long as that takes at most.
  void AwaitEnd(uint64_t epoch, const absl::Status& status) const;
  // Of the GPU, as the first process found it.
  const std::string& device_uuid() const { return device_uuid_; }
  const std::string& device_name() const { return device_name_; }

  // All calls: UNAVAILABLE (DEVICE_AGENT_LOST) when the agent is gone or goes
  // meanwhile, FAILED_PRECONDITION (STALE_EPOCH) when `epoch` is not its
  // epoch, DEADLINE_EXCEEDED (DEVICE_AGENT_HUNG) when there is no answer: then
  // it is killed, and started again.

  // Except that who looks kills nobody: the runtime may hold a question up for
  // as long as it pins or opens memory. RESOURCE_EXHAUSTED (AGENT_BUSY): it has
  // not answered the question before.
  absl::StatusOr<AgentUsage> GetUsage(absl::Duration deadline);
  // An allocation of another process, by what DeviceHandle::Encode gave. The
  // errors of ImportCache::Acquire.
  absl::StatusOr<uint64_t> Open(uint64_t epoch, const std::string& handle,
                                bool writable, absl::Duration deadline);
  absl::Status Close(uint64_t epoch, uint64_t import, absl::Duration deadline);
  // [offset, offset + bytes) of a file as host memory; offset is that of a
  // page.
  absl::StatusOr<uint64_t> MapHost(uint64_t epoch, int fd, int64_t offset,
                                   int64_t bytes, absl::Duration deadline);
  absl::Status UnmapHost(uint64_t epoch, uint64_t host,
                         absl::Duration deadline);
  // `on_frames`: as in PackRequest; on the caller's thread, and nobody else
  // waits for it. The deadline does not count what it takes. May be null.
  absl::StatusOr<Digest> Pack(
      uint64_t epoch, const AgentPack& pack,
      std::function<void(int64_t first, int64_t last,
                         absl::Span<const Digest> digests)>
          on_frames,
      absl::Duration deadline);
  absl::Status Copy(uint64_t epoch, absl::Span<const AgentCopy> copies,
                    absl::Duration deadline);
  // Of all pieces, which are read and go nowhere.
  absl::StatusOr<Digest> DigestOf(uint64_t epoch, const AgentPack& pack,
                                  absl::Duration deadline);
  // Of those of its frames that it names, one for each.
  absl::StatusOr<std::vector<Digest>> DigestFrames(uint64_t epoch,
                                                   const AgentPack& pack,
                                                   absl::Duration deadline);
  // At most kMaxReadBytes.
  static constexpr int64_t kMaxReadBytes = 1 << 20;
  absl::StatusOr<std::string> ReadBytes(uint64_t epoch, const AgentPlace& from,
                                        int64_t bytes, absl::Duration deadline);

  // Memory of the GPU that is there until it is freed, or this epoch ends. The
  // errors of CudaMemory::Allocate.
  struct StorePart {
    uint64_t id = 0;  // for an AgentPlace
    // For host memory to import, writable: the control of the memory
    // (segment_control.h).
    MemoryTicket control;
  };
  absl::StatusOr<StorePart> MakeStore(uint64_t epoch, int64_t bytes,
                                      int generation_slots,
                                      const std::string& name,
                                      absl::Duration deadline);
  // It is given back when nobody has it open any more.
  absl::Status FreeStore(uint64_t epoch, uint64_t id, absl::Duration deadline);

  // ---- Ends of edges over NCCL (agent_channel.h) ----

  // As tcp::PayloadChannel has them.
  absl::StatusOr<uint64_t> NewChannel(uint64_t epoch, const std::string& peer,
                                      absl::Duration deadline);
  absl::StatusOr<std::string> ChannelOffer(uint64_t epoch, uint64_t channel,
                                           absl::Duration deadline);
  absl::StatusOr<tcp::PayloadChannel::Acceptance> ChannelAccept(
      uint64_t epoch, uint64_t channel, const std::string& offer,
      absl::Duration deadline);
  absl::StatusOr<bool> ChannelAnswered(uint64_t epoch, uint64_t channel,
                                       const std::string& answer,
                                       absl::Duration deadline);
  // `stopped` ends them early, in bounded time.
  absl::Status ChannelConnect(uint64_t epoch, uint64_t channel,
                              absl::Duration timeout,
                              const std::function<bool()>& stopped);
  absl::Status ChannelMove(uint64_t epoch, uint64_t channel, bool send,
                           absl::Span<const AgentPart> parts,
                           absl::Duration timeout,
                           const std::function<bool()>& stopped);
  // `well`: it was finished.
  absl::Status EndChannel(uint64_t epoch, uint64_t channel, bool well,
                          absl::Duration deadline);

 private:
  struct Call {
    std::deque<AgentPacket> frames;  // that the caller has not looked at
    bool done = false;
    absl::Status status;
    std::string answer;  // after the status
  };

  explicit DeviceAgent(Options options) : options_(std::move(options)) {}

  // One life of a process: from its start to its end.
  absl::Status StartProcess(uint64_t epoch);
  absl::Status Spawn(uint64_t epoch);
  void Supervise();
  void Read(int socket);
  // Everything that waits for it is told `why`.
  void EndProcess(const absl::Status& why);

  // What becomes of an agent that does not answer in time.
  enum class Silence { kIsFatal, kIsToldOnly };

  // epoch 0: whichever runs.
  absl::StatusOr<std::string> Ask(
      uint64_t epoch, AgentMessage type, const std::string& payload, int fd,
      absl::Duration deadline,
      std::function<void(const AgentPacket&)> on_frames = nullptr,
      const std::function<bool()>& stopped = nullptr, uint64_t channel = 0,
      Silence silence = Silence::kIsFatal);

  const Options options_;
  std::string device_uuid_, device_name_;  // constant after Start

  mutable absl::Mutex mutex_;
  absl::Mutex send_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time end_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  uint64_t starts_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none is ready
  uint64_t process_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = 0;
  int socket_ ABSL_GUARDED_BY(mutex_) = -1;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;  // the reader has seen its end
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Call*> calls_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;  // of the process that runs
  std::thread supervisor_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_DEVICE_AGENT_H_
