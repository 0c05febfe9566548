// Whole updates between nodes of one process: real bytes over loopback.

#include "daemon/node/mover.h"

#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/eventually.h"
#include "transport/fault/fault_policy.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::kDeadline;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::RankMemory;
using testing::TestNode;
using testing::TestUpdate;
using transport::Eventually;
using transport::FaultRules;
using transport::ReasonOf;

// Three FSDP ranks on node a; two tensor-parallel workers on b; on c one worker
// that wants all and one that wants half.
v1::DefineLayout ThreeNodes(int64_t scale = 4) {
  return ModelBuilder()
      .SmallModel(scale)
      .FsdpRanks("a", 3)
      .TensorParallelWorker("b", 0, 2)
      .TensorParallelWorker("b", 1, 2)
      .TensorParallelWorker("c", 1, 2)
      .Build();
}

// What is sent over each edge, "a->c", and let through: (bucket, frame).
class SentFrames : public transport::FaultPolicy {
 public:
  explicit SentFrames(transport::FaultPolicy* rules = nullptr)
      : rules_(rules) {}
  absl::Status OnConnect(absl::string_view from,
                         absl::string_view to) override {
    return rules_ == nullptr ? absl::OkStatus() : rules_->OnConnect(from, to);
  }
  transport::FrameFault OnSend(absl::string_view from, absl::string_view to,
                               uint64_t bucket, uint32_t frame) override {
    transport::FrameFault fault;
    if (rules_ != nullptr) fault = rules_->OnSend(from, to, bucket, frame);
    if (fault.kind == transport::FrameFault::Kind::kNone) {
      absl::MutexLock lock(&mutex_);
      sent_[absl::StrCat(from, "->", to)].insert({bucket, frame});
    }
    return fault;
  }
  std::set<std::pair<uint64_t, uint32_t>> Over(const std::string& edge) {
    absl::MutexLock lock(&mutex_);
    return sent_[edge];
  }

 private:
  transport::FaultPolicy* const rules_;
  absl::Mutex mutex_;
  std::map<std::string, std::set<std::pair<uint64_t, uint32_t>>> sent_
      ABSL_GUARDED_BY(mutex_);
};

FaultRules::Rule Parse(const std::string& text) {
  auto rules = FaultRules::Parse(text);
  EXPECT_TRUE(rules.ok()) << rules.status();
  return (*rules)[0];
}

TEST(Mover, EveryWorkerGetsExactlyTheTrainersBytes) {
  const v1::DefineLayout define = ThreeNodes();
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  for (int version = 1; version <= 4; ++version) {
    const ModelBytes model(define, version);
    TestUpdate update(define, "update-" + std::to_string(version), version,
                      nodes);
    ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
    // Applied before it is ended, as the coordinator has it.
    update.ExpectWorkersEqual(model);
    update.End(/*committed=*/true);
    for (TestNode* node : nodes) {
      EXPECT_TRUE(Eventually([&] {
        auto held = node->store().HeldUpdates();
        return !held.empty() && held[0].version() == version;
      }));
      EXPECT_LE(node->store().HeldUpdates().size(), 2u);
    }
    // And from the store afterwards, as a late joiner.
    update.ExpectWorkersEqual(model);
  }
}

TEST(Mover, SnapshotsMayComeBeforeThePreparation) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 7);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Manifest();
  update.Move();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "");
  }
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST(Mover, RanksOfOneNodeAreCopiedAtTheSameTime) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 8);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const RankMemory memory = MakeRankMemory(define, model, rank);
      EXPECT_TRUE(a.Snapshot(define, "u", 1, rank, memory).ok());
    });
  }
  update.Prepare();
  update.Move();
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < 3; ++rank) {
    auto report = a.WaitFor(
        [](const v1::NodeReport& r) { return r.has_rank_snapshotted(); });
    for (const v1::BucketDigest& bucket : report.rank_snapshotted().buckets()) {
      *update.manifest().add_buckets() = bucket;
    }
  }
  update.Manifest();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "");
  }
  update.ExpectWorkersEqual(model);
  update.End(true);
}

