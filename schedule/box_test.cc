#include "schedule/box.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using testing::MakeBox;
using Runs = std::vector<std::pair<int64_t, int64_t>>;

Runs RunsIn(const Box& box, Dims shape) {
  Runs runs;
  ForEachRun(box, shape, [&](int64_t first, int64_t count) {
    runs.emplace_back(first, count);
  });
  EXPECT_EQ(static_cast<int64_t>(runs.size()), CountRuns(box, shape));
  return runs;
}

TEST(BoxTest, IntersectionIsTheSharedPart) {
  Box shared;
  EXPECT_TRUE(
      Intersect(MakeBox({{0, 4}, {2, 8}}), MakeBox({{3, 9}, {0, 3}}), &shared));
  EXPECT_EQ(shared, MakeBox({{3, 4}, {2, 3}}));
  EXPECT_FALSE(Intersect(MakeBox({{0, 4}}), MakeBox({{4, 8}}), &shared));
  EXPECT_TRUE(Intersect(Box(), Box(), &shared)) << "scalars always meet";
  EXPECT_EQ(shared.Volume(), 1);
}

TEST(BoxTest, SubtractLeavesDisjointRest) {
  std::vector<Box> rest;
  Subtract(MakeBox({{0, 4}, {0, 4}}), MakeBox({{1, 3}, {1, 3}}), &rest);
  int64_t volume = 0;
  for (size_t i = 0; i < rest.size(); ++i) {
    volume += rest[i].Volume();
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(Intersects(rest[i], rest[j]));
  }
  EXPECT_EQ(volume, 12);
  EXPECT_EQ(rest.size(), 4u);
  rest.clear();
  Subtract(MakeBox({{0, 4}}), MakeBox({{0, 9}}), &rest);
  EXPECT_TRUE(rest.empty());
}

TEST(BoxTest, RunsOfFullRowsAreOne) {
  EXPECT_EQ(RunsIn(MakeBox({{1, 3}, {0, 5}}), {4, 5}), (Runs{{5, 10}}));
  EXPECT_EQ(RunsIn(MakeBox({{1, 3}, {2, 4}}), {4, 5}), (Runs{{7, 2}, {12, 2}}));
  EXPECT_EQ(RunsIn(MakeBox({{0, 2}, {1, 2}, {0, 3}}), {2, 2, 3}),
            (Runs{{3, 3}, {9, 3}}));
  EXPECT_EQ(RunsIn(Box(), {}), (Runs{{0, 1}}));
}

TEST(BoxTest, AFlatRangeIsTiledInOrder) {
  std::vector<Box> boxes;
  BoxesOfFlatRange({4, 5}, 3, 17, &boxes);
  EXPECT_THAT(boxes,
              ElementsAre(MakeBox({{0, 1}, {3, 5}}), MakeBox({{1, 3}, {0, 5}}),
                          MakeBox({{3, 4}, {0, 2}})));
  boxes.clear();
  BoxesOfFlatRange({4, 5}, 6, 8, &boxes);
  EXPECT_THAT(boxes, ElementsAre(MakeBox({{1, 2}, {1, 3}})));
}

TEST(BoxTest, EveryFlatRangeOfACubeIsTiledExactly) {
  const Dims shape = {3, 4, 5};
  for (int64_t begin = 0; begin <= 60; ++begin) {
    for (int64_t end = begin; end <= 60; ++end) {
      std::vector<Box> boxes;
      BoxesOfFlatRange(shape, begin, end, &boxes);
      EXPECT_LE(boxes.size(), 5u);
      int64_t at = begin;
      for (const Box& box : boxes) {
        ForEachRun(box, shape, [&](int64_t first, int64_t count) {
          ASSERT_EQ(first, at);
          at += count;
        });
      }
      ASSERT_EQ(at, end);
    }
  }
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
