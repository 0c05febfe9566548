// A small cluster for tests: daemons, the ranks of one model and its replicas.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_CLUSTER_FIXTURE_H_
#define WEIGHTSYNC_DAEMON_SERVICE_CLUSTER_FIXTURE_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/daemon.h"
#include "daemon/service/testing.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace testing {

class ClusterTest : public ::testing::Test {
 protected:
  // Starts a daemon; the first one coordinates, the others follow it.
  void StartNode(const std::string& node,
                 const std::function<void(Options*)>& change = nullptr) {
    Options options = TestOptions(directory_.path(), node, coordinator_);
    if (change) change(&options);
    auto daemon = Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    if (coordinator_.empty()) coordinator_ = (*daemon)->addresses().listen[0];
    options_[node] = options;
    daemons_[node] = *std::move(daemon);
  }

  std::shared_ptr<grpc::Channel> Channel(const std::string& node) {
    return ChannelTo("unix:" + daemons_.at(node)->addresses().unix_socket);
  }

  // All ranks of the model, on `nodes` in turn.
  void StartTrainers(const std::vector<std::string>& nodes, int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      trainers_.push_back(std::make_unique<RawTrainer>(
          Channel(nodes[rank % nodes.size()]), rank, world_size));
      const absl::Status status = trainers_.back()->SetUp(model_);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // A replica with `workers` workers, all on `node`.
  void StartReplica(const std::string& node, const std::string& replica,
                    int workers = 1) {
    replicas_[replica] = std::make_unique<RawReplica>(
        Channel(node), ReplicaOf(replica, workers));
    const absl::Status control = replicas_[replica]->Open();
    ASSERT_TRUE(control.ok()) << control;
    for (int index = 0; index < workers; ++index) {
      const v1::RegisterWorker registration =
          WorkerOf(replica, model_, index, workers);
      workers_[replica].push_back(
          std::make_unique<RawWorker>(Channel(node), registration));
      wanted_[replica].push_back(registration);
      const absl::Status status = workers_[replica].back()->Open();
      ASSERT_TRUE(status.ok()) << status;
    }
    // Not before the node has room for what it may be given: until then an
    // update goes on without it, and comes later.
    const auto admin = Admin(node);
    EXPECT_TRUE(Eventually([&] {
      grpc::ClientContext context;
      SetDeadline(&context);
      v1::GetReplicaRequest request;
      request.set_name("models/m/replicas/" + replica);
      v1::Replica found;
      return admin->GetReplica(&context, request, &found).ok() &&
             found.state() != v1::Replica::STATE_INCOMPLETE;
    })) << replica;
  }

  // Every rank publishes version `seed` of the tensors at once; the answers, or
  // the first error.
  absl::StatusOr<std::vector<v1::PublishVersionResponse>> PublishAll(
      uint64_t seed, int64_t version = 0) {
    std::vector<absl::StatusOr<v1::PublishVersionResponse>> results(
        trainers_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < trainers_.size(); ++i) {
      trainers_[i]->Fill(seed);
      threads.emplace_back(
          [&, i] { results[i] = trainers_[i]->Publish(version); });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<v1::PublishVersionResponse> answers;
    for (auto& result : results) {
      if (!result.ok()) return result.status();
      answers.push_back(*std::move(result));
    }
    // They may be changed now: nothing of it may reach a replica.
    for (auto& trainer : trainers_) trainer->Fill(seed + 1000000);
    return answers;
  }

  // Publishes, waits, and looks at every byte of every worker of every replica.
  void UpdateWorks(uint64_t seed) {
    const auto published = PublishAll(seed);
    ASSERT_TRUE(published.ok()) << published.status();
    const absl::StatusOr<v1::Version> version = trainers_[0]->Wait(
        (*published)[0].version_name(), (*published)[0].update_id());
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
    for (const auto& answer : *published) {
      EXPECT_EQ(answer.update_id(), version->update_id());
    }
    for (const auto& replica : workers_)
      ExpectServes(replica.first, seed, *version);
  }

  void ExpectServes(const std::string& replica, uint64_t seed,
                    const v1::Version& version) {
    EXPECT_FALSE(replicas_.at(replica)->paused()) << replica;
    EXPECT_EQ(replicas_.at(replica)->last_resume().update_id(),
              version.update_id())
        << replica;
    EXPECT_TRUE(replicas_.at(replica)->last_resume().weights_changed())
        << replica;
    for (size_t w = 0; w < workers_.at(replica).size(); ++w) {
      RawWorker& worker = *workers_.at(replica)[w];
      EXPECT_EQ(worker.installed().state(),
                v1::InstalledState::STATE_INSTALLED);
      EXPECT_EQ(worker.installed().update_id(), version.update_id());
      const v1::RegisterWorker& wanted = wanted_.at(replica)[w];
      for (int t = 0; t < wanted.tensors_size(); ++t) {
        EXPECT_TRUE(worker.Live(t) == Expected(wanted.tensors(t), seed))
            << replica << " worker " << w << " " << wanted.tensors(t).name();
      }
    }
  }

  std::unique_ptr<v1::AdminService::Stub> Admin(const std::string& node) {
    return v1::AdminService::NewStub(Channel(node));
  }

  absl::StatusOr<v1::Version> GetVersion(const std::string& node,
                                         const std::string& name) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetVersionRequest request;
    request.set_name(name);
    v1::Version version;
    const grpc::Status status =
        Admin(node)->GetVersion(&context, request, &version);
    if (!status.ok()) return FromGrpcStatus(status);
    return version;
  }

  absl::StatusOr<v1::Model> GetModel(const std::string& node) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetModelRequest request;
    request.set_name("models/m");
    v1::Model model;
    const grpc::Status status =
        Admin(node)->GetModel(&context, request, &model);
    if (!status.ok()) return FromGrpcStatus(status);
    return model;
  }

  absl::StatusOr<v1::Replica> GetReplica(const std::string& node,
                                         const std::string& replica) {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::GetReplicaRequest request;
    request.set_name("models/m/replicas/" + replica);
    v1::Replica found;
    const grpc::Status status =
        Admin(node)->GetReplica(&context, request, &found);
    if (!status.ok()) return FromGrpcStatus(status);
    return found;
  }

  bool ReplicaReaches(const std::string& node, const std::string& replica,
                      v1::Replica::State state) {
    return Eventually([&] {
      const auto found = GetReplica(node, replica);
      return found.ok() && found->state() == state;
    });
  }

  void TearDown() override {
    // Clients first: they are not what is tested here.
    workers_.clear();
    replicas_.clear();
    trainers_.clear();
    for (auto& daemon : daemons_) {
      if (daemon.second != nullptr) daemon.second->Shutdown();
    }
  }

  TempDir directory_;
  const std::vector<v1::Parameter> model_ = TestModel();
  std::string coordinator_;
  std::map<std::string, Options> options_;
  std::map<std::string, std::unique_ptr<Daemon>> daemons_;
  std::vector<std::unique_ptr<RawTrainer>> trainers_;
  std::map<std::string, std::unique_ptr<RawReplica>> replicas_;
  std::map<std::string, std::vector<std::unique_ptr<RawWorker>>> workers_;
  std::map<std::string, std::vector<v1::RegisterWorker>> wanted_;
};

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_CLUSTER_FIXTURE_H_
