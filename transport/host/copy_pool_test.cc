#include "transport/host/copy_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {
namespace {

using Index = std::vector<int64_t>;

std::vector<char> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> bytes(count);
  for (size_t i = 0; i < count; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, count - i));
  }
  return bytes;
}

int64_t Product(const Index& extents) {
  int64_t product = 1;
  for (int64_t extent : extents) product *= extent;
  return product;
}

// A tensor, a box of it, and the box's memory on two sides, with any strides.
struct Case {
  int32_t element_bytes;
  Index shape, offset, extents, src_strides, dst_strides;
  std::vector<char> src, dst;

  CopyTask Task(bool with_place) {
    absl::optional<GlobalBox> place;
    if (with_place) place = GlobalBox{7, shape, offset};
    return MakeBoxCopy(extents, element_bytes, dst.data(), dst_strides,
                       src.data(), src_strides, place);
  }

  // Element by element: what the engine has to come to.
  void Expect(std::vector<char>* expected, Digest* digest) const {
    *expected = dst;
    const auto strides = DenseStrides(shape);
    const int64_t count = Product(extents);
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat, from = 0, to = 0, element = 0;
      for (size_t i = extents.size(); i-- > 0;) {
        const int64_t at = rest % extents[i];
        rest /= extents[i];
        from += at * src_strides[i];
        to += at * dst_strides[i];
        element += (offset[i] + at) * strides[i];
      }
      std::memcpy(expected->data() + to * element_bytes,
                  src.data() + from * element_bytes, element_bytes);
      digest_internal::DigestAccumulateByDefinition(
          src.data() + from * element_bytes, {7, element, 1, element_bytes},
          digest);
    }
  }
};

// Strides of a layout in which the dimensions have been put in some order, and
// some have gaps.
Index RandomStrides(const Index& extents, std::mt19937_64* random, bool dense,
                    int64_t* span) {
  std::vector<int> order(extents.size());
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = static_cast<int>(order.size() - 1 - i);
  if (!dense && (*random)() % 2 == 0)
    std::shuffle(order.begin(), order.end(), *random);
  Index strides(extents.size());
  int64_t stride = 1;
  for (int i : order) {
    strides[i] = stride;
    stride *= extents[i];
    if (!dense && extents[i] > 8 && (*random)() % 2 == 0)
      stride += static_cast<int64_t>((*random)() % 5);
  }
  *span = stride;
  return strides;
}

Case RandomCase(std::mt19937_64* random, int64_t max_extent) {
  Case c;
  const int32_t sizes[] = {1, 2, 4, 8};
  c.element_bytes = sizes[(*random)() % 4];
  const size_t dims = (*random)() % 5;
  int64_t left = 20000;  // elements
  for (size_t i = 0; i < dims; ++i) {
    const int64_t extent =
        1 + static_cast<int64_t>((*random)() % std::min(max_extent, left));
    left = std::max<int64_t>(1, left / extent);
    const int64_t before =
        static_cast<int64_t>((*random)() % 3) * ((*random)() % 2);
    const int64_t after =
        static_cast<int64_t>((*random)() % 3) * ((*random)() % 2);
    c.extents.push_back(extent);
    c.offset.push_back(before);
    c.shape.push_back(before + extent + after);
  }
  int64_t span;
  c.src_strides = RandomStrides(c.extents, random, (*random)() % 2 == 0, &span);
  c.src = RandomBytes(span * c.element_bytes, (*random)());
  c.dst_strides = RandomStrides(c.extents, random, (*random)() % 2 == 0, &span);
  c.dst.assign(span * c.element_bytes, 'x');
  return c;
}

TEST(CopyPool, AnyStridesCopyAndDigestAsElementByElement) {
  std::mt19937_64 random(1);
  CopyPool pool(3);
  for (int round = 0; round < 400; ++round) {
    Case c = RandomCase(&random, round % 4 == 0 ? 3000 : 14);
    std::vector<char> expected;
    Digest expected_digest;
    c.Expect(&expected, &expected_digest);
    const bool with_digest = round % 3 != 0;
    Digest digest;
    const CopyTask task = c.Task(with_digest);
    ASSERT_TRUE(
        pool.Copy({task}, CopyOptions(), with_digest ? &digest : nullptr).ok());
    ASSERT_EQ(c.dst, expected) << "round " << round;
    if (with_digest) {
      ASSERT_EQ(digest, expected_digest) << "round " << round;
      // And of what stands there, without a copy.
      CopyTask look = task;
      look.dst = nullptr;
      Digest again;
      ASSERT_TRUE(pool.Copy({look}, CopyOptions(), &again).ok());
      ASSERT_EQ(again, expected_digest);
    }
  }
}

