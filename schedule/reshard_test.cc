#include "schedule/reshard.h"

#include <cstring>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using testing::Everything;
using ::testing::IsEmpty;
using testing::MakeBox;
using testing::MakeParam;
using testing::On;

// The box as a dense tensor of its own.
MemoryBox Dense(uint32_t ordinal, Box box, int32_t memory, int64_t size = 2) {
  MemoryBox out;
  out.ordinal = ordinal;
  out.strides = DenseStrides(box.extent, size);
  out.box = std::move(box);
  out.memory = memory;
  return out;
}

TEST(CopyBoxTest, FullRowsMergeIntoOneRun) {
  const Box box = MakeBox({{0, 4}, {0, 8}});
  const Dims strides = DenseStrides(box.extent, 2);
  const StridedCopy copy = CopyBox(MakeBox({{1, 3}, {0, 8}}), box, 100, strides,
                                   box, 200, strides, 2, 2, Cast::kNone);
  EXPECT_THAT(copy.extents, IsEmpty());
  EXPECT_EQ(copy.run_bytes, 32);
  EXPECT_EQ(copy.src_offset, 116);
  EXPECT_EQ(copy.dst_offset, 216);
}

TEST(CopyBoxTest, ASliceOfColumnsIsOneRunPerRow) {
  const Box whole = MakeBox({{0, 4}, {0, 8}});
  const Box half = MakeBox({{0, 4}, {4, 8}});
  const StridedCopy copy =
      CopyBox(half, whole, 0, DenseStrides(whole.extent, 2), half, 0,
              DenseStrides(half.extent, 2), 2, 2, Cast::kNone);
  EXPECT_THAT(copy.extents, ElementsAre(4));
  EXPECT_THAT(copy.src_strides, ElementsAre(16));
  EXPECT_THAT(copy.dst_strides, ElementsAre(8));
  EXPECT_EQ(copy.run_bytes, 8);
  EXPECT_EQ(copy.src_offset, 8);
  EXPECT_EQ(copy.Bytes(), 32);
}

TEST(CopyBoxTest, OuterDimensionsMergeWhereBothSidesAreRegular) {
  const Box whole = MakeBox({{0, 2}, {0, 3}, {0, 8}});
  const Box part = MakeBox({{0, 2}, {0, 3}, {0, 4}});
  const StridedCopy copy =
      CopyBox(part, whole, 0, DenseStrides(whole.extent, 2), part, 0,
              DenseStrides(part.extent, 2), 2, 2, Cast::kNone);
  EXPECT_THAT(copy.extents, ElementsAre(6));
  EXPECT_EQ(copy.run_bytes, 8);
}

TEST(CopyBoxTest, ATransposedSideHasRunsOfOneElement) {
  const Box box = MakeBox({{0, 2}, {0, 3}});
  const StridedCopy copy =
      CopyBox(box, box, 0, {2, 4}, box, 0, {6, 2}, 2, 2, Cast::kNone);
  EXPECT_EQ(copy.run_bytes, 2);
  EXPECT_EQ(copy.Runs(), 6);
}

TEST(CopyBoxTest, ACastCountsTheDestinationsBytes) {
  const Box box = MakeBox({{0, 2}, {0, 3}});
  const StridedCopy copy =
      CopyBox(box, box, 0, {12, 4}, box, 0, {6, 2}, 4, 2, Cast::kF32ToBF16);
  EXPECT_THAT(copy.extents, IsEmpty());
  EXPECT_EQ(copy.run_bytes, 12);
}

TEST(SnapshotTest, TakesWhatTheRankOwnsAndNothingElse) {
  auto catalog = Catalog::Create({MakeParam("a", {8, 4})});
  const Box top = MakeBox({{0, 4}, {0, 4}});
  const Box bottom = MakeBox({{4, 8}, {0, 4}});
  auto layout = BuildLayout(*catalog,
                            {SourceRank{0, 0, MakeBoxList({On(0, top)})},
                             SourceRank{1, 1, MakeBoxList({On(0, bottom)})}},
                            {}, 1 << 20);
  ASSERT_TRUE(layout.ok());
  auto copies = SnapshotCopies(*catalog, *layout, 1, {Dense(0, bottom, 5)});
  ASSERT_TRUE(copies.ok()) << copies.status();
  ASSERT_EQ(copies->size(), 1u);
  EXPECT_EQ((*copies)[0].bucket, 1u);
  EXPECT_EQ((*copies)[0].memory, 5);
  EXPECT_EQ((*copies)[0].copy.run_bytes, 32);

  const absl::Status missing =
      SnapshotCopies(*catalog, *layout, 1, {Dense(0, top, 5)}).status();
  EXPECT_EQ(ReasonOf(missing), "SHARD_NOT_HELD");
  EXPECT_EQ(missing.message().find("parameter 'a'"), 0u);
}

