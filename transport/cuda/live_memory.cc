#include "transport/cuda/live_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kBufferBytes = 32 << 20;

// The same copy, to or from `dense`, where its bytes follow one another.
CopyTask ToDense(const CopyTask& task, char* dense) {
  CopyTask to = task;
  to.dst = dense;
  int64_t stride = to.run_bytes;
  for (size_t d = to.dims.size(); d-- > 0;) {
    to.dims[d].dst_stride = stride;
    stride *= to.dims[d].extent;
  }
  return to;
}
CopyTask FromDense(const CopyTask& task, const char* dense) {
  CopyTask from = task;
  from.src = dense;
  int64_t stride = from.run_bytes;
  for (size_t d = from.dims.size(); d-- > 0;) {
    from.dims[d].src_stride = stride;
    stride *= from.dims[d].extent;
  }
  return from;
}

}  // namespace

// An arena of the daemon's, for as long as it is mapped.
class LiveMemory::PinnedSegment final : public Segment {
 public:
  PinnedSegment(std::shared_ptr<ProcessGpu> gpu, std::unique_ptr<Segment> base)
      : gpu_(std::move(gpu)), base_(std::move(base)) {
    const absl::Status status =
        gpu_->Pin(base_->data(), base_->bytes(), !base_->writable());
    pinned_ = status.ok();
    LOG_IF(WARNING, !pinned_)
        << "memory of the daemon cannot be pinned, and copies from it to "
        << gpu_->uuid() << " will be slower: " << status;
  }
  ~PinnedSegment() override {
    if (pinned_) gpu_->Unpin(base_->data());
  }

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
  const std::shared_ptr<ProcessGpu> gpu_;
  const std::unique_ptr<Segment> base_;
  bool pinned_ = false;
};

LiveMemory::~LiveMemory() {
  absl::MutexLock lock(&buffer_mutex_);
  if (buffer_ == nullptr) return;
  if (buffer_pinned_) gpus_[0]->Unpin(buffer_);
  munmap(buffer_, kBufferBytes);
}

absl::Status LiveMemory::AddRange(const void* data, int64_t bytes) {
  const absl::StatusOr<std::shared_ptr<ProcessGpu>> gpu = ProcessGpu::Of(data);
  if (!gpu.ok()) return gpu.status();
  if (std::find(gpus_.begin(), gpus_.end(), *gpu) == gpus_.end())
    gpus_.push_back(*gpu);
  // Tied tensors lie in one another: what touches becomes one range.
  const char* begin = static_cast<const char*>(data);
  const char* end = begin + bytes;
  auto at = ranges_.upper_bound(begin);
  if (at != ranges_.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second.bytes >= begin) at = before;
  }
  while (at != ranges_.end() && at->first <= end) {
    // Memory of two GPUs is never adjacent: allocations have gaps.
    begin = std::min(begin, at->first);
    end = std::max(end, at->first + at->second.bytes);
    at = ranges_.erase(at);
  }
  ranges_[begin] = {end - begin, *gpu};
  return absl::OkStatus();
}

ProcessGpu* LiveMemory::GpuOf(const void* address) const {
  const char* const at = static_cast<const char*>(address);
  auto range = ranges_.upper_bound(at);
  if (range == ranges_.begin()) return nullptr;
  --range;
  return at < range->first + range->second.bytes ? range->second.gpu.get()
                                                 : nullptr;
}

absl::StatusOr<std::unique_ptr<Segment>> LiveMemory::Import(
    const MemoryTicket& ticket, absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<Segment>> base =
      host_->Import(ticket, timeout);
  // Pinned memory is portable: by one GPU for all.
  if (!base.ok() || gpus_.empty()) return base;
  return std::unique_ptr<Segment>(
      std::make_unique<PinnedSegment>(gpus_[0], *std::move(base)));
}

absl::Status LiveMemory::Copy(absl::Span<const CopyTask> tasks,
                              const CopyOptions& options, Digest* digest) {
  std::vector<CopyTask> here;
  std::map<ProcessGpu*, std::vector<CopyTask>> there;
  std::vector<std::pair<ProcessGpu*, const CopyTask*>> through;
  for (const CopyTask& task : tasks) {
    const absl::Status status = task.Validate();
    if (!status.ok()) return status;
    if (task.bytes() == 0) continue;
    ProcessGpu* const from = GpuOf(task.src);
    ProcessGpu* const to = task.dst == nullptr ? nullptr : GpuOf(task.dst);
    if (from == nullptr && to == nullptr) {
      here.push_back(task);
      continue;
    }
    ProcessGpu* const gpu = to != nullptr ? to : from;
    if (digest != nullptr) {
      through.emplace_back(gpu, &task);
    } else if (task.dst != nullptr) {
      there[gpu].push_back(task);
    }
  }
  if (there.empty() && through.empty())
    return host_->Copy(tasks, options, digest);
  Digest sum;
  if (!here.empty()) {
    const absl::Status status =
        host_->Copy(here, options, digest == nullptr ? nullptr : &sum);
    if (!status.ok()) return status;
  }
  for (const auto& [gpu, of_gpu] : there) {
    const absl::Status status = gpu->Copy(of_gpu, copy_timeout_);
    if (!status.ok()) return status;
  }
  for (const auto& [gpu, task] : through) {
    const absl::Status status = CopyThrough(gpu, *task, options, &sum);
    if (!status.ok()) return status;
  }
  if (digest != nullptr) *digest += sum;
  return absl::OkStatus();
}

absl::Status LiveMemory::MakeBuffer() {
  if (buffer_ != nullptr) return absl::OkStatus();
  void* const data = mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (data == MAP_FAILED) {
    return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                          "NO_MEMORY_FOR_BUFFER",
                          "a buffer between host and GPU", errno);
  }
  buffer_ = static_cast<char*>(data);
  buffer_pinned_ = gpus_[0]->Pin(buffer_, kBufferBytes, false).ok();
  return absl::OkStatus();
}

absl::Status LiveMemory::CopyThrough(ProcessGpu* gpu, const CopyTask& task,
                                     const CopyOptions& options,
                                     Digest* digest) {
  absl::MutexLock lock(&buffer_mutex_);
  absl::Status status = MakeBuffer();
  if (!status.ok()) return status;
  const bool from_gpu = GpuOf(task.src) != nullptr;
  for (const CopyTask& part : SplitCopy(task, kBufferBytes)) {
    CopyTask in = ToDense(part, buffer_);
    CopyTask out = FromDense(part, buffer_);
    if (from_gpu) {
      status = gpu->Copy({in}, copy_timeout_);
      // Reads, and writes nothing where there is no destination.
      if (status.ok()) status = host_->Copy({out}, options, digest);
    } else {
      // What the digest is of is what is written: one look at the source.
      status = host_->Copy({in}, options, digest);
      if (status.ok()) status = gpu->Copy({out}, copy_timeout_);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LiveMemory::Read(const char* from, absl::Span<char> to) {
  ProcessGpu* const gpu = GpuOf(from);
  if (gpu == nullptr) return host_->Read(from, to);
  CopyTask task;
  task.src = from;
  task.dst = to.data();
  task.run_bytes = static_cast<int64_t>(to.size());
  return gpu->Copy({task}, copy_timeout_);
}

absl::Status LiveMemory::Write(absl::Span<const char> from, char* to) {
  ProcessGpu* const gpu = GpuOf(to);
  if (gpu == nullptr) return host_->Write(from, to);
  CopyTask task;
  task.src = from.data();
  task.dst = to;
  task.run_bytes = static_cast<int64_t>(from.size());
  return gpu->Copy({task}, copy_timeout_);
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
