// --memory=cuda --store=device --group=nccl: weights go from the trainer's GPU
// to those of workers on other nodes over NCCL, and never through the host.
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/status.h"
#include "tests/e2e/gpu_uuid.h"
#include "tests/gpu/gpu_cluster.h"
#include "tests/gpu/one_worker.h"

namespace weightsync {
namespace e2e {
namespace {

// Large enough that the tables of launches and the digests, which do cross, are
// little beside it.
constexpr int64_t kScale = 64;
constexpr int64_t kBucketBytes = 1 << 20;

int64_t ModelBytes() {
  int64_t bytes = 0;
  for (const client::Tensor& tensor : Parameters())
    bytes += client::PartBytes(tensor);
  return bytes;
}

class DeviceGroupTest : public GpuClusterTest {
 protected:
  void SetUp() override {
    model_scale = kScale;
    GpuClusterTest::SetUp();
  }
  // A node whose store and whose end of edges are on GPU `device`.
  void Start(const std::string& node, int device,
             std::vector<std::string> more = {}) {
    std::vector<std::string> flags = {
        "--memory=cuda",       "--store=device",
        "--group=nccl",        absl::StrCat("--bucket_bytes=", kBucketBytes),

        "--device_timeout=5s", "--device_uuid=" + UuidOf(device)};
    flags.insert(flags.end(), more.begin(), more.end());
    // A fault picks a node's agents by its name.
    setenv("GPU_SIM_ROLE", node.c_str(), 1);
    ASSERT_TRUE(cluster_.StartNode(node, flags));
    unsetenv("GPU_SIM_ROLE");
    nodes_.push_back(node);
  }
  // From now on what crosses between agents' GPUs and the host is counted.
  void Count() {
    std::string rules;
    for (const std::string& node : nodes_) {
      for (const char* way : {"hostToDevice", "deviceToHost"}) {
        absl::StrAppend(&rules, "call=", way, " process=", node,
                        " note=1 count=0;");
      }
    }
    gpu_sim::TakeNotes();
    gpu_sim::Plant(rules);
  }
  int64_t Crossed() {
    std::istringstream notes(gpu_sim::TakeNotes());
    std::string way;
    int64_t bytes = 0, sum = 0;
    while (notes >> way >> bytes) sum += bytes;
    return sum;
  }
  // Host memory of a node's store, also what it had before.
  int64_t HostStore(const std::string& node) {
    const auto found = cluster_.GetNode(node);
    return found.ok() ? found->memory().store_reserved_bytes() : -1;
  }
  bool Serves(const std::string& replica, int64_t version) {
    return WaitUntil([&] {
      grpc::ClientContext context;
      v1::GetReplicaRequest request;
      request.set_name(absl::StrCat("models/", kModel, "/replicas/", replica));
      v1::Replica found;
      return Admin("a")->GetReplica(&context, request, &found).ok() &&
             found.state() == v1::Replica::STATE_SERVING &&
             found.version() == version;
    });
  }
  pid_t AgentOf(const std::string& node) {
    return ChildOf(cluster_.process(node)->pid(), "weightsync_device_agent");
  }
  // Waits until an agent has come to what was planted for it with note=1.
  bool Noted() {
    return WaitUntil([] { return !gpu_sim::TakeNotes().empty(); });
  }

