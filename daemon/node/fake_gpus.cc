#include "daemon/node/fake_gpus.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace testing {

using transport::MakeError;

class FakeGpus::GpuSegment final : public transport::Segment {
 public:
  GpuSegment(FakeGpus* gpus, std::unique_ptr<transport::Segment> real,
             char* data, std::string device)
      : gpus_(gpus),
        real_(std::move(real)),
        data_(data),
        device_(std::move(device)) {}
  ~GpuSegment() override {
    {
      absl::MutexLock lock(&gpus_->mutex_);
      gpus_->ranges_.erase(data_);
    }
    munmap(data_, static_cast<size_t>(real_->bytes()));
  }
  transport::MemoryKind kind() const override {
    return transport::MemoryKind::kCuda;
  }
  char* data() const override { return data_; }
  int64_t bytes() const override { return real_->bytes(); }
  std::string device_uuid() const override { return device_; }
  bool writable() const override { return true; }
  int generation_slots() const override { return real_->generation_slots(); }
  uint64_t Generation(int slot) const override {
    return real_->Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return real_->AdvanceGeneration(slot);
  }

 private:
  FakeGpus* const gpus_;
  const std::unique_ptr<transport::Segment> real_;
  char* const data_;
  const std::string device_;
};

void FakeGpus::SetTensors(const void* data, int64_t bytes,
                          const std::string& device) {
  absl::MutexLock lock(&mutex_);
  ranges_[static_cast<const char*>(data)] = {bytes, device, nullptr, false};
}

void FakeGpus::ForgetTensors() {
  absl::MutexLock lock(&mutex_);
  for (auto it = ranges_.begin(); it != ranges_.end();) {
    it = it->second.real == nullptr ? ranges_.erase(it) : std::next(it);
  }
}

void FakeGpus::Lose(const std::string& device) {
  absl::MutexLock lock(&mutex_);
  for (auto& range : ranges_) {
    if (range.second.device == device && range.second.real != nullptr) {
      range.second.lost = true;
    }
  }
}

void FakeGpus::DamageCopies(int count) {
  absl::MutexLock lock(&mutex_);
  damage_ = count;
}

int64_t FakeGpus::device_bytes(const std::string& device) const {
  int64_t bytes = 0;
  absl::MutexLock lock(&mutex_);
  for (const auto& range : ranges_) {
    if (range.second.device == device && range.second.real != nullptr) {
      bytes += range.second.bytes;
    }
  }
  return bytes;
}

absl::StatusOr<std::unique_ptr<transport::Segment>> FakeGpus::Allocate(
    int64_t bytes, const transport::AllocateOptions& options) {
  if (options.device_uuid.empty()) return host_->Allocate(bytes, options);
  transport::AllocateOptions real_options = options;
  real_options.device_uuid.clear();
  auto real = host_->Allocate(bytes, real_options);
  if (!real.ok()) return real.status();
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(data != MAP_FAILED);
  absl::MutexLock lock(&mutex_);
  ranges_[static_cast<char*>(data)] = {bytes, options.device_uuid,
                                       (*real)->data(), false};
  return std::unique_ptr<transport::Segment>(std::make_unique<GpuSegment>(
      this, *std::move(real), static_cast<char*>(data), options.device_uuid));
}

absl::StatusOr<char*> FakeGpus::Find(const char* address,
                                     std::string* device) const {
  absl::MutexLock lock(&mutex_);
  auto at = ranges_.upper_bound(address);
  if (at != ranges_.begin()) {
    --at;
    const Range& range = at->second;
    if (address < at->first + range.bytes) {
      *device = range.device;
      if (range.lost) {
        return MakeError(absl::StatusCode::kUnavailable, "DEVICE_STORE_LOST",
                         absl::StrCat(range.device, " is lost"));
      }
      return range.real == nullptr ? const_cast<char*>(address)
                                   : range.real + (address - at->first);
    }
  }
  return const_cast<char*>(address);
}

