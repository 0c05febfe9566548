// What an update costs an engine's GPU while the engine waits: not how many
// tensors there are, but a launch or two.
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/gpu/gpu_cluster.h"

namespace weightsync {
namespace e2e {
namespace {

constexpr int kSmallTensors = 600;

class GpuInstallTest : public GpuClusterTest {
 protected:
  void SetUp() override {
    GpuClusterTest::SetUp();
    small_tensors = kSmallTensors;
  }
  void TearDown() override {
    GpuClusterTest::TearDown();
    small_tensors = 0;
  }
  // With a bucket for all of them.
  void StartStore(const std::string& store) {
    std::vector<std::string> flags = GpuFlags();
    flags.push_back("--bucket_bytes=1048576");
    flags.push_back(absl::StrCat("--store=", store));
    StartNode("a", flags);
  }
  // Calls of this process, where the engine is, while a version is published.
  static std::map<std::string, int> CallsOf(
      GpuTrainer* trainer, int version,
      const v1::UpdateOptions& options = v1::UpdateOptions()) {
    std::string rules;
    for (const char* call :
         {"cuLaunchKernel", "cudaHostAlloc", "cudaMalloc", "cudaMemcpy2DAsync",
          "cudaMemcpyAsync", "cuModuleLoadData"})
      absl::StrAppend(&rules, "call=", call, " process=test note=1 count=0;");
    gpu_sim::TakeNotes();
    gpu_sim::Plant(rules);
    const auto published = trainer->Publish(version, options);
    gpu_sim::Plant("");
    EXPECT_TRUE(published.ok()) << version << ": " << published.status();
    std::map<std::string, int> calls;
    for (const absl::string_view line :
         absl::StrSplit(gpu_sim::TakeNotes(), '\n', absl::SkipEmpty()))
      ++calls[std::string(line)];
    return calls;
  }
};

// Two workers, with the columns of each tensor: some 600 strided pieces each.
TEST_F(GpuInstallTest, ABucketOfManySmallTensorsIsOneLaunch) {
  StartStore("device");
  GpuTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 2, 0, /*apart=*/0);
  // Arenas of the store are opened, and the daemon's places are full.
  for (const int version : {1, 2, 3, 4}) {
    ASSERT_TRUE(trainer.Publish(version).ok());
    ASSERT_TRUE(replica.Holds(version));
  }
  for (const int version : {5, 6}) {
    // For each worker the launch, and its table.
    EXPECT_EQ(CallsOf(&trainer, version),
              (std::map<std::string, int>{{"cuLaunchKernel", 2},
                                          {"cudaMemcpyAsync", 2}}));
    EXPECT_TRUE(replica.Holds(version));
  }
}

// Out of host memory copy engines copy, as ever.
TEST_F(GpuInstallTest, OutOfHostMemoryThereIsNoLaunch) {
  StartStore("host");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 0);
  ASSERT_TRUE(trainer.Publish(1).ok());
  const auto calls = CallsOf(&trainer, 2);
  EXPECT_TRUE(replica.Holds(2));
  EXPECT_EQ(calls.count("cuLaunchKernel"), 0u);
  EXPECT_GT(calls.at("cudaMemcpyAsync"), kSmallTensors);
}

// What is copied straight out of the trainer's memory is, too, though each
// tensor is answered for by itself.
TEST_F(GpuInstallTest, AStreamIsALaunchForEachBucket) {
  StartStore("host");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 0);
  v1::UpdateOptions streamed;
  streamed.set_update_mode(v1::UPDATE_MODE_STREAM);
  streamed.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  streamed.set_allow_no_recovery(true);
  ASSERT_TRUE(trainer.Publish(1).ok());
  const auto calls = CallsOf(&trainer, 2, streamed);
  EXPECT_TRUE(replica.Holds(2));
  EXPECT_GE(calls.at("cuLaunchKernel"), 1);
  EXPECT_LE(calls.at("cuLaunchKernel"), 8);
  // Of the launches' tables, and the rest.
  EXPECT_LT(calls.at("cudaMemcpyAsync"), 30);
}

// An engine that swaps sets of weights generates while one is written: its SMs
// are its own.
TEST_F(GpuInstallTest, AnEngineThatSwapsKeepsItsSms) {
  StartStore("device");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuTensors tensors(Parameters(), 0), spare(Parameters(), 0);
  client::WorkerOptions options;
  options.address = cluster_.address("a");
  options.model = kModel;
  options.replica = "swaps";
  options.incarnation = client::RandomId();
  int serves = 0;
  options.swap = [&serves](int set, const std::string&) {
    serves = set;
    return absl::OkStatus();
  };
  auto worker =
      client::Worker::Start(options, tensors.tensors(), spare.tensors());
  ASSERT_TRUE(worker.ok()) << worker.status();
  client::ReplicaOptions replica_options;
  replica_options.address = options.address;
  replica_options.model = kModel;
  replica_options.replica = options.replica;
  replica_options.incarnation = options.incarnation;
  replica_options.atomic_swap = true;
  client::ReplicaHooks hooks;
  hooks.on_pause = [](const client::PauseRequest&) {
    return absl::StatusOr<std::string>("");
  };
  hooks.on_resume = [](const client::ResumeInfo&) { return absl::OkStatus(); };
  auto replica = client::Replica::Start(replica_options, hooks);
  ASSERT_TRUE(replica.ok()) << replica.status();
  ASSERT_TRUE((*worker)->WaitRegistered(kPatience).ok());
  for (const int version : {1, 2}) {
    const auto calls = CallsOf(&trainer, version);
    EXPECT_EQ(calls.count("cuLaunchKernel"), 0u);
    EXPECT_GT(calls.at("cudaMemcpyAsync"), kSmallTensors);
    const auto got = (serves == 0 ? tensors : spare).Read();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(got[i] == Content(Parameters()[i], version)) << i;
  }
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
