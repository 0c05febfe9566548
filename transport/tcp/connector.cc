#include "transport/tcp/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/error.h"
#include "transport/group.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr int64_t kRetryNanos = 50000000;
constexpr int64_t kRefusedNanos = 2000000000;

// One attempt. Knows the deadline and who may interrupt.
class Attempt {
 public:
  Attempt(int64_t deadline_nanos, const std::atomic<bool>& cancelled,
          WakeFd* wake)
      : deadline_(deadline_nanos), cancelled_(cancelled), wake_(wake) {}

  // Waits until `fd` (-1: none) is ready for `events`. DEADLINE_EXCEEDED,
  // CANCELLED.
  absl::Status Await(int fd, int16_t events, int64_t until) {
    while (!cancelled_.load()) {
      const int64_t left = std::min(until, deadline_) - NowNanos();
      if (left <= 0) return absl::DeadlineExceededError("no answer");
      pollfd waits[2] = {{fd, events, 0}, {wake_->fd(), POLLIN, 0}};
      poll(waits, 2, static_cast<int>(left / 1000000) + 1);
      if (fd >= 0 && waits[0].revents != 0) return absl::OkStatus();
    }
    return absl::CancelledError("aborted while joining");
  }

  absl::Status Write(int fd, absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n =
          send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) {
        bytes.remove_prefix(static_cast<size_t>(n));
        continue;
      }
      if (errno != EAGAIN && errno != EINTR)
        return ErrnoError("sending the handshake", errno);
      if (absl::Status status = Await(fd, POLLOUT, deadline_); !status.ok())
        return status;
    }
    return absl::OkStatus();
  }

  absl::Status Read(int fd, char* to, size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = recv(fd, to, bytes, MSG_DONTWAIT);
      if (n == 0)
        return absl::UnavailableError(
            "the peer closed the connection during the handshake");
      if (n > 0) {
        to += n;
        bytes -= static_cast<size_t>(n);
        continue;
      }
      if (errno != EAGAIN && errno != EINTR)
        return ErrnoError("receiving the handshake", errno);
      if (absl::Status status = Await(fd, POLLIN, deadline_); !status.ok())
        return status;
    }
    return absl::OkStatus();
  }

  absl::Status Handshake(int fd, const Hello& hello) {
    if (absl::Status status = Write(fd, EncodeHello(hello)); !status.ok())
      return status;
    std::string envelope(kEnvelopeHeaderBytes, '\0');
    if (absl::Status status = Read(fd, &envelope[0], envelope.size());
        !status.ok())
      return status;
    absl::StatusOr<uint32_t> length =
        DecodeEnvelopeHeader(envelope, /*hello=*/false);
    if (!length.ok()) return length.status();
    envelope.resize(kEnvelopeHeaderBytes + *length);
    if (absl::Status status =
            Read(fd, &envelope[kEnvelopeHeaderBytes], *length);
        !status.ok())
      return status;
    return DecodeWelcome(envelope);
  }

  int64_t deadline() const { return deadline_; }

 private:
  const int64_t deadline_;
  const std::atomic<bool>& cancelled_;
  WakeFd* const wake_;
};

}  // namespace

absl::StatusOr<Fd> ConnectStream(const std::string& address, const Hello& hello,
                                 const HopOptions& options,
                                 int64_t deadline_nanos,
                                 const std::atomic<bool>& cancelled,
                                 WakeFd* wake) {
  Attempt attempt(deadline_nanos, cancelled, wake);
  const int64_t refused_until =
      std::min(deadline_nanos, NowNanos() + kRefusedNanos);
  absl::Status last = absl::UnavailableError("not tried");
  while (true) {
    bool refused = false;
    absl::Status status =
        options.faults == nullptr
            ? absl::OkStatus()
            : options.faults->OnConnect(options.from, options.to);
    if (status.ok()) {
      absl::StatusOr<Fd> fd = StartConnect(address);
      status = fd.status();
      if (status.ok())
        status = attempt.Await(fd->get(), POLLOUT, deadline_nanos);
      if (status.ok()) {
        const int error = ConnectResult(fd->get());
        if (error != 0)
          status = ErrnoError(absl::StrCat("connecting to ", address), error);
        refused = error != 0;
      }
      if (status.ok()) {
        PrepareStream(fd->get());
        status = attempt.Handshake(fd->get(), hello);
        if (status.ok()) return fd;
      }
    } else {
      refused = true;
    }
    const std::string reason = ReasonOf(status);
    if (absl::IsCancelled(status)) return status;
    if (absl::IsDeadlineExceeded(status) && reason.empty()) {
      // What the attempt before ended with says more than that time is up.
      const absl::string_view why =
          absl::IsDeadlineExceeded(last) || last.message() == "not tried"
              ? status.message()
              : last.message();
      return EdgeError(
          absl::StatusCode::kDeadlineExceeded, "JOIN_TIMEOUT", options.from,
          options.to, absl::StrCat(options.to, " did not join in time: ", why));
    }
    if (reason == "UNKNOWN_GROUP" || reason == "BUSY") {
      last = status;
    } else if (!reason.empty()) {
      return EdgeError(status.code(), reason, options.from, options.to,
                       status.message());
    } else {
      last = status;
      if (NowNanos() > refused_until ||
          (!refused && NowNanos() > deadline_nanos))
        return BlameEdge(options, status);
    }
    if (absl::Status waited = attempt.Await(-1, 0, NowNanos() + kRetryNanos);
        absl::IsCancelled(waited))
      return waited;
    if (NowNanos() > deadline_nanos) {
      return EdgeError(
          absl::StatusCode::kDeadlineExceeded, "JOIN_TIMEOUT", options.from,
          options.to,
          absl::StrCat(options.to, " did not join in time: ", last.message()));
    }
  }
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
