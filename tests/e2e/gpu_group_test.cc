// Real daemons over a simulated GPU each: bytes between nodes go over NCCL,
// from device agents, and an agent that dies costs nothing but time.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/cluster.h"

namespace weightsync {
namespace e2e {
namespace {

// As the simulated machine has them (tests/gpu/sim/machine.cc).
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

std::vector<std::string> Flags(int device) {
  return {"--group=nccl", "--device_uuid=" + UuidOf(device)};
}

TEST(GpuGroupTest, UpdatesGoOverNccl) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a", Flags(0)));
  ASSERT_TRUE(cluster.StartNode("b", Flags(1)));
  ASSERT_TRUE(cluster.StartNode("c", Flags(2)));
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica one(&cluster, "b", "one", 2), two(&cluster, "c", "two");
  for (const char value : {1, 2, 3}) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
    EXPECT_TRUE(one.WaitServes(value));
    EXPECT_TRUE(two.WaitServes(value));
  }
  EXPECT_FALSE(one.SawMix());
  EXPECT_FALSE(two.SawMix());
  // It was NCCL that they went over.
  EXPECT_NE(cluster.process("b")->Log().find("bytes go over NCCL"),
            std::string::npos);
}

TEST(GpuGroupTest, AnAgentThatDiesIsStartedAgainAndTheNextUpdateArrives) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a", Flags(0)));
  ASSERT_TRUE(cluster.StartNode("b", Flags(1)));
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica replica(&cluster, "b", "one");
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(replica.WaitServes(1));
  for (const char* node : {"a", "b"}) {
    const pid_t daemon = cluster.process(node)->pid();
    const pid_t agent = ChildOf(daemon, "weightsync_device_agent");
    ASSERT_NE(agent, 0);
    ASSERT_EQ(kill(agent, SIGKILL), 0);
    ASSERT_TRUE(WaitUntil([&] {
      const pid_t now = ChildOf(daemon, "weightsync_device_agent");
      return now != 0 && now != agent &&
             cluster.process(node)->Log().find("a new device agent, epoch 2") !=
                 std::string::npos;
    }));
    EXPECT_TRUE(cluster.process(node)->Running());
  }
  const auto version = trainer.Publish(2);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
  EXPECT_TRUE(replica.WaitServes(2));
  EXPECT_FALSE(replica.SawMix());
}

TEST(GpuGroupTest, ADaemonWithoutItsGpuSaysWhichItSees) {
  Cluster cluster;
  EXPECT_FALSE(cluster.StartNode(
      "a", {"--group=nccl", "--device_uuid=GPU-of-another-machine"}));
  const std::string log = cluster.process("a")->Log();
  EXPECT_NE(log.find("DEVICE_NOT_VISIBLE"), std::string::npos);
  EXPECT_NE(log.find(UuidOf(3)), std::string::npos);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
