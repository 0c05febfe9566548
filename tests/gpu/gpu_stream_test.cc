// STREAM beside the trainer: workers copy out of its GPU allocation, within the
// GPU, and with nothing between. Trainers and engines are processes of their
// own here where that matters: CUDA opens nothing in the process that made it.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "glog/logging.h"
#include "tests/e2e/gpu_uuid.h"
#include "tests/gpu/gpu_cluster.h"
#include "transport/cuda/nvml.h"

namespace weightsync {
namespace e2e {
namespace {

v1::UpdateOptions Streamed() {
  v1::UpdateOptions options;
  options.set_update_mode(v1::UPDATE_MODE_STREAM);
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  options.set_allow_no_recovery(true);
  return options;
}

int64_t ModelBytes() {
  int64_t bytes = 0;
  for (const client::Tensor& tensor : Parameters())
    bytes += client::PartBytes(tensor);
  return bytes;
}

// ---- Children: this program, started again ----

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// An engine with one worker; says what it holds whenever that changes.
int RunWorker(const std::string& address, int device) {
  GpuReplica replica(address, "one", 1, device);
  Say("ready");
  std::string before;
  while (true) {
    const v1::InstalledState now = replica.worker(0)->installed();
    std::string state;
    if (now.state() == v1::InstalledState::STATE_WRITING) {
      state = absl::StrCat("writing ", now.version());
    } else if (now.state() == v1::InstalledState::STATE_INSTALLED) {
      state = absl::StrCat("holds ", now.version());
    }
    if (state != before && absl::StartsWith(state, "holds")) {
      Say(absl::StrCat(
          state, replica.Holds(static_cast<int>(now.version())) ? "" : " wrong",
          "."));
    } else if (state != before) {
      Say(state + ".");
    }
    before = state;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

std::atomic<bool> told_to_go_on{false};

// A rank that publishes two versions, the second as a STREAM and when it is
// told to (SIGUSR1): the worker may be looking at the first until then.
int RunTrainer(const std::string& address) {
  signal(SIGUSR1, [](int) { told_to_go_on = true; });
  GpuTrainer trainer(address, 1);
  absl::Status status = trainer.Register();
  if (status.ok()) status = trainer.Publish(1).status();
  Say(absl::StrCat("published 1: ", status.ToString()));
  while (!told_to_go_on) absl::SleepFor(absl::Milliseconds(5));
  if (status.ok()) status = trainer.Publish(2, Streamed()).status();
  Say(absl::StrCat("published 2: ", status.ToString()));
  while (true) absl::SleepFor(absl::Seconds(1));
}

class GpuStreamTest : public GpuClusterTest {
 protected:
  // Bytes are counted here on each way that they take. Copy engines tell how
  // many they copy, and a kernel does not: workers cannot load theirs. Which
  // way it is does not depend on it.
  void SetUp() override {
    GpuClusterTest::SetUp();
    gpu_sim::Plant("call=cuModuleLoadData error=209 count=0");
  }
  std::unique_ptr<Process> Child(const std::string& role,
                                 const std::string& node, int device) {
    setenv("GPU_SIM_ROLE", role.c_str(), 1);
    auto process = std::make_unique<Process>(
        std::vector<std::string>{"/proc/self/exe", role, cluster_.address(node),
                                 absl::StrCat(device)},
        absl::StrCat(cluster_.directory().path(), "/", role, ".log"));
    setenv("GPU_SIM_ROLE", "test", 1);
    return process;
  }
  static bool WaitSays(const Process& process, const std::string& text) {
    return WaitUntil(
        [&] { return process.Log().find(text) != std::string::npos; },
        kPatience);
  }
  static size_t Count(const std::string& text, const std::string& what) {
    size_t count = 0;
    for (size_t at = text.find(what); at != std::string::npos;
         at = text.find(what, at + 1))
      ++count;
    return count;
  }
  // All of it.
  std::string LogOf(const std::string& node) {
    std::ostringstream text;
    text << std::ifstream(
                absl::StrCat(cluster_.directory().path(), "/", node, ".log"))
                .rdbuf();
    return text.str();
  }
  // Notes what `role` copies in which direction from now on.
  static void Watch(const std::string& role) {
    std::string rules;
    for (const char* call :
         {"copyToHost", "copyToDevice", "copyWithin", "copyBetween"}) {
      absl::StrAppend(&rules, "call=", call, " process=", role,
                      " note=1 count=0;");
    }
    gpu_sim::Plant(rules);
    gpu_sim::TakeNotes();
  }
  // Bytes that were copied so and not by cudaMemcpy, with which the tests
  // themselves look.
  static int64_t Copied(const std::string& notes, const std::string& how) {
    int64_t bytes = 0;
    for (const absl::string_view line : absl::StrSplit(notes, '\n')) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      int64_t some = 0;
      if (words.size() == 3 && words[0] == how && words[1] != "cudaMemcpy" &&
          absl::SimpleAtoi(words[2], &some))
        bytes += some;
    }
    return bytes;
  }
  ::testing::AssertionResult Verified() {
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/one"));
    v1::VerifyReplicaResponse response;
    const grpc::Status status =
        Admin("a")->VerifyReplica(&context, request, &response);
    if (!status.ok())
      return ::testing::AssertionFailure() << status.error_message();
    if (!response.equal())
      return ::testing::AssertionFailure() << response.ShortDebugString();
    return ::testing::AssertionSuccess();
  }
  static int64_t FreeBytes() {
    const auto nvml = transport::cuda::Nvml::Open();
    EXPECT_TRUE(nvml.ok()) << nvml.status();
    if (!nvml.ok()) return 0;
    const auto memory = (*nvml)->MemoryOf(UuidOf(0));
    EXPECT_TRUE(memory.ok()) << memory.status();
    return memory.ok() ? (int64_t{256} << 20) - memory->used_bytes : 0;
  }
};

TEST_F(GpuStreamTest, BytesStayWithinTheGpu) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Register().ok());
  const auto worker = Child("worker", "a", 0);
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  for (const int version : {1, 2, 3}) {
    if (version == 2) Watch("worker");
    v1::UpdateOptions options = Streamed();
    options.set_verify_source(version == 3);
    const auto published = trainer.Publish(version, options);
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    ASSERT_TRUE(WaitSays(*worker, absl::StrCat("holds ", version, ".")))
        << worker->Log();
    EXPECT_TRUE(Verified());
    if (version == 1) continue;
    const std::string notes = gpu_sim::TakeNotes();
    EXPECT_EQ(Copied(notes, "copyWithin"), ModelBytes()) << notes;
    EXPECT_EQ(Copied(notes, "copyToDevice"), 0) << notes;
    // `Verified` reads all of it, once, for the digest.
    EXPECT_EQ(Copied(notes, "copyToHost"), ModelBytes()) << notes;
  }
  // The agent has read them, and brought nothing but digests to the host.
  Watch("node");
  ASSERT_TRUE(trainer.Publish(4, Streamed()).ok());
  ASSERT_TRUE(WaitSays(*worker, "holds 4.")) << worker->Log();
  EXPECT_LT(Copied(gpu_sim::TakeNotes(), "copyToHost"), ModelBytes() / 10);
  EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
  EXPECT_EQ(Count(LogOf("a"), "is passed bucket"), 0u) << LogOf("a");
}

// What is the first GPU of one process is the second of another.
TEST_F(GpuStreamTest, DevicesAreFoundWhateverTheirOrder) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  setenv("GPU_SIM_VISIBLE", "1,0", 1);
  const auto worker = Child("worker", "a", 1);
  unsetenv("GPU_SIM_VISIBLE");
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  Watch("worker");
  ASSERT_TRUE(trainer.Publish(1, Streamed()).ok());
  ASSERT_TRUE(WaitSays(*worker, "holds 1.")) << worker->Log();
  EXPECT_EQ(Copied(gpu_sim::TakeNotes(), "copyWithin"), ModelBytes());
}

// Straight out of the trainer's memory, from GPU to GPU.
TEST_F(GpuStreamTest, AWorkerOnAnotherGpuReadsTheTrainers) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Register().ok());
  const auto worker = Child("worker", "a", 1);
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  for (const int version : {1, 2}) {
    Watch("worker");
    v1::UpdateOptions options = Streamed();
    options.set_verify_source(version == 2);
    ASSERT_TRUE(trainer.Publish(version, options).ok());
    ASSERT_TRUE(WaitSays(*worker, absl::StrCat("holds ", version, ".")))
        << worker->Log();
    const std::string notes = gpu_sim::TakeNotes();
    EXPECT_EQ(Copied(notes, "copyBetween"), ModelBytes()) << notes;
    EXPECT_EQ(Copied(notes, "copyToDevice"), 0) << notes;
    EXPECT_TRUE(Verified());
  }
  EXPECT_EQ(Count(LogOf("a"), "is passed bucket"), 0u) << LogOf("a");
}

