// The pure machine of one update by itself: what the coordinator's tests cannot
// see well.

#include "daemon/coordinator/update_machine.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::IsEmpty;

const absl::Time kStart = absl::FromUnixSeconds(100);

class UpdateMachineTest : public ::testing::Test {
 protected:
  using U = UpdateAction;
  using E = UpdateEvent;

  void SetUp() override {
    for (const char* name : {"n0", "n1", "n2"}) {
      UpdateNode node;
      node.name = name;
      node.source = state_.nodes.empty();
      node.receiver = !node.source;
      state_.nodes.push_back(node);
    }
    state_.ranks.resize(1);
    state_.replicas.resize(2);
    BeginUpdate(config_, now_, &state_);
  }
  int Count(const std::vector<U>& actions, U::Kind kind) {
    return static_cast<int>(
        std::count_if(actions.begin(), actions.end(),
                      [kind](const U& action) { return action.kind == kind; }));
  }
  std::vector<U> Step(E::Kind kind, int index = 0,
                      absl::StatusCode code = absl::StatusCode::kOk) {
    E event;
    event.kind = kind;
    event.rank = event.node = event.replica = index;
    event.epoch = state_.epoch;
    if (code != absl::StatusCode::kOk) event.fault = Fault(code, "X", "x");
    return StepUpdate(config_, event, now_, &state_);
  }
  void Prepare() {
    for (int i = 0; i < 3; ++i) Step(E::kNodePrepared, i);
  }
  void Verify() {
    for (int i = 0; i < 3; ++i) Step(E::kNodeVerified, i);
  }

  UpdateConfig config_;
  UpdateState state_;
  absl::Time now_ = kStart;
};

TEST_F(UpdateMachineTest, TheManifestFollowsThePrepareWheneverTheCopyEnds) {
  Step(E::kRankCopied);
  const auto actions = Step(E::kRankArrived);
  ASSERT_EQ(Count(actions, U::kPrepare), 3);
  ASSERT_EQ(Count(actions, U::kManifest), 3);
  EXPECT_EQ(actions.back().kind, U::kManifest);
}

TEST_F(UpdateMachineTest, OldEpochsChangeNothing) {
  Step(E::kRankArrived);
  Prepare();
  EXPECT_EQ(state_.phase, UpdatePhase::kMoving);
  EXPECT_EQ(state_.epoch, 1);
  Step(E::kNodeVerified, 1, absl::StatusCode::kUnavailable);
  EXPECT_EQ(state_.epoch, 2);
  E old;
  old.kind = E::kNodeVerified;
  old.node = 2;
  old.epoch = 1;
  old.fault = Fault(absl::StatusCode::kUnavailable, "X", "x");
  EXPECT_THAT(StepUpdate(config_, old, now_, &state_), IsEmpty());
  old.kind = E::kNodePrepared;
  old.fault = Fault();
  EXPECT_THAT(StepUpdate(config_, old, now_, &state_), IsEmpty());
  EXPECT_EQ(state_.phase, UpdatePhase::kPreparing);
}

TEST_F(UpdateMachineTest, ARankMayGoOnceItIsCopied) {
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Step(E::kRankLost, 0, absl::StatusCode::kAborted);
  EXPECT_EQ(state_.phase, UpdatePhase::kPreparing);
}

TEST_F(UpdateMachineTest, NothingIsUndoneAfterTheCommit) {
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Verify();
  EXPECT_EQ(state_.phase, UpdatePhase::kPausing);
  Step(E::kNodeLost, 0, absl::StatusCode::kUnavailable);  // all is verified
  Step(E::kReplicaPaused, 0);
  EXPECT_FALSE(state_.committed);
  const auto actions = Step(E::kReplicaPaused, 1);
  EXPECT_TRUE(state_.committed);
  EXPECT_EQ(actions[0].kind, U::kCommit);
  EXPECT_EQ(Count(actions, U::kInstall), 2);
  Step(E::kCancel, 0, absl::StatusCode::kCancelled);
  Step(E::kRankLost, 0, absl::StatusCode::kAborted);
  Step(E::kNodeLost, 1, absl::StatusCode::kUnavailable);
  now_ += absl::Hours(1);
  Step(E::kTick);
  EXPECT_EQ(state_.phase, UpdatePhase::kApplying);
  Step(E::kReplicaInstalled, 0);
  Step(E::kReplicaFenced, 1, absl::StatusCode::kInternal);
  EXPECT_EQ(state_.phase, UpdatePhase::kResuming);
  const auto end = Step(E::kReplicaResumed, 0);
  EXPECT_EQ(end.back().kind, U::kEnd);
  EXPECT_EQ(state_.phase, UpdatePhase::kActive);
  EXPECT_THAT(Step(E::kReplicaResumed, 0), IsEmpty());
}

