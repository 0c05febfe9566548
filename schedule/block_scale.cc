#include "schedule/block_scale.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

int64_t Blocks(int64_t extent) {
  return (extent + kScaleBlock - 1) / kScaleBlock;
}

absl::Status Refuse(const Param& param, absl::string_view what) {
  return InvalidPlan(
      kDTypeMismatch,
      absl::StrCat(
          "parameter '", param.name,
          "' is F8_E4M3 in the catalog and BF16 on a trainer: ", what));
}

// Whether a box held as `dtype` is cast to FP8, with scales.
bool IsBlockCast(const Catalog& catalog, uint32_t ordinal, DType dtype) {
  return dtype == DType::kBF16 && ordinal < catalog.size() &&
         catalog.param(ordinal).dtype == DType::kF8E4M3;
}

// The scales of every box that needs them; `scale_of` makes the entry.
template <typename T, typename Fn>
absl::StatusOr<std::vector<T>> Collect(const Catalog& catalog,
                                       absl::Span<const T> boxes, Fn scale_of) {
  std::vector<T> scales;
  absl::flat_hash_set<uint32_t> computed;
  for (const T& box : boxes) {
    if (!IsBlockCast(catalog, box.ordinal, box.dtype) ||
        !InsideShape(box.box, catalog.param(box.ordinal).shape)) {
      continue;
    }
    absl::StatusOr<uint32_t> scale = ScaleOf(catalog, box.ordinal);
    if (!scale.ok()) return scale.status();
    absl::StatusOr<Box> part = ScaleBoxOf(catalog, box.ordinal, box.box);
    if (!part.ok()) return part.status();
    computed.insert(*scale);
    scales.push_back(scale_of(box, *scale, *std::move(part)));
  }
  if (scales.empty()) return scales;
  for (const T& box : boxes) {
    if (!computed.contains(box.ordinal)) continue;
    return InvalidPlan(
        kDTypeMismatch,
        absl::StrCat("parameter '", catalog.param(box.ordinal).name,
                     "' is held beside the BF16 tensor that it is computed "
                     "from; hold one of them"));
  }
  return scales;
}

}  // namespace

std::string ScaleName(const Param& param) {
  return absl::StrCat(param.name, "_scale_inv");
}

absl::StatusOr<Param> ScaleParam(const Param& param) {
  if (param.shape.size() != 2) {
    return Refuse(param,
                  absl::StrCat("only matrices are cast in blocks, and it has "
                               "shape ",
                               DimsString(param.shape), "; keep it BF16"));
  }
  Param scale;
  scale.name = ScaleName(param);
  scale.dtype = DType::kF32;
  scale.shape = {Blocks(param.shape[0]), Blocks(param.shape[1])};
  scale.component = param.component;
  return scale;
}

absl::StatusOr<uint32_t> ScaleOf(const Catalog& catalog, uint32_t ordinal) {
  const Param& param = catalog.param(ordinal);
  const absl::StatusOr<Param> want = ScaleParam(param);
  if (!want.ok()) return want.status();
  const absl::optional<uint32_t> scale = catalog.Find(want->name);
  if (!scale.has_value() || catalog.param(*scale).dtype != want->dtype ||
      catalog.param(*scale).shape != want->shape) {
    return Refuse(param,
                  absl::StrCat("that needs a parameter '", want->name,
                               "' of F32 and shape ", DimsString(want->shape)));
  }
  return *scale;
}

absl::StatusOr<Box> ScaleBoxOf(const Catalog& catalog, uint32_t ordinal,
                               const Box& box) {
  return ScaleBoxOf(catalog.param(ordinal), box);
}

absl::StatusOr<Box> ScaleBoxOf(const Param& param, const Box& box) {
  Box scale;
  for (int d = 0; d < box.dims(); ++d) {
    const int64_t end = box.end(d);
    if (box.offset[d] % kScaleBlock != 0 ||
        (end % kScaleBlock != 0 && end != param.shape[d])) {
      return Refuse(
          param,
          absl::StrCat("the shard ", BoxString(box), " cuts through blocks of ",
                       kScaleBlock, " x ", kScaleBlock,
                       ", whose scales it cannot know; shard it by "
                       "multiples of ",
                       kScaleBlock, ", or gather it"));
    }
    scale.offset.push_back(box.offset[d] / kScaleBlock);
    scale.extent.push_back(Blocks(end) - box.offset[d] / kScaleBlock);
  }
  return scale;
}

absl::StatusOr<std::vector<OrdinalBox>> ScalesFor(
    const Catalog& catalog, absl::Span<const OrdinalBox> boxes) {
  return Collect(catalog, boxes,
                 [](const OrdinalBox&, uint32_t scale, Box part) {
                   OrdinalBox out;
                   out.ordinal = scale;
                   out.box = std::move(part);
                   return out;
                 });
}

absl::StatusOr<std::vector<MemoryBox>> ScalesFor(
    const Catalog& catalog, absl::Span<const MemoryBox> boxes) {
  return Collect(catalog, boxes,
                 [](const MemoryBox& box, uint32_t scale, Box part) {
                   MemoryBox out = box;
                   out.ordinal = scale;
                   out.box = std::move(part);
                   for (int64_t& stride : out.strides) stride *= kScaleBlock;
                   return out;
                 });
}

}  // namespace schedule
}  // namespace weightsync
