// A real daemon with --memory=cuda, its device agents, and clients with their
// tensors on GPUs, over the simulator.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "glog/logging.h"
#include "grpcpp/grpcpp.h"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "tests/gpu/gpu_tensors.h"
#include "transport/cuda/sim_control.h"
#include "weightsync/v1/admin.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace e2e {
namespace {

constexpr char kModel[] = "on_gpu";

std::vector<client::Tensor> Parameters() {
  std::vector<client::Tensor> parameters(3);
  parameters[0].name = "embed.weight";
  parameters[0].shape = {300, 64};
  parameters[1].name = "down.weight";
  parameters[1].shape = {66, 128};
  parameters[2].name = "norm.weight";
  parameters[2].shape = {6};
  for (client::Tensor& parameter : parameters) parameter.dtype = v1::DTYPE_BF16;
  return parameters;
}

// The bytes of a parameter in a version.
std::string Content(const client::Tensor& parameter, int version) {
  int64_t bytes = 2;
  for (const int64_t extent : parameter.shape) bytes *= extent;
  std::string content(static_cast<size_t>(bytes), '\0');
  uint64_t state =
      static_cast<uint64_t>(version) * 1000 + parameter.name.size();
  for (char& byte : content) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return content;
}

// Dimension `dim` of each parameter, part `part` of `parts`; parameters of
// fewer dimensions are held whole.
std::vector<client::Tensor> Parts(size_t dim, int part, int parts) {
  std::vector<client::Tensor> tensors = Parameters();
  for (client::Tensor& tensor : tensors) {
    if (parts == 1 || dim >= tensor.shape.size()) continue;
    const int64_t length = tensor.shape[dim] / parts;
    client::Box box;
    box.offset.assign(tensor.shape.size(), 0);
    box.extent = tensor.shape;
    box.offset[dim] = length * part;
    box.extent[dim] =
        part + 1 == parts ? tensor.shape[dim] - length * part : length;
    tensor.box = box;
  }
  return tensors;
}

// What a box of `tensor` holds in a version, densely.
std::string BoxContent(const client::Tensor& tensor, int version) {
  const std::string all = Content(tensor, version);
  if (!tensor.box.has_value()) return all;
  const client::Box& box = *tensor.box;
  if (tensor.shape.size() == 1)
    return all.substr(static_cast<size_t>(box.offset[0] * 2),
                      static_cast<size_t>(box.extent[0] * 2));
  std::string content;
  for (int64_t row = 0; row < box.extent[0]; ++row) {
    content += all.substr(
        static_cast<size_t>(
            2 * ((box.offset[0] + row) * tensor.shape[1] + box.offset[1])),
        static_cast<size_t>(2 * box.extent[1]));
  }
  return content;
}

// A rank whose shards are rows, in one allocation of a GPU.
class GpuTrainer {
 public:
  GpuTrainer(Cluster* cluster, const std::string& node, int ranks,
             int devices = 1) {
    for (int i = 0; i < ranks; ++i) {
      client::TrainerOptions options;
      options.address = cluster->address(node);
      options.model = kModel;
      options.rank = i;
      options.world_size = ranks;
      auto trainer = client::Trainer::Connect(options);
      if (!trainer.ok()) {
        ADD_FAILURE() << trainer.status();
        return;
      }
      Rank rank;
      rank.trainer = *std::move(trainer);
      rank.tensors =
          std::make_unique<GpuTensors>(Parts(0, i, ranks), i % devices);
      ranks_.push_back(std::move(rank));
    }
  }
  // Memory goes when nobody has it open any more.
  ~GpuTrainer() {
    for (Rank& rank : ranks_) rank.trainer = nullptr;
  }