// Trainer and worker on one node: nothing travels.
TEST(Mover, OneNodeAlone) {
  const v1::DefineLayout define =
      ModelBuilder().SmallModel().FsdpRanks("a", 2).Worker("a").Build();
  const ModelBytes model(define, 9);
  TestNode a("a");
  TestUpdate update(define, "u", 1, {&a});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.ExpectWorkersEqual(model);
  update.End(true);
}

// Each of two nodes has a trainer rank and a worker: both send and receive.
TEST(Mover, SourcesThatAreReceiversToo) {
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(3)
                                      .FsdpRanks("a", 1)
                                      .Worker("a")
                                      .Worker("b")
                                      .Build();
  v1::DefineLayout both = define;
  // Halve rank 0's shards: rank 1, on b, holds the other half.
  both.mutable_sources(0)->clear_shards();
  v1::LayoutSource* second = both.add_sources();
  second->set_rank(1);
  second->set_node(1);
  for (int p = 0; p < both.catalog_size(); ++p) {
    v1::OrdinalBox* shard = both.mutable_sources(p % 2)->add_shards();
    shard->set_ordinal(p);
    for (int64_t extent : both.catalog(p).shape()) {
      shard->mutable_box()->add_offset(0);
      shard->mutable_box()->add_extent(extent);
    }
    if (both.catalog(p).shape().empty()) shard->mutable_box();
  }
  both.set_layout_id(ComputeNodeLayout(both, "")->id);
  const ModelBytes model(both, 10);
  TestNode a("a"), b("b");
  TestUpdate update(both, "u", 1, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST(Mover, ProgressIsReported) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 11);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(model));
  int64_t last = -1;
  for (const v1::NodeReport& report : b.TakeReports()) {
    if (!report.has_update_progress()) continue;
    EXPECT_GT(report.update_progress().received_bytes(), last);
    last = report.update_progress().received_bytes();
    EXPECT_LE(last, report.update_progress().needed_bytes());
  }
  EXPECT_GT(last, 1 << 18) << "the last one has all bytes";
  update.End(true);
}

// The link to the coordinator broke as it was said.
TEST(Mover, WhatCameOfARoundIsSaidAgain) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 12);
  TestNode::Options small;
  small.budget_bytes = 300 << 10;
  TestNode a("a"), b("b", small), c("c");
  {
    TestUpdate refused(define, "u", 1, {&a, &b, &c});
    refused.Define();
    refused.Prepare();
    EXPECT_EQ(b.WaitPrepared().failure().reason(), "NO_STORE_ROOM");
    refused.PrepareAgain(&b);
    EXPECT_EQ(b.WaitPrepared().failure().reason(), "NO_STORE_ROOM");
    refused.End(false);
    // The others had room, and wait for b in vain.
    EXPECT_TRUE(
        Eventually([&] { return a.UsedBytes() == 0 && c.UsedBytes() == 0; }));
    a.TakeReports();
  }
  const v1::DefineLayout fits = ModelBuilder("models/n")
                                    .SmallModel()
                                    .FsdpRanks("a", 3)
                                    .TensorParallelWorker("b", 0, 2)
                                    .Build();
  const ModelBytes other(fits, 13);
  TestUpdate update(fits, "v", 1, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(update.RunToVerified(other));
  for (TestNode* node : {&a, &b}) {
    update.PrepareAgain(node);
    node->mover().MoveUpdate(update.MoveCommand(node));
    EXPECT_EQ(node->WaitPrepared().failure().reason(), "");
    const v1::UpdateVerified verified = node->WaitVerified();
    EXPECT_EQ(verified.update_id(), "v");
    EXPECT_EQ(verified.failure().reason(), "");
  }
  update.End(true);
}

TEST(Mover, AnUpdateOverTheBudgetIsRefusedAndDisturbsNobody) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 12);
  TestNode::Options small;
  small.budget_bytes = 300 << 10;
  TestNode a("a"), b("b", small), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  const v1::UpdatePrepared refused = b.WaitPrepared();
  EXPECT_EQ(refused.failure().reason(), "NO_STORE_ROOM");
  EXPECT_NE(refused.failure().message().find("307200"), std::string::npos)
      << refused.failure().message();
  update.End(false);
  EXPECT_TRUE(
      Eventually([&] { return a.UsedBytes() == 0 && c.UsedBytes() == 0; }));

  const v1::DefineLayout fits = ModelBuilder("models/n")
                                    .SmallModel()
                                    .FsdpRanks("a", 3)
                                    .TensorParallelWorker("b", 0, 2)
                                    .Worker("c")
                                    .Build();
  const ModelBytes other(fits, 13);
  TestUpdate next(fits, "v", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(next.RunToVerified(other));
  next.ExpectWorkersEqual(other);
  next.End(true);
}

