#ifndef WEIGHTSYNC_TRANSPORT_CONFORMANCE_GROUP_CONFORMANCE_H_
#define WEIGHTSYNC_TRANSPORT_CONFORMANCE_GROUP_CONFORMANCE_H_

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/fault/fault_policy.h"
#include "transport/group.h"

namespace weightsync {
namespace transport {

// What every Group must do, whatever it is made of. An implementation's test
// brings a maker of nodes and its own main():
//
//   INSTANTIATE_TEST_SUITE_P(Tcp, GroupConformance,
//   testing::Values(GroupBackend{"tcp", MakeTcpNode})); int main(int argc,
//   char** argv) { return GroupConformanceMain(argc, argv, MakeTcpNode); }

constexpr char kConformanceCluster[] = "conformance";

// One node of cluster kConformanceCluster, reachable from this machine, with
// heartbeats that suit a peer deadline of a second. `faults` is asked about
// every frame; it may be null.
using GroupNodeMaker =
    std::function<std::unique_ptr<GroupFactory>(FaultPolicy* faults)>;

struct GroupBackend {
  std::string name;
  GroupNodeMaker make_node;
};

inline void PrintTo(const GroupBackend& backend, std::ostream* out) {
  *out << backend.name;
}

class GroupConformance : public testing::TestWithParam<GroupBackend> {};

// Runs the tests, or plays the part of a peer in a process of its own that a
// test can stop.
int GroupConformanceMain(int argc, char** argv,
                         const GroupNodeMaker& make_node);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CONFORMANCE_GROUP_CONFORMANCE_H_