std::string FakeGpus::DeviceOf(const char* address) const {
  std::string device;
  (void)Find(address, &device);
  return device;
}

absl::Status FakeGpus::Copy(absl::Span<const transport::CopyTask> tasks,
                            const transport::CopyOptions& options,
                            transport::Digest* digest) {
  std::vector<transport::CopyTask> real(tasks.begin(), tasks.end());
  std::string devices;
  int64_t crossed = 0;
  for (transport::CopyTask& task : real) {
    std::string from, to;
    auto src = Find(task.src, &from);
    if (!src.ok()) return src.status();
    if (task.has_blocks()) {
      const char* const blocks = *src + (task.blocks.src - task.src);
      task.blocks.src = blocks;
    }
    task.src = *src;
    if (task.dst != nullptr) {
      auto dst = Find(task.dst, &to);
      if (!dst.ok()) return dst.status();
      task.dst = *dst;
    }
    devices += from + to;
    if (task.dst != nullptr && from.empty() != to.empty())
      crossed += task.bytes();
  }
  absl::Status status = host_->Copy(real, options, digest);
  absl::MutexLock lock(&mutex_);
  crossed_bytes_ += crossed;
  if (status.ok() && !devices.empty() && damage_ > 0 && !real.empty() &&
      real[0].dst != nullptr) {
    --damage_;
    real[0].dst[real[0].run_bytes / 2] ^= 4;
  }
  return status;
}

absl::Status FakeGpus::Pack(const transport::PackRequest& request,
                            transport::PackResult* result) {
  transport::PackRequest real = request;
  std::string device;
  auto bucket = Find(request.bucket, &device);
  if (!bucket.ok()) return bucket.status();
  real.bucket = *bucket;
  for (const transport::PackPiece& piece : request.pieces) {
    if (device.empty() || piece.copy.bytes() == 0) continue;
    if (DeviceOf(piece.copy.src) != device) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_DEVICE",
                       "the tensors are elsewhere");
    }
  }
  return host_->Pack(real, result);
}

absl::StatusOr<std::vector<transport::Digest>> FakeGpus::DigestFrames(
    const transport::FrameDigestRequest& request) {
  // As they are packed again.
  std::vector<transport::PackPiece> pieces(request.pieces.begin(),
                                           request.pieces.end());
  int64_t end = 0;
  for (transport::PackPiece& piece : pieces) {
    std::string device;
    auto real = Find(piece.copy.src, &device);
    if (!real.ok()) return real.status();
    if (device.empty()) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                       "host memory is not for a GPU to digest");
    }
    piece.copy.src = *real;
    end = piece.offset + piece.copy.bytes();
  }
  std::vector<transport::Digest> digests(request.frames.size());
  if (pieces.empty()) return digests;
  std::string again(static_cast<size_t>(end), '\0');
  transport::PackRequest pack;
  pack.bucket = &again[0];
  pack.bucket_bytes = end;
  pack.frame_bytes = request.frame_bytes;
  pack.pieces = pieces;
  transport::PackResult result;
  absl::Status status = host_->Pack(pack, &result);
  if (!status.ok()) return status;
  for (size_t i = 0; i < digests.size(); ++i) {
    if (request.frames[i] < result.frames.size()) {
      digests[i] = result.frames[request.frames[i]];
    }
  }
  return digests;
}

// ---- Channels ----

namespace {

// What both ends of an edge have.
struct Pipe {
  absl::Mutex mutex;
  std::string bytes ABSL_GUARDED_BY(mutex);
};

std::shared_ptr<Pipe> PipeOf(const std::string& offer) {
  static absl::Mutex* const mutex = new absl::Mutex;
  static auto* const pipes = new std::map<std::string, std::weak_ptr<Pipe>>;
  absl::MutexLock lock(mutex);
  std::shared_ptr<Pipe> pipe = (*pipes)[offer].lock();
  if (pipe == nullptr) {
    pipe = std::make_shared<Pipe>();
    (*pipes)[offer] = pipe;
  }
  return pipe;
}

}  // namespace

