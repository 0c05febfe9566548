#include "transport/copy.h"

#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

char source[1];
char target[1];

TEST(BoxCopy, DenseSidesMakeOneRun) {
  const CopyTask task =
      MakeBoxCopy({4, 6}, 2, target, {6, 1}, source, {6, 1}, absl::nullopt);
  EXPECT_TRUE(task.dims.empty());
  EXPECT_EQ(task.run_bytes, 48);
  EXPECT_EQ(task.bytes(), 48);
}

TEST(BoxCopy, RowsOfAShardStayOneRunInTheTensor) {
  const CopyTask task = MakeBoxCopy({4, 6}, 2, target, {6, 1}, source, {6, 1},
                                    GlobalBox{3, {100, 6}, {10, 0}});
  EXPECT_TRUE(task.dims.empty());
  EXPECT_EQ(task.run_bytes, 48);
  EXPECT_EQ(task.ordinal, 3u);
  EXPECT_EQ(task.first_element, 60);
}

TEST(BoxCopy, ColumnsOfAShardAreCutForTheDigestAlone) {
  const int64_t shape[] = {4, 12};
  CopyTask task = MakeBoxCopy({4, 6}, 2, target, {6, 1}, source, {6, 1},
                              GlobalBox{3, shape, {0, 6}});
  ASSERT_EQ(task.dims.size(), 1u);
  EXPECT_EQ(task.dims[0].extent, 4);
  EXPECT_EQ(task.dims[0].element_stride, 12);
  EXPECT_EQ(task.run_bytes, 12);
  EXPECT_EQ(task.first_element, 6);
  EXPECT_TRUE(task.dense_dst());
}

TEST(BoxCopy, DimensionsOfOneAndRegularLoopsAreMerged) {
  // A box of columns in three dimensions: both outer loops are one.
  const CopyTask task = MakeBoxCopy({2, 1, 3, 4}, 4, target, {24, 24, 8, 1},
                                    source, {12, 12, 4, 1}, absl::nullopt);
  ASSERT_EQ(task.dims.size(), 1u);
  EXPECT_EQ(task.dims[0].extent, 6);
  EXPECT_EQ(task.dims[0].dst_stride, 32);
  EXPECT_EQ(task.dims[0].src_stride, 16);
  EXPECT_EQ(task.run_bytes, 16);
  EXPECT_FALSE(task.dense_dst());
}

TEST(BoxCopy, TransposedSource) {
  const CopyTask task = MakeBoxCopy({3, 5}, 2, target, {5, 1}, source, {1, 3},
                                    GlobalBox{0, {3, 5}, {0, 0}});
  EXPECT_EQ(task.run_bytes, 2);
  EXPECT_EQ(task.rows(), 15);
  EXPECT_EQ(task.src_extent(), 30);
}

TEST(BoxCopy, ScalarsAndNothing) {
  EXPECT_EQ(MakeBoxCopy({}, 4, target, {}, source, {}, absl::nullopt).bytes(),
            4);
  EXPECT_EQ(
      MakeBoxCopy({0, 3}, 4, target, {3, 1}, source, {3, 1}, absl::nullopt)
          .bytes(),
      0);
}

TEST(CopyTask, ValidateRefusesWhatCannotBe) {
  CopyTask good =
      MakeBoxCopy({4, 6}, 2, target, {8, 1}, source, {6, 1}, absl::nullopt);
  EXPECT_TRUE(good.Validate().ok());
  CopyTask task = good;
  task.element_bytes = 3;
  EXPECT_EQ(ReasonOf(task.Validate()), "BAD_COPY");
  task = good;
  task.run_bytes = 13;
  EXPECT_FALSE(task.Validate().ok());
  task = good;
  task.dims[0].extent = -1;
  EXPECT_FALSE(task.Validate().ok());
  task = good;
  task.dims[0].extent = INT64_MAX / 2;
  EXPECT_FALSE(task.Validate().ok());
  task = good;
  task.src = nullptr;
  EXPECT_FALSE(task.Validate().ok());
  task = good;
  task.dims.resize(9);
  EXPECT_FALSE(task.Validate().ok());
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
