#include <memory>

#include "gtest/gtest.h"
#include "transport/conformance/group_conformance.h"
#include "transport/tcp/endpoint.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

std::unique_ptr<GroupFactory> MakeNode(FaultPolicy* faults) {
  EndpointOptions options;
  options.cluster_id = kConformanceCluster;
  options.heartbeat = absl::Milliseconds(200);
  options.faults = faults;
  auto endpoint = Endpoint::Create(options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return *std::move(endpoint);
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Tcp, GroupConformance,
                         testing::Values(GroupBackend{"tcp", MakeNode}));

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  return weightsync::transport::GroupConformanceMain(
      argc, argv, weightsync::transport::tcp::MakeNode);
}
