// What a process opens of others: on its own GPU and on one beside it, once,
// and closed where it holds up nobody.
#include "transport/cuda/process_gpu.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/device.h"
#include "transport/cuda/device_handle.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/nvml.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kBytes = 64 << 10;
constexpr size_t kHandleBytes = 400;  // more than any has

std::string Pattern(int allocation) {
  std::string pattern(static_cast<size_t>(kBytes), '\0');
  for (size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = static_cast<char>((i + allocation * 31) * 7919 >> 5);
  return pattern;
}

// ---- Another process: this program, with a part to play ----

class Child {
 public:
  explicit Child(std::vector<std::string> arguments) {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      setenv("GPU_SIM_ROLE", "child", 1);
      std::vector<char*> argv = {const_cast<char*>("child")};
      for (std::string& argument : arguments) argv.push_back(&argument[0]);
      argv.push_back(nullptr);
      execv("/proc/self/exe", argv.data());
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
  }
  ~Child() {
    close(to_);
    close(from_);
    if (!waited_) waitpid(pid_, nullptr, 0);
  }
  void Say(const std::string& bytes) {
    EXPECT_EQ(write(to_, bytes.data(), bytes.size()),
              static_cast<ssize_t>(bytes.size()));
  }
  std::string Hear(size_t bytes) {
    std::string heard(bytes, '\0');
    size_t done = 0;
    while (done < bytes) {
      const ssize_t got = read(from_, &heard[done], bytes - done);
      if (got <= 0) {
        ADD_FAILURE() << "the child has ended";
        return std::string(bytes, '\0');
      }
      done += static_cast<size_t>(got);
    }
    return heard;
  }
  DeviceHandle HearHandle() {
    const std::string padded = Hear(kHandleBytes);
    const std::string size = padded.substr(0, 4);
    const absl::StatusOr<DeviceHandle> handle = DeviceHandle::Decode(
        padded.substr(4, static_cast<size_t>(std::atoi(size.c_str()))));
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? *handle : DeviceHandle();
  }
  // Not waited for: what is left of it stays.
  void Kill() { kill(pid_, SIGKILL); }
  int Wait(absl::Duration patience) {
    int status = -1;
    const absl::Time until = absl::Now() + patience;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (absl::Now() > until) {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        status = -1;
        break;
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    waited_ = true;
    return status;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int to_, from_;
  bool waited_ = false;
};

std::string Padded(const DeviceHandle& handle) {
  const std::string encoded = handle.Encode();
  char size[8];
  snprintf(size, sizeof(size), "%04zu", encoded.size());
  std::string padded = size + encoded;
  padded.resize(kHandleBytes);
  return padded;
}

void Tell(const std::string& bytes) {
  if (write(1, bytes.data(), bytes.size()) !=
      static_cast<ssize_t>(bytes.size()))
    _exit(3);
}

char Heard() {
  char byte = 0;
  return read(0, &byte, 1) == 1 ? byte : 'e';
}

// Exports two allocations of GPU `ordinal`: "f" frees the first; all at the
// end.
int Exporter(int ordinal) {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok()) return 4;
  const DeviceInfo& device = (*devices)[static_cast<size_t>(ordinal)];
  auto exporter = DeviceExporter::Create(device);
  if (!exporter.ok()) return 5;
  void* memory[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (cudaMalloc(&memory[i], kBytes) != cudaSuccess ||
        cudaMemcpy(memory[i], Pattern(i).data(), kBytes,
                   cudaMemcpyHostToDevice) != cudaSuccess)
      return 6;
    const auto place = (*exporter)->Describe(memory[i], kBytes);
    if (!place.ok()) return 7;
    Tell(Padded(place->handle));
  }
  for (char said = Heard(); said != 'e'; said = Heard()) {
    cudaFree(memory[0]);
    memory[0] = nullptr;
    Tell("f");
  }
  for (void* each : memory) cudaFree(each);
  return 0;
}

// A GPU of this process, with memory on it.
class Engine {
 public:
  explicit Engine(int ordinal) {
    EXPECT_EQ(cudaSetDevice(ordinal), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory_, kBytes), cudaSuccess);
    auto gpu = ProcessGpu::Of(memory_);
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    if (gpu.ok()) gpu_ = *std::move(gpu);
  }
  ~Engine() {
    gpu_ = nullptr;
    cudaFree(memory_);
    cudaSetDevice(0);
  }
  ProcessGpu* operator->() const { return gpu_.get(); }
  // What is there, by way of this GPU's memory.
  std::string Copied(const ProcessGpu::Opened& opened) {
    CopyTask task;
    task.src = opened.data;
    task.dst = static_cast<char*>(memory_);
    task.run_bytes = kBytes;
    const absl::Status status = gpu_->Copy({task}, absl::Seconds(20));
    EXPECT_TRUE(status.ok()) << status;
    std::string bytes(static_cast<size_t>(kBytes), '\0');
    EXPECT_EQ(cudaMemcpy(&bytes[0], memory_, kBytes, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return bytes;
  }
  std::string ReasonOfOpen(const DeviceHandle& handle) {
    return ReasonOf(gpu_->Open(handle).status());
  }
  // Until all that was let go of is closed.
  void AwaitClosed() {
    absl::Notification closed;
    gpu_->Later([&closed] { closed.Notify(); });
    EXPECT_TRUE(closed.WaitForNotificationWithTimeout(absl::Seconds(20)));
  }

 private:
  void* memory_ = nullptr;
  std::shared_ptr<ProcessGpu> gpu_;
};

// A process that has a context on the second GPU alone, as a thread of its own
// opens memory of the first.
int PeerReader() {
  cudaSetDevice(1);
  {
    Engine engine(1);
    std::string padded(kHandleBytes, '\0');
    if (read(0, &padded[0], kHandleBytes) != static_cast<ssize_t>(kHandleBytes))
      return 4;
    const auto handle = DeviceHandle::Decode(padded.substr(
        4, static_cast<size_t>(std::atoi(padded.substr(0, 4).c_str()))));
    if (!handle.ok()) return 5;
    bool right = false;
    std::thread([&] {
      ProcessGpu::KeepDevice();
      const auto opened = engine->Open(*handle);
      right = opened.ok() && engine.Copied(**opened) == Pattern(0);
    }).join();
    if (!right) return 6;
    Tell("r");
    Heard();
  }
  _exit(0);  // the tests' devices of its main thread are of no interest
}

// A process whose GPU never lets go of what it closes.
int NeverCloses() {
  std::string padded(kHandleBytes, '\0');
  if (read(0, &padded[0], kHandleBytes) != static_cast<ssize_t>(kHandleBytes))
    return 4;
  const auto handle = DeviceHandle::Decode(padded.substr(
      4, static_cast<size_t>(std::atoi(padded.substr(0, 4).c_str()))));
  if (!handle.ok()) return 5;
  void* memory = nullptr;
  if (cudaMalloc(&memory, kBytes) != cudaSuccess) return 6;
  auto gpu = ProcessGpu::Of(memory);
  if (!gpu.ok()) return 7;
  auto opened = (*gpu)->Open(*handle);
  if (!opened.ok()) return 8;
  const absl::Time start = absl::Now();
  opened->reset();
  if (absl::Now() - start > absl::Seconds(2)) return 9;
  gpu->reset();
  _exit(0);
}

class ProcessGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Of this process, which has children with another.
    setenv("GPU_SIM_ROLE", "test", 1);
    gpu_sim::Plant("call=none error=1");
    ASSERT_TRUE(FindCudart().ok());
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    ASSERT_EQ(devices, 2);
    gpu_sim::Plant("");
  }
  void TearDown() override { gpu_sim::Plant(""); }
  static void Count() {
    gpu_sim::Plant(
        "call=cudaIpcOpenMemHandle process=test note=1 count=0;"
        "call=cudaIpcCloseMemHandle process=test note=1 count=0;"
        "call=copyBetween process=test note=1 count=0;"
        "call=copyWithin process=test note=1 count=0");
    gpu_sim::TakeNotes();
  }
  static int Noted(const std::string& notes, const std::string& call) {
    int count = 0;
    for (size_t at = notes.find(call); at != std::string::npos;
         at = notes.find(call, at + 1))
      ++count;
    return count;
  }
  static std::string Uuid(size_t ordinal) {
    return (*ListDevices())[ordinal].uuid;
  }
};

TEST_F(ProcessGpuTest, AnAllocationIsOpenedOnceAndAnExporterProbedOnce) {
  Child exporter({"exporter", "0"});
  const DeviceHandle first = exporter.HearHandle();
  const DeviceHandle second = exporter.HearHandle();
  Engine engine(0);
  Count();
  auto one = engine->Open(first);
  ASSERT_TRUE(one.ok()) << one.status();
  auto again = engine->Open(first);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*one, *again);
  engine.AwaitClosed();
  std::string notes = gpu_sim::TakeNotes();
  EXPECT_EQ(Noted(notes, "cudaIpcOpenMemHandle"), 2) << "probe, and all of it";
  EXPECT_EQ(Noted(notes, "cudaIpcCloseMemHandle"), 1) << "the probe";
  auto other = engine->Open(second);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(Noted(gpu_sim::TakeNotes(), "cudaIpcOpenMemHandle"), 1);
  EXPECT_TRUE(engine.Copied(**one) == Pattern(0));
  EXPECT_TRUE(engine.Copied(**other) == Pattern(1));
  // One of two lets go: nothing is closed.
  one->reset();
  engine.AwaitClosed();
  EXPECT_EQ(Noted(gpu_sim::TakeNotes(), "cudaIpcCloseMemHandle"), 0);
  EXPECT_TRUE(engine.Copied(**again) == Pattern(0));
  again->reset();
  other->reset();
  engine.AwaitClosed();
  EXPECT_EQ(Noted(gpu_sim::TakeNotes(), "cudaIpcCloseMemHandle"), 2);
  // Anew, where nobody has it.
  auto anew = engine->Open(first);
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_EQ(Noted(gpu_sim::TakeNotes(), "cudaIpcOpenMemHandle"), 1);
  // Longer than it is.
  DeviceHandle longer = first;
  longer.bytes += 1 << 20;
  EXPECT_EQ(engine.ReasonOfOpen(longer), "PAST_ALLOCATION");
}

