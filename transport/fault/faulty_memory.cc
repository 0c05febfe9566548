#include "transport/fault/faulty_memory.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace weightsync {
namespace transport {
namespace {

bool Fails(const absl::optional<MemoryFault>& fault) {
  return fault.has_value() && fault->kind == MemoryFault::Kind::kFail;
}

// The first `bytes` bytes of a task, as a task for every row that they touch.
void AppendHead(const CopyTask& task, int64_t bytes,
                std::vector<CopyTask>* tasks) {
  bytes = bytes / task.element_bytes * task.element_bytes;
  for (int64_t row = 0; row * task.run_bytes < bytes; ++row) {
    CopyTask head = task;
    head.dims.clear();
    head.run_bytes = std::min(task.run_bytes, bytes - row * task.run_bytes);
    int64_t rest = row;
    for (size_t i = task.dims.size(); i-- > 0;) {
      const CopyDim& dim = task.dims[i];
      const int64_t at = rest % dim.extent;
      rest /= dim.extent;
      if (head.dst != nullptr) head.dst += at * dim.dst_stride;
      head.src += at * dim.src_stride;
      head.first_element += at * dim.element_stride;
    }
    tasks->push_back(std::move(head));
  }
}

}  // namespace

void FaultyMemory::Inject(const MemoryFault& fault) {
  absl::MutexLock lock(&mutex_);
  faults_.push_back(fault);
}

void FaultyMemory::Clear() {
  absl::MutexLock lock(&mutex_);
  faults_.clear();
}

int64_t FaultyMemory::hits() const {
  absl::MutexLock lock(&mutex_);
  return hits_;
}

absl::optional<MemoryFault> FaultyMemory::Next(
    MemoryFault::Operation operation) {
  absl::optional<MemoryFault> found;
  absl::Duration delay;
  {
    absl::MutexLock lock(&mutex_);
    for (MemoryFault& fault : faults_) {
      if (fault.operation != operation || fault.count == 0) continue;
      if (fault.after > 0) {
        --fault.after;
        continue;
      }
      if (fault.count > 0) --fault.count;
      ++hits_;
      if (fault.kind == MemoryFault::Kind::kDelay) {
        delay += fault.delay;
      } else if (!found.has_value()) {
        found = fault;
      }
    }
  }
  if (delay > absl::ZeroDuration()) absl::SleepFor(delay);
  return found;
}

absl::Status FaultyMemory::FlipBit(char* byte) {
  char value;
  const absl::Status status = base_->Read(byte, absl::MakeSpan(&value, 1));
  if (!status.ok()) return status;
  value ^= 1;
  return base_->Write(absl::MakeConstSpan(&value, 1), byte);
}

absl::StatusOr<std::unique_ptr<Segment>> FaultyMemory::Allocate(
    int64_t bytes, const AllocateOptions& options) {
  const absl::optional<MemoryFault> fault =
      Next(MemoryFault::Operation::kAllocate);
  if (Fails(fault)) return fault->status;
  return base_->Allocate(bytes, options);
}

absl::StatusOr<MemoryTicket> FaultyMemory::Export(
    const Segment& segment, const ExportOptions& options) {
  const absl::optional<MemoryFault> fault =
      Next(MemoryFault::Operation::kExport);
  if (Fails(fault)) return fault->status;
  return base_->Export(segment, options);
}

absl::StatusOr<std::unique_ptr<Segment>> FaultyMemory::Import(
    const MemoryTicket& ticket, absl::Duration timeout) {
  const absl::optional<MemoryFault> fault =
      Next(MemoryFault::Operation::kImport);
  if (Fails(fault)) return fault->status;
  return base_->Import(ticket, timeout);
}

absl::Status FaultyMemory::Copy(absl::Span<const CopyTask> tasks,
                                const CopyOptions& options, Digest* digest) {
  const absl::optional<MemoryFault> fault = Next(MemoryFault::Operation::kCopy);
  if (Fails(fault)) return fault->status;
  if (!fault.has_value() || tasks.empty())
    return base_->Copy(tasks, options, digest);
  if (fault->kind == MemoryFault::Kind::kDamage) {
    const absl::Status status = base_->Copy(tasks, options, digest);
    if (!status.ok()) return status;
    return FlipBit(tasks[0].dst + fault->byte);
  }
  // The digest is that of all bytes: the copier believes that it has written
  // them.
  if (digest != nullptr) {
    std::vector<CopyTask> look(tasks.begin(), tasks.end());
    for (CopyTask& task : look) task.dst = nullptr;
    const absl::Status status = base_->Copy(look, options, digest);
    if (!status.ok()) return status;
  }
  std::vector<CopyTask> head;
  int64_t left = fault->byte;
  for (const CopyTask& task : tasks) {
    AppendHead(task, std::min(left, task.bytes()), &head);
    left -= std::min(left, task.bytes());
  }
  return base_->Copy(head, options, nullptr);
}

absl::Status FaultyMemory::Pack(const PackRequest& request,
                                PackResult* result) {
  const absl::optional<MemoryFault> fault = Next(MemoryFault::Operation::kPack);
  if (Fails(fault)) return fault->status;
  if (!fault.has_value()) return base_->Pack(request, result);
  // Before the frames that are hit are told of, or their next user could be
  // faster than the fault.
  PackRequest faulty = request;
  absl::Status status;
  faulty.on_frames = [&](int64_t first, int64_t last,
                         absl::Span<const Digest> digests) {
    const int64_t begin = first * request.frame_bytes;
    const int64_t end =
        std::min(request.bucket_bytes, last * request.frame_bytes);
    if (fault->kind == MemoryFault::Kind::kDamage) {
      if (fault->byte >= begin && fault->byte < end)
        status.Update(FlipBit(request.bucket + fault->byte));
    } else if (fault->byte < end) {
      const int64_t from = std::max(begin, fault->byte);
      const std::vector<char> zeros(end - from);
      status.Update(base_->Write(zeros, request.bucket + from));
    }
    if (request.on_frames != nullptr) request.on_frames(first, last, digests);
  };
  const absl::Status packed = base_->Pack(faulty, result);
  return packed.ok() ? status : packed;
}

}  // namespace transport
}  // namespace weightsync
