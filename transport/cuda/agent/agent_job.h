// What a device agent is asked to do, as both ends know it.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_JOB_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_JOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/copy.h"
#include "transport/cuda/agent/agent_wire.h"
#include "transport/cuda/kernels.h"

namespace weightsync {
namespace transport {
namespace cuda {

// A place in memory that an agent can reach. Agents know memory by number, not
// by address: an address means nothing in another process.
struct AgentPlace {
  enum class Kind : uint32_t { kImport, kSlot, kHost, kStore };
  Kind kind = Kind::kSlot;
  // Of an import, of host memory or of a part of the store; a slot's index.
  uint64_t id = 0;
  int64_t offset = 0;
};

// A piece of a bucket: PackPiece whose source is a place.
struct AgentPiece {
  int64_t offset = 0;
  AgentPlace source;
  // Its addresses mean nothing, but for how far they are from each other:
  // `source` is where copy.source() is.
  CopyTask copy;
  // What Decode found of that, in bytes from `source`.
  int64_t blocks_offset = 0;
  int64_t src_offset = 0;

  // The addresses of the copy, in the process that has `source` at `base`.
  void PlaceAt(const char* base) {
    copy.src = base + src_offset;
    if (copy.has_blocks()) copy.blocks.src = base + blocks_offset;
  }
};

// Fill one bucket: in the store, or in a slot, and from there, frame by frame,
// in host memory where there is any.
struct AgentPack {
  int64_t bucket_bytes = 0;
  int64_t frame_bytes = kFrameBytes;
  AgentPlace bucket;  // kSlot or kStore
  bool to_host = false;
  AgentPlace host;
  std::vector<AgentPiece> pieces;  // by offset; of a kDigest: only to be read
  // Of a kDigest: those of which each has a digest of its own. None: all pieces
  // together have one.
  std::vector<uint32_t> frames;

  std::string Encode() const;
  static absl::StatusOr<AgentPack> Decode(absl::string_view bytes);
};

struct AgentCopy {
  AgentPlace from, to;
  int64_t bytes = 0;
};

// Bytes of a part of what a channel moves: host memory, or the store's.
struct AgentPart {
  AgentPlace place;
  int64_t bytes = 0;
};

// A GPU that an agent sees.
struct AgentDevice {
  std::string uuid;
  std::string name;
  int64_t total_bytes = 0;
  bool mig = false;
};

struct AgentConfig {
  std::string device_uuid;  // empty: the only one
  int32_t slots = 3;
  int64_t slot_bytes = 256 << 20;
  std::string fd_socket;  // where the agent's segments are redeemed
  int64_t keep_free_bytes = 64 << 20;
  int64_t stall_deadline_ms = 60000;
  // For channels over NCCL: as transport/nccl/nccl_channel.h has them.
  std::string nccl_library;
  int32_t nccl_max_ctas = 4;
  int32_t nccl_cta_policy = 1;
  int64_t nccl_staging_bytes = 32 << 20;
  int64_t nccl_abort_deadline_ms = 5000;

  std::string Encode() const;
  static absl::StatusOr<AgentConfig> Decode(absl::string_view bytes);
};

struct AgentUsage {
  // What the driver took for the context when it was made, as NVML says
  // (nvml.h): 0 where there is no NVML, and nobody knows. Code that the driver
  // loads later, when it is first launched, is not in it.
  int64_t context_bytes = 0;
  int64_t slots_bytes = 0;
  int64_t store_bytes = 0;
  int64_t scratch_bytes = 0;
  int64_t free_bytes = 0;  // of the whole GPU
  int64_t total_bytes = 0;
  int64_t imports = 0;
  // Of channels over NCCL: staging buffers and communicators, also those that
  // wait for the next channel. NCCL does not tell what a communicator takes: it
  // is by how much less was free when it had been made, at most 512 MiB for
  // each, and an estimate, because it counts what any other process of the GPU
  // took or freed meanwhile.
  int64_t nccl_bytes = 0;
  // Communicators that are there, idle ones too: the count of those bytes.
  int64_t nccl_communicators = 0;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_JOB_H_
