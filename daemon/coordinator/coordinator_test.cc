// Updates through the Coordinator, from the first call to the end, and each way
// in which one can fail. Every test ends with engines that serve one update.

#include "daemon/coordinator/coordinator.h"

#include <algorithm>
#include <string>
#include <vector>

#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::HasSubstr;
using Command = v1::NodeCommand;

TEST(CoordinatorTest, LockstepPausesAllThenCommitsThenAppliesThenResumes) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();

  const v1::Version version = c.Version();
  EXPECT_EQ(version.name(), "models/m/versions/1");
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, version.update_id());

  EXPECT_LT(Last(c, "pause_replica"), First(c, "journal:update_committed"));
  EXPECT_LT(First(c, "journal:update_committed"), First(c, "apply_worker"));
  EXPECT_LT(Last(c, "apply_worker"), First(c, "resume_replica"));
  EXPECT_LT(Last(c, "resume_replica"), First(c, "end_update"));
  EXPECT_EQ(c.CountCommands(Command::kApplyWorker), 3);

  EXPECT_TRUE(version.has_commit_time());
  ASSERT_EQ(version.replicas_size(), 2);
  for (const v1::ReplicaTimes& times : version.replicas()) {
    EXPECT_TRUE(times.has_pause_request_time());
    EXPECT_TRUE(times.has_paused_time());
    EXPECT_TRUE(times.has_applied_time());
    EXPECT_TRUE(times.has_resumed_time());
  }
  std::vector<std::string> phases;
  for (const auto& phase : version.phases()) phases.push_back(phase.phase());
  EXPECT_THAT(phases, ::testing::ElementsAre("gather", "snapshot", "prepare",
                                             "transfer", "pause", "commit",
                                             "apply", "resume", "total"));
  EXPECT_EQ(c.Replica("r2").version(), 1);
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_SERVING);
  EXPECT_TRUE(c.engines["r1"].last_resume.weights_changed());
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 2);
}

TEST(CoordinatorTest, EveryReportTwiceChangesNothing) {
  FakeCluster c;
  c.twice = true;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_EQ(c.CountCommands(Command::kApplyWorker), 3);
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 2);
  EXPECT_EQ(c.CountCommands(Command::kResumeReplica), 2);
}

TEST(CoordinatorTest, WithoutReplicasAnUpdateIsActiveWithNobody) {
  FakeCluster c;
  c.AddNode("n0");
  c.AddRank(0, 1, "n0");
  c.Publish(0, 7);
  c.Run();
  EXPECT_EQ(c.Version().version(), 7);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
}

TEST(CoordinatorTest, OptionsThatCannotBeHadAreRefusedByName) {
  FakeCluster c;
  c.AddStandard();
  const auto reason = [&](void (*set)(v1::UpdateOptions*)) {
    v1::UpdateOptions options;
    set(&options);
    const int64_t call = c.Publish(0, 0, "", options);
    c.Run();
    return c.FindReply(call)->failure().reason();
  };
  EXPECT_EQ(reason([](v1::UpdateOptions* o) {
              o->mutable_commit_policy()->mutable_rolling();
            }),
            "MAX_UNAVAILABLE_INVALID");
  // Values of no enum are not taken for defaults.
  for (void (*set)(v1::UpdateOptions*) :
       std::vector<void (*)(v1::UpdateOptions*)>{
           [](v1::UpdateOptions* o) {
             o->set_publish_mode(static_cast<v1::PublishMode>(9));
           },
           [](v1::UpdateOptions* o) {
             o->set_update_mode(static_cast<v1::UpdateMode>(9));
           },
           [](v1::UpdateOptions* o) {
             o->set_pause_mode(static_cast<v1::PauseMode>(9));
           },
           [](v1::UpdateOptions* o) {
             o->set_transfer_policy(static_cast<v1::TransferPolicy>(9));
           },
           [](v1::UpdateOptions* o) {
             o->set_delivery_policy(static_cast<v1::DeliveryPolicy>(9));
           },
           [](v1::UpdateOptions* o) {
             o->mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
                 static_cast<v1::LockstepPolicy::OnStraggler>(9));
           }}) {
    EXPECT_EQ(reason(set), "OPTION_UNKNOWN");
  }
  EXPECT_EQ(
      reason([](v1::UpdateOptions* o) {
        o->mutable_commit_policy()->mutable_rolling()->set_max_unavailable(1);
        o->set_update_mode(v1::UPDATE_MODE_STREAM);
      }),
      "COMMIT_POLICY_UNIMPLEMENTED");
  EXPECT_EQ(reason([](v1::UpdateOptions* o) {
              o->set_pause_mode(v1::PAUSE_MODE_NONE);
              o->set_update_mode(v1::UPDATE_MODE_STREAM);
            }),
            "PAUSE_MODE_UNIMPLEMENTED");
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, VersionMustBeNewer) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2, 5);
  c.Run();
  const int64_t call = c.Publish(0, 5);
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "VERSION_NOT_NEWER");
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 6);
}

