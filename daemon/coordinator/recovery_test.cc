// A coordinator that ends and comes back, replicas that come late or hold a
// mix, nodes that do not belong here.

#include <algorithm>
#include <deque>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "daemon/node/layouts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::HasSubstr;
using Command = v1::NodeCommand;

// Ends the coordinator at each point of the life of an update: before the first
// command or record of each kind. Afterwards the update is on all replicas or
// on none, as the journal says, and the next one works.
class CrashTest : public ::testing::TestWithParam<const char*> {};

TEST_P(CrashTest, AllOfTheOldOrAllOfTheNew) {
  FakeCluster c;
  c.AddStandard();
  c.crash_before = GetParam();
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(2));
  ASSERT_TRUE(c.crashed);
  const bool committed =
      !c.journal.models[kModel].committed.update_id().empty();
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  EXPECT_EQ(c.coordinator->term(), 2);
  const v1::Version version = c.Version();
  if (committed) {
    EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE);
    ExpectAllServe(c, version.update_id());
  } else {
    ExpectAllServe(c, "");
    if (!version.update_id().empty()) {
      EXPECT_EQ(version.state(), v1::Version::STATE_ABORTED);
      EXPECT_EQ(version.failure().reason(), "COORDINATOR_RESTARTED");
    }
  }
  // Ranks whose calls were lost call again; those that were told go on. Both
  // reach the same publish.
  for (int i = 0; i < 4 && c.Version().state() != v1::Version::STATE_GATHERING;
       ++i) {
    c.Publish(0);
    c.Run();
  }
  for (int i = 0; i < 4 && c.Version().state() != v1::Version::STATE_ACTIVE;
       ++i) {
    c.Publish(1);
    c.Run();
  }
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_NE(c.Version().update_id(), version.update_id());
  ExpectAllServe(c, c.Version().update_id());
}

INSTANTIATE_TEST_SUITE_P(
    EveryStep, CrashTest,
    ::testing::Values("journal:update_opened", "send:n0:define_layout",
                      "send:n0:reply", "prepare_update", "move_update",
                      "update_manifest", "pause_replica", "send:n2:pause",
                      "journal:layout_defined", "journal:update_committed",
                      "apply_worker", "send:n2:apply", "resume_replica",
                      "send:n2:resume", "journal:update_ended", "end_update"));

// Found by tests/model: an Apply sent in that moment crosses with the old word
// of its worker, which then counts as the answer.
TEST(RecoveryTest, ANodeIsToldNothingBeforeItHasNamedItsClients) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.Disconnect("n2");
  const int pauses = c.CountCommands(v1::NodeCommand::kPauseReplica);
  int early = -1;
  c.after_hello = [&](const std::string&) {
    v1::PauseReplicaRequest pause;
    pause.set_name(std::string(kModel) + "/replicas/r2");
    c.Ask(pause);
    early = c.CountCommands(v1::NodeCommand::kPauseReplica);
  };
  c.Reconnect("n2");
  EXPECT_EQ(early, pauses);
  EXPECT_EQ(c.CountCommands(v1::NodeCommand::kPauseReplica), pauses + 1);
  c.after_hello = nullptr;
  c.Run();
  EXPECT_TRUE(c.engines["r2"].paused);
}

// One that is silent about them is not waited for.
TEST(RecoveryTest, ANodeThatNeverNamesItsClientsIsSentAway) {
  FakeCluster c;
  c.AddStandard();
  v1::NodeReport report;
  v1::Hello* hello = report.mutable_hello();
  hello->set_node("n7");
  hello->set_incarnation("n7-1");
  hello->set_protocol_version(1);
  hello->set_cluster_id(c.coordinator->cluster_id());
  hello->set_data_address("n7:1");
  v1::NodeReport heartbeat;
  heartbeat.mutable_heartbeat();
  c.Do(c.coordinator->OnReport(c.now, "silent", report));
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(c.closed.empty()) << i;
    c.Do(c.coordinator->OnReport(c.now, "silent", heartbeat));
    c.Pass(absl::Seconds(1));
  }
  ASSERT_FALSE(c.closed.empty());
  EXPECT_EQ(c.closed.back().failure.reason(), "HELLO_TIMEOUT");
}

