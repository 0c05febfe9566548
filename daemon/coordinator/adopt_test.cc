// A journal that was lost: what the nodes say becomes what is known.

#include <algorithm>
#include <set>
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

TEST(AdoptTest, TheNodesWordBecomesWhatIsKnown) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2, 41);
  c.Run();
  const std::string held = c.Version().update_id();
  const std::string cluster = c.coordinator->cluster_id();
  v1::AdoptClusterRequest adopt;
  EXPECT_EQ(c.Answered(c.Ask(adopt))->failure.reason(), "NOT_LOST");

  c.journal = JournalState();
  c.remembered_cluster = cluster;
  c.RestartCoordinator();
  v1::Cluster shown;
  c.coordinator->FillCluster(&shown);
  EXPECT_EQ(shown.blocked().reason(), "JOURNAL_LOST");
  EXPECT_EQ(c.Answered(c.Ask(Pause("r1")))->failure.reason(), "JOURNAL_LOST");
  adopt.set_cluster_id("another");
  EXPECT_EQ(c.Answered(c.Ask(adopt))->failure.reason(), "CLUSTER_MISMATCH");
  adopt.clear_cluster_id();
  const int64_t call = c.Ask(adopt);
  ASSERT_EQ(c.Answered(call)->failure.code(), 0)
      << c.Answered(call)->failure.message();
  EXPECT_EQ(c.coordinator->cluster_id(), cluster);
  // Not the next one: some node may have followed that one, and remember what
  // it has answered then. (Two adoptions from the same knowledge must differ.)
  EXPECT_GT(c.coordinator->term(), 2);
  for (const char* node : {"n0", "n1", "n2"}) c.Reconnect(node);
  c.Run();
  c.Pass(absl::Seconds(31));  // while nodes come nothing is opened
  // What they serve is the floor: no number is given twice.
  EXPECT_EQ(c.Version().version(), 41);
  EXPECT_EQ(c.Version().update_id(), held);
  ExpectAllServe(c, held);
  EXPECT_EQ(c.Replica("r1").version(), 41);
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 42);
  // And it stays so.
  c.RestartCoordinator();
  EXPECT_EQ(c.coordinator->cluster_id(), cluster);
  c.Pass(absl::Seconds(31));
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 43);
}

// One that was configured for this coordinator by mistake.
std::string RefusedStranger(FakeCluster* c) {
  v1::NodeReport report;
  v1::Hello* hello = report.mutable_hello();
  hello->set_node("stranger");
  hello->set_protocol_version(1);
  hello->set_incarnation("x");
  hello->set_cluster_id("another");
  hello->set_newest_term(9);
  c->Do(c->coordinator->OnReport(c->now, "stranger", report));
  return c->closed.empty() ? "" : c->closed.back().failure.reason();
}

TEST(AdoptTest, AStrangerDoesNotStopACluster) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(RefusedStranger(&c), "CLUSTER_MISMATCH");
  v1::Cluster shown;
  c.coordinator->FillCluster(&shown);
  EXPECT_FALSE(shown.has_blocked()) << shown.ShortDebugString();
  ExpectNextPublishWorks(&c);
}

// Before the first update it cannot be told from a journal that was lost; the
// operator can.
TEST(AdoptTest, ANewClusterThatMetAStrangerMayStayItself) {
  FakeCluster c;
  c.AddStandard();
  const std::string cluster = c.coordinator->cluster_id();
  EXPECT_EQ(RefusedStranger(&c), "JOURNAL_LOST");
  v1::AdoptClusterRequest adopt;
  EXPECT_EQ(c.Answered(c.Ask(adopt))->failure.reason(), "CLUSTER_MISMATCH")
      << "which of the two is not clear";
  adopt.set_cluster_id(cluster);
  const int64_t call = c.Ask(adopt);
  ASSERT_EQ(c.Answered(call)->failure.code(), 0)
      << c.Answered(call)->failure.message();
  for (const char* node : {"n0", "n1", "n2"}) c.Reconnect(node);
  c.Run();
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.coordinator->cluster_id(), cluster);
  EXPECT_EQ(RefusedStranger(&c), "CLUSTER_MISMATCH");
  ExpectNextPublishWorks(&c);
}

