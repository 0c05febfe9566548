// The memory of an engine whose live parameters are on GPUs, all or some.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
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
// pinned, once, where there is a GPU. Copies to a GPU go by its copy engines;
// what wants a digest as well, and what is only read for its digest, goes
// through a pinned buffer, as the digest is computed by the CPU.
//
// Thread-safe, once the ranges are there.
class LiveMemory final : public Memory {
 public:
  // `host` outlives this; so do segments and this GPU ranges.
  explicit LiveMemory(Memory* host,
                      absl::Duration copy_timeout = absl::Seconds(60))
      : host_(host), copy_timeout_(copy_timeout) {}
  ~LiveMemory() override;

  // [data, data + bytes) is GPU memory of this process. The errors of
  // ProcessGpu::Of.
  absl::Status AddRange(const void* data, int64_t bytes);

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
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override;
  // Besides what memory.h says, the errors of ProcessGpu::Copy.
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  absl::Status Pack(const PackRequest& request, PackResult* result) override {
    return host_->Pack(request, result);
  }
  absl::Status Read(const char* from, absl::Span<char> to) override;
  absl::Status Write(absl::Span<const char> from, char* to) override;

 private:
  class PinnedSegment;
  struct Range {
    int64_t bytes = 0;
    std::shared_ptr<ProcessGpu> gpu;
  };

  // Null: host memory.
  ProcessGpu* GpuOf(const void* address) const;
  absl::Status MakeBuffer();
  absl::Status CopyThrough(ProcessGpu* gpu, const CopyTask& task,
                           const CopyOptions& options, Digest* digest);

  Memory* const host_;
  const absl::Duration copy_timeout_;
  // By address; not overlapping.
  std::map<const char*, Range> ranges_;
  // Each once.
  std::vector<std::shared_ptr<ProcessGpu>> gpus_;

  absl::Mutex buffer_mutex_;
  char* buffer_ ABSL_GUARDED_BY(buffer_mutex_) = nullptr;
  bool buffer_pinned_ ABSL_GUARDED_BY(buffer_mutex_) = false;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_LIVE_MEMORY_H_
