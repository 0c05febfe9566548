#include "daemon/node/snapshot.h"

#include <string>

#include "daemon/node/bucket_digest.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::BoxBytes;
using testing::MakeParameter;
using testing::ModelBuilder;
using testing::ModelBytes;
using testing::RankMemory;
using transport::Landing;
using transport::ReasonOf;

// Landings in plain memory, to look into.
class Snapshot {
 public:
  Snapshot(const v1::DefineLayout& define, int rank)
      : layout(std::make_shared<const NodeLayout>(
            *ComputeNodeLayout(define, "a"))),
        pool(2),
        memory(&pool, nullptr, transport::HostMemory::Options()) {
    for (int32_t b : layout->RankBuckets(rank)) {
      bytes.emplace_back(static_cast<size_t>(layout->bucket_bytes(b)), '\xEE');
      maps.push_back(std::make_shared<BucketDigestMap>(layout, b));
    }
    size_t i = 0;
    for (int32_t b : layout->RankBuckets(rank)) {
      landings.push_back(std::make_shared<Landing>(
          static_cast<uint64_t>(b),
          absl::MakeSpan(&bytes[i][0], bytes[i].size()), maps[i]));
      ++i;
    }
  }

  absl::StatusOr<SnapshotResult> Take(int rank, const RankMemory& source) {
    SourceRegion region;
    region.data = source.bytes.data();
    region.size_bytes = static_cast<int64_t>(source.bytes.size());
    auto shards = ResolveShards(*layout, {region}, source.shards);
    if (!shards.ok()) return shards.status();
    return TakeSnapshot(*layout, rank, *shards, landings, &memory, {&cancel});
  }

  std::shared_ptr<const NodeLayout> layout;
  transport::CopyPool pool;
  transport::HostMemory memory;
  std::vector<std::string> bytes;
  std::vector<std::shared_ptr<BucketDigestMap>> maps;
  std::vector<std::shared_ptr<Landing>> landings;
  CancelFlag cancel;
};

v1::DefineLayout Define() {
  return ModelBuilder()
      .SmallModel()
      .FsdpRanks("a", 3)
      .TensorParallelWorker("b", 0, 2)
      .Worker("c")
      .Build();
}

TEST(Snapshot, FillsEveryPieceAndCountsItsDigest) {
  const v1::DefineLayout define = Define();
  const ModelBytes model(define, 1);
  for (int rank = 0; rank < 3; ++rank) {
    Snapshot snapshot(define, rank);
    const RankMemory source = MakeRankMemory(define, model, rank);
    auto result = snapshot.Take(rank, source);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->copied_bytes, static_cast<int64_t>(source.bytes.size()));
    ASSERT_EQ(result->buckets.size(), snapshot.landings.size());
    for (size_t i = 0; i < snapshot.landings.size(); ++i) {
      const Landing& landing = *snapshot.landings[i];
      EXPECT_TRUE(landing.complete());
      // The digest of what was read is that of what stands there.
      EXPECT_EQ(landing.bucket_digest(),
                snapshot.maps[i]->Of(0, snapshot.bytes[i]));
      for (const schedule::Piece& piece :
           snapshot.layout->plan.pieces(landing.bucket_id())) {
        v1::Box box;
        for (int d = 0; d < piece.box.dims(); ++d) {
          box.add_offset(piece.box.offset[d]);
          box.add_extent(piece.box.extent[d]);
        }
        const std::string expected = BoxBytes(define.catalog(piece.ordinal),
                                              model.tensor(piece.ordinal), box);
        EXPECT_TRUE(snapshot.bytes[i].compare(piece.offset, expected.size(),
                                              expected) == 0)
            << define.catalog(piece.ordinal).name();
      }
    }
  }
}

// As a trainer that keeps some tensors transposed and with gaps.
TEST(Snapshot, ReadsStridedMemory) {
  const v1::Parameter parameter =
      MakeParameter("w", v1::DTYPE_BF16, {300, 200});
  const v1::DefineLayout define = ModelBuilder()
                                      .BucketBytes(32 << 10)
                                      .Parameter(parameter)
                                      .FsdpRanks("a", 1)
                                      .Worker("a")
                                      .Build();
  const ModelBytes model(define, 3);
  const std::string& tensor = model.tensor(0);
  RankMemory dense = MakeRankMemory(define, model, 0);
  RankMemory strided;
  const int64_t step = 310;  // elements between columns
  strided.bytes.assign(200 * step * 2, '\x77');
  for (int64_t row = 0; row < 300; ++row) {
    for (int64_t column = 0; column < 200; ++column) {
      for (int64_t k = 0; k < 2; ++k) {
        strided.bytes[(column * step + row) * 2 + k] =
            tensor[(row * 200 + column) * 2 + k];
      }
    }
  }
  strided.shards = dense.shards;
  strided.shards.Mutable(0)->add_strides(1);
  strided.shards.Mutable(0)->add_strides(step);

  Snapshot one(define, 0);
  Snapshot other(define, 0);
  auto a = one.Take(0, dense);
  auto b = other.Take(0, strided);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_TRUE(one.bytes == other.bytes);
  for (size_t i = 0; i < a->buckets.size(); ++i) {
    EXPECT_EQ(a->buckets[i].digest().lane0(), b->buckets[i].digest().lane0());
  }
}

