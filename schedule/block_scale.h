// FP8 with block scales: a trainer's bf16 tensor that the catalog has as
// F8_E4M3, with one fp32 scale for each block of 128 x 128 elements in a
// parameter of its own beside it: "….weight" and "….weight_scale_inv", the
// names of DeepSeek-V3's checkpoints. weight = fp8 x scale, scale = largest of
// the block / 448.
//
// Nobody holds scales: they are computed where their blocks are copied out. A
// shard must therefore hold whole blocks, and is taken to hold their scales.

#ifndef WEIGHTSYNC_SCHEDULE_BLOCK_SCALE_H_
#define WEIGHTSYNC_SCHEDULE_BLOCK_SCALE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/box.h"
#include "schedule/catalog.h"
#include "schedule/layout.h"
#include "schedule/reshard.h"

namespace weightsync {
namespace schedule {

inline constexpr int64_t kScaleBlock = 128;
// The largest finite value of E4M3.
inline constexpr float kLargestE4M3 = 448.0f;

// "w" -> "w_scale_inv".
std::string ScaleName(const Param& param);

// The ordinal of the scales of an F8_E4M3 parameter. DTYPE_MISMATCH, naming it:
// it has no two dimensions, or the catalog has no F32 parameter of that name
// with one element for each block.
absl::StatusOr<uint32_t> ScaleOf(const Catalog& catalog, uint32_t ordinal);

// The scales' parameter, as ScaleOf wants it, in the component of `param`.
// DTYPE_MISMATCH, naming it: it has no two dimensions.
absl::StatusOr<Param> ScaleParam(const Param& param);

// The box of scales that belongs to a box of an F8_E4M3 parameter.
// DTYPE_MISMATCH when it cuts through a block.
absl::StatusOr<Box> ScaleBoxOf(const Param& param, const Box& box);
absl::StatusOr<Box> ScaleBoxOf(const Catalog& catalog, uint32_t ordinal,
                               const Box& box);

// The scales of every bf16 box of an F8_E4M3 parameter; none where there is no
// such box. The errors of ScaleOf and ScaleBoxOf; DTYPE_MISMATCH, too, for
// scales that are held beside the tensor that they are computed from. Boxes
// that are wrong otherwise are passed over.
absl::StatusOr<std::vector<OrdinalBox>> ScalesFor(
    const Catalog& catalog, absl::Span<const OrdinalBox> boxes);
// The same for memory: the strides of scales step from block to block of the
// tensor, whose dtype they keep.
absl::StatusOr<std::vector<MemoryBox>> ScalesFor(
    const Catalog& catalog, absl::Span<const MemoryBox> boxes);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_BLOCK_SCALE_H_
