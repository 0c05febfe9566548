// on_isolation = KEEP_SERVING: a replica whose node is away for longer than
// max_staleness may serve what is old, and whoever looks at it is told.

#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Command = v1::NodeCommand;

constexpr char kStale[] = "STALE_REPLICA";

// Nothing else can be what is seen: a lost node names itself in other words.
std::string ReasonOf(const FakeCluster& c, const std::string& replica) {
  return c.Replica(replica).last_failure().reason();
}

TEST(StaleReplicaTest, IsFlaggedWithWhatItMayServeAndUntilItsNodeIsBack) {
  CoordinatorOptions options;
  options.max_staleness = absl::Seconds(60);
  FakeCluster c(options);
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(3));
  const absl::Time heard = c.now;
  c.Disconnect("n2");
  c.Pass(absl::Seconds(59));
  EXPECT_NE(ReasonOf(c, "r2"), kStale);
  c.PublishAll(2);
  c.Run();
  c.Pass(absl::Seconds(1));
  ASSERT_EQ(ReasonOf(c, "r2"), kStale);
  EXPECT_EQ(c.Replica("r2").state(), v1::Replica::STATE_LOST);
  EXPECT_THAT(
      c.Replica("r2").last_failure().message(),
      AllOf(HasSubstr("node n2 since "),
            HasSubstr(absl::FormatTime(heard, absl::UTCTimeZone())),
            HasSubstr("longer than 1m"), HasSubstr("models/m/replicas/r2"),
            HasSubstr("may still serve version 1 there"),
            HasSubstr("bring the node or its link back")));
  // Whose node is there is not flagged, however long nothing is published.
  c.Pass(absl::Minutes(3));
  EXPECT_EQ(ReasonOf(c, "r1"), "");
  EXPECT_EQ(ReasonOf(c, "r2"), kStale);
  c.Reconnect("n2");
  EXPECT_EQ(ReasonOf(c, "r2"), "");
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
}

// It was told to install version 2 when its node went: it may have finished.
TEST(StaleReplicaTest, NamesWhatItMayHaveGoneOverToByItself) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.intercept = [](const std::string& node, const Command& command) {
    return node == "n2" && command.has_apply_worker();
  };
  c.PublishAll(2);
  c.Run();
  ASSERT_EQ(c.Version().state(), v1::Version::STATE_APPLYING);
  c.Disconnect("n2");
  c.Pass(absl::Minutes(10), absl::Seconds(5));
  ASSERT_EQ(ReasonOf(c, "r2"), kStale);
  EXPECT_THAT(c.Replica("r2").last_failure().message(),
              HasSubstr("may still serve version 1 or version 2 there"));
}

// Its engine ended while the node was away, or another took its name: nobody
// serves there.
TEST(StaleReplicaTest, OneThatHasEndedIsNoneAnyMore) {
  CoordinatorOptions options;
  options.max_staleness = absl::Seconds(20);
  FakeCluster c(options);
  c.AddStandard();
  c.AddReplica("r3", {"n1", "n2"});
  c.Run();
  c.PublishAll(2);
  c.Run();
  c.Disconnect("n2");
  c.Pass(absl::Seconds(21));
  ASSERT_EQ(ReasonOf(c, "r2"), kStale);
  ASSERT_EQ(ReasonOf(c, "r3"), kStale);  // half of it was there
  c.engines.erase("r2");
  c.Reconnect("n2");
  c.Run();
  EXPECT_EQ(ReasonOf(c, "r2"), "");
  EXPECT_EQ(ReasonOf(c, "r3"), "");
  c.Pass(absl::Seconds(60));
  EXPECT_NE(ReasonOf(c, "r2"), kStale);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
