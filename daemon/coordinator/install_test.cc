// Installing an update from a holder: late joins, updates that nobody holds any
// more, nodes that are drained, versions and replicas that are deleted, and
// verification of what was installed.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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

// ---- Late joins ----

TEST(LateJoinTest, ANodeThatHasNothingFetchesFromTheNearestHolder) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("n3");
  c.AddReplica("r3", {"n3"});
  // What an engine came with is no version: it waits for one, paused.
  EXPECT_EQ(c.Replica("r3").state(), v1::Replica::STATE_PAUSING);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  const v1::PrepareUpdate* fetch = nullptr;
  for (const auto& command : c.commands) {
    if (command.first == "n3" && command.second.has_prepare_update()) {
      fetch = &command.second.prepare_update();
    }
  }
  ASSERT_NE(fetch, nullptr);
  EXPECT_TRUE(fetch->fetch());
  EXPECT_EQ(fetch->layout_id(), c.Version().layout_id());
  ASSERT_EQ(fetch->flows_size(), 1);
  EXPECT_EQ(fetch->flows(0).members(1).node(), "n3");
  EXPECT_GT(fetch->flows(0).buckets_size(), 0);
  EXPECT_LT(Last(c, "send:n3:update_manifest"), Last(c, "send:n3:apply"));
  EXPECT_TRUE(c.pinned.empty());  // and nothing is kept for longer than needed
  EXPECT_EQ(c.Replica("r3").version(), 1);
  // A second replica on that node finds it there.
  const int before = c.CountCommands(Command::kPrepareUpdate);
  c.AddReplica("r4", {"n3"});
  c.Run();
  EXPECT_EQ(c.CountCommands(Command::kPrepareUpdate), before);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(LateJoinTest, OneThatServesAnOlderVersionGoesOnWhileTheBytesCome) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().update_id();
  c.LoseWorker("r2", 0);
  c.PublishAll(2);
  c.Run();
  c.RestartNode("n2");
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_move_update();
  };
  c.Run();
  EXPECT_FALSE(c.engines["r2"].paused);
  EXPECT_EQ(c.Replica("r2").version(), 1);
  EXPECT_TRUE(c.Replica("r2").behind());
  c.intercept = nullptr;
  c.Pass(absl::Seconds(60));
  EXPECT_NE(c.Version().update_id(), first);
  ExpectAllServe(c, c.Version().update_id());
}

// Found by tests/chaos/simulation: while one replica was late and installed the
// update from a holder, a newer one was committed; the applies of the older one
// then named no commit, its workers refused them, and it was fenced.
TEST(LateJoinTest, OneUnderWayWhenANewerVersionIsCommittedNamesItsCommit) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().update_id();
  // r2 comes back without weights, and its applies are slow.
  std::vector<Command> held;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node != "n2" || !command.has_apply_worker()) return false;
    held.push_back(command);
    return true;
  };
  c.engines["r2"].workers.assign(2, v1::InstalledState());
  for (v1::InstalledState& worker : c.engines["r2"].workers) {
    worker.set_state(v1::InstalledState::STATE_NOTHING);
  }
  c.Register("r2");
  c.Run();
  ASSERT_EQ(held.size(), 2u);
  EXPECT_EQ(held[0].apply_worker().update_id(), first);
  // They do not answer in time, and the next try comes after the next commit.
  v1::UpdateOptions evict;
  evict.mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
      v1::LockstepPolicy::ON_STRAGGLER_EVICT);
  for (int rank = 0; rank < 2; ++rank) c.Publish(rank, 0, "", evict);
  c.Run();
  EXPECT_NE(c.Version().update_id(), first);
  c.Pass(absl::Seconds(130));
  ASSERT_GT(held.size(), 2u);
  for (const Command& command : held) {
    EXPECT_GT(command.apply_worker().commit_term(), 0)
        << command.ShortDebugString();
  }
}

