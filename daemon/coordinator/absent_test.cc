// Replicas that are known and not there: an update that they had no part in,
// and a removal that has not reached them, name them.

#include <string>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::RemoveModelRequest Removal() {
  v1::RemoveModelRequest request;
  request.set_name(kModel);
  return request;
}

TEST(AbsentTest, WhoIsWholeIsNotNamed) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
}

TEST(AbsentTest, AnUpdateNamesWhoHadNoPartInIt) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  // One of the two workers of r2 ends.
  c.LoseWorker("r2", 1);
  c.PublishAll(2);
  c.Run();
  const v1::Version version = c.Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(version.replicas_size(), 1);
  EXPECT_THAT(version.absent_replicas(), ElementsAre("models/m/replicas/r2"));
  // It comes later: it is named until it serves the update.
  bool asked = false;
  c.intercept = [&](const std::string&, const v1::NodeCommand& command) {
    if (!command.has_resume_replica()) return false;
    asked = true;
    EXPECT_THAT(c.Version().absent_replicas(),
                ElementsAre("models/m/replicas/r2"));
    return false;
  };
  c.Register("r2");
  c.Run();
  EXPECT_TRUE(asked);
  EXPECT_EQ(c.Replica("r2").version(), version.version());
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
  EXPECT_EQ(c.Version().replicas_size(), 2) << "it is counted instead";
  v1::ListVersionsRequest list;
  list.set_parent(kModel);
  const auto versions = c.coordinator->ListVersions(list, c.now);
  ASSERT_TRUE(versions.ok());
  for (const v1::Version& listed : versions->versions()) {
    EXPECT_THAT(listed.absent_replicas(), IsEmpty());
  }
  // Nor when it goes again: it had it.
  c.LoseWorker("r2", 1);
  c.Run();
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_LOST);
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
}

// It never gets that version, and must not be told to be waited for.
TEST(AbsentTest, OneThatCameForALaterUpdateIsNotAwaitedForTheOlder) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.LoseWorker("r2", 1);
  c.PublishAll(2);
  c.Run();
  const std::string older = std::to_string(c.Version().version());
  ASSERT_EQ(c.Version(older).update_id(), c.Version().update_id());
  EXPECT_THAT(c.Version(older).absent_replicas(),
              ElementsAre("models/m/replicas/r2"));
  c.PublishAll(2);
  c.Run();
  c.Register("r2");
  c.Run();
  EXPECT_EQ(c.Replica("r2").version(), c.Version().version());
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
  EXPECT_THAT(c.Version(older).absent_replicas(), IsEmpty());
}

TEST(AbsentTest, OneThatWasDeletedIsNotAwaited) {
  FakeCluster c;
  c.AddStandard();
  c.Disconnect("n2");
  c.Pass(absl::Seconds(10));
  c.PublishAll(2);
  c.Run();
  EXPECT_THAT(c.Version().absent_replicas(),
              ElementsAre("models/m/replicas/r2"));
  v1::DeleteReplicaRequest remove;
  remove.set_name(std::string(kModel) + "/replicas/r2");
  const int64_t deletion = c.Ask(remove);
  c.Run();
  ASSERT_NE(c.Answered(deletion), nullptr);
  ASSERT_EQ(c.Answered(deletion)->failure.reason(), "");
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
}

// An operator holds it: it has the update all the same, and nothing is to come.
TEST(AbsentTest, OneThatHasItAndIsHeldIsNotAwaited) {
  FakeCluster c;
  c.AddStandard();
  c.LoseWorker("r2", 1);
  c.PublishAll(2);
  c.Run();
  v1::PauseReplicaRequest pause;
  pause.set_name(std::string(kModel) + "/replicas/r2");
  c.Ask(pause);
  c.Register("r2");
  c.Run();
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_PAUSED);
  EXPECT_EQ(c.Replica("r2").version(), c.Version().version());
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
}

// In the moments after a restart nobody has come, and the journal alone knows
// who there is.
TEST(AbsentTest, AfterARestartThoseOfTheJournalAreNamed) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const auto engines = c.engines;
  c.engines.clear();
  c.RestartCoordinator();
  c.PublishAll(2);
  c.Run();
  v1::Version version = c.Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(version.replicas_size(), 0);
  EXPECT_THAT(version.absent_replicas(),
              ElementsAre("models/m/replicas/r1", "models/m/replicas/r2"));
  // Nor has that commit made them unknown.
  c.RestartCoordinator();
  c.engines = engines;
  c.Register("r1");
  c.Run();
  c.PublishAll(2);
  c.Run();
  version = c.Version();
  EXPECT_EQ(version.replicas_size(), 1);
  EXPECT_THAT(version.absent_replicas(), ElementsAre("models/m/replicas/r2"));
  // One that never comes back is not waited for for ever.
  c.Pass(absl::Minutes(61), absl::Seconds(4));
  c.PublishAll(2);
  c.Run();
  EXPECT_THAT(c.Version().absent_replicas(), IsEmpty());
}

TEST(AbsentTest, ARemovalNamesWhoMayStillHoldIt) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  EXPECT_THAT(c.coordinator->GetModel(kModel)->absent_replicas(), IsEmpty());
  c.Disconnect("n2");
  c.Pass(absl::Seconds(10));
  EXPECT_THAT(c.coordinator->GetModel(kModel)->absent_replicas(), IsEmpty())
      << "it was not removed";
  const int64_t removal = c.Ask(Removal());
  c.Run();
  ASSERT_NE(c.Answered(removal), nullptr);
  const auto& model = absl::get<v1::Model>(c.Answered(removal)->response);
  EXPECT_TRUE(model.removed());
  EXPECT_THAT(model.absent_replicas(), ElementsAre("models/m/replicas/r2"));
  c.Reconnect("n2");
  c.Pass(absl::Seconds(2));
  EXPECT_EQ(c.engines["r2"].removes, 2);
  EXPECT_THAT(c.coordinator->GetModel(kModel)->absent_replicas(), IsEmpty());
  // One that has dropped it and goes does not hold it.
  c.LoseWorker("r2", 1);
  c.Run();
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_LOST);
  EXPECT_THAT(c.coordinator->GetModel(kModel)->absent_replicas(), IsEmpty());
}

TEST(AbsentTest, ARemovalRightAfterARestartToo) {
  FakeCluster c;
  c.AddStandardAdapter();
  c.PublishAll(2);
  c.Run();
  const auto engines = c.engines;
  c.engines.clear();
  c.RestartCoordinator();
  const int64_t removal = c.Ask(Removal());
  c.Run();
  ASSERT_NE(c.Answered(removal), nullptr);
  EXPECT_THAT(
      absl::get<v1::Model>(c.Answered(removal)->response).absent_replicas(),
      ElementsAre("models/m/replicas/r1", "models/m/replicas/r2"));
  c.engines = engines;
  c.Register("r1");
  c.Register("r2");
  c.Pass(absl::Seconds(2));
  EXPECT_EQ(c.engines["r1"].removes, 1);
  EXPECT_THAT(c.coordinator->GetModel(kModel)->absent_replicas(), IsEmpty());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
