#include "schedule/route.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

template <typename T>
void Rotate(std::vector<T>* items, int turn) {
  if (items->size() < 2) return;
  std::rotate(items->begin(), items->begin() + turn % items->size(),
              items->end());
}

}  // namespace

void AssignWaves(size_t node_count, std::vector<Flow>* flows) {
  std::vector<size_t> order(flows->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return (*flows)[a].bytes > (*flows)[b].bytes;
  });
  // Per wave, nodes whose way out or way in is taken.
  std::vector<std::vector<bool>> out;
  std::vector<std::vector<bool>> in;
  // Waves before this one are full for flows that enter the node.
  std::vector<size_t> hint(node_count, 0);
  for (size_t i : order) {
    Flow& flow = (*flows)[i];
    size_t wave = 0;
    for (int32_t node : flow.chain) wave = std::max(wave, hint[node]);
    for (;; ++wave) {
      if (wave == out.size()) {
        out.emplace_back(node_count, false);
        in.emplace_back(node_count, false);
      }
      bool free = !out[wave][flow.source_node];
      for (size_t k = 0; free && k < flow.chain.size(); ++k) {
        free = !in[wave][flow.chain[k]] &&
               (k + 1 == flow.chain.size() || !out[wave][flow.chain[k]]);
      }
      if (free) break;
    }
    flow.wave = static_cast<int32_t>(wave);
    out[wave][flow.source_node] = true;
    for (size_t k = 0; k < flow.chain.size(); ++k) {
      const int32_t node = flow.chain[k];
      in[wave][node] = true;
      if (k + 1 < flow.chain.size()) out[wave][node] = true;
      while (hint[node] < in.size() && in[hint[node]][node]) ++hint[node];
    }
  }
}

std::vector<int32_t> ChainOrder(absl::Span<const NodeLabels> nodes,
                                int32_t source,
                                absl::Span<const int32_t> receivers, int turn) {
  // zone -> rack -> nodes by name.
  std::map<std::string, std::map<std::string, std::vector<int32_t>>> places;
  for (int32_t node : receivers) {
    places[nodes[node].zone][nodes[node].rack].push_back(node);
  }
  const NodeLabels& home = nodes[source];
  std::vector<int32_t> chain;
  chain.reserve(receivers.size());
  auto add_zone = [&](std::map<std::string, std::vector<int32_t>>* racks,
                      bool home_zone) {
    std::vector<std::vector<int32_t>*> order;
    for (auto& rack : *racks) {
      std::sort(rack.second.begin(), rack.second.end(),
                [&](int32_t a, int32_t b) {
                  if (nodes[a].name != nodes[b].name) {
                    return nodes[a].name < nodes[b].name;
                  }
                  return a < b;
                });
      Rotate(&rack.second, turn);
      if (!(home_zone && rack.first == home.rack)) {
        order.push_back(&rack.second);
      }
    }
    Rotate(&order, turn);
    if (home_zone) {
      auto own = racks->find(home.rack);
      if (own != racks->end()) order.insert(order.begin(), &own->second);
    }
    for (std::vector<int32_t>* rack : order) {
      chain.insert(chain.end(), rack->begin(), rack->end());
    }
  };
  auto own = places.find(home.zone);
  if (own != places.end()) add_zone(&own->second, true);
  std::vector<std::map<std::string, std::vector<int32_t>>*> zones;
  for (auto& zone : places) {
    if (zone.first != home.zone) zones.push_back(&zone.second);
  }
  Rotate(&zones, turn);
  for (auto* zone : zones) add_zone(zone, false);
  return chain;
}

absl::StatusOr<std::vector<Flow>> RouteFlows(const UpdateLayout& layout,
                                             absl::Span<const NodeLabels> nodes,
                                             const RouteOptions& options) {
  const auto node_count = static_cast<int32_t>(nodes.size());
  std::map<std::pair<int32_t, int32_t>, Flow> moved;
  for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
    const Bucket& bucket = layout.bucket(b);
    if (layout.classes[bucket.need_class].empty()) continue;
    if (bucket.source_node < 0 || bucket.source_node >= node_count) {
      return InvalidPlan(
          kInvalidTopology,
          absl::StrCat("node number ", bucket.source_node, " of trainer rank ",
                       bucket.source_rank, " is not among the ", node_count,
                       " nodes given"));
    }
    Flow& flow = moved[{bucket.source_node, bucket.need_class}];
    flow.source_node = bucket.source_node;
    flow.need_class = bucket.need_class;
    flow.buckets.push_back(b);
    flow.bytes += bucket.bytes;
  }
  absl::flat_hash_map<int32_t, size_t> tail;
  for (size_t i = 0; i < options.last.size(); ++i) {
    tail.emplace(options.last[i], i);
  }
  absl::flat_hash_map<int32_t, int> turn_of_source;
  std::vector<Flow> flows;
  for (auto& entry : moved) {
    Flow& flow = entry.second;
    std::vector<int32_t> receivers;
    for (int32_t node : layout.classes[flow.need_class]) {
      if (node < 0 || node >= node_count) {
        return InvalidPlan(
            kInvalidTopology,
            absl::StrCat("node number ", node, " of a worker is not among the ",
                         node_count, " nodes given"));
      }
      if (node != flow.source_node) receivers.push_back(node);
    }
    if (receivers.empty()) continue;
    const int turn =
        turn_of_source
            .emplace(flow.source_node, static_cast<int>(turn_of_source.size()))
            .first->second;
    flow.chain = ChainOrder(nodes, flow.source_node, receivers, turn);
    if (!tail.empty()) {
      auto slow = std::stable_partition(
          flow.chain.begin(), flow.chain.end(),
          [&](int32_t node) { return !tail.contains(node); });
      std::sort(slow, flow.chain.end(),
                [&](int32_t a, int32_t b) { return tail[a] < tail[b]; });
    }
    if (options.shape == RouteShape::kStar) {
      for (int32_t node : flow.chain) {
        Flow single = flow;
        single.chain = {node};
        flows.push_back(std::move(single));
      }
    } else {
      flows.push_back(std::move(flow));
    }
  }
  AssignWaves(nodes.size(), &flows);
  return flows;
}

}  // namespace schedule
}  // namespace weightsync
