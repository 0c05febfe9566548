#include "daemon/coordinator/replica_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weightsync {
namespace daemon {

namespace {

WorkerContent ContentFor(UpdateKey target) {
  return target == kRemoval ? WorkerContent{Content::kNothing, 0}
                            : WorkerContent{Content::kInstalled, target};
}

// On the way there, and perhaps half way.
WorkerContent MixFor(UpdateKey target) {
  return WorkerContent{Content::kWriting, target == kRemoval ? 0 : target};
}

}  // namespace

bool ReplicaState::Complete() const {
  if (!control || workers.empty()) return false;
  for (const ReplicaWorker& worker : workers) {
    if (!worker.present) return false;
  }
  return true;
}

bool ReplicaState::Servable() const {
  for (const ReplicaWorker& worker : workers) {
    if (!worker.present || !(worker.content == workers[0].content))
      return false;
  }
  if (workers.empty()) return false;
  const Content kind = workers[0].content.kind;
  return kind == Content::kOwn || kind == Content::kInstalled ||
         (removable && lacks && kind == Content::kNothing);
}

bool ReplicaState::InstalledEverywhere(UpdateKey update) const {
  const WorkerContent wanted = ContentFor(update);
  for (const ReplicaWorker& worker : workers) {
    if (!worker.present || !(worker.content == wanted)) return false;
  }
  return !workers.empty();
}

bool ReplicaState::HeldBy(const Holder& holder) const {
  return std::find(holders.begin(), holders.end(), holder) != holders.end();
}

bool ReplicaState::DoneWith(UpdateKey update) const {
  if (!InstalledEverywhere(update)) return false;
  for (const Holder& holder : holders) {
    if (holder.update == update &&
        (holder.kind == Holder::kInstall || holder.kind == Holder::kUpdate)) {
      return false;
    }
  }
  return engine == EngineState::kRunning || !holders.empty();
}

PauseKind ReplicaState::WantedPause() const {
  if (fenced) return PauseKind::kDrain;
  // Workers that build the same update beside may differ; those that have built
  // another one have it in the set that is not served, and would write this one
  // into the set that is.
  const bool beside =
      (engine == EngineState::kPaused || engine == EngineState::kPausing) &&
      pause == PauseKind::kNone && paused_for == WantedPauseFor();
  PauseKind wanted = PauseKind::kDrain;
  for (const Holder& holder : holders) {
    wanted = holder.pause;
    if (wanted != PauseKind::kNone) return wanted;
  }
  // While workers build beside they differ; before they began they must not.
  // And one that has not said that it generates with what its workers hold may
  // still do so with the set that would be written to.
  if (wanted == PauseKind::kNone && !beside &&
      !(Servable() && (flipped || workers[0].content.kind == Content::kOwn))) {
    return PauseKind::kDrain;
  }
  return wanted;
}

UpdateKey ReplicaState::WantedPauseFor() const {
  for (const Holder& holder : holders) {
    if (holder.kind != Holder::kUpdate && holder.kind != Holder::kInstall) {
      return 0;
    }
  }
  return holders.empty() ? target : holders[0].update;
}

bool ReplicaState::Unflipped() const {
  return swaps && !flipped && workers[0].content.kind == Content::kInstalled;
}

bool ReplicaState::WouldGoOver() const {
  return engine != EngineState::kRunning &&
         !(served_known && served == workers[0].content);
}

bool ReplicaState::PausedForAll() const {
  return control && engine == EngineState::kPaused &&
         (holders.empty() || paused_for == WantedPauseFor()) &&
         (pause != PauseKind::kNone || WantedPause() == PauseKind::kNone);
}

namespace {

// When an engine that could not pause, or not resume, is asked again.
constexpr absl::Duration kPauseRetry = absl::Seconds(5);
constexpr absl::Duration kResumeRetry = absl::Seconds(1);

class Stepper {
 public:
  Stepper(const ReplicaTimeouts& timeouts, absl::Time now, ReplicaState* state)
      : timeouts_(timeouts), now_(now), s_(*state) {}

