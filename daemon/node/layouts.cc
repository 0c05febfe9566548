#include "daemon/node/layouts.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/node/convert.h"
#include "schedule/stable_hash.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

absl::Status InvalidLayout(absl::string_view sentence) {
  return transport::MakeError(absl::StatusCode::kInvalidArgument,
                              "LAYOUT_INVALID", sentence);
}

// Boxes of one rank or worker.
absl::StatusOr<schedule::BoxListRef> BoxesFromProto(
    const google::protobuf::RepeatedPtrField<v1::OrdinalBox>& boxes,
    const schedule::Catalog& catalog) {
  std::vector<schedule::OrdinalBox> result;
  result.reserve(boxes.size());
  for (const v1::OrdinalBox& box : boxes) {
    if (box.ordinal() < 0 ||
        static_cast<uint32_t>(box.ordinal()) >= catalog.size()) {
      return InvalidLayout(absl::StrCat("there is no parameter with ordinal ",
                                        box.ordinal(), " in a catalog of ",
                                        catalog.size()));
    }
    const schedule::Param& param = catalog.param(box.ordinal());
    auto parsed =
        BoxFromProto(box.has_box(), box.box(), param.shape, param.name);
    if (!parsed.ok()) return parsed.status();
    schedule::OrdinalBox out;
    out.ordinal = static_cast<uint32_t>(box.ordinal());
    if (box.dtype() != v1::DTYPE_UNSPECIFIED) {
      auto held = ShardDType(box.dtype(), param, *parsed);
      if (!held.ok()) return held.status();
      // As if nothing was said, so that the layout is the same.
      if (*held != param.dtype) out.dtype = *held;
    }
    out.box = *std::move(parsed);
    result.push_back(std::move(out));
  }
  return schedule::MakeBoxList(std::move(result));
}

}  // namespace

std::vector<int32_t> NodeLayout::RankBuckets(int32_t rank) const {
  std::vector<int32_t> buckets;
  for (int32_t b = 0; b < bucket_count(); ++b) {
    if (plan.bucket(b).source_rank == rank) buckets.push_back(b);
  }
  return buckets;
}

std::vector<int32_t> NodeLayout::LocalSourceBuckets() const {
  std::vector<int32_t> buckets;
  if (node < 0) return buckets;
  for (int32_t b = 0; b < bucket_count(); ++b) {
    if (plan.bucket(b).source_node == node) buckets.push_back(b);
  }
  return buckets;
}

int64_t NodeLayout::Bytes(const std::vector<int32_t>& buckets) const {
  int64_t bytes = 0;
  for (int32_t bucket : buckets) bytes += bucket_bytes(bucket);
  return bytes;
}

int64_t NodeLayout::LocalBytes() const {
  std::set<int32_t> buckets(needed_buckets.begin(), needed_buckets.end());
  for (int32_t bucket : LocalSourceBuckets()) buckets.insert(bucket);
  int64_t bytes = 0;
  for (int32_t bucket : buckets) bytes += bucket_bytes(bucket);
  return bytes;
}

std::string LayoutId(uint64_t digest) {
  return absl::StrFormat("%016x", digest);
}

