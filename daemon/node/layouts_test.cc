#include "daemon/node/layouts.h"

#include <string>

#include "daemon/node/bucket_digest.h"
#include "daemon/node/convert.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::MakeBox;
using testing::MakeParameter;
using testing::ModelBuilder;
using transport::ReasonOf;

v1::DefineLayout TwoNodes() {
  return ModelBuilder()
      .SmallModel()
      .FsdpRanks("a", 3)
      .TensorParallelWorker("b", 0, 2)
      .TensorParallelWorker("b", 1, 2)
      .TensorParallelWorker("c", 0, 2)
      .Build();
}

TEST(LayoutBook, EveryNodeSeesItsOwnPart) {
  const v1::DefineLayout define = TwoNodes();
  LayoutBook a("a"), b("b"), c("c");
  ASSERT_TRUE(a.Define(define).ok());
  ASSERT_TRUE(b.Define(define).ok());
  ASSERT_TRUE(c.Define(define).ok());
  ASSERT_TRUE(a.Define(define).ok()) << "saying it twice is fine";

  auto source = *a.Find(define.layout_id());
  auto whole = *b.Find(define.layout_id());
  auto half = *c.Find(define.layout_id());
  EXPECT_TRUE(source->needed_buckets.empty());
  EXPECT_EQ(source->LocalSourceBuckets().size(),
            static_cast<size_t>(source->bucket_count()));
  EXPECT_TRUE(whole->LocalSourceBuckets().empty());
  EXPECT_EQ(whole->needed_buckets.size(),
            static_cast<size_t>(whole->bucket_count()));
  EXPECT_LT(half->LocalBytes(), whole->LocalBytes());
  size_t by_rank = 0;
  for (int rank = 0; rank < 3; ++rank) {
    by_rank += source->RankBuckets(rank).size();
  }
  EXPECT_EQ(by_rank, static_cast<size_t>(source->bucket_count()));
}

TEST(LayoutBook, ADifferentDigestIsRefused) {
  v1::DefineLayout define = TwoNodes();
  define.set_layout_id("0123456789abcdef");
  LayoutBook book("a");
  absl::Status status = book.Define(define);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "LAYOUT_MISMATCH");
  EXPECT_EQ(ReasonOf(book.Find(define.layout_id()).status()), "LAYOUT_UNKNOWN");
}

// Ids say whose layout it is: the plan alone would not differ.
TEST(LayoutBook, ModelsAndNodesHaveIdsOfTheirOwn) {
  v1::DefineLayout define = TwoNodes();
  const std::string id = define.layout_id();
  define.set_model("models/other");
  EXPECT_NE(ComputeNodeLayout(define, "a")->id, id);
  define = TwoNodes();
  define.mutable_nodes(1)->set_node("elsewhere");
  EXPECT_NE(ComputeNodeLayout(define, "a")->id, id);
}

TEST(LayoutBook, IndicesOutOfRangeAreRefused) {
  LayoutBook book("a");
  v1::DefineLayout define = TwoNodes();
  define.mutable_sources(0)->set_node(17);
  EXPECT_EQ(ReasonOf(book.Define(define)), "LAYOUT_INVALID");
  define = TwoNodes();
  define.mutable_workers(0)->mutable_boxes(0)->set_ordinal(1000);
  EXPECT_EQ(ReasonOf(book.Define(define)), "LAYOUT_INVALID");
  define = TwoNodes();
  define.mutable_sources(0)->mutable_shards(0)->mutable_box()->set_offset(0,
                                                                          -1);
  EXPECT_EQ(ReasonOf(book.Define(define)), "BOX_OUT_OF_RANGE");
}

TEST(LayoutBook, OldLayoutsGoUnlessSomebodyUsesThem) {
  LayoutBook book("a");
  std::vector<std::string> ids;
  std::shared_ptr<const NodeLayout> used;
  for (size_t i = 0; i < LayoutBook::kKeptPerModel + 2; ++i) {
    const v1::DefineLayout define =
        ModelBuilder()
            .Parameter(MakeParameter("w", v1::DTYPE_BF16,
                                     {100 + static_cast<int64_t>(i), 3}))
            .FsdpRanks("a", 1)
            .Build();
    ASSERT_TRUE(book.Define(define).ok());
    ids.push_back(define.layout_id());
    if (i == 0) used = *book.Find(ids[0]);
  }
  EXPECT_TRUE(book.Find(ids[0]).ok());
  EXPECT_FALSE(book.Find(ids[1]).ok());
  EXPECT_TRUE(book.Find(ids.back()).ok());
}

