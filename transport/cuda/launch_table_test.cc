// The kernels' bodies and their tables, on the CPU, against a plain reference:
// what does not need a GPU to be wrong.
#include "transport/cuda/launch_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/cuda/kernel_body.h"
#include "transport/digest.h"
#include "transport/error.h"
#include "transport/host/copy_pool.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

std::string RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Runs the copy kernel with `threads` to a block.
std::vector<Digest> RunCopy(const LaunchTable& table, uint32_t threads) {
  const std::vector<int16_t> keys = InnerKeys();
  std::vector<Digest> digests(table.frames);
  unsigned long long unused = 0;  // NOLINT: CUDA's type
  CopyLaunch launch = {};
  launch.copies = table.copies.data();
  launch.units = table.units.data();
  launch.unit_count = static_cast<int64_t>(table.units.size());
  launch.unit_bytes = table.unit_bytes;
  launch.frame_bytes = table.frame_bytes;
  launch.digests = &unused;
  launch.inner_keys = keys.data();
  for (int64_t unit = 0; unit < launch.unit_count; ++unit) {
    for (uint32_t thread = 0; thread < threads; ++thread) {
      DigestSum sum;
      sum.inner_keys = keys.data();
      const int64_t frame =
          CopyUnit<false>(launch, unit, thread, threads, &sum);
      digests[frame].lanes[0] += sum.lanes[0];
      digests[frame].lanes[1] += sum.lanes[1];
    }
  }
  return digests;
}

// A random strided copy of at most a few hundred kilobytes.
CopyTask RandomTask(std::mt19937* random, char* dst, const char* src,
                    int64_t room) {
  const auto pick = [random](int64_t most) {
    return static_cast<int64_t>((*random)() % most) + 1;
  };
  constexpr int32_t kSizes[] = {1, 2, 4, 8, 16};
  CopyTask task;
  while (true) {
    task = CopyTask();
    task.element_bytes = kSizes[(*random)() % 5];
    task.run_bytes = pick((*random)() % 2 ? 20 : 9000) * task.element_bytes;
    task.ordinal = (*random)() % 100;
    task.first_element = (*random)() % 100000;
    int64_t dst_step = task.run_bytes, src_step = task.run_bytes;
    int64_t element_step = task.run_bytes / task.element_bytes;
    const int dims = static_cast<int>((*random)() % 4);
    for (int i = 0; i < dims; ++i) {
      CopyDim dim;
      dim.extent = pick(6);
      dim.src_stride = src_step + ((*random)() % 3) * task.element_bytes;
      dim.dst_stride = dst_step + ((*random)() % 2) * 24;
      dim.element_stride = element_step + (*random)() % 5;
      src_step = dim.src_stride * dim.extent;
      dst_step = dim.dst_stride * dim.extent;
      element_step = dim.element_stride * dim.extent;
      task.dims.insert(task.dims.begin(), dim);
    }
    if (std::max(src_step, dst_step) < room) break;
  }
  task.src = src + (*random)() % 64;
  task.dst = dst + (*random)() % 64;
  return task;
}

TEST(CopyKernel, StridedCopiesOfEveryKindAreWhatTheHostDoes) {
  std::mt19937 random(3);
  CopyPool pool(1);
  constexpr int64_t kRoom = 400000;
  const std::string source = RandomBytes(kRoom + 64, 1);
  for (int round = 0; round < 300; ++round) {
    std::string got(kRoom + 64, 'x'), want(kRoom + 64, 'x');
    const CopyTask task = RandomTask(&random, &got[0], source.data(), kRoom);
    CopyTask host = task;
    host.dst = &want[0] + (task.dst - got.data());
    Digest want_digest;
    ASSERT_TRUE(pool.Copy({host}, {}, &want_digest).ok());
    LaunchTable table;
    ASSERT_TRUE(AddTasks({task}, &table).ok());
    const std::vector<Digest> digests =
        RunCopy(table, round % 3 == 0 ? kBlockThreads : 64);
    ASSERT_TRUE(got == want) << round;
    ASSERT_EQ(digests[0], want_digest) << round;
  }
}

