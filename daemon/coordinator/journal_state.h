// What the journal's records add up to. Pure; the file is journal.h's business.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_STATE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_STATE_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "daemon/coordinator/request_book.h"
#include "weightsync/internal/v1/journal.pb.h"

namespace weightsync {
namespace daemon {

struct JournalModel {
  // The highest version ever given out, and the publish it was.
  int64_t floor = 0;
  int64_t publish_index = 0;
  // The update at the floor, and how it stands.
  internal::v1::UpdateOpened newest;
  bool newest_ended = false;
  // Meaningful when newest_ended.
  internal::v1::UpdateEnded newest_end;
  // Opened and not ended, oldest first; at most the committed one among them.
  std::vector<internal::v1::UpdateOpened> unended;
  // Those that ended without a commit, oldest first; at most kOlderFailures:
  // whoever waits for one of them may ask again after a restart.
  struct Failed {
    internal::v1::UpdateOpened opened;
    internal::v1::UpdateEnded ended;
  };
  std::vector<Failed> failed;
  // The newest committed update; no update_id: none yet.
  internal::v1::UpdateCommitted committed;
  // Its participants had all been served.
  bool committed_ended = false;
  // No holder of its bytes was left.
  bool committed_lost = false;
  // Those committed before it, oldest first; at most kOlderCommits.
  std::vector<internal::v1::UpdateCommitted> older;
  // Of an update that has not ended.
  internal::v1::StreamBegun stream_begun;
  // A rollback holds the model on an update; no update_id: none does.
  internal::v1::HoldPlaced held;
  // Replicas that an operator keeps paused.
  std::set<std::string> held_replicas;
  // It was taken out of its engines, and nothing was committed since.
  bool removed = false;
};

inline constexpr size_t kOlderCommits = 8;
inline constexpr size_t kOlderFailures = 8;

struct JournalState {
  // Empty: the journal was empty.
  std::string cluster_id;
  int64_t term = 0;
  std::map<std::string, JournalModel> models;
  // By layout_id: those that a committed update names.
  std::map<std::string, v1::DefineLayout> layouts;
  RequestBook requests;
  // Nodes that were drained.
  std::set<std::string> drained;
  // Clusters that this coordinator called its own before it adopted another:
  // nodes that come with one of these are its own.
  std::set<std::string> former_clusters;
  // The term in which it did so last; 0: never.
  int64_t adopted_term = 0;
  // Not empty: nothing may be accepted (JOURNAL_LOST).
  std::string lost_evidence;
};

// Adds one record. Applying a record twice changes nothing.
void ApplyRecord(const internal::v1::JournalRecord& record,
                 JournalState* state);

// Forgets requests of `oldest` and before, and layouts that no commit names.
void ForgetOld(absl::Time oldest, JournalState* state);

// The shortest list of records from which ApplyRecord makes `state` again.
// Empty for an empty state.
std::vector<internal::v1::JournalRecord> RecordsOf(const JournalState& state);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_JOURNAL_STATE_H_
