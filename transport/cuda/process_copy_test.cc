// What the copies of an engine's process do to its GPU: which bytes, and in how
// many commands.
#include "transport/cuda/process_copy.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/live_memory.h"
#include "transport/cuda/process_gpu.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(20);

// Memory of the GPU that this process has made, and a plain copy of it.
class Buffer {
 public:
  Buffer(int64_t bytes, uint32_t seed)
      : plain_(static_cast<size_t>(bytes), '\0') {
    EXPECT_TRUE(FindCudart().ok());
    std::mt19937 random(seed);
    // Of a prime number of bytes, again and again.
    std::string some(65521, '\0');
    for (char& byte : some) byte = static_cast<char>(random());
    for (size_t at = 0; at < plain_.size(); at += some.size()) {
      const size_t count = std::min(some.size(), plain_.size() - at);
      std::copy_n(some.data(), count, &plain_[at]);
    }
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, plain_.size()), cudaSuccess);
    data_ = static_cast<char*>(data);
    EXPECT_EQ(
        cudaMemcpy(data_, plain_.data(), plain_.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return static_cast<int64_t>(plain_.size()); }
  std::string* plain() { return &plain_; }
  std::string Read() const {
    std::string read(plain_.size(), '\0');
    EXPECT_EQ(cudaMemcpy(&read[0], data_, read.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return read;
  }

 private:
  std::string plain_;
  char* data_ = nullptr;
};

// The same copy within the plain ones.
void CopyPlain(const CopyTask& task, Buffer* from, Buffer* to) {
  const std::function<void(size_t, int64_t, int64_t)> copy =
      [&](size_t dim, int64_t src, int64_t dst) {
        if (dim == task.dims.size()) {
          std::copy_n(from->plain()->data() + src, task.run_bytes,
                      &(*to->plain())[0] + dst);
          return;
        }
        for (int64_t i = 0; i < task.dims[dim].extent; ++i) {
          copy(dim + 1, src + i * task.dims[dim].src_stride,
               dst + i * task.dims[dim].dst_stride);
        }
      };
  copy(0, task.src - from->data(), task.dst - to->data());
}

// A thousand bytes and some, of every alignment and number of dimensions, that
// stand apart on both sides.
constexpr int64_t kRoom = 1536;
std::vector<CopyTask> Pieces(int first, int count, const Buffer& from,
                             const Buffer& to) {
  std::mt19937 engine(static_cast<uint32_t>(first + 1));
  const auto below = [&engine](int limit) {
    return static_cast<int64_t>(engine()) % limit;
  };
  std::vector<CopyTask> tasks;
  for (int i = first; i < first + count; ++i) {
    CopyTask task;
    task.src = from.data() + i * kRoom + below(17);
    task.dst = to.data() + i * kRoom + below(17);
    switch (i % 4) {
      case 0:
        task.run_bytes = 1 + below(1500);
        break;
      case 1:  // a slice of columns
        task.run_bytes = 1 + below(40);
        task.dims.push_back({1 + below(16), 41 + below(5), 41 + below(50), 0});
        break;
      case 2:  // turned: rows there are columns here
        task.run_bytes = 2;
        task.dims.push_back({16, 2, 64, 0});
        task.dims.push_back({20, 48, 2, 0});
        break;
      default:
        task.run_bytes = 16;
        task.src = from.data() + i * kRoom;
        task.dst = to.data() + i * kRoom;
        task.dims.push_back({3, 480, 320, 0});
        task.dims.push_back({4, 96, 64, 0});
        task.dims.push_back({2, 32, 16, 0});
    }
    tasks.push_back(task);
  }
  return tasks;
}

class ProcessCopyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant("");
    gpu_sim::TakeNotes();
  }
  void TearDown() override { gpu_sim::Plant(""); }

  static std::shared_ptr<ProcessGpu> Gpu(const Buffer& buffer) {
    const absl::StatusOr<std::shared_ptr<ProcessGpu>> gpu =
        ProcessGpu::Of(buffer.data());
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *gpu;
  }

  // How often each call was made while `body` ran.
  static std::map<std::string, int> Calls(const std::function<void()>& body) {
    std::string rules;
    for (const char* call :
         {"cuLaunchKernel", "cuModuleLoadData", "cudaFree", "cudaHostAlloc",
          "cudaMalloc", "cudaMemcpy2DAsync", "cudaMemcpyAsync"})
      absl::StrAppend(&rules, "call=", call, " note=1 count=0;");
    gpu_sim::TakeNotes();
    gpu_sim::Plant(rules);
    body();
    gpu_sim::Plant("");
    std::map<std::string, int> calls;
    for (const absl::string_view line :
         absl::StrSplit(gpu_sim::TakeNotes(), '\n', absl::SkipEmpty()))
      ++calls[std::string(line)];
    return calls;
  }
};

