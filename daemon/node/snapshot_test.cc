#include "daemon/node/snapshot.h"

#include <algorithm>
#include <string>
#include <vector>

#include "daemon/node/bucket_digest.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/cast_definition.h"
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

// ---- Casts ----

std::string TextOf(const void* data, size_t bytes) {
  return std::string(static_cast<const char*>(data), bytes);
}

// A matrix that is F8_E4M3 in the catalog, with its scales and a vector, held
// by two ranks as BF16, and F32 for the vector; and what must come of it.
struct CastModel {
  static constexpr int64_t kRows = 300, kColumns = 400;

  CastModel() {
    ModelBuilder builder;
    define =
        builder.BucketBytes(16 << 10)
            .Parameter(MakeParameter("norm", v1::DTYPE_BF16, {77}))
            .Parameter(MakeParameter("w", v1::DTYPE_F8_E4M3, {kRows, kColumns}))
            .Parameter(MakeParameter("w_scale_inv", v1::DTYPE_F32, {3, 4}))
            .FsdpRanks("a", 2)
            .TensorParallelWorker("b", 0, 2)
            .TensorParallelWorker("c", 1, 2)
            .Build();
    // Whole blocks; scales are nobody's.
    for (int rank = 0; rank < 2; ++rank) {
      v1::LayoutSource* source = define.mutable_sources(rank);
      source->clear_shards();
      v1::OrdinalBox* w = source->add_shards();
      w->set_ordinal(1);
      *w->mutable_box() = rank == 0
                              ? testing::MakeBox({0, 0}, {256, kColumns})
                              : testing::MakeBox({256, 0}, {44, kColumns});
      w->set_dtype(v1::DTYPE_BF16);
      if (rank == 1) {
        v1::OrdinalBox* norm = source->add_shards();
        norm->set_ordinal(0);
        norm->set_dtype(v1::DTYPE_F32);
      }
    }
    auto layout = ComputeNodeLayout(define, "");
    EXPECT_TRUE(layout.ok()) << layout.status();
    define.set_layout_id(layout->id);

    for (int64_t i = 0; i < 77; ++i) {
      masters.push_back(0.001f * static_cast<float>(i * i) - 1.3f);
      const uint16_t cast =
          transport::FloatToBF16(transport::FloatBits(masters.back()));
      want[0] += TextOf(&cast, 2);
    }
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const float value = static_cast<float>(i * 7919 % 1000 - 500) *
                          static_cast<float>(i / (40 * kColumns) + 1);
      values.push_back(transport::FloatToBF16(transport::FloatBits(value)));
    }
    want[1].resize(static_cast<size_t>(kRows * kColumns));
    for (int64_t block = 0; block < 12; ++block) {
      const int64_t row0 = block / 4 * 128, column0 = block % 4 * 128;
      const auto each = [&](auto fn) {
        for (int64_t r = row0; r < std::min(kRows, row0 + 128); ++r)
          for (int64_t c = column0; c < std::min(kColumns, column0 + 128); ++c)
            fn(static_cast<size_t>(r * kColumns + c));
      };
      uint32_t largest = 0;
      each([&](size_t i) {
        largest = std::max(largest, (values[i] & 0x7fffu) << 16);
      });
      const float scale = transport::BlockScale(largest);
      each([&](size_t i) {
        want[1][i] = static_cast<char>(transport::BF16ToE4M3(values[i], scale));
      });
      want[2] += TextOf(&scale, 4);
    }
  }

  // `turned`: columns of the matrix follow one another.
  RankMemory Memory(int rank, bool turned) const {
    RankMemory memory;
    const int64_t first = rank == 0 ? 0 : 256;
    const int64_t rows = rank == 0 ? 256 : 44;
    if (turned) {
      for (int64_t c = 0; c < kColumns; ++c)
        for (int64_t r = 0; r < rows; ++r)
          memory.bytes += TextOf(&values[(first + r) * kColumns + c], 2);
    } else {
      memory.bytes = TextOf(&values[first * kColumns], rows * kColumns * 2);
    }
    const v1::LayoutSource& source = define.sources(rank);
    for (const v1::OrdinalBox& held : source.shards()) {
      v1::TensorShard* shard = memory.shards.Add();
      *shard->mutable_parameter() = define.catalog(held.ordinal());
      if (held.has_box()) *shard->mutable_box() = held.box();
      shard->set_dtype(held.dtype());
      if (held.ordinal() == 1 && turned) {
        shard->add_strides(1);
        shard->add_strides(rows);
      }
      if (held.ordinal() == 0) {
        shard->set_offset_bytes(static_cast<int64_t>(memory.bytes.size()));
        memory.bytes += TextOf(masters.data(), 77 * 4);
      }
    }
    return memory;
  }

  v1::DefineLayout define;
  std::vector<float> masters;    // norm
  std::vector<uint16_t> values;  // w
  std::string want[3];
};

