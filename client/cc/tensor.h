// A part of a model's parameter in this process's memory: what a trainer rank
// offers and what a worker wants filled.
#ifndef WEIGHTSYNC_CLIENT_CC_TENSOR_H_
#define WEIGHTSYNC_CLIENT_CC_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace client {

// Part of a tensor, in elements; one entry per dimension.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> extent;
};

struct Tensor {
  // The parameter, whole: the same words on every rank and worker.
  std::string name;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  // How its elements lie here, where a trainer has them in another type: the
  // daemon casts them when it copies them out (TensorShard.dtype says which to
  // which). Unset: as the parameter is.
  v1::DType stored_dtype = v1::DTYPE_UNSPECIFIED;
  // Which part of it lies here. Absent: all of it.
  absl::optional<Box> box;
  // Distance between neighbours in each dimension, in elements (as
  // torch.Tensor.stride). Empty: dense, row-major over the box.
  std::vector<int64_t> strides;
  // The first element. Not owned.
  void* data = nullptr;
  // `data` is an address of GPU memory of this process.
  bool on_gpu = false;
  // "main" when empty.
  std::string component;
};

// Bytes of one element; 0 for what is no element type.
int64_t DTypeBytes(v1::DType dtype);

// Bytes of one element here.
int64_t StoredBytes(const Tensor& tensor);

// Checks what the daemon would check too, so that a mistake is found where it
// was made. Each names the tensor.
//   INVALID_ARGUMENT  DTYPE_UNKNOWN, SHAPE_INVALID (a dimension of zero, less,
//   or
//     above 2^31, or more bytes than int64 holds), BOX_OUT_OF_RANGE,
//     STRIDES_INVALID (another number of them, negative, or an extent of more
//     than 2^63 bytes), NAME_INVALID (empty).
absl::Status CheckTensor(const Tensor& tensor);

// CheckTensor for each; also DUPLICATE_NAME where `unique_names`, as workers
// have them, who get no other type than the parameter's either
// (DTYPE_MISMATCH).
absl::Status CheckTensors(absl::Span<const Tensor> tensors, bool unique_names);

// The rest needs a tensor that CheckTensor finds right.

// Extents of the part.
absl::Span<const int64_t> PartExtent(const Tensor& tensor);
// Elements, and bytes as they lie here, of the part, without gaps.
int64_t PartElements(const Tensor& tensor);
int64_t PartBytes(const Tensor& tensor);
// Strides in elements, dense ones filled in.
std::vector<int64_t> PartStrides(const Tensor& tensor);
// Bytes from the first to behind the last element, gaps included.
int64_t SpanBytes(const Tensor& tensor);

// REQUIRES: stored_dtype is unset.
v1::WantedTensor ToWantedTensor(const Tensor& tensor);
// `region` and `offset_bytes`: where `data` lies in what is registered.
v1::TensorShard ToTensorShard(const Tensor& tensor, int region,
                              int64_t offset_bytes);

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_TENSOR_H_
