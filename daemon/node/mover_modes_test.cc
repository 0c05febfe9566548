// Fetching from a holder, IN_PLACE and STREAM: real bytes over loopback between
// nodes of one process.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "daemon/node/in_place_ranks.h"
#include "daemon/node/mover.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/eventually.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::ExpectBytes;
using testing::InPlaceRanks;
using testing::kDeadline;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::RankMemory;
using testing::TestNode;
using testing::TestSink;
using testing::TestUpdate;
using transport::Eventually;
using transport::ReasonOf;

v1::DefineLayout TwoReceivers() {
  return ModelBuilder()
      .SmallModel(4)
      .FsdpRanks("a", 2)
      .Worker("b")
      .Worker("c")
      .Build();
}

std::vector<int32_t> AllBuckets(TestNode& node,
                                const v1::DefineLayout& define) {
  auto layout = node.layouts().Find(define.layout_id());
  EXPECT_TRUE(layout.ok()) << layout.status();
  std::vector<int32_t> buckets;
  for (int32_t b = 0; b < (*layout)->bucket_count(); ++b) buckets.push_back(b);
  return buckets;
}

v1::ReleaseSources Release(const std::string& update_id) {
  v1::ReleaseSources release;
  release.set_model("models/m");
  release.set_update_id(update_id);
  return release;
}

// ---- Fetching ----

TEST(Fetch, ANodeThatCameLateGetsACommittedUpdateFromAReceiver) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 1);
  TestNode a("a"), b("b"), c("c"), late("late"), later("later");
  TestUpdate update(define, "u", 7, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  for (TestNode* node : {&late, &later}) {
    ASSERT_TRUE(node->layouts().Define(define).ok());
  }
  const std::vector<int32_t> all = AllBuckets(b, define);
  b.TakeReports();
  // Both at once from b, in epochs of their own.
  std::vector<v1::MoveUpdate> moves;
  for (TestNode* node : {&late, &later}) {
    const v1::PrepareUpdate fetch = update.FetchCommand(&b, node, all);
    b.mover().PrepareUpdate(fetch);
    node->mover().PrepareUpdate(fetch);
    moves.push_back(update.MoveCommand(node));
    EXPECT_EQ(b.WaitPrepared().failure().reason(), "");
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  for (const v1::MoveUpdate& move : moves) b.mover().MoveUpdate(move);
  late.mover().MoveUpdate(moves[0]);
  later.mover().MoveUpdate(moves[1]);
  for (TestNode* node : {&late, &later}) {
    node->mover().UpdateManifest(update.manifest());
    const v1::UpdateVerified verified = node->WaitVerified();
    EXPECT_EQ(verified.failure().reason(), "") << verified.ShortDebugString();
    // A worker that was not in the layout: half of everything.
    const v1::DefineLayout half = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 2)
                                      .TensorParallelWorker("b", 1, 2)
                                      .Build();
    auto live = node->Apply(define, "u", testing::WantedBy(half, 0));
    ASSERT_TRUE(live.ok()) << live.status();
    ExpectBytes(half, model, 0, *live);
    // It ends by itself and is kept.
    EXPECT_TRUE(Eventually([&] {
      auto held = node->store().HeldUpdates();
      return held.size() == 1 && held[0].version() == 7;
    }));
  }
  // The holder has what it had.
  update.ExpectWorkersEqual(model);
  for (const v1::NodeReport& report : b.TakeReports()) {
    EXPECT_FALSE(report.has_update_verified()) << report.ShortDebugString();
  }
}