TEST(RecoveryTest, AParticipantThatDoesNotComeBackIsLeftOut) {
  FakeCluster c;
  c.AddStandard();
  c.crash_before = "apply_worker";
  c.PublishAll(2);
  c.Run();
  ASSERT_TRUE(c.crashed);
  FakeEngine gone = c.engines["r2"];
  c.engines.erase("r2");
  c.RestartCoordinator();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_APPLYING);
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
  // It comes much later, still paused: its node has the update.
  c.engines["r2"] = gone;
  c.Register("r2");
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RecoveryTest, ALateReplicaInstallsTheNewestUpdateFromItsNode) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddReplica("r3", {"n1"});
  c.Run();
  EXPECT_EQ(c.Replica("r3").version(), 1);
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_EQ(First(c, "send:n1:prepare_update"),
            Last(c, "send:n1:prepare_update"));  // nothing was fetched
  ExpectNextPublishWorks(&c);
}

TEST(RecoveryTest, AReplicaThatWasAwayForLongIsResumedWithItsOwnNumber) {
  CoordinatorOptions options;
  options.kept_versions = 2;
  FakeCluster c(options);
  c.AddStandard();
  c.AddNode("n3");
  c.AddReplica("r4", {"n3"});
  c.Run();
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Replica("r4").version(), 1);
  c.LoseWorker("r4", 0);
  for (int i = 0; i < 4; ++i) {
    c.PublishAll(2);
    c.Run();
  }
  // Its record is gone, and its node cannot be given anything newer now.
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_prepare_update() && command.prepare_update().fetch();
  };
  c.engines["r4"].paused = true;
  c.engines["r4"].workers[0].set_version(1);
  c.engines["r4"].last_resume.Clear();
  c.Register("r4");
  c.Run();
  EXPECT_TRUE(c.Replica("r4").behind());
  EXPECT_EQ(c.Replica("r4").version(), 1);
  EXPECT_EQ(c.engines["r4"].last_resume.version(), 1);
}

TEST(RecoveryTest, AWorkerThatHoldsAMixIsAppliedAgainFromTheStore) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.LoseWorker("r2", 0);
  c.engines["r2"].workers[0].set_state(v1::InstalledState::STATE_WRITING);
  c.engines["r2"].workers[0].set_update_id("x");
  c.Register("r2");
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RecoveryTest, AMixThatNobodyCanMendIsFencedByName) {
  FakeCluster c;
  c.AddStandard();
  c.engines["r2"].workers[1].set_state(v1::InstalledState::STATE_WRITING);
  c.engines["r2"].workers[1].set_update_id("x");
  c.LoseWorker("r2", 1);
  c.Register("r2");
  c.Run();
  EXPECT_TRUE(c.engines["r2"].paused);
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_FENCED);
  EXPECT_EQ(c.Replica("r2").last_failure().reason(), "WORKER_TAINTED");
  EXPECT_THAT(c.Replica("r2").last_failure().message(),
              HasSubstr("worker 1 holds a mix"));
  c.PublishAll(2);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RecoveryTest, AnEngineThatADeadCoordinatorPausedIsResumed) {
  FakeCluster c;
  c.AddStandard();
  c.engines["r1"].paused = true;
  c.RestartCoordinator();
  ExpectAllServe(c, "");
}

TEST(RecoveryTest, ARefusalEndsTheOfferAndNotTheUpdate) {
  FakeCluster c;
  c.AddStandard();
  c.crash_before = "send:n1:apply";
  c.PublishAll(2);
  c.Run();
  ASSERT_TRUE(c.crashed);
  // All workers of r2 are on one node: it may give the pause up.
  EXPECT_TRUE(c.engines["r2"].last_pause.may_refuse());
  c.engines["r2"].refused_command_ids = {
      c.engines["r2"].last_pause.pause().command_id()};
  c.engines["r2"].paused = false;
  const int pauses = c.engines["r2"].pauses;
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  // The higher term finds it committed, and offers it with its own pause.
  EXPECT_EQ(c.engines["r2"].pauses, pauses + 1);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RecoveryTest, AReplicaOnTwoNodesMayNotRefuse) {
  FakeCluster c;
  c.AddStandard();
  c.AddReplica("r3", {"n1", "n2"});
  c.Run();
  c.PublishAll(2);
  c.Run();
  EXPECT_FALSE(c.engines["r3"].last_pause.may_refuse());
  EXPECT_TRUE(c.engines["r1"].last_pause.may_refuse());
  EXPECT_EQ(c.engines["r1"].last_pause.barrier_timeout().seconds(), 30);
}

TEST(RecoveryTest, AnIsolatedReplicaIsLetGoWhenItHasWhatThereIs) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.Disconnect("n2");
  c.Pass(absl::Seconds(6));
  c.PublishAll(2);
  c.Run();
  // on_isolation=PAUSE: its node held it.
  c.engines["r2"].paused = true;
  c.engines["r2"].isolation_hold = true;
  c.Reconnect("n2");
  EXPECT_THAT(c.Replica("r2").pause_holders(),
              ::testing::Contains("isolation"));
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

