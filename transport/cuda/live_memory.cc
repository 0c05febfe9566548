#include "transport/cuda/live_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/cuda/segment_control.h"
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

// The entry of `ranges` that `address` lies in, or its end.
template <typename Ranges>
auto Holder(const Ranges& ranges, const char* address) {
  auto range = ranges.upper_bound(address);
  if (range == ranges.begin()) return ranges.end();
  --range;
  return address < range->first + range->second.bytes ? range : ranges.end();
}

}  // namespace

// An arena of the daemon's, for as long as it is mapped.
class LiveMemory::PinnedSegment final : public Segment {
 public:
  PinnedSegment(LiveMemory* memory, std::shared_ptr<ProcessGpu> gpu,
                std::unique_ptr<Segment> base)
      : memory_(memory), gpu_(std::move(gpu)), base_(std::move(base)) {
    const absl::Status status =
        gpu_->Pin(base_->data(), base_->bytes(), !base_->writable());
    pinned_ = status.ok();
    LOG_IF(WARNING, !pinned_)
        << "memory of the daemon cannot be pinned, and copies from it to "
        << gpu_->uuid() << " will be slower: " << status;
    if (!pinned_) return;
    absl::MutexLock lock(&memory_->imported_mutex_);
    memory_->pinned_[base_->data()] = base_->bytes();
  }
  ~PinnedSegment() override {
    if (!pinned_) return;
    {
      absl::MutexLock lock(&memory_->imported_mutex_);
      memory_->pinned_.erase(base_->data());
    }
    gpu_->Unpin(base_->data());
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
  LiveMemory* const memory_;
  const std::shared_ptr<ProcessGpu> gpu_;
  const std::unique_ptr<Segment> base_;
  bool pinned_ = false;
};

// An arena of the daemon's on a GPU, for as long as it is open.
class LiveMemory::DeviceSegment final : public Segment {
 public:
  DeviceSegment(LiveMemory* memory, std::string device,
                std::unique_ptr<Segment> control, UniqueFd lock,
                std::vector<Opening> openings, int64_t bytes)
      : memory_(memory),
        device_(std::move(device)),
        control_(std::move(control)),
        lock_(std::make_shared<const UniqueFd>(std::move(lock))),
        openings_(std::move(openings)),
        data_(openings_[0].opened->data),
        bytes_(bytes) {
    absl::MutexLock guard(&memory_->imported_mutex_);
    // The same allocation may come by another name before this one goes.
    Imported& imported = memory_->imported_[data_];
    imported.bytes = std::max(imported.bytes, bytes_);
    imported.device = device_;
    imported.openings.clear();
    for (const Opening& opening : openings_)
      imported.openings.emplace_back(opening.gpu.get(), opening.opened->data);
    ++imported.segments;
  }
  ~DeviceSegment() override {
    {
      absl::MutexLock guard(&memory_->imported_mutex_);
      const auto at = memory_->imported_.find(data_);
      if (--at->second.segments == 0) memory_->imported_.erase(at);
    }
    // The lock goes when the last GPU has closed it, and not before: then it
    // may be freed.
    for (Opening& opening : openings_) {
      opening.opened = nullptr;
      opening.gpu->Later([lock = lock_] {});
    }
  }

  MemoryKind kind() const override { return MemoryKind::kCuda; }
  char* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }
  std::string device_uuid() const override { return device_; }
  bool writable() const override { return false; }
  int generation_slots() const override { return control_->generation_slots(); }
  uint64_t Generation(int slot) const override {
    return control_->Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return control_->AdvanceGeneration(slot);
  }

 private:
  LiveMemory* const memory_;
  const std::string device_;
  const std::unique_ptr<Segment> control_;
  std::shared_ptr<const UniqueFd> lock_;
  std::vector<Opening> openings_;
  char* const data_;
  const int64_t bytes_;
};

LiveMemory::~LiveMemory() {
  absl::MutexLock lock(&buffer_mutex_);
  if (buffer_ == nullptr) return;
  gpus_[0]->Unpin(buffer_);
  munmap(buffer_, kBufferBytes);
}

