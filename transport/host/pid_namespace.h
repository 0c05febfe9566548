// In which pid namespace a process counts. A pid says who is meant only there:
// the main process of every container is number 1.
#ifndef WEIGHTSYNC_TRANSPORT_HOST_PID_NAMESPACE_H_
#define WEIGHTSYNC_TRANSPORT_HOST_PID_NAMESPACE_H_

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace transport {

// The inode of the namespace of `process`, a pid of this one, or "self": the
// same number for the same one everywhere on the machine. 0: it cannot be seen.
inline uint64_t PidNamespace(absl::string_view process = "self") {
  struct stat stat;
  return ::stat(absl::StrCat("/proc/", process, "/ns/pid").c_str(), &stat) == 0
             ? stat.st_ino
             : 0;
}

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_PID_NAMESPACE_H_