// A rank may register a part in several shards.
TEST(Snapshot, ComposesAPieceOfSeveralShards) {
  const v1::DefineLayout define =
      ModelBuilder()
          .Parameter(MakeParameter("w", v1::DTYPE_F32, {60, 50}))
          .FsdpRanks("a", 1)
          .Worker("a")
          .Build();
  const ModelBytes model(define, 4);
  RankMemory source;
  for (int half = 0; half < 2; ++half) {
    v1::TensorShard* shard = source.shards.Add();
    *shard->mutable_parameter() = define.catalog(0);
    *shard->mutable_box() = testing::MakeBox({0, half * 25}, {60, 25});
    shard->set_offset_bytes(static_cast<int64_t>(source.bytes.size()));
    source.bytes += BoxBytes(define.catalog(0), model.tensor(0), shard->box());
  }
  Snapshot snapshot(define, 0);
  auto result = snapshot.Take(0, source);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(snapshot.bytes[0] == model.tensor(0));
  EXPECT_TRUE(snapshot.landings[0]->complete());

  source.shards.RemoveLast();
  Snapshot less(define, 0);
  EXPECT_EQ(ReasonOf(less.Take(0, source).status()), "SHARD_NOT_HELD");
  EXPECT_EQ(ReasonOf(less.landings[0]->status()), "SHARD_NOT_HELD");
}

TEST(Snapshot, MemoryOutsideItsRegionIsRefused) {
  const v1::DefineLayout define = Define();
  const ModelBytes model(define, 1);
  Snapshot snapshot(define, 0);
  RankMemory source = MakeRankMemory(define, model, 0);
  source.bytes.pop_back();
  EXPECT_EQ(ReasonOf(snapshot.Take(0, source).status()), "MEMORY_OUT_OF_RANGE");
  source = MakeRankMemory(define, model, 0);
  source.shards.Mutable(0)->set_offset_bytes(-2);
  EXPECT_EQ(ReasonOf(snapshot.Take(0, source).status()), "MEMORY_OUT_OF_RANGE");
  source = MakeRankMemory(define, model, 0);
  source.shards.Mutable(0)->set_offset_bytes(int64_t{1} << 62);
  EXPECT_EQ(ReasonOf(snapshot.Take(0, source).status()), "MEMORY_OUT_OF_RANGE");
  source = MakeRankMemory(define, model, 0);
  source.shards.Mutable(0)->set_region(1);
  EXPECT_EQ(ReasonOf(snapshot.Take(0, source).status()), "MEMORY_OUT_OF_RANGE");
  source = MakeRankMemory(define, model, 0);
  source.shards.Mutable(0)->mutable_parameter()->set_dtype(v1::DTYPE_F32);
  EXPECT_EQ(ReasonOf(snapshot.Take(0, source).status()), "CATALOG_MISMATCH");
}

TEST(Snapshot, ACancelledOneFailsItsLandings) {
  const v1::DefineLayout define = Define();
  const ModelBytes model(define, 1);
  Snapshot snapshot(define, 0);
  snapshot.cancel.Cancel(
      transport::MakeError(absl::StatusCode::kAborted, "RANK_LOST", "it died"));
  auto result = snapshot.Take(0, MakeRankMemory(define, model, 0));
  EXPECT_EQ(ReasonOf(result.status()), "RANK_LOST");
  for (const auto& landing : snapshot.landings) {
    EXPECT_EQ(ReasonOf(landing->status()), "RANK_LOST");
  }
}

TEST(CheckShardMemory, JudgesParametersAsTheApiNamesIt) {
  google::protobuf::RepeatedPtrField<v1::TensorShard> shards;
  v1::TensorShard* shard = shards.Add();
  std::string bytes(64, '\0');
  SourceRegion region;
  region.data = bytes.data();
  region.size_bytes = 64;
  *shard->mutable_parameter() = MakeParameter("w", v1::DTYPE_F32, {4, 4});
  EXPECT_TRUE(CheckShardMemory({region}, shards).ok());
  *shard->mutable_parameter() = MakeParameter("w", v1::DTYPE_F32, {4, 0});
  EXPECT_EQ(ReasonOf(CheckShardMemory({region}, shards)), "SHAPE_INVALID");
  *shard->mutable_parameter() = MakeParameter("w", v1::DTYPE_F32, {4, -4});
  EXPECT_EQ(ReasonOf(CheckShardMemory({region}, shards)), "SHAPE_INVALID");
  *shard->mutable_parameter() =
      MakeParameter("w", v1::DTYPE_F32, {1 << 30, 1 << 30, 1 << 30});
  EXPECT_EQ(ReasonOf(CheckShardMemory({region}, shards)), "SHAPE_INVALID");
  *shard->mutable_parameter() =
      MakeParameter("w", v1::DTYPE_UNSPECIFIED, {4, 4});
  EXPECT_EQ(ReasonOf(CheckShardMemory({region}, shards)), "DTYPE_UNKNOWN");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