TEST_F(GpuStreamTest, AWorkerWithoutPeerAccessIsPassedBuckets) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 2);
  ASSERT_TRUE(trainer.Register().ok());
  gpu_sim::Plant("call=peerAccess no=1 count=0");
  const auto worker = Child("worker", "a", 1);
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  Watch("worker");
  ASSERT_TRUE(trainer.Publish(1, Streamed()).ok());
  ASSERT_TRUE(WaitSays(*worker, "holds 1.")) << worker->Log();
  const std::string notes = gpu_sim::TakeNotes();
  EXPECT_EQ(Copied(notes, "copyToDevice"), ModelBytes()) << notes;
  EXPECT_EQ(Copied(notes, "copyBetween"), 0) << notes;
}

// A trainer and an engine in one process, on two GPUs: CUDA opens nothing
// there, and the daemon passes the buckets.
TEST_F(GpuStreamTest, OneProcessOnTwoGpusIsPassedBuckets) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  for (const int version : {1, 2}) {
    ASSERT_TRUE(trainer.Publish(version, Streamed()).ok());
    EXPECT_TRUE(replica.Holds(version)) << version;
  }
}

// --store=device, and a worker whose process was not given the trainer's GPU.
TEST_F(GpuStreamTest, AWorkerThatDoesNotSeeTheGpuIsServedThroughTheHost) {
  std::vector<std::string> flags = GpuFlags();
  flags.push_back("--store=device");
  StartNode("a", flags);
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  setenv("GPU_SIM_VISIBLE", "1", 1);
  const auto worker = Child("worker", "a", 0);
  unsetenv("GPU_SIM_VISIBLE");
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  int version = 0;
  for (const v1::UpdateOptions& options : {v1::UpdateOptions(), Streamed()}) {
    ++version;
    Watch("worker");
    ASSERT_TRUE(trainer.Publish(version, options).ok());
    ASSERT_TRUE(WaitSays(*worker, absl::StrCat("holds ", version, ".")))
        << worker->Log();
    const std::string notes = gpu_sim::TakeNotes();
    EXPECT_EQ(Copied(notes, "copyToDevice"), ModelBytes()) << notes;
    EXPECT_EQ(Copied(notes, "copyBetween"), 0) << notes;
  }
  EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
}

