#include "schedule/parallel.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using testing::MakeBox;
using testing::MakeParam;
using testing::On;

std::pair<int64_t, int64_t> Pair(Range range) {
  return {range.begin, range.end};
}

TEST(ChunkTest, FsdpChunksAreThoseOfTorch) {
  // torch.chunk(10, 4): 3, 3, 3, 1; torch.chunk(5, 4): 2, 2, 1 and none.
  EXPECT_EQ(Pair(CeilChunk(10, 4, 3)), std::make_pair(int64_t{9}, int64_t{10}));
  EXPECT_EQ(Pair(CeilChunk(5, 4, 2)), std::make_pair(int64_t{4}, int64_t{5}));
  EXPECT_TRUE(CeilChunk(5, 4, 3).empty());
}

TEST(ChunkTest, HeadsAreNeverCutAndFewOfThemAreShared) {
  // Two kv heads of 64 on eight ranks: four ranks each.
  EXPECT_EQ(Pair(UnitChunk(128, 64, 8, 3)),
            std::make_pair(int64_t{0}, int64_t{64}));
  EXPECT_EQ(Pair(UnitChunk(128, 64, 8, 4)),
            std::make_pair(int64_t{64}, int64_t{128}));
  EXPECT_EQ(Pair(UnitChunk(512, 64, 2, 1)),
            std::make_pair(int64_t{256}, int64_t{512}));
}

TEST(ChunkTest, APaddedVocabularyIsCutEvenlyAndClipped) {
  // 100 rows padded to 128 over 4 ranks of 32.
  EXPECT_EQ(Pair(VocabChunk(100, 32, 4, 2)),
            std::make_pair(int64_t{64}, int64_t{96}));
  EXPECT_EQ(Pair(VocabChunk(100, 32, 4, 3)),
            std::make_pair(int64_t{96}, int64_t{100}));
  EXPECT_TRUE(VocabChunk(90, 32, 4, 3).empty());
}

TEST(FlatShardTest, CutsThroughTensors) {
  auto catalog = Catalog::Create({MakeParam("a", {3, 5}), MakeParam("b", {4})});
  std::vector<OrdinalBox> boxes;
  FlatShard(*catalog, {0, 1}, 2, 1, &boxes);  // elements 10 to 19 of 19
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_EQ(boxes[0].box, MakeBox({{2, 3}, {0, 5}}));
  EXPECT_EQ(boxes[1].box, MakeBox({{0, 4}}));
}

TEST(RoleTest, NamesSayHowAModelIsCut) {
  const ModelConfig config = *FindModel("deepseek-v3");
  auto role = [&](const char* name, Dims shape) {
    return RoleOf(MakeParam(name, shape), config);
  };
  EXPECT_TRUE(role("model.embed_tokens.weight", {10, 4}).vocab);
  EXPECT_TRUE(role("lm_head.weight", {10, 4}).head);
  EXPECT_TRUE(role("model.norm.weight", {4}).head);
  const ParamRole expert =
      role("model.layers.12.mlp.experts.7.down_proj.weight", {4, 8});
  EXPECT_EQ(expert.layer, 12);
  EXPECT_EQ(expert.expert, 7);
  EXPECT_EQ(expert.tp_dim, 1);
  EXPECT_EQ(
      role("model.layers.3.mlp.shared_experts.up_proj.weight", {8, 4}).expert,
      -1);
  EXPECT_EQ(role("model.layers.3.self_attn.q_b_proj.weight", {384, 4}).tp_unit,
            192);
  EXPECT_EQ(role("model.layers.3.mlp.gate.weight", {8, 4}).tp_dim, -1);
  EXPECT_EQ(role("model.layers.3.self_attn.q_proj.bias", {8}).tp_dim, 0);
  EXPECT_EQ(role("model.layers.3.self_attn.o_proj.bias", {8}).tp_dim, -1);
}

// Whatever the mix, the ranks together hold the model, without odd overlaps.
TEST(TrainerTest, EveryMixHoldsTheModelWhole) {
  ModelConfig config = *FindModel("deepseek-v3");
  config.layers = 4;
  config.dense_layers = 1;
  config.experts = 8;
  auto catalog = ModelCatalog(config);
  ASSERT_TRUE(catalog.ok());
  int made = 0;
  for (DataSharding sharding :
       {DataSharding::kReplicated, DataSharding::kDim0,
        DataSharding::kFlatTensor, DataSharding::kFlatLayer}) {
    for (int pp : {1, 2}) {
      for (int tp : {1, 2, 4}) {
        for (int ep : {1, 4}) {
          for (int replicas : {1, 2}) {
            TrainerSpec spec;
            spec.sharding = sharding;
            spec.ranks = 32;
            spec.pp = pp;
            spec.tp = tp;
            spec.ep = ep;
            spec.replicas = replicas;
            auto lists = TrainerLists(*catalog, config, spec);
            ASSERT_TRUE(lists.ok()) << lists.status();
            std::vector<SourceRank> sources;
            for (int r = 0; r < spec.ranks; ++r) {
              sources.push_back(SourceRank{r, r / 8, (*lists)[r]});
            }
            auto partition = SourcePartition::Create(*catalog, sources);
            EXPECT_TRUE(partition.ok()) << partition.status();
            ++made;
          }
        }
      }
    }
  }
  EXPECT_EQ(made, 96);
}

TEST(TrainerTest, CountsThatDoNotDivideAreRefused) {
  auto catalog = ModelCatalog("qwen2.5-0.5b");
  TrainerSpec spec;
  spec.ranks = 6;
  spec.tp = 4;
  EXPECT_EQ(ReasonOf(TrainerLists(*catalog, {}, spec).status()),
            "INVALID_COUNT");
  spec.tp = 0;
  EXPECT_EQ(ReasonOf(TrainerLists(*catalog, {}, spec).status()),
            "INVALID_COUNT");
}

