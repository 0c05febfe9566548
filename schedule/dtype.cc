#include "schedule/dtype.h"

#include "absl/strings/str_cat.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

constexpr absl::string_view kNames[] = {
    "UNSPECIFIED", "BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "I16", "U16",
    "F16",         "BF16", "I32", "U32", "F32",     "I64",     "U64", "F64"};
constexpr int kCount = sizeof(kNames) / sizeof(kNames[0]);

}  // namespace

absl::string_view DTypeName(DType dtype) {
  const int index = static_cast<int>(dtype);
  return index < kCount ? kNames[index] : kNames[0];
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (int i = 1; i < kCount; ++i) {
    if (kNames[i] == name) return static_cast<DType>(i);
  }
  return InvalidPlan(
      kUnknownDType,
      absl::StrCat("dtype '", name,
                   "' is unknown; use a safetensors name such as BF16 or F32"));
}

absl::StatusOr<Cast> CastBetween(DType from, DType to) {
  if (from == to) return Cast::kNone;
  if (from == DType::kF32 && to == DType::kBF16) return Cast::kF32ToBF16;
  if (from == DType::kF32 && to == DType::kF16) return Cast::kF32ToF16;
  if (from == DType::kBF16 && to == DType::kF8E4M3) return Cast::kBF16ToF8E4M3;
  return InvalidPlan(
      kDTypeMismatch,
      absl::StrCat("no cast leads from ", DTypeName(from), " to ",
                   DTypeName(to),
                   "; only F32 to BF16, F32 to F16 and BF16 to F8_E4M3 do"));
}

}  // namespace schedule
}  // namespace weightsync
