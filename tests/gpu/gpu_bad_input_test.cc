// What a daemon with --memory=cuda refuses, what it says then, and that it goes
// on serving others: each case ends with an update of another model, through
// the same daemon. Over the simulated GPU.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "grpcpp/grpcpp.h"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "tests/gpu/gpu_cluster.h"
#include "tests/gpu/gpu_tensors.h"
#include "transport/cuda/handle.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/process_gpu.h"
#include "transport/cuda/sim_control.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace e2e {
namespace {

constexpr char kExporter[] = "--exporter";

// A trainer that speaks for itself.
class BareTrainer {
 public:
  BareTrainer(Cluster* cluster, const std::string& node, int pid)
      : stub_(v1::TrainerService::NewStub(grpc::CreateChannel(
            cluster->address(node), grpc::InsecureChannelCredentials()))) {
    stream_ = stub_->OpenSession(&context_);
    v1::TrainerHeartbeat first;
    first.mutable_identity()->set_model("models/bare");
    first.mutable_identity()->set_world_size(1);
    first.mutable_identity()->set_pid(pid);
    first.mutable_identity()->set_protocol_version(1);
    v1::TrainerEvent event;
    EXPECT_TRUE(stream_->Write(first));
    EXPECT_TRUE(stream_->Read(&event));
    request_.set_session(event.opened().session());
    v1::MemoryRegion* region = request_.add_regions();
    region->set_size_bytes(4096);
    v1::CudaIpcMemory* memory = region->mutable_memory()->mutable_cuda_ipc();
    memory->set_handle(std::string(64, 'h'));
    memory->set_probe_handle(std::string(64, 'p'));
    memory->set_nonce(std::string(16, 'n'));
    v1::TensorShard* shard = request_.add_shards();
    shard->mutable_parameter()->set_name("w");
    shard->mutable_parameter()->set_dtype(v1::DTYPE_BF16);
    shard->mutable_parameter()->add_shape(8);
    heartbeats_ = std::thread([this] {
      while (!stop_.WaitForNotificationWithTimeout(absl::Milliseconds(200)))
        stream_->Write(v1::TrainerHeartbeat());
    });
  }
  // Until the daemon has ended the session: its memory is closed then.
  ~BareTrainer() {
    stop_.Notify();
    heartbeats_.join();
    stream_->WritesDone();
    v1::TrainerEvent event;
    while (stream_->Read(&event)) continue;
    stream_->Finish();
  }

  v1::CudaIpcMemory* memory() {
    return request_.mutable_regions(0)->mutable_memory()->mutable_cuda_ipc();
  }
  v1::RegisterShardsRequest* request() { return &request_; }
  // Of a whole trainer of one rank, which looks at nothing before it.
  absl::Status Publish() {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    v1::PublishVersionRequest request;
    request.set_session(request_.session());
    v1::PublishVersionResponse response;
    return FromGrpcStatus(stub_->PublishVersion(&context, request, &response));
  }
  absl::Status Register() {
    grpc::ClientContext context;
    v1::RegisterShardsResponse response;
    return FromGrpcStatus(stub_->RegisterShards(&context, request_, &response));
  }

 private:
  std::unique_ptr<v1::TrainerService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::TrainerHeartbeat, v1::TrainerEvent>>
      stream_;
  v1::RegisterShardsRequest request_;
  absl::Notification stop_;
  std::thread heartbeats_;
};

::testing::AssertionResult Refused(const absl::Status& status,
                                   absl::StatusCode code,
                                   const std::string& reason,
                                   const std::string& sentence) {
  if (status.code() == code && ErrorReason(status) == reason &&
      absl::StrContains(status.message(), sentence))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "not " << reason << " with '" << sentence << "' but "
         << ErrorReason(status) << ": " << status;
}

std::string Text(const std::array<char, 64>& chars) {
  return std::string(chars.data(), chars.size());
}

class GpuBadInputTest : public GpuClusterTest {
 protected:
  // A daemon, and a model in host memory that it serves all the while. With
  // `variable` the daemon and its agents see another machine than the test.
  void Start(const std::string& variable = "", const std::string& value = "") {
    if (!variable.empty()) setenv(variable.c_str(), value.c_str(), 1);
    StartNode("a", GpuFlags());
    if (!variable.empty()) unsetenv(variable.c_str());
    other_ = std::make_unique<TestTrainer>(&cluster_, "a", 1);
    others_ = std::make_unique<TestReplica>(&cluster_, "a", "other");
    EXPECT_TRUE(StillServes());
  }
  void TearDown() override {
    others_ = nullptr;
    other_ = nullptr;
    GpuClusterTest::TearDown();
  }

