#include "transport/cuda/closing_thread.h"

#include <deque>
#include <utility>

#include "glog/logging.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kEndPatience = absl::Seconds(5);

}  // namespace

struct ClosingThread::State {
  absl::Mutex mutex;
  std::deque<std::function<void()>> calls ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool ended ABSL_GUARDED_BY(mutex) = false;
};

ClosingThread::ClosingThread(std::string name, std::function<void()> begin)
    : name_(std::move(name)),
      begin_(std::move(begin)),
      state_(std::make_shared<State>()) {}

void ClosingThread::Later(std::function<void()> call) {
  {
    absl::MutexLock lock(&state_->mutex);
    state_->calls.push_back(std::move(call));
  }
  absl::MutexLock lock(&mutex_);
  if (thread_.joinable()) return;
  thread_ = std::thread([begin = begin_, state = state_] {
    if (begin) begin();
    Run(state);
  });
}

void ClosingThread::Run(const std::shared_ptr<State>& state) {
  while (true) {
    std::function<void()> call;
    {
      absl::MutexLock lock(&state->mutex);
      const auto due = [&state]() ABSL_SHARED_LOCKS_REQUIRED(state->mutex) {
        return state->stopping || !state->calls.empty();
      };
      state->mutex.Await(absl::Condition(&due));
      if (state->calls.empty()) {
        state->ended = true;
        return;
      }
      call = std::move(state->calls.front());
      state->calls.pop_front();
    }
    call();
  }
}

ClosingThread::~ClosingThread() {
  absl::MutexLock lock(&mutex_);
  if (!thread_.joinable()) return;
  bool ended = false;
  {
    absl::MutexLock guard(&state_->mutex);
    state_->stopping = true;
    ended = state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended),
                                           kEndPatience);
  }
  if (ended) {
    thread_.join();
    return;
  }
  LOG(WARNING) << name_ << " has not let go of memory of other processes in "
               << absl::FormatDuration(kEndPatience)
               << ": it stays open until the GPU has done what it is at";
  thread_.detach();
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
