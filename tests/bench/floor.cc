#include "tests/bench/floor.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"

namespace weightsync {
namespace bench {
namespace {

// How much one system call sends or receives.
constexpr int64_t kStep = 1 << 20;

// What a sender says first on each connection.
struct Header {
  int64_t offset;
  int64_t bytes;
};

bool ReadAll(int socket, char* data, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = recv(socket, data, std::min(bytes, kStep), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data += n;
    bytes -= n;
  }
  return true;
}

bool WriteAll(int socket, const char* data, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = send(socket, data, std::min(bytes, kStep), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data += n;
    bytes -= n;
  }
  return true;
}

}  // namespace

WarmMemory::WarmMemory(int64_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  CHECK(data != MAP_FAILED) << "no memory for " << bytes << " bytes";
  data_ = static_cast<char*>(data);
  // A page that was only read is the kernel's one page of zeros.
  for (int64_t i = 0; i < bytes; i += 4096) data_[i] = static_cast<char>(i);
}

WarmMemory::~WarmMemory() { munmap(data_, bytes_); }

absl::Duration TimeMemcpy(const WarmMemory& source, const WarmMemory& target,
                          int threads) {
  CHECK_GE(target.bytes(), source.bytes());
  const absl::Time start = absl::Now();
  std::vector<std::thread> copies;
  for (int i = 0; i < threads; ++i) {
    const int64_t begin = source.bytes() * i / threads;
    const int64_t end = source.bytes() * (i + 1) / threads;
    copies.emplace_back([&source, &target, begin, end] {
      std::memcpy(target.data() + begin, source.data() + begin, end - begin);
    });
  }
  for (std::thread& copy : copies) copy.join();
  return absl::Now() - start;
}

absl::StatusOr<std::unique_ptr<SocketSink>> SocketSink::Start(int port,
                                                              int64_t bytes) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) return absl::UnavailableError("no socket");
  const int one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) !=
          0) {
    const std::string error = std::strerror(errno);
    close(listener);
    return absl::UnavailableError(
        absl::StrCat("cannot listen on port ", port, ": ", error));
  }
  return std::unique_ptr<SocketSink>(
      new SocketSink(listener, ntohs(address.sin_port), bytes));
}

SocketSink::SocketSink(int listener, int port, int64_t bytes)
    : listener_(listener), port_(port), memory_(bytes) {
  thread_ = std::thread([this] { Accept(); });
}

SocketSink::~SocketSink() {
  stopping_ = true;
  shutdown(listener_, SHUT_RDWR);
  thread_.join();
  close(listener_);
}

void SocketSink::Accept() {
  std::vector<std::thread> receivers;
  while (!stopping_) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      break;
    }
    receivers.emplace_back([this, socket] {
      Receive(socket);
      close(socket);
    });
  }
  for (std::thread& receiver : receivers) receiver.join();
}

void SocketSink::Receive(int socket) {
  Header header;
  if (!ReadAll(socket, reinterpret_cast<char*>(&header), sizeof(header))) {
    return;
  }
  if (header.offset < 0 || header.bytes < 0 ||
      header.offset > memory_.bytes() - header.bytes) {
    return;
  }
  const char done = 1;
  // Says that it is ready to receive, so that starting a thread is not
  // measured.
  if (!WriteAll(socket, &done, 1)) return;
  if (!ReadAll(socket, memory_.data() + header.offset, header.bytes)) return;
  WriteAll(socket, &done, 1);
}

absl::StatusOr<absl::Duration> TimeSockets(const WarmMemory& source,
                                           const std::string& host, int port,
                                           int streams) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    return absl::InvalidArgumentError(absl::StrCat(host, " is no address"));
  }
  std::vector<int> sockets;
  std::vector<Header> headers;
  bool ok = true;
  for (int i = 0; i < streams && ok; ++i) {
    const int64_t begin = source.bytes() * i / streams;
    const int64_t end = source.bytes() * (i + 1) / streams;
    headers.push_back({begin, end - begin});
    sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int one = 1;
    setsockopt(sockets.back(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    char ready;
    ok = sockets.back() >= 0 &&
         connect(sockets.back(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)) == 0 &&
         WriteAll(sockets.back(), reinterpret_cast<char*>(&headers.back()),
                  sizeof(Header)) &&
         ReadAll(sockets.back(), &ready, 1);
  }
  absl::Duration time;
  if (ok) {
    std::atomic<bool> sent{true};
    const absl::Time start = absl::Now();
    std::vector<std::thread> senders;
    for (int i = 0; i < streams; ++i) {
      senders.emplace_back([&, i] {
        char done;
        if (!WriteAll(sockets[i], source.data() + headers[i].offset,
                      headers[i].bytes) ||
            !ReadAll(sockets[i], &done, 1)) {
          sent = false;
        }
      });
    }
    for (std::thread& sender : senders) sender.join();
    time = absl::Now() - start;
    ok = sent;
  }
  for (int s : sockets) {
    if (s >= 0) close(s);
  }
  if (!ok) {
    return absl::UnavailableError(
        absl::StrCat("plain sockets to ", host, ":", port, " broke off"));
  }
  return time;
}

}  // namespace bench
}  // namespace weightsync
