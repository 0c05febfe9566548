// --store=device and a worker on another GPU of its node than the trainer's: it
// opens the store's memory there and copies from GPU to GPU, where it can, and
// is given the bytes by way of host memory where it cannot.
#include <signal.h>

#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/status.h"
#include "tests/gpu/gpu_cluster.h"
#include "tests/gpu/one_worker.h"

namespace weightsync {
namespace e2e {
namespace {

// Large enough that the tables of launches and the digests, which do cross, are
// little beside it.
constexpr int64_t kScale = 64;

int64_t ModelBytes() {
  int64_t bytes = 0;
  for (const client::Tensor& tensor : Parameters())
    bytes += client::PartBytes(tensor);
  return bytes;
}

class GpuPeerTest : public GpuClusterTest {
 protected:
  void SetUp() override {
    model_scale = kScale;
    GpuClusterTest::SetUp();
    StartNode("a", {"--memory=cuda", "--store=device", "--bucket_bytes=1048576",
                    "--device_timeout=5s"});
    trainer_ = std::make_unique<GpuTrainer>(&cluster_, "a", 1);
    const absl::Status registered = trainer_->Register();
    ASSERT_TRUE(registered.ok()) << registered;
  }
  void TearDown() override {
    trainer_ = nullptr;
    GpuClusterTest::TearDown();
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
  // What moved, from Watch on: between the agents' GPUs and the host, and in
  // this process, where the worker is, to its GPU.
  struct Moved {
    int64_t crossed = 0, from_host = 0, between = 0;
  };
  // Besides `more` rules.
  static void Watch(const std::string& more = "") {
    std::string rules = more;
    for (const char* way : {"hostToDevice", "deviceToHost"}) {
      absl::StrAppend(&rules, "call=", way, " process=node note=1 count=0;");
    }
    for (const char* way : {"copyToDevice", "copyBetween"})
      absl::StrAppend(&rules, "call=", way, " process=test note=1 count=0;");
    gpu_sim::TakeNotes();
    gpu_sim::Plant(rules);
  }
  static Moved TakeMoved() {
    Moved moved;
    for (const absl::string_view line :
         absl::StrSplit(gpu_sim::TakeNotes(), '\n')) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      int64_t bytes = 0;
      // With cudaMemcpy the tests write and look.
      if (words.size() < 2 || words[1] == "cudaMemcpy" ||
          !absl::SimpleAtoi(words.back(), &bytes))
        continue;
      if (words[0] == "copyToDevice") {
        moved.from_host += bytes;
      } else if (words[0] == "copyBetween") {
        moved.between += bytes;
      } else {
        moved.crossed += bytes;
      }
    }
    return moved;
  }
  v1::MemoryUse Memory() {
    const auto found = cluster_.GetNode("a");
    return found.ok() ? found->memory() : v1::MemoryUse();
  }
  void Publish(int version) {
    const auto published = trainer_->Publish(version);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
  }
  // What is known of GPUs comes with heartbeats.
  ::testing::AssertionResult PlanSays(const std::string& what) {
    v1::PlanRequest request;
    request.set_model(absl::StrCat("models/", kModel));
    std::string said;
    const bool found = WaitUntil([&] {
      const auto plan = cluster_.Plan(request);
      said = plan.ok() ? plan->explanation() : plan.status().ToString();
      return absl::StrContains(said, what);
    });
    if (found) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << said;
  }

  std::unique_ptr<GpuTrainer> trainer_;
};

TEST_F(GpuPeerTest, BytesGoFromGpuToGpu) {
  {
    OneWorker other(&cluster_, "a", "other", 1);
    // It is not known yet where weights wait here.
    EXPECT_TRUE(PlanSays("by CUDA IPC and shared memory (a)"));
    // More than the store keeps: arenas come and go.
    for (const int version : {1, 2, 3, 4, 5}) {
      Watch();
      ASSERT_NO_FATAL_FAILURE(Publish(version));
      ASSERT_TRUE(Serves("other", version));
      const Moved moved = TakeMoved();
      gpu_sim::Plant("");
      EXPECT_TRUE(other.Holds(version)) << version;
      EXPECT_EQ(moved.between, ModelBytes()) << version;
      EXPECT_EQ(moved.from_host, 0) << version;
      EXPECT_LT(moved.crossed, ModelBytes() / 10) << version;
    }
    // None of it was ever in host memory.
    EXPECT_EQ(Memory().store_reserved_bytes(), 0);
    ASSERT_TRUE(
        WaitUntil([&] { return Gpu("a", 0).device_store_bytes() > 0; }));
    EXPECT_TRUE(PlanSays(
        "1 worker beside the sender by CUDA IPC for what waits on GPUs (a)"));
  }
  // The worker has closed what it had open: what is freed from here on is
  // nobody's, or the simulator finds it.
  for (const int version : {6, 7, 8}) ASSERT_NO_FATAL_FAILURE(Publish(version));
}

TEST_F(GpuPeerTest, WithoutPeerAccessTheyGoThroughTheHost) {
  const std::string without = "call=peerAccess no=1 count=0;";
  gpu_sim::Plant(without);
  OneWorker other(&cluster_, "a", "other", 1);
  for (const int version : {1, 2}) {
    Watch(without);
    ASSERT_NO_FATAL_FAILURE(Publish(version));
    ASSERT_TRUE(Serves("other", version));
    const Moved moved = TakeMoved();
    EXPECT_TRUE(other.Holds(version)) << version;
    EXPECT_EQ(moved.between, 0) << version;
    EXPECT_EQ(moved.from_host, ModelBytes()) << version;
  }
  EXPECT_GT(Memory().store_reserved_bytes(), 0);
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).device_store_bytes() > 0; }));
  EXPECT_TRUE(PlanSays("by CUDA IPC and shared memory (a)"));
}

