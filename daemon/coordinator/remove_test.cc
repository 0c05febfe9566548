// RemoveModel: an adapter is taken out of its engines, and published again.

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

v1::RemoveModelRequest Removal() {
  v1::RemoveModelRequest request;
  request.set_name(kModel);
  return request;
}

// Nobody has the model, and everybody runs and was told so.
void ExpectRemoved(const FakeCluster& c) {
  EXPECT_EQ(c.violations, 0);
  for (const auto& engine : c.engines) {
    EXPECT_FALSE(engine.second.paused) << engine.first;
    EXPECT_TRUE(engine.second.last_resume.removed()) << engine.first;
    for (const v1::InstalledState& worker : engine.second.workers) {
      EXPECT_EQ(worker.state(), v1::InstalledState::STATE_NOTHING)
          << engine.first;
    }
  }
  const auto model = c.coordinator->GetModel(kModel);
  ASSERT_TRUE(model.ok());
  EXPECT_TRUE(model->removed());
  EXPECT_EQ(model->active_version(), "");
  EXPECT_EQ(c.Version().name(), "") << "its versions are forgotten";
}

TEST(RemoveTest, EveryEngineDropsItAndTheNextPublishBringsItBack) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.PublishAll(2);
  c.Run();
  const int64_t removal = c.Ask(Removal());
  EXPECT_EQ(c.Answered(removal), nullptr) << "not before it is out of all";
  c.Run();
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "");
  EXPECT_TRUE(absl::get<v1::Model>(c.Answered(removal)->response).removed());
  ExpectRemoved(c);
  // Journalled before anybody was told; both versions on all three nodes freed.
  EXPECT_LT(First(c, "journal:model_removed"), First(c, "remove_worker"));
  EXPECT_EQ(c.CountCommands(Command::kDropUpdate), 6);
  EXPECT_EQ(c.engines["r2"].removes, 2);
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_SERVING);
  EXPECT_EQ(c.Replica("r1").version(), 0);
  EXPECT_FALSE(c.Replica("r1").behind());
  // Again: nothing is done twice.
  const int64_t again = c.Ask(Removal());
  ASSERT_NE(c.Answered(again), nullptr);
  EXPECT_EQ(c.Answered(again)->failure.reason(), "");
  EXPECT_EQ(c.engines["r1"].removes, 1);

  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 3) << "numbers go on";
  EXPECT_FALSE(c.engines["r1"].last_resume.removed());
  EXPECT_FALSE(c.coordinator->GetModel(kModel)->removed());
}

TEST(RemoveTest, WhoCannotGoOnWithoutItIsNamedAndNobodyIsTouched) {
  FakeCluster c;
  c.engines["r1"].removable = true;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const int64_t removal = c.Ask(Removal());
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "MODEL_REQUIRED");
  EXPECT_THAT(c.Answered(removal)->failure.message(),
              HasSubstr("models/m/replicas/r2 "));
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_EQ(First(c, "journal:model_removed"), -1);
  v1::RemoveModelRequest nowhere;
  nowhere.set_name("models/nowhere");
  EXPECT_EQ(c.Answered(c.Ask(nowhere))->failure.reason(), "MODEL_UNKNOWN");
}

TEST(RemoveTest, NotWhileAnUpdateIsUnderWay) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.Publish(0);
  c.Run();
  const int64_t removal = c.Ask(Removal());
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "MODEL_UPDATING");
  c.Publish(1);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(RemoveTest, AReplicaThatWasAwayIsToldWhenItComesBack) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  const v1::InstalledState held = c.engines["r2"].workers[0];
  c.Disconnect("n2");
  c.Pass(absl::Seconds(10));
  const int64_t removal = c.Ask(Removal());
  c.Run();
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.engines["r2"].workers[0].update_id(), held.update_id());
  // Also when neither side remembers more than is written down.
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  ExpectRemoved(c);
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_SERVING);
  ExpectNextPublishWorks(&c);
}

// A rank on it may wait to be told (IN_PLACE), although the update is
// forgotten.
TEST(RemoveTest, ANodeThatWasAwayLearnsHowTheLastUpdateEnded) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  const std::string update = c.Version().update_id();
  c.Disconnect("n0");
  c.Ask(Removal());
  c.Run();
  ASSERT_NE(First(c, "journal:model_removed"), -1);
  c.commands.clear();
  c.Reconnect("n0");
  c.Run();
  int ends = 0;
  for (const auto& sent : c.commands) {
    const v1::EndUpdate& end = sent.second.end_update();
    if (end.update_id() == update && end.committed()) ++ends;
  }
  EXPECT_EQ(ends, 1);
  ExpectNextPublishWorks(&c);
}

