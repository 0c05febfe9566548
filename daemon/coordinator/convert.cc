#include "daemon/coordinator/convert.h"

#include "proto/status.h"

namespace weightsync {
namespace daemon {

google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp proto;
  const int64_t seconds = absl::ToUnixSeconds(time);
  proto.set_seconds(seconds);
  proto.set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
  return proto;
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

absl::Time FromProto(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) +
         absl::Nanoseconds(time.nanos());
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) +
         absl::Nanoseconds(duration.nanos());
}

v1::Failure ToProto(const Fault& fault) {
  v1::Failure failure;
  if (fault.ok()) return failure;
  failure.set_code(static_cast<int>(fault.code));
  failure.set_reason(fault.reason);
  failure.set_message(fault.message);
  return failure;
}

bool IsFailure(const v1::Failure& failure) {
  return failure.code() != 0 || !failure.reason().empty();
}

Fault FromProto(const v1::Failure& failure) {
  if (!IsFailure(failure)) return Fault();
  const absl::StatusCode code =
      failure.code() >= 1 && failure.code() <= 16
          ? static_cast<absl::StatusCode>(failure.code())
          : absl::StatusCode::kInternal;
  return Fault(code, failure.reason(), failure.message());
}

PauseKind PauseOf(v1::PauseMode mode) {
  switch (mode) {
    case v1::PAUSE_MODE_ABORT:
      return PauseKind::kAbort;
    case v1::PAUSE_MODE_KEEP:
      return PauseKind::kKeep;
    case v1::PAUSE_MODE_NONE:
      return PauseKind::kNone;
    default:
      return PauseKind::kDrain;
  }
}

v1::PauseMode ToProto(PauseKind kind) {
  switch (kind) {
    case PauseKind::kAbort:
      return v1::PAUSE_MODE_ABORT;
    case PauseKind::kKeep:
      return v1::PAUSE_MODE_KEEP;
    case PauseKind::kNone:
      return v1::PAUSE_MODE_NONE;
    case PauseKind::kDrain:
      break;
  }
  return v1::PAUSE_MODE_DRAIN;
}

absl::Status ToStatus(const Fault& fault) {
  if (fault.ok()) return absl::OkStatus();
  return ErrorStatus(fault.code, fault.reason, fault.message);
}

}  // namespace daemon
}  // namespace weightsync
