// The GPUs of a process that has tensors on them: a trainer, which lets others
// open them, or an engine, whose live parameters are written.
//
// Nothing here needs CUDA to be built or to start: its runtime is looked for
// when a tensor on a GPU comes (late_cudart.h). There is one kernel, which the
// driver loads (driver_kernel.h): an engine that stands still for new weights
// has its SMs to spare, and is back sooner; one that runs meanwhile has none,
// and copies by copy engines alone (copy_policy.h).
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_GPU_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_GPU_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/copy.h"
#include "transport/cuda/handle.h"

namespace weightsync {
namespace transport {
namespace cuda {

// One GPU. Thread-safe; leaves the caller's current device as it is.
class ProcessGpu {
 public:
  // That which `pointer` is an address of; the same for all who ask while
  // somebody has it. INVALID_ARGUMENT (NOT_DEVICE_MEMORY), FAILED_PRECONDITION
  // (CUDA_RUNTIME_MISSING, CUDA_NOT_BUILT, DRIVER_TOO_OLD, NO_DEVICE).
  static absl::StatusOr<std::shared_ptr<ProcessGpu>> Of(const void* pointer);

  // The calling thread is the caller's own: calls may leave another device
  // current on it. Others get theirs back, which makes a context on that device
  // where there was none.
  static void KeepDevice();

  virtual ~ProcessGpu() = default;

  virtual const std::string& uuid() const = 0;
  // UUIDs of other GPUs that this process sees, out of whose memory copies come
  // straight to this one (peer access). Constant.
  virtual const std::vector<std::string>& peers() const = 0;

  // How others open the allocation that holds [pointer, pointer + bytes). The
  // errors of DeviceExporter; what was told is good as long as this lives.
  virtual absl::StatusOr<DevicePlace> Describe(const void* pointer,
                                               int64_t bytes) = 0;
  // FAILED_PRECONDITION (ALLOCATION_FREED): another allocation, or none, is
  // where `handle`'s was.
  virtual absl::Status CheckStillThere(const DeviceHandle& handle) = 0;
  // Until all that this process has given to the GPU is done, on every stream:
  // another process reads what it has written next. The errors of CheckCuda.
  virtual absl::Status Synchronize() = 0;

  // Host memory that Copy may go to or from; only to be read, where
  // `read_only`. UNAVAILABLE (CUDA_ERROR) where that cannot be.
  virtual absl::Status Pin(const char* data, int64_t bytes, bool read_only) = 0;
  virtual void Unpin(const char* data) = 0;

  // An allocation of another process on this GPU or one of its peers, to be
  // read by copies of this GPU; no context is made on the other. The same for
  // equal handles, as long as somebody has it. Whoever lets go of it last waits
  // for nothing: it is closed on another thread. The errors of
  // IpcImports::Acquire; NOT_FOUND (DEVICE_NOT_VISIBLE): it is of another GPU
  // than those; FAILED_PRECONDITION (MIG_NO_IPC).
  using Opened = ImportedAllocation;
  virtual absl::StatusOr<std::shared_ptr<const Opened>> Open(
      const DeviceHandle& handle) = 0;
  // Calls `then` when all that was let go of before is closed; on another
  // thread.
  virtual void Later(std::function<void()> then) = 0;

  // What CopyWithin wants, made ahead of it: a few MiB on each side, and the
  // kernel on the GPU. To make it holds the GPU up. What is missing is logged,
  // once; nothing fails for it.
  virtual void PrepareCopies(absl::Duration timeout) = 0;

  // By copy engines, between this GPU and pinned host memory, or within it, or
  // to it from what is open of a peer: with memory that is not pinned,
  // `timeout` bounds nothing. Returns when the bytes are in place, and not
  // before what it has begun has ended, but for DEADLINE_EXCEEDED
  // (DEVICE_STALLED): nothing has moved for `timeout`, and more may follow. The
  // errors of CheckCuda.
  virtual absl::Status Copy(absl::Span<const CopyTask> tasks,
                            absl::Duration timeout) = 0;
  // The same, where both ends of every task are memory of this GPU, or mapped
  // there, and nobody wants its SMs: small and strided pieces go by a kernel,
  // whole buckets of them in one launch. Casts nothing.
  virtual absl::Status CopyWithin(absl::Span<const CopyTask> tasks,
                                  absl::Duration timeout) = 0;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_GPU_H_
