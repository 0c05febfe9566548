// Buckets that go from memory of a GPU to memory of another node's, and never
// through host memory; and those that cannot.

#include <memory>
#include <string>
#include <vector>

#include "daemon/node/in_place_ranks.h"
#include "daemon/node/placement.h"
#include "daemon/node/store.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/eventually.h"
#include "transport/fault/fault_policy.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::ExpectBytes;
using testing::InPlaceRanks;
using testing::MakeRankMemory;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::RankMemory;
using testing::TestNode;
using testing::TestSink;
using testing::TestUpdate;
using transport::Eventually;
using transport::FaultRules;
using transport::ReasonOf;

FaultRules::Rule Parse(const std::string& text) {
  auto rules = FaultRules::Parse(text);
  EXPECT_TRUE(rules.ok()) << rules.status();
  return (*rules)[0];
}

TestNode::Options OnGpu(const std::string& device) {
  TestNode::Options options;
  options.device_budget_bytes = 64 << 20;
  options.payload_device = device;
  return options;
}

// Two ranks on a; workers on b and c.
v1::DefineLayout Chain(int scale = 4) {
  return ModelBuilder()
      .SmallModel(scale)
      .FsdpRanks("a", 2)
      .Worker("b")
      .Worker("c")
      .Build();
}

int64_t HostBytes(TestNode& node) {
  v1::MemoryUse use;
  node.store().FillMemoryUse(&use);
  return use.store_reserved_bytes();
}

class DeviceGroupTest : public ::testing::Test {
 protected:
  // The workers of `node` reach `device` alone.
  static void Place(TestNode* node, const std::string& device) {
    node->placement().SetWorker("models/m", "w", {device});
    node->SetReachable({device});
  }
  static void Prepare(TestUpdate* update, const std::vector<TestNode*>& nodes) {
    update->Prepare();
    for (TestNode* node : nodes) {
      const auto prepared = node->WaitPrepared();
      EXPECT_EQ(prepared.failure().message(), "") << node->name();
    }
  }
  // Packs the tensors of both ranks, which are on gpu-0 of `a`.
  static void Snapshot(TestNode* a, TestUpdate* update,
                       const ModelBytes& model) {
    for (int rank = 0; rank < 2; ++rank) {
      const RankMemory memory = MakeRankMemory(update->define(), model, rank);
      a->gpus().SetTensors(memory.bytes.data(),
                           static_cast<int64_t>(memory.bytes.size()), "gpu-0");
      auto taken =
          a->Snapshot(update->define(), update->update_id(), 1, rank, memory);
      ASSERT_TRUE(taken.ok()) << taken.status();
      for (const v1::BucketDigest& digest : taken->buckets)
        *update->manifest().add_buckets() = digest;
      a->gpus().ForgetTensors();
    }
  }
  static void PlaceRanks(TestNode* a) {
    for (int rank = 0; rank < 2; ++rank)
      a->placement().SetRank("models/m", rank, "gpu-0");
  }
  static void ExpectVerified(const std::vector<TestNode*>& nodes) {
    for (TestNode* node : nodes) {
      const auto verified = node->WaitVerified();
      EXPECT_EQ(verified.failure().message(), "") << node->name();
    }
  }
  // From Define to the verified update.
  static void Run(TestUpdate* update, const std::vector<TestNode*>& nodes,
                  const ModelBytes& model) {
    PlaceRanks(nodes[0]);
    update->Define();
    ASSERT_NO_FATAL_FAILURE(Prepare(update, nodes));
    update->Move();
    ASSERT_NO_FATAL_FAILURE(Snapshot(nodes[0], update, model));
    update->Manifest();
    ExpectVerified(nodes);
  }
};

TEST_F(DeviceGroupTest, FromGpuToGpuToGpuAndNeverThroughTheHost) {
  TestNode a("a", OnGpu("gpu-0")), b("b", OnGpu("gpu-1")),
      c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-1");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain();
  for (int version = 1; version <= 4; ++version) {
    const ModelBytes model(define, static_cast<uint64_t>(version));
    TestUpdate update(define, "u" + std::to_string(version), version,
                      {&a, &b, &c});
    ASSERT_NO_FATAL_FAILURE(Run(&update, {&a, &b, &c}, model));
    for (TestNode* node : {&a, &b, &c}) {
      EXPECT_EQ(HostBytes(*node), 0) << node->name();
      if (version == 1) {
        EXPECT_EQ(node->gpus().crossed_bytes(), 0) << node->name();
      }
    }
    update.ExpectWorkersEqual(model);
    update.End(true);
  }
  EXPECT_GT(b.gpus().device_bytes("gpu-1"), 0);
  EXPECT_GT(c.gpus().device_bytes("gpu-2"), 0);
}

