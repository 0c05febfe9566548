#include "proto/plan.h"

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"

namespace weightsync {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

v1::PlanSpec Spec() {
  v1::PlanSpec spec;
  spec.set_model("qwen2.5-0.5b");
  spec.set_training_sharding("dp");
  spec.set_training_gpus(8);
  spec.set_inference_replicas(4);
  spec.set_inference_tp(2);
  return spec;
}

std::string Refused(const v1::PlanSpec& spec) {
  return ErrorReason(PlanOfSpec(spec).status());
}

TEST(PlanOfSpecTest, EveryGoldenPairedCaseAsAMessage) {
  std::ifstream file("schedule/testdata/paired_schedule_cases.json");
  int cases = 0;
  for (const Json& golden : Json::parse(file)) {
    v1::PlanSpec spec = Spec();
    spec.set_policy("paired");
    spec.set_training_sharding(golden["training_sharding"]);
    spec.set_training_gpus(golden["training_gpus"]);
    spec.set_inference_replicas(golden["inference_replicas"]);
    spec.set_inference_tp(golden["inference_tp"]);
    spec.set_base_port(golden["base_port"]);
    const auto report = PlanOfSpec(spec);
    ASSERT_TRUE(report.ok()) << report.status();
    const v1::PlanResponse response =
        ToPlanResponse(*report, absl::Milliseconds(250));
    EXPECT_EQ(response.policy(), v1::TRANSFER_POLICY_PAIRED);
    EXPECT_EQ(std::vector<int>(response.sender_ranks().begin(),
                               response.sender_ranks().end()),
              golden["sender_ranks"].get<std::vector<int>>());
    ASSERT_EQ(response.groups_size(), golden["num_groups"]);
    for (const v1::PlanGroup& group : response.groups()) {
      const std::string sender = std::to_string(group.sender_rank());
      Json targets = Json::array();
      Json ports = Json::array();
      for (const v1::PlanGroup::Target& target : group.targets()) {
        targets.push_back({target.replica(), target.tp()});
        ports.push_back(target.port());
      }
      EXPECT_EQ(targets, golden["targets"][sender]);
      EXPECT_EQ(ports, golden["ports"][sender]);
      EXPECT_EQ(group.world_size(), 1 + group.targets_size());
    }
    EXPECT_EQ(Json::parse(response.json())["plan_seconds"], 0.25);
    EXPECT_EQ(response.plan_duration().nanos(), 250000000);
    ++cases;
  }
  EXPECT_GT(cases, 5);
}

TEST(PlanOfSpecTest, PhasesBoundsAndChainsAreCarriedOver) {
  const auto report = PlanOfSpec(Spec());
  ASSERT_TRUE(report.ok()) << report.status();
  const v1::PlanResponse response = ToPlanResponse(*report, absl::Seconds(1));
  EXPECT_EQ(response.policy(), v1::TRANSFER_POLICY_SHARDED);
  std::vector<std::string> phases;
  for (const v1::PhaseTime& phase : response.phases()) {
    phases.push_back(phase.phase());
    EXPECT_FALSE(phase.has_measured());
  }
  EXPECT_THAT(phases,
              ElementsAre("gather", "snapshot", "transfer", "pause", "total"));
  EXPECT_EQ(response.wire_bytes(), report->wire_bytes);
  EXPECT_GT(response.lower_bound().nanos(), 0);
  ASSERT_GT(response.groups_size(), 0);
  EXPECT_THAT(response.groups(0).nodes(),
              ElementsAre("trainer-0000", "inference-0000"));
  EXPECT_GT(response.groups(0).bytes(), 0);
  EXPECT_THAT(response.explanation(), HasSubstr("BROADCAST"));
  // Engines have nodes of their own here: nothing is inside one.
  EXPECT_THAT(response.explanation(), Not(HasSubstr("inside a node")));
}

TEST(PlanOfSpecTest, WhatTakesNoGroupIsInTheExplanation) {
  auto report = PlanOfSpec(Spec());
  ASSERT_TRUE(report.ok()) << report.status();
  report->beside_sender.assign(report->nodes.size(), 0);
  report->beside_sender[0] = 4;
  EXPECT_THAT(ToPlanResponse(*report, absl::Seconds(1)).explanation(),
              HasSubstr("\ninside a node, over no group: 4 workers beside the "
                        "sender by shared memory, or CUDA IPC from GPUs "
                        "(trainer-0000)"));
}

TEST(PlanOfSpecTest, ALinkRateIsInBits) {
  v1::PlanSpec spec = Spec();
  spec.set_link_gbps(8);
  spec.set_policy("sharded");
  const auto slow = PlanOfSpec(spec);
  ASSERT_TRUE(slow.ok()) << slow.status();
  // One copy of the model into one node, at 1e9 bytes a second.
  EXPECT_NEAR(slow->cost.lower_bound_seconds, slow->total_bytes / 1e9, 0.01);
}

TEST(PlanOfSpecTest, EveryBadSpecHasItsReason) {
  v1::PlanSpec spec = Spec();
  spec.clear_model();
  EXPECT_EQ(Refused(spec), "PLAN_SUBJECT_MISSING");
  spec.set_model("gpt-5");
  EXPECT_EQ(Refused(spec), "UNKNOWN_MODEL");
  spec = Spec();
  schedule::Catalog catalog;
  EXPECT_EQ(ErrorReason(PlanOfSpec(spec, &catalog).status()),
            "PLAN_SUBJECT_MISSING");
  spec.set_training_sharding("tp");
  EXPECT_EQ(Refused(spec), "UNKNOWN_SHARDING");
  for (int count : {0, -1}) {
    spec = Spec();
    spec.set_training_gpus(count);
    EXPECT_EQ(Refused(spec), "INVALID_COUNT");
    spec = Spec();
    spec.set_inference_replicas(count);
    EXPECT_EQ(Refused(spec), "INVALID_COUNT");
    spec = Spec();
    spec.set_inference_tp(count);
    EXPECT_EQ(Refused(spec), "INVALID_COUNT");
  }
  for (const char* name : {"training_pp", "training_tp", "training_ep",
                           "inference_ep", "gpus_per_node"}) {
    spec = Spec();
    spec.GetReflection()->SetInt32(
        &spec, v1::PlanSpec::descriptor()->FindFieldByName(name), -1);
    const absl::Status status = PlanOfSpec(spec).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_COUNT");
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
  spec = Spec();
  spec.set_training_sharding("zero3");
  spec.set_policy("paired");
  spec.set_training_gpus(7);
  EXPECT_EQ(Refused(spec), "TOO_FEW_TRAINERS");
  spec = Spec();
  spec.set_policy("quick");
  EXPECT_EQ(Refused(spec), "UNKNOWN_POLICY");
  spec = Spec();
  spec.set_base_port(65530);
  EXPECT_EQ(Refused(spec), "PORT_OVERFLOW");
  spec = Spec();
  spec.set_bucket_size(8);
  EXPECT_EQ(Refused(spec), "INVALID_BUCKET_BYTES");
  spec.set_bucket_size(1 << 20);
  spec.set_weight_chunked_mem_mb(2);
  EXPECT_EQ(Refused(spec), "INVALID_BUCKET_BYTES");
  spec.set_weight_chunked_mem_mb(1);
  EXPECT_TRUE(PlanOfSpec(spec).ok());
  spec = Spec();
  spec.set_link_gbps(-1);
  EXPECT_EQ(Refused(spec), "INVALID_RATE");
  spec = Spec();
  spec.set_copy_gbytes_per_second(-1);
  EXPECT_EQ(Refused(spec), "INVALID_RATE");
}

TEST(PlanOfSpecTest, AWorkersCopiesAddUpToWhatItNeeds) {
  const v1::PlanSpec spec = Spec();
  const auto report = PlanOfSpec(spec, nullptr, {{3, 1}, {0, 0}});
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->workers.size(), 2u);
  int64_t bytes = 0;
  for (const schedule::WorkerReport& worker : report->workers) {
    ASSERT_FALSE(worker.copies.empty());
    for (const schedule::CopyReport& copy : worker.copies) {
      bytes += copy.bytes;
      EXPECT_EQ(report->nodes[copy.from_node], "trainer-0000");
    }
  }
  // Two halves, and twice what is on both.
  EXPECT_GT(bytes, report->total_bytes);
  EXPECT_LT(bytes, report->total_bytes * 5 / 4);
  EXPECT_EQ(ErrorReason(PlanOfSpec(spec, nullptr, {{4, 0}}).status()),
            "INVALID_COUNT");
}

TEST(PolicyTest, ThereAndBack) {
  for (v1::TransferPolicy policy :
       {v1::TRANSFER_POLICY_AUTO, v1::TRANSFER_POLICY_SHARDED,
        v1::TRANSFER_POLICY_PAIRED, v1::TRANSFER_POLICY_BROADCAST}) {
    EXPECT_EQ(PolicyToProto(PolicyFromProto(policy)), policy);
  }
  EXPECT_EQ(PolicyFromProto(v1::TRANSFER_POLICY_UNSPECIFIED),
            schedule::Policy::kAuto);
}

}  // namespace
}  // namespace weightsync