TEST(CopyPool, ManyTasksOfAllSizesOverManyParts) {
  std::mt19937_64 random(2);
  CopyPool pool(2);
  const std::vector<char> source = RandomBytes(24 << 20, 3);
  std::vector<char> target(source.size());
  std::vector<CopyTask> tasks;
  Digest expected;
  for (size_t at = 0; at < source.size();) {
    CopyTask task;
    const size_t most = tasks.size() % 7 == 0 ? (5 << 20) : 5000;
    task.run_bytes = static_cast<int64_t>(
        std::min(source.size() - at, 2 * (random() % most / 2)));
    task.src = source.data() + at;
    task.dst = target.data() + at;
    task.ordinal = static_cast<uint32_t>(tasks.size());
    task.element_bytes = 2;
    at += task.run_bytes;
    DigestAccumulate(task.src, {task.ordinal, 0, task.run_bytes / 2, 2},
                     &expected);
    tasks.push_back(task);
  }
  Digest digest;
  ASSERT_TRUE(pool.Copy(tasks, CopyOptions(), &digest).ok());
  EXPECT_EQ(target, source);
  EXPECT_EQ(digest, expected);
}

TEST(CopyPool, NothingToDo) {
  CopyPool pool(1);
  Digest digest;
  EXPECT_TRUE(pool.Copy({}, CopyOptions(), &digest).ok());
  EXPECT_EQ(digest, Digest());
}

TEST(CopyPool, CallsFromManyThreads) {
  CopyPool pool(2);
  const std::vector<char> source = RandomBytes(3 << 20, 4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        std::vector<char> target(source.size());
        CopyTask task;
        task.run_bytes = static_cast<int64_t>(source.size());
        task.src = source.data();
        task.dst = target.data();
        EXPECT_TRUE(pool.Copy({task}).ok());
        EXPECT_EQ(target, source);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CopyPool, ParallelForStopsAtTheFirstError) {
  CopyPool pool(2);
  std::atomic<int> calls{0};
  const absl::Status status =
      pool.ParallelFor(1000, [&](int64_t part) -> absl::Status {
        ++calls;
        if (part == 10) return absl::DataLossError("ten");
        return absl::OkStatus();
      });
  EXPECT_EQ(status.message(), "ten");
  EXPECT_LT(calls, 1000);
}

// A source that its owner truncates.
TEST(CopyPool, LostSourceFailsTheCopyAndNothingElse) {
  const size_t bytes = 8 << 20;
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), bytes), 0);
  char* source = static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0));
  ASSERT_EQ(ftruncate(fd.get(), bytes / 2), 0);
  CopyPool pool(2);
  std::vector<char> target(bytes);
  CopyTask task;
  task.run_bytes = static_cast<int64_t>(bytes);
  task.src = source;
  task.dst = target.data();
  CopyOptions options;
  options.guard_source = true;
  Digest digest;
  EXPECT_EQ(ReasonOf(pool.Copy({task}, options, &digest)),
            "SOURCE_MEMORY_LOST");
  EXPECT_EQ(digest, Digest());
  task.run_bytes = static_cast<int64_t>(bytes / 2);
  EXPECT_TRUE(pool.Copy({task}, options, &digest).ok());

  PackPiece piece;
  piece.copy = task;
  piece.copy.run_bytes = static_cast<int64_t>(bytes);
  PackRequest request;
  request.bucket = target.data();
  request.bucket_bytes = static_cast<int64_t>(bytes);
  request.pieces = absl::MakeConstSpan(&piece, 1);
  request.guard_source = true;
  int64_t told = 0;
  request.on_frames = [&](int64_t, int64_t last, absl::Span<const Digest>) {
    told = last;
  };
  EXPECT_EQ(ReasonOf(pool.Pack(request, nullptr)), "SOURCE_MEMORY_LOST");
  EXPECT_LE(told, static_cast<int64_t>(bytes / 2) / kFrameBytes);
  munmap(source, bytes);
}

