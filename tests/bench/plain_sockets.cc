#include "tests/bench/plain_sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

#include "absl/time/clock.h"
#include "glog/logging.h"

namespace weightsync {
namespace bench {
namespace {

constexpr int64_t kCallBytes = 1 << 20;

sockaddr_in Address(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  CHECK_EQ(inet_pton(AF_INET, host.c_str(), &address.sin_addr), 1) << host;
  return address;
}

// Calls `each` with the part of the bytes that belongs to each socket.
void InParts(const std::vector<int>& sockets, int64_t bytes,
             const std::function<void(int, int64_t, int64_t)>& each) {
  const int64_t count = static_cast<int64_t>(sockets.size());
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = bytes * i / count, to = bytes * (i + 1) / count;
    const int fd = sockets[i];
    threads.emplace_back([=, &each] { each(fd, from, to - from); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int ListenPlain(const std::string& host, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  PCHECK(fd >= 0);
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  const sockaddr_in address = Address(host, port);
  PCHECK(bind(fd, reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) == 0)
      << host << ":" << port;
  PCHECK(listen(fd, 64) == 0);
  return fd;
}

int AcceptPlain(int listener) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  PCHECK(fd >= 0);
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

int ConnectPlain(const std::string& host, int port) {
  const sockaddr_in address = Address(host, port);
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (true) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    PCHECK(fd >= 0);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) == 0) {
      const int one = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
      return fd;
    }
    PCHECK(absl::Now() < until) << "connecting to " << host << ":" << port;
    close(fd);
    absl::SleepFor(absl::Milliseconds(20));
  }
}

void WriteAll(int fd, const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(
        fd, at, static_cast<size_t>(std::min(bytes, kCallBytes)), MSG_NOSIGNAL);
    PCHECK(n > 0) << "send";
    at += n;
    bytes -= n;
  }
}

void ReadAll(int fd, void* data, int64_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n =
        recv(fd, at, static_cast<size_t>(std::min(bytes, kCallBytes)), 0);
    PCHECK(n > 0) << "recv";
    at += n;
    bytes -= n;
  }
}

void WriteLine(int fd, const std::string& line) {
  const std::string text = line + "\n";
  WriteAll(fd, text.data(), static_cast<int64_t>(text.size()));
}

std::string ReadLine(int fd) {
  std::string line;
  char byte;
  while (true) {
    ReadAll(fd, &byte, 1);
    if (byte == '\n') return line;
    line += byte;
  }
}

void SendPlain(const std::vector<int>& sockets, const char* data,
               int64_t bytes) {
  InParts(sockets, bytes, [data](int fd, int64_t from, int64_t count) {
    WriteAll(fd, data + from, count);
    char answer;
    ReadAll(fd, &answer, 1);
  });
}

void ReceivePlain(const std::vector<int>& sockets, char* data, int64_t bytes) {
  InParts(sockets, bytes, [data](int fd, int64_t from, int64_t count) {
    ReadAll(fd, data + from, count);
    WriteAll(fd, "k", 1);
  });
}

}  // namespace bench
}  // namespace weightsync
