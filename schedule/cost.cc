#include "schedule/cost.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// Keeps the busiest of all resources that it is shown.
class Busiest {
 public:
  void Show(double bytes, double rate, const std::string& name) {
    if (rate <= 0 || bytes <= 0) return;
    const double seconds = bytes / rate;
    if (seconds > seconds_) {
      seconds_ = seconds;
      name_ = name;
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

void EstimateTransfer(absl::Span<const Flow> flows,
                      absl::Span<const NodeLabels> nodes, const Rates& rates,
                      CostEstimate* cost) {
  std::map<std::pair<std::string, std::string>, std::pair<double, double>>
      racks;
  std::map<std::string, std::pair<double, double>> zones;
  std::map<std::string, double> hosts;
  const bool uplinks = rates.rack_uplink > 0 || rates.zone_uplink > 0;
  double fill = 0;
  for (const Flow& flow : flows) {
    int32_t from = flow.source_node;
    double first_frame = 0;
    const double frame =
        static_cast<double>(std::min(rates.frame_bytes, flow.bytes));
    for (int32_t to : flow.chain) {
      cost->nodes[from].out_bytes += flow.bytes;
      cost->nodes[to].in_bytes += flow.bytes;
      cost->wire_bytes += flow.bytes;
      const auto bytes = static_cast<double>(flow.bytes);
      const NodeLabels& a = nodes[from];
      const NodeLabels& b = nodes[to];
      if (uplinks && (a.zone != b.zone || a.rack != b.rack)) {
        racks[{a.zone, a.rack}].first += bytes;
        racks[{b.zone, b.rack}].second += bytes;
        if (a.zone != b.zone) {
          zones[a.zone].first += bytes;
          zones[b.zone].second += bytes;
        }
      }
      if (rates.host_hops > 0) {
        hosts[a.host.empty() ? NodeName(nodes, from) : a.host] += bytes / 2;
        hosts[b.host.empty() ? NodeName(nodes, to) : b.host] += bytes / 2;
      }
      // The last byte needs one frame's time at every hop after the first.
      if (from != flow.source_node) {
        first_frame += frame / std::min(LinkOf(rates, from), LinkOf(rates, to));
      }
      first_frame += rates.hop_latency;
      from = to;
    }
    fill = std::max(fill, first_frame);
  }
  Busiest busiest;
  for (size_t n = 0; n < nodes.size(); ++n) {
    const double link = LinkOf(rates, static_cast<int32_t>(n));
    const std::string name = NodeName(nodes, n);
    busiest.Show(static_cast<double>(cost->nodes[n].out_bytes), link,
                 absl::StrCat("link out of ", name));
    busiest.Show(static_cast<double>(cost->nodes[n].in_bytes), link,
                 absl::StrCat("link into ", name));
  }
  for (const auto& rack : racks) {
    busiest.Show(std::max(rack.second.first, rack.second.second),
                 rates.rack_uplink,
                 absl::StrCat("uplink of rack ", rack.first.second));
  }
  for (const auto& zone : zones) {
    busiest.Show(std::max(zone.second.first, zone.second.second),
                 rates.zone_uplink,
                 absl::StrCat("uplink of zone ", zone.first));
  }
  for (const auto& host : hosts) {
    busiest.Show(host.second, rates.host_hops,
                 absl::StrCat("processors of ", host.first));
  }
  cost->transfer_seconds = busiest.seconds() + fill;
  cost->bound_by = fill > busiest.seconds() ? "latency" : busiest.name();
}

namespace {

// Per node, the buckets that it sends without owning or having gathered them:
// bytes that it has to snapshot from its own trainers.
std::vector<int64_t> SnapshotBesides(const UpdateLayout& layout,
                                     absl::Span<const Flow> flows,
                                     size_t node_count) {
  std::vector<int64_t> bytes(node_count, 0);
  std::vector<std::vector<bool>> seen(node_count);
  for (const Flow& flow : flows) {
    std::vector<bool>& mine = seen[flow.source_node];
    for (uint32_t b : flow.buckets) {
      const Bucket& bucket = layout.bucket(b);
      if (bucket.source_node == flow.source_node) continue;
      if (mine.empty()) mine.assign(layout.bucket_count(), false);
      if (!mine[b]) bytes[flow.source_node] += bucket.bytes;
      mine[b] = true;
    }
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
  std::vector<std::vector<int64_t>> own(class_count);  // per class, per node
  for (const Bucket& bucket : layout.table->buckets) {
    class_bytes[bucket.need_class] += bucket.bytes;
    std::vector<int64_t>& made = own[bucket.need_class];
    if (made.empty()) made.assign(node_count, 0);
    made[bucket.source_node] += bucket.bytes;
  }
  for (size_t c = 0; c < class_count; ++c) {
    const std::vector<int32_t>& members = layout.classes[c];
    if (class_bytes[c] == 0 || members.empty()) continue;
    for (int32_t node : members) {
      must.enter[node] += static_cast<double>(class_bytes[c] - own[c][node]);
      must.needed[node] += class_bytes[c];
    }
    for (size_t n = 0; n < node_count; ++n) {
      const bool alone =
          members.size() == 1 && members[0] == static_cast<int32_t>(n);
      if (!alone) must.leave[n] += static_cast<double>(own[c][n]);
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
  EstimateTransfer(flows, nodes, rates, &cost);
  CostEstimate gathered;
  gathered.nodes.resize(nodes.size());
  EstimateTransfer(gather, nodes, rates, &gathered);
  cost.gather_seconds = gathered.transfer_seconds;
  cost.wire_bytes += gathered.wire_bytes;

  std::vector<int64_t> besides(nodes.size(), 0);
  if (gather.empty()) besides = SnapshotBesides(layout, flows, nodes.size());
  for (const Bucket& bucket : layout.table->buckets) {
    cost.nodes[bucket.source_node].snapshot_bytes += bucket.bytes;
  }
  const MustMove must = FindMustMove(layout, nodes.size());
  double snapshot = 0;
  double apply = 0;
  for (size_t n = 0; n < nodes.size(); ++n) {
    NodeCost& node = cost.nodes[n];
    node.snapshot_bytes += besides[n];
    node.staging_bytes =
        node.snapshot_bytes + node.in_bytes + gathered.nodes[n].in_bytes;
    node.out_bytes += gathered.nodes[n].out_bytes;
    node.in_bytes += gathered.nodes[n].in_bytes;
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
  cost.total_seconds = cost.snapshot_seconds + rates.control_latency +
                       cost.gather_seconds + cost.transfer_seconds +
                       cost.pause_seconds;
  return cost;
}

}  // namespace schedule
}  // namespace weightsync