// Of a journal that was lost: nodes have an update of which nobody knows how it
// ended, and a rank may wait for that (IN_PLACE).
TEST(RemoveTest, WhatNobodyKnowsOfHasEndedToo) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.Ask(Removal());
  c.Run();
  v1::NodeReport report;
  v1::Hello* hello = report.mutable_hello();
  hello->set_node("n9");
  hello->set_incarnation("x");
  hello->set_protocol_version(1);
  hello->set_cluster_id(c.coordinator->cluster_id());
  hello->set_newest_term(c.coordinator->term());
  v1::HeldUpdate* held = hello->add_held_updates();
  held->set_model(kModel);
  held->set_update_id("stray");
  held->set_version(9);
  int ends = 0;
  int drops = 0;
  for (const Action& action : c.coordinator->OnReport(c.now, "s", report)) {
    const SendCommand* send = absl::get_if<SendCommand>(&action);
    if (send == nullptr) continue;
    const v1::EndUpdate& end = send->command.end_update();
    if (end.update_id() == "stray" && !end.committed()) ++ends;
    if (send->command.drop_update().update_id() == "stray") ++drops;
  }
  EXPECT_EQ(ends, 1);
  EXPECT_EQ(drops, 1);
  ExpectNextPublishWorks(&c);
}

// What it was installing when the model was removed is given up with it.
TEST(RemoveTest, AnInstallUnderWayIsGivenUp) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  std::vector<std::pair<std::string, Command>> kept;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (!command.has_apply_worker()) return false;
    kept.emplace_back(node, command);
    return true;
  };
  c.engines["r1"].workers[0].Clear();
  c.Register("r1");
  c.Run();
  ASSERT_EQ(kept.size(), 1u);
  ASSERT_TRUE(c.engines["r1"].paused);
  c.Ask(Removal());
  // The apply that was on its way, then the removal.
  c.intercept = nullptr;
  c.Deliver(kept[0].first, kept[0].second);
  c.Run();
  c.Pass(absl::Seconds(2));
  ExpectRemoved(c);
  EXPECT_TRUE(c.pinned.empty());
}

TEST(RemoveTest, ARollbackAndAnOperatorsPause) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.PublishAll(2);
  c.Run();
  v1::RollbackModelRequest rollback;
  rollback.set_version(std::string(kModel) + "/versions/1");
  c.Ask(rollback);
  v1::PauseReplicaRequest pause;
  pause.set_name(std::string(kModel) + "/replicas/r1");
  c.Ask(pause);
  c.Run();
  const int64_t removal = c.Ask(Removal());
  c.Run();
  // It is out of both; the one stays paused for whoever paused it.
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "");
  EXPECT_TRUE(c.engines["r1"].paused);
  EXPECT_EQ(c.engines["r1"].workers[0].state(),
            v1::InstalledState::STATE_NOTHING);
  EXPECT_EQ(c.coordinator->GetModel(kModel)->held_version(), "");
  v1::ResumeReplicaRequest resume;
  resume.set_name(pause.name());
  c.Ask(resume);
  c.Run();
  ExpectRemoved(c);
  ExpectNextPublishWorks(&c);
}

// It sleeps, and was given up for the update that it shall have when it wakes:
// now nobody wants it to have anything.
TEST(RemoveTest, AnEngineThatHoldsNothingAlready) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  const auto asleep = [&c](v1::WorkerAppliedReport* report) {
    report->set_model(kModel);
    report->set_replica("r1");
    report->set_worker_index(0);
    report->set_incarnation(c.engines["r1"].incarnation);
    report->mutable_installed()->set_state(v1::InstalledState::STATE_NOTHING);
  };
  c.intercept = [&](const std::string& node, const v1::NodeCommand& command) {
    if (node != "n1" || !command.has_apply_worker()) return false;
    v1::NodeReport refused;
    asleep(refused.mutable_worker_applied());
    v1::WorkerAppliedReport* report = refused.mutable_worker_applied();
    report->set_command_id(command.apply_worker().command_id());
    report->set_update_id(command.apply_worker().update_id());
    *report->mutable_failure() = MakeFailure(9, "WORKER_ASLEEP", "it sleeps");
    c.Report(node, refused);
    return true;
  };
  v1::NodeReport report;
  asleep(report.mutable_worker_applied());
  c.engines["r1"].workers[0] = report.worker_applied().installed();
  c.Report("n1", report);
  c.Run();
  c.Pass(absl::Seconds(30));
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_FENCED);
  const int64_t removal = c.Ask(Removal());
  c.Run();
  c.Pass(absl::Seconds(2));
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "");
  c.intercept = nullptr;
  ExpectRemoved(c);
  ExpectNextPublishWorks(&c);
}

