// What the machine itself can do, measured beside what weightsync does: copies
// by memcpy, and bytes through plain sockets.
#ifndef WEIGHTSYNC_TESTS_BENCH_FLOOR_H_
#define WEIGHTSYNC_TESTS_BENCH_FLOOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace weightsync {
namespace bench {

// Anonymous memory with every page faulted in.
class WarmMemory {
 public:
  explicit WarmMemory(int64_t bytes);
  ~WarmMemory();

  WarmMemory(const WarmMemory&) = delete;
  WarmMemory& operator=(const WarmMemory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t bytes_;
  char* data_;
};

// Copies `source` to `target` with that many threads; the time from the start
// of the first to the end of the last. REQUIRES: target.bytes() >=
// source.bytes().
absl::Duration TimeMemcpy(const WarmMemory& source, const WarmMemory& target,
                          int threads);

// The receiving end of plain sockets: takes what comes into one warm buffer,
// and answers one byte per stream when all of that stream is there.
class SocketSink {
 public:
  // Listens on all addresses; port 0: one that the kernel chooses. `bytes` is
  // the most that one sender may send at a time.
  static absl::StatusOr<std::unique_ptr<SocketSink>> Start(int port,
                                                           int64_t bytes);
  ~SocketSink();

  int port() const { return port_; }

 private:
  SocketSink(int listener, int port, int64_t bytes);
  void Accept();
  void Receive(int socket);

  const int listener_;
  const int port_;
  WarmMemory memory_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Sends `source` to a sink over that many connections, made before the clock
// starts; the time from the first byte until the sink has all.
// UNAVAILABLE when it cannot be reached or breaks off.
absl::StatusOr<absl::Duration> TimeSockets(const WarmMemory& source,
                                           const std::string& host, int port,
                                           int streams);

}  // namespace bench
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_BENCH_FLOOR_H_
