// The pure machine of one replica by itself: what the coordinator's tests
// cannot see well.

#include "daemon/coordinator/replica_machine.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const absl::Time kStart = absl::FromUnixSeconds(100);

class ReplicaMachineTest : public ::testing::Test {
 protected:
  using R = ReplicaAction;

  void SetUp() override {
    state_.name = "models/m/replicas/r";
    state_.workers.resize(2);
    Join(false);
  }
  std::vector<R::Kind> Step(ReplicaEvent event) {
    last_ = StepReplica(timeouts_, event, now_, &state_);
    std::vector<R::Kind> kinds;
    for (const R& action : last_) kinds.push_back(action.kind);
    return kinds;
  }
  void Join(bool paused) {
    ReplicaEvent event;
    event.kind = ReplicaEvent::kControlJoined;
    event.paused = paused;
    Step(event);
    event.kind = ReplicaEvent::kWorkerJoined;
    for (int i = 0; i < 2; ++i) {
      event.worker = i;
      event.content = state_.workers[i].content;
      Step(event);
    }
  }
  ReplicaEvent Event(ReplicaEvent::Kind kind, int64_t command = 0) {
    ReplicaEvent event;
    event.kind = kind;
    event.command = command;
    event.holder = Holder{Holder::kUpdate, 7};
    event.update = 7;
    event.content = WorkerContent{Content::kInstalled, 7};
    return event;
  }
  ReplicaEvent Failed(ReplicaEvent event) {
    event.fault = Fault(absl::StatusCode::kInternal, "X", "x");
    event.content = WorkerContent{Content::kWriting, 7};
    return event;
  }
  ReplicaEvent Applied(int worker, int64_t command) {
    ReplicaEvent event = Event(ReplicaEvent::kApplied, command);
    event.worker = worker;
    return event;
  }

  ReplicaTimeouts timeouts_;
  ReplicaState state_;
  absl::Time now_ = kStart;
  std::vector<R> last_;
};

TEST_F(ReplicaMachineTest, HoldInstallReleaseIsOneInstall) {
  EXPECT_THAT(Step(Event(ReplicaEvent::kHold)), ElementsAre(R::kSendPause));
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, last_[0].command)),
              ElementsAre(R::kPausedNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kInstall)),
              ElementsAre(R::kSendApply, R::kSendApply));
  const int64_t first = last_[0].command;
  EXPECT_THAT(Step(Applied(0, first)), IsEmpty());
  EXPECT_THAT(Step(Applied(0, first)), IsEmpty());
  EXPECT_THAT(Step(Applied(1, first + 1)), ElementsAre(R::kInstalledNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  EXPECT_TRUE(last_[0].weights_changed);
  EXPECT_EQ(last_[0].update, 7);
  EXPECT_THAT(Step(Event(ReplicaEvent::kResumed, last_[0].command)),
              ElementsAre(R::kResumedNow));
  EXPECT_EQ(state_.engine, EngineState::kRunning);
}

TEST_F(ReplicaMachineTest, AReleaseWhileItPausesResumesAtOnce) {
  Step(Event(ReplicaEvent::kHold));
  const int64_t pause = last_[0].command;
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  EXPECT_FALSE(last_[0].weights_changed);
  const int64_t resume = last_[0].command;
  // The answer to the pause comes late.
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, pause)), IsEmpty());
  EXPECT_THAT(Step(Event(ReplicaEvent::kResumed, resume)),
              ElementsAre(R::kResumedNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kResumed, resume)), IsEmpty());
}

// Found by tests/chaos/simulation: the worker of a replica was lost while it
// installed, its update went on without it, and a later pause, for a newer
// update, had the older one applied first.
TEST_F(ReplicaMachineTest, WhatALostReplicaShouldHaveHadIsNotInstalledLater) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  ReplicaEvent left = Event(ReplicaEvent::kWorkerLeft);
  left.worker = 1;
  EXPECT_THAT(Step(left), ElementsAre(R::kLeft));
  Step(Event(ReplicaEvent::kRelease));
  ReplicaEvent joined = Event(ReplicaEvent::kWorkerJoined);
  joined.worker = 1;
  joined.content = WorkerContent();
  EXPECT_THAT(Step(joined), ElementsAre(R::kComplete));
  ReplicaEvent newer = Event(ReplicaEvent::kHold);
  newer.holder = Holder{Holder::kUpdate, 8};
  for (const R::Kind kind : Step(newer)) EXPECT_NE(kind, R::kSendApply);
  if (!last_.empty() && last_.back().kind == R::kSendPause) {
    EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, last_.back().command)),
                ElementsAre(R::kPausedNow));
  }
}