TEST(Fetch, WhatIsMissingJoinsWhatIsThere) {
  // b has the lower half, and fetches the rest from c, which has everything.
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 2)
                                      .TensorParallelWorker("b", 0, 2)
                                      .Worker("c")
                                      .Build();
  const ModelBytes model(define, 2);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  ASSERT_TRUE(Eventually([&] { return b.store().HeldUpdates().size() == 1; }));
  std::vector<int32_t> missing;
  for (int32_t bucket : AllBuckets(b, define)) {
    if (!b.store().Holds("u", {bucket})) missing.push_back(bucket);
  }
  ASSERT_FALSE(missing.empty());
  const v1::PrepareUpdate fetch = update.FetchCommand(&c, &b, missing);
  for (TestNode* node : {&b, &c}) node->mover().PrepareUpdate(fetch);
  for (TestNode* node : {&b, &c}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  // Room is not bytes.
  EXPECT_FALSE(b.store().Holds("u", missing));
  for (TestNode* node : {&b, &c}) {
    node->mover().MoveUpdate(update.MoveCommand(node));
  }
  b.mover().UpdateManifest(update.manifest());
  EXPECT_EQ(b.WaitVerified().failure().reason(), "");
  auto live = b.Apply(define, "u", testing::WantedBy(define, 1));
  ASSERT_TRUE(live.ok()) << live.status();
  ExpectBytes(define, model, 1, *live);
}

TEST(Fetch, AFetchThatIsEndedGivesItsRoomBack) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 3);
  TestNode a("a"), b("b"), c("c"), late("late");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  ASSERT_TRUE(late.layouts().Define(define).ok());
  const auto fetch = update.FetchCommand(&b, &late, AllBuckets(b, define));
  late.mover().PrepareUpdate(fetch);
  ASSERT_TRUE(Eventually([&] { return late.UsedBytes() > 0; }));
  v1::EndUpdate end;
  end.set_model("models/m");
  end.set_update_id("u");
  late.mover().EndUpdate(end);
  EXPECT_TRUE(Eventually([&] { return late.UsedBytes() == 0; }));
  update.ExpectWorkersEqual(model);
}

// Found by tests/chaos: the first fetch was still ending when the second had
// reserved the same buckets, and dropped them under it: the second was verified
// in room that was not the update's any more.
TEST(Fetch, OneThatIsEndingDoesNotDropTheRoomOfTheNext) {
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 2)
                                      .TensorParallelWorker("b", 0, 2)
                                      .Worker("c")
                                      .Build();
  const ModelBytes model(define, 2);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  ASSERT_TRUE(Eventually([&] { return b.store().HeldUpdates().size() == 1; }));
  std::vector<int32_t> missing;
  for (int32_t bucket : AllBuckets(b, define)) {
    if (!b.store().Holds("u", {bucket})) missing.push_back(bucket);
  }
  ASSERT_FALSE(missing.empty());
  // Its holder never comes; told to move, it ends some time after its end.
  const int64_t before = b.UsedBytes();
  b.mover().PrepareUpdate(update.FetchCommand(&c, &b, missing));
  ASSERT_TRUE(Eventually([&] { return b.UsedBytes() > before; }));
  b.mover().MoveUpdate(update.MoveCommand(&b));
  absl::SleepFor(absl::Milliseconds(200));
  v1::EndUpdate end;
  end.set_model("models/m");
  end.set_update_id("u");
  end.set_committed(true);
  b.mover().EndUpdate(end);
  const absl::Time ended = absl::Now();
  const v1::PrepareUpdate again = update.FetchCommand(&c, &b, missing);
  for (TestNode* node : {&b, &c}) node->mover().PrepareUpdate(again);
  for (TestNode* node : {&b, &c}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  for (TestNode* node : {&b, &c}) {
    node->mover().MoveUpdate(update.MoveCommand(node));
  }
  // By now the first one has ended, whichever way they meet.
  absl::SleepFor(ended + absl::Milliseconds(2500) - absl::Now());
  b.mover().UpdateManifest(update.manifest());
  EXPECT_EQ(b.WaitVerified().failure().reason(), "");
  EXPECT_TRUE(b.store().Holds("u", missing));
  auto live = b.Apply(define, "u", testing::WantedBy(define, 1));
  ASSERT_TRUE(live.ok()) << live.status();
  ExpectBytes(define, model, 1, *live);
}