using Counts = std::map<std::string, int>;

TEST_F(ProcessCopyTest, ThousandsOfPiecesAreOneLaunch) {
  Buffer from(8 << 20, 1), to(8 << 20, 2);
  const auto gpu = Gpu(from);
  gpu->PrepareCopies(kTimeout);
  const std::vector<CopyTask> tasks = Pieces(0, 5000, from, to);
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  absl::Status status;
  // Its table, and the launch.
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(to.Read() == *to.plain());
  EXPECT_TRUE(from.Read() == *from.plain());
}

TEST_F(ProcessCopyTest, WhatATableHasNoRoomForIsTheNextLaunch) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = Gpu(from);
  gpu->PrepareCopies(kTimeout);
  std::vector<CopyTask> tasks;
  for (int i = 0; i < 23000; ++i) {
    CopyTask task;
    task.src = from.data() + i * 40;
    task.dst = to.data() + i * 41;
    task.run_bytes = 1 + i % 39;
    tasks.push_back(task);
  }
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  absl::Status status;
  // 10,922 pieces of one unit have room in a table, and there are two.
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cuLaunchKernel", 3}, {"cudaMemcpyAsync", 3}}));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(to.Read() == *to.plain());
}

TEST_F(ProcessCopyTest, WhatIsLargeAndContiguousGoesByACopyEngine) {
  constexpr int64_t kLarge = 16 << 20;
  Buffer from(2 * kLarge, 1), to(2 * kLarge, 2);
  const auto gpu = Gpu(from);
  gpu->PrepareCopies(kTimeout);
  std::vector<CopyTask> tasks = Pieces(0, 100, from, to);
  CopyTask large;
  large.src = from.data() + kLarge;
  large.dst = to.data() + kLarge;
  large.run_bytes = kLarge - 1;
  tasks.insert(tasks.begin() + 50, large);
  absl::Status status;
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  ++tasks[50].run_bytes;
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 2}}));
  ASSERT_TRUE(status.ok()) << status;
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