TEST(CoordinatorTest, ARepeatedRequestGetsTheSameAnswerAndNoSecondUpdate) {
  FakeCluster c;
  c.AddStandard();
  const int64_t first = c.Publish(0, 0, "a");
  c.Publish(1, 0, "b");
  c.Run();
  const int64_t again = c.Publish(0, 0, "a");
  c.Run();
  EXPECT_EQ(c.FindReply(again)->publish_opened().update_id(),
            c.FindReply(first)->publish_opened().update_id());
  EXPECT_TRUE(c.FindReply(again)->publish_opened().repeated_request());
  EXPECT_EQ(c.FindReply(again)->publish_opened().copied_bytes(), 64);
  EXPECT_EQ(c.Version().version(), 1);
  // And after a restart.
  c.RestartCoordinator();
  const int64_t later = c.Publish(0, 0, "a");
  c.Run();
  EXPECT_TRUE(c.FindReply(later)->publish_opened().repeated_request());
  const int64_t other = c.Publish(0, 9, "a");
  c.Run();
  EXPECT_EQ(c.FindReply(other)->failure().reason(), "REQUEST_ID_INVALID");
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, MissingRanksAreNamedWhenThePatienceEnds) {
  FakeCluster c;
  c.AddNode("n0");
  c.AddRank(0, 2, "n0");
  const int64_t call = c.Publish(0);
  c.Run();
  EXPECT_EQ(c.FindReply(call), nullptr);
  c.Pass(absl::Seconds(121));
  ASSERT_NE(c.FindReply(call), nullptr);
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "WORLD_INCOMPLETE");
  EXPECT_THAT(c.FindReply(call)->failure().message(), HasSubstr(": 1"));
  c.AddRank(1, 2, "n0");
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, ALateRankIsToldOfTheAbortAndOpensNothingAlone) {
  FakeCluster c;
  c.AddStandard();
  c.Publish(0);
  c.Run();
  c.Pass(absl::Seconds(61));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "GATHER_TIMEOUT");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("rank 1"));
  const int64_t late = c.Publish(1);
  c.Run();
  EXPECT_EQ(c.FindReply(late)->failure().reason(), "GATHER_TIMEOUT");
  EXPECT_EQ(c.FindReply(late)->failure().code(), 10);
  EXPECT_EQ(c.Version().version(), 1);
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AnAbortedNumberMayBeTriedAgainWhileItIsTheFloor) {
  FakeCluster c;
  c.AddStandard();
  c.Publish(0, 3);
  c.Run();
  c.Pass(absl::Seconds(61));
  const std::string first = c.Version().update_id();
  c.Publish(0, 3);
  const int64_t told = c.Publish(1, 3);
  c.Run();
  EXPECT_EQ(c.FindReply(told)->failure().reason(), "GATHER_TIMEOUT");
  c.Publish(1, 3);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Version().version(), 3);
  EXPECT_NE(c.Version().update_id(), first);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(CoordinatorTest, RanksThatDisagreeAreAllToldAtOnce) {
  FakeCluster c;
  c.AddStandard();
  c.Publish(0, 0, "", {}, 10);
  const int64_t call = c.Publish(1, 0, "", {}, 11);
  c.Run();
  EXPECT_EQ(c.FindReply(call)->failure().reason(), "OPTIONS_DISAGREE");
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "OPTIONS_DISAGREE");
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, RanksThatNameDifferentVersionsAreAllToldAtOnce) {
  FakeCluster c;
  c.AddNode("n0");
  for (int rank = 0; rank < 3; ++rank) c.AddRank(rank, 3, "n0");
  // The update is open when they disagree; the third rank comes later.
  c.Publish(0, 20);
  const int64_t other = c.Publish(1, 21);
  c.Run();
  EXPECT_EQ(c.FindReply(other)->failure().reason(), "OPTIONS_DISAGREE");
  EXPECT_EQ(c.FindReply(other)->failure().code(), 3);
  EXPECT_EQ(c.Version().failure().reason(), "OPTIONS_DISAGREE");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("rank 1"));
  const int64_t third = c.Publish(2, 21);
  c.Run();
  EXPECT_EQ(c.FindReply(third)->failure().reason(), "OPTIONS_DISAGREE");
  ExpectNextPublishWorks(&c, 3);
  EXPECT_EQ(c.Version().version(), 21);
}