TEST(Pack, FramesCarryTheDigestOfTheirPartsOfAllPieces) {
  std::mt19937_64 random(5);
  CopyPool pool(2);
  for (int round = 0; round < 40; ++round) {
    std::vector<Case> cases;
    std::vector<PackPiece> pieces;
    std::vector<std::vector<char>> packed;
    int64_t offset = 0;
    const int count = static_cast<int>(random() % 12);
    Digest whole;
    cases.reserve(count);
    for (int i = 0; i < count; ++i) {
      cases.push_back(RandomCase(&random, round % 2 == 0 ? 20000 : 20));
      Case& c = cases.back();
      int64_t span;
      c.dst_strides = RandomStrides(c.extents, &random, /*dense=*/true, &span);
      c.dst.assign(Product(c.extents) * c.element_bytes, 'x');
      packed.emplace_back();
      c.Expect(&packed.back(), &whole);
      PackPiece piece;
      piece.offset = offset;
      piece.copy = c.Task(/*with_place=*/true);
      pieces.push_back(piece);
      offset += static_cast<int64_t>(packed.back().size());
      offset = (offset + 15) / 16 * 16 + 16 * (random() % 2);
    }
    std::vector<char> bucket(offset + 100, 'y');
    PackRequest request;
    request.bucket = bucket.data();
    request.bucket_bytes = offset;
    request.pieces = pieces;
    request.frame_bytes = round % 2 == 0 ? kFrameBytes : 4096;
    int64_t told = 0;
    std::vector<Digest> told_digests;
    request.on_frames = [&](int64_t first, int64_t last,
                            absl::Span<const Digest> digests) {
      EXPECT_EQ(first, told);
      EXPECT_EQ(static_cast<int64_t>(digests.size()), last - first);
      told = last;
      told_digests.insert(told_digests.end(), digests.begin(), digests.end());
    };
    PackResult result;
    ASSERT_TRUE(pool.Pack(request, &result).ok());
    EXPECT_EQ(result.bucket, whole);
    EXPECT_EQ(static_cast<int64_t>(result.frames.size()),
              (offset + request.frame_bytes - 1) / request.frame_bytes);
    EXPECT_EQ(told_digests, result.frames);
    // Every byte is a piece's or zero, and nothing beyond the bucket was
    // touched.
    std::vector<char> expected(offset + 100, 0);
    std::fill(expected.begin() + offset, expected.end(), 'y');
    for (int i = 0; i < count; ++i)
      std::copy(packed[i].begin(), packed[i].end(),
                expected.begin() + pieces[i].offset);
    EXPECT_EQ(bucket, expected);
  }
}

TEST(Pack, TwoWholeFrames) {
  CopyPool pool(2);
  const std::vector<char> source = RandomBytes(2 * kFrameBytes, 6);
  PackPiece piece;
  piece.copy = MakeBoxCopy({kFrameBytes}, 2, nullptr, {1}, source.data(), {1},
                           GlobalBox{4, {kFrameBytes}, {0}});
  std::vector<char> bucket(source.size());
  PackRequest request;
  request.bucket = bucket.data();
  request.bucket_bytes = 2 * kFrameBytes;
  request.pieces = absl::MakeConstSpan(&piece, 1);
  PackResult result;
  ASSERT_TRUE(pool.Pack(request, &result).ok());
  ASSERT_EQ(result.frames.size(), 2u);
  Digest second;
  DigestAccumulate(bucket.data() + kFrameBytes,
                   {4, kFrameBytes / 2, kFrameBytes / 2, 2}, &second);
  EXPECT_EQ(result.frames[1], second);
}

TEST(Pack, RefusesPiecesThatDoNotFit) {
  CopyPool pool(1);
  const std::vector<char> source(4096);
  std::vector<char> bucket(4096);
  std::vector<PackPiece> pieces(2);
  for (PackPiece& piece : pieces) {
    piece.copy.src = source.data();
    piece.copy.run_bytes = 1024;
  }
  PackRequest request;
  request.bucket = bucket.data();
  request.bucket_bytes = 4096;
  request.pieces = pieces;
  pieces[1].offset = 1008;
  EXPECT_EQ(ReasonOf(pool.Pack(request, nullptr)), "BAD_COPY");
  pieces[1].offset = 1030;
  EXPECT_EQ(ReasonOf(pool.Pack(request, nullptr)), "BAD_COPY");
  pieces[1].offset = 3088;
  EXPECT_EQ(ReasonOf(pool.Pack(request, nullptr)), "BAD_COPY");
  pieces[1].offset = 3072;
  EXPECT_TRUE(pool.Pack(request, nullptr).ok());
  request.frame_bytes = 100;
  EXPECT_EQ(ReasonOf(pool.Pack(request, nullptr)), "BAD_COPY");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