  absl::Status Register() {
    for (Rank& rank : ranks_) {
      const absl::Status status =
          rank.trainer->RegisterShards(rank.tensors->tensors()).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<v1::Version> Publish(
      int version, const v1::UpdateOptions& update = v1::UpdateOptions()) {
    std::vector<absl::StatusOr<client::PublishResult>> results(
        ranks_.size(), absl::UnknownError("not run"));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] {
        std::vector<std::string> content;
        for (const client::Tensor& tensor : ranks_[i].tensors->tensors())
          content.push_back(BoxContent(tensor, version));
        ranks_[i].tensors->Write(content);
        client::PublishOptions options;
        options.timeout = kPatience;
        options.update = update;
        results[i] = ranks_[i].trainer->Publish(options);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& result : results) {
      if (!result.ok()) return result.status();
    }
    return ranks_[0].trainer->Wait(*results[0], kPatience);
  }
  client::Trainer* trainer(int rank) { return ranks_[rank].trainer.get(); }
  GpuTensors* tensors(int rank) { return ranks_[rank].tensors.get(); }
  void NewTensors(int rank) {
    before_ = std::move(ranks_[rank].tensors);
    ranks_[rank].tensors = std::make_unique<GpuTensors>(
        Parts(0, rank, static_cast<int>(ranks_.size())), 0);
  }
  void FreeBefore() { before_ = nullptr; }

 private:
  struct Rank {
    std::unique_ptr<GpuTensors> tensors;
    std::unique_ptr<client::Trainer> trainer;
  };
  std::vector<Rank> ranks_;
  std::unique_ptr<GpuTensors> before_;
};

// An engine whose workers hold columns, each on a GPU.
class GpuReplica {
 public:
  GpuReplica(Cluster* cluster, const std::string& node, const std::string& name,
             int workers, int first_device) {
    const std::string incarnation = client::RandomId();
    for (int i = 0; i < workers; ++i) {
      tensors_.push_back(
          std::make_unique<GpuTensors>(Parts(1, i, workers), first_device + i));
      client::WorkerOptions options;
      options.address = cluster->address(node);
      options.model = kModel;
      options.replica = name;
      options.incarnation = incarnation;
      options.worker_index = i;
      options.worker_count = workers;
      auto worker = client::Worker::Start(options, tensors_.back()->tensors());
      EXPECT_TRUE(worker.ok()) << worker.status();
      if (worker.ok()) workers_.push_back(*std::move(worker));
    }
    client::ReplicaOptions options;
    options.address = cluster->address(node);
    options.model = kModel;
    options.replica = name;
    options.incarnation = incarnation;
    options.worker_count = workers;
    client::ReplicaHooks hooks;
    hooks.on_pause = [](const client::PauseRequest&) {
      return absl::StatusOr<std::string>("");
    };
    hooks.on_resume = [](const client::ResumeInfo&) {
      return absl::OkStatus();
    };
    auto replica = client::Replica::Start(options, hooks);
    EXPECT_TRUE(replica.ok()) << replica.status();
    if (replica.ok()) replica_ = *std::move(replica);
    for (auto& worker : workers_)
      EXPECT_TRUE(worker->WaitRegistered(kPatience).ok());
  }
  // Whether every worker holds exactly this version.
  ::testing::AssertionResult Holds(int version) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const std::vector<std::string> got = tensors_[i]->Read();
      for (size_t t = 0; t < got.size(); ++t) {
        const client::Tensor& tensor = tensors_[i]->tensors()[t];
        if (got[t] != BoxContent(tensor, version)) {
          return ::testing::AssertionFailure()
                 << "worker " << i << ", " << tensor.name
                 << " is not that of version " << version;
        }
      }
    }
    return ::testing::AssertionSuccess();
  }
  GpuTensors* tensors(int worker) { return tensors_[worker].get(); }

 private:
  std::vector<std::unique_ptr<GpuTensors>> tensors_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
  std::unique_ptr<client::Replica> replica_;
};

std::vector<std::string> Flags() {
  return {"--memory=cuda", "--bucket_bytes=16384", "--gpu_slots=2",
          "--device_timeout=5s"};
}

class GpuMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant("");
    ASSERT_TRUE(transport::cuda::FindCudart().ok());
  }
  void TearDown() override { gpu_sim::Plant(""); }

  // Starts a daemon whose agents a fault can pick.
  void StartNode(const std::string& name,
                 const std::vector<std::string>& flags) {
    setenv("GPU_SIM_ROLE", "node", 1);
    ASSERT_TRUE(cluster_.StartNode(name, flags));
    unsetenv("GPU_SIM_ROLE");
  }
  std::unique_ptr<v1::AdminService::Stub> Admin(const std::string& node) {
    return v1::AdminService::NewStub(grpc::CreateChannel(
        cluster_.address(node), grpc::InsecureChannelCredentials()));
  }
  v1::GpuUse Gpu(const std::string& node, size_t index) {
    const auto found = cluster_.GetNode("nodes/" + node);
    if (!found.ok() || found->memory().gpus_size() <= static_cast<int>(index))
      return v1::GpuUse();
    return found->memory().gpus(static_cast<int>(index));
  }

  Cluster cluster_;
};

