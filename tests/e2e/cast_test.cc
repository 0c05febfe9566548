// Trainers that hold a model in other types than it has, two daemons, and
// engines that get it as it is.
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/status.h"
#include "tests/e2e/cast_model.h"
#include "tests/e2e/cluster.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace e2e {
namespace {

using ::testing::HasSubstr;

constexpr char kModel[] = "cast";

// Ranks with rows, in arenas of the daemon.
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
      ranks_.emplace_back();
      ranks_.back().trainer = *std::move(trainer);
      ranks_.back().shards = cast_model::ShardsOf(i, ranks);
    }
  }

  // Into memory that was not used before.
  absl::Status Register() {
    for (Rank& rank : ranks_) {
      int64_t bytes = 0;
      for (const client::Tensor& shard : rank.shards)
        bytes += (client::PartBytes(shard) + 63) / 64 * 64;
      auto arena = rank.trainer->AllocateArena(bytes);
      if (!arena.ok()) return arena.status();
      int64_t at = 0;
      for (client::Tensor& shard : rank.shards) {
        shard.data = arena->data + at;
        at += (client::PartBytes(shard) + 63) / 64 * 64;
      }
      const absl::Status status =
          rank.trainer->RegisterShards(rank.shards).status();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<v1::Version> Publish(int version,
                                      const v1::UpdateOptions& update) {
    std::vector<absl::StatusOr<client::PublishResult>> results(
        ranks_.size(), absl::UnknownError("not run"));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([&, i] {
        for (const client::Tensor& shard : ranks_[i].shards) {
          const std::string held = cast_model::PartOf(
              shard, cast_model::HeldContent(shard, version));
          std::memcpy(shard.data, held.data(), held.size());
        }
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
  std::vector<client::Tensor>* shards(int rank) { return &ranks_[rank].shards; }

 private:
  struct Rank {
    std::unique_ptr<client::Trainer> trainer;
    std::vector<client::Tensor> shards;
  };
  std::vector<Rank> ranks_;
};

// An engine whose workers hold columns.
class CastReplica {
 public:
  CastReplica(Cluster* cluster, const std::string& node,
              const std::string& name, int workers) {
    const std::string incarnation = client::RandomId();
    for (int i = 0; i < workers; ++i) {
      tensors_.push_back(cast_model::WantedBy(i, workers));
      for (client::Tensor& tensor : tensors_.back()) {
        memory_.emplace_back(
            new char[static_cast<size_t>(client::PartBytes(tensor))]());
        tensor.data = memory_.back().get();
      }
      client::WorkerOptions options;
      options.address = cluster->address(node);
      options.model = kModel;
      options.replica = name;
      options.incarnation = incarnation;
      options.worker_index = i;
      options.worker_count = workers;
      auto worker = client::Worker::Start(options, tensors_.back());
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

  ::testing::AssertionResult Holds(int version) const {
    const auto sent = cast_model::Sent(version);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (const client::Tensor& tensor : tensors_[i]) {
        const std::string want =
            cast_model::PartOf(tensor, sent.at(tensor.name));
        if (std::memcmp(tensor.data, want.data(), want.size()) != 0) {
          return ::testing::AssertionFailure()
                 << "worker " << i << ", " << tensor.name
                 << " is not that of version " << version;
        }
      }
    }
    return ::testing::AssertionSuccess();
  }
  void FlipBit() { static_cast<char*>(tensors_[0].back().data)[1] ^= 1; }

 private:
  std::vector<std::vector<client::Tensor>> tensors_;
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
  std::unique_ptr<client::Replica> replica_;
};

class CastTest : public ::testing::Test {
 protected:
  // Whether what a replica holds is what the trainers gave, after casts.
  bool Verified(const std::string& replica) {
    const auto stub = v1::AdminService::NewStub(grpc::CreateChannel(
        cluster_.address("a"), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/", replica));
    v1::VerifyReplicaResponse response;
    const grpc::Status status =
        stub->VerifyReplica(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.equal();
  }

  // Whether it is whole, and comes to be: the next update counts on it.
  bool Serves(const std::string& replica) {
    const auto stub = v1::AdminService::NewStub(grpc::CreateChannel(
        cluster_.address("a"), grpc::InsecureChannelCredentials()));
    return WaitUntil(
        [&] {
          grpc::ClientContext context;
          v1::GetReplicaRequest request;
          request.set_name(
              absl::StrCat("models/", kModel, "/replicas/", replica));
          v1::Replica shown;
          return stub->GetReplica(&context, request, &shown).ok() &&
                 shown.state() == v1::Replica::STATE_SERVING;
        },
        kPatience);
  }

  Cluster cluster_;
};

TEST_F(CastTest, WorkersGetWhatTheModelHas) {
  ASSERT_TRUE(cluster_.StartNode("a", {"--bucket_bytes=65536"}));
  ASSERT_TRUE(cluster_.StartNode("b", {"--bucket_bytes=65536"}));
  CastTrainer trainer(&cluster_, "a", 2);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  CastReplica near(&cluster_, "a", "near", 2);
  CastReplica far(&cluster_, "b", "far", 1);
  ASSERT_TRUE(Serves("near") && Serves("far"));
  for (int version = 1; version <= 6; ++version) {
    v1::UpdateOptions options;
    options.set_verify_source(version == 2 || version == 3);
    if (version == 3 || version == 4)
      options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
    if (version == 4) {
      // Where a tensor is cast, the worker beside the trainer gets it through a
      // slot, too.
      options.set_update_mode(v1::UPDATE_MODE_STREAM);
      options.set_allow_no_recovery(true);
    }
    if (version == 5) {
      // Of memory that lies elsewhere now.
      ASSERT_TRUE(trainer.Register().ok());
    }
    if (version == 6)
      options.set_transfer_policy(v1::TRANSFER_POLICY_BROADCAST);
    const auto published = trainer.Publish(version, options);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    EXPECT_TRUE(near.Holds(version));
    EXPECT_TRUE(far.Holds(version));
    EXPECT_TRUE(Verified("near"));
    EXPECT_TRUE(Verified("far"));
  }
  far.FlipBit();
  EXPECT_FALSE(Verified("far"));
}

TEST_F(CastTest, WhatCannotBeIsSaidBeforeAnythingMoves) {
  ASSERT_TRUE(cluster_.StartNode("a", {"--bucket_bytes=65536"}));
  CastTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  const auto refused = [&](size_t shard, auto change) {
    std::vector<client::Tensor> shards = *trainer.shards(0);
    change(&shards[shard]);
    const absl::Status status =
        trainer.trainer(0)->RegisterShards(shards).status();
    EXPECT_EQ(ErrorReason(status), "DTYPE_MISMATCH") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(shards[shard].name));
    return std::string(status.message());
  };
  // bf16 that was registered as if it were fp16.
  EXPECT_THAT(refused(0,
                      [](client::Tensor* tensor) {
                        tensor->stored_dtype = v1::DTYPE_BF16;
                      }),
              HasSubstr("no cast leads from BF16 to F16"));
  EXPECT_THAT(refused(3,
                      [](client::Tensor* tensor) {
                        client::Box box;
                        box.offset = {0, 0};
                        box.extent = {200, 300};
                        tensor->box = box;
                      }),
              HasSubstr("cuts through blocks of 128 x 128"));
  // What was registered before still is.
  CastReplica replica(&cluster_, "a", "one", 1);
  const auto published = trainer.Publish(1, v1::UpdateOptions());
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(1));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
