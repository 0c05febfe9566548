#include "schedule/describe.h"

#include <fstream>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

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
    EXPECT_FALSE(other.at_least);  // of a plan as small as this one
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
  // People and programs are told why.
  EXPECT_THAT(ExplainPolicies(report),
              HasSubstr("; PAIRED cannot be had (TOO_FEW_TRAINERS): "
                        "training_gpus is 8; PAIRED under zero3 needs one for "
                        "each of the 16 inference workers"));
  const Json paired = Json::parse(PlanJson(report, 0))["policies"][1];
  EXPECT_EQ(paired["policy"], "PAIRED");
  EXPECT_EQ(paired["reason"], "TOO_FEW_TRAINERS");
  EXPECT_THAT(paired["message"].get<std::string>(), HasSubstr("16"));
  EXPECT_FALSE(paired.contains("total_seconds"));
  request_.policy = Policy::kPaired;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "TOO_FEW_TRAINERS");
}

TEST_F(DescribeTest, WhoNeedsNoGroupIsSaidAndHowItIsReached) {
  // Described engines have nodes of their own.
  PlanReport report = Describe();
  EXPECT_EQ(ExplainPaths(report), "");
  report = PlanReport();
  report.nodes = {"a", "b", "c"};
  report.beside_sender = {2, 0, 1};
  report.num_groups = 3;
  EXPECT_EQ(ExplainPaths(report),
            "inside a node, over no group: 3 workers beside the sender by "
            "shared memory, or CUDA IPC from GPUs (a, c)");
  report.on_gpus = {true, true, false};
  report.inner_groups = 1;
  EXPECT_EQ(ExplainPaths(report),
            "inside a node, over no group: 2 workers beside the sender by CUDA "
            "IPC and shared memory (a), 1 worker beside the sender by shared "
            "memory (c); 1 of 3 groups would have nobody elsewhere, and is not "
            "made");
  // One of the two on a reaches the GPUs in which the store lies.
  report.gpu_to_gpu = {1, 0, 0};
  report.inner_groups = 0;
  EXPECT_EQ(ExplainPaths(report),
            "inside a node, over no group: 1 worker beside the sender by CUDA "
            "IPC and shared memory (a), 1 worker beside the sender by CUDA IPC "
            "for what waits on GPUs (a), 1 worker beside the sender by shared "
            "memory (c)");
  report.gpu_to_gpu.clear();
  report.nodes.assign(100, "n");
  report.beside_sender.assign(100, 1);
  report.on_gpus.assign(100, false);
  EXPECT_THAT(ExplainPaths(report), HasSubstr("(n, n, n, n, ...)"));
}

TEST_F(DescribeTest, LargePlansBoundWhatCannotWin) {
  request_.config.training_gpus = 64;
  request_.config.inference_replicas = 64;
  request_.config.bucket_size = 1 << 18;
  const PlanReport report = Describe();
  EXPECT_EQ(report.policy, Policy::kSharded);
  ASSERT_EQ(report.policies.size(), 3u);
  for (int i = 1; i < 3; ++i) {
    EXPECT_TRUE(report.policies[i].at_least);
    EXPECT_GT(report.policies[i].total_seconds, 0);
    EXPECT_EQ(Json::parse(PlanJson(report, 0))["policies"][i]["at_least"],
              true);
  }
  EXPECT_THAT(ExplainPolicies(report), HasSubstr(", PAIRED at least "));
  request_.policy = Policy::kPaired;
  EXPECT_GE(Describe().cost.total_seconds, report.policies[1].total_seconds);
}

// Each of these would run for minutes, or out of memory.
TEST_F(DescribeTest, WhatIsTooLargeIsRefusedAtOnce) {
  const PlanRequest small = request_;
  const auto refused = [&](absl::string_view what) {
    const absl::Time start = absl::Now();
    const absl::Status status = DescribePlan(request_).status();
    EXPECT_LT(absl::Now() - start, absl::Seconds(60)) << what;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << what;
    EXPECT_EQ(ReasonOf(status), "PLAN_TOO_LARGE") << what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    request_ = small;
  };
  request_.config.bucket_size = 16;
  refused("bucket_size");
  request_.config.training_sharding = "dp";
  request_.config.training_gpus = 1 << 20;
  request_.config.inference_replicas = 8192;
  request_.config.inference_tp = 1;
  refused("hops");
  // The other policies would not be chosen for their merits.
  request_.config.training_sharding = "dp";
  request_.config.training_gpus = 1 << 20;
  request_.config.inference_replicas = 8192;
  request_.config.inference_tp = 1;
  request_.policy = Policy::kSharded;
  refused("hops");
  request_.config.training_gpus = 1 << 20;
  refused("training_gpus 1048576");
  request_.config.training_sharding = "dp";
  request_.config.training_gpus = 1 << 20;
  request_.training_tp = 8;
  refused("training_gpus 1048576");
  request_.config.inference_tp = 2000;
  refused("inference_tp");
  request_.config.inference_replicas = 1 << 13;
  request_.config.inference_tp = 1 << 7;
  refused("inference_replicas");
  request_.policy = Policy::kBroadcast;
  request_.config.training_gpus = 1 << 10;
  request_.training_pp = 1 << 10;
  request_.config.inference_replicas = 1 << 13;
  refused("BROADCAST");
  request_.policy = Policy::kPaired;
  request_.config.training_sharding = "dp";
  request_.config.inference_replicas = 1 << 17;
  request_.config.inference_tp = 1;
  request_.gpus_per_node = 1;
  request_.config.bucket_size = 4 << 20;
  refused("PAIRED");
}

TEST_F(DescribeTest, ExpertsAreDealtOutOnlyWhereThereAreSome) {
  for (int* ways : {&request_.training_ep, &request_.inference_ep}) {
    *ways = 2;
    const absl::Status status = DescribePlan(request_).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_COUNT");
    EXPECT_THAT(std::string(status.message()), HasSubstr("has 0 experts"));
    *ways = 1;
  }
  config_ = *FindModel("qwen3-30b-a3b");
  catalog_ = *ModelCatalog(config_);
  request_.model = config_;
  request_.inference_ep = 128;
  EXPECT_TRUE(DescribePlan(request_).ok());
  request_.inference_ep = 129;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "INVALID_COUNT");
  // Workers of experts are workers, too.
  request_.inference_ep = 128;
  request_.config.inference_replicas = 1 << 14;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "PLAN_TOO_LARGE");
}

TEST_F(DescribeTest, BytesOfAllNodesThatNoNumberHolds) {
  catalog_ = *Catalog::Create(
      {Param{"w", DType::kU8, {int64_t{1} << 31, int64_t{1} << 31}, ""}});
  request_.config.bucket_size = kMaxBucketBytes;
  const absl::Status status = DescribePlan(request_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "BYTES_OVERFLOW");
  catalog_ = Catalog();
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "INVALID_PARAMETER");
}

TEST_F(DescribeTest, PortsArePairedsAlone) {
  request_.config.base_port = 65535;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "PORT_OVERFLOW");
  request_.policy = Policy::kPaired;
  EXPECT_EQ(ReasonOf(DescribePlan(request_).status()), "PORT_OVERFLOW");
  request_.policy = Policy::kSharded;
  EXPECT_TRUE(DescribePlan(request_).ok());
  request_.policy = Policy::kBroadcast;
  EXPECT_TRUE(DescribePlan(request_).ok());
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
