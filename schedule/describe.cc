#include "schedule/describe.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// Shards of all trainer ranks, and boxes of the workers of a replica.
constexpr int64_t kMaxShards = int64_t{1} << 23;
// Looks at (rank, tensor) while shards are listed.
constexpr int64_t kMaxLooks = int64_t{1} << 28;
// Workers of a replica: needs are cut along each other.
constexpr int kMaxWidth = 1 << 10;
constexpr int64_t kMaxWorkers = int64_t{1} << 17;
// Pipeline, tensor and expert parallelism, and GPUs of a node.
constexpr int kMaxWays = 1 << 20;

absl::Status TooLarge(absl::string_view message) {
  return PlanError(absl::StatusCode::kResourceExhausted, kPlanTooLarge,
                   message);
}

// The described cluster, as the planning functions take it.
struct Described {
  PlanCluster cluster;
  std::vector<SourceRank> sources;
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

// Expert parallelism that has no experts to deal out is a slip.
absl::Status CheckExperts(const PlanRequest& request) {
  if (request.training_ep == 1 && request.inference_ep == 1) {
    return absl::OkStatus();
  }
  int experts = 0;
  for (const Param& param : request.catalog->params()) {
    experts = std::max(experts, RoleOf(param, request.model).expert + 1);
  }
  for (const auto& ways :
       {std::make_pair("training_ep", request.training_ep),
        std::make_pair("inference_ep", request.inference_ep)}) {
    if (ways.second > std::max(1, experts)) {
      return InvalidPlan(
          kInvalidCount,
          absl::StrCat(ways.first, " is ", ways.second, ", and the model has ",
                       experts, " experts to deal out"));
    }
  }
  return absl::OkStatus();
}

// Whether the plan can be made in seconds, as far as the counts tell.
absl::Status CheckSize(const PlanRequest& request,
                       const TransferCounts& counts) {
  const auto tensors = static_cast<int64_t>(request.catalog->size());
  const int64_t stage_ranks =
      std::max<int64_t>(1, counts.training_gpus / request.training_pp);
  const int64_t columns = request.training_ep;
  // Ranks that hold the same list cost one.
  const bool alike = counts.sharding == TrainingSharding::kDp &&
                     request.training_tp == 1 && columns == 1;
  const int64_t lists = alike ? 1 : stage_ranks;
  const int64_t shards = std::max<int64_t>(1, lists / columns);
  if (shards > kMaxShards / tensors || lists > kMaxLooks / tensors) {
    return TooLarge(absl::StrCat(
        "training_gpus ", counts.training_gpus, " would cut ", tensors,
        " tensors into more than ", kMaxShards,
        " shards; describe expert and pipeline parallelism (training_ep, "
        "training_pp), too, or fewer ranks"));
  }
  const int64_t width = std::max(counts.inference_tp, request.inference_ep);
  if (width > kMaxWidth || width > kMaxShards / tensors) {
    return TooLarge(absl::StrCat(
        "a replica of ", width, " workers (inference_tp, inference_ep) and ",
        tensors, " tensors is more than a plan can have; at most ",
        std::min<int64_t>(kMaxWidth, kMaxShards / tensors), " workers are"));
  }
  const int64_t workers = counts.inference_replicas * width;
  if (workers > kMaxWorkers) {
    return TooLarge(absl::StrCat("inference_replicas ",
                                 counts.inference_replicas, " of ", width,
                                 " workers are ", workers,
                                 " workers; a plan has at most ", kMaxWorkers));
  }
  // What enters nodes, and the gathering beside it.
  const int64_t nodes =
      2 + (counts.training_gpus + workers) / request.gpus_per_node;
  if (request.catalog->total_bytes() >
      std::numeric_limits<int64_t>::max() / 4 / nodes) {
    return InvalidPlan(
        kBytesOverflow,
        absl::StrCat("the catalog's ", request.catalog->total_bytes(),
                     " bytes on ", nodes,
                     " nodes are more than an int64 can count"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Described> MakeCluster(const PlanRequest& request) {
  Described described;
  PlanCluster& cluster = described.cluster;
  absl::StatusOr<TransferCounts> counts =
      CheckConfig(request.config, request.policy);
  if (!counts.ok()) return counts.status();
  cluster.counts = *counts;
  cluster.stages = request.training_pp;
  cluster.gather = counts->sharding != TrainingSharding::kDp;
  const Catalog& catalog = *request.catalog;
  for (const auto& count :
       {std::make_pair("gpus_per_node", request.gpus_per_node),
        std::make_pair("training_pp", request.training_pp),
        std::make_pair("training_tp", request.training_tp),
        std::make_pair("training_ep", request.training_ep),
        std::make_pair("inference_ep", request.inference_ep)}) {
    if (count.second < 1 || count.second > kMaxWays) {
      return InvalidPlan(kInvalidCount,
                         absl::StrCat(count.first, " is ", count.second,
                                      "; it must be between 1 and ", kMaxWays));
    }
  }
  absl::Status ok = CheckExperts(request);
  if (!ok.ok()) return ok;
  ok = CheckSize(request, *counts);
  if (!ok.ok()) return ok;
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
    described.sources.push_back(
        SourceRank{rank, rank / per_node, (*shards)[rank]});
    cluster.rank_nodes.push_back(rank / per_node);
  }
  const int trainer_nodes = (counts->training_gpus + per_node - 1) / per_node;
  const int width = static_cast<int>(needs->size());
  // Expert parallelism may be wider: a replica is as many workers as that.
  cluster.counts.inference_tp = width;
  const int worker_count = counts->inference_replicas * width;
  for (int w = 0; w < worker_count; ++w) {
    cluster.workers.push_back(
        WorkerNeed{w, trainer_nodes + w / per_node, (*needs)[w % width]});
    cluster.worker_ids.emplace_back(w / width, w % width);
  }
  const int node_count =
      trainer_nodes + (worker_count + per_node - 1) / per_node;
  cluster.nodes.resize(node_count);
  for (int n = 0; n < node_count; ++n) {
    cluster.nodes[n].name =
        n < trainer_nodes
            ? absl::StrFormat("trainer-%04d", n)
            : absl::StrFormat("inference-%04d", n - trainer_nodes);
  }
  std::vector<int64_t> need_bytes;
  for (const BoxListRef& list : *needs) {
    need_bytes.push_back(BytesOf(catalog, *list));
  }
  cluster.apply_bytes.assign(node_count, 0);
  for (const WorkerNeed& w : cluster.workers) {
    cluster.apply_bytes[w.node] += need_bytes[w.worker % width];
  }
  return described;
}

std::vector<GroupReport> GroupsOf(const PolicyPlan& plan,
                                  const PlanCluster& cluster) {
  std::vector<GroupReport> groups;
  const auto ranks = static_cast<int>(cluster.rank_nodes.size());
  switch (plan.policy) {
    case Policy::kPaired: {
      // Targets are numbered through; a real cluster's replicas may differ.
      const int tp = cluster.counts.inference_tp;
      for (const PairedGroup& paired : plan.paired.groups) {
        GroupReport group;
        group.group_id = paired.group_id;
        group.sender_rank = paired.sender_rank;
        group.sender_node = cluster.rank_nodes[paired.sender_rank % ranks];
        group.world_size = paired.world_size;
        for (const PairedTarget& target : paired.targets) {
          group.targets.push_back(
              cluster.worker_ids[target.replica * tp + target.tp]);
          if (target.port > 0) group.ports.push_back(target.port);
        }
        groups.push_back(std::move(group));
      }
      break;
    }
    case Policy::kBroadcast:
      for (int head : plan.broadcast.head_ranks) {
        GroupReport group;
        group.group_id = static_cast<int>(groups.size());
        group.sender_rank = head;
        group.sender_node = cluster.rank_nodes[head % ranks];
        group.world_size = plan.broadcast.world_size;
        group.targets = cluster.worker_ids;
        groups.push_back(std::move(group));
      }
      break;
    case Policy::kAuto:
    case Policy::kSharded:
      for (const Flow& flow : plan.flows.flows) {
        GroupReport group;
        group.group_id = static_cast<int>(groups.size());
        group.sender_node = flow.source_node;
        group.world_size = 1 + static_cast<int>(flow.chain.size());
        group.nodes.assign(flow.chain.begin(), flow.chain.end());
        group.bytes = flow.bytes;
        groups.push_back(std::move(group));
      }
      return groups;
  }
  absl::flat_hash_map<int32_t, int64_t> sent;  // by node
  for (const Flow& flow : plan.flows.flows) {
    sent[flow.source_node] += flow.bytes;
  }
  for (GroupReport& group : groups) group.bytes = sent[group.sender_node];
  return groups;
}

// Fills what is not sent over any group.
void CountInside(const PolicyPlan& plan, const PlanCluster& cluster,
                 PlanReport* report) {
  report->beside_sender.assign(cluster.nodes.size(), 0);
  std::map<std::pair<int, int>, int32_t> index_of;
  for (size_t i = 0; i < cluster.worker_ids.size(); ++i) {
    index_of[cluster.worker_ids[i]] = static_cast<int32_t>(i);
  }
  const auto node_of = [&](const std::pair<int, int>& target) {
    return cluster.workers[static_cast<size_t>(index_of.at(target))].node;
  };
  const auto count = [&](int32_t worker) {
    const int32_t node = cluster.workers[static_cast<size_t>(worker)].node;
    ++report->beside_sender[static_cast<size_t>(node)];
    report->beside_workers.push_back(worker);
  };
  if (plan.policy == Policy::kPaired) {
    for (const GroupReport& group : report->groups) {
      int elsewhere = 0;
      for (const std::pair<int, int>& target : group.targets) {
        if (node_of(target) == group.sender_node) {
          count(index_of.at(target));
        } else {
          ++elsewhere;
        }
      }
      if (elsewhere == 0 && !group.targets.empty()) ++report->inner_groups;
    }
    return;
  }
  std::set<int32_t> senders;
  for (const GroupReport& group : report->groups) {
    senders.insert(group.sender_node);
    bool inner = true;
    for (int node : group.nodes) inner = inner && node == group.sender_node;
    for (const std::pair<int, int>& target : group.targets) {
      inner = inner && node_of(target) == group.sender_node;
    }
    if (inner) ++report->inner_groups;
  }
  // A bucket that nobody elsewhere needs has no flow at all.
  for (int32_t node : cluster.rank_nodes) senders.insert(node);
  for (size_t i = 0; i < cluster.workers.size(); ++i) {
    if (senders.count(cluster.workers[i].node) > 0)
      count(static_cast<int32_t>(i));
  }
}

std::vector<int> SendersOf(const PolicyPlan& plan, const UpdateLayout& layout) {
  if (plan.policy == Policy::kPaired) return plan.paired.sender_ranks;
  if (plan.policy == Policy::kBroadcast) return plan.broadcast.head_ranks;
  std::set<int> ranks;
  for (const Flow& flow : plan.flows.flows) {
    for (uint32_t b : flow.buckets) ranks.insert(layout.bucket(b).source_rank);
  }
  return std::vector<int>(ranks.begin(), ranks.end());
}

absl::StatusOr<WorkerReport> ListCopies(const Catalog& catalog,
                                        const PlanCluster& cluster,
                                        const UpdateLayout& layout,
                                        const PolicyPlan& plan,
                                        std::pair<int, int> id) {
  const auto found =
      std::find(cluster.worker_ids.begin(), cluster.worker_ids.end(), id);
  if (found == cluster.worker_ids.end()) {
    return InvalidPlan(
        kInvalidCount,
        absl::StrCat("there is no worker ", id.first, ":", id.second,
                     "; replicas are 0 to ",
                     cluster.counts.inference_replicas - 1,
                     ", their workers 0 to ", cluster.counts.inference_tp - 1));
  }
  const WorkerNeed& worker =
      cluster.workers[found - cluster.worker_ids.begin()];
  WorkerReport report;
  report.replica = id.first;
  report.tp = id.second;
  report.node = worker.node;
  // Who hands each bucket to the worker's node.
  std::vector<int> from(layout.bucket_count(), worker.node);
  for (const std::vector<Flow>* flows :
       {&plan.flows.gather, &plan.flows.flows}) {
    for (const Flow& flow : *flows) {
      int before = flow.source_node;
      for (int32_t node : flow.chain) {
        if (node == worker.node) {
          for (uint32_t b : flow.buckets) from[b] = before;
        }
        before = node;
      }
    }
  }
  std::vector<std::vector<const Box*>> needs(catalog.size());
  for (const OrdinalBox& need : worker.boxes->boxes()) {
    needs[need.ordinal].push_back(&need.box);
  }
  for (uint32_t b : BucketsFor(layout, worker.boxes->boxes())) {
    for (const Piece& piece : layout.pieces(b)) {
      for (const Box* need : needs[piece.ordinal]) {
        CopyReport copy;
        if (!Intersect(*need, piece.box, &copy.box)) continue;
        const Param& param = catalog.param(piece.ordinal);
        copy.ordinal = piece.ordinal;
        copy.parameter = param.name;
        copy.bytes = copy.box.Volume() * DTypeSize(param.dtype);
        copy.bucket = b;
        copy.source_rank = layout.bucket(b).source_rank;
        copy.from_node = from[b];
        report.copies.push_back(std::move(copy));
      }
    }
  }
  return report;
}

}  // namespace

PlanReport ReportPlan(const Catalog& catalog, const PlanCluster& cluster,
                      const UpdateLayout& layout, Policy requested,
                      ChosenPlan chosen) {
  PlanReport report;
  report.requested = requested;
  report.policy = chosen.plan.policy;
  report.policies = std::move(chosen.policies);
  report.sender_ranks = SendersOf(chosen.plan, layout);
  report.groups = GroupsOf(chosen.plan, cluster);
  report.num_groups = static_cast<int>(report.groups.size());
  CountInside(chosen.plan, cluster, &report);
  report.num_tensors = catalog.size();
  report.num_buckets = layout.bucket_count();
  report.bucket_bytes = layout.table->bucket_bytes;
  report.total_bytes = catalog.total_bytes();
  report.wire_bytes = chosen.plan.cost.wire_bytes;
  const std::set<int32_t> trainers(cluster.rank_nodes.begin(),
                                   cluster.rank_nodes.end());
  std::set<int32_t> inference;
  for (const WorkerNeed& worker : cluster.workers) {
    inference.insert(worker.node);
  }
  report.trainer_nodes = static_cast<int>(trainers.size());
  report.inference_nodes = static_cast<int>(inference.size());
  report.plan_digest = PlanDigest(chosen.plan, layout);
  report.cost = std::move(chosen.plan.cost);
  for (const NodeLabels& node : cluster.nodes) {
    report.nodes.push_back(node.name);
  }
  return report;
}

absl::StatusOr<PlanReport> DescribePlan(const PlanRequest& request) {
  if (request.catalog == nullptr) {
    return InvalidPlan(kUnknownModel, "no model or catalog is given");
  }
  if (request.catalog->size() == 0) {
    return InvalidPlan(kInvalidParameter,
                       "the catalog has no parameters; there is nothing to "
                       "plan");
  }
  absl::StatusOr<Described> described = MakeCluster(request);
  if (!described.ok()) return described.status();
  const PlanCluster& cluster = described->cluster;
  absl::StatusOr<UpdateLayout> layout =
      BuildLayout(*request.catalog, described->sources, cluster.workers,
                  cluster.counts.bucket_bytes);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<ChosenPlan> chosen =
      ChoosePlan(request.policy, cluster, *layout, request.rates);
  if (!chosen.ok()) return chosen.status();
  std::vector<WorkerReport> workers;
  for (const std::pair<int, int>& id : request.workers) {
    absl::StatusOr<WorkerReport> worker =
        ListCopies(*request.catalog, cluster, *layout, chosen->plan, id);
    if (!worker.ok()) return worker.status();
    workers.push_back(*std::move(worker));
  }
  PlanReport report = ReportPlan(*request.catalog, cluster, *layout,
                                 request.policy, *std::move(chosen));
  report.workers = std::move(workers);
  return report;
}

std::string ExplainPolicies(const PlanReport& report) {
  std::string text = absl::StrCat(PolicyName(report.requested), ":");
  const char* between = " ";
  for (const PolicyReport& weighed : report.policies) {
    if (!weighed.status.ok()) continue;
    absl::StrAppend(&text, between, PolicyName(weighed.policy),
                    weighed.at_least ? " at least " : " ",
                    absl::StrFormat("%.4g s", weighed.total_seconds));
    between = ", ";
  }
  for (const PolicyReport& weighed : report.policies) {
    if (weighed.status.ok()) continue;
    absl::StrAppend(&text, "; ", PolicyName(weighed.policy), " cannot be had (",
                    ReasonOf(weighed.status), "): ", weighed.status.message());
  }
  return text;
}

std::string ExplainPaths(const PlanReport& report) {
  struct Way {
    int workers = 0;
    std::vector<std::string> nodes;
  };
  std::map<std::string, Way> ways;
  const auto add = [&](const char* by, int workers, const std::string& node) {
    if (workers == 0) return;
    ways[by].workers += workers;
    ways[by].nodes.push_back(node);
  };
  for (size_t i = 0; i < report.beside_sender.size(); ++i) {
    const int straight = report.gpu_to_gpu.empty() ? 0 : report.gpu_to_gpu[i];
    add("CUDA IPC for what waits on GPUs", straight, report.nodes[i]);
    // By IPC from the trainers' GPUs, and by way of host memory to the workers:
    // with a store there, and to those who cannot open the GPUs'.
    add(report.on_gpus.empty() ? "shared memory, or CUDA IPC from GPUs"
        : report.on_gpus[i]    ? "CUDA IPC and shared memory"
                               : "shared memory",
        report.beside_sender[i] - straight, report.nodes[i]);
  }
  if (ways.empty()) return "";
  std::string text = "inside a node, over no group:";
  const char* between = " ";
  for (const auto& [by, way] : ways) {
    // A hundred names help nobody.
    constexpr size_t kShown = 4;
    const std::vector<std::string> shown(
        way.nodes.begin(),
        way.nodes.begin() +
            static_cast<std::ptrdiff_t>(std::min(kShown, way.nodes.size())));
    absl::StrAppend(
        &text, between, way.workers, way.workers == 1 ? " worker" : " workers",
        " beside the sender by ", by, " (", absl::StrJoin(shown, ", "),
        way.nodes.size() > kShown ? ", ...)" : ")");
    between = ", ";
  }
  if (report.inner_groups > 0) {
    absl::StrAppend(&text, "; ", report.inner_groups, " of ", report.num_groups,
                    report.num_groups == 1 ? " group" : " groups",
                    " would have nobody elsewhere, and ",
                    report.inner_groups == 1 ? "is" : "are", " not made");
  }
  return text;
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
    entry["sender_node"] = report.nodes[group.sender_node];
    entry["world_size"] = group.world_size;
    if (report.policy == Policy::kSharded) {
      Json chain = Json::array();
      for (int node : group.nodes) chain.push_back(report.nodes[node]);
      entry["nodes"] = std::move(chain);
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
      // Also of those that were only bounded: "at_least".
      entry["total_seconds"] = weighed.total_seconds;
      entry["at_least"] = weighed.at_least;
    } else {
      entry["reason"] = ReasonOf(weighed.status);
      entry["message"] = text(weighed.status.message());
    }
    policies.push_back(std::move(entry));
  }
  json["policies"] = std::move(policies);
  if (!report.workers.empty()) {
    Json workers = Json::array();
    for (const WorkerReport& worker : report.workers) {
      Json copies = Json::array();
      for (const CopyReport& copy : worker.copies) {
        copies.push_back(
            {{"parameter", copy.parameter},
             {"offset", std::vector<int64_t>(copy.box.offset.begin(),
                                             copy.box.offset.end())},
             {"extent", std::vector<int64_t>(copy.box.extent.begin(),
                                             copy.box.extent.end())},
             {"bytes", copy.bytes},
             {"bucket", copy.bucket},
             {"source_rank", copy.source_rank},
             {"from_node", report.nodes[copy.from_node]}});
      }
      workers.push_back({{"replica", worker.replica},
                         {"tp", worker.tp},
                         {"node", report.nodes[worker.node]},
                         {"copies", std::move(copies)}});
    }
    json["workers"] = std::move(workers);
  }
  json["plan_digest"] = DigestString(report.plan_digest);
  json["plan_seconds"] = plan_seconds;
  return json.dump();
}

}  // namespace schedule
}  // namespace weightsync
