// --store=device: weights wait in memory of the GPUs, from trainers on a GPU to
// workers on the same one, on another one, on another node and on none.
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "tests/e2e/gpu_uuid.h"
#include "tests/gpu/gpu_cluster.h"
#include "tests/gpu/one_worker.h"

namespace weightsync {
namespace e2e {
namespace {

constexpr int64_t kBucketBytes = 16384;

std::vector<std::string> DeviceFlags(std::vector<std::string> more = {}) {
  std::vector<std::string> flags = GpuFlags();
  flags.push_back("--store=device");
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// What all tensors of the model take.
int64_t ModelBytes() {
  int64_t bytes = 0;
  for (const client::Tensor& tensor : Parameters())
    bytes += client::PartBytes(tensor);
  return bytes;
}

class DeviceStoreTest : public GpuClusterTest {
 protected:
  v1::MemoryUse Memory(const std::string& node) {
    const auto found = cluster_.GetNode(node);
    return found.ok() ? found->memory() : v1::MemoryUse();
  }
  // Waits until it does. Its memory is not to be read before: a worker may be
  // writing it.
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
  bool Verify(const std::string& replica) {
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/", replica));
    v1::VerifyReplicaResponse response;
    return Admin("a")->VerifyReplica(&context, request, &response).ok() &&
           response.equal();
  }
  // Returns when the daemon knows that it has ended.
  void KillAgent(const std::string& node, size_t gpu = 0) {
    const int before = Gpu(node, gpu).restart_count();
    const pid_t agent =
        ChildOf(cluster_.process(node)->pid(), "weightsync_device_agent");
    ASSERT_NE(agent, 0);
    ASSERT_EQ(kill(agent, SIGKILL), 0);
    // What GetNode says may be of before an earlier start.
    ASSERT_TRUE(WaitUntil([&] {
      const pid_t now =
          ChildOf(cluster_.process(node)->pid(), "weightsync_device_agent");
      return now != 0 && now != agent &&
             Gpu(node, gpu).restart_count() > before;
    }));
  }
  std::string Log(const std::string& node) {
    return cluster_.process(node)->Log();
  }
};

TEST_F(DeviceStoreTest, WeightsWaitOnTheGpuAndReachWorkersEverywhere) {
  StartNode("a", DeviceFlags());
  StartNode("b", DeviceFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  {
    // On the trainer's GPU alone: nothing lies in host memory.
    OneWorker near(&cluster_, "a", "near", 0);
    for (const int version : {1, 2, 3, 4}) {
      const auto published = trainer.Publish(version);
      ASSERT_TRUE(published.ok()) << version << ": " << published.status();
      EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
      ASSERT_TRUE(Serves("near", version));
      EXPECT_TRUE(near.Holds(version));
    }
    EXPECT_TRUE(Verify("near"));
    EXPECT_EQ(Memory("a").store_used_bytes(), 0);
    EXPECT_EQ(Memory("a").store_reserved_bytes(), 0);
    // Two updates, each in an arena of its own, and the slots apart.
    ASSERT_TRUE(WaitUntil(
        [&] { return Gpu("a", 0).device_store_bytes() >= 2 * ModelBytes(); }));
    EXPECT_LT(Gpu("a", 0).device_store_bytes(), 2 * ModelBytes() + 8192);
    EXPECT_EQ(Gpu("a", 0).slot_bytes(), 2 * kBucketBytes);

    // On another GPU of the node, and on another node.
    OneWorker other(&cluster_, "a", "other", 1);
    OneWorker far(&cluster_, "b", "far", 3);
    ASSERT_TRUE(Serves("other", 4));
    ASSERT_TRUE(Serves("far", 4));
    EXPECT_TRUE(other.Holds(4));
    EXPECT_TRUE(far.Holds(4));
    for (const int version : {5, 6, 7}) {
      v1::UpdateOptions options;
      options.set_verify_source(version == 6);
      const auto published = trainer.Publish(version, options);
      ASSERT_TRUE(published.ok()) << version << ": " << published.status();
      EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
      ASSERT_TRUE(Serves("near", version));
      EXPECT_TRUE(near.Holds(version));
      ASSERT_TRUE(Serves("other", version));
      EXPECT_TRUE(other.Holds(version));
      ASSERT_TRUE(Serves("far", version));
      EXPECT_TRUE(far.Holds(version));
    }
    for (const char* name : {"near", "other", "far"}) EXPECT_TRUE(Verify(name));
    // What came to the other node lies on the GPU of its worker. Copies in host
    // memory went with the updates that they were for.
    ASSERT_TRUE(WaitUntil(
        [&] { return Gpu("b", 0).device_store_bytes() >= ModelBytes(); }));
    EXPECT_TRUE(WaitUntil([&] {
      return Memory("a").store_used_bytes() == 0 &&
             Memory("b").store_used_bytes() == 0;
    })) << Memory("a").ShortDebugString()
        << Memory("b").ShortDebugString();

    // The other modes are as ever.
    for (const int version : {8, 9, 10}) {
      v1::UpdateOptions options;
      options.set_allow_no_recovery(true);
      if (version != 10) options.set_update_mode(v1::UPDATE_MODE_STREAM);
      if (version != 8) options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
      const auto published = trainer.Publish(version, options);
      ASSERT_TRUE(published.ok()) << version << ": " << published.status();
      ASSERT_TRUE(Serves("near", version));
      EXPECT_TRUE(near.Holds(version));
      ASSERT_TRUE(Serves("other", version));
      EXPECT_TRUE(other.Holds(version));
      ASSERT_TRUE(Serves("far", version));
      EXPECT_TRUE(far.Holds(version));
    }
  }
  // Of a worker without a GPU, what it needs lies in host memory.
  OneWorker host(&cluster_, "a", "host", -1);
  ASSERT_TRUE(Serves("host", 10));
  EXPECT_TRUE(host.Holds(10));
  auto published = trainer.Publish(11);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(host.Holds(11));
  EXPECT_TRUE(Verify("host"));
  // It comes with heartbeats.
  EXPECT_TRUE(WaitUntil([&] { return Memory("a").store_used_bytes() > 0; }));
  // One that comes when the bytes are on a GPU is brought a copy.
  OneWorker late(&cluster_, "b", "late", 2);
  ASSERT_TRUE(Serves("late", 11));
  EXPECT_TRUE(late.Holds(11));
  published = trainer.Publish(12);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(late.Holds(12));
  OneWorker later(&cluster_, "b", "later", -1);
  ASSERT_TRUE(Serves("later", 12));
  EXPECT_TRUE(later.Holds(12));
  EXPECT_TRUE(Verify("later"));
}

// With and without peer access between the GPUs.
class ShardedDeviceStoreTest : public DeviceStoreTest,
                               public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(PeerAccess, ShardedDeviceStoreTest, ::testing::Bool());

TEST_P(ShardedDeviceStoreTest, ShardsOfSeveralGpusAndTensorParallelWorkers) {
  const bool peers = GetParam();
  if (!peers) gpu_sim::Plant("call=peerAccess no=1 count=0");
  StartNode("a", DeviceFlags());
  StartNode("b", DeviceFlags());
  GpuTrainer trainer(&cluster_, "a", 2, /*devices=*/2);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica near(&cluster_, "a", "near", 2, 0);
  GpuReplica far(&cluster_, "b", "far", 2, 2);
  for (const int version : {1, 2, 3}) {
    const auto published = trainer.Publish(version);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    ASSERT_TRUE(Serves("near", version));
    EXPECT_TRUE(near.Holds(version));
    ASSERT_TRUE(Serves("far", version));
    EXPECT_TRUE(far.Holds(version));
  }
  // Each rank's on its GPU.
  ASSERT_TRUE(WaitUntil([&] {
    return Gpu("a", 0).device_store_bytes() > 0 &&
           Gpu("a", 1).device_store_bytes() > 0;
  }));
  if (peers) {
    // What came lies on the GPUs of the workers there, and on no other.
    ASSERT_TRUE(WaitUntil([&] {
      return Gpu("b", 0).device_store_bytes() > 0 &&
             Gpu("b", 1).device_store_bytes() > 0;
    }));
    EXPECT_EQ(Gpu("b", 0).device_uuid(), UuidOf(2));
    EXPECT_EQ(Gpu("b", 1).device_uuid(), UuidOf(3));
    EXPECT_EQ(Memory("b").gpus_size(), 2);
    EXPECT_TRUE(WaitUntil([&] { return Memory("b").store_used_bytes() == 0; }));
  } else {
    // What no one GPU serves, in host memory.
    EXPECT_GT(Memory("b").store_used_bytes(), 0);
  }
  EXPECT_TRUE(Verify("near"));
  EXPECT_TRUE(Verify("far"));
}

TEST_F(DeviceStoreTest, WhatADeadAgentHadComesFromAnotherHolder) {
  StartNode("a", DeviceFlags());
  StartNode("b", {"--bucket_bytes=16384"});
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  OneWorker far(&cluster_, "b", "far", 3);
  ASSERT_TRUE(trainer.Publish(1).ok());
  // One that was not all there when it was published gets it later.
  ASSERT_TRUE(Serves("near", 1));
  ASSERT_TRUE(Serves("far", 1));
  ASSERT_EQ(cluster_.GetNode("a")->update_ids_size(), 1);
  KillAgent("a");
  // The node says that it does not have it any more, and what it served stays.
  ASSERT_TRUE(
      WaitUntil([&] { return cluster_.GetNode("a")->update_ids_size() == 0; }));
  EXPECT_TRUE(near.Holds(1));
  EXPECT_TRUE(absl::StrContains(Log("a"), "is lost here"));
  ASSERT_TRUE(WaitUntil([&] {
    const v1::GpuUse gpu = Gpu("a", 0);
    return gpu.slot_bytes() > 0 && gpu.device_store_bytes() == 0;
  }));
  // A worker that comes now gets it from the other node.
  OneWorker late(&cluster_, "a", "late", 0);
  ASSERT_TRUE(Serves("late", 1));
  EXPECT_TRUE(late.Holds(1));
  EXPECT_TRUE(Verify("late"));
  EXPECT_EQ(cluster_.GetNode("a")->update_ids_size(), 1);
  const auto published = trainer.Publish(2);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(near.Holds(2));
  EXPECT_TRUE(late.Holds(2));
  EXPECT_TRUE(far.Holds(2));
}

TEST_F(DeviceStoreTest, AnAgentThatDiesBetweenVerifiedAndApplied) {
  StartNode("a", DeviceFlags());
  StartNode("b", {"--bucket_bytes=16384"});
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  std::atomic<bool> kill_it{false};
  OneWorker near(&cluster_, "a", "near", 0, [&] {
    if (kill_it.exchange(false)) KillAgent("a");
  });
  OneWorker far(&cluster_, "b", "far", 3);
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(Serves("near", 1));
  ASSERT_TRUE(Serves("far", 1));
  kill_it = true;
  // Every byte was where it was to be; then it was not. It is on b, too.
  const auto published = trainer.Publish(2);
  EXPECT_FALSE(kill_it);
  EXPECT_TRUE(published.ok()) << published.status();
  ASSERT_TRUE(Serves("near", 2));
  EXPECT_TRUE(near.Holds(2));
  EXPECT_TRUE(far.Holds(2));
  EXPECT_TRUE(Verify("near"));
}

TEST_F(DeviceStoreTest, AnAgentThatDiesWithTheOnlyCopy) {
  StartNode("a", DeviceFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  std::atomic<bool> kill_it{false};
  OneWorker near(&cluster_, "a", "near", 0, [&] {
    if (kill_it.exchange(false)) KillAgent("a");
  });
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(Serves("near", 1));
  EXPECT_TRUE(near.Holds(1));

  // Before the commit, in the middle of the copy: it is given up by name.
  gpu_sim::Plant("call=cudaLaunchKernel process=node sticky=700");
  auto published = trainer.Publish(2);
  EXPECT_FALSE(published.ok());
  const std::string reason = ErrorReason(published.status());
  EXPECT_TRUE(reason == "DEVICE_FAULT" || reason == "DEVICE_AGENT_LOST" ||
              reason == "DEVICE_STORE_LOST")
      << published.status();
  gpu_sim::Plant("");
  EXPECT_TRUE(near.Holds(1));
  ASSERT_TRUE(Serves("near", 1));
  published = trainer.Publish(3);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(near.Holds(3));

  // After everything was verified: nobody has it any more. All of the old one
  // or all of a newer one is served, never a mix, and nothing waits for ever.
  kill_it = true;
  published = trainer.Publish(4);
  EXPECT_FALSE(kill_it);
  EXPECT_TRUE(near.Holds(3) || near.Holds(4));
  published = trainer.Publish(5);
  ASSERT_TRUE(published.ok()) << published.status();
  ASSERT_TRUE(Serves("near", published->version()));
  EXPECT_TRUE(near.Holds(5));
  EXPECT_TRUE(Verify("near"));
}

TEST_F(DeviceStoreTest, NoRoomIsSaidWithTheSums) {
  StartNode("a", DeviceFlags({absl::StrCat("--device_store_bytes=",
                                           ModelBytes() * 3 / 2)}));
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  ASSERT_TRUE(trainer.Publish(1).ok());
  // The one that is installed stays, so two do not fit.
  auto published = trainer.Publish(2);
  EXPECT_EQ(ErrorReason(published.status()), "NO_STORE_ROOM")
      << published.status();
  for (const std::string& said :
       {std::string("--device_store_bytes"), absl::StrCat(ModelBytes() * 3 / 2),
        Gpu("a", 0).device_uuid()}) {
    EXPECT_TRUE(absl::StrContains(published.status().message(), said))
        << said << " is not in: " << published.status();
  }
  EXPECT_TRUE(near.Holds(1));
  ASSERT_TRUE(Serves("near", 1));
  // Others are served meanwhile.
  StartNode("b", DeviceFlags());
  OneWorker far(&cluster_, "b", "far", 3);
  ASSERT_TRUE(Serves("far", 1));
  EXPECT_TRUE(far.Holds(1));
}

TEST_F(DeviceStoreTest, AFullGpuIsNamed) {
  StartNode("a", DeviceFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  gpu_sim::Plant("call=cudaMalloc process=node error=2 count=0");
  auto published = trainer.Publish(1);
  EXPECT_TRUE(ErrorReason(published.status()) == "MEMORY_EXHAUSTED" ||
              ErrorReason(published.status()) == "NO_MEMORY_FOR_ARENA")
      << published.status();
  EXPECT_TRUE(absl::StrContains(published.status().message(), "free of"))
      << published.status();
  gpu_sim::Plant("");
  published = trainer.Publish(2);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(near.Holds(2));
}

TEST_F(DeviceStoreTest, ACheckpointIsWrittenFromAGpu) {
  const std::string root = cluster_.directory().path() + "/checkpoints";
  ASSERT_EQ(mkdir(root.c_str(), 0700), 0);
  StartNode("a", DeviceFlags({"--checkpoint_root=" + root}));
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  ASSERT_TRUE(trainer.Publish(1).ok());
  ASSERT_TRUE(trainer.Publish(2).ok());
  const auto model = absl::StrCat("models/", kModel);
  {
    grpc::ClientContext context;
    v1::SaveVersionRequest request;
    request.set_name(model + "/versions/2");
    request.set_path("two");
    v1::SaveVersionResponse response;
    const grpc::Status saved =
        Admin("a")->SaveVersion(&context, request, &response);
    ASSERT_TRUE(saved.ok()) << saved.error_message();
  }
  ASSERT_TRUE(trainer.Publish(3).ok());
  EXPECT_TRUE(near.Holds(3));
  grpc::ClientContext context;
  v1::LoadVersionRequest request;
  request.set_name(model);
  request.set_path("two");
  v1::Version response;
  const grpc::Status loaded =
      Admin("a")->LoadVersion(&context, request, &response);
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  ASSERT_TRUE(Serves("near", response.version()));
  EXPECT_TRUE(near.Holds(2));
}

TEST_F(DeviceStoreTest, AWorkerThatCannotOpenItIsBroughtCopies) {
  StartNode("a", DeviceFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  OneWorker near(&cluster_, "a", "near", 0);
  ASSERT_TRUE(trainer.Publish(1).ok());
  // As between containers without a common name space.
  gpu_sim::Plant("call=cudaIpcOpenMemHandle process=test error=1 count=0");
  OneWorker closed(&cluster_, "a", "closed", 0);
  ASSERT_TRUE(Serves("closed", 1));
  EXPECT_TRUE(closed.Holds(1));
  for (const int version : {2, 3}) {
    const auto published = trainer.Publish(version);
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(Serves("near", version));
    EXPECT_TRUE(near.Holds(version));
    // It registers anew, and may come to the update late.
    ASSERT_TRUE(Serves("closed", version));
    EXPECT_TRUE(closed.Holds(version));
  }
  EXPECT_TRUE(Verify("closed"));
}

TEST_F(DeviceStoreTest, ItNeedsGpus) {
  EXPECT_FALSE(cluster_.StartNode("a", {"--store=device"}));
  EXPECT_TRUE(absl::StrContains(Log("a"), "it needs --memory=cuda"));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
