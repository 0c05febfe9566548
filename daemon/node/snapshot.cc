#include "daemon/node/snapshot.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/convert.h"
#include "schedule/block_scale.h"
#include "transport/copy.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::Landing;
using transport::MakeError;
using ShardsOf = absl::flat_hash_map<uint32_t, std::vector<const SourceShard*>>;

ShardsOf ByOrdinal(const std::vector<SourceShard>& shards) {
  ShardsOf shards_of;
  for (const SourceShard& shard : shards) {
    shards_of[shard.ordinal].push_back(&shard);
  }
  return shards_of;
}

// Checks one shard against its region; fills all of *out but the ordinal.
absl::Status Resolve(const schedule::Param& param,
                     const std::vector<SourceRegion>& regions,
                     const v1::TensorShard& shard, SourceShard* out) {
  auto box =
      BoxFromProto(shard.has_box(), shard.box(), param.shape, param.name);
  if (!box.ok()) return box.status();
  auto dtype = ShardDType(shard.dtype(), param, *box);
  if (!dtype.ok()) return dtype.status();
  out->dtype = *dtype;
  out->cast = *schedule::CastBetween(*dtype, param.dtype);
  const int64_t element_bytes = schedule::DTypeSize(*dtype);
  int64_t span = 0;
  auto strides = StridesFromProto(shard.strides(), box->extent, element_bytes,
                                  param.name, &span);
  if (!strides.ok()) return strides.status();
  if (shard.region() < 0 ||
      static_cast<size_t>(shard.region()) >= regions.size()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE",
                     absl::StrCat(param.name, ": there is no region ",
                                  shard.region(), " among ", regions.size()));
  }
  const SourceRegion& region = regions[shard.region()];
  if (shard.offset_bytes() < 0 || span > region.size_bytes ||
      shard.offset_bytes() > region.size_bytes - span) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE",
        absl::StrCat(param.name, ": ", span, " bytes at offset ",
                     shard.offset_bytes(), " do not lie inside region ",
                     shard.region(), " of ", region.size_bytes, " bytes"));
  }
  out->box = *std::move(box);
  out->data = region.data + shard.offset_bytes();
  out->guard = region.guard;
  for (int64_t bytes : *strides) out->strides.push_back(bytes / element_bytes);
  return absl::OkStatus();
}

// Of an element that the shard holds; `box`: of the shard.
const char* AddressOf(const SourceShard& shard, const schedule::Box& box,
                      const schedule::Dims& at) {
  int64_t elements = 0;
  for (int d = 0; d < box.dims(); ++d) {
    elements += (at[d] - box.offset[d]) * shard.strides[d];
  }
  return shard.data + elements * schedule::DTypeSize(shard.dtype);
}

transport::CopyCast CastOf(schedule::Cast cast) {
  switch (cast) {
    case schedule::Cast::kF32ToBF16:
      return transport::CopyCast::kF32ToBF16;
    case schedule::Cast::kF32ToF16:
      return transport::CopyCast::kF32ToF16;
    case schedule::Cast::kBF16ToF8E4M3:
      return transport::CopyCast::kBF16ToF8E4M3;
    case schedule::Cast::kBF16BlockScale:
      return transport::CopyCast::kBF16BlockScale;
    case schedule::Cast::kNone:
      break;
  }
  return transport::CopyCast::kNone;
}

// The blocks of the shard (of the matrix, in `held`) that have elements of
// rows and columns `begin` to `end`.
transport::CopyBlocks BlocksOf(const SourceShard& shard,
                               const schedule::Box& held,
                               const schedule::Dims& begin,
                               const schedule::Dims& end,
                               int64_t matrix_columns) {
  constexpr int64_t kBlock = schedule::kScaleBlock;
  schedule::Dims first, extent;
  for (int d = 0; d < 2; ++d) {
    // The shard has all of them.
    first.push_back(begin[d] / kBlock * kBlock);
    extent.push_back(
        std::min((end[d] + kBlock - 1) / kBlock * kBlock, held.end(d)) -
        first[d]);
  }
  const int64_t size = schedule::DTypeSize(shard.dtype);
  transport::CopyBlocks blocks;
  blocks.src = AddressOf(shard, held, first);
  // A stride of one element may be anything.
  blocks.row_stride = extent[0] == 1 ? 0 : shard.strides[0] * size;
  blocks.column_stride = extent[1] == 1 ? 0 : shard.strides[1] * size;
  blocks.rows = extent[0];
  blocks.columns = extent[1];
  blocks.first_row = first[0];
  blocks.first_column = first[1];
  blocks.matrix_columns = matrix_columns;
  return blocks;
}