TEST(CoordinatorTest, TheNextPublishIsCopiedWhileOneRunsAndTheOneAfterWaits) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  const int64_t next = c.Publish(0);
  c.Run();
  // QUEUE: it is copied out, and waits.
  ASSERT_NE(c.FindReply(next), nullptr);
  EXPECT_EQ(c.FindReply(next)->publish_opened().version(), 2);
  c.Publish(1);
  c.Run();
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_GATHERING);
  const int64_t third = c.Publish(0);
  c.Run();
  EXPECT_EQ(c.FindReply(third), nullptr);
  c.intercept = nullptr;
  c.Pass(absl::Seconds(61));  // the pause fails, the first is aborted
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version("2").update_id());
  ASSERT_NE(c.FindReply(third), nullptr);
  EXPECT_EQ(c.FindReply(third)->publish_opened().version(), 3);
  c.Publish(1);
  c.Run();
  EXPECT_EQ(c.Version().version(), 3);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
}

// ---- Failures before the commit ----

TEST(CoordinatorTest, ANodeThatCannotReserveAbortsByName) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_prepare_update()) return false;
    v1::NodeReport report;
    auto* prepared = report.mutable_update_prepared();
    prepared->set_model(kModel);
    prepared->set_update_id(command.prepare_update().update_id());
    *prepared->mutable_epoch() = command.prepare_update().epoch();
    *prepared->mutable_failure() =
        MakeFailure(8, "NO_STORE_ROOM", "3 of 2 bytes");
    c.Report(node, report);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "NO_STORE_ROOM");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("n1"));
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 0);
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, ANodeThatDoesNotPrepareIsNamed) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_prepare_update();
  };
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.Version().failure().reason(), "PREPARE_TIMEOUT");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("n2"));
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AFailedCopyAbortsAndNamesTheRank) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (!command.has_reply() || !command.reply().has_publish_opened()) {
      return false;
    }
    v1::NodeReport report;
    auto* snapshotted = report.mutable_rank_snapshotted();
    snapshotted->set_model(kModel);
    snapshotted->set_update_id(command.reply().publish_opened().update_id());
    snapshotted->set_rank(1);
    *snapshotted->mutable_failure() = MakeFailure(10, "SOURCE_LOST", "gone");
    c.Report(node, report);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().failure().reason(), "SOURCE_LOST");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("rank 1"));
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AFailedEdgeIsRoutedRoundInANewEpoch) {
  FakeCluster c;
  c.AddStandard();
  int failures = 1;
  std::string from, to;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (!command.has_move_update() || failures == 0) return false;
    // The second node of the first chain does not hear the first.
    for (const auto& sent : c.commands) {
      if (sent.second.has_prepare_update() && sent.first == node &&
          sent.second.prepare_update().flows_size() > 0) {
        const auto& members = sent.second.prepare_update().flows(0).members();
        if (members.size() < 3 || members[2].node() != node) return false;
        from = members[1].node();
        to = members[2].node();
      }
    }
    if (to != node) return false;
    --failures;
    v1::NodeReport report;
    auto* verified = report.mutable_update_verified();
    verified->set_model(kModel);
    verified->set_update_id(command.move_update().update_id());
    *verified->mutable_epoch() = command.move_update().epoch();
    *verified->mutable_failure() = MakeFailure(14, "EDGE_FAILED", "no bytes");
    verified->set_edge_from(from);
    verified->set_edge_to(to);
    c.Report(node, report);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(failures, 0);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  const auto& last = std::find_if(c.commands.rbegin(), c.commands.rend(),
                                  [](const auto& command) {
                                    return command.second.has_prepare_update();
                                  })
                         ->second.prepare_update();
  EXPECT_EQ(last.epoch().counter(), 2);
  const auto& members = last.flows(0).members();
  for (int i = 1; i < members.size(); ++i) {
    EXPECT_FALSE(members[i - 1].node() == from && members[i].node() == to);
  }
  ExpectAllServe(c, c.Version().update_id());
}

