#include "daemon/node/direct_plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "daemon/node/convert.h"
#include "schedule/reshard.h"

namespace weightsync {
namespace daemon {

namespace {

// The tensor's elements follow one another in memory as they do in the
// parameter: it is dense, and whole in all dimensions but the outermost.
bool IsOneStretch(const schedule::Param& param, const schedule::Box& box,
                  const schedule::Dims& strides, int64_t element_bytes) {
  int64_t dense = element_bytes;
  for (int d = box.dims(); d-- > 0;) {
    if (d > 0 && box.extent[d] != param.shape[d]) return false;
    if (box.extent[d] > 1 && strides[d] != dense) return false;
    dense *= box.extent[d];
  }
  return true;
}

// Host memory is in everybody's reach.
bool Reaches(const std::vector<std::string>& reachable,
             const std::string& device) {
  return device.empty() || std::find(reachable.begin(), reachable.end(),
                                     device) != reachable.end();
}

}  // namespace

std::vector<int32_t> OrdinalsOf(const NodeLayout& layout,
                                const WantedTensors& tensors) {
  std::vector<int32_t> ordinals;
  ordinals.reserve(static_cast<size_t>(tensors.size()));
  for (const v1::WantedTensor& tensor : tensors) {
    const absl::optional<uint32_t> ordinal = layout.catalog.Find(tensor.name());
    ordinals.push_back(ordinal.has_value() ? static_cast<int32_t>(*ordinal)
                                           : -1);
  }
  return ordinals;
}

DirectPlanner::DirectPlanner(const NodeLayout& layout,
                             const InPlaceSource& source,
                             const WantedTensors& tensors,
                             const std::vector<int32_t>& ordinals,
                             std::vector<std::string> reachable)
    : layout_(layout), tensors_(tensors), reachable_(std::move(reachable)) {
  shards_.reserve(source.shards.size());
  for (const SourceShard& shard : source.shards) {
    shards_[shard.ordinal].push_back(&shard);
  }
  wanted_.reserve(ordinals.size());
  for (size_t i = 0; i < ordinals.size(); ++i) {
    wanted_[ordinals[i]].push_back(static_cast<int>(i));
  }
  for (const SourceRegion& region : source.regions) {
    if (region.arena == nullptr) continue;
    // One arena may be named twice.
    const SourceRegion*& known = regions_[region.data];
    if (known == nullptr || known->size_bytes < region.size_bytes) {
      known = &region;
    }
    if (!region.device_uuid.empty()) device_arenas_.insert(region.arena_id);
  }
}

bool DirectPlanner::ReadsDevice(
    const std::vector<v1::DirectCopies>& copies) const {
  return std::any_of(
      copies.begin(), copies.end(), [this](const v1::DirectCopies& part) {
        return device_arenas_.contains(part.memory().arena().arena_id());
      });
}

const SourceShard* DirectPlanner::FindShard(
    const schedule::Piece& piece) const {
  const auto found = shards_.find(piece.ordinal);
  if (found == shards_.end()) return nullptr;
  for (const SourceShard* shard : found->second) {
    if (schedule::Contains(shard->box, piece.box)) return shard;
  }
  return nullptr;
}

const SourceRegion* DirectPlanner::FindRegion(const SourceShard& shard) const {
  const auto after = regions_.upper_bound(shard.data);
  if (after == regions_.begin()) return nullptr;
  const SourceRegion* const region = std::prev(after)->second;
  return shard.data < region->data + region->size_bytes ? region : nullptr;
}

absl::optional<std::vector<v1::DirectCopies>> DirectPlanner::Copies(
    int32_t bucket) const {
  std::vector<v1::DirectCopies> result;
  for (const schedule::Piece& piece :
       layout_.plan.pieces(static_cast<uint32_t>(bucket))) {
    const schedule::Param& param = layout_.catalog.param(piece.ordinal);
    const int64_t element_bytes = schedule::DTypeSize(param.dtype);

    const SourceShard* const shard = FindShard(piece);
    if (shard == nullptr || shard->cast != schedule::Cast::kNone) {
      return absl::nullopt;
    }
    const SourceRegion* const region = FindRegion(*shard);
    if (region == nullptr || !Reaches(reachable_, region->device_uuid))
      return absl::nullopt;

    int wanted = -1;
    schedule::Box box;
    schedule::Dims strides;
    const auto candidates = wanted_.find(static_cast<int32_t>(piece.ordinal));
    if (candidates == wanted_.end()) return absl::nullopt;
    for (const int i : candidates->second) {
      const v1::WantedTensor& tensor = tensors_.Get(i);
      auto parsed =
          BoxFromProto(tensor.has_box(), tensor.box(), param.shape, param.name);
      if (!parsed.ok() || !schedule::Contains(*parsed, piece.box)) continue;
      int64_t span = 0;
      auto said = StridesFromProto(tensor.strides(), parsed->extent,
                                   element_bytes, param.name, &span);
      if (!said.ok()) return absl::nullopt;
      wanted = i;
      box = *std::move(parsed);
      strides = *std::move(said);
      break;
    }
    if (wanted < 0 || !IsOneStretch(param, box, strides, element_bytes)) {
      return absl::nullopt;
    }

    schedule::Dims from;
    for (int64_t stride : shard->strides)
      from.push_back(stride * element_bytes);
    const schedule::StridedCopy copy = schedule::CopyBox(
        piece.box, shard->box, shard->data - region->data, from, box, 0,
        strides, element_bytes, element_bytes, schedule::Cast::kNone);
    if (result.empty() || result.back().copies(0).tensor() != wanted ||
        result.back().memory().arena().arena_id() != region->arena_id) {
      result.emplace_back();
      result.back().set_bucket(bucket);
      result.back().mutable_memory()->mutable_arena()->set_arena_id(
          region->arena_id);
      result.back().set_size_bytes(region->size_bytes);
    }
    v1::TensorCopy* to = result.back().add_copies();
    to->set_tensor(wanted);
    to->set_bucket_offset_bytes(copy.src_offset);
    to->set_tensor_offset_bytes(copy.dst_offset);
    to->set_run_bytes(copy.run_bytes);
    for (size_t d = 0; d < copy.extents.size(); ++d) {
      to->add_extents(copy.extents[d]);
      to->add_bucket_strides_bytes(copy.src_strides[d]);
      to->add_tensor_strides_bytes(copy.dst_strides[d]);
    }
  }
  return result;
}

}  // namespace daemon
}  // namespace weightsync