schedule::Dims ElementStrides(const schedule::Box& box) {
  return schedule::DenseStrides(box.extent, 1);
}

transport::CopyTask PartCopy(const NodeLayout& layout,
                             const schedule::Piece& piece,
                             const schedule::Box& part,
                             const SourceShard& shard, char* dst) {
  const schedule::Param& param = layout.catalog.param(piece.ordinal);
  const int64_t element_bytes = schedule::DTypeSize(param.dtype);
  transport::GlobalBox global;
  global.ordinal = piece.ordinal;
  global.shape = param.shape;
  global.offset = part.offset;
  if (shard.cast == schedule::Cast::kBF16BlockScale) {
    // All of the blocks whose scales these are; the scales lie as if they were
    // dense.
    schedule::Dims begin, end;
    for (int d = 0; d < 2; ++d) {
      begin.push_back(part.offset[d] * schedule::kScaleBlock);
      end.push_back(
          std::min(part.end(d) * schedule::kScaleBlock, shard.of.end(d)));
    }
    const transport::CopyBlocks blocks =
        BlocksOf(shard, shard.of, begin, end, shard.of_columns);
    transport::CopyTask task = transport::MakeBoxCopy(
        part.extent, static_cast<int32_t>(element_bytes), dst,
        ElementStrides(piece.box), blocks.src, ElementStrides(part), global,
        CastOf(shard.cast));
    task.blocks = blocks;
    return task;
  }
  transport::CopyTask task = transport::MakeBoxCopy(
      part.extent, static_cast<int32_t>(element_bytes), dst,
      ElementStrides(piece.box), AddressOf(shard, shard.box, part.offset),
      shard.strides, global, CastOf(shard.cast));
  if (shard.cast == schedule::Cast::kBF16ToF8E4M3) {
    task.blocks = BlocksOf(shard, shard.box, part.offset,
                           {part.end(0), part.end(1)}, param.shape[1]);
  }
  return task;
}

absl::Status NotHeld(const NodeLayout& layout, int32_t rank,
                     const schedule::Piece& piece) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "SHARD_NOT_HELD",
      absl::StrCat(layout.catalog.param(piece.ordinal).name, ": rank ", rank,
                   " does not hold all of ", schedule::BoxString(piece.box),
                   ", which layout ", layout.id, " expects of it"));
}

// A piece, composed of the shards that have it; with no `bucket`, only to be
// read.
absl::Status ComposePiece(const NodeLayout& layout, int32_t rank,
                          const ShardsOf& shards_of,
                          const schedule::Piece& piece, char* bucket,
                          std::vector<transport::CopyTask>* tasks,
                          bool* guard) {
  const int64_t element_bytes =
      schedule::DTypeSize(layout.catalog.param(piece.ordinal).dtype);
  const schedule::Dims strides = ElementStrides(piece.box);
  int64_t covered = 0;
  std::vector<schedule::Box> parts;
  auto found = shards_of.find(piece.ordinal);
  if (found == shards_of.end()) return NotHeld(layout, rank, piece);
  for (const SourceShard* shard : found->second) {
    schedule::Box part;
    if (!schedule::Intersect(piece.box, shard->box, &part)) continue;
    // Shards are disjoint or equal.
    if (std::find(parts.begin(), parts.end(), part) != parts.end()) continue;
    parts.push_back(part);
    covered += part.Volume();
    int64_t at = 0;
    for (int d = 0; d < part.dims(); ++d) {
      at += (part.offset[d] - piece.box.offset[d]) * strides[d];
    }
    tasks->push_back(PartCopy(
        layout, piece, part, *shard,
        bucket == nullptr ? nullptr
                          : bucket + piece.offset + at * element_bytes));
    *guard = *guard || shard->guard;
  }
  if (covered != piece.box.Volume()) return NotHeld(layout, rank, piece);
  return absl::OkStatus();
}