// Found by tests/chaos/simulation: a pause hook was still running, or had
// failed, when the control stream broke; the engine registered as "not
// running", was believed to stand still, and was written into while it
// generated.
TEST_F(ReplicaMachineTest,
       AnEngineThatComesBackPausedIsAskedBeforeItIsWritten) {
  ReplicaEvent left = Event(ReplicaEvent::kControlLeft);
  EXPECT_THAT(Step(left), ElementsAre(R::kLeft));
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kInstall));
  ReplicaEvent joined = Event(ReplicaEvent::kControlJoined);
  joined.paused = true;
  Step(joined);
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendPause));
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, last_[0].command)),
              ElementsAre(R::kPausedNow, R::kSendApply, R::kSendApply));
}

TEST_F(ReplicaMachineTest, AnEngineThatComesBackPausedForNobodyIsResumed) {
  Step(Event(ReplicaEvent::kControlLeft));
  ReplicaEvent joined = Event(ReplicaEvent::kControlJoined);
  joined.paused = true;
  Step(joined);
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendResume));
}

// Found by tests/chaos/simulation: the answer to a Resume was lost with the
// stream, the engine came back and said that it ran, and its update waited for
// that answer for ever.
TEST_F(ReplicaMachineTest, AResumeWhoseAnswerIsLostIsKnownByTheEnginesOwnWord) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  EXPECT_THAT(Step(Event(ReplicaEvent::kControlJoined)),
              ElementsAre(R::kResumedNow));
  EXPECT_EQ(state_.engine, EngineState::kRunning);
  // One that says so again has not resumed again.
  EXPECT_THAT(Step(Event(ReplicaEvent::kControlJoined)), IsEmpty());
}

TEST_F(ReplicaMachineTest, AResumeThatFailedIsAlsoKnownByTheEnginesOwnWord) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kRelease));
  Step(Failed(Event(ReplicaEvent::kResumed, last_[0].command)));
  EXPECT_EQ(state_.engine, EngineState::kUnresumed);
  EXPECT_THAT(Step(Event(ReplicaEvent::kControlJoined)),
              ElementsAre(R::kResumedNow));
}

// Found by tests/chaos/simulation: an engine that was to resume lost its
// weights and was paused again, and its update waited for the resume for ever.
TEST_F(ReplicaMachineTest, AResumeThatAPauseOvertakesIsWaitedForByNobody) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kRelease));
  ReplicaEvent asleep = Event(ReplicaEvent::kContent);
  asleep.content = WorkerContent{Content::kNothing, 0};
  EXPECT_THAT(Step(asleep), ElementsAre(R::kStillHeld, R::kSendPause));
}

// Found by tests/chaos: the coordinator stood still between the resume and its
// answer for longer than --max_staleness; the engine had been resumed and was
// paused again by its node, and its update waited for the answer for ever.
TEST_F(ReplicaMachineTest, OneThatItsNodeHeldBeforeItAnsweredIsNotWaitedFor) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  const Holder isolation{Holder::kIsolation, 0};
  state_.holders.push_back(isolation);
  ReplicaEvent joined = Event(ReplicaEvent::kControlJoined);
  joined.paused = true;
  EXPECT_THAT(Step(joined), ElementsAre(R::kStillHeld, R::kSendPause));
  Step(Event(ReplicaEvent::kPaused, last_[1].command));
  ReplicaEvent release = Event(ReplicaEvent::kRelease);
  release.holder = isolation;
  EXPECT_THAT(Step(release), ElementsAre(R::kSendResume));
}

// ---- Removals ----

