// An engine's memory, on a GPU and on the host.
#include "transport/cuda/live_memory.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kBytes = 1 << 20;

// A process with one tensor on its GPU.
class Engine {
 public:
  explicit Engine(absl::Duration timeout = absl::Seconds(20))
      : pool_(1),
        host_(&pool_, nullptr, {}),
        live_(&host_, LiveMemory::Engine::kStands, timeout) {
    EXPECT_TRUE(FindCudart().ok());
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, kBytes), cudaSuccess);
    data_ = static_cast<char*>(data);
    const absl::Status added = live_.AddRange(data_, kBytes);
    EXPECT_TRUE(added.ok()) << added;
  }
  ~Engine() { cudaFree(data_); }
  LiveMemory* operator->() { return &live_; }
  char* data() const { return data_; }

 private:
  CopyPool pool_;
  HostMemory host_;
  LiveMemory live_;
  char* data_ = nullptr;
};

std::string Pattern(int64_t bytes) {
  std::string pattern(static_cast<size_t>(bytes), '\0');
  for (size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = static_cast<char>(i * 7919 >> 5);
  return pattern;
}

TEST(LiveMemoryTest, PlainMemoryOfTheHostGoesThroughPinnedMemory) {
  Engine engine;
  const std::string bytes = Pattern(kBytes);
  ASSERT_TRUE(engine
                  ->Write(absl::MakeConstSpan(bytes.data(), bytes.size()),
                          engine.data())
                  .ok());
  std::string read(bytes.size(), '\0');
  ASSERT_TRUE(engine->Read(engine.data(), absl::MakeSpan(read)).ok());
  EXPECT_TRUE(read == bytes);
  // Rows, with gaps on both sides, and what is between them stays.
  std::string rows(100 * 1000, 'x');
  CopyTask task;
  task.src = engine.data() + 3;
  task.dst = &rows[0];
  task.run_bytes = 700;
  task.dims.push_back({100, 1000, 4096, 0});
  ASSERT_TRUE(engine->Copy({task}, CopyOptions(), nullptr).ok());
  for (int row = 0; row < 100; ++row) {
    ASSERT_EQ(rows.substr(row * 1000, 700), bytes.substr(3 + row * 4096, 700));
    ASSERT_EQ(rows.substr(row * 1000 + 700, 300), std::string(300, 'x'));
  }
}

// In a process of its own, whose stream never ends.
int Stalled() {
  Engine engine(absl::Milliseconds(300));
  gpu_sim::Plant("call=cudaMemcpyAsync stall=1");
  std::string read(100, '\0');
  const absl::Time start = absl::Now();
  const absl::Status status = engine->Read(engine.data(), absl::MakeSpan(read));
  if (ReasonOf(status) != "DEVICE_STALLED") _exit(2);
  if (absl::Now() - start > absl::Seconds(5)) _exit(3);
  _exit(0);
}

// To memory that is not pinned the runtime copies while its caller waits.
TEST(LiveMemoryTest, ACopyToPlainMemoryHasADeadline) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "child", "--stalled", nullptr);
    _exit(1);
  }
  int status = -1;
  const absl::Time until = absl::Now() + absl::Seconds(20);
  pid_t ended = 0;
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 && absl::Now() < until)
    absl::SleepFor(absl::Milliseconds(20));
  if (ended == 0) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    FAIL() << "it waits without a deadline";
  }
  EXPECT_EQ(status, 0);
  gpu_sim::Plant("");
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  if (argc == 2 && std::string(argv[1]) == "--stalled")
    return weightsync::transport::cuda::Stalled();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
