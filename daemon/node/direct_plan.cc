#include "daemon/node/direct_plan.h"

#include <algorithm>

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

bool ReadsDevice(const std::vector<v1::DirectCopies>& copies,
                 const InPlaceSource& source) {
  return std::any_of(
      copies.begin(), copies.end(), [&source](const v1::DirectCopies& part) {
        const std::string& arena_id = part.memory().arena().arena_id();
        return std::any_of(source.regions.begin(), source.regions.end(),
                           [&arena_id](const SourceRegion& region) {
                             return region.arena_id == arena_id &&
                                    !region.device_uuid.empty();
                           });
      });
}

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

absl::optional<std::vector<v1::DirectCopies>> MakeDirectCopies(
    const NodeLayout& layout, int32_t bucket, const InPlaceSource& source,
    const WantedTensors& tensors, const std::vector<std::string>& reachable) {
  const std::vector<int32_t> ordinals = OrdinalsOf(layout, tensors);
  std::vector<v1::DirectCopies> result;
  for (const schedule::Piece& piece :
       layout.plan.pieces(static_cast<uint32_t>(bucket))) {
    const schedule::Param& param = layout.catalog.param(piece.ordinal);
    const int64_t element_bytes = schedule::DTypeSize(param.dtype);

    const SourceShard* shard = nullptr;
    for (const SourceShard& candidate : source.shards) {
      if (candidate.ordinal == piece.ordinal &&
          schedule::Contains(candidate.box, piece.box)) {
        shard = &candidate;
        break;
      }
    }
    if (shard == nullptr || shard->cast != schedule::Cast::kNone) {
      return absl::nullopt;
    }
    const SourceRegion* region = nullptr;
    for (const SourceRegion& candidate : source.regions) {
      if (candidate.arena != nullptr && shard->data >= candidate.data &&
          shard->data < candidate.data + candidate.size_bytes) {
        region = &candidate;
        break;
      }
    }
    if (region == nullptr || !Reaches(reachable, region->device_uuid))
      return absl::nullopt;

    int wanted = -1;
    schedule::Box box;
    schedule::Dims strides;
    for (int i = 0; i < tensors.size() && wanted < 0; ++i) {
      if (ordinals[static_cast<size_t>(i)] !=
          static_cast<int32_t>(piece.ordinal)) {
        continue;
      }
      const v1::WantedTensor& tensor = tensors.Get(i);
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
