// Which call of PublishVersion, of which rank, belongs to which publish of one
// model. Pure: no clock but `now`, no protos.
//
// Publishes are numbered 1, 2, 3, ... (publish_index). A rank takes part in
// each at most once, in order:
//   - with version 0 its next call belongs to the publish after the last one it
//     took part in: so the i-th calls of all ranks belong together;
//   - with a version its next call belongs to the first such publish of that
//     version;
//   - with a step it belongs to no publish that FAILED with a lower step. Calls
//     of one rank may have been refused where they are not counted (its node
//     was cut off) while others' were counted: counts that came apart would
//     stay apart for ever, each rank failing for want of the others.
// A publish is
//   PENDING  ranks wait: the model is not complete, or another update runs
//   OPEN     it is an update now; ranks that come later join it at once
//   DONE     its update is ACTIVE
//   FAILED   its update was aborted, or it never became one (the wait was too
//            long). A rank that comes later is told so, once; it does not open
//            a new one with that call. Only its next call may.
// There is at most one PENDING publish, the last; before it the OPEN ones.
//
// Ranks that give different versions, steps or options for one publish end it:
// it FAILS with OPTIONS_DISAGREE for all of them, each rank's next call to it
// being told so whatever that call names, and then all are free to call again.
//
// A rank that registers anew takes part in nothing that was opened before.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_PUBLISH_BOOK_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_PUBLISH_BOOK_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/coordinator/fault.h"

namespace weightsync {
namespace daemon {

struct PublishCall {
  int32_t rank = 0;
  int64_t version = 0;
  int64_t step = 0;
  // Whatever must be equal on all ranks, as one string of any form.
  std::string options;
  std::string request_id;
  // The caller's: how to answer a call that waits.
  std::string stream;
  int64_t correlation = 0;
};

struct Publish {
  enum State : uint8_t { kPending, kOpen, kDone, kFailed };
  int64_t index = 0;
  State state = kPending;
  // The ranks' word while PENDING (0: theirs to be given), the real one later.
  int64_t version = 0;
  int64_t step = 0;
  std::string options;
  std::string update_id;
  // When the first rank came, and until when it waits.
  absl::Time begin;
  absl::Time deadline;
  // While PENDING, one per rank.
  std::vector<PublishCall> waiting;
  Fault fault;
  // Its ranks said different things.
  bool disagreed = false;
};

class PublishBook {
 public:
  // `show_options` makes PublishCall::options readable; null: they are.
  using ShowOptions = std::string (*)(const std::string& options);
  explicit PublishBook(ShowOptions show_options = nullptr)
      : show_options_(show_options) {}

  // A publish remembered from the journal: everything up to `index` has ended.
  // `newest_fault` not OK: the newest, of `floor` and `step`, was aborted.
  void Recover(int64_t floor, int64_t index, const std::string& update_id,
               int64_t step, const Fault& newest_fault);

  // A rank's lease began. `last_index`: the newest publish that its node
  // remembers for this very session; 0 for a new session. Answers a publish
  // that waited under a number which an earlier term had given to another:
  // everybody who waits has to be told its fault.
  absl::optional<Publish> RankClaimed(int32_t rank, int64_t last_index);
  // Its lease ended: the call that waits, if one does, goes with it.
  void RankGone(int32_t rank);

  struct Decision {
    enum Kind : uint8_t {
      kWait,    // answered by Open or Expire
      kJoin,    // the open update `update_id`
      kRefuse,  // `fault`
      // The publish ends with `fault`: for `told` (this call among them), and,
      // where it is open, for the update `update_id`.
      kDisagree,
    };
    Kind kind = kWait;
    Fault fault;
    // 0 where the call is no part of any publish and may be repeated.
    int64_t publish_index = 0;
    std::string update_id;
    // A call of the same rank that waited, and does not any more.
    absl::optional<PublishCall> replaced;
    std::vector<PublishCall> told;
  };
  Decision OnCall(const PublishCall& call, absl::Time now,
                  absl::Duration patience);

  // The publish that waits; null: none. Owned by the book.
  const Publish* pending() const;

  // PENDING -> OPEN under `update_id`. Its version is settled and becomes the
  // floor. Answers `waiting` once more. REQUIRES: pending().
  Publish Open(const std::string& update_id);
  // OPEN -> DONE, or FAILED with the fault.
  void End(const std::string& update_id, const Fault& fault);
  // PENDING -> FAILED when its deadline has passed, or `force`: everybody who
  // waits has to be told `fault`.
  absl::optional<Publish> Expire(absl::Time now, const Fault& fault,
                                 bool force = false);

  // A version that no rank publishes (LoadVersion) and that is no publish of
  // theirs. Why it cannot be had; OK: it can. 0: the next one. Not while a
  // publish waits that has a version of its own: kUnavailable.
  Fault CheckAside(int64_t version) const;
  // Takes it; it becomes the floor. REQUIRES: CheckAside.
  int64_t OpenAside(int64_t version);
  void EndAside(int64_t version, const Fault& fault);

  // A higher version is known to be out (an adopted cluster's). One that waits
  // and has named one that is not above it is FAILED: as Expire.
  absl::optional<Publish> RaiseFloor(int64_t version);

  int64_t floor() const { return floor_; }
  int64_t newest_index() const { return newest_index_; }
  // The number that a version of 0 would get now.
  int64_t next_version() const { return floor_ + 1; }

 private:
  // Past what a call of this step cannot have missed.
  void SkipLowerSteps(const PublishCall& call);
  static constexpr size_t kKept = 128;

  Publish* Find(int64_t index);
  Fault ForgottenFault(int64_t index) const;
  Fault NotNewer(int64_t version) const;
  Decision Enter(Publish* publish, const PublishCall& call);
  Decision Refuse(Fault fault, int64_t index = 0) const;
  Decision Disagree(Publish* publish, const PublishCall& call,
                    const std::string& what);

  ShowOptions show_options_;
  int64_t floor_ = 0;
  // The newest attempt at the floor was aborted: it may be tried again.
  bool floor_aborted_ = false;
  int64_t newest_index_ = 0;
  // Consecutive indices, the newest last.
  std::deque<Publish> publishes_;
  // The newest publish that each rank took part in.
  std::map<int32_t, int64_t> last_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_PUBLISH_BOOK_H_