// Found by tests/chaos: what a rollback needs is pinned before it is whole; its
// fetch failed, and the node refused every other one (UPDATE_ENDED) for as long
// as the rollback held.
TEST(Fetch, OneThatFailedWhilePinnedCanBeBegunAnew) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 1);
  TestNode a("a"), b("b"), c("c"), late("late");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  ASSERT_TRUE(Eventually([&] { return b.store().HeldUpdates().size() == 1; }));
  ASSERT_TRUE(late.layouts().Define(define).ok());
  const std::vector<int32_t> buckets = AllBuckets(b, define);
  // Its holder never comes.
  late.mover().PrepareUpdate(update.FetchCommand(&b, &late, buckets));
  ASSERT_TRUE(Eventually([&] { return late.UsedBytes() > 0; }));
  v1::PinUpdate pin;
  pin.set_model("models/m");
  pin.set_update_id("u");
  pin.set_pin(true);
  late.mover().PinUpdate(pin);
  v1::EndUpdate end;
  end.set_model("models/m");
  end.set_update_id("u");
  end.set_committed(false);
  late.mover().EndUpdate(end);

  const v1::PrepareUpdate again = update.FetchCommand(&b, &late, buckets);
  for (TestNode* node : {&b, &late}) node->mover().PrepareUpdate(again);
  for (TestNode* node : {&b, &late}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  for (TestNode* node : {&b, &late}) {
    node->mover().MoveUpdate(update.MoveCommand(node));
  }
  late.mover().UpdateManifest(update.manifest());
  EXPECT_EQ(late.WaitVerified().failure().reason(), "");
  EXPECT_TRUE(late.store().Holds("u", buckets));
}

// A holder is never told that a fetch has failed: only that it keeps what it
// had. What it has pinned for one could never be evicted.
TEST(Fetch, AHolderLetsGoOfWhatWasFetchedInVain) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 1);
  TestNode::Options options;
  options.prepare_timeout = absl::Milliseconds(500);
  TestNode a("a"), b("b", options), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.End(true);
  ASSERT_TRUE(Eventually([&] { return b.store().HeldUpdates().size() == 1; }));
  const std::vector<int32_t> buckets = AllBuckets(b, define);
  const auto freed = [&] {
    v1::DropUpdate drop;
    drop.set_model("models/m");
    drop.set_update_id("u");
    b.mover().DropUpdate(drop);
    return b.UsedBytes() == 0;
  };
  for (const bool moves : {true, false}) {
    auto late = std::make_unique<TestNode>("late");
    ASSERT_TRUE(late->layouts().Define(define).ok());
    const auto fetch = update.FetchCommand(&b, late.get(), buckets);
    for (TestNode* node : {&b, late.get()}) node->mover().PrepareUpdate(fetch);
    for (TestNode* node : {&b, late.get()}) {
      ASSERT_EQ(node->WaitPrepared().failure().reason(), "");
    }
    // The target dies: in the middle, or before anything moves.
    if (moves) b.mover().MoveUpdate(update.MoveCommand(late.get()));
    late = nullptr;
    if (moves) {
      EXPECT_NE(b.WaitVerified().failure().reason(), "");
    }
    // What the coordinator says then.
    v1::EndUpdate end;
    end.set_model("models/m");
    end.set_update_id("u");
    end.set_committed(true);
    b.mover().EndUpdate(end);
  }
  // Nothing has it pinned any more.
  EXPECT_TRUE(b.store().Has("u"));
  EXPECT_TRUE(Eventually(freed));
}

TEST(Fetch, AHolderWithoutTheBytesSaysSo) {
  const v1::DefineLayout define = TwoReceivers();
  TestNode b("b"), late("late");
  for (TestNode* node : {&b, &late}) {
    ASSERT_TRUE(node->layouts().Define(define).ok());
  }
  TestUpdate update(define, "u", 1, {&b});
  b.mover().PrepareUpdate(
      update.FetchCommand(&b, &late, AllBuckets(b, define)));
  EXPECT_EQ(b.WaitPrepared().failure().reason(), "UPDATE_UNKNOWN");
}

