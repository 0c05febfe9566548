#include "transport/conformance/group_conformance.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/conformance/test_chain.h"
#include "transport/error.h"
#include "transport/eventually.h"

extern char** environ;

namespace weightsync {
namespace transport {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GroupConformance);

namespace {

constexpr int64_t kFrame = Landing::kFrameBytes;
constexpr char kChildFlag[] = "--group_conformance_child";
const std::vector<int64_t> kChildSizes = {8 * kFrame};

std::vector<int64_t> OddSizes() {
  return {1,       0,          kFrame - 1, kFrame, kFrame + 1, 3 * kFrame + 777,
          1000001, 16 * kFrame};
}

void ExpectMovesTo(const GroupNodeMaker& make_node, int receivers) {
  TestNodes nodes(make_node, receivers + 1);
  std::vector<int> chain(receivers + 1);
  std::iota(chain.begin(), chain.end(), 0);
  std::vector<std::unique_ptr<TestStore>> stores;
  std::vector<TestStore*> views;
  for (int i = 0; i <= receivers; ++i) {
    stores.push_back(std::make_unique<TestStore>(OddSizes()));
    views.push_back(stores.back().get());
  }
  stores[0]->FillAndMark(7);
  auto groups = nodes.NewGroups(chain);
  JoinAll(groups);
  MoveAll(groups, views);
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  for (int i = 1; i <= receivers; ++i) ExpectSameBytes(*stores[0], *stores[i]);
  const GroupProgress progress = groups.back()->Progress();
  EXPECT_EQ(progress.ready_frames, stores[0]->frames());
  EXPECT_EQ(progress.ready_bytes, progress.bytes);
}

// The peer may say that it has everything before the last frame is counted
// here.
void ExpectSent(const Group& group, int64_t frames) {
  EXPECT_TRUE(Eventually(
      [&] { return PeerOf(group, /*upstream=*/false).frames >= frames; }));
  EXPECT_EQ(PeerOf(group, /*upstream=*/false).frames, frames);
}

}  // namespace

TEST_P(GroupConformance, MovesBucketsOfOddSizesToOneReceiver) {
  ExpectMovesTo(GetParam().make_node, 1);
}
TEST_P(GroupConformance, MovesBucketsOfOddSizesToTwoReceivers) {
  ExpectMovesTo(GetParam().make_node, 2);
}
TEST_P(GroupConformance, MovesBucketsOfOddSizesToFourReceivers) {
  ExpectMovesTo(GetParam().make_node, 4);
}

TEST_P(GroupConformance, ASourceAloneIsDoneAtOnce) {
  TestNodes nodes(GetParam().make_node, 1);
  TestStore store({kFrame});
  store.FillAndMark(1);
  auto groups = nodes.NewGroups({0});
  JoinAll(groups);
  MoveAll(groups, {&store});
  EXPECT_EQ(Blame(groups[0]->Wait(absl::Seconds(5))), "OK");
}

TEST_P(GroupConformance, NothingToMoveIsDoneAtOnce) {
  TestNodes nodes(GetParam().make_node, 3);
  TestStore a({}), b({}), c({});
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
}

TEST_P(GroupConformance, FramesGoThroughToTheEndAsTheyBecomeReadyInAnyOrder) {
  TestNodes nodes(GetParam().make_node, 3);
  TestStore a({40 * kFrame + 5}), b({40 * kFrame + 5}), c({40 * kFrame + 5});
  a[0].Fill(3);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  std::vector<uint32_t> order(a[0].landing()->frame_count());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(11));
  for (size_t i = 0; i < order.size(); ++i) {
    a[0].Mark(order[i]);
    // Each is at the end of the chain before the next is even ready.
    ASSERT_TRUE(Eventually([&] { return c[0].landing()->IsReady(order[i]); }))
        << i;
  }
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, c);
}

