#include "tests/bench/floor.h"

#include "gtest/gtest.h"

namespace weightsync {
namespace bench {
namespace {

constexpr int64_t kBytes = (8 << 20) + 13;

TEST(FloorTest, MemcpyCopiesAll) {
  WarmMemory source(kBytes);
  WarmMemory target(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) source.data()[i] = i * 7;
  EXPECT_GT(TimeMemcpy(source, target, 3), absl::ZeroDuration());
  for (int64_t i = 0; i < kBytes; ++i) {
    ASSERT_EQ(source.data()[i], target.data()[i]) << "at " << i;
  }
}

}  // namespace
}  // namespace bench
}  // namespace weightsync