// Found by tests/chaos/simulation: an engine stood still with an older update
// (of a rollback that had been released) and was to get the newest; when a
// newer one was committed meanwhile, the first install ended before the second
// held it, and in between it was resumed with what it had.
TEST(LateJoinTest, OneThatStandsStillIsNotResumedBetweenTwoInstalls) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::vector<v1::InstalledState> older = c.engines["r2"].workers;
  c.PublishAll(2);
  c.Run();
  c.LoseWorker("r2", 0);
  std::vector<std::pair<std::string, Command>> moves;
  std::vector<std::pair<std::string, Command>> pauses;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node == "n1" && command.has_move_update()) {
      moves.emplace_back(node, command);
      return true;
    }
    if (node == "n2" && command.has_pause_replica()) {
      pauses.emplace_back(node, command);
      return true;
    }
    return false;
  };
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(moves.size(), 1u);
  c.engines["r2"].workers = older;
  c.engines["r2"].paused = true;
  c.Register("r2");
  c.Run();
  ASSERT_EQ(pauses.size(), 1u);
  const auto resumes_with = [&](const std::string& update_id) {
    return std::count_if(
        c.commands.begin(), c.commands.end(), [&](const auto& sent) {
          return sent.first == "n2" && sent.second.has_resume_replica() &&
                 sent.second.resume_replica().resume().update_id() == update_id;
        });
  };
  const auto before = resumes_with(older[0].update_id());
  c.Deliver(moves[0].first, moves[0].second);
  c.Run();
  EXPECT_EQ(c.Version().version(), 3);
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  c.intercept = nullptr;
  for (const auto& pause : pauses) c.Deliver(pause.first, pause.second);
  c.Run();
  c.Pass(absl::Seconds(61));
  EXPECT_EQ(resumes_with(older[0].update_id()), before);
  ExpectAllServe(c, c.Version().update_id());
}

TEST(LateJoinTest, AHolderThatFailsIsReplacedByAnother) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("n3");
  std::string failed;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (!command.has_prepare_update() || node == "n3" ||
        (!failed.empty() && failed != node)) {
      return false;
    }
    failed = node;
    v1::NodeReport report;
    auto* prepared = report.mutable_update_prepared();
    prepared->set_model(kModel);
    prepared->set_update_id(command.prepare_update().update_id());
    *prepared->mutable_epoch() = command.prepare_update().epoch();
    *prepared->mutable_failure() = MakeFailure(14, "EDGE_FAILED", "no way");
    c.Report(node, report);
    return true;
  };
  c.AddReplica("r3", {"n3"});
  c.Run();
  EXPECT_EQ(c.Replica("r3").last_failure().reason(), "EDGE_FAILED");
  EXPECT_THAT(c.Replica("r3").last_failure().message(), HasSubstr(failed));
  // It was not kept waiting for ever.
  EXPECT_FALSE(c.engines["r3"].paused);
  c.Pass(absl::Seconds(6));
  ExpectAllServe(c, c.Version().update_id());
}

TEST(LateJoinTest, AFetchThatStandsStillHasADeadline) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("n3");
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n3" && command.has_move_update();
  };
  c.AddReplica("r3", {"n3"});
  c.Run();
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.Replica("r3").last_failure().reason(), "PROGRESS_TIMEOUT");
  EXPECT_THAT(c.Replica("r3").last_failure().message(), HasSubstr("n3"));
  EXPECT_FALSE(c.engines["r3"].paused);
  c.intercept = nullptr;
  c.Pass(absl::Seconds(70));
  ExpectAllServe(c, c.Version().update_id());
}

TEST(LateJoinTest, AHolderThatIsLostMeanwhileIsReplaced) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("n3");
  std::string holder;
  c.intercept = [&](const std::string& node, const Command& command) {
    if (node == "n3" && command.has_prepare_update() && holder.empty()) {
      holder = command.prepare_update().flows(0).members(0).node();
    }
    return command.has_move_update() && node == holder;
  };
  c.AddReplica("r3", {"n3"});
  c.Run();
  c.intercept = nullptr;
  c.RestartNode(holder);
  c.Run();
  c.Pass(absl::Seconds(40));
  EXPECT_EQ(c.engines["r3"].workers[0].update_id(), c.Version().update_id());
  ExpectAllServe(c, c.Version().update_id());
}

// ---- LOST ----

TEST(LostTest, ACommittedUpdateThatNobodyHoldsIsLostAndTheNextSupersedesIt) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string lost = c.Version().update_id();
  for (const char* node : {"n0", "n1", "n2"}) c.RestartNode(node);
  c.Run();
  c.engines["r1"].workers[0].Clear();  // its machine was restarted as well
  c.LoseWorker("r1", 0);
  c.Register("r1");
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  c.Pass(absl::Seconds(31));  // holders might still come back
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_LOST);
  EXPECT_EQ(c.Version().failure().reason(), "NO_HOLDER");
  EXPECT_FALSE(c.engines["r1"].paused);
  EXPECT_EQ(c.engines["r2"].workers[0].update_id(), lost);
  EXPECT_FALSE(c.engines["r2"].paused);
  c.RestartCoordinator();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_LOST);
  ExpectNextPublishWorks(&c);
}