TEST_F(ReplicaMachineTest, ARemovalIsAnInstallOfNothing) {
  state_.removable = state_.may_lack = true;
  for (ReplicaWorker& worker : state_.workers) {
    worker.content = WorkerContent{Content::kInstalled, 5};
  }
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder = Holder{Holder::kInstall, kRemoval};
  EXPECT_THAT(Step(hold), ElementsAre(R::kSendPause));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  ReplicaEvent install = Event(ReplicaEvent::kInstall);
  install.update = kRemoval;
  EXPECT_THAT(Step(install), ElementsAre(R::kSendRemove, R::kSendRemove));
  const int64_t first = last_[0].command;
  ReplicaEvent dropped = Applied(0, first);
  dropped.update = kRemoval;
  dropped.content = WorkerContent{Content::kNothing, 0};
  EXPECT_THAT(Step(dropped), IsEmpty());
  // Half of it is a mix: whoever lets go, it stays paused.
  EXPECT_FALSE(state_.Servable());
  ReplicaEvent other = dropped;
  other.worker = 1;
  other.command = first + 1;
  EXPECT_THAT(Step(other), ElementsAre(R::kInstalledNow));
  EXPECT_EQ(last_[0].update, kRemoval);
  hold.kind = ReplicaEvent::kRelease;
  EXPECT_THAT(Step(hold), ElementsAre(R::kSendResume));
  EXPECT_TRUE(last_[0].removed);
  EXPECT_TRUE(last_[0].weights_changed);
  EXPECT_EQ(last_[0].update, 0);
}

// What says it has dropped the model and has not must not be believed, and one
// that never answers may be half way.
TEST_F(ReplicaMachineTest, AWorkerThatDoesNotDropTheModelIsAskedThenFenced) {
  state_.removable = state_.may_lack = true;
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder = Holder{Holder::kInstall, kRemoval};
  Step(hold);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  ReplicaEvent install = Event(ReplicaEvent::kInstall);
  install.update = kRemoval;
  Step(install);
  ReplicaEvent failed = Failed(Applied(0, last_[0].command));
  failed.update = kRemoval;
  failed.content = WorkerContent{Content::kWriting, 0};
  EXPECT_THAT(Step(failed), ElementsAre(R::kApplyFailed, R::kSendRemove));
  now_ += timeouts_.apply;
  EXPECT_THAT(Step(ReplicaEvent()),
              ElementsAre(R::kApplyFailed, R::kApplyFailed, R::kSendRemove,
                          R::kSendRemove));
  now_ += timeouts_.apply;
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kFenced, R::kApplyFailed));
  EXPECT_FALSE(state_.Servable());
  // An update mends it.
  EXPECT_THAT(Step(Event(ReplicaEvent::kInstall)),
              ElementsAre(R::kSendApply, R::kSendApply));
}

// The engine of a base model is never without it.
TEST_F(ReplicaMachineTest, NothingIsServableOnlyWhereItWasSaidToBe) {
  for (ReplicaWorker& worker : state_.workers) {
    worker.content = WorkerContent{Content::kNothing, 0};
  }
  state_.may_lack = true;
  Step(ReplicaEvent());
  EXPECT_FALSE(state_.Servable());
  state_.removable = true;
  EXPECT_TRUE(state_.Servable());
  state_.workers[1].content = WorkerContent{Content::kInstalled, 5};
  EXPECT_FALSE(state_.Servable());
}

// A stream that was given up, and completed all the same before its worker
// heard of that: the worker says that it failed, and that it holds the update.
TEST_F(ReplicaMachineTest, AFailureOfAWorkerThatHoldsTheUpdateIsNone) {
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder = Holder{Holder::kInstall, 7};
  Step(hold);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  ReplicaEvent install = Event(ReplicaEvent::kInstall);
  install.update = 7;
  EXPECT_THAT(Step(install), ElementsAre(R::kSendApply, R::kSendApply));
  const int64_t first = last_[0].command;
  ReplicaEvent broken = Failed(Applied(0, 0));
  broken.update = 7;
  broken.content = WorkerContent{Content::kInstalled, 7};
  EXPECT_THAT(Step(broken), IsEmpty());
  ReplicaEvent other = Applied(1, first + 1);
  other.update = 7;
  other.content = WorkerContent{Content::kInstalled, 7};
  EXPECT_THAT(Step(other), ElementsAre(R::kInstalledNow));
}

