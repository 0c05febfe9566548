// The plan of a described cluster, from a model and a few counts: what
// `weightsyncctl plan` prints and the Plan RPC answers, without any cluster.

#ifndef WEIGHTSYNC_SCHEDULE_DESCRIBE_H_
#define WEIGHTSYNC_SCHEDULE_DESCRIBE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "schedule/catalog.h"
#include "schedule/choose.h"
#include "schedule/cost.h"
#include "schedule/models.h"
#include "schedule/parallel.h"
#include "schedule/transfer_schedule.h"

namespace weightsync {
namespace schedule {

struct PlanRequest {
  // Not owned; must outlive the call.
  const Catalog* catalog = nullptr;
  // Head sizes and the like; a default one is good enough for a catalog from a
  // file (tensors are then cut by rows).
  ModelConfig model;
  TransferConfig config;
  Policy policy = Policy::kAuto;
  // Beside training_sharding, which is that of the data-parallel groups.
  int training_pp = 1;
  int training_tp = 1;
  int training_ep = 1;
  int inference_ep = 1;
  // Trainer ranks fill nodes in order, workers fill nodes after them.
  int gpus_per_node = 8;
  Rates rates;
  // Whose copies are to be listed: (replica, tensor-parallel rank).
  std::vector<std::pair<int, int>> workers;
};

struct GroupReport {
  int group_id = 0;
  int sender_rank = -1;  // PAIRED and BROADCAST
  int sender_node = -1;
  int world_size = 1;
  // PAIRED and BROADCAST: (replica, tp rank), and for PAIRED their ports.
  std::vector<std::pair<int, int>> targets;
  std::vector<int> ports;
  // SHARDED: the chain.
  std::vector<int> nodes;
  int64_t bytes = 0;
};

// One stretch of a worker's weights: a box of a parameter and where it comes
// from.
struct CopyReport {
  uint32_t ordinal = 0;
  std::string parameter;
  Box box;
  int64_t bytes = 0;
  uint32_t bucket = 0;
  int source_rank = 0;  // who owns the bucket
  // The node that hands the bucket to the worker's node; the latter itself
  // where its own ranks hold the bytes.
  int from_node = 0;
};

struct WorkerReport {
  int replica = 0;
  int tp = 0;
  int node = 0;
  std::vector<CopyReport> copies;  // in order of buckets
};

struct PlanReport {
  Policy requested = Policy::kAuto;
  Policy policy = Policy::kSharded;  // never kAuto
  std::vector<int> sender_ranks;     // those that send something
  std::vector<GroupReport> groups;
  int num_groups = 0;
  int64_t num_tensors = 0;
  int64_t num_buckets = 0;
  int64_t bucket_bytes = 0;
  int64_t total_bytes = 0;  // of the catalog
  int64_t wire_bytes = 0;
  int trainer_nodes = 0;
  int inference_nodes = 0;
  // Seconds per phase, bound_by, lower bound, staging bytes.
  CostEstimate cost;
  // Of the layout, the policy and all flows.
  uint64_t plan_digest = 0;
  std::vector<PolicyReport> policies;  // all that were weighed
  std::vector<std::string> nodes;      // names, by the numbers used above
  // By node: workers beside the rank that sends to them. What it sends them
  // goes over no group.
  std::vector<int> beside_sender;
  // Which they are, once for each count: indices of PlanCluster::workers.
  std::vector<int32_t> beside_workers;
  // Groups of which nobody is on another node: they are not made.
  int inner_groups = 0;
  // By node, where that is known: whether its daemon serves GPUs; and how many
  // of beside_sender copy out of memory of all of those, in which the node's
  // store has what it holds.
  std::vector<bool> on_gpus;
  std::vector<int> gpu_to_gpu;
  std::vector<WorkerReport> workers;  // those asked for
};

// What is known of a plan. REQUIRES: `chosen` was made from the others.
PlanReport ReportPlan(const Catalog& catalog, const PlanCluster& cluster,
                      const UpdateLayout& layout, Policy requested,
                      ChosenPlan chosen);

// Errors: those of CheckConfig, SchedulePaired, TrainerLists, BuildLayout and
// the routes; INVALID_COUNT for a worker that there is not; BYTES_OVERFLOW
// where the bytes that nodes take in are more than an int64 counts; and
// RESOURCE_EXHAUSTED PLAN_TOO_LARGE, before the work is done, for what would
// take minutes or tens of gigabytes.
absl::StatusOr<PlanReport> DescribePlan(const PlanRequest& request);

// One JSON object; `plan_seconds` is what the caller measured. Digests are
// 16 hexadecimal digits, for not all readers keep 64-bit integers.
std::string PlanJson(const PlanReport& report, double plan_seconds);

// Why this policy: "AUTO: SHARDED 1.20 s, BROADCAST at least 1.18 s; PAIRED
// cannot be had (TOO_FEW_TRAINERS): training_gpus is 4; ...".
std::string ExplainPolicies(const PlanReport& report);

// Who is reached without a group, and how: "inside a node, over no group: 2
// workers beside the sender by shared memory (node-a); ...". Empty where groups
// reach everybody.
std::string ExplainPaths(const PlanReport& report);

// 16 hexadecimal digits.
std::string DigestString(uint64_t digest);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_DESCRIBE_H_
