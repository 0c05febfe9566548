// What users of other systems reported, and what must not be possible here:
// each report is a test of its name.

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "daemon/coordinator/fault.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using Command = v1::NodeCommand;

TEST(UsersReportsTest, AnEngineLeftPausedAfterAFailedUpdate) {
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
  ExpectAllServe(c, "");
}

TEST(UsersReportsTest, AVersionLabelThatAdvancesAlthoughTheApplyFailed) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_apply_worker();
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_APPLYING);
  EXPECT_NE(c.Replica("r1").version(), 1);
  c.Pass(absl::Seconds(370), absl::Seconds(2));
  EXPECT_EQ(c.Replica("r1").state(), v1::Replica::STATE_FENCED);
  EXPECT_NE(c.Replica("r1").version(), 1);
  EXPECT_EQ(c.Replica("r2").version(), 1);
}

TEST(UsersReportsTest, SuccessReportedBeforeCopiesAreComplete) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_apply_worker() &&
           command.apply_worker().worker_index() == 1;
  };
  c.PublishAll(2);
  c.Run();
  // One of three workers is still at it: nothing runs and nothing is active.
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_APPLYING);
  EXPECT_TRUE(c.engines["r1"].paused);
  EXPECT_TRUE(c.engines["r2"].paused);
}

TEST(UsersReportsTest, AnEngineResumedByAnUpdateWhileSomebodyElseHoldsIt) {
  FakeCluster c;
  c.AddStandard();
  v1::PauseReplicaRequest pause;
  pause.set_name(std::string(kModel) + "/replicas/r2");
  c.Ask(pause);
  c.Run();
  c.PublishAll(2);
  c.Run();
  EXPECT_TRUE(c.engines["r2"].paused);
  EXPECT_EQ(c.engines["r2"].resumes, 0);
}

TEST(UsersReportsTest, AnUpdateWrittenIntoAnEngineWhoseMemoryIsNotThere) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  // Asleep: it dropped its weights, and says so; it is given the update before
  // it may run. Starting: see ReadinessTest.
  v1::NodeReport report;
  v1::WorkerAppliedReport* said = report.mutable_worker_applied();
  said->set_model(kModel);
  said->set_replica("r1");
  said->set_worker_index(0);
  said->set_incarnation(c.engines["r1"].incarnation);
  said->mutable_installed()->set_state(v1::InstalledState::STATE_NOTHING);
  c.engines["r1"].workers[0] = said->installed();
  c.Report("n1", report);
  EXPECT_NE(c.Replica("r1").state(), v1::Replica::STATE_SERVING);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

// Whatever is reported twice, each engine is told once. What it does with a
// command that comes to it twice: ReplicaTest.ARepeatedCommandDoesNothingTwice
// (client/cc/replica_test.cc).
TEST(UsersReportsTest, ADuplicateResume) {
  FakeCluster c;
  c.twice = true;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(40));
  EXPECT_EQ(c.CountCommands(Command::kResumeReplica), 2);
  EXPECT_EQ(c.CountCommands(Command::kPauseReplica), 2);
  EXPECT_EQ(c.engines["r1"].resumes, 1);
  EXPECT_EQ(c.engines["r2"].resumes, 1);
  // Answers of that update that come once more during the next one are not
  // taken for the next one's.
  v1::NodeReport late;
  auto* resumed = late.mutable_replica_resumed();
  resumed->set_model(kModel);
  resumed->set_replica("r2");
  resumed->set_incarnation(c.engines["r2"].incarnation);
  resumed->set_command_id(c.engines["r2"].last_resume.command_id());
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_resume_replica();
  };
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_RESUMING);
  c.Report("n2", late);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_RESUMING);
  EXPECT_EQ(c.CountCommands(Command::kResumeReplica), 4);
}

TEST(UsersReportsTest, AReplicasErrorStatusIgnoredByTheController) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_pause_replica()) return false;
    v1::NodeReport report;
    auto* paused = report.mutable_replica_paused();
    paused->set_model(kModel);
    paused->set_replica("r2");
    paused->set_incarnation(command.pause_replica().incarnation());
    paused->set_command_id(command.pause_replica().pause().command_id());
    *paused->mutable_failure() =
        MakeFailure(13, "HOOK_FAILED", "the scheduler is stuck");
    c.Report(node, report);
    return true;
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "HOOK_FAILED");
  EXPECT_THAT(c.Version().failure().message(),
              ::testing::HasSubstr("the scheduler is stuck"));
}

