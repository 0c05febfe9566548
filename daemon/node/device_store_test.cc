// Buckets on GPUs: the store's part, and whole updates between nodes.

#include <string>
#include <vector>

#include "daemon/node/placement.h"
#include "daemon/node/store.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/eventually.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::kDeadline;
using testing::MakeParameter;
using testing::MakeRankMemory;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::RankMemory;
using testing::TestNode;
using testing::TestUpdate;
using transport::Eventually;
using transport::ReasonOf;

constexpr int64_t kUpdateBytes = 320 << 10;

TestNode::Options OnDevice(int64_t device_bytes = 64 << 20) {
  TestNode::Options options;
  options.device_budget_bytes = device_bytes;
  return options;
}

// ---- The store ----

class DeviceStoreTest : public ::testing::Test {
 protected:
  void Make(int64_t device_bytes, int keep_updates = 2) {
    TestNode::Options options = OnDevice(device_bytes);
    options.keep_updates = keep_updates;
    node_ = std::make_unique<TestNode>("a", options);
    const v1::DefineLayout define =
        ModelBuilder("models/m")
            .BucketBytes(256 << 10)
            .Parameter(MakeParameter("w", v1::DTYPE_U8, {256 << 10}))
            .Parameter(MakeParameter("b", v1::DTYPE_U8, {64 << 10}))
            .FsdpRanks("a", 1)
            .Worker("a")
            .Build();
    layout_ =
        std::make_shared<const NodeLayout>(*ComputeNodeLayout(define, "a"));
  }
  Store& store() { return node_->store(); }
  absl::Status Reserve(const std::string& update_id,
                       const std::map<int32_t, std::string>& devices) {
    return store().Reserve(update_id, 1, layout_, {0, 1}, devices).status();
  }
  void Commit(const std::string& update_id,
              const std::map<int32_t, std::string>& devices = {{0, "gpu-0"},
                                                               {1, "gpu-0"}}) {
    absl::Status status = Reserve(update_id, devices);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(store().MarkWhole(update_id).ok());
    ASSERT_TRUE(store().Commit(update_id).ok());
  }

  std::unique_ptr<TestNode> node_;
  std::shared_ptr<const NodeLayout> layout_;
};

TEST_F(DeviceStoreTest, BucketsLieWhereTheyShall) {
  Make(1 << 20);
  ASSERT_TRUE(store().ReserveFor("models/m", kUpdateBytes).ok());
  EXPECT_TRUE(store().ArenaIds().empty()) << "host memory is not taken ahead";
  auto rooms = store().Reserve("u1", 1, layout_, {0, 1}, {{0, "gpu-0"}});
  ASSERT_TRUE(rooms.ok()) << rooms.status();
  EXPECT_EQ((*rooms)[0].device, "gpu-0");
  EXPECT_EQ(node_->gpus().DeviceOf((*rooms)[0].data.data()), "gpu-0");
  EXPECT_LT((*rooms)[0].file.fd, 0);
  EXPECT_EQ((*rooms)[1].device, "");
  EXPECT_EQ(node_->UsedBytes(), 64 << 10);
  ASSERT_TRUE(store().MarkWhole("u1").ok());
  // Who reaches it is pointed there, and nobody else.
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0, 1}).status()), "OUT_OF_REACH");
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0, 1}, {"gpu-1"}).status()),
            "OUT_OF_REACH");
  auto located = store().Locate("u1", {0, 1}, {"gpu-0"});
  ASSERT_TRUE(located.ok()) << located.status();
  auto arena = store().FindArena(located->buckets[0].slot().arena_id());
  EXPECT_EQ(arena->device_uuid(), "gpu-0");
  EXPECT_EQ(store().OutOfReach("u1", {0, 1}, {}), std::vector<int32_t>{0});
  EXPECT_TRUE(store().OutOfReach("u1", {0, 1}, {"gpu-0"}).empty());

  // A copy, for as long as somebody has the update.
  {
    auto pin = store().Pin("u1");
    auto copies = store().ReserveCopies("u1", {0, 1});
    ASSERT_TRUE(copies.ok()) << copies.status();
    EXPECT_EQ((*copies)[0].device, "");
    EXPECT_EQ((*copies)[1].data.data(), (*rooms)[1].data.data());
    EXPECT_EQ(ReasonOf(store().Locate("u1", {0, 1}).status()), "OUT_OF_REACH")
        << "it is not complete";
    ASSERT_TRUE(store().MarkCopies("u1", {0}).ok());
    EXPECT_EQ(node_->UsedBytes(), kUpdateBytes);
    located->pin.Release();
    auto there = store().Locate("u1", {0, 1});
    ASSERT_TRUE(there.ok()) << there.status();
    located = *std::move(there);
    EXPECT_EQ(
        store().FindArena(located->buckets[0].slot().arena_id())->device_uuid(),
        "");
  }
  const v1::SlotLocation slot = located->buckets[0].slot();
  auto host = store().FindArena(slot.arena_id());
  EXPECT_EQ(host->Generation(slot.generation_slot()), slot.generation());
  located->pin.Release();
  EXPECT_EQ(node_->UsedBytes(), 64 << 10);
  // A late reader of the copy notices.
  EXPECT_NE(host->Generation(slot.generation_slot()), slot.generation());
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0}).status()), "OUT_OF_REACH");
}

