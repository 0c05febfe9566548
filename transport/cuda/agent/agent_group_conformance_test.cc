// Groups over NCCL whose communicators live in device agents pass what every
// Group passes: a daemon's groups, without a context in the daemon.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/conformance/group_conformance.h"
#include "transport/cuda/agent/agent_channel.h"
#include "transport/cuda/agent/agent_server.h"
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

AgentChannels* ChannelsOf(int device) {
  static std::unique_ptr<DeviceAgent> agents[kDevices];
  static std::unique_ptr<AgentChannels> channels[kDevices];
  if (channels[device] == nullptr) {
    DeviceAgent::Options options;
    options.command = {Self()};
    options.config.device_uuid = UuidOf(device);
    options.config.slots = 1;
    options.config.slot_bytes = 1 << 20;
    options.config.keep_free_bytes = 1 << 20;
    options.config.nccl_staging_bytes = kStaging;
    options.fd_socket_prefix =
        absl::StrCat(getenv("GPU_SIM_DIR"), "/g", getpid(), "_", device);
    auto agent = DeviceAgent::Start(options);
    EXPECT_TRUE(agent.ok()) << agent.status();
    agents[device] = *std::move(agent);
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
