// Groups over NCCL whose communicators live in device agents pass what every
// Group passes: a daemon's groups, without a context in the daemon.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/conformance/group_conformance.h"
#include "transport/cuda/agent/agent_channel.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/cuda/sim_control.h"
#include "transport/error.h"
#include "transport/tcp/endpoint.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// The simulated machine's GPUs. The last is that of the process that plays a
// peer; the others are this process's nodes' in turn.
constexpr int kDevices = 8;
constexpr int64_t kStaging = 300 << 10;
bool is_child = false;

std::string Self() {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  return std::string(path, size);
}

// As tests/gpu/sim/machine.cc makes them. This process has no CUDA of its own
// to ask.
std::string UuidOf(int device) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    snprintf(hex, sizeof(hex), "%02x", (0xa0 + 17 * i + device) & 0xff);
    text += hex;
  }
  return text;
}

std::unique_ptr<DeviceAgent> NewAgent(int device, const std::string& role) {
  DeviceAgent::Options options;
  options.command = {"/usr/bin/env", "GPU_SIM_ROLE=" + role, Self()};
  options.config.device_uuid = UuidOf(device);
  options.config.slots = 1;
  options.config.slot_bytes = 1 << 20;
  options.config.keep_free_bytes = 1 << 20;
  options.config.nccl_staging_bytes = kStaging;
  options.fd_socket_prefix =
      absl::StrCat(getenv("GPU_SIM_DIR"), "/g", getpid(), "_", role, device);
  auto agent = DeviceAgent::Start(options);
  EXPECT_TRUE(agent.ok()) << agent.status();
  return *std::move(agent);
}

AgentChannels* ChannelsOf(int device) {
  static std::unique_ptr<DeviceAgent> agents[kDevices];
  static std::unique_ptr<AgentChannels> channels[kDevices];
  if (channels[device] == nullptr) {
    agents[device] = NewAgent(device, "agent");
    channels[device] =
        std::make_unique<AgentChannels>(agents[device].get(), kStaging);
  }
  return channels[device].get();
}

std::unique_ptr<GroupFactory> MakeNode(FaultPolicy* faults) {
  static std::atomic<int> counter{0};
  const int device = is_child ? kDevices - 1 : counter++ % (kDevices - 1);
  tcp::EndpointOptions options;
  options.cluster_id = kConformanceCluster;
  options.heartbeat = absl::Milliseconds(200);
  options.faults = faults;
  options.payload = ChannelsOf(device)->Factory();
  auto endpoint = tcp::Endpoint::Create(options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return *std::move(endpoint);
}

bool Runs() { return false; }

// Bytes that an agent has received and that a copy engine has not put in place
// may come at any time, until the agent has ended: whoever hears that they did
// not come gives their place to others.
TEST(AgentChannelTest, AStalledCopyIsToldWhenItsProcessHasEnded) {
  const std::unique_ptr<DeviceAgent> a = NewAgent(0, "sender");
  const std::unique_ptr<DeviceAgent> b = NewAgent(1, "receiver");
  AgentChannels from(a.get(), kStaging), to(b.get(), kStaging);
  const auto sender = *from.Factory()("cluster/b");
  const auto receiver = *to.Factory()("cluster/a");
  ASSERT_TRUE(receiver->Accept(*sender->Offer()).ok());
  absl::Status connected;
  std::thread connecting(
      [&] { connected = receiver->Connect(absl::Seconds(20), Runs); });
  EXPECT_TRUE(sender->Connect(absl::Seconds(20), Runs).ok());
  connecting.join();
  ASSERT_TRUE(connected.ok()) << connected;
  gpu_sim::Plant("call=cudaMemcpyAsync process=receiver stall=1");
  const std::string bytes(1000, 'b');
  std::string got(1000, 'x');
  std::thread sending([&] {
    (void)sender->Send({absl::MakeConstSpan(bytes)}, absl::Seconds(20), Runs);
  });
  const absl::Status status =
      receiver->Receive({absl::MakeSpan(got)}, absl::Milliseconds(500), Runs);
  EXPECT_FALSE(b->Runs(1));
  const std::string reason = ReasonOf(status);
  EXPECT_TRUE(reason == "DEVICE_STALLED" || reason == "DEVICE_AGENT_LOST")
      << status;
  EXPECT_EQ(got, std::string(1000, 'x'));
  sending.join();
  gpu_sim::Plant("");
}

// An agent keeps a communicator whose other end dies with its agent; its own
// end waits for nobody.
TEST(AgentChannelTest, APeerThatVanishesWhileIdleHoldsUpNoEnd) {
  std::unique_ptr<DeviceAgent> a = NewAgent(0, "stays");
  const std::unique_ptr<DeviceAgent> b = NewAgent(1, "vanishes");
  {
    AgentChannels from(a.get(), kStaging), to(b.get(), kStaging);
    const auto sender = *from.Factory()("cluster/b");
    const auto receiver = *to.Factory()("cluster/a");
    ASSERT_TRUE(receiver->Accept(*sender->Offer()).ok());
    absl::Status connected;
    std::thread connecting(
        [&] { connected = receiver->Connect(absl::Seconds(20), Runs); });
    EXPECT_TRUE(sender->Connect(absl::Seconds(20), Runs).ok());
    connecting.join();
    ASSERT_TRUE(connected.ok()) << connected;
    sender->Finish();
    receiver->Finish();
  }
  // It is counted: a staging buffer, and what a communicator takes.
  const auto usage = a->GetUsage(absl::Seconds(5));
  ASSERT_TRUE(usage.ok()) << usage.status();
  EXPECT_GT(usage->nccl_bytes, kStaging);
  ASSERT_EQ(kill(b->pid(), SIGKILL), 0);
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=ncclCommAbort process=stays note=1 count=0");
  const absl::Time start = absl::Now();
  a = nullptr;
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  // By itself: it was not killed.
  EXPECT_EQ(gpu_sim::TakeNotes(), "ncclCommAbort\n");
  gpu_sim::Plant("");
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Agent, GroupConformance,
                         testing::Values(GroupBackend{"agent", MakeNode}));

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  namespace cuda = weightsync::transport::cuda;
  const std::string part = argc == 2 ? argv[1] : "";
  if (absl::StartsWith(part, "--device_agent=")) {
    FLAGS_logtostderr = true;
    return cuda::RunDeviceAgent(
        std::atoi(part.c_str() + std::strlen("--device_agent=")));
  }
  cuda::is_child = absl::StartsWith(part, "--group_conformance");
  return weightsync::transport::GroupConformanceMain(argc, argv,
                                                     cuda::MakeNode);
}