TEST(Pins, APinOfWhatIsNotHereIsAnsweredWithItsEviction) {
  TestNode a("a");
  v1::PinUpdate pin;
  pin.set_model("models/m");
  pin.set_update_id("gone");
  pin.set_pin(true);
  a.mover().PinUpdate(pin);
  const std::vector<v1::NodeReport> reports = a.TakeReports();
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].update_evicted().update_id(), "gone");
}

TEST(Pins, APinnedUpdateOutlivesNewerOnesAndADroppedOneGoes) {
  const v1::DefineLayout define = TwoReceivers();
  TestNode::Options options;
  options.keep_updates = 1;
  TestNode a("a", options), b("b", options), c("c", options);
  auto holds = [&](const std::string& update_id) {
    for (const v1::HeldUpdate& held : b.store().HeldUpdates()) {
      if (held.update_id() == update_id) return true;
    }
    return false;
  };
  for (int version = 1; version <= 3; ++version) {
    const ModelBytes model(define, static_cast<uint64_t>(version));
    TestUpdate update(define, "u" + std::to_string(version), version,
                      {&a, &b, &c});
    ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
    update.End(true);
    ASSERT_TRUE(Eventually([&] { return holds(update.update_id()); }));
    if (version == 1) {
      v1::PinUpdate pin;
      pin.set_model("models/m");
      pin.set_update_id("u1");
      pin.set_pin(true);
      b.mover().PinUpdate(pin);
    }
  }
  EXPECT_TRUE(Eventually([&] { return !holds("u2"); }));
  EXPECT_TRUE(holds("u1"));
  const int64_t before = b.UsedBytes();
  v1::DropUpdate drop;
  drop.set_model("models/m");
  drop.set_update_id("u1");
  b.mover().DropUpdate(drop);
  EXPECT_FALSE(holds("u1"));
  EXPECT_LT(b.UsedBytes(), before);
}

// ---- IN_PLACE ----

TEST(InPlace, NothingIsCopiedAtTheSourceAndTheRanksWaitForTheirRelease) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 4);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STAGE, v1::PUBLISH_MODE_IN_PLACE, 2);
  update.Define();
  InPlaceRanks ranks(&a, define, "u", model, /*verify_source=*/true);
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  // Two slots for a flow, of at most a bucket each.
  EXPECT_LE(a.UsedBytes(), 2 * (64 << 10) + 4096);
  update.Move();
  ASSERT_NO_FATAL_FAILURE(ranks.Collect(&a, &update));
  ranks.ExpectTensors(define, model);
  update.Manifest();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "");
  }
  for (const auto& returned : ranks.returned) EXPECT_FALSE(returned);
  a.mover().ReleaseSources(Release("u"));
  ranks.Join();
  for (const absl::Status& status : ranks.results) EXPECT_TRUE(status.ok());
  update.ExpectWorkersEqual(model);
  update.End(true);
  EXPECT_TRUE(Eventually([&] { return a.UsedBytes() == 0; }));
}

TEST(InPlace, OnANodeWithItsOwnWorkersTheStoreIsFilled) {
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 2)
                                      .Worker("a")
                                      .Worker("b")
                                      .Build();
  const ModelBytes model(define, 5);
  TestNode a("a"), b("b");
  TestUpdate update(define, "u", 1, {&a, &b});
  update.SetModes(v1::UPDATE_MODE_STAGE, v1::PUBLISH_MODE_IN_PLACE, 0);
  update.Define();
  InPlaceRanks ranks(&a, define, "u", model);
  update.Prepare();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  ASSERT_NO_FATAL_FAILURE(ranks.Collect(&a, &update));
  update.Manifest();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "");
  }
  update.ExpectWorkersEqual(model);
  // The commit releases them, too.
  update.End(true);
  ranks.Join();
  for (const absl::Status& status : ranks.results) EXPECT_TRUE(status.ok());
}

