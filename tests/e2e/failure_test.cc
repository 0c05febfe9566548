// Things die. Whatever does, no replica ever serves a mix, the rest goes on,
// and the next update works.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "client/cc/rpc.h"
#include "tests/e2e/cluster.h"

namespace weightsync {
namespace e2e {
namespace {

class FailureTest : public ::testing::Test {
 protected:
  // a coordinates and has the trainers, b and c have a replica each.
  void SetUp() override {
    for (const char* node : {"a", "b", "c"}) {
      ASSERT_TRUE(cluster_.StartNode(node));
    }
    b_ = std::make_unique<TestReplica>(&cluster_, "b", "rb", 2);
    c_ = std::make_unique<TestReplica>(&cluster_, "c", "rc");
    trainer_ = nullptr;  // its ranks go before their successors come
    trainer_ = std::make_unique<TestTrainer>(&cluster_, "a", 2);
    ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_SERVING));
    ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
    Succeed(1);
  }

  void TearDown() override {
    if (b_ != nullptr) {
      EXPECT_FALSE(b_->SawMix());
    }
    if (c_ != nullptr) {
      EXPECT_FALSE(c_->SawMix());
    }
  }

  // An update that all replicas which are there get.
  void Succeed(char value, bool on_c = true) {
    const auto version = trainer_->Publish(value);
    ASSERT_TRUE(version.ok()) << version.status();
    EXPECT_EQ(version->state(), v1::Version::STATE_ACTIVE);
    EXPECT_TRUE(b_->WaitServes(value));
    if (on_c) {
      EXPECT_TRUE(c_->WaitServes(value));
    }
  }

  // On c, in a process of its own.
  std::unique_ptr<Process> StartEngine(const std::string& replica,
                                       int workers) {
    return cluster_.Start(
        replica, {"tests/e2e/test_engine", cluster_.address("c"), replica,
                  std::to_string(workers)});
  }

  // Until the replica serves the newest version.
  bool WaitHas(const std::string& name) {
    return WaitUntil(
        [&] {
          const auto version = cluster_.GetVersion("latest");
          const auto replica = cluster_.GetReplica(name);
          return version.ok() && replica.ok() &&
                 replica->state() == v1::Replica::STATE_SERVING &&
                 replica->update_id() == version->update_id();
        },
        kPatience);
  }