  std::vector<ReplicaAction> Run(const ReplicaEvent& event) {
    const bool was_complete = s_.Complete();
    Take(event);
    NoteLack();
    if (was_complete && !s_.Complete()) {
      // Whoever wanted something installed gives that up with the replica; when
      // it is back, what it shall have then is decided anew.
      ForgetTarget();
      Say(ReplicaAction::kLeft, s_.fault);
    } else if (!was_complete && s_.Complete()) {
      // What is wanted of it is decided now that it is known.
      Say(ReplicaAction::kComplete);
      return std::move(actions_);
    }
    Reconcile();
    return std::move(actions_);
  }

 private:
  void Take(const ReplicaEvent& event) {
    switch (event.kind) {
      case ReplicaEvent::kControlJoined:
        s_.control = true;
        s_.command = 0;
        s_.answered = ReplicaState::kNothingAnswered;
        s_.fenced = false;
        s_.pause = PauseKind::kDrain;
        s_.swaps = event.swaps;
        s_.removable = event.removable;
        s_.flipped = false;
        // An engine that says it runs is believed. One that says it stands
        // still may be in the middle of a hook, or have failed in one: before
        // anything is written it is asked to pause once more, which costs one
        // that does stand still nothing.
        if (event.paused) {
          // Whoever waits for it to run waits in vain: its node holds it.
          if ((s_.engine == EngineState::kResuming ||
               s_.engine == EngineState::kUnresumed) &&
              !s_.holders.empty()) {
            Say(ReplicaAction::kStillHeld);
          }
          s_.engine = EngineState::kDoubtful;
          s_.deadline = now_;
          s_.served_known = false;
        } else {
          // Released while its node had not named it yet, it was not even sent.
          const bool resumed =
              s_.engine == EngineState::kResuming ||
              s_.engine == EngineState::kUnresumed ||
              (s_.engine != EngineState::kRunning && s_.holders.empty());
          s_.engine = EngineState::kRunning;
          // The answer was lost with the stream. One that swaps has never stood
          // still: the command itself may be lost, and is given again.
          if (resumed && !s_.Unflipped()) Say(ReplicaAction::kResumedNow);
        }
        return;
      case ReplicaEvent::kControlLeft:
        if (!s_.control) return;
        s_.control = false;
        s_.command = 0;
        s_.fault = event.fault;
        return;
      case ReplicaEvent::kWorkerJoined: {
        ReplicaWorker& worker = s_.workers[event.worker];
        worker.present = true;
        SetContent(&worker, event.content);
        worker.command = 0;
        worker.attempts = 0;
        worker.first_command = s_.next_command;
        s_.fenced = false;
        CheckInstalled();
        return;
      }
      case ReplicaEvent::kWorkerLeft: {
        ReplicaWorker& worker = s_.workers[event.worker];
        if (!worker.present) return;
        worker.present = false;
        worker.command = 0;
        s_.fault = event.fault;
        return;
      }
      case ReplicaEvent::kPaused: {
        const bool late = event.command <= s_.answered;
        s_.answered = std::max(s_.answered, event.command);
        if (s_.engine == EngineState::kRunning && !late) {
          // The hook of a pause that nobody waits for any more has ended after
          // its node had said that the engine runs.
          s_.engine = EngineState::kDoubtful;
          s_.deadline = now_;
          return;
        }
        if (s_.engine != EngineState::kPausing || event.command != s_.command) {
          return;
        }
        if (event.fault.ok()) {
          s_.command = 0;
          s_.engine = EngineState::kPaused;
          if (s_.PausedForAll()) Say(ReplicaAction::kPausedNow);
        } else {
          PauseFailed(event.fault);
        }
        return;
      }
      case ReplicaEvent::kResumed:
        s_.answered = std::max(s_.answered, event.command);
        if (s_.engine != EngineState::kResuming ||
            event.command != s_.command) {
          return;
        }
        if (event.fault.ok()) {
          s_.command = 0;
          s_.engine = EngineState::kRunning;
          s_.served = s_.workers[0].content;
          s_.served_known = true;
          s_.flipped = true;
          Say(ReplicaAction::kResumedNow);
        } else {
          ResumeFailed(event.fault);
        }
        return;
      case ReplicaEvent::kApplied:
        Applied(event);
        return;
      case ReplicaEvent::kHold:
        if (!s_.HeldBy(event.holder)) s_.holders.push_back(event.holder);
        RemoveHolder(event.replaces);
        if (s_.PausedForAll()) Say(ReplicaAction::kPausedNow);
        return;
      case ReplicaEvent::kRelease:
        RemoveHolder(event.holder);
        // What it was held for is not wanted any more either, if it is not
        // there.
        if (s_.target != 0 && s_.target == event.holder.update &&
            std::none_of(s_.holders.begin(), s_.holders.end(),
                         [&](const Holder& holder) {
                           return holder.update == s_.target;
                         })) {
          ForgetTarget();
        }
        if (!s_.holders.empty() || !s_.Servable()) {
          Say(ReplicaAction::kStillHeld);
        } else if (s_.engine == EngineState::kRunning) {
          Say(ReplicaAction::kResumedNow);
        }
        return;
      case ReplicaEvent::kInstall:
        if (s_.target != event.update || s_.fenced) {
          ForgetTarget();
          s_.target = event.update;
          s_.fenced = false;
          for (ReplicaWorker& worker : s_.workers) {
            worker.command = 0;
            worker.attempts = 0;
            worker.first_command = s_.next_command;
          }
        }
        CheckInstalled();
        return;
      case ReplicaEvent::kForget:
        ForgetTarget();
        s_.fenced = false;
        return;
      case ReplicaEvent::kStreaming:
        for (ReplicaWorker& worker : s_.workers) {
          if (!worker.present) continue;
          SetContent(&worker, WorkerContent{Content::kWriting, event.update});
          worker.command = 0;
          worker.first_command = s_.next_command;
        }
        return;
      case ReplicaEvent::kContent: {
        ReplicaWorker& worker = s_.workers[event.worker];
        if (!worker.present) return;
        SetContent(&worker, event.content);
        CheckInstalled();
        return;
      }
      case ReplicaEvent::kFence:
        Fence(event.fault);
        return;
      case ReplicaEvent::kTick:
        Tick();
        return;
    }
  }

