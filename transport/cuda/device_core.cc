#include "transport/cuda/device_core.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/nvml.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// How long closing waits for copies to end. They may never all end.
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kRetry = absl::Milliseconds(20);

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceCore>> DeviceCore::Create(
    const DeviceInfo& device, const Options& options) {
  std::shared_ptr<DeviceCore> core(new DeviceCore(device, options));
  // Before the first call that makes a context.
  const absl::StatusOr<std::unique_ptr<Nvml>> nvml = Nvml::Open();
  const auto look = [&]() -> absl::StatusOr<Nvml::Memory> {
    if (!nvml.ok()) return nvml.status();
    return (*nvml)->MemoryOf(device.uuid);
  };
  const absl::StatusOr<Nvml::Memory> before = look();
  absl::Status status = core->Use();
  // Where setting the device alone made none yet.
  if (status.ok()) status = CheckCuda(cudaFree(nullptr), "cudaFree");
  if (!status.ok()) return status;
  if (before.ok()) {
    const absl::StatusOr<Nvml::Memory> after = look();
    if (after.ok()) core->context_bytes_ = ContextBytes(*before, *after);
  } else {
    LOG(WARNING) << "what a context takes of " << device.uuid
                 << " is not known: " << before.status().message();
  }
  core->closer_ = std::thread([core = core.get()] { core->Close(); });
  return core;
}

DeviceCore::DeviceCore(const DeviceInfo& device, const Options& options)
    : device_(device), options_(options) {}

DeviceCore::~DeviceCore() {
  Finish(kPatience);
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (closer_.joinable()) closer_.join();
  absl::MutexLock lock(&mutex_);
  // A lane that was not given back has work that never ended.
  if (!failed_.ok() || cudaSetDevice(device_.ordinal) != cudaSuccess) return;
  for (Lane& lane : lanes_) {
    for (cudaEvent_t event : lane.events) cudaEventDestroy(event);
    if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
    cudaFreeHost(lane.host);
    cudaFree(lane.device);
  }
}

absl::Status DeviceCore::Use() {
  {
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return failed_;
  }
  const absl::Status status =
      CheckCuda(cudaSetDevice(device_.ordinal), "cudaSetDevice");
  if (ReasonOf(status) == "DEVICE_FAULT") Fail(status);
  return status;
}

void DeviceCore::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (failed_.ok()) {
    failed_ = status;
    LOG(ERROR) << device_.uuid << ": " << status.message();
  }
}

void DeviceCore::AddRange(const void* base, int64_t bytes, Place place,
                          bool writable, std::weak_ptr<const void> owner) {
  absl::MutexLock lock(&mutex_);
  ranges_[reinterpret_cast<uint64_t>(base)] = {bytes, place, writable,
                                               std::move(owner)};
}

void DeviceCore::RemoveRange(const void* base) {
  absl::MutexLock lock(&mutex_);
  const auto at = ranges_.find(reinterpret_cast<uint64_t>(base));
  // The address may have been opened again meanwhile.
  if (at != ranges_.end() && at->second.owner.expired()) ranges_.erase(at);
}

absl::StatusOr<DeviceCore::Pinned> DeviceCore::Pin(const void* pointer,
                                                   int64_t bytes,
                                                   bool for_writing) const {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  absl::MutexLock lock(&mutex_);
  auto at = ranges_.upper_bound(address);
  if (at != ranges_.begin()) {
    --at;
    const Range& range = at->second;
    const uint64_t offset = address - at->first;
    if (bytes >= 0 && offset <= static_cast<uint64_t>(range.bytes) &&
        static_cast<uint64_t>(bytes) <=
            static_cast<uint64_t>(range.bytes) - offset) {
      if (for_writing && !range.writable) {
        return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                         "the destination was given to be read only");
      }
      Pinned pinned;
      pinned.place = range.place;
      pinned.owner = range.owner.lock();
      if (pinned.owner != nullptr) return pinned;
    }
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                   absl::StrCat(bytes, " bytes at ", absl::Hex(address),
                                " lie in no memory that this process has of ",
                                device_.uuid, ", or no longer"));
}