TEST_F(GpuMemoryTest, TensorsGoFromGpuToGpu) {
  StartNode("a", Flags());
  StartNode("b", {"--bucket_bytes=16384"});  // its GPUs are its workers' own
  GpuTrainer trainer(&cluster_, "a", 2, /*devices=*/2);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  GpuReplica near(&cluster_, "a", "near", 2, 1);
  GpuReplica far(&cluster_, "b", "far", 1, 3);
  for (const int version : {1, 2, 3}) {
    v1::UpdateOptions options;
    options.set_verify_source(version == 2);
    if (version == 3) {
      options.set_update_mode(v1::UPDATE_MODE_STREAM);
      options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
      options.set_allow_no_recovery(true);
    }
    const auto published = trainer.Publish(version, options);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    EXPECT_TRUE(near.Holds(version));
    EXPECT_TRUE(far.Holds(version));
  }
  // What lies on the GPUs is what the trainer had, and a flipped bit is seen.
  for (const char* name : {"near", "far"}) {
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/", name));
    v1::VerifyReplicaResponse response;
    ASSERT_TRUE(Admin("a")->VerifyReplica(&context, request, &response).ok());
    EXPECT_TRUE(response.equal()) << response.ShortDebugString();
  }
  near.tensors(1)->FlipBit();
  grpc::ClientContext context;
  v1::VerifyReplicaRequest request;
  request.set_name(absl::StrCat("models/", kModel, "/replicas/near"));
  v1::VerifyReplicaResponse response;
  ASSERT_TRUE(Admin("a")->VerifyReplica(&context, request, &response).ok());
  EXPECT_FALSE(response.equal());

  // Two GPUs are in use, and each has exactly its slots.
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 1).slot_bytes() == 2 * 16384; }));
  for (const size_t index : {0, 1}) {
    const v1::GpuUse use = Gpu("a", index);
    EXPECT_TRUE(absl::StartsWith(use.device_uuid(), "GPU-"));
    EXPECT_EQ(use.state(), v1::GpuUse::STATE_READY);
    EXPECT_EQ(use.slot_count(), 2);
    EXPECT_EQ(use.slot_bytes(), 2 * 16384);
    EXPECT_GT(use.total_bytes(), use.free_bytes());
    EXPECT_GT(use.free_bytes(), 0);
  }
  const auto node = cluster_.GetNode("nodes/a");
  ASSERT_TRUE(node.ok());
  EXPECT_EQ(node->memory().gpus_size(), 2);
}

TEST_F(GpuMemoryTest, ADeadAgentCostsOnePublishAtMost) {
  StartNode("a", Flags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));

  // Killed while nothing runs: nobody notices.
  const pid_t daemon = cluster_.process("a")->pid();
  const pid_t agent = ChildOf(daemon, "weightsync_device_agent");
  ASSERT_NE(agent, 0);
  ASSERT_EQ(kill(agent, SIGKILL), 0);
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).restart_count() == 1; }));
  auto published = trainer.Publish(2);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(2));

  // A fault of the GPU in the middle: the publish fails by name, nothing
  // changes in the replica, and others are served.
  gpu_sim::Plant("call=cudaLaunchKernel process=node sticky=700");
  published = trainer.Publish(3);
  EXPECT_FALSE(published.ok());
  const std::string reason = ErrorReason(published.status());
  EXPECT_TRUE(reason == "DEVICE_FAULT" || reason == "DEVICE_AGENT_LOST")
      << published.status();
  EXPECT_TRUE(replica.Holds(2));
  gpu_sim::Plant("");
  EXPECT_TRUE(cluster_.process("a")->Running());
  published = trainer.Publish(4);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(4));

  // One that hangs is killed at its deadline; tensors in host memory go their
  // way meanwhile.
  TestTrainer other(&cluster_, "a", 1);
  TestReplica others(&cluster_, "a", "other");
  ASSERT_TRUE(other.Publish(1).ok());
  gpu_sim::Plant("call=cudaLaunchKernel process=node stall=1");
  absl::Status stalled;
  std::thread stuck([&] { stalled = trainer.Publish(5).status(); });
  for (const char value : {2, 3}) EXPECT_TRUE(other.Publish(value).ok());
  EXPECT_TRUE(others.WaitServes(3));
  stuck.join();
  EXPECT_TRUE(ErrorReason(stalled) == "DEVICE_AGENT_HUNG" ||
              ErrorReason(stalled) == "DEVICE_STALLED" ||
              ErrorReason(stalled) == "DEVICE_AGENT_LOST")
      << stalled;
  gpu_sim::Plant("");
  EXPECT_TRUE(replica.Holds(4));
  published = trainer.Publish(6);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(6));
}