TEST(ApplyTest, FillsAFusedTensorFromThreeParameters) {
  // qkv of one worker: rows of q, k and v one after another.
  auto catalog = Catalog::Create(
      {MakeParam("q", {8, 4}), MakeParam("k", {4, 4}), MakeParam("v", {4, 4})});
  auto layout = BuildLayout(*catalog, {SourceRank{0, 0, Everything(*catalog)}},
                            {}, 1 << 20);
  ASSERT_TRUE(layout.ok());
  MemoryBox q = Dense(0, MakeBox({{4, 8}, {0, 4}}), 0);
  MemoryBox k = Dense(1, MakeBox({{2, 4}, {0, 4}}), 0);
  MemoryBox v = Dense(2, MakeBox({{2, 4}, {0, 4}}), 0);
  k.offset = 4 * 4 * 2;
  v.offset = 6 * 4 * 2;
  auto copies = ApplyCopies(*catalog, *layout, {q, k, v});
  ASSERT_TRUE(copies.ok()) << copies.status();
  ASSERT_EQ(copies->size(), 3u);
  EXPECT_EQ((*copies)[0].copy.src_offset, 32);
  EXPECT_EQ((*copies)[0].copy.dst_offset, 0);
  EXPECT_EQ((*copies)[1].copy.src_offset, 64 + 16);
  EXPECT_EQ((*copies)[1].copy.dst_offset, 32);
  EXPECT_EQ((*copies)[2].copy.dst_offset, 48);
}

TEST(ApplyTest, BadBoxesHaveAReason) {
  auto catalog = Catalog::Create({MakeParam("a", {8, 4})});
  auto other = Catalog::Create({MakeParam("b", {8, 4})});
  auto layout = BuildLayout(*catalog, {SourceRank{0, 0, Everything(*catalog)}},
                            {}, 1 << 20);
  const Box whole = MakeBox({{0, 8}, {0, 4}});
  auto reason = [&](const Catalog& c, const MemoryBox& box) {
    return ReasonOf(ApplyCopies(c, *layout, {box}).status());
  };
  EXPECT_EQ(reason(*other, Dense(0, whole, 0)), "INVALID_LAYOUT");
  EXPECT_EQ(reason(*catalog, Dense(1, whole, 0)), "UNKNOWN_ORDINAL");
  EXPECT_EQ(reason(*catalog, Dense(0, MakeBox({{0, 9}, {0, 4}}), 0)),
            "BOX_OUTSIDE_TENSOR");
  MemoryBox box = Dense(0, whole, 0);
  box.strides.pop_back();
  EXPECT_EQ(reason(*catalog, box), "INVALID_LAYOUT");
  box = Dense(0, whole, 0);
  box.dtype = DType::kF32;
  EXPECT_EQ(reason(*catalog, box), "DTYPE_MISMATCH");
}

TEST(ApplyTest, ABoxThatNobodyFillsIsNamed) {
  // A layout of which a part was lost on the way.
  auto catalog = Catalog::Create({MakeParam("a", {8, 4}), MakeParam("b", {4})});
  auto layout =
      BuildLayout(*catalog, {SourceRank{0, 0, Everything(*catalog)}}, {}, 32);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const MemoryBox whole = Dense(0, MakeBox({{0, 8}, {0, 4}}), 0);
  ASSERT_TRUE(ApplyCopies(*catalog, *layout, {whole}).ok());
  auto table = std::make_shared<BucketTable>(*layout->table);
  ASSERT_EQ(table->param_begin[1], 2u);
  table->param_pieces.erase(table->param_pieces.begin());
  for (size_t o = 1; o < table->param_begin.size(); ++o) {
    --table->param_begin[o];
  }
  UpdateLayout broken = *layout;
  broken.table = table;
  const absl::Status status = ApplyCopies(*catalog, broken, {whole}).status();
  EXPECT_EQ(ReasonOf(status), "UNFILLED_BOX");
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr("'a'"),
                               ::testing::HasSubstr("16 elements")));
}

TEST(DirectTest, CopiesWhatBothHold) {
  auto catalog = Catalog::Create({MakeParam("a", {8, 4})});
  auto copies = DirectCopies(*catalog, {Dense(0, MakeBox({{0, 4}, {0, 4}}), 3)},
                             {Dense(0, MakeBox({{2, 8}, {0, 4}}), 4)});
  ASSERT_TRUE(copies.ok());
  ASSERT_EQ(copies->size(), 1u);
  EXPECT_EQ((*copies)[0].src_memory, 3);
  EXPECT_EQ((*copies)[0].dst_memory, 4);
  EXPECT_EQ((*copies)[0].copy.src_offset, 16);
  EXPECT_EQ((*copies)[0].copy.dst_offset, 0);
  EXPECT_EQ((*copies)[0].copy.run_bytes, 16);
}

TEST(RunsTest, AreKeyedByTheGlobalElement) {
  auto catalog = Catalog::Create({MakeParam("a", {8, 4})});
  Piece piece;
  piece.box = MakeBox({{2, 4}, {1, 3}});
  piece.offset = 64;
  const std::vector<ElementRun> runs = RunsOf(*catalog, piece);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].first_element, 9);
  EXPECT_EQ(runs[0].element_count, 2);
  EXPECT_EQ(runs[0].bucket_offset, 64);
  EXPECT_EQ(runs[1].first_element, 13);
  EXPECT_EQ(runs[1].bucket_offset, 68);
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