TEST(UsersReportsTest, AnEngineThatDoesNotResumeIsNamedUntilItDoes) {
  FakeCluster c;
  c.AddStandard();
  bool refuses = true;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_resume_replica() || !refuses) return false;
    v1::NodeReport report;
    auto* resumed = report.mutable_replica_resumed();
    resumed->set_model(kModel);
    resumed->set_replica("r2");
    resumed->set_incarnation(command.resume_replica().incarnation());
    resumed->set_command_id(command.resume_replica().resume().command_id());
    *resumed->mutable_failure() =
        MakeFailure(2, "HOOK_FAILED",
                    "The engine of models/m/replicas/r2 could not resume: no "
                    "room for a cache");
    c.Report(node, report);
    return true;
  };
  const auto times_of_r2 = [&c] {
    const v1::Version version = c.Version();
    for (const v1::ReplicaTimes& times : version.replicas()) {
      if (times.replica() == "models/m/replicas/r2") return times;
    }
    return v1::ReplicaTimes();
  };
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(times_of_r2().failure().reason(), "HOOK_FAILED");
  EXPECT_EQ(times_of_r2().failure().message(),
            "The engine of models/m/replicas/r2 could not resume: no room for "
            "a cache");
  EXPECT_FALSE(times_of_r2().has_resumed_time());
  refuses = false;
  c.Pass(absl::Seconds(4));
  EXPECT_EQ(times_of_r2().failure().reason(), "");
  EXPECT_TRUE(times_of_r2().has_resumed_time());
}

// Who reports a failure is named in front of it, and may have named himself.
TEST(UsersReportsTest, NobodyIsNamedTwiceInASentence) {
  EXPECT_EQ(SaidBy("node n2", "no room"), "node n2: no room");
  EXPECT_EQ(SaidBy("node n2", "node n2 has no room"), "node n2 has no room");
  EXPECT_EQ(SaidBy("node n2", "node n2: no room"), "node n2: no room");
  EXPECT_EQ(SaidBy("node n2", "node n2.b has no room"),
            "node n2: node n2.b has no room");
  for (const char* said : {"node n2 has no room", "no room"}) {
    FakeCluster c;
    c.AddStandard();
    c.intercept = [&](const std::string& node, const Command& command) {
      if (node != "n2" || !command.has_prepare_update()) return false;
      v1::NodeReport report;
      auto* prepared = report.mutable_update_prepared();
      prepared->set_model(kModel);
      prepared->set_update_id(command.prepare_update().update_id());
      *prepared->mutable_epoch() = command.prepare_update().epoch();
      *prepared->mutable_failure() = MakeFailure(8, "NO_STORE_ROOM", said);
      c.Report(node, report);
      return true;
    };
    c.PublishAll(2);
    c.Run();
    EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
    const std::string message = c.Version().failure().message();
    EXPECT_NE(message.find("node n2"), std::string::npos) << message;
    EXPECT_EQ(message.find("node n2"), message.rfind("node n2")) << message;
  }
}

TEST(UsersReportsTest, NorIsOneWhoHasGone) {
  const std::string who = "worker 0 of models/m/replicas/r1";
  for (const auto& said : {std::pair<std::string, std::string>{"", " has gone"},
                           {"no luck", " has gone: no luck"},
                           {who + " is lost: no luck", " is lost: no luck"}}) {
    FakeCluster c;
    c.AddStandard();
    v1::NodeReport report;
    v1::WorkerLeft* left = report.mutable_worker_left();
    left->set_model(kModel);
    left->set_replica("r1");
    left->set_incarnation(c.engines["r1"].incarnation);
    left->mutable_failure()->set_message(said.first);
    c.Report("n1", report);
    EXPECT_EQ(c.Replica("r1").last_failure().message(),
              who + " on node n1" + said.second);
  }
}

// The one worker whose answer is lost is asked again, about the same update,
// and nobody else is. That it then writes nothing is its own to keep:
// WorkerTest.ARepeatedApplyWritesNothing (client/cc/worker_test.cc).
TEST(UsersReportsTest, ARetryThatAppliesTwice) {
  FakeCluster c;
  c.AddStandard();
  bool lost = false;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_apply_worker() || lost) return false;
    // It is applied, and its answer is lost.
    lost = true;
    v1::InstalledState& installed = c.engines["r1"].workers[0];
    installed.set_state(v1::InstalledState::STATE_INSTALLED);
    installed.set_update_id(command.apply_worker().update_id());
    ++c.engines["r1"].applies;
    return true;
  };
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(122));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].applies, 1);
  std::map<std::string, int> asked;
  for (const auto& command : c.commands) {
    if (!command.second.has_apply_worker()) continue;
    const v1::ApplyWorker& apply = command.second.apply_worker();
    EXPECT_EQ(apply.update_id(), c.Version().update_id());
    ++asked[absl::StrCat(apply.replica(), "/", apply.worker_index())];
  }
  EXPECT_EQ(asked, (std::map<std::string, int>{
                       {"r1/0", 2}, {"r2/0", 1}, {"r2/1", 1}}));
  ExpectAllServe(c, c.Version().update_id());
}

