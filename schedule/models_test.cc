#include "schedule/models.h"

#include "gtest/gtest.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

// Counts of the published checkpoints.
TEST(ModelsTest, CountsAreThoseOfThePublishedModels) {
  const struct {
    const char* name;
    uint32_t tensors;
    int64_t parameters;
  } kExpected[] = {
      {"qwen2.5-0.5b", 290, 494032768},
      {"llama-3.1-8b", 291, 8030261248},
      {"llama-3.1-70b", 723, 70553706496},
      {"qwen3-30b-a3b", 18867, 30532122624},
      {"deepseek-v3", 45395, 671026419200},
  };
  EXPECT_EQ(ModelNames().size(), 5u);
  for (const auto& expected : kExpected) {
    absl::StatusOr<Catalog> catalog = ModelCatalog(expected.name);
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    EXPECT_EQ(catalog->size(), expected.tensors) << expected.name;
    EXPECT_EQ(catalog->total_elements(), expected.parameters) << expected.name;
  }
}

TEST(ModelsTest, NamesAndShapesAreThoseOfTheCheckpoints) {
  auto catalog = ModelCatalog("deepseek-v3");
  ASSERT_TRUE(catalog.ok());
  auto shape = [&](const char* name) {
    auto ordinal = catalog->Find(name);
    return ordinal.has_value() ? catalog->param(*ordinal).shape : Dims{};
  };
  EXPECT_EQ(shape("model.layers.60.self_attn.q_b_proj.weight"),
            (Dims{24576, 1536}));
  EXPECT_EQ(shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
            (Dims{576, 7168}));
  EXPECT_EQ(shape("model.layers.3.self_attn.kv_b_proj.weight"),
            (Dims{32768, 512}));
  EXPECT_EQ(shape("model.layers.3.mlp.experts.255.down_proj.weight"),
            (Dims{7168, 2048}));
  EXPECT_EQ(shape("model.layers.2.mlp.gate_proj.weight"), (Dims{18432, 7168}));
  auto bias = catalog->Find("model.layers.3.mlp.gate.e_score_correction_bias");
  ASSERT_TRUE(bias.has_value());
  EXPECT_EQ(catalog->param(*bias).dtype, DType::kF32);
  EXPECT_FALSE(
      ModelCatalog("qwen2.5-0.5b")->Find("lm_head.weight").has_value());
}

TEST(ModelsTest, AnUnknownModelIsNamedBesideTheKnown) {
  const absl::Status status = ModelCatalog("gpt-2").status();
  EXPECT_EQ(ReasonOf(status), "UNKNOWN_MODEL");
  EXPECT_NE(status.message().find("llama-3.1-8b"), absl::string_view::npos);
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