TEST(CopyKernel, PacksAsTheHostDoes) {
  std::mt19937 random(5);
  CopyPool pool(1);
  constexpr int64_t kRoom = 60000;
  const std::string source = RandomBytes(kRoom + 64, 2);
  for (int round = 0; round < 30; ++round) {
    PackRequest request;
    std::vector<PackPiece> pieces(20);
    int64_t end = 0;
    for (PackPiece& piece : pieces) {
      piece.copy = RandomTask(&random, nullptr, source.data(), kRoom);
      piece.copy.dst = nullptr;
      piece.offset = (end + 15) / 16 * 16 + (random() % 2) * 160;
      end = piece.offset + piece.copy.bytes();
    }
    request.pieces = pieces;
    request.bucket_bytes = end + random() % 100;
    if (round % 4 == 1) request.frame_bytes = 192;
    if (round % 4 == 2) request.frame_bytes = 40960;
    std::string want(request.bucket_bytes, 'x'), got(request.bucket_bytes, 'y');
    PackResult result;
    request.bucket = &want[0];
    ASSERT_TRUE(pool.Pack(request, &result).ok());
    request.bucket = &got[0];
    ASSERT_TRUE(CheckPack(request).ok());
    LaunchTable table;
    ASSERT_TRUE(AddPack(request, &table).ok());
    EXPECT_EQ(RunCopy(table, kBlockThreads), result.frames) << round;
    ASSERT_TRUE(got == want) << round;
  }
}

TEST(CopyKernel, ABadPackIsRefusedAsTheHostDoes) {
  CopyPool pool(1);
  std::string bytes(1000, 'x');
  PackPiece piece;
  piece.copy.src = bytes.data();
  piece.copy.run_bytes = 100;
  const auto refused = [&](const PackRequest& request) {
    const absl::Status host = pool.Pack(request, nullptr);
    EXPECT_EQ(ReasonOf(CheckPack(request)), "BAD_COPY");
    EXPECT_EQ(CheckPack(request).message(), host.message());
  };
  PackRequest request;
  refused(request);
  request.bucket = &bytes[0];
  request.bucket_bytes = 99;
  request.pieces = absl::MakeConstSpan(&piece, 1);
  refused(request);
  request.bucket_bytes = 500;
  piece.offset = 8;
  refused(request);
  piece.offset = 16;
  request.frame_bytes = 100;
  refused(request);
  request.frame_bytes = 64;
  EXPECT_TRUE(CheckPack(request).ok());
  const PackPiece two[] = {piece, piece};
  request.pieces = two;
  refused(request);
}

// ---- Casts ----

std::vector<float> InterestingFloats() {
  std::vector<float> values;
  std::mt19937 random(9);
  for (int i = 0; i < 20000; ++i) values.push_back(FloatOfBits(random()));
  for (int i = 0; i < 20000; ++i) {
    values.push_back(std::ldexp(static_cast<float>(random()) / 4294967296.0f,
                                static_cast<int>(random() % 50) - 30));
  }
  for (const float value : {0.0f,
                            -0.0f,
                            1.0f,
                            448.0f,
                            447.9f,
                            449.0f,
                            464.0f,
                            480.0f,
                            65504.0f,
                            65519.9f,
                            65520.0f,
                            1e30f,
                            5.9604645e-8f,
                            2.9802322e-8f,
                            2.99e-8f,
                            0.001953125f,
                            0.0009765625f,
                            0.00097657f,
                            0.015625f,
                            0.0156f,
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    values.push_back(value);
    values.push_back(-value);
  }
  return values;
}

// The nearest of all values that `decode` makes of `codes` codes; the even one
// of two that are as near.
int Nearest(double value, int codes, double (*decode)(int)) {
  int best = -1;
  double distance = 0;
  for (int code = 0; code < codes; ++code) {
    const double candidate = decode(code);
    if (std::isnan(candidate) || std::isinf(candidate)) continue;
    const double d = std::fabs(candidate - value);
    if (best < 0 || d < distance || (d == distance && code % 2 == 0)) {
      best = code;
      distance = d;
    }
  }
  return best;
}

double DecodeE4M3(int code) {
  if (code == 127) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9)
                       : std::ldexp(8 + mantissa, exponent - 10);
}

TEST(Cast, E4M3IsTheNearestAndSaturates) {
  for (const float value : InterestingFloats()) {
    const int got = FloatToE4M3(FloatBits(value));
    EXPECT_EQ(got >> 7, std::signbit(value) ? 1 : 0);
    if (std::isnan(value)) {
      EXPECT_EQ(got & 127, 127);
      continue;
    }
    const double magnitude = std::min(std::fabs(double{value}), 448.0);
    ASSERT_EQ(got & 127, Nearest(magnitude, 127, DecodeE4M3)) << value;
  }
}

