// A second process of a test: its own program, with a part to play.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_TEST_CHILD_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_TEST_CHILD_H_

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"
#include "transport/eventually.h"

namespace weightsync {
namespace transport {
namespace cuda {

constexpr char kChild[] = "--child=";

inline std::string RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

class Child {
 public:
  explicit Child(const std::string& part,
                 const std::vector<std::string>& environment = {}) {
    int to[2], from[2];
    EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      for (const std::string& setting : environment)
        putenv(const_cast<char*>(setting.c_str()));
      execl("/proc/self/exe", "child", (kChild + part).c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
  }
  ~Child() {
    close(to_);
    if (pid_ > 0) Wait();
    close(from_);
  }
  void Send(const std::string& bytes) {
    const uint32_t size = static_cast<uint32_t>(bytes.size());
    EXPECT_EQ(write(to_, &size, 4), 4);
    EXPECT_EQ(write(to_, bytes.data(), size), ssize_t{size});
  }
  std::string Receive() {
    uint32_t size = 0;
    if (read(from_, &size, 4) != 4) return "(the child has ended)";
    std::string bytes(size, '\0');
    size_t done = 0;
    while (done < size) {
      const ssize_t n = read(from_, &bytes[done], size - done);
      if (n <= 0) return "(the child has ended)";
      done += n;
    }
    return bytes;
  }
  pid_t pid() const { return pid_; }
  void Kill() {
    kill(pid_, SIGKILL);
    Wait();
  }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return status;
  }

 private:
  pid_t pid_;
  int to_, from_;
};

inline std::string FromParent() {
  uint32_t size = 0;
  if (read(0, &size, 4) != 4) return "";
  std::string bytes(size, '\0');
  for (size_t done = 0; done < size;) {
    // A pipe gives as much as it holds.
    const ssize_t n = read(0, &bytes[done], size - done);
    if (n <= 0) _exit(3);
    done += static_cast<size_t>(n);
  }
  return bytes;
}
inline void ToParent(const std::string& bytes) {
  const uint32_t size = static_cast<uint32_t>(bytes.size());
  if (write(1, &size, 4) != 4 || write(1, bytes.data(), size) != ssize_t{size})
    _exit(3);
}

inline std::string Encode(const MemoryTicket& ticket) {
  return absl::StrCat(ticket.bytes, "\n", ticket.read_only, "\n",
                      ticket.address, "\n", ticket.token);
}
inline MemoryTicket DecodeTicket(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  MemoryTicket ticket;
  ticket.kind = MemoryKind::kCuda;
  ticket.bytes = std::stoll(lines[0]);
  ticket.read_only = lines[1] == "1";
  ticket.address = lines[2];
  ticket.token = lines[3];
  return ticket;
}

// Imports what it is told to, says what it reads there, and holds it until it
// is told to let it go.
inline int Worker() {
  TestProcess process;
  const MemoryTicket ticket = DecodeTicket(FromParent());
  auto segment = process->Import(ticket, absl::Seconds(10));
  if (!segment.ok()) {
    ToParent(ReasonOf(segment.status()));
    return 0;
  }
  ToParent("OK");
  while (true) {
    const std::string command = FromParent();
    if (command.empty() || command == "end") break;
    if (command == "read") {
      ToParent(process.Read((*segment)->data(), (*segment)->bytes()) +
               std::to_string((*segment)->Generation(0)));
    } else if (command == "close") {
      segment->reset();
      process->core()->Drain(absl::Seconds(5));
      ToParent("closed");
    } else if (command == "write") {
      const std::string bytes((*segment)->bytes(), 'w');
      CopyTask task;
      task.src = task.dst = (*segment)->data();
      task.run_bytes = 10;
      ToParent(ReasonOf(
          process->Write(absl::MakeConstSpan(bytes.data(), bytes.size()),
                         (*segment)->data())));
    }
  }
  return 0;
}

// A trainer: makes an allocation of cudaMalloc, and tells where a tensor in it
// lies. TRAINER_SEED: of its bytes.
inline int Trainer() {
  const absl::StatusOr<DeviceInfo> device = FindDevice("");
  auto exporter = DeviceExporter::Create(*device);
  void* pointer = nullptr;
  cudaMalloc(&pointer, 10000);
  const char* const seed = getenv("TRAINER_SEED");
  const std::string bytes =
      RandomBytes(10000, seed == nullptr ? 77 : std::atoi(seed));
  cudaMemcpy(pointer, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  auto place = (*exporter)->Describe(static_cast<char*>(pointer) + 100, 500);
  ToParent(place->handle.Encode());
  while (true) {
    const std::string command = FromParent();
    if (command.empty() || command == "end") break;
    if (command == "free") {
      cudaFree(pointer);
      pointer = nullptr;
      ToParent(ReasonOf(DeviceExporter::CheckStillThere(place->handle)));
    } else if (command == "again") {
      // The same address, and not the same allocation.
      cudaMalloc(&pointer, 10000);
      ToParent(absl::StrCat(
          reinterpret_cast<uint64_t>(pointer) == place->handle.base, " ",
          ReasonOf(DeviceExporter::CheckStillThere(place->handle))));
      place = (*exporter)->Describe(pointer, 10000);
      ToParent(place->handle.Encode());
    }
  }
  if (pointer != nullptr) cudaFree(pointer);
  return 0;
}

inline MemoryTicket Ticket(TestProcess* process, const Segment& segment,
                           bool read_only) {
  ExportOptions options;
  options.read_only = read_only;
  const absl::StatusOr<MemoryTicket> ticket =
      (*process)->Export(segment, options);
  EXPECT_TRUE(ticket.ok()) << ticket.status();
  return *ticket;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_TEST_CHILD_H_
