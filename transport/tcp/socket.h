#ifndef WEIGHTSYNC_TRANSPORT_TCP_SOCKET_H_
#define WEIGHTSYNC_TRANSPORT_TCP_SOCKET_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// Nanoseconds on a clock that nobody sets.
int64_t NowNanos();

// Wakes a thread that polls. Thread-safe.
class WakeFd {
 public:
  WakeFd();
  int fd() const { return fd_.get(); }
  void Wake();
  void Drain();

 private:
  Fd fd_;
};

absl::Status ErrnoError(absl::string_view what, int error);

// "host:port", "[v6]:port"; the host may be a name.
absl::Status SplitAddress(absl::string_view address, std::string* host,
                          std::string* port);
std::string JoinAddress(absl::string_view host, int port);

// Listens on `host`, on the first free port of [first_port, last_port], or on
// one that the kernel chooses if first_port is 0. Non-blocking. Sets *port.
// RESOURCE_EXHAUSTED (NO_PORT) when all are taken.
absl::StatusOr<Fd> Listen(const std::string& host, int first_port,
                          int last_port, int* port);

// Starts to connect; the socket does not block.
absl::StatusOr<Fd> StartConnect(const std::string& address);
// After the socket became writable: whether the connection stands. Returns an
// errno, 0 for success.
int ConnectResult(int fd);

// No delay, close-on-exec, not blocking.
void PrepareStream(int fd);

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_SOCKET_H_
