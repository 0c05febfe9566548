#include "tests/chaos/control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

namespace weightsync {
namespace chaos {
namespace {

constexpr absl::Duration kLongestHold = absl::Seconds(3);

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
  return address;
}

[[noreturn]] void Die(const char* what, const std::string& path) {
  fprintf(stderr, "%s %s: %s\n", what, path.c_str(), strerror(errno));
  _exit(9);
}

}  // namespace

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

Control::Control(std::string who, const std::string& socket_path,
                 std::string run_socket, const std::string& log,
                 Handler handler)
    : who_(std::move(who)),
      run_socket_(std::move(run_socket)),
      handler_(std::move(handler)) {
  if (!log.empty()) {
    log_ = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (log_ < 0) Die("cannot open", log);
  }
  if (socket_path.empty()) return;
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  unlink(socket_path.c_str());
  const sockaddr_un address = AddressOf(socket_path);
  if (socket_ < 0 || bind(socket_, reinterpret_cast<const sockaddr*>(&address),
                          sizeof(address)) != 0) {
    Die("cannot bind", socket_path);
  }
  std::thread([this] { Listen(); }).detach();
}

void Control::Log(nlohmann::json line) {
  if (log_ < 0) return;
  line["t"] = MonotonicNanos();
  line["who"] = who_;
  const std::string text = line.dump() + "\n";
  // One call, so that a line is there whole or not at all.
  if (write(log_, text.data(), text.size()) !=
      static_cast<ssize_t>(text.size())) {
    Die("cannot write the log of", who_);
  }
}

bool Control::Hit(absl::string_view point) {
  if (armed_.id == 0) return false;
  absl::string_view pattern = armed_.point;
  if (absl::ConsumeSuffix(&pattern, "*") ? !absl::StartsWith(point, pattern)
                                         : point != pattern) {
    return false;
  }
  return armed_.skip-- == 0;
}

void Control::Reach(absl::string_view point, absl::string_view update) {
  int64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (Hit(point)) {
      id = held_ = armed_.id;
      armed_ = Armed();
    }
  }
  nlohmann::json line = {{"ev", "point"},
                         {"point", std::string(point)},
                         {"update", std::string(update)}};
  if (id != 0) line["hit"] = id;
  Log(line);
  if (id == 0) return;
  line["who"] = who_;
  line["t"] = MonotonicNanos();
  const std::string text = line.dump();
  const sockaddr_un address = AddressOf(run_socket_);
  if (sendto(socket_, text.data(), text.size(), 0,
             reinterpret_cast<const sockaddr*>(&address),
             sizeof(address)) < 0) {
    return;
  }
  absl::MutexLock lock(&mutex_);
  const auto released = [this, id]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return held_ != id;
  };
  mutex_.AwaitWithTimeout(absl::Condition(&released), kLongestHold);
}

void Control::Listen() {
  char buffer[8192];
  while (true) {
    const ssize_t n = recv(socket_, buffer, sizeof(buffer), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) Die("cannot receive as", who_);
    const nlohmann::json command = nlohmann::json::parse(
        buffer, buffer + n, /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (!command.is_object()) continue;
    const std::string cmd = command.value("cmd", "");
    if (cmd == "arm") {
      absl::MutexLock lock(&mutex_);
      armed_.id = command.value("id", int64_t{0});
      armed_.point = command.value("point", "");
      armed_.skip = command.value("skip", int64_t{0});
    } else if (cmd == "disarm") {
      absl::MutexLock lock(&mutex_);
      armed_ = Armed();
    } else if (cmd == "go") {
      absl::MutexLock lock(&mutex_);
      if (held_ == command.value("id", int64_t{0})) held_ = 0;
    } else if (handler_) {
      handler_(command);
    }
  }
}

}  // namespace chaos
}  // namespace weightsync