// Its table is a command, too.
TEST_F(ProcessCopyTest, AFewPiecesAreNotWorthALaunch) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = Gpu(from);
  gpu->PrepareCopies(kTimeout);
  // One piece, rows of a slice, a piece, and what would be 20 commands.
  std::vector<CopyTask> tasks = Pieces(0, 3, from, to);
  CopyTask turned = tasks[2];
  tasks.pop_back();
  absl::Status status;
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cudaMemcpy2DAsync", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  tasks.push_back(Pieces(4, 1, from, to)[0]);
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin(tasks, kTimeout); }),
            (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Calls([&] { status = gpu->CopyWithin({turned}, kTimeout); }),
            (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  tasks.push_back(turned);
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

TEST_F(ProcessCopyTest, NothingIsNoCommand) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = Gpu(from);
  gpu->PrepareCopies(kTimeout);
  std::vector<CopyTask> tasks = Pieces(0, 8, from, to);
  for (CopyTask& task : tasks) task.run_bytes = 0;
  absl::Status status;
  EXPECT_EQ(Calls([&] {
              status = gpu->CopyWithin(tasks, kTimeout);
              status.Update(gpu->CopyWithin({}, kTimeout));
            }),
            Counts());
  EXPECT_TRUE(status.ok()) << status;
  // Among others, too.
  tasks = Pieces(0, 8, from, to);
  tasks[3].run_bytes = 0;
  ASSERT_TRUE(gpu->CopyWithin(tasks, kTimeout).ok());
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

TEST_F(ProcessCopyTest, ABadTaskIsRefusedAndThoseAfterItAreAsGoodAsBefore) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = Gpu(from);
  std::vector<CopyTask> tasks = Pieces(0, 8, from, to);
  tasks[7].cast = CopyCast::kF32ToBF16;
  tasks[7].run_bytes = tasks[7].element_bytes = 2;
  tasks[7].dims.clear();
  EXPECT_EQ(ReasonOf(gpu->CopyWithin(tasks, kTimeout)), "BAD_COPY");
  // Nothing of them comes with the next ones.
  to.plain()->replace(0, 100 * kRoom, 100 * kRoom, '\0');
  ASSERT_EQ(cudaMemcpy(to.data(), to.plain()->data(), 100 * kRoom,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  tasks = Pieces(100, 8, from, to);
  ASSERT_TRUE(gpu->CopyWithin(tasks, kTimeout).ok());
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

TEST_F(ProcessCopyTest, CallsOfSeveralThreadsDoNotDisturbEachOther) {
  constexpr int kThreads = 4, kEach = 20, kRounds = 4;
  Buffer from(2 << 20, 1), to(2 << 20, 2);
  const auto gpu = Gpu(from);
  std::vector<std::thread> threads;
  std::vector<absl::Status> results(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const std::vector<CopyTask> tasks = Pieces(i * kEach, kEach, from, to);
      for (int round = 0; round < kRounds; ++round) {
        results[i].Update(round % 2 == 0 ? gpu->CopyWithin(tasks, kTimeout)
                                         : gpu->Copy(tasks, kTimeout));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i) {
    EXPECT_TRUE(results[i].ok()) << results[i];
    for (const CopyTask& task : Pieces(i * kEach, kEach, from, to))
      CopyPlain(task, &from, &to);
  }
  EXPECT_TRUE(to.Read() == *to.plain());
}

// ---- Where there is no kernel ----

TEST_F(ProcessCopyTest, WithoutAKernelCopyEnginesCopyAndTheLogSaysWhyOnce) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  for (const auto& [rule, why] : std::map<std::string, std::string>{
           {"call=cuModuleLoadData error=209",
            "cudaErrorNoKernelImageForDevice"},
           {"call=cuModuleLoadData error=222",
            "cudaErrorUnsupportedPtxVersion"},
           {"call=cuModuleGetFunction error=500", "cudaErrorSymbolNotFound"},
           {"call=cudaMalloc after=1 error=2", "NO_DEVICE_MEMORY"},
           {"call=cudaHostAlloc error=2", "NO_DEVICE_MEMORY"},
           {"call=cuLaunchKernel error=1", "cudaErrorInvalidValue"}}) {
    const auto gpu = Gpu(from);
    const std::vector<CopyTask> tasks = Pieces(0, 12, from, to);
    absl::Status status;
    ::testing::internal::CaptureStderr();
    gpu_sim::Plant(rule + ";call=cudaFree note=1 count=0");
    gpu->PrepareCopies(kTimeout);
    gpu->PrepareCopies(kTimeout);
    // What was made for it is given back at once.
    if (rule == "call=cuLaunchKernel error=1") {
      EXPECT_EQ(gpu_sim::TakeNotes(), "cudaFree\ncudaFree\ncudaFree\n");
    }
    const Counts calls = Calls([&] {
      status = gpu->CopyWithin(tasks, kTimeout);
      status.Update(gpu->CopyWithin(tasks, kTimeout));
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(calls.count("cuLaunchKernel"), 0u) << rule;
    EXPECT_GE(calls.at("cudaMemcpyAsync") + calls.at("cudaMemcpy2DAsync"), 24);
    const size_t said = log.find("go by its copy engines");
    ASSERT_NE(said, std::string::npos) << log;
    EXPECT_EQ(log.find("go by its copy engines", said + 1), std::string::npos)
        << log;
    EXPECT_NE(log.find(why), std::string::npos) << log;
    for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
    EXPECT_TRUE(to.Read() == *to.plain());
  }
}

// ---- What an engine's memory makes of it ----

class Engine {
 public:
  explicit Engine(LiveMemory::Engine engine)
      : pool_(1), host_(&pool_, nullptr, {}), live_(&host_, engine, kTimeout) {}
  LiveMemory* operator->() { return &live_; }

 private:
  CopyPool pool_;
  HostMemory host_;
  LiveMemory live_;
};

TEST_F(ProcessCopyTest, AnEngineThatStandsIsPreparedBeforeAnyCopy) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  Engine engine(LiveMemory::Engine::kStands);
  const Counts added = Calls([&] {
    ASSERT_TRUE(engine->AddRange(from.data(), from.bytes()).ok());
    ASSERT_TRUE(engine->AddRange(to.data(), to.bytes()).ok());
  });
  EXPECT_EQ(added.at("cuModuleLoadData"), 1);
  const std::vector<CopyTask> tasks = Pieces(0, 500, from, to);
  absl::Status status;
  EXPECT_EQ(
      Calls([&] { status = engine->Copy(tasks, CopyOptions(), nullptr); }),
      (Counts{{"cuLaunchKernel", 1}, {"cudaMemcpyAsync", 1}}));
  ASSERT_TRUE(status.ok()) << status;
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

// Where some of it is host memory, each part goes its way.
TEST_F(ProcessCopyTest, HostMemoryAmongThemGoesItsOwnWay) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  Engine engine(LiveMemory::Engine::kStands);
  ASSERT_TRUE(engine->AddRange(from.data(), from.bytes()).ok());
  ASSERT_TRUE(engine->AddRange(to.data(), to.bytes()).ok());
  std::vector<CopyTask> tasks = Pieces(0, 100, from, to);
  const std::string source(1000, 'h');
  std::string target(3000, 't');
  CopyTask in, out, host, nothing;
  in.src = host.src = source.data();
  in.dst = to.data() + 200 * kRoom;
  out.src = from.data();
  out.dst = &target[0];
  host.dst = &target[2000];
  in.run_bytes = out.run_bytes = host.run_bytes = 1000;
  tasks.insert(tasks.begin() + 10, {in, out, nothing, host});
  absl::Status status;
  const Counts calls =
      Calls([&] { status = engine->Copy(tasks, CopyOptions(), nullptr); });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls.at("cuLaunchKernel"), 1);
  // The table, and one each to the GPU and from it.
  EXPECT_EQ(calls.at("cudaMemcpyAsync"), 3);
  for (const CopyTask& task : Pieces(0, 100, from, to))
    CopyPlain(task, &from, &to);
  to.plain()->replace(200 * kRoom, 1000, source);
  EXPECT_TRUE(to.Read() == *to.plain());
  EXPECT_TRUE(target ==
              from.plain()->substr(0, 1000) + std::string(1000, 't') + source);
}

TEST_F(ProcessCopyTest, AnEngineThatRunsKeepsItsSms) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  Engine engine(LiveMemory::Engine::kRuns);
  const std::vector<CopyTask> tasks = Pieces(0, 100, from, to);
  absl::Status status;
  const Counts calls = Calls([&] {
    ASSERT_TRUE(engine->AddRange(from.data(), from.bytes()).ok());
    ASSERT_TRUE(engine->AddRange(to.data(), to.bytes()).ok());
    status = engine->Copy(tasks, CopyOptions(), nullptr);
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls.count("cuModuleLoadData") + calls.count("cuLaunchKernel") +
                calls.count("cudaMalloc"),
            0u);
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  EXPECT_TRUE(to.Read() == *to.plain());
}

// ---- In processes of their own, whose GPU is lost ----

#define CHILD_EXPECT(condition)                                     \
  if (!(condition)) {                                               \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    _exit(2);                                                       \
  }

// A launch that never ends: the call does, and nothing that the GPU may still
// use is freed or used again.
int Stalled(const std::string& rule) {
  constexpr absl::Duration kShort = absl::Milliseconds(300);
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  auto gpu = *ProcessGpu::Of(from.data());
  const std::vector<CopyTask> tasks = Pieces(0, 100, from, to);
  gpu_sim::Plant(rule);
  const absl::Time start = absl::Now();
  gpu->PrepareCopies(kShort);
  CHILD_EXPECT(ReasonOf(gpu->CopyWithin(tasks, kShort)) == "DEVICE_STALLED");
  gpu_sim::TakeNotes();
  gpu_sim::Plant(
      "call=cudaMemcpyAsync note=1 count=0;call=cudaFree note=1 count=0;"
      "call=cudaFreeHost note=1 count=0;call=cuModuleUnload note=1 count=0;"
      "call=cuLaunchKernel note=1 count=0");
  CHILD_EXPECT(ReasonOf(gpu->CopyWithin(tasks, kShort)) == "DEVICE_STALLED");
  CHILD_EXPECT(ReasonOf(gpu->Copy(tasks, kShort)) == "DEVICE_STALLED");
  gpu = nullptr;
  CHILD_EXPECT(gpu_sim::TakeNotes().empty());
  CHILD_EXPECT(absl::Now() - start < absl::Seconds(10));
  _exit(0);
}

// Five tables, of which there are two, on a GPU that is slower to read them
// than they are made.
int Slow() {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = *ProcessGpu::Of(from.data());
  gpu->PrepareCopies(kTimeout);
  std::vector<CopyTask> tasks;
  for (int i = 0; i < 45000; ++i) {
    CopyTask task;
    task.src = from.data() + i * 23;
    task.dst = to.data() + i * 22;
    task.run_bytes = 1 + i % 22;
    tasks.push_back(task);
  }
  for (const CopyTask& task : tasks) CopyPlain(task, &from, &to);
  CHILD_EXPECT(gpu->CopyWithin(tasks, kTimeout).ok());
  CHILD_EXPECT(to.Read() == *to.plain());
  return 0;
}

// On a GPU of the generation that the environment says: whether its kernel
// copies.
int Generation(bool kernel) {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = *ProcessGpu::Of(from.data());
  gpu->PrepareCopies(kTimeout);
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=cuLaunchKernel note=1 count=0");
  CHILD_EXPECT(gpu->CopyWithin(Pieces(0, 12, from, to), kTimeout).ok());
  CHILD_EXPECT(gpu_sim::TakeNotes() == (kernel ? "cuLaunchKernel\n" : ""));
  return 0;
}

// The GPU refuses to go on.
int Faulted() {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = *ProcessGpu::Of(from.data());
  gpu->PrepareCopies(kTimeout);
  gpu_sim::Plant("call=cuLaunchKernel sticky=700");
  const std::vector<CopyTask> tasks = Pieces(0, 100, from, to);
  CHILD_EXPECT(ReasonOf(gpu->CopyWithin(tasks, kTimeout)) == "DEVICE_FAULT");
  CHILD_EXPECT(ReasonOf(gpu->CopyWithin(tasks, kTimeout)) == "DEVICE_FAULT");
  return 0;
}

// The kernel itself touches what is not there.
int Wild() {
  Buffer from(1 << 20, 1), to(1 << 20, 2);
  const auto gpu = *ProcessGpu::Of(from.data());
  std::vector<CopyTask> tasks = Pieces(0, 3, from, to);
  tasks[0].src = from.data() + from.bytes() - 10;
  tasks[0].run_bytes = 3 << 20;
  CHILD_EXPECT(ReasonOf(gpu->CopyWithin(tasks, kTimeout)) == "DEVICE_FAULT");
  return 0;
}

void ExpectChild(const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& environment = {}) {
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [name, value] : environment)
      setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> argv;
    std::vector<std::string> all = arguments;
    all.insert(all.begin(), "child");
    for (std::string& argument : all) argv.push_back(&argument[0]);
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  int status = -1;
  const absl::Time until = absl::Now() + absl::Seconds(40);
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (absl::Now() < until) {
      absl::SleepFor(absl::Milliseconds(20));
      continue;
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    FAIL() << arguments[0] << " waits without a deadline";
  }
  EXPECT_EQ(status, 0) << arguments[0];
}

TEST_F(ProcessCopyTest, ALaunchThatStallsHasADeadlineAndKeepsItsMemory) {
  // After the one that prepares.
  ExpectChild({"--stalled", "call=cuLaunchKernel after=1 stall=1"});
}

TEST_F(ProcessCopyTest, AGpuThatIsStalledFromTheStartHasADeadline) {
  ExpectChild({"--stalled", "call=cuLaunchKernel stall=1"});
}

TEST_F(ProcessCopyTest, ATableThatStallsHasADeadlineAndKeepsItsMemory) {
  ExpectChild({"--stalled", "call=cudaMemcpyAsync stall=1"});
}

TEST_F(ProcessCopyTest, ATableIsNotUsedAgainBeforeItWasRead) {
  ExpectChild({"--slow"}, {{"GPU_SIM_DELAY_US", "200000"}});
}

TEST_F(ProcessCopyTest, EveryGenerationOfGpusHasItsCode) {
  for (const char* capability : {"80", "86", "89", "90", "100", "103", "120"}) {
    ExpectChild({"--generation", "kernel"},
                {{"GPU_SIM_CC", capability}, {"GPU_SIM_PTX", "0"}});
  }
  // Those to come have PTX, and those of before have copy engines.
  ExpectChild({"--generation", "kernel"}, {{"GPU_SIM_CC", "130"}});
  ExpectChild({"--generation", "engines"}, {{"GPU_SIM_CC", "75"}});
}

TEST_F(ProcessCopyTest, AFaultIsNamed) { ExpectChild({"--faulted"}); }

TEST_F(ProcessCopyTest, AKernelOutOfBoundsIsAFault) {
  ExpectChild({"--wild"});
  EXPECT_NE(gpu_sim::TakeFindings().find("touched the address"),
            std::string::npos);
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  namespace cuda = weightsync::transport::cuda;
  FLAGS_logtostderr = true;
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "--stalled" && argc == 3) return cuda::Stalled(argv[2]);
  if (part == "--generation" && argc == 3)
    return cuda::Generation(std::string(argv[2]) == "kernel");
  if (part == "--slow") return cuda::Slow();
  if (part == "--faulted") return cuda::Faulted();
  if (part == "--wild") return cuda::Wild();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
