// absl's times and protobuf's.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_PROTO_TIME_H_
#define WEIGHTSYNC_DAEMON_SERVICE_PROTO_TIME_H_

#include <cstdint>

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"

namespace weightsync {
namespace daemon {

inline google::protobuf::Duration EncodeDuration(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(duration / absl::Nanoseconds(1)));
  return proto;
}

inline absl::Duration DecodeDuration(const google::protobuf::Duration& proto) {
  return absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}

inline google::protobuf::Timestamp EncodeTime(absl::Time time) {
  google::protobuf::Timestamp proto;
  const int64_t seconds = absl::ToUnixSeconds(time);
  proto.set_seconds(seconds);
  proto.set_nanos(static_cast<int32_t>((time - absl::FromUnixSeconds(seconds)) /
                                       absl::Nanoseconds(1)));
  return proto;
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_PROTO_TIME_H_
