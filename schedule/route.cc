#include "schedule/route.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
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

// The waves in which one way of a node is taken: memory goes with the hops, not
// with nodes x waves.
class TakenWaves {
 public:
  // All waves before this one.
  size_t full() const { return full_; }
  bool Has(size_t wave) const { return wave < full_ || beyond_.contains(wave); }
  void Take(size_t wave) {
    if (wave != full_) {
      beyond_.insert(wave);
      return;
    }
    ++full_;
    while (!beyond_.empty() && beyond_.erase(full_) > 0) ++full_;
  }

 private:
  size_t full_ = 0;
  absl::flat_hash_set<size_t> beyond_;
};

}  // namespace

void AssignWaves(size_t node_count, std::vector<Flow>* flows) {
  std::vector<size_t> order(flows->size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return (*flows)[a].bytes > (*flows)[b].bytes;
  });
  std::vector<TakenWaves> out(node_count);
  std::vector<TakenWaves> in(node_count);
  for (size_t i : order) {
    Flow& flow = (*flows)[i];
    const size_t hops = flow.chain.size();
    size_t wave = out[flow.source_node].full();
    for (size_t k = 0; k < hops; ++k) {
      wave = std::max(wave, in[flow.chain[k]].full());
      if (k + 1 < hops) wave = std::max(wave, out[flow.chain[k]].full());
    }
    for (;; ++wave) {
      bool free = !out[flow.source_node].Has(wave);
      for (size_t k = 0; free && k < hops; ++k) {
        free = !in[flow.chain[k]].Has(wave) &&
               (k + 1 == hops || !out[flow.chain[k]].Has(wave));
      }
      if (free) break;
    }
    flow.wave = static_cast<int32_t>(wave);
    out[flow.source_node].Take(wave);
    for (size_t k = 0; k < hops; ++k) {
      in[flow.chain[k]].Take(wave);
      if (k + 1 < hops) out[flow.chain[k]].Take(wave);
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

absl::Status CheckHops(int64_t hops) {
  if (hops <= kMaxHops) return absl::OkStatus();
  return PlanError(
      absl::StatusCode::kResourceExhausted, kPlanTooLarge,
      absl::StrCat("the chains would have ", hops,
                   " hops or more; a plan has at most ", kMaxHops,
                   ": describe fewer trainer ranks or replicas, or more GPUs "
                   "of a node (gpus_per_node)"));
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
  int64_t hops = 0;
  for (const auto& flow : moved) {
    hops += static_cast<int64_t>(layout.classes[flow.first.second].size());
  }
  const absl::Status ok = CheckHops(hops);
  if (!ok.ok()) return ok;
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
