#include "transport/fault/fault_policy.h"

#include "gtest/gtest.h"

namespace weightsync {
namespace transport {
namespace {

using Kind = FrameFault::Kind;

TEST(FaultRulesTest, StrikesTheEdgeItNamesAfterSoManyFrames) {
  FaultRules faults(
      *FaultRules::Parse("kind=damage edge=a->b after=2 count=2"));
  EXPECT_EQ(faults.OnSend("b", "c", 0, 0).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 0).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 1).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 2).kind, Kind::kDamagePayload);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 3).kind, Kind::kDamagePayload);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 4).kind, Kind::kNone);
  EXPECT_EQ(faults.strikes(), 2);
}

TEST(FaultRulesTest, OneFrameAlone) {
  FaultRules faults(*FaultRules::Parse("kind=drop bucket=3 frame=7"));
  EXPECT_EQ(faults.OnSend("a", "b", 3, 6).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "b", 2, 7).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "b", 3, 7).kind, Kind::kDrop);
}

TEST(FaultRulesTest, ACutEdgeCannotBeConnectedAgain) {
  FaultRules faults(*FaultRules::Parse("kind=cut edge=*->c after=1"));
  EXPECT_TRUE(faults.OnConnect("a", "c").ok());
  EXPECT_EQ(faults.OnSend("a", "c", 0, 0).kind, Kind::kNone);
  EXPECT_EQ(faults.OnSend("a", "c", 0, 1).kind, Kind::kDrop);
  EXPECT_FALSE(faults.OnConnect("b", "c").ok());
  EXPECT_TRUE(faults.OnConnect("a", "b").ok());
}

TEST(FaultRulesTest, TheFirstRuleThatIsDueIsTaken) {
  FaultRules faults(*FaultRules::Parse(
      "kind=silence after=1; kind=delay ms=20 count=0 edge=a->*"));
  EXPECT_EQ(faults.OnSend("a", "b", 0, 0).delay, absl::Milliseconds(20));
  EXPECT_EQ(faults.OnSend("a", "b", 0, 1).kind, Kind::kSilence);
  EXPECT_EQ(faults.OnSend("a", "b", 0, 2).delay, absl::Milliseconds(20));
}

TEST(FaultRulesTest, WhatItCannotReadIsAnError) {
  for (const char* text :
       {"kind=magic", "edge=a->b", "kind=drop edge=ab", "kind=drop after=x",
        "kind=drop after=-1", "kind=drop colour=3"}) {
    EXPECT_FALSE(FaultRules::Parse(text).ok()) << text;
  }
  EXPECT_TRUE(FaultRules::Parse("")->empty());
  EXPECT_EQ(FaultRules::Parse("kind=drop; ;kind=cut ")->size(), 2u);
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