TEST_F(DeviceStoreTest, EachGpuHasABudgetOfItsOwn) {
  Make(2 * kUpdateBytes);
  Commit("u1");
  Commit("u2");
  ASSERT_TRUE(Reserve("u3", {{0, "gpu-0"}, {1, "gpu-0"}}).ok());
  EXPECT_EQ(node_->evicted(), std::vector<std::string>{"u1"});
  const absl::Status refused = Reserve("u4", {{0, "gpu-0"}, {1, "gpu-0"}});
  EXPECT_EQ(ReasonOf(refused), "NO_STORE_ROOM");
  for (const char* said :
       {"gpu-0", "--device_store_bytes", "u2", "u3", "655360", "327680"}) {
    EXPECT_NE(refused.message().find(said), absl::string_view::npos)
        << said << " is not in: " << refused;
  }
  // Nobody elsewhere is refused, or goes for it.
  EXPECT_TRUE(Reserve("u4", {{0, "gpu-1"}, {1, "gpu-1"}}).ok());
  EXPECT_TRUE(Reserve("u5", {}).ok());
  EXPECT_TRUE(store().Has("u2"));
  EXPECT_EQ(node_->gpus().device_bytes("gpu-0"), 2 * kUpdateBytes);
  // With the model everything goes.
  for (const char* id : {"u3", "u4", "u5"}) store().Drop(id);
  store().Forget("models/m");
  EXPECT_TRUE(store().ArenaIds().empty());
  EXPECT_TRUE(Eventually([&] {
    return node_->gpus().device_bytes("gpu-0") == 0 &&
           node_->gpus().device_bytes("gpu-1") == 0;
  }));
}

TEST_F(DeviceStoreTest, WhatALostGpuHadIsGone) {
  Make(4 << 20, /*keep_updates=*/4);
  Commit("old", {});
  Commit("copied");
  auto pin = store().Pin("copied");
  ASSERT_TRUE(store().ReserveCopies("copied", {0, 1}).ok());
  ASSERT_TRUE(store().MarkCopies("copied", {0, 1}).ok());
  Commit("there", {{0, "gpu-1"}, {1, "gpu-1"}});
  ASSERT_TRUE(Reserve("incoming", {{0, "gpu-0"}}).ok());
  auto late = store().Locate("copied", {0}, {"gpu-0"});
  ASSERT_TRUE(late.ok());
  const v1::SlotLocation slot = late->buckets[0].slot();
  auto arena = store().FindArena(slot.arena_id());
  node_->gpus().Lose("gpu-0");
  store().LoseDevice("gpu-0");
  // Readers notice at once, and workers are told to let go.
  EXPECT_NE(arena->Generation(slot.generation_slot()), slot.generation());
  EXPECT_EQ(node_->arenas_dropped().front(), slot.arena_id());
  EXPECT_FALSE(store().Has("incoming"));
  EXPECT_EQ(node_->evicted(), std::vector<std::string>{"incoming"});
  EXPECT_TRUE(store().Has("old"));
  EXPECT_TRUE(store().Holds("there", {0, 1}));
  // What has copies lives on in them, also unpinned.
  late->pin.Release();
  pin->Release();
  auto located = store().Locate("copied", {0, 1});
  ASSERT_TRUE(located.ok()) << located.status();
  EXPECT_EQ(
      store().FindArena(located->buckets[0].slot().arena_id())->device_uuid(),
      "");
  // What comes after has new memory.
  EXPECT_TRUE(Reserve("next", {{0, "gpu-0"}, {1, "gpu-0"}}).ok());
  store().LoseDevice("gpu-1");
  EXPECT_FALSE(store().Has("there"));
  located->pin.Release();
  arena = nullptr;
  store().Drop("next");
}

