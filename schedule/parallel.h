// Which boxes a trainer rank holds and an inference worker needs, under the
// ways of parallelism that frameworks use. For plans of described clusters, and
// for tests: real trainers and workers say themselves what they hold.

#ifndef WEIGHTSYNC_SCHEDULE_PARALLEL_H_
#define WEIGHTSYNC_SCHEDULE_PARALLEL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "schedule/catalog.h"
#include "schedule/layout.h"
#include "schedule/models.h"
#include "schedule/reshard.h"

namespace weightsync {
namespace schedule {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
};

// Part i of n as torch.chunk makes it (FSDP2 along dimension 0): all but the
// last of ceil(extent / n); the last ones shorter or empty.
Range CeilChunk(int64_t extent, int n, int i);

// Tensor parallelism: part i of n of a dimension made of units (heads) that
// are never cut. Fewer units than parts: each unit is on n / units parts in
// turn (GQA). A number of units that neither divides nor is divided by n is
// dealt as evenly as can be.
Range UnitChunk(int64_t extent, int64_t unit, int n, int i);

// A vocabulary padded to a multiple of `pad` x n rows and cut evenly: the part
// of shard i that exists in the checkpoint (maybe none).
Range VocabChunk(int64_t vocab, int64_t pad, int n, int i);

// FSDP1: the parameters are flattened, put one after another, padded and cut
// into n equal shards that go through tensors. Appends shard i's boxes.
void FlatShard(const Catalog& catalog, absl::Span<const uint32_t> ordinals,
               int n, int i, std::vector<OrdinalBox>* out);

// What a parameter's name says about how it is cut.
struct ParamRole {
  int layer = -1;       // -1: not in a layer
  int expert = -1;      // -1: not of a routed expert
  bool head = false;    // belongs to the last stage: final norm, lm_head
  int tp_dim = -1;      // -1: whole on every rank
  int64_t tp_unit = 1;  // rows of tp_dim that stay together
  bool vocab = false;   // tp_dim is the vocabulary
};
// Units of heads come from `config`; a default one means single rows.
ParamRole RoleOf(const Param& param, const ModelConfig& config);

// How the ranks of one data-parallel group hold a parameter.
enum class DataSharding {
  kReplicated,  // dp: whole on each
  kDim0,        // FSDP2
  kFlatTensor,  // ZeRO-3: every tensor flattened and cut by itself
  kFlatLayer,   // FSDP1: all tensors of a layer flattened together
};

// rank = ((stage * replicas + replica) * shards + shard) * tp + t.
struct TrainerSpec {
  DataSharding sharding = DataSharding::kDim0;
  int ranks = 1;
  int pp = 1;  // stages of whole layers
  int tp = 1;
  int replicas = 1;  // HSDP: groups of ranks that hold the same
  // Expert parallelism inside a stage's replica: its shards x tp ranks are
  // ep columns; a column's ranks shard its experts (along dimension 0).
  int ep = 1;
};

// The list of every rank. INVALID_COUNT: a count below one, or ranks that the
// product of the others does not divide.
absl::StatusOr<std::vector<BoxListRef>> TrainerLists(const Catalog& catalog,
                                                     const ModelConfig& config,
                                                     const TrainerSpec& spec);

// worker = stage * max(tp, ep) + w; w's tensor-parallel rank is w % tp. With
// ep > 1 whole experts are dealt over ep workers.
struct WorkerSpec {
  int tp = 1;
  int pp = 1;
  int ep = 1;
  int64_t vocab_pad = 64;
};

// The list of every worker of one replica; INVALID_COUNT as above.
absl::StatusOr<std::vector<BoxListRef>> WorkerLists(const Catalog& catalog,
                                                    const ModelConfig& config,
                                                    const WorkerSpec& spec);

// ---- fused tensors ----

enum class QkvOrder {
  kConcatenated,  // all q heads, all k heads, all v heads (vLLM, SGLang)
  kGrouped,       // per kv head: its q heads, it, its v head (Megatron)
};

// Rank t of tp's fused qkv tensor (weight or bias) as one memory: appends its
// boxes. q, k and v are ordinals with the same dimensions but the first.
// INVALID_LAYOUT when the head counts do not fit.
absl::Status FusedQkv(const Catalog& catalog, uint32_t q, uint32_t k,
                      uint32_t v, int64_t head_dim, int tp, int t,
                      QkvOrder order, int32_t memory,
                      std::vector<MemoryBox>* out);

// Rank t of tp's [gate; up].
absl::Status FusedGateUp(const Catalog& catalog, uint32_t gate, uint32_t up,
                         int tp, int t, int32_t memory,
                         std::vector<MemoryBox>* out);

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_PARALLEL_H_