TEST_F(DeviceGroupTest, ADamagedFrameIsRepairedBetweenGpus) {
  FaultRules faults({Parse("kind=damage edge=a->* after=3 count=2")});
  TestNode::Options faulty = OnGpu("gpu-0");
  faulty.faults = &faults;
  TestNode a("a", faulty), b("b", OnGpu("gpu-1")), c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-1");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain(16);
  const ModelBytes model(define, 7);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  PlaceRanks(&a);
  update.Define();
  ASSERT_NO_FATAL_FAILURE(Prepare(&update, {&a, &b, &c}));
  update.Move();
  ASSERT_NO_FATAL_FAILURE(Snapshot(&a, &update, model));
  update.Manifest();
  int64_t repaired = 0;
  for (TestNode* node : {&a, &b, &c}) {
    const auto verified = node->WaitVerified();
    EXPECT_EQ(verified.failure().message(), "");
    repaired += verified.repaired_frames();
  }
  EXPECT_EQ(repaired, 2);
  // What stood for the damage was in host memory; nothing else was.
  EXPECT_LE(a.gpus().crossed_bytes(), 2 * transport::Landing::kFrameBytes);
  EXPECT_EQ(b.gpus().crossed_bytes(), 0);
  EXPECT_EQ(c.gpus().crossed_bytes(), 0);
  update.ExpectWorkersEqual(model);
  update.End(true);
}

// Bytes that changed on the holder's GPU are blamed on it, and on no wire.
TEST_F(DeviceGroupTest, AHolderWhoseGpuDamagedThemIsNamed) {
  FaultRules faults({Parse("kind=damage edge=a->* after=3 count=1")});
  TestNode::Options faulty = OnGpu("gpu-0");
  faulty.faults = &faults;
  TestNode a("a", faulty), b("b", OnGpu("gpu-1")), c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-1");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain(16);
  const ModelBytes model(define, 8);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  PlaceRanks(&a);
  update.Define();
  // Everything is packed before anything moves.
  ASSERT_NO_FATAL_FAILURE(Prepare(&update, {&a, &b, &c}));
  ASSERT_NO_FATAL_FAILURE(Snapshot(&a, &update, model));
  a.gpus().DamageSegments("gpu-0");
  update.Move();
  update.Manifest();
  const auto failed =
      a.WaitFor([](const v1::NodeReport& report) {
         return report.has_update_verified() &&
                !report.update_verified().failure().reason().empty();
       }).update_verified();
  EXPECT_EQ(failed.failure().reason(), "HOLDER_DAMAGED")
      << failed.ShortDebugString();
  EXPECT_EQ(failed.edge_from(), "a");
  update.End(false);
}

// The room is on a GPU that the group does not reach.
TEST_F(DeviceGroupTest, WhatIsToLieOnAnotherGpuLandsBesideIt) {
  TestNode a("a", OnGpu("gpu-0")), b("b", OnGpu("gpu-1")),
      c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-5");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain();
  const ModelBytes model(define, 9);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(Run(&update, {&a, &b, &c}, model));
  EXPECT_GT(HostBytes(b), 0);
  EXPECT_GT(b.gpus().device_bytes("gpu-5"), 0);
  EXPECT_EQ(HostBytes(a), 0);
  EXPECT_EQ(HostBytes(c), 0);
  EXPECT_EQ(c.gpus().crossed_bytes(), 0);
  update.ExpectWorkersEqual(model);
  update.End(true);
  EXPECT_TRUE(Eventually([&] { return b.UsedBytes() == 0; }));
}

// Of a chain in which one has TCP alone, those at its edges stage.
TEST_F(DeviceGroupTest, WhereAnEdgeGoesOverTcpItsEndsGoByTheHost) {
  TestNode::Options on_a = OnGpu("gpu-0"), on_b = OnGpu("gpu-1");
  on_a.any_way = on_b.any_way = true;
  TestNode::Options on_c;
  on_c.device_budget_bytes = 64 << 20;
  on_c.any_way = true;
  TestNode a("a", on_a), b("b", on_b), c("c", on_c);
  Place(&b, "gpu-1");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain();
  for (int version = 1; version <= 2; ++version) {
    const ModelBytes model(define, static_cast<uint64_t>(version));
    TestUpdate update(define, "u" + std::to_string(version), version,
                      {&a, &b, &c});
    ASSERT_NO_FATAL_FAILURE(Run(&update, {&a, &b, &c}, model));
    EXPECT_EQ(HostBytes(a), 0) << "its only edge goes over the channel";
    EXPECT_GT(HostBytes(b), 0);
    EXPECT_GT(HostBytes(c), 0);
    update.ExpectWorkersEqual(model);
    update.End(true);
  }
}

