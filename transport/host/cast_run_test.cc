// Casts on the way of a copy, against their definition; the definition itself
// is judged in transport/cuda/launch_table_test.cc.
#include "transport/host/cast_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/cast_definition.h"
#include "transport/host/copy_pool.h"

namespace weightsync {
namespace transport {
namespace {

// Every upper half, with lower halves on, just below and just above each tie.
std::vector<uint32_t> Floats() {
  std::vector<uint32_t> floats;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u,
                                 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      floats.push_back(upper << 16 | lower);
    }
  }
  return floats;
}

TEST(CastRun, EveryFloatIsCastAsDefined) {
  const std::vector<uint32_t> floats = Floats();
  const int64_t count = static_cast<int64_t>(floats.size());
  std::vector<uint16_t> got(floats.size());
  CastRun(CopyCast::kF32ToBF16, {}, got.data(), floats.data(), count, 0);
  for (size_t i = 0; i < floats.size(); ++i) {
    ASSERT_EQ(got[i], FloatToBF16(floats[i])) << std::hex << floats[i];
  }
  CastRun(CopyCast::kF32ToF16, {}, got.data(), floats.data(), count, 0);
  for (size_t i = 0; i < floats.size(); ++i) {
    ASSERT_EQ(got[i], FloatToF16(floats[i])) << std::hex << floats[i];
  }
  // The last few of a run go another way.
  for (int64_t few = 0; few < 40; ++few) {
    std::vector<uint16_t> some(41, 0xabcd);
    CastRun(CopyCast::kF32ToBF16, {}, some.data(), &floats[77777], few, 0);
    for (int64_t i = 0; i < few; ++i)
      ASSERT_EQ(some[i], FloatToBF16(floats[77777 + i]));
    ASSERT_EQ(some[few], 0xabcd);
  }
}

TEST(CastRun, BF16IsTheNearestOfTwo) {
  // Not by the definition's own arithmetic: against both neighbours.
  for (const uint32_t bits : Floats()) {
    uint16_t got;
    CastRun(CopyCast::kF32ToBF16, {}, &got, &bits, 1, 0);
    const float value = FloatOfBits(bits);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(BF16ToFloat(got)));
      continue;
    }
    const uint16_t below = static_cast<uint16_t>(bits >> 16);
    const uint32_t lower = bits & 0xffffu;
    const bool up = lower > 0x8000u || (lower == 0x8000u && (below & 1) != 0);
    ASSERT_EQ(got, below + (up ? 1 : 0)) << std::hex << bits;
  }
}

TEST(CastRun, EveryBF16BecomesE4M3AsDefined) {
  std::vector<uint16_t> values(0x10000);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<uint16_t>(i);
  for (const float scale : {1.0f, 0.0078125f, 3.1f / 448, 1e-30f, 1e-44f, 1e30f,
                            0.0f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    CopyBlocks blocks;
    blocks.rows = 1;
    blocks.columns = blocks.matrix_columns = kScaleBlock;
    blocks.scales = &scale;
    std::vector<uint8_t> got(values.size());
    // A matrix of one block in a row; its row 0 again and again.
    for (size_t at = 0; at < values.size(); at += kScaleBlock) {
      CastRun(CopyCast::kBF16ToF8E4M3, blocks, &got[at], &values[at],
              kScaleBlock, 0);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(got[i], BF16ToE4M3(values[i], scale))
          << std::hex << i << " by " << scale;
    }
  }
}

// ---- On the way of a copy ----

// A matrix of bf16, as it lies in memory, and what it becomes.
struct Matrix {
  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns) {
    std::mt19937 random(static_cast<uint32_t>(rows * 1000 + columns));
    values.resize(static_cast<size_t>(rows * columns));
    for (uint16_t& value : values) {
      value = FloatToBF16(
          FloatBits(std::ldexp(static_cast<float>(random()) / 2e9f - 1.0f,
                               static_cast<int>(random() % 12) - 6)));
    }
  }
  // The definition, one block at a time.
  void Quantise(std::vector<uint8_t>* bytes, std::vector<float>* scales) const {
    const int64_t across = (columns + 127) / 128;
    bytes->resize(values.size());
    scales->assign(static_cast<size_t>((rows + 127) / 128 * across), 0);
    for (int64_t block = 0; block < static_cast<int64_t>(scales->size());
         ++block) {
      const int64_t row0 = block / across * 128, column0 = block % across * 128;
      const auto each = [&](auto fn) {
        for (int64_t r = row0; r < std::min(rows, row0 + 128); ++r)
          for (int64_t c = column0; c < std::min(columns, column0 + 128); ++c)
            fn(static_cast<size_t>(r * columns + c));
      };
      uint32_t largest = 0;
      each([&](size_t i) {
        largest = std::max(largest, (values[i] & 0x7fffu) << 16);
      });
      (*scales)[block] = BlockScale(largest);
      each([&](size_t i) {
        (*bytes)[i] = BF16ToE4M3(values[i], (*scales)[block]);
      });
    }
  }
  const int64_t rows, columns;
  std::vector<uint16_t> values;
};