TEST(Snapshot, CastsOnTheWayAndDigestsWhatItMade) {
  const CastModel model;
  for (const bool turned : {false, true}) {
    TensorDigests tensors;
    for (int rank = 0; rank < 2; ++rank) {
      Snapshot snapshot(model.define, rank);
      const RankMemory source = model.Memory(rank, turned);
      auto result = snapshot.Take(rank, source);
      ASSERT_TRUE(result.ok()) << result.status();
      for (size_t i = 0; i < snapshot.landings.size(); ++i) {
        const Landing& landing = *snapshot.landings[i];
        EXPECT_EQ(landing.bucket_digest(),
                  snapshot.maps[i]->Of(0, snapshot.bytes[i]));
        for (const schedule::Piece& piece :
             snapshot.layout->plan.pieces(landing.bucket_id())) {
          v1::Box box;
          for (int d = 0; d < piece.box.dims(); ++d) {
            box.add_offset(piece.box.offset[d]);
            box.add_extent(piece.box.extent[d]);
          }
          const std::string expected =
              BoxBytes(model.define.catalog(piece.ordinal),
                       model.want[piece.ordinal], box);
          EXPECT_TRUE(snapshot.bytes[i].compare(piece.offset, expected.size(),
                                                expected) == 0)
              << model.define.catalog(piece.ordinal).name() << " "
              << schedule::BoxString(piece.box) << (turned ? " turned" : "");
        }
        // A second look finds the same (verify_source).
        SourceRegion region;
        region.data = source.bytes.data();
        region.size_bytes = static_cast<int64_t>(source.bytes.size());
        auto shards = ResolveShards(*snapshot.layout, {region}, source.shards);
        ASSERT_TRUE(shards.ok());
        auto again =
            DigestSourceBucket(*snapshot.layout, rank, *shards,
                               static_cast<int32_t>(landing.bucket_id()),
                               &snapshot.memory, &tensors);
        ASSERT_TRUE(again.ok()) << again.status();
        EXPECT_EQ(*again, landing.bucket_digest());
      }
      for (const auto& tensor : result->tensors)
        tensors[tensor.first] -= tensor.second;
    }
    // Both looks added up to the same, tensor by tensor.
    for (const auto& tensor : tensors)
      EXPECT_EQ(tensor.second, transport::Digest()) << tensor.first;
    EXPECT_EQ(tensors.size(), 3u);
  }
}

TEST(Snapshot, ACastThatTheMemoryIsTooSmallForIsRefused) {
  const CastModel model;
  Snapshot snapshot(model.define, 1);
  RankMemory source = model.Memory(1, false);
  source.bytes.pop_back();
  EXPECT_EQ(ReasonOf(snapshot.Take(1, source).status()), "MEMORY_OUT_OF_RANGE");
  source = model.Memory(1, false);
  // 77 halves would fit.
  source.shards.Mutable(1)->set_offset_bytes(
      static_cast<int64_t>(source.bytes.size()) - 77 * 2);
  EXPECT_EQ(ReasonOf(snapshot.Take(1, source).status()), "MEMORY_OUT_OF_RANGE");
}

TEST(CheckShardMemory, NamesWhatCannotBeCast) {
  std::string bytes(1 << 20, '\0');
  SourceRegion region;
  region.data = bytes.data();
  region.size_bytes = 1 << 20;
  const auto check = [&](v1::DType parameter, v1::DType stored,
                         const std::vector<int64_t>& shape,
                         const std::vector<int64_t>& extent) {
    google::protobuf::RepeatedPtrField<v1::TensorShard> shards;
    v1::TensorShard* shard = shards.Add();
    *shard->mutable_parameter() = MakeParameter("layer.w", parameter, shape);
    *shard->mutable_box() =
        testing::MakeBox(std::vector<int64_t>(extent.size(), 0), extent);
    shard->set_dtype(stored);
    return CheckShardMemory({region}, shards);
  };
  const auto mismatch = [&](const absl::Status& status,
                            std::vector<std::string> words) {
    EXPECT_EQ(ReasonOf(status), "DTYPE_MISMATCH") << status;
    words.push_back("layer.w");
    for (const std::string& word : words) {
      EXPECT_NE(status.message().find(word), absl::string_view::npos)
          << word << " in " << status;
    }
  };
  const std::vector<int64_t> matrix = {300, 200};
  EXPECT_TRUE(check(v1::DTYPE_BF16, v1::DTYPE_F32, matrix, matrix).ok());
  EXPECT_TRUE(check(v1::DTYPE_BF16, v1::DTYPE_BF16, matrix, matrix).ok());
  EXPECT_TRUE(
      check(v1::DTYPE_F8_E4M3, v1::DTYPE_BF16, matrix, {128, 200}).ok());
  mismatch(check(v1::DTYPE_BF16, v1::DTYPE_F16, matrix, matrix),
           {"F16", "BF16", "cast it in the trainer"});
  mismatch(check(v1::DTYPE_F8_E4M3, v1::DTYPE_F32, matrix, matrix),
           {"F32", "F8_E4M3", "BF16 to F8_E4M3"});
  mismatch(check(v1::DTYPE_F8_E4M3, v1::DTYPE_BF16, matrix, {100, 200}),
           {"BF16", "F8_E4M3", "128", "multiples"});
  mismatch(check(v1::DTYPE_F8_E4M3, v1::DTYPE_BF16, {300}, {300}),
           {"BF16", "F8_E4M3", "only matrices"});
  EXPECT_EQ(ReasonOf(check(v1::DTYPE_BF16, static_cast<v1::DType>(99), matrix,
                           matrix)),
            "DTYPE_UNKNOWN");
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
