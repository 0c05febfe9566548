#include "schedule/layout.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/reshard.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using testing::Everything;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeBox;
using testing::MakeParam;
using testing::On;

Catalog MakeCatalog(std::vector<Param> params) {
  absl::StatusOr<Catalog> catalog = Catalog::Create(std::move(params));
  EXPECT_TRUE(catalog.ok()) << catalog.status();
  return *std::move(catalog);
}

SourceRank Rank(int32_t rank, int32_t node, std::vector<OrdinalBox> boxes) {
  return SourceRank{rank, node, MakeBoxList(std::move(boxes))};
}

absl::Status BuildError(const Catalog& catalog, std::vector<SourceRank> sources,
                        std::vector<WorkerNeed> workers = {}) {
  return BuildLayout(catalog, sources, workers, 1 << 20).status();
}

TEST(BucketTest, PiecesAreInCatalogOrderAndAligned) {
  const Catalog catalog =
      MakeCatalog({MakeParam("a", {3}), MakeParam("b", {5}, DType::kU8),
                   MakeParam("c", {2}, DType::kF64)});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 1 << 20);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->bucket_count(), 1u);
  const auto pieces = layout->pieces(0);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].ordinal, 0u);
  EXPECT_EQ(pieces[0].offset, 0);
  EXPECT_EQ(pieces[1].offset, 16);
  EXPECT_EQ(pieces[2].offset, 32);
  EXPECT_EQ(layout->bucket(0).bytes, 48);
  EXPECT_THAT(layout->need_nodes(0), IsEmpty());
}

TEST(BucketTest, AnExactFitStays) {
  const Catalog catalog =
      MakeCatalog({MakeParam("a", {16}), MakeParam("b", {16})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 64);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->bucket_count(), 1u);
  EXPECT_EQ(layout->bucket(0).bytes, 64);
}