// Rows [row, row + rows) x columns [column, ...) of `matrix`, whose memory has
// the given strides.
CopyTask Part(const Matrix& matrix, const uint16_t* memory,
              std::vector<int64_t> strides, std::vector<int64_t> offset,
              std::vector<int64_t> extent, char* dst) {
  const std::vector<int64_t> shape = {matrix.rows, matrix.columns};
  const std::vector<int64_t> dense = {extent[1], 1};
  CopyTask task = MakeBoxCopy(
      extent, 1, dst, dense,
      reinterpret_cast<const char*>(memory + offset[0] * strides[0] +
                                    offset[1] * strides[1]),
      strides, GlobalBox{5, shape, offset}, CopyCast::kBF16ToF8E4M3);
  CopyBlocks& blocks = task.blocks;
  blocks.first_row = offset[0] / 128 * 128;
  blocks.first_column = offset[1] / 128 * 128;
  blocks.rows =
      std::min(matrix.rows, (offset[0] + extent[0] + 127) / 128 * 128) -
      blocks.first_row;
  blocks.columns =
      std::min(matrix.columns, (offset[1] + extent[1] + 127) / 128 * 128) -
      blocks.first_column;
  blocks.matrix_columns = matrix.columns;
  blocks.src =
      reinterpret_cast<const char*>(memory + blocks.first_row * strides[0] +
                                    blocks.first_column * strides[1]);
  blocks.row_stride = strides[0] * 2;
  blocks.column_stride = strides[1] * 2;
  return task;
}