TEST(CoordinatorTest, AnEdgeThatFailsAlwaysIsGivenUpByName) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_move_update()) return false;
    v1::NodeReport report;
    auto* verified = report.mutable_update_verified();
    verified->set_model(kModel);
    verified->set_update_id(command.move_update().update_id());
    *verified->mutable_epoch() = command.move_update().epoch();
    *verified->mutable_failure() = MakeFailure(14, "EDGE_FAILED", "no bytes");
    verified->set_edge_from("n0");
    verified->set_edge_to("n1");
    c.Report(node, report);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "EDGE_FAILED");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("n0 -> n1"));
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, ALostReceivingNodeIsLeftOut) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_MOVING);
  c.Disconnect("n2");
  c.Pass(absl::Seconds(6));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_LOST);
  // It comes back with an empty store: what it lacks is fetched.
  c.intercept = nullptr;
  c.RestartNode("n2");
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, ANodeThatComesBackInTimeGoesOn) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  c.PublishAll(2);
  c.Run();
  c.Disconnect("n2");
  c.intercept = nullptr;
  c.Pass(absl::Seconds(2));
  c.Reconnect("n2");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(CoordinatorTest, ALostSourceNodeAborts) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_move_update();
  };
  c.PublishAll(2);
  c.Run();
  c.RestartNode("n0");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "NODE_LOST");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("n0"));
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, ARankLostBeforeItArrivedAborts) {
  FakeCluster c;
  c.AddStandard();
  c.Publish(0);
  c.Run();
  c.LoseRank(1);
  EXPECT_EQ(c.Version().failure().reason(), "RANK_LOST");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("rank 1"));
  c.AddRank(1, 2, "n0");
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AReplicaThatDoesNotPauseAbortsAndAllResume) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_TRUE(c.engines["r1"].paused);
  c.Pass(absl::Seconds(61));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "PAUSE_TIMEOUT");
  EXPECT_THAT(c.Version().failure().message(), HasSubstr("r2"));
  ExpectAllServe(c, "");
  EXPECT_EQ(c.engines["r2"].resumes, 1);  // it may have paused unseen
  EXPECT_EQ(First(c, "journal:update_committed"), -1);
  EXPECT_FALSE(c.engines["r1"].last_resume.weights_changed());
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AStragglerIsEvictedWhereThatIsAsked) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  v1::UpdateOptions options;
  options.mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
      v1::LockstepPolicy::ON_STRAGGLER_EVICT);
  c.Publish(0, 0, "", options);
  c.Publish(1, 0, "", options);
  c.Run();
  c.Pass(absl::Seconds(61));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  // Its node holds the update: it is asked again, on its own.
  c.intercept = nullptr;
  c.Pass(absl::Seconds(70));
  ExpectAllServe(c, c.Version().update_id());
}

TEST(CoordinatorTest, AReplicaThatLosesAWorkerLeavesWholeAndTheUpdateGoesOn) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  c.LoseWorker("r2", 1);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_LOST);
  // Its worker comes back: a late join from the store of its node.
  c.intercept = nullptr;
  c.Register("r2");
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

// ---- Failures after the commit ----

Command::CommandCase Case(const Command& command) {
  return command.command_case();
}

void FailApply(FakeCluster* c, const Command& command, int worker_state) {
  const v1::ApplyWorker& apply = command.apply_worker();
  v1::NodeReport report;
  auto* applied = report.mutable_worker_applied();
  applied->set_model(kModel);
  applied->set_replica(apply.replica());
  applied->set_worker_index(apply.worker_index());
  applied->set_incarnation(apply.incarnation());
  applied->set_update_id(apply.update_id());
  applied->set_command_id(apply.command_id());
  *applied->mutable_failure() = MakeFailure(13, "COPY_FAILED", "no luck");
  v1::InstalledState& installed =
      c->engines[apply.replica()].workers[apply.worker_index()];
  installed.set_state(static_cast<v1::InstalledState::State>(worker_state));
  installed.set_update_id(apply.update_id());
  *applied->mutable_installed() = installed;
  c->Report("n2", report);
}