// Found by tests/chaos: the answer to its resume was lost, its node held it
// (on_isolation=PAUSE), and its update, which "takes care of it", waited for
// ever; so did everything published after it.
TEST(RecoveryTest, AnUpdateDoesNotWaitForAReplicaThatItsNodeHolds) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_resume_replica();
  };
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_RESUMING);
  c.Disconnect("n2");
  c.engines["r2"].paused = true;
  c.engines["r2"].isolation_hold = true;
  c.intercept = nullptr;
  c.Reconnect("n2");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
  ExpectNextPublishWorks(&c);
}

TEST(RecoveryTest, AnAnswerAboutAnAbortedUpdateIsNotTakenForItsNumber) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  c.PublishAll(2, 5);
  c.Run();
  const std::string first = c.Version().update_id();
  c.RestartNode("n0");  // aborted
  c.Run();
  c.PublishAll(2, 5);
  c.Run();
  EXPECT_EQ(c.Version().version(), 5);
  EXPECT_NE(c.Version().update_id(), first);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_MOVING);
  // From the node that is awaited, in the epoch that runs: the update_id alone
  // tells the two apart.
  v1::NodeReport late;
  auto* verified = late.mutable_update_verified();
  verified->set_model(kModel);
  for (const auto& command : c.commands) {
    if (command.first == "n2" && command.second.has_prepare_update()) {
      *verified->mutable_epoch() = command.second.prepare_update().epoch();
    }
  }
  ASSERT_GT(verified->epoch().counter(), 1);
  verified->set_update_id(first);
  c.Report("n2", late);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_MOVING);
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 0);
  // Said of the one that runs it is what was awaited.
  verified->set_update_id(c.Version().update_id());
  c.Report("n2", late);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_PAUSING);
}

TEST(RecoveryTest, ATrainerThatComesBackWithAnotherWorldReplacesTheOldOne) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.LoseRank(0);
  c.LoseRank(1);
  // Another world: the catalog is twice as large, and the old engines do not
  // fit it once it is whole.
  c.AddRank(0, 4, "n0");
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_SERVING);
  for (int rank = 1; rank < 4; ++rank) c.AddRank(rank, 4, "n0");
  EXPECT_EQ(c.CountCommands(Command::kRefuseWorker), 3);
  c.Run();
  for (const char* name : {"r1", "r2"}) c.Register(name);
  c.Run();
  ExpectNextPublishWorks(&c, 4);
}

// Found by tests/chaos: replicas came and went, and when those of long ago were
// back every update was aborted with LAYOUT_UNKNOWN, for ever.
TEST(RecoveryTest, ALayoutThatNodesHaveForgottenIsDefinedAgain) {
  FakeCluster c;
  c.AddStandard();
  // What a node's LayoutBook keeps.
  std::map<std::string, std::deque<std::string>> kept;
  int unknown = 0;
  c.intercept = [&](const std::string& node, const Command& command) {
    std::deque<std::string>& ids = kept[node];
    if (command.has_define_layout()) {
      ids.push_back(command.define_layout().layout_id());
      if (ids.size() > LayoutBook::kKeptPerModel) ids.pop_front();
    }
    if (command.has_prepare_update() &&
        std::find(ids.begin(), ids.end(),
                  command.prepare_update().layout_id()) == ids.end()) {
      ++unknown;
    }
    return false;
  };
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().layout_id();
  for (size_t i = 0; i <= LayoutBook::kKeptPerModel; ++i) {
    const std::string name = absl::StrCat("x", i);
    c.AddNode(absl::StrCat("n", name));
    c.AddReplica(name, {absl::StrCat("n", name)});
    c.Run();
    c.PublishAll(2);
    c.Run();
    ASSERT_NE(c.Version().layout_id(), first);
    c.LoseWorker(name, 0);
    c.Run();
  }
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().layout_id(), first);
  EXPECT_EQ(unknown, 0);
  for (const char* name : {"r1", "r2"}) {
    EXPECT_EQ(c.engines[name].workers[0].update_id(), c.Version().update_id());
  }
}

TEST(RecoveryTest, ASnapshotThatIsSaidAgainAfterAnOutageCountsOnce) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  c.PublishAll(2);
  c.Run();
  v1::NodeReport again;
  auto* snapshotted = again.mutable_rank_snapshotted();
  snapshotted->set_model(kModel);
  snapshotted->set_update_id(c.Version().update_id());
  snapshotted->set_rank(0);
  v1::TensorDigest* tensor = snapshotted->add_tensors();
  tensor->mutable_digest()->set_lane0(99);
  c.Disconnect("n0");
  c.Reconnect("n0");
  c.Report("n0", again);
  c.intercept = nullptr;
  c.Disconnect("n2");
  c.Reconnect("n2");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  v1::VerifyReplicaRequest verify;
  verify.set_name(std::string(kModel) + "/replicas/r1");
  const int64_t call = c.Ask(verify);
  c.Run();
  EXPECT_TRUE(
      absl::get<v1::VerifyReplicaResponse>(c.Answered(call)->response).equal());
}