TEST(RemoveTest, AnEngineThatCannotIsNamedAndAskedAgain) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.engines["r2"].fail_remove = true;
  v1::RemoveModelRequest request = Removal();
  request.mutable_timeout()->set_seconds(3);
  const int64_t removal = c.Ask(request);
  c.Run();
  c.Pass(absl::Seconds(4));
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Answered(removal)->failure.reason(), "REMOVE_TIMEOUT");
  EXPECT_THAT(c.Answered(removal)->failure.message(),
              HasSubstr("models/m/replicas/r2 (fenced: HOOK_FAILED)"));
  EXPECT_TRUE(c.engines["r2"].paused) << "it may have half of it";
  EXPECT_FALSE(c.engines["r1"].paused);
  c.engines["r2"].fail_remove = false;
  const int64_t again = c.Ask(Removal());
  c.Run();
  ASSERT_NE(c.Answered(again), nullptr);
  EXPECT_EQ(c.Answered(again)->failure.reason(), "");
  ExpectRemoved(c);
}

// A worker is lost in the middle; the engine starts again, with weights of its
// own.
TEST(RemoveTest, AWorkerThatDiesInARemovalIsToldAgain) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.intercept = [&](const std::string&, const Command& command) {
    return command.has_remove_worker() &&
           command.remove_worker().worker_index() == 1;
  };
  c.Ask(Removal());
  c.Run();
  c.intercept = nullptr;
  c.LoseWorker("r2", 1);
  c.engines["r2"].workers[1].Clear();
  c.RegisterWorker("r2", 1);
  c.Run();
  ExpectRemoved(c);
}

TEST(RemoveTest, APublishWhileItIsRemovedOvertakesIt) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  std::vector<std::pair<std::string, Command>> kept;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (!command.has_remove_worker()) return false;
    kept.emplace_back(node, command);
    return true;
  };
  const int64_t removal = c.Ask(Removal());
  c.Run();
  EXPECT_EQ(kept.size(), 3u);
  c.PublishAll(2);
  // Workers do what they are told in the order in which they were told.
  for (const auto& late : kept) c.Deliver(late.first, late.second);
  c.intercept = nullptr;
  c.Run();
  c.Pass(absl::Seconds(300));
  EXPECT_NE(c.Answered(removal), nullptr);
  EXPECT_EQ(c.Version().version(), 2);
  ExpectAllServe(c, c.Version().update_id());
}

// An update that is aborted leaves it removed.
TEST(RemoveTest, AnAbortedPublishDoesNotBringItBack) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  c.Ask(Removal());
  c.Run();
  ExpectRemoved(c);
  c.crash_before = "journal:update_committed";
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(2));
  ASSERT_TRUE(c.crashed);
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  for (const auto& engine : c.engines) {
    EXPECT_FALSE(engine.second.paused);
    EXPECT_TRUE(engine.second.last_resume.removed());
  }
  EXPECT_TRUE(c.coordinator->GetModel(kModel)->removed());
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.violations, 0);
}

class RemoveCrashTest : public ::testing::TestWithParam<const char*> {};

TEST_P(RemoveCrashTest, AllOrNothing) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  const std::string update_id = c.Version().update_id();
  c.crash_before = GetParam();
  c.Ask(Removal());
  c.Run();
  c.Pass(absl::Seconds(2));
  ASSERT_TRUE(c.crashed);
  const bool removed = c.journal.models[kModel].removed;
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  if (removed) {
    ExpectRemoved(c);
  } else {
    ExpectAllServe(c, update_id);
  }
  // The records say the same when they are compacted.
  JournalState compacted;
  for (const auto& record : RecordsOf(c.journal)) {
    ApplyRecord(record, &compacted);
  }
  EXPECT_EQ(compacted.models[kModel].removed, removed);
  EXPECT_EQ(compacted.models[kModel].floor, 1);
  EXPECT_EQ(compacted.models[kModel].committed.update_id(),
            removed ? "" : update_id);
  for (int i = 0; i < 4 && c.Version().state() != v1::Version::STATE_GATHERING;
       ++i) {
    c.Publish(0);
    c.Run();
  }
  c.Publish(1);
  c.Run();
  EXPECT_EQ(c.Version().version(), 2);
  ExpectAllServe(c, c.Version().update_id());
}

INSTANTIATE_TEST_SUITE_P(EveryStep, RemoveCrashTest,
                         ::testing::Values("journal:model_removed",
                                           "pause_replica", "send:n2:pause",
                                           "drop_update", "remove_worker",
                                           "send:n2:remove", "resume_replica",
                                           "send:n2:resume"));

}  // namespace
}  // namespace daemon
}  // namespace weightsync
