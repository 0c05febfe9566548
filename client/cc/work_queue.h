// One thread that does what it is given, in order.
#ifndef WEIGHTSYNC_CLIENT_CC_WORK_QUEUE_H_
#define WEIGHTSYNC_CLIENT_CC_WORK_QUEUE_H_

#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace client {

// Thread-safe.
class WorkQueue {
 public:
  WorkQueue() : thread_([this] { Run(); }) {}
  ~WorkQueue() { Stop(); }

  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Ignored after Stop.
  void Post(std::function<void()> work) {
    absl::MutexLock lock(&mutex_);
    if (!stopping_) queue_.push_back(std::move(work));
  }

  // Forgets what has not begun.
  void Clear() {
    absl::MutexLock lock(&mutex_);
    queue_.clear();
  }

  // Waits until nothing runs and nothing is queued; false at the deadline.
  bool WaitIdle(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithDeadline(
        absl::Condition(
            +[](WorkQueue* q) ABSL_EXCLUSIVE_LOCKS_REQUIRED(q->mutex_) {
              return q->queue_.empty() && !q->running_;
            },
            this),
        deadline);
  }

  // Waits for what runs, forgets the rest, joins. Idempotent; not from the
  // queue's own thread.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      queue_.clear();
    }
    absl::MutexLock lock(&join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    while (true) {
      std::function<void()> work;
      {
        absl::MutexLock lock(&mutex_);
        running_ = false;
        mutex_.Await(absl::Condition(
            +[](WorkQueue* q) ABSL_EXCLUSIVE_LOCKS_REQUIRED(q->mutex_) {
              return q->stopping_ || !q->queue_.empty();
            },
            this));
        if (stopping_) return;
        work = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
      }
      work();
    }
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Mutex join_mutex_;
  std::thread thread_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_WORK_QUEUE_H_
