#include "schedule/transfer_schedule.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

constexpr int64_t kMaxCount = int64_t{1} << 20;
constexpr int64_t kMaxPort = 65535;
// Targets of all groups together.
constexpr int64_t kMaxListed = int64_t{1} << 22;

absl::Status CheckCount(absl::string_view option, int64_t value) {
  if (value >= 1 && value <= kMaxCount) return absl::OkStatus();
  return InvalidPlan(
      kInvalidCount,
      absl::StrCat(option, " is ", value, value == 0 ? " or missing" : "",
                   "; it must be between 1 and ", kMaxCount));
}

}  // namespace

absl::StatusOr<Policy> ParsePolicy(absl::string_view name) {
  for (Policy policy :
       {Policy::kAuto, Policy::kSharded, Policy::kPaired, Policy::kBroadcast}) {
    if (absl::AsciiStrToUpper(name) == PolicyName(policy)) return policy;
  }
  return InvalidPlan(kUnknownPolicy,
                     absl::StrCat("policy '", name,
                                  "' is unknown; use AUTO, SHARDED, PAIRED or "
                                  "BROADCAST"));
}

absl::string_view PolicyName(Policy policy) {
  switch (policy) {
    case Policy::kAuto:
      return "AUTO";
    case Policy::kSharded:
      return "SHARDED";
    case Policy::kPaired:
      return "PAIRED";
    case Policy::kBroadcast:
      return "BROADCAST";
  }
  return "AUTO";
}

absl::StatusOr<TrainingSharding> ParseTrainingSharding(absl::string_view name) {
  for (TrainingSharding sharding :
       {TrainingSharding::kDp, TrainingSharding::kFsdp,
        TrainingSharding::kZero3}) {
    if (name == TrainingShardingName(sharding)) return sharding;
  }
  return InvalidPlan(
      kUnknownSharding,
      name.empty()
          ? std::string("training_sharding is missing; use dp, fsdp or zero3")
          : absl::StrCat("training_sharding '", name,
                         "' is unknown; use dp, fsdp or zero3"));
}

absl::string_view TrainingShardingName(TrainingSharding sharding) {
  switch (sharding) {
    case TrainingSharding::kDp:
      return "dp";
    case TrainingSharding::kFsdp:
      return "fsdp";
    case TrainingSharding::kZero3:
      return "zero3";
  }
  return "dp";
}

absl::StatusOr<TransferCounts> CheckConfig(const TransferConfig& config,
                                           Policy policy) {
  TransferCounts counts;
  absl::StatusOr<TrainingSharding> sharding =
      ParseTrainingSharding(config.training_sharding);
  if (!sharding.ok()) return sharding.status();
  counts.sharding = *sharding;

  absl::Status ok = CheckCount("training_gpus", config.training_gpus);
  if (!ok.ok()) return ok;
  ok = CheckCount("inference_replicas", config.inference_replicas);
  if (!ok.ok()) return ok;
  ok = CheckCount("inference_tp", config.inference_tp);
  if (!ok.ok()) return ok;
  const int64_t targets = config.inference_replicas * config.inference_tp;
  ok = CheckCount("inference_replicas x inference_tp", targets);
  if (!ok.ok()) return ok;
  counts.training_gpus = static_cast<int>(config.training_gpus);
  counts.inference_replicas = static_cast<int>(config.inference_replicas);
  counts.inference_tp = static_cast<int>(config.inference_tp);

  if (config.base_port < 0 || config.base_port > kMaxPort) {
    return InvalidPlan(
        kPortOverflow,
        absl::StrCat("base_port ", config.base_port,
                     " is not a port; it must be between 1 and ", kMaxPort));
  }
  const bool ports = policy == Policy::kPaired || policy == Policy::kAuto;
  if (ports && config.base_port > 0 &&
      config.base_port + targets - 1 > kMaxPort) {
    return InvalidPlan(
        kPortOverflow,
        absl::StrCat("base_port ", config.base_port, " and ", targets,
                     " targets need ports up to ",
                     config.base_port + targets - 1, ", past ", kMaxPort,
                     "; lower base_port or leave it out"));
  }
  counts.base_port = static_cast<int>(config.base_port);

  if (config.weight_chunked_mem_mb < 0 ||
      config.weight_chunked_mem_mb > (kMaxBucketBytes >> 20)) {
    return InvalidPlan(
        kInvalidBucketBytes,
        absl::StrCat("weight_chunked_mem_mb is ", config.weight_chunked_mem_mb,
                     "; it must be between 1 and ", kMaxBucketBytes >> 20,
                     " MiB"));
  }
  const int64_t chunked = config.weight_chunked_mem_mb << 20;
  if (chunked > 0 && config.bucket_size != 0 && config.bucket_size != chunked) {
    return InvalidPlan(kInvalidBucketBytes,
                       absl::StrCat("bucket_size ", config.bucket_size,
                                    " and weight_chunked_mem_mb ",
                                    config.weight_chunked_mem_mb,
                                    " disagree; give one of them"));
  }
  if (config.bucket_size != 0) {
    counts.bucket_bytes = config.bucket_size;
  } else if (chunked > 0) {
    counts.bucket_bytes = chunked;
  }
  if (counts.bucket_bytes < kMinBucketBytes ||
      counts.bucket_bytes > kMaxBucketBytes) {
    return InvalidPlan(kInvalidBucketBytes,
                       absl::StrCat("bucket_size is ", config.bucket_size,
                                    "; it must be between ", kMinBucketBytes,
                                    " and ", kMaxBucketBytes, " bytes"));
  }
  return counts;
}

