// Whole updates through the public RPCs, and what one sees of them.

#include <fstream>

#include "daemon/service/cluster_fixture.h"
#include "gmock/gmock.h"
#include "grpcpp/support/sync_stream.h"
#include "nlohmann/json.hpp"

namespace weightsync {
namespace daemon {
namespace testing {
namespace {

using ::testing::HasSubstr;

class UpdateTest : public ClusterTest {};

TEST_F(UpdateTest, OneNode) {
  StartNode("a");
  StartTrainers({"a"}, 2);
  StartReplica("a", "r0");
  StartReplica("a", "r1", 2);
  UpdateWorks(1);
  UpdateWorks(2);
  UpdateWorks(3);
  EXPECT_EQ(replicas_["r0"]->pauses(), 3);

  const auto version = GetVersion("a", "models/m/versions/latest");
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->version(), 3);
  const auto model = GetModel("a");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->active_version(), "models/m/versions/3");
  EXPECT_EQ(model->parameters_size(), static_cast<int>(model_.size()));
}

TEST_F(UpdateTest, BeforeAnyReplica) {
  StartNode("a");
  StartTrainers({"a"}, 2);
  UpdateWorks(1);
}

TEST_F(UpdateTest, CoordinatorAndTwoNodes) {
  StartNode("c");
  StartNode("t");
  StartNode("w");
  StartTrainers({"t"}, 3);
  StartReplica("w", "r0");
  StartReplica("w", "r1", 2);
  StartReplica("t", "r2");
  UpdateWorks(1);
  UpdateWorks(2);
}

TEST_F(UpdateTest, RanksOnSeveralNodes) {
  StartNode("a");
  StartNode("b");
  StartNode("c");
  StartTrainers({"a", "b"}, 3);
  StartReplica("b", "r0", 2);
  StartReplica("c", "r1");
  UpdateWorks(1);
  UpdateWorks(2);
}

TEST_F(UpdateTest, TheTrainersOwnNumbers) {
  StartNode("a");
  StartTrainers({"a"}, 1);
  StartReplica("a", "r0");
  trainers_[0]->Fill(7);
  const auto published = trainers_[0]->Publish(70);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->version_name(), "models/m/versions/70");
  ASSERT_TRUE(trainers_[0]->Wait("models/m/versions/70").ok());
  const auto older = trainers_[0]->Publish(70);
  EXPECT_EQ(older.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(older.status()), "VERSION_NOT_NEWER");
  UpdateWorks(8);
  EXPECT_TRUE(GetVersion("a", "models/m/versions/71").ok());
}

TEST_F(UpdateTest, ARepeatedRequestIdPublishesNothing) {
  StartNode("a");
  StartTrainers({"a"}, 1);
  StartReplica("a", "r0");
  trainers_[0]->Fill(1);
  v1::PublishVersionRequest request;
  request.set_session(trainers_[0]->session());
  request.set_request_id("step-1");
  const auto first = trainers_[0]->Publish(request);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(trainers_[0]->Wait(first->version_name()).ok());
  const auto second = trainers_[0]->Publish(request);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->update_id(), first->update_id());
  EXPECT_EQ(second->version(), first->version());
  EXPECT_EQ(second->copied_bytes(), first->copied_bytes());
  const auto latest = GetVersion("a", "models/m/versions/latest");
  ASSERT_TRUE(latest.ok());
  EXPECT_EQ(latest->version(), first->version());
  UpdateWorks(2);
}

TEST_F(UpdateTest, AReplicaThatComesLateGetsWhatIsServed) {
  StartNode("a");
  StartTrainers({"a"}, 2);
  StartReplica("a", "r0");
  UpdateWorks(1);
  StartReplica("a", "r1");
  ASSERT_TRUE(Eventually([&] {
    return workers_["r1"][0]->installed().state() ==
           v1::InstalledState::STATE_INSTALLED;
  }));
  ASSERT_TRUE(ReplicaReaches("a", "r1", v1::Replica::STATE_SERVING));
  const auto version = GetVersion("a", "models/m/versions/latest");
  ASSERT_TRUE(version.ok());
  ExpectServes("r1", 1, *version);
  UpdateWorks(2);
}

