// Real daemons over simulated GPUs whose edges cannot go over NCCL: by name
// with
// --group=nccl, over TCP with --group=auto.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/gpu_uuid.h"
#include "transport/cuda/sim_control.h"

namespace weightsync {
namespace e2e {
namespace {

std::vector<std::string> Flags(const std::string& group, int device) {
  return {"--group=" + group, "--device_uuid=" + UuidOf(device)};
}

// An update from a to b of a cluster whose daemons were started.
class GpuGroupRefusedTest : public ::testing::Test {
 protected:
  void TearDown() override { gpu_sim::Plant(""); }

  // What the trainer hears has this reason and sentence, and so has the
  // version's failure; the daemons go on.
  void ExpectRefused(const std::string& reason, const std::string& sentence) {
    TestTrainer trainer(&cluster_, "a", 2);
    TestReplica replica(&cluster_, "b", "one");
    ASSERT_TRUE(cluster_.WaitReplicaState("one", v1::Replica::STATE_SERVING));
    const auto version = trainer.Publish(1);
    if (version.ok()) {
      EXPECT_EQ(version->state(), v1::Version::STATE_ABORTED);
      EXPECT_EQ(version->failure().reason(), reason)
          << version->ShortDebugString();
      EXPECT_TRUE(absl::StrContains(version->failure().message(), sentence))
          << version->ShortDebugString();
    } else {
      EXPECT_EQ(ErrorReason(version.status()), reason) << version.status();
      EXPECT_TRUE(absl::StrContains(version.status().message(), sentence))
          << version.status();
    }
    for (const char* node : {"a", "b"})
      EXPECT_TRUE(cluster_.process(node)->Running());
  }
  void ExpectOverTcp(const std::string& reason) {
    TestTrainer trainer(&cluster_, "a", 2);
    TestReplica replica(&cluster_, "b", "one");
    for (const char value : {1, 2}) {
      const auto version = trainer.Publish(value);
      ASSERT_TRUE(version.ok()) << version.status();
      EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
      EXPECT_TRUE(replica.WaitServes(value));
    }
    EXPECT_TRUE(absl::StrContains(
        cluster_.process("a")->Log(),
        absl::StrCat("a->b: bytes go over TCP: ", reason, ": ")))
        << cluster_.process("a")->Log();
  }

  Cluster cluster_;
};

TEST_F(GpuGroupRefusedTest, TwoDaemonsOnOneGpu) {
  for (const char* node : {"a", "b"})
    ASSERT_TRUE(cluster_.StartNode(node, Flags("nccl", 0)));
  ExpectRefused("SAME_GPU", UuidOf(0));
}

TEST_F(GpuGroupRefusedTest, TwoDaemonsOnOneGpuGoOverTcpWithAuto) {
  for (const char* node : {"a", "b"})
    ASSERT_TRUE(cluster_.StartNode(node, Flags("auto", 0)));
  ExpectOverTcp("SAME_GPU");
}

TEST_F(GpuGroupRefusedTest, TwoVersionsOfNccl) {
  ASSERT_TRUE(cluster_.StartNode("a", Flags("nccl", 0)));
  setenv("GPU_SIM_NCCL_VERSION", "22706", 1);
  ASSERT_TRUE(cluster_.StartNode("b", Flags("nccl", 1)));
  unsetenv("GPU_SIM_NCCL_VERSION");
  ExpectRefused("NCCL_VERSION_MISMATCH", "2.27.6");
}

TEST_F(GpuGroupRefusedTest, TwoVersionsOfNcclGoOverTcpWithAuto) {
  ASSERT_TRUE(cluster_.StartNode("a", Flags("auto", 0)));
  setenv("GPU_SIM_NCCL_VERSION", "22706", 1);
  ASSERT_TRUE(cluster_.StartNode("b", Flags("auto", 1)));
  unsetenv("GPU_SIM_NCCL_VERSION");
  ExpectOverTcp("NCCL_VERSION_MISMATCH");
}

// One waits in NCCL for its peer, and the peer's call never returns: both
// daemons end when they are told to.
TEST_F(GpuGroupRefusedTest, ADaemonEndsWhileNcclHangs) {
  gpu_sim::TakeNotes();
  setenv("GPU_SIM_ROLE", "early", 1);
  ASSERT_TRUE(cluster_.StartNode("a", Flags("nccl", 0)));
  setenv("GPU_SIM_ROLE", "late", 1);
  ASSERT_TRUE(cluster_.StartNode("b", Flags("nccl", 1)));
  unsetenv("GPU_SIM_ROLE");
  gpu_sim::Plant(
      "call=ncclCommInitRankConfig process=late note=1 hang=1 count=0;"
      "call=ncclCommInitRankConfig process=early note=1 count=0");
  TestTrainer trainer(&cluster_, "a", 2);
  TestReplica replica(&cluster_, "b", "one");
  ASSERT_TRUE(cluster_.WaitReplicaState("one", v1::Replica::STATE_SERVING));
  std::thread publishing([&] { (void)trainer.Publish(1); });
  // Both are in it.
  EXPECT_TRUE(WaitUntil([&] {
    const std::string notes = gpu_sim::Notes();
    return notes.find('\n') != notes.rfind('\n');
  })) << gpu_sim::Notes();
  for (const char* node : {"b", "a"}) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(cluster_.EndNode(node), 0) << node;
    // --shutdown_timeout, and for the agent that is killed then.
    EXPECT_LT(absl::Now() - start, absl::Seconds(6)) << node;
  }
  publishing.join();
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