// A trainer and an engine in one process: nothing is opened.
TEST_F(GpuStreamTest, OneProcessCopiesWithinItsOwnMemory) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 0);
  Watch("test");
  ASSERT_TRUE(trainer.Publish(1, Streamed()).ok());
  EXPECT_TRUE(replica.Holds(1));
  EXPECT_EQ(Copied(gpu_sim::TakeNotes(), "copyWithin"), ModelBytes());
}

TEST_F(GpuStreamTest, AMemoryThatCannotBeOpenedIsPassedAndNotTriedAgain) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  const auto worker = Child("worker", "a", 0);
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  gpu_sim::Plant("call=cudaIpcOpenMemHandle process=worker error=1 count=0");
  size_t passed = 0;
  for (const int version : {1, 2}) {
    const auto published = trainer.Publish(version, Streamed());
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(WaitSays(*worker, absl::StrCat("holds ", version, ".")))
        << worker->Log();
    // Each bucket of the first update, and none of the second.
    const size_t now = Count(LogOf("a"), "is passed bucket");
    EXPECT_GE(now, 1u) << LogOf("a");
    if (version == 1) passed = now;
    EXPECT_EQ(now, passed);
  }
  EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
  // The worker was there all the time.
  EXPECT_EQ(Count(LogOf("a"), "worker 0 of models/on_gpu/replicas/one is here"),
            1u)
      << LogOf("a");
}

TEST_F(GpuStreamTest, ATrainerMayFreeItsMemoryWhenItIsReleased) {
  StartNode("a", GpuFlags());
  const int64_t at_first = FreeBytes();
  {
    GpuTrainer trainer(&cluster_, "a", 1);
    ASSERT_TRUE(trainer.Register().ok());
    const auto worker = Child("worker", "a", 0);
    ASSERT_TRUE(WaitSays(*worker, "ready"));
    ASSERT_TRUE(trainer.Publish(1, Streamed()).ok());
    ASSERT_TRUE(WaitSays(*worker, "holds 1.")) << worker->Log();
    // Other memory: the worker has the old one open until it is told.
    trainer.NewTensors(0);
    ASSERT_TRUE(trainer.Register().ok());
    const int64_t with_both = FreeBytes();
    trainer.FreeBefore();
    EXPECT_GT(FreeBytes(), with_both);
    // The same memory registered again stays open.
    Watch("worker");
    for (const int version : {2, 3}) {
      ASSERT_TRUE(trainer.Publish(version, Streamed()).ok());
      ASSERT_TRUE(WaitSays(*worker, absl::StrCat("holds ", version, ".")))
          << worker->Log();
      ASSERT_TRUE(trainer.Register().ok());
    }
    EXPECT_EQ(Copied(gpu_sim::TakeNotes(), "copyWithin"), 2 * ModelBytes());
    EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
    EXPECT_TRUE(worker->Running());
  }
  // Trainer and worker have gone, and so has all that was theirs; the agent
  // stays.
  const v1::GpuUse agent = Gpu("a", 0);
  EXPECT_TRUE(WaitUntil([&] {
    return at_first - FreeBytes() <= agent.slot_bytes() + (32 << 20);
  })) << at_first - FreeBytes();
}

