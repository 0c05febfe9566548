#include "daemon/coordinator/update_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/node/convert.h"

namespace weightsync {
namespace daemon {
namespace {

// Smaller movements measure latencies, not rates.
constexpr int64_t kTellingBytes = int64_t{4} << 20;
constexpr absl::Duration kTellingTime = absl::Milliseconds(2);
// Under AUTO an update weighs only what could win.
constexpr int64_t kWeighedForPeople = 0;

void Mean(double sample, bool* known, double* rate) {
  *rate = *known ? (*rate + sample) / 2 : sample;
  *known = true;
}

v1::Flow ToProto(const KnownLayout& known, const schedule::Flow& flow,
                 const std::string& id) {
  v1::Flow out;
  out.set_flow_id(id);
  out.add_members()->set_node(known.labels[flow.source_node].name);
  for (int32_t node : flow.chain) {
    out.add_members()->set_node(known.labels[node].name);
  }
  for (uint32_t bucket : flow.buckets) {
    out.add_buckets(static_cast<int32_t>(bucket));
  }
  return out;
}

// Who gets each bucket, chains from its owner; without those excluded.
std::vector<schedule::Flow> FromOwners(const KnownLayout& known,
                                       const schedule::PolicyPlan& plan,
                                       const FlowOptions& options) {
  std::vector<std::set<int32_t>> receivers(known.layout.plan.bucket_count());
  for (const auto* flows : {&plan.flows.gather, &plan.flows.flows}) {
    for (const schedule::Flow& flow : *flows) {
      for (uint32_t bucket : flow.buckets) {
        for (int32_t node : flow.chain) {
          if (!options.excluded[node]) receivers[bucket].insert(node);
        }
      }
    }
  }
  std::map<std::pair<int32_t, std::vector<int32_t>>, schedule::Flow> by_chain;
  for (uint32_t b = 0; b < known.layout.plan.bucket_count(); ++b) {
    const schedule::Bucket& bucket = known.layout.plan.bucket(b);
    if (receivers[b].empty() || options.excluded[bucket.source_node]) continue;
    std::vector<int32_t> nodes(receivers[b].begin(), receivers[b].end());
    schedule::Flow& flow = by_chain[{bucket.source_node, std::move(nodes)}];
    flow.source_node = bucket.source_node;
    flow.need_class = bucket.need_class;
    flow.buckets.push_back(b);
    flow.bytes += bucket.bytes;
  }
  std::vector<schedule::Flow> out;
  int turn = 0;
  for (auto& entry : by_chain) {
    schedule::Flow& flow = entry.second;
    flow.chain = AvoidEdges(flow.source_node,
                            schedule::ChainOrder(known.labels, flow.source_node,
                                                 entry.first.second, turn++),
                            options.bad_edges);
    out.push_back(std::move(flow));
  }
  return out;
}

}  // namespace

// ---- Rates ----

absl::Duration RateBook::Round(const std::string& model,
                               const std::string& phase) const {
  auto it = rounds_.find({model, phase});
  return it == rounds_.end() ? absl::Seconds(rates_.control_latency)
                             : it->second;
}

void RateBook::Learn(const Seen& seen) {
  const auto rate = [](int64_t bytes, absl::Duration time) {
    return static_cast<double>(bytes) / absl::ToDoubleSeconds(time);
  };
  const auto telling = [](int64_t bytes, absl::Duration time) {
    return bytes >= kTellingBytes && time >= kTellingTime;
  };
  // A transfer that waited for the copy out says nothing of links.
  if (telling(seen.link_bytes, seen.transfer) &&
      seen.transfer > seen.snapshot) {
    Mean(rate(seen.link_bytes, seen.transfer), &knows_link_, &rates_.link);
  }
  if (telling(seen.snapshot_bytes, seen.snapshot)) {
    Mean(rate(seen.snapshot_bytes, seen.snapshot), &knows_copy_, &rates_.copy);
  }
  if (telling(seen.apply_bytes, seen.apply)) {
    Mean(rate(seen.apply_bytes, seen.apply), &knows_apply_, &rates_.apply_copy);
  }
  for (const auto& round : seen.rounds) {
    auto inserted =
        rounds_.try_emplace({seen.model, round.first}, round.second);
    absl::Duration& known = inserted.first->second;
    if (!inserted.second) known = (known + round.second) / 2;
  }
}

// ---- Plans ----

schedule::PlanCluster ClusterOf(const KnownLayout& known) {
  const v1::DefineLayout& define = known.define;
  const schedule::Catalog& catalog = known.layout.catalog;
  schedule::PlanCluster cluster;
  cluster.nodes = known.labels;
  cluster.gather = true;
  cluster.apply_bytes.assign(known.labels.size(), 0);
  std::map<int32_t, int32_t> ranks;
  for (const v1::LayoutSource& source : define.sources()) {
    ranks[source.rank()] = source.node();
  }
  for (const auto& rank : ranks) cluster.rank_nodes.push_back(rank.second);
  // Only nodes that own buckets take part in every update to its end; a rank
  // elsewhere leaves its sending to the next that is on one.
  const auto count = static_cast<int>(cluster.rank_nodes.size());
  const std::vector<int32_t> said = cluster.rank_nodes;
  for (int i = 0; i < count; ++i) {
    for (int next = 0; next < count; ++next) {
      const int32_t node = said[(i + next) % count];
      if (!known.source[node]) continue;
      cluster.rank_nodes[i] = node;
      break;
    }
  }
  std::map<std::string, int> replicas;
  for (const v1::LayoutWorker& worker : define.workers()) {
    const int replica =
        replicas
            .try_emplace(worker.replica(), static_cast<int>(replicas.size()))
            .first->second;
    std::vector<schedule::OrdinalBox> boxes;
    for (const v1::OrdinalBox& box : worker.boxes()) {
      const schedule::Param& param = catalog.param(box.ordinal());
      auto parsed =
          BoxFromProto(box.has_box(), box.box(), param.shape, param.name);
      if (!parsed.ok()) continue;  // the layout could not have been made
      schedule::OrdinalBox out;
      out.ordinal = static_cast<uint32_t>(box.ordinal());
      out.box = *std::move(parsed);
      cluster.apply_bytes[worker.node()] +=
          out.box.Volume() * schedule::DTypeSize(param.dtype);
      boxes.push_back(std::move(out));
    }
    cluster.workers.push_back({static_cast<int32_t>(cluster.workers.size()),
                               worker.node(),
                               schedule::MakeBoxList(std::move(boxes))});
    cluster.worker_ids.emplace_back(replica, worker.worker_index());
  }
  // Replicas may differ in size: targets are numbered through.
  cluster.counts.sharding = schedule::TrainingSharding::kFsdp;
  cluster.counts.training_gpus = count;
  cluster.counts.inference_replicas = static_cast<int>(cluster.workers.size());
  cluster.counts.inference_tp = 1;
  cluster.counts.bucket_bytes = define.bucket_bytes();
  return cluster;
}

absl::StatusOr<schedule::ChosenPlan> PlanLayout(const KnownLayout& known,
                                                schedule::Policy policy,
                                                const schedule::Rates& rates) {
  const schedule::PlanCluster cluster = ClusterOf(known);
  // Without workers nothing moves, and there is nothing to choose.
  if (cluster.workers.empty()) policy = schedule::Policy::kSharded;
  return schedule::ChoosePlan(policy, cluster, known.layout.plan, rates,
                              kWeighedForPeople);
}

absl::StatusOr<schedule::PlanReport> PlanOf(const PlanInputs& inputs) {
  std::shared_ptr<const KnownLayout> known = inputs.known;
  if (known == nullptr) {
    auto made = MakeKnownLayout(inputs.define);
    if (!made.ok()) return made.status();
    known = *std::move(made);
  }
  const schedule::PlanCluster cluster = ClusterOf(*known);
  // Who asks wants to see what the others would take, too.
  auto chosen = schedule::ChoosePlan(inputs.policy, cluster, known->layout.plan,
                                     inputs.rates);
  if (!chosen.ok()) return chosen.status();
  schedule::PlanReport report =
      schedule::ReportPlan(known->layout.catalog, cluster, known->layout.plan,
                           inputs.policy, *std::move(chosen));
  for (const std::string& node : report.nodes) {
    report.on_gpus.push_back(inputs.gpu_nodes.count(node) > 0);
  }
  report.gpu_to_gpu.assign(report.nodes.size(), 0);
  for (const int32_t index : report.beside_workers) {
    // In the order of the cluster's.
    const v1::LayoutWorker& worker = known->define.workers(index);
    if (inputs.gpu_to_gpu.count({worker.replica(), worker.worker_index()}) > 0)
      ++report.gpu_to_gpu[static_cast<size_t>(
          cluster.workers[static_cast<size_t>(index)].node)];
  }
  return report;
}

std::vector<v1::Flow> FlowsOfPlan(const KnownLayout& known,
                                  const schedule::PolicyPlan& plan,
                                  const FlowOptions& options) {
  std::vector<v1::Flow> flows;
  const bool plain = options.bad_edges.empty() &&
                     std::find(options.excluded.begin(), options.excluded.end(),
                               true) == options.excluded.end();
  // Numbers, after what tells people where a flow comes from.
  const auto add = [&](const std::vector<schedule::Flow>& planned,
                       absl::string_view kind) {
    for (const schedule::Flow& flow : planned) {
      flows.push_back(ToProto(known, flow,
                              absl::StrCat(known.labels[flow.source_node].name,
                                           "/", kind, flows.size())));
    }
  };
  if (plain) {
    add(plan.flows.gather, "gather-");
    add(plan.flows.flows, "");
  } else {
    add(FromOwners(known, plan, options), "");
  }
  return flows;
}

std::map<std::string, absl::Duration> PredictPhases(
    const schedule::CostEstimate& cost, const std::string& model,
    const RateBook& book) {
  std::map<std::string, absl::Duration> phases;
  const double round = book.rates().control_latency;
  phases["snapshot"] = absl::Seconds(cost.snapshot_seconds);
  phases["transfer"] = absl::Seconds(
      std::max(cost.snapshot_seconds, cost.transfer_seconds) + round);
  phases["apply"] = absl::Seconds(cost.apply_seconds + round);
  for (const char* phase : {"prepare", "pause", "commit", "resume"}) {
    phases[phase] = book.Round(model, phase);
  }
  absl::Duration total;
  for (const auto& phase : phases) {
    if (phase.first != "snapshot") total += phase.second;
  }
  phases["total"] = total;
  return phases;
}

int64_t BusiestLink(const schedule::CostEstimate& cost) {
  int64_t bytes = 0;
  for (const schedule::NodeCost& node : cost.nodes) {
    bytes = std::max({bytes, node.in_bytes, node.out_bytes});
  }
  return bytes;
}

}  // namespace daemon
}  // namespace weightsync
