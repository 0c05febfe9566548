#include "schedule/describe.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"
#include "schedule/plan.h"
#include "schedule/policy.h"
#include "schedule/stable_hash.h"

namespace weightsync {
namespace schedule {
namespace {

constexpr int64_t kMaxShards = int64_t{1} << 23;

// The described cluster, as the planning functions take it.
struct Cluster {
  TransferCounts counts;
  std::vector<SourceRank> sources;
  std::vector<WorkerNeed> workers;  // replica-major
  std::vector<NodeLabels> nodes;
  std::vector<int64_t> apply_bytes;
  int trainer_nodes = 0;
};

// One policy's answer.
struct Candidate {
  Policy policy = Policy::kSharded;
  PolicyFlows flows;
  CostEstimate cost;
  PairedSchedule paired;
  BroadcastSchedule broadcast;
};

DataSharding DataShardingOf(TrainingSharding sharding) {
  switch (sharding) {
    case TrainingSharding::kDp:
      return DataSharding::kReplicated;
    case TrainingSharding::kFsdp:
      return DataSharding::kDim0;
    case TrainingSharding::kZero3:
      return DataSharding::kFlatTensor;
  }
  return DataSharding::kReplicated;
}

int64_t BytesOf(const Catalog& catalog, const BoxList& list) {
  int64_t bytes = 0;
  for (const OrdinalBox& box : list.boxes()) {
    bytes += box.box.Volume() * DTypeSize(catalog.param(box.ordinal).dtype);
  }
  return bytes;
}

absl::StatusOr<Cluster> MakeCluster(const PlanRequest& request) {
  Cluster cluster;
  absl::StatusOr<TransferCounts> counts = CheckConfig(request.config);
  if (!counts.ok()) return counts.status();
  cluster.counts = *counts;
  const Catalog& catalog = *request.catalog;
  if (request.gpus_per_node < 1) {
    return InvalidPlan(kInvalidCount,
                       absl::StrCat("gpus_per_node is ", request.gpus_per_node,
                                    "; it must be at least one"));
  }
  const int64_t spread =
      counts->sharding == TrainingSharding::kDp
          ? int64_t{1}
          : counts->training_gpus /
                std::max(1, request.training_pp * request.training_ep);
  if (std::max<int64_t>(1, spread) * catalog.size() > kMaxShards) {
    return PlanError(
        absl::StatusCode::kResourceExhausted, kPlanTooLarge,
        absl::StrCat("training_gpus ", counts->training_gpus, " would cut ",
                     catalog.size(), " tensors into more than ", kMaxShards,
                     " shards; describe expert and pipeline parallelism "
                     "(training_ep, training_pp), too"));
  }
  TrainerSpec trainer;
  trainer.sharding = DataShardingOf(counts->sharding);
  trainer.ranks = counts->training_gpus;
  trainer.pp = request.training_pp;
  trainer.tp = request.training_tp;
  trainer.ep = request.training_ep;
  absl::StatusOr<std::vector<BoxListRef>> shards =
      TrainerLists(catalog, request.model, trainer);
  if (!shards.ok()) return shards.status();
  WorkerSpec worker;
  worker.tp = counts->inference_tp;
  worker.ep = request.inference_ep;
  absl::StatusOr<std::vector<BoxListRef>> needs =
      WorkerLists(catalog, request.model, worker);
  if (!needs.ok()) return needs.status();

  const int per_node = request.gpus_per_node;
  for (int rank = 0; rank < counts->training_gpus; ++rank) {
    cluster.sources.push_back(
        SourceRank{rank, rank / per_node, (*shards)[rank]});
  }
  cluster.trainer_nodes = (counts->training_gpus + per_node - 1) / per_node;
  const int width = static_cast<int>(needs->size());
  const int worker_count = counts->inference_replicas * width;
  for (int w = 0; w < worker_count; ++w) {
    cluster.workers.push_back(WorkerNeed{
        w, cluster.trainer_nodes + w / per_node, (*needs)[w % width]});
  }
  const int node_count =
      cluster.trainer_nodes + (worker_count + per_node - 1) / per_node;
  cluster.nodes.resize(node_count);
  for (int n = 0; n < node_count; ++n) {
    cluster.nodes[n].name =
        n < cluster.trainer_nodes
            ? absl::StrFormat("trainer-%04d", n)
            : absl::StrFormat("inference-%04d", n - cluster.trainer_nodes);
  }
  std::vector<int64_t> need_bytes;
  for (const BoxListRef& list : *needs) {
    need_bytes.push_back(BytesOf(catalog, *list));
  }
  cluster.apply_bytes.assign(node_count, 0);
  for (const WorkerNeed& w : cluster.workers) {
    cluster.apply_bytes[w.node] += need_bytes[w.worker % width];
  }
  return cluster;
}

absl::StatusOr<Candidate> Weigh(Policy policy, const PlanRequest& request,
                                const Cluster& cluster,
                                const UpdateLayout& layout) {
  Candidate candidate;
  candidate.policy = policy;
  const bool gather = cluster.counts.sharding != TrainingSharding::kDp;
  if (policy == Policy::kSharded) {
    absl::StatusOr<std::vector<Flow>> flows = RouteFlows(layout, cluster.nodes);
    if (!flows.ok()) return flows.status();
    candidate.flows.flows = *std::move(flows);
  } else if (policy == Policy::kPaired) {
    absl::StatusOr<PairedSchedule> paired = SchedulePaired(cluster.counts);
    if (!paired.ok()) return paired.status();
    candidate.paired = *std::move(paired);
    std::vector<PairedRoute> routes;
    for (const WorkerNeed& worker : cluster.workers) {
      const auto senders =
          static_cast<int>(candidate.paired.sender_ranks.size());
      const int rank = candidate.paired.sender_ranks[worker.worker % senders];
      routes.push_back(
          PairedRoute{rank / request.gpus_per_node, worker.node, worker.boxes});
    }
    absl::StatusOr<PolicyFlows> flows =
        RoutePaired(layout, cluster.nodes, routes, gather);
    if (!flows.ok()) return flows.status();
    candidate.flows = *std::move(flows);
  } else {
    absl::StatusOr<BroadcastSchedule> broadcast =
        ScheduleBroadcast(cluster.counts, request.training_pp);
    if (!broadcast.ok()) return broadcast.status();
    candidate.broadcast = *std::move(broadcast);
    const int stage_ranks = cluster.counts.training_gpus / request.training_pp;
    std::vector<int32_t> head_of_node;
    for (int n = 0; n < cluster.trainer_nodes; ++n) {
      const int stage = n * request.gpus_per_node / stage_ranks;
      head_of_node.push_back(candidate.broadcast.head_ranks[stage] /
                             request.gpus_per_node);
    }
    absl::StatusOr<PolicyFlows> flows =
        RouteBroadcast(layout, cluster.nodes, head_of_node, gather);
    if (!flows.ok()) return flows.status();
    candidate.flows = *std::move(flows);
  }
  absl::StatusOr<CostEstimate> cost =
      EstimateCost(layout, candidate.flows.flows, cluster.nodes, request.rates,
                   cluster.apply_bytes, candidate.flows.gather);
  if (!cost.ok()) return cost.status();
  candidate.cost = *std::move(cost);
  return candidate;
}

std::vector<GroupReport> GroupsOf(const Candidate& candidate,
                                  const PlanRequest& request,
                                  const Cluster& cluster) {
  std::vector<GroupReport> groups;
  const int tp = cluster.counts.inference_tp;
  switch (candidate.policy) {
    case Policy::kPaired:
      for (const PairedGroup& paired : candidate.paired.groups) {
        GroupReport group;
        group.group_id = paired.group_id;
        group.sender_rank = paired.sender_rank;
        group.sender_node = paired.sender_rank / request.gpus_per_node;
        group.world_size = paired.world_size;
        for (const PairedTarget& target : paired.targets) {
          group.targets.emplace_back(target.replica, target.tp);
          if (target.port > 0) group.ports.push_back(target.port);
        }
        groups.push_back(std::move(group));
      }
      break;
    case Policy::kBroadcast:
      for (int head : candidate.broadcast.head_ranks) {
        GroupReport group;
        group.group_id = static_cast<int>(groups.size());
        group.sender_rank = head;
        group.sender_node = head / request.gpus_per_node;
        group.world_size = candidate.broadcast.world_size;
        for (int i = 0; i < cluster.counts.targets(); ++i) {
          group.targets.emplace_back(i / tp, i % tp);
        }
        groups.push_back(std::move(group));
      }
      break;
    case Policy::kAuto:
    case Policy::kSharded:
      for (const Flow& flow : candidate.flows.flows) {
        GroupReport group;
        group.group_id = static_cast<int>(groups.size());
        group.sender_node = flow.source_node;
        group.world_size = 1 + static_cast<int>(flow.chain.size());
        group.nodes.assign(flow.chain.begin(), flow.chain.end());
        group.bytes = flow.bytes;
        groups.push_back(std::move(group));
      }
      break;
  }
  return groups;
}

std::vector<int> SendersOf(const Candidate& candidate,
                           const UpdateLayout& layout) {
  if (candidate.policy == Policy::kPaired) return candidate.paired.sender_ranks;
  if (candidate.policy == Policy::kBroadcast) {
    return candidate.broadcast.head_ranks;
  }
  std::set<int> ranks;
  for (const Flow& flow : candidate.flows.flows) {
    for (uint32_t b : flow.buckets) ranks.insert(layout.bucket(b).source_rank);
  }
  return std::vector<int>(ranks.begin(), ranks.end());
}

uint64_t DigestOf(const Candidate& candidate, const UpdateLayout& layout) {
  StableHash hash;
  hash.Add(layout.digest);
  hash.Add(absl::string_view(PolicyName(candidate.policy)));
  hash.Add(FlowsDigest(candidate.flows.gather));
  hash.Add(FlowsDigest(candidate.flows.flows));
  return hash.Finish();
}

}  // namespace

absl::StatusOr<PlanReport> DescribePlan(const PlanRequest& request) {
  if (request.catalog == nullptr) {
    return InvalidPlan(kUnknownModel, "no model or catalog is given");
  }
  absl::StatusOr<Cluster> cluster = MakeCluster(request);
  if (!cluster.ok()) return cluster.status();
  absl::StatusOr<UpdateLayout> layout =
      BuildLayout(*request.catalog, cluster->sources, cluster->workers,
                  cluster->counts.bucket_bytes);
  if (!layout.ok()) return layout.status();

  std::vector<Policy> policies = {request.policy};
  if (request.policy == Policy::kAuto) {
    // Among equals the first wins.
    policies = {Policy::kSharded, Policy::kPaired, Policy::kBroadcast};
  }
  PlanReport report;
  absl::StatusOr<Candidate> best = absl::UnknownError("no policy");
  for (Policy policy : policies) {
    absl::StatusOr<Candidate> candidate =
        Weigh(policy, request, *cluster, *layout);
    PolicyReport weighed;
    weighed.policy = policy;
    weighed.status = candidate.status();
    if (candidate.ok()) weighed.total_seconds = candidate->cost.total_seconds;
    report.policies.push_back(std::move(weighed));
    const bool better =
        candidate.ok() && (!best.ok() || candidate->cost.total_seconds <
                                             best->cost.total_seconds);
    if (better || (!best.ok() && !candidate.ok())) best = std::move(candidate);
  }
  if (!best.ok()) return best.status();

  report.requested = request.policy;
  report.policy = best->policy;
  report.sender_ranks = SendersOf(*best, *layout);
  report.groups = GroupsOf(*best, request, *cluster);
  report.num_groups = static_cast<int>(report.groups.size());
  report.num_tensors = request.catalog->size();
  report.num_buckets = layout->bucket_count();
  report.bucket_bytes = cluster->counts.bucket_bytes;
  report.total_bytes = request.catalog->total_bytes();
  report.wire_bytes = best->cost.wire_bytes;
  report.trainer_nodes = cluster->trainer_nodes;
  report.inference_nodes =
      static_cast<int>(cluster->nodes.size()) - cluster->trainer_nodes;
  report.plan_digest = DigestOf(*best, *layout);
  report.cost = std::move(best->cost);
  return report;
}

std::string DigestString(uint64_t digest) {
  return absl::StrFormat("%016x", digest);
}

std::string PlanJson(const PlanReport& report, double plan_seconds) {
  using Json = nlohmann::ordered_json;
  Json json;
  auto text = [](absl::string_view view) { return std::string(view); };
  json["policy"] = text(PolicyName(report.policy));
  json["requested_policy"] = text(PolicyName(report.requested));
  json["sender_ranks"] = report.sender_ranks;
  json["num_groups"] = report.num_groups;
  Json groups = Json::array();
  for (const GroupReport& group : report.groups) {
    Json entry;
    entry["group_id"] = group.group_id;
    if (group.sender_rank >= 0) entry["sender_rank"] = group.sender_rank;
    entry["sender_node"] = group.sender_node;
    entry["world_size"] = group.world_size;
    if (report.policy == Policy::kSharded) {
      entry["nodes"] = group.nodes;
      entry["bytes"] = group.bytes;
    } else {
      Json targets = Json::array();
      for (const auto& target : group.targets) {
        targets.push_back({target.first, target.second});
      }
      entry["targets"] = std::move(targets);
      if (report.policy == Policy::kPaired) entry["ports"] = group.ports;
    }
    groups.push_back(std::move(entry));
  }
  json["groups"] = std::move(groups);
  json["num_tensors"] = report.num_tensors;
  json["num_buckets"] = report.num_buckets;
  json["bucket_bytes"] = report.bucket_bytes;
  json["total_bytes"] = report.total_bytes;
  json["wire_bytes"] = report.wire_bytes;
  json["trainer_nodes"] = report.trainer_nodes;
  json["inference_nodes"] = report.inference_nodes;
  json["predicted_seconds"] = {{"gather", report.cost.gather_seconds},
                               {"snapshot", report.cost.snapshot_seconds},
                               {"transfer", report.cost.transfer_seconds},
                               {"pause", report.cost.pause_seconds},
                               {"total", report.cost.total_seconds}};
  json["bound_by"] = report.cost.bound_by;
  json["lower_bound_seconds"] = report.cost.lower_bound_seconds;
  json["staging_bytes_per_node"] = report.cost.staging_bytes_per_node;
  Json policies = Json::array();
  for (const PolicyReport& weighed : report.policies) {
    Json entry;
    entry["policy"] = text(PolicyName(weighed.policy));
    if (weighed.status.ok()) {
      entry["total_seconds"] = weighed.total_seconds;
    } else {
      entry["reason"] = ReasonOf(weighed.status);
      entry["message"] = text(weighed.status.message());
    }
    policies.push_back(std::move(entry));
  }
  json["policies"] = std::move(policies);
  json["plan_digest"] = DigestString(report.plan_digest);
  json["plan_seconds"] = plan_seconds;
  return json.dump();
}

}  // namespace schedule
}  // namespace weightsync