// ---- Where ----

TEST(Placement, SaysWhereBucketsLie) {
  const v1::DefineLayout define = ModelBuilder()
                                      .SmallModel(2)
                                      .FsdpRanks("a", 2)
                                      .Worker("a")
                                      .Worker("b")
                                      .Build();
  const auto layout = ComputeNodeLayout(define, "a");
  ASSERT_TRUE(layout.ok());
  const std::vector<int32_t> first = layout->RankBuckets(0);
  const std::vector<int32_t> second = layout->RankBuckets(1);
  Placement placement;
  EXPECT_TRUE(placement.ForPacked(*layout, first).empty());
  placement.SetRank("models/m", 0, "gpu-0");
  EXPECT_EQ(placement.ForPacked(*layout, first).size(), first.size());
  EXPECT_TRUE(placement.ForPacked(*layout, second).empty());
  // Nobody is there to reach it.
  EXPECT_TRUE(placement.ForReceived(*layout, second).empty());
  placement.SetWorker("models/m", "w0", {"gpu-0", "gpu-1"});
  EXPECT_EQ(placement.ForReceived(*layout, second).size(), second.size());
  placement.SetWorker("models/m", "w1", {"gpu-1"});
  for (const auto& bucket : placement.ForReceived(*layout, second)) {
    EXPECT_EQ(bucket.second, "gpu-1") << "what all of them reach";
  }
  // A GPU that all of them reach and none is on has other work.
  placement.SetWorker("models/m", "w0", {"gpu-0", "gpu-1", "gpu-2"});
  placement.SetWorker("models/m", "w1", {"gpu-1", "gpu-2"});
  for (const auto& bucket : placement.ForReceived(*layout, second)) {
    EXPECT_EQ(bucket.second, "gpu-1") << "what all of them reach";
  }
  EXPECT_TRUE(placement.AllReach("models/m", "gpu-2"));
  EXPECT_FALSE(placement.AllReach("models/m", "gpu-0"));
  EXPECT_TRUE(placement.AllReach("models/m", "gpu-1"));
  // A rank's bytes stay on its GPU, unless somebody has none at all.
  EXPECT_EQ(placement.ForPacked(*layout, first).size(), first.size());
  placement.SetWorker("models/m", "w2", {});
  EXPECT_TRUE(placement.ForPacked(*layout, first).empty());
  EXPECT_TRUE(placement.ForReceived(*layout, second).empty());
  placement.RemoveWorker("models/m", "w2");
  placement.SetRank("models/m", 0, "");
  EXPECT_TRUE(placement.ForPacked(*layout, first).empty());
}

// ---- Whole updates ----

// Two ranks on a, workers on a and b.
v1::DefineLayout TwoNodes() {
  return ModelBuilder()
      .SmallModel(4)
      .FsdpRanks("a", 2)
      .Worker("a")
      .TensorParallelWorker("b", 0, 2)
      .TensorParallelWorker("b", 1, 2)
      .Build();
}

// A rank whose memory is the GPU's.
absl::Status SnapshotOnDevice(TestNode* node, TestUpdate* update,
                              int64_t version, int rank,
                              const RankMemory& memory,
                              v1::UpdateManifest* manifest,
                              bool verify_source = false) {
  auto taken = node->Snapshot(update->define(), update->update_id(), version,
                              rank, memory, std::make_shared<CancelFlag>(),
                              /*in_place=*/false, verify_source);
  if (!taken.ok()) return taken.status();
  for (const v1::BucketDigest& digest : taken->buckets) {
    *manifest->add_buckets() = digest;
  }
  return absl::OkStatus();
}

