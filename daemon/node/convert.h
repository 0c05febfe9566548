// Between the messages of the API and the types of schedule/.

#ifndef WEIGHTSYNC_DAEMON_NODE_CONVERT_H_
#define WEIGHTSYNC_DAEMON_NODE_CONVERT_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "schedule/box.h"
#include "schedule/catalog.h"
#include "schedule/dtype.h"
#include "transport/digest.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

// kUnspecified for a value that this build does not know.
schedule::DType FromProto(v1::DType dtype);

// `box`, or the whole tensor when `has_box` is false. INVALID_ARGUMENT
// (BOX_OUT_OF_RANGE), naming `parameter`, when it does not lie inside `shape`.
absl::StatusOr<schedule::Box> BoxFromProto(bool has_box, const v1::Box& box,
                                           absl::Span<const int64_t> shape,
                                           absl::string_view parameter);

// Strides in bytes of a tensor with `extent`: `strides` times the element, or
// row-major when there are none. *span gets the bytes from the first element to
// the end of the last one. INVALID_ARGUMENT (STRIDES_INVALID), naming
// `parameter`, for a wrong count, a negative stride, one under which two
// elements share bytes, or a span above 2^62.
absl::StatusOr<schedule::Dims> StridesFromProto(
    const google::protobuf::RepeatedField<int64_t>& strides,
    absl::Span<const int64_t> extent, int64_t element_bytes,
    absl::string_view parameter, int64_t* span);

schedule::Param ParamFromProto(const v1::Parameter& parameter);
v1::Parameter ToProto(const schedule::Param& param);

// How the elements of a shard of `param` lie in its trainer's memory: `dtype`,
// or as the parameter has them where that is unset. INVALID_ARGUMENT:
// DTYPE_UNKNOWN; DTYPE_MISMATCH, naming the parameter, both types and what can
// be done, where there is no cast between them or `box` has parts of blocks.
absl::StatusOr<schedule::DType> ShardDType(v1::DType dtype,
                                           const schedule::Param& param,
                                           const schedule::Box& box);

// Judges one parameter as the catalog would. INVALID_ARGUMENT: DTYPE_UNKNOWN,
// SHAPE_INVALID (an extent that is zero, negative or above 2^31, too many
// dimensions, more bytes than 63 bits count), NAME_INVALID.
absl::Status CheckParameter(const schedule::Param& param);

void ToProto(const transport::Digest& digest, v1::Digest* out);
transport::Digest FromProto(const v1::Digest& digest);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_CONVERT_H_
