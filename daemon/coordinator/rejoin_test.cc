// A node that was away: what it is told of the updates that it holds, so that
// none of them is kept there for ever.

#include <string>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using Command = v1::NodeCommand;

// What `node` was last told of the end of `update_id`; null: nothing.
const v1::EndUpdate* ToldEnd(const FakeCluster& c, const std::string& node,
                             const std::string& update_id, size_t from) {
  const v1::EndUpdate* told = nullptr;
  for (size_t i = from; i < c.commands.size(); ++i) {
    const auto& command = c.commands[i];
    if (command.first == node && command.second.has_end_update() &&
        command.second.end_update().update_id() == update_id) {
      told = &command.second.end_update();
    }
  }
  return told;
}

// n1 has all bytes of version 1 and is away before it hears how that ended,
// while `others` more are published.
std::string MissTheEnd(FakeCluster* c, int others) {
  c->AddStandard();
  c->intercept = [](const std::string& node, const Command& command) {
    return node == "n1" && command.has_end_update();
  };
  c->PublishAll(2);
  c->Run();
  const std::string update_id = c->Version().update_id();
  c->Disconnect("n1");
  c->Pass(absl::Minutes(1));
  c->intercept = nullptr;
  for (int i = 0; i < others; ++i) {
    c->PublishAll(2);
    c->Run();
    EXPECT_EQ(c->Version().state(), v1::Version::STATE_ACTIVE);
  }
  return update_id;
}

TEST(RejoinTest, IsToldTheEndOfWhatItHoldsHoweverMuchHasEndedSince) {
  FakeCluster c;
  const std::string update_id = MissTheEnd(&c, 6);
  const size_t from = c.commands.size();
  c.Reconnect("n1");
  c.Run();
  const v1::EndUpdate* told = ToldEnd(c, "n1", update_id, from);
  ASSERT_NE(told, nullptr);
  EXPECT_TRUE(told->committed());
  ExpectNextPublishWorks(&c);
}

TEST(RejoinTest, WhatNobodyRemembersIsGivenUp) {
  FakeCluster c;
  const std::string update_id = MissTheEnd(&c, 14);
  const size_t from = c.commands.size();
  c.Reconnect("n1");
  c.Run();
  const v1::EndUpdate* told = ToldEnd(c, "n1", update_id, from);
  ASSERT_NE(told, nullptr);
  EXPECT_FALSE(told->committed());
  ExpectNextPublishWorks(&c);
}

// A holder from which something is fetched keeps it for that long. It is cut
// off for so long that it counts as lost, and comes back with its store.
TEST(RejoinTest, APinIsLetGoOfAlsoWhereNobodyHeardThatItEnded) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_move_update();
  };
  c.AddNode("n3");
  c.AddReplica("r3", {"n3"});
  c.Run();
  ASSERT_FALSE(c.pinned.empty());
  const std::string holder = c.pinned.begin()->first;
  c.intercept = nullptr;
  c.Disconnect(holder);
  c.Pass(absl::Minutes(3));
  ASSERT_EQ(c.Replica("r3").version(), 1) << "from another one";
  c.Reconnect(holder);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  EXPECT_TRUE(c.pinned.empty()) << c.pinned.begin()->first;
}

TEST(RejoinTest, APinThatWasSaidToNobodyIsSaidAgain) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().update_id();
  c.PublishAll(2);
  c.Run();
  // Its link breaks as everybody is told to keep the first one.
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pin_update();
  };
  c.Ask(RollbackTo(1));
  c.Run();
  c.intercept = nullptr;
  EXPECT_EQ(c.pinned.count({"n2", first}), 0u);
  c.Disconnect("n2");
  c.Reconnect("n2");
  c.Run();
  for (const char* node : {"n1", "n2"}) {
    EXPECT_EQ(c.pinned.count({node, first}), 1u) << node;
  }
  ExpectAllServe(c, first);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
