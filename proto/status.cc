#include "proto/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace weightsync {
namespace {

// The sentence travels twice, once percent-encoded (up to three times its size)
// and once in base64 (four thirds): 1700 bytes stay below 8 KiB with room for
// the caller's own metadata.
constexpr size_t kLongestMessage = 1700;

// Number of continuation bytes after `lead`, -1 if it cannot lead a UTF-8
// sequence.
int ContinuationBytes(unsigned char lead) {
  if (lead < 0x80) return 0;
  if (lead >= 0xC2 && lead < 0xE0) return 1;
  if (lead >= 0xE0 && lead < 0xF0) return 2;
  if (lead >= 0xF0 && lead < 0xF5) return 3;
  return -1;
}

// Valid UTF-8 of at most `limit` bytes: a path that a sentence quotes may be
// anything, and a protobuf string with other bytes in it cannot be parsed.
std::string Presentable(absl::string_view text, size_t limit) {
  std::string out;
  size_t i = 0;
  while (i < text.size()) {
    const int more = ContinuationBytes(static_cast<unsigned char>(text[i]));
    bool valid = more >= 0 && i + more < text.size();
    for (int k = 1; valid && k <= more; ++k) {
      valid = (static_cast<unsigned char>(text[i + k]) & 0xC0) == 0x80;
    }
    // Overlong forms, surrogates and what lies above U+10FFFF.
    if (valid && more >= 2) {
      const unsigned char a = text[i], b = text[i + 1];
      valid = !(a == 0xE0 && b < 0xA0) && !(a == 0xED && b >= 0xA0) &&
              !(a == 0xF0 && b < 0x90) && !(a == 0xF4 && b >= 0x90);
    }
    const absl::string_view piece = valid ? text.substr(i, more + 1) : "?";
    if (out.size() + piece.size() > limit) {
      absl::StrAppend(&out, "...");
      break;
    }
    absl::StrAppend(&out, piece);
    i += valid ? more + 1 : 1;
  }
  return out;
}

// Codes of gRPC and absl are the same numbers.
absl::StatusCode ToCode(int code) {
  if (code < 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return absl::StatusCode::kUnknown;
  }
  return static_cast<absl::StatusCode>(code);
}

std::string AttachedReason(const absl::Status& status) {
  absl::optional<absl::Cord> payload = status.GetPayload(kReasonPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace

absl::Status ErrorStatus(absl::StatusCode code, absl::string_view reason,
                         absl::string_view message) {
  absl::Status status(code, message);
  if (!reason.empty()) status.SetPayload(kReasonPayload, absl::Cord(reason));
  return status;
}

std::string ErrorReason(const absl::Status& status) {
  if (status.ok()) return "";
  std::string reason = AttachedReason(status);
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

v1::Failure ToFailure(const absl::Status& status) {
  v1::Failure failure;
  if (status.ok()) return failure;
  failure.set_code(static_cast<int>(status.code()));
  failure.set_reason(ErrorReason(status));
  failure.set_message(Presentable(status.message(), status.message().size()));
  return failure;
}

absl::Status FromFailure(const v1::Failure& failure) {
  if (failure.code() == 0 && failure.reason().empty()) return absl::OkStatus();
  // A reason without a code is still a failure.
  const absl::StatusCode code =
      failure.code() == 0 ? absl::StatusCode::kUnknown : ToCode(failure.code());
  return ErrorStatus(code, failure.reason(), failure.message());
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Presentable(status.message(), kLongestMessage);
  google::rpc::ErrorInfo info;
  info.set_reason(ErrorReason(status));
  info.set_domain(kErrorDomain);
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  details.add_details()->PackFrom(info);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  std::string reason;
  google::rpc::Status details;
  if (!status.error_details().empty() &&
      details.ParseFromString(status.error_details())) {
    for (const google::protobuf::Any& detail : details.details()) {
      google::rpc::ErrorInfo info;
      if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info) &&
          info.domain() == kErrorDomain) {
        reason = info.reason();
      }
    }
  }
  return ErrorStatus(ToCode(status.error_code()), reason,
                     status.error_message());
}

}  // namespace weightsync