class BlockCast : public ::testing::Test {
 protected:
  // All of the matrix and its scales, whole and in parts that cut blocks.
  void Check(const Matrix& matrix) {
    std::vector<uint8_t> want;
    std::vector<float> scales;
    matrix.Quantise(&want, &scales);
    std::vector<uint16_t> transposed(matrix.values.size());
    for (int64_t r = 0; r < matrix.rows; ++r)
      for (int64_t c = 0; c < matrix.columns; ++c)
        transposed[c * matrix.rows + r] = matrix.values[r * matrix.columns + c];
    const std::vector<std::vector<int64_t>> offsets = {
        {0, 0}, {130, 7}, {1, 0}};
    for (const auto& offset : offsets) {
      if (offset[0] >= matrix.rows || offset[1] >= matrix.columns) continue;
      const std::vector<int64_t> extent = {matrix.rows - offset[0],
                                           matrix.columns - offset[1]};
      for (const bool turned : {false, true}) {
        std::vector<uint8_t> got(static_cast<size_t>(extent[0] * extent[1]),
                                 0xee);
        const CopyTask task =
            Part(matrix, turned ? transposed.data() : matrix.values.data(),
                 turned ? std::vector<int64_t>{1, matrix.rows}
                        : std::vector<int64_t>{matrix.columns, 1},
                 offset, extent, reinterpret_cast<char*>(got.data()));
        ASSERT_TRUE(task.Validate().ok()) << task.Validate();
        Digest digest, expected;
        ASSERT_TRUE(
            pool_.Copy({task}, {/*guard_source=*/turned}, &digest).ok());
        for (int64_t r = 0; r < extent[0]; ++r) {
          const int64_t element = (offset[0] + r) * matrix.columns + offset[1];
          ASSERT_EQ(std::memcmp(&got[r * extent[1]], &want[element], extent[1]),
                    0)
              << "row " << r << " of a part at " << offset[0];
          DigestAccumulate(&want[element], {5, element, extent[1], 1},
                           &expected);
        }
        EXPECT_EQ(digest, expected);
        // In small parts, as a GPU's slots want them.
        std::fill(got.begin(), got.end(), 0xee);
        ASSERT_TRUE(pool_.Copy(SplitCopy(task, 1000), {}, nullptr).ok());
        EXPECT_EQ(
            got[got.size() / 2],
            want[(offset[0] + got.size() / 2 / extent[1]) * matrix.columns +
                 offset[1] + got.size() / 2 % extent[1]]);
      }
    }
    // Into a bucket, with the scales behind.
    std::vector<PackPiece> pieces(2);
    pieces[0].copy = Part(matrix, matrix.values.data(), {matrix.columns, 1},
                          {0, 0}, {matrix.rows, matrix.columns}, nullptr);
    pieces[1].offset = static_cast<int64_t>((want.size() + 15) / 16 * 16);
    const int64_t across = (matrix.columns + 127) / 128;
    const std::vector<int64_t> blocks = {(matrix.rows + 127) / 128, across};
    pieces[1].copy = MakeBoxCopy(
        blocks, 4, nullptr, {across, 1},
        reinterpret_cast<const char*>(matrix.values.data()), {across, 1},
        GlobalBox{6, blocks, {0, 0}}, CopyCast::kBF16BlockScale);
    pieces[1].copy.blocks = pieces[0].copy.blocks;
    PackRequest request;
    std::string bucket(pieces[1].offset + scales.size() * 4, '\xee');
    request.bucket = &bucket[0];
    request.bucket_bytes = static_cast<int64_t>(bucket.size());
    request.pieces = pieces;
    request.frame_bytes = 4096;
    PackResult result;
    ASSERT_TRUE(pool_.Pack(request, &result).ok());
    EXPECT_EQ(std::memcmp(bucket.data(), want.data(), want.size()), 0);
    EXPECT_EQ(std::memcmp(&bucket[pieces[1].offset], scales.data(),
                          scales.size() * 4),
              0);
    Digest expected;
    DigestAccumulate(want.data(), {5, 0, static_cast<int64_t>(want.size()), 1},
                     &expected);
    DigestAccumulate(scales.data(),
                     {6, 0, static_cast<int64_t>(scales.size()), 4}, &expected);
    EXPECT_EQ(result.bucket, expected);
  }

  CopyPool pool_{3};
};

TEST_F(BlockCast, MatricesOfAllShapes) {
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{128, 128},
                                                {256, 384},
                                                {300, 200},
                                                {1, 1},
                                                {129, 1},
                                                {1, 129},
                                                {131, 1000}}) {
    Check(Matrix(rows, columns));
  }
}