// Found by tests/chaos: a second coordinator with a copy of the journal took
// replicas back to the version before the one that the first had committed.
TEST(AdoptTest, AJournalOfSomeTimeAgoTakesNobodyBack) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2, 41);
  c.Run();
  const JournalState copy = c.journal;
  c.PublishAll(2, 42);
  c.Run();
  const std::string newest = c.Version().update_id();
  const int applies = c.CountCommands(v1::NodeCommand::kApplyWorker);

  c.journal = copy;
  c.RestartCoordinator();
  c.Run();
  c.Pass(absl::Seconds(31));
  v1::Cluster shown;
  c.coordinator->FillCluster(&shown);
  EXPECT_EQ(shown.blocked().reason(), "JOURNAL_LOST");
  EXPECT_THAT(shown.blocked().message(), HasSubstr("holds version 42"));
  EXPECT_EQ(c.CountCommands(v1::NodeCommand::kApplyWorker), applies);
  ExpectAllServe(c, newest);

  const int64_t call = c.Ask(v1::AdoptClusterRequest());
  ASSERT_EQ(c.Answered(call)->failure.code(), 0)
      << c.Answered(call)->failure.message();
  for (const char* node : {"n0", "n1", "n2"}) c.Reconnect(node);
  c.Run();
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.Version().update_id(), newest);
  ExpectAllServe(c, newest);
  ExpectNextPublishWorks(&c);
  EXPECT_EQ(c.Version().version(), 43);
}

// Found by tests/chaos: a node was not told of the end of an update before the
// journal was lost; a newer one was committed afterwards, and the node kept the
// older one, for whose end it waited, until its store had no room.
TEST(AdoptTest, WhatANodeWasNotToldOfIsNotKeptForEverEither) {
  FakeCluster c;
  c.AddStandard();
  const std::string cluster = c.coordinator->cluster_id();
  c.intercept = [](const std::string& node, const v1::NodeCommand& command) {
    return node == "n1" && command.has_end_update();
  };
  c.PublishAll(2, 41);
  c.Run();
  c.intercept = nullptr;
  const std::string older = c.Version().update_id();
  c.PublishAll(2, 42);
  c.Run();
  c.journal = JournalState();
  c.remembered_cluster = cluster;
  c.RestartCoordinator();
  ASSERT_EQ(c.Answered(c.Ask(v1::AdoptClusterRequest()))->failure.code(), 0);
  c.commands.clear();
  for (const char* node : {"n0", "n1", "n2"}) c.Reconnect(node);
  c.Run();
  c.Pass(absl::Seconds(31));
  const bool told = std::any_of(
      c.commands.begin(), c.commands.end(), [&](const auto& command) {
        return command.first == "n1" && command.second.has_end_update() &&
               command.second.end_update().update_id() == older;
      });
  EXPECT_TRUE(told);
  ExpectNextPublishWorks(&c);
}

// Found by tests/chaos: nodes kept for ever, as incoming, an update whose
// journal was lost before its commit, until the store had no room.
TEST(AdoptTest, WhatNobodyCommittedIsNotKeptForEver) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2, 41);
  c.Run();
  const std::string committed = c.Version().update_id();
  const std::string cluster = c.coordinator->cluster_id();
  c.intercept = [](const std::string&, const v1::NodeCommand& command) {
    return command.has_pause_replica();
  };
  c.PublishAll(2, 42);
  c.Run();
  const std::string undecided = c.Version("42").update_id();
  ASSERT_NE(undecided, committed);
  c.intercept = nullptr;

  c.journal = JournalState();
  c.remembered_cluster = cluster;
  c.RestartCoordinator();
  ASSERT_EQ(c.Answered(c.Ask(v1::AdoptClusterRequest()))->failure.code(), 0);
  c.commands.clear();
  for (const char* node : {"n0", "n1", "n2"}) c.Reconnect(node);
  c.Run();
  c.Pass(absl::Seconds(31));
  std::set<std::string> told;
  for (const auto& command : c.commands) {
    if (!command.second.has_end_update()) continue;
    const v1::EndUpdate& end = command.second.end_update();
    if (end.update_id() == undecided) {
      EXPECT_FALSE(end.committed());
      told.insert(command.first);
    }
    EXPECT_TRUE(end.update_id() != committed || end.committed());
  }
  EXPECT_THAT(told, ::testing::IsSupersetOf({"n1", "n2"}));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