TEST(BucketTest, WhatDoesNotFitOpensTheNextAndOnlyUsedBytesCount) {
  const Catalog catalog =
      MakeCatalog({MakeParam("a", {17}), MakeParam("b", {16})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 64);
  ASSERT_TRUE(layout.ok());
  ASSERT_EQ(layout->bucket_count(), 2u);
  EXPECT_EQ(layout->bucket(0).bytes, 34);
  EXPECT_EQ(layout->bucket(1).bytes, 32);
  EXPECT_EQ(layout->table->total_bytes, 66);
}

TEST(BucketTest, ALargeTensorIsSplitByRows) {
  // Rows of 24 bytes, buckets of 64: two rows each.
  const Catalog catalog = MakeCatalog({MakeParam("a", {5, 12})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 64);
  ASSERT_TRUE(layout.ok());
  ASSERT_EQ(layout->bucket_count(), 3u);
  EXPECT_EQ(layout->pieces(0)[0].box, MakeBox({{0, 2}, {0, 12}}));
  EXPECT_EQ(layout->pieces(1)[0].box, MakeBox({{2, 4}, {0, 12}}));
  EXPECT_EQ(layout->pieces(2)[0].box, MakeBox({{4, 5}, {0, 12}}));
}

TEST(BucketTest, ARowLargerThanABucketIsSplitWithin) {
  const Catalog catalog = MakeCatalog({MakeParam("a", {2, 40})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 64);
  ASSERT_TRUE(layout.ok());
  std::vector<Box> boxes;
  for (const Piece& piece : layout->table->pieces) boxes.push_back(piece.box);
  EXPECT_THAT(
      boxes,
      ElementsAre(MakeBox({{0, 1}, {0, 32}}), MakeBox({{0, 1}, {32, 40}}),
                  MakeBox({{1, 2}, {0, 32}}), MakeBox({{1, 2}, {32, 40}})));
  for (const Bucket& bucket : layout->table->buckets) {
    EXPECT_LE(bucket.bytes, 64);
  }
}

TEST(BucketTest, TooSmallABucketIsRefused) {
  const Catalog catalog = MakeCatalog({MakeParam("a", {2})});
  const SourceRank rank{0, 0, Everything(catalog)};
  for (int64_t bytes : {int64_t{0}, int64_t{-1}, int64_t{15}}) {
    EXPECT_EQ(ReasonOf(BuildLayout(catalog, {rank}, {}, bytes).status()),
              "INVALID_BUCKET_BYTES");
  }
}

TEST(NeedClassTest, ANodeGetsABucketOnlyIfItNeedsAllOfIt) {
  // Node 1 needs the upper half of a, node 2 the left half, nobody needs b.
  const Catalog catalog =
      MakeCatalog({MakeParam("a", {4, 4}), MakeParam("b", {4})});
  const SourceRank rank{7, 0, Everything(catalog)};
  const WorkerNeed upper{0, 1, MakeBoxList({On(0, MakeBox({{0, 2}, {0, 4}}))})};
  const WorkerNeed left{1, 2, MakeBoxList({On(0, MakeBox({{0, 4}, {0, 2}}))})};
  auto layout = BuildLayout(catalog, {rank}, {upper, left}, 1 << 20);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<std::pair<std::vector<int32_t>, Box>> seen;
  for (uint32_t b = 0; b < layout->bucket_count(); ++b) {
    EXPECT_EQ(layout->bucket(b).source_rank, 7);
    for (const Piece& piece : layout->pieces(b)) {
      if (piece.ordinal == 0)
        seen.emplace_back(layout->need_nodes(b), piece.box);
    }
  }
  using Nodes = std::vector<int32_t>;
  EXPECT_THAT(seen, ::testing::UnorderedElementsAre(
                        std::make_pair(Nodes{1, 2}, MakeBox({{0, 2}, {0, 2}})),
                        std::make_pair(Nodes{1}, MakeBox({{0, 2}, {2, 4}})),
                        std::make_pair(Nodes{2}, MakeBox({{2, 4}, {0, 2}})),
                        std::make_pair(Nodes{}, MakeBox({{2, 4}, {2, 4}}))));
}

TEST(NeedClassTest, WorkersOfOneNodeThatTileATensorDoNotCutIt) {
  const Catalog catalog = MakeCatalog({MakeParam("a", {8, 8})});
  const SourceRank rank{0, 0, Everything(catalog)};
  std::vector<WorkerNeed> workers;
  for (int t = 0; t < 4; ++t) {
    workers.push_back(WorkerNeed{
        t, 1, MakeBoxList({On(0, MakeBox({{0, 8}, {2 * t, 2 * t + 2}}))})});
  }
  auto layout = BuildLayout(catalog, {rank}, workers, 1 << 20);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->table->pieces.size(), 1u);
  EXPECT_THAT(layout->need_nodes(0), ElementsAre(1));
}

// The cache of need patterns once took a 4-d shape for a 1-d shape with a need.
TEST(NeedClassTest, ShapesAndNeedsAreNotMixedUp) {
  const Catalog catalog =
      MakeCatalog({MakeParam("one", {9}), MakeParam("four", {9, 1, 2, 3})});
  const SourceRank rank{0, 0, Everything(catalog)};
  const WorkerNeed worker{0, 1, MakeBoxList({On(0, MakeBox({{2, 5}}))})};
  auto layout = BuildLayout(catalog, {rank}, {worker}, 1 << 20);
  ASSERT_TRUE(layout.ok());
  for (uint32_t b = 0; b < layout->bucket_count(); ++b) {
    for (const Piece& piece : layout->pieces(b)) {
      if (piece.ordinal == 1) {
        EXPECT_THAT(layout->need_nodes(b), IsEmpty());
      }
    }
  }
}

TEST(SourceTest, ReplicatedSourcesShareTheLoad) {
  std::vector<Param> params;
  for (int i = 0; i < 7; ++i) {
    params.push_back(MakeParam(absl::StrCat("p", i), {1000, 64}));
  }
  const Catalog catalog = MakeCatalog(std::move(params));
  std::vector<SourceRank> sources;
  for (int r = 0; r < 4; ++r) {
    sources.push_back(SourceRank{r, r, Everything(catalog)});
  }
  auto partition = SourcePartition::Create(catalog, sources);
  ASSERT_TRUE(partition.ok());
  for (const auto& source : (*partition)->sources()) {
    EXPECT_NEAR(static_cast<double>(source.bytes), catalog.total_bytes() / 4.0,
                0.01 * catalog.total_bytes());
  }
}

TEST(SourceTest, ReplicasLevelOutWhatRanksSendAnyway) {
  // Rank 0 alone holds "own"; "both" is on both, and goes mostly to rank 1.
  const Catalog catalog =
      MakeCatalog({MakeParam("own", {100, 64}), MakeParam("both", {300, 64})});
  auto partition = SourcePartition::Create(
      catalog, {Rank(0, 0,
                     {On(0, MakeBox({{0, 100}, {0, 64}})),
                      On(1, MakeBox({{0, 300}, {0, 64}}))}),
                Rank(1, 1, {On(1, MakeBox({{0, 300}, {0, 64}}))})});
  ASSERT_TRUE(partition.ok());
  EXPECT_EQ((*partition)->sources()[0].bytes, 200 * 64 * 2);
  EXPECT_EQ((*partition)->sources()[1].bytes, 200 * 64 * 2);
}

TEST(SourceTest, OverlapIsRefusedAndNamesParameterAndRanks) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {8, 2})});
  const absl::Status status =
      BuildError(catalog, {Rank(3, 0, {On(0, MakeBox({{0, 5}, {0, 2}}))}),
                           Rank(4, 0, {On(0, MakeBox({{4, 8}, {0, 2}}))})});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "OVERLAPPING_SHARDS");
  EXPECT_EQ(status.message().find("parameter 'w'"), 0u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 4"));
}

