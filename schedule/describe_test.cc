#include "schedule/describe.h"

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using Json = nlohmann::json;

class DescribeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = *FindModel("qwen2.5-0.5b");
    catalog_ = *ModelCatalog(config_);
    request_.catalog = &catalog_;
    request_.model = config_;
    request_.config.training_sharding = "fsdp";
    request_.config.training_gpus = 16;
    request_.config.inference_replicas = 8;
    request_.config.inference_tp = 2;
  }

  PlanReport Describe() {
    auto report = DescribePlan(request_);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : PlanReport();
  }

  ModelConfig config_;
  Catalog catalog_;
  PlanRequest request_;
};

TEST_F(DescribeTest, AutoTakesTheCheapestAndSaysWhatTheOthersCost) {
  const PlanReport report = Describe();
  EXPECT_EQ(report.policy, Policy::kSharded);
  ASSERT_EQ(report.policies.size(), 3u);
  for (const PolicyReport& other : report.policies) {
    ASSERT_TRUE(other.status.ok());
    EXPECT_GE(other.total_seconds * kWorthChanging, report.cost.total_seconds);
  }
  EXPECT_EQ(report.sender_ranks.size(), 16u);
  EXPECT_EQ(report.trainer_nodes, 2);
  EXPECT_EQ(report.inference_nodes, 2);
  EXPECT_EQ(report.total_bytes, catalog_.total_bytes());
  EXPECT_LE(report.cost.transfer_seconds,
            1.05 * report.cost.lower_bound_seconds);
}

TEST_F(DescribeTest, GatheringPoliciesCostMore) {
  request_.policy = Policy::kPaired;
  const PlanReport paired = Describe();
  EXPECT_EQ(paired.policy, Policy::kPaired);
  EXPECT_GT(paired.cost.gather_seconds, 0);
  request_.policy = Policy::kBroadcast;
  const PlanReport broadcast = Describe();
  EXPECT_GT(broadcast.cost.gather_seconds, 0);
  EXPECT_EQ(broadcast.num_groups, 1);
  EXPECT_EQ(broadcast.groups[0].world_size, 17);
  EXPECT_NE(paired.plan_digest, broadcast.plan_digest);
}

TEST_F(DescribeTest, TheDigestIsThatOfTheInputs) {
  const uint64_t digest = Describe().plan_digest;
  EXPECT_EQ(digest, Describe().plan_digest);
  request_.config.bucket_size = 1 << 20;
  EXPECT_NE(digest, Describe().plan_digest);
}

TEST_F(DescribeTest, JsonCarriesTheReferencesAssignments) {
  std::ifstream file("schedule/testdata/paired_schedule_cases.json");
  for (const Json& golden : Json::parse(file)) {
    request_.policy = Policy::kPaired;
    request_.config.training_sharding = golden["training_sharding"];
    request_.config.training_gpus = golden["training_gpus"];
    request_.config.inference_replicas = golden["inference_replicas"];
    request_.config.inference_tp = golden["inference_tp"];
    request_.config.base_port = golden["base_port"];
    const Json json = Json::parse(PlanJson(Describe(), 0.25));
    EXPECT_EQ(json["policy"], "PAIRED");
    EXPECT_EQ(json["sender_ranks"], golden["sender_ranks"]);
    EXPECT_EQ(json["num_groups"], golden["num_groups"]);
    for (const Json& group : json["groups"]) {
      const std::string sender =
          std::to_string(group["sender_rank"].get<int>());
      EXPECT_EQ(group["targets"], golden["targets"][sender]);
      EXPECT_EQ(group["ports"], golden["ports"][sender]);
      EXPECT_EQ(group["world_size"], 1 + group["targets"].size());
      EXPECT_EQ(group["group_id"], group["sender_rank"]);
    }
    for (const char* key :
         {"num_buckets", "total_bytes", "wire_bytes", "bound_by",
          "lower_bound_seconds", "staging_bytes_per_node", "plan_digest"}) {
      EXPECT_TRUE(json.contains(key)) << key;
    }
    for (const char* key : {"transfer", "pause", "total"}) {
      EXPECT_TRUE(json["predicted_seconds"][key].is_number()) << key;
    }
    EXPECT_EQ(json["plan_seconds"], 0.25);
  }
}

TEST_F(DescribeTest, AutoGoesOnWithoutAPolicyThatCannotBe) {
  request_.config.training_sharding = "zero3";
  request_.config.training_gpus = 8;
  const PlanReport report = Describe();
  EXPECT_EQ(report.policy, Policy::kSharded);
  EXPECT_EQ(ReasonOf(report.policies[1].status), "TOO_FEW_TRAINERS");
  request_.policy = Policy::kPaired;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "TOO_FEW_TRAINERS");
}

TEST_F(DescribeTest, BadRequestsHaveAReason) {
  request_.config.inference_tp = 0;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "INVALID_COUNT");
  request_.config.inference_tp = 1;
  request_.gpus_per_node = 0;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "INVALID_COUNT");
  request_.gpus_per_node = 8;
  request_.rates.link = -1;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "INVALID_RATE");
  request_.rates = Rates();
  request_.config.training_gpus = 1 << 20;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "PLAN_TOO_LARGE");
  request_.catalog = nullptr;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "UNKNOWN_MODEL");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