TEST(WorkerTest, ExpertsAreDealtOverAllWorkers) {
  ModelConfig config = *FindModel("qwen3-30b-a3b");
  config.layers = 1;
  config.experts = 8;
  auto catalog = ModelCatalog(config);
  WorkerSpec spec;
  spec.tp = 2;
  spec.ep = 4;
  auto lists = WorkerLists(*catalog, config, spec);
  ASSERT_TRUE(lists.ok());
  ASSERT_EQ(lists->size(), 4u);
  for (const BoxListRef& list : *lists) {
    int experts = 0;
    for (const OrdinalBox& box : list->boxes()) {
      experts += RoleOf(catalog->param(box.ordinal), config).expert >= 0;
    }
    EXPECT_EQ(experts, 2 * 3);
  }
}

// ---- fused tensors, as bytes ----

void RunCopy(const StridedCopy& copy, const std::vector<uint16_t>& src,
             std::vector<uint16_t>* dst) {
  std::vector<int64_t> index(copy.extents.size(), 0);
  for (int64_t run = 0; run < copy.Runs(); ++run) {
    int64_t from = copy.src_offset;
    int64_t to = copy.dst_offset;
    int64_t rest = run;
    for (int d = static_cast<int>(copy.extents.size()) - 1; d >= 0; --d) {
      from += rest % copy.extents[d] * copy.src_strides[d];
      to += rest % copy.extents[d] * copy.dst_strides[d];
      rest /= copy.extents[d];
    }
    std::memcpy(reinterpret_cast<char*>(dst->data()) + to,
                reinterpret_cast<const char*>(src.data()) + from,
                copy.run_bytes);
  }
}

// Megatron's grouped qkv of one trainer rank becomes vLLM's on tp 2.
TEST(FusedTest, GroupedQkvBecomesConcatenatedPerRank) {
  constexpr int kHead = 2;  // rows of a head
  constexpr int kHidden = 3;
  auto catalog = Catalog::Create({MakeParam("q", {4 * kHead, kHidden}),
                                  MakeParam("k", {2 * kHead, kHidden}),
                                  MakeParam("v", {2 * kHead, kHidden})});
  std::vector<MemoryBox> grouped;
  ASSERT_TRUE(
      FusedQkv(*catalog, 0, 1, 2, kHead, 1, 0, QkvOrder::kGrouped, 0, &grouped)
          .ok());
  ASSERT_EQ(grouped.size(), 6u);
  // Each row is named 100 * parameter + row.
  std::vector<uint16_t> source(8 * kHead * kHidden);
  int at = 0;
  for (int group = 0; group < 2; ++group) {
    for (int row : {0, 1, 2, 3}) {
      for (int c = 0; c < kHidden; ++c) source[at++] = 0 + 4 * group + row;
    }
    for (int row : {0, 1}) {
      for (int c = 0; c < kHidden; ++c) source[at++] = 100 + 2 * group + row;
    }
    for (int row : {0, 1}) {
      for (int c = 0; c < kHidden; ++c) source[at++] = 200 + 2 * group + row;
    }
  }
  std::vector<MemoryBox> wanted;
  ASSERT_TRUE(FusedQkv(*catalog, 0, 1, 2, kHead, 2, 1, QkvOrder::kConcatenated,
                       0, &wanted)
                  .ok());
  auto copies = DirectCopies(*catalog, grouped, wanted);
  ASSERT_TRUE(copies.ok()) << copies.status();
  std::vector<uint16_t> out(4 * kHead * kHidden, 9999);
  for (const DirectCopy& copy : *copies) RunCopy(copy.copy, source, &out);
  std::vector<uint16_t> expected;
  for (int row : {4, 5, 6, 7, 102, 103, 202, 203}) {
    for (int c = 0; c < kHidden; ++c) expected.push_back(row);
  }
  EXPECT_EQ(out, expected);
}

TEST(FusedTest, GateAndUpAreHalves) {
  auto catalog =
      Catalog::Create({MakeParam("gate", {8, 3}), MakeParam("up", {8, 3})});
  std::vector<MemoryBox> boxes;
  ASSERT_TRUE(FusedGateUp(*catalog, 0, 1, 2, 1, 4, &boxes).ok());
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_EQ(boxes[0].box, MakeBox({{4, 8}, {0, 3}}));
  EXPECT_EQ(boxes[0].offset, 0);
  EXPECT_EQ(boxes[1].box, MakeBox({{4, 8}, {0, 3}}));
  EXPECT_EQ(boxes[1].offset, 4 * 3 * 2);
}

TEST(FusedTest, WhatDoesNotFitIsRefused) {
  auto catalog =
      Catalog::Create({MakeParam("q", {8, 3}), MakeParam("k", {4, 3}),
                       MakeParam("v", {4, 4}), MakeParam("v2", {4, 3})});
  std::vector<MemoryBox> boxes;
  auto reason = [&](uint32_t v, int64_t head, int tp, QkvOrder order) {
    return ReasonOf(FusedQkv(*catalog, 0, 1, v, head, tp, 0, order, 0, &boxes));
  };
  EXPECT_EQ(reason(2, 2, 1, QkvOrder::kConcatenated), "INVALID_LAYOUT");
  EXPECT_EQ(reason(3, 3, 1, QkvOrder::kConcatenated), "INVALID_LAYOUT");
  EXPECT_EQ(reason(3, 2, 4, QkvOrder::kGrouped), "INVALID_LAYOUT");
  EXPECT_EQ(reason(3, 2, 4, QkvOrder::kConcatenated), "");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