absl::Status LiveMemory::AddRange(const void* data, int64_t bytes) {
  const absl::StatusOr<std::shared_ptr<ProcessGpu>> gpu = ProcessGpu::Of(data);
  if (!gpu.ok()) return gpu.status();
  if (std::find(gpus_.begin(), gpus_.end(), *gpu) == gpus_.end()) {
    gpus_.push_back(*gpu);
    if (engine_ == Engine::kStands) (*gpu)->PrepareCopies(copy_timeout_);
  }
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

bool LiveMemory::AllReach(const std::string& device) const {
  return std::all_of(gpus_.begin(), gpus_.end(), [&device](const auto& gpu) {
    const std::vector<std::string>& peers = gpu->peers();
    return gpu->uuid() == device ||
           std::find(peers.begin(), peers.end(), device) != peers.end();
  });
}

std::vector<std::string> LiveMemory::device_uuids() const {
  std::vector<std::string> uuids;
  if (gpus_.empty()) return uuids;
  for (const auto& gpu : gpus_) {
    if (!AllReach(gpu->uuid())) return {};
    uuids.push_back(gpu->uuid());
  }
  for (const std::string& peer : gpus_[0]->peers()) {
    if (std::find(uuids.begin(), uuids.end(), peer) == uuids.end() &&
        AllReach(peer))
      uuids.push_back(peer);
  }
  return uuids;
}

ProcessGpu* LiveMemory::GpuOf(const void* address) const {
  const char* const at = static_cast<const char*>(address);
  const auto range = Holder(ranges_, at);
  if (range != ranges_.end()) return range->second.gpu.get();
  absl::MutexLock lock(&imported_mutex_);
  const auto imported = Holder(imported_, at);
  return imported == imported_.end() ? nullptr
                                     : imported->second.openings[0].first;
}

std::string LiveMemory::DeviceOf(const char* address) const {
  const auto range = Holder(ranges_, address);
  if (range != ranges_.end()) return range->second.gpu->uuid();
  absl::MutexLock lock(&imported_mutex_);
  const auto imported = Holder(imported_, address);
  return imported == imported_.end() ? "" : imported->second.device;
}

bool LiveMemory::LiesOn(const char* address, const ProcessGpu& gpu) const {
  const auto range = Holder(ranges_, address);
  if (range != ranges_.end()) return range->second.gpu.get() == &gpu;
  absl::MutexLock lock(&imported_mutex_);
  const auto imported = Holder(imported_, address);
  return imported != imported_.end() && imported->second.device == gpu.uuid();
}

const char* LiveMemory::SourceFor(const char* source,
                                  const ProcessGpu* gpu) const {
  const auto range = Holder(ranges_, source);
  if (range != ranges_.end())
    return range->second.gpu.get() == gpu ? source : nullptr;
  absl::MutexLock lock(&imported_mutex_);
  const auto imported = Holder(imported_, source);
  if (imported == imported_.end()) return nullptr;
  for (const auto& [opener, data] : imported->second.openings) {
    if (opener == gpu) return data + (source - imported->first);
  }
  return nullptr;
}

bool LiveMemory::CopiesStraight(const char* source, const char* target) const {
  const ProcessGpu* const gpu = GpuOf(target);
  return gpu != nullptr && SourceFor(source, gpu) != nullptr;
}

absl::StatusOr<std::vector<LiveMemory::Opening>> LiveMemory::Open(
    const DeviceHandle& handle) {
  std::vector<Opening> openings;
  if (handle.exporter == ThisProcess()) {
    // CUDA opens nothing in the process that made it; here the address is good
    // as it is, and its owner waits for the lock as for others.
    const auto gpu = std::find_if(
        gpus_.begin(), gpus_.end(), [&handle](const auto& candidate) {
          return candidate->uuid() == handle.device_uuid;
        });
    if (gpu == gpus_.end()) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "OWN_EXPORT",
          absl::StrCat("this process has made the memory itself, on ",
                       handle.device_uuid,
                       ", where this worker has no tensors: CUDA opens it in "
                       "other processes alone"));
    }
    const absl::Status there = (*gpu)->CheckStillThere(handle);
    if (!there.ok()) return there;
    auto own = std::make_shared<ProcessGpu::Opened>();
    own->data = reinterpret_cast<char*>(handle.base);
    own->bytes = handle.bytes;
    openings.push_back({*gpu, std::move(own)});
    return openings;
  }
  if (gpus_.empty() || !AllReach(handle.device_uuid)) {
    return MakeError(
        absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE",
        absl::StrCat("the memory lies on ", handle.device_uuid,
                     ", where this worker has no tensors, and to which not all "
                     "of its GPUs have a way"));
  }
  for (const std::shared_ptr<ProcessGpu>& gpu : gpus_) {
    absl::StatusOr<std::shared_ptr<const ProcessGpu::Opened>> opened =
        gpu->Open(handle);
    if (!opened.ok()) return opened.status();
    openings.push_back({gpu, *std::move(opened)});
  }
  return openings;
}