TEST(Cast, HalfIsTheCompilers) {
#if defined(__FLT16_MAX__)
  for (const float value : InterestingFloats()) {
    const uint16_t got = FloatToF16(FloatBits(value));
    if (std::isnan(value)) {
      EXPECT_EQ(got & 0x7c00, 0x7c00);
      EXPECT_NE(got & 0x3ff, 0);
      continue;
    }
    const _Float16 want = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &want, 2);
    ASSERT_EQ(got, bits) << value;
  }
#else
  GTEST_SKIP() << "this compiler has no _Float16";
#endif
}

TEST(Cast, BF16IsTheNearest) {
  for (const float value : InterestingFloats()) {
    const uint16_t got = FloatToBF16(FloatBits(value));
    const float back = BF16ToFloat(got);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(back));
      continue;
    }
    if (std::isinf(back)) {
      EXPECT_GE(std::fabs(value), 3.3961775e38f);
      continue;
    }
    const double error = std::fabs(double{back} - double{value});
    for (const int step : {-1, 1}) {
      const float other = BF16ToFloat(static_cast<uint16_t>(got + step));
      if (std::isnan(other) || std::isinf(other)) continue;
      const double distance = std::fabs(double{other} - double{value});
      ASSERT_LE(error, distance) << value;
      if (error == distance && other != back) {
        ASSERT_EQ(got % 2, 0) << value;
      }
    }
  }
}

TEST(Cast, OnTheWayOfAStridedCopy) {
  std::mt19937 random(11);
  for (const auto& [cast, unaligned] :
       std::vector<std::pair<CopyCast, int>>{{CopyCast::kF32ToBF16, 0},
                                             {CopyCast::kF32ToF16, 0},
                                             {CopyCast::kF32ToBF16, 2},
                                             {CopyCast::kF32ToF16, 1}}) {
    // 50 rows of 333 of a tensor of 400 columns.
    std::string source(50 * 400 * 4 + 8, '\0');
    std::vector<float> values(50 * 400);
    for (float& value : values)
      value = static_cast<float>(random()) / 1e9f - 2.0f;
    std::memcpy(&source[unaligned], values.data(), values.size() * 4);
    std::vector<uint16_t> got(50 * 333);
    CopyTask task;
    task.src = source.data() + unaligned;
    task.dst = reinterpret_cast<char*>(got.data());
    task.element_bytes = 2;
    task.run_bytes = 333 * 2;
    task.ordinal = 4;
    task.dims.push_back({50, 333 * 2, 400 * 4, 400});
    task.cast = cast;
    LaunchTable table;
    ASSERT_TRUE(AddTasks({task}, &table).ok());
    const std::vector<Digest> digests = RunCopy(table, kBlockThreads);
    Digest want;
    for (int row = 0; row < 50; ++row) {
      for (int column = 0; column < 333; ++column) {
        const uint32_t bits = FloatBits(values[row * 400 + column]);
        ASSERT_EQ(got[row * 333 + column], cast == CopyCast::kF32ToBF16
                                               ? FloatToBF16(bits)
                                               : FloatToF16(bits));
      }
      // Of the bytes as they are sent.
      DigestAccumulate(&got[row * 333], {4, row * 400, 333, 2}, &want);
    }
    EXPECT_EQ(digests[0], want);
  }
}