TEST(LayoutBook, OneThatIsDefinedAgainIsTheNewest) {
  LayoutBook book("a");
  std::vector<v1::DefineLayout> defines;
  for (size_t i = 0; i < LayoutBook::kKeptPerModel + 1; ++i) {
    defines.push_back(
        ModelBuilder()
            .Parameter(MakeParameter("w", v1::DTYPE_BF16,
                                     {100 + static_cast<int64_t>(i), 3}))
            .FsdpRanks("a", 1)
            .Build());
  }
  ASSERT_TRUE(book.Define(defines[0]).ok());
  std::shared_ptr<const NodeLayout> used = *book.Find(defines[0].layout_id());
  for (const v1::DefineLayout& define : defines) {
    ASSERT_TRUE(book.Define(define).ok());
  }
  // It is older than what is kept, and known for as long as an update uses it.
  ASSERT_TRUE(book.Define(defines[0]).ok());
  used = nullptr;
  EXPECT_TRUE(book.Find(defines[0].layout_id()).ok());
  EXPECT_FALSE(book.Find(defines[1].layout_id()).ok());
  EXPECT_TRUE(book.Find(defines[2].layout_id()).ok());
}

// However a bucket is cut into frames, the digests add up to what they are when
// each element is counted where it stands in its tensor.
TEST(BucketDigestMap, AddsUpOverAnySplit) {
  const v1::DefineLayout define = TwoNodes();
  auto layout =
      std::make_shared<const NodeLayout>(*ComputeNodeLayout(define, "a"));
  for (int32_t b = 0; b < layout->bucket_count(); ++b) {
    std::string bytes(static_cast<size_t>(layout->bucket_bytes(b)), '\0');
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<char>(i * 2654435761u >> 24);
    }
    transport::Digest expected;
    for (const schedule::Piece& piece : layout->plan.pieces(b)) {
      const schedule::Param& param = layout->catalog.param(piece.ordinal);
      int64_t offset = piece.offset;
      schedule::ForEachRun(
          piece.box, param.shape, [&](int64_t first, int64_t count) {
            // Element by element.
            for (int64_t i = 0; i < count; ++i) {
              transport::DigestRun run;
              run.ordinal = piece.ordinal;
              run.first_element = first + i;
              run.element_count = 1;
              run.element_bytes =
                  static_cast<int32_t>(schedule::DTypeSize(param.dtype));
              transport::DigestAccumulate(bytes.data() + offset, run,
                                          &expected);
              offset += run.element_bytes;
            }
          });
    }
    const BucketDigestMap map(layout, b);
    for (size_t step : {size_t{16}, size_t{48}, size_t{4096}, size_t{65536}}) {
      transport::Digest sum;
      for (size_t at = 0; at < bytes.size(); at += step) {
        const size_t n = std::min(step, bytes.size() - at);
        sum += map.Of(static_cast<int64_t>(at),
                      absl::MakeConstSpan(bytes.data() + at, n));
      }
      EXPECT_EQ(sum.ToString(), expected.ToString())
          << "bucket " << b << " in steps of " << step;
    }
  }
}

TEST(CopyPlan, BucketsAscendAndAreReadForwards) {
  const v1::DefineLayout define = TwoNodes();
  const NodeLayout layout = *ComputeNodeLayout(define, "b");
  auto plan = MakeCopyPlan(layout, testing::WantedBy(define, 0));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->layout_id(), define.layout_id());
  int64_t bytes = 0;
  int32_t last_bucket = -1;
  for (const v1::BucketCopies& bucket : plan->buckets()) {
    EXPECT_GT(bucket.bucket(), last_bucket);
    last_bucket = bucket.bucket();
    int64_t last_offset = -1;
    for (const v1::TensorCopy& copy : bucket.copies()) {
      EXPECT_GE(copy.bucket_offset_bytes(), last_offset);
      last_offset = copy.bucket_offset_bytes();
      int64_t b = copy.run_bytes();
      for (int64_t extent : copy.extents()) b *= extent;
      bytes += b;
    }
  }
  EXPECT_EQ(bytes, BytesOf(*plan));
}