// An engine that fell into deep sleep with an adapter that is to be served must
// not wake up without it; one that has gone on without it before the next
// update was committed goes on until it has that.
TEST_F(ReplicaMachineTest, AnEngineGoesWithoutTheModelOnlyWhenNobodyWantsIt) {
  state_.removable = true;
  for (ReplicaWorker& worker : state_.workers) {
    worker.content = WorkerContent{Content::kNothing, 0};
  }
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendPause));
  EXPECT_FALSE(state_.Servable());
  state_.may_lack = true;
  Step(ReplicaEvent());
  EXPECT_TRUE(state_.Servable());
  state_.may_lack = false;
  Step(ReplicaEvent());
  EXPECT_TRUE(state_.Servable());
}

// The answer to a removal that a publish has overtaken says nothing about that.
TEST_F(ReplicaMachineTest, ALateAnswerToARemovalIsNotTakenForAnUpdates) {
  state_.removable = state_.may_lack = true;
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder = Holder{Holder::kInstall, kRemoval};
  Step(hold);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  ReplicaEvent install = Event(ReplicaEvent::kInstall);
  install.update = kRemoval;
  Step(install);
  ReplicaEvent late = Applied(0, last_[0].command);
  late.update = kRemoval;
  late.content = WorkerContent{Content::kNothing, 0};
  EXPECT_THAT(Step(Event(ReplicaEvent::kInstall)),
              ElementsAre(R::kSendApply, R::kSendApply));
  const int64_t apply = last_[0].command;
  EXPECT_EQ(state_.workers[0].content.kind, Content::kWriting);
  EXPECT_THAT(Step(late), IsEmpty());
  EXPECT_EQ(state_.workers[0].command, apply);
  Step(Applied(0, apply));
  EXPECT_THAT(Step(Applied(1, apply + 1)), ElementsAre(R::kInstalledNow));
}

// Its hook ran while the coordinator that had asked it died, or its node's
// stream broke: the node could not say yet that it stands still.
TEST_F(ReplicaMachineTest, AnEngineThatStandsStillUnaskedIsResumed) {
  for (const int64_t command : {int64_t{-1}, int64_t{1}}) {
    Step(Event(ReplicaEvent::kHold));
    Step(Event(ReplicaEvent::kControlLeft));
    Step(Event(ReplicaEvent::kRelease));
    Step(Event(ReplicaEvent::kControlJoined));
    ASSERT_EQ(state_.engine, EngineState::kRunning);
    ASSERT_THAT(Step(Event(ReplicaEvent::kPaused, command)),
                ElementsAre(R::kSendResume));
    const int64_t resume = last_[0].command;
    // What was said before that says nothing any more.
    EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, command)), IsEmpty());
    EXPECT_THAT(Step(Event(ReplicaEvent::kResumed, resume)),
                ElementsAre(R::kResumedNow));
    EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, command)), IsEmpty());
    EXPECT_EQ(state_.engine, EngineState::kRunning);
  }
}

TEST_F(ReplicaMachineTest, AnEngineWhoseLatePauseFailedIsResumedToo) {
  EXPECT_THAT(Step(Failed(Event(ReplicaEvent::kPaused, -1))),
              ElementsAre(R::kSendResume));
}

TEST_F(ReplicaMachineTest, AnotherHolderKeepsItPaused) {
  Step(Event(ReplicaEvent::kHold));
  const int64_t pause = last_[0].command;
  ReplicaEvent other = Event(ReplicaEvent::kHold);
  other.holder = Holder{Holder::kInstall, 3};
  Step(other);
  Step(Event(ReplicaEvent::kPaused, pause));
  // What it is paused for is another one now.
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)),
              ElementsAre(R::kStillHeld, R::kSendPause));
  EXPECT_EQ(last_[1].update, 3);
  other.kind = ReplicaEvent::kRelease;
  EXPECT_THAT(Step(other), ElementsAre(R::kSendResume));
}

