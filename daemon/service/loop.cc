#include "daemon/service/loop.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr absl::Duration kFarAway = absl::Hours(8760);
constexpr absl::Duration kLook = absl::Seconds(1);

}  // namespace

Loop::Loop(const std::string& name) : thread_([this, name] { Run(name); }) {}

Loop::~Loop() { Stop(); }

void Loop::Post(Task task) {
  absl::MutexLock lock(&mutex_);
  // The task, if it is not taken, is destroyed by the caller's frame, after the
  // lock: what it holds may call back.
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  changed_.Signal();
}

Loop::TimerId Loop::PostAt(absl::Time when, Task task) {
  return PostAfter(when - absl::Now(), std::move(task));
}

Loop::TimerId Loop::PostAfter(absl::Duration delay, Task task) {
  // Far-away times would overflow.
  delay = std::min(std::max(delay, absl::ZeroDuration()), kFarAway);
  return PostAtTime(
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(delay),
      std::move(task));
}

Loop::TimerId Loop::PostAtTime(Time when, Task task) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return 0;
  const TimerId id = next_timer_++;
  timers_.emplace(std::make_pair(when, id), std::move(task));
  timer_times_.emplace(id, when);
  changed_.Signal();
  return id;
}

void Loop::Cancel(TimerId id) {
  Task dropped;
  absl::MutexLock lock(&mutex_);
  auto time = timer_times_.find(id);
  if (time == timer_times_.end()) return;
  auto timer = timers_.find({time->second, id});
  dropped = std::move(timer->second);
  timers_.erase(timer);
  timer_times_.erase(time);
}

bool Loop::IsCurrentThread() const {
  return std::this_thread::get_id() == thread_.get_id();
}

void Loop::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.Signal();
  }
  CHECK(!IsCurrentThread()) << "a loop cannot join itself";
  if (thread_.joinable()) thread_.join();
}

void Loop::Run(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  std::map<std::pair<Time, TimerId>, Task> dropped;
  mutex_.Lock();
  for (;;) {
    std::deque<Task> batch;
    batch.swap(tasks_);
    if (!batch.empty()) {
      mutex_.Unlock();
      while (!batch.empty()) {
        std::move(batch.front())();
        batch.pop_front();
      }
      mutex_.Lock();
      continue;
    }
    if (stopping_) break;
    if (timers_.empty()) {
      changed_.Wait(&mutex_);
      continue;
    }
    auto first = timers_.begin();
    const Time now = std::chrono::steady_clock::now();
    if (first->first.first > now) {
      // What waits here may count on the clock that is set.
      changed_.WaitWithTimeout(
          &mutex_, std::min(absl::FromChrono(first->first.first - now), kLook));
      continue;
    }
    Task task = std::move(first->second);
    timer_times_.erase(first->first.second);
    timers_.erase(first);
    mutex_.Unlock();
    std::move(task)();
    task = nullptr;
    mutex_.Lock();
  }
  dropped.swap(timers_);
  timer_times_.clear();
  mutex_.Unlock();
}

}  // namespace daemon
}  // namespace weightsync
