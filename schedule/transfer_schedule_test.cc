#include "schedule/transfer_schedule.h"

#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TransferConfig Config(const char* sharding, int64_t gpus, int64_t replicas,
                      int64_t tp, int64_t base_port = 0) {
  TransferConfig config;
  config.training_sharding = sharding;
  config.training_gpus = gpus;
  config.inference_replicas = replicas;
  config.inference_tp = tp;
  config.base_port = base_port;
  return config;
}

TEST(PairedTest, IsWhatTheReferenceAssigns) {
  std::ifstream file("schedule/testdata/paired_schedule_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 8u);
  for (const auto& golden : cases) {
    SCOPED_TRACE(golden.dump());
    auto counts = CheckConfig(
        Config(golden["training_sharding"].get<std::string>().c_str(),
               golden["training_gpus"], golden["inference_replicas"],
               golden["inference_tp"], golden["base_port"]));
    ASSERT_TRUE(counts.ok()) << counts.status();
    auto schedule = SchedulePaired(*counts);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    EXPECT_EQ(schedule->sender_ranks,
              golden["sender_ranks"].get<std::vector<int>>());
    EXPECT_EQ(schedule->groups.size(), golden["num_groups"].get<size_t>());
    ASSERT_EQ(schedule->groups.size(), golden["targets"].size());
    for (const PairedGroup& group : schedule->groups) {
      const std::string sender = std::to_string(group.sender_rank);
      std::vector<std::pair<int, int>> targets;
      std::vector<int> ports;
      for (const PairedTarget& target : group.targets) {
        targets.emplace_back(target.replica, target.tp);
        ports.push_back(target.port);
        EXPECT_EQ(
            schedule->GroupOf(target.replica, target.tp, counts->inference_tp),
            group.group_id);
      }
      EXPECT_EQ(
          targets,
          (golden["targets"][sender].get<std::vector<std::pair<int, int>>>()));
      EXPECT_EQ(ports, golden["ports"][sender].get<std::vector<int>>());
      EXPECT_EQ(group.world_size, 1 + static_cast<int>(targets.size()));
    }
  }
}

TEST(PairedTest, OnlyShardedTrainersGather) {
  EXPECT_FALSE(SchedulePaired(*CheckConfig(Config("dp", 4, 2, 1)))->gather);
  EXPECT_TRUE(SchedulePaired(*CheckConfig(Config("fsdp", 4, 2, 1)))->gather);
  EXPECT_TRUE(SchedulePaired(*CheckConfig(Config("zero3", 4, 2, 1)))->gather);
}

TEST(PairedTest, Zero3NeedsATrainerPerTarget) {
  auto counts = CheckConfig(Config("zero3", 3, 2, 2));
  ASSERT_TRUE(counts.ok());
  const absl::Status status = SchedulePaired(*counts).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "TOO_FEW_TRAINERS");
  EXPECT_TRUE(SchedulePaired(*CheckConfig(Config("zero3", 4, 2, 2))).ok());
  EXPECT_TRUE(SchedulePaired(*CheckConfig(Config("fsdp", 3, 2, 2))).ok());
}

TEST(PairedTest, WithoutABasePortThereAreNoPorts) {
  auto schedule = SchedulePaired(*CheckConfig(Config("dp", 2, 1, 2)));
  EXPECT_EQ(schedule->groups[0].targets[0].port, 0);
}

TEST(BroadcastTest, OneHeadPerStageAndEveryWorker) {
  auto counts = CheckConfig(Config("fsdp", 8, 3, 2));
  auto schedule = ScheduleBroadcast(*counts, 2);
  ASSERT_TRUE(schedule.ok());
  EXPECT_THAT(schedule->head_ranks, ElementsAre(0, 4));
  EXPECT_EQ(schedule->world_size, 7);
  EXPECT_EQ(ReasonOf(ScheduleBroadcast(*counts, 3).status()), "INVALID_COUNT");
  EXPECT_EQ(ReasonOf(ScheduleBroadcast(*counts, 0).status()), "INVALID_COUNT");
  const absl::Status too_many =
      ScheduleBroadcast(*CheckConfig(Config("fsdp", 1 << 10, 1 << 16, 1)),
                        1 << 10)
          .status();
  EXPECT_EQ(too_many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(too_many), "PLAN_TOO_LARGE");
}