TEST(InPlace, AnAbortTellsTheRanks) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 6);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STAGE, v1::PUBLISH_MODE_IN_PLACE, 0);
  update.Define();
  InPlaceRanks ranks(&a, define, "u", model);
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.End(false);
  ranks.Join();
  for (const absl::Status& status : ranks.results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  }
}

TEST(InPlace, ASourceThatChangesBetweenTwoReadsIsNamed) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 7);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STAGE, v1::PUBLISH_MODE_IN_PLACE, 0);
  update.Define();
  InPlaceRanks ranks(&a, define, "u", model);
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Move();
  ASSERT_NO_FATAL_FAILURE(ranks.Collect(&a, &update));
  ranks.memory[0].bytes[100] ^= 1;
  // Another way: everything is read again.
  update.Lose(&c);
  update.Prepare();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  const auto report = a.WaitFor([](const v1::NodeReport& r) {
    return r.has_update_verified() &&
           r.update_verified().failure().reason() == "SOURCE_CHANGED";
  });
  EXPECT_NE(report.update_verified().failure().message().find("rank 0"),
            std::string::npos)
      << report.ShortDebugString();
  update.End(false);
}

// ---- STREAM ----

// What a STREAM leaves: the workers' bytes, and nothing in the store.
TEST(Stream, BucketsGoFromSlotsIntoLiveMemory) {
  for (const v1::PublishMode publish :
       {v1::PUBLISH_MODE_SNAPSHOT, v1::PUBLISH_MODE_IN_PLACE}) {
    const v1::DefineLayout define = TwoReceivers();
    const ModelBytes model(define, 8);
    TestNode a("a"), b("b"), c("c");
    TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
    a.mover().SetSink(&sink_a);
    b.mover().SetSink(&sink_b);
    c.mover().SetSink(&sink_c);
    TestUpdate update(define, "u", 1, {&a, &b, &c});
    update.SetModes(v1::UPDATE_MODE_STREAM, publish, 2);
    update.Define();
    std::unique_ptr<InPlaceRanks> ranks;
    if (publish == v1::PUBLISH_MODE_IN_PLACE) {
      ranks = std::make_unique<InPlaceRanks>(&a, define, "u", model);
    }
    update.Prepare();
    for (TestNode* node : {&a, &b, &c}) {
      EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
    }
    EXPECT_EQ(sink_b.begun(), 0) << "before MoveUpdate nobody is touched";
    EXPECT_LE(b.UsedBytes(), 2 * (64 << 10) + 4096);
    update.Move();
    if (ranks != nullptr) {
      ASSERT_NO_FATAL_FAILURE(ranks->Collect(&a, &update));
    } else {
      ASSERT_TRUE(update.Snapshot(&a, model).ok());
    }
    update.Manifest();
    for (TestNode* node : {&a, &b, &c}) {
      const auto verified = node->WaitVerified();
      EXPECT_EQ(verified.failure().reason(), "") << verified.ShortDebugString();
    }
    ExpectBytes(define, model, 0, sink_b.live(0));
    ExpectBytes(define, model, 1, sink_c.live(1));
    update.End(true);
    for (TestNode* node : {&b, &c}) {
      EXPECT_TRUE(Eventually([&] { return node->UsedBytes() == 0; }));
      EXPECT_TRUE(node->store().HeldUpdates().empty());
    }
    EXPECT_EQ(sink_b.aborted(), 0);
  }
}

TEST(Stream, OnOneNodeWorkersReadTheTrainersMemory) {
  const v1::DefineLayout define =
      ModelBuilder().SmallModel(4).FsdpRanks("a", 2).Worker("a").Build();
  const ModelBytes model(define, 9);
  TestNode a("a");
  TestSink sink(&a, define);
  a.mover().SetSink(&sink);
  TestUpdate update(define, "u", 1, {&a});
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_IN_PLACE, 0);
  update.Define();
  InPlaceRanks ranks(&a, define, "u", model);
  update.Prepare();
  EXPECT_EQ(a.WaitPrepared().failure().reason(), "");
  update.Move();
  ASSERT_NO_FATAL_FAILURE(ranks.Collect(&a, &update));
  update.Manifest();
  EXPECT_EQ(a.WaitVerified().failure().reason(), "");
  ranks.ExpectTensors(define, model);
  EXPECT_EQ(sink.direct_reads(),
            static_cast<int>(AllBuckets(a, define).size()));
  ExpectBytes(define, model, 0, sink.live(0));
  update.End(true);
  ranks.Join();
}

