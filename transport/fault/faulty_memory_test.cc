#include "transport/fault/faulty_memory.h"

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace {

constexpr int64_t kBytes = 3 * kFrameBytes;

class FaultyMemoryTest : public ::testing::Test {
 protected:
  FaultyMemoryTest()
      : pool_(2),
        host_(&pool_, nullptr, {}),
        memory_(&host_),
        source_(kBytes, 's'),
        target_(kBytes, 't') {
    task_.src = source_.data();
    task_.dst = &target_[0];
    task_.run_bytes = kBytes;
    task_.element_bytes = 2;
    piece_.copy = task_;
    request_.bucket = &target_[0];
    request_.bucket_bytes = kBytes;
    request_.pieces = absl::MakeConstSpan(&piece_, 1);
  }

  absl::Status Copy(Digest* digest = nullptr) {
    return memory_.Copy({task_}, CopyOptions(), digest);
  }
  void Inject(MemoryFault::Operation operation, MemoryFault::Kind kind,
              int64_t after, int64_t byte = 0) {
    MemoryFault fault;
    fault.operation = operation;
    fault.kind = kind;
    fault.after = after;
    fault.byte = byte;
    memory_.Inject(fault);
  }
  Digest DigestOf(const std::string& bytes) {
    Digest digest;
    DigestAccumulate(bytes.data(), {0, 0, kBytes / 2, 2}, &digest);
    return digest;
  }

  CopyPool pool_;
  HostMemory host_;
  FaultyMemory memory_;
  const std::string source_;
  std::string target_;
  CopyTask task_;
  PackPiece piece_;
  PackRequest request_;
};

TEST_F(FaultyMemoryTest, FailsAfterN) {
  Inject(MemoryFault::Operation::kCopy, MemoryFault::Kind::kFail, 2);
  EXPECT_TRUE(Copy().ok());
  EXPECT_TRUE(Copy().ok());
  EXPECT_EQ(Copy().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Copy().ok());
  EXPECT_EQ(memory_.hits(), 1);
}

TEST_F(FaultyMemoryTest, FailsForGoodUntilCleared) {
  MemoryFault fault;
  fault.operation = MemoryFault::Operation::kAllocate;
  fault.count = -1;
  memory_.Inject(fault);
  EXPECT_FALSE(memory_.Allocate(4096, AllocateOptions()).ok());
  EXPECT_FALSE(memory_.Allocate(4096, AllocateOptions()).ok());
  EXPECT_TRUE(Copy().ok());
  memory_.Clear();
  EXPECT_TRUE(memory_.Allocate(4096, AllocateOptions()).ok());
}

TEST_F(FaultyMemoryTest, Delays) {
  MemoryFault fault;
  fault.kind = MemoryFault::Kind::kDelay;
  fault.delay = absl::Milliseconds(50);
  memory_.Inject(fault);
  const absl::Time start = absl::Now();
  EXPECT_TRUE(Copy().ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(50));
  EXPECT_EQ(target_, source_);
}

TEST_F(FaultyMemoryTest, DamageOfACopyIsSeenByItsDigest) {
  Inject(MemoryFault::Operation::kCopy, MemoryFault::Kind::kDamage, 0, 70000);
  Digest digest;
  EXPECT_TRUE(Copy(&digest).ok());
  EXPECT_NE(target_, source_);
  EXPECT_EQ(digest, DigestOf(source_));
  EXPECT_NE(digest, DigestOf(target_));
  target_[70000] ^= 1;
  EXPECT_EQ(target_, source_);
}

TEST_F(FaultyMemoryTest, TruncatedCopy) {
  Inject(MemoryFault::Operation::kCopy, MemoryFault::Kind::kTruncate, 0, 70000);
  Digest digest;
  EXPECT_TRUE(Copy(&digest).ok());
  EXPECT_EQ(target_,
            source_.substr(0, 70000) + std::string(kBytes - 70000, 't'));
  EXPECT_EQ(digest, DigestOf(source_));
}

TEST_F(FaultyMemoryTest, TruncatedStridedCopy) {
  const std::string source = "abcdefghijkl";
  std::string target = "............";
  const CopyTask columns = MakeBoxCopy(
      {3, 2}, 1, &target[0], {2, 1}, source.data() + 1, {4, 1}, absl::nullopt);
  Inject(MemoryFault::Operation::kCopy, MemoryFault::Kind::kTruncate, 0, 5);
  EXPECT_TRUE(memory_.Copy({columns}, CopyOptions(), nullptr).ok());
  EXPECT_EQ(target, "bcfgj.......");
}

TEST_F(FaultyMemoryTest, DamageOfAPackIsInPlaceWhenItsFrameIsToldOf) {
  Inject(MemoryFault::Operation::kPack, MemoryFault::Kind::kDamage, 0,
         kFrameBytes + 5);
  bool damaged_when_told = false;
  request_.on_frames = [&](int64_t first, int64_t last,
                           absl::Span<const Digest>) {
    if (first <= 1 && last > 1)
      damaged_when_told = target_[kFrameBytes + 5] == ('s' ^ 1);
  };
  PackResult result;
  EXPECT_TRUE(memory_.Pack(request_, &result).ok());
  EXPECT_TRUE(damaged_when_told);
  EXPECT_EQ(result.bucket, DigestOf(source_));
  EXPECT_NE(result.bucket, DigestOf(target_));
}

TEST_F(FaultyMemoryTest, TruncatedPack) {
  Inject(MemoryFault::Operation::kPack, MemoryFault::Kind::kTruncate, 0,
         kFrameBytes + 5);
  EXPECT_TRUE(memory_.Pack(request_, nullptr).ok());
  EXPECT_EQ(target_, source_.substr(0, kFrameBytes + 5) +
                         std::string(kBytes - kFrameBytes - 5, '\0'));
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