  std::vector<std::string> nodes_;
};

// What a daemon is told of NCCL arrives in every communicator of its agents:
// each node its own.
TEST_F(DeviceGroupTest, CommunicatorsAreMadeAsTheDaemonWasTold) {
  Start("a", 0, {"--nccl_max_ctas=7", "--nccl_cta_policy=zero"});
  Start("b", 1, {"--nccl_max_ctas=3", "--nccl_cta_policy=default"});
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=ncclCommInitRankConfig note=1 count=0");
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  OneWorker far(&cluster_, "b", "far", 1);
  const auto published = trainer.Publish(1);
  ASSERT_TRUE(published.ok()) << published.status();
  ASSERT_TRUE(Serves("far", 1));
  std::istringstream notes(gpu_sim::TakeNotes());
  std::string line;
  std::set<std::string> lines;
  while (std::getline(notes, line)) lines.insert(line);
  const std::string before =
      "ncclCommInitRankConfig blocking=0 minCTAs=1 maxCTAs=";
  EXPECT_EQ(lines,
            (std::set<std::string>{before + "7 CTAPolicy=2 connections=32",
                                   before + "3 CTAPolicy=0 connections=32"}));
}

TEST_F(DeviceGroupTest, UpdatesGoFromGpuToGpu) {
  Start("a", 0);
  Start("b", 1);
  Start("c", 2);
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  OneWorker one(&cluster_, "b", "one", 1);
  OneWorker two(&cluster_, "c", "two", 2);
  int version = 0;
  const auto publish = [&](const v1::UpdateOptions& options) {
    ++version;
    Count();
    const auto published = trainer.Publish(version, options);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    ASSERT_TRUE(Serves("one", version));
    ASSERT_TRUE(Serves("two", version));
    const int64_t crossed = Crossed();
    gpu_sim::Plant("");
    EXPECT_TRUE(one.Holds(version)) << version;
    EXPECT_TRUE(two.Holds(version)) << version;
    // Through the host every byte would cross six times.
    EXPECT_LT(crossed, ModelBytes() / 10) << version;
  };
  // SNAPSHOT and STAGE, what publishes are if nothing is said.
  for (int i = 0; i < 3; ++i)
    ASSERT_NO_FATAL_FAILURE(publish(v1::UpdateOptions()));
  // The others.
  for (int i = 0; i < 2; ++i) {
    v1::UpdateOptions options;
    options.set_allow_no_recovery(true);
    options.set_update_mode(v1::UPDATE_MODE_STREAM);
    ASSERT_NO_FATAL_FAILURE(publish(options));
    options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
    ASSERT_NO_FATAL_FAILURE(publish(options));
    options.set_update_mode(v1::UPDATE_MODE_STAGE);
    ASSERT_NO_FATAL_FAILURE(publish(options));
  }
  // None was ever taken.
  for (const char* node : {"a", "b", "c"})
    EXPECT_EQ(HostStore(node), 0) << node;

  // Where nothing is said, an agent has three slots of a bucket each.
  const v1::GpuUse gpu = Gpu("a", 0);
  EXPECT_EQ(gpu.slot_count(), 3);
  EXPECT_EQ(gpu.slot_bytes(), 3 * kBucketBytes);

  // One that comes late is served from a GPU, too.
  ASSERT_NO_FATAL_FAILURE(publish(v1::UpdateOptions()));
  Start("d", 3);
  Count();
  OneWorker late(&cluster_, "d", "late", 3);
  ASSERT_TRUE(Serves("late", version));
  const int64_t crossed = Crossed();
  gpu_sim::Plant("");
  EXPECT_TRUE(late.Holds(version));
  EXPECT_LT(crossed, ModelBytes() / 10);
  for (const char* node : {"a", "b", "c", "d"})
    EXPECT_EQ(HostStore(node), 0) << node;
}

// On the trainer's node, beside a chain that goes on to others.
TEST_F(DeviceGroupTest, WorkersBesideTheTrainerAndElsewhere) {
  Start("a", 0);
  Start("b", 1);
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  OneWorker far(&cluster_, "b", "far", 1);
  int version = 0;
  for (const v1::UpdateMode update :
       {v1::UPDATE_MODE_STAGE, v1::UPDATE_MODE_STREAM}) {
    for (const v1::PublishMode publish :
         {v1::PUBLISH_MODE_SNAPSHOT, v1::PUBLISH_MODE_IN_PLACE}) {
      v1::UpdateOptions options;
      options.set_allow_no_recovery(true);
      options.set_update_mode(update);
      options.set_publish_mode(publish);
      const auto published = trainer.Publish(++version, options);
      ASSERT_TRUE(published.ok()) << version << ": " << published.status();
      ASSERT_TRUE(Serves("near", version));
      ASSERT_TRUE(Serves("far", version));
      EXPECT_TRUE(near.Holds(version)) << version;
      EXPECT_TRUE(far.Holds(version)) << version;
    }
  }
  EXPECT_EQ(HostStore("a"), 0);
  EXPECT_EQ(HostStore("b"), 0);
}

// A worker on a GPU that the node's channels are not of: what is for it goes
// through the host, and arrives.
TEST_F(DeviceGroupTest, WhatIsForAnotherGpuLandsBesideIt) {
  Start("a", 0);
  Start("b", 1, {"--device_uuid=" + UuidOf(1) + "," + UuidOf(3)});
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker far(&cluster_, "b", "far", 3);
  for (const int version : {1, 2}) {
    const auto published = trainer.Publish(version);
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(Serves("far", version));
    EXPECT_TRUE(far.Holds(version));
  }
  EXPECT_EQ(HostStore("a"), 0);
  EXPECT_GT(HostStore("b"), 0);
}

// An agent that dies in the middle takes the node's part of the update along:
// it is given up by name, or goes on without the node; nobody is left with a
// mixture, and the next update arrives.
TEST_F(DeviceGroupTest, AnAgentThatDiesInTheMiddle) {
  Start("a", 0);
  Start("b", 1);
  Start("c", 2);
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker one(&cluster_, "b", "one", 1);
  OneWorker two(&cluster_, "c", "two", 2);
  ASSERT_TRUE(trainer.Publish(1).ok());
  int version = 1;
  for (const char* node : {"b", "c", "a"}) {
    ++version;
    const pid_t agent = AgentOf(node);
    ASSERT_NE(agent, 0);
    // It hangs in the middle, and is killed.
    gpu_sim::TakeNotes();
    gpu_sim::Plant(absl::StrCat(
        "call=", node == std::string("a") ? "ncclSend" : "ncclRecv",
        " process=", node, " note=1 hang=1"));
    std::thread killer([&] {
      EXPECT_TRUE(Noted());
      gpu_sim::Plant("");
      kill(agent, SIGKILL);
    });
    const auto published = trainer.Publish(version);
    killer.join();
    if (!published.ok()) {
      EXPECT_NE(ErrorReason(published.status()), "") << published.status();
    }
    ASSERT_TRUE(WaitUntil([&] {
      const pid_t now = AgentOf(node);
      return now != 0 && now != agent;
    }));
    ++version;
    const auto next = trainer.Publish(version);
    ASSERT_TRUE(next.ok()) << node << ": " << next.status();
    ASSERT_TRUE(Serves("one", next->version()));
    ASSERT_TRUE(Serves("two", next->version()));
    EXPECT_TRUE(one.Holds(version));
    EXPECT_TRUE(two.Holds(version));
  }
}

// A daemon in the middle of a chain dies; who stands behind it gets the rest.
TEST_F(DeviceGroupTest, AMemberThatDiesInTheMiddle) {
  Start("a", 0);
  Start("b", 1);
  Start("c", 2);
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker two(&cluster_, "c", "two", 2);
  {
    OneWorker one(&cluster_, "b", "one", 1);
    ASSERT_TRUE(trainer.Publish(1).ok());
    gpu_sim::TakeNotes();
    gpu_sim::Plant("call=ncclRecv process=b note=1 hang=1");
    std::thread killer([&] {
      EXPECT_TRUE(Noted());
      gpu_sim::Plant("");
      kill(cluster_.process("b")->pid(), SIGKILL);
    });
    const auto published = trainer.Publish(2);
    killer.join();
    EXPECT_TRUE(published.ok()) << published.status();
    if (published.ok()) {
      ASSERT_TRUE(Serves("two", 2));
      EXPECT_TRUE(two.Holds(2));
    }
    EXPECT_TRUE(one.Holds(1) || one.Holds(2));
  }
  const auto published = trainer.Publish(3);
  ASSERT_TRUE(published.ok()) << published.status();
  ASSERT_TRUE(Serves("two", published->version()));
  EXPECT_TRUE(two.Holds(3));
  EXPECT_EQ(HostStore("c"), 0);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
