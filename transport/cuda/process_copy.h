// The copies of a process that has tensors on a GPU, on one stream.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_COPY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_COPY_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/copy.h"
#include "transport/cuda/driver_kernel.h"
#include "transport/cuda/launch_table.h"

namespace weightsync {
namespace transport {
namespace cuda {

// What the kernel's tables take of each side, pinned and on the GPU, twice:
// while the GPU does one launch, the next one's table is made. A bucket of 256
// MB in 10,000 pieces has room in one. They are made once, as to make them
// holds the GPU up: not in a pause.
constexpr int64_t kCopyTableBytes = 4 << 20;

// Thread-safe; one call at a time copies. REQUIRES of all: the same GPU is the
// thread's current device.
class ProcessCopier {
 public:
  // `name` is the GPU's, for errors.
  explicit ProcessCopier(std::string name) : name_(std::move(name)) {}
  // What a stalled GPU may still use is left to it.
  ~ProcessCopier();

  // Makes all that CopyWithin wants: it can then be a pause that waits for it.
  // Whatever is missing for a kernel is logged, once, and copy engines copy.
  void Prepare(absl::Duration timeout);

  // As ProcessGpu says it.
  absl::Status Copy(absl::Span<const CopyTask> tasks, absl::Duration timeout);
  absl::Status CopyWithin(absl::Span<const CopyTask> tasks,
                          absl::Duration timeout);

 private:
  // A table of a launch, on both sides.
  struct Table {
    char* host = nullptr;  // pinned
    char* device = nullptr;
    cudaEvent_t event = nullptr;  // after the launch
    bool used = false;            // the event was recorded
  };

  absl::Status Begin(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of what was begun, also after an error.
  absl::Status End(const absl::Status& begun, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PrepareLocked(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeKernel(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // REQUIRES: nothing of it is under way.
  void GiveBackKernel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status ByEngine(const CopyTask& task, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Submit(const CopyTask& task, size_t dim, char* dst,
                      const char* src, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Told(cudaError_t error, const char* call, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ByKernel(const CopyTask& task, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AddToTable(const CopyTask& task, absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ClearMade() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LaunchMade(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until `query` is no longer cudaErrorNotReady.
  absl::Status WaitFor(const std::function<cudaError_t()>& query,
                       absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForAll(absl::Duration timeout)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  // Held while copies run: there is one stream.
  absl::Mutex mutex_;
  cudaStream_t stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int commands_ ABSL_GUARDED_BY(mutex_) = 0;
  // A wait had no end: what was given to the GPU may still run.
  bool stalled_ ABSL_GUARDED_BY(mutex_) = false;
  bool prepared_ ABSL_GUARDED_BY(mutex_) = false;
  // False: copy engines copy.
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<DriverKernel> kernel_ ABSL_GUARDED_BY(mutex_);
  std::array<Table, 2> tables_ ABSL_GUARDED_BY(mutex_);
  size_t next_table_ ABSL_GUARDED_BY(mutex_) = 0;
  // The next launch's, and what of a table it leaves.
  LaunchTable made_ ABSL_GUARDED_BY(mutex_);
  int64_t room_ ABSL_GUARDED_BY(mutex_) = kCopyTableBytes;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_PROCESS_COPY_H_
