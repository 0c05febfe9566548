// Element types, with the names and sizes that safetensors gives them.

#ifndef WEIGHTSYNC_SCHEDULE_DTYPE_H_
#define WEIGHTSYNC_SCHEDULE_DTYPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace schedule {

// Values are part of the catalog digest: append, never renumber.
enum class DType : uint8_t {
  kUnspecified = 0,
  kBool = 1,
  kU8 = 2,
  kI8 = 3,
  kF8E5M2 = 4,
  kF8E4M3 = 5,
  kI16 = 6,
  kU16 = 7,
  kF16 = 8,
  kBF16 = 9,
  kI32 = 10,
  kU32 = 11,
  kF32 = 12,
  kI64 = 13,
  kU64 = 14,
  kF64 = 15,
};

// Bytes of one element; 0 for kUnspecified.
constexpr int64_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kUnspecified:
      return 0;
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kF8E5M2:
    case DType::kF8E4M3:
      return 1;
    case DType::kI16:
    case DType::kU16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI32:
    case DType::kU32:
    case DType::kF32:
      return 4;
    case DType::kI64:
    case DType::kU64:
    case DType::kF64:
      return 8;
  }
  return 0;
}

// The safetensors name: "BF16", "F8_E4M3", ...; "UNSPECIFIED" for kUnspecified.
absl::string_view DTypeName(DType dtype);

// Accepts exactly the safetensors names; UNKNOWN_DTYPE otherwise.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// What happens to an element on its way from a trainer's shard (`from`) to the
// catalog's dtype (`to`). Bytes on the wire are always of the catalog's dtype.
enum class Cast : uint8_t {
  kNone = 0,
  kF32ToBF16 = 1,
  kF32ToF16 = 2,
  // With the scale of the element's block; see block_scale.h.
  kBF16ToF8E4M3 = 3,
  // The scale itself, fp32, from the whole of its block.
  kBF16BlockScale = 4,
};

// The cast of a copy; DTYPE_MISMATCH when there is none for this pair.
absl::StatusOr<Cast> CastBetween(DType from, DType to);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_DTYPE_H_
