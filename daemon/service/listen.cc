#include "daemon/service/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

absl::Status Invalid(absl::string_view flag, const std::string& why) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, "ADDRESS_INVALID",
                     absl::StrCat("--", flag, why));
}

absl::Status NoAddress(absl::string_view flag, absl::string_view text,
                       absl::string_view examples) {
  return Invalid(flag, absl::StrCat("=", text,
                                    " is no address; give a numeric one such "
                                    "as ",
                                    examples));
}

constexpr char kWithPort[] = "127.0.0.1:7670, [::1]:7670 or 10.0.0.4:7670";

absl::Status SystemError(absl::string_view reason, absl::string_view what) {
  const int error = errno;
  return ErrorStatus(absl::StatusCode::kUnavailable, reason,
                     absl::StrCat(what, ": ", strerror(error)));
}

}  // namespace

std::string HostPort::text() const {
  return absl::StrContains(host, ":") ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

namespace {

absl::optional<HostPort> Host(absl::string_view text) {
  HostPort address;
  address.host = text == "localhost" ? "127.0.0.1" : std::string(text);
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) {
    address.loopback = (ntohl(v4.s_addr) >> 24) == 127;
    address.wildcard = v4.s_addr == 0;
  } else if (inet_pton(AF_INET6, address.host.c_str(), &v6) == 1) {
    address.loopback = IN6_IS_ADDR_LOOPBACK(&v6);
    address.wildcard = IN6_IS_ADDR_UNSPECIFIED(&v6);
  } else {
    return absl::nullopt;
  }
  return address;
}

}  // namespace

absl::StatusOr<HostPort> ParseHost(absl::string_view text,
                                   absl::string_view flag) {
  auto address = Host(text);
  if (!address.has_value()) {
    return NoAddress(flag, text, "127.0.0.1, ::1 or 10.0.0.4");
  }
  return *std::move(address);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text,
                                       absl::string_view flag) {
  const size_t colon = text.rfind(':');
  int port;
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return NoAddress(flag, text, kWithPort);
  }
  absl::string_view host = text.substr(0, colon);
  const bool bracketed = absl::ConsumePrefix(&host, "[");
  if (bracketed != absl::ConsumeSuffix(&host, "]")) {
    return NoAddress(flag, text, kWithPort);
  }
  auto address = Host(host);
  if (!address.has_value() ||
      bracketed != absl::StrContains(address->host, ":")) {
    return NoAddress(flag, text, kWithPort);
  }
  address->port = port;
  return *std::move(address);
}

absl::Status CheckApart(absl::Span<const ListenFlag> places) {
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const HostPort& a = places[j].address;
      const HostPort& b = places[i].address;
      const bool family =
          absl::StrContains(a.host, ":") == absl::StrContains(b.host, ":");
      if (a.port == 0 || a.port != b.port || !family ||
          !(a.host == b.host || a.wildcard || b.wildcard)) {
        continue;
      }
      const std::string places_text =
          a.text() == b.text() ? a.text()
                               : absl::StrCat(a.text(), " and ", b.text());
      if (places[i].flag == places[j].flag) {
        return Invalid(places[i].flag,
                       absl::StrCat(" names ", places_text,
                                    ", which is one place twice: name it once, "
                                    "or give another port"));
      }
      return Invalid(
          places[j].flag,
          absl::StrCat(" and --", places[i].flag, " both name ", places_text,
                       ": give one of them another port"));
    }
  }
  return absl::OkStatus();
}

bool IsElsewhere(absl::string_view dialled) {
  if (absl::StartsWith(dialled, "unix:")) return false;
  absl::string_view host = dialled.substr(0, dialled.rfind(':'));
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  const auto address = Host(host);
  if (!address.has_value() || address->loopback || address->wildcard) {
    return false;
  }
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return false;
  bool here = false;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    const void* bytes = nullptr;
    if (family == AF_INET) {
      bytes = &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr;
    } else if (family == AF_INET6) {
      bytes = &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
    }
    char text[INET6_ADDRSTRLEN];
    here = here || (bytes != nullptr &&
                    inet_ntop(family, bytes, text, sizeof(text)) != nullptr &&
                    address->host == text);
  }
  freeifaddrs(all);
  return !here;
}

absl::Status CheckDialled(absl::string_view address) {
  absl::string_view rest = address;
  bool fine;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    fine = !rest.empty();
  } else {
    const size_t colon = rest.rfind(':');
    int port = 0;
    fine = colon != absl::string_view::npos && colon > 0 &&
           absl::SimpleAtoi(rest.substr(colon + 1), &port) && port > 0 &&
           port <= 65535;
    const absl::string_view host = rest.substr(0, fine ? colon : 0);
    const bool v6 = absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
    for (const char c : host) {
      fine = fine && absl::ascii_isgraph(c) && c != '/' && (v6 || c != ':');
    }
  }
  if (fine) return absl::OkStatus();
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "ADDRESS_INVALID",
      absl::StrCat("--coordinator_address=", address,
                   " names no daemon; give HOST:PORT, such as trainer-0:7670 "
                   "or [fd00::4]:7670, or unix:PATH"));
}