TEST(Stream, ASlowWorkerHoldsTheChainAndNothingPilesUp) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 10);
  TestNode a("a"), b("b"), c("c");
  TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
  a.mover().SetSink(&sink_a);
  b.mover().SetSink(&sink_b);
  c.mover().SetSink(&sink_c);
  sink_b.Hold(true);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT, 2);
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  update.Manifest();
  // Both slots of the flow, and no more.
  EXPECT_TRUE(Eventually([&] { return sink_b.held() == 2; }));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(sink_b.held(), 2);
  sink_b.Hold(false);
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "");
  }
  ExpectBytes(define, model, 0, sink_b.live(0));
  ExpectBytes(define, model, 1, sink_c.live(1));
  update.End(true);
}

TEST(Stream, AWorkerThatNeverTakesFailsTheMoveByNameAndTheAbortEndsIt) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 11);
  TestNode a("a"), b("b"), c("c");
  TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
  a.mover().SetSink(&sink_a);
  b.mover().SetSink(&sink_b);
  c.mover().SetSink(&sink_c);
  sink_b.Hold(true);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT, 1);
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  for (TestNode* node : {&a, &b, &c}) {
    v1::MoveUpdate move = update.MoveCommand(node);
    move.mutable_progress_timeout()->set_seconds(1);
    node->mover().MoveUpdate(move);
  }
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  EXPECT_EQ(a.WaitVerified().failure().reason(), "NO_PROGRESS");
  update.End(false);
  EXPECT_TRUE(Eventually([&] {
    return sink_b.aborted() > 0 && b.UsedBytes() == 0 && a.UsedBytes() == 0;
  }));
}

// The end comes while the workers are about to be told.
TEST(Stream, AnAbortThatOvertakesTheBeginningIsSaidAgain) {
  const v1::DefineLayout define = TwoReceivers();
  TestNode a("a"), b("b"), c("c");
  TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
  a.mover().SetSink(&sink_a);
  b.mover().SetSink(&sink_b);
  c.mover().SetSink(&sink_c);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  absl::Notification beginning;
  sink_b.before_begin = [&] {
    beginning.Notify();
    EXPECT_TRUE(Eventually([&] { return sink_b.aborted() == 1; }));
  };
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT, 1);
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Move();
  ASSERT_TRUE(beginning.WaitForNotificationWithTimeout(kDeadline));
  update.End(false);
  EXPECT_TRUE(
      Eventually([&] { return sink_b.begun() == 1 && !sink_b.left_behind(); }));
}

TEST(Stream, AfterALostReceiverTheOthersGetTheRestFromTheSource) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 12);
  TestNode a("a"), b("b"), c("c");
  TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
  a.mover().SetSink(&sink_a);
  b.mover().SetSink(&sink_b);
  c.mover().SetSink(&sink_c);
  sink_c.Hold(true);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT, 2);
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  // c has taken nothing, so b is somewhere in the middle.
  EXPECT_TRUE(Eventually([&] { return sink_c.held() == 2; }));
  c.mover().Shutdown();
  update.Lose(&c);
  update.Prepare();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  update.Manifest();
  for (TestNode* node : {&a, &b}) {
    v1::NodeReport report = node->WaitFor([](const v1::NodeReport& r) {
      return r.has_update_verified() && !r.update_verified().has_failure();
    });
  }
  ExpectBytes(define, model, 0, sink_b.live(0));
  update.End(true);
}

// ---- Equal bytes ----

}  // namespace
}  // namespace daemon
}  // namespace weightsync
