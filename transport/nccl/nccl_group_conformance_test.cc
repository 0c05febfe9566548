// Groups over NCCL pass what every Group passes. Each node has a simulated GPU
// of its own, as NCCL asks.
#include <unistd.h>

#include <atomic>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "transport/conformance/group_conformance.h"
#include "transport/conformance/test_chain.h"
#include "transport/cuda/device.h"
#include "transport/nccl/nccl_channel.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

// Of the process that plays a peer; the others are this process's in turn.
constexpr int kDevices = 8;
bool is_child = false;

NcclDevice* DeviceOf(int ordinal) {
  static std::unique_ptr<NcclDevice> devices[kDevices];
  if (devices[ordinal] == nullptr) {
    NcclOptions options;
    options.device_uuid = (*cuda::ListDevices())[ordinal].uuid;
    // Less than a batch, so that it goes in pieces.
    options.staging_bytes = 300 << 10;
    auto device = NcclDevice::Create(options);
    EXPECT_TRUE(device.ok()) << device.status();
    devices[ordinal] = *std::move(device);
  }
  return devices[ordinal].get();
}

std::unique_ptr<GroupFactory> MakeNode(FaultPolicy* faults) {
  static std::atomic<int> counter{0};
  const int ordinal = is_child ? kDevices - 1 : counter++ % (kDevices - 1);
  tcp::EndpointOptions options;
  options.cluster_id = kConformanceCluster;
  options.heartbeat = absl::Milliseconds(200);
  options.faults = faults;
  auto endpoint = CreateNcclEndpoint(options, DeviceOf(ordinal));
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return *std::move(endpoint);
}

}  // namespace

// A node that was told to move over TCP alone, and one on the same GPU.
TEST(NcclGroup, EdgesThatCannotBeAreNamed) {
  for (const bool same_gpu : {false, true}) {
    int made = 0;
    TestNodes nodes(
        [&](FaultPolicy*) -> std::unique_ptr<GroupFactory> {
          tcp::EndpointOptions options;
          options.cluster_id = kConformanceCluster;
          return *(made++ == 0 || same_gpu
                       ? CreateNcclEndpoint(options, DeviceOf(0))
                       : tcp::Endpoint::Create(options));
        },
        2);
    TestStore a({1000}), b({1000});
    a.FillAndMark(1);
    auto groups = nodes.NewGroups({0, 1});
    JoinAll(groups);
    MoveAll(groups, {&a, &b});
    for (const absl::Status& status : WaitAll(groups)) {
      EXPECT_EQ(Blame(status),
                same_gpu ? "SAME_GPU a->b" : "GROUP_KIND_MISMATCH a->b");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Nccl, GroupConformance,
                         testing::Values(GroupBackend{"nccl", MakeNode}));

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  weightsync::transport::nccl::is_child =
      argc == 2 && argv[1][2] == 'g' && argv[1][3] == 'r';
  return weightsync::transport::GroupConformanceMain(
      argc, argv, weightsync::transport::nccl::MakeNode);
}