TEST_F(ProcessGpuTest, WhatCannotBeOpenedHasItsReason) {
  Child exporter({"exporter", "0"});
  const DeviceHandle first = exporter.HearHandle();
  const DeviceHandle second = exporter.HearHandle();
  Engine engine(0);
  DeviceHandle foreign = first;
  foreign.exporter.pid_namespace += 1;
  gpu_sim::Plant("call=cudaIpcOpenMemHandle error=205 process=test");
  const absl::Status status = engine->Open(foreign).status();
  EXPECT_EQ(ReasonOf(status), "FOREIGN_NAMESPACE") << status;
  for (const char* way : {"shareProcessNamespace", "--store=host"})
    EXPECT_TRUE(absl::StrContains(status.message(), way)) << status;
  // Where it can be opened all the same, nothing is wrong with it.
  EXPECT_TRUE(engine->Open(foreign).ok());
  DeviceHandle other = first;
  other.nonce[2] ^= 1;
  EXPECT_EQ(engine.ReasonOfOpen(other), "PROBE_FAILED");
  engine.AwaitClosed();
  exporter.Say("f");
  exporter.Hear(1);
  EXPECT_EQ(engine.ReasonOfOpen(first), "ALLOCATION_FREED");
  // It has ended, and nobody has looked yet.
  exporter.Kill();
  for (int i = 0; i < 1000 && StateOf(second.exporter) != ProcessState::kDead;
       ++i)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(engine.ReasonOfOpen(second), "EXPORTER_DEAD");
  EXPECT_EQ(kill(exporter.pid(), 0), 0) << "a zombie";
}