TEST(SourceTest, OverlapAlongAnInnerDimensionIsSeen) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {2, 8})});
  EXPECT_EQ(ReasonOf(BuildError(catalog,
                                {Rank(0, 0, {On(0, MakeBox({{0, 2}, {0, 5}}))}),
                                 Rank(1, 0,
                                      {On(0, MakeBox({{0, 1}, {4, 8}})),
                                       On(0, MakeBox({{1, 2}, {5, 8}}))})})),
            "OVERLAPPING_SHARDS");
}

TEST(SourceTest, AHoleIsNamed) {
  const Catalog catalog =
      MakeCatalog({MakeParam("v", {4}), MakeParam("w", {8, 2})});
  const absl::Status status = BuildError(
      catalog,
      {Rank(0, 0, {On(0, MakeBox({{0, 4}})), On(1, MakeBox({{0, 3}, {0, 2}}))}),
       Rank(1, 0, {On(1, MakeBox({{5, 8}, {0, 2}}))})});
  EXPECT_EQ(ReasonOf(status), "HOLE_IN_PARAMETER");
  EXPECT_EQ(status.message().find("parameter 'w'"), 0u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("[3:5, 0:2]"));
}

TEST(SourceTest, AParameterThatNobodyHoldsIsAHole) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {8})});
  EXPECT_EQ(ReasonOf(BuildError(catalog, {})), "HOLE_IN_PARAMETER");
  EXPECT_EQ(ReasonOf(BuildError(catalog, {Rank(0, 0, {})})),
            "HOLE_IN_PARAMETER");
}

TEST(SourceTest, OtherBadShardsHaveAReason) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {8})});
  const Box whole = MakeBox({{0, 8}});
  EXPECT_EQ(ReasonOf(BuildError(catalog, {Rank(0, 0, {On(1, whole)})})),
            "UNKNOWN_ORDINAL");
  EXPECT_EQ(
      ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, MakeBox({{0, 9}}))})})),
      "BOX_OUTSIDE_TENSOR");
  EXPECT_EQ(
      ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, MakeBox({{-1, 8}}))})})),
      "BOX_OUTSIDE_TENSOR");
  EXPECT_EQ(
      ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, MakeBox({{3, 3}}))})})),
      "BOX_OUTSIDE_TENSOR");
  Box huge = whole;
  huge.offset[0] = std::numeric_limits<int64_t>::max();
  huge.extent[0] = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, huge)})})),
            "BOX_OUTSIDE_TENSOR");
  EXPECT_EQ(
      ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, whole, DType::kF16)})})),
      "DTYPE_MISMATCH");
  EXPECT_TRUE(
      BuildError(catalog, {Rank(0, 0, {On(0, whole, DType::kF32)})}).ok());
  EXPECT_EQ(ReasonOf(BuildError(catalog, {Rank(0, 0, {On(0, whole)}),
                                          Rank(0, 1, {On(0, whole)})})),
            "INVALID_TOPOLOGY");
  EXPECT_EQ(ReasonOf(BuildError(catalog, {Rank(0, -1, {On(0, whole)})})),
            "INVALID_TOPOLOGY");
}