// ---- Nodes, versions, replicas ----

TEST(DrainTest, ADrainedNodeGetsNoUpdatesAndIsNoHolder) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().update_id();
  v1::DrainNodeRequest drain;
  drain.set_name("nodes/n2");
  const int64_t call = c.Ask(drain);
  EXPECT_TRUE(absl::get<v1::Node>(c.Answered(call)->response).draining());
  c.PublishAll(2);
  c.Run();
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  EXPECT_EQ(c.engines["r2"].workers[0].update_id(), first);
  EXPECT_FALSE(c.engines["r2"].paused);
  EXPECT_EQ(c.engines["r1"].workers[0].update_id(), c.Version().update_id());
  // It takes no new replicas.
  c.AddReplica("r5", {"n2"});
  EXPECT_EQ(c.Replica("r5").name(), "");
  c.engines.erase("r5");
  // Remembered, and undone.
  c.RestartCoordinator();
  c.Pass(absl::Seconds(31));
  EXPECT_EQ(c.engines["r2"].workers[0].update_id(), first);
  drain.set_undo(true);
  c.Ask(drain);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  ExpectNextPublishWorks(&c);
}

// What nobody could send while its holders were drained is looked for at once
// when one is back, and not when the last try's patience is over.
TEST(DrainTest, WhatIsTakenBackIsAHolderAtOnce) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  v1::DrainNodeRequest drain;
  for (const char* node : {"nodes/n0", "nodes/n1", "nodes/n2"}) {
    drain.set_name(node);
    c.Ask(drain);
  }
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Version().version(), 2);
  drain.set_undo(true);
  for (const char* node : {"nodes/n1", "nodes/n2"}) {
    drain.set_name(node);
    c.Ask(drain);
  }
  c.Run();
  c.Pass(absl::Seconds(2));
  EXPECT_TRUE(c.Replica("r1").behind());
  drain.set_name("nodes/n0");
  c.Ask(drain);
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

TEST(DeleteTest, VersionsAndReplicasThatNobodyNeeds) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.PublishAll(2);
  c.Run();
  const auto remove = [&](int version) {
    v1::DeleteVersionRequest request;
    request.set_name(VersionName(version));
    return c.Answered(c.Ask(request))->failure.reason();
  };
  EXPECT_EQ(remove(2), "VERSION_IN_USE");
  const std::string first = c.Version("1").update_id();
  EXPECT_EQ(remove(1), "");
  EXPECT_EQ(c.CountCommands(Command::kDropUpdate), 3);
  EXPECT_EQ(remove(1), "VERSION_UNKNOWN");
  v1::RollbackModelRequest rollback;
  rollback.set_version(VersionName(1));
  EXPECT_EQ(c.Answered(c.Ask(rollback))->failure.reason(), "VERSION_UNKNOWN");
  v1::DeleteReplicaRequest request;
  request.set_name(ReplicaName("r1"));
  EXPECT_EQ(c.Answered(c.Ask(request))->failure.reason(), "REPLICA_ALIVE");
  c.LoseWorker("r1", 0);
  v1::NodeReport left;
  left.mutable_replica_left()->set_model(kModel);
  left.mutable_replica_left()->set_replica("r1");
  left.mutable_replica_left()->set_incarnation(c.engines["r1"].incarnation);
  c.Report("n1", left);
  EXPECT_EQ(c.Answered(c.Ask(request))->failure.reason(), "");
  EXPECT_EQ(c.Replica("r1").name(), "");
  c.engines.erase("r1");
  ExpectNextPublishWorks(&c);
}

