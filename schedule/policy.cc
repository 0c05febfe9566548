#include "schedule/policy.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

absl::Status CheckNode(int32_t node, size_t node_count) {
  if (node >= 0 && node < static_cast<int32_t>(node_count)) {
    return absl::OkStatus();
  }
  return InvalidPlan(kInvalidTopology,
                     absl::StrCat("node number ", node, " is not among the ",
                                  node_count, " nodes given"));
}

void AddBucket(const UpdateLayout& layout, uint32_t b, Flow* flow) {
  flow->buckets.push_back(b);
  flow->bytes += layout.bucket(b).bytes;
}

void SortOnce(std::vector<int32_t>* nodes) {
  std::sort(nodes->begin(), nodes->end());
  nodes->erase(std::unique(nodes->begin(), nodes->end()), nodes->end());
}

// Flows that bring bucket b to wanted[b], from its owner.
absl::StatusOr<std::vector<Flow>> Gather(
    const UpdateLayout& layout, absl::Span<const NodeLabels> nodes,
    std::vector<std::vector<int32_t>>* wanted) {
  std::map<std::pair<int32_t, std::vector<int32_t>>, Flow> flows;
  int64_t hops = 0;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const int32_t owner = layout.bucket(b).source_node;
    std::vector<int32_t>& to = (*wanted)[b];
    SortOnce(&to);
    to.erase(std::remove(to.begin(), to.end(), owner), to.end());
    if (to.empty()) continue;
    const auto inserted = flows.try_emplace({owner, to});
    if (inserted.second) {
      hops += static_cast<int64_t>(to.size());
      const absl::Status ok = CheckHops(hops);
      if (!ok.ok()) return ok;
    }
    Flow& flow = inserted.first->second;
    flow.source_node = owner;
    flow.need_class = layout.bucket(b).need_class;
    AddBucket(layout, b, &flow);
  }
  std::vector<Flow> out;
  int turn = 0;
  for (auto& entry : flows) {
    entry.second.chain =
        ChainOrder(nodes, entry.first.first, entry.first.second, turn++);
    out.push_back(std::move(entry.second));
  }
  AssignWaves(nodes.size(), &out);
  return out;
}

}  // namespace

int64_t ArrivalCount(const UpdateLayout& layout) {
  int64_t count = 0;
  for (const Bucket& bucket : layout.table->buckets) {
    count += static_cast<int64_t>(layout.classes[bucket.need_class].size());
  }
  return count;
}

absl::StatusOr<PolicyFlows> RoutePaired(const UpdateLayout& layout,
                                        absl::Span<const NodeLabels> nodes,
                                        absl::Span<const PairedRoute> routes,
                                        bool gather) {
  for (const PairedRoute& route : routes) {
    for (int32_t node : {route.sender_node, route.node}) {
      absl::Status ok = CheckNode(node, nodes.size());
      if (!ok.ok()) return ok;
    }
  }
  for (const Bucket& bucket : layout.table->buckets) {
    absl::Status ok = CheckNode(bucket.source_node, nodes.size());
    if (!ok.ok()) return ok;
  }
  const int64_t arrival_count = ArrivalCount(layout);
  if (arrival_count > kMaxArrivals) {
    return PlanError(
        absl::StatusCode::kResourceExhausted, kPlanTooLarge,
        absl::StrCat("PAIRED would bring ", arrival_count,
                     " buckets to nodes one by one; a plan may bring ",
                     kMaxArrivals,
                     ": use SHARDED, or larger buckets (bucket_size)"));
  }
  // Workers with equal boxes need the same buckets.
  absl::flat_hash_map<const BoxList*, std::vector<uint32_t>> buckets_of;
  // By receiving node: what is needed there and who may send it, each once.
  std::vector<std::tuple<int32_t, const BoxList*, int32_t>> offers;
  for (const PairedRoute& route : routes) {
    if (route.boxes == nullptr) continue;
    auto inserted = buckets_of.try_emplace(route.boxes.get());
    if (inserted.second) {
      inserted.first->second = BucketsFor(layout, route.boxes->boxes());
    }
    offers.emplace_back(route.node, route.boxes.get(), route.sender_node);
  }
  std::sort(offers.begin(), offers.end());
  offers.erase(std::unique(offers.begin(), offers.end()), offers.end());
  // Who sends bucket b to a node; its owner has it already.
  struct Arrival {
    int32_t node;
    uint32_t bucket;
    int32_t sender;
  };
  std::vector<Arrival> arrivals;
  arrivals.reserve(arrival_count);
  std::vector<std::vector<int32_t>> senders(layout.bucket_count());
  std::vector<std::pair<uint32_t, int32_t>> choices;  // bucket, sender
  for (size_t at = 0; at < offers.size();) {
    const int32_t node = std::get<0>(offers[at]);
    choices.clear();
    for (; at < offers.size() && std::get<0>(offers[at]) == node; ++at) {
      for (uint32_t b : buckets_of[std::get<1>(offers[at])]) {
        choices.emplace_back(b, std::get<2>(offers[at]));
      }
    }
    if (!std::is_sorted(choices.begin(), choices.end())) {
      std::sort(choices.begin(), choices.end());
    }
    choices.erase(std::unique(choices.begin(), choices.end()), choices.end());
    absl::flat_hash_map<int32_t, int64_t> load;
    for (size_t i = 0; i < choices.size();) {
      const uint32_t b = choices[i].first;
      int32_t best = choices[i].second;
      for (++i; i < choices.size() && choices[i].first == b; ++i) {
        const int32_t sender = choices[i].second;
        if (load[sender] < load[best]) best = sender;
      }
      if (layout.bucket(b).source_node == node) continue;
      load[best] += layout.bucket(b).bytes;
      senders[b].push_back(best);
      arrivals.push_back({node, b, best});
    }
  }
  for (std::vector<int32_t>& of_bucket : senders) SortOnce(&of_bucket);
  // A node that sends a bucket holds it, or gathers it, and must not be given
  // it a second time.
  std::vector<std::vector<int32_t>> wanted(layout.bucket_count());
  std::map<std::pair<int32_t, int32_t>, Flow> flows;  // (node, sender)
  for (const Arrival& arrival : arrivals) {
    const std::vector<int32_t>& also = senders[arrival.bucket];
    if (std::binary_search(also.begin(), also.end(), arrival.node)) {
      wanted[arrival.bucket].push_back(arrival.node);
      continue;
    }
    wanted[arrival.bucket].push_back(arrival.sender);
    Flow& flow = flows[{arrival.node, arrival.sender}];
    flow.source_node = arrival.sender;
    flow.chain = {arrival.node};
    flow.need_class = layout.bucket(arrival.bucket).need_class;
    AddBucket(layout, arrival.bucket, &flow);
  }
  PolicyFlows result;
  for (auto& entry : flows) result.flows.push_back(std::move(entry.second));
  AssignWaves(nodes.size(), &result.flows);
  if (gather) {
    auto gathered = Gather(layout, nodes, &wanted);
    if (!gathered.ok()) return gathered.status();
    result.gather = *std::move(gathered);
  }
  return result;
}

