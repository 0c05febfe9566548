#include "transport/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Resolve(const std::string& host,
                                  const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                port.c_str(), &hints, &list);
  if (error != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_ADDRESS",
                     absl::StrCat("cannot resolve '", host, "' port '", port,
                                  "': ", gai_strerror(error)));
  }
  return Addresses(list);
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Fd::release() { return std::exchange(fd_, -1); }

void Fd::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int64_t NowNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

WakeFd::WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  PCHECK(fd_) << "eventfd";
}

void WakeFd::Wake() {
  const uint64_t one = 1;
  // Full means that it is awake already.
  (void)!write(fd_.get(), &one, sizeof(one));
}

void WakeFd::Drain() {
  uint64_t count;
  (void)!read(fd_.get(), &count, sizeof(count));
}

absl::Status ErrnoError(absl::string_view what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

absl::Status SplitAddress(absl::string_view address, std::string* host,
                          std::string* port) {
  const size_t colon = address.rfind(':');
  int number = 0;
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(address.substr(colon + 1), &number) || number < 0 ||
      number > 65535) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_ADDRESS",
                     absl::StrCat("'", address, "' is not host:port"));
  }
  absl::string_view name = address.substr(0, colon);
  if (name.size() >= 2 && name.front() == '[' && name.back() == ']')
    name = name.substr(1, name.size() - 2);
  *host = std::string(name);
  *port = absl::StrCat(number);
  return absl::OkStatus();
}

std::string JoinAddress(absl::string_view host, int port) {
  const bool v6 = host.find(':') != absl::string_view::npos;
  return v6 ? absl::StrCat("[", host, "]:", port)
            : absl::StrCat(host, ":", port);
}

absl::StatusOr<Fd> Listen(const std::string& host, int first_port,
                          int last_port, int* port) {
  absl::Status last = absl::OkStatus();
  for (int try_port = first_port; try_port <= (first_port == 0 ? 0 : last_port);
       ++try_port) {
    absl::StatusOr<Addresses> addresses =
        Resolve(host, absl::StrCat(try_port), AI_PASSIVE);
    if (!addresses.ok()) return addresses.status();
    const addrinfo* a = addresses->get();
    Fd fd(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return ErrnoError("socket", errno);
    const int one = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd.get(), a->ai_addr, a->ai_addrlen) != 0 ||
        listen(fd.get(), 128) != 0) {
      last = ErrnoError(
          absl::StrCat("listening on ", JoinAddress(host, try_port)), errno);
      if (errno != EADDRINUSE) return last;
      continue;
    }
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) !=
        0) {
      return ErrnoError("getsockname", errno);
    }
    *port = ntohs(bound.ss_family == AF_INET6
                      ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                      : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
    return fd;
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, "NO_PORT",
      absl::StrCat("no free data port in ", first_port, "-", last_port, " on ",
                   host, " (", last.message(), "): widen the range"));
}

absl::StatusOr<Fd> StartConnect(const std::string& address) {
  std::string host, port;
  if (absl::Status status = SplitAddress(address, &host, &port); !status.ok())
    return status;
  absl::StatusOr<Addresses> addresses = Resolve(host, port, 0);
  if (!addresses.ok()) return addresses.status();
  const addrinfo* a = addresses->get();
  Fd fd(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return ErrnoError("socket", errno);
  if (connect(fd.get(), a->ai_addr, a->ai_addrlen) != 0 &&
      errno != EINPROGRESS) {
    return ErrnoError(absl::StrCat("connecting to ", address), errno);
  }
  return fd;
}

int ConnectResult(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void PrepareStream(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
