// One thread that runs tasks in the order in which they were posted, and
// timers. State that only tasks of one loop touch needs no lock: the
// coordinator and the node's agent each live on one.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_LOOP_H_
#define WEIGHTSYNC_DAEMON_SERVICE_LOOP_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class Loop {
 public:
  using Task = absl::AnyInvocable<void()>;
  // 0 names no timer.
  using TimerId = uint64_t;

  // `name`: of the thread, for people; 15 characters are seen.
  explicit Loop(const std::string& name);
  // As Stop.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Never blocks. After Stop the task is destroyed and not run.
  void Post(Task task);

  // Timers that are due run after the tasks that were posted before: a timer
  // that finds out that something has not come can be sure that it does not
  // just wait behind it in the queue. They count on a clock that nobody sets:
  // `when` is so far from now.
  TimerId PostAt(absl::Time when, Task task);
  TimerId PostAfter(absl::Duration delay, Task task);
  // Afterwards the task does not begin, if it has not begun; called on the loop
  // itself this is certain. 0 and timers that have run are fine.
  void Cancel(TimerId id);

  bool IsCurrentThread() const;

  // Runs the tasks that were posted before, drops timers, joins the thread.
  // Idempotent. Not to be called on the loop.
  void Stop();

 private:
  // Of the clock that nobody sets.
  using Time = std::chrono::steady_clock::time_point;

  TimerId PostAtTime(Time when, Task task);
  void Run(const std::string& name);

  mutable absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<Time, TimerId>, Task> timers_ ABSL_GUARDED_BY(mutex_);
  std::map<TimerId, Time> timer_times_ ABSL_GUARDED_BY(mutex_);
  TimerId next_timer_ ABSL_GUARDED_BY(mutex_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::CondVar changed_;
  std::thread thread_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_LOOP_H_