absl::StatusOr<NodeLayout> ComputeNodeLayout(const v1::DefineLayout& define,
                                             absl::string_view node) {
  NodeLayout layout;
  layout.model = define.model();

  std::vector<schedule::Param> params;
  params.reserve(define.catalog_size());
  for (const v1::Parameter& parameter : define.catalog()) {
    params.push_back(ParamFromProto(parameter));
  }
  auto catalog = schedule::Catalog::Create(std::move(params));
  if (!catalog.ok()) return catalog.status();
  layout.catalog = *std::move(catalog);

  for (const v1::LayoutNode& n : define.nodes()) {
    if (n.node() == node) layout.node = static_cast<int>(layout.nodes.size());
    layout.nodes.push_back(n.node());
  }
  auto check_node = [&](int32_t index) {
    if (index >= 0 && index < define.nodes_size()) return absl::OkStatus();
    return InvalidLayout(absl::StrCat("there is no node ", index, " among ",
                                      define.nodes_size()));
  };

  std::vector<schedule::SourceRank> sources;
  for (const v1::LayoutSource& source : define.sources()) {
    absl::Status known = check_node(source.node());
    if (!known.ok()) return known;
    auto shards = BoxesFromProto(source.shards(), layout.catalog);
    if (!shards.ok()) return shards.status();
    schedule::SourceRank rank;
    rank.rank = source.rank();
    rank.node = source.node();
    rank.shards = *std::move(shards);
    sources.push_back(std::move(rank));
  }
  std::vector<schedule::WorkerNeed> workers;
  for (const v1::LayoutWorker& worker : define.workers()) {
    absl::Status known = check_node(worker.node());
    if (!known.ok()) return known;
    auto boxes = BoxesFromProto(worker.boxes(), layout.catalog);
    if (!boxes.ok()) return boxes.status();
    schedule::WorkerNeed need;
    need.worker = static_cast<int32_t>(workers.size());
    need.node = worker.node();
    need.boxes = *std::move(boxes);
    workers.push_back(std::move(need));
  }

  auto plan = schedule::BuildLayout(layout.catalog, sources, workers,
                                    define.bucket_bytes());
  if (!plan.ok()) return plan.status();
  layout.plan = *std::move(plan);
  // The plan knows nodes by index alone, and does not know the model.
  schedule::StableHash hash;
  hash.Add(layout.plan.digest);
  hash.Add(absl::string_view(layout.model));
  hash.Add(static_cast<uint64_t>(layout.nodes.size()));
  for (const std::string& name : layout.nodes)
    hash.Add(absl::string_view(name));
  layout.id = LayoutId(hash.Finish());
  for (int32_t b = 0; layout.node >= 0 && b < layout.bucket_count(); ++b) {
    const std::vector<int32_t>& nodes = layout.plan.need_nodes(b);
    if (std::binary_search(nodes.begin(), nodes.end(), layout.node)) {
      layout.needed_buckets.push_back(b);
    }
  }
  return layout;
}

LayoutBook::LayoutBook(std::string node) : node_(std::move(node)) {}

absl::Status LayoutBook::Define(const v1::DefineLayout& define) {
  auto found = Find(define.layout_id());
  if (found.ok()) {
    Keep(*std::move(found));
    return absl::OkStatus();
  }
  auto computed = ComputeNodeLayout(define, node_);
  if (!computed.ok()) return computed.status();
  if (computed->id != define.layout_id()) {
    return transport::MakeError(
        absl::StatusCode::kFailedPrecondition, "LAYOUT_MISMATCH",
        absl::StrCat("node ", node_, " computes layout ", computed->id, " for ",
                     define.model(), " where the coordinator has ",
                     define.layout_id(),
                     "; run the same release of weightsyncd on both"));
  }
  Keep(std::make_shared<const NodeLayout>(*std::move(computed)));
  return absl::OkStatus();
}

void LayoutBook::Keep(std::shared_ptr<const NodeLayout> layout) {
  absl::MutexLock lock(&mutex_);
  std::weak_ptr<const NodeLayout>& known = by_id_[layout->id];
  // Another thread was faster: one object for each.
  std::shared_ptr<const NodeLayout> other = known.lock();
  if (other != nullptr) layout = std::move(other);
  known = layout;
  auto& recent = recent_[layout->model];
  recent.erase(std::remove(recent.begin(), recent.end(), layout), recent.end());
  recent.push_back(std::move(layout));
  if (recent.size() > kKeptPerModel) recent.pop_front();
  for (auto it = by_id_.begin(); it != by_id_.end();) {
    if (it->second.expired()) {
      by_id_.erase(it++);
    } else {
      ++it;
    }
  }
}

absl::StatusOr<std::shared_ptr<const NodeLayout>> LayoutBook::Find(
    absl::string_view layout_id) const {
  absl::MutexLock lock(&mutex_);
  auto it = by_id_.find(layout_id);
  std::shared_ptr<const NodeLayout> layout;
  if (it != by_id_.end()) layout = it->second.lock();
  if (layout == nullptr) {
    return transport::MakeError(
        absl::StatusCode::kNotFound, "LAYOUT_UNKNOWN",
        absl::StrCat("node ", node_, " knows no layout ", layout_id));
  }
  return layout;
}

}  // namespace daemon
}  // namespace weightsync
