// What the machine itself can do, measured beside what weightsync does: copies
// by memcpy, and bytes through plain sockets (tests/bench/plain_sockets.h).
// Errors end the process.
#ifndef WEIGHTSYNC_TESTS_BENCH_FLOOR_H_
#define WEIGHTSYNC_TESTS_BENCH_FLOOR_H_

#include <cstdint>
#include <string>

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
// of the first to the end of the last. Each call of memcpy copies `call_bytes`;
// 0: all that is its thread's. REQUIRES: target.bytes() >= source.bytes().
absl::Duration TimeMemcpy(const WarmMemory& source, const WarmMemory& target,
                          int threads, int64_t call_bytes = 0);

// The receiving end of plain sockets, for the rest of the process's life: takes
// what TimeSockets sends, at most `bytes` at a time, into one warm buffer.
void StartSink(const std::string& host, int port, int64_t bytes);

// Sends `source` to a sink over that many connections, made before the clock
// starts; the time from the first byte until the sink has all.
absl::Duration TimeSockets(const WarmMemory& source, const std::string& host,
                           int port, int streams);

}  // namespace bench
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_BENCH_FLOOR_H_
