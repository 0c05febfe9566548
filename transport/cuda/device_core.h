// What everything on one GPU in one process shares: which addresses may be
// touched, streams, and a thread for what would hold up everybody else.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_CORE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_CORE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
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
#include "transport/cuda/device.h"

namespace weightsync {
namespace transport {
namespace cuda {

// A stream, and memory on both sides for small things that go with its work.
struct Lane {
  cudaStream_t stream = nullptr;
  char* host = nullptr;  // pinned
  int64_t host_bytes = 0;
  char* device = nullptr;
  int64_t device_bytes = 0;
  std::vector<cudaEvent_t> events;
};

// Thread-safe. Always held by shared_ptr.
class DeviceCore : public std::enable_shared_from_this<DeviceCore> {
 public:
  struct Options {
    // An operation that takes longer is given up, and with it the process: it
    // may never end.
    absl::Duration stall_deadline = absl::Seconds(60);
    int lanes = 4;
  };
  static absl::StatusOr<std::shared_ptr<DeviceCore>> Create(
      const DeviceInfo& device, const Options& options);
  ~DeviceCore();

  const DeviceInfo& device() const { return device_; }
  const Options& options() const { return options_; }

  // Makes the GPU the current one of this thread; the error that stays, once
  // the context is lost or an operation has stalled.
  absl::Status Use();

  // ---- Addresses ----

  enum class Place { kDevice, kPinnedHost };
  // From now on [base, base + bytes) may be touched while `owner` can be
  // locked.
  void AddRange(const void* base, int64_t bytes, Place place, bool writable,
                std::weak_ptr<const void> owner);
  // After its owner is gone.
  void RemoveRange(const void* base);
  // Which range [pointer, pointer + bytes) lies in, and something that keeps it
  // alive. INVALID_ARGUMENT (BAD_COPY): in none, or not to be written to.
  struct Pinned {
    Place place = Place::kDevice;
    std::shared_ptr<const void> owner;
  };
  absl::StatusOr<Pinned> Pin(const void* pointer, int64_t bytes,
                             bool for_writing) const;

  // ---- Work ----

  // A lane for one call. Gives it back at the end, when its work has ended.
  class LaneLease {
   public:
    LaneLease(DeviceCore* core, Lane* lane) : core_(core), lane_(lane) {}
    ~LaneLease() {
      if (core_ != nullptr) core_->GiveBack(lane_);
    }
    LaneLease(LaneLease&& other) : core_(other.core_), lane_(other.lane_) {
      other.core_ = nullptr;
    }
    Lane* operator->() const { return lane_; }
    Lane* get() const { return lane_; }

   private:
    DeviceCore* core_;
    Lane* lane_;
  };
  absl::StatusOr<LaneLease> TakeLane();
  // Several, all at once: who waited for a second one while it held a first
  // could wait for others that do the same. REQUIRES: count <= options().lanes.
  // Both: DEADLINE_EXCEEDED (DEVICE_BUSY) when there are none for a stall
  // deadline. It is not stalled: who has them would have said so.
  absl::StatusOr<std::vector<LaneLease>> TakeLanes(int count);
  // At least so many bytes of scratch on each side. RESOURCE_EXHAUSTED
  // (NO_DEVICE_MEMORY).
  absl::Status Reserve(Lane* lane, int64_t host_bytes, int64_t device_bytes);
  absl::StatusOr<cudaEvent_t> Event(Lane* lane, size_t index);

  // Until all work of the lane has ended. DEADLINE_EXCEEDED (DEVICE_STALLED):
  // nothing more can be done with this process.
  absl::Status Wait(const Lane& lane);
  // Until the event's.
  absl::Status WaitEvent(cudaEvent_t event);

  // ---- What waits for the whole GPU ----

  // Calls `close` on a thread of its own, when no copy is under way or after a
  // while.
  void Later(std::function<void()> close);
  // As Later, from when `ready` has returned true: it is asked again and again,
  // on that thread, and must be quick. Until then it holds up nobody.
  void LaterWhen(std::function<bool()> ready, std::function<void()> close);
  // Waits for what was given to Later until now, and not for what others hold.
  // False: it is not done yet, and will be.
  bool Drain(absl::Duration deadline);
  // For an end: waits for everything; what is not done by then never is.
  void Finish(absl::Duration deadline);

  int64_t scratch_bytes() const { return scratch_bytes_; }
  // What the context took of the GPU as it was made here; 0 where there was one
  // already, and where nobody can tell: then there is no NVML.
  int64_t context_bytes() const { return context_bytes_; }

 private:
  struct Range {
    int64_t bytes;
    Place place;
    bool writable;
    std::weak_ptr<const void> owner;
  };
  struct Closing {
    std::function<void()> close;
    absl::Time since;
    uint64_t number;
  };
  struct Held {
    std::function<bool()> ready;
    std::function<void()> close;
  };

  DeviceCore(const DeviceInfo& device, const Options& options);
  void GiveBack(Lane* lane);
  void AddClosing(std::function<void()> close)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitUntil(const std::function<int()>& query, const char* what);
  void Fail(const absl::Status& status);
  void Close();

  const DeviceInfo device_;
  const Options options_;
  std::atomic<int64_t> scratch_bytes_{0};
  int64_t context_bytes_ = 0;  // constant after Create

  mutable absl::Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Range> ranges_ ABSL_GUARDED_BY(mutex_);
  std::list<Lane> lanes_ ABSL_GUARDED_BY(mutex_);
  std::vector<Lane*> free_lanes_ ABSL_GUARDED_BY(mutex_);
  int active_ ABSL_GUARDED_BY(mutex_) = 0;
  // In the order of their numbers; all up to closed_ have been closed.
  std::list<Closing> closings_ ABSL_GUARDED_BY(mutex_);
  uint64_t given_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t closed_ ABSL_GUARDED_BY(mutex_) = 0;
  // Not ready yet, and how many there are, with those that are being asked.
  std::list<Held> held_ ABSL_GUARDED_BY(mutex_);
  int held_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ask_ ABSL_GUARDED_BY(mutex_) = false;  // there is a new one
  bool given_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread closer_;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_DEVICE_CORE_H_
