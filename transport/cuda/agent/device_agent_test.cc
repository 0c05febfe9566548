#include "transport/cuda/agent/device_agent.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/cuda/sim_control.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"
#include "transport/eventually.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(20);
constexpr int64_t kSlotBytes = 1 << 20;

std::string Self() {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  return std::string(path, size);
}

std::string RandomBytes(size_t count, uint32_t seed) {
  std::string bytes(count, '\0');
  uint64_t state = seed;
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

DeviceAgent::Options SmallOptions() {
  static std::atomic<int> counter{0};
  DeviceAgent::Options options;
  options.command = {"/usr/bin/env", "GPU_SIM_ROLE=agent", Self()};
  options.config.slots = 2;
  options.config.slot_bytes = kSlotBytes;
  options.config.keep_free_bytes = 1 << 20;
  options.config.stall_deadline_ms = 1000;
  options.config.nccl_staging_bytes = 64 << 10;
  options.fd_socket_prefix =
      absl::StrCat(getenv("GPU_SIM_DIR"), "/agent_", getpid(), "_", counter++);
  options.hang_deadline = absl::Seconds(2);
  options.backoff = absl::Milliseconds(10);
  return options;
}

// A trainer in a process of its own: it has an allocation of 600,000 bytes,
// RandomBytes(…, 5), and says how it can be opened.
class Trainer {
 public:
  Trainer() {
    int to[2], from[2];
    EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      execl("/proc/self/exe", "trainer", "--trainer", nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    char bytes[4096];
    const ssize_t n = read(from[0], bytes, sizeof(bytes));
    handle_.assign(bytes, n > 0 ? n : 0);
    close(from[0]);
  }
  ~Trainer() {
    close(to_);
    waitpid(pid_, nullptr, 0);
  }
  const std::string& handle() const { return handle_; }

  static constexpr int64_t kBytes = 600000;
  static int Play() {
    auto exporter = DeviceExporter::Create(*FindDevice(""));
    void* pointer = nullptr;
    cudaMalloc(&pointer, kBytes);
    const std::string bytes = RandomBytes(kBytes, 5);
    cudaMemcpy(pointer, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    const std::string handle =
        (*exporter)->Describe(pointer, kBytes)->handle.Encode();
    if (write(1, handle.data(), handle.size()) < 0) return 1;
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    cudaFree(pointer);
    return 0;
  }

 private:
  pid_t pid_;
  int to_;
  std::string handle_;
};

// A store: a file in memory that is mapped here.
class Store {
 public:
  explicit Store(int64_t bytes) : bytes_(bytes) {
    fd_ = memfd_create("store", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(fd_, bytes), 0);
    data_ = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
  }
  ~Store() {
    munmap(data_, bytes_);
    close(fd_);
  }
  int fd() const { return fd_; }
  char* data() const { return data_; }

 private:
  const int64_t bytes_;
  int fd_;
  char* data_;
};

class DeviceAgentTest : public ::testing::Test {
 protected:
  void SetUp() override { gpu_sim::Plant(""); }
  void TearDown() override { gpu_sim::Plant(""); }

  std::unique_ptr<DeviceAgent> Start(DeviceAgent::Options options) {
    options.on_change = [this](uint64_t epoch, const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      changes_.push_back(epoch != 0 ? absl::StrCat("up ", epoch)
                                    : absl::StrCat("down ", ReasonOf(status)));
    };
    absl::StatusOr<std::unique_ptr<DeviceAgent>> agent =
        DeviceAgent::Start(options);
    EXPECT_TRUE(agent.ok()) << agent.status();
    return agent.ok() ? *std::move(agent) : nullptr;
  }
  std::vector<std::string> changes() {
    absl::MutexLock lock(&mutex_);
    return changes_;
  }
  // A pack of the whole allocation of a trainer into a bucket of a slot.
  static AgentPack WholePack(uint64_t import) {
    AgentPack pack;
    pack.bucket_bytes = Trainer::kBytes;
    AgentPiece piece;
    piece.source = {AgentPlace::Kind::kImport, import, 0};
    piece.copy.run_bytes = Trainer::kBytes;
    piece.copy.element_bytes = 2;
    piece.copy.ordinal = 9;
    pack.pieces.push_back(piece);
    return pack;
  }
  static Digest WholeDigest() {
    const std::string bytes = RandomBytes(Trainer::kBytes, 5);
    Digest digest;
    DigestAccumulate(bytes.data(), {9, 0, Trainer::kBytes / 2, 2}, &digest);
    return digest;
  }

  absl::Mutex mutex_;
  std::vector<std::string> changes_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(DeviceAgentTest, PacksATrainersTensorsIntoTheStore) {
  Trainer trainer;
  Store store(2 << 20);
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  ASSERT_NE(agent, nullptr);
  EXPECT_EQ(agent->epoch(), 1u);
  EXPECT_TRUE(absl::StartsWith(agent->device_uuid(), "GPU-"));
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(import.ok()) << import.status();
  const auto host = agent->MapHost(1, store.fd(), 4096, 1 << 20, kDeadline);
  ASSERT_TRUE(host.ok()) << host.status();
  AgentPack pack = WholePack(*import);
  pack.to_host = true;
  pack.host = {AgentPlace::Kind::kHost, *host, 8192};
  const std::string want = RandomBytes(Trainer::kBytes, 5);
  int64_t told = 0;
  Digest sum;
  const absl::StatusOr<Digest> digest = agent->Pack(
      1, pack,
      [&](int64_t first, int64_t last, absl::Span<const Digest> digests) {
        EXPECT_EQ(first, told);
        told = last;
        for (const Digest& frame : digests) sum += frame;
        // What is told of is in place.
        const int64_t begin = first * kFrameBytes;
        const int64_t end = std::min(Trainer::kBytes, last * kFrameBytes);
        EXPECT_EQ(std::memcmp(store.data() + 4096 + 8192 + begin,
                              want.data() + begin, end - begin),
                  0);
      },
      kDeadline);
  ASSERT_TRUE(digest.ok()) << digest.status();
  EXPECT_EQ(told, (Trainer::kBytes + kFrameBytes - 1) / kFrameBytes);
  EXPECT_EQ(*digest, WholeDigest());
  EXPECT_EQ(sum, *digest);
  const absl::StatusOr<AgentUsage> usage = agent->GetUsage(kDeadline);
  ASSERT_TRUE(usage.ok());
  EXPECT_EQ(usage->slots_bytes, 2 * kSlotBytes);
  EXPECT_EQ(usage->imports, 1);
  EXPECT_TRUE(agent->Close(1, *import, kDeadline).ok());
  EXPECT_TRUE(agent->UnmapHost(1, *host, kDeadline).ok());
  EXPECT_EQ(ReasonOf(agent->Pack(1, pack, nullptr, kDeadline).status()),
            "BAD_JOB");
}

TEST_F(DeviceAgentTest, BadInputIsRefusedAndTheAgentGoesOn) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  EXPECT_EQ(ReasonOf(agent->Open(1, "no handle", false, kDeadline).status()),
            "HANDLE_MALFORMED");
  EXPECT_EQ(ReasonOf(agent->MapHost(1, -1, 0, 4096, kDeadline).status()),
            "BAD_JOB");
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  AgentPack pack = WholePack(*import + 7);
  EXPECT_EQ(ReasonOf(agent->Pack(1, pack, nullptr, kDeadline).status()),
            "BAD_JOB");
  pack = WholePack(*import);
  // What is rounded up to is the allocation's; beyond that is nobody's.
  pack.pieces[0].source.offset = Trainer::kBytes;
  EXPECT_EQ(ReasonOf(agent->Pack(1, pack, nullptr, kDeadline).status()),
            "BAD_COPY");
  pack = WholePack(*import);
  pack.bucket_bytes = kSlotBytes + 1;
  EXPECT_EQ(ReasonOf(agent->Pack(1, pack, nullptr, kDeadline).status()),
            "PAST_ALLOCATION");
  AgentCopy copy;
  copy.from = {AgentPlace::Kind::kSlot, 0, kSlotBytes - 10};
  copy.to = {AgentPlace::Kind::kSlot, 1, 0};
  copy.bytes = 11;
  EXPECT_EQ(ReasonOf(agent->Copy(1, {copy}, kDeadline)), "PAST_ALLOCATION");
  copy.bytes = 10;
  EXPECT_TRUE(agent->Copy(1, {copy}, kDeadline).ok());
  EXPECT_EQ(agent->epoch(), 1u);
}

TEST_F(DeviceAgentTest, AnAgentThatIsKilledIsStartedAgainInANewEpoch) {
  Trainer trainer;
  const DeviceAgent::Options options = SmallOptions();
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(import.ok());
  const pid_t first = agent->pid();
  ASSERT_EQ(kill(first, SIGKILL), 0);
  ASSERT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
  EXPECT_NE(agent->pid(), first);
  // Numbers of the old one mean nothing to the new one.
  EXPECT_EQ(
      ReasonOf(agent->Pack(1, WholePack(*import), nullptr, kDeadline).status()),
      "STALE_EPOCH");
  const auto again = agent->Open(2, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*agent->Pack(2, WholePack(*again), nullptr, kDeadline),
            WholeDigest());
  EXPECT_TRUE(Eventually([&] { return changes().size() == 3; }));
  EXPECT_EQ(changes(), (std::vector<std::string>{
                           "up 1", "down DEVICE_AGENT_LOST", "up 2"}));
  // It left nothing behind.
  EXPECT_NE(access((options.fd_socket_prefix + ".1").c_str(), F_OK), 0);
  EXPECT_EQ(access((options.fd_socket_prefix + ".2").c_str(), F_OK), 0);
  // The slots of the old one were given back.
  EXPECT_EQ(agent->GetUsage(kDeadline)->slots_bytes, 2 * kSlotBytes);
}

TEST_F(DeviceAgentTest, AFaultCostsOneAgentAndIsNamed) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  gpu_sim::Plant("call=cudaLaunchKernel process=agent sticky=700");
  EXPECT_EQ(
      ReasonOf(agent->Pack(1, WholePack(*import), nullptr, kDeadline).status()),
      "DEVICE_FAULT");
  gpu_sim::Plant("");
  ASSERT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
  const auto again = agent->Open(2, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*agent->Pack(2, WholePack(*again), nullptr, kDeadline),
            WholeDigest());
}

TEST_F(DeviceAgentTest, WorkThatDoesNotEndCostsOneAgent) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  gpu_sim::Plant("call=cudaLaunchKernel process=agent stall=1");
  EXPECT_EQ(
      ReasonOf(agent->Pack(1, WholePack(*import), nullptr, kDeadline).status()),
      "DEVICE_STALLED");
  gpu_sim::Plant("");
  EXPECT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
}

TEST_F(DeviceAgentTest, ACallThatHangsIsADeadlineAndCostsOneAgent) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  // Inside the runtime: no deadline of the agent's own ends it.
  gpu_sim::Plant("call=cudaIpcOpenMemHandle process=agent hang=1");
  const absl::Time start = absl::Now();
  EXPECT_EQ(
      ReasonOf(
          agent->Open(1, trainer.handle(), false, absl::Seconds(1)).status()),
      "DEVICE_AGENT_HUNG");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  gpu_sim::Plant("");
  ASSERT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
  EXPECT_TRUE(agent->Open(2, trainer.handle(), false, kDeadline).ok());
}