TEST_P(GroupConformance, OnlyWhatLacksIsSent) {
  TestNodes nodes(GetParam().make_node, 3);
  const std::vector<int64_t> sizes = {10 * kFrame, 6 * kFrame + 1, 3 * kFrame};
  TestStore a(sizes), b(sizes), c(sizes);
  a.FillAndMark(5);
  for (const uint32_t frame : {1u, 3u, 9u}) b[0].TakeFrom(a[0], frame);
  for (uint32_t frame = 0; frame < 3; ++frame) b[2].TakeFrom(a[2], frame);
  c[1].TakeFrom(a[1], 6);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, b);
  ExpectSameBytes(a, c);
  ExpectSent(*groups[0], a.frames() - 6);
  ExpectSent(*groups[1], a.frames() - 1);
}

TEST_P(GroupConformance, AGroupMovesAgain) {
  TestNodes nodes(GetParam().make_node, 3);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  for (uint32_t round = 0; round < 5; ++round) {
    TestStore a({kFrame * 3 + round}), b({kFrame * 3 + round}),
        c({kFrame * 3 + round});
    a.FillAndMark(round);
    // Receivers may be ahead of their predecessors, and hold everything
    // already.
    if (round == 3) {
      std::copy(a[0].bytes().begin(), a[0].bytes().end(), c[0].bytes().begin());
      EXPECT_TRUE(c[0].landing()->MarkAllReady().ok());
    }
    ASSERT_TRUE(groups[2]->Move(c.landings()).ok());
    ASSERT_TRUE(groups[1]->Move(b.landings()).ok());
    ASSERT_TRUE(groups[0]->Move(a.landings()).ok());
    for (const absl::Status& status : WaitAll(groups))
      ASSERT_EQ(Blame(status), "OK") << round;
    ExpectSameBytes(a, c);
  }
}

// Each member goes on as soon as its own Wait has returned, as the lanes of a
// STREAM do: nothing of one move may get lost over the next.
TEST_P(GroupConformance, MembersMoveAgainWithoutWaitingForEachOther) {
  TestNodes nodes(GetParam().make_node, 3);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  constexpr int kMoves = 100;
  std::vector<std::thread> members;
  std::vector<std::string> results(3);
  for (size_t member = 0; member < 3; ++member) {
    members.emplace_back([&, member] {
      for (uint32_t move = 0; move < kMoves; ++move) {
        TestStore store({kFrame + move});
        if (member == 0) store.FillAndMark(move);
        absl::Status status = groups[member]->Move(store.landings());
        if (status.ok()) status = groups[member]->Wait(absl::Seconds(20));
        results[member] = absl::StrCat(move, " ", Blame(status));
        if (!status.ok()) return;
      }
    });
  }
  for (std::thread& member : members) member.join();
  for (const std::string& result : results) EXPECT_EQ(result, "99 OK");
}

TEST_P(GroupConformance, TwoGroupsMoveAtOnceBetweenTheSameNodes) {
  TestNodes nodes(GetParam().make_node, 3);
  ChainOptions one, two;
  one.group_id = "one";
  two.group_id = "two";
  two.secret = "another";
  auto forward = nodes.NewGroups({0, 1, 2}, one);
  auto backward = nodes.NewGroups({2, 0, 1}, two);
  const std::vector<int64_t> sizes = {50 * kFrame, 20 * kFrame + 3};
  TestStore fa(sizes), fb(sizes), fc(sizes), ba(sizes), bb(sizes), bc(sizes);
  fa.FillAndMark(1);
  bc.FillAndMark(100);
  JoinAll(forward);
  JoinAll(backward);
  MoveAll(forward, {&fa, &fb, &fc});
  MoveAll(backward, {&bc, &ba, &bb});
  for (const absl::Status& status : WaitAll(forward))
    EXPECT_EQ(Blame(status), "OK");
  for (const absl::Status& status : WaitAll(backward))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(fa, fc);
  ExpectSameBytes(bc, bb);
}

TEST_P(GroupConformance, ADamagedFrameIsSentAgain) {
  FaultRules faults(
      *FaultRules::Parse("kind=damage edge=a->b bucket=0 frame=4 count=2; "
                         "kind=damage edge=b->c after=3"));
  TestNodes nodes(GetParam().make_node, 3, &faults);
  TestStore a({10 * kFrame}), b({10 * kFrame}), c({10 * kFrame});
  a.FillAndMark(5);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, b);
  ExpectSameBytes(a, c);
  EXPECT_EQ(faults.strikes(), 3);
  EXPECT_EQ(PeerOf(*groups[1], true).repaired_frames, 2);
  EXPECT_EQ(PeerOf(*groups[0], false).repaired_frames, 2);
  EXPECT_EQ(PeerOf(*groups[2], true).repaired_frames, 1);
}

