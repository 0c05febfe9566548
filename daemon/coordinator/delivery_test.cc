// How an update is delivered: pause modes, rolling commits, STREAM, publishing
// in place, queues, and readiness.

#include <string>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::HasSubstr;
using Command = v1::NodeCommand;

void PublishBoth(FakeCluster* c, const v1::UpdateOptions& options) {
  c->Publish(0, 0, "", options);
  c->Publish(1, 0, "", options);
  c->Run();
}

// ---- Pause modes ----

TEST(PauseModeTest, IsCarriedToTheEngineAndItsAnswerIsRecorded) {
  FakeCluster c;
  c.AddStandard();
  for (const v1::PauseMode mode :
       {v1::PAUSE_MODE_ABORT, v1::PAUSE_MODE_DRAIN, v1::PAUSE_MODE_KEEP}) {
    v1::UpdateOptions options;
    options.set_pause_mode(mode);
    PublishBoth(&c, options);
    EXPECT_EQ(c.engines["r1"].last_pause.pause().mode(), mode);
    EXPECT_EQ(c.engines["r1"].last_resume.mode(), mode);
    EXPECT_TRUE(c.engines["r1"].last_resume.weights_changed());
    const v1::Version version = c.Version();
    ASSERT_EQ(version.replicas_size(), 2);
    EXPECT_EQ(version.replicas(0).pause_mode(), mode);
    EXPECT_EQ(version.replicas(0).pause_detail(), "drained 3 requests");
    ExpectAllServe(c, version.update_id());
  }
}

TEST(PauseModeTest, NoneOnlyWhereEveryReplicaSwapsAtomically) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions options;
  options.set_pause_mode(v1::PAUSE_MODE_NONE);
  c.engines["r1"].atomic_swap = true;
  c.Register("r1");
  const int64_t call = c.Publish(0, 0, "", options);
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "ATOMIC_SWAP_REQUIRED");
  EXPECT_THAT(c.FindReply(call)->failure().message(), HasSubstr("r2"));
  // The other rank is told too, once; then both are free.
  const int64_t other = c.Publish(1, 0, "", options);
  c.Run();
  EXPECT_EQ(c.FindReply(other)->failure().reason(), "ATOMIC_SWAP_REQUIRED");
  c.engines["r2"].atomic_swap = true;
  c.Register("r2");
  PublishBoth(&c, options);
  EXPECT_EQ(c.engines["r2"].last_pause.pause().mode(), v1::PAUSE_MODE_NONE);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(PauseModeTest, TheEngineIsToldWhatItHasAndWhetherCachesMustGo) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2, 4);
  c.Run();
  c.Pass(absl::Seconds(61));  // aborted: r1 resumes with what it had
  EXPECT_FALSE(c.engines["r1"].last_resume.weights_changed());
  EXPECT_EQ(c.engines["r1"].last_resume.update_id(), "");
  c.intercept = nullptr;
  c.PublishAll(2, 5);
  c.Run();
  EXPECT_TRUE(c.engines["r1"].last_resume.weights_changed());
  EXPECT_EQ(c.engines["r1"].last_resume.update_id(), c.Version().update_id());
  EXPECT_EQ(c.engines["r1"].last_resume.version(), 5);
}

// ---- Rolling ----

v1::UpdateOptions Rolling(int max_unavailable) {
  v1::UpdateOptions options;
  options.mutable_commit_policy()->mutable_rolling()->set_max_unavailable(
      max_unavailable);
  return options;
}

TEST(RollingTest, NeverMoreAwayThanIsAllowed) {
  FakeCluster c;
  c.AddStandard();
  c.AddReplica("r3", {"n1"});
  c.AddReplica("r4", {"n2"});
  c.Run();
  int worst = 0;
  c.intercept = [&](const std::string&, const Command&) {
    int away = 0;
    for (const auto& engine : c.engines) away += engine.second.paused;
    worst = std::max(worst, away);
    return false;
  };
  PublishBoth(&c, Rolling(1));
  EXPECT_EQ(worst, 1);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
  // The decision comes before anybody is asked to pause.
  EXPECT_LT(First(c, "journal:update_committed"), First(c, "pause_replica"));
  PublishBoth(&c, Rolling(2));
  EXPECT_EQ(worst, 2);
}

