#ifndef WEIGHTSYNC_TRANSPORT_HOST_COPY_POOL_H_
#define WEIGHTSYNC_TRANSPORT_HOST_COPY_POOL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "transport/copy.h"
#include "transport/digest.h"

namespace weightsync {
namespace transport {

// Threads that copy host memory. A call uses the caller's own thread and, while
// they are free, the pool's; calls from several threads share them. One pass
// over the bytes: stores go round the cache, the digest is computed on the way.
// Thread-safe. Must outlive its calls.
class CopyPool {
 public:
  // `threads` work on one call, the caller's among them; at least 1.
  explicit CopyPool(int threads);
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  int threads() const { return static_cast<int>(threads_.size()) + 1; }

  // As Memory::Copy and Memory::Pack (transport/memory.h).
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options = {}, Digest* digest = nullptr);
  absl::Status Pack(const PackRequest& request, PackResult* result);

  // Calls body(0) .. body(count - 1), begun in this order, on several threads;
  // returns when all have returned. After an error no further ones are begun,
  // and the first error is the answer.
  absl::Status ParallelFor(int64_t count,
                           absl::FunctionRef<absl::Status(int64_t)> body);

 private:
  // One call of ParallelFor. Lives on its caller's stack.
  struct Job {
    Job(int64_t count, absl::FunctionRef<absl::Status(int64_t)> body)
        : count(count), body(body) {}
    const int64_t count;
    const absl::FunctionRef<absl::Status(int64_t)> body;
    std::atomic<int64_t> next{0};
    int helpers = 0;      // threads of the pool inside; under mutex_
    absl::Status status;  // under mutex_
  };

  void Help();
  // Does parts of the job until there are none left.
  void Work(Job* job) ABSL_LOCKS_EXCLUDED(mutex_);
  // Computes the scales of the tasks' blocks into `tables`: then a task of
  // kBF16BlockScale is a plain copy out of them.
  absl::Status MakeScales(absl::Span<CopyTask> tasks, bool guard_source,
                          std::vector<std::vector<float>>* tables);
  // True when there is a job to help with, or the end has come.
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !jobs_.empty();
  }

  absl::Mutex mutex_;
  std::deque<Job*> jobs_
      ABSL_GUARDED_BY(mutex_);  // those that may have parts left
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> threads_;  // constant after construction
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_COPY_POOL_H_
