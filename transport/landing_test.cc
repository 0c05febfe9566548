#include "transport/landing.h"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "transport/digest_map.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr int64_t kFrame = Landing::kFrameBytes;

std::vector<char> Bytes(int64_t size) {
  std::vector<char> bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 31 + i / 251);
  }
  return bytes;
}

class Recorder : public Landing::Watcher {
 public:
  void OnFramesReady(absl::Span<const uint32_t> ready) override {
    frames.insert(frames.end(), ready.begin(), ready.end());
  }
  void OnFailed(const absl::Status& why) override { status = why; }
  std::vector<uint32_t> frames;
  absl::Status status;
};

TEST(DigestMapTest, PartsAddUpWhereverTheyAreCut) {
  const std::vector<char> bytes = Bytes(3000);
  // Two tensors with padding between them, the second from the middle of a
  // global tensor.
  const DigestRun first{4, 0, 500, 2}, second{9, 77, 480, 4};
  RunDigestMap map({{0, first}, {1008, second}});
  Digest whole;
  DigestAccumulate(bytes.data(), first, &whole);
  DigestAccumulate(bytes.data() + 1008, second, &whole);
  EXPECT_TRUE(map.Of(0, bytes) == whole);
  for (const int64_t cut : {0, 4, 512, 1000, 1004, 1008, 1012, 2000, 2928}) {
    const absl::Span<const char> all = absl::MakeConstSpan(bytes);
    EXPECT_TRUE(
        map.Of(0, all.subspan(0, cut)) + map.Of(cut, all.subspan(cut)) == whole)
        << cut;
  }
  EXPECT_TRUE(map.Of(1000, absl::MakeConstSpan(bytes).subspan(1000, 8)) ==
              Digest())
      << "padding belongs to nobody";
}

class LandingTest : public testing::Test {
 protected:
  LandingTest()
      : bytes_(Bytes(3 * kFrame + 10)),
        map_(std::make_shared<RunDigestMap>(std::vector<PlacedRun>{
            {0, DigestRun{1, 0, (3 * kFrame + 10) / 2, 2}}})),
        landing_(7, absl::MakeSpan(bytes_), map_) {}

  std::vector<char> bytes_;
  std::shared_ptr<const DigestMap> map_;
  Landing landing_;
};

TEST_F(LandingTest, TheLastFrameIsShort) {
  EXPECT_EQ(landing_.frame_count(), 4u);
  EXPECT_EQ(landing_.frame(2).size(), static_cast<size_t>(kFrame));
  EXPECT_EQ(landing_.frame(3).size(), 10u);
}

TEST_F(LandingTest, AnEmptyBucketIsComplete) {
  Landing empty(1, absl::Span<char>(), map_);
  EXPECT_TRUE(empty.complete());
  EXPECT_TRUE(empty.WaitComplete(absl::ZeroDuration()).ok());
}

TEST_F(LandingTest, OneClaimAtATimeAndNoneOnWhatIsReady) {
  EXPECT_TRUE(landing_.Claim(1));
  EXPECT_FALSE(landing_.Claim(1));
  landing_.Unclaim(1);
  EXPECT_TRUE(landing_.Claim(1));
  landing_.MarkReady(1, landing_.ComputeDigest(1));
  EXPECT_FALSE(landing_.Claim(1));
  landing_.Unclaim(1);
  EXPECT_TRUE(landing_.IsReady(1));
}

TEST_F(LandingTest, TheBucketsDigestIsThatOfItsBytes) {
  EXPECT_FALSE(landing_.MarkReady(3, landing_.ComputeDigest(3)));
  EXPECT_FALSE(landing_.MarkReady(0, landing_.ComputeDigest(0)));
  EXPECT_FALSE(landing_.MarkReady(0, Digest())) << "it stays as it is";
  EXPECT_FALSE(landing_.MarkReady(1, landing_.ComputeDigest(1)));
  EXPECT_EQ(landing_.ReadyBitmap(), std::vector<uint8_t>{0b1011});
  EXPECT_TRUE(landing_.MarkReady(2, landing_.ComputeDigest(2)));
  EXPECT_TRUE(landing_.complete());
  EXPECT_TRUE(landing_.bucket_digest() == map_->Of(0, bytes_));
}

TEST_F(LandingTest, AWatcherHearsOfEveryFrameOnce) {
  landing_.MarkReady(2, Digest());
  Recorder recorder;
  landing_.AddWatcher(&recorder);
  landing_.MarkReady(0, Digest());
  landing_.MarkReady(0, Digest());
  EXPECT_EQ(recorder.frames, (std::vector<uint32_t>{2, 0}));
  landing_.RemoveWatcher(&recorder);
  landing_.MarkReady(1, Digest());
  EXPECT_EQ(recorder.frames.size(), 2u);
}

