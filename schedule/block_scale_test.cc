// bf16 to FP8 with block scales, as parts of the copies of a snapshot: what the
// plan says is carried out here, element by element, and compared with casting
// the whole tensor at once.

#include "schedule/block_scale.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using testing::Everything;
using ::testing::HasSubstr;
using testing::MakeBox;
using testing::MakeParam;
using testing::On;

constexpr int64_t kRows = 300;
constexpr int64_t kColumns = 260;

float FromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Nearest, ties to even; `value` within +-448.
uint8_t ToE4M3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, -6);
  // In units of the last place: normal numbers have 8 to 15 of them.
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  if (units < 8) return static_cast<uint8_t>(sign | units);
  int biased = exponent + 7;
  int mantissa = units - 8;
  if (units == 16) {
    ++biased;
    mantissa = 0;
  }
  return static_cast<uint8_t>(sign | biased << 3 | mantissa);
}

float FromE4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(mantissa, -9)
                              : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The trainer's tensor, whole; ranks hold parts of it.
class BlockScaleTest : public ::testing::Test {
 protected:
  BlockScaleTest() {
    std::mt19937 random(3);
    values_.resize(kRows * kColumns);
    for (uint16_t& value : values_) {
      // Magnitudes from 2^-15 to 2^4, either sign.
      value = static_cast<uint16_t>((random() & 0x80ff) | (112 + random() % 20)
                                                              << 7);
    }
    scales_.resize(9);
    for (int64_t block = 0; block < 9; ++block) {
      scales_[block] = Compute(block / 3, block % 3);
    }
    catalog_ = *Catalog::Create(
        {MakeParam("w", {kRows, kColumns}, DType::kF8E4M3),
         MakeParam("w_scale_inv", {3, 3}, DType::kF32), MakeParam("b", {7})});
  }

  float At(int64_t row, int64_t column) const {
    return FromBf16(values_[row * kColumns + column]);
  }
  float Scale(int64_t block_row, int64_t block_column) const {
    return scales_[block_row * 3 + block_column];
  }
  float Compute(int64_t block_row, int64_t block_column) const {
    float largest = 0;
    for (int64_t r = block_row * kScaleBlock;
         r < std::min(kRows, (block_row + 1) * kScaleBlock); ++r) {
      for (int64_t c = block_column * kScaleBlock;
           c < std::min(kColumns, (block_column + 1) * kScaleBlock); ++c) {
        largest = std::max(largest, std::fabs(At(r, c)));
      }
    }
    return largest / kLargestE4M3;
  }

  // The element of a shard's memory at some byte.
  float Read(const Box& shard, int64_t offset) const {
    const int64_t element = offset / 2;
    return At(shard.offset[0] + element / shard.extent[1],
              shard.offset[1] + element % shard.extent[1]);
  }

  Catalog catalog_;
  std::vector<uint16_t> values_;
  std::vector<float> scales_;
};

