#include "schedule/safetensors_catalog.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::StatusOr<Catalog> Of(const std::vector<std::string>& headers) {
  std::vector<SafetensorsFile> files;
  for (const std::string& header : headers) {
    files.push_back({absl::StrCat("f", files.size() + 1), header, -1});
  }
  return CatalogFromSafetensors(files);
}

TEST(SafetensorsTest, TensorsComeInOrderOfTheirData) {
  auto catalog = Of({R"({
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
      // All tensors together, each of which could be counted.
      {"BYTES_OVERFLOW",
       R"({"v": {"dtype": "U8", "shape": [2147483648, 2147483648],
                 "data_offsets": [0, 4611686018427387904]},
           "w": {"dtype": "U8", "shape": [2147483648, 2147483648],
                 "data_offsets": [4611686018427387904, 9223372036854775808]}})"},
      {"BYTES_OVERFLOW",
       R"({"w": {"dtype": "U8", "shape": [1],
                 "data_offsets": [100000000000000000000, 100000000000000000001]}})"},
      {"DIMENSION_TOO_LARGE",
       R"({"w": {"dtype": "U8", "shape": [0, 18446744073709551615],
                 "data_offsets": [0, 0]}})"},
      {"DIMENSION_TOO_LARGE",
       R"({"w": {"dtype": "U8", "shape": [2147483649],
                 "data_offsets": [0, 2147483649]}})"},
      {"INVALID_SAFETENSORS", "{}"},
      {"INVALID_SAFETENSORS",
       R"({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})"},
  };
  for (const auto& bad : kCases) {
    const absl::Status status = Of({bad.header}).status();
    EXPECT_EQ(ReasonOf(status), bad.reason) << bad.header;
    EXPECT_THAT(std::string(status.message()), StartsWith("f1: "));
  }
}

constexpr char kW[] =
    R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";

TEST(SafetensorsTest, ATensorInTwoFilesIsADuplicate) {
  const absl::Status status = Of({kW, kW}).status();
  EXPECT_EQ(ReasonOf(status), "DUPLICATE_PARAMETER");
  EXPECT_EQ(status.message(), "f2: parameter 'w' is in f1, too");
}

TEST(SafetensorsTest, FilesThatTogetherHaveTooManyBytes) {
  const auto huge = [](const char* name) {
    return absl::StrCat(R"({")", name,
                        R"(": {"dtype": "U8", "shape": [2147483648, 2147483648],
            "data_offsets": [0, 4611686018427387904]}})");
  };
  const absl::Status status = Of({huge("v"), huge("w")}).status();
  EXPECT_EQ(ReasonOf(status), "BYTES_OVERFLOW");
  EXPECT_THAT(std::string(status.message()), HasSubstr("'w'"));
}

TEST(SafetensorsTest, AFileOfAnotherLengthThanItsHeaderSays) {
  for (int64_t bytes : {0, 7, 9}) {
    const absl::Status status =
        CatalogFromSafetensors({SafetensorsFile{"a", kW, bytes}}).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_SAFETENSORS") << bytes;
    EXPECT_THAT(
        std::string(status.message()),
        StartsWith(bytes < 8 ? "a: it is cut short" : "a: it is too long"));
  }
  EXPECT_TRUE(CatalogFromSafetensors({SafetensorsFile{"a", kW, 8}}).ok());
}

TEST(SafetensorsTest, AnIndexNamesItsFiles) {
  auto index = ParseSafetensorsIndex(
      R"({"metadata": {"total_size": 3},
          "weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors",
                         "c": "model-2.safetensors"}})");
  ASSERT_TRUE(index.ok());
  EXPECT_THAT(index->Files(),
              ElementsAre("model-1.safetensors", "model-2.safetensors"));
  for (const char* bad :
       {"{}", "", "not json", "[]", R"({"weight_map": {}})",
        R"({"weight_map": {"w": 3}})", R"({"weight_map": {"w": ""}})",
        R"({"weight_map": {"w": "../w.safetensors"}})",
        R"({"weight_map": {"w": "/etc/passwd"}})"}) {
    EXPECT_EQ(ReasonOf(ParseSafetensorsIndex(bad).status()),
              "INVALID_SAFETENSORS")
        << bad;
  }
}

TEST(SafetensorsTest, AnIndexAndItsFilesMustAgree) {
  const std::string v =
      R"({"v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
  const std::vector<SafetensorsFile> files = {{"one", v, 8}, {"two", kW, 8}};
  const auto refused = [&](std::map<std::string, std::string> file_of) {
    const SafetensorsIndex index{std::move(file_of)};
    const absl::Status status = CatalogFromSafetensors(files, &index).status();
    EXPECT_EQ(ReasonOf(status), "INVALID_SAFETENSORS");
    return std::string(status.message());
  };
  const SafetensorsIndex good{{{"v", "one"}, {"w", "two"}}};
  EXPECT_TRUE(CatalogFromSafetensors(files, &good).ok());
  EXPECT_EQ(refused({{"v", "two"}, {"w", "one"}}),
            "one: parameter 'v' is in two by the index");
  EXPECT_EQ(refused({{"w", "two"}}), "one: parameter 'v' is not in the index");
  EXPECT_EQ(refused({{"v", "one"}, {"w", "two"}, {"x", "two"}}),
            "two: parameter 'x' is not in it, where the index says that it is");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
