// Who takes part changes, and with it the layout of the buckets.
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/e2e/cluster.h"

namespace weightsync {
namespace e2e {
namespace {

// A worker is told how to copy each layout once, and keeps no more than some of
// that. A layout that comes back after many others is told again.
TEST(LayoutsTest, OneThatComesBackAfterManyOthersIsInstalled) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a"));
  ASSERT_TRUE(cluster.StartNode("b"));
  TestTrainer trainer(&cluster, "a", 1);
  TestReplica stays(&cluster, "b", "stays");
  ASSERT_TRUE(cluster.WaitReplicaState("stays", v1::Replica::STATE_SERVING));
  const auto publish = [&](char value) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    ASSERT_TRUE(stays.WaitServes(value)) << version->ShortDebugString();
  };
  publish(1);
  for (int i = 0; i < 18; ++i) {
    const std::string name = absl::StrCat("guest-", i);
    TestReplica guest(&cluster, "b", name, 2 + i);
    ASSERT_TRUE(cluster.WaitReplicaState(name, v1::Replica::STATE_SERVING));
    publish(static_cast<char>(2 + i));
  }
  publish(40);
  EXPECT_FALSE(stays.SawMix());
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