TEST(ConfigTest, BadOptionsAreNamedWithAReason) {
  auto reason = [](const TransferConfig& config, const char* option) {
    const absl::Status status = CheckConfig(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(option));
    return ReasonOf(status);
  };
  EXPECT_EQ(reason(Config("ddp", 1, 1, 1), "training_sharding"),
            "UNKNOWN_SHARDING");
  EXPECT_EQ(reason(Config("", 1, 1, 1), "training_sharding"),
            "UNKNOWN_SHARDING");
  for (int64_t bad : {int64_t{0}, int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_EQ(reason(Config("dp", bad, 1, 1), "training_gpus"),
              "INVALID_COUNT");
    EXPECT_EQ(reason(Config("dp", 1, bad, 1), "inference_replicas"),
              "INVALID_COUNT");
    EXPECT_EQ(reason(Config("dp", 1, 1, bad), "inference_tp"), "INVALID_COUNT");
  }
  EXPECT_EQ(reason(Config("dp", 1, 1 << 15, 1 << 15), "inference_replicas"),
            "INVALID_COUNT");
}

TEST(ConfigTest, PortsPast65535AreAnErrorBeforeAnythingStarts) {
  EXPECT_TRUE(CheckConfig(Config("dp", 1, 2, 2, 65532)).ok());
  EXPECT_EQ(ReasonOf(CheckConfig(Config("dp", 1, 2, 2, 65533)).status()),
            "PORT_OVERFLOW");
  EXPECT_EQ(ReasonOf(CheckConfig(Config("dp", 1, 1, 1, 70000)).status()),
            "PORT_OVERFLOW");
  EXPECT_EQ(ReasonOf(CheckConfig(Config("dp", 1, 1, 1, -1)).status()),
            "PORT_OVERFLOW");
}

TEST(ConfigTest, PortsAreCountedOnlyWhereTheyAreUsed) {
  const TransferConfig config = Config("dp", 1, 2, 2, 65535);
  EXPECT_TRUE(CheckConfig(config, Policy::kSharded).ok());
  EXPECT_TRUE(CheckConfig(config, Policy::kBroadcast).ok());
  // AUTO may take PAIRED.
  for (Policy policy : {Policy::kPaired, Policy::kAuto}) {
    EXPECT_EQ(ReasonOf(CheckConfig(config, policy).status()), "PORT_OVERFLOW");
  }
  // What is no port is none under any policy.
  EXPECT_EQ(
      ReasonOf(
          CheckConfig(Config("dp", 1, 1, 1, 65536), Policy::kSharded).status()),
      "PORT_OVERFLOW");
}

TEST(ConfigTest, BucketSizeHasTwoNames) {
  TransferConfig config = Config("dp", 1, 1, 1);
  EXPECT_EQ(CheckConfig(config)->bucket_bytes, kDefaultBucketBytes);
  config.weight_chunked_mem_mb = 64;
  EXPECT_EQ(CheckConfig(config)->bucket_bytes, 64 << 20);
  config.bucket_size = 64 << 20;
  EXPECT_EQ(CheckConfig(config)->bucket_bytes, 64 << 20);
  config.bucket_size = 63 << 20;
  EXPECT_EQ(ReasonOf(CheckConfig(config).status()), "INVALID_BUCKET_BYTES");
  config.weight_chunked_mem_mb = 0;
  EXPECT_EQ(CheckConfig(config)->bucket_bytes, 63 << 20);
  config.bucket_size = -1;
  EXPECT_EQ(ReasonOf(CheckConfig(config).status()), "INVALID_BUCKET_BYTES");
  config.bucket_size = kMaxBucketBytes + 1;
  EXPECT_EQ(ReasonOf(CheckConfig(config).status()), "INVALID_BUCKET_BYTES");
  config.bucket_size = 0;
  config.weight_chunked_mem_mb = int64_t{1} << 44;  // past an int64 in bytes
  EXPECT_EQ(ReasonOf(CheckConfig(config).status()), "INVALID_BUCKET_BYTES");
  config.weight_chunked_mem_mb = -5;
  EXPECT_EQ(ReasonOf(CheckConfig(config).status()), "INVALID_BUCKET_BYTES");
}

TEST(PolicyTest, NamesAreReadInAnyCase) {
  EXPECT_EQ(*ParsePolicy("sharded"), Policy::kSharded);
  EXPECT_EQ(*ParsePolicy("AUTO"), Policy::kAuto);
  EXPECT_EQ(ReasonOf(ParsePolicy("fastest").status()), "UNKNOWN_POLICY");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
