// Ids of commands to replicas: engines that lived on know those of before, and
// a pause that is answered from memory is an engine that is written to while it
// generates.

#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/fake_cluster.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

void PublishTwice(FakeCluster* c) {
  for (int i = 0; i < 2; ++i) {
    c->PublishAll(2);
    c->Run();
    EXPECT_EQ(c->Version().state(), v1::Version::STATE_ACTIVE)
        << c->Version().ShortDebugString();
  }
}

TEST(CommandIdsTest, AReplicaThatWasForgottenAndComesBackIsToldNewOnes) {
  FakeCluster c;
  c.AddStandard();
  PublishTwice(&c);
  c.Disconnect("n2");
  c.Pass(absl::Seconds(10));
  v1::DeleteReplicaRequest remove;
  remove.set_name(absl::StrCat(kModel, "/replicas/r2"));
  const int64_t deletion = c.Ask(remove);
  c.Run();
  ASSERT_NE(c.Answered(deletion), nullptr);
  ASSERT_EQ(c.Answered(deletion)->failure.reason(), "");
  // The same engine.
  c.Reconnect("n2");
  c.Run();
  PublishTwice(&c);
  EXPECT_EQ(c.violations, 0);
  EXPECT_EQ(c.engines["r2"].pauses, 4);
}

TEST(CommandIdsTest, ACoordinatorThatHasLostItsJournalTellsNewOnes) {
  FakeCluster c;
  c.AddStandard();
  PublishTwice(&c);
  c.journal = JournalState();
  c.RestartCoordinator();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.violations, 0);
  // Its terms begin again, too.
  EXPECT_EQ(c.journal.term, 1);
}

TEST(CommandIdsTest, ARestartedCoordinatorTellsNewOnes) {
  FakeCluster c;
  c.AddStandard();
  PublishTwice(&c);
  c.RestartCoordinator();
  PublishTwice(&c);
  EXPECT_EQ(c.violations, 0);
  EXPECT_EQ(c.engines["r1"].pauses, 4);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
