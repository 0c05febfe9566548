// The journal's seam to the file system, so that tests can fail it.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_FILE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace daemon {

// A file opened for appending. Closed by its destructor.
class JournalFile {
 public:
  virtual ~JournalFile() = default;
  // All of `data`, or an error.
  virtual absl::Status Append(absl::string_view data) = 0;
  // On the disk when it returns.
  virtual absl::Status Sync() = 0;
};

class JournalFiles {
 public:
  virtual ~JournalFiles() = default;
  // At most `size` bytes from `offset` on; fewer only at its end. NOT_FOUND
  // when there is no such file.
  virtual absl::StatusOr<std::string> Read(const std::string& path,
                                           int64_t offset, int64_t size) = 0;
  // Makes it, or empties it.
  virtual absl::StatusOr<std::unique_ptr<JournalFile>> Create(
      const std::string& path) = 0;
  virtual absl::Status Rename(const std::string& from,
                              const std::string& to) = 0;
  // The directory's entries are on the disk when it returns.
  virtual absl::Status SyncDirectory(const std::string& dir) = 0;
  // Held until the returned object goes. FAILED_PRECONDITION when another
  // process holds it.
  virtual absl::StatusOr<std::shared_ptr<void>> Lock(
      const std::string& path) = 0;
};

// POSIX. Never destroyed.
JournalFiles* SystemJournalFiles();

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_FILE_H_