// A runtime that pins or opens memory holds questions up for seconds.
TEST_F(DeviceAgentTest, WhoLooksAtUsageKillsNobody) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  gpu_sim::Plant("call=cudaMemGetInfo process=agent hang=1");
  EXPECT_EQ(ReasonOf(agent->GetUsage(absl::Milliseconds(200)).status()),
            "DEVICE_AGENT_SLOW");
  gpu_sim::Plant("");
  // At most one of its threads waits, however often it is asked.
  EXPECT_EQ(ReasonOf(agent->GetUsage(kDeadline).status()), "AGENT_BUSY");
  EXPECT_EQ(*agent->Pack(1, WholePack(*import), nullptr, kDeadline),
            WholeDigest());
  EXPECT_EQ(agent->epoch(), 1u);
  EXPECT_EQ(changes(), std::vector<std::string>{"up 1"});
}

TEST_F(DeviceAgentTest, AnAbortThatNeverReturnsCostsOneAgent) {
  DeviceAgent::Options options = SmallOptions();
  options.config.nccl_abort_deadline_ms = 200;
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  const auto channel = agent->NewChannel(1, "cluster/b", kDeadline);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(agent->ChannelOffer(1, *channel, kDeadline).ok());
  gpu_sim::Plant("call=ncclCommAbort process=agent hang=1");
  const absl::Time start = absl::Now();
  EXPECT_EQ(ReasonOf(agent->ChannelConnect(1, *channel, absl::Milliseconds(100),
                                           [] { return false; })),
            "DEVICE_AGENT_LOST");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  gpu_sim::Plant("");
  ASSERT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
  EXPECT_EQ(ReasonOf(agent->ChannelOffer(1, *channel, kDeadline).status()),
            "STALE_EPOCH");
  EXPECT_TRUE(agent->NewChannel(2, "cluster/b", kDeadline).ok());
}