TEST(CoordinatorTest, AFailedApplyIsTriedAgain) {
  FakeCluster c;
  c.AddStandard();
  int failures = 2;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n2" || Case(command) != Command::kApplyWorker ||
        failures == 0) {
      return false;
    }
    --failures;
    FailApply(&c, command, v1::InstalledState::STATE_WRITING);
    c.engines["r2"]
        .workers[command.apply_worker().worker_index()]
        .clear_update_id();
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(CoordinatorTest, AReplicaThatCannotInstallIsFencedAndTheOthersServe) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&](const std::string&, const Command& command) {
    if (!command.has_apply_worker() ||
        command.apply_worker().replica() != "r2" ||
        command.apply_worker().worker_index() != 1) {
      return false;
    }
    FailApply(&c, command, v1::InstalledState::STATE_WRITING);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_FALSE(c.engines["r1"].paused);
  EXPECT_TRUE(c.engines["r2"].paused);
  const v1::Replica fenced = c.Replica("r2");
  EXPECT_EQ(fenced.state(), v1::Replica::STATE_FENCED);
  EXPECT_EQ(fenced.last_failure().reason(), "COPY_FAILED");
  EXPECT_THAT(fenced.last_failure().message(), HasSubstr("worker 1 of"));
  EXPECT_NE(fenced.version(), 1);
  EXPECT_EQ(c.violations, 0);
  // The next publish is its way on.
  for (auto& worker : c.engines["r2"].workers) worker.clear_update_id();
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AWorkerThatNeverAcknowledgesIsGivenUp) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_apply_worker();
  };
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(365), absl::Seconds(2));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_FENCED);
  EXPECT_EQ(c.Replica("r1").last_failure().reason(), "APPLY_TIMEOUT");
  EXPECT_FALSE(c.engines["r2"].paused);
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, AResumeThatIsNotAnsweredIsAskedForAgain) {
  FakeCluster c;
  c.AddStandard();
  int swallowed = 0;
  c.intercept = [&](const std::string& node, const Command& command) {
    return node == "n1" && command.has_resume_replica() && swallowed++ == 0;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_RESUMING);
  c.Pass(absl::Seconds(33));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version().update_id());
}

// ---- Prepare ----

TEST(CoordinatorTest, PrepareAnswersWhenEveryNodeIsReady) {
  FakeCluster c;
  c.AddStandard();
  v1::PrepareRequest request;
  request.set_model(kModel);
  c.Do(c.coordinator->OnPrepareRequest(c.now, 1, request));
  c.Do(c.coordinator->OnPrepareRequest(c.now, 2, request));
  c.Run();
  ASSERT_EQ(c.prepared.size(), 2u);
  EXPECT_EQ(c.prepared[0].failure.code(), 0);
  EXPECT_GT(c.prepared[0].response.wire_bytes(), 0);
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_prepare_update();
  };
  c.Do(c.coordinator->OnPrepareRequest(c.now, 3, request));
  c.Run();
  c.Pass(absl::Seconds(31));
  ASSERT_EQ(c.prepared.size(), 3u);
  EXPECT_EQ(c.prepared[2].failure.reason(), "PREPARE_TIMEOUT");
  EXPECT_THAT(c.prepared[2].failure.message(), HasSubstr("n1"));
  ExpectNextPublishWorks(&c);
}

TEST(CoordinatorTest, PrepareWithoutRanksOrWorkers) {
  FakeCluster c;
  v1::PrepareRequest request;
  request.set_model(kModel);
  c.Do(c.coordinator->OnPrepareRequest(c.now, 1, request));
  c.AddNode("n0");
  c.AddRank(0, 2, "n0");
  c.Do(c.coordinator->OnPrepareRequest(c.now, 2, request));
  c.AddRank(1, 2, "n0");
  c.Do(c.coordinator->OnPrepareRequest(c.now, 3, request));
  ASSERT_EQ(c.prepared.size(), 3u);
  EXPECT_EQ(c.prepared[0].failure.reason(), "MODEL_UNKNOWN");
  EXPECT_EQ(c.prepared[1].failure.reason(), "WORLD_INCOMPLETE");
  EXPECT_EQ(c.prepared[1].failure.code(), 9);
  EXPECT_EQ(c.prepared[2].failure.reason(), "NO_WORKERS");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
