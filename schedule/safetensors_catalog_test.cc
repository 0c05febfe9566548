#include "schedule/safetensors_catalog.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;

TEST(SafetensorsTest, TensorsComeInOrderOfTheirData) {
  auto catalog = CatalogFromSafetensors({R"({
    "__metadata__": {"format": "pt"},
    "a.second": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
    "b.first": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    "c.none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [16, 16]}
  })",
                                         R"({
    "d": {"dtype": "F8_E4M3", "shape": [5], "data_offsets": [0, 5]}
  })"});
  ASSERT_TRUE(catalog.ok()) << catalog.status();
  ASSERT_EQ(catalog->size(), 3u);
  EXPECT_EQ(catalog->param(0).name, "b.first");
  EXPECT_EQ(catalog->param(1).name, "a.second");
  EXPECT_EQ(catalog->param(1).shape, (Dims{2, 3}));
  EXPECT_EQ(catalog->param(2).dtype, DType::kF8E4M3);
}

TEST(SafetensorsTest, DamagedHeadersHaveAReason) {
  const struct {
    const char* reason;
    const char* header;
  } kCases[] = {
      {"INVALID_SAFETENSORS", "not json"},
      {"INVALID_SAFETENSORS", "[]"},
      {"INVALID_SAFETENSORS", R"({"w": 3})"},
      {"INVALID_SAFETENSORS", R"({"w": {"dtype": "F32", "shape": [2]}})"},
      {"UNKNOWN_DTYPE",
       R"({"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}})"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}})"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}})"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}})"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})"},
      {"INVALID_SAFETENSORS",
       R"({"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
           "w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})"},
      {"BYTES_OVERFLOW",
       R"({"w": {"dtype": "F32", "shape": [4611686018427387904, 4],
           "data_offsets": [0, 8]}})"},
  };
  for (const auto& bad : kCases) {
    EXPECT_EQ(ReasonOf(CatalogFromSafetensors({bad.header}).status()),
              bad.reason)
        << bad.header;
  }
}

TEST(SafetensorsTest, ATensorInTwoFilesIsADuplicate) {
  const char* kHeader =
      R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  EXPECT_EQ(ReasonOf(CatalogFromSafetensors({kHeader, kHeader}).status()),
            "DUPLICATE_PARAMETER");
}

TEST(SafetensorsTest, AnIndexNamesItsFiles) {
  auto files = FilesOfSafetensorsIndex(
      R"({"metadata": {"total_size": 3},
          "weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors",
                         "c": "model-2.safetensors"}})");
  ASSERT_TRUE(files.ok());
  EXPECT_THAT(*files,
              ElementsAre("model-1.safetensors", "model-2.safetensors"));
  EXPECT_EQ(ReasonOf(FilesOfSafetensorsIndex("{}").status()),
            "INVALID_SAFETENSORS");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