  // The next update of the other model arrives.
  ::testing::AssertionResult StillServes() {
    const auto published = other_->Publish(++value_);
    if (!published.ok())
      return ::testing::AssertionFailure() << published.status();
    if (!others_->WaitServes(value_))
      return ::testing::AssertionFailure()
             << "update " << +value_ << " is late";
    return ::testing::AssertionSuccess();
  }

  // As a client of `tensors` would tell of it.
  void Fill(const GpuTensors& tensors, BareTrainer* trainer) {
    const void* const data = tensors.tensors()[0].data;
    gpu_ = *transport::cuda::ProcessGpu::Of(data);
    const auto place = gpu_->Describe(data, 16);
    ASSERT_TRUE(place.ok()) << place.status();
    Fill(place->handle, trainer);
  }
  void Fill(const transport::cuda::DeviceHandle& handle, BareTrainer* trainer) {
    uuid_ = handle.device_uuid;
    v1::CudaIpcMemory* memory = trainer->memory();
    memory->set_handle(Text(handle.ipc));
    memory->set_probe_handle(Text(handle.probe_ipc));
    memory->set_nonce(std::string(handle.nonce.data(), handle.nonce.size()));
    memory->set_device_uuid(uuid_);
    memory->set_buffer_id(handle.buffer_id);
    memory->set_base_address(handle.base);
    trainer->request()->mutable_regions(0)->set_size_bytes(4096);
    trainer->request()->mutable_shards(0)->set_offset_bytes(0);
  }

  std::unique_ptr<TestTrainer> other_;
  std::unique_ptr<TestReplica> others_;
  char value_ = 0;
  // Keeps the probes.
  std::shared_ptr<transport::cuda::ProcessGpu> gpu_;
  std::string uuid_;
};

TEST_F(GpuBadInputTest, Handles) {
  Start();
  GpuTensors mine(Parameters(), 0);
  BareTrainer trainer(&cluster_, "a", getpid());
  EXPECT_TRUE(Refused(trainer.Register(), absl::StatusCode::kInvalidArgument,
                      "HANDLE_MALFORMED", "of which GPU (device_uuid)"));
  Fill(mine, &trainer);
  EXPECT_TRUE(trainer.Register().ok());

  struct Case {
    std::function<void()> damage;
    absl::StatusCode code;
    std::string reason, sentence;
  };
  v1::RegisterShardsRequest* const request = trainer.request();
  const Case cases[] = {
      {[&] { trainer.memory()->set_handle("short"); },
       absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
       "handle has 5 bytes, and not 64"},
      {[&] { trainer.memory()->set_handle(std::string(65, 'h')); },
       absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
       "handle has 65 bytes, and not 64"},
      {[&] { trainer.memory()->set_probe_handle(""); },
       absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
       "probe_handle has 0 bytes"},
      {[&] { trainer.memory()->set_nonce(""); },
       absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED", "nonce has 0"},
      {[&] { request->mutable_regions(0)->set_size_bytes(0); },
       absl::StatusCode::kInvalidArgument, "MEMORY_SIZE_INVALID",
       "a region has 0 bytes"},
      {[&] { trainer.memory()->set_device_uuid("GPU-of-another-machine"); },
       absl::StatusCode::kNotFound, "DEVICE_NOT_VISIBLE", uuid_},
      {[&] { request->mutable_regions(0)->set_size_bytes(int64_t{1} << 40); },
       absl::StatusCode::kInvalidArgument, "PAST_ALLOCATION",
       "an allocation of 1099511627776 bytes was named"},
      {[&] { request->mutable_shards(0)->set_offset_bytes(4090); },
       absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE", "4090"},
      {[&] { request->mutable_shards(0)->set_offset_bytes(-2); },
       absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE", "-2"},
  };
  for (const Case& bad : cases) {
    Fill(mine, &trainer);
    bad.damage();
    EXPECT_TRUE(
        Refused(trainer.Register(), bad.code, bad.reason, bad.sentence));
    EXPECT_TRUE(StillServes());
  }
  Fill(mine, &trainer);
  EXPECT_TRUE(trainer.Register().ok());
}

TEST_F(GpuBadInputTest, MemoryOfOthers) {
  Start();
  GpuTensors mine(Parameters(), 0);
  {
    // Whose pid is nobody's here: of another pid namespace. It can be opened,
    // and is other memory; then not even that.
    BareTrainer trainer(&cluster_, "a", 4194303);
    Fill(mine, &trainer);
    trainer.memory()->set_nonce(std::string(16, 'x'));
    EXPECT_TRUE(Refused(trainer.Register(), absl::StatusCode::kUnavailable,
                        "PROBE_FAILED", "use --memory=host"));
    EXPECT_TRUE(StillServes());
    trainer.memory()->set_probe_handle(std::string(64, 'x'));
    EXPECT_TRUE(Refused(trainer.Register(),
                        absl::StatusCode::kFailedPrecondition,
                        "FOREIGN_NAMESPACE", "shareProcessNamespace"));
    EXPECT_TRUE(StillServes());
  }
  {
    // Given back between export and registration.
    GpuTensors gone(Parameters(), 0);
    BareTrainer trainer(&cluster_, "a", getpid());
    Fill(gone, &trainer);
    gone.Free();
    EXPECT_TRUE(Refused(trainer.Register(),
                        absl::StatusCode::kFailedPrecondition,
                        "ALLOCATION_FREED", "register the tensors again"));
    EXPECT_TRUE(StillServes());
  }
  {
    // Given back under a registration. The agent has it open still; a new one
    // cannot open it again, and says so before a byte is read.
    GpuTensors gone(Parameters(), 0);
    BareTrainer trainer(&cluster_, "a", getpid());
    Fill(gone, &trainer);
    ASSERT_TRUE(trainer.Register().ok());
    const pid_t daemon = cluster_.process("a")->pid();
    gone.Free();
    EXPECT_TRUE(absl::StrContains(gpu_sim::TakeFindings(), "freed"));
    ASSERT_EQ(kill(ChildOf(daemon, "weightsync_device_agent"), SIGKILL), 0);
    ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).restart_count() == 1; }));
    EXPECT_TRUE(Refused(trainer.Publish(), absl::StatusCode::kDataLoss,
                        "SOURCE_MEMORY_LOST", "ALLOCATION_FREED"));
    EXPECT_TRUE(StillServes());
  }
}