  void SetContent(ReplicaWorker* worker, const WorkerContent& content) {
    if (worker->content == content) return;
    worker->content = content;
    s_.flipped = false;
  }

  void NoteLack() {
    const bool nothing = std::all_of(
        s_.workers.begin(), s_.workers.end(), [](const ReplicaWorker& worker) {
          return worker.present && worker.content.kind == Content::kNothing;
        });
    s_.lacks = nothing && (s_.lacks || s_.may_lack);
  }

  void RemoveHolder(const Holder& holder) {
    s_.holders.erase(std::remove(s_.holders.begin(), s_.holders.end(), holder),
                     s_.holders.end());
  }

  void ForgetTarget() {
    DoubtInFlight();
    s_.target = 0;
  }

  void Applied(const ReplicaEvent& event) {
    ReplicaWorker& worker = s_.workers[event.worker];
    if (!worker.present) return;
    if (s_.target == 0 || event.update != s_.target) {
      // Of an install that was given up: what it left is the worker's word.
      if (worker.command != 0 && event.command == worker.command) {
        SetContent(&worker, event.content);
        worker.command = 0;
      }
      return;
    }
    const WorkerContent wanted = ContentFor(s_.target);
    if (worker.content == wanted) return;  // said before
    const bool current =
        worker.command != 0 &&
        (event.command == 0 || event.command == worker.command);
    if (event.fault.ok()) {
      // A success of an attempt that was given up counts as well: the library
      // answers later ones without writing.
      if (!current && event.command < worker.first_command) return;
      if (!(event.content == wanted)) return;
      SetContent(&worker, wanted);
      worker.command = 0;
      CheckInstalled();
      return;
    }
    if (!current) return;
    SetContent(&worker, event.content);
    worker.command = 0;
    // Whatever has failed, it holds what it should: nothing is sent to it any
    // more, and what it still answers is "said before".
    if (event.content == wanted) return CheckInstalled();
    ApplyFailed(event.worker, event.fault);
  }

