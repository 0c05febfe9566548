// Channels between the stores of two nodes: what lies in an arena goes between
// it and the GPU by copy engine, and through no buffer beside it.
#include "transport/cuda/agent/agent_channel.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/cuda/agent/device_agents.h"
#include "transport/cuda/device.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kStaging = 64 << 10;
constexpr int64_t kArena = 1 << 20;
constexpr absl::Duration kPatience = absl::Seconds(20);

bool Runs() { return false; }

std::string Bytes(int64_t count, uint32_t seed) {
  std::string bytes(static_cast<size_t>(count), '\0');
  uint64_t state = seed;
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

// Buffers that a channel has mapped in this process.
int Buffers() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, "weightsync_channel");
  }
  return count;
}

// How often agents of `role` were seen to call what is noted.
int Count(const std::string& notes, const std::string& call) {
  std::istringstream lines(notes);
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    count += absl::StartsWith(line, call);
  }
  return count;
}

// The memory of one node, on one GPU.
class Node {
 public:
  Node(const std::string& role, int device) {
    const std::string prefix =
        absl::StrCat(getenv("GPU_SIM_DIR"), "/c", getpid(), role);
    auto fds = FdServer::Start(prefix, FdServer::Options());
    EXPECT_TRUE(fds.ok()) << fds.status();
    fds_ = *std::move(fds);
    host_ =
        std::make_unique<HostMemory>(&pool_, fds_.get(), HostMemory::Options());
    DeviceAgents::Options options;
    options.agent.command = {"/usr/bin/env",
                             absl::StrCat("GPU_SIM_ROLE=", role), ""};
    char path[4096];
    options.agent.command[2].assign(
        path, readlink("/proc/self/exe", path, sizeof(path)));
    options.agent.config.slots = 1;
    options.agent.config.slot_bytes = kArena;
    options.agent.config.keep_free_bytes = 1 << 20;
    options.agent.config.nccl_staging_bytes = kStaging;
    options.agent.fd_socket_prefix = prefix + "_agent";
    options.agent.backoff = absl::Milliseconds(10);
    const auto devices = ListDevices();
    EXPECT_TRUE(devices.ok()) << devices.status();
    options.device_uuids = {(*devices)[static_cast<size_t>(device)].uuid};
    auto agents = DeviceAgents::Create(options);
    EXPECT_TRUE(agents.ok()) << agents.status();
    agents_ = *std::move(agents);
    memory_ = std::make_unique<AgentMemory>(host_.get(), agents_.get(), 1,
                                            kArena, AgentMemory::Options());
    const auto agent = agents_->Get(options.device_uuids[0]);
    EXPECT_TRUE(agent.ok()) << agent.status();
    channels_ = std::make_unique<AgentChannels>(
        *agent, kStaging, absl::ZeroDuration(), memory_.get());
  }

  std::unique_ptr<Segment> Arena() {
    AllocateOptions options;
    options.name = "store";
    options.generation_slots = 1;
    options.others_read_only = true;
    auto arena = memory_->Allocate(kArena, options);
    EXPECT_TRUE(arena.ok()) << arena.status();
    return *std::move(arena);
  }
  AgentChannels* channels() { return channels_.get(); }

 private:
  CopyPool pool_{1};
  std::unique_ptr<FdServer> fds_;
  std::unique_ptr<HostMemory> host_;
  std::unique_ptr<DeviceAgents> agents_;
  std::unique_ptr<AgentMemory> memory_;
  std::unique_ptr<AgentChannels> channels_;
};

class ArenaChannelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant(
        "call=cudaHostRegister process=sender note=1 count=0\n"
        "call=cudaHostRegister process=receiver note=1 count=0");
    gpu_sim::TakeNotes();
    a_ = std::make_unique<Node>("sender", 0);
    b_ = std::make_unique<Node>("receiver", 1);
  }
  void TearDown() override {
    sender_ = nullptr;
    receiver_ = nullptr;
    a_ = nullptr;
    b_ = nullptr;
    gpu_sim::Plant("");
  }
  void Connect() {
    auto sender = a_->channels()->Factory()("cluster/b");
    auto receiver = b_->channels()->Factory()("cluster/a");
    ASSERT_TRUE(sender.ok()) << sender.status();
    ASSERT_TRUE(receiver.ok()) << receiver.status();
    sender_ = *std::move(sender);
    receiver_ = *std::move(receiver);
    const auto offer = sender_->Offer();
    ASSERT_TRUE(offer.ok()) << offer.status();
    ASSERT_TRUE(receiver_->Accept(*offer).ok());
    absl::Status connected;
    std::thread connecting(
        [&] { connected = receiver_->Connect(kPatience, Runs); });
    const absl::Status status = sender_->Connect(kPatience, Runs);
    connecting.join();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(connected.ok()) << connected;
  }
  // Frames of several sizes and beginnings, so that pieces cross the staging
  // buffers' ends.
  void Move(const char* from, char* to, int64_t bytes) {
    std::vector<absl::Span<const char>> sent;
    std::vector<absl::Span<char>> received;
    for (int64_t at = 0, size = 100; at < bytes; at += size, size = 70001) {
      size = std::min(size, bytes - at);
      sent.emplace_back(from + at, static_cast<size_t>(size));
      received.emplace_back(to + at, static_cast<size_t>(size));
    }
    absl::Status status;
    std::thread sending([&] { status = sender_->Send(sent, kPatience, Runs); });
    const absl::Status got = receiver_->Receive(received, kPatience, Runs);
    sending.join();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(got.ok()) << got;
  }

  std::unique_ptr<Node> a_, b_;
  std::unique_ptr<tcp::PayloadChannel> sender_, receiver_;
};

TEST_F(ArenaChannelTest, ArenasGoStraight) {
  // Both were pinned when they were made: nothing waits for that in an update.
  const std::unique_ptr<Segment> from = a_->Arena(), to = b_->Arena();
  EXPECT_LE(Count(gpu_sim::TakeNotes(), "cudaHostRegister"), 2);
  const std::string bytes = Bytes(kArena, 1);
  memcpy(from->data(), bytes.data(), bytes.size());
  ASSERT_NO_FATAL_FAILURE(Connect());
  Move(from->data() + 4096, to->data(), kArena - 4096);
  EXPECT_EQ(memcmp(to->data(), bytes.data() + 4096, bytes.size() - 4096), 0);
  EXPECT_EQ(Buffers(), 0);
  EXPECT_EQ(Count(gpu_sim::TakeNotes(), "cudaHostRegister"), 0);
}

TEST_F(ArenaChannelTest, WhatIsInNoArenaGoesThroughABuffer) {
  const std::unique_ptr<Segment> to = b_->Arena();
  const std::string bytes = Bytes(300000, 2);
  ASSERT_NO_FATAL_FAILURE(Connect());
  Move(bytes.data(), to->data(), 300000);
  EXPECT_EQ(memcmp(to->data(), bytes.data(), bytes.size()), 0);
  EXPECT_EQ(Buffers(), 1);  // the sender's
}

// Out of memory, or for a reason that the driver alone knows: an update does
// not wait for it, and what can be pinned later is.
class UnpinnedTest : public ArenaChannelTest,
                     public ::testing::WithParamInterface<int> {};

TEST_P(UnpinnedTest, AnArenaThatIsNotPinnedGoesThroughABufferUntilItIs) {
  gpu_sim::Plant(absl::StrCat(
      "call=cudaHostRegister process=receiver error=", GetParam(),
      " count=1\ncall=cudaHostRegister process=receiver note=1 count=0"));
  const std::unique_ptr<Segment> from = a_->Arena(), to = b_->Arena();
  const std::string bytes = Bytes(kArena, 3);
  memcpy(from->data(), bytes.data(), bytes.size());
  ASSERT_NO_FATAL_FAILURE(Connect());
  for (int i = 0; i < 3; ++i) {
    memset(to->data(), 0, bytes.size());
    Move(from->data(), to->data(), kArena);
    EXPECT_EQ(memcmp(to->data(), bytes.data(), bytes.size()), 0);
  }
  EXPECT_EQ(Buffers(), 1);  // the receiver's
  // It, and the arena: nothing is asked for with every piece.
  EXPECT_LE(Count(gpu_sim::TakeNotes(), "cudaHostRegister"), 2);
}

INSTANTIATE_TEST_SUITE_P(Errors, UnpinnedTest, ::testing::Values(2, 801));

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (absl::StartsWith(word, "--device_agent=")) {
      return weightsync::transport::cuda::RunDeviceAgent(
          atoi(word.c_str() + strlen("--device_agent=")));
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