TEST_F(UpdateMachineTest, AnAbortReleasesWhatItHeld) {
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Verify();
  const auto actions =
      Step(E::kReplicaPauseFailed, 1, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Count(actions, U::kRelease), 2);
  EXPECT_EQ(actions.back().kind, U::kEnd);
  EXPECT_EQ(state_.phase, UpdatePhase::kAborted);
}

TEST_F(UpdateMachineTest, SilenceWhileMovingIsNoticed) {
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Step(E::kNodeVerified, 0);
  for (int i = 0; i <= config_.max_reconfigurations; ++i) {
    ASSERT_EQ(state_.phase, UpdatePhase::kMoving);
    now_ += 2 * config_.progress_timeout;
    Step(E::kTick);
    Prepare();
  }
  EXPECT_EQ(state_.phase, UpdatePhase::kAborted);
  EXPECT_EQ(state_.fault.reason, "PROGRESS_TIMEOUT");
  EXPECT_THAT(state_.fault.message, ::testing::HasSubstr("n1, n2"));
}

TEST_F(UpdateMachineTest, RollingHoldsAsManyAsItMay) {
  config_.max_unavailable = 1;
  state_.replicas.resize(3);
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  for (int i = 0; i < 2; ++i) Step(E::kNodeVerified, i);
  auto actions = Step(E::kNodeVerified, 2);
  // The decision comes first, then one replica is held.
  EXPECT_TRUE(state_.committed);
  EXPECT_EQ(Count(actions, U::kCommit), 1);
  EXPECT_EQ(Count(actions, U::kHold), 1);
  EXPECT_EQ(Count(Step(E::kReplicaPaused, 0), U::kInstall), 1);
  EXPECT_EQ(Count(Step(E::kReplicaInstalled, 0), U::kRelease), 1);
  // The second's turn comes when the first is back, and one that cannot pause
  // holds nobody up.
  actions = Step(E::kReplicaResumed, 0);
  EXPECT_EQ(Count(actions, U::kHold), 1);
  actions = Step(E::kReplicaPauseFailed, 1, absl::StatusCode::kInternal);
  EXPECT_EQ(Count(actions, U::kRelease), 1);
  EXPECT_EQ(Count(actions, U::kHold), 1);
  EXPECT_EQ(state_.replicas[1].stage, UpdateReplica::kLeft);
  Step(E::kReplicaPaused, 2);
  Step(E::kReplicaFenced, 2, absl::StatusCode::kInternal);
  EXPECT_EQ(state_.phase, UpdatePhase::kActive);
}

TEST_F(UpdateMachineTest, StreamPausesBeforeItMoves) {
  config_.stream = true;
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  EXPECT_EQ(state_.phase, UpdatePhase::kPausing);
  Step(E::kReplicaPaused, 0);
  auto actions = Step(E::kReplicaPaused, 1);
  EXPECT_EQ(actions[0].kind, U::kStreamBegin);
  EXPECT_EQ(Count(actions, U::kMove), 3);
  EXPECT_EQ(state_.phase, UpdatePhase::kMoving);
  // A new route does not begin it again.
  Step(E::kNodeVerified, 1, absl::StatusCode::kUnavailable);
  Prepare();
  EXPECT_EQ(state_.phase, UpdatePhase::kMoving);
  for (int i = 0; i < 2; ++i) Step(E::kNodeVerified, i);
  actions = Step(E::kNodeVerified, 2);
  EXPECT_EQ(actions[0].kind, U::kCommit);
  EXPECT_EQ(Count(actions, U::kInstall), 2);
}

TEST_F(UpdateMachineTest, StreamThatLosesANodeWhileItPausesIsRoutedAnew) {
  config_.stream = true;
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Step(E::kReplicaPaused, 0);
  const auto lost = Step(E::kNodeLost, 2, absl::StatusCode::kUnavailable);
  EXPECT_EQ(Count(lost, U::kPrepare), 2);
  Step(E::kReplicaLeft, 1, absl::StatusCode::kUnavailable);
  Prepare();
  EXPECT_TRUE(state_.stream_begun);
  EXPECT_EQ(state_.phase, UpdatePhase::kMoving);
}

TEST_F(UpdateMachineTest, SourcesInPlaceAreHeldUntilTheirBytesAreElsewhere) {
  config_.in_place = true;
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  for (int i = 0; i < 2; ++i) Step(E::kNodeVerified, i);
  EXPECT_FALSE(state_.sources_released);
  const auto actions = Step(E::kNodeVerified, 2);
  EXPECT_EQ(Count(actions, U::kReleaseSources), 1);
  EXPECT_EQ(actions[0].kind, U::kReleaseSources);
  Step(E::kRankLost, 0, absl::StatusCode::kAborted);
  EXPECT_EQ(state_.phase, UpdatePhase::kPausing);
  // One that did not hear it is told when it is back; receivers are not.
  EXPECT_EQ(Count(Step(E::kNodeBack, 0), U::kReleaseSources), 1);
  EXPECT_EQ(Count(Step(E::kNodeBack, 1), U::kReleaseSources), 0);
}