TEST_F(GpuMemoryTest, WhatATrainerCannotExportIsNamed) {
  StartNode("a", Flags());
  {
    // As PyTorch's expandable segments are.
    gpu_sim::Plant("call=cudaMalloc unexportable=1");
    GpuTrainer trainer(&cluster_, "a", 1);
    gpu_sim::Plant("");
    const absl::Status status = trainer.Register();
    EXPECT_EQ(ErrorReason(status), "NOT_EXPORTABLE");
    EXPECT_TRUE(absl::StrContains(status.message(), "expandable_segments"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "embed.weight"));
    // With other memory the same trainer goes on.
    trainer.NewTensors(0);
    EXPECT_TRUE(trainer.Register().ok());
  }
  {
    GpuTrainer trainer(&cluster_, "a", 1);
    std::vector<client::Tensor> tensors = trainer.tensors(0)->tensors();
    // Not on a GPU at all, and beyond the end of what is.
    std::vector<char> host(1 << 20);
    tensors[0].data = host.data();
    EXPECT_EQ(ErrorReason(trainer.trainer(0)->RegisterShards(tensors).status()),
              "NOT_DEVICE_MEMORY");
    tensors = trainer.tensors(0)->tensors();
    tensors[0].shape[0] = 100000;
    EXPECT_EQ(ErrorReason(trainer.trainer(0)->RegisterShards(tensors).status()),
              "PAST_ALLOCATION");
    client::WorkerOptions options;
    options.address = cluster_.address("a");
    options.model = kModel;
    options.replica = "bad";
    options.incarnation = client::RandomId();
    tensors = trainer.tensors(0)->tensors();
    tensors[1].data = host.data();
    EXPECT_EQ(ErrorReason(client::Worker::Start(options, tensors).status()),
              "NOT_DEVICE_MEMORY");
  }
  {
    // Other tensors are registered: what was before may be freed at once, and
    // the simulator would say so if somebody still had it open.
    GpuTrainer trainer(&cluster_, "a", 1);
    ASSERT_TRUE(trainer.Register().ok());
    GpuReplica replica(&cluster_, "a", "one", 1, 1);
    ASSERT_TRUE(trainer.Publish(1).ok());
    trainer.NewTensors(0);
    ASSERT_TRUE(trainer.Register().ok());
    trainer.FreeBefore();
    ASSERT_TRUE(trainer.Publish(2).ok());
    EXPECT_TRUE(replica.Holds(2));
    // Freed under a registration: found before a byte is read.
    trainer.tensors(0)->Free();
    EXPECT_TRUE(absl::StrContains(gpu_sim::TakeFindings(), "freed"));
    const auto published = trainer.Publish(3);
    EXPECT_EQ(ErrorReason(published.status()), "ALLOCATION_FREED")
        << published.status();
    EXPECT_TRUE(replica.Holds(2));
  }
}

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
  }
  ~BareTrainer() { context_.TryCancel(), stream_->Finish(); }

  v1::CudaIpcMemory* memory() {
    return request_.mutable_regions(0)->mutable_memory()->mutable_cuda_ipc();
  }
  v1::RegisterShardsRequest* request() { return &request_; }
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
};