// Who has sent everything on hears nothing while the last link of the chain
// works through it, for longer than anything may stand still.
TEST(Mover, ASlowEndOfAChainIsWaitedFor) {
  FaultRules faults({Parse("kind=delay edge=b->c ms=250 count=0")});
  TestNode::Options slow;
  slow.faults = &faults;
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(4)
                                      .FsdpRanks("a", 2)
                                      .Worker("b")
                                      .Worker("c")
                                      .Build();
  const ModelBytes model(define, 15);
  TestNode a("a"), b("b", slow), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  const absl::Time start = absl::Now();
  for (TestNode* node : {&a, &b, &c}) {
    v1::MoveUpdate move = update.MoveCommand(node);
    move.mutable_progress_timeout()->set_nanos(400000000);
    node->mover().MoveUpdate(move);
  }
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  update.Manifest();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "") << node->name();
  }
  // Otherwise it was no test.
  EXPECT_GT(absl::Now() - start, absl::Milliseconds(800));
  update.ExpectWorkersEqual(model);
  update.End(true);
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_TRUE(
        Eventually([&] { return !node->store().HeldUpdates().empty(); }));
    for (const v1::NodeReport& report : node->TakeReports()) {
      EXPECT_FALSE(report.update_verified().has_failure())
          << node->name() << ": " << report.ShortDebugString();
    }
  }
}

TEST(Mover, AbortInTheMiddleFreesEverything) {
  // The link to b is slow: the update cannot end by itself.
  FaultRules faults({Parse("kind=delay edge=a->b ms=50 count=0")});
  TestNode::Options slow;
  slow.faults = &faults;
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 14);
  TestNode a("a", slow), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  std::thread rank([&] {
    const RankMemory memory = MakeRankMemory(define, model, 0);
    a.Snapshot(define, "u", 1, 0, memory).status().IgnoreError();
  });
  rank.join();
  const absl::Time start = absl::Now();
  update.End(false);
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_TRUE(Eventually([&] { return node->UsedBytes() == 0; }))
        << node->name();
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  // A rank that comes now is told why.
  const RankMemory memory = MakeRankMemory(define, model, 1);
  auto late = a.Snapshot(define, "u", 1, 1, memory);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(late.status()), "UPDATE_ENDED");
  EXPECT_TRUE(b.store().HeldUpdates().empty());

  // The next one is not disturbed.
  faults.Set({});
  TestUpdate next(define, "v", 2, {&a, &b, &c});
  for (TestNode* node : {&a, &b, &c}) node->TakeReports();
  ASSERT_NO_FATAL_FAILURE(next.RunToVerified(model));
  next.ExpectWorkersEqual(model);
  next.End(true);
}

TEST(Mover, ARankThatDiesFailsItsSnapshot) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 15);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  auto cancel = std::make_shared<CancelFlag>();
  cancel->Cancel(transport::MakeError(absl::StatusCode::kAborted, "RANK_LOST",
                                      "rank 0 ended"));
  const RankMemory memory = MakeRankMemory(define, model, 0);
  auto result = a.Snapshot(define, "u", 1, 0, memory, cancel);
  EXPECT_EQ(ReasonOf(result.status()), "RANK_LOST");
  const auto report = a.WaitFor(
      [](const v1::NodeReport& r) { return r.has_rank_snapshotted(); });
  EXPECT_EQ(report.rank_snapshotted().failure().reason(), "RANK_LOST");
  update.End(false);
  EXPECT_TRUE(Eventually([&] { return a.UsedBytes() == 0; }));
}