absl::Status PackBucket(const NodeLayout& layout, int32_t rank, int32_t bucket,
                        const ShardsOf& shards_of, Landing* landing,
                        transport::Memory* memory) {
  if (landing->complete()) return absl::OkStatus();
  char* const data = landing->frame(0).data();
  const absl::Span<const schedule::Piece> pieces =
      layout.plan.pieces(static_cast<uint32_t>(bucket));

  std::vector<transport::PackPiece> packs;
  packs.reserve(pieces.size());
  bool guard = false;
  for (const schedule::Piece& piece : pieces) {
    const SourceShard* holder = nullptr;
    auto found = shards_of.find(piece.ordinal);
    if (found != shards_of.end()) {
      for (const SourceShard* shard : found->second) {
        if (schedule::Contains(shard->box, piece.box)) {
          holder = shard;
          break;
        }
      }
    }
    if (holder == nullptr) break;
    guard = guard || holder->guard;
    transport::PackPiece pack;
    pack.offset = piece.offset;
    pack.copy = PartCopy(layout, piece, piece.box, *holder, nullptr);
    packs.push_back(std::move(pack));
  }

  if (packs.size() == pieces.size()) {
    transport::PackRequest request;
    request.bucket = data;
    request.bucket_bytes = landing->size();
    request.pieces = packs;
    request.frame_bytes = Landing::kFrameBytes;
    request.guard_source = guard;
    request.on_frames = [landing](int64_t first, int64_t last,
                                  absl::Span<const transport::Digest> digests) {
      for (int64_t frame = first; frame < last; ++frame) {
        landing->MarkReady(static_cast<uint32_t>(frame),
                           digests[static_cast<size_t>(frame - first)]);
      }
    };
    transport::PackResult result;
    return memory->Pack(request, &result);
  }

  if (!memory->DeviceOf(data).empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SHARD_NOT_HELD",
                     absl::StrCat("rank ", rank, " of ", layout.model,
                                  " does not hold the pieces of bucket ",
                                  bucket, " whole any more: publish again"));
  }
  // Rare: several shards of one rank meet in a piece.
  std::vector<transport::CopyTask> tasks;
  for (const schedule::Piece& piece : pieces) {
    absl::Status status =
        ComposePiece(layout, rank, shards_of, piece, data, &tasks, &guard);
    if (!status.ok()) return status;
  }
  transport::CopyOptions options;
  options.guard_source = guard;
  absl::Status status = memory->Copy(tasks, options, nullptr);
  return status.ok() ? landing->MarkAllReady() : status;
}

}  // namespace

absl::StatusOr<std::vector<SourceShard>> ResolveShards(
    const NodeLayout& layout, const std::vector<SourceRegion>& regions,
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards) {
  std::vector<SourceShard> resolved;
  resolved.reserve(shards.size());
  for (const v1::TensorShard& shard : shards) {
    const schedule::Param said = ParamFromProto(shard.parameter());
    absl::optional<uint32_t> ordinal = layout.catalog.Find(said.name);
    if (!ordinal.has_value() ||
        layout.catalog.param(*ordinal).dtype != said.dtype ||
        layout.catalog.param(*ordinal).shape != said.shape) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "CATALOG_MISMATCH",
          absl::StrCat(said.name, ": layout ", layout.id,
                       " has no such parameter with this type and shape"));
    }
    SourceShard out;
    absl::Status status =
        Resolve(layout.catalog.param(*ordinal), regions, shard, &out);
    if (!status.ok()) return status;
    out.ordinal = *ordinal;
    resolved.push_back(std::move(out));
  }
  const size_t said = resolved.size();
  for (size_t i = 0; i < said; ++i) {
    if (resolved[i].cast != schedule::Cast::kBF16ToF8E4M3) continue;
    SourceShard scales = resolved[i];
    auto ordinal = schedule::ScaleOf(layout.catalog, scales.ordinal);
    if (!ordinal.ok()) {
      return MakeError(absl::StatusCode::kFailedPrecondition,
                       "CATALOG_MISMATCH", ordinal.status().message());
    }
    scales.cast = schedule::Cast::kBF16BlockScale;
    scales.of = scales.box;
    scales.of_columns = layout.catalog.param(scales.ordinal).shape[1];
    // Of whole blocks: ShardDType has looked.
    scales.box =
        *schedule::ScaleBoxOf(layout.catalog, scales.ordinal, resolved[i].box);
    scales.ordinal = *ordinal;
    resolved.push_back(std::move(scales));
  }
  return resolved;
}