TEST_F(GpuMemoryTest, BadHandlesAreNamed) {
  StartNode("a", Flags());
  GpuTrainer served(&cluster_, "a", 1);
  ASSERT_TRUE(served.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  GpuTensors mine(Parameters(), 0);
  const auto gpu = transport::cuda::ProcessGpu::Of(mine.tensors()[0].data);
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  const auto place = (*gpu)->Describe(mine.tensors()[0].data, 16);
  ASSERT_TRUE(place.ok()) << place.status();
  const auto text = [](const auto& chars) {
    return std::string(chars.data(), chars.size());
  };
  const auto fill = [&](BareTrainer* trainer) {
    v1::CudaIpcMemory* memory = trainer->memory();
    memory->set_handle(text(place->handle.ipc));
    memory->set_probe_handle(text(place->handle.probe_ipc));
    memory->set_nonce(text(place->handle.nonce));
    memory->set_device_uuid(place->handle.device_uuid);
    memory->set_buffer_id(place->handle.buffer_id);
    memory->set_base_address(place->handle.base);
  };
  {
    BareTrainer trainer(&cluster_, "a", getpid());
    const auto reason = [&] { return ErrorReason(trainer.Register()); };
    EXPECT_EQ(reason(), "HANDLE_MALFORMED");  // of no device
    fill(&trainer);
    EXPECT_TRUE(trainer.Register().ok());
    trainer.memory()->set_handle("short");
    const absl::Status status = trainer.Register();
    EXPECT_EQ(ErrorReason(status), "HANDLE_MALFORMED");
    EXPECT_TRUE(absl::StrContains(status.message(), "5 bytes, and not 64"))
        << status;
    fill(&trainer);
    trainer.memory()->set_nonce("");
    EXPECT_EQ(reason(), "HANDLE_MALFORMED");
    fill(&trainer);
    trainer.memory()->set_device_uuid("GPU-of-another-machine");
    const absl::Status unknown = trainer.Register();
    EXPECT_EQ(ErrorReason(unknown), "DEVICE_NOT_VISIBLE");
    EXPECT_TRUE(absl::StrContains(unknown.message(), place->handle.device_uuid))
        << unknown;
    // Longer than it is; a shard beyond its end.
    fill(&trainer);
    trainer.request()->mutable_regions(0)->set_size_bytes(int64_t{1} << 40);
    EXPECT_EQ(reason(), "PAST_ALLOCATION");
    trainer.request()->mutable_regions(0)->set_size_bytes(4096);
    trainer.request()->mutable_shards(0)->set_offset_bytes(4090);
    EXPECT_EQ(reason(), "MEMORY_OUT_OF_RANGE");
    trainer.request()->mutable_shards(0)->set_offset_bytes(0);
    EXPECT_TRUE(trainer.Register().ok());
  }
  {
    // Whose pid is nobody's here: of another pid namespace.
    BareTrainer trainer(&cluster_, "a", 4194303);
    fill(&trainer);
    trainer.memory()->set_nonce(std::string(16, 'x'));
    EXPECT_EQ(ErrorReason(trainer.Register()), "PROBE_FAILED");
    trainer.memory()->set_probe_handle(std::string(64, 'x'));
    EXPECT_EQ(ErrorReason(trainer.Register()), "FOREIGN_NAMESPACE");
  }
  {
    // A GPU without room for the slots: fails by name, and can be tried again.
    gpu_sim::Plant("call=cudaMalloc process=node error=2 count=0");
    client::TrainerOptions options;
    options.address = cluster_.address("a");
    options.model = "another";
    GpuTensors there(Parameters(), 2);
    const auto trainer = client::Trainer::Connect(options);
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    const absl::Status status =
        (*trainer)->RegisterShards(there.tensors()).status();
    EXPECT_EQ(ErrorReason(status), "MEMORY_EXHAUSTED") << status;
    ASSERT_TRUE(WaitUntil(
        [&] { return Gpu("a", 1).state() == v1::GpuUse::STATE_FAILED; }));
    EXPECT_EQ(Gpu("a", 1).failure().reason(), "MEMORY_EXHAUSTED");
    gpu_sim::Plant("");
    EXPECT_TRUE((*trainer)->RegisterShards(there.tensors()).ok());
  }
  // All the while others are served.
  ASSERT_TRUE(served.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));
}

TEST_F(GpuMemoryTest, ADaemonWithoutGpusSaysSo) {
  StartNode("a", {});
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status status = trainer.Register();
  EXPECT_EQ(ErrorReason(status), "MEMORY_KIND_DISABLED") << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "--memory=cuda"));
  EXPECT_FALSE(cluster_.StartNode(
      "b", {"--memory=cuda", "--device_uuid=GPU-of-another-machine"}));
  EXPECT_TRUE(
      absl::StrContains(cluster_.process("b")->Log(), "DEVICE_NOT_VISIBLE"));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
