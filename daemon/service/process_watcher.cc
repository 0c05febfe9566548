#include "daemon/service/process_watcher.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

// In epoll's data: not a watch, but the request to end.
constexpr ProcessWatcher::WatchId kWake = 0;

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessWatcher>> ProcessWatcher::Start() {
  const int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (epoll_fd < 0 || wake_fd < 0 ||
      epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) != 0) {
    const int error = errno;
    if (epoll_fd >= 0) close(epoll_fd);
    if (wake_fd >= 0) close(wake_fd);
    return ErrorStatus(
        absl::StatusCode::kResourceExhausted, "DESCRIPTORS_EXHAUSTED",
        absl::StrCat("cannot watch processes: ", strerror(error)));
  }
  return absl::WrapUnique(new ProcessWatcher(epoll_fd, wake_fd));
}

ProcessWatcher::ProcessWatcher(int epoll_fd, int wake_fd)
    : epoll_fd_(epoll_fd), wake_fd_(wake_fd), thread_([this] { Run(); }) {}

ProcessWatcher::~ProcessWatcher() {
  const uint64_t one = 1;
  PCHECK(write(wake_fd_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  for (const auto& entry : entries_) close(entry.second.pidfd);
  close(epoll_fd_);
  close(wake_fd_);
}

absl::StatusOr<ProcessWatcher::WatchId> ProcessWatcher::Watch(
    pid_t pid, std::function<void()> on_exit) {
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) {
    return ErrorStatus(
        errno == ESRCH ? absl::StatusCode::kNotFound
                       : absl::StatusCode::kInternal,
        errno == ESRCH ? "PROCESS_UNKNOWN" : "PROCESS_UNWATCHABLE",
        absl::StrCat("cannot watch process ", pid, ": ", strerror(errno)));
  }
  absl::MutexLock lock(&mutex_);
  const WatchId id = next_id_++;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, pidfd, &event) != 0) {
    const int error = errno;
    close(pidfd);
    return ErrorStatus(
        absl::StatusCode::kInternal, "PROCESS_UNWATCHABLE",
        absl::StrCat("cannot watch process ", pid, ": ", strerror(error)));
  }
  entries_[id] = Entry{pidfd, std::move(on_exit)};
  return id;
}

void ProcessWatcher::Unwatch(WatchId id) {
  Entry entry;
  absl::MutexLock lock(&mutex_);
  auto it = entries_.find(id);
  if (it == entries_.end()) return;
  entry = std::move(it->second);
  entries_.erase(it);
  // Also takes it out of the epoll set: nobody else has the description.
  close(entry.pidfd);
}

void ProcessWatcher::Run() {
  pthread_setname_np(pthread_self(), "ws-pidfd");
  for (;;) {
    epoll_event events[16];
    const int count = epoll_wait(epoll_fd_, events, 16, -1);
    if (count < 0) {
      PCHECK(errno == EINTR) << "epoll_wait";
      continue;
    }
    for (int i = 0; i < count; ++i) {
      const WatchId id = events[i].data.u64;
      if (id == kWake) return;
      Entry entry;
      {
        absl::MutexLock lock(&mutex_);
        auto it = entries_.find(id);
        if (it == entries_.end()) continue;
        entry = std::move(it->second);
        entries_.erase(it);
        close(entry.pidfd);
      }
      entry.on_exit();
    }
  }
}

}  // namespace daemon
}  // namespace weightsync
