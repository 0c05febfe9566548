#include "daemon/node/away.h"

#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

AwayWorker On(const std::string& update_id) {
  AwayWorker worker;
  worker.state = AwayWorker::State::kInstalled;
  worker.update_id = update_id;
  return worker;
}

// Two workers on "old", paused for "new", whose commit is not known.
AwayReplica Offered() {
  AwayReplica replica;
  replica.away = absl::Seconds(30);
  replica.grace = absl::Seconds(5);
  replica.paused = true;
  replica.worker_count = 2;
  replica.workers = {On("old"), On("old")};
  replica.offered = "new";
  replica.may_refuse = true;
  replica.barrier_timeout = absl::Seconds(20);
  return replica;
}

TEST(Away, APauseWhoseCommitIsNotKnownIsRefusedAfterTheBarrierTimeout) {
  AwayReplica replica = Offered();
  EXPECT_EQ(DecideAway(replica), AwayAction::kRefuse);
  replica.away = absl::Seconds(19);
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
}

TEST(Away, OnlyWhereNoOtherNodeHasAWord) {
  AwayReplica replica = Offered();
  replica.may_refuse = false;
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
  replica = Offered();
  replica.workers.pop_back();
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
}

TEST(Away, AWorkerThatWasWrittenToIsNeverResumedOnTheOldUpdate) {
  AwayReplica replica = Offered();
  replica.workers[1].state = AwayWorker::State::kWriting;
  replica.workers[1].update_id = "new";
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
}

// An engine in deep sleep has no old update to go on with.
TEST(Away, AWorkerThatHoldsNothingIsNeverResumed) {
  AwayReplica replica = Offered();
  for (AwayWorker& worker : replica.workers) {
    worker.state = AwayWorker::State::kNothing;
    worker.update_id.clear();
  }
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
}

TEST(Away, WhatAnEngineCameWithIsAnOldUpdateToo) {
  AwayReplica replica = Offered();
  for (AwayWorker& worker : replica.workers) worker = AwayWorker();
  EXPECT_EQ(DecideAway(replica), AwayAction::kRefuse);
}

TEST(Away, WorkersThatDifferAreNeverResumedAsTheOldUpdate) {
  AwayReplica replica = Offered();
  replica.workers = {On("new"), On("old")};
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
  replica.workers = {On("older"), On("old")};
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
}

TEST(Away, WhatAllWorkersHaveIsCommittedWhetherItWasHeardOrNot) {
  AwayReplica replica = Offered();
  replica.workers = {On("new"), On("new")};
  EXPECT_EQ(DecideAway(replica), AwayAction::kResume);
  replica.workers[1].busy = true;
  EXPECT_NE(DecideAway(replica), AwayAction::kResume);
}

TEST(Away, PastTheCommitItFinishesByItself) {
  AwayReplica replica = Offered();
  replica.committed = true;
  replica.workers = {On("new"), On("old")};
  EXPECT_EQ(DecideAway(replica), AwayAction::kApply);
  replica.workers[1].busy = true;
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
  replica.workers[1] = On("new");
  EXPECT_EQ(DecideAway(replica), AwayAction::kResume);
  // And never refuses, however long it takes.
  replica.workers[1] = On("old");
  replica.away = absl::Hours(1);
  EXPECT_EQ(DecideAway(replica), AwayAction::kApply);
}

TEST(Away, PastTheCommitAReplicaOfSeveralNodesWaits) {
  AwayReplica replica = Offered();
  replica.committed = true;
  replica.workers = {On("new")};
  EXPECT_EQ(DecideAway(replica), AwayAction::kAlarm);
}

TEST(Away, ACoordinatorThatIsBackSoonIsWaitedFor) {
  AwayReplica replica = Offered();
  replica.committed = true;
  replica.workers = {On("new"), On("new")};
  replica.away = absl::Seconds(4);
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
}

TEST(Away, SomebodyElsesPauseIsNotEnded) {
  AwayReplica replica = Offered();
  replica.offered.clear();
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
}

TEST(Away, AnIsolatedReplicaServesOnUnlessItWasToldOtherwise) {
  AwayReplica replica = Offered();
  replica.paused = false;
  replica.offered.clear();
  replica.max_staleness = absl::Seconds(25);
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
  replica.pause_on_isolation = true;
  EXPECT_EQ(DecideAway(replica), AwayAction::kHold);
  replica.away = absl::Seconds(24);
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
}

TEST(Away, NothingHappensWhileTheEngineIsAtSomething) {
  AwayReplica replica = Offered();
  replica.busy = true;
  EXPECT_EQ(DecideAway(replica), AwayAction::kNothing);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