absl::StatusOr<PolicyFlows> RouteBroadcast(
    const UpdateLayout& layout, absl::Span<const NodeLabels> nodes,
    absl::Span<const int32_t> head_of_node, bool gather) {
  // By head, class, and the owner where it is in the class: it has the bytes.
  std::map<std::tuple<int32_t, int32_t, int32_t>, Flow> moved;
  std::vector<std::vector<int32_t>> wanted(layout.bucket_count());
  for (const auto& members : layout.classes) {
    for (int32_t node : members) {
      absl::Status ok = CheckNode(node, nodes.size());
      if (!ok.ok()) return ok;
    }
  }
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const Bucket& bucket = layout.bucket(b);
    const std::vector<int32_t>& members = layout.classes[bucket.need_class];
    if (members.empty()) continue;
    absl::Status ok = CheckNode(bucket.source_node,
                                std::min(nodes.size(), head_of_node.size()));
    if (!ok.ok()) return ok;
    const int32_t head = head_of_node[bucket.source_node];
    ok = CheckNode(head, nodes.size());
    if (!ok.ok()) return ok;
    const bool owner_needs =
        std::binary_search(members.begin(), members.end(), bucket.source_node);
    const bool head_needs =
        std::binary_search(members.begin(), members.end(), head);
    const size_t have_it =
        bucket.source_node == head ? head_needs : owner_needs + head_needs;
    if (members.size() > have_it) {
      Flow& flow = moved[{head, bucket.need_class,
                          owner_needs ? bucket.source_node : -1}];
      flow.source_node = head;
      flow.need_class = bucket.need_class;
      AddBucket(layout, b, &flow);
    } else if (!head_needs) {
      continue;  // nobody waits for the head
    }
    wanted[b].push_back(head);
  }
  PolicyFlows result;
  int64_t hops = 0;
  for (const auto& entry : moved) {
    hops +=
        static_cast<int64_t>(layout.classes[entry.second.need_class].size());
  }
  const absl::Status ok = CheckHops(hops);
  if (!ok.ok()) return ok;
  for (auto& entry : moved) {
    Flow& flow = entry.second;
    std::vector<int32_t> receivers;
    for (int32_t node : layout.classes[flow.need_class]) {
      if (node != flow.source_node && node != std::get<2>(entry.first)) {
        receivers.push_back(node);
      }
    }
    flow.chain = ChainOrder(nodes, flow.source_node, receivers, 0);
    result.flows.push_back(std::move(flow));
  }
  AssignWaves(nodes.size(), &result.flows);
  if (gather) {
    auto gathered = Gather(layout, nodes, &wanted);
    if (!gathered.ok()) return gathered.status();
    result.gather = *std::move(gathered);
  }
  return result;
}

}  // namespace schedule
}  // namespace weightsync
