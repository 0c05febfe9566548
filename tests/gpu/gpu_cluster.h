// Trainers and engines with their tensors on GPUs of the test's own process,
// and daemons that serve them, over the simulated GPU.
#ifndef WEIGHTSYNC_TESTS_GPU_GPU_CLUSTER_H_
#define WEIGHTSYNC_TESTS_GPU_GPU_CLUSTER_H_

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "grpcpp/grpcpp.h"
#include "tests/e2e/cluster.h"
#include "tests/gpu/gpu_tensors.h"
#include "transport/cuda/sim_control.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace e2e {

inline constexpr char kModel[] = "on_gpu";

// Of a test that wants a larger model, or one of more tensors: small ones.
inline int64_t model_scale = 1;
inline int small_tensors = 0;

inline std::vector<client::Tensor> Parameters() {
  std::vector<client::Tensor> parameters(3);
  parameters[0].name = "embed.weight";
  parameters[0].shape = {300 * model_scale, 64};
  parameters[1].name = "down.weight";
  parameters[1].shape = {66 * model_scale, 128};
  parameters[2].name = "norm.weight";
  parameters[2].shape = {6};
  for (int i = 0; i < small_tensors; ++i) {
    parameters.emplace_back();
    parameters.back().name = absl::StrCat("layers.", i, ".weight");
    parameters.back().shape = {4 + i % 5, 24};
  }
  for (client::Tensor& parameter : parameters) parameter.dtype = v1::DTYPE_BF16;
  return parameters;
}

// The bytes of a parameter in a version.
inline std::string Content(const client::Tensor& parameter, int version) {
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
inline std::vector<client::Tensor> Parts(size_t dim, int part, int parts) {
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
inline std::string BoxContent(const client::Tensor& tensor, int version) {
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
             int devices = 1)
      : GpuTrainer(cluster->address(node), ranks, devices) {}
  // The same by the address of its daemon, for another process.
  explicit GpuTrainer(const std::string& address, int ranks, int devices = 1) {
    for (int i = 0; i < ranks; ++i) {
      client::TrainerOptions options;
      options.address = address;
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

// An engine whose workers hold columns, each on a GPU; `apart` 0: all on one.
class GpuReplica {
 public:
  GpuReplica(Cluster* cluster, const std::string& node, const std::string& name,
             int workers, int first_device, int apart = 1)
      : GpuReplica(cluster->address(node), name, workers, first_device, apart) {
  }
  GpuReplica(const std::string& address, const std::string& name, int workers,
             int first_device, int apart = 1) {
    const std::string incarnation = client::RandomId();
    for (int i = 0; i < workers; ++i) {
      tensors_.push_back(std::make_unique<GpuTensors>(
          Parts(1, i, workers), first_device + i * apart));
      client::WorkerOptions options;
      options.address = address;
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
    options.address = address;
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
    EXPECT_TRUE(replica_->WaitRegistered(kPatience).ok());
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
  client::Worker* worker(int worker) { return workers_[worker].get(); }

 private:
  std::vector<std::unique_ptr<GpuTensors>> tensors_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
  std::unique_ptr<client::Replica> replica_;
};

inline std::vector<std::string> GpuFlags() {
  return {"--memory=cuda", "--bucket_bytes=16384", "--gpu_slots=2",
          "--device_timeout=5s"};
}

class GpuClusterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Of this process, before a daemon inherits another: it is read once.
    setenv("GPU_SIM_ROLE", "test", 1);
    gpu_sim::Plant("call=none error=1");
    ASSERT_TRUE(transport::cuda::FindCudart().ok());
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    gpu_sim::Plant("");
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
    const auto found = cluster_.GetNode(node);
    if (!found.ok() || found->memory().gpus_size() <= static_cast<int>(index))
      return v1::GpuUse();
    return found->memory().gpus(static_cast<int>(index));
  }

  Cluster cluster_;
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_GPU_CLUSTER_H_
