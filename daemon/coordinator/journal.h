// The coordinator's journal: an append-only file of records, each on the disk
// (file and directory synced) before Append returns.
//
// The file "coordinator.journal" in --state_dir:
//   "WSJRNL02"                          magic, with the format's version
//   frames of  u32 length, u32 crc32c of (length, payload), payload
// little-endian; a payload is a serialized internal.v1.JournalRecord. The top
// bit of a length says that the record was appended together with the one
// before it, in one batch. Format 01, which is read too, has no batches.
//
// At opening the records are read, what nobody needs any more is left out, and
// the rest is written to a new file that takes the old one's place by rename.
// The same is done again while it grows (Tend).
//   - A torn tail (a crash inside Append: the file ends within the last batch,
//     or a checksum in that is wrong, and no other batch was begun behind it)
//     is cut, with a warning: nobody was told of those records. The records of
//     the batch that come before the damage count: they are what was decided.
//   - Damage with another batch behind it is refused with its offset: something
//     that was promised may be missing.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/coordinator/journal_file.h"
#include "daemon/coordinator/journal_state.h"
#include "weightsync/internal/v1/journal.pb.h"

namespace weightsync {
namespace daemon {

// A journal that has grown to this, and to four times what is needed of it, is
// written anew.
inline constexpr int64_t kJournalBytes = int64_t{64} << 20;

// Not thread-safe.
class Journal {
 public:
  // Opens or makes the journal in `dir`, which must exist. `files` outlives it;
  // null means the machine's own file system. `grown_bytes`: kJournalBytes, but
  // for tests.
  //   DATA_LOSS (JOURNAL_DAMAGED): with the offset.
  //   FAILED_PRECONDITION (JOURNAL_FORMAT_UNSUPPORTED): of a newer release.
  //   (JOURNAL_LOCKED): another process has it open.
  //   Others (JOURNAL_IO): what the system said.
  static absl::StatusOr<std::unique_ptr<Journal>> Open(
      const std::string& dir, absl::Time now, absl::Duration request_ttl,
      JournalFiles* files = nullptr, int64_t grown_bytes = kJournalBytes);

  // What its records add up to.
  const JournalState& state() const { return state_; }

  // All on the disk when it returns OK, after one sync. After an error nothing
  // is known about the records, and every later Append fails too: end the
  // process.
  absl::Status Append(
      const std::vector<const internal::v1::JournalRecord*>& records);
  absl::Status Append(const internal::v1::JournalRecord& record);

  // To be called now and then: forgets what is old, and writes the file anew
  // when it has grown. After an error it is as after one of Append. That there
  // is no room for a new file is none: the old one serves on, and it is tried
  // again later.
  absl::Status Tend(absl::Time now);

  int64_t size_bytes() const { return size_bytes_; }

 private:
  Journal(const std::string& dir, absl::Duration request_ttl,
          JournalFiles* files, int64_t grown_bytes, JournalState state,
          std::shared_ptr<void> lock);

  // Puts a file of what is needed in the place of the one that there is.
  // *replaced: which of the two there is now is not known any more.
  absl::Status WriteAnew(bool* replaced);

  const std::string dir_;
  const absl::Duration request_ttl_;
  JournalFiles* const files_;
  const int64_t grown_bytes_;
  JournalState state_;
  const std::shared_ptr<void> lock_;
  std::unique_ptr<JournalFile> file_;
  int64_t size_bytes_ = 0;
  // At this size it is written anew.
  int64_t anew_at_ = 0;
  absl::Time forget_time_;
  absl::Status broken_;
};

// CRC-32C (Castagnoli), as iSCSI has it.
uint32_t Crc32c(absl::string_view data, uint32_t crc = 0);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_H_