  void CheckInstalled() {
    if (s_.target == 0 || !s_.InstalledEverywhere(s_.target)) return;
    s_.fenced = false;
    for (ReplicaWorker& worker : s_.workers) worker.command = 0;
    ReplicaAction action;
    action.kind = ReplicaAction::kInstalledNow;
    action.update = s_.target;
    actions_.push_back(std::move(action));
    s_.target = 0;
  }

  // Who was told to install and has not answered may be writing: it counts as a
  // mix until its word comes.
  void DoubtInFlight() {
    for (ReplicaWorker& worker : s_.workers) {
      if (worker.command == 0) continue;
      SetContent(&worker, MixFor(s_.target));
    }
  }

  void ApplyFailed(int index, const Fault& fault) {
    if (s_.workers[index].attempts >= timeouts_.apply_attempts) {
      Fence(fault);
    } else {
      s_.fault = fault;
      Say(ReplicaAction::kApplyFailed, fault);
    }
  }

  void Fence(const Fault& fault) {
    if (s_.fenced) return;
    s_.fenced = true;
    s_.fault = fault;
    DoubtInFlight();
    ReplicaAction action;
    action.kind = ReplicaAction::kFenced;
    action.update = s_.target;
    action.fault = fault;
    actions_.push_back(std::move(action));
  }

  void PauseFailed(const Fault& fault) {
    s_.engine = EngineState::kDoubtful;
    s_.command = 0;
    // Whoever holds it decides first; where nobody gives up, it is asked again.
    s_.deadline = now_ + std::min(timeouts_.pause, kPauseRetry);
    s_.fault = fault;
    Say(ReplicaAction::kPauseFailed, fault);
  }

  void ResumeFailed(const Fault& fault) {
    s_.engine = EngineState::kUnresumed;
    s_.command = 0;
    // Not at once: what refuses at once would be asked a thousand times.
    s_.deadline = now_ + std::min(timeouts_.resume, kResumeRetry);
    s_.fault = fault;
    Say(ReplicaAction::kResumeFailed, fault);
  }

  void Tick() {
    if (!s_.Complete()) return;
    if (s_.command != 0 && now_ >= s_.deadline) {
      if (s_.engine == EngineState::kPausing) {
        PauseFailed(Fault(absl::StatusCode::kDeadlineExceeded, "PAUSE_TIMEOUT",
                          absl::StrCat(s_.name, " did not say within ",
                                       absl::FormatDuration(timeouts_.pause),
                                       " that it has paused")));
      } else if (s_.engine == EngineState::kResuming) {
        ResumeFailed(
            Fault(absl::StatusCode::kDeadlineExceeded, "RESUME_TIMEOUT",
                  absl::StrCat(s_.name, " did not say within ",
                               absl::FormatDuration(timeouts_.resume),
                               " that it generates again; it is asked again")));
      }
    }
    for (size_t i = 0; i < s_.workers.size(); ++i) {
      ReplicaWorker& worker = s_.workers[i];
      if (worker.command == 0 || now_ < worker.deadline) continue;
      worker.command = 0;
      // It may have begun to write since it last said what it holds.
      if (s_.target == 0) continue;
      SetContent(&worker, MixFor(s_.target));
      ApplyFailed(static_cast<int>(i),
                  Fault(absl::StatusCode::kDeadlineExceeded, "APPLY_TIMEOUT",
                        absl::StrCat("worker ", i, " of ", s_.name, " did not ",
                                     s_.target == kRemoval
                                         ? "drop the model within "
                                         : "install the update within ",
                                     absl::FormatDuration(timeouts_.apply))));
    }
  }

  bool PauseWanted() const {
    return !s_.holders.empty() || !s_.Servable() || s_.fenced;
  }