// The requests that an engine works on, treated as its commands say. An engine
// that is resumed in another way than it was paused cannot go on with what it
// froze.
struct InFlight {
  int running = 3;
  int frozen = 0;
  int finished = 0;
  int lost = 0;

  void Take(const Command& command) {
    if (command.has_pause_replica()) {
      switch (command.pause_replica().pause().mode()) {
        case v1::PAUSE_MODE_DRAIN:
          finished += running;
          break;
        case v1::PAUSE_MODE_KEEP:
          frozen += running;
          break;
        default:
          lost += running;
          break;
      }
      running = 0;
    } else if (command.has_resume_replica()) {
      if (command.resume_replica().resume().mode() != v1::PAUSE_MODE_KEEP) {
        lost += frozen;
      } else {
        running += frozen;
      }
      frozen = 0;
    }
  }
};

// Through an update that succeeds, one that is aborted while the engine stands,
// one whose node is cut off in the middle, and one in the middle of which the
// coordinator is started again. With a model that answers:
// tests/python/serving_test.py.
class InFlightTest : public ::testing::TestWithParam<v1::PauseMode> {};

TEST_P(InFlightTest, RequestsInFlightLostUnderDrainOrKeep) {
  FakeCluster c;
  c.AddStandard();
  std::map<std::string, InFlight> requests;
  std::function<bool(const std::string&, const Command&)> also;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (also != nullptr && also(node, command)) return true;
    if (command.has_pause_replica()) {
      requests[command.pause_replica().replica()].Take(command);
    } else if (command.has_resume_replica()) {
      requests[command.resume_replica().replica()].Take(command);
    }
    return false;
  };
  v1::UpdateOptions options;
  options.set_pause_mode(GetParam());
  const auto publish = [&] {
    for (int rank = 0; rank < 2; ++rank) c.Publish(rank, 0, "", options);
    c.Run();
  };
  const auto expect_none_lost = [&] {
    ASSERT_EQ(requests.size(), 2u);
    for (auto& entry : requests) {
      InFlight& engine = entry.second;
      EXPECT_EQ(engine.lost, 0) << entry.first;
      if (GetParam() == v1::PAUSE_MODE_KEEP) {
        EXPECT_EQ(engine.running, 3) << entry.first;
        EXPECT_EQ(engine.finished, 0) << entry.first;
      } else {
        EXPECT_EQ(engine.finished, 3) << entry.first;
        engine.finished = 0;
        engine.running = 3;  // the next ones
      }
    }
  };
  publish();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  expect_none_lost();

  // r2 does not pause, and so r1 stands for nothing.
  also = [&](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  publish();
  c.Pass(absl::Seconds(61));
  also = nullptr;
  c.Run();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(requests["r1"].lost, 0);
  requests["r2"] = requests["r1"];  // it was never paused
  expect_none_lost();

  // The node of one that stands goes away for a moment.
  also = [](const std::string&, const Command& command) {
    return command.has_apply_worker();
  };
  publish();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_APPLYING);
  c.Disconnect("n1");
  also = nullptr;
  c.Reconnect("n1");
  c.Run();
  c.Pass(absl::Seconds(125));
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  expect_none_lost();

  // The coordinator ends after the commit.
  c.crash_before = "apply_worker";
  publish();
  ASSERT_TRUE(c.crashed);
  c.RestartCoordinator();
  c.Pass(absl::Seconds(2));
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  expect_none_lost();
  ExpectAllServe(c, c.Version().update_id());
}

INSTANTIATE_TEST_SUITE_P(UsersReportsTest, InFlightTest,
                         ::testing::Values(v1::PAUSE_MODE_DRAIN,
                                           v1::PAUSE_MODE_KEEP));

TEST(UsersReportsTest, ATimeoutClockThatStartsBeforeItsWorkDoes) {
  // The pause takes most of its own time, the apply most of its own: neither
  // eats into the other's.
  CoordinatorOptions options;
  options.pause_timeout = absl::Seconds(20);
  options.apply_timeout = absl::Seconds(20);
  FakeCluster c(options);
  c.AddStandard();
  bool hold_pause = true;
  bool hold_apply = true;
  std::vector<std::pair<std::string, Command>> held;
  c.intercept = [&](const std::string& node, const Command& command) {
    const bool hold = (command.has_pause_replica() && hold_pause) ||
                      (command.has_apply_worker() && hold_apply);
    if (hold) held.emplace_back(node, command);
    return hold;
  };
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(19));
  hold_pause = false;
  for (const auto& command : held) c.Deliver(command.first, command.second);
  held.clear();
  c.Run();
  c.Pass(absl::Seconds(19));
  EXPECT_EQ(c.CountCommands(Command::kApplyWorker), 3);
  hold_apply = false;
  for (const auto& command : held) c.Deliver(command.first, command.second);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.CountCommands(Command::kApplyWorker), 3);
  ExpectAllServe(c, c.Version().update_id());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
