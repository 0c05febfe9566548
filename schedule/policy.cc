#include "schedule/policy.h"

#include <algorithm>
#include <map>
#include <set>
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
  PolicyFlows result;
  std::vector<std::set<int32_t>> wanted(layout.bucket_count());
  for (const auto& node : choices) {
    std::map<int32_t, Flow> by_sender;
    for (const auto& bucket : node.second) {
      if (layout.bucket(bucket.first).source_node == node.first) continue;
      int32_t best = *bucket.second.begin();
      for (int32_t sender : bucket.second) {
        if (by_sender[sender].bytes < by_sender[best].bytes) best = sender;
      }
      wanted[bucket.first].insert(best);
      Flow& flow = by_sender[best];
      flow.source_node = best;
      flow.need_class = layout.bucket(bucket.first).need_class;
      AddBucket(layout, bucket.first, &flow);
    }
    for (auto& entry : by_sender) {
      if (entry.second.bytes == 0 || entry.first == node.first) continue;
      entry.second.chain = {node.first};
      result.flows.push_back(std::move(entry.second));
    }
  }
  AssignWaves(nodes.size(), &result.flows);
  if (gather) result.gather = Gather(layout, nodes, wanted);
  return result;
}

absl::StatusOr<PolicyFlows> RouteBroadcast(
    const UpdateLayout& layout, absl::Span<const NodeLabels> nodes,
    absl::Span<const int32_t> head_of_node, bool gather) {
  std::map<std::pair<int32_t, int32_t>, Flow> moved;
  std::vector<std::set<int32_t>> wanted(layout.bucket_count());
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const Bucket& bucket = layout.bucket(b);
    if (layout.classes[bucket.need_class].empty()) continue;
    absl::Status ok = CheckNode(bucket.source_node,
                                std::min(nodes.size(), head_of_node.size()));
    if (!ok.ok()) return ok;
    const int32_t head = head_of_node[bucket.source_node];
    ok = CheckNode(head, nodes.size());
    if (!ok.ok()) return ok;
    wanted[b].insert(head);
    Flow& flow = moved[{head, bucket.need_class}];
    flow.source_node = head;
    flow.need_class = bucket.need_class;
    AddBucket(layout, b, &flow);
  }
  PolicyFlows result;
  for (auto& entry : moved) {
    Flow& flow = entry.second;
    std::vector<int32_t> receivers;
    for (int32_t node : layout.classes[flow.need_class]) {
      absl::Status ok = CheckNode(node, nodes.size());
      if (!ok.ok()) return ok;
      if (node != flow.source_node) receivers.push_back(node);
    }
    if (receivers.empty()) continue;
    flow.chain = ChainOrder(nodes, flow.source_node, receivers, 0);
    result.flows.push_back(std::move(flow));
  }
  AssignWaves(nodes.size(), &result.flows);
  if (gather) result.gather = Gather(layout, nodes, wanted);
  return result;
}

}  // namespace schedule
}  // namespace weightsync