// Closing waits for all that the GPU is at; who lets go does not.
TEST_F(ProcessGpuTest, AClosingThatTakesLongHoldsUpNobody) {
  Child exporter({"exporter", "0"});
  const DeviceHandle handle = exporter.HearHandle();
  Engine engine(0);
  auto opened = engine->Open(handle);
  ASSERT_TRUE(opened.ok()) << opened.status();
  engine.AwaitClosed();
  constexpr size_t kLarge = 32 << 20;
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kLarge), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
            cudaSuccess);
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(cudaMemcpyAsync(memory, static_cast<char*>(memory) + kLarge / 2,
                              kLarge / 2, cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
  }
  opened->reset();
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady)
      << "whoever let go has waited for the GPU";
  engine.AwaitClosed();
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess)
      << "it was not closed when its lock went";
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(ProcessGpuTest, AClosingThatNeverEndsIsNotWaitedForForEver) {
  Child exporter({"exporter", "0"});
  const DeviceHandle handle = exporter.HearHandle();
  gpu_sim::Plant("call=cudaIpcCloseMemHandle process=child hang=1");
  Child stuck({"never_closes"});
  stuck.Say(Padded(handle));
  EXPECT_EQ(stuck.Wait(absl::Seconds(30)), 0);
}

// ---- Two GPUs ----

