#ifndef WEIGHTSYNC_TRANSPORT_HOST_LIMITS_H_
#define WEIGHTSYNC_TRANSPORT_HOST_LIMITS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {

// How much memory this process may still take.
struct MemoryLimits {
  int64_t machine_available_bytes = 0;  // MemAvailable
  int64_t machine_total_bytes = 0;      // MemTotal
  // Of the control group (or one above it) that leaves the least; INT64_MAX
  // where none sets a limit. What the kernel could drop of the group's file
  // pages counts as free.
  int64_t group_available_bytes = INT64_MAX;
  int64_t group_limit_bytes = INT64_MAX;
  std::string group;  // its directory

  // What this process could ever have.
  int64_t total_bytes() const {
    return machine_total_bytes < group_limit_bytes ? machine_total_bytes
                                                   : group_limit_bytes;
  }
  int64_t available_bytes() const {
    return machine_available_bytes < group_available_bytes
               ? machine_available_bytes
               : group_available_bytes;
  }
};

// Looks at /proc and at control groups of version 1 and 2; tests give other
// roots. What cannot be read sets no limit.
MemoryLimits LookAtMemory(const std::string& proc_root = "/proc",
                          const std::string& cgroup_root = "/sys/fs/cgroup");

// OK, or RESOURCE_EXHAUSTED (NO_MEMORY_FOR_ARENA) with the sums.
// `keep_free_bytes` are left to others.
absl::Status CheckMemory(absl::string_view what, int64_t bytes,
                         int64_t keep_free_bytes, const MemoryLimits& limits);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_LIMITS_H_
