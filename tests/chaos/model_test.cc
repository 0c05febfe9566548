#include "tests/chaos/model.h"

#include <gtest/gtest.h>

#include <set>

namespace weightsync {
namespace chaos {
namespace {

constexpr int64_t kBytes = 1 << 20;

// Puts content into live memory as an update would.
void Put(const std::vector<client::Tensor>& parameters, int64_t content,
         int index, int count, LiveModel* live) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<char> whole(client::PartBytes(parameters[i]));
    Fill(7, content, i, &whole);
    live->storage[i] =
        Cut(parameters[i], WorkerBox(parameters[i], i, index, count), whole);
  }
}

TEST(ModelTest, HasDozensOfUnevenTensors) {
  const auto parameters = Parameters(7, kBytes);
  EXPECT_GE(parameters.size(), 24);
  std::set<int64_t> sizes;
  int64_t total = 0;
  for (const client::Tensor& parameter : parameters) {
    EXPECT_TRUE(client::CheckTensor(parameter).ok());
    sizes.insert(client::PartBytes(parameter));
    total += client::PartBytes(parameter);
  }
  EXPECT_GT(sizes.size(), 20);
  EXPECT_GT(total, kBytes / 2);
  EXPECT_LT(total, kBytes * 2);
}

TEST(ModelTest, ALiveHashIsTheExpectedOneOfItsContentAlone) {
  const auto parameters = Parameters(7, kBytes);
  for (int count : {1, 2}) {
    for (int index = 0; index < count; ++index) {
      LiveModel live = MakeLive(parameters, index, count);
      const std::string own = live.Hash();
      Put(parameters, 5, index, count, &live);
      EXPECT_EQ(live.Hash(), ExpectedHashes(parameters, 7, 5, count)[index]);
      EXPECT_NE(live.Hash(), ExpectedHashes(parameters, 7, 6, count)[index]);
      EXPECT_NE(live.Hash(), own);
      // One byte of another content is seen.
      live.storage[20].back() ^= 1;
      EXPECT_NE(live.Hash(), ExpectedHashes(parameters, 7, 5, count)[index]);
    }
  }
}

TEST(ModelTest, RanksHoldEveryRowOnce) {
  for (const client::Tensor& parameter : Parameters(7, kBytes)) {
    int64_t rows = 0;
    for (int rank = 0; rank < 3; ++rank) {
      client::Box box;
      if (!RankBox(parameter, rank, 3, &box)) continue;
      EXPECT_EQ(box.offset[0], rows);
      rows += box.extent[0];
    }
    EXPECT_EQ(rows, parameter.shape[0]);
  }
}

}  // namespace
}  // namespace chaos
}  // namespace weightsync