// A process with a tensor on GPU 0, which it says how to open; until it is
// killed.
class Exporter {
 public:
  Exporter() {
    int from[2];
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(from[1], 1);
      execl("/proc/self/exe", "exporter", kExporter, nullptr);
      _exit(127);
    }
    close(from[1]);
    char bytes[4096];
    const ssize_t n = read(from[0], bytes, sizeof(bytes));
    close(from[0]);
    const auto handle = transport::cuda::DeviceHandle::Decode(
        absl::string_view(bytes, n > 0 ? static_cast<size_t>(n) : 0));
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (handle.ok()) handle_ = *handle;
  }
  ~Exporter() { KillAndReap(); }
  // It has ended then; until this object goes its parent has not noticed.
  void Kill() {
    kill(pid_, SIGKILL);
    siginfo_t ended;
    waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOWAIT);
  }
  void KillAndReap() {
    if (pid_ <= 0) return;
    Kill();
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  const transport::cuda::DeviceHandle& handle() const { return handle_; }

  static int Play() {
    if (!transport::cuda::FindCudart().ok()) return 1;
    void* data = nullptr;
    if (cudaMalloc(&data, 4096) != cudaSuccess) return 1;
    const auto gpu = transport::cuda::ProcessGpu::Of(data);
    if (!gpu.ok()) return 1;
    const auto place = (*gpu)->Describe(data, 4096);
    if (!place.ok()) return 1;
    const std::string handle = place->handle.Encode();
    if (write(1, handle.data(), handle.size()) < 0) return 1;
    while (true) pause();
  }

 private:
  pid_t pid_ = 0;
  transport::cuda::DeviceHandle handle_;
};

