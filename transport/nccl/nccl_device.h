// What all edges of one process on one GPU share.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_NCCL_DEVICE_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_NCCL_DEVICE_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "transport/nccl/kept_communicators.h"
#include "transport/nccl/nccl_library.h"

namespace weightsync {
namespace transport {
namespace nccl {

struct NcclOptions {
  std::string library;      // as NcclLibrary::Load
  std::string device_uuid;  // empty: the only one of the process
  // Of the GPU's SMs, for each operation: the rest is the trainer's or the
  // engine's.
  int max_ctas = 4;
  int cta_policy = 1;  // NCCL_CTA_POLICY_EFFICIENCY
  // Bytes move through a buffer of this size at each end of each edge, in its
  // two halves in turn.
  int64_t staging_bytes = 32 << 20;
  // A communicator takes tens of MiB of the GPU and, to be made, up to seconds:
  // as many are kept idle as a node usually has edges (two for each chain that
  // it is in), and for longer than from one step of a trainer to the next. At
  // rest it takes no SM.
  int most_kept = 16;
  absl::Duration keep_limit = absl::Hours(1);
  // How long a communicator that nothing is wrong with may take to come to its
  // end in good order. One that takes longer is aborted, as all others are.
  absl::Duration finalize_deadline = absl::Seconds(1);
  // An end that takes longer never returns (an abort is seen to hang): then
  // this is called, once, and the process is expected to end.
  absl::Duration abort_deadline = absl::Seconds(5);
  std::function<void(const absl::Status&)> on_hung;
};

// Owns the library, streams, staging buffers and idle communicators.
// Thread-safe; outlives its channels.
//
// Communicators are kept. One that its edge has left in good order
// (nccl_channel .cc) waits here for the next edge between the same two agents
// in the same direction. Nobody needs to remember what the other end has: the
// sender offers one of its own by its unique id, with how much has been done on
// it, and the receiver takes it if it has it too, idle and well, with as much
// done. It may have received less: a send completes when NCCL has taken the
// bytes, and the next edge would receive them as its own. So one is used again
// only where both ends have done the same.
class NcclDevice {
 public:
  // FAILED_PRECONDITION: NCCL_MISSING, NCCL_TOO_OLD, NCCL_SETTING,
  // DRIVER_TOO_OLD, NO_DEVICE; NOT_FOUND (DEVICE_NOT_VISIBLE).
  static absl::StatusOr<std::unique_ptr<NcclDevice>> Create(
      const NcclOptions& options);
  // Ends all idle communicators at once, by abort: in bounded time, whether
  // their peers are there or not.
  ~NcclDevice();

  const NcclLibrary& library() const { return *library_; }
  const std::string& device_uuid() const { return uuid_; }
  // Communicators that were made and have not ended yet, and those among them
  // that are idle.
  int communicators() const;
  int idle_communicators() const;
  // Of the GPU's memory. In buffers: of channels, and of those that have ended.
  int64_t staging_bytes() const;
  // In communicators, idle ones too: an estimate, because NCCL does not say.
  int64_t communicator_bytes() const;

 private:
  friend class NcclChannel;

  // Streams and buffers are used again: to free is to wait for the whole GPU.
  struct Lane {
    // NCCL's operations, and copies between the staging buffer and where the
    // bytes belong: so that one goes on while the other does.
    cudaStream_t stream = nullptr, copies = nullptr;
    char* staging = nullptr;
    // Of each half: NCCL is done with it, and it has been copied.
    cudaEvent_t moved[2] = {}, copied[2] = {};
  };
  struct Ending {
    Communicator communicator;
    bool healthy;
  };

  explicit NcclDevice(const NcclOptions& options)
      : options_(options),
        kept_(static_cast<size_t>(options.most_kept), options.keep_limit) {}

  int64_t half_bytes() const { return options_.staging_bytes / 2; }
  // Of this object, among all: a number that its peers remember it by.
  uint64_t process() const { return process_; }

  // FAILED_PRECONDITION (NCCL_HUNG); the errors of CUDA.
  absl::StatusOr<Lane> TakeLane();
  void GiveBack(const Lane& lane);
  absl::Status MakeLane(Lane* lane);
  static void FreeLane(const Lane& lane);

  // Counts one that was made.
  void Made(const Communicator& made);
  // One for an edge to `peer`, well as far as NCCL can say; with `id` that one,
  // which is waited for where a channel is just about to give it back. Null
  // also where the GPU is lost or an end of NCCL hangs.
  // `stream` is any with nothing under way.
  absl::optional<Communicator> TakeKept(const std::string& peer, int rank,
                                        cudaStream_t stream,
                                        const ncclUniqueId* id = nullptr);
  // Its edge has left in good order, and nothing is under way on it.
  void Keep(Communicator communicator, cudaStream_t stream);
  // Ends it, on another thread.
  void Discard(Communicator communicator, bool healthy);
  // The peer's process is `process`: what was kept with another is ended.
  void PeerIs(const std::string& peer, int rank, uint64_t process);
  bool IsWell(ncclComm_t comm, cudaStream_t stream) const;
  void NoLongerUsed(const Communicator& communicator)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Ends it in bounded time: finalized and destroyed where it is `healthy` and
  // that can be done in time, aborted otherwise. False: it hangs, and so will
  // whatever follows.
  bool End(const Communicator& communicator, bool healthy);
  using Done = std::shared_ptr<absl::Notification>;
  Done BeginEnd(const Communicator& communicator, bool healthy) const;
  bool AwaitEnd(const Done& done, const Communicator& communicator,
                absl::Duration deadline);
  absl::Duration EndDeadline(bool healthy) const;
  void EndAll(const std::vector<Ending>& endings);
  // Of the thread that ends what was discarded or has not been used for long.
  void Reap();

  // Of the environment as NCCL has left it: its first call adds what stands in
  // /etc/nccl.conf, ~/.nccl.conf and the like. FAILED_PRECONDITION
  // (NCCL_SETTING).
  absl::Status CheckSettings();

  const NcclOptions options_;
  std::unique_ptr<NcclLibrary> library_;
  std::string uuid_;
  int ordinal_ = 0;
  uint64_t process_ = 0;

  mutable absl::Mutex mutex_;
  std::vector<Lane> free_ ABSL_GUARDED_BY(mutex_);
  int lanes_ ABSL_GUARDED_BY(mutex_) = 0;  // that were made
  int communicators_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t communicator_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  KeptCommunicators kept_ ABSL_GUARDED_BY(mutex_);
  // Of those that channels have.
  std::vector<ncclUniqueId> in_use_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ending> endings_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool hung_ ABSL_GUARDED_BY(mutex_) = false;
  // As they were last told.
  std::string settings_ ABSL_GUARDED_BY(mutex_);
  std::thread reaper_;
};

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_NCCL_DEVICE_H_