TEST_F(BlockScaleTest, SnapshotsGiveWhatCastingTheWholeTensorGives) {
  // Three ranks: rows by blocks, one of them in two columns; FP8 is never held.
  const std::vector<Box> shards = {MakeBox({{0, 128}, {0, kColumns}}),
                                   MakeBox({{128, kRows}, {0, 128}}),
                                   MakeBox({{128, kRows}, {128, kColumns}})};
  std::vector<SourceRank> sources;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<OrdinalBox> held = {On(0, shards[rank], DType::kBF16)};
    if (rank == 0) held.push_back(On(2, WholeBox({7})));
    sources.push_back({rank, 0, MakeBoxList(held)});
  }
  // Workers cut through blocks; so do small buckets.
  const std::vector<WorkerNeed> workers = {
      {0, 1,
       MakeBoxList({On(0, MakeBox({{0, 200}, {0, kColumns}})),
                    On(1, WholeBox({3, 3}))})},
      {1, 2, Everything(catalog_)}};
  for (int64_t bucket_bytes : {1000, 1 << 20}) {
    const auto layout = BuildLayout(catalog_, sources, workers, bucket_bytes);
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::vector<int> cast(kRows * kColumns, 0);
    std::vector<int> scaled(9, 0);
    for (int rank = 0; rank < 3; ++rank) {
      const Box& shard = shards[rank];
      std::vector<MemoryBox> memory(1);
      memory[0].box = shard;
      memory[0].strides = DenseStrides(shard.extent, 2);
      memory[0].dtype = DType::kBF16;
      if (rank == 0) {
        memory.emplace_back();
        memory[1].ordinal = 2;
        memory[1].box = WholeBox({7});
        memory[1].memory = 1;
        memory[1].strides = {2};
      }
      const auto copies = SnapshotCopies(catalog_, *layout, rank, memory);
      ASSERT_TRUE(copies.ok()) << copies.status();
      for (const BucketCopy& copy : *copies) {
        if (copy.copy.cast == Cast::kNone) continue;
        ASSERT_EQ(copy.memory, 0);
        const bool scale = copy.copy.cast == Cast::kBF16BlockScale;
        EXPECT_EQ(copy.ordinal, scale ? 1u : 0u);
        EXPECT_EQ(copy.copy.Bytes(), copy.part.Volume() * (scale ? 4 : 1));
        // Where the copy's first element lies, by the plan and by its box.
        const int64_t block = scale ? kScaleBlock : 1;
        const int64_t row = copy.part.offset[0] * block;
        const int64_t column = copy.part.offset[1] * block;
        EXPECT_EQ(Read(shard, copy.copy.src_offset), At(row, column));
        for (int64_t r = 0; r < copy.part.extent[0]; ++r) {
          for (int64_t c = 0; c < copy.part.extent[1]; ++c) {
            const int64_t br = (row + r * block) / kScaleBlock;
            const int64_t bc = (column + c * block) / kScaleBlock;
            // All of the block is in this rank's memory.
            EXPECT_TRUE(Contains(
                shard,
                MakeBox({{br * kScaleBlock,
                          std::min(kRows, (br + 1) * kScaleBlock)},
                         {bc * kScaleBlock,
                          std::min(kColumns, (bc + 1) * kScaleBlock)}})));
            if (scale) {
              ++scaled[br * 3 + bc];
              continue;
            }
            ++cast[(row + r) * kColumns + column + c];
            const float value = At(row + r, column + c);
            const float back =
                FromE4M3(ToE4M3(value / Scale(br, bc))) * Scale(br, bc);
            EXPECT_NEAR(back, value,
                        std::max(std::fabs(value) / 16, Scale(br, bc) / 512));
          }
        }
      }
    }
    EXPECT_EQ(std::count(cast.begin(), cast.end(), 1), kRows * kColumns);
    EXPECT_EQ(std::count(scaled.begin(), scaled.end(), 1), 9);
    // Workers take FP8 and scales as they are.
    std::vector<MemoryBox> live(2);
    live[0].box = WholeBox({kRows, kColumns});
    live[0].strides = {kColumns, 1};
    live[1].ordinal = 1;
    live[1].box = WholeBox({3, 3});
    live[1].strides = {12, 4};
    EXPECT_TRUE(ApplyCopies(catalog_, *layout, live).ok());
  }
}

TEST_F(BlockScaleTest, WhatCannotBeCastIsRefusedByName) {
  const auto refusal = [](const Catalog& catalog,
                          std::vector<OrdinalBox> boxes) {
    const absl::Status status =
        SourcePartition::Create(catalog, {SourceRank{0, 0, MakeBoxList(boxes)}})
            .status();
    EXPECT_EQ(ReasonOf(status), "DTYPE_MISMATCH");
    return std::string(status.message());
  };
  const Box whole = WholeBox({kRows, kColumns});
  EXPECT_THAT(refusal(catalog_, {On(0, MakeBox({{0, 100}, {0, kColumns}}),
                                    DType::kBF16)}),
              HasSubstr("parameter 'w' is F8_E4M3 in the catalog and BF16 on a "
                        "trainer: the shard [0:100, 0:260] cuts through"));
  EXPECT_THAT(
      refusal(catalog_, {On(0, whole, DType::kBF16), On(1, WholeBox({3, 3}))}),
      HasSubstr("'w_scale_inv' is held beside"));
  const Catalog bare =
      *Catalog::Create({MakeParam("w", {kRows, kColumns}, DType::kF8E4M3)});
  EXPECT_THAT(refusal(bare, {On(0, whole, DType::kBF16)}),
              HasSubstr("needs a parameter 'w_scale_inv' of F32 and shape "
                        "[3, 3]"));
  const Catalog vector =
      *Catalog::Create({MakeParam("w", {kRows}, DType::kF8E4M3)});
  EXPECT_THAT(refusal(vector, {On(0, WholeBox({kRows}), DType::kBF16)}),
              HasSubstr("only matrices"));
  EXPECT_THAT(refusal(catalog_, {On(0, whole, DType::kF32)}),
              HasSubstr("parameter 'w'"));
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
