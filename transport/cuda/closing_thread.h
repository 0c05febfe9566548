// A thread for calls that wait for a whole GPU: freeing and closing do,
// whatever else it is at.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_CLOSING_THREAD_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_CLOSING_THREAD_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Thread-safe. Has no thread until something is given.
class ClosingThread {
 public:
  // `begin` is the first that the thread calls; `name` is for people.
  ClosingThread(std::string name, std::function<void()> begin);
  // Waits a while for what was given; what a GPU does not let go of then goes
  // on by itself, and with it whatever else is behind it.
  ~ClosingThread();
  ClosingThread(const ClosingThread&) = delete;
  ClosingThread& operator=(const ClosingThread&) = delete;

  // One after the other, in this order. Holds up nobody.
  void Later(std::function<void()> call);

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::string name_;
  const std::function<void()> begin_;
  // The thread has it too, and may outlive this.
  const std::shared_ptr<State> state_;
  absl::Mutex mutex_;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_CLOSING_THREAD_H_
