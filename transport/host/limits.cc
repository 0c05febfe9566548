#include "transport/host/limits.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

absl::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The number in a file of one number. Nothing for "max", and for version 1's
// way to say the same: a number beyond any memory.
absl::optional<int64_t> ReadNumber(const std::string& path) {
  const absl::optional<std::string> text = ReadFile(path);
  int64_t value;
  if (!text.has_value() ||
      !absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &value))
    return absl::nullopt;
  if (value >= int64_t{1} << 60) return absl::nullopt;
  return value;
}

// The number after `key` in lines of "key number".
int64_t ReadKey(const std::string& path, absl::string_view key) {
  const absl::optional<std::string> text = ReadFile(path);
  if (!text.has_value()) return 0;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    int64_t value;
    if (absl::ConsumePrefix(&line, key) && absl::ConsumePrefix(&line, " ") &&
        absl::SimpleAtoi(line, &value)) {
      return value;
    }
  }
  return 0;
}

struct GroupFiles {
  const char* limit;
  const char* used;
  const char* reclaimable;  // key in memory.stat
};
constexpr GroupFiles kVersion1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current",
                                  "inactive_file"};

// Looks at the group `path` below `root` and at all above it: a limit binds
// everything below. Inside a container the path may be the host's, of which
// only the end of the walk, the root, is there: files that are not there say
// nothing.
void LookAtGroups(const std::string& root, std::string path,
                  const GroupFiles& files, MemoryLimits* limits) {
  while (true) {
    const std::string directory = path == "/" ? root : root + path;
    const absl::optional<int64_t> limit =
        ReadNumber(absl::StrCat(directory, "/", files.limit));
    const absl::optional<int64_t> used =
        ReadNumber(absl::StrCat(directory, "/", files.used));
    if (limit.has_value() && used.has_value()) {
      const int64_t reclaimable =
          ReadKey(absl::StrCat(directory, "/memory.stat"), files.reclaimable);
      const int64_t available = std::max<int64_t>(
          0, *limit - std::max<int64_t>(0, *used - reclaimable));
      if (available < limits->group_available_bytes) {
        limits->group_available_bytes = available;
        limits->group_limit_bytes = *limit;
        limits->group = directory;
      }
    }
    if (path.size() <= 1) return;
    const size_t slash = path.rfind('/');
    path =
        slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
  }
}

bool HasController(absl::string_view controllers, absl::string_view name) {
  for (absl::string_view controller : absl::StrSplit(controllers, ',')) {
    if (controller == name) return true;
  }
  return false;
}

}  // namespace

MemoryLimits LookAtMemory(const std::string& proc_root,
                          const std::string& cgroup_root) {
  MemoryLimits limits;
  limits.machine_available_bytes = INT64_MAX;
  limits.machine_total_bytes = INT64_MAX;
  const std::string meminfo = ReadFile(proc_root + "/meminfo").value_or("");
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    const bool total = absl::ConsumePrefix(&line, "MemTotal:");
    int64_t kib;
    if ((total || absl::ConsumePrefix(&line, "MemAvailable:")) &&
        absl::ConsumeSuffix(&line, "kB") &&
        absl::SimpleAtoi(absl::StripAsciiWhitespace(line), &kib)) {
      (total ? limits.machine_total_bytes : limits.machine_available_bytes) =
          kib * 1024;
    }
  }
  const std::string groups = ReadFile(proc_root + "/self/cgroup").value_or("");
  for (absl::string_view line : absl::StrSplit(groups, '\n')) {
    // hierarchy-ID:controllers:path
    const std::vector<absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::string path(parts[2]);
    if (parts[1].empty()) {
      LookAtGroups(cgroup_root, path, kVersion2, &limits);
      LookAtGroups(cgroup_root + "/unified", path, kVersion2, &limits);
    } else if (HasController(parts[1], "memory")) {
      LookAtGroups(cgroup_root + "/memory", path, kVersion1, &limits);
    }
  }
  return limits;
}

absl::Status CheckMemory(absl::string_view what, int64_t bytes,
                         int64_t keep_free_bytes, const MemoryLimits& limits) {
  if (bytes <= limits.available_bytes() - keep_free_bytes)
    return absl::OkStatus();
  std::string message =
      absl::StrCat(what, " needs ", bytes, " bytes; this machine has ",
                   limits.machine_available_bytes, " bytes available");
  if (limits.group_limit_bytes != INT64_MAX) {
    absl::StrAppend(&message, ", the control group ", limits.group, " leaves ",
                    limits.group_available_bytes, " of its ",
                    limits.group_limit_bytes);
  }
  absl::StrAppend(&message, ", and ", keep_free_bytes,
                  " are kept free for others. Ask for less, or free memory.");
  return MakeError(absl::StatusCode::kResourceExhausted, "NO_MEMORY_FOR_ARENA",
                   message);
}

}  // namespace transport
}  // namespace weightsync