// b vanishes in the middle; what c has on its GPU stays, and the rest comes
// from a, over TCP or over a channel.
TEST_F(DeviceGroupTest, AfterALostMemberTheRestComesAnotherWay) {
  for (const bool over_tcp : {false, true}) {
    FaultRules faults({Parse("kind=cut edge=b->c after=9")});
    TestNode::Options on_b = OnGpu("gpu-1"), on_c = OnGpu("gpu-2");
    on_b.faults = &faults;
    TestNode::Options on_a = OnGpu("gpu-0");
    on_a.any_way = on_b.any_way = on_c.any_way = true;
    TestNode a("a", on_a), b("b", on_b), c("c", on_c);
    Place(&b, "gpu-1");
    Place(&c, "gpu-2");
    const v1::DefineLayout define = Chain(16);
    const ModelBytes model(define, 11);
    TestUpdate update(define, "u", 1, {&a, &b, &c});
    PlaceRanks(&a);
    update.Define();
    ASSERT_NO_FATAL_FAILURE(Prepare(&update, {&a, &b, &c}));
    update.Move();
    ASSERT_NO_FATAL_FAILURE(Snapshot(&a, &update, model));
    const auto failed =
        c.WaitFor([](const v1::NodeReport& report) {
           return report.has_update_verified() &&
                  !report.update_verified().failure().reason().empty();
         }).update_verified();
    EXPECT_EQ(failed.edge_from(), "b") << failed.ShortDebugString();
    update.Lose(&b);
    b.mover().Shutdown();
    a.TakeReports();
    if (over_tcp) a.gpus().RefuseChannels();
    ASSERT_NO_FATAL_FAILURE(Prepare(&update, {&a, &c}));
    update.Move();
    update.Manifest();
    for (TestNode* node : {&a, &c}) {
      const auto verified =
          node->WaitFor([](const v1::NodeReport& report) {
                return report.has_update_verified() &&
                       report.update_verified().epoch().counter() == 2;
              })
              .update_verified();
      EXPECT_EQ(verified.failure().message(), "");
    }
    EXPECT_EQ(HostBytes(a) > 0, over_tcp);
    EXPECT_EQ(HostBytes(c) > 0, over_tcp);
    c.SetReachable({"gpu-2"});
    update.ExpectWorkersEqual(model);
    update.End(true);
  }
}

TEST_F(DeviceGroupTest, AHolderSendsFromItsGpuToAnother) {
  TestNode a("a", OnGpu("gpu-0")), b("b", OnGpu("gpu-1")),
      c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-1");
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain();
  const ModelBytes model(define, 12);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  ASSERT_NO_FATAL_FAILURE(Run(&update, {&a, &b, &c}, model));
  update.End(true);
  for (TestNode* node : {&a, &b, &c}) {
    ASSERT_TRUE(
        Eventually([&] { return !node->store().HeldUpdates().empty(); }));
  }
  c.gpus().Lose("gpu-2");
  c.store().LoseDevice("gpu-2");
  EXPECT_FALSE(c.store().Has("u"));
  auto layout = c.layouts().Find(define.layout_id());
  ASSERT_TRUE(layout.ok());
  const std::vector<int32_t> needed = (*layout)->needed_buckets;
  const v1::PrepareUpdate fetch = update.FetchCommand(&b, &c, needed);
  for (TestNode* node : {&b, &c}) node->mover().PrepareUpdate(fetch);
  for (TestNode* node : {&b, &c}) {
    EXPECT_EQ(node->WaitPrepared().failure().message(), "");
  }
  for (TestNode* node : {&b, &c})
    node->mover().MoveUpdate(update.MoveCommand(node));
  c.mover().UpdateManifest(update.manifest());
  EXPECT_EQ(c.WaitVerified().failure().message(), "");
  EXPECT_TRUE(Eventually([&] { return c.store().Holds("u", needed); }));
  for (TestNode* node : {&a, &b, &c}) {
    EXPECT_EQ(HostBytes(*node), 0) << node->name();
    EXPECT_EQ(node->gpus().crossed_bytes(), 0) << node->name();
  }
  update.ExpectWorkersEqual(model);
}

// ---- Lanes ----

