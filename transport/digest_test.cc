#include "transport/digest.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "transport/digest_definition.h"

namespace weightsync {
namespace transport {
namespace {

using digest_internal::DigestAccumulateByDefinition;
using digest_internal::DigestAccumulateScalar;

constexpr int kElementBytes[] = {1, 2, 4, 8};

std::vector<unsigned char> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

Digest Of(const void* data, const DigestRun& run) {
  Digest digest;
  DigestAccumulate(data, run, &digest);
  return digest;
}

Digest ByDefinition(const void* data, const DigestRun& run) {
  Digest digest;
  DigestAccumulateByDefinition(data, run, &digest);
  return digest;
}

TEST(DigestKeys, InnerKeysAreOddSmallAndDifferent) {
  for (int lane = 0; lane < kDigestLanes; ++lane) {
    std::set<int> seen;
    for (int i = 0; i < kDigestBlockWords; ++i) {
      const int key = DigestInnerKey(lane, i);
      EXPECT_EQ(key % 2, 1);
      EXPECT_GT(key, 0);
      EXPECT_LT(key, 4096);
      seen.insert(key);
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(kDigestBlockWords))
        << "lane " << lane;
  }
}

// Digests travel between nodes that may run different builds: these values
// never change.
TEST(Digest, KnownAnswers) {
  std::vector<unsigned char> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<unsigned char>(i * 7 + 3);
  EXPECT_EQ(Of(bytes.data(), {0, 0, 500, 2}).ToString(),
            "f85f2e7be236d204ff2e0386da7df074");
  EXPECT_EQ(Of(bytes.data(), {17, 123456789012, 250, 4}).ToString(),
            "03d6d24f44735384fd2f9c7d21219c00");
  EXPECT_EQ(Of(bytes.data(), {1, 5, 1000, 1}).ToString(),
            "0187ecf428fa1a6601170dd79375efee");
}

TEST(Digest, OfNothingAndOfZerosIsZero) {
  const std::vector<unsigned char> zeros(4096);
  EXPECT_EQ(Of(zeros.data(), {3, 77, 0, 2}), Digest());
  EXPECT_EQ(Of(zeros.data(), {3, 77, 2048, 2}), Digest());
}

TEST(Digest, EveryPathGivesTheDefinition) {
  std::mt19937_64 random(1);
  const std::vector<unsigned char> bytes = RandomBytes(1 << 16, 2);
  for (int round = 0; round < 2000; ++round) {
    DigestRun run;
    run.element_bytes = kElementBytes[random() % 4];
    run.ordinal = static_cast<uint32_t>(random());
    run.first_element = static_cast<int64_t>(
        random() % (round % 2 == 0 ? 300 : int64_t{1} << 40));
    run.element_count =
        static_cast<int64_t>(random() % (round % 4 == 0 ? 4000 : 200));
    const size_t offset = random() % 64;
    const Digest expected = ByDefinition(bytes.data() + offset, run);
    EXPECT_EQ(Of(bytes.data() + offset, run), expected);
    Digest scalar;
    DigestAccumulateScalar(bytes.data() + offset, run, &scalar);
    EXPECT_EQ(scalar, expected);
  }
}

TEST(Digest, ExtremeWordsDoNotOverflow) {
  std::vector<int16_t> words(64 * 64, -32768);
  const DigestRun run = {5, 0, static_cast<int64_t>(words.size()), 2};
  EXPECT_EQ(Of(words.data(), run), ByDefinition(words.data(), run));
  std::fill(words.begin(), words.end(), 32767);
  EXPECT_EQ(Of(words.data(), run), ByDefinition(words.data(), run));
}

TEST(Digest, PartsAddUp) {
  std::mt19937_64 random(3);
  const std::vector<unsigned char> bytes = RandomBytes(1 << 16, 4);
  for (int round = 0; round < 300; ++round) {
    const int size = kElementBytes[random() % 4];
    const DigestRun whole = {static_cast<uint32_t>(round),
                             static_cast<int64_t>(random() % 1000),
                             static_cast<int64_t>(random() % 4000), size};
    Digest sum;
    for (int64_t done = 0; done < whole.element_count;) {
      const int64_t count =
          std::min<int64_t>(1 + random() % 500, whole.element_count - done);
      DigestAccumulate(bytes.data() + done * size,
                       {whole.ordinal, whole.first_element + done, count, size},
                       &sum);
      done += count;
    }
    EXPECT_EQ(sum, Of(bytes.data(), whole));
  }
}

TEST(Digest, DifferenceLeavesTheRest) {
  const std::vector<unsigned char> bytes = RandomBytes(2000, 5);
  const Digest head = Of(bytes.data(), {1, 0, 300, 2});
  const Digest whole = Of(bytes.data(), {1, 0, 1000, 2});
  EXPECT_EQ(whole - head, Of(bytes.data() + 600, {1, 300, 700, 2}));
}

TEST(Digest, AnyFlippedBitIsSeenInBothLanes) {
  for (const int size : kElementBytes) {
    std::vector<unsigned char> bytes = RandomBytes(1024, 6 + size);
    const DigestRun run = {9, 31, 1024 / size, size};
    const Digest before = Of(bytes.data(), run);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      bytes[bit / 8] ^= 1 << bit % 8;
      const Digest after = Of(bytes.data(), run);
      EXPECT_NE(after.lanes[0], before.lanes[0]);
      EXPECT_NE(after.lanes[1], before.lanes[1]);
      bytes[bit / 8] ^= 1 << bit % 8;
    }
  }
}

TEST(Digest, AnyTwoSwappedWordsAreSeen) {
  std::vector<uint16_t> words(192);
  for (size_t i = 0; i < words.size(); ++i)
    words[i] = static_cast<uint16_t>(1000 + i);
  const DigestRun run = {2, 0, static_cast<int64_t>(words.size()), 2};
  const Digest before = Of(words.data(), run);
  for (size_t a = 0; a < words.size(); ++a) {
    for (size_t b = a + 1; b < words.size(); ++b) {
      std::swap(words[a], words[b]);
      EXPECT_NE(Of(words.data(), run), before) << a << " and " << b;
      std::swap(words[a], words[b]);
    }
  }
}

TEST(Digest, TensorsThatChangedPlacesAreSeen) {
  const std::vector<unsigned char> a = RandomBytes(4096, 7);
  const std::vector<unsigned char> b = RandomBytes(4096, 8);
  const Digest right =
      Of(a.data(), {0, 0, 2048, 2}) + Of(b.data(), {1, 0, 2048, 2});
  const Digest wrong =
      Of(b.data(), {0, 0, 2048, 2}) + Of(a.data(), {1, 0, 2048, 2});
  EXPECT_NE(right, wrong);
}

TEST(Digest, BytesAtAnotherPlaceOfTheTensorAreSeen) {
  const std::vector<unsigned char> bytes = RandomBytes(4096, 9);
  EXPECT_NE(Of(bytes.data(), {0, 0, 2048, 2}),
            Of(bytes.data(), {0, 64, 2048, 2}));
  EXPECT_NE(Of(bytes.data(), {0, 0, 2048, 2}),
            Of(bytes.data(), {0, 1, 2048, 2}));
}

TEST(Copy, CopiesAllBytesNoOthersAndDigests) {
  std::mt19937_64 random(10);
  const std::vector<unsigned char> source = RandomBytes(1 << 16, 11);
  std::vector<unsigned char> target(1 << 17);
  for (int round = 0; round < 3000; ++round) {
    DigestRun run;
    run.element_bytes = kElementBytes[random() % 4];
    run.ordinal = static_cast<uint32_t>(random());
    run.first_element = static_cast<int64_t>(random() % 200);
    run.element_count =
        static_cast<int64_t>(random() % (round % 8 == 0 ? 6000 : 500));
    const size_t from = random() % 100;
    const size_t to = 64 + random() % 100;
    std::memset(target.data(), 0xa5, to + run.bytes() + 64);
    Digest digest;
    const bool with_digest = round % 3 != 0;
    if (with_digest) {
      CopyAccumulate(target.data() + to, source.data() + from, run, &digest);
      EXPECT_EQ(digest, ByDefinition(source.data() + from, run));
    } else {
      CopyNonTemporal(target.data() + to, source.data() + from, run.bytes());
    }
    ASSERT_EQ(
        std::memcmp(target.data() + to, source.data() + from, run.bytes()), 0);
    for (size_t i = 1; i <= 64; ++i) {
      ASSERT_EQ(target[to - i], 0xa5);
      ASSERT_EQ(target[to + run.bytes() + i - 1], 0xa5);
    }
  }
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
