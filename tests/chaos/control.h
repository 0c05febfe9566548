// What every process of a chaos run has: a log that survives SIGKILL, a socket
// at which it is told what to do, and points at which it can be held while the
// run does something to it or to another.
#ifndef WEIGHTSYNC_TESTS_CHAOS_CONTROL_H_
#define WEIGHTSYNC_TESTS_CHAOS_CONTROL_H_

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "nlohmann/json.hpp"

namespace weightsync {
namespace chaos {

// Nanoseconds of CLOCK_MONOTONIC: one clock for all processes of a machine.
int64_t MonotonicNanos();

// Datagrams in, each a JSON object with "cmd":
//   arm   {id, point, skip}  hold this process when it reaches `point` (exact,
//         or a prefix that ends in '*') after `skip` more times; once
//   go    {id}               let it go on
//   disarm
// Everything else goes to the handler. When an armed point is reached the
// datagram {"hit": id, "who", "point", "update", "t"} goes to the run's socket,
// and the thread waits for "go", at most three seconds.
//
// Thread-safe. Lives as long as the process.
class Control {
 public:
  using Handler = std::function<void(const nlohmann::json& command)>;

  // Ends the process where it cannot. Empty paths: nothing is heard, said or
  // logged.
  Control(std::string who, const std::string& socket, std::string run_socket,
          const std::string& log, Handler handler = nullptr);
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // One line, with "t" and "who": one write to a file opened for appending.
  void Log(nlohmann::json line);

  void Reach(absl::string_view point, absl::string_view update);

 private:
  struct Armed {
    int64_t id = 0;
    std::string point;
    int64_t skip = 0;
  };

  void Listen();
  bool Hit(absl::string_view point) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string who_;
  const std::string run_socket_;
  const Handler handler_;
  int socket_ = -1;
  int log_ = -1;

  absl::Mutex mutex_;
  Armed armed_ ABSL_GUARDED_BY(mutex_);  // id 0: none
  int64_t held_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace chaos
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_CONTROL_H_
