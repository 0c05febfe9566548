#include "transport/cuda/agent/agent_job.h"

#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

absl::Status Malformed() {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_JOB",
                   "a job for a device agent that is none");
}

}  // namespace

std::string AgentPack::Encode() const {
  AgentWriter out;
  out.Put(bucket_bytes).Put(frame_bytes).Put(bucket).Put(to_host).Put(host);
  out.Put(static_cast<uint64_t>(pieces.size()));
  for (const AgentPiece& piece : pieces) {
    const CopyTask& copy = piece.copy;
    out.Put(piece.offset).Put(piece.source).Put(copy.cast);
    out.Put(copy.run_bytes).Put(copy.ordinal).Put(copy.first_element);
    out.Put(copy.element_bytes).Put(static_cast<uint32_t>(copy.dims.size()));
    for (const CopyDim& dim : copy.dims) out.Put(dim);
    if (!copy.has_blocks()) continue;
    const CopyBlocks& blocks = copy.blocks;
    out.Put(static_cast<int64_t>(blocks.src - copy.source()));
    out.Put(static_cast<int64_t>(copy.src - copy.source()));
    out.Put(blocks.row_stride).Put(blocks.column_stride);
    out.Put(blocks.rows).Put(blocks.columns);
    out.Put(blocks.first_row).Put(blocks.first_column);
    out.Put(blocks.matrix_columns);
  }
  out.Put(static_cast<uint64_t>(frames.size()));
  for (const uint32_t frame : frames) out.Put(frame);
  return out.bytes();
}

absl::StatusOr<AgentPack> AgentPack::Decode(absl::string_view bytes) {
  AgentReader in(bytes);
  AgentPack pack;
  pack.bucket_bytes = in.Get<int64_t>();
  pack.frame_bytes = in.Get<int64_t>();
  pack.bucket = in.Get<AgentPlace>();
  pack.to_host = in.Get<bool>();
  pack.host = in.Get<AgentPlace>();
  const uint64_t count = in.Get<uint64_t>();
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    AgentPiece piece;
    piece.offset = in.Get<int64_t>();
    piece.source = in.Get<AgentPlace>();
    piece.copy.cast = in.Get<CopyCast>();
    piece.copy.run_bytes = in.Get<int64_t>();
    piece.copy.ordinal = in.Get<uint32_t>();
    piece.copy.first_element = in.Get<int64_t>();
    piece.copy.element_bytes = in.Get<int32_t>();
    const uint32_t dims = in.Get<uint32_t>();
    if (dims > kMaxCopyDims) return Malformed();
    for (uint32_t d = 0; d < dims; ++d)
      piece.copy.dims.push_back(in.Get<CopyDim>());
    if (piece.copy.has_blocks()) {
      CopyBlocks& blocks = piece.copy.blocks;
      piece.blocks_offset = in.Get<int64_t>();
      piece.src_offset = in.Get<int64_t>();
      blocks.row_stride = in.Get<int64_t>();
      blocks.column_stride = in.Get<int64_t>();
      blocks.rows = in.Get<int64_t>();
      blocks.columns = in.Get<int64_t>();
      blocks.first_row = in.Get<int64_t>();
      blocks.first_column = in.Get<int64_t>();
      blocks.matrix_columns = in.Get<int64_t>();
    }
    pack.pieces.push_back(std::move(piece));
  }
  const uint64_t frames = in.Get<uint64_t>();
  for (uint64_t i = 0; i < frames && in.ok(); ++i)
    pack.frames.push_back(in.Get<uint32_t>());
  if (!in.done()) return Malformed();
  return pack;
}

std::string AgentConfig::Encode() const {
  return AgentWriter()
      .PutString(device_uuid)
      .Put(slots)
      .Put(slot_bytes)
      .PutString(fd_socket)
      .Put(keep_free_bytes)
      .Put(stall_deadline_ms)
      .PutString(nccl_library)
      .Put(nccl_max_ctas)
      .Put(nccl_cta_policy)
      .Put(nccl_staging_bytes)
      .Put(nccl_abort_deadline_ms)
      .bytes();
}

absl::StatusOr<AgentConfig> AgentConfig::Decode(absl::string_view bytes) {
  AgentReader in(bytes);
  AgentConfig config;
  config.device_uuid = in.GetString();
  config.slots = in.Get<int32_t>();
  config.slot_bytes = in.Get<int64_t>();
  config.fd_socket = in.GetString();
  config.keep_free_bytes = in.Get<int64_t>();
  config.stall_deadline_ms = in.Get<int64_t>();
  config.nccl_library = in.GetString();
  config.nccl_max_ctas = in.Get<int32_t>();
  config.nccl_cta_policy = in.Get<int32_t>();
  config.nccl_staging_bytes = in.Get<int64_t>();
  config.nccl_abort_deadline_ms = in.Get<int64_t>();
  if (!in.done()) return Malformed();
  return config;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