TEST_F(ReplicaMachineTest, AMixIsNeverResumed) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t first = last_[0].command;
  Step(Applied(0, first));
  for (int attempt = 1; attempt < 3; ++attempt) {
    EXPECT_THAT(Step(Failed(Applied(1, first + attempt))),
                ElementsAre(R::kApplyFailed, R::kSendApply));
    // The same failure again is of an older command.
    EXPECT_THAT(Step(Failed(Applied(1, first + attempt))), IsEmpty());
  }
  EXPECT_THAT(Step(Failed(Applied(1, first + 3))), ElementsAre(R::kFenced));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kStillHeld));
  now_ += absl::Hours(1);
  EXPECT_THAT(Step(ReplicaEvent()), IsEmpty());
  EXPECT_EQ(state_.engine, EngineState::kPaused);
  // Another update is its way on.
  ReplicaEvent next = Event(ReplicaEvent::kInstall);
  next.update = 8;
  EXPECT_THAT(Step(next), ElementsAre(R::kSendApply, R::kSendApply));
}

TEST_F(ReplicaMachineTest, ALateSuccessOfAnEarlierAttemptCounts) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t first = last_[0].command;
  Step(Applied(0, first));
  now_ += timeouts_.apply;
  EXPECT_THAT(Step(ReplicaEvent()),
              ElementsAre(R::kApplyFailed, R::kSendApply));
  EXPECT_THAT(Step(Applied(1, first + 1)), ElementsAre(R::kInstalledNow));
}

TEST_F(ReplicaMachineTest, AnAnswerFromBeforeARegistrationDoesNotCount) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t first = last_[0].command;
  ReplicaEvent joined = Event(ReplicaEvent::kWorkerJoined);
  joined.worker = 0;
  joined.content = WorkerContent{Content::kWriting, 7};
  EXPECT_THAT(Step(joined), ElementsAre(R::kSendApply));
  Step(Applied(1, first + 1));
  EXPECT_THAT(Step(Applied(0, first)), IsEmpty());
  EXPECT_THAT(Step(Applied(0, first + 2)), ElementsAre(R::kInstalledNow));
}

TEST_F(ReplicaMachineTest, NothingIsSentToAReplicaThatIsNotWhole) {
  ReplicaEvent left = Event(ReplicaEvent::kWorkerLeft);
  left.fault = Fault(absl::StatusCode::kUnavailable, "WORKER_LOST", "gone");
  EXPECT_THAT(Step(left), ElementsAre(R::kLeft));
  EXPECT_EQ(last_[0].fault.reason, "WORKER_LOST");
  EXPECT_THAT(Step(left), IsEmpty());
  EXPECT_THAT(Step(Event(ReplicaEvent::kHold)), IsEmpty());
  left.kind = ReplicaEvent::kWorkerJoined;
  left.content = WorkerContent();
  EXPECT_THAT(Step(left), ElementsAre(R::kComplete));
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendPause));
}

TEST_F(ReplicaMachineTest, AnEngineThatForgotItsResumeIsResumedAgain) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kRelease));
  now_ += timeouts_.resume;
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kResumeFailed));
  EXPECT_THAT(Step(ReplicaEvent()), IsEmpty());
  now_ += absl::Seconds(1);
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendResume));
}

TEST_F(ReplicaMachineTest, WhatWasInFlightWhenAnInstallWasGivenUpIsAMix) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t first = last_[0].command;
  Step(Event(ReplicaEvent::kForget));
  // Nobody has said what the two applies left behind: it is not resumed.
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kStillHeld));
  EXPECT_THAT(Step(Applied(0, first)), IsEmpty());
  EXPECT_THAT(Step(Applied(1, first + 1)), ElementsAre(R::kSendResume));
  EXPECT_EQ(last_[0].update, 7);
}

TEST_F(ReplicaMachineTest, AFenceDoesNotForgetWhoMayStillBeWriting) {
  timeouts_.apply_attempts = 1;
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t first = last_[0].command;
  // Worker 0 could not begin, worker 1 has not answered.
  ReplicaEvent untouched = Failed(Applied(0, first));
  untouched.content = WorkerContent();
  EXPECT_THAT(Step(untouched), ElementsAre(R::kFenced));
  EXPECT_FALSE(state_.Servable());
  Step(Event(ReplicaEvent::kForget));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kStillHeld));
  ReplicaEvent mixed = Failed(Applied(1, first + 1));
  EXPECT_THAT(Step(mixed), IsEmpty());
  EXPECT_FALSE(state_.Servable());
}