TEST_P(GroupConformance, AnEdgeThatDamagesAFrameThreeTimesIsGivenUp) {
  FaultRules faults(
      *FaultRules::Parse("kind=damage edge=a->b bucket=0 frame=4 count=0"));
  TestNodes nodes(GetParam().make_node, 3, &faults);
  TestStore a({10 * kFrame}), b({10 * kFrame}), c({10 * kFrame});
  a.FillAndMark(5);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  for (const absl::Status& status : WaitAll(groups)) {
    EXPECT_EQ(Blame(status), "EDGE_DAMAGED a->b");
    EXPECT_TRUE(absl::IsDataLoss(status));
  }
  EXPECT_EQ(faults.strikes(), 3);
  EXPECT_FALSE(b[0].landing()->IsReady(4));
}

TEST_P(GroupConformance, ADamagedHeaderEndsTheEdge) {
  FaultRules faults(*FaultRules::Parse("kind=damage_header edge=a->b after=3"));
  TestNodes nodes(GetParam().make_node, 2, &faults);
  TestStore a({10 * kFrame}), b({10 * kFrame});
  a.FillAndMark(5);
  auto groups = nodes.NewGroups({0, 1});
  JoinAll(groups);
  MoveAll(groups, {&a, &b});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "EDGE_DAMAGED a->b");
}

TEST_P(GroupConformance, AHolderWhoseBytesChangedIsBlamedForIt) {
  TestNodes nodes(GetParam().make_node, 2);
  TestStore a({10 * kFrame}), b({10 * kFrame});
  a.FillAndMark(5);
  a[0].bytes()[7 * kFrame + 9] ^= 4;
  auto groups = nodes.NewGroups({0, 1});
  JoinAll(groups);
  MoveAll(groups, {&a, &b});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "HOLDER_DAMAGED a->b");
}

TEST_P(GroupConformance, ALostEdgeIsNamedAndARebuiltRouteSendsWhatLacks) {
  FaultRules faults(*FaultRules::Parse("kind=cut edge=b->c after=12"));
  TestNodes nodes(GetParam().make_node, 3, &faults);
  TestStore a({30 * kFrame}), b({30 * kFrame}), c({30 * kFrame});
  a.FillAndMark(5);
  std::atomic<int> told{0};
  ChainOptions options;
  options.on_edge_failed = [&](const absl::Status& status) {
    if (Blame(status) == "EDGE_LOST b->c") ++told;
  };
  auto groups = nodes.NewGroups({0, 1, 2}, options);
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "EDGE_LOST b->c");
  EXPECT_TRUE(Eventually([&] { return told == 2; }));
  // The member before the lost edge went on receiving.
  ExpectSameBytes(a, b);
  for (const auto& group : groups) group->Abort(absl::OkStatus());
  // Counted when no stream is at work any more.
  const int64_t had = c[0].landing()->ready_frames();
  EXPECT_LT(had, 30);

  ChainOptions next;
  next.epoch = Epoch{1, 2};
  auto rebuilt = nodes.NewGroups({0, 2}, next);
  JoinAll(rebuilt);
  MoveAll(rebuilt, {&a, &c});
  for (const absl::Status& status : WaitAll(rebuilt))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, c);
  ExpectSent(*rebuilt[0], 30 - had);

  // The edge stays cut for new groups too.
  ChainOptions last;
  last.epoch = Epoch{1, 3};
  auto cut = nodes.NewGroups({1, 2}, last);
  const auto joined =
      OnAll(cut, [](Group& g, size_t) { return g.Join(absl::Seconds(3)); });
  EXPECT_EQ(Blame(joined[0]), "EDGE_LOST b->c");
  EXPECT_EQ(Blame(joined[1]), "JOIN_TIMEOUT b->c");
}

