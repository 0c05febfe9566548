// The memory of an engine whose live parameters are on GPUs, all or some.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/cuda/process_gpu.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Host memory, and of GPUs those ranges that were said. What is imported is
// pinned, once, where there is a GPU; memory of the daemon or of a trainer on a
// GPU of the ranges, or on one that all of those reach (ProcessGpu::peers), is
// opened by CUDA IPC, or used as it is where this process made it. Copies
// between a GPU and the host, and from one GPU to another, go by copy engines;
// within a GPU by these and a kernel (ProcessGpu::CopyWithin), unless the
// engine runs meanwhile. What wants a digest as well, and what is only read for
// its digest, goes through a pinned buffer, as the digest is computed by the
// CPU; and so does what goes to or from host memory that is not pinned, which
// would otherwise hold its thread up in the runtime without a deadline.
//
// Thread-safe, once the ranges are there.
class LiveMemory final : public Memory {
 public:
  // What the engine does while its weights are copied. One that swaps sets of
  // them (WorkerOptions::swap) goes on, and its GPU has no SMs for copies.
  enum class Engine { kStands, kRuns };

  // `host` outlives this; so do segments and this GPU ranges.
  explicit LiveMemory(Memory* host, Engine engine = Engine::kStands,
                      absl::Duration copy_timeout = absl::Seconds(60))
      : host_(host), engine_(engine), copy_timeout_(copy_timeout) {}
  ~LiveMemory() override;

  // [data, data + bytes) is GPU memory of this process. May hold its GPU up, so
  // that no copy does (ProcessGpu::PrepareCopies). The errors of
  // ProcessGpu::Of.
  absl::Status AddRange(const void* data, int64_t bytes);

  // The GPUs whose memory all GPUs of the ranges can copy out of, and that may
  // be imported, by UUID: those of the ranges first, then their peers. None
  // where the ranges are on several GPUs that do not reach each other.
  std::vector<std::string> device_uuids() const;
  // Whether bytes of imported memory at `source` get to `target`, of a range,
  // straight from GPU to GPU or within one.
  bool CopiesStraight(const char* source, const char* target) const
      ABSL_LOCKS_EXCLUDED(imported_mutex_);

  MemoryKind kind() const override { return MemoryKind::kHost; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override {
    return host_->Allocate(bytes, options);
  }
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override {
    return host_->Export(segment, options);
  }
  void Withdraw(const MemoryTicket& ticket) override {
    host_->Withdraw(ticket);
  }
  // Of a kCuda ticket also NOT_FOUND (DEVICE_NOT_VISIBLE): not of
  // device_uuids(); FAILED_PRECONDITION (SEGMENT_GONE; OWN_EXPORT: this process
  // made it, on a GPU where no range is), and the errors of ProcessGpu::Open.
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override;
  // Besides what memory.h says, the errors of ProcessGpu::Copy.
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  // Of the ranges and of what is imported: where the memory lies.
  std::string DeviceOf(const char* address) const override;
  // On the host alone: INVALID_ARGUMENT (BAD_COPY) of GPU memory.
  absl::Status Pack(const PackRequest& request, PackResult* result) override;
  absl::Status Read(const char* from, absl::Span<char> to) override;
  absl::Status Write(absl::Span<const char> from, char* to) override;

 private:
  class PinnedSegment;
  class DeviceSegment;
  struct Range {
    int64_t bytes = 0;
    std::shared_ptr<ProcessGpu> gpu;
  };
  // What one GPU of the ranges has open.
  struct Opening {
    std::shared_ptr<ProcessGpu> gpu;
    std::shared_ptr<const ProcessGpu::Opened> opened;
  };
  // Of DeviceSegments, which keep it open.
  struct Imported {
    int64_t bytes = 0;
    std::string device;  // where it lies
    // By the GPU that copies from it: its address there. The first is what the
    // segment says.
    std::vector<std::pair<ProcessGpu*, const char*>> openings;
    int segments = 0;
  };

  // The GPU that copies from or to `address`. Null: host memory.
  ProcessGpu* GpuOf(const void* address) const
      ABSL_LOCKS_EXCLUDED(imported_mutex_);
  // Whether memory is of that GPU, and not of one that it can read.
  bool LiesOn(const char* address, const ProcessGpu& gpu) const
      ABSL_LOCKS_EXCLUDED(imported_mutex_);
  // `source` as `gpu` finds it. Null: it has no way to it.
  const char* SourceFor(const char* source, const ProcessGpu* gpu) const
      ABSL_LOCKS_EXCLUDED(imported_mutex_);
  bool AllReach(const std::string& device) const;
  absl::StatusOr<std::vector<Opening>> Open(const DeviceHandle& handle);
  absl::StatusOr<std::unique_ptr<Segment>> ImportDevice(
      const MemoryTicket& ticket, absl::Duration timeout);
  bool IsPinned(const char* data, int64_t bytes) const
      ABSL_LOCKS_EXCLUDED(imported_mutex_);
  absl::Status MakeBuffer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(buffer_mutex_);
  // `from`, `to`: of the task's ends; null: in host memory, or nowhere.
  absl::Status CopyThrough(ProcessGpu* from, ProcessGpu* to,
                           const CopyTask& task, const CopyOptions& options,
                           Digest* digest);

  Memory* const host_;
  const Engine engine_;
  const absl::Duration copy_timeout_;
  // By address; not overlapping.
  std::map<const char*, Range> ranges_;
  // Each once.
  std::vector<std::shared_ptr<ProcessGpu>> gpus_;

  mutable absl::Mutex imported_mutex_;
  std::map<const char*, Imported> imported_ ABSL_GUARDED_BY(imported_mutex_);
  // Arenas of host memory: their bytes.
  std::map<const char*, int64_t> pinned_ ABSL_GUARDED_BY(imported_mutex_);

  absl::Mutex buffer_mutex_;
  char* buffer_ ABSL_GUARDED_BY(buffer_mutex_) = nullptr;  // pinned
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_