// Whoever exported the memory died between that and the registration.
TEST_F(GpuBadInputTest, AnExporterThatHasEnded) {
  Start();
  // The agent is there, and knows other memory.
  GpuTrainer source(&cluster_, "a", 1);
  ASSERT_TRUE(source.Register().ok());
  const pid_t agent =
      ChildOf(cluster_.process("a")->pid(), "weightsync_device_agent");
  ASSERT_NE(agent, 0);
  {
    // The trainer itself. Its daemon has seen it come, and asks the agent,
    // which finds it dead. (Once more where it died before its daemon had even
    // looked up who it is.)
    pid_t pid = 0;
    absl::Status registered;
    const auto register_dead = [&](int i, bool reaped) {
      Exporter exporter;
      pid = exporter.pid();
      BareTrainer trainer(&cluster_, "a", pid);
      Fill(exporter.handle(), &trainer);
      EXPECT_EQ(kill(agent, SIGSTOP), 0);
      std::thread registering([&] { registered = trainer.Register(); });
      absl::SleepFor(i * absl::Milliseconds(200));
      if (reaped) {
        exporter.KillAndReap();
      } else {
        exporter.Kill();
      }
      absl::SleepFor(absl::Milliseconds(100));
      EXPECT_EQ(kill(agent, SIGCONT), 0);
      registering.join();
    };
    // Whether its parent has noticed, or not yet.
    for (const bool reaped : {true, false}) {
      registered = absl::NotFoundError("not tried");
      for (int i = 1; i <= 5 && absl::IsNotFound(registered); ++i)
        register_dead(i, reaped);
      EXPECT_TRUE(Refused(
          registered, absl::StatusCode::kFailedPrecondition, "EXPORTER_DEAD",
          absl::StrCat("process ", pid,
                       ", which exported this memory, has ended")))
          << reaped;
      EXPECT_TRUE(StillServes());
    }
  }
  {
    // Who it is, is known from when it came, also where its end is not noticed:
    // that of a thread is not. Nobody is said to be in another pid namespace.
    Exporter exporter;
    std::atomic<pid_t> thread{0};
    absl::Notification leave;
    std::thread named([&] {
      thread = static_cast<pid_t>(syscall(SYS_gettid));
      leave.WaitForNotification();
    });
    EXPECT_TRUE(WaitUntil([&] { return thread != 0; }));
    BareTrainer trainer(&cluster_, "a", thread);
    Fill(exporter.handle(), &trainer);
    exporter.KillAndReap();
    leave.Notify();
    named.join();
    EXPECT_TRUE(WaitUntil([&] {
      return access(absl::StrCat("/proc/", thread.load()).c_str(), F_OK) != 0;
    }));
    EXPECT_TRUE(Refused(trainer.Register(),
                        absl::StatusCode::kFailedPrecondition, "EXPORTER_DEAD",
                        absl::StrCat("process ", thread.load(), ", which")));
    EXPECT_TRUE(StillServes());
  }
  {
    // A child of the trainer, of which a daemon cannot know.
    Exporter exporter;
    BareTrainer trainer(&cluster_, "a", getpid());
    Fill(exporter.handle(), &trainer);
    exporter.Kill();
    EXPECT_TRUE(Refused(trainer.Register(),
                        absl::StatusCode::kFailedPrecondition,
                        "ALLOCATION_FREED", "register the tensors again"));
    EXPECT_TRUE(StillServes());
  }
  // The same agent, all the while.
  EXPECT_EQ(Gpu("a", 0).restart_count(), 0);
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  ASSERT_TRUE(source.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));
}

TEST_F(GpuBadInputTest, AGpuWithoutRoom) {
  Start();
  GpuTrainer source(&cluster_, "a", 1);
  ASSERT_TRUE(source.Register().ok());
  GpuReplica replica(&cluster_, "a", "full", 1, 2);
  // All of GPU 2 is taken.
  GpuTensors there(Parameters(), 2);
  std::vector<void*> taken;
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  for (size_t bytes = 128 << 20; bytes >= (2 << 20);) {
    void* more = nullptr;
    if (cudaMalloc(&more, bytes) == cudaSuccess) {
      taken.push_back(more);
    } else {
      bytes /= 2;
    }
  }
  cudaGetLastError();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);

  // A trainer's needs room for the agent's context and slots: fails by name,
  // and can be tried again.
  client::TrainerOptions options;
  options.address = cluster_.address("a");
  options.model = "another";
  const auto trainer = client::Trainer::Connect(options);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  EXPECT_TRUE(Refused((*trainer)->RegisterShards(there.tensors()).status(),
                      absl::StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED",
                      "the GPU's memory is taken"));
  EXPECT_TRUE(StillServes());
  ASSERT_TRUE(WaitUntil(
      [&] { return Gpu("a", 1).state() == v1::GpuUse::STATE_FAILED; }));
  EXPECT_EQ(Gpu("a", 1).failure().reason(), "MEMORY_EXHAUSTED");
  EXPECT_EQ(Gpu("a", 1).slot_bytes(), 0);

  // A worker's needs none: nothing is allocated beside its parameters.
  ASSERT_TRUE(source.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));

  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  for (void* memory : taken) ASSERT_EQ(cudaFree(memory), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_TRUE((*trainer)->RegisterShards(there.tensors()).ok());
  EXPECT_TRUE(StillServes());
  (*trainer)->Close();
}

