#include "schedule/catalog.h"

#include <limits>
#include <utility>

#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using testing::MakeParam;

TEST(DTypeTest, NamesAndSizesAreThoseOfSafetensors) {
  const struct {
    const char* name;
    int64_t size;
  } kExpected[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1},
                   {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
                   {"BF16", 2},    {"I32", 4}, {"U32", 4}, {"F32", 4},
                   {"I64", 8},     {"U64", 8}, {"F64", 8}};
  for (const auto& expected : kExpected) {
    absl::StatusOr<DType> dtype = ParseDType(expected.name);
    ASSERT_TRUE(dtype.ok()) << expected.name;
    EXPECT_EQ(DTypeName(*dtype), expected.name);
    EXPECT_EQ(DTypeSize(*dtype), expected.size);
  }
  EXPECT_EQ(ReasonOf(ParseDType("bf16").status()), "UNKNOWN_DTYPE");
  EXPECT_EQ(ReasonOf(ParseDType("UNSPECIFIED").status()), "UNKNOWN_DTYPE");
}

TEST(DTypeTest, OnlyNarrowingFloatsIsACast) {
  EXPECT_EQ(*CastBetween(DType::kBF16, DType::kBF16), Cast::kNone);
  EXPECT_EQ(*CastBetween(DType::kF32, DType::kBF16), Cast::kF32ToBF16);
  EXPECT_EQ(*CastBetween(DType::kF32, DType::kF16), Cast::kF32ToF16);
  EXPECT_EQ(*CastBetween(DType::kBF16, DType::kF8E4M3), Cast::kBF16ToF8E4M3);
  EXPECT_EQ(ReasonOf(CastBetween(DType::kF32, DType::kF8E4M3).status()),
            "DTYPE_MISMATCH");
  EXPECT_EQ(ReasonOf(CastBetween(DType::kBF16, DType::kF8E5M2).status()),
            "DTYPE_MISMATCH");
  EXPECT_EQ(ReasonOf(CastBetween(DType::kBF16, DType::kF32).status()),
            "DTYPE_MISMATCH");
  EXPECT_EQ(ReasonOf(CastBetween(DType::kF16, DType::kBF16).status()),
            "DTYPE_MISMATCH");
}

TEST(CatalogTest, CountsAndFinds) {
  auto catalog = Catalog::Create(
      {MakeParam("embed", {100, 8}), MakeParam("scale", {}, DType::kF32)});
  ASSERT_TRUE(catalog.ok());
  EXPECT_EQ(catalog->size(), 2u);
  EXPECT_EQ(catalog->total_bytes(), 1604);
  EXPECT_EQ(catalog->total_elements(), 801);
  EXPECT_EQ(catalog->Find("scale"), absl::optional<uint32_t>(1));
  EXPECT_EQ(catalog->Find("nothing"), absl::nullopt);
}

TEST(CatalogTest, DigestSeesOrderNamesShapesAndDTypes) {
  const Param a = MakeParam("a", {4, 8});
  const Param b = MakeParam("b", {8});
  const uint64_t digest = Catalog::Create({a, b})->digest();
  EXPECT_EQ(digest, Catalog::Create({a, b})->digest());
  EXPECT_NE(digest, Catalog::Create({b, a})->digest());
  EXPECT_NE(digest, Catalog::Create({a, MakeParam("c", {8})})->digest());
  EXPECT_NE(digest, Catalog::Create({MakeParam("a", {8, 4}), b})->digest());
  EXPECT_NE(digest,
            Catalog::Create({a, MakeParam("b", {8}, DType::kF16)})->digest());
  Param draft = b;
  draft.component = "draft";
  EXPECT_NE(digest, Catalog::Create({a, draft})->digest());
  Param main = b;
  main.component = "main";
  EXPECT_EQ(digest, Catalog::Create({a, main})->digest());
}

// The digest is compared between machines and releases: it may not drift.
TEST(CatalogTest, DigestIsStable) {
  EXPECT_EQ(Catalog::Create({MakeParam("model.embed_tokens.weight", {16, 4})})
                ->digest(),
            0xFB592762D40D81B4u);
}

struct BadCase {
  const char* reason;
  Param param;
};

TEST(CatalogTest, BadParametersAreNamedWithAReason) {
  const BadCase kCases[] = {
      {"EMPTY_DIMENSION", MakeParam("bad", {4, 0})},
      {"EMPTY_DIMENSION", MakeParam("bad", {-1})},
      {"DIMENSION_TOO_LARGE", MakeParam("bad", {kMaxDimension + 1})},
      {"BYTES_OVERFLOW",
       MakeParam("bad", {kMaxDimension, kMaxDimension, kMaxDimension})},
      {"UNKNOWN_DTYPE", MakeParam("bad", {4}, DType::kUnspecified)},
      {"INVALID_PARAMETER", MakeParam("bad", {1, 1, 1, 1, 1, 1, 1, 1, 1})},
      {"DUPLICATE_PARAMETER", MakeParam("good", {4})},
  };
  for (const BadCase& bad : kCases) {
    const absl::Status status =
        Catalog::Create({MakeParam("good", {4}), bad.param}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), bad.reason);
    EXPECT_EQ(status.message().find("parameter '" + bad.param.name + "'"), 0u)
        << status;
  }
}

TEST(CatalogTest, TotalBytesPastInt64AreRefused) {
  // 2^62 bytes each: two of them are one too many.
  const Dims shape = {kMaxDimension, int64_t{1} << 30};
  const absl::Status status =
      Catalog::Create({MakeParam("half", shape), MakeParam("rest", shape)})
          .status();
  EXPECT_EQ(ReasonOf(status), "BYTES_OVERFLOW");
  EXPECT_EQ(status.message().find("parameter 'rest'"), 0u) << status;
}

TEST(CatalogTest, TheLargestDimensionIsAccepted) {
  EXPECT_TRUE(Catalog::Create({MakeParam("max", {kMaxDimension})}).ok());
}

// Short names lie inside the parameters, not beside them.
TEST(CatalogTest, FindsAfterItWasMoved) {
  Catalog made = *Catalog::Create(
      {MakeParam("w", {2}), MakeParam("a.name.that.is.not.short", {3})});
  Catalog moved = std::move(made);
  Catalog again;
  again = std::move(moved);
  EXPECT_EQ(again.Find("w"), absl::optional<uint32_t>(0));
  EXPECT_EQ(again.Find("a.name.that.is.not.short"),
            absl::optional<uint32_t>(1));
  EXPECT_EQ(again.Find("b"), absl::nullopt);
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