TEST_F(UpdateMachineTest, ARankInPlaceThatIsLostBeforeThatAborts) {
  config_.in_place = true;
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Step(E::kNodeVerified, 1);
  Step(E::kRankLost, 0, absl::StatusCode::kAborted);
  EXPECT_EQ(state_.phase, UpdatePhase::kAborted);
}

TEST_F(UpdateMachineTest, StreamInPlaceReleasesItsSourcesAtTheCommit) {
  config_.in_place = true;
  config_.stream = true;
  Step(E::kRankArrived);
  Step(E::kRankCopied);
  Prepare();
  Step(E::kReplicaPaused, 0);
  Step(E::kReplicaPaused, 1);
  for (int i = 0; i < 2; ++i) Step(E::kNodeVerified, i);
  const auto actions = Step(E::kNodeVerified, 2);
  EXPECT_EQ(actions[0].kind, U::kCommit);
  EXPECT_EQ(actions[1].kind, U::kReleaseSources);
}

TEST_F(UpdateMachineTest, BehindAnOlderOneItGathersAndWaits) {
  state_.blocked = true;
  Step(E::kRankCopied);
  EXPECT_THAT(Step(E::kRankArrived), IsEmpty());
  EXPECT_EQ(Count(Step(E::kUnblocked), U::kPrepare), 3);
}

TEST_F(UpdateMachineTest, BehindAnOlderOneItDoesNotWaitForEver) {
  state_.blocked = true;
  Step(E::kRankCopied);
  Step(E::kRankArrived);
  now_ += config_.queue_timeout - absl::Seconds(1);
  Step(E::kTick);
  EXPECT_EQ(state_.phase, UpdatePhase::kGathering);
  now_ += absl::Seconds(1);
  E tick;
  tick.behind = "version 3 is MOVING";
  StepUpdate(config_, tick, now_, &state_);
  EXPECT_EQ(state_.fault.reason, "QUEUE_TIMEOUT");
  EXPECT_EQ(state_.fault.message,
            "the update before it did not end within 2m: version 3 is MOVING; "
            "publish again");
}

// What QUEUE_TIMEOUT says of the update in the way, phase by phase.
TEST_F(UpdateMachineTest, SaysWhoItWaitsFor) {
  state_.ranks[0].rank = 7;
  state_.replicas[0].name = "r1";
  state_.replicas[1].name = "r2";
  EXPECT_EQ(WaitsFor(state_), "rank 7");
  Step(E::kRankArrived);
  Step(E::kNodePrepared, 1);
  EXPECT_EQ(WaitsFor(state_), "node n0, n2");
  Prepare();
  EXPECT_EQ(WaitsFor(state_), "rank 7");
  Step(E::kRankCopied);
  Step(E::kNodeVerified, 0);
  EXPECT_EQ(WaitsFor(state_), "node n1, n2");
  Verify();
  EXPECT_EQ(WaitsFor(state_), "r1, r2");
  Step(E::kReplicaPaused, 0);
  EXPECT_EQ(WaitsFor(state_), "r2");
  Step(E::kReplicaPaused, 1);
  ASSERT_EQ(state_.phase, UpdatePhase::kApplying);
  Step(E::kReplicaInstalled, 1);
  EXPECT_EQ(WaitsFor(state_), "r1");
  Step(E::kReplicaInstalled, 0);
  ASSERT_EQ(state_.phase, UpdatePhase::kResuming);
  Step(E::kReplicaResumed, 0);
  EXPECT_EQ(WaitsFor(state_), "r2");
  Step(E::kReplicaResumed, 1);
  EXPECT_EQ(WaitsFor(state_), "");
}

TEST_F(UpdateMachineTest, LatestMovesBehindTheOlderOneAndSaysWhenItIsComplete) {
  state_.blocked = true;
  config_.latest = true;
  Step(E::kRankCopied);
  EXPECT_EQ(Count(Step(E::kRankArrived), U::kPrepare), 3);
  Prepare();
  for (int i = 0; i < 2; ++i) Step(E::kNodeVerified, i);
  const auto actions = Step(E::kNodeVerified, 2);
  EXPECT_EQ(Count(actions, U::kAtBarrier), 1);
  EXPECT_EQ(Count(actions, U::kHold), 0);
  EXPECT_EQ(Count(Step(E::kUnblocked), U::kHold), 2);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
