// What did not change since the update before it: kept once, and not sent.

#include <map>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "daemon/node/mover.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/eventually.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::kDeadline;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::TestNode;
using testing::TestUpdate;
using transport::Eventually;

v1::DefineLayout TwoReceivers() {
  return ModelBuilder()
      .SmallModel(4)
      .FsdpRanks("a", 2)
      .Worker("b")
      .Worker("c")
      .Build();
}

bool ComesToHold(TestNode& node, int version) {
  return Eventually([&] {
    const auto held = node.store().HeldUpdates();
    return !held.empty() && held[0].version() == version;
  });
}

TEST(EqualBuckets, AreKeptOnceAndDoNotTravel) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 13);
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  int64_t one = 0;
  for (int version = 1; version <= 3; ++version) {
    TestUpdate update(define, "u" + std::to_string(version), version, nodes);
    update.Define();
    // The snapshot is done before the move, as a small change of a large model.
    update.Prepare();
    for (TestNode* node : nodes) node->WaitPrepared();
    ASSERT_TRUE(update.Snapshot(&a, model).ok());
    update.Manifest();
    update.Move();
    for (TestNode* node : nodes) {
      const auto verified = node->WaitVerified();
      ASSERT_EQ(verified.failure().reason(), "");
      if (node == &a) continue;
      if (version == 1) {
        EXPECT_GT(verified.received_bytes(), 1 << 18);
      }
      // That the second equals the first is only seen when it is here.
      if (version == 3) {
        EXPECT_EQ(verified.received_bytes(), 0);
      }
    }
    update.ExpectWorkersEqual(model);
    update.End(true);
    for (TestNode* node : nodes) ASSERT_TRUE(ComesToHold(*node, version));
    if (version == 1) one = b.UsedBytes();
    EXPECT_TRUE(Eventually([&] { return b.UsedBytes() == one; }))
        << b.UsedBytes() << " after version " << version << ", one takes "
        << one;
    update.ExpectWorkersEqual(model);
  }
}

// Every bucket but one is that of the update before: that one alone travels,
// and lands with its new bytes among the old ones.
TEST(EqualBuckets, OfAnUpdateThatChangedOneOnlyThatOneTravels) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes before(define, 13);
  ModelBytes after(define, 13);
  after.Change(/*ordinal=*/2, /*byte=*/1000);
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  std::map<int32_t, v1::Digest> digests;
  int64_t one = 0;
  for (int version = 1; version <= 4; ++version) {
    // The receivers wait for digests after one that hardly changed: the second.
    const ModelBytes& model = version < 3 ? before : after;
    TestUpdate update(define, "u" + std::to_string(version), version, nodes);
    update.Define();
    update.Prepare();
    for (TestNode* node : nodes) node->WaitPrepared();
    ASSERT_TRUE(update.Snapshot(&a, model).ok());
    update.Manifest();
    update.Move();
    std::vector<int32_t> changed;
    for (const v1::BucketDigest& bucket : update.manifest().buckets()) {
      v1::Digest& known = digests[bucket.bucket()];
      if (known.lane0() != bucket.digest().lane0() ||
          known.lane1() != bucket.digest().lane1()) {
        changed.push_back(bucket.bucket());
      }
      known = bucket.digest();
    }
    int64_t changed_bytes = 0;
    if (version == 3) {
      ASSERT_EQ(changed.size(), 1u);
      ASSERT_GT(digests.size(), 4u);
      const auto layout = a.layouts().Find(define.layout_id());
      ASSERT_TRUE(layout.ok()) << layout.status();
      changed_bytes = (*layout)->bucket_bytes(changed[0]);
      EXPECT_GT(changed_bytes, 0);
    }
    for (TestNode* node : nodes) {
      const auto verified = node->WaitVerified();
      ASSERT_EQ(verified.failure().reason(), "");
      if (node != &a && version >= 3) {
        EXPECT_EQ(verified.received_bytes(), changed_bytes)
            << node->name() << " of version " << version;
      }
    }
    update.ExpectWorkersEqual(model);
    update.End(true);
    for (TestNode* node : nodes) ASSERT_TRUE(ComesToHold(*node, version));
    if (version == 1) one = b.UsedBytes();
    if (version == 3) {
      // Two versions are kept, and what they have in common once.
      EXPECT_TRUE(Eventually([&] {
        return b.UsedBytes() <= one + 2 * changed_bytes;
      })) << b.UsedBytes()
          << ", one takes " << one;
      EXPECT_GE(b.UsedBytes(), one + changed_bytes);
    }
  }
}

// What was whole when it came may not be when it is copied. It must not stand
// in the way of every update to come.
TEST(EqualBuckets, WhatWasDamagedInTheStoreTravelsAgain) {
  const v1::DefineLayout define = TwoReceivers();
  const ModelBytes model(define, 13);
  TestNode a("a"), b("b"), c("c");
  const std::vector<TestNode*> nodes = {&a, &b, &c};
  const auto layout = [&] { return *a.layouts().Find(define.layout_id()); };
  int64_t one = 0;
  for (int version = 1; version <= 3; ++version) {
    if (version == 3) {
      // What the two have in common is kept once by now: there is no other.
      ASSERT_TRUE(Eventually([&] { return b.UsedBytes() == one; }));
      const auto rooms = b.store().Rooms("u2", {1});
      ASSERT_TRUE(rooms.ok()) << rooms.status();
      (*rooms)[0].data[17] ^= 4;
    }
    TestUpdate update(define, "u" + std::to_string(version), version, nodes);
    update.Define();
    update.Prepare();
    for (TestNode* node : nodes) node->WaitPrepared();
    ASSERT_TRUE(update.Snapshot(&a, model).ok());
    update.Manifest();
    update.Move();
    for (TestNode* node : nodes) {
      const auto verified = node->WaitVerified();
      ASSERT_EQ(verified.failure().reason(), "")
          << version << ": " << verified.failure().message();
      if (version == 3 && node != &a) {
        EXPECT_EQ(verified.received_bytes(),
                  node == &b ? layout()->bucket_bytes(1) : 0);
      }
    }
    update.ExpectWorkersEqual(model);
    update.End(true);
    for (TestNode* node : nodes) ASSERT_TRUE(ComesToHold(*node, version));
    if (version == 1) one = b.UsedBytes();
  }
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
