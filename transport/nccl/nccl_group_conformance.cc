// Groups over NCCL pass what every Group passes. Each node has a simulated GPU
// of its own, as NCCL asks.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/conformance/group_conformance.h"
#include "transport/conformance/test_chain.h"
#include "transport/cuda/device.h"
#include "transport/nccl/nccl_channel.h"

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

constexpr int kMaxDevices = 16;
bool is_child = false;

int DeviceCount() {
  static const int count = [] {
    const auto devices = cuda::ListDevices();
    CHECK(devices.ok()) << devices.status();
    return std::min(kMaxDevices, static_cast<int>(devices->size()));
  }();
  return count;
}

// Where there are enough, the last is that of the process that plays a peer,
// and the others are this process's nodes' in turn.
int NextDevice() {
  static std::atomic<int> counter{0};
  const int count = DeviceCount();
  if (is_child) return count - 1;
  return counter++ % (count > 2 ? count - 1 : count);
}

NcclDevice* DeviceOf(int ordinal) {
  static std::unique_ptr<NcclDevice> devices[kMaxDevices];
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
  const int ordinal = NextDevice();
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

// Besides the tests, `--check_nccl`: whether there is an NCCL to be had.
int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--check_nccl") {
    const auto library = weightsync::transport::nccl::NcclLibrary::Load();
    std::cout << (library.ok() ? (*library)->path()
                               : std::string(library.status().message()))
              << std::endl;
    return library.ok() ? 0 : 1;
  }
  weightsync::transport::nccl::is_child =
      argc == 2 && argv[1][2] == 'g' && argv[1][3] == 'r';
  return weightsync::transport::GroupConformanceMain(
      argc, argv, weightsync::transport::nccl::MakeNode);
}