TEST_F(ReplicaMachineTest, APauseOfNoneStopsNobodyUntilSomebodyElseHolds) {
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder.pause = PauseKind::kNone;
  EXPECT_THAT(Step(hold), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kNone);
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, last_[0].command)),
              ElementsAre(R::kPausedNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kInstall)),
              ElementsAre(R::kSendApply, R::kSendApply));
  const int64_t first = last_[0].command;
  // They differ for a moment: that is what building beside means.
  EXPECT_THAT(Step(Applied(0, first)), IsEmpty());
  EXPECT_TRUE(state_.PausedForAll());
  ReplicaEvent by_hand = Event(ReplicaEvent::kHold);
  by_hand.holder = Holder{Holder::kOperator, 0, PauseKind::kAbort};
  EXPECT_THAT(Step(by_hand), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kAbort);
  EXPECT_FALSE(state_.PausedForAll());
}

TEST_F(ReplicaMachineTest, ItsNodeHearsThatSomebodyElseHoldsItToo) {
  EXPECT_THAT(Step(Event(ReplicaEvent::kHold)), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].update, 7);
  EXPECT_FALSE(last_[0].again);
  // While it pauses: said when it has.
  ReplicaEvent by_hand = Event(ReplicaEvent::kHold);
  by_hand.holder = Holder{Holder::kOperator, 0, PauseKind::kAbort};
  const int64_t first = last_[0].command;
  EXPECT_THAT(Step(by_hand), IsEmpty());
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, first)),
              ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].update, 0);
  EXPECT_TRUE(last_[0].again);
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, last_[0].command)),
              ElementsAre(R::kPausedNow));
  // It is installed all the same.
  EXPECT_THAT(Step(Event(ReplicaEvent::kInstall)),
              ElementsAre(R::kSendApply, R::kSendApply));
  const int64_t apply = last_[0].command;
  by_hand.kind = ReplicaEvent::kRelease;
  EXPECT_THAT(Step(by_hand), ElementsAre(R::kStillHeld, R::kSendPause));
  EXPECT_EQ(last_[1].update, 7);
  const int64_t again = last_[1].command;
  EXPECT_THAT(Step(Applied(0, apply)), IsEmpty());
  EXPECT_THAT(Step(Applied(1, apply + 1)), ElementsAre(R::kInstalledNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kPaused, again)),
              ElementsAre(R::kPausedNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
}

TEST_F(ReplicaMachineTest, AMixThatWasBuiltBesideIsPausedInEarnestAtTheEnd) {
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder.pause = PauseKind::kNone;
  Step(hold);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  Step(Applied(0, last_[0].command));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)),
              ElementsAre(R::kStillHeld, R::kSendPause));
  EXPECT_EQ(last_[1].pause, PauseKind::kDrain);
}

// Else a set would be written to with which the engine still generates.
TEST_F(ReplicaMachineTest, APauseOfNoneNeedsAnEngineThatSaysItHasFlipped) {
  const auto rejoin = [this] {
    Step(Event(ReplicaEvent::kControlLeft));
    ReplicaEvent joined = Event(ReplicaEvent::kControlJoined);
    joined.swaps = true;
    return Step(joined);
  };
  // What it came with needs no flip, and no second word.
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  EXPECT_THAT(rejoin(), ElementsAre(R::kResumedNow, R::kComplete));
  EXPECT_THAT(Step(ReplicaEvent()), IsEmpty());
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder.pause = PauseKind::kNone;
  EXPECT_THAT(Step(hold), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kNone);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  const int64_t apply = last_[0].command;
  Step(Applied(0, apply));
  EXPECT_THAT(Step(Applied(1, apply + 1)), ElementsAre(R::kInstalledNow));
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kSendResume));
  // The stream breaks: the Resume is lost, or its answer.
  EXPECT_THAT(rejoin(), ElementsAre(R::kComplete));
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendResume));
  EXPECT_EQ(last_[0].update, 7);
  ReplicaEvent next = hold;
  next.holder.update = 8;
  EXPECT_THAT(Step(next), ElementsAre(R::kStillHeld, R::kSendPause));
  EXPECT_EQ(last_[1].pause, PauseKind::kDrain);
  next.kind = ReplicaEvent::kRelease;
  EXPECT_THAT(Step(next), ElementsAre(R::kSendResume));
  EXPECT_THAT(Step(Event(ReplicaEvent::kResumed, last_[0].command)),
              ElementsAre(R::kResumedNow));
  next.kind = ReplicaEvent::kHold;
  EXPECT_THAT(Step(next), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kNone);
}

