// Notices at once when a process ends, by its pidfd: a lease must not outlive
// the process that took it, even if a forked child keeps the connection open.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_PROCESS_WATCHER_H_
#define WEIGHTSYNC_DAEMON_SERVICE_PROCESS_WATCHER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace weightsync {
namespace daemon {

// Thread-safe. One thread.
class ProcessWatcher {
 public:
  // 0 names no watch.
  using WatchId = uint64_t;

  static absl::StatusOr<std::unique_ptr<ProcessWatcher>> Start();
  ~ProcessWatcher();
  ProcessWatcher(const ProcessWatcher&) = delete;
  ProcessWatcher& operator=(const ProcessWatcher&) = delete;

  // Calls `on_exit` once, on the watcher's thread, when process `pid` has
  // ended.
  //   NOT_FOUND (PROCESS_UNKNOWN): there is none here; perhaps another pid
  //   namespace counts so.
  absl::StatusOr<WatchId> Watch(pid_t pid, std::function<void()> on_exit);
  // 0 and watches that have fired are fine. A call that is just beginning may
  // still come.
  void Unwatch(WatchId id);

 private:
  struct Entry {
    int pidfd = -1;
    std::function<void()> on_exit;
  };

  ProcessWatcher(int epoll_fd, int wake_fd);
  void Run();

  const int epoll_fd_;
  const int wake_fd_;

  absl::Mutex mutex_;
  absl::flat_hash_map<WatchId, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  WatchId next_id_ ABSL_GUARDED_BY(mutex_) = 1;

  std::thread thread_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_PROCESS_WATCHER_H_
