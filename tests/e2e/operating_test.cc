// What an operator does to a cluster, by weightsyncctl, with real daemons and
// real clients: pause and resume, roll back and release, verify, drain, delete,
// adopt. And every way of updating it through a real coordinator: STREAM,
// IN_PLACE, ROLLING, LATEST, no pause at all, a late join by fetching.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cc/rpc.h"
#include "nlohmann/json.hpp"
#include "proto/status.h"
#include "tests/e2e/cluster.h"

namespace weightsync {
namespace e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class OperatingTest : public ::testing::Test {
 protected:
  // a coordinates and has the trainers; b has a replica of two workers, c one.
  void StartAll(const std::vector<std::string>& flags = {}) {
    for (const char* node : {"a", "b", "c"}) {
      ASSERT_TRUE(cluster_.StartNode(node, flags));
    }
    StartReplicas();
    trainer_ = std::make_unique<TestTrainer>(&cluster_, "a", 2);
  }
  void StartReplicas(bool swap = false) {
    b_ = std::make_unique<TestReplica>(&cluster_, "b", "rb", 2, swap);
    c_ = std::make_unique<TestReplica>(&cluster_, "c", "rc", 1, swap);
    ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_SERVING));
    ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  }

  void TearDown() override {
    for (const auto* replica : {&b_, &c_}) {
      if (*replica == nullptr) continue;
      EXPECT_FALSE((*replica)->SawMix());
      EXPECT_FALSE((*replica)->SawWriteWhileServing());
    }
  }

  v1::Version Publish(char value) {
    const auto version = trainer_->Publish(value);
    EXPECT_TRUE(version.ok()) << version.status();
    if (!version.ok()) return v1::Version();
    EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
    return *version;
  }
  // On everybody.
  v1::Version Succeed(char value) {
    const v1::Version version = Publish(value);
    EXPECT_TRUE(b_->WaitServes(value));
    EXPECT_TRUE(c_->WaitServes(value));
    return version;
  }

  // Runs weightsyncctl against node `at`.
  int Ctl(std::vector<std::string> arguments, const std::string& at = "a") {
    arguments.insert(arguments.begin(), "client/ctl/weightsyncctl");
    arguments.push_back("--address=" + cluster_.address(at));
    arguments.push_back("--timeout=40s");
    const std::string name = absl::StrCat("ctl", ++runs_);
    const auto process = cluster_.Start(name, arguments);
    const auto code = process->Wait(kPatience);
    std::ifstream log(cluster_.directory().path() + "/" + name + ".log");
    printed_.assign(std::istreambuf_iterator<char>(log), {});
    return code.value_or(-1);
  }
  nlohmann::json Printed() {
    auto json = nlohmann::json::parse(printed_, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << printed_;
    return json.is_discarded() ? nlohmann::json::object() : json;
  }
  std::vector<std::string> Holders(const std::string& replica) {
    const auto got = cluster_.GetReplica(replica);
    EXPECT_TRUE(got.ok()) << got.status();
    if (!got.ok()) return {};
    return {got->pause_holders().begin(), got->pause_holders().end()};
  }

  Cluster cluster_;
  std::unique_ptr<TestReplica> b_;
  std::unique_ptr<TestReplica> c_;
  std::unique_ptr<TestTrainer> trainer_;
  std::string printed_;
  int runs_ = 0;
};