absl::StatusOr<std::unique_ptr<Segment>> LiveMemory::ImportDevice(
    const MemoryTicket& ticket, absl::Duration timeout) {
  MemoryTicket control_ticket = ticket;
  control_ticket.kind = MemoryKind::kHost;
  control_ticket.bytes = sizeof(SegmentControl);
  absl::StatusOr<std::unique_ptr<Segment>> control =
      host_->Import(control_ticket, timeout);
  if (!control.ok()) return control.status();
  const absl::StatusOr<DeviceHandle> handle =
      ReadSegmentControl(**control, ticket.bytes);
  if (!handle.ok()) return handle.status();
  // Before it is opened.
  absl::StatusOr<UniqueFd> lock = LockSegmentControl(**control);
  if (!lock.ok()) return lock.status();
  absl::StatusOr<std::vector<Opening>> openings = Open(*handle);
  if (!openings.ok()) return openings.status();
  return std::unique_ptr<Segment>(std::make_unique<DeviceSegment>(
      this, handle->device_uuid, *std::move(control), *std::move(lock),
      *std::move(openings), ticket.bytes));
}

absl::StatusOr<std::unique_ptr<Segment>> LiveMemory::Import(
    const MemoryTicket& ticket, absl::Duration timeout) {
  if (ticket.kind == MemoryKind::kCuda) return ImportDevice(ticket, timeout);
  absl::StatusOr<std::unique_ptr<Segment>> base =
      host_->Import(ticket, timeout);
  // Pinned memory is portable: by one GPU for all.
  if (!base.ok() || gpus_.empty()) return base;
  return std::unique_ptr<Segment>(
      std::make_unique<PinnedSegment>(this, gpus_[0], *std::move(base)));
}

bool LiveMemory::IsPinned(const char* data, int64_t bytes) const {
  absl::MutexLock lock(&imported_mutex_);
  auto range = pinned_.upper_bound(data);
  if (range == pinned_.begin()) return false;
  --range;
  return data - range->first <= range->second - bytes;
}