TEST(RollingTest, AReplicaThatCannotPauseDoesNotBlockTheOthers) {
  FakeCluster c;
  c.AddStandard();
  c.AddReplica("r0", {"n1"});
  c.Run();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_pause_replica() &&
           command.pause_replica().replica() == "r0";
  };
  PublishBoth(&c, Rolling(1));
  EXPECT_EQ(c.engines["r1"].pauses, 0);  // r0's turn
  c.Pass(absl::Seconds(62));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  EXPECT_EQ(c.engines["r2"].workers[0].update_id(), c.Version().update_id());
  // And it is not forgotten.
  c.intercept = nullptr;
  c.Pass(absl::Seconds(70));
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RollingTest, AReplicaThatCannotApplyIsFencedAndTheOthersGoOn) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_apply_worker();
  };
  PublishBoth(&c, Rolling(1));
  c.Pass(absl::Seconds(370), absl::Seconds(2));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_FENCED);
  EXPECT_EQ(c.engines["r2"].workers[1].update_id(), c.Version().update_id());
  EXPECT_FALSE(c.engines["r2"].paused);
  ExpectNextPublishWorks(&c);
}

TEST(RollingTest, ARestartedCoordinatorGoesOnRolling) {
  FakeCluster c;
  c.AddStandard();
  c.AddReplica("r3", {"n1"});
  c.Run();
  c.crash_before = "send:n1:apply";
  PublishBoth(&c, Rolling(1));
  ASSERT_TRUE(c.crashed);
  int worst = 0;
  c.intercept = [&](const std::string&, const Command&) {
    int away = 0;
    for (const auto& engine : c.engines) away += engine.second.paused;
    worst = std::max(worst, away);
    return false;
  };
  c.RestartCoordinator();
  c.Pass(absl::Seconds(3));
  EXPECT_EQ(worst, 1);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

// ---- STREAM and publishing in place ----

v1::UpdateOptions Stream() {
  v1::UpdateOptions options;
  options.set_update_mode(v1::UPDATE_MODE_STREAM);
  return options;
}

TEST(StreamTest, PausesThenJournalsThenMovesThenCommits) {
  FakeCluster c;
  c.AddStandard();
  PublishBoth(&c, Stream());
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE)
      << c.Version().ShortDebugString();
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_LT(Last(c, "pause_replica"), First(c, "journal:stream_begun"));
  EXPECT_LT(First(c, "journal:stream_begun"), First(c, "move_update"));
  EXPECT_LT(Last(c, "move_update"), First(c, "journal:update_committed"));
  EXPECT_LT(First(c, "journal:update_committed"), First(c, "apply_worker"));
  // A node's store need not have it: what it cannot refuse it is not offered.
  EXPECT_FALSE(c.engines["r1"].last_pause.may_refuse());
  EXPECT_TRUE(c.engines["r1"].last_resume.weights_changed());
}

TEST(StreamTest, OneThatBreaksOffLeavesMixesThatAreMendedFromTheOldOne) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string old = c.Version().update_id();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_move_update()) return false;
    v1::NodeReport report;
    auto* verified = report.mutable_update_verified();
    verified->set_model(kModel);
    verified->set_update_id(command.move_update().update_id());
    *verified->mutable_epoch() = command.move_update().epoch();
    *verified->mutable_failure() =
        MakeFailure(15, "MANIFEST_MISMATCH", "bucket 1 differs");
    c.Report(node, report);
    return true;
  };
  PublishBoth(&c, Stream());
  c.Pass(absl::Seconds(70));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_GT(First(c, "journal:stream_begun"), 0);
  // They held a mix, by their own word, and were given the old one again.
  ExpectAllServe(c, old);
  EXPECT_EQ(c.Replica("r2").version(), 1);
  ExpectNextPublishWorks(&c);
}

// Found by tests/chaos/simulation (seed 98362): a node came back between the
// record of the stream and its Move. Its workers were written to and still
// counted as what they had said when they joined: a mix was resumed.
TEST(StreamTest, AWorkerThatJoinsBeforeItsMoveCountsAsWritten) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  int moves = 0;
  c.intercept = [&moves](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_move_update()) return false;
    ++moves;
    return true;
  };
  PublishBoth(&c, Stream());
  ASSERT_EQ(moves, 1);
  c.Reconnect("n2");
  c.Run();
  ASSERT_EQ(moves, 2);
  const v1::Replica replica = c.Replica("r2");
  ASSERT_EQ(replica.workers_size(), 2);
  for (const v1::Worker& worker : replica.workers()) {
    EXPECT_EQ(worker.installed().state(), v1::InstalledState::STATE_WRITING);
  }
}