absl::Status CheckReach(const HostPort& address, bool insecure,
                        absl::string_view flag) {
  if (address.loopback || insecure) return absl::OkStatus();
  return ErrorStatus(
      absl::StatusCode::kFailedPrecondition, "INSECURE_REQUIRED",
      absl::StrCat(
          "--", flag, "=", address.host,
          " can be reached from other machines, and there is no TLS yet: "
          "whoever reaches it can ",
          flag == "http_address"
              ? "read the figures of this node (nothing can be changed there)"
              : "read and replace weights",
          ". Say --insecure if that is as it should be"));
}

absl::Status WhyNotListen(const HostPort& address, absl::string_view flag) {
  sockaddr_storage storage = {};
  socklen_t size;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
    storage.ss_family = AF_INET;
    v4->sin_port = htons(address.port);
    size = sizeof(*v4);
  } else {
    storage.ss_family = AF_INET6;
    inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr);
    v6->sin6_port = htons(address.port);
    size = sizeof(*v6);
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return SystemError("LISTEN_FAILED", "cannot make a socket");
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, reinterpret_cast<sockaddr*>(&storage), size) == 0 &&
      listen(fd, 1) == 0) {
    return absl::OkStatus();
  }
  if (errno == EADDRNOTAVAIL) {
    return Invalid(flag, absl::StrCat("=", address.host,
                                      " is not an address of this machine; `ip "
                                      "address` shows which ones are"));
  }
  if (errno == EADDRINUSE) {
    return ErrorStatus(
        absl::StatusCode::kAlreadyExists, "SOCKET_IN_USE",
        absl::StrCat("another process listens at ", address.text(),
                     "; end it, or give this daemon another --", flag));
  }
  return SystemError("LISTEN_FAILED", absl::StrCat("cannot listen at --", flag,
                                                   "=", address.text()));
}

absl::Status MakeDirectories(const std::string& directory, int mode) {
  for (size_t slash = directory.find('/', 1);;
       slash = directory.find('/', slash + 1)) {
    const std::string part = directory.substr(0, slash);
    struct stat info;
    if (mkdir(part.c_str(), mode) != 0 &&
        !(errno == EEXIST ||
          (stat(part.c_str(), &info) == 0 && S_ISDIR(info.st_mode)))) {
      return SystemError("DIRECTORY_FAILED",
                         absl::StrCat("cannot make directory ", part));
    }
    if (slash == std::string::npos) return absl::OkStatus();
  }
}

absl::StatusOr<std::unique_ptr<DirectoryClaim>> DirectoryClaim::Take(
    const std::string& directory) {
  const int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    return SystemError("DIRECTORY_FAILED",
                       absl::StrCat("cannot open ", directory));
  auto claim = absl::WrapUnique(new DirectoryClaim(fd));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      return SystemError("DIRECTORY_FAILED",
                         absl::StrCat("cannot lock ", directory));
    }
    return ErrorStatus(
        absl::StatusCode::kAlreadyExists, "STATE_DIR_IN_USE",
        absl::StrCat("another daemon keeps its state in ", directory,
                     "; give this one another --state_dir"));
  }
  return claim;
}

DirectoryClaim::~DirectoryClaim() { close(fd_); }

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  const std::string temporary = absl::StrCat(path, ".tmp.", getpid());
  const int fd =
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0)
    return SystemError("FILE_FAILED", absl::StrCat("cannot write ", temporary));
  const ssize_t written = write(fd, contents.data(), contents.size());
  bool ok = written == static_cast<ssize_t>(contents.size()) && fsync(fd) == 0;
  ok = close(fd) == 0 && ok;
  if (!ok || rename(temporary.c_str(), path.c_str()) != 0) {
    absl::Status status =
        SystemError("FILE_FAILED", absl::StrCat("cannot write ", path));
    unlink(temporary.c_str());
    return status;
  }
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "."
                                : slash == 0               ? "/"
                                             : path.substr(0, slash);
  const int directory_fd =
      open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory_fd >= 0) {
    fsync(directory_fd);
    close(directory_fd);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT) return std::string();
    return SystemError("FILE_FAILED", absl::StrCat("cannot read ", path));
  }
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  char buffer[4096];
  const ssize_t size = read(fd, buffer, sizeof(buffer));
  if (size < 0)
    return SystemError("FILE_FAILED", absl::StrCat("cannot read ", path));
  return std::string(buffer, size);
}

}  // namespace daemon
}  // namespace weightsync
