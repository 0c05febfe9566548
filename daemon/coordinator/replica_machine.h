// One replica, as a pure state machine: it is told what is wanted (who holds
// its pause, which update it shall have) and what has happened, and answers
// with commands that bring the second closer to the first. Every way of
// installing an update (LOCKSTEP, late join, repair, later rollback and
// ROLLING) is a hold, an install and a release.
//
// No clock, no ids but numbers, no protos: a simulation runs it by the million.
//
// The engine:
//   state      on                                  to         and
//   RUNNING    a pause is wanted                   PAUSING    send Pause
//              Paused(an earlier command)          DOUBTFUL
//   PAUSING    Paused(command)                     PAUSED     say kPausedNow
//              Paused(fault), deadline             DOUBTFUL   say kPauseFailed
//              no pause is wanted any more         RESUMING   send Resume
//   DOUBTFUL   no pause is wanted                  RESUMING   send Resume
//              still wanted, five seconds after    PAUSING    send Pause
//              a failure, at once when it is back
//   PAUSED     no pause is wanted                  RESUMING   send Resume
//              target not installed on a worker    PAUSED     send it Apply
//              it is wanted for somebody else      PAUSING    send Pause
//   RESUMING   Resumed(command)                    RUNNING    say kResumedNow
//              Resumed(fault), deadline            UNRESUMED  say kResumeFailed
//              a pause is wanted                   PAUSING    say kStillHeld,
//                                                             send Pause
//   UNRESUMED  a second later                      RESUMING   send Resume
//              a pause is wanted                   PAUSING    say kStillHeld,
//                                                             send Pause
// A pause is wanted while somebody holds it and while the workers' memories are
// not servable: not all what the engine came with, and not all one update. So a
// mix is never resumed, whoever asks. Nothing is sent while a worker or the
// control stream is missing or has not been named anew; when they are back,
// their own word (what is installed; that it runs) replaces what was believed,
// and what is still wanted is sent again. One that says it stands still is
// DOUBTFUL.
//
// How it is paused is the holders' wish: the first that wants a real pause
// decides. PAUSE_NONE asks for none: the engine goes on generating with what it
// has, its workers build beside, and the Resume makes it flip. It is granted to
// an engine whose workers agree and which has said that it flipped to what they
// hold; one that holds a mix, or may still generate with the set that would be
// written to (that is also one that has built another update beside and not
// flipped to it), or is fenced, or is held by somebody else too, is paused in
// earnest, also when it had been told PAUSE_NONE before. One that swaps is
// given the Resume again after its stream was lost: whether it flipped is not
// known.
//
// A Pause names the update that it is for, and the node may end it by itself
// when we are away and the update allows that (daemon/node/away.h). So the node
// must know for whom it is: an engine that stands PAUSED is asked again, for
// nobody's update, when an operator's hold is added to an update's; for the
// update when that hold ends; for the next one when it is held for another. The
// engine does nothing about it, and only when it has answered is the pause said
// to be there.
//
// A worker that has a command in flight:
//   Applied(command)                      its own word says what it holds now
//   Applied(command, fault), deadline     again, up to apply_attempts, then the
//                                         replica is FENCED: it stays paused
//                                         until another update is to be
//                                         installed or it registers anew
// Answers to older commands and to nothing are ignored, but for a late success
// of the same install.
//
// A model that is taken out of its engines (an adapter) is the install of
// nothing: the target is kRemoval, workers are sent Remove instead of Apply,
// and what they are to hold is NOTHING. An engine that said that it can go on
// without the model (`removable`) is servable when all of its workers hold
// nothing, and is resumed with `removed`; half of a removal is a mix like any
// other. That holds only while nobody wants it to have anything (`may_lack`):
// one that fell asleep with an update that is to be served stays paused until
// it has that again.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_REPLICA_MACHINE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_REPLICA_MACHINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "daemon/coordinator/fault.h"

namespace weightsync {
namespace daemon {

// Stands for an update_id; 0 is none.
using UpdateKey = int64_t;

// The target of a removal: workers are to hold nothing.
inline constexpr UpdateKey kRemoval = -1;

// What lies in a worker's live memory.
enum class Content : uint8_t {
  kOwn,        // what the engine loaded by itself
  kInstalled,  // exactly `update`
  kWriting,    // a mix that ends in `update`
  kNothing,    // the engine dropped its weights
};

struct WorkerContent {
  Content kind = Content::kOwn;
  UpdateKey update = 0;

  friend bool operator==(const WorkerContent& a, const WorkerContent& b) {
    return a.kind == b.kind && a.update == b.update;
  }
};

// What a pause does to the requests that the engine is working on.
enum class PauseKind : uint8_t { kDrain, kAbort, kKeep, kNone };

// Who keeps a replica paused.
struct Holder {
  enum Kind : uint8_t {
    kUpdate,     // the update that is being published
    kInstall,    // a late join, a repair or a rollback
    kOperator,   // somebody who said so
    kIsolation,  // its node, while it was cut off
  };
  Kind kind = kUpdate;
  UpdateKey update = 0;
  // No part of who it is.
  PauseKind pause = PauseKind::kDrain;