TEST(CopyPlan, EqualWorkersShareOne) {
  const v1::DefineLayout define = TwoNodes();
  const NodeLayout layout = *ComputeNodeLayout(define, "b");
  CopyPlanCache cache(2);
  auto first = cache.PlanFor(layout, testing::WantedBy(define, 0));
  auto other = cache.PlanFor(layout, testing::WantedBy(define, 1));
  // Worker 2 wants on node c what worker 0 wants on node b.
  auto again = cache.PlanFor(layout, testing::WantedBy(define, 2));
  ASSERT_TRUE(first.ok() && other.ok() && again.ok());
  EXPECT_EQ(*first, *again);
  EXPECT_NE(*first, *other);
}

TEST(CopyPlan, WhatTheTrainersDoNotHoldIsNamed) {
  const v1::DefineLayout define = TwoNodes();
  const NodeLayout layout = *ComputeNodeLayout(define, "b");
  WantedTensors wanted = testing::WantedBy(define, 0);
  wanted.Mutable(0)->set_name("nobody.knows");
  EXPECT_EQ(ReasonOf(MakeCopyPlan(layout, wanted).status()),
            "PARAMETER_UNKNOWN");
  wanted = testing::WantedBy(define, 0);
  wanted.Mutable(0)->set_dtype(v1::DTYPE_F16);
  EXPECT_EQ(ReasonOf(MakeCopyPlan(layout, wanted).status()), "DTYPE_MISMATCH");
  wanted = testing::WantedBy(define, 0);
  wanted.Mutable(0)->set_shape(0, 7);
  EXPECT_EQ(ReasonOf(MakeCopyPlan(layout, wanted).status()), "SHAPE_MISMATCH");
  wanted = testing::WantedBy(define, 0);
  wanted.Mutable(0)->mutable_box()->set_extent(0, 1 << 20);
  EXPECT_EQ(ReasonOf(MakeCopyPlan(layout, wanted).status()),
            "BOX_OUT_OF_RANGE");
  wanted = testing::WantedBy(define, 0);
  wanted.Mutable(0)->add_strides(1);
  EXPECT_EQ(ReasonOf(MakeCopyPlan(layout, wanted).status()), "STRIDES_INVALID");
  EXPECT_NE(MakeCopyPlan(layout, wanted).status().message().find("embed"),
            absl::string_view::npos);
}

TEST(Strides, ThoseUnderWhichElementsShareBytesAreRefused) {
  google::protobuf::RepeatedField<int64_t> strides;
  int64_t span = 0;
  const schedule::Dims extent = {4, 3};
  auto with = [&](int64_t outer, int64_t inner) {
    strides.Clear();
    strides.Add(outer);
    strides.Add(inner);
    return StridesFromProto(strides, extent, 2, "w", &span);
  };
  ASSERT_TRUE(with(3, 1).ok());
  EXPECT_EQ(span, 24);
  ASSERT_TRUE(with(1, 4).ok()) << "transposed";
  EXPECT_EQ(span, 24);
  ASSERT_TRUE(with(10, 2).ok()) << "with gaps";
  EXPECT_EQ(span, (3 * 10 + 2 * 2 + 1) * 2);
  EXPECT_FALSE(with(2, 1).ok());
  EXPECT_FALSE(with(0, 1).ok());
  EXPECT_FALSE(with(-3, 1).ok());
  EXPECT_FALSE(with(int64_t{1} << 62, 1).ok());
}

TEST(Layouts, WhatAShardIsCastFromChangesNoByteOfALayout) {
  v1::DefineLayout define =
      ModelBuilder()
          .Parameter(MakeParameter("w", v1::DTYPE_BF16, {300, 200}))
          .FsdpRanks("a", 2)
          .Worker("b")
          .Build();
  for (const v1::DType held : {v1::DTYPE_BF16, v1::DTYPE_F32}) {
    v1::DefineLayout cast = define;
    for (v1::LayoutSource& source : *cast.mutable_sources())
      source.mutable_shards(0)->set_dtype(held);
    auto layout = ComputeNodeLayout(cast, "b");
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(layout->id, define.layout_id());
  }
  define.mutable_sources(1)->mutable_shards(0)->set_dtype(v1::DTYPE_F64);
  EXPECT_EQ(ReasonOf(ComputeNodeLayout(define, "b").status()),
            "DTYPE_MISMATCH");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
