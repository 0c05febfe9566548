#include "daemon/coordinator/known_layout.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/fit.h"
#include "daemon/node/convert.h"

namespace weightsync {
namespace daemon {
namespace {

std::string Label(const v1::LayoutNode& node, const char* key) {
  auto it = node.labels().find(key);
  return it == node.labels().end() ? std::string() : it->second;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const KnownLayout>> MakeKnownLayout(
    v1::DefineLayout define) {
  auto known = std::make_shared<KnownLayout>();
  auto layout = ComputeNodeLayout(define, "");
  if (!layout.ok()) return layout.status();
  known->layout = *std::move(layout);
  define.set_layout_id(known->layout.id);
  known->define = std::move(define);
  for (const v1::LayoutNode& node : known->define.nodes()) {
    known->node_index[node.node()] = static_cast<int>(known->labels.size());
    schedule::NodeLabels labels;
    labels.zone = Label(node, "zone");
    labels.rack = Label(node, "rack");
    labels.host = Label(node, "host");
    labels.name = node.node();
    known->labels.push_back(std::move(labels));
  }
  known->total_bytes = known->layout.catalog.total_bytes();
  known->source.resize(known->labels.size());
  known->receiver.resize(known->labels.size());
  for (uint32_t b = 0; b < known->layout.plan.bucket_count(); ++b) {
    const schedule::Bucket& bucket = known->layout.plan.bucket(b);
    known->source[bucket.source_node] = true;
    for (int32_t node : known->layout.plan.need_nodes(b)) {
      known->receiver[node] = true;
    }
  }
  return std::shared_ptr<const KnownLayout>(std::move(known));
}

absl::StatusOr<std::shared_ptr<const KnownLayout>> RecentLayouts::Make(
    v1::DefineLayout define) {
  std::string inputs = define.SerializeAsString();
  const auto at =
      std::find_if(made_.begin(), made_.end(),
                   [&](const Made& made) { return made.inputs == inputs; });
  if (at != made_.end()) {
    std::rotate(at, at + 1, made_.end());
    return made_.back().layout;
  }
  auto known = MakeKnownLayout(std::move(define));
  if (!known.ok()) return known.status();
  if (made_.size() == kKept) made_.erase(made_.begin());
  made_.push_back({std::move(inputs), *known});
  return known;
}

std::shared_ptr<const KnownLayout> RecentLayouts::Find(
    const v1::DefineLayout& define) const {
  const std::string inputs = define.SerializeAsString();
  for (const Made& made : made_) {
    if (made.inputs == inputs) return made.layout;
  }
  return nullptr;
}

std::vector<std::string> RecentLayouts::ids() const {
  std::vector<std::string> ids;
  for (const Made& made : made_) ids.push_back(made.layout->id());
  return ids;
}

absl::optional<std::vector<uint32_t>> NeededBuckets(
    const KnownLayout& known, const v1::RegisterWorker& worker) {
  const schedule::Catalog& catalog = known.layout.catalog;
  if (!CheckWanted(catalog, worker).ok()) return absl::nullopt;
  std::vector<std::vector<schedule::Box>> wanted(catalog.size());
  for (const v1::WantedTensor& tensor : worker.tensors()) {
    const uint32_t ordinal = *catalog.Find(tensor.name());
    const schedule::Param& param = catalog.param(ordinal);
    auto box = BoxFromProto(tensor.has_box(), tensor.box(), param.shape,
                            tensor.name());
    if (!box.ok()) return absl::nullopt;
    wanted[ordinal].push_back(*std::move(box));
  }
  std::vector<uint32_t> buckets;
  for (uint32_t b = 0; b < known.layout.plan.bucket_count(); ++b) {
    const auto pieces = known.layout.plan.pieces(b);
    const bool needed = std::any_of(
        pieces.begin(), pieces.end(), [&](const schedule::Piece& piece) {
          const auto& boxes = wanted[piece.ordinal];
          schedule::Box part;
          return std::any_of(
              boxes.begin(), boxes.end(), [&](const schedule::Box& box) {
                return schedule::Intersect(piece.box, box, &part);
              });
        });
    if (needed) buckets.push_back(b);
  }
  return buckets;
}

std::vector<int32_t> AvoidEdges(
    int32_t source, std::vector<int32_t> chain,
    const std::vector<std::pair<int, int>>& bad_edges) {
  if (bad_edges.empty()) return chain;
  const auto bad = [&bad_edges](int from, int to) {
    return std::find(bad_edges.begin(), bad_edges.end(),
                     std::make_pair(from, to)) != bad_edges.end();
  };
  // Depth first, in the given order; the budget keeps a hopeless search short.
  int budget = 10000;
  std::vector<int32_t> order;
  std::vector<bool> used(chain.size());
  const std::function<bool(int32_t)> extend = [&](int32_t from) -> bool {
    if (order.size() == chain.size()) return true;
    for (size_t i = 0; i < chain.size(); ++i) {
      if (used[i] || bad(from, chain[i])) continue;
      if (--budget < 0) return false;
      used[i] = true;
      order.push_back(chain[i]);
      if (extend(chain[i])) return true;
      order.pop_back();
      used[i] = false;
    }
    return false;
  };
  return extend(source) ? order : chain;
}

std::map<std::string, int64_t> NeededBytes(const KnownLayout& known,
                                           const std::vector<v1::Flow>& flows) {
  std::map<std::string, int64_t> needed;
  for (const v1::Flow& flow : flows) {
    int64_t bytes = 0;
    for (int32_t bucket : flow.buckets()) {
      bytes += known.layout.plan.bucket(bucket).bytes;
    }
    for (int i = 1; i < flow.members_size(); ++i) {
      needed[flow.members(i).node()] += bytes;
    }
  }
  return needed;
}

int64_t WireBytes(const KnownLayout& known,
                  const std::vector<v1::Flow>& flows) {
  int64_t bytes = 0;
  for (const auto& node : NeededBytes(known, flows)) bytes += node.second;
  return bytes;
}

}  // namespace daemon
}  // namespace weightsync
