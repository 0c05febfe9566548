#include "tests/bench/floor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "glog/logging.h"
#include "tests/bench/plain_sockets.h"

namespace weightsync {
namespace bench {

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
                          int threads, int64_t call_bytes) {
  CHECK_GE(target.bytes(), source.bytes());
  if (call_bytes <= 0) call_bytes = source.bytes();
  const absl::Time start = absl::Now();
  std::vector<std::thread> copies;
  for (int i = 0; i < threads; ++i) {
    const int64_t begin = source.bytes() * i / threads;
    const int64_t end = source.bytes() * (i + 1) / threads;
    copies.emplace_back([&source, &target, begin, end, call_bytes] {
      for (int64_t at = begin; at < end; at += call_bytes) {
        std::memcpy(target.data() + at, source.data() + at,
                    std::min(call_bytes, end - at));
      }
    });
  }
  for (std::thread& copy : copies) copy.join();
  return absl::Now() - start;
}

void StartSink(const std::string& host, int port, int64_t bytes) {
  const int listener = ListenPlain(host, port);
  std::thread([listener, bytes] {
    WarmMemory memory(bytes);
    while (true) {
      // The first connection says how many there will be, and of how many
      // bytes.
      std::vector<int> sockets = {AcceptPlain(listener)};
      const int64_t count = std::stoll(ReadLine(sockets[0]));
      const int64_t sent = std::stoll(ReadLine(sockets[0]));
      CHECK_LE(sent, memory.bytes());
      while (static_cast<int64_t>(sockets.size()) < count) {
        WriteLine(sockets.back(), "next");
        sockets.push_back(AcceptPlain(listener));
      }
      WriteLine(sockets.back(), "ready");
      ReceivePlain(sockets, memory.data(), sent);
      for (int socket : sockets) close(socket);
    }
  }).detach();
}

absl::Duration TimeSockets(const WarmMemory& source, const std::string& host,
                           int port, int streams) {
  std::vector<int> sockets;
  while (static_cast<int>(sockets.size()) < streams) {
    // One after the other, so that both ends have them in one order.
    sockets.push_back(ConnectPlain(host, port));
    if (sockets.size() == 1) {
      WriteLine(sockets[0], std::to_string(streams));
      WriteLine(sockets[0], std::to_string(source.bytes()));
    }
    CHECK_EQ(ReadLine(sockets.back()),
             static_cast<int>(sockets.size()) == streams ? "ready" : "next");
  }
  const absl::Time start = absl::Now();
  SendPlain(sockets, source.data(), source.bytes());
  const absl::Duration time = absl::Now() - start;
  for (int socket : sockets) close(socket);
  return time;
}

}  // namespace bench
}  // namespace weightsync