// What was said to be in reach turns out not to be.
TEST_F(GpuPeerTest, PeerAccessThatEndsIsNotCountedOnAnyMore) {
  OneWorker other(&cluster_, "a", "other", 1);
  for (const int version : {1, 2, 3}) {
    // There again for the last; nobody asks.
    Watch(version < 3 ? "call=peerAccess no=1 count=0;" : "");
    ASSERT_NO_FATAL_FAILURE(Publish(version));
    ASSERT_TRUE(Serves("other", version));
    const Moved moved = TakeMoved();
    EXPECT_TRUE(other.Holds(version)) << version;
    EXPECT_EQ(moved.between, 0) << version;
    EXPECT_GE(moved.from_host, ModelBytes()) << version;
  }
}

TEST_F(GpuPeerTest, MemoryThatCannotBeOpenedComesThroughTheHost) {
  int version = 1;
  ASSERT_NO_FATAL_FAILURE(Publish(version));
  for (const char* fault :
       {"call=cudaIpcOpenMemHandle process=test error=205 count=0;",
        "call=cudaIpcOpenMemHandle process=test error=1 after=1;",
        "call=cuMemGetAddressRange process=test error=1 count=0;"}) {
    SCOPED_TRACE(fault);
    Watch(fault);
    const std::string name = absl::StrCat("other", version);
    OneWorker other(&cluster_, "a", name, 1);
    ASSERT_TRUE(Serves(name, version));
    EXPECT_TRUE(other.Holds(version));
    ASSERT_NO_FATAL_FAILURE(Publish(++version));
    ASSERT_TRUE(Serves(name, version));
    EXPECT_TRUE(other.Holds(version));
    const Moved moved = TakeMoved();
    EXPECT_EQ(moved.between, 0);
    EXPECT_EQ(moved.from_host, 2 * ModelBytes());
    gpu_sim::Plant("");
  }
}

TEST_F(GpuPeerTest, AnAgentThatIsKilledUnderIt) {
  // Another holder.
  StartNode("b", {"--bucket_bytes=1048576"});
  std::atomic<bool> kill_it{false};
  const auto kill_agent = [&] {
    if (!kill_it.exchange(false)) return;
    const pid_t agent =
        ChildOf(cluster_.process("a")->pid(), "weightsync_device_agent");
    ASSERT_NE(agent, 0);
    ASSERT_EQ(kill(agent, SIGKILL), 0);
    ASSERT_TRUE(WaitUntil([&] {
      const pid_t now =
          ChildOf(cluster_.process("a")->pid(), "weightsync_device_agent");
      return now != 0 && now != agent;
    }));
  };
  OneWorker other(&cluster_, "a", "other", 1, kill_agent);
  OneWorker far(&cluster_, "b", "far", -1);
  ASSERT_NO_FATAL_FAILURE(Publish(1));
  ASSERT_TRUE(Serves("other", 1));
  ASSERT_TRUE(Serves("far", 1));
  // Between verified and applied.
  kill_it = true;
  ASSERT_NO_FATAL_FAILURE(Publish(2));
  EXPECT_FALSE(kill_it);
  ASSERT_TRUE(Serves("other", 2));
  EXPECT_TRUE(other.Holds(2));
  ASSERT_TRUE(Serves("far", 2));
  EXPECT_TRUE(far.Holds(2));
  // With the new agent all is as before.
  Watch();
  ASSERT_NO_FATAL_FAILURE(Publish(3));
  ASSERT_TRUE(Serves("other", 3));
  const Moved moved = TakeMoved();
  gpu_sim::Plant("");
  EXPECT_TRUE(other.Holds(3));
  EXPECT_EQ(moved.between, ModelBytes());
  EXPECT_EQ(moved.from_host, 0);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