// b is in the middle of the chain to c. It vanishes; c gets the rest on another
// route. `kept`: some of what b had sent did not travel again.
void LoseTheMiddleOfAChain(bool* kept) {
  constexpr int kLet = 20;  // of 27
  FaultRules faults({Parse(absl::StrCat("kind=cut edge=b->c after=", kLet))});
  SentFrames of_a, of_b(&faults);
  TestNode::Options counted, faulty;
  counted.faults = &of_a;
  faulty.faults = &of_b;
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(16)
                                      .FsdpRanks("a", 3)
                                      .Worker("b")
                                      .Worker("c")
                                      .Build();
  const ModelBytes model(define, 16);
  TestNode a("a", counted), b("b", faulty), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  const v1::UpdateVerified failed =
      c.WaitFor([](const v1::NodeReport& r) {
         return r.has_update_verified() &&
                !r.update_verified().failure().reason().empty();
       }).update_verified();
  EXPECT_EQ(failed.edge_from(), "b");
  EXPECT_EQ(failed.edge_to(), "c");
  EXPECT_EQ(failed.epoch().counter(), 1);

  update.Lose(&b);
  b.mover().Shutdown();
  a.TakeReports();
  update.Prepare();
  for (TestNode* node : {&a, &c}) {
    const v1::UpdatePrepared prepared = node->WaitPrepared();
    EXPECT_EQ(prepared.failure().reason(), "") << prepared.ShortDebugString();
    EXPECT_EQ(prepared.epoch().counter(), 2);
  }
  update.Move();
  update.Manifest();
  for (TestNode* node : {&a, &c}) {
    const v1::UpdateVerified verified =
        node->WaitFor([](const v1::NodeReport& r) {
              return r.has_update_verified() &&
                     r.update_verified().epoch().counter() == 2;
            })
            .update_verified();
    EXPECT_EQ(verified.failure().reason(), "") << verified.ShortDebugString();
  }
  update.ExpectWorkersEqual(model);
  const auto had = of_b.Over("b->c");
  const auto again = of_a.Over("a->c");
  ASSERT_GE(had.size(), static_cast<size_t>(kLet));
  size_t twice = 0;
  for (const auto& frame : had) twice += again.count(frame);
  *kept = twice < had.size();
  EXPECT_FALSE(again.empty());
  update.End(true);
}

// What c had got from b it does not ask a for. What was on its way when the
// edge was cut is lost with it: on a busy machine that may be all.
TEST(Mover, AHigherEpochGoesOnWithoutALostReceiver) {
  bool kept = false;
  for (int attempt = 0; attempt < 20 && !kept && !::testing::Test::HasFailure();
       ++attempt) {
    LoseTheMiddleOfAChain(&kept);
  }
  EXPECT_TRUE(kept);
}

TEST(Mover, AnOldEpochIsRefused) {
  const v1::DefineLayout define = ThreeNodes();
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  const v1::PrepareUpdate old = update.PrepareCommand(&b);
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitPrepared().epoch().counter(), 2);
  }
  b.mover().PrepareUpdate(old);
  EXPECT_EQ(b.WaitPrepared().failure().reason(), "STALE_EPOCH");
  update.End(false);
}

TEST(Mover, ADamagedFrameIsRepaired) {
  FaultRules faults({Parse("kind=damage edge=a->* after=3 count=2")});
  TestNode::Options faulty;
  faulty.faults = &faults;
  const v1::DefineLayout define = ThreeNodes(16);
  const ModelBytes model(define, 17);
  TestNode a("a", faulty), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_EQ(node->WaitPrepared().failure().reason(), "");
  }
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  update.Manifest();
  int64_t repaired = 0;
  for (TestNode* node : {&a, &b, &c}) {
    const v1::UpdateVerified verified = node->WaitVerified();
    EXPECT_EQ(verified.failure().reason(), "") << verified.ShortDebugString();
    repaired += verified.repaired_frames();
  }
  EXPECT_EQ(faults.strikes(), 2);
  EXPECT_EQ(repaired, 2);
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST(Mover, BytesThatDisagreeWithTheManifestAreNotVerified) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 18);
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  for (v1::BucketDigest& bucket : *update.manifest().mutable_buckets()) {
    bucket.mutable_digest()->set_lane1(bucket.digest().lane1() ^ 1);
  }
  update.Manifest();
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(node->WaitVerified().failure().reason(), "MANIFEST_MISMATCH");
    EXPECT_TRUE(node->store().HeldUpdates().empty());
  }
  update.End(false);
}