TEST_P(GroupConformance,
       MembersAfterALostEdgeGetWhatIsThereAndNameTheSameEdge) {
  FaultRules faults(*FaultRules::Parse("kind=drop edge=a->b after=12"));
  TestNodes nodes(GetParam().make_node, 4, &faults);
  const std::vector<int64_t> sizes = {30 * kFrame};
  TestStore a(sizes), b(sizes), c(sizes), d(sizes);
  a.FillAndMark(5);
  auto groups = nodes.NewGroups({0, 1, 2, 3});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c, &d});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "EDGE_LOST a->b");
  EXPECT_EQ(d[0].landing()->ready_frames(), b[0].landing()->ready_frames());
}

TEST_P(GroupConformance, AFrozenEdgeIsNoticedOnBothSides) {
  FaultRules faults(
      *FaultRules::Parse("kind=silence edge=a->b after=5 count=0"));
  TestNodes nodes(GetParam().make_node, 2, &faults);
  TestStore a({30 * kFrame}), b({30 * kFrame});
  a.FillAndMark(5);
  ChainOptions options;
  options.peer_deadline = absl::Seconds(1);
  auto groups = nodes.NewGroups({0, 1}, options);
  JoinAll(groups);
  MoveAll(groups, {&a, &b});
  const absl::Time start = absl::Now();
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "EDGE_LOST a->b");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_P(GroupConformance, ASlowPeerIsReportedAndNotDropped) {
  FaultRules faults(*FaultRules::Parse("kind=delay edge=b->c ms=50 count=0"));
  TestNodes nodes(GetParam().make_node, 3, &faults);
  TestStore a({60 * kFrame}), b({60 * kFrame}), c({60 * kFrame});
  a.FillAndMark(5);
  ChainOptions options;
  options.peer_deadline = absl::Milliseconds(800);
  auto groups = nodes.NewGroups({0, 1, 2}, options);
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  EXPECT_TRUE(Eventually([&] {
    const PeerProgress slow = PeerOf(*groups[1], false);
    return slow.queued_frames > 0 && slow.bytes_per_second > 0 &&
           slow.bytes_per_second < 20e6;
  }));
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, c);
}

TEST_P(GroupConformance, NoProgressIsNotALostPeer) {
  TestNodes nodes(GetParam().make_node, 2);
  TestStore a({4 * kFrame}), b({4 * kFrame});
  a[0].Fill(9);
  a[0].Mark(2);
  ChainOptions options;
  options.peer_deadline = absl::Milliseconds(600);
  auto groups = nodes.NewGroups({0, 1}, options);
  JoinAll(groups);
  MoveAll(groups, {&a, &b});
  EXPECT_EQ(Blame(groups[0]->Wait(absl::Seconds(1))), "NO_PROGRESS");
  EXPECT_EQ(Blame(groups[1]->Wait(absl::Milliseconds(200))), "NO_PROGRESS");
  for (const uint32_t frame : {0u, 1u, 3u}) a[0].Mark(frame);
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "OK");
  ExpectSameBytes(a, b);
}

TEST_P(GroupConformance, AFailedSourceLandingEndsTheMoveEverywhere) {
  TestNodes nodes(GetParam().make_node, 3);
  TestStore a({4 * kFrame}), b({4 * kFrame}), c({4 * kFrame});
  a[0].Fill(9);
  a[0].Mark(2);
  auto groups = nodes.NewGroups({0, 1, 2});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c});
  // Where payload goes beside the words, the failure may overtake it.
  EXPECT_TRUE(Eventually([&] { return c[0].landing()->IsReady(2); }));
  a[0].landing()->Fail(MakeError(absl::StatusCode::kAborted, "SOURCE_CHANGED",
                                 "the trainer wrote during the copy"));
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "SOURCE_CHANGED");
  EXPECT_TRUE(c[0].landing()->IsReady(2));
}