TEST_F(OperatingTest, AnOperatorsPauseOutlastsUpdatesAndTheCoordinator) {
  StartAll();
  Succeed(1);
  ASSERT_EQ(Ctl({"pause", "test/rb", "--mode", "keep"}), 0) << printed_;
  EXPECT_THAT(printed_, HasSubstr("operator"));
  EXPECT_FALSE(b_->serving());
  EXPECT_EQ(b_->last_pause_mode(), v1::PAUSE_MODE_KEEP);
  // It takes part in the update, and stays paused.
  const int resumes = b_->resumes();
  Publish(2);
  EXPECT_TRUE(c_->WaitServes(2));
  EXPECT_TRUE(b_->WaitHolds(2));
  EXPECT_FALSE(b_->serving());
  EXPECT_EQ(b_->resumes(), resumes);
  EXPECT_THAT(Holders("rb"), ::testing::ElementsAre("operator"));
  // The hold is in the journal.
  cluster_.KillNode("a");
  ASSERT_TRUE(cluster_.RestartNode("a"));
  ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_PAUSED));
  EXPECT_THAT(Holders("rb"), ::testing::ElementsAre("operator"));
  EXPECT_FALSE(b_->serving());
  EXPECT_EQ(b_->resumes(), resumes);
  // Any daemon takes the word, as soon as it has the coordinator again.
  ASSERT_TRUE(WaitUntil([&] {
    return Ctl({"resume", "test/rb", "--json"}, "c") == 0;
  })) << printed_;
  EXPECT_TRUE(b_->WaitServes(2));
  EXPECT_EQ(Ctl({"resume", "test/rb"}), 0) << "once more changes nothing";
  EXPECT_EQ(b_->resumes(), resumes + 1);
  EXPECT_EQ(Ctl({"pause", "test/nobody"}), 4);
  EXPECT_THAT(printed_, HasSubstr("REPLICA_UNKNOWN"));
  Succeed(3);
}

TEST_F(OperatingTest, ARollbackHoldsUntilItIsReleased) {
  StartAll({"--keep_updates=3"});
  Succeed(1);
  Succeed(2);
  ASSERT_EQ(Ctl({"rollback", "test/1"}), 0) << printed_;
  EXPECT_TRUE(b_->WaitServes(1, absl::ZeroDuration()));
  EXPECT_TRUE(c_->WaitServes(1, absl::ZeroDuration()));
  // Newer ones are kept and not applied; a replica that comes gets the old one.
  const auto newer = trainer_->PublishOnly(3);
  ASSERT_TRUE(newer.ok()) << newer.status();
  ASSERT_TRUE(WaitUntil([&] {
    const auto version = cluster_.GetVersion("3");
    return version.ok() && version->has_verify_time();
  }));
  c_ = nullptr;
  c_ = std::make_unique<TestReplica>(&cluster_, "c", "rc");
  EXPECT_TRUE(c_->WaitServes(1));
  EXPECT_TRUE(b_->WaitServes(1, absl::ZeroDuration()));
  ASSERT_EQ(Ctl({"models", "test", "--json"}), 0);
  EXPECT_EQ(Printed()["heldVersion"], "models/test/versions/1") << printed_;
  ASSERT_EQ(Ctl({"release", "test"}), 0) << printed_;
  EXPECT_TRUE(b_->WaitServes(3));
  EXPECT_TRUE(c_->WaitServes(3));
  const auto version = trainer_->Wait(*newer);
  EXPECT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(Ctl({"rollback", "test/17"}), 4) << printed_;
  Succeed(4);
}

TEST_F(OperatingTest, VerifyFindsTheBitThatDiffers) {
  StartAll();
  EXPECT_EQ(Ctl({"verify", "test/rb"}), 1);
  EXPECT_THAT(printed_, HasSubstr("NOTHING_INSTALLED"));
  Succeed(1);
  ASSERT_EQ(Ctl({"verify", "test/rb", "--json"}), 0) << printed_;
  EXPECT_TRUE(Printed().value("equal", false));
  EXPECT_EQ(Printed()["workers"].size(), 2u);
  b_->Damage();
  EXPECT_EQ(Ctl({"verify", "test/rb", "--json"}), 1) << printed_;
  EXPECT_FALSE(Printed().value("equal", false)) << printed_;
  int different = 0;
  const nlohmann::json report = Printed();
  for (const auto& worker : report["workers"]) {
    if (!worker.contains("differentTensors")) continue;
    for (const auto& name : worker["differentTensors"]) {
      EXPECT_EQ(name, "embed.weight");
      ++different;
    }
  }
  // A parameter's digest is of the whole: whoever holds a part of it is named.
  EXPECT_EQ(different, 2) << printed_;
  EXPECT_EQ(Ctl({"verify", "test/rc"}), 0) << printed_;
  Succeed(2);
  EXPECT_EQ(Ctl({"verify", "test/rb"}), 0)
      << "mended by the next: " << printed_;
}

