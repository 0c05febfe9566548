// Errors of the planning functions: a status code, a sentence that names the
// parameter (or the option) at fault, and a machine-readable reason.
//
// The reason travels as a status payload, so that a gRPC service can copy it
// into google.rpc.ErrorInfo without parsing the sentence.

#ifndef WEIGHTSYNC_SCHEDULE_ERROR_H_
#define WEIGHTSYNC_SCHEDULE_ERROR_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace schedule {

// Payload URL under which the UPPER_SNAKE reason is attached.
inline constexpr char kReasonUrl[] = "type.weightsync/reason";

// Reasons, by who can mend them.
// The catalog:
inline constexpr char kDuplicateParameter[] = "DUPLICATE_PARAMETER";
inline constexpr char kInvalidParameter[] = "INVALID_PARAMETER";
inline constexpr char kEmptyDimension[] = "EMPTY_DIMENSION";
inline constexpr char kDimensionTooLarge[] = "DIMENSION_TOO_LARGE";
inline constexpr char kBytesOverflow[] = "BYTES_OVERFLOW";
inline constexpr char kUnknownDType[] = "UNKNOWN_DTYPE";
inline constexpr char kInvalidSafetensors[] = "INVALID_SAFETENSORS";
inline constexpr char kUnknownModel[] = "UNKNOWN_MODEL";
// Trainer shards:
inline constexpr char kUnknownOrdinal[] = "UNKNOWN_ORDINAL";
inline constexpr char kBoxOutsideTensor[] = "BOX_OUTSIDE_TENSOR";
inline constexpr char kOverlappingShards[] = "OVERLAPPING_SHARDS";
inline constexpr char kHoleInParameter[] = "HOLE_IN_PARAMETER";
inline constexpr char kDTypeMismatch[] = "DTYPE_MISMATCH";
inline constexpr char kShardNotHeld[] = "SHARD_NOT_HELD";
// Workers:
inline constexpr char kUnfilledBox[] = "UNFILLED_BOX";
// Options:
inline constexpr char kInvalidBucketBytes[] = "INVALID_BUCKET_BYTES";
inline constexpr char kInvalidTopology[] = "INVALID_TOPOLOGY";
inline constexpr char kInvalidCount[] = "INVALID_COUNT";
inline constexpr char kUnknownSharding[] = "UNKNOWN_SHARDING";
inline constexpr char kUnknownPolicy[] = "UNKNOWN_POLICY";
inline constexpr char kTooFewTrainers[] = "TOO_FEW_TRAINERS";
inline constexpr char kPortOverflow[] = "PORT_OVERFLOW";
inline constexpr char kInvalidRate[] = "INVALID_RATE";
inline constexpr char kPlanTooLarge[] = "PLAN_TOO_LARGE";
inline constexpr char kInvalidLayout[] = "INVALID_LAYOUT";

// A status with `reason` attached. REQUIRES: code is not kOk.
absl::Status PlanError(absl::StatusCode code, absl::string_view reason,
                       absl::string_view message);

// INVALID_ARGUMENT, the code of nearly every planning error.
absl::Status InvalidPlan(absl::string_view reason, absl::string_view message);

// The attached reason; empty when there is none.
std::string ReasonOf(const absl::Status& status);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_ERROR_H_
