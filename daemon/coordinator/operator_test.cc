// Replicas that an operator pauses and resumes by hand.

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

TEST(OperatorTest, AnUpdatesResumeDoesNotUndoAnOperatorsPause) {
  FakeCluster c;
  c.AddStandard();
  const int64_t pause = c.Ask(Pause("r1"));
  EXPECT_EQ(c.Answered(pause), nullptr);  // its engine has not paused yet
  c.Run();
  ASSERT_NE(c.Answered(pause), nullptr);
  EXPECT_EQ(absl::get<v1::Replica>(c.Answered(pause)->response).state(),
            v1::Replica::STATE_PAUSED);
  EXPECT_EQ(c.Replica("r1").pause_holders(0), "operator");
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  EXPECT_TRUE(c.engines["r1"].paused);
  EXPECT_FALSE(c.engines["r2"].paused);
  // It holds over a restart of the coordinator and of the engine.
  c.RestartCoordinator();
  EXPECT_TRUE(c.engines["r1"].paused);
  c.LoseWorker("r1", 0);
  c.engines["r1"].incarnation = "another";
  c.engines["r1"].paused = false;
  v1::NodeReport left;
  left.mutable_replica_left()->set_model(kModel);
  left.mutable_replica_left()->set_replica("r1");
  left.mutable_replica_left()->set_incarnation(c.Replica("r1").incarnation());
  c.Report("n1", left);
  c.Register("r1");
  c.Run();
  EXPECT_TRUE(c.engines["r1"].paused);
  const int64_t resume = c.Ask(Resume("r1"));
  c.Run();
  ASSERT_NE(c.Answered(resume), nullptr);
  ExpectAllServe(c, c.Version().update_id());
  c.Ask(Resume("r1"));  // once more changes nothing
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(OperatorTest, AnOperatorsResumeDoesNotUndoAnUpdatesPause) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  const int64_t resume = c.Ask(Resume("r1"));
  c.Run();
  ASSERT_NE(c.Answered(resume), nullptr);
  EXPECT_TRUE(c.engines["r1"].paused);
  EXPECT_THAT(
      absl::get<v1::Replica>(c.Answered(resume)->response).pause_holders(0),
      HasSubstr("update/"));
}

TEST(OperatorTest, AResumeThatTheEngineDoesNotAnswerIsNotCalledWell) {
  FakeCluster c;
  c.AddStandard();
  c.Ask(Pause("r1"));
  c.Run();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_resume_replica();
  };
  const int64_t resume = c.Ask(Resume("r1"));
  c.Pass(absl::Seconds(33));
  ASSERT_NE(c.Answered(resume), nullptr);
  EXPECT_EQ(c.Answered(resume)->failure.reason(), "RESUME_TIMEOUT");
  EXPECT_EQ(c.Replica("r1").pause_holders_size(), 0);
  // The hold is given up all the same, and the engine asked again.
  c.intercept = nullptr;
  c.Pass(absl::Seconds(33));
  EXPECT_FALSE(c.engines["r1"].paused);
}

TEST(OperatorTest, AnEngineThatDoesNotPauseIsHeldAllTheSame) {
  FakeCluster c;
  c.AddStandard();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_pause_replica();
  };
  v1::PauseReplicaRequest request = Pause("r1");
  request.mutable_timeout()->set_seconds(5);
  const int64_t pause = c.Ask(request);
  c.Run();
  c.Pass(absl::Seconds(6));
  ASSERT_NE(c.Answered(pause), nullptr);
  EXPECT_EQ(c.Answered(pause)->failure.reason(), "PAUSE_TIMEOUT");
  EXPECT_EQ(c.Replica("r1").pause_holders_size(), 1);
  const int64_t unknown = c.Ask(Pause("nobody"));
  EXPECT_EQ(c.Answered(unknown)->failure.reason(), "REPLICA_UNKNOWN");
}

TEST(OperatorTest, APauseThatCannotBeSaysWhyAndIsHeldAllTheSame) {
  FakeCluster c;
  c.AddStandard();
  // The engine says no.
  c.intercept = [&c](const std::string& node, const Command& command) {
    if (node != "n1" || !command.has_pause_replica()) return false;
    const v1::PauseReplicaCommand& asked = command.pause_replica();
    v1::NodeReport report;
    v1::ReplicaPausedReport* said = report.mutable_replica_paused();
    said->set_model(asked.model());
    said->set_replica(asked.replica());
    said->set_incarnation(asked.incarnation());
    said->set_command_id(asked.pause().command_id());
    *said->mutable_failure() = MakeFailure(13, "ENGINE_BUSY", "not now");
    c.Report(node, report);
    return true;
  };
  v1::PauseReplicaRequest request = Pause("r1");
  request.mutable_timeout()->set_seconds(2);
  const int64_t refused = c.Ask(request);
  c.Run();
  c.Pass(absl::Seconds(3));
  ASSERT_NE(c.Answered(refused), nullptr);
  EXPECT_EQ(c.Answered(refused)->failure.reason(), "PAUSE_TIMEOUT");
  EXPECT_THAT(c.Answered(refused)->failure.message(), HasSubstr("ENGINE_BUSY"));
  // One that is not there: at once.
  c.intercept = nullptr;
  c.Disconnect("n2");
  c.Pass(absl::Seconds(31));
  const int64_t lost = c.Ask(Pause("r2"));
  ASSERT_NE(c.Answered(lost), nullptr);
  EXPECT_EQ(c.Answered(lost)->failure.reason(), "REPLICA_LOST");
  EXPECT_EQ(c.Replica("r2").pause_holders_size(), 1);
  request = Pause("r1");
  request.set_mode(static_cast<v1::PauseMode>(9));
  EXPECT_EQ(c.Answered(c.Ask(request))->failure.reason(), "PAUSE_MODE_INVALID");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
