// What stands for an inference engine in the demo: it "generates" by reading
// all of its weights once for every version that it serves.
#ifndef WEIGHTSYNC_TESTS_E2E_DEMO_ENGINE_H_
#define WEIGHTSYNC_TESTS_E2E_DEMO_ENGINE_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace demo {

// A request is in flight from the moment in which a new version may be served
// until Done. Thread-safe.
class Engine {
 public:
  // Drains: returns when no request is in flight, with what it did.
  absl::StatusOr<std::string> Pause(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const bool busy = in_flight_;
    if (!mutex_.AwaitWithDeadline(
            absl::Condition(
                +[](Engine* e) ABSL_EXCLUSIVE_LOCKS_REQUIRED(e->mutex_) {
                  return !e->in_flight_;
                },
                this),
            deadline)) {
      return absl::DeadlineExceededError("a request is still in flight");
    }
    return std::string(busy ? "drained 1 request" : "drained 0 requests");
  }

  // Generates with `version`, which begins a request when it is a new one.
  absl::Status Resume(int64_t version) {
    absl::MutexLock lock(&mutex_);
    if (version != version_) in_flight_ = true;
    version_ = version;
    return absl::OkStatus();
  }

  // The version of the next request; 0 at the deadline.
  int64_t NextRequest(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(absl::Condition(&in_flight_), deadline);
    return in_flight_ ? version_ : 0;
  }
  void Done() {
    absl::MutexLock lock(&mutex_);
    in_flight_ = false;
  }

 private:
  absl::Mutex mutex_;
  bool in_flight_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace demo
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_DEMO_ENGINE_H_
