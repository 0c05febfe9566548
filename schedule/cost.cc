#include "schedule/cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// Keeps the busiest of all resources that it is shown.
class Busiest {
 public:
  template <typename Name>
  void Show(double bytes, double rate, Name name) {
    if (rate <= 0 || bytes <= 0) return;
    const double seconds = bytes / rate;
    if (seconds > seconds_) {
      seconds_ = seconds;
      name_ = name();
    }
  }
  double seconds() const { return seconds_; }
  const std::string& name() const { return name_; }

 private:
  double seconds_ = 0;
  std::string name_ = "nothing to move";
};

std::string NodeName(absl::Span<const NodeLabels> nodes, size_t node) {
  return nodes[node].name.empty() ? absl::StrCat("node ", node)
                                  : nodes[node].name;
}

double CopyRate(const Rates& rates) {
  return rates.device_copy > 0 ? std::min(rates.copy, rates.device_copy)
                               : rates.copy;
}

}  // namespace

absl::Status CheckRates(const Rates& rates, size_t node_count) {
  auto positive = [](double v) { return std::isfinite(v) && v > 0; };
  auto optional = [](double v) { return std::isfinite(v) && v >= 0; };
  bool ok = positive(rates.link) && positive(rates.copy) &&
            optional(rates.rack_uplink) && optional(rates.zone_uplink) &&
            optional(rates.host_hops) && optional(rates.device_copy) &&
            optional(rates.hop_latency) && optional(rates.control_latency) &&
            rates.frame_bytes > 0;
  for (double link : rates.node_links) ok = ok && positive(link);
  if (!ok) {
    return InvalidPlan(kInvalidRate,
                       "link and copy rates must be positive numbers, the "
                       "other rates and latencies not negative");
  }
  if (!rates.node_links.empty() && rates.node_links.size() != node_count) {
    return InvalidPlan(kInvalidRate,
                       absl::StrCat("there are ", rates.node_links.size(),
                                    " link rates for ", node_count, " nodes"));
  }
  return absl::OkStatus();
}

double LinkOf(const Rates& rates, int32_t node) {
  return rates.node_links.empty() ? rates.link : rates.node_links[node];
}

namespace {

// What flows put on links, racks, zones and hosts.
class Traffic {
 public:
  Traffic(absl::Span<const NodeLabels> nodes, const Rates& rates)
      : nodes_(nodes),
        rates_(rates),
        out_bytes_(nodes.size(), 0),
        in_bytes_(nodes.size(), 0) {}

  void Add(absl::Span<const Flow> flows) {
    const bool uplinks = rates_.rack_uplink > 0 || rates_.zone_uplink > 0;
    double fill = 0;
    for (const Flow& flow : flows) {
      int32_t from = flow.source_node;
      double first_frame = 0;
      const double frame =
          static_cast<double>(std::min(rates_.frame_bytes, flow.bytes));
      const auto bytes = static_cast<double>(flow.bytes);
      for (int32_t to : flow.chain) {
        out_bytes_[from] += flow.bytes;
        in_bytes_[to] += flow.bytes;
        const NodeLabels& a = nodes_[from];
        const NodeLabels& b = nodes_[to];
        if (uplinks && (a.zone != b.zone || a.rack != b.rack)) {
          racks_[{a.zone, a.rack}].first += bytes;
          racks_[{b.zone, b.rack}].second += bytes;
          if (a.zone != b.zone) {
            zones_[a.zone].first += bytes;
            zones_[b.zone].second += bytes;
          }
        }
        if (rates_.host_hops > 0) {
          hosts_[a.host.empty() ? NodeName(nodes_, from) : a.host] += bytes / 2;
          hosts_[b.host.empty() ? NodeName(nodes_, to) : b.host] += bytes / 2;
        }
        // The last byte needs one frame's time at every hop after the first.
        if (from != flow.source_node) {
          first_frame +=
              frame / std::min(LinkOf(rates_, from), LinkOf(rates_, to));
        }
        first_frame += rates_.hop_latency;
        from = to;
      }
      fill = std::max(fill, first_frame);
    }
    // What is handed on after another Add's flows fills their chains first.
    fill_ += fill;
  }