TEST_F(GpuBadInputTest, AWorkerWhoseGpuRefusesACopyTriesAgain) {
  Start();
  GpuTrainer source(&cluster_, "a", 1);
  ASSERT_TRUE(source.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  // The first command of the first update finds no memory for itself.
  gpu_sim::Plant("call=cudaStreamCreateWithFlags process=test error=2");
  const auto published = source.Publish(1);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(1));
  EXPECT_TRUE(StillServes());
}

TEST_F(GpuBadInputTest, MigInstances) {
  Start("GPU_SIM_MIG", "0");
  GpuTensors mine(Parameters(), 0), whole(Parameters(), 1);
  BareTrainer trainer(&cluster_, "a", getpid());
  // The whole GPU of which there is but a slice is none that the daemon sees;
  // the slice, which it names, has no IPC.
  Fill(mine, &trainer);
  const absl::Status unknown = trainer.Register();
  EXPECT_TRUE(Refused(unknown, absl::StatusCode::kNotFound,
                      "DEVICE_NOT_VISIBLE", uuid_));
  const std::string sentence(unknown.message());
  const size_t served = sentence.find("it serves ");
  ASSERT_NE(served, std::string::npos) << unknown;
  trainer.memory()->set_device_uuid(sentence.substr(served + 10, uuid_.size()));
  EXPECT_TRUE(Refused(trainer.Register(), absl::StatusCode::kFailedPrecondition,
                      "MIG_NO_IPC", "use a whole GPU, or --memory=host"));
  EXPECT_TRUE(StillServes());
  // Another GPU of the same node is a whole one.
  Fill(whole, &trainer);
  EXPECT_TRUE(trainer.Register().ok());
}

TEST_F(GpuBadInputTest, ADriverThatIsOlderThanTheRuntime) {
  Start();
  {
    // The trainer's own.
    GpuTrainer trainer(&cluster_, "a", 1);
    setenv("GPU_SIM_DRIVER_VERSION", "12040", 1);
    EXPECT_TRUE(Refused(trainer.Register(),
                        absl::StatusCode::kFailedPrecondition, "DRIVER_TOO_OLD",
                        "the driver serves CUDA 12.4 and the runtime is 13.0"));
    unsetenv("GPU_SIM_DRIVER_VERSION");
    EXPECT_TRUE(trainer.Register().ok());
    EXPECT_TRUE(StillServes());
  }
  // The daemon's: it does not start.
  setenv("GPU_SIM_DRIVER_VERSION", "12040", 1);
  EXPECT_FALSE(cluster_.StartNode("b", GpuFlags()));
  unsetenv("GPU_SIM_DRIVER_VERSION");
  const std::string log = cluster_.process("b")->Log();
  EXPECT_TRUE(absl::StrContains(log, "DRIVER_TOO_OLD")) << log;
  EXPECT_TRUE(absl::StrContains(log, "the driver serves CUDA 12.4")) << log;
  EXPECT_TRUE(StillServes());
}

// Casts are the trainer's to ask for: a worker that wants another type is told
// who has which.
TEST_F(GpuBadInputTest, AWorkerThatWantsAnotherType) {
  Start();
  std::vector<client::Tensor> wide = Parameters();
  for (client::Tensor& tensor : wide) tensor.dtype = v1::DTYPE_F32;
  GpuTensors masters(wide, 0);
  client::TrainerOptions options;
  options.address = cluster_.address("a");
  options.model = kModel;
  const auto trainer = client::Trainer::Connect(options);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  const absl::Status registered =
      (*trainer)->RegisterShards(masters.tensors()).status();
  ASSERT_TRUE(registered.ok()) << registered;
  GpuTensors live(Parameters(), 1);
  client::WorkerOptions wanting;
  wanting.address = cluster_.address("a");
  wanting.model = kModel;
  wanting.replica = "narrow";
  wanting.incarnation = client::RandomId();
  auto worker = client::Worker::Start(wanting, live.tensors());
  ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_TRUE(Refused((*worker)->WaitRegistered(kPatience),
                      absl::StatusCode::kFailedPrecondition, "DTYPE_MISMATCH",
                      "have the trainers register it in the worker's"));
  EXPECT_TRUE(StillServes());
  (*trainer)->Close();
}

}  // namespace

int RunExporter() { return Exporter::Play(); }

}  // namespace e2e
}  // namespace weightsync

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == weightsync::e2e::kExporter)
    return weightsync::e2e::RunExporter();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