class FakeGpus::Channel final : public transport::tcp::PayloadChannel {
 public:
  explicit Channel(FakeGpus* gpus) : gpus_(gpus) {}

  absl::StatusOr<std::string> Offer() override {
    static std::atomic<int> count{0};
    const std::string offer = absl::StrCat("edge ", count++);
    pipe_ = PipeOf(offer);
    return offer;
  }
  absl::StatusOr<Acceptance> Accept(absl::string_view offer) override {
    pipe_ = PipeOf(std::string(offer));
    return Acceptance();
  }
  absl::StatusOr<bool> Answered(absl::string_view) override { return true; }
  absl::Status Connect(absl::Duration, const Stopped&) override {
    return absl::OkStatus();
  }
  absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                    absl::Duration, const Stopped&) override {
    for (const absl::Span<const char> part : parts) {
      auto real = Here(part.data(), part.size());
      if (!real.ok()) return real.status();
      absl::MutexLock lock(&pipe_->mutex);
      pipe_->bytes.append(*real, part.size());
    }
    return absl::OkStatus();
  }
  absl::Status Receive(absl::Span<const absl::Span<char>> parts,
                       absl::Duration timeout,
                       const Stopped& stopped) override {
    const absl::Time until = absl::Now() + timeout;
    for (const absl::Span<char> part : parts) {
      auto real = Here(part.data(), part.size());
      if (!real.ok()) return real.status();
      absl::MutexLock lock(&pipe_->mutex);
      auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(pipe_->mutex) {
        return pipe_->bytes.size() >= part.size();
      };
      while (!pipe_->mutex.AwaitWithTimeout(absl::Condition(&there),
                                            absl::Milliseconds(10))) {
        if (stopped()) return absl::CancelledError("the group ends");
        if (absl::Now() > until) return absl::UnavailableError("nothing came");
      }
      memcpy(*real, pipe_->bytes.data(), part.size());
      pipe_->bytes.erase(0, part.size());
    }
    return absl::OkStatus();
  }
  void Finish() override {}

 private:
  absl::StatusOr<char*> Here(const char* address, size_t bytes) {
    std::string device;
    auto real = gpus_->Find(address, &device);
    if (real.ok() && device.empty()) {
      absl::MutexLock lock(&gpus_->mutex_);
      gpus_->crossed_bytes_ += static_cast<int64_t>(bytes);
    }
    return real;
  }

  FakeGpus* const gpus_;
  std::shared_ptr<Pipe> pipe_;
};

transport::tcp::PayloadChannelFactory FakeGpus::Channels() {
  return
      [this](const std::string&)
          -> absl::StatusOr<std::unique_ptr<transport::tcp::PayloadChannel>> {
        absl::MutexLock lock(&mutex_);
        if (refuse_channels_) {
          return MakeError(absl::StatusCode::kUnavailable, "CHANNEL_RESTS",
                           "no channel can be made");
        }
        return std::unique_ptr<transport::tcp::PayloadChannel>(
            new Channel(this));
      };
}

void FakeGpus::RefuseChannels() {
  absl::MutexLock lock(&mutex_);
  refuse_channels_ = true;
}

void FakeGpus::DamageSegments(const std::string& device) {
  absl::MutexLock lock(&mutex_);
  for (auto& range : ranges_) {
    if (range.second.device != device || range.second.real == nullptr) continue;
    for (int64_t at = 0; at < range.second.bytes; at += 4096)
      range.second.real[at] ^= 4;
  }
}

int64_t FakeGpus::crossed_bytes() const {
  absl::MutexLock lock(&mutex_);
  return crossed_bytes_;
}

absl::Status FakeGpus::Read(const char* from, absl::Span<char> to) {
  std::string device;
  auto real = Find(from, &device);
  if (!real.ok()) return real.status();
  return host_->Read(*real, to);
}

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
