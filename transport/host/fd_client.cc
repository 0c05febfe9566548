#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "transport/error.h"
#include "transport/host/fd_message.h"
#include "transport/host/fd_socket.h"

namespace weightsync {
namespace transport {
namespace {

absl::Status Unreachable(const std::string& path, int error_number) {
  return MakeErrnoError(
      absl::StatusCode::kUnavailable, "FD_SOCKET_UNREACHABLE",
      absl::StrCat("cannot talk to the daemon at ", path,
                   "; is it running, does its socket directory reach into this "
                   "container, and may this "
                   "user use it"),
      error_number);
}

absl::Status TimedOut(const std::string& path) {
  return MakeError(
      absl::StatusCode::kDeadlineExceeded, "FD_SOCKET_TIMEOUT",
      absl::StrCat("the daemon at ", path, " did not answer in time"));
}

// Waits for `events`. False when the deadline came first.
bool WaitFor(int fd, short events, absl::Time deadline) {
  while (true) {
    const int64_t left = absl::ToInt64Milliseconds(
        absl::Ceil(deadline - absl::Now(), absl::Milliseconds(1)));
    pollfd polled = {fd, events, 0};
    const int ready = poll(&polled, 1,
                           static_cast<int>(std::min<int64_t>(
                               std::max<int64_t>(left, 0), 1 << 30)));
    if (ready > 0) return true;
    if (ready == 0 && left <= 0) return false;
  }
}

// Sends `request` with `fd` if it is one; the rest of an OK reply, and its
// descriptor.
absl::StatusOr<std::string> Exchange(const std::string& path,
                                     const std::string& request, int fd,
                                     absl::Duration timeout,
                                     UniqueFd* reply_fd) {
  const absl::Time deadline = absl::Now() + timeout;
  sockaddr_un address;
  std::memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path))
    return Unreachable(path, ENAMETOOLONG);
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd connection(
      socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection.valid()) return Unreachable(path, errno);
  while (connect(connection.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)) != 0) {
    // A unix socket whose queue is full does not become ready later; it has to
    // be asked again.
    if (errno != EAGAIN && errno != EINTR) return Unreachable(path, errno);
    if (absl::Now() >= deadline) return TimedOut(path);
    absl::SleepFor(absl::Milliseconds(5));
  }
  if (!SendFdMessage(connection.get(), request, fd))
    return Unreachable(path, errno);
  if (!WaitFor(connection.get(), POLLIN, deadline)) return TimedOut(path);
  std::string reply;
  const ssize_t received = ReceiveFdMessage(connection.get(), &reply, reply_fd);
  if (received < 0) return Unreachable(path, errno);
  if (received <= static_cast<ssize_t>(kFdMessageMagicBytes) ||
      reply.compare(0, kFdMessageMagicBytes, kFdMessageMagic,
                    kFdMessageMagicBytes) != 0) {
    return Unreachable(path, EPROTO);
  }
  const auto code = static_cast<absl::StatusCode>(reply[kFdMessageMagicBytes]);
  reply.erase(0, kFdMessageMagicBytes + 1);
  if (code == absl::StatusCode::kOk) return reply;
  const size_t zero = std::min(reply.find('\0'), reply.size());
  return MakeError(code, reply.substr(0, zero),
                   zero < reply.size() ? reply.substr(zero + 1) : "");
}

}  // namespace

absl::StatusOr<UniqueFd> RedeemFd(const std::string& path,
                                  const std::string& token,
                                  absl::Duration timeout) {
  UniqueFd fd;
  const absl::StatusOr<std::string> reply = Exchange(
      path,
      absl::StrCat(absl::string_view(kFdMessageMagic, kFdMessageMagicBytes),
                   "R", token),
      -1, timeout, &fd);
  if (!reply.ok()) return reply.status();
  // This process's table of descriptors is full: the kernel drops what does not
  // fit.
  if (!fd.valid()) return Unreachable(path, EMFILE);
  return fd;
}

absl::StatusOr<std::string> DepositFd(const std::string& path, int fd,
                                      absl::Duration timeout) {
  UniqueFd none;
  return Exchange(
      path,
      absl::StrCat(absl::string_view(kFdMessageMagic, kFdMessageMagicBytes),
                   "D"),
      fd, timeout, &none);
}

}  // namespace transport
}  // namespace weightsync
