#include "schedule/policy.h"

#include <algorithm>
#include <map>
#include <set>
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

// Flows that bring bucket b to wanted[b], from its owner.
std::vector<Flow> Gather(const UpdateLayout& layout,
                         absl::Span<const NodeLabels> nodes,
                         const std::vector<std::set<int32_t>>& wanted) {
  std::map<std::pair<int32_t, std::vector<int32_t>>, Flow> flows;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const int32_t owner = layout.bucket(b).source_node;
    std::vector<int32_t> to;
    for (int32_t node : wanted[b]) {
      if (node != owner) to.push_back(node);
    }
    if (to.empty()) continue;
    Flow& flow = flows[{owner, to}];
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
  // Workers with equal boxes need the same buckets.
  absl::flat_hash_map<const BoxList*, std::vector<uint32_t>> buckets_of;
  // Per receiving node and bucket, the senders that may bring it.
  std::map<int32_t, std::map<uint32_t, std::set<int32_t>>> choices;
  for (const PairedRoute& route : routes) {
    if (route.boxes == nullptr) continue;
    auto inserted = buckets_of.try_emplace(route.boxes.get());
    if (inserted.second) {
      inserted.first->second = BucketsFor(layout, route.boxes->boxes());
    }
    std::map<uint32_t, std::set<int32_t>>& of_node = choices[route.node];
    for (uint32_t b : inserted.first->second) {
      of_node[b].insert(route.sender_node);
    }
  }
  // Who sends bucket b to a node; its owner has it already.
  struct Arrival {
    int32_t node;
    uint32_t bucket;
    int32_t sender;
  };
  std::vector<Arrival> arrivals;
  std::vector<std::set<int32_t>> senders(layout.bucket_count());
  for (const auto& node : choices) {
    std::map<int32_t, int64_t> load;
    for (const auto& bucket : node.second) {
      if (layout.bucket(bucket.first).source_node == node.first) continue;
      int32_t best = *bucket.second.begin();
      for (int32_t sender : bucket.second) {
        if (load[sender] < load[best]) best = sender;
      }
      load[best] += layout.bucket(bucket.first).bytes;
      senders[bucket.first].insert(best);
      arrivals.push_back({node.first, bucket.first, best});
    }
  }
  // A node that sends a bucket holds it, or gathers it, and must not be given
  // it a second time.
  std::vector<std::set<int32_t>> wanted(layout.bucket_count());
  std::map<std::pair<int32_t, int32_t>, Flow> flows;  // (node, sender)
  for (const Arrival& arrival : arrivals) {
    if (senders[arrival.bucket].count(arrival.node) > 0) {
      wanted[arrival.bucket].insert(arrival.node);
      continue;
    }
    wanted[arrival.bucket].insert(arrival.sender);
    Flow& flow = flows[{arrival.node, arrival.sender}];
    flow.source_node = arrival.sender;
    flow.chain = {arrival.node};
    flow.need_class = layout.bucket(arrival.bucket).need_class;
    AddBucket(layout, arrival.bucket, &flow);
  }
  PolicyFlows result;
  for (auto& entry : flows) result.flows.push_back(std::move(entry.second));
  AssignWaves(nodes.size(), &result.flows);
  if (gather) result.gather = Gather(layout, nodes, wanted);
  return result;
}

absl::StatusOr<PolicyFlows> RouteBroadcast(
    const UpdateLayout& layout, absl::Span<const NodeLabels> nodes,
    absl::Span<const int32_t> head_of_node, bool gather) {
  // By head, class, and the owner where it is in the class: it has the bytes.
  std::map<std::tuple<int32_t, int32_t, int32_t>, Flow> moved;
  std::vector<std::set<int32_t>> wanted(layout.bucket_count());
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
    wanted[b].insert(head);
  }
  PolicyFlows result;
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
  if (gather) result.gather = Gather(layout, nodes, wanted);
  return result;
}

}  // namespace schedule
}  // namespace weightsync
