#include "daemon/service/task_threads.h"

#include <pthread.h>

#include <utility>

namespace weightsync {
namespace daemon {

void TaskThreads::Run(Task task) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  if (idle_ > 0) {
    --idle_;
  } else {
    threads_.emplace_back([this] { Work(); });
  }
}

void TaskThreads::Stop() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void TaskThreads::Work() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  for (;;) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(
          +[](TaskThreads* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) {
            return self->stopping_ || !self->tasks_.empty();
          },
          this));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    std::move(task)();
    task = nullptr;
    absl::MutexLock lock(&mutex_);
    ++idle_;
  }
}

}  // namespace daemon
}  // namespace weightsync
