#include "client/cc/tensor.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/status.h"

namespace weightsync {
namespace client {
namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 31;

absl::Status Invalid(absl::string_view reason, const Tensor& tensor,
                     absl::string_view message) {
  return ErrorStatus(absl::StatusCode::kInvalidArgument, reason,
                     absl::StrCat(tensor.name, ": ", message));
}

}  // namespace

int64_t DTypeBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BOOL:
    case v1::DTYPE_U8:
    case v1::DTYPE_I8:
    case v1::DTYPE_F8_E5M2:
    case v1::DTYPE_F8_E4M3:
      return 1;
    case v1::DTYPE_I16:
    case v1::DTYPE_U16:
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_I32:
    case v1::DTYPE_U32:
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_I64:
    case v1::DTYPE_U64:
    case v1::DTYPE_F64:
      return 8;
    default:
      return 0;
  }
}

int64_t StoredBytes(const Tensor& tensor) {
  return DTypeBytes(tensor.stored_dtype == v1::DTYPE_UNSPECIFIED
                        ? tensor.dtype
                        : tensor.stored_dtype);
}

absl::Status CheckTensor(const Tensor& tensor) {
  if (tensor.name.empty()) {
    return ErrorStatus(absl::StatusCode::kInvalidArgument, "NAME_INVALID",
                       "A tensor has no name.");
  }
  const int64_t element = StoredBytes(tensor);
  if (element == 0 || DTypeBytes(tensor.dtype) == 0) {
    return Invalid("DTYPE_UNKNOWN", tensor, "give it an element type.");
  }
  int64_t bytes = std::max(element, DTypeBytes(tensor.dtype));
  for (const int64_t extent : tensor.shape) {
    if (extent <= 0 || extent > kMaxDimension ||
        __builtin_mul_overflow(bytes, extent, &bytes)) {
      return Invalid("SHAPE_INVALID", tensor,
                     absl::StrCat("[", absl::StrJoin(tensor.shape, ", "),
                                  "] is no shape: every dimension is 1 to "
                                  "2^31, all together below 2^63 bytes."));
    }
  }
  if (tensor.box.has_value()) {
    const Box& box = *tensor.box;
    bool inside = box.offset.size() == tensor.shape.size() &&
                  box.extent.size() == tensor.shape.size();
    for (size_t d = 0; inside && d < tensor.shape.size(); ++d) {
      inside = box.offset[d] >= 0 && box.extent[d] > 0 &&
               box.extent[d] <= tensor.shape[d] &&
               box.offset[d] <= tensor.shape[d] - box.extent[d];
    }
    if (!inside) {
      return Invalid(
          "BOX_OUT_OF_RANGE", tensor,
          absl::StrCat("the box at [", absl::StrJoin(box.offset, ", "),
                       "] of [", absl::StrJoin(box.extent, ", "),
                       "] does not lie in the shape [",
                       absl::StrJoin(tensor.shape, ", "), "]."));
    }
  }
  if (!tensor.strides.empty()) {
    const absl::Span<const int64_t> extent = PartExtent(tensor);
    bool right = tensor.strides.size() == tensor.shape.size();
    int64_t last = 0;
    for (size_t d = 0; right && d < extent.size(); ++d) {
      int64_t reach;
      right =
          tensor.strides[d] >= 0 &&
          !__builtin_mul_overflow(extent[d] - 1, tensor.strides[d], &reach) &&
          !__builtin_add_overflow(last, reach, &last);
    }
    int64_t span;
    right = right && !__builtin_mul_overflow(last + 1, element, &span);
    if (!right) {
      return Invalid(
          "STRIDES_INVALID", tensor,
          absl::StrCat("[", absl::StrJoin(tensor.strides, ", "),
                       "] are no strides: give one for each dimension, not "
                       "negative, or none for a dense tensor."));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(absl::Span<const Tensor> tensors, bool unique_names) {
  absl::flat_hash_set<absl::string_view> names;
  for (const Tensor& tensor : tensors) {
    const absl::Status status = CheckTensor(tensor);
    if (!status.ok()) return status;
    if (unique_names && !names.insert(tensor.name).second) {
      return Invalid("DUPLICATE_NAME", tensor, "the name occurs twice.");
    }
    if (unique_names && tensor.stored_dtype != v1::DTYPE_UNSPECIFIED &&
        tensor.stored_dtype != tensor.dtype) {
      return Invalid("DTYPE_MISMATCH", tensor,
                     "a worker gets it in the parameter's type and no other.");
    }
  }
  return absl::OkStatus();
}

absl::Span<const int64_t> PartExtent(const Tensor& tensor) {
  return tensor.box.has_value() ? tensor.box->extent : tensor.shape;
}

int64_t PartElements(const Tensor& tensor) {
  int64_t elements = 1;
  for (const int64_t extent : PartExtent(tensor)) elements *= extent;
  return elements;
}

int64_t PartBytes(const Tensor& tensor) {
  return PartElements(tensor) * StoredBytes(tensor);
}

std::vector<int64_t> PartStrides(const Tensor& tensor) {
  if (!tensor.strides.empty()) return tensor.strides;
  const absl::Span<const int64_t> extent = PartExtent(tensor);
  std::vector<int64_t> strides(extent.size());
  int64_t stride = 1;
  for (size_t d = extent.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= extent[d];
  }
  return strides;
}

int64_t SpanBytes(const Tensor& tensor) {
  const absl::Span<const int64_t> extent = PartExtent(tensor);
  const std::vector<int64_t> strides = PartStrides(tensor);
  int64_t last = 0;
  for (size_t d = 0; d < extent.size(); ++d) {
    last += (extent[d] - 1) * strides[d];
  }
  return (last + 1) * StoredBytes(tensor);
}

namespace {

void FillBox(const Tensor& tensor, v1::Box* box) {
  for (const int64_t o : tensor.box->offset) box->add_offset(o);
  for (const int64_t e : tensor.box->extent) box->add_extent(e);
}

}  // namespace

v1::WantedTensor ToWantedTensor(const Tensor& tensor) {
  v1::WantedTensor wanted;
  wanted.set_name(tensor.name);
  wanted.set_dtype(tensor.dtype);
  for (const int64_t extent : tensor.shape) wanted.add_shape(extent);
  if (tensor.box.has_value()) FillBox(tensor, wanted.mutable_box());
  for (const int64_t stride : tensor.strides) wanted.add_strides(stride);
  return wanted;
}

v1::TensorShard ToTensorShard(const Tensor& tensor, int region,
                              int64_t offset_bytes) {
  v1::TensorShard shard;
  v1::Parameter* parameter = shard.mutable_parameter();
  parameter->set_name(tensor.name);
  parameter->set_dtype(tensor.dtype);
  for (const int64_t extent : tensor.shape) parameter->add_shape(extent);
  parameter->set_component(tensor.component);
  if (tensor.box.has_value()) FillBox(tensor, shard.mutable_box());
  shard.set_region(region);
  shard.set_offset_bytes(offset_bytes);
  for (const int64_t stride : tensor.strides) shard.add_strides(stride);
  shard.set_dtype(tensor.stored_dtype);
  return shard;
}

}  // namespace client
}  // namespace weightsync