TEST_F(OperatingTest, ADrainedNodeIsLeftOutUntilItIsBack) {
  StartAll();
  Succeed(1);
  ASSERT_EQ(Ctl({"drain", "c"}), 0) << printed_;
  const v1::Version two = Publish(2);
  EXPECT_TRUE(b_->WaitServes(2));
  EXPECT_TRUE(c_->WaitServes(1, absl::ZeroDuration())) << "it serves on";
  for (const v1::NodeProgress& node : two.nodes()) {
    EXPECT_THAT(node.node(), Not(HasSubstr("nodes/c")));
  }
  // It takes no new replicas.
  TestReplica refused(&cluster_, "c", "rd");
  ASSERT_TRUE(WaitUntil([&] {
    return ErrorReason(refused.replica()->status()) == "NODE_DRAINING" ||
           ErrorReason(refused.worker(0)->status()) == "NODE_DRAINING";
  })) << refused.replica()->status()
      << refused.worker(0)->status();
  ASSERT_EQ(Ctl({"drain", "c", "--undo"}), 0) << printed_;
  EXPECT_TRUE(c_->WaitServes(2)) << "it is given what it missed";
  Succeed(3);
  EXPECT_EQ(Ctl({"drain", "nobody"}), 4) << printed_;
}

TEST_F(OperatingTest, WhatNobodyServesCanBeForgotten) {
  StartAll({"--keep_updates=3"});
  Succeed(1);
  const v1::Version one = *cluster_.GetVersion("1");
  Succeed(2);
  EXPECT_EQ(Ctl({"delete", "test/2"}), 1);
  EXPECT_THAT(printed_, HasSubstr("VERSION_IN_USE"));
  const auto holds = [&](const std::string& update) {
    int nodes = 0;
    for (const char* name : {"a", "b", "c"}) {
      const auto node = cluster_.GetNode(name);
      if (!node.ok()) continue;
      for (const std::string& id : node->update_ids()) nodes += id == update;
    }
    return nodes;
  };
  EXPECT_GT(holds(one.update_id()), 0);
  ASSERT_EQ(Ctl({"delete", "test/1"}), 0) << printed_;
  EXPECT_TRUE(WaitUntil([&] { return holds(one.update_id()) == 0; }));
  EXPECT_EQ(cluster_.GetVersion("1").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Ctl({"delete", "test/rc"}), 1);
  EXPECT_THAT(printed_, HasSubstr("REPLICA_ALIVE"));
  c_ = nullptr;
  ASSERT_TRUE(WaitUntil([&] {
    const auto replica = cluster_.GetReplica("rc");
    return replica.ok() && replica->state() == v1::Replica::STATE_LOST;
  }));
  ASSERT_EQ(Ctl({"delete", "test/rc"}), 0) << printed_;
  EXPECT_EQ(cluster_.GetReplica("rc").status().code(),
            absl::StatusCode::kNotFound);
  Publish(3);
  EXPECT_TRUE(b_->WaitServes(3));
}

TEST_F(OperatingTest, ALostJournalIsShownAndAdopted) {
  StartAll();
  Succeed(1);
  Succeed(2);
  ASSERT_EQ(Ctl({"adopt"}), 1);
  EXPECT_THAT(printed_, HasSubstr("NOT_LOST"));
  cluster_.KillNode("a");
  std::filesystem::remove_all(cluster_.directory().path() + "/a.state");
  ASSERT_TRUE(cluster_.RestartNode("a"));
  ASSERT_TRUE(WaitUntil([&] { return Ctl({"status"}) == 1; })) << printed_;
  EXPECT_THAT(printed_, HasSubstr("JOURNAL_LOST"));
  // Nothing is accepted, and everybody serves on.
  EXPECT_TRUE(b_->WaitServes(2, absl::ZeroDuration()));
  EXPECT_TRUE(c_->WaitServes(2, absl::ZeroDuration()));
  ASSERT_TRUE(WaitUntil([&] { return Ctl({"adopt"}) == 0; })) << printed_;
  ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_SERVING));
  ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  const v1::Version next = Succeed(3);
  EXPECT_GT(next.version(), 2) << "the floor is the nodes' word";
}