absl::Status CheckPaired(const TransferCounts& counts) {
  if (counts.sharding != TrainingSharding::kZero3 ||
      counts.training_gpus >= counts.targets()) {
    return absl::OkStatus();
  }
  return InvalidPlan(
      kTooFewTrainers,
      absl::StrCat("training_gpus is ", counts.training_gpus,
                   "; PAIRED under zero3 needs one for each of the ",
                   counts.targets(), " inference workers"));
}

absl::StatusOr<PairedSchedule> SchedulePaired(const TransferCounts& counts) {
  const absl::Status ok = CheckPaired(counts);
  if (!ok.ok()) return ok;
  const int targets = counts.targets();
  PairedSchedule schedule;
  const int senders = counts.sharding == TrainingSharding::kZero3
                          ? counts.training_gpus
                          : std::min(counts.training_gpus, targets);
  schedule.gather = counts.sharding != TrainingSharding::kDp;
  for (int rank = 0; rank < senders; ++rank) {
    PairedGroup group;
    group.group_id = rank;
    group.sender_rank = rank;
    for (int i = rank; i < targets; i += senders) {
      PairedTarget target;
      target.replica = i / counts.inference_tp;
      target.tp = i % counts.inference_tp;
      target.port = counts.base_port > 0 ? counts.base_port + i : 0;
      group.targets.push_back(target);
    }
    group.world_size = 1 + static_cast<int>(group.targets.size());
    schedule.sender_ranks.push_back(rank);
    schedule.groups.push_back(std::move(group));
  }
  return schedule;
}

absl::StatusOr<BroadcastSchedule> ScheduleBroadcast(
    const TransferCounts& counts, int stages) {
  if (stages < 1 || counts.training_gpus % stages != 0) {
    return InvalidPlan(
        kInvalidCount,
        absl::StrCat("training_gpus is ", counts.training_gpus, ", which ",
                     stages, " pipeline stages do not divide"));
  }
  const int64_t listed = static_cast<int64_t>(stages) * counts.targets();
  if (listed > kMaxListed) {
    return PlanError(
        absl::StatusCode::kResourceExhausted, kPlanTooLarge,
        absl::StrCat("BROADCAST's ", stages, " groups of ", counts.targets(),
                     " workers each would list ", listed,
                     " targets; a plan lists at most ", kMaxListed,
                     ": use SHARDED, or describe fewer stages or replicas"));
  }
  BroadcastSchedule schedule;
  for (int stage = 0; stage < stages; ++stage) {
    schedule.head_ranks.push_back(stage * (counts.training_gpus / stages));
  }
  schedule.world_size = counts.targets() + 1;
  return schedule;
}

}  // namespace schedule
}  // namespace weightsync
