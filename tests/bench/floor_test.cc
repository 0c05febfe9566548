#include "tests/bench/floor.h"

#include <memory>

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

TEST(FloorTest, SocketsSendAllWithAnyNumberOfStreams) {
  absl::StatusOr<std::unique_ptr<SocketSink>> sink =
      SocketSink::Start(0, kBytes);
  ASSERT_TRUE(sink.ok()) << sink.status();
  WarmMemory source(kBytes);
  for (int streams : {1, 2, 4}) {
    absl::StatusOr<absl::Duration> time =
        TimeSockets(source, "127.0.0.1", (*sink)->port(), streams);
    ASSERT_TRUE(time.ok()) << time.status();
    EXPECT_GT(*time, absl::ZeroDuration());
  }
}

TEST(FloorTest, WhatTheSinkCannotTakeIsAnError) {
  absl::StatusOr<std::unique_ptr<SocketSink>> sink =
      SocketSink::Start(0, kBytes - 1);
  ASSERT_TRUE(sink.ok()) << sink.status();
  WarmMemory source(kBytes);
  EXPECT_FALSE(TimeSockets(source, "127.0.0.1", (*sink)->port(), 1).ok());
}

}  // namespace
}  // namespace bench
}  // namespace weightsync
