// Errors on their way: absl::Status inside a process, Failure in a resource or
// on the stream between daemons, grpc::Status on the wire. All three carry a
// code, a sentence that says what to do, and a reason in UPPER_SNAKE that
// programs can test.
//
// In absl::Status the reason is a payload under kReasonPayload. On the wire it
// is a google.rpc.ErrorInfo with domain kErrorDomain inside the
// google.rpc.Status of the grpc-status-details-bin trailer, which clients in
// any language can decode.
//
// Conversions lose nothing but over-long sentences: what does not fit into
// gRPC's 8 KiB of metadata would turn the whole error into RESOURCE_EXHAUSTED,
// so ToGrpcStatus shortens it.

#ifndef WEIGHTSYNC_PROTO_STATUS_H_
#define WEIGHTSYNC_PROTO_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {

// Where an absl::Status keeps its reason. Rooms that do not know this one use
// the same URL.
inline constexpr char kReasonPayload[] = "type.weightsync/reason";
inline constexpr char kErrorDomain[] = "weightsync.dev";

// A status with a reason. REQUIRES: code is not kOk.
absl::Status ErrorStatus(absl::StatusCode code, absl::string_view reason,
                         absl::string_view message);

// The reason; the name of the code ("INTERNAL") when none was attached, and ""
// for OK.
std::string ErrorReason(const absl::Status& status);

// OK gives a Failure that is all default, which FromFailure takes for OK.
v1::Failure ToFailure(const absl::Status& status);
absl::Status FromFailure(const v1::Failure& failure);

grpc::Status ToGrpcStatus(const absl::Status& status);
// What did not come from a weightsync server (a refused connection, a deadline)
// has no ErrorInfo and so no reason of its own.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace weightsync

#endif  // WEIGHTSYNC_PROTO_STATUS_H_
