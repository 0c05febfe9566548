// Who sends to whom under the policies that the reference documents define:
// pure arithmetic over counts.
//
// PAIRED follows arctic_weight_sync.txt: every inference
// worker (replica, tp rank) is a target; targets, replica-major, are dealt over
// the senders; each sender has a group, in it a communicator of two per target.
// BROADCAST follows areal_weight_sync.txt: one head per
// pipeline stage and every worker, in one group each.

#ifndef WEIGHTSYNC_SCHEDULE_TRANSFER_SCHEDULE_H_
#define WEIGHTSYNC_SCHEDULE_TRANSFER_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "schedule/layout.h"

namespace weightsync {
namespace schedule {

enum class Policy { kAuto, kSharded, kPaired, kBroadcast };
enum class TrainingSharding { kDp, kFsdp, kZero3 };

// "AUTO", "SHARDED", "PAIRED", "BROADCAST", in any case; UNKNOWN_POLICY.
absl::StatusOr<Policy> ParsePolicy(absl::string_view name);
absl::string_view PolicyName(Policy policy);
// "dp", "fsdp", "zero3"; UNKNOWN_SHARDING.
absl::StatusOr<TrainingSharding> ParseTrainingSharding(absl::string_view name);
absl::string_view TrainingShardingName(TrainingSharding sharding);

// Under the names that users of the reference documents know.
struct TransferConfig {
  std::string training_sharding = "dp";
  int64_t training_gpus = 0;
  int64_t inference_replicas = 0;
  int64_t inference_tp = 1;
  int64_t base_port = 0;  // 0: ports are chosen when they are bound
  // Bucket size, under either name; 0: not given. Both given must agree.
  int64_t bucket_size = 0;            // bytes
  int64_t weight_chunked_mem_mb = 0;  // MiB
};

// A checked TransferConfig.
struct TransferCounts {
  TrainingSharding sharding = TrainingSharding::kDp;
  int training_gpus = 0;
  int inference_replicas = 0;
  int inference_tp = 0;
  int base_port = 0;
  int64_t bucket_bytes = kDefaultBucketBytes;

  int targets() const { return inference_replicas * inference_tp; }
};

// INVALID_ARGUMENT, naming the option:
//   INVALID_COUNT         a count below one, or more than 2^20 workers or ranks
//   UNKNOWN_SHARDING
//   INVALID_BUCKET_BYTES  negative, too small or too large, or two different
//                         ones
//   PORT_OVERFLOW         a base_port that is no port; or one with which a port
//                         would pass 65535, under the policies that may number
//                         ports from it (PAIRED, and AUTO, which may take it)
absl::StatusOr<TransferCounts> CheckConfig(const TransferConfig& config,
                                           Policy policy = Policy::kPaired);

struct PairedTarget {
  int replica = 0;
  int tp = 0;
  int port = 0;  // base_port + replica * inference_tp + tp; 0 without base_port
};

struct PairedGroup {
  int group_id = 0;
  int sender_rank = 0;
  int world_size = 1;  // the sender and its targets
  std::vector<PairedTarget> targets;
};

struct PairedSchedule {
  std::vector<int> sender_ranks;
  std::vector<PairedGroup> groups;  // one per sender, also without targets
  // Shards have to be gathered among the senders first (fsdp, zero3).
  bool gather = false;

  // Index into groups of a target's sender.
  int GroupOf(int replica, int tp, int inference_tp) const {
    return (replica * inference_tp + tp) % static_cast<int>(groups.size());
  }
};

// dp and fsdp: min(training_gpus, replicas * tp) senders. zero3: all ranks take
// part; TOO_FEW_TRAINERS when they are fewer than the targets.
absl::StatusOr<PairedSchedule> SchedulePaired(const TransferCounts& counts);
// Its error, without the schedule.
absl::Status CheckPaired(const TransferCounts& counts);

struct BroadcastSchedule {
  std::vector<int> head_ranks;  // one per pipeline stage
  int world_size = 0;           // of each group: every worker and the head
};

// `stages` of training_gpus / stages ranks each; INVALID_COUNT when they do not
// divide, RESOURCE_EXHAUSTED PLAN_TOO_LARGE when every group listing every
// worker would take more than 2^22 entries.
absl::StatusOr<BroadcastSchedule> ScheduleBroadcast(
    const TransferCounts& counts, int stages = 1);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_TRANSFER_SCHEDULE_H_