  friend bool operator==(const Holder& a, const Holder& b) {
    return a.kind == b.kind && a.update == b.update;
  }
};

enum class EngineState : uint8_t {
  kRunning,
  kPausing,
  kPaused,
  kDoubtful,  // asked to pause; whether it did is not known
  kResuming,
  kUnresumed,  // asked to resume; did not
};

struct ReplicaTimeouts {
  absl::Duration pause = absl::Seconds(60);
  absl::Duration apply = absl::Seconds(120);
  absl::Duration resume = absl::Seconds(30);
  int apply_attempts = 3;
};

struct ReplicaWorker {
  bool present = false;
  WorkerContent content;
  // The Apply in flight; 0: none.
  int64_t command = 0;
  absl::Time deadline;
  int attempts = 0;
  // Answers to commands before this one are about another install.
  int64_t first_command = 0;
};

struct ReplicaState {
  // For sentences: "models/m/replicas/r".
  std::string name;
  // Its control stream is there.
  bool control = false;
  // False between the hello of a node of its and the end of what that node has
  // to say: what was believed of its workers may be old, and nothing is sent.
  bool named = true;
  std::vector<ReplicaWorker> workers;

  EngineState engine = EngineState::kRunning;
  // How it was asked to pause last.
  PauseKind pause = PauseKind::kDrain;
  // For which update; 0: for nobody's, only we may end it.
  UpdateKey paused_for = 0;
  // It declares atomic_swap, and: it has said, in answer to a Resume, that it
  // generates with what its workers hold now.
  bool swaps = false;
  bool flipped = false;
  // It can generate without the model.
  bool removable = false;
  // Said by the owner before each step: the model is removed, or no update of
  // it was ever begun.
  bool may_lack = false;
  // All workers hold nothing, and came to do so while they might.
  bool lacks = false;
  // The Pause or Resume in flight.
  int64_t command = 0;
  absl::Time deadline;
  // The newest Pause or Resume that it has answered since its control stream
  // joined; it answers them in order. Those of earlier terms are -1.
  static constexpr int64_t kNothingAnswered = -2;
  int64_t answered = kNothingAnswered;
  // Numbers are never used twice.
  int64_t next_command = 1;

  std::vector<Holder> holders;
  // What shall be installed, or kRemoval; 0: what is there may stay.
  UpdateKey target = 0;
  // What it served when it last ran, and whether that is known.
  WorkerContent served;
  bool served_known = false;

  bool fenced = false;
  // Why it is fenced, or the last thing that failed.
  Fault fault;

  bool Complete() const;
  // All workers hold one and the same thing that an engine can run with.
  bool Servable() const;
  // `update` may be kRemoval.
  bool InstalledEverywhere(UpdateKey update) const;
  bool HeldBy(const Holder& holder) const;
  // `update` (which may be kRemoval) is installed everywhere, and it is not
  // paused for that any more: it runs, or others keep it from running.
  bool DoneWith(UpdateKey update) const;
  // Paused as its holders want it: nobody of theirs finds it generating.
  bool PausedForAll() const;
  // It swaps, and may still generate with what it had before.
  bool Unflipped() const;
  // It does not run, and a Resume may make it serve something else than it
  // served before.
  bool WouldGoOver() const;
  // How its holders want it paused now, and for which update.
  PauseKind WantedPause() const;
  UpdateKey WantedPauseFor() const;
};

struct ReplicaEvent {
  enum Kind : uint8_t {
    // The stream is there (again). `paused`, `swaps`, `removable`: the engine's
    // own word.
    kControlJoined,
    kControlLeft,
    // `content`: the worker's own word.
    kWorkerJoined,
    kWorkerLeft,
    // Answers. `fault` where it failed.
    kPaused,
    kResumed,
    kApplied,
    // Wishes.
    kHold,
    kRelease,
    kInstall,
    // Gives up the install that is wanted; nothing is fenced.
    kForget,
    // Workers are about to be written to without another word (STREAM): each
    // counts as WRITING `update` until it says what it holds.
    kStreaming,
    // A worker's own word, unasked: `worker`, `content`.
    kContent,
    // It cannot be mended: stay paused, with `fault`.
    kFence,
    kTick,
  };
  Kind kind = kTick;
  bool paused = false;
  bool swaps = false;
  bool removable = false;
  int worker = 0;
  // 0 in kApplied: the answer does not say; taken for the one in flight.
  int64_t command = 0;
  WorkerContent content;
  UpdateKey update = 0;
  Holder holder;
  // kHold: whose place it takes, where that one holds it: at no moment does
  // nobody, and nothing of the first is taken for the second's.
  Holder replaces;
  Fault fault;
};

struct ReplicaAction {
  enum Kind : uint8_t {
    // Commands, with `command`.
    kSendPause,   // `update`: whose; `pause`; `again`: it stands paused
    kSendApply,   // `worker`, `update`
    kSendRemove,  // `worker`
    kSendResume,  // `update`: what is installed (0: its own, or `removed`),
                  // `weights_changed`,
                  // `pause`: how it was asked to pause
    // News.
    kComplete,   // everybody is there; nothing is sent before the next event
    kLeft,       // somebody is missing: `fault`
    kPausedNow,  // also in answer to kHold when it was paused already
    kPauseFailed,
    kInstalledNow,  // the target, on all workers; `update`: it, or kRemoval
    kApplyFailed,   // once; it is tried again
    kFenced,
    kResumedNow,
    kResumeFailed,
    // A release that leaves it paused, or a resume that a pause has overtaken:
    // others hold it, or it holds a mix.
    kStillHeld,
  };
  Kind kind = kComplete;
  int worker = 0;
  int64_t command = 0;
  UpdateKey update = 0;
  bool weights_changed = false;
  bool removed = false;
  bool again = false;
  PauseKind pause = PauseKind::kDrain;
  Fault fault;
};

// REQUIRES: state->workers has its final size; `now` does not go back.
std::vector<ReplicaAction> StepReplica(const ReplicaTimeouts& timeouts,
                                       const ReplicaEvent& event,
                                       absl::Time now, ReplicaState* state);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_REPLICA_MACHINE_H_
