// Replica.history: what a replica was taken away for, and when, so that a
// trainer can tell with which weights a token was made.

#include <string>
#include <vector>

#include "daemon/coordinator/convert.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::ElementsAre;
using Command = v1::NodeCommand;

class HistoryTest : public ::testing::Test {
 protected:
  // Every command takes a moment, so that the times differ.
  void SetUp() override {
    c_.AddStandard();
    c_.intercept = [this](const std::string&, const Command&) {
      c_.now += absl::Milliseconds(10);
      return false;
    };
  }
  std::string Publish() {
    c_.PublishAll(2);
    c_.Run();
    EXPECT_EQ(c_.Version().state(), v1::Version::STATE_ACTIVE);
    return c_.Version().update_id();
  }
  std::vector<std::string> UpdatesOf(const std::string& replica) {
    std::vector<std::string> updates;
    const v1::Replica shown = c_.Replica(replica);
    for (const v1::ReplicaTimes& times : shown.history()) {
      updates.push_back(times.update_id());
    }
    return updates;
  }
  // In order, within [from, now], and one absence after the other.
  void ExpectOrdered(const std::string& replica, absl::Time from) {
    absl::Time before = from;
    const v1::Replica shown = c_.Replica(replica);
    for (const v1::ReplicaTimes& times : shown.history()) {
      EXPECT_EQ(times.replica(), "models/m/replicas/" + replica);
      EXPECT_LE(before, FromProto(times.pause_request_time()));
      EXPECT_LT(FromProto(times.pause_request_time()),
                FromProto(times.paused_time()));
      EXPECT_LT(FromProto(times.paused_time()),
                FromProto(times.applied_time()));
      EXPECT_LT(FromProto(times.applied_time()),
                FromProto(times.resumed_time()));
      before = FromProto(times.resumed_time());
    }
    EXPECT_LE(before, c_.now);
  }

  FakeCluster c_;
};

TEST_F(HistoryTest, EachUpdateWithItsTimesNewestLast) {
  const absl::Time begin = c_.now;
  const std::string first = Publish();
  const absl::Time between = c_.now;
  const std::string second = Publish();
  for (const std::string replica : {"r1", "r2"}) {
    EXPECT_THAT(UpdatesOf(replica), ElementsAre(first, second));
    ExpectOrdered(replica, begin);
    const v1::Replica shown = c_.Replica(replica);
    EXPECT_EQ(shown.history(0).version(), 1);
    EXPECT_EQ(shown.history(1).version(), 2);
    // Which weights it generated with at that moment can be told.
    EXPECT_LE(FromProto(shown.history(0).resumed_time()), between);
    EXPECT_GE(FromProto(shown.history(1).pause_request_time()), between);
    EXPECT_EQ(shown.history(1).pause_detail(), "drained 3 requests");
  }
}

TEST_F(HistoryTest, AnEngineThatWasStartedAgainKeepsIt) {
  const absl::Time begin = c_.now;
  const std::string first = Publish();
  const std::string before = c_.Replica("r1").incarnation();
  c_.LoseWorker("r1", 0);
  v1::NodeReport left;
  left.mutable_replica_left()->set_model(kModel);
  left.mutable_replica_left()->set_replica("r1");
  left.mutable_replica_left()->set_incarnation(before);
  c_.Report("n1", left);
  c_.engines["r1"].incarnation = "another";
  c_.engines["r1"].workers[0].Clear();
  c_.Register("r1");
  c_.Run();
  ASSERT_EQ(c_.Replica("r1").incarnation(), "another");
  // It was given the update again, in an absence of its own.
  EXPECT_THAT(UpdatesOf("r1"), ElementsAre(first, first));
  const std::string second = Publish();
  EXPECT_THAT(UpdatesOf("r1"), ElementsAre(first, first, second));
  EXPECT_THAT(UpdatesOf("r2"), ElementsAre(first, second));
  const v1::Replica shown = c_.Replica("r1");
  EXPECT_LT(FromProto(shown.history(0).resumed_time()),
            FromProto(shown.history(1).applied_time()));
  EXPECT_LT(FromProto(shown.history(1).resumed_time()),
            FromProto(shown.history(2).pause_request_time()));
  ExpectOrdered("r2", begin);
}

TEST_F(HistoryTest, AnAbsenceInVainHasItsReason) {
  c_.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c_.PublishAll(2);
  c_.Run();
  c_.Pass(absl::Seconds(61));
  ASSERT_EQ(c_.Version().state(), v1::Version::STATE_ABORTED);
  const v1::Replica shown = c_.Replica("r1");
  ASSERT_EQ(shown.history_size(), 1);
  EXPECT_EQ(shown.history(0).update_id(), c_.Version().update_id());
  EXPECT_EQ(shown.history(0).failure().reason(), "PAUSE_TIMEOUT");
  EXPECT_FALSE(shown.history(0).has_applied_time());
  EXPECT_TRUE(shown.history(0).has_resumed_time());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
