// The coordinator's journal: an append-only file of records, each on the disk
// (file and directory synced) before Append returns.
//
// The file "coordinator.journal" in --state_dir:
//   "WSJRNL01"                          magic, with the format's version
//   frames of  u32 length, u32 crc32c of (length, payload), payload
// little-endian; a payload is a serialized internal.v1.JournalRecord.
//
// At opening the records are read, what nobody needs any more is left out, and
// the rest is written to a new file that takes the old one's place by rename.
//   - A torn tail (a crash inside Append: the file ends within the last frame,
//     or the last frame's checksum is wrong and nothing follows it) is cut,
//     with a warning: nobody was told of that record.
//   - Damage with intact records or further bytes after it is refused with its
//     offset: something that was promised may be missing.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/coordinator/journal_file.h"
#include "daemon/coordinator/journal_state.h"
#include "weightsync/internal/v1/journal.pb.h"

namespace weightsync {
namespace daemon {

// Not thread-safe.
class Journal {
 public:
  // Opens or makes the journal in `dir`, which must exist. `files` outlives it;
  // null means the machine's own file system.
  //   DATA_LOSS (JOURNAL_DAMAGED): with the offset.
  //   FAILED_PRECONDITION (JOURNAL_FORMAT_UNSUPPORTED): of a newer release.
  //   (JOURNAL_LOCKED): another process has it open.
  //   Others (JOURNAL_IO): what the system said.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(
      const std::string& dir, absl::Time now, absl::Duration request_ttl,
      JournalFiles* files = nullptr);

  // What the records added up to when it was opened.
  const JournalState& recovered() const { return recovered_; }

  // On the disk when it returns OK. After an error nothing is known about the
  // record, and every later Append fails too: end the process.
  absl::Status Append(const internal::v1::JournalRecord& record);

  int64_t size_bytes() const { return size_bytes_; }

 private:
  Journal(JournalState recovered, std::shared_ptr<void> lock,
          std::unique_ptr<JournalFile> file, int64_t size_bytes);

  const JournalState recovered_;
  const std::shared_ptr<void> lock_;
  std::unique_ptr<JournalFile> file_;
  int64_t size_bytes_ = 0;
  absl::Status broken_;
};

// CRC-32C (Castagnoli), as iSCSI has it.
uint32_t Crc32c(absl::string_view data, uint32_t crc = 0);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_