TEST(Mover, AFlowThatBringsTooLittleIsRefused) {
  const v1::DefineLayout define = ThreeNodes();
  TestNode a("a"), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  v1::PrepareUpdate command = update.PrepareCommand(&b);
  command.mutable_epoch()->set_counter(9);
  command.mutable_flows()->RemoveLast();
  b.mover().PrepareUpdate(command);
  const auto report = b.WaitFor([](const v1::NodeReport& r) {
    return r.has_update_prepared() &&
           r.update_prepared().epoch().counter() == 9;
  });
  EXPECT_EQ(report.update_prepared().failure().reason(), "FLOW_INVALID");
  command.set_update_id("w");
  command.set_layout_id("nothing");
  b.mover().PrepareUpdate(command);
  EXPECT_EQ(b.WaitFor([](const v1::NodeReport& r) {
               return r.update_prepared().update_id() == "w";
             })
                .update_prepared()
                .failure()
                .reason(),
            "LAYOUT_UNKNOWN");
  update.End(false);
}

TEST(Mover, ADryRunMakesMemoryAndLeavesNoUpdate) {
  const v1::DefineLayout define = ThreeNodes();
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  TestUpdate update(define, "dry", 0, nodes);
  update.Define();
  update.Prepare();
  for (TestNode* node : nodes) node->WaitPrepared();
  // As a dry run, in the next epoch.
  for (TestNode* node : nodes) {
    v1::PrepareUpdate command = update.PrepareCommand(node);
    command.set_update_id("really-dry");
    command.set_dry(true);
    node->mover().PrepareUpdate(command);
  }
  update.End(false);
  for (TestNode* node : nodes) {
    const v1::UpdatePrepared prepared = node->WaitPrepared();
    EXPECT_EQ(prepared.update_id(), "really-dry");
    EXPECT_EQ(prepared.failure().reason(), "");
    v1::EndUpdate end;
    end.set_model(define.model());
    end.set_update_id("really-dry");
    node->mover().EndUpdate(end);
    EXPECT_TRUE(Eventually([&] { return node->UsedBytes() == 0; }));
    EXPECT_FALSE(node->store().ArenaIds().empty());
  }
}

TEST(Mover, AbandoningKeepsWhatIsWhole) {
  const v1::DefineLayout define = ThreeNodes();
  const ModelBytes model(define, 19);
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  TestUpdate whole(define, "whole", 1, nodes);
  ASSERT_NO_FATAL_FAILURE(whole.RunToVerified(model));
  TestUpdate begun(define, "begun", 2, nodes);
  begun.Prepare();
  for (TestNode* node : nodes) {
    node->WaitPrepared();
    node->mover().AbandonUpdates(
        transport::MakeError(absl::StatusCode::kUnavailable, "COORDINATOR_LOST",
                             "the coordinator is gone"));
  }
  for (TestNode* node : nodes) {
    EXPECT_TRUE(Eventually([&] { return !node->store().Pin("begun").ok(); }));
    ASSERT_EQ(node->store().HeldUpdates().size(), 1u);
    EXPECT_EQ(node->store().HeldUpdates()[0].update_id(), "whole");
  }
  whole.End(true);
  whole.ExpectWorkersEqual(model);
}

TEST(Mover, ShutdownEndsInTheMiddle) {
  FaultRules faults({Parse("kind=silence edge=a->b")});
  TestNode::Options faulty;
  faulty.faults = &faults;
  const v1::DefineLayout define = ThreeNodes(16);
  const ModelBytes model(define, 20);
  TestNode a("a", faulty), b("b"), c("c");
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b, &c}) node->WaitPrepared();
  update.Move();
  ASSERT_TRUE(update.Snapshot(&a, model).ok());
  const absl::Time start = absl::Now();
  for (TestNode* node : {&a, &b, &c}) node->mover().Shutdown();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  for (TestNode* node : {&a, &b, &c}) EXPECT_EQ(node->UsedBytes(), 0);
  // Afterwards it says so.
  b.TakeReports();
  b.mover().PrepareUpdate(update.PrepareCommand(&b));
  EXPECT_EQ(b.WaitPrepared().failure().reason(), "SHUTTING_DOWN");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