TEST_F(LandingTest, WaitingEndsWithCompletionFailureOrSilence) {
  EXPECT_EQ(ReasonOf(landing_.WaitComplete(absl::Milliseconds(5))),
            "NO_PROGRESS");
  std::thread filler([this] { EXPECT_TRUE(landing_.MarkAllReady().ok()); });
  EXPECT_TRUE(landing_.WaitComplete(absl::Seconds(20)).ok());
  filler.join();
  Landing failing(1, absl::MakeSpan(bytes_), map_);
  Recorder recorder;
  failing.AddWatcher(&recorder);
  failing.Fail(absl::AbortedError("first"));
  failing.Fail(absl::AbortedError("second"));
  EXPECT_EQ(failing.WaitComplete(absl::Seconds(20)).message(), "first");
  EXPECT_EQ(recorder.status.message(), "first");
  failing.RemoveWatcher(&recorder);
}

// A GPU's frames are digested by the GPU, many at once, and its errors are the
// landing's.
TEST_F(LandingTest, FramesOfAGpuAreDigestedThere) {
  class Gpu final : public FrameDigester {
   public:
    absl::StatusOr<std::vector<Digest>> DigestFrames(
        absl::Span<const uint32_t> frames) const override {
      if (!status.ok()) return status;
      asked.push_back(frames.size());
      std::vector<Digest> digests;
      for (const uint32_t frame : frames) digests.push_back(DigestOf(frame));
      return digests;
    }
    static Digest DigestOf(uint32_t frame) {
      Digest digest;
      const int32_t value = static_cast<int32_t>(frame) + 1;
      DigestAccumulate(reinterpret_cast<const char*>(&value),
                       DigestRun{1, 0, 1, 4}, &digest);
      return digest;
    }
    absl::Status status;
    mutable std::vector<size_t> asked;
  };
  const auto gpu = std::make_shared<Gpu>();
  // An address that nobody may follow.
  char* const name = reinterpret_cast<char*>(int64_t{1} << 20);
  constexpr uint32_t kFrames = Landing::kDigestFrames + 44;
  Landing landing(3, absl::MakeSpan(name, kFrames * kFrame - 100), gpu);
  EXPECT_TRUE(landing.on_device());
  EXPECT_FALSE(landing_.on_device());
  EXPECT_EQ(landing.frame_count(), kFrames);
  EXPECT_LT(landing.frame_file(0).fd, 0);
  const auto some = landing.ComputeDigests({7, 2});
  ASSERT_TRUE(some.ok());
  EXPECT_TRUE((*some)[0] == Gpu::DigestOf(7));
  EXPECT_TRUE((*some)[1] == Gpu::DigestOf(2));

  gpu->status = absl::UnavailableError("the GPU is gone");
  EXPECT_TRUE(absl::IsUnavailable(landing.ComputeDigests({1}).status()));
  EXPECT_TRUE(absl::IsUnavailable(landing.MarkAllReady()));
  EXPECT_EQ(landing.ready_frames(), 0u);
  gpu->status = absl::OkStatus();
  gpu->asked.clear();
  landing.MarkReady(0, Gpu::DigestOf(0));
  ASSERT_TRUE(landing.MarkAllReady().ok());
  EXPECT_TRUE(landing.complete());
  EXPECT_EQ(gpu->asked,
            (std::vector<size_t>{Landing::kDigestFrames,
                                 kFrames - 1 - Landing::kDigestFrames}));
  EXPECT_TRUE(landing.frame_digest(299) == Gpu::DigestOf(299));
}

// One landing is sent to many at once, and each of their threads fills it.
TEST_F(LandingTest, ThoseWhoFillItTogetherShareTheWork) {
  class Counting final : public DigestMap {
   public:
    explicit Counting(std::shared_ptr<const DigestMap> map)
        : map_(std::move(map)) {}
    Digest Of(int64_t offset, absl::Span<const char> bytes) const override {
      ++count;
      return map_->Of(offset, bytes);
    }
    mutable std::atomic<int> count{0};

   private:
    const std::shared_ptr<const DigestMap> map_;
  };
  const auto counting = std::make_shared<Counting>(map_);
  Landing landing(1, absl::MakeSpan(bytes_), counting);
  std::vector<std::thread> fillers;
  for (int i = 0; i < 8; ++i) {
    fillers.emplace_back(
        [&landing] { EXPECT_TRUE(landing.MarkAllReady().ok()); });
  }
  for (std::thread& filler : fillers) filler.join();
  EXPECT_TRUE(landing.complete());
  EXPECT_EQ(counting->count, static_cast<int>(landing.frame_count()));
}

TEST_F(LandingTest, OneReceiverAtATime) {
  const int one = 0, two = 0;
  EXPECT_TRUE(landing_.AcquireReceiver(&one));
  EXPECT_TRUE(landing_.AcquireReceiver(&one));
  EXPECT_FALSE(landing_.AcquireReceiver(&two));
  landing_.ReleaseReceiver(&two);
  EXPECT_FALSE(landing_.AcquireReceiver(&two));
  landing_.ReleaseReceiver(&one);
  EXPECT_TRUE(landing_.AcquireReceiver(&two));
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