TEST_F(ProcessGpuTest, MemoryOfAPeerIsReadFromGpuToGpu) {
  Child exporter({"exporter", "0"});
  const DeviceHandle handle = exporter.HearHandle();
  Engine engine(1);
  EXPECT_EQ(engine->peers(), std::vector<std::string>{Uuid(0)});
  Count();
  {
    auto opened = engine->Open(handle);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(engine.Copied(**opened) == Pattern(0));
    // Of the same exporter's, one that is other memory.
    DeviceHandle other = handle;
    other.nonce[2] ^= 1;
    other.buffer_id += 1;
    EXPECT_EQ(engine.ReasonOfOpen(other), "PROBE_FAILED");
  }
  engine.AwaitClosed();
  const std::string notes = gpu_sim::TakeNotes();
  EXPECT_EQ(Noted(notes, absl::StrCat("copyBetween cudaMemcpyAsync ", kBytes)),
            1)
      << notes;
  EXPECT_EQ(Noted(notes, "copyWithin"), 0) << notes;
  EXPECT_EQ(Noted(notes, "cudaIpcCloseMemHandle"),
            Noted(notes, "cudaIpcOpenMemHandle"));
  // There was access, and there is none when it is opened.
  gpu_sim::Plant("call=peerAccess no=1 count=0");
  EXPECT_EQ(engine.ReasonOfOpen(handle), "NO_PEER_ACCESS");
}

TEST_F(ProcessGpuTest, WithoutPeerAccessThereAreNoPeers) {
  Child exporter({"exporter", "0"});
  const DeviceHandle handle = exporter.HearHandle();
  for (const char* why : {"call=peerAccess no=1 count=0",
                          "call=cudaDeviceCanAccessPeer error=1 count=0"}) {
    gpu_sim::Plant(why);
    Engine engine(1);
    EXPECT_EQ(engine->peers(), std::vector<std::string>()) << why;
    EXPECT_EQ(engine.ReasonOfOpen(handle), "DEVICE_NOT_VISIBLE") << why;
  }
}

// Half a gigabyte of a GPU that is another's.
TEST_F(ProcessGpuTest, NoContextIsMadeOnThePeer) {
  const auto nvml = Nvml::Open();
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  Child exporter({"exporter", "0"});
  const DeviceHandle handle = exporter.HearHandle();
  exporter.HearHandle();
  const auto before = (*nvml)->MemoryOf(Uuid(0));
  ASSERT_TRUE(before.ok()) << before.status();
  Child reader({"peer_reader"});
  reader.Say(Padded(handle));
  EXPECT_EQ(reader.Hear(1), "r");
  const auto with = (*nvml)->MemoryOf(Uuid(0));
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_EQ(with->used_bytes, before->used_bytes);
  reader.Say("e");
  EXPECT_EQ(reader.Wait(absl::Seconds(20)), 0);
}

}  // namespace

int RunChild(int argc, char** argv) {
  const std::string part = argv[1];
  if (!FindCudart().ok()) return 2;
  if (part == "exporter" && argc == 3) return Exporter(std::atoi(argv[2]));
  if (part == "peer_reader") return PeerReader();
  if (part == "never_closes") return NeverCloses();
  return 1;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  if (std::string(argv[0]) == "child")
    return weightsync::transport::cuda::RunChild(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