// Requests that take long are no reason to take an agent for hung.
TEST_F(DeviceAgentTest, ManyRequestsThatWaitLeaveItAnswering) {
  DeviceAgent::Options options = SmallOptions();
  options.hang_deadline = absl::Seconds(1);
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  std::vector<std::thread> waiting;
  std::atomic<int> told{0};
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&] {
      // A peer that never comes.
      const auto channel = agent->NewChannel(1, "cluster/b", kDeadline);
      ASSERT_TRUE(channel.ok()) << channel.status();
      ASSERT_TRUE(agent->ChannelOffer(1, *channel, kDeadline).ok());
      if (absl::IsUnavailable(agent->ChannelConnect(
              1, *channel, absl::Seconds(3), [] { return false; })))
        ++told;
    });
  }
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(agent->GetUsage(kDeadline).ok());
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(told, 3);
  EXPECT_EQ(agent->epoch(), 1u);
}

// Packs to the host take two streams each.
TEST_F(DeviceAgentTest, AllSlotsArePackedToTheHostAtOnce) {
  constexpr int kSlots = 4;
  Trainer trainer;
  Store store(kSlots * kSlotBytes);
  DeviceAgent::Options options = SmallOptions();
  options.config.slots = kSlots;
  // Each has its first before any has its second.
  options.command.insert(options.command.begin() + 1, "GPU_SIM_DELAY_US=20000");
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(import.ok()) << import.status();
  const auto host =
      agent->MapHost(1, store.fd(), 0, kSlots * kSlotBytes, kDeadline);
  ASSERT_TRUE(host.ok()) << host.status();
  for (int round = 0; round < 3; ++round) {
    std::memset(store.data(), 0, kSlots * kSlotBytes);
    std::vector<std::thread> packs;
    for (int slot = 0; slot < kSlots; ++slot) {
      packs.emplace_back([&, slot] {
        AgentPack pack = WholePack(*import);
        pack.bucket.id = slot;
        pack.to_host = true;
        pack.host = {AgentPlace::Kind::kHost, *host, slot * kSlotBytes};
        const auto digest = agent->Pack(1, pack, nullptr, kDeadline);
        EXPECT_TRUE(digest.ok()) << digest.status();
        EXPECT_TRUE(digest.ok() && *digest == WholeDigest());
      });
    }
    for (std::thread& pack : packs) pack.join();
    const std::string want = RandomBytes(Trainer::kBytes, 5);
    for (int slot = 0; slot < kSlots; ++slot) {
      EXPECT_EQ(std::memcmp(store.data() + slot * kSlotBytes, want.data(),
                            want.size()),
                0);
    }
  }
  EXPECT_EQ(agent->epoch(), 1u);
}

