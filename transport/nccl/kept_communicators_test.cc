#include "transport/nccl/kept_communicators.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace weightsync {
namespace transport {
namespace nccl {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

Communicator Make(const std::string& peer, int rank, char id,
                  uint64_t process = 1) {
  Communicator made;
  made.peer = peer;
  made.rank = rank;
  made.peer_process = process;
  made.id.internal[100] = id;
  return made;
}

std::string Ids(const std::vector<Communicator>& communicators) {
  std::string ids;
  for (const Communicator& one : communicators) ids += one.id.internal[100];
  return ids;
}

TEST(KeptCommunicatorsTest, ThatOfThePeerAndDirectionThatWasUsedLast) {
  KeptCommunicators kept(8, absl::Hours(1));
  kept.Put(Make("c/b", 0, 'a'), kStart);
  kept.Put(Make("c/b", 0, 'b'), kStart);
  kept.Put(Make("c/b", 1, 'c'), kStart);
  kept.Put(Make("c/d", 0, 'd'), kStart);
  EXPECT_FALSE(kept.Take("d/b", 0).has_value());
  EXPECT_EQ(kept.Take("c/b", 0)->id.internal[100], 'b');
  EXPECT_EQ(kept.Take("c/b", 0)->id.internal[100], 'a');
  EXPECT_FALSE(kept.Take("c/b", 0).has_value());
  EXPECT_EQ(Ids(kept.TakeAll()), "cd");
  EXPECT_EQ(kept.size(), 0u);
}

TEST(KeptCommunicatorsTest, ByItsId) {
  KeptCommunicators kept(8, absl::Hours(1));
  kept.Put(Make("c/b", 1, 'a'), kStart);
  kept.Put(Make("c/b", 1, 'b'), kStart);
  const Communicator wanted = Make("", 0, 'a'), other = Make("", 0, 'x');
  EXPECT_FALSE(kept.Take("c/b", 1, &other.id).has_value());
  EXPECT_FALSE(kept.Take("c/b", 0, &wanted.id).has_value());
  EXPECT_FALSE(kept.Take("c/c", 1, &wanted.id).has_value());
  EXPECT_EQ(kept.Take("c/b", 1, &wanted.id)->id.internal[100], 'a');
}

TEST(KeptCommunicatorsTest, ThoseThatWereNotUsedForLongestGoForOthers) {
  KeptCommunicators kept(2, absl::Hours(1));
  EXPECT_EQ(Ids(kept.Put(Make("c/b", 0, 'a'), kStart)), "");
  EXPECT_EQ(Ids(kept.Put(Make("c/d", 0, 'b'), kStart)), "");
  // It is used.
  kept.Put(*kept.Take("c/b", 0), kStart + absl::Seconds(1));
  EXPECT_EQ(Ids(kept.Put(Make("c/e", 0, 'c'), kStart)), "b");
  KeptCommunicators none(0, absl::Hours(1));
  EXPECT_EQ(Ids(none.Put(Make("c/b", 0, 'a'), kStart)), "a");
}

TEST(KeptCommunicatorsTest, ThoseOfAProcessThatWasStartedAgainGo) {
  KeptCommunicators kept(8, absl::Hours(1));
  kept.Put(Make("c/b", 0, 'a', 1), kStart);
  kept.Put(Make("c/b", 0, 'b', 2), kStart);
  kept.Put(Make("c/b", 1, 'c', 1), kStart);
  kept.Put(Make("c/d", 0, 'd', 1), kStart);
  EXPECT_EQ(Ids(kept.TakeOfOthers("c/b", 0, 2)), "a");
  EXPECT_EQ(Ids(kept.TakeAll()), "bcd");
}

TEST(KeptCommunicatorsTest, ThoseThatNobodyUsedForTooLongGo) {
  KeptCommunicators kept(8, absl::Minutes(10));
  kept.Put(Make("c/b", 0, 'a'), kStart);
  kept.Put(Make("c/d", 0, 'b'), kStart + absl::Minutes(5));
  EXPECT_EQ(Ids(kept.TakeExpired(kStart + absl::Minutes(9))), "");
  EXPECT_EQ(Ids(kept.TakeExpired(kStart + absl::Minutes(10))), "a");
  EXPECT_EQ(kept.size(), 1u);
}

}  // namespace
}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