  Cluster cluster_;
  std::unique_ptr<TestReplica> b_;
  std::unique_ptr<TestReplica> c_;
  std::unique_ptr<TestTrainer> trainer_;
};

TEST_F(FailureTest, AReceivingDaemonIsKilledAndComesBack) {
  cluster_.KillNode("c");
  ASSERT_TRUE(cluster_.WaitNodeState("c", v1::Node::STATE_LOST));
  Succeed(2, /*on_c=*/false);
  EXPECT_TRUE(c_->WaitServes(1, absl::ZeroDuration()))
      << "it keeps what it has";
  ASSERT_TRUE(cluster_.RestartNode("c"));
  // The clients come back by themselves.
  ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  Succeed(3);
}

TEST_F(FailureTest, AReceivingDaemonStandsStill) {
  cluster_.process("c")->Signal(SIGSTOP);
  // Before anybody has noticed.
  Succeed(2, /*on_c=*/false);
  cluster_.process("c")->Signal(SIGCONT);
  ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  Succeed(3);
}

TEST_F(FailureTest, TheCoordinatorIsKilledAndComesBack) {
  cluster_.KillNode("a");
  ASSERT_TRUE(cluster_.RestartNode("a"));
  ASSERT_TRUE(cluster_.WaitNodeState("b", v1::Node::STATE_CONNECTED));
  ASSERT_TRUE(cluster_.WaitNodeState("c", v1::Node::STATE_CONNECTED));
  ASSERT_TRUE(cluster_.WaitReplicaState("rb", v1::Replica::STATE_SERVING));
  ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  // The trainers come back by themselves, with their memory.
  Succeed(3);
  const auto version = cluster_.GetVersion("latest");
  ASSERT_TRUE(version.ok());
  EXPECT_GE(version->version(), 2) << "the floor was kept";
}

TEST_F(FailureTest, AnEngineProcessIsKilledBetweenUpdates) {
  std::unique_ptr<Process> process = StartEngine("victim", /*workers=*/2);
  ASSERT_TRUE(cluster_.WaitReplicaState("victim", v1::Replica::STATE_SERVING));
  process->Signal(SIGKILL);
  ASSERT_EQ(process->Wait(kPatience), 128 + SIGKILL);
  ASSERT_TRUE(cluster_.WaitReplicaState("victim", v1::Replica::STATE_LOST));
  Succeed(2);
  // Its successor is given that, and takes part in the next one.
  process = StartEngine("victim", /*workers=*/2);
  ASSERT_TRUE(cluster_.WaitReplicaState("victim", v1::Replica::STATE_SERVING));
  EXPECT_TRUE(WaitHas("victim"));
  Succeed(3);
  EXPECT_TRUE(WaitHas("victim"));
}

TEST_F(FailureTest, AReplicaClosesBetweenUpdates) {
  c_ = nullptr;
  ASSERT_TRUE(WaitUntil([&] {
    const auto replica = cluster_.GetReplica("rc");
    return !replica.ok() || replica->state() == v1::Replica::STATE_LOST;
  }));
  Succeed(2, /*on_c=*/false);
  c_ = std::make_unique<TestReplica>(&cluster_, "c", "rc");
  ASSERT_TRUE(cluster_.WaitReplicaState("rc", v1::Replica::STATE_SERVING));
  Succeed(3);
}

TEST_F(FailureTest, ARankLeavesBeforeItArrives) {
  trainer_->CloseRank(1);
  const auto published = trainer_->PublishRank(0, 2, kPatience);
  // Refused, or opened and then given up; either way it is named.
  EXPECT_FALSE(published.ok() && trainer_->Wait(*published).ok());
  EXPECT_TRUE(b_->WaitServes(1));
  trainer_ = nullptr;  // its ranks go before their successors come
  trainer_ = std::make_unique<TestTrainer>(&cluster_, "a", 2);
  Succeed(3);
}

TEST_F(FailureTest, ARankThatNeverArrivesEndsTheUpdateByName) {
  const auto published = trainer_->PublishRank(0, 2, kPatience);
  ASSERT_TRUE(published.ok()) << published.status();
  const auto version = trainer_->Wait(*published);
  EXPECT_EQ(ErrorReason(version.status()), "GATHER_TIMEOUT");
  EXPECT_NE(version.status().message().find("rank 1"), std::string::npos)
      << version.status();
  EXPECT_TRUE(b_->WaitServes(1));
  // Its call belongs to the update that has ended: it is told so, and does not
  // open another one alone.
  const auto late = trainer_->PublishRank(1, 2, kPatience);
  EXPECT_EQ(ErrorReason(late.status()), "GATHER_TIMEOUT") << late.status();
  Succeed(3);
}

TEST_F(FailureTest, AnEngineThatCannotPauseAbortsAndNobodyIsLeftPaused) {
  c_->SetPause(ErrorStatus(absl::StatusCode::kInternal, "ENGINE_STUCK", "no"),
               absl::ZeroDuration());
  const auto version = trainer_->Publish(2);
  EXPECT_FALSE(version.ok());
  EXPECT_NE(version.status().message().find("rc"), std::string::npos)
      << version.status();
  EXPECT_TRUE(b_->WaitServes(1));
  c_->SetPause(absl::OkStatus(), absl::ZeroDuration());
  Succeed(3);
}

TEST_F(FailureTest, AnEngineThatPausesTooLateIsResumed) {
  c_->SetPause(absl::OkStatus(), absl::Seconds(8));  // pause_timeout is 5 s
  const auto version = trainer_->Publish(2);
  EXPECT_FALSE(version.ok());
  EXPECT_TRUE(b_->WaitServes(1));
  c_->SetPause(absl::OkStatus(), absl::ZeroDuration());
  EXPECT_TRUE(c_->WaitServes(1)) << "left paused";
  Succeed(3);
}

TEST_F(FailureTest, AnEngineProcessIsKilledDuringUpdates) {
  // A third replica in a process of its own that dies in the middle of
  // something, at another moment each time.
  for (int i = 0; i < 5; ++i) {
    const std::string replica = "victim" + std::to_string(i);
    const std::unique_ptr<Process> process = StartEngine(replica, 1);
    ASSERT_TRUE(cluster_.WaitReplicaState(replica, v1::Replica::STATE_SERVING));
    const auto published = trainer_->PublishOnly(static_cast<char>(10 + i));
    ASSERT_TRUE(published.ok()) << published.status();
    absl::SleepFor(absl::Milliseconds(3 * i));
    process->Signal(SIGKILL);
    ASSERT_EQ(process->Wait(kPatience), 128 + SIGKILL);
    const auto version = trainer_->Wait(*published);
    // All of the new one or all of the old one.
    const char value =
        static_cast<char>(version.ok() ? 10 + i : (i == 0 ? 1 : 50 + i - 1));
    EXPECT_TRUE(b_->WaitServes(value)) << version.status();
    EXPECT_TRUE(c_->WaitServes(value)) << version.status();
    Succeed(static_cast<char>(50 + i));
  }
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