TEST(StreamTest, AMixWithoutAnOldOneIsFencedUntilTheNextPublish) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  v1::UpdateOptions options = Stream();
  PublishBoth(&c, options);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_MOVING);
  c.RestartNode("n0");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_FENCED);
  EXPECT_TRUE(c.engines["r1"].paused);
  EXPECT_EQ(c.Replica("r1").last_failure().reason(), "WORKER_TAINTED");
  EXPECT_EQ(c.violations, 0);
  ExpectNextPublishWorks(&c);
}

TEST(StreamTest, ACoordinatorThatDiesInTheMiddleLeavesMixesThatAreMended) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string old = c.Version().update_id();
  for (const char* point :
       {"journal:stream_begun", "send:n1:move", "send:n2:move"}) {
    c.crash_before = point;
    PublishBoth(&c, Stream());
    ASSERT_TRUE(c.crashed) << point;
    c.RestartCoordinator();
    c.Pass(absl::Seconds(40));
    ExpectAllServe(c, old);
    EXPECT_EQ(c.Version().failure().reason(), "COORDINATOR_RESTARTED");
  }
  // A crash after the commit is rolled forward.
  for (int i = 0; i < 3 && c.Version().state() != v1::Version::STATE_ACTIVE;
       ++i) {
    c.PublishAll(2);
    c.Run();
  }
  ExpectNextPublishWorks(&c);
}

TEST(StreamTest, IsRefusedWhereNoWholeCopyWouldOutliveTheSender) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions options = Stream();
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  const int64_t call = c.Publish(0, 0, "", options);
  const int64_t other = c.Publish(1, 0, "", options);
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "NO_RECOVERY_SOURCE");
  EXPECT_EQ(c.FindReply(other)->failure().reason(), "NO_RECOVERY_SOURCE");
  // Said to be wanted:
  options.set_allow_no_recovery(true);
  PublishBoth(&c, options);
  ExpectAllServe(c, c.Version().update_id());
  // Nobody has that one in a store, so it is refused again ...
  options.set_allow_no_recovery(false);
  const int64_t again = c.Publish(0, 0, "", options);
  c.Publish(1, 0, "", options);
  c.Run();
  EXPECT_EQ(c.FindReply(again)->failure().reason(), "NO_RECOVERY_SOURCE");
  // ... until an update lies in the stores of all.
  c.PublishAll(2);
  c.Run();
  PublishBoth(&c, options);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(InPlaceTest, SourcesAreReleasedWhenAllIsVerified) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions options;
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  PublishBoth(&c, options);
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_LT(First(c, "release_sources"), First(c, "pause_replica"));
  EXPECT_EQ(c.CountCommands(Command::kReleaseSources), 1);
}

TEST(InPlaceTest, ARankThatIsLostBeforeThatAborts) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  v1::UpdateOptions options;
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  PublishBoth(&c, options);
  c.LoseRank(0);
  EXPECT_EQ(c.Version().failure().reason(), "RANK_LOST");
  c.AddRank(0, 2, "n0");
  ExpectNextPublishWorks(&c);
}

TEST(InPlaceTest, ARepeatedRequestIsAnsweredOnlyOnceItMayChangeItsTensors) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  v1::UpdateOptions options;
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  c.Publish(0, 0, "a", options);
  c.Publish(1, 0, "b", options);
  c.Run();
  const int64_t early = c.Publish(0, 0, "a", options);
  c.Run();
  EXPECT_FALSE(c.FindReply(early)->publish_opened().repeated_request());
  EXPECT_EQ(First(c, "journal:rank_copied"), -1);
  c.intercept = nullptr;
  c.Disconnect("n2");
  c.Reconnect("n2");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  const int64_t late = c.Publish(0, 0, "a", options);
  c.Run();
  EXPECT_TRUE(c.FindReply(late)->publish_opened().repeated_request());
}

// ---- LATEST ----

