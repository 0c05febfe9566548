// PAIRED, BROADCAST and SHARDED with real daemons: two nodes of trainers, one
// of them with an engine of its own, and two more. Whatever the route, every
// byte arrives as it was, once, and as much crosses the network as was planned.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "transport/file/safetensors.h"

namespace weightsync {
namespace e2e {
namespace {

using ::testing::HasSubstr;

constexpr v1::TransferPolicy kPolicies[] = {v1::TRANSFER_POLICY_PAIRED,
                                            v1::TRANSFER_POLICY_BROADCAST,
                                            v1::TRANSFER_POLICY_SHARDED};

v1::PlanRequest Registered(v1::TransferPolicy policy) {
  v1::PlanRequest request;
  request.set_model("models/test");
  request.set_policy(policy);
  return request;
}

TEST(PoliciesTest, AsManyBytesMoveAsWerePlanned) {
  Cluster cluster;
  for (const char* node : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(cluster.StartNode(node, {"--bucket_bytes=8192"}));
  }
  TestTrainer trainer(&cluster, {"a", "b", "a"});
  TestReplica beside(&cluster, "b", "r0");
  TestReplica split(&cluster, "c", "r1", 2);
  TestReplica whole(&cluster, "d", "r2");
  for (const char* replica : {"r0", "r1", "r2"}) {
    ASSERT_TRUE(cluster.WaitReplicaState(replica, v1::Replica::STATE_SERVING));
  }
  char value = 1;
  int64_t sharded = 0;
  int64_t broadcast = 0;
  for (const v1::TransferPolicy policy : kPolicies) {
    SCOPED_TRACE(v1::TransferPolicy_Name(policy));
    const auto planned = cluster.Plan(Registered(policy));
    ASSERT_TRUE(planned.ok()) << planned.status();
    EXPECT_EQ(planned->policy(), policy);
    v1::UpdateOptions options;
    options.set_transfer_policy(policy);
    trainer.SetOptions(options);
    const auto version = trainer.Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    ASSERT_EQ(version->state(), v1::Version::STATE_ACTIVE)
        << version->ShortDebugString();
    for (TestReplica* replica : {&beside, &split, &whole}) {
      EXPECT_TRUE(replica->WaitServes(value));
      EXPECT_FALSE(replica->SawMix());
    }
    EXPECT_EQ(version->transfer_policy(), policy);
    EXPECT_EQ(version->wire_bytes(), planned->wire_bytes());
    EXPECT_EQ(version->bucket_count(), planned->bucket_count());
    // What nodes say that they received, each byte once.
    int64_t received = 0;
    for (const v1::NodeProgress& node : version->nodes()) {
      received += node.received_bytes();
    }
    EXPECT_EQ(received, planned->wire_bytes());
    for (const v1::PhaseTime& phase : version->phases()) {
      EXPECT_EQ(phase.has_predicted(), phase.phase() != "gather")
          << phase.phase();
    }
    (policy == v1::TRANSFER_POLICY_SHARDED ? sharded : broadcast) =
        planned->wire_bytes();
    ++value;
  }
  EXPECT_GT(broadcast, sharded) << "gathering at the head is not free";
}

TEST(PoliciesTest, DescribedPlansNeedNoCluster) {
  Cluster cluster;
  ASSERT_TRUE(cluster.StartNode("a"));
  ASSERT_TRUE(cluster.StartNode("b"));
  v1::PlanRequest request;
  v1::PlanSpec* spec = request.mutable_spec();
  spec->set_model("qwen2.5-0.5b");
  spec->set_training_sharding("dp");
  spec->set_training_gpus(8);
  spec->set_inference_replicas(4);
  spec->set_inference_tp(2);
  spec->set_policy("paired");
  spec->set_base_port(29500);
  const auto plan = cluster.Plan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->policy(), v1::TRANSFER_POLICY_PAIRED);
  ASSERT_EQ(plan->groups_size(), 8);
  EXPECT_EQ(plan->groups(7).targets(0).port(), 29507);
  EXPECT_THAT(plan->json(), HasSubstr("\"predicted_seconds\""));
  spec->set_training_sharding("tp");
  EXPECT_EQ(ErrorReason(cluster.Plan(request).status()), "UNKNOWN_SHARDING");
  spec->set_training_sharding("dp");
  // What would keep the daemon busy for minutes is refused at once.
  spec->set_bucket_size(16);
  const absl::Status large = cluster.Plan(request).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(large), "PLAN_TOO_LARGE");
  EXPECT_EQ(ErrorReason(cluster.Plan(v1::PlanRequest()).status()),
            "PLAN_SUBJECT_MISSING");
  EXPECT_EQ(
      ErrorReason(cluster.Plan(Registered(v1::TRANSFER_POLICY_AUTO)).status()),
      "MODEL_UNKNOWN");
}

// A model whose every byte differs from its neighbours.
std::string WriteModel(const std::string& directory) {
  const std::vector<transport::SafetensorsTensor> tensors = {
      {"model.embed_tokens.weight", "BF16", {1001, 64}, 0, 0},
      {"model.layers.0.mlp.up_proj.weight", "F32", {130, 64}, 0, 0},
      {"model.layers.0.mlp.down_proj.weight", "BF16", {64, 130}, 0, 0},
      {"model.norm.weight", "BF16", {2}, 0, 0},
  };
  const auto header = transport::MakeSafetensorsHeader(tensors, {});
  EXPECT_TRUE(header.ok()) << header.status();
  const std::string path = directory + "/model.safetensors";
  std::ofstream file(path, std::ios::binary);
  file << *header;
  uint32_t x = 4711;
  for (int i = 0; i < 2 * 1001 * 64 + 4 * 130 * 64 + 2 * 64 * 130 + 4; ++i) {
    x = x * 1664525 + 1013904223;
    file.put(static_cast<char>(x >> 24));
  }
  return path;
}

std::multiset<std::string> Lines(const std::string& path,
                                 const std::string& with) {
  std::multiset<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (line.find(with) != std::string::npos) lines.insert(line);
  }
  return lines;
}

