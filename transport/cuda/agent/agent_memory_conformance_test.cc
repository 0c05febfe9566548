// The memory of a node with GPUs, whose agent is a process of its own: segments
// in host memory, packed out of host memory and out of a trainer's GPU, and
// segments of the GPU.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/conformance/memory_conformance.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/cuda/test_child.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int kSlots = 2;
constexpr int64_t kSlotBytes = 1 << 20;
constexpr absl::Duration kPatience = absl::Seconds(20);

// A trainer: has the bytes that it is told on its GPU until it ends.
int HoldBytes() {
  const std::string bytes = FromParent();
  const absl::StatusOr<DeviceInfo> device = FindDevice("");
  auto exporter = DeviceExporter::Create(*device);
  void* pointer = nullptr;
  cudaMalloc(&pointer, bytes.size());
  cudaMemcpy(pointer, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  ToParent((*exporter)
               ->Describe(pointer, static_cast<int64_t>(bytes.size()))
               ->handle.Encode());
  while (!FromParent().empty()) continue;
  cudaFree(pointer);
  return 0;
}

class AgentFixture : public MemoryFixture {
 public:
  enum class Segments { kHost, kDevice };
  enum class Sources { kSegments, kTrainers };

  AgentFixture(Segments segments, Sources sources)
      : segments_(segments), sources_(sources) {
    static std::atomic<int> counter{0};
    const std::string prefix = absl::StrCat(getenv("GPU_SIM_DIR"), "/agent_",
                                            getpid(), "_", counter++);
    auto fds = FdServer::Start(prefix, FdServer::Options());
    EXPECT_TRUE(fds.ok()) << fds.status();
    fds_ = *std::move(fds);
    host_ =
        std::make_unique<HostMemory>(&pool_, fds_.get(), HostMemory::Options());
    DeviceAgents::Options options;
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
    options.agent.command = {"/usr/bin/env", "GPU_SIM_ROLE=agent",
                             std::string(path, static_cast<size_t>(length))};
    options.agent.config.slots = kSlots;
    options.agent.config.slot_bytes = kSlotBytes;
    options.agent.config.keep_free_bytes = 1 << 20;
    options.agent.fd_socket_prefix = prefix + "_fds";
    auto agents = DeviceAgents::Create(options);
    EXPECT_TRUE(agents.ok()) << agents.status();
    agents_ = *std::move(agents);
    AgentMemory::Options patient;
    patient.timeout = kPatience;
    memory_ = std::make_unique<AgentMemory>(host_.get(), agents_.get(), kSlots,
                                            kSlotBytes, patient);
    const absl::StatusOr<DeviceInfo> device = FindDevice("");
    EXPECT_TRUE(device.ok()) << device.status();
    uuid_ = device->uuid;
    // From now on there is an agent, which pins the arenas of its daemon.
    EXPECT_NE(Region("some bytes"), nullptr);
    AllocateOptions staging;
    staging.name = "staging";
    staging.generation_slots = 1;
    auto staged = memory_->Allocate(kSlotBytes, staging);
    EXPECT_TRUE(staged.ok()) << staged.status();
    absl::MutexLock lock(&mutex_);
    staging_ = *std::move(staged);
  }
  ~AgentFixture() override {
    // Before the trainers end.
    regions_.clear();
    const absl::Status closed = memory_->AwaitClosed({}, kPatience);
    EXPECT_TRUE(closed.ok()) << closed;
    trainers_.clear();
    absl::MutexLock lock(&mutex_);
    staging_ = nullptr;
  }

  Memory* memory() override { return memory_.get(); }
  // A worker's process.
  Memory* importer() override {
    if (segments_ == Segments::kDevice) return importer_.get();
    return importer_.host();
  }
  void Shape(AllocateOptions* options) override {
    if (segments_ == Segments::kDevice) options->device_uuid = uuid_;
  }
  MemoryKind kind() override {
    return segments_ == Segments::kDevice ? MemoryKind::kCuda
                                          : MemoryKind::kHost;
  }
  // A GPU's segment is written by copies alone.
  absl::Status Write(absl::Span<const char> from, char* to) override {
    if (segments_ == Segments::kHost) return memory_->Write(from, to);
    absl::MutexLock lock(&mutex_);
    const absl::Status status = memory_->Write(from, staging_->data());
    if (!status.ok()) return status;
    CopyTask task;
    task.src = staging_->data();
    task.dst = to;
    task.run_bytes = static_cast<int64_t>(from.size());
    return memory_->Copy({task}, CopyOptions(), nullptr);
  }
  bool others_may_write() const override { return false; }
  bool copies_rows() const override { return segments_ == Segments::kHost; }
  const char* Source(const std::string& bytes) override {
    return sources_ == Sources::kTrainers ? Region(bytes) : nullptr;
  }

 private:
  // Where a trainer's bytes are, by their name here.
  const char* Region(const std::string& bytes) {
    trainers_.push_back(std::make_unique<Child>("holder"));
    trainers_.back()->Send(bytes);
    const auto handle = DeviceHandle::Decode(trainers_.back()->Receive());
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (!handle.ok()) return nullptr;
    auto region = memory_->Open(*handle);
    EXPECT_TRUE(region.ok()) << region.status();
    if (!region.ok()) return nullptr;
    regions_.push_back(*std::move(region));
    return regions_.back()->data();
  }

  const Segments segments_;
  const Sources sources_;
  CopyPool pool_{1};
  std::unique_ptr<FdServer> fds_;
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<DeviceAgents> agents_;
  std::unique_ptr<AgentMemory> memory_;
  std::string uuid_;
  std::vector<std::unique_ptr<Child>> trainers_;
  std::vector<std::shared_ptr<const AgentMemory::Region>> regions_;
  absl::Mutex mutex_;
  std::unique_ptr<Segment> staging_ ABSL_GUARDED_BY(mutex_);
  TestProcess importer_;
};

std::function<std::unique_ptr<MemoryFixture>()> Make(
    AgentFixture::Segments segments, AgentFixture::Sources sources) {
  return [segments, sources]() -> std::unique_ptr<MemoryFixture> {
    return std::make_unique<AgentFixture>(segments, sources);
  };
}

INSTANTIATE_TEST_SUITE_P(
    AgentHost, MemoryConformance,
    ::testing::Values(Make(AgentFixture::Segments::kHost,
                           AgentFixture::Sources::kSegments)));
INSTANTIATE_TEST_SUITE_P(
    AgentHostFromGpu, MemoryConformance,
    ::testing::Values(Make(AgentFixture::Segments::kHost,
                           AgentFixture::Sources::kTrainers)));
INSTANTIATE_TEST_SUITE_P(
    AgentDevice, MemoryConformance,
    ::testing::Values(Make(AgentFixture::Segments::kDevice,
                           AgentFixture::Sources::kTrainers)));

// Some of a copy's tasks are the GPU's and some the host's: all of them are
// looked at before the first byte.
TEST(AgentMemoryConformance, ABadCopyBesideOneOfTheGpuWritesNothing) {
  AgentFixture fixture(AgentFixture::Segments::kDevice,
                       AgentFixture::Sources::kTrainers);
  AllocateOptions options;
  options.name = "host";
  options.generation_slots = 1;
  const auto host = fixture.memory()->Allocate(1000, options);
  ASSERT_TRUE(host.ok()) << host.status();
  fixture.Shape(&options);
  const auto device = fixture.memory()->Allocate(1000, options);
  ASSERT_TRUE(device.ok()) << device.status();
  const std::string bytes(1000, 'x');
  ASSERT_TRUE(fixture.memory()
                  ->Write(absl::MakeConstSpan(bytes.data(), bytes.size()),
                          (*host)->data())
                  .ok());
  std::vector<CopyTask> tasks(2);
  for (CopyTask& task : tasks) {
    task.src = (*host)->data();
    task.run_bytes = 500;
  }
  tasks[0].dst = (*device)->data();
  tasks[1].dst = (*host)->data() + 500;
  tasks[1].element_bytes = 7;
  EXPECT_EQ(ReasonOf(fixture.memory()->Copy(tasks, CopyOptions(), nullptr)),
            "BAD_COPY");
  std::string read(1000, 'r');
  ASSERT_TRUE(
      fixture.memory()->Read((*device)->data(), absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, std::string(1000, '\0'));
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  namespace cuda = weightsync::transport::cuda;
  signal(SIGPIPE, SIG_IGN);
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == absl::StrCat(cuda::kChild, "holder")) return cuda::HoldBytes();
    if (absl::StartsWith(word, "--device_agent=")) {
      return cuda::RunDeviceAgent(
          atoi(word.c_str() + strlen("--device_agent=")));
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