absl::StatusOr<DeviceCore::LaneLease> DeviceCore::TakeLane() {
  absl::StatusOr<std::vector<LaneLease>> lanes = TakeLanes(1);
  if (!lanes.ok()) return lanes.status();
  return std::move(lanes->front());
}

absl::StatusOr<std::vector<DeviceCore::LaneLease>> DeviceCore::TakeLanes(
    int count) {
  CHECK_LE(count, options_.lanes);
  absl::Status status = Use();
  if (!status.ok()) return status;
  std::vector<LaneLease> leases;
  absl::MutexLock lock(&mutex_);
  const auto available = [this, count]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return static_cast<int>(free_lanes_.size()) + options_.lanes -
                   static_cast<int>(lanes_.size()) >=
               count ||
           !failed_.ok();
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&available),
                               options_.stall_deadline)) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, "DEVICE_BUSY",
        absl::StrCat("all ", options_.lanes, " streams of ", device_.uuid,
                     " are at work, for ",
                     absl::FormatDuration(options_.stall_deadline), " now"));
  }
  if (!failed_.ok()) return failed_;
  while (static_cast<int>(free_lanes_.size()) < count) {
    lanes_.emplace_back();
    status = CheckCuda(
        cudaStreamCreateWithFlags(&lanes_.back().stream, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
    if (!status.ok()) {
      lanes_.pop_back();
      return status;
    }
    free_lanes_.push_back(&lanes_.back());
  }
  for (int i = 0; i < count; ++i) {
    leases.emplace_back(this, free_lanes_.back());
    free_lanes_.pop_back();
    ++active_;
  }
  return leases;
}

void DeviceCore::GiveBack(Lane* lane) {
  // After an error its stream may still be at work on the lane's scratch.
  const cudaError_t state = cudaStreamQuery(lane->stream);
  if (state == cudaErrorNotReady) (void)Wait(*lane);
  absl::MutexLock lock(&mutex_);
  --active_;
  if (failed_.ok()) free_lanes_.push_back(lane);
}

absl::Status DeviceCore::Reserve(Lane* lane, int64_t host_bytes,
                                 int64_t device_bytes) {
  const auto grown = [](int64_t now, int64_t wanted) {
    int64_t bytes = std::max<int64_t>(now, 256 << 10);
    while (bytes < wanted) bytes *= 2;
    return bytes;
  };
  if (lane->host_bytes < host_bytes) {
    const int64_t bytes = grown(lane->host_bytes, host_bytes);
    void* fresh = nullptr;
    const absl::Status status =
        CheckCuda(cudaMallocHost(&fresh, bytes), "cudaMallocHost");
    if (!status.ok()) return status;
    Later([old = lane->host] { cudaFreeHost(old); });
    lane->host = static_cast<char*>(fresh);
    lane->host_bytes = bytes;
  }
  if (lane->device_bytes < device_bytes) {
    const int64_t bytes = grown(lane->device_bytes, device_bytes);
    void* fresh = nullptr;
    const absl::Status status =
        CheckCuda(cudaMalloc(&fresh, bytes), "cudaMalloc");
    if (!status.ok()) return status;
    Later([old = lane->device] { cudaFree(old); });
    scratch_bytes_ += bytes - lane->device_bytes;
    lane->device = static_cast<char*>(fresh);
    lane->device_bytes = bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<cudaEvent_t> DeviceCore::Event(Lane* lane, size_t index) {
  while (lane->events.size() <= index) {
    cudaEvent_t event = nullptr;
    const absl::Status status =
        CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                  "cudaEventCreateWithFlags");
    if (!status.ok()) return status;
    lane->events.push_back(event);
  }
  return lane->events[index];
}

absl::Status DeviceCore::WaitUntil(const std::function<int()>& query,
                                   const char* what) {
  const absl::Time start = absl::Now();
  while (true) {
    const auto state = static_cast<cudaError_t>(query());
    if (state == cudaSuccess) return absl::OkStatus();
    if (state != cudaErrorNotReady) {
      const absl::Status status = CheckCuda(state, what);
      if (ReasonOf(status) == "DEVICE_FAULT") Fail(status);
      return status;
    }
    const absl::Duration waited = absl::Now() - start;
    if (waited > options_.stall_deadline) {
      const absl::Status status = MakeError(
          absl::StatusCode::kDeadlineExceeded, "DEVICE_STALLED",
          absl::StrCat("work on ", device_.uuid, " has not ended for ",
                       absl::FormatDuration(options_.stall_deadline),
                       "; the process that gave it must be started again"));
      Fail(status);
      return status;
    }
    // Most work is short; what is not costs no core.
    if (waited < absl::Microseconds(50)) {
      std::this_thread::yield();
    } else {
      absl::SleepFor(std::min(waited / 20, absl::Microseconds(500)));
    }
  }
}

absl::Status DeviceCore::Wait(const Lane& lane) {
  return WaitUntil([&lane] { return int{cudaStreamQuery(lane.stream)}; },
                   "cudaStreamQuery");
}

absl::Status DeviceCore::WaitEvent(cudaEvent_t event) {
  return WaitUntil([event] { return int{cudaEventQuery(event)}; },
                   "cudaEventQuery");
}

void DeviceCore::AddClosing(std::function<void()> close) {
  closings_.push_back({std::move(close), absl::Now(), ++given_});
}

void DeviceCore::Later(std::function<void()> close) {
  absl::MutexLock lock(&mutex_);
  AddClosing(std::move(close));
}

void DeviceCore::LaterWhen(std::function<bool()> ready,
                           std::function<void()> close) {
  absl::MutexLock lock(&mutex_);
  held_.push_back({std::move(ready), std::move(close)});
  ++held_count_;
  ask_ = true;
}

bool DeviceCore::Drain(absl::Duration deadline) {
  absl::MutexLock lock(&mutex_);
  const uint64_t until = given_;
  const auto done = [this, until]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closed_ >= until || !failed_.ok();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&done), deadline);
  return closed_ >= until;
}