TEST_F(OperatingTest, EveryWayOfMovingEndsWithTheSameBytes) {
  StartAll();
  char value = 0;
  for (const v1::UpdateMode update :
       {v1::UPDATE_MODE_STAGE, v1::UPDATE_MODE_STREAM}) {
    for (const v1::PublishMode publish :
         {v1::PUBLISH_MODE_SNAPSHOT, v1::PUBLISH_MODE_IN_PLACE}) {
      SCOPED_TRACE(absl::StrCat(v1::UpdateMode_Name(update), " ",
                                v1::PublishMode_Name(publish)));
      v1::UpdateOptions options;
      options.set_update_mode(update);
      options.set_publish_mode(publish);
      options.set_allow_no_recovery(true);
      options.set_verify_source(true);
      trainer_->SetOptions(options);
      const v1::Version version = Succeed(++value);
      EXPECT_EQ(version.options().update_mode(), update);
      EXPECT_EQ(Ctl({"verify", "test/rb"}), 0) << printed_;
      EXPECT_EQ(Ctl({"verify", "test/rc"}), 0) << printed_;
    }
  }
}

TEST_F(OperatingTest, AStreamWithoutAWholeCopyElsewhereIsRefused) {
  StartAll();
  v1::UpdateOptions options;
  options.set_update_mode(v1::UPDATE_MODE_STREAM);
  options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
  trainer_->SetOptions(options);
  const auto refused = trainer_->Publish(1);
  EXPECT_EQ(ErrorReason(refused.status()), "NO_RECOVERY_SOURCE")
      << refused.status();
  trainer_->SetOptions(v1::UpdateOptions());
  Succeed(2);
}

TEST_F(OperatingTest, RollingTakesOneAfterTheOther) {
  StartAll();
  Succeed(1);
  v1::UpdateOptions options;
  options.mutable_commit_policy()->mutable_rolling()->set_max_unavailable(1);
  trainer_->SetOptions(options);
  const v1::Version version = Succeed(2);
  ASSERT_EQ(version.replicas_size(), 2);
  const auto time = [](const google::protobuf::Timestamp& t) {
    return t.seconds() * 1000000000 + t.nanos();
  };
  int first = 0;
  if (time(version.replicas(1).pause_request_time()) <
      time(version.replicas(0).pause_request_time())) {
    first = 1;
  }
  EXPECT_LE(time(version.replicas(first).resumed_time()),
            time(version.replicas(1 - first).pause_request_time()))
      << version.ShortDebugString();
}

// All pause, the commit, all apply, all resume.
TEST_F(OperatingTest, TheOrderOfALockstepUpdateIsInItsTimes) {
  StartAll();
  Succeed(1);
  const v1::Version version = Succeed(2);
  ASSERT_EQ(version.replicas_size(), 2);
  const auto time = [](const google::protobuf::Timestamp& t) {
    return t.seconds() * 1000000000 + t.nanos();
  };
  for (const v1::ReplicaTimes& one : version.replicas()) {
    EXPECT_LE(time(version.verify_time()), time(one.pause_request_time()));
    EXPECT_LE(time(one.pause_request_time()), time(one.paused_time()));
    EXPECT_LE(time(one.paused_time()), time(version.commit_time()));
    EXPECT_LE(time(version.commit_time()), time(one.applied_time()));
    EXPECT_EQ(one.pause_detail(), "stopped");
    for (const v1::ReplicaTimes& other : version.replicas()) {
      EXPECT_LE(time(one.applied_time()), time(other.resumed_time()))
          << "nobody resumes before all have applied";
    }
  }
}