// A worker lets go at once, and its GPU when it has time: only then may the
// trainer free.
TEST_F(GpuStreamTest, ATrainerWaitsForAClosingThatTakesLong) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  const auto worker = Child("worker", "a", 1);
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  ASSERT_TRUE(trainer.Publish(1, Streamed()).ok());
  ASSERT_TRUE(WaitSays(*worker, "holds 1.")) << worker->Log();
  gpu_sim::Plant("call=cudaIpcCloseMemHandle process=worker hang=1");
  trainer.NewTensors(0);
  const absl::Time start = absl::Now();
  ASSERT_TRUE(trainer.Register().ok());
  // For as long as anybody is waited for (kCloseDeadline).
  EXPECT_GT(absl::Now() - start, absl::Seconds(4));
  // Meanwhile the worker goes on.
  ASSERT_TRUE(trainer.Publish(2, Streamed()).ok());
  ASSERT_TRUE(WaitSays(*worker, "holds 2.")) << worker->Log();
  EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
  worker->Signal(SIGKILL);
  EXPECT_TRUE(WaitUntil([&] { return !worker->Running(); }));
  trainer.FreeBefore();
}

TEST_F(GpuStreamTest, ATrainerThatDiesInTheMiddleLeavesTheOldVersion) {
  StartNode("a", GpuFlags());
  // Slow, so that there is a middle.
  setenv("GPU_SIM_DELAY_US", "300000", 1);
  const auto worker = Child("worker", "a", 0);
  unsetenv("GPU_SIM_DELAY_US");
  ASSERT_TRUE(WaitSays(*worker, "ready"));
  const auto trainer = Child("trainer", "a", 0);
  ASSERT_TRUE(WaitSays(*trainer, "published 1: OK")) << trainer->Log();
  ASSERT_TRUE(WaitSays(*worker, "holds 1.")) << worker->Log();
  trainer->Signal(SIGUSR1);
  ASSERT_TRUE(WaitSays(*worker, "writing 2.")) << worker->Log();
  const int64_t with_trainer = FreeBytes();
  trainer->Signal(SIGKILL);
  // It has a mix, and gets back what the store has.
  ASSERT_TRUE(WaitUntil([&] { return Count(worker->Log(), "holds 1.") == 2; },
                        kPatience))
      << worker->Log() << cluster_.process("a")->Log();
  EXPECT_TRUE(WaitUntil([&] {
    v1::GetReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/one"));
    grpc::ClientContext context;
    v1::Replica replica;
    return Admin("a")->GetReplica(&context, request, &replica).ok() &&
           replica.state() == v1::Replica::STATE_SERVING;
  }));
  // Agent and worker have closed what it had: its memory and its context are
  // the machine's again.
  EXPECT_TRUE(WaitUntil([&] {
    return FreeBytes() >= with_trainer + ModelBytes() + (8 << 20);
  })) << FreeBytes() - with_trainer;
  v1::GetVersionRequest request;
  request.set_name(absl::StrCat("models/", kModel, "/versions/2"));
  grpc::ClientContext context;
  v1::Version version;
  const grpc::Status status =
      Admin("a")->GetVersion(&context, request, &version);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(version.state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(worker->Log().find("wrong"), std::string::npos) << worker->Log();
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync

int main(int argc, char** argv) {
  if (argc == 4) {
    FLAGS_logtostderr = true;
    google::InitGoogleLogging(argv[0]);
    if (!weightsync::transport::cuda::FindCudart().ok()) return 1;
    const std::string role = argv[1];
    return role == "worker" ? weightsync::e2e::RunWorker(argv[2], atoi(argv[3]))
                            : weightsync::e2e::RunTrainer(argv[2]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