// A rank of it may wait to be told how its call ended (IN_PLACE).
TEST(DeleteTest, ANodeThatWasAwayLearnsHowADeletedUpdateEnded) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.Publish(0);
  c.Run();
  const std::string update = c.Version().update_id();
  c.Disconnect("n0");
  c.Pass(absl::Seconds(60));
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  v1::DeleteVersionRequest request;
  request.set_name(VersionName(2));
  ASSERT_EQ(c.Answered(c.Ask(request))->failure.reason(), "");
  c.commands.clear();
  c.Reconnect("n0");
  c.Run();
  int ends = 0;
  for (const auto& sent : c.commands) {
    const v1::EndUpdate& end = sent.second.end_update();
    if (end.update_id() != update) continue;
    EXPECT_FALSE(end.committed());
    EXPECT_NE(end.failure().reason(), "");
    ++ends;
  }
  EXPECT_EQ(ends, 1);
}

// ---- Verification ----

TEST(VerifyTest, ADamagedWorkerIsNamedWithItsTensor) {
  FakeCluster c;
  c.AddStandard();
  v1::VerifyReplicaRequest request;
  request.set_name(ReplicaName("r2"));
  EXPECT_EQ(c.Answered(c.Ask(request))->failure.reason(), "NOTHING_INSTALLED");
  c.PublishAll(2);
  c.Run();
  int64_t verify = c.Ask(request);
  c.Run();
  ASSERT_NE(c.Answered(verify), nullptr);
  auto response =
      absl::get<v1::VerifyReplicaResponse>(c.Answered(verify)->response);
  EXPECT_TRUE(response.equal()) << response.ShortDebugString();
  EXPECT_EQ(response.version(), 1);
  ASSERT_EQ(response.workers_size(), 2);
  EXPECT_EQ(response.workers(0).tensor_count(), 1);

  c.engines["r2"].damaged_worker = 1;
  verify = c.Ask(request);
  c.Run();
  response = absl::get<v1::VerifyReplicaResponse>(c.Answered(verify)->response);
  EXPECT_FALSE(response.equal());
  EXPECT_EQ(response.workers(0).different_tensors_size(), 0);
  ASSERT_EQ(response.workers(1).different_tensors_size(), 1);
  EXPECT_EQ(response.workers(1).different_tensors(0), "w");
  // What is known of the update outlives the coordinator.
  c.engines["r2"].damaged_worker = -1;
  c.RestartCoordinator();
  verify = c.Ask(request);
  c.Run();
  EXPECT_TRUE(absl::get<v1::VerifyReplicaResponse>(c.Answered(verify)->response)
                  .equal());
  c.intercept = [](const std::string&, const Command& command) {
    return command.has_digest_worker() &&
           command.digest_worker().worker_index() == 1;
  };
  request.mutable_timeout()->set_seconds(3);
  verify = c.Ask(request);
  c.Run();
  c.Pass(absl::Seconds(4));
  EXPECT_EQ(c.Answered(verify)->failure.reason(), "VERIFY_TIMEOUT");
  EXPECT_THAT(c.Answered(verify)->failure.message(), HasSubstr("worker 1"));
}

// A cluster of engines that was started again: what they lack comes from all
// who have it, and not from the first alone.
TEST(InstallTest, ManyWhoComeAtOnceAreSentItByMany) {
  FakeCluster c;
  c.AddNode("n0");
  c.AddRank(0, 1, "n0");
  for (int i = 1; i <= 4; ++i) {
    c.AddNode(absl::StrCat("n", i));
    c.AddReplica(absl::StrCat("r", i), {absl::StrCat("n", i)});
  }
  c.PublishAll(1);
  c.Run();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_ACTIVE);
  c.commands.clear();
  for (int i = 10; i < 34; ++i) {
    c.AddNode(absl::StrCat("n", i));
    c.AddReplica(absl::StrCat("r", i), {absl::StrCat("n", i)});
  }
  c.Run();
  std::map<std::string, std::set<std::string>> sent;  // by holder
  for (const auto& command : c.commands) {
    if (!command.second.prepare_update().fetch()) continue;
    for (const v1::Flow& flow : command.second.prepare_update().flows()) {
      sent[flow.members(0).node()].insert(flow.members(1).node());
    }
  }
  EXPECT_GE(sent.size(), 4u);
  for (const auto& holder : sent) {
    EXPECT_LE(holder.second.size(), 12u) << holder.first;
  }
  for (int i = 10; i < 34; ++i) {
    EXPECT_EQ(c.Replica(absl::StrCat("r", i)).state(),
              v1::Replica::STATE_SERVING);
  }
  EXPECT_EQ(c.violations, 0);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