TEST(LatestTest, TheOlderOneIsSupersededOnlyWhenTheNewerIsComplete) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions latest;
  latest.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  std::string held_back;
  c.intercept = [&](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update() &&
           (held_back.empty() ||
            command.move_update().update_id() == held_back) &&
           (held_back = command.move_update().update_id(), true);
  };
  PublishBoth(&c, latest);
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_MOVING);
  c.Publish(0, 0, "", latest);
  c.Run();
  // The newer one gathers: nothing is given up for it yet.
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_MOVING);
  c.Publish(1, 0, "", latest);
  c.Run();
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_SUPERSEDED);
  EXPECT_EQ(c.Version("1").failure().reason(), "SUPERSEDED");
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version("2").update_id());
  // It is one decision: on the disk before the newer one's commit is.
  const int superseded = First(c, "journal:update_ended");
  ASSERT_GE(superseded, 0);
  EXPECT_LT(superseded, First(c, "journal:update_committed"));
  EXPECT_LT(superseded, First(c, "pause_replica"));
  // And remembered, also when the journal was compacted more than once.
  const std::string first = c.Version("1").update_id();
  for (int i = 0; i < 2; ++i) {
    c.RestartCoordinator();
    EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_SUPERSEDED);
    EXPECT_EQ(c.Version("1").update_id(), first);
    EXPECT_EQ(c.Version("1").failure().reason(), "SUPERSEDED");
    EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ACTIVE);
    EXPECT_EQ(c.Version().version(), 2);
  }
  ExpectNextPublishWorks(&c);
}

// Before the decision is on the disk, after it, and before and after the newer
// one's commit: each settles as the journal says.
class SupersedeCrashTest : public ::testing::TestWithParam<const char*> {};

TEST_P(SupersedeCrashTest, SettlesAsTheJournalSays) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions latest;
  latest.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  std::string held_back;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_move_update()) return false;
    if (held_back.empty()) held_back = command.move_update().update_id();
    return command.move_update().update_id() == held_back;
  };
  PublishBoth(&c, latest);
  const std::string first = c.Version("1").update_id();
  c.crash_before = GetParam();
  PublishBoth(&c, latest);
  ASSERT_TRUE(c.crashed);
  const bool decided = First(c, "journal:update_ended") >= 0;
  const bool committed = First(c, "journal:update_committed") >= 0;
  c.intercept = nullptr;
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  EXPECT_EQ(c.Version("1").update_id(), first);
  EXPECT_EQ(c.Version("1").state(), decided ? v1::Version::STATE_SUPERSEDED
                                            : v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version("1").failure().reason(),
            decided ? "SUPERSEDED" : "COORDINATOR_RESTARTED");
  if (committed) {
    EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ACTIVE);
    ExpectAllServe(c, c.Version("2").update_id());
  } else {
    EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ABORTED);
    EXPECT_EQ(c.Version("2").failure().reason(), "COORDINATOR_RESTARTED");
    ExpectAllServe(c, "");
  }
  ExpectNextPublishWorks(&c);
}

INSTANTIATE_TEST_SUITE_P(EveryStep, SupersedeCrashTest,
                         ::testing::Values("journal:update_ended", "end_update",
                                           "pause_replica",
                                           "journal:update_committed",
                                           "apply_worker"));

TEST(LatestTest, ACommittedOneIsNeverSuperseded) {
  CoordinatorOptions timeouts;
  timeouts.apply_timeout = absl::Seconds(20);
  FakeCluster c(timeouts);
  c.AddStandard();
  v1::UpdateOptions latest;
  latest.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_apply_worker();
  };
  PublishBoth(&c, latest);
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_APPLYING);
  PublishBoth(&c, latest);
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_APPLYING);
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_MOVING);
  c.intercept = nullptr;
  c.Pass(absl::Seconds(21));  // the apply is sent again
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ACTIVE)
      << c.Version("2").ShortDebugString();
  ExpectAllServe(c, c.Version("2").update_id());
}

TEST(LatestTest, BothAreAbortedWhenTheCoordinatorEnds) {
  FakeCluster c;
  c.AddStandard();
  v1::UpdateOptions latest;
  latest.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  PublishBoth(&c, latest);
  PublishBoth(&c, latest);
  c.RestartCoordinator();
  EXPECT_EQ(c.Version("1").failure().reason(), "COORDINATOR_RESTARTED");
  EXPECT_EQ(c.Version("2").failure().reason(), "COORDINATOR_RESTARTED");
  ExpectNextPublishWorks(&c);
}

// ---- Readiness ----

TEST(ReadinessTest, NobodyIsPausedForAWorkerWhoseRoomIsStillBeingMade) {
  FakeCluster c;
  c.AddStandard();
  c.AddNode("n3");
  c.engines["r3"].node = "n3";
  c.engines["r3"].incarnation = "x";
  c.engines["r3"].worker_nodes = {"n3"};
  c.engines["r3"].workers.resize(1);
  c.Register("r3", /*ready=*/false);
  c.Run();
  // It was told how much room it needs, and counts for nothing yet.
  EXPECT_EQ(c.Replica("r3").state(), v1::Replica::STATE_INCOMPLETE);
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r3"].pauses, 0);
  c.RegisterWorker("r3", 0);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