TEST(SourceTest, BadNeedsHaveAReason) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {8})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto need = [&](OrdinalBox box, int32_t node = 1) {
    return ReasonOf(BuildError(
        catalog, {rank}, {WorkerNeed{0, node, MakeBoxList({std::move(box)})}}));
  };
  EXPECT_EQ(need(On(3, MakeBox({{0, 8}}))), "UNKNOWN_ORDINAL");
  EXPECT_EQ(need(On(0, MakeBox({{4, 9}}))), "BOX_OUTSIDE_TENSOR");
  EXPECT_EQ(need(On(0, MakeBox({{0, 8}}), DType::kF32)), "DTYPE_MISMATCH");
  EXPECT_EQ(need(On(0, MakeBox({{0, 8}})), -2), "INVALID_TOPOLOGY");
}

TEST(RebuildTest, AReplicaThatLeavesKeepsTheTable) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {64, 8})});
  auto partition =
      SourcePartition::Create(catalog, {SourceRank{0, 0, Everything(catalog)}});
  ASSERT_TRUE(partition.ok());
  std::vector<WorkerNeed> workers;
  for (int n = 1; n <= 3; ++n) {
    workers.push_back(WorkerNeed{n, n, Everything(catalog)});
  }
  auto before = BuildLayout(catalog, **partition, workers, 256);
  ASSERT_TRUE(before.ok());
  workers.erase(workers.begin());
  auto after = RebuildLayout(*before, catalog, **partition, workers);
  ASSERT_TRUE(after.ok());
  EXPECT_EQ(after->table, before->table);
  EXPECT_NE(after->digest, before->digest);
  EXPECT_THAT(after->need_nodes(0), ElementsAre(2, 3));
  auto anew = BuildLayout(catalog, **partition, workers, 256);
  EXPECT_EQ(anew->digest, after->digest);

  // Another kind of need: another table, and again what a fresh build gives.
  workers.push_back(
      WorkerNeed{9, 4, MakeBoxList({On(0, MakeBox({{0, 32}, {0, 8}}))})});
  after = RebuildLayout(*before, catalog, **partition, workers);
  ASSERT_TRUE(after.ok());
  EXPECT_NE(after->table, before->table);
  EXPECT_EQ(after->digest,
            BuildLayout(catalog, **partition, workers, 256)->digest);
}

TEST(RebuildTest, DigestSeesBucketBytesSourcesAndNeeds) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {64, 8})});
  const SourceRank rank{0, 0, Everything(catalog)};
  const WorkerNeed worker{0, 1, Everything(catalog)};
  const uint64_t digest = BuildLayout(catalog, {rank}, {worker}, 256)->digest;
  EXPECT_EQ(digest, BuildLayout(catalog, {rank}, {worker}, 256)->digest);
  EXPECT_NE(digest, BuildLayout(catalog, {rank}, {worker}, 512)->digest);
  SourceRank moved = rank;
  moved.node = 2;
  EXPECT_NE(digest, BuildLayout(catalog, {moved}, {worker}, 256)->digest);
  EXPECT_NE(digest, BuildLayout(catalog, {rank}, {}, 256)->digest);
}

TEST(BucketsForTest, NamesWhatALateJoinerFetches) {
  const Catalog catalog = MakeCatalog({MakeParam("w", {8, 8})});
  const SourceRank rank{0, 0, Everything(catalog)};
  auto layout = BuildLayout(catalog, {rank}, {}, 32);  // two rows each
  ASSERT_TRUE(layout.ok());
  EXPECT_THAT(BucketsFor(*layout, {On(0, MakeBox({{3, 5}, {0, 1}}))}),
              ElementsAre(1, 2));
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