TEST_P(GroupConformance, AbortEndsEverybodyInBoundedTime) {
  TestNodes nodes(GetParam().make_node, 4);
  const std::vector<int64_t> sizes = {100 * kFrame};
  TestStore a(sizes), b(sizes), c(sizes), d(sizes);
  a[0].Fill(9);
  for (uint32_t frame = 0; frame < 50; ++frame) a[0].Mark(frame);
  auto groups = nodes.NewGroups({0, 1, 2, 3});
  JoinAll(groups);
  MoveAll(groups, {&a, &b, &c, &d});
  std::thread aborter([&] {
    EXPECT_TRUE(Eventually([&] { return d[0].landing()->ready_frames() > 5; }));
    const absl::Time start = absl::Now();
    groups[1]->Abort(
        MakeError(absl::StatusCode::kCancelled, "OPERATOR", "somebody asked"));
    EXPECT_LT(absl::Now() - start, absl::Seconds(2));
    // Nobody touches the memory any more.
    const std::vector<char> before(b[0].bytes().begin(), b[0].bytes().end());
    a[0].Mark(50);
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_TRUE(before == b[0].bytes());
  });
  const std::vector<absl::Status> results = WaitAll(groups);
  aborter.join();
  EXPECT_EQ(Blame(results[0]), "PEER_ABORTED a->b");
  EXPECT_EQ(Blame(results[1]), "OPERATOR");
  EXPECT_EQ(Blame(results[2]), "PEER_ABORTED b->c");
  EXPECT_EQ(Blame(results[3]), "PEER_ABORTED b->c");
  EXPECT_EQ(Blame(groups[1]->Move(b.landings())), "OPERATOR");
}

TEST_P(GroupConformance, AMemberThatNeverJoinsIsADeadline) {
  TestNodes nodes(GetParam().make_node, 3);
  const absl::Time start = absl::Now();
  auto first = nodes.NewGroup({0, 1, 2}, 0);
  EXPECT_EQ(Blame(first->Join(absl::Milliseconds(300))), "JOIN_TIMEOUT a->b");
  auto last = nodes.NewGroup({0, 1, 2}, 2);
  EXPECT_EQ(Blame(last->Join(absl::Milliseconds(300))), "JOIN_TIMEOUT b->c");
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
}

