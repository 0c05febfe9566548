#include "daemon/service/asker.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/time/clock.h"

namespace weightsync {
namespace daemon {

Asker::Outcome Asker::Ask(Loop::Task task, absl::Duration timeout) {
  const absl::Time own = absl::Now() + timeout;
  auto done = std::make_shared<bool>(false);
  loop_->Post([this, done, task = std::move(task)]() mutable {
    task();
    absl::MutexLock lock(&mutex_);
    *done = true;
    changed_.SignalAll();
  });
  absl::MutexLock lock(&mutex_);
  while (!*done) {
    const absl::Time until = std::min(own, end_);
    if (absl::Now() >= until) {
      return until == own ? Outcome::kLate : Outcome::kEnding;
    }
    changed_.WaitWithDeadline(&mutex_, until);
  }
  return Outcome::kDone;
}

void Asker::EndBy(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  end_ = deadline;
  changed_.SignalAll();
}

}  // namespace daemon
}  // namespace weightsync