TEST_F(DeviceGroupTest, LanesPassThroughSlotsOfTheGpus) {
  for (const v1::PublishMode publish :
       {v1::PUBLISH_MODE_SNAPSHOT, v1::PUBLISH_MODE_IN_PLACE}) {
    TestNode a("a", OnGpu("gpu-0")), b("b", OnGpu("gpu-1")),
        c("c", OnGpu("gpu-2"));
    Place(&b, "gpu-1");
    Place(&c, "gpu-2");
    const v1::DefineLayout define = Chain();
    const ModelBytes model(define, 13);
    TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
    a.mover().SetSink(&sink_a);
    b.mover().SetSink(&sink_b);
    c.mover().SetSink(&sink_c);
    TestUpdate update(define, "u", 1, {&a, &b, &c});
    update.SetModes(v1::UPDATE_MODE_STREAM, publish, 2);
    PlaceRanks(&a);
    update.Define();
    std::unique_ptr<InPlaceRanks> ranks;
    if (publish == v1::PUBLISH_MODE_IN_PLACE) {
      ranks = std::make_unique<InPlaceRanks>(&a, define, "u", model,
                                             /*verify_source=*/false, "gpu-0");
    }
    ASSERT_NO_FATAL_FAILURE(Prepare(&update, {&a, &b, &c}));
    EXPECT_GT(b.gpus().device_bytes("gpu-1"), 0);
    update.Move();
    if (ranks != nullptr) {
      ASSERT_NO_FATAL_FAILURE(ranks->Collect(&a, &update));
      ranks->ExpectTensors(define, model);
    } else {
      ASSERT_NO_FATAL_FAILURE(Snapshot(&a, &update, model));
    }
    update.Manifest();
    ExpectVerified({&a, &b, &c});
    for (TestNode* node : {&a, &b, &c})
      EXPECT_EQ(HostBytes(*node), 0) << node->name();
    ExpectBytes(define, model, 0, sink_b.live(0));
    ExpectBytes(define, model, 1, sink_c.live(1));
    update.End(true);
    EXPECT_EQ(sink_b.aborted(), 0);
    if (ranks != nullptr) ranks->Join();
  }
}

// A worker that does not reach the GPU is passed what lies in host memory.
TEST_F(DeviceGroupTest, LanesOfWorkersElsewhereAreInHostMemory) {
  TestNode a("a", OnGpu("gpu-0")), b("b", OnGpu("gpu-1")),
      c("c", OnGpu("gpu-2"));
  Place(&b, "gpu-1");
  b.placement().SetWorker("models/m", "host", {});
  Place(&c, "gpu-2");
  const v1::DefineLayout define = Chain();
  const ModelBytes model(define, 14);
  TestSink sink_a(&a, define), sink_b(&b, define), sink_c(&c, define);
  a.mover().SetSink(&sink_a);
  b.mover().SetSink(&sink_b);
  c.mover().SetSink(&sink_c);
  TestUpdate update(define, "u", 1, {&a, &b, &c});
  update.SetModes(v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT, 2);
  ASSERT_NO_FATAL_FAILURE(Run(&update, {&a, &b, &c}, model));
  EXPECT_GT(HostBytes(b), 0);
  EXPECT_EQ(b.gpus().device_bytes("gpu-1"), 0);
  EXPECT_EQ(HostBytes(c), 0);
  ExpectBytes(define, model, 0, sink_b.live(0));
  ExpectBytes(define, model, 1, sink_c.live(1));
  update.End(true);
}

TEST_F(DeviceGroupTest, ASlotThatItsGpuLostIsTold) {
  TestNode b("b", OnGpu("gpu-1"));
  auto slot = b.store().TakeSlot("models/m", 100 << 10, "gpu-1");
  ASSERT_TRUE(slot.ok()) << slot.status();
  EXPECT_EQ((*slot)->device(), "gpu-1");
  EXPECT_LT((*slot)->file().fd, 0);
  const v1::SlotLocation before = (*slot)->Location(1000);
  EXPECT_EQ(before.size_bytes(), 1000);
  const auto arena = b.store().FindArena(before.arena_id());
  EXPECT_EQ(arena->device_uuid(), "gpu-1");
  EXPECT_FALSE((*slot)->lost());
  b.gpus().Lose("gpu-1");
  b.store().LoseDevice("gpu-1");
  EXPECT_TRUE((*slot)->lost());
  EXPECT_TRUE(b.evicted().empty()) << "it is no update";
  // A late reader notices, and nobody falls over it.
  EXPECT_NE(arena->Generation(before.generation_slot()), before.generation());
  (*slot)->Recycle();
  *slot = nullptr;
  auto next = b.store().TakeSlot("models/m", 100 << 10, "gpu-1");
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_FALSE((*next)->lost());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