TEST_F(OperatingTest, WithoutAPauseEnginesFlipTogether) {
  for (const char* node : {"a", "b", "c"}) {
    ASSERT_TRUE(cluster_.StartNode(node));
  }
  StartReplicas(/*swap=*/true);
  trainer_ = std::make_unique<TestTrainer>(&cluster_, "a", 2);
  v1::UpdateOptions options;
  options.set_pause_mode(v1::PAUSE_MODE_NONE);
  trainer_->SetOptions(options);
  for (char value = 1; value <= 4; ++value) Succeed(value);
  EXPECT_EQ(b_->pauses(), 0);
  EXPECT_EQ(c_->pauses(), 0);
  // An engine that does not swap is named before anything moves.
  TestReplica plain(&cluster_, "c", "plain");
  ASSERT_TRUE(WaitUntil([&] {
    const auto replica = cluster_.GetReplica("plain");
    return replica.ok() && replica->state() != v1::Replica::STATE_INCOMPLETE;
  }));
  const auto refused = trainer_->Publish(5);
  EXPECT_EQ(ErrorReason(refused.status()), "ATOMIC_SWAP_REQUIRED")
      << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("plain"));
}

TEST_F(OperatingTest, TheLatestOvertakesWhatIsNotCommitted) {
  StartAll({"--pause_timeout=30s"});
  Succeed(1);
  v1::UpdateOptions options;
  options.set_delivery_policy(v1::DELIVERY_POLICY_LATEST);
  trainer_->SetOptions(options);
  // It pauses for so long that the next one is complete before it commits.
  c_->SetPause(absl::OkStatus(), absl::Seconds(4));
  const auto two = trainer_->PublishOnly(2);
  ASSERT_TRUE(two.ok()) << two.status();
  ASSERT_TRUE(WaitUntil([&] {
    const auto version = cluster_.GetVersion("2");
    return version.ok() && version->state() == v1::Version::STATE_PAUSING;
  }));
  const auto three = trainer_->PublishOnly(3);
  ASSERT_TRUE(three.ok()) << three.status();
  const auto ended = trainer_->Wait(*three);
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_TRUE(b_->WaitServes(3));
  EXPECT_TRUE(c_->WaitServes(3));
  const auto overtaken = cluster_.GetVersion("2");
  ASSERT_TRUE(overtaken.ok());
  EXPECT_EQ(overtaken->state(), v1::Version::STATE_SUPERSEDED);
  EXPECT_EQ(ErrorReason(trainer_->Wait(*two).status()), "SUPERSEDED");
}

// A node that was not there fetches the update from one that holds it; the
// trainer is gone by then.
TEST_F(OperatingTest, ANodeThatJoinsLateFetchesWhatIsServed) {
  StartAll();
  Succeed(1);
  trainer_ = nullptr;
  ASSERT_TRUE(cluster_.StartNode("d"));
  TestReplica late(&cluster_, "d", "late", 2);
  EXPECT_TRUE(late.WaitServes(1));
  EXPECT_FALSE(late.SawMix());
  ASSERT_EQ(Ctl({"verify", "test/late"}), 0) << printed_;
  const auto replica = cluster_.GetReplica("late");
  ASSERT_TRUE(replica.ok());
  EXPECT_EQ(replica->version(), 1);
  EXPECT_FALSE(replica->behind());
}

// The same wherever a worker of one replica may be.
TEST_F(OperatingTest, AReplicaWithWorkersOnTwoNodesSwitchesAsOne) {
  for (const char* node : {"a", "b", "c"}) {
    ASSERT_TRUE(cluster_.StartNode(node));
  }
  TestReplica wide(&cluster_, std::vector<std::string>{"b", "c"}, "wide");
  trainer_ = std::make_unique<TestTrainer>(&cluster_, "a", 2);
  ASSERT_TRUE(cluster_.WaitReplicaState("wide", v1::Replica::STATE_SERVING));
  for (char value = 1; value <= 3; ++value) {
    Publish(value);
    EXPECT_TRUE(wide.WaitServes(value));
  }
  ASSERT_EQ(Ctl({"verify", "test/wide"}), 0) << printed_;
  EXPECT_FALSE(wide.SawMix());
  EXPECT_FALSE(wide.SawWriteWhileServing());
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