class DeviceMoverTest : public ::testing::Test {
 protected:
  // Moves an update, from two ranks that have their tensors on gpu-0 of `a`.
  void Move(TestNode* a, TestNode* b, TestUpdate* update, int64_t version,
            const ModelBytes& model) {
    const RankMemory ranks[] = {MakeRankMemory(update->define(), model, 0),
                                MakeRankMemory(update->define(), model, 1)};
    for (int rank = 0; rank < 2; ++rank) {
      a->gpus().SetTensors(ranks[rank].bytes.data(),
                           static_cast<int64_t>(ranks[rank].bytes.size()),
                           "gpu-0");
      a->placement().SetRank("models/m", rank, "gpu-0");
    }
    update->Define();
    update->Prepare();
    for (TestNode* node : {a, b}) {
      EXPECT_EQ(node->WaitPrepared().failure().message(), "");
    }
    update->Move();
    for (int rank = 0; rank < 2; ++rank) {
      absl::Status status =
          SnapshotOnDevice(a, update, version, rank, ranks[rank],
                           &update->manifest(), /*verify_source=*/rank == 1);
      ASSERT_TRUE(status.ok()) << status;
    }
    a->gpus().ForgetTensors();
    update->Manifest();
  }
};

TEST_F(DeviceMoverTest, FromGpuToGpuOfAnotherNode) {
  TestNode a("a", OnDevice()), b("b", OnDevice());
  a.placement().SetWorker("models/m", "w", {"gpu-0"});
  b.placement().SetWorker("models/m", "w0", {"gpu-5"});
  b.placement().SetWorker("models/m", "w1", {"gpu-5"});
  a.SetReachable({"gpu-0"});
  b.SetReachable({"gpu-5"});
  const v1::DefineLayout define = TwoNodes();
  for (int version = 1; version <= 4; ++version) {
    const ModelBytes model(define, version);
    TestUpdate update(define, "u" + std::to_string(version), version, {&a, &b});
    ASSERT_NO_FATAL_FAILURE(Move(&a, &b, &update, version, model));
    for (TestNode* node : {&a, &b}) {
      EXPECT_EQ(node->WaitVerified().failure().message(), "");
    }
    update.ExpectWorkersEqual(model);
    update.End(true);
    for (TestNode* node : {&a, &b}) {
      EXPECT_TRUE(Eventually([&] {
        auto held = node->store().HeldUpdates();
        return !held.empty() && held[0].version() == version;
      }));
      // Nothing stays in host memory.
      EXPECT_TRUE(Eventually([&] { return node->UsedBytes() == 0; }))
          << node->UsedBytes();
    }
    update.ExpectWorkersEqual(model);
  }
  EXPECT_GT(a.gpus().device_bytes("gpu-0"), 0);
  EXPECT_GT(b.gpus().device_bytes("gpu-5"), 0);
}

TEST_F(DeviceMoverTest, WorkersOfOtherGpusAreBroughtCopiesBeforeItIsVerified) {
  TestNode a("a", OnDevice()), b("b", OnDevice());
  a.placement().SetWorker("models/m", "w", {"gpu-1"});
  // No GPU that both reach.
  b.placement().SetWorker("models/m", "w0", {"gpu-5"});
  b.placement().SetWorker("models/m", "w1", {"gpu-6"});
  const v1::DefineLayout define = TwoNodes();
  const ModelBytes model(define, 3);
  TestUpdate update(define, "u", 1, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(Move(&a, &b, &update, 1, model));
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitVerified().failure().message(), "");
  }
  EXPECT_GT(a.gpus().device_bytes("gpu-0"), 0);
  EXPECT_EQ(b.gpus().device_bytes("gpu-5"), 0);
  std::vector<int32_t> needed;
  {
    auto layout = a.layouts().Find(define.layout_id());
    ASSERT_TRUE(layout.ok());
    needed = (*layout)->needed_buckets;
  }
  EXPECT_TRUE(a.store().OutOfReach("u", needed, {"gpu-1"}).empty());
  update.ExpectWorkersEqual(model);
  update.End(true);
}

