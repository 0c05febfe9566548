// Questions to a loop from threads that wait for the answer, and that do not
// hold up whoever ends the process.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_ASKER_H_
#define WEIGHTSYNC_DAEMON_SERVICE_ASKER_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/service/loop.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class Asker {
 public:
  enum class Outcome {
    kDone,
    kLate,    // the loop has not come to it in `timeout`
    kEnding,  // nor until EndBy's time
  };

  // `loop` must be stopped before the Asker ends.
  explicit Asker(Loop* loop) : loop_(loop) {}

  // Runs `task` on the loop and waits until that is done, at most `timeout`. It
  // may run after that, and so owns what it refers to. Not on the loop.
  Outcome Ask(Loop::Task task, absl::Duration timeout);

  // From now on nobody waits beyond `deadline`.
  void EndBy(absl::Time deadline);

 private:
  Loop* const loop_;
  absl::Mutex mutex_;
  absl::CondVar changed_;
  absl::Time end_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_ASKER_H_