TEST_P(GroupConformance, AbortEndsJoin) {
  TestNodes nodes(GetParam().make_node, 3);
  auto first = nodes.NewGroup({0, 1, 2}, 0);
  auto last = nodes.NewGroup({0, 1, 2}, 2);
  const absl::Time start = absl::Now();
  std::thread aborter([&] {
    absl::SleepFor(absl::Milliseconds(50));
    first->Abort(
        MakeError(absl::StatusCode::kCancelled, "OPERATOR", "somebody asked"));
    last->Abort(
        MakeError(absl::StatusCode::kCancelled, "OPERATOR", "somebody asked"));
  });
  EXPECT_EQ(Blame(first->Join(absl::Seconds(20))), "OPERATOR");
  EXPECT_EQ(Blame(last->Join(absl::Seconds(20))), "OPERATOR");
  aborter.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_P(GroupConformance, AnEarlyPeerIsWaitedFor) {
  TestNodes nodes(GetParam().make_node, 2);
  auto source = nodes.NewGroup({0, 1}, 0);
  absl::Status joined;
  std::thread early([&] { joined = source->Join(absl::Seconds(10)); });
  absl::SleepFor(absl::Milliseconds(200));
  auto receiver = nodes.NewGroup({0, 1}, 1);
  EXPECT_EQ(Blame(receiver->Join(absl::Seconds(10))), "OK");
  early.join();
  EXPECT_EQ(Blame(joined), "OK");
}

TEST_P(GroupConformance, AnOlderEpochIsRefused) {
  TestNodes nodes(GetParam().make_node, 2);
  ChainOptions now;
  now.epoch = Epoch{2, 1};
  auto current = nodes.NewGroups({0, 1}, now);
  JoinAll(current);
  ChainOptions old;
  old.epoch = Epoch{1, 9};
  auto stale = nodes.NewGroup({0, 1}, 0, old);
  EXPECT_EQ(Blame(stale->Join(absl::Seconds(5))), "STALE_EPOCH a->b");
  // And whoever missed that a newer epoch was here cannot offer the old one
  // again.
  auto late = nodes.NewGroup({0, 1}, 1, old);
  EXPECT_EQ(Blame(late->Join(absl::Seconds(5))), "STALE_EPOCH");
  TestStore a({kFrame}), b({kFrame});
  a.FillAndMark(1);
  MoveAll(current, {&a, &b});
  for (const absl::Status& status : WaitAll(current))
    EXPECT_EQ(Blame(status), "OK");
}

TEST_P(GroupConformance, AWrongSecretIsRefused) {
  TestNodes nodes(GetParam().make_node, 2);
  ChainOptions good, bad;
  bad.secret = "guess";
  auto receiver = nodes.NewGroup({0, 1}, 1, good);
  auto stranger = nodes.NewGroup({0, 1}, 0, bad);
  std::vector<std::unique_ptr<Group>> groups;
  groups.push_back(std::move(stranger));
  groups.push_back(std::move(receiver));
  const auto joined =
      OnAll(groups, [](Group& g, size_t) { return g.Join(absl::Seconds(1)); });
  EXPECT_EQ(Blame(joined[0]), "BAD_SECRET a->b");
  EXPECT_EQ(Blame(joined[1]), "JOIN_TIMEOUT a->b");
}

TEST_P(GroupConformance, MembersThatDisagreeAboutABucketDoNotMoveIt) {
  TestNodes nodes(GetParam().make_node, 2);
  TestStore a({kFrame}), b({kFrame + 1});
  a.FillAndMark(1);
  auto groups = nodes.NewGroups({0, 1});
  JoinAll(groups);
  MoveAll(groups, {&a, &b});
  for (const absl::Status& status : WaitAll(groups))
    EXPECT_EQ(Blame(status), "MOVE_MISMATCH a->b");
}

TEST_P(GroupConformance, MisuseIsAnError) {
  TestNodes nodes(GetParam().make_node, 2);
  TestStore a({kFrame}), b({kFrame});
  a.FillAndMark(1);
  auto groups = nodes.NewGroups({0, 1});
  EXPECT_TRUE(absl::IsFailedPrecondition(groups[0]->Move(a.landings())));
  JoinAll(groups);
  EXPECT_TRUE(absl::IsFailedPrecondition(groups[0]->Wait(absl::Seconds(1))));
  EXPECT_EQ(Blame(groups[0]->Move({a[0].landing(), a[0].landing()})),
            "BUCKET_TWICE");
  const int other = 0;
  ASSERT_TRUE(b[0].landing()->AcquireReceiver(&other));
  EXPECT_EQ(Blame(groups[1]->Move(b.landings())), "LANDING_BUSY");
  b[0].landing()->ReleaseReceiver(&other);
  GroupSpec spec = nodes.Spec({0, 1}, 0);
  spec.self = 2;
  EXPECT_FALSE(nodes.node(0).NewGroup(spec, GroupOptions()).ok());
  spec = nodes.Spec({0, 0}, 0);
  EXPECT_FALSE(nodes.node(0).NewGroup(spec, GroupOptions()).ok());
}

// ---- A peer in another process, which can be stopped and killed ----

namespace {

// Tells its address, reads the chain, moves and waits.
int RunChild(const GroupNodeMaker& make_node) {
  std::unique_ptr<GroupFactory> node = make_node(nullptr);
  std::cout << node->address() << std::endl;
  std::string line;
  std::getline(std::cin, line);
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  GroupSpec spec;
  spec.cluster_id = kConformanceCluster;
  spec.group_id = "child";
  spec.epoch = Epoch{1, 1};
  spec.secret = "child";
  spec.self = std::stoi(words[0]);
  for (size_t i = 1; i + 1 < words.size(); i += 2)
    spec.members.push_back({words[i], words[i + 1]});
  GroupOptions options;
  options.peer_deadline = absl::Seconds(1);
  auto group = node->NewGroup(spec, options);
  if (!group.ok() || !(*group)->Join(absl::Seconds(10)).ok()) return 2;
  TestStore store(kChildSizes);
  if (spec.self == 0) {
    store[0].Fill(1);
    store[0].Mark(0);
  }
  if (!(*group)->Move(store.landings()).ok()) return 3;
  if (!store[0].landing()->WaitComplete(absl::Milliseconds(1)).ok())
    std::cout << "moving" << std::endl;
  (void)(*group)->Wait(absl::Seconds(30));
  return 0;
}

class Child {
 public:
  Child() {
    int in[2], out[2];
    PCHECK(pipe(in) == 0 && pipe(out) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    for (const int fd : {in[0], in[1], out[0], out[1]})
      posix_spawn_file_actions_addclose(&actions, fd);
    std::string self = "/proc/self/exe", flag = kChildFlag;
    char* argv[] = {&self[0], &flag[0], nullptr};
    CHECK_EQ(posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv, environ),
             0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = fdopen(out[0], "r");
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(to_);
    fclose(from_);
  }
  std::string ReadLine() {
    char line[256] = {};
    if (fgets(line, sizeof(line), from_) == nullptr) return "";
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }
  void WriteLine(const std::string& line) {
    const std::string text = line + "\n";
    PCHECK(write(to_, text.data(), text.size()) ==
           static_cast<ssize_t>(text.size()));
  }
  void Signal(int signal) { kill(pid_, signal); }

 private:
  pid_t pid_ = 0;
  int to_ = -1;
  FILE* from_ = nullptr;
};

// The child is member `child_index` of [a, b]; the other one is here. What Wait
// says after `signal`.
std::string BlameAfter(const GroupNodeMaker& make_node, int child_index,
                       int signal) {
  Child child;
  std::unique_ptr<GroupFactory> node = make_node(nullptr);
  GroupSpec spec;
  spec.cluster_id = kConformanceCluster;
  spec.group_id = "child";
  spec.epoch = Epoch{1, 1};
  spec.secret = "child";
  spec.members = {{"a", ""}, {"b", ""}};
  spec.members[child_index].address = child.ReadLine();
  spec.members[1 - child_index].address = node->address();
  spec.self = 1 - child_index;
  child.WriteLine(absl::StrCat(child_index, " a ", spec.members[0].address,
                               " b ", spec.members[1].address));
  GroupOptions options;
  options.peer_deadline = absl::Seconds(1);
  auto group = node->NewGroup(spec, options);
  if (!group.ok()) return Blame(group.status());
  if (absl::Status status = (*group)->Join(absl::Seconds(10)); !status.ok())
    return Blame(status);
  TestStore store(kChildSizes);
  if (spec.self == 0) {
    store[0].Fill(1);
    store[0].Mark(0);
  }
  if (absl::Status status = (*group)->Move(store.landings()); !status.ok())
    return Blame(status);
  if (child.ReadLine() != "moving") return "the child did not move";
  // Idle, but alive: longer than the peer deadline.
  const absl::Status idle = (*group)->Wait(absl::Milliseconds(1500));
  if (Blame(idle) != "NO_PROGRESS") return Blame(idle);
  child.Signal(signal);
  const absl::Time start = absl::Now();
  const absl::Status status = (*group)->Wait(absl::Seconds(20));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  return Blame(status);
}

}  // namespace

TEST_P(GroupConformance, AStoppedReceiverIsNoticed) {
  EXPECT_EQ(BlameAfter(GetParam().make_node, 1, SIGSTOP), "EDGE_LOST a->b");
}
TEST_P(GroupConformance, AStoppedSourceIsNoticed) {
  EXPECT_EQ(BlameAfter(GetParam().make_node, 0, SIGSTOP), "EDGE_LOST a->b");
}
TEST_P(GroupConformance, AKilledReceiverIsNoticed) {
  EXPECT_EQ(BlameAfter(GetParam().make_node, 1, SIGKILL), "EDGE_LOST a->b");
}
TEST_P(GroupConformance, AKilledSourceIsNoticed) {
  EXPECT_EQ(BlameAfter(GetParam().make_node, 0, SIGKILL), "EDGE_LOST a->b");
}

int GroupConformanceMain(int argc, char** argv,
                         const GroupNodeMaker& make_node) {
  signal(SIGPIPE, SIG_IGN);
  FLAGS_logtostderr = true;
  if (argc == 2 && std::string(argv[1]) == kChildFlag)
    return RunChild(make_node);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace transport
}  // namespace weightsync
