#include "daemon/node/direct_plan.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/node/convert.h"
#include "daemon/node/layouts.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/host/copy_pool.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::MakeParameter;
using testing::ModelBuilder;

// A rank that holds `count` parameters of bf16, each whole, in as many arenas
// as is said, one behind the other; and a worker of its node that wants them.
class DirectPlanTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRoom = 64;  // bytes of a parameter, and some

  void Make(int count, int arenas) {
    ModelBuilder builder;
    for (int i = 0; i < count; ++i) {
      builder.Parameter(MakeParameter(absl::StrCat("layers.", i, ".weight"),
                                      v1::DTYPE_BF16, {4, 1 + i % 5}));
    }
    auto segment = host_.Allocate(4096, transport::AllocateOptions());
    ASSERT_TRUE(segment.ok()) << segment.status();
    segment_ = *std::move(segment);
    define_ = builder.FsdpRanks("a", 1).Worker("a").Build();
    auto layout = ComputeNodeLayout(define_, "a");
    ASSERT_TRUE(layout.ok()) << layout.status();
    layout_ = std::make_unique<NodeLayout>(*std::move(layout));
    const int each = (count + arenas - 1) / arenas;
    for (int i = 0; i < count; ++i) {
      if (i % each == 0) {
        memory_.push_back(
            std::make_unique<char[]>(static_cast<size_t>(each) * kRoom));
        SourceRegion region;
        region.data = memory_.back().get();
        region.size_bytes = each * kRoom;
        // Workers can open it: that is all that is asked.
        region.arena = segment_;
        region.arena_id = absl::StrCat("arena-", source_.regions.size());
        source_.regions.push_back(std::move(region));
      }
      const schedule::Param& param =
          layout_->catalog.param(static_cast<uint32_t>(i));
      SourceShard shard;
      shard.ordinal = static_cast<uint32_t>(i);
      shard.box = schedule::WholeBox(param.shape);
      shard.dtype = param.dtype;
      shard.strides = schedule::DenseStrides(param.shape, 1);
      shard.data = source_.regions.back().data + i % each * kRoom;
      char* const bytes = const_cast<char*>(shard.data);
      for (int64_t b = 0; b < param.Bytes(); ++b) {
        bytes[b] = static_cast<char>(31 * i + 7 * b);
      }
      source_.shards.push_back(std::move(shard));
    }
    tensors_ = testing::WantedBy(define_, 0);
    ordinals_ = OrdinalsOf(*layout_, tensors_);
  }

  // Carries out what every bucket's plan says; whether it is all of it.
  void ExpectCopies(const DirectPlanner& planner) {
    std::vector<std::string> live;
    for (const v1::WantedTensor& tensor : tensors_) {
      int64_t bytes = 2;
      for (int64_t extent : tensor.shape()) bytes *= extent;
      live.emplace_back(static_cast<size_t>(bytes), '\0');
    }
    std::map<std::string, const SourceRegion*> regions;
    for (const SourceRegion& region : source_.regions) {
      regions[region.arena_id] = &region;
    }
    for (int32_t bucket = 0; bucket < layout_->bucket_count(); ++bucket) {
      const auto copies = planner.Copies(bucket);
      ASSERT_TRUE(copies.has_value()) << bucket;
      for (const v1::DirectCopies& from : *copies) {
        EXPECT_EQ(from.bucket(), bucket);
        const auto found = regions.find(from.memory().arena().arena_id());
        ASSERT_NE(found, regions.end());
        const SourceRegion* const region = found->second;
        EXPECT_EQ(from.size_bytes(), region->size_bytes);
        for (const v1::TensorCopy& copy : from.copies()) {
          ASSERT_EQ(copy.extents_size(), 0);
          memcpy(&live[static_cast<size_t>(copy.tensor())]
                      [static_cast<size_t>(copy.tensor_offset_bytes())],
                 region->data + copy.bucket_offset_bytes(),
                 static_cast<size_t>(copy.run_bytes()));
        }
      }
    }
    for (size_t i = 0; i < live.size(); ++i) {
      const SourceShard& shard =
          source_.shards[static_cast<size_t>(ordinals_[i])];
      ASSERT_EQ(memcmp(live[i].data(), shard.data, live[i].size()), 0) << i;
    }
  }

  transport::CopyPool pool_{1};
  transport::HostMemory host_{&pool_, nullptr,
                              transport::HostMemory::Options()};
  std::shared_ptr<const transport::Segment> segment_;
  std::vector<std::unique_ptr<char[]>> memory_;
  v1::DefineLayout define_;
  std::unique_ptr<NodeLayout> layout_;
  InPlaceSource source_;
  WantedTensors tensors_;
  std::vector<int32_t> ordinals_;
};

TEST_F(DirectPlanTest, EveryElementComesFromItsArena) {
  ASSERT_NO_FATAL_FAILURE(Make(23, 4));
  const DirectPlanner planner(*layout_, source_, tensors_, ordinals_);
  ExpectCopies(planner);
  EXPECT_FALSE(planner.ReadsDevice(*planner.Copies(0)));
}

// In proportion: by pairs of a tensor and a shard, or of a copy and a region,
// this would be billions of steps.
TEST_F(DirectPlanTest, AModelOfManyTensorsInManyAllocations) {
  ASSERT_NO_FATAL_FAILURE(Make(60000, 2000));
  ExpectCopies(DirectPlanner(*layout_, source_, tensors_, ordinals_));
}

TEST_F(DirectPlanTest, WhatTheWorkerDoesNotReachIsNotPlanned) {
  ASSERT_NO_FATAL_FAILURE(Make(9, 3));
  source_.regions[1].device_uuid = "gpu-1";
  const DirectPlanner planner(*layout_, source_, tensors_, ordinals_);
  EXPECT_FALSE(planner.Copies(0).has_value());
  const DirectPlanner reaches(*layout_, source_, tensors_, ordinals_,
                              {"gpu-0", "gpu-1"});
  ExpectCopies(reaches);
  EXPECT_TRUE(reaches.ReadsDevice(*reaches.Copies(0)));
}

TEST_F(DirectPlanTest, MemoryThatNobodyElseCanOpenIsNotPlanned) {
  ASSERT_NO_FATAL_FAILURE(Make(9, 3));
  source_.regions[2].arena = nullptr;
  EXPECT_FALSE(DirectPlanner(*layout_, source_, tensors_, ordinals_)
                   .Copies(0)
                   .has_value());
}

TEST_F(DirectPlanTest, WhatIsCastOrNotOneStretchIsNotPlanned) {
  ASSERT_NO_FATAL_FAILURE(Make(9, 1));
  source_.shards[3].cast = schedule::Cast::kF32ToBF16;
  EXPECT_FALSE(DirectPlanner(*layout_, source_, tensors_, ordinals_)
                   .Copies(0)
                   .has_value());
  source_.shards[3].cast = schedule::Cast::kNone;
  v1::WantedTensor* tensor = tensors_.Mutable(4);
  tensor->add_strides(100);
  tensor->add_strides(1);
  EXPECT_FALSE(DirectPlanner(*layout_, source_, tensors_, ordinals_)
                   .Copies(0)
                   .has_value());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