TEST_F(UpdateTest, AnyDaemonAnswersAndFollows) {
  StartNode("c");
  StartNode("n");
  StartTrainers({"n"}, 1);
  StartReplica("n", "r0");

  // A watch from the node that does not coordinate, begun before there is a
  // version.
  std::vector<v1::Version> seen;
  grpc::ClientContext watching;
  SetDeadline(&watching);
  v1::WatchVersionRequest watch;
  watch.set_name("models/m/versions/latest");
  auto admin = Admin("n");
  auto stream = admin->WatchVersion(&watching, watch);
  std::thread watcher([&] {
    v1::Version version;
    while (stream->Read(&version)) {
      seen.push_back(version);
      if (version.state() == v1::Version::STATE_ACTIVE) break;
    }
    watching.TryCancel();
    stream->Finish();
  });
  UpdateWorks(1);
  watcher.join();
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().state(), v1::Version::STATE_ACTIVE);

  // One that has ended is sent once, and the stream ends.
  grpc::ClientContext again;
  SetDeadline(&again);
  watch.set_name("models/m/versions/1");
  auto ended = admin->WatchVersion(&again, watch);
  v1::Version version;
  EXPECT_TRUE(ended->Read(&version));
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE);
  EXPECT_FALSE(ended->Read(&version));
  EXPECT_TRUE(ended->Finish().ok());

  grpc::ClientContext context;
  SetDeadline(&context);
  v1::Cluster cluster;
  ASSERT_TRUE(
      admin->GetCluster(&context, v1::GetClusterRequest(), &cluster).ok());
  EXPECT_EQ(cluster.answered_by(), "nodes/n");
  EXPECT_EQ(cluster.coordinator(), "nodes/c");
  EXPECT_EQ(cluster.cluster_id(), daemons_["c"]->cluster_id());

  // What a node says of its memory comes with its heartbeats.
  v1::Node node;
  ASSERT_TRUE(Eventually([&] {
    grpc::ClientContext nodes_context;
    SetDeadline(&nodes_context);
    v1::ListNodesResponse nodes;
    if (!admin->ListNodes(&nodes_context, v1::ListNodesRequest(), &nodes)
             .ok() ||
        nodes.nodes_size() != 2) {
      return false;
    }
    node = nodes.nodes(1);
    return node.memory().store_reserved_bytes() > 0;
  }));
  EXPECT_EQ(node.name(), "nodes/n");
  EXPECT_EQ(node.trainer_rank_count(), 1);
  EXPECT_EQ(node.worker_count(), 1);
  EXPECT_GT(node.memory().trainer_arena_bytes(), 0);
  EXPECT_GT(node.memory().resident_bytes(), 0);

  const auto missing = GetVersion("n", "models/m/versions/99");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(missing.status()), "VERSION_UNKNOWN");
}

TEST_F(UpdateTest, PrepareMakesReadyAndMovesNothing) {
  StartNode("c");
  StartNode("n");
  auto admin = Admin("n");
  const auto prepare = [&]() -> absl::StatusOr<v1::PrepareResponse> {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::PrepareRequest request;
    request.set_model("models/m");
    v1::PrepareResponse response;
    const grpc::Status status = admin->Prepare(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  };
  StartTrainers({"c"}, 2);
  EXPECT_EQ(ErrorReason(prepare().status()), "NO_WORKERS");
  StartReplica("n", "r0");
  const auto ready = prepare();
  ASSERT_TRUE(ready.ok()) << ready.status();
  EXPECT_GT(ready->bucket_count(), 0);
  EXPECT_GT(ready->wire_bytes(), 0);
  ASSERT_TRUE(prepare().ok());
  UpdateWorks(1);
}

TEST_F(UpdateTest, TheReadyFileSaysWhereItServes) {
  const std::string ready_file = directory_.path() + "/ready.json";
  StartNode("a", [&](Options* options) { options->ready_file = ready_file; });
  std::ifstream file(ready_file);
  const nlohmann::json ready = nlohmann::json::parse(file);
  EXPECT_EQ(ready["node"], "a");
  EXPECT_EQ(ready["listen"][0], daemons_["a"]->addresses().listen[0]);
  EXPECT_EQ(ready["unix_socket"], daemons_["a"]->addresses().unix_socket);
  daemons_["a"]->Shutdown();
  EXPECT_FALSE(std::ifstream(ready_file).good());
}

}  // namespace
}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