void DeviceCore::Finish(absl::Duration deadline) {
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return (closed_ == given_ && held_count_ == 0) || !failed_.ok();
  };
  mutex_.AwaitWithTimeout(absl::Condition(&done), deadline);
  if (closed_ == given_ && held_count_ == 0) return;
  given_up_ = true;
  LOG(WARNING) << device_.uuid << ": "
               << static_cast<uint64_t>(held_count_) + given_ - closed_
               << " allocations are still open elsewhere, or in use, and stay "
                  "until this process ends";
  closings_.clear();
  held_.clear();
  held_count_ = 0;
}

void DeviceCore::Close() {
  cudaSetDevice(device_.ordinal);
  while (true) {
    std::list<Held> asked;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || ask_ || (!closings_.empty() && active_ == 0);
      };
      // Looks again now and then: patience ends without anybody's doing, and so
      // does what others hold.
      mutex_.AwaitWithTimeout(absl::Condition(&due),
                              held_.empty() ? absl::Seconds(1) : kRetry);
      if (stopping_) return;
      ask_ = false;
      asked.swap(held_);
    }
    std::list<Held> ready;
    for (auto at = asked.begin(); at != asked.end();) {
      const auto next = std::next(at);
      if (at->ready()) ready.splice(ready.end(), asked, at);
      at = next;
    }
    std::list<Closing> now;
    {
      absl::MutexLock lock(&mutex_);
      if (!given_up_) {
        held_.splice(held_.begin(), asked);
        held_count_ -= static_cast<int>(ready.size());
        // From here on, and not before, it waits for copies to end.
        for (Held& held : ready) AddClosing(std::move(held.close));
      }
      if (!closings_.empty() &&
          (active_ == 0 || absl::Now() - closings_.front().since > kPatience))
        now.swap(closings_);
    }
    for (Closing& closing : now) closing.close();
    if (now.empty()) continue;
    absl::MutexLock lock(&mutex_);
    closed_ = now.back().number;
  }
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
