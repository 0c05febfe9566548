#include "client/ctl/ctl.h"

#include <google/protobuf/util/json_util.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/help.h"
#include "client/ctl/names.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"

namespace weightsync {
namespace ctl {

absl::StatusOr<std::string> ToJson(const google::protobuf::Message& message,
                                   bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = pretty;
  options.always_print_primitive_fields = true;
  std::string text;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  return text;
}

void PrintError(const Screen& screen, bool json, const absl::Status& status,
                const std::string& help) {
  const bool usage = !help.empty();
  if (!json) {
    *screen.err << "weightsyncctl: ";
    if (!usage) *screen.err << ErrorReason(status) << ": ";
    *screen.err << status.message() << "\n";
    if (usage) *screen.err << "\n" << help;
    return;
  }
  nlohmann::ordered_json error;
  error["code"] = absl::StatusCodeToString(status.code());
  error["reason"] = usage ? "USAGE" : ErrorReason(status);
  error["message"] = std::string(status.message());
  // What comes from a command line need not be UTF-8.
  *screen.err << error.dump(-1, ' ', false,
                            nlohmann::ordered_json::error_handler_t::replace)
              << "\n";
}

int ExitOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kDeadlineExceeded:
      // A daemon that does not answer, not one that says that time is up.
      return ErrorReason(status) == "CALL_TIMEOUT" ? kExitUnreachable
                                                   : kExitError;
    default:
      return kExitError;
  }
}

absl::optional<std::string> Ctl::OneName(const char* collection,
                                         const char* usage) {
  if (arguments_.positional.size() != 1) {
    Usage(usage);
    return absl::nullopt;
  }
  const absl::StatusOr<Name> name =
      ParseName(arguments_.positional[0], collection);
  if (!name.ok()) {
    UsageOf(name.status());
    return absl::nullopt;
  }
  if (name->resource.empty()) {
    Usage(usage);
    return absl::nullopt;
  }
  return name->resource;
}

}  // namespace ctl
}  // namespace weightsync
