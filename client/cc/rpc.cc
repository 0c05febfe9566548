#include "client/cc/rpc.h"

#include <sys/stat.h>

#include <cstdint>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weightsync {
namespace client {
namespace {

constexpr char kLibraryName[] = "weightsync-cc/0.1";

}  // namespace

std::string DefaultAddress() {
  struct stat info;
  if (stat(kDefaultSocket, &info) == 0 && S_ISSOCK(info.st_mode)) {
    return absl::StrCat("unix:", kDefaultSocket);
  }
  return kDefaultAddress;
}

absl::StatusOr<std::string> NormalizeAddress(absl::string_view address) {
  if (address.empty()) return DefaultAddress();
  if (absl::StartsWith(address, "/")) return absl::StrCat("unix:", address);
  if (absl::StartsWith(address, "unix:")) {
    if (address.size() > 5) return std::string(address);
  } else {
    const size_t colon = address.rfind(':');
    int port = 0;
    if (colon != absl::string_view::npos && colon > 0 &&
        absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 &&
        port < 65536 && !absl::StrContains(address, "/")) {
      return std::string(address);
    }
  }
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "ADDRESS_INVALID",
      absl::StrCat("\"", address,
                   "\" is no address: give host:port, unix:/path or /path."));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(
    absl::string_view address) {
  const absl::StatusOr<std::string> target = NormalizeAddress(address);
  if (!target.ok()) return target.status();
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Weights never go through a proxy, and a proxy has no place on loopback.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(*target, grpc::InsecureChannelCredentials(),
                                   args);
}

bool IsPermanent(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return true;
    default:
      return false;
  }
}

void PrepareContext(absl::Time deadline, grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(deadline));
  context->set_wait_for_ready(true);
}

absl::Status CallStatus(absl::string_view what, const grpc::Status& status) {
  absl::Status converted = FromGrpcStatus(status);
  if (converted.ok() || converted.GetPayload(kReasonPayload).has_value()) {
    return converted;
  }
  absl::string_view reason;
  std::string sentence;
  switch (converted.code()) {
    case absl::StatusCode::kDeadlineExceeded:
      reason = "CALL_TIMEOUT";
      sentence = "the daemon did not answer in time; is it running?";
      break;
    case absl::StatusCode::kUnavailable:
      reason = "DAEMON_UNREACHABLE";
      sentence = "the daemon cannot be reached; is it running?";
      break;
    case absl::StatusCode::kUnimplemented:
      reason = "METHOD_UNKNOWN";
      sentence =
          "the daemon does not know this call; is it of an older release?";
      break;
    default:
      return ErrorStatus(converted.code(), ErrorReason(converted),
                         absl::StrCat(what, ": ", converted.message()));
  }
  return ErrorStatus(
      converted.code(), reason,
      absl::StrCat(what, ": ", sentence, " (", converted.message(), ")"));
}

std::string RandomId() {
  std::random_device device;  // getrandom(2)
  std::string id;
  for (int i = 0; i < 4; ++i) {
    absl::StrAppendFormat(&id, "%08x", static_cast<uint32_t>(device()));
  }
  return id;
}

std::string ClientName(absl::string_view program) {
  return program.empty() ? std::string(kLibraryName)
                         : absl::StrCat(kLibraryName, " ", program);
}

std::string ModelName(absl::string_view model) {
  return absl::StartsWith(model, "models/") ? std::string(model)
                                            : absl::StrCat("models/", model);
}

}  // namespace client
}  // namespace weightsync