v1::NodeReport HelloFrom(const std::string& node, const std::string& cluster,
                         int64_t term) {
  v1::NodeReport report;
  report.mutable_hello()->set_node(node);
  report.mutable_hello()->set_incarnation("x");
  report.mutable_hello()->set_protocol_version(1);
  report.mutable_hello()->set_cluster_id(cluster);
  report.mutable_hello()->set_newest_term(term);
  return report;
}

TEST(RecoveryTest, AnEmptyJournalThatMeetsAKnownClusterAcceptsNothing) {
  FakeCluster c;
  c.AddStandard();
  c.Do(c.coordinator->OnReport(c.now, "s", HelloFrom("n9", "other", 4)));
  ASSERT_EQ(c.closed.size(), 1u);
  EXPECT_EQ(c.closed[0].failure.reason(), "JOURNAL_LOST");
  const int64_t call = c.Publish(0);
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "JOURNAL_LOST");
  // It is remembered.
  c.RestartCoordinator();
  const int64_t again = c.Publish(0);
  c.Run();
  EXPECT_EQ(c.FindReply(again)->failure().reason(), "JOURNAL_LOST");
}

TEST(RecoveryTest, StrangersAndTwinsAreRefused) {
  FakeCluster c;
  c.AddStandard();
  c.RestartCoordinator();  // the journal is not empty any more
  c.Do(c.coordinator->OnReport(c.now, "s1", HelloFrom("n9", "other", 1)));
  c.Do(c.coordinator->OnReport(c.now, "s2", HelloFrom("n1", "", 0)));
  v1::NodeReport future = HelloFrom("n8", "", 0);
  future.mutable_hello()->set_protocol_version(2);
  c.Do(c.coordinator->OnReport(c.now, "s3", future));
  c.Do(c.coordinator->OnReport(c.now, "s4", v1::NodeReport()));
  ASSERT_EQ(c.closed.size(), 4u);
  EXPECT_EQ(c.closed[0].failure.reason(), "CLUSTER_MISMATCH");
  EXPECT_EQ(c.closed[1].failure.reason(), "NODE_TAKEN");
  EXPECT_EQ(c.closed[2].failure.reason(), "PROTOCOL_UNSUPPORTED");
  EXPECT_EQ(c.closed[3].failure.reason(), "HELLO_EXPECTED");
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  c.Do(c.coordinator->OnReport(
      c.now, "s5", HelloFrom("n7", c.coordinator->cluster_id(), 9)));
  EXPECT_EQ(c.closed.back().failure.reason(), "JOURNAL_LOST");
}

TEST(RecoveryTest, ASilentNodeIsLost) {
  FakeCluster c;
  c.AddStandard();
  c.now += absl::Seconds(6);
  c.Do(c.coordinator->OnTick(c.now));
  ASSERT_EQ(c.closed.size(), 3u);
  EXPECT_EQ(c.closed[0].failure.reason(), "HEARTBEAT_LOST");
  auto node = c.coordinator->GetNode("nodes/n1");
  ASSERT_TRUE(node.ok());
  EXPECT_EQ(node->state(), v1::Node::STATE_LOST);
}

TEST(RecoveryTest, ListsArePaged) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.PublishAll(2);
  c.Run();
  v1::ListVersionsRequest request;
  request.set_parent("models/-");
  request.set_page_size(1);
  auto first = c.coordinator->ListVersions(request, c.now);
  ASSERT_TRUE(first.ok());
  ASSERT_EQ(first->versions_size(), 1);
  EXPECT_EQ(first->versions(0).version(), 2);
  request.set_page_token(first->next_page_token());
  auto second = c.coordinator->ListVersions(request, c.now);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->versions(0).version(), 1);
  EXPECT_EQ(second->next_page_token(), "");
  request.set_page_token("nonsense");
  EXPECT_FALSE(c.coordinator->ListVersions(request, c.now).ok());
  auto models = c.coordinator->ListModels(v1::ListModelsRequest());
  ASSERT_TRUE(models.ok());
  EXPECT_EQ(models->models(0).replica_count(), 2);
  EXPECT_EQ(models->models(0).worker_count(), 3);
  EXPECT_EQ(models->models(0).active_version(), "models/m/versions/2");
  EXPECT_EQ(models->models(0).total_bytes(), 128);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