TEST(Cast, E4M3WithBlockScales) {
  std::mt19937 random(13);
  constexpr int kRows = 300, kColumns = 200, kStride = 256;
  std::vector<uint16_t> source(kRows * kStride);
  for (uint16_t& value : source)
    value = FloatToBF16(FloatBits(static_cast<float>(random()) / 1e9f - 2.0f));
  // A block of zeros.
  for (int row = 128; row < 256; ++row)
    for (int column = 0; column < 128; ++column)
      source[row * kStride + column] = 0;
  for (const auto& [dense, unaligned] : std::vector<std::pair<bool, int>>{
           {false, 0}, {true, 0}, {false, 1}, {true, 1}}) {
    const int64_t stride = dense ? kColumns : kStride;
    std::string memory(static_cast<size_t>(unaligned), '\0');
    for (int row = 0; row < kRows; ++row) {
      memory.append(
          reinterpret_cast<const char*>(&source[row * kStride]),
          static_cast<size_t>(row + 1 == kRows ? kColumns : stride) * 2);
    }
    std::vector<uint8_t> got(kRows * kColumns);
    std::vector<float> scales(6, -1.0f);
    CopyTask task = MakeBoxCopy(
        {kRows, kColumns}, 1, reinterpret_cast<char*>(got.data()),
        {kColumns, 1}, memory.data() + unaligned, {stride, 1},
        GlobalBox{0, {kRows, kColumns}, {0, 0}}, CopyCast::kBF16ToF8E4M3);
    task.blocks.src = task.src;
    task.blocks.row_stride = stride * 2;
    task.blocks.column_stride = 2;
    task.blocks.rows = kRows;
    task.blocks.columns = task.blocks.matrix_columns = kColumns;
    CopyTask of_scales =
        MakeBoxCopy({3, 2}, 4, reinterpret_cast<char*>(scales.data()), {2, 1},
                    task.src, {2, 1}, absl::nullopt, CopyCast::kBF16BlockScale);
    of_scales.blocks = task.blocks;
    LaunchTable table;
    ASSERT_TRUE(task.Validate().ok()) << task.Validate();
    ASSERT_TRUE(of_scales.Validate().ok());
    ASSERT_TRUE(AddTasks({task, of_scales}, &table).ok());
    // Of the same blocks: computed once.
    ASSERT_EQ(table.scale_units.size(), 6u);
    std::vector<float> floats(static_cast<size_t>(table.scale_count), 0.0f);
    PlaceScales(floats.data(), &table);
    const ScaleLaunch launch = {table.scales.data(), table.scale_units.data(),
                                6};
    for (int64_t unit = 0; unit < 6; ++unit) {
      uint32_t largest = 0;
      float* scale = nullptr;
      for (uint32_t thread = 0; thread < kBlockThreads; ++thread) {
        largest = std::max(
            largest, BlockLargest(launch, unit, thread, kBlockThreads, &scale));
      }
      *scale = BlockScale(largest);
    }
    RunCopy(table, kBlockThreads);
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        float largest = 0;
        const int row0 = row / 128 * 128, column0 = column / 128 * 128;
        for (int r = row0; r < std::min(row0 + 128, kRows); ++r)
          for (int c = column0; c < std::min(column0 + 128, kColumns); ++c)
            largest = std::max(largest,
                               std::fabs(BF16ToFloat(source[r * kStride + c])));
        const float scale = largest / 448.0f;
        ASSERT_EQ(scales[row / 128 * 2 + column / 128], scale);
        const float value = BF16ToFloat(source[row * kStride + column]);
        const uint8_t want =
            scale == 0 ? 0 : FloatToE4M3(FloatBits(value / scale));
        ASSERT_EQ(got[row * kColumns + column], want) << row << "," << column;
        if (column % 37 != 0) column += 36;  // the check above is quadratic
      }
      row += 20;
    }
  }
}

TEST(Scan, FindsAndGathersWhatChanged) {
  std::mt19937 random(17);
  for (const int bytes : {1, 2, 4, 8}) {
    constexpr int64_t kElements = 10000;
    const std::string before = RandomBytes(kElements * bytes, bytes);
    std::string after = before;
    std::vector<uint32_t> changed;
    for (uint32_t i = 0; i < kElements; ++i) {
      if (random() % 50 != 0) continue;
      after[i * bytes + random() % bytes] ^= 1;
      changed.push_back(i);
    }
    const int64_t words = (kElements + 63) / 64;
    std::vector<unsigned long long> bits(words);  // NOLINT
    std::vector<unsigned> counts((kElements + kScanGroup - 1) / kScanGroup);
    CompactLaunch launch = {};
    launch.scan = {before.data(), after.data(), kElements,
                   bytes,         bits.data(),  counts.data()};
    for (int64_t word = 0; word < words; ++word) {
      bits[word] = ChangedWord(launch.scan, word);
      counts[word / 64] += PopCount(bits[word]);
    }
    std::vector<int64_t> first(counts.size());
    for (size_t i = 1; i < counts.size(); ++i)
      first[i] = first[i - 1] + counts[i - 1];
    std::vector<uint32_t> indices(changed.size());
    std::string values(changed.size() * bytes, '\0');
    launch.first = first.data();
    launch.indices = indices.data();
    launch.values = &values[0];
    for (int64_t word = 0; word < words; ++word) CompactWord(launch, word);
    EXPECT_EQ(indices, changed);
    for (size_t i = 0; i < changed.size(); ++i) {
      EXPECT_EQ(values.substr(i * bytes, bytes),
                after.substr(changed[i] * bytes, bytes));
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