// Whoever is told of frames may take long over it.
TEST_F(DeviceAgentTest, ASlowReceiverOfFramesHoldsUpNobody) {
  Trainer trainer;
  DeviceAgent::Options options = SmallOptions();
  options.hang_deadline = absl::Seconds(1);
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(import.ok());
  absl::Mutex mutex;
  bool begun = false;
  std::thread pack([&] {
    // Longer than its own deadline, too, which is the agent's.
    const auto digest = agent->Pack(
        1, WholePack(*import),
        [&](int64_t, int64_t, absl::Span<const Digest>) {
          {
            absl::MutexLock lock(&mutex);
            begun = true;
          }
          absl::SleepFor(absl::Seconds(3));
        },
        absl::Seconds(2));
    EXPECT_TRUE(digest.ok()) << digest.status();
    EXPECT_TRUE(digest.ok() && *digest == WholeDigest());
  });
  {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&begun));
  }
  for (int i = 0; i < 5; ++i) {
    const absl::Time start = absl::Now();
    EXPECT_TRUE(agent->GetUsage(kDeadline).ok());
    EXPECT_LT(absl::Now() - start, absl::Seconds(1));
    absl::SleepFor(absl::Milliseconds(300));
  }
  pack.join();
  EXPECT_EQ(agent->epoch(), 1u);
  EXPECT_EQ(changes(), std::vector<std::string>{"up 1"});
}

TEST_F(DeviceAgentTest, AnAgentThatIsFullCanStillBeToldToStop) {
  Trainer trainer;
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  const auto import = agent->Open(1, trainer.handle(), false, kDeadline);
  ASSERT_TRUE(import.ok());
  const auto channel = agent->NewChannel(1, "cluster/b", kDeadline);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(agent->ChannelOffer(1, *channel, kDeadline).ok());
  std::atomic<bool> stop{false};
  absl::Status connected;
  std::thread connect([&] {
    connected = agent->ChannelConnect(1, *channel, absl::Seconds(25),
                                      [&stop] { return stop.load(); });
  });
  // One hangs in the runtime, and all others behind it.
  gpu_sim::Plant("call=cudaIpcOpenMemHandle process=agent hang=1");
  std::atomic<int> busy{0};
  std::vector<std::thread> opens;
  DeviceHandle handle = *DeviceHandle::Decode(trainer.handle());
  handle.base += 4096;  // not the one that is open
  for (int i = 0; i < 540; ++i) {
    opens.emplace_back([&] {
      const absl::Status status =
          agent->Open(1, handle.Encode(), false, absl::Seconds(60)).status();
      if (ReasonOf(status) == "AGENT_BUSY") ++busy;
    });
  }
  ASSERT_TRUE(Eventually([&] { return busy > 0; }));
  const absl::Time start = absl::Now();
  stop = true;
  connect.join();
  EXPECT_EQ(ReasonOf(connected), "GROUP_CLOSED");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  // What gives something back is not refused, either.
  EXPECT_TRUE(agent->EndChannel(1, *channel, false, kDeadline).ok());
  gpu_sim::Plant("");
  kill(agent->pid(), SIGKILL);
  for (std::thread& open : opens) open.join();
}