TEST_F(DeviceMoverTest, DamageOnTheWayToAGpuIsSeen) {
  TestNode a("a", OnDevice()), b("b", OnDevice());
  a.placement().SetWorker("models/m", "w", {"gpu-0"});
  b.placement().SetWorker("models/m", "w0", {"gpu-5"});
  b.gpus().DamageCopies(1);
  const v1::DefineLayout define = TwoNodes();
  const ModelBytes model(define, 4);
  TestUpdate update(define, "u", 1, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(Move(&a, &b, &update, 1, model));
  EXPECT_EQ(b.WaitVerified().failure().reason(), "DEVICE_STORE_DAMAGED");
  update.End(false);
  EXPECT_TRUE(Eventually([&] { return b.UsedBytes() == 0; }));
}

TEST_F(DeviceMoverTest, AGpuThatIsLostInTheMiddleFailsTheUpdateByName) {
  TestNode a("a", OnDevice()), b("b", OnDevice());
  a.placement().SetWorker("models/m", "w", {"gpu-0"});
  b.placement().SetWorker("models/m", "w0", {"gpu-5"});
  const v1::DefineLayout define = TwoNodes();
  const ModelBytes model(define, 5);
  TestUpdate update(define, "u", 1, {&a, &b});
  update.Define();
  update.Prepare();
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitPrepared().failure().message(), "");
  }
  b.gpus().Lose("gpu-5");
  b.store().LoseDevice("gpu-5");
  EXPECT_EQ(b.WaitVerified().failure().reason(), "DEVICE_STORE_LOST");
  EXPECT_EQ(b.evicted(), std::vector<std::string>{"u"});
  update.End(false);
  // The next one has new memory there.
  TestUpdate next(define, "v", 2, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(Move(&a, &b, &next, 2, model));
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitVerified().failure().message(), "");
  }
  next.ExpectWorkersEqual(model);
  next.End(true);
}

TEST_F(DeviceMoverTest, AHolderSendsWhatItHasOnAGpu) {
  TestNode a("a", OnDevice()), b("b", OnDevice());
  a.placement().SetWorker("models/m", "w", {"gpu-0"});
  b.placement().SetWorker("models/m", "w0", {"gpu-5"});
  const v1::DefineLayout define = TwoNodes();
  const ModelBytes model(define, 6);
  TestUpdate update(define, "u", 1, {&a, &b});
  ASSERT_NO_FATAL_FAILURE(Move(&a, &b, &update, 1, model));
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitVerified().failure().message(), "");
  }
  update.End(true);
  ASSERT_TRUE(Eventually([&] {
    return !a.store().HeldUpdates().empty() && !b.store().HeldUpdates().empty();
  }));
  // With its copies in host memory it would live on.
  ASSERT_TRUE(Eventually([&] { return b.UsedBytes() == 0; }));
  // b loses it all, and fetches it.
  b.gpus().Lose("gpu-5");
  b.store().LoseDevice("gpu-5");
  EXPECT_FALSE(b.store().Has("u"));
  auto layout = b.layouts().Find(define.layout_id());
  ASSERT_TRUE(layout.ok());
  const std::vector<int32_t> needed = (*layout)->needed_buckets;
  const v1::PrepareUpdate fetch = update.FetchCommand(&a, &b, needed);
  for (TestNode* node : {&a, &b}) node->mover().PrepareUpdate(fetch);
  for (TestNode* node : {&a, &b}) {
    EXPECT_EQ(node->WaitPrepared().failure().message(), "");
  }
  for (TestNode* node : {&a, &b}) {
    node->mover().MoveUpdate(update.MoveCommand(node));
  }
  b.mover().UpdateManifest(update.manifest());
  EXPECT_EQ(b.WaitVerified().failure().message(), "");
  EXPECT_TRUE(Eventually([&] { return b.store().Holds("u", needed); }));
  EXPECT_TRUE(Eventually([&] { return b.UsedBytes() == 0; }));
  EXPECT_GT(b.gpus().device_bytes("gpu-5"), 0);
  update.ExpectWorkersEqual(model);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
