#include "daemon/node/convert.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "schedule/block_scale.h"
#include "schedule/error.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

absl::Status Invalid(absl::string_view reason, absl::string_view parameter,
                     absl::string_view sentence) {
  return transport::MakeError(absl::StatusCode::kInvalidArgument, reason,
                              absl::StrCat(parameter, ": ", sentence));
}

}  // namespace

schedule::DType FromProto(v1::DType dtype) {
  // The two enums have equal values; both are part of the protocol.
  static_assert(static_cast<int>(schedule::DType::kBF16) == v1::DTYPE_BF16, "");
  static_assert(static_cast<int>(schedule::DType::kF64) == v1::DTYPE_F64, "");
  if (!v1::DType_IsValid(dtype)) return schedule::DType::kUnspecified;
  return static_cast<schedule::DType>(dtype);
}

absl::StatusOr<schedule::Box> BoxFromProto(bool has_box, const v1::Box& box,
                                           absl::Span<const int64_t> shape,
                                           absl::string_view parameter) {
  if (!has_box) return schedule::WholeBox(shape);
  schedule::Box result;
  result.offset.assign(box.offset().begin(), box.offset().end());
  result.extent.assign(box.extent().begin(), box.extent().end());
  if (result.offset.size() != shape.size() ||
      result.extent.size() != shape.size() ||
      !schedule::InsideShape(result, shape)) {
    return Invalid(
        "BOX_OUT_OF_RANGE", parameter,
        absl::StrCat("a box with offset ", schedule::DimsString(result.offset),
                     " and extent ", schedule::DimsString(result.extent),
                     " does not lie inside shape ",
                     schedule::DimsString(shape)));
  }
  return result;
}

absl::StatusOr<schedule::Dims> StridesFromProto(
    const google::protobuf::RepeatedField<int64_t>& strides,
    absl::Span<const int64_t> extent, int64_t element_bytes,
    absl::string_view parameter, int64_t* span) {
  constexpr int64_t kMaxSpan = int64_t{1} << 62;
  if (strides.empty()) {
    schedule::Dims dense = schedule::DenseStrides(extent, element_bytes);
    *span = element_bytes;
    for (int64_t e : extent) *span *= e;
    return dense;
  }
  if (strides.size() != static_cast<int>(extent.size())) {
    return Invalid("STRIDES_INVALID", parameter,
                   absl::StrCat(strides.size(), " strides for ", extent.size(),
                                " dimensions"));
  }
  schedule::Dims bytes(strides.begin(), strides.end());
  // From the innermost out: each stride must step over all that is inside.
  std::vector<int> order(extent.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return bytes[a] < bytes[b]; });
  int64_t covered = 1;  // elements
  for (int d : order) {
    // The stride of a dimension with one index is never used.
    if (extent[d] == 1) continue;
    if (bytes[d] < covered) {
      return Invalid(
          "STRIDES_INVALID", parameter,
          absl::StrCat("stride ", bytes[d], " of dimension ", d,
                       bytes[d] < 0 ? " is negative"
                                    : " makes elements share their bytes"));
    }
    if (bytes[d] > kMaxSpan / element_bytes / extent[d] - covered) {
      return Invalid("STRIDES_INVALID", parameter,
                     absl::StrCat("stride ", bytes[d], " is too large"));
    }
    covered += bytes[d] * (extent[d] - 1);
  }
  for (int64_t& stride : bytes) {
    // Of a dimension with one index it may be anything.
    stride = std::min(std::max(stride, int64_t{0}), kMaxSpan / element_bytes) *
             element_bytes;
  }
  *span = covered * element_bytes;
  return bytes;
}

schedule::Param ParamFromProto(const v1::Parameter& parameter) {
  schedule::Param param;
  param.name = parameter.name();
  param.dtype = FromProto(parameter.dtype());
  param.shape.assign(parameter.shape().begin(), parameter.shape().end());
  param.component = parameter.component();
  return param;
}

v1::Parameter ToProto(const schedule::Param& param) {
  v1::Parameter parameter;
  parameter.set_name(param.name);
  parameter.set_dtype(static_cast<v1::DType>(param.dtype));
  parameter.mutable_shape()->Add(param.shape.begin(), param.shape.end());
  parameter.set_component(param.component);
  return parameter;
}

absl::StatusOr<schedule::DType> ShardDType(v1::DType dtype,
                                           const schedule::Param& param,
                                           const schedule::Box& box) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return param.dtype;
  const schedule::DType held = FromProto(dtype);
  if (held == schedule::DType::kUnspecified) {
    return Invalid("DTYPE_UNKNOWN", param.name,
                   absl::StrCat("a shard has type ", static_cast<int>(dtype),
                                ", which is none of DType; name one"));
  }
  const absl::StatusOr<schedule::Cast> cast =
      schedule::CastBetween(held, param.dtype);
  if (!cast.ok()) {
    return Invalid(
        "DTYPE_MISMATCH", param.name,
        absl::StrCat("a trainer holds it as ", schedule::DTypeName(held),
                     " and registers it as ", schedule::DTypeName(param.dtype),
                     "; ", cast.status().message(),
                     "; cast it in the trainer, or register it as ",
                     schedule::DTypeName(held)));
  }
  if (*cast == schedule::Cast::kBF16ToF8E4M3) {
    absl::Status status = schedule::ScaleParam(param).status();
    if (status.ok()) status = schedule::ScaleBoxOf(param, box).status();
    if (!status.ok()) {
      return Invalid("DTYPE_MISMATCH", param.name, status.message());
    }
  }
  return held;
}

absl::Status CheckParameter(const schedule::Param& param) {
  const absl::Status status = schedule::CheckParam(param);
  if (status.ok()) return status;
  absl::string_view ours = "SHAPE_INVALID";
  if (schedule::ReasonOf(status) == schedule::kUnknownDType) {
    ours = "DTYPE_UNKNOWN";
  }
  if (param.name.empty()) ours = "NAME_INVALID";
  return transport::MakeError(absl::StatusCode::kInvalidArgument, ours,
                              status.message());
}

void ToProto(const transport::Digest& digest, v1::Digest* out) {
  out->set_lane0(digest.lanes[0]);
  out->set_lane1(digest.lanes[1]);
}

transport::Digest FromProto(const v1::Digest& digest) {
  transport::Digest result;
  result.lanes[0] = digest.lane0();
  result.lanes[1] = digest.lane1();
  return result;
}

}  // namespace daemon
}  // namespace weightsync