// What its communicators may take of the GPU is as it was configured.
TEST_F(DeviceAgentTest, ChannelsAreMadeAsConfigured) {
  gpu_sim::TakeNotes();
  DeviceAgent::Options options = SmallOptions();
  options.config.nccl_max_ctas = 9;
  options.config.nccl_cta_policy = 2;
  const std::unique_ptr<DeviceAgent> agent = Start(options);
  const auto channel = agent->NewChannel(1, "cluster/b", kDeadline);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(agent->ChannelOffer(1, *channel, kDeadline).ok());
  gpu_sim::Plant("call=ncclCommInitRankConfig note=1 count=0");
  EXPECT_FALSE(agent
                   ->ChannelConnect(1, *channel, absl::Milliseconds(100),
                                    [] { return false; })
                   .ok());
  EXPECT_EQ(gpu_sim::TakeNotes(),
            "ncclCommInitRankConfig blocking=0 minCTAs=1 maxCTAs=9 "
            "CTAPolicy=2 connections=32\n");
}

TEST_F(DeviceAgentTest, AnAgentThatIsStoppedIsNoticedWithoutACall) {
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  ASSERT_EQ(kill(agent->pid(), SIGSTOP), 0);
  EXPECT_TRUE(Eventually([&] { return agent->epoch() == 2; }));
  EXPECT_EQ(changes()[1], "down DEVICE_AGENT_HUNG");
}

TEST_F(DeviceAgentTest, StartsThatComeToNothingAreRepeated) {
  const std::unique_ptr<DeviceAgent> agent = Start(SmallOptions());
  // The probe is the first allocation of each start; counts are a process's.
  gpu_sim::Plant("call=cudaMalloc process=agent error=2");
  ASSERT_EQ(kill(agent->pid(), SIGKILL), 0);
  ASSERT_TRUE(Eventually([&] { return agent->epoch() == 0; }));
  EXPECT_EQ(ReasonOf(agent->GetUsage(kDeadline).status()), "DEVICE_AGENT_LOST");
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(agent->epoch(), 0u);
  gpu_sim::Plant("");
  ASSERT_TRUE(Eventually([&] { return agent->epoch() > 2; }));
  EXPECT_TRUE(agent->GetUsage(kDeadline).ok());
}

TEST_F(DeviceAgentTest, AGpuThatCannotServeIsSaidAtTheStart) {
  DeviceAgent::Options options = SmallOptions();
  options.config.slot_bytes = int64_t{1} << 40;
  absl::Status status = DeviceAgent::Start(options).status();
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA");
  options = SmallOptions();
  options.config.device_uuid = "GPU-of-another-machine";
  EXPECT_EQ(ReasonOf(DeviceAgent::Start(options).status()),
            "DEVICE_NOT_VISIBLE");
  options = SmallOptions();
  options.command.insert(options.command.begin() + 1, "GPU_SIM_MIG=0");
  EXPECT_EQ(ReasonOf(DeviceAgent::Start(options).status()), "MIG_NO_IPC");
  options = SmallOptions();
  options.command = {"/nonexistent"};
  EXPECT_EQ(ReasonOf(DeviceAgent::Start(options).status()),
            "DEVICE_AGENT_LOST");
  options = SmallOptions();
  options.command = {"/bin/false"};
  EXPECT_EQ(ReasonOf(DeviceAgent::Start(options).status()),
            "DEVICE_AGENT_LOST");
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  FLAGS_logtostderr = true;
  const std::string part = argc == 2 ? argv[1] : "";
  if (part == "--trainer") return weightsync::transport::cuda::Trainer::Play();
  if (absl::StartsWith(part, "--device_agent="))
    return weightsync::transport::cuda::RunDeviceAgent(
        std::atoi(part.c_str() + std::strlen("--device_agent=")));
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
