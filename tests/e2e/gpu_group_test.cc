// Real daemons over a simulated GPU each: bytes between nodes go over NCCL,
// from device agents, and an agent that dies costs nothing but time.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/gpu_uuid.h"
#include "transport/cuda/sim_control.h"

namespace weightsync {
namespace e2e {
namespace {

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

// Each policy by its name, with trainers on two nodes, one of them with an
// engine of its own.
TEST(GpuGroupTest, EveryPolicyMovesItsBytesOverNccl) {
  Cluster cluster;
  const std::vector<std::string> nodes = {"a", "b", "c", "d"};
  for (int device = 0; device < 4; ++device) {
    std::vector<std::string> flags = Flags(device);
    flags.push_back("--bucket_bytes=8192");
    ASSERT_TRUE(cluster.StartNode(nodes[device], flags));
  }
  TestTrainer trainer(&cluster, {"a", "b", "a"});
  TestReplica beside(&cluster, "b", "beside");
  TestReplica split(&cluster, "c", "split", 2);
  TestReplica whole(&cluster, "d", "whole");
  for (const char* replica : {"beside", "split", "whole"}) {
    ASSERT_TRUE(cluster.WaitReplicaState(replica, v1::Replica::STATE_SERVING));
  }
  char value = 0;
  for (int round = 0; round < 2; ++round) {
    for (const v1::TransferPolicy policy :
         {v1::TRANSFER_POLICY_PAIRED, v1::TRANSFER_POLICY_BROADCAST,
          v1::TRANSFER_POLICY_SHARDED}) {
      SCOPED_TRACE(v1::TransferPolicy_Name(policy));
      v1::UpdateOptions options;
      options.set_transfer_policy(policy);
      trainer.SetOptions(options);
      const auto version = trainer.Publish(++value);
      ASSERT_TRUE(version.ok()) << version.status();
      EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
      EXPECT_EQ(version->transfer_policy(), policy);
      EXPECT_GT(version->wire_bytes(), 0);
      for (TestReplica* replica : {&beside, &split, &whole}) {
        // All of its bytes are those of this version.
        EXPECT_TRUE(replica->WaitServes(value));
        EXPECT_FALSE(replica->SawMix());
      }
    }
  }
  for (const std::string& node : nodes) {
    EXPECT_EQ(cluster.process(node)->Log().find("bytes go over TCP"),
              std::string::npos);
  }
}

int Count(const std::string& text, const std::string& what) {
  int count = 0;
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + what.size()))
    ++count;
  return count;
}

// To make a communicator takes up to seconds: the first update does so for each
// end of each edge, and no other, until an agent dies, whose peers make theirs
// with the next.
TEST(GpuGroupTest, CommunicatorsAreMadeOnce) {
  constexpr char kMade[] = "ncclCommInitRankConfig";
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=ncclCommInitRankConfig note=1 count=0");
  setenv("GLOG_v", "1", 1);
  Cluster cluster;
  const std::vector<std::string> nodes = {"a", "b", "c"};
  for (int device = 0; device < 3; ++device)
    ASSERT_TRUE(cluster.StartNode(nodes[device], Flags(device)));
  unsetenv("GLOG_v");
  const auto kept = [&] {
    int count = 0;
    for (const std::string& node : nodes)
      count += Count(cluster.process(node)->Log(), " is kept");
    return count;
  };
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica one(&cluster, "b", "one"), two(&cluster, "c", "two");
  for (const char* replica : {"one", "two"}) {
    ASSERT_TRUE(cluster.WaitReplicaState(replica, v1::Replica::STATE_SERVING));
  }
  int ends = 0, kept_before = 0;
  const auto publish = [&](char value) {
    const auto version = trainer.Publish(value);
    EXPECT_TRUE(version.ok()) << version.status();
    EXPECT_TRUE(one.WaitServes(value));
    EXPECT_TRUE(two.WaitServes(value));
    EXPECT_FALSE(one.SawMix());
    EXPECT_FALSE(two.SawMix());
    const int made = Count(gpu_sim::TakeNotes(), kMade);
    if (ends == 0) ends = made;
    // The next one may be published before nodes have left this one's groups.
    EXPECT_TRUE(WaitUntil([&] { return kept() == kept_before + ends; }))
        << kept() << " after " << kept_before;
    kept_before += ends;
    return made;
  };
  EXPECT_GT(publish(1), 0);
  EXPECT_EQ(ends % 2, 0);
  EXPECT_EQ(publish(2), 0);
  EXPECT_EQ(publish(3), 0);
  const auto nccl_bytes = [&](const std::string& node) {
    const auto found = cluster.GetNode(node);
    return found.ok() && found->memory().gpus_size() == 1
               ? found->memory().gpus(0).nccl_bytes()
               : 0;
  };
  const int64_t before = nccl_bytes("a");

  const pid_t daemon = cluster.process("c")->pid();
  const pid_t agent = ChildOf(daemon, "weightsync_device_agent");
  ASSERT_NE(agent, 0);
  ASSERT_EQ(kill(agent, SIGKILL), 0);
  ASSERT_TRUE(WaitUntil([&] {
    return cluster.process("c")->Log().find("a new device agent, epoch 2") !=
           std::string::npos;
  }));
  // Those of one edge, which the others still had at their end.
  EXPECT_EQ(publish(4), 2);
  EXPECT_EQ(publish(5), 0);
  EXPECT_TRUE(WaitUntil([&] { return nccl_bytes("a") == before; }))
      << nccl_bytes("a") << " and not " << before;
  gpu_sim::Plant("");
}

// BROADCAST is a chain of pairs, and each of them NCCL's.
TEST(GpuGroupTest, ABroadcastIsAChainOverNccl) {
  Cluster cluster;
  for (const auto& [node, device] :
       std::vector<std::pair<std::string, int>>{{"a", 0}, {"b", 1}, {"c", 2}}) {
    ASSERT_TRUE(cluster.StartNode(node, Flags(device)));
  }
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica one(&cluster, "b", "one"), two(&cluster, "c", "two");
  for (const char* replica : {"one", "two"}) {
    ASSERT_TRUE(cluster.WaitReplicaState(replica, v1::Replica::STATE_SERVING));
  }
  v1::UpdateOptions options;
  options.set_transfer_policy(v1::TRANSFER_POLICY_BROADCAST);
  trainer.SetOptions(options);
  for (const char value : {1, 2}) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(version->transfer_policy(), v1::TRANSFER_POLICY_BROADCAST);
    EXPECT_TRUE(one.WaitServes(value));
    EXPECT_TRUE(two.WaitServes(value));
  }
  // A staging buffer at each end of each edge: two ends have one, and who
  // stands between them two.
  int edges = 0;
  EXPECT_TRUE(WaitUntil([&] {
    edges = 0;
    for (const char* node : {"a", "b", "c"}) {
      const auto found = cluster.GetNode(node);
      if (!found.ok() || found->memory().gpus_size() != 1) return false;
      edges +=
          static_cast<int>(found->memory().gpus(0).nccl_bytes() / (16 << 20));
    }
    return edges == 4;
  })) << edges;
  for (const char* node : {"a", "b", "c"}) {
    EXPECT_EQ(cluster.process(node)->Log().find("bytes go over TCP"),
              std::string::npos);
  }
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

// NCCL where both ends of an edge have it, and TCP elsewhere: to a node without
// a GPU, and between two that share one.
TEST(GpuGroupTest, AutoTakesWhatBothEndsOfAnEdgeHave) {
  Cluster cluster;
  const auto automatic = [](int device) {
    return std::vector<std::string>{"--group=auto",
                                    "--device_uuid=" + UuidOf(device)};
  };
  const auto nccl_bytes = [&](const std::string& node) {
    const auto found = cluster.GetNode(node);
    return found.ok() && found->memory().gpus_size() == 1
               ? found->memory().gpus(0).nccl_bytes()
               : 0;
  };
  ASSERT_TRUE(cluster.StartNode("a", automatic(0)));
  ASSERT_TRUE(cluster.StartNode("b", automatic(1)));
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica one(&cluster, "b", "one");
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(one.WaitServes(1));
  // A staging buffer and a communicator (4 MiB of a simulated GPU) at each end
  // of an edge, which stay for the next update, and nothing else: no slots are
  // taken.
  EXPECT_TRUE(WaitUntil([&] {
    return nccl_bytes("a") == 20 << 20 && nccl_bytes("b") == 20 << 20;
  })) << nccl_bytes("a")
      << " " << nccl_bytes("b");
  EXPECT_EQ(cluster.GetNode("a")->memory().gpus(0).slot_bytes(), 0);
  EXPECT_EQ(cluster.GetNode("a")->memory().gpus(0).slot_count(), 0);

  setenv("GPU_SIM_VISIBLE", "", 1);
  ASSERT_TRUE(cluster.StartNode("c", {"--group=auto"}));
  unsetenv("GPU_SIM_VISIBLE");
  EXPECT_NE(cluster.process("c")->Log().find("bytes go over TCP: NO_DEVICE"),
            std::string::npos);
  ASSERT_TRUE(cluster.StartNode("d", automatic(1)));
  TestReplica two(&cluster, "c", "two"), three(&cluster, "d", "three");
  for (const char value : {2, 3}) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_TRUE(one.WaitServes(value));
    EXPECT_TRUE(two.WaitServes(value));
    EXPECT_TRUE(three.WaitServes(value));
  }
  std::string logs;
  for (const char* node : {"a", "b", "c", "d"})
    logs += cluster.process(node)->Log();
  EXPECT_NE(logs.find("bytes go over TCP: GROUP_KIND_MISMATCH: c moves"),
            std::string::npos)
      << logs;
}

// What cannot be made is tried once, and not at every update.
TEST(GpuGroupTest, AutoGoesOnOverTcpWhereNcclFails) {
  gpu_sim::Plant("call=ncclCommInitRankConfig error=2 count=0");
  Cluster cluster;
  ASSERT_TRUE(
      cluster.StartNode("a", {"--group=auto", "--device_uuid=" + UuidOf(0)}));
  ASSERT_TRUE(
      cluster.StartNode("b", {"--group=auto", "--device_uuid=" + UuidOf(1)}));
  TestTrainer trainer(&cluster, "a", 2);
  TestReplica replica(&cluster, "b", "one");
  for (const char value : {1, 2}) {
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_TRUE(replica.WaitServes(value));
  }
  gpu_sim::Plant("");
  EXPECT_NE(cluster.process("a")->Log().find(
                "a->b: bytes go over TCP: CHANNEL_RESTS: a channel did not "
                "connect (NCCL_ERROR: "),
            std::string::npos)
      << cluster.process("a")->Log();
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
