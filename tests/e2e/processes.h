// Real processes for tests: started, watched, signalled, and always ended.
#ifndef WEIGHTSYNC_TESTS_E2E_PROCESSES_H_
#define WEIGHTSYNC_TESTS_E2E_PROCESSES_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace weightsync {
namespace e2e {

// A directory that is removed, with all that is in it, at the end.
class TempDirectory {
 public:
  TempDirectory();
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }
  // Names of all that lies in it, sorted.
  std::vector<std::string> List() const;

 private:
  std::string path_;
};

// A child process. It dies with the test, at the latest (PR_SET_PDEATHSIG).
class Process {
 public:
  // `arguments[0]` is the program. stdout and stderr go to `log`.
  Process(const std::vector<std::string>& arguments, std::string log);
  // SIGKILL where it still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  bool Running();
  void Signal(int signal);
  // Its exit code, or 128 + signal; nothing when it still runs at the deadline.
  absl::optional<int> Wait(absl::Duration timeout);
  // What it has written, for a failure's message.
  std::string Log() const;

 private:
  pid_t pid_ = -1;
  absl::optional<int> exit_;
  const std::string log_;
};

// The child of a process that has this name (as far as the kernel keeps it);
// 0: there is none.
pid_t ChildOf(pid_t parent, const std::string& name);

// Polls until `condition` holds; false at the deadline.
bool WaitUntil(const std::function<bool()>& condition,
               absl::Duration timeout = absl::Seconds(30));

// The path of a binary that the test has as data, "daemon/weightsyncd".
std::string DataPath(const std::string& path);

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_PROCESSES_H_
