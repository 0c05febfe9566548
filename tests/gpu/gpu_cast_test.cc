// Trainers whose tensors are on GPUs in other types than the model has: the
// device agents cast them, and nobody copies in the trainer.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cc/rpc.h"
#include "proto/status.h"
#include "tests/e2e/cast_model.h"
#include "tests/gpu/gpu_cluster.h"

namespace weightsync {
namespace e2e {
namespace {

// Ranks with rows, each on a GPU.
class CastTrainer {
 public:
  CastTrainer(Cluster* cluster, const std::string& node, int ranks) {
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
      trainers_.push_back(*std::move(trainer));
      tensors_.push_back(nullptr);
    }
  }
  // Memory goes when nobody has it open any more.
  ~CastTrainer() {
    for (auto& trainer : trainers_) trainer = nullptr;
  }

  // In allocations that were not used before.
  absl::Status Register() {
    for (size_t i = 0; i < trainers_.size(); ++i) {
      const std::unique_ptr<GpuTensors> before = std::move(tensors_[i]);
      const int rank = static_cast<int>(i);
      tensors_[i] = std::make_unique<GpuTensors>(
          cast_model::ShardsOf(rank, static_cast<int>(trainers_.size())), rank);
      const absl::Status status =
          trainers_[i]->RegisterShards(tensors_[i]->tensors()).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<v1::Version> Publish(int version,
                                      const v1::UpdateOptions& update) {
    std::vector<absl::StatusOr<client::PublishResult>> results(
        trainers_.size(), absl::UnknownError("not run"));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < trainers_.size(); ++i) {
      threads.emplace_back([&, i] {
        std::vector<std::string> content;
        for (const client::Tensor& tensor : tensors_[i]->tensors()) {
          content.push_back(cast_model::PartOf(
              tensor, cast_model::HeldContent(tensor, version)));
        }
        tensors_[i]->Write(content);
        client::PublishOptions options;
        options.timeout = kPatience;
        options.update = update;
        results[i] = trainers_[i]->Publish(options);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& result : results) {
      if (!result.ok()) return result.status();
    }
    return trainers_[0]->Wait(*results[0], kPatience);
  }

 private:
  std::vector<std::unique_ptr<client::Trainer>> trainers_;
  std::vector<std::unique_ptr<GpuTensors>> tensors_;
};

// An engine with one worker, on a GPU.
class CastReplica {
 public:
  CastReplica(Cluster* cluster, const std::string& node,
              const std::string& name, int device)
      : tensors_(cast_model::Wanted(), device) {
    client::WorkerOptions worker;
    worker.address = cluster->address(node);
    worker.model = kModel;
    worker.replica = name;
    worker.incarnation = client::RandomId();
    auto started = client::Worker::Start(worker, tensors_.tensors());
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) worker_ = *std::move(started);
    client::ReplicaOptions options;
    options.address = worker.address;
    options.model = kModel;
    options.replica = name;
    options.incarnation = worker.incarnation;
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
    EXPECT_TRUE(worker_->WaitRegistered(kPatience).ok());
  }

  ::testing::AssertionResult Holds(int version) const {
    const auto sent = cast_model::Sent(version);
    const std::vector<std::string> got = tensors_.Read();
    for (size_t i = 0; i < got.size(); ++i) {
      const std::string& name = tensors_.tensors()[i].name;
      if (got[i] != sent.at(name)) {
        return ::testing::AssertionFailure()
               << name << " is not that of version " << version;
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  GpuTensors tensors_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Replica> replica_;
};

class GpuCastTest : public GpuClusterTest {
 protected:
  bool Verified(const std::string& replica) {
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/", replica));
    v1::VerifyReplicaResponse response;
    const grpc::Status status =
        Admin("a")->VerifyReplica(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.equal();
  }

  bool Serves(const std::string& replica) {
    return WaitUntil(
        [&] {
          grpc::ClientContext context;
          v1::GetReplicaRequest request;
          request.set_name(
              absl::StrCat("models/", kModel, "/replicas/", replica));
          v1::Replica shown;
          return Admin("a")->GetReplica(&context, request, &shown).ok() &&
                 shown.state() == v1::Replica::STATE_SERVING;
        },
        kPatience);
  }

  void Run(const std::vector<std::string>& flags) {
    StartNode("a", flags);
    StartNode("b", {"--bucket_bytes=16384"});
    CastTrainer trainer(&cluster_, "a", 2);
    const absl::Status registered = trainer.Register();
    ASSERT_TRUE(registered.ok()) << registered;
    CastReplica near(&cluster_, "a", "near", 0);
    CastReplica far(&cluster_, "b", "far", 3);
    ASSERT_TRUE(Serves("near") && Serves("far"));
    for (int version = 1; version <= 4; ++version) {
      v1::UpdateOptions options;
      options.set_verify_source(version == 2);
      if (version == 3) {
        options.set_update_mode(v1::UPDATE_MODE_STREAM);
        options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
        options.set_allow_no_recovery(true);
      }
      if (version == 4) {
        ASSERT_TRUE(trainer.Register().ok());
      }
      const auto published = trainer.Publish(version, options);
      ASSERT_TRUE(published.ok()) << version << ": " << published.status();
      EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
      EXPECT_TRUE(near.Holds(version));
      EXPECT_TRUE(far.Holds(version));
      EXPECT_TRUE(Verified("near"));
      EXPECT_TRUE(Verified("far"));
    }
  }
};

TEST_F(GpuCastTest, ByWayOfSlots) { Run(GpuFlags()); }

TEST_F(GpuCastTest, IntoADeviceStore) {
  std::vector<std::string> flags = GpuFlags();
  flags.push_back("--store=device");
  Run(flags);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