  void Reconcile() {
    if (!s_.Complete() || !s_.named) return;
    if (PauseWanted()) {
      const bool again =
          s_.engine == EngineState::kDoubtful && now_ >= s_.deadline;
      const PauseKind wanted = s_.WantedPause();
      // It was told to go on while its workers build beside; now it must not.
      const bool in_earnest = (s_.engine == EngineState::kPaused ||
                               s_.engine == EngineState::kPausing) &&
                              s_.pause == PauseKind::kNone &&
                              wanted != PauseKind::kNone;
      // Its node may end the pause of an update by itself, and of no one else.
      const UpdateKey paused_for = s_.WantedPauseFor();
      const bool for_another = s_.engine == EngineState::kPaused &&
                               !in_earnest && !s_.holders.empty() &&
                               s_.paused_for != paused_for;
      if (s_.engine == EngineState::kRunning ||
          s_.engine == EngineState::kResuming ||
          s_.engine == EngineState::kUnresumed || again || in_earnest ||
          for_another) {
        // Whoever waits for it to run waits in vain.
        if (s_.engine == EngineState::kResuming ||
            s_.engine == EngineState::kUnresumed) {
          Say(ReplicaAction::kStillHeld);
        }
        if (s_.engine == EngineState::kRunning) {
          s_.served = s_.workers[0].content;
          s_.served_known = s_.Servable();
        }
        s_.engine = EngineState::kPausing;
        if (!for_another) s_.pause = wanted;
        s_.paused_for = paused_for;
        s_.deadline = now_ + timeouts_.pause;
        ReplicaAction& action = Command(ReplicaAction::kSendPause);
        s_.command = action.command;
        action.pause = s_.pause;
        action.update = paused_for;
        action.again = for_another;
      }
      if (s_.engine == EngineState::kPaused && s_.target != 0 && !s_.fenced) {
        SendApplies();
      }
      return;
    }
    if ((s_.engine == EngineState::kRunning && !s_.Unflipped()) ||
        s_.engine == EngineState::kResuming ||
        (s_.engine == EngineState::kUnresumed && now_ < s_.deadline)) {
      return;
    }
    s_.engine = EngineState::kResuming;
    s_.deadline = now_ + timeouts_.resume;
    ReplicaAction& action = Command(ReplicaAction::kSendResume);
    s_.command = action.command;
    action.pause = s_.pause;
    const WorkerContent& content = s_.workers[0].content;
    action.update = content.update;
    action.removed = content.kind == Content::kNothing;
    action.weights_changed = s_.served_known ? !(s_.served == content)
                                             : content.kind != Content::kOwn;
  }

  void SendApplies() {
    const WorkerContent wanted = ContentFor(s_.target);
    for (size_t i = 0; i < s_.workers.size(); ++i) {
      ReplicaWorker& worker = s_.workers[i];
      if (worker.command != 0 || worker.content == wanted) continue;
      ++worker.attempts;
      worker.deadline = now_ + timeouts_.apply;
      ReplicaAction& action =
          Command(s_.target == kRemoval ? ReplicaAction::kSendRemove
                                        : ReplicaAction::kSendApply);
      worker.command = action.command;
      action.worker = static_cast<int>(i);
      action.update = s_.target;
    }
  }

  ReplicaAction& Command(ReplicaAction::Kind kind) {
    ReplicaAction action;
    action.kind = kind;
    action.command = s_.next_command++;
    actions_.push_back(std::move(action));
    return actions_.back();
  }

  void Say(ReplicaAction::Kind kind, Fault fault = Fault()) {
    ReplicaAction action;
    action.kind = kind;
    action.fault = std::move(fault);
    actions_.push_back(std::move(action));
  }

  const ReplicaTimeouts& timeouts_;
  const absl::Time now_;
  ReplicaState& s_;
  std::vector<ReplicaAction> actions_;
};

}  // namespace

std::vector<ReplicaAction> StepReplica(const ReplicaTimeouts& timeouts,
                                       const ReplicaEvent& event,
                                       absl::Time now, ReplicaState* state) {
  return Stepper(timeouts, now, state).Run(event);
}

}  // namespace daemon
}  // namespace weightsync