absl::Status CheckShardMemory(
    const std::vector<SourceRegion>& regions,
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards) {
  for (const v1::TensorShard& shard : shards) {
    const schedule::Param param = ParamFromProto(shard.parameter());
    absl::Status status = CheckParameter(param);
    if (!status.ok()) return status;
    SourceShard out;
    status = Resolve(param, regions, shard, &out);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void CancelFlag::Cancel(absl::Status why) {
  absl::MutexLock lock(&mutex_);
  if (cancelled_.load(std::memory_order_relaxed)) return;
  why_ = std::move(why);
  cancelled_.store(true, std::memory_order_release);
}

absl::Status CancelFlag::status() const {
  absl::MutexLock lock(&mutex_);
  return why_;
}

absl::StatusOr<transport::Digest> PackSourceBucket(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards, Landing* landing,
    transport::Memory* memory) {
  if (landing->size() > 0) {
    absl::Status status =
        PackBucket(layout, rank, static_cast<int32_t>(landing->bucket_id()),
                   ByOrdinal(shards), landing, memory);
    if (!status.ok()) return status;
  }
  return landing->bucket_digest();
}

absl::StatusOr<transport::Digest> DigestSourceBucket(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards, int32_t bucket,
    transport::Memory* memory, TensorDigests* tensors) {
  const ShardsOf shards_of = ByOrdinal(shards);
  transport::CopyOptions options;
  std::vector<transport::CopyTask> tasks;
  std::vector<uint32_t> ordinals;
  for (const schedule::Piece& piece :
       layout.plan.pieces(static_cast<uint32_t>(bucket))) {
    absl::Status status =
        ComposePiece(layout, rank, shards_of, piece,
                     /*bucket=*/nullptr, &tasks, &options.guard_source);
    if (!status.ok()) return status;
    ordinals.resize(tasks.size(), piece.ordinal);
  }
  // All at once: a GPU's agent is asked once, and not for each tensor.
  std::vector<transport::Digest> digests(tasks.size());
  absl::Status status =
      memory->DigestEach(tasks, options, absl::MakeSpan(digests));
  if (!status.ok()) return status;
  transport::Digest sum;
  for (size_t i = 0; i < tasks.size(); ++i) {
    (*tensors)[ordinals[i]] += digests[i];
    sum += digests[i];
  }
  return sum;
}

absl::Status SourceChanged(const NodeLayout& layout, int32_t rank,
                           int32_t bucket, const transport::Digest& before,
                           const transport::Digest& now) {
  std::string first = "nothing";
  const auto pieces = layout.plan.pieces(static_cast<uint32_t>(bucket));
  if (!pieces.empty()) {
    first = layout.catalog.param(pieces[0].ordinal).name;
    const std::string& last =
        layout.catalog.param(pieces[pieces.size() - 1].ordinal).name;
    if (last != first) first = absl::StrCat(first, " to ", last);
  }
  return MakeError(
      absl::StatusCode::kAborted, "SOURCE_CHANGED",
      absl::StrCat("rank ", rank, " of ", layout.model,
                   " wrote to its tensors before the publish had returned: "
                   "bucket ",
                   bucket, " (", first, ") had digest ", before.ToString(),
                   " and has ", now.ToString(),
                   " now; leave them alone until it returns, and publish "
                   "again"));
}

absl::StatusOr<SnapshotResult> TakeSnapshot(
    const NodeLayout& layout, int32_t rank,
    const std::vector<SourceShard>& shards,
    const std::vector<std::shared_ptr<Landing>>& landings,
    transport::Memory* memory, absl::Span<const CancelFlag* const> cancels) {
  const absl::Time start = absl::Now();
  const ShardsOf shards_of = ByOrdinal(shards);
  auto fail = [&](const absl::Status& status) {
    for (const auto& landing : landings) {
      if (!landing->complete()) landing->Fail(status);
    }
    return status;
  };

  SnapshotResult result;
  for (const auto& landing : landings) {
    for (const CancelFlag* cancel : cancels) {
      if (cancel->cancelled()) return fail(cancel->status());
    }
    const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
    if (landing->size() > 0) {
      absl::Status status =
          PackBucket(layout, rank, bucket, shards_of, landing.get(), memory);
      if (!status.ok()) return fail(status);
    }
    v1::BucketDigest digest;
    digest.set_bucket(bucket);
    ToProto(landing->bucket_digest(), digest.mutable_digest());
    result.buckets.push_back(std::move(digest));
    absl::Status added =
        AddTensorDigests(layout, *landing, memory, &result.tensors);
    if (!added.ok()) return fail(added);
    for (const schedule::Piece& piece :
         layout.plan.pieces(static_cast<uint32_t>(bucket))) {
      result.copied_bytes +=
          piece.box.Volume() *
          schedule::DTypeSize(layout.catalog.param(piece.ordinal).dtype);
    }
  }
  // A rank that vanished after its last bytes were read may have torn them down
  // before: what was read is not what it published.
  for (const CancelFlag* cancel : cancels) {
    if (cancel->cancelled()) return fail(cancel->status());
  }
  result.copy_duration = absl::Now() - start;
  return result;
}

}  // namespace daemon
}  // namespace weightsync
