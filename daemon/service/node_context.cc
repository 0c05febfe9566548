#include "daemon/service/node_context.h"

#include <sys/random.h>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

absl::Status ApiStatus(const absl::Status& status) {
  struct Rename {
    absl::string_view from, to;
  };
  constexpr Rename kRenames[] = {
      {"NO_MEMORY_FOR_ARENA", "MEMORY_EXHAUSTED"},
      {"NO_ADDRESS_SPACE", "MEMORY_EXHAUSTED"},
      {"BAD_SIZE", "ARENA_SIZE_INVALID"},
      {"SEGMENT_TOO_SMALL", "MEMORY_OUT_OF_RANGE"},
      {"SEGMENT_UNKNOWN", "MEMORY_UNKNOWN"},
      {"SEGMENT_DENIED", "MEMORY_DENIED"},
      {"BAD_SEGMENT_NAME", "MEMORY_NAME_INVALID"},
  };
  const std::string reason = ErrorReason(status);
  for (const Rename& rename : kRenames) {
    if (reason != rename.from) continue;
    // Asking for less, or for what is there, is the caller's to do: OUT_OF_RANGE says the same.
    const absl::StatusCode code = absl::IsOutOfRange(status) ? absl::StatusCode::kInvalidArgument
                                                             : status.code();
    return ErrorStatus(code, rename.to, status.message());
  }
  return status;
}

std::string RandomId() {
  char bytes[16];
  PCHECK(getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes));
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

}  // namespace daemon
}  // namespace weightsync