TEST_F(BlockCast, BlocksOfZerosOfHugeValuesAndWithNaN) {
  Matrix matrix(400, 300);
  const auto fill = [&](int64_t row0, int64_t column0, uint16_t value) {
    for (int64_t r = row0; r < std::min<int64_t>(400, row0 + 128); ++r)
      for (int64_t c = column0; c < std::min<int64_t>(300, column0 + 128); ++c)
        matrix.values[r * 300 + c] = value;
  };
  fill(0, 0, 0);                            // zeros: the scale is 0
  fill(0, 128, 0x8000);                     // and their signs stay
  fill(128, 0, 0x7f7f);                     // the largest bf16
  fill(128, 128, 0x0001);                   // the smallest one
  matrix.values[260 * 300 + 3] = 0xffc1;    // a NaN
  matrix.values[260 * 300 + 260] = 0x7f80;  // infinity
  Check(matrix);
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  matrix.Quantise(&bytes, &scales);
  EXPECT_EQ(scales[0], 0.0f);
  EXPECT_EQ(bytes[0], 0x00);
  EXPECT_EQ(bytes[128], 0x80);
  EXPECT_EQ(bytes[128 * 300], 0x7e);
  EXPECT_EQ(FloatBits(scales[6]), 0x7fc00000u);
  EXPECT_EQ(bytes[260 * 300 + 3], 0xff);
  EXPECT_TRUE(std::isinf(scales[8]));
}

TEST_F(BlockCast, BlocksThatDoNotHaveTheElementsAreRefused) {
  const Matrix matrix(300, 200);
  std::vector<char> got(300 * 200);
  const CopyTask good = Part(matrix, matrix.values.data(), {200, 1}, {128, 0},
                             {100, 200}, got.data());
  ASSERT_TRUE(good.Validate().ok());
  const auto refused = [&](auto change) {
    CopyTask task = good;
    change(&task);
    EXPECT_EQ(task.Validate().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_FALSE(pool_.Copy({task}, {}, nullptr).ok());
  };
  refused([](CopyTask* task) { task->blocks.rows = 99; });
  refused([](CopyTask* task) { task->blocks.columns = 199; });
  refused([](CopyTask* task) { task->blocks.columns = 201; });
  refused([](CopyTask* task) { task->blocks.first_row = 256; });
  refused([](CopyTask* task) { task->blocks.first_row = 100; });
  refused([](CopyTask* task) { task->blocks.src = nullptr; });
  refused([](CopyTask* task) { task->blocks.row_stride = -2; });
  refused([](CopyTask* task) { task->element_bytes = 2; });
  refused([](CopyTask* task) { task->cast = CopyCast::kF32ToBF16; });
  refused([](CopyTask* task) {
    task->cast = CopyCast::kBF16BlockScale;
    task->element_bytes = 4;
  });
}

TEST(CastCopy, RowsOfAllLengths) {
  CopyPool pool(2);
  std::mt19937 random(3);
  for (const int64_t columns : {1, 3, 40, 129, 300, 5000}) {
    for (const CopyCast cast : {CopyCast::kF32ToBF16, CopyCast::kF32ToF16}) {
      const int64_t rows = 60000 / columns;
      std::vector<uint32_t> source(static_cast<size_t>(rows * (columns + 3)));
      for (uint32_t& value : source) {
        value = FloatBits(static_cast<float>(random()) / 1e9f - 2.0f);
      }
      std::vector<uint16_t> got(static_cast<size_t>(rows * columns));
      const std::vector<int64_t> extent = {rows, columns};
      const std::vector<int64_t> shape = {rows, columns + 1};
      const CopyTask task = MakeBoxCopy(
          extent, 2, reinterpret_cast<char*>(got.data()), {columns, 1},
          reinterpret_cast<const char*>(source.data()), {columns + 3, 1},
          GlobalBox{1, shape, {0, 1}}, cast);
      for (const bool whole : {true, false}) {
        std::fill(got.begin(), got.end(), 0xabcd);
        Digest digest, want;
        ASSERT_TRUE(pool.Copy(whole ? std::vector<CopyTask>{task}
                                    : SplitCopy(task, 700),
                              {}, &digest)
                        .ok());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) {
            const uint32_t bits = source[r * (columns + 3) + c];
            ASSERT_EQ(got[r * columns + c], cast == CopyCast::kF32ToBF16
                                                ? FloatToBF16(bits)
                                                : FloatToF16(bits));
          }
          DigestAccumulate(&got[r * columns],
                           {1, r * (columns + 1) + 1, columns, 2}, &want);
        }
        EXPECT_EQ(digest, want);
      }
    }
  }
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