  // Seconds until all of it has arrived, and what they are spent on.
  double Seconds(std::string* bound_by) const {
    Busiest busiest;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const double link = LinkOf(rates_, static_cast<int32_t>(n));
      busiest.Show(static_cast<double>(out_bytes_[n]), link,
                   [&] { return "link out of " + NodeName(nodes_, n); });
      busiest.Show(static_cast<double>(in_bytes_[n]), link,
                   [&] { return "link into " + NodeName(nodes_, n); });
    }
    for (const auto& rack : racks_) {
      busiest.Show(std::max(rack.second.first, rack.second.second),
                   rates_.rack_uplink,
                   [&] { return "uplink of rack " + rack.first.second; });
    }
    for (const auto& zone : zones_) {
      busiest.Show(std::max(zone.second.first, zone.second.second),
                   rates_.zone_uplink,
                   [&] { return "uplink of zone " + zone.first; });
    }
    for (const auto& host : hosts_) {
      busiest.Show(host.second, rates_.host_hops,
                   [&] { return "processors of " + host.first; });
    }
    *bound_by = fill_ > busiest.seconds() ? "latency" : busiest.name();
    return busiest.seconds() + fill_;
  }

  int64_t out_bytes(size_t node) const { return out_bytes_[node]; }
  int64_t in_bytes(size_t node) const { return in_bytes_[node]; }

 private:
  const absl::Span<const NodeLabels> nodes_;
  const Rates& rates_;
  std::vector<int64_t> out_bytes_;
  std::vector<int64_t> in_bytes_;
  // (out, in)
  std::map<std::pair<std::string, std::string>, std::pair<double, double>>
      racks_;
  std::map<std::string, std::pair<double, double>> zones_;
  std::map<std::string, double> hosts_;
  double fill_ = 0;
};

}  // namespace

void EstimateTransfer(absl::Span<const Flow> flows,
                      absl::Span<const NodeLabels> nodes, const Rates& rates,
                      CostEstimate* cost, absl::Span<const Flow> gather) {
  Traffic traffic(nodes, rates);
  traffic.Add(gather);
  std::string ignored;
  if (!gather.empty()) cost->gather_seconds = traffic.Seconds(&ignored);
  traffic.Add(flows);
  cost->transfer_seconds = traffic.Seconds(&cost->bound_by);
  for (size_t n = 0; n < nodes.size(); ++n) {
    cost->nodes[n].out_bytes += traffic.out_bytes(n);
    cost->nodes[n].in_bytes += traffic.in_bytes(n);
    cost->wire_bytes += traffic.in_bytes(n);
  }
}

namespace {

// Per node, the buckets that it sends without owning or having gathered them:
// bytes that it has to snapshot from its own trainers.
std::vector<int64_t> SnapshotBesides(const UpdateLayout& layout,
                                     absl::Span<const Flow> flows,
                                     size_t node_count) {
  std::vector<std::pair<int32_t, uint32_t>> sent;  // node, bucket
  for (const Flow& flow : flows) {
    for (uint32_t b : flow.buckets) {
      if (layout.bucket(b).source_node != flow.source_node) {
        sent.emplace_back(flow.source_node, b);
      }
    }
  }
  std::sort(sent.begin(), sent.end());
  sent.erase(std::unique(sent.begin(), sent.end()), sent.end());
  std::vector<int64_t> bytes(node_count, 0);
  for (const auto& one : sent) {
    bytes[one.first] += layout.bucket(one.second).bytes;
  }
  return bytes;
}

// The bytes that must leave each node and must enter each node, whatever the
// routes, and those that its workers need in all.
struct MustMove {
  std::vector<double> leave;
  std::vector<double> enter;
  std::vector<int64_t> needed;
};

MustMove FindMustMove(const UpdateLayout& layout, size_t node_count) {
  MustMove must;
  must.leave.assign(node_count, 0);
  must.enter.assign(node_count, 0);
  must.needed.assign(node_count, 0);
  const size_t class_count = layout.classes.size();
  std::vector<int64_t> class_bytes(class_count, 0);
  // (class, node) -> what the node owns of the class
  absl::flat_hash_map<std::pair<int32_t, int32_t>, int64_t> own;
  for (const Bucket& bucket : layout.table->buckets) {
    class_bytes[bucket.need_class] += bucket.bytes;
    own[{bucket.need_class, bucket.source_node}] += bucket.bytes;
  }
  for (size_t c = 0; c < class_count; ++c) {
    if (class_bytes[c] == 0) continue;
    for (int32_t node : layout.classes[c]) {
      must.enter[node] += static_cast<double>(class_bytes[c]);
      must.needed[node] += class_bytes[c];
    }
  }
  for (const auto& made : own) {
    const std::vector<int32_t>& members = layout.classes[made.first.first];
    const int32_t node = made.first.second;
    if (members.empty()) continue;
    const bool needs = std::binary_search(members.begin(), members.end(), node);
    if (needs) must.enter[node] -= static_cast<double>(made.second);
    if (!needs || members.size() > 1) {
      must.leave[node] += static_cast<double>(made.second);
    }
  }
  // What has several holders could leave another one, but some one it must.
  std::vector<double> shared(node_count, 0);
  std::vector<bool> sends(node_count, false);
  for (const SourceLoad& source : layout.table->sources) {
    shared[source.node] +=
        static_cast<double>(source.bytes - source.exclusive_bytes);
    sends[source.node] = true;
  }
  const double all = std::accumulate(must.leave.begin(), must.leave.end(), 0.0);
  const auto senders =
      static_cast<double>(std::count(sends.begin(), sends.end(), true));
  for (size_t n = 0; n < node_count; ++n) {
    if (!sends[n]) continue;
    must.leave[n] = std::max(must.leave[n] - shared[n], all / senders);
  }
  return must;
}

}  // namespace

