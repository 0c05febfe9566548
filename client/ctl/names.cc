#include "client/ctl/names.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/status.h"

namespace weightsync {
namespace ctl {
namespace {

absl::Status Invalid(absl::string_view text, absl::string_view example) {
  return ErrorStatus(
      absl::StatusCode::kInvalidArgument, "RESOURCE_NAME_INVALID",
      absl::StrCat("\"", text, "\" names nothing here; write ", example, "."));
}

}  // namespace

absl::StatusOr<Name> ParseName(absl::string_view text,
                               absl::string_view collection) {
  std::vector<std::string> parts = absl::StrSplit(text, '/');
  for (const std::string& part : parts) {
    if (part.empty()) {
      return Invalid(text, absl::StrCat("MODEL or MODEL/NAME"));
    }
  }
  if (parts.size() == 4 && parts[0] == "models" && parts[2] == collection) {
    return Name{absl::StrCat("models/", parts[1]), std::string(text)};
  }
  if (parts.size() == 2 && parts[0] == "models") {
    return Name{std::string(text), ""};
  }
  if (parts.size() == 2) {
    return Name{
        absl::StrCat("models/", parts[0]),
        absl::StrCat("models/", parts[0], "/", collection, "/", parts[1])};
  }
  if (parts.size() == 1) return Name{absl::StrCat("models/", parts[0]), ""};
  return Invalid(text, absl::StrCat("MODEL, MODEL/NAME or models/MODEL/",
                                    collection, "/NAME"));
}

absl::StatusOr<std::string> ParseTopName(absl::string_view text,
                                         absl::string_view collection) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  if (parts.size() == 1 && !parts[0].empty()) {
    return absl::StrCat(collection, "/", parts[0]);
  }
  if (parts.size() == 2 && parts[0] == collection && !parts[1].empty()) {
    return std::string(text);
  }
  return Invalid(text, absl::StrCat("NAME or ", collection, "/NAME"));
}

}  // namespace ctl
}  // namespace weightsync