// Found by tests/chaos: a worker was stopped while its replica built an update
// beside; the update went on without it, it finished all the same, and the next
// update was written into the set that the engine generated with.
TEST_F(ReplicaMachineTest, AnotherUpdateIsNotBuiltBesideBeforeItFlipped) {
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder.pause = PauseKind::kNone;
  Step(hold);
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kInstall));
  Step(Applied(0, last_[0].command));
  ReplicaEvent worker = Event(ReplicaEvent::kWorkerLeft);
  worker.worker = 1;
  EXPECT_THAT(Step(worker), ElementsAre(R::kLeft));
  Step(Event(ReplicaEvent::kRelease));
  worker.kind = ReplicaEvent::kWorkerJoined;
  EXPECT_THAT(Step(worker), ElementsAre(R::kComplete));
  EXPECT_TRUE(state_.InstalledEverywhere(7));
  hold.holder.update = 8;
  EXPECT_THAT(Step(hold), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kDrain);
  ReplicaEvent install = Event(ReplicaEvent::kInstall);
  install.update = 8;
  EXPECT_THAT(Step(install), IsEmpty());
}

// Found by tests/chaos/simulation: its node had resumed it by itself; back, and
// before it had named the engine, the update released it, and then waited for
// ever for the answer to a Resume that was never sent.
TEST_F(ReplicaMachineTest, ReleasedBeforeItIsNamedItIsResumedWhenItSaysItRuns) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  state_.named = false;
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), IsEmpty());
  EXPECT_THAT(Step(Event(ReplicaEvent::kControlJoined)),
              ElementsAre(R::kResumedNow));
  // One that stands still is resumed when all is named.
  Step(Event(ReplicaEvent::kHold));
  state_.named = true;
  Step(ReplicaEvent());
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  state_.named = false;
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), IsEmpty());
  state_.named = true;
  EXPECT_THAT(Step(ReplicaEvent()), ElementsAre(R::kSendResume));
}

TEST_F(ReplicaMachineTest, AMixIsNotLetOffWithAPauseOfNone) {
  ReplicaEvent content = Event(ReplicaEvent::kContent);
  content.worker = 1;
  content.content = WorkerContent{Content::kWriting, 9};
  EXPECT_THAT(Step(content), ElementsAre(R::kSendPause));
  EXPECT_EQ(last_[0].pause, PauseKind::kDrain);
  ReplicaEvent hold = Event(ReplicaEvent::kHold);
  hold.holder.pause = PauseKind::kNone;
  EXPECT_THAT(Step(hold), IsEmpty());
  EXPECT_EQ(state_.pause, PauseKind::kDrain);
}

TEST_F(ReplicaMachineTest, WhatIsStreamedIntoCountsAsAMixUntilItSaysOtherwise) {
  Step(Event(ReplicaEvent::kHold));
  Step(Event(ReplicaEvent::kPaused, last_[0].command));
  Step(Event(ReplicaEvent::kStreaming));
  EXPECT_FALSE(state_.Servable());
  // The update is aborted: the release does not resume it.
  EXPECT_THAT(Step(Event(ReplicaEvent::kRelease)), ElementsAre(R::kStillHeld));
  // Nothing had been written.
  ReplicaEvent content = Event(ReplicaEvent::kContent);
  content.content = WorkerContent();
  EXPECT_THAT(Step(content), IsEmpty());
  content.worker = 1;
  EXPECT_THAT(Step(content), ElementsAre(R::kSendResume));
  EXPECT_FALSE(last_[0].weights_changed);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