absl::StatusOr<CostEstimate> EstimateCost(const UpdateLayout& layout,
                                          absl::Span<const Flow> flows,
                                          absl::Span<const NodeLabels> nodes,
                                          const Rates& rates,
                                          absl::Span<const int64_t> apply_bytes,
                                          absl::Span<const Flow> gather) {
  absl::Status ok = CheckRates(rates, nodes.size());
  if (!ok.ok()) return ok;
  CostEstimate cost;
  cost.nodes.resize(nodes.size());
  EstimateTransfer(flows, nodes, rates, &cost, gather);

  std::vector<int64_t> besides(nodes.size(), 0);
  if (gather.empty()) besides = SnapshotBesides(layout, flows, nodes.size());
  for (const Bucket& bucket : layout.table->buckets) {
    cost.nodes[bucket.source_node].snapshot_bytes += bucket.bytes;
  }
  const MustMove must = FindMustMove(layout, nodes.size());
  double owned = 0;
  double snapshot = 0;
  double apply = 0;
  for (size_t n = 0; n < nodes.size(); ++n) {
    NodeCost& node = cost.nodes[n];
    owned = std::max(owned, static_cast<double>(node.snapshot_bytes));
    node.snapshot_bytes += besides[n];
    node.staging_bytes = node.snapshot_bytes + node.in_bytes;
    node.apply_bytes = apply_bytes.empty() ? must.needed[n] : apply_bytes[n];
    const double link = LinkOf(rates, static_cast<int32_t>(n));
    cost.lower_bound_seconds = std::max(
        {cost.lower_bound_seconds, must.leave[n] / link, must.enter[n] / link});
    cost.staging_bytes_per_node =
        std::max(cost.staging_bytes_per_node, node.staging_bytes);
    snapshot = std::max(snapshot, static_cast<double>(node.snapshot_bytes));
    apply = std::max(apply, static_cast<double>(node.apply_bytes));
  }
  cost.snapshot_seconds = snapshot / CopyRate(rates);
  // Pause, commit, apply's own answer and resume are a round each.
  cost.apply_seconds =
      apply / (rates.apply_copy > 0 ? rates.apply_copy : CopyRate(rates));
  cost.pause_seconds = cost.apply_seconds + 4 * rates.control_latency;
  cost.total_seconds = rates.control_latency + cost.pause_seconds +
                       std::max(cost.snapshot_seconds, cost.transfer_seconds);
  // A sender that copies out what it does not own copies more than that.
  cost.least_total_seconds =
      rates.control_latency + cost.pause_seconds +
      std::max(owned / CopyRate(rates), cost.lower_bound_seconds);
  return cost;
}

}  // namespace schedule
}  // namespace weightsync