TEST(PoliciesTest, EveryWorkerHoldsWhatWasPublishedUnderEachPolicy) {
  Cluster cluster;
  for (const char* node : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(cluster.StartNode(node, {"--bucket_bytes=20000"}));
  }
  const std::string& directory = cluster.directory().path();
  const std::vector<std::string> common = {
      "--safetensors=" + WriteModel(directory), "--name=test", "--versions=3"};
  std::vector<std::unique_ptr<Process>> all;
  const auto start = [&](const std::string& name, const std::string& program,
                         const std::string& node,
                         std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program);
    arguments.push_back("--address=" + cluster.address(node));
    arguments.push_back("--hashes=" + directory + "/" + name + ".hashes");
    arguments.insert(arguments.end(), common.begin(), common.end());
    all.push_back(cluster.Start(name, arguments));
  };
  const auto replica = [&](const std::string& name, const std::string& node,
                           int workers) {
    start(name, "tests/e2e/demo_worker", node,
          {"--replica=" + name, absl::StrCat("--workers=", workers),
           "--hash_parts=3"});
  };
  replica("r0", "b", 1);
  replica("r1", "c", 2);
  replica("r2", "d", 1);
  for (int rank = 0; rank < 3; ++rank) {
    start(absl::StrCat("rank", rank), "tests/e2e/demo_trainer",
          rank == 1 ? "b" : "a",
          {absl::StrCat("--rank=", rank), "--world_size=3", "--wait_replicas=3",
           "--policies=paired,broadcast,sharded"});
  }
  for (const auto& process : all) {
    ASSERT_EQ(process->Wait(absl::Minutes(2)), 0) << process->Log();
  }
  const auto published = [&](const std::string& with) {
    std::multiset<std::string> lines;
    for (int rank = 0; rank < 3; ++rank) {
      lines.merge(
          Lines(absl::StrCat(directory, "/rank", rank, ".hashes"), with));
    }
    return lines;
  };
  const auto one = published(" 0/1 ");
  EXPECT_GT(one.size(), 3u * 3 * 3);
  EXPECT_EQ(Lines(directory + "/r0.hashes", " "), one);
  EXPECT_EQ(Lines(directory + "/r2.hashes", " "), one);
  std::multiset<std::string> two = published(" 0/2 ");
  two.merge(published(" 1/2 "));
  EXPECT_EQ(Lines(directory + "/r1.hashes", " "), two);
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
