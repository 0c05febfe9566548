// Threads for work that blocks: as many as there are tasks at once, kept for
// the next ones.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_TASK_THREADS_H_
#define WEIGHTSYNC_DAEMON_SERVICE_TASK_THREADS_H_

#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class TaskThreads {
 public:
  using Task = absl::AnyInvocable<void()>;

  explicit TaskThreads(std::string name) : name_(std::move(name)) {}
  // As Stop.
  ~TaskThreads() { Stop(); }
  TaskThreads(const TaskThreads&) = delete;
  TaskThreads& operator=(const TaskThreads&) = delete;

  // Begins at once, on an idle thread or a new one. Never blocks. After Stop
  // the task is destroyed and not run.
  void Run(Task task);

  // Waits for the tasks that run, which somebody else must have asked to end.
  // Idempotent.
  void Stop();

 private:
  void Work();

  const std::string name_;
  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  // Threads that wait for a task and have none coming.
  int idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_TASK_THREADS_H_
