// What a node must not forget when it is started again: the offers that it has
// refused while the coordinator was away. A file of a few lines in the state
// directory, replaced as a whole, with fsync of the file and the directory.

#ifndef WEIGHTSYNC_DAEMON_NODE_NODE_JOURNAL_H_
#define WEIGHTSYNC_DAEMON_NODE_NODE_JOURNAL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weightsync {
namespace daemon {

// A pause that the node gave up by itself: it can never be followed by a commit
// on this replica any more. A higher term that finds the update committed makes
// another offer.
struct RefusedOffer {
  std::string model;
  std::string replica;
  std::string incarnation;
  std::string command_id;
  std::string update_id;
  // Of the coordinator that made the offer.
  int64_t term = 0;
};

// Not thread-safe.
class NodeJournal {
 public:
  // Refusals that are remembered; a replica has one at a time.
  static constexpr size_t kKept = 1024;

  // `directory` empty: nothing outlives the process, and nothing is written.
  //   DATA_LOSS (NODE_JOURNAL_DAMAGED): the file is not what was written; the
  //   sentence has its path.
  //   FAILED_PRECONDITION (NODE_JOURNAL_UNREADABLE): there is one, and it
  //   cannot be read.
  static absl::StatusOr<std::unique_ptr<NodeJournal>> Open(
      const std::string& directory);

  // Returns when it is on the disk. After an error it is not known whether it
  // is: the caller must tell nobody, and end.
  absl::Status Refuse(const RefusedOffer& offer);

  // The command_ids that were refused for one incarnation of a replica.
  std::vector<std::string> RefusedBy(absl::string_view model,
                                     absl::string_view replica,
                                     absl::string_view incarnation) const;

 private:
  explicit NodeJournal(std::string directory)
      : directory_(std::move(directory)) {}
  std::string path() const { return directory_ + "/node_journal"; }
  absl::Status Write() const;
  absl::Status Read();

  const std::string directory_;
  // Oldest first.
  std::deque<RefusedOffer> refused_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_NODE_JOURNAL_H_
