// Waiting for ranks and for the update before: what ends it, and who is named.

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

TEST(QueueTest, ACallThatWaitsBehindAnUpdateIsToldWhoThatWaitsFor) {
  CoordinatorOptions options;
  options.publish_timeout = absl::Seconds(10);
  FakeCluster c(options);
  c.AddStandard();
  c.Publish(0);
  c.Run();
  // Rank 1 does not come; the next one cannot be opened before that.
  const int64_t next = c.Publish(0);
  c.Run();
  c.Pass(absl::Seconds(9));
  EXPECT_EQ(c.FindReply(next), nullptr);
  c.Pass(absl::Seconds(1));
  ASSERT_NE(c.FindReply(next), nullptr);
  EXPECT_EQ(c.FindReply(next)->failure().reason(), "QUEUE_TIMEOUT");
  EXPECT_EQ(c.FindReply(next)->failure().code(),
            static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(c.FindReply(next)->failure().message(),
              HasSubstr("within 10s: version 1 of models/m is GATHERING and "
                        "waits for rank 1; publish again"));
  // The one before it is not touched by that.
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_GATHERING);
  c.Publish(1);
  c.Run();
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_ACTIVE);
  ExpectAllServe(c, c.Version("1").update_id());
}

TEST(QueueTest, AnUpdateThatWaitsBehindAnotherNamesWhoThatWaitsFor) {
  CoordinatorOptions options;
  options.publish_timeout = absl::Seconds(10);
  FakeCluster c(options);
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Version("2").state(), v1::Version::STATE_GATHERING);
  c.Pass(absl::Seconds(10));
  EXPECT_EQ(c.Version("2").state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version("2").failure().reason(), "QUEUE_TIMEOUT");
  EXPECT_THAT(c.Version("2").failure().message(),
              HasSubstr("within 10s: version 1 of models/m is PAUSING and "
                        "waits for models/m/replicas/r2; publish again"));
  EXPECT_EQ(c.Version("1").state(), v1::Version::STATE_PAUSING);
}

TEST(QueueTest, ALoadThatWaitsIsToldWhoItWaitsFor) {
  CoordinatorOptions options;
  options.publish_timeout = absl::Seconds(10);
  FakeCluster c(options);
  c.AddStandard();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_pause_replica();
  };
  c.PublishAll(2);
  c.Run();
  v1::LoadVersionRequest load;
  load.set_name(kModel);
  load.set_path("runs/7");
  const int64_t call = c.Ask(load);
  c.Run();
  c.Pass(absl::Seconds(11));
  ASSERT_NE(c.Answered(call), nullptr);
  EXPECT_EQ(c.Answered(call)->failure.reason(), "QUEUE_TIMEOUT");
  EXPECT_THAT(c.Answered(call)->failure.message(),
              HasSubstr("version 1 of models/m is PAUSING and waits for "
                        "models/m/replicas/r2"));
}

TEST(QueueTest, ARankThatCameAndIsNotCopiedOutIsNamed) {
  FakeCluster c;
  c.AddStandard();
  c.Publish(0);
  c.Run();
  // Rank 1 arrives, and its node never says that the copy is made.
  c.intercept = [](const std::string&, const Command& command) {
    return command.reply().has_publish_opened();
  };
  c.Publish(1);
  c.Run();
  c.Pass(absl::Seconds(59));
  EXPECT_NE(c.Version().state(), v1::Version::STATE_ABORTED);
  c.Pass(absl::Seconds(1));
  EXPECT_EQ(c.Version().state(), v1::Version::STATE_ABORTED);
  EXPECT_EQ(c.Version().failure().reason(), "SNAPSHOT_TIMEOUT");
  EXPECT_THAT(c.Version().failure().message(),
              HasSubstr("the tensors of rank 1 were not copied out within 1m"));
  ExpectAllServe(c, "");
  ExpectNextPublishWorks(&c);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