absl::Status LiveMemory::Copy(absl::Span<const CopyTask> tasks,
                              const CopyOptions& options, Digest* digest) {
  std::vector<CopyTask> here;
  // By GPU, and whether it is within its memory, while nobody wants its SMs.
  std::map<std::pair<ProcessGpu*, bool>, std::vector<CopyTask>> there;
  struct Through {
    ProcessGpu* from;
    ProcessGpu* to;
    const CopyTask* task;
  };
  std::vector<Through> through;
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
    if (task.cast != CopyCast::kNone) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                       "GPU memory is cast by the daemon's device agent alone");
    }
    // Copies that two GPUs take part in are those of the one that is written.
    const char* const source =
        from != nullptr && to != nullptr ? SourceFor(task.src, to) : task.src;
    bool pinned = source != nullptr;
    if (to == nullptr && task.dst != nullptr) {
      int64_t extent = task.run_bytes;
      for (const CopyDim& dim : task.dims)
        extent += (dim.extent - 1) * dim.dst_stride;
      pinned = IsPinned(task.dst, extent);
    } else if (from == nullptr) {
      pinned = IsPinned(task.src, task.src_extent());
    }
    if (digest != nullptr || !pinned) {
      through.push_back({from, to, &task});
    } else if (task.dst != nullptr) {
      ProcessGpu* const gpu = to != nullptr ? to : from;
      // What lies on another GPU is read by copy engines alone.
      const bool within = from != nullptr && to != nullptr &&
                          engine_ == Engine::kStands && LiesOn(task.src, *gpu);
      std::vector<CopyTask>& of_gpu = there[{gpu, within}];
      // Mostly all of them, thousands, while an engine waits.
      if (of_gpu.empty()) of_gpu.reserve(tasks.size());
      of_gpu.push_back(task);
      of_gpu.back().src = source;
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
  for (const auto& [where, of_gpu] : there) {
    const auto& [gpu, within] = where;
    const absl::Status status = within ? gpu->CopyWithin(of_gpu, copy_timeout_)
                                       : gpu->Copy(of_gpu, copy_timeout_);
    if (!status.ok()) return status;
  }
  for (const Through& copy : through) {
    const absl::Status status =
        CopyThrough(copy.from, copy.to, *copy.task, options,
                    digest == nullptr ? nullptr : &sum);
    if (!status.ok()) return status;
  }
  if (digest != nullptr) *digest += sum;
  return absl::OkStatus();
}

absl::Status LiveMemory::Pack(const PackRequest& request, PackResult* result) {
  bool on_gpu = GpuOf(request.bucket) != nullptr;
  for (const PackPiece& piece : request.pieces)
    on_gpu = on_gpu || GpuOf(piece.copy.source()) != nullptr;
  if (!on_gpu) return host_->Pack(request, result);
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                   "GPU memory is packed by the daemon's device agent alone");
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
  const absl::Status pinned =
      gpus_[0]->Pin(static_cast<const char*>(data), kBufferBytes, false);
  if (!pinned.ok()) {
    munmap(data, kBufferBytes);
    return pinned;
  }
  buffer_ = static_cast<char*>(data);
  return absl::OkStatus();
}

absl::Status LiveMemory::CopyThrough(ProcessGpu* from, ProcessGpu* to,
                                     const CopyTask& task,
                                     const CopyOptions& options,
                                     Digest* digest) {
  absl::MutexLock lock(&buffer_mutex_);
  absl::Status status = MakeBuffer();
  if (!status.ok()) return status;
  for (const CopyTask& part : SplitCopy(task, kBufferBytes)) {
    CopyTask in = ToDense(part, buffer_);
    CopyTask out = FromDense(part, buffer_);
    if (from != nullptr) {
      status = from->Copy({in}, copy_timeout_);
      CopyTask read = out;
      if (to != nullptr) read.dst = nullptr;
      // Reads, and writes nothing where there is no destination.
      if (status.ok()) status = host_->Copy({read}, options, digest);
      if (status.ok() && to != nullptr) status = to->Copy({out}, copy_timeout_);
    } else {
      // What the digest is of is what is written: one look at the source.
      status = host_->Copy({in}, options, digest);
      if (status.ok()) status = to->Copy({out}, copy_timeout_);
    }
    if (!status.ok()) {
      // What was begun may still come here, or be read.
      if (ReasonOf(status) == "DEVICE_STALLED") buffer_ = nullptr;
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status LiveMemory::Read(const char* from, absl::Span<char> to) {
  if (GpuOf(from) == nullptr) return host_->Read(from, to);
  CopyTask task;
  task.src = from;
  task.dst = to.data();
  task.run_bytes = static_cast<int64_t>(to.size());
  return Copy({task}, CopyOptions(), nullptr);
}

absl::Status LiveMemory::Write(absl::Span<const char> from, char* to) {
  if (GpuOf(to) == nullptr) return host_->Write(from, to);
  CopyTask task;
  task.src = from.data();
  task.dst = to;
  task.run_bytes = static_cast<int64_t>(from.size());
  return Copy({task}, CopyOptions(), nullptr);
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
